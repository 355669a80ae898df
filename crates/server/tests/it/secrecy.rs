//! No secret gets into the log, whatever its level.

use std::io::Write;
use std::sync::{Arc, Mutex};

use reqwest::Method;
use rlm_server::app::identity::accounts;
use serde_json::json;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::accounts::{Browser, account, hidden};
use crate::common::TestServer;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

// For the whole program: the database's threads log too, and so do the other tests.
#[tokio::test]
async fn the_log_holds_no_secrets() {
    let log = Log::default();
    let filter = EnvFilter::new("rlm_server=trace,sqlx=trace,tower_http=trace");
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(log.clone()).with_ansi(false).finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let server = TestServer::start().await;
    let password = "a password to look for";
    accounts::create_owner(&server.state, &account("ada@example.com"), password, "lab").await.unwrap();
    let mut browser = Browser::new(&server);
    browser.sign_in("ada@example.com", "a wrong password to look for").await;
    browser.sign_in("ada@example.com", password).await;
    let form = [("client_id", "rlmesh-cli")];
    let begun = server.send(server.request(Method::POST, "/v1/oauth/device/authorize").form(&form)).await.ok();
    let user_code = begun["user_code"].as_str().unwrap();
    let page = browser.get(&format!("/device?user_code={user_code}")).await;
    let form_token = hidden(&page.text, "form_token");
    browser.submit("/device", &[("form_token", &form_token), ("user_code", user_code), ("decision", "approve")]).await;
    let device_code = begun["device_code"].as_str().unwrap();
    let form = [("grant_type", "urn:ietf:params:oauth:grant-type:device_code"), ("client_id", "rlmesh-cli"), ("device_code", device_code)];
    let tokens = server.send(server.request(Method::POST, "/v1/oauth/token").form(&form)).await.ok();
    let (access, refresh) = (tokens["access_token"].as_str().unwrap(), tokens["refresh_token"].as_str().unwrap());
    let next = server.refresh(refresh, &[]).await.ok();
    let key = server.post(access, "/v1/keys", &json!({"name": "k"})).await.ok();
    let key = key["secret"].as_str().unwrap();
    server.get(key, "/v1/me").await.ok();
    server.get(&key[..key.len() - 1], "/v1/me").await.refused("unauthenticated");
    let cluster = server.post(key, "/v1/clusters", &json!({"name": "cell"})).await.ok();
    let path = format!("/v1/clusters/{}/join-tokens", cluster["id"].as_str().unwrap());
    let join = server.post(key, &path, &json!({})).await.ok();

    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("/v1/oauth/token") && log.contains("INSERT INTO api_keys"), "the log is there");
    let server_key = hex::encode(server.state.identity.server_key());
    for (name, secret) in [
        ("password", "password to look for"),
        ("cookie", browser.cookie.as_deref().unwrap()),
        ("device code", device_code),
        ("user code", user_code),
        ("form token", &form_token),
        ("access token", access.rsplit('.').next().unwrap()),
        ("refresh token", &refresh[7..]),
        ("next refresh token", &next["refresh_token"].as_str().unwrap()[7..]),
        ("API key", &key[8..40]),
        ("join token", &join["token"].as_str().unwrap()[7..]),
        ("server key", &server_key),
    ] {
        assert!(!log.contains(secret), "the {name} is in the log");
    }
}

//! Accounts: the first admin, passwords, the browser's sign-in and its protection.

use reqwest::{Method, StatusCode};
use rlm_server::app::identity::accounts::{self, NewAccount};

use crate::common::{Answer, TestServer, TestUser};

const PASSWORD: &str = "correct horse battery";

/// A browser: keeps the cookie, sends the origin.
pub struct Browser<'a> {
    server: &'a TestServer,
    pub cookie: Option<String>,
}

impl<'a> Browser<'a> {
    pub fn new(server: &'a TestServer) -> Self {
        Self { server, cookie: None }
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        let request = self.server.request(Method::GET, path);
        self.go(request).await
    }

    pub async fn submit(&mut self, path: &str, form: &[(&str, &str)]) -> Answer {
        let request = self.server.request(Method::POST, path).header("origin", &self.server.url).form(form);
        self.go(request).await
    }

    async fn go(&mut self, mut request: reqwest::RequestBuilder) -> Answer {
        if let Some(cookie) = &self.cookie {
            request = request.header("cookie", format!("rlmesh_session={cookie}"));
        }
        let answer = self.server.send(request).await;
        if let Some(set) = answer.headers.get("set-cookie") {
            let text = set.to_str().unwrap();
            assert!(text.contains("; HttpOnly") && text.contains("; SameSite=Lax") && text.contains("; Path=/"), "{text}");
            let value = text.split(['=', ';']).nth(1).unwrap();
            self.cookie = (!value.is_empty()).then(|| value.to_owned());
        }
        answer
    }

    pub async fn sign_in(&mut self, email: &str, password: &str) -> Answer {
        self.submit("/login", &[("email", email), ("password", password), ("next", "/device")]).await
    }
}

/// The value of a hidden field in a page.
pub fn hidden(page: &str, name: &str) -> String {
    let start = page.find(&format!("name=\"{name}\" value=\"")).unwrap_or_else(|| panic!("no field {name} in {page}"));
    page[start..].split('"').nth(3).unwrap().to_owned()
}

pub fn account(email: &str) -> NewAccount {
    NewAccount { email: email.to_owned(), first_name: "Ada".to_owned(), last_name: "L".to_owned() }
}

#[tokio::test]
async fn the_first_start_leaves_a_password_that_works() {
    use std::os::unix::fs::PermissionsExt as _;
    let server = TestServer::start().await;
    accounts::make_first_admin(&server.state).await.unwrap();
    let path = server.state_dir().join("admin-password");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let password = std::fs::read_to_string(&path).unwrap();
    let mut browser = Browser::new(&server);
    let answer = browser.sign_in(accounts::FIRST_ADMIN, password.trim()).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text);
    assert_eq!(answer.headers["location"], "/device");

    std::fs::remove_file(&path).unwrap();
    accounts::make_first_admin(&server.state).await.unwrap();
    assert!(!path.exists(), "only the first start makes an account");
}

#[tokio::test]
async fn a_browser_signs_in_and_out() {
    let server = TestServer::start().await;
    accounts::create_owner(&server.state, &account("Ada@Example.com"), PASSWORD, "lab").await.unwrap();
    let mut browser = Browser::new(&server);

    let start = browser.get("/").await;
    assert_eq!((start.status, start.headers["location"].to_str().unwrap()), (StatusCode::SEE_OTHER, "/login?next=%2F"));
    let login = browser.get("/login?next=//evil.example").await;
    assert_eq!(hidden(&login.text, "next"), "/");
    assert!(login.headers["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));

    for (email, password) in [("ada@example.com", "wrong password"), ("nobody@example.com", PASSWORD), ("", "")] {
        let answer = browser.sign_in(email, password).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
        assert!(answer.text.contains("email address or password is wrong"), "says neither which: {}", answer.text);
        assert!(browser.cookie.is_none());
    }
    browser.sign_in("ADA@example.com ", PASSWORD).await;
    assert!(browser.cookie.is_some());
    let start = browser.get("/").await;
    assert_eq!(start.status, StatusCode::OK);
    assert!(start.text.contains("ada@example.com") && start.text.contains("lab"));
    let me = browser.get("/v1/me").await.ok();
    assert_eq!(me["subject"]["displayName"], "Ada L");

    let stale = browser.submit("/logout", &[("form_token", "0000")]).await;
    assert_eq!(stale.status, StatusCode::FORBIDDEN);
    let cookie = browser.cookie.clone();
    let out = browser.submit("/logout", &[("form_token", &hidden(&start.text, "form_token"))]).await;
    assert_eq!(out.status, StatusCode::SEE_OTHER);
    assert!(browser.cookie.is_none());
    browser.cookie = cookie;
    browser.get("/v1/me").await.refused("unauthenticated");
}

#[tokio::test]
async fn a_browsers_session_ends_by_itself() {
    let server = TestServer::start().await;
    accounts::create_owner(&server.state, &account("ada@example.com"), PASSWORD, "lab").await.unwrap();
    let mut browser = Browser::new(&server);
    browser.sign_in("ada@example.com", PASSWORD).await;
    browser.get("/v1/me").await.ok();
    server.advance(server.state.config.timings.browser_session);
    browser.get("/v1/me").await.refused("unauthenticated");
}

#[tokio::test]
async fn passwords_can_not_be_guessed_fast() {
    let server = TestServer::start().await;
    accounts::create_owner(&server.state, &account("ada@example.com"), PASSWORD, "lab").await.unwrap();
    let mut browser = Browser::new(&server);
    let mut refused = 0;
    for _ in 0..12 {
        refused += usize::from(browser.sign_in("ada@example.com", "guess").await.status == StatusCode::TOO_MANY_REQUESTS);
    }
    assert_eq!(refused, 2, "ten at once, then one every six seconds");
    assert_eq!(browser.sign_in("ada@example.com", PASSWORD).await.status, StatusCode::TOO_MANY_REQUESTS);
    server.advance(std::time::Duration::from_secs(7));
    assert_eq!(browser.sign_in("ada@example.com", PASSWORD).await.status, StatusCode::SEE_OTHER);
}

#[tokio::test]
async fn pages_of_others_can_not_use_the_cookie() {
    let server = TestServer::start().await;
    accounts::create_owner(&server.state, &account("ada@example.com"), PASSWORD, "lab").await.unwrap();
    let mut browser = Browser::new(&server);
    browser.sign_in("ada@example.com", PASSWORD).await;
    let cookie = format!("rlmesh_session={}", browser.cookie.clone().unwrap());
    let body = serde_json::json!({"name": "stolen"});
    let post = || server.request(Method::POST, "/v1/keys").header("cookie", &cookie).json(&body);

    server.send(post().header("origin", "http://evil.example")).await.refused("foreign_origin");
    server.send(post().header("origin", "null")).await.refused("foreign_origin");
    server.send(post().header("sec-fetch-site", "cross-site")).await.refused("foreign_origin");
    server.send(post().header("sec-fetch-site", "none")).await.refused("foreign_origin");
    server.send(post()).await.refused("foreign_origin");
    // Another port of the same host is another origin, though the cookie is sent there.
    server.send(post().header("origin", "http://127.0.0.1:1")).await.refused("foreign_origin");
    server.send(post().header("origin", &server.url)).await.ok();
    server.send(post().header("sec-fetch-site", "same-origin")).await.ok();

    let login = server.request(Method::POST, "/login").form(&[("email", "ada@example.com"), ("password", PASSWORD)]);
    assert_eq!(server.send(login.header("origin", "http://evil.example")).await.code(), "foreign_origin");
    let login = server.request(Method::POST, "/login").form(&[("email", "ada@example.com"), ("password", PASSWORD)]);
    assert_eq!(server.send(login).await.status, StatusCode::FORBIDDEN, "nor without saying where it comes from");
}

#[tokio::test]
async fn a_rebound_name_is_not_answered() {
    let server = TestServer::start().await;
    let key = server.key(&server.organization("lab").await).await;
    for host in ["evil.example", "evil.example:80", "localhost.evil.example"] {
        let request = server.request(Method::GET, "/v1/me").bearer_auth(&key).header("host", host);
        server.send(request).await.refused("foreign_origin");
        let request = server.request(Method::GET, "/login").header("host", host);
        server.send(request).await.refused("foreign_origin");
    }
    let port = server.address().port();
    for host in [format!("localhost:{port}"), format!("127.0.0.1:{port}")] {
        let request = server.request(Method::GET, "/v1/me").bearer_auth(&key).header("host", host);
        server.send(request).await.ok();
    }
}

#[tokio::test]
async fn accounts_are_checked_before_they_are_made() {
    let server = TestServer::start().await;
    let error = accounts::create_owner(&server.state, &account("no address"), "short", "").await.unwrap_err();
    let paths: Vec<&str> = error.details.iter().map(|problem| problem.path.as_str()).collect();
    assert_eq!(paths, ["email", "password", "organization"]);
    accounts::create_owner(&server.state, &account("ada@example.com"), PASSWORD, "lab").await.unwrap();
    let again = accounts::create_owner(&server.state, &account("ADA@example.com"), PASSWORD, "other").await.unwrap_err();
    assert!(again.message.contains("email address"), "{again}");
    let same_name = accounts::create_owner(&server.state, &account("bea@example.com"), PASSWORD, "lab").await.unwrap_err();
    assert!(same_name.message.contains("'lab'"), "{same_name}");
    let changed = accounts::ensure_owner(&server.state, &account("ada@example.com"), "another password", "lab").await.unwrap();
    assert_eq!(changed, "set the password of");
    assert!(accounts::sign_in(&server.state, "ada@example.com", "another password", "").await.is_ok());
    assert!(accounts::sign_in(&server.state, "ada@example.com", PASSWORD, "").await.is_err());
}

#[tokio::test]
async fn a_new_password_ends_the_sign_ins_of_the_old_one() {
    let server = TestServer::start().await;
    let (user, organization) = accounts::create_owner(&server.state, &account("ada@example.com"), PASSWORD, "lab").await.unwrap();
    let user = TestUser { id: user.id, organization: organization.id };
    let mut browser = Browser::new(&server);
    browser.sign_in("ada@example.com", PASSWORD).await;
    let refresh = server.refresh_token(&user).await;
    accounts::reset_password(&server.state, "ada@example.com", "another long password").await.unwrap();
    browser.get("/v1/me").await.refused("unauthenticated");
    assert_eq!(server.refresh(&refresh, &[]).await.body["error"], "invalid_grant");
    let log = server.get(&server.key(&user).await, "/v1/audit").await.ok();
    assert_eq!((&log["items"][0]["action"], &log["items"][0]["actor"]), (&"account.password".into(), &"system".into()));
}

//! The device flow, access tokens, refresh tokens: how they work once, end, and are not to be stolen.

use std::time::Duration;

use reqwest::{Method, StatusCode};
use rlm_server::app::access::Role;
use rlm_server::app::identity::accounts;
use serde_json::Value;

use crate::accounts::{Browser, account, hidden};
use crate::common::{Answer, TestServer, TestUser, for_each_server};

const PASSWORD: &str = "correct horse battery";
const DEVICE_CODE: &str = "urn:ietf:params:oauth:grant-type:device_code";

async fn form(server: &TestServer, path: &str, fields: &[(&str, &str)]) -> Answer {
    server.send(server.request(Method::POST, path).form(fields)).await
}

async fn authorize(server: &TestServer) -> Value {
    form(server, "/v1/oauth/device/authorize", &[("client_id", "rlmesh-cli")]).await.ok()
}

async fn poll(server: &TestServer, device_code: &str) -> Answer {
    let fields = [("grant_type", DEVICE_CODE), ("client_id", "rlmesh-cli"), ("device_code", device_code)];
    form(server, "/v1/oauth/token", &fields).await
}

fn oauth_error(answer: &Answer) -> (u16, &str) {
    assert!(answer.body["error_description"].is_string(), "{}", answer.text);
    (answer.status.as_u16(), answer.body["error"].as_str().unwrap())
}

async fn signed_in_browser(server: &TestServer) -> Browser<'_> {
    accounts::create_owner(&server.state, &account("ada@example.com"), PASSWORD, "lab").await.unwrap();
    let mut browser = Browser::new(server);
    browser.sign_in("ada@example.com", PASSWORD).await;
    browser
}

#[tokio::test]
async fn the_device_flow_from_code_to_tokens() {
    let server = TestServer::start().await;
    let info = server.send(server.request(Method::GET, "/v1/info")).await.ok();
    assert_eq!(info["auth"]["deviceAuthorizationEndpoint"], format!("{}/v1/oauth/device/authorize", server.url));
    let begun = authorize(&server).await;
    let device_code = begun["device_code"].as_str().unwrap();
    let user_code = begun["user_code"].as_str().unwrap();
    assert_eq!(begun["verification_uri"], format!("{}/device", server.url));
    assert_eq!((&begun["interval"], &begun["expires_in"]), (&Value::from(5), &Value::from(900)));
    assert_eq!(oauth_error(&poll(&server, device_code).await), (400, "authorization_pending"));

    let page = format!("/device?user_code={user_code}");
    let mut stranger = Browser::new(&server);
    let answer = stranger.get(&page).await;
    assert_eq!(answer.headers["location"], format!("/login?next=%2Fdevice%3Fuser_code%3D{user_code}"));

    let mut browser = signed_in_browser(&server).await;
    let shown = browser.get(&page.to_lowercase()).await;
    assert_eq!(shown.status, StatusCode::OK);
    assert!(shown.text.contains(user_code) && shown.text.contains("ada@example.com") && shown.text.contains("lab"));
    let token = hidden(&shown.text, "form_token");
    let fields = [("form_token", token.as_str()), ("user_code", user_code), ("decision", "approve")];
    let approved = browser.submit("/device", &fields).await;
    assert_eq!(approved.status, StatusCode::OK, "{}", approved.text);
    assert_eq!(browser.submit("/device", &fields).await.status, StatusCode::NOT_FOUND, "a code is decided once");

    let tokens = poll(&server, device_code).await.ok();
    assert_eq!(tokens["token_type"], "Bearer");
    assert_eq!(tokens["user"]["email"], "ada@example.com");
    assert_eq!((&tokens["user"]["first_name"], &tokens["user"]["last_name"]), (&Value::from("Ada"), &Value::from("L")));
    let me = server.get(tokens["access_token"].as_str().unwrap(), "/v1/me").await.ok();
    assert_eq!(me["organization"]["id"], tokens["organization_id"]);
    assert_eq!(me["subject"]["id"], tokens["user"]["id"]);
    assert_eq!(oauth_error(&poll(&server, device_code).await), (400, "invalid_grant"));
}

#[tokio::test]
async fn polls_that_are_too_fast_too_late_or_denied() {
    let server = TestServer::start().await;
    let begun = authorize(&server).await;
    let code = begun["device_code"].as_str().unwrap();
    assert_eq!(oauth_error(&poll(&server, code).await), (400, "authorization_pending"));
    assert_eq!(oauth_error(&poll(&server, code).await), (400, "slow_down"));
    server.advance(Duration::from_secs(6));
    assert_eq!(oauth_error(&poll(&server, code).await), (400, "slow_down"), "the interval is 10 s now");
    server.advance(Duration::from_secs(16));
    assert_eq!(oauth_error(&poll(&server, code).await), (400, "authorization_pending"));
    server.advance(server.state.config.timings.device_code);
    assert_eq!(oauth_error(&poll(&server, code).await), (400, "expired_token"));

    let begun = authorize(&server).await;
    let user_code = begun["user_code"].as_str().unwrap();
    let mut browser = signed_in_browser(&server).await;
    let shown = browser.get(&format!("/device?user_code={user_code}")).await;
    let token = hidden(&shown.text, "form_token");
    let foreign = server
        .request(Method::POST, "/device")
        .header("cookie", format!("rlmesh_session={}", browser.cookie.clone().unwrap()))
        .header("origin", "http://evil.example")
        .form(&[("form_token", token.as_str()), ("user_code", user_code), ("decision", "approve")]);
    server.send(foreign).await.refused("foreign_origin");
    let forged = browser.submit("/device", &[("form_token", "00"), ("user_code", user_code), ("decision", "approve")]).await;
    assert_eq!(forged.status, StatusCode::FORBIDDEN);
    let denied = browser.submit("/device", &[("form_token", &token), ("user_code", user_code), ("decision", "deny")]).await;
    assert_eq!(denied.status, StatusCode::OK);
    assert_eq!(oauth_error(&poll(&server, begun["device_code"].as_str().unwrap()).await), (400, "access_denied"));
}

#[tokio::test]
async fn keys_and_tokens_can_not_approve_sign_ins() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let begun = authorize(&server).await;
    let fields = [("form_token", ""), ("user_code", begun["user_code"].as_str().unwrap()), ("decision", "approve")];
    for token in [server.key(&owner).await, server.access_token(&owner).await] {
        let request = server.request(Method::POST, "/device").bearer_auth(token).form(&fields);
        assert_eq!(server.send(request).await.status, StatusCode::FORBIDDEN);
    }
}

#[tokio::test]
async fn the_token_endpoint_refuses_nonsense_in_oauths_words() {
    let server = TestServer::start().await;
    for (fields, expected) in [
        (vec![("grant_type", "password"), ("client_id", "rlmesh-cli")], (400, "unsupported_grant_type")),
        (vec![("grant_type", "refresh_token"), ("client_id", "rlmesh-cli")], (400, "invalid_request")),
        (vec![("grant_type", "refresh_token"), ("client_id", "other"), ("refresh_token", "x")], (401, "invalid_client")),
        (vec![("grant_type", "refresh_token"), ("client_id", "rlmesh-cli"), ("refresh_token", "x")], (400, "invalid_grant")),
        (vec![("grant_type", DEVICE_CODE), ("client_id", "rlmesh-cli"), ("device_code", "x")], (400, "invalid_grant")),
        (vec![("client_id", "rlmesh-cli")], (400, "invalid_request")),
        (vec![("grant_type", "a"), ("grant_type", "b"), ("client_id", "rlmesh-cli")], (400, "invalid_request")),
    ] {
        assert_eq!(oauth_error(&form(&server, "/v1/oauth/token", &fields).await), expected, "{fields:?}");
    }
    let json = server.request(Method::POST, "/v1/oauth/token").json(&serde_json::json!({"grant_type": "refresh_token"}));
    assert_eq!(oauth_error(&server.send(json).await), (400, "invalid_request"));
    assert_eq!(oauth_error(&form(&server, "/v1/oauth/device/authorize", &[("client_id", "x")]).await), (401, "invalid_client"));
}

#[tokio::test]
async fn access_tokens_expire_and_end_with_their_sign_in() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let refresh = server.refresh_token(&owner).await;
    let tokens = server.refresh(&refresh, &[]).await.ok();
    let access = tokens["access_token"].as_str().unwrap();
    server.get(access, "/v1/me").await.ok();
    server.advance(Duration::from_secs(15 * 60 + 1));
    let expired = server.get(access, "/v1/me").await.refused("unauthenticated");
    assert!(expired.message().contains("expired"));
    assert_eq!(expired.headers["www-authenticate"], "Bearer realm=\"rlmesh\"");

    let next = server.refresh(tokens["refresh_token"].as_str().unwrap(), &[]).await.ok();
    let access = next["access_token"].as_str().unwrap();
    assert_eq!(server.delete(access, "/v1/me/session").await.status, StatusCode::NO_CONTENT);
    assert!(server.get(access, "/v1/me").await.refused("unauthenticated").message().contains("ended"));
    let refused = server.refresh(next["refresh_token"].as_str().unwrap(), &[]).await;
    assert_eq!(oauth_error(&refused), (400, "invalid_grant"));

    let refresh = server.refresh_token(&owner).await;
    let access = server.refresh(&refresh, &[]).await.ok()["access_token"].as_str().unwrap().to_owned();
    assert_eq!(form(&server, "/v1/oauth/revoke", &[("token", &refresh)]).await.status, StatusCode::OK);
    assert_eq!(form(&server, "/v1/oauth/revoke", &[("token", "unknown")]).await.status, StatusCode::OK);
    server.get(&access, "/v1/me").await.refused("unauthenticated");
    let log = server.get(&server.key(&owner).await, "/v1/audit").await.ok();
    let ends = log["items"].as_array().unwrap().iter().filter(|entry| entry["action"] == "session.end").count();
    assert_eq!(ends, 2, "{log}");
}

#[tokio::test]
async fn a_lost_reply_is_answered_again_with_the_same_token() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let refresh = server.refresh_token(&owner).await;
    let first = server.refresh(&refresh, &[]).await.ok();
    server.advance(Duration::from_secs(50));
    let again = server.refresh(&refresh, &[]).await.ok();
    assert_eq!(first["refresh_token"], again["refresh_token"]);
    assert_ne!(first["refresh_token"].as_str().unwrap(), refresh);
    server.get(again["access_token"].as_str().unwrap(), "/v1/me").await.ok();
    let successor = first["refresh_token"].as_str().unwrap();
    server.refresh(successor, &[]).await.ok();
    server.get(again["access_token"].as_str().unwrap(), "/v1/me").await.ok();
}

#[tokio::test]
async fn reuse_ends_the_sign_in() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;

    // Used again after the window.
    let refresh = server.refresh_token(&owner).await;
    let first = server.refresh(&refresh, &[]).await.ok();
    server.advance(Duration::from_secs(61));
    assert_eq!(oauth_error(&server.refresh(&refresh, &[]).await), (400, "invalid_grant"));
    server.get(first["access_token"].as_str().unwrap(), "/v1/me").await.refused("unauthenticated");
    assert_eq!(oauth_error(&server.refresh(first["refresh_token"].as_str().unwrap(), &[]).await), (400, "invalid_grant"));

    // Used again within the window, but the reply did arrive: its token was used.
    let refresh = server.refresh_token(&owner).await;
    let first = server.refresh(&refresh, &[]).await.ok();
    let second = server.refresh(first["refresh_token"].as_str().unwrap(), &[]).await.ok();
    assert_eq!(oauth_error(&server.refresh(&refresh, &[]).await), (400, "invalid_grant"));
    server.get(second["access_token"].as_str().unwrap(), "/v1/me").await.refused("unauthenticated");

    // Another sign-in of the same user goes on.
    let other = server.access_token(&owner).await;
    server.get(&other, "/v1/me").await.ok();
    let key = server.key(&owner).await;
    let log = server.get(&key, "/v1/audit").await.ok();
    let reuses = log["items"].as_array().unwrap().iter().filter(|entry| entry["action"] == "session.reuse").count();
    assert_eq!(reuses, 2);
}

#[tokio::test]
async fn many_refreshes_at_once_give_one_successor() {
    for_each_server(|server| async move {
        let owner = server.organization("lab").await;
        let refresh = server.refresh_token(&owner).await;
        let all = futures::future::join_all((0..8).map(|_| server.refresh(&refresh, &[]))).await;
        let mut successors: Vec<String> = all.into_iter().map(|answer| answer.ok()["refresh_token"].as_str().unwrap().to_owned()).collect();
        successors.dedup();
        assert_eq!(successors.len(), 1);
    })
    .await;
}

#[tokio::test]
async fn the_whole_device_flow_on_each_database() {
    for_each_server(|server| async move {
        let begun = authorize(&server).await;
        let (device_code, user_code) = (begun["device_code"].as_str().unwrap(), begun["user_code"].as_str().unwrap());
        assert_eq!(oauth_error(&poll(&server, device_code).await), (400, "authorization_pending"));
        let mut browser = signed_in_browser(&server).await;
        let shown = browser.get(&format!("/device?user_code={user_code}")).await;
        let token = hidden(&shown.text, "form_token");
        browser.submit("/device", &[("form_token", &token), ("user_code", user_code), ("decision", "approve")]).await;
        // Polls at once: one of them gets the tokens.
        let polls = futures::future::join_all((0..4).map(|_| poll(&server, device_code))).await;
        assert_eq!(polls.iter().filter(|answer| answer.status.is_success()).count(), 1);
        let tokens = polls.into_iter().find(|answer| answer.status.is_success()).unwrap().ok();
        let next = server.refresh(tokens["refresh_token"].as_str().unwrap(), &[]).await.ok();
        server.get(next["access_token"].as_str().unwrap(), "/v1/me").await.ok();
        server.delete(next["access_token"].as_str().unwrap(), "/v1/me/session").await;
        server.get(next["access_token"].as_str().unwrap(), "/v1/me").await.refused("unauthenticated");
    })
    .await;
}

#[tokio::test]
async fn a_refresh_can_move_to_another_organization() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let other = server.organization("other").await;
    let refresh = server.refresh_token(&owner).await;
    let foreign = other.organization.to_string();
    assert_eq!(oauth_error(&server.refresh(&refresh, &[("organization_id", &foreign)]).await), (400, "invalid_grant"));
    assert_eq!(oauth_error(&server.refresh(&refresh, &[("organization_id", "nonsense")]).await), (400, "invalid_grant"));

    join(&server, &owner, &other).await;
    let moved = server.refresh(&refresh, &[("organization_id", &foreign)]).await.ok();
    assert_eq!(moved["organization_id"], foreign);
    let access = moved["access_token"].as_str().unwrap();
    assert_eq!(server.get(access, "/v1/me").await.ok()["role"], "viewer");
    let list = server.get(access, "/v1/me/organizations").await.ok();
    let active: Vec<&Value> = list["organizations"].as_array().unwrap().iter().filter(|one| one["active"] == true).collect();
    assert_eq!((active.len(), &active[0]["id"]), (1, &Value::from(foreign.as_str())));
    let next = server.refresh(moved["refresh_token"].as_str().unwrap(), &[]).await.ok();
    assert_eq!(next["organization_id"], foreign, "it stays there");
}

async fn join(server: &TestServer, user: &TestUser, other: &TestUser) {
    let mut write = server.state.store.write().await.unwrap();
    rlm_server::store::organizations::add_member(&mut write, other.organization, user.id, Role::Viewer, 1).await.unwrap();
    write.commit().await.unwrap();
}

#[tokio::test]
async fn a_browser_switches_its_organization() {
    let server = TestServer::start().await;
    let mut browser = signed_in_browser(&server).await;
    let other = server.organization("other").await;
    let me = browser.get("/v1/me").await.ok();
    let user = TestUser { id: me["subject"]["id"].as_str().unwrap().parse().unwrap(), organization: other.organization };
    let cookie = format!("rlmesh_session={}", browser.cookie.clone().unwrap());
    let switch = |id: String| {
        let body = serde_json::json!({"organizationId": id});
        server.request(Method::PUT, "/v1/me/session").header("cookie", &cookie).header("origin", &server.url).json(&body)
    };
    server.send(switch(other.organization.to_string())).await.refused("not_found");
    server.send(switch("nonsense".to_owned())).await.refused("not_found");
    join(&server, &user, &other).await;
    server.send(switch(other.organization.to_string())).await.ok();
    assert_eq!(browser.get("/v1/me").await.ok()["organization"]["id"], other.organization.to_string());
    let log = server.get(&server.key(&other).await, "/v1/audit").await.ok();
    assert_eq!(log["items"][0]["action"], "session.switch");
}

#[tokio::test]
async fn a_repeated_refresh_moves_to_the_organization_it_names() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let other = server.organization("other").await;
    let foreign = other.organization.to_string();
    let refresh = server.refresh_token(&owner).await;
    let lost = server.refresh(&refresh, &[]).await.ok();
    assert_eq!(oauth_error(&server.refresh(&refresh, &[("organization_id", &foreign)]).await), (400, "invalid_grant"));
    join(&server, &owner, &other).await;
    let moved = server.refresh(&refresh, &[("organization_id", &foreign)]).await.ok();
    assert_eq!((&moved["organization_id"], &moved["refresh_token"]), (&Value::from(foreign.as_str()), &lost["refresh_token"]));
    let next = server.refresh(moved["refresh_token"].as_str().unwrap(), &[]).await.ok();
    assert_eq!(next["organization_id"], foreign);
}

//! API keys: shown once, no more than their maker may do, gone at once when revoked.

use std::time::Duration;

use reqwest::StatusCode;
use rlm_server::app::access::{Role, Scope};
use serde_json::json;

use crate::common::TestServer;

#[tokio::test]
async fn a_key_is_shown_once_and_works_until_revoked() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let token = server.access_token(&owner).await;
    let made = server.post(&token, "/v1/keys", &json!({"name": "ci", "scopes": ["evaluations:read", "keys:write"]})).await;
    assert_eq!(made.status, StatusCode::CREATED);
    assert_eq!(made.headers["cache-control"], "no-store");
    let made = made.ok();
    let secret = made["secret"].as_str().unwrap();
    let id = made["id"].as_str().unwrap();
    assert!(secret.starts_with("rlm_key_"));
    assert_eq!(made["environment"], json!({"RLMESH_API_KEY": secret, "RLMESH_PLATFORM_URL": server.url}));

    let me = server.get(secret, "/v1/me").await.ok();
    assert_eq!(me["scopes"], json!(["evaluations:read", "keys:write"]));
    let seen = server.get(&token, &format!("/v1/keys/{id}")).await;
    assert!(!seen.text.contains(secret));
    assert!(seen.ok()["lastUsedAt"].is_string());
    assert!(!server.get(&token, "/v1/keys").await.text.contains(secret));
    server.get(secret, "/v1/audit").await.refused("forbidden");

    assert_eq!(server.delete(&token, &format!("/v1/keys/{id}")).await.status, StatusCode::NO_CONTENT);
    assert_eq!(server.delete(&token, &format!("/v1/keys/{id}")).await.status, StatusCode::NO_CONTENT, "may be repeated");
    assert!(server.get(secret, "/v1/me").await.refused("unauthenticated").message().contains("was revoked"));
    let log = server.get(&token, "/v1/audit").await;
    assert!(!log.text.contains(secret));
    let actions: Vec<_> = log.body["items"].as_array().unwrap().iter().map(|entry| entry["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["key.revoke", "key.create"], "one record per change, newest first");
}

#[tokio::test]
async fn a_key_gets_no_more_than_its_maker_has() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let member = server.user(owner.organization, Role::Member).await;
    let token = server.access_token(&member).await;
    let body = json!({"name": "", "scopes": ["evaluations:write", "clusters:write", "everything"], "expiresAt": "2001-01-01T00:00:00Z"});
    let refused = server.post(&token, "/v1/keys", &body).await.refused("invalid_request");
    let paths: Vec<_> = refused.body["error"]["details"].as_array().unwrap().iter().map(|one| one["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["name", "expiresAt", "scopes[1]", "scopes[2]"]);
    server.post(&token, "/v1/keys", &json!({"name": "k", "scopes": []})).await.refused("invalid_request");

    let small = server.key_with(&member, &[Scope::KeysWrite]).await;
    let made = server.post(&small, "/v1/keys", &json!({"name": "child"})).await.ok();
    assert_eq!(made["scopes"], json!(["keys:write"]));
    server.post(&small, "/v1/keys", &json!({"name": "child", "scopes": ["evaluations:read"]})).await.refused("invalid_request");
}

#[tokio::test]
async fn a_key_follows_its_makers_role_and_membership() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let member = server.user(owner.organization, Role::Admin).await;
    let owner_key = server.key(&owner).await;
    let key = server.key(&member).await;
    server.get(&key, "/v1/audit").await.ok();
    let path = format!("/v1/organizations/{}/members/{}", owner.organization, member.id);
    server.patch(&owner_key, &path, &json!({"role": "viewer"})).await.ok();
    server.get(&key, "/v1/audit").await.refused("forbidden");
    assert_eq!(server.delete(&owner_key, &path).await.status, StatusCode::NO_CONTENT);
    server.get(&key, "/v1/me").await.refused("unauthenticated");
}

#[tokio::test]
async fn keys_expire_and_are_listed_in_pages() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let member = server.user(owner.organization, Role::Member).await;
    let token = server.access_token(&owner).await;
    let at = chrono::Utc::now() + chrono::Duration::seconds(100);
    let made = server.post(&token, "/v1/keys", &json!({"name": "short", "expiresAt": at})).await.ok();
    let secret = made["secret"].as_str().unwrap();
    server.get(secret, "/v1/me").await.ok();
    server.advance(Duration::from_secs(101));
    assert!(server.get(secret, "/v1/me").await.refused("unauthenticated").message().contains("expired"));

    for number in 0..4 {
        server.post(&token, "/v1/keys", &json!({"name": format!("k{number}")})).await.ok();
    }
    let theirs = server.key(&member).await;
    let mut names = Vec::new();
    let mut path = "/v1/keys?limit=2".to_owned();
    loop {
        let page = server.get(&token, &path).await.ok();
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= 2);
        names.extend(items.iter().map(|key| key["name"].as_str().unwrap().to_owned()));
        let Some(cursor) = page["nextCursor"].as_str() else { break };
        path = format!("/v1/keys?limit=2&cursor={cursor}");
    }
    assert_eq!(names, ["test", "k3", "k2", "k1", "k0", "short"], "an owner sees all");
    let own = server.get(&theirs, "/v1/keys").await.ok();
    assert_eq!(own["items"].as_array().unwrap().len(), 1, "a member sees their own");
    let foreign = made["id"].as_str().unwrap();
    server.get(&theirs, &format!("/v1/keys/{foreign}")).await.refused("not_found");
    server.delete(&theirs, &format!("/v1/keys/{foreign}")).await.refused("not_found");
    server.get(&token, "/v1/keys?limit=0").await.refused("bad_request");
    server.get(&token, "/v1/keys?cursor=nonsense").await.refused("bad_request");
}

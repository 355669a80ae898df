//! Organizations and members: ranks, the last owner, and that nobody sees another organization.

use reqwest::StatusCode;
use rlm_server::app::access::Role;
use rlm_server::store::organizations;
use serde_json::json;

use crate::common::{TestServer, TestUser, for_each_server};

#[tokio::test]
async fn members_come_change_and_go() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let key = server.key(&owner).await;
    let members = format!("/v1/organizations/{}/members", owner.organization);
    let new = json!({"email": "Bea@example.com", "role": "member", "firstName": "Bea", "password": "a long password"});
    let added = server.post(&key, &members, &new).await;
    assert_eq!(added.status, StatusCode::CREATED);
    let added = added.ok();
    assert_eq!((added["email"].as_str(), added["role"].as_str()), (Some("bea@example.com"), Some("member")));
    server.post(&key, &members, &new).await.refused("already_exists");
    server.post(&key, &members, &json!({"email": "bea@example.com", "role": "viewer"})).await.refused("already_exists");
    server.post(&key, &members, &json!({"email": "carl@example.com", "role": "viewer"})).await.refused("invalid_request");
    server
        .post(&key, &members, &json!({"email": "carl", "role": "viewer", "password": "a long password"}))
        .await
        .refused("invalid_request");
    server.post(&key, &members, &json!({"email": "c@example.com", "role": "king"})).await.refused("invalid_request");

    let one = format!("{members}/{}", added["userId"].as_str().unwrap());
    assert_eq!(server.patch(&key, &one, &json!({"role": "admin"})).await.ok()["role"], "admin");
    let list = server.get(&key, &members).await.ok();
    assert_eq!(list["items"].as_array().unwrap().len(), 2);
    assert_eq!(server.delete(&key, &one).await.status, StatusCode::NO_CONTENT);
    server.delete(&key, &one).await.refused("not_found");
    server.patch(&key, &one, &json!({"role": "admin"})).await.refused("not_found");

    // The account is still there, and can be added without a password.
    server.post(&key, &members, &json!({"email": "bea@example.com", "role": "viewer"})).await.ok();
}

#[tokio::test]
async fn only_owners_touch_owners_and_one_stays() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let admin = server.user(owner.organization, Role::Admin).await;
    let (owner_key, admin_key) = (server.key(&owner).await, server.key(&admin).await);
    let path = |user| format!("/v1/organizations/{}/members/{user}", owner.organization);
    server.patch(&admin_key, &path(owner.id), &json!({"role": "viewer"})).await.refused("forbidden");
    server.delete(&admin_key, &path(owner.id)).await.refused("forbidden");
    server.patch(&admin_key, &path(admin.id), &json!({"role": "owner"})).await.refused("forbidden");
    let members = format!("/v1/organizations/{}/members", owner.organization);
    let new = json!({"email": "b@example.com", "role": "owner", "password": "a long password"});
    server.post(&admin_key, &members, &new).await.refused("forbidden");

    server.patch(&owner_key, &path(owner.id), &json!({"role": "viewer"})).await.refused("conflict");
    server.delete(&owner_key, &path(owner.id)).await.refused("conflict");
    server.patch(&owner_key, &path(admin.id), &json!({"role": "owner"})).await.ok();
    server.delete(&owner_key, &path(owner.id)).await;
    server.delete(&admin_key, &path(admin.id)).await.refused("conflict");
}

#[tokio::test]
async fn two_owners_can_not_both_leave_at_once() {
    for_each_server(|server| async move {
        let one = server.organization("lab").await;
        let two = server.user(one.organization, Role::Owner).await;
        let (key_one, key_two) = (server.key(&one).await, server.key(&two).await);
        let path = |user| format!("/v1/organizations/{}/members/{user}", one.organization);
        let (left, right) = (path(one.id), path(two.id));
        let (a, b) = tokio::join!(server.delete(&key_one, &left), server.delete(&key_two, &right));
        let gone = [a.status, b.status].into_iter().filter(|status| *status == StatusCode::NO_CONTENT).count();
        assert_eq!(gone, 1, "{a:?} {b:?}");
    })
    .await;
}

#[tokio::test]
async fn organizations_are_made_renamed_and_apart() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let other = server.organization("other").await;
    let key = server.key(&owner).await;
    let path = format!("/v1/organizations/{}", owner.organization);
    assert_eq!(server.get(&key, &path).await.ok()["name"], "lab");
    server.patch(&key, &path, &json!({"name": "other"})).await.refused("already_exists");
    server.patch(&key, &path, &json!({"name": " "})).await.refused("invalid_request");
    assert_eq!(server.patch(&key, &path, &json!({"name": "new lab"})).await.ok()["name"], "new lab");

    let made = server.post(&key, "/v1/organizations", &json!({"name": "third"})).await.ok();
    server.post(&key, "/v1/organizations", &json!({"name": "third"})).await.refused("already_exists");
    let token = server.access_token(&owner).await;
    let mine = server.get(&token, "/v1/me/organizations").await.ok();
    let ids: Vec<_> = mine["organizations"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert!(ids.contains(&made["id"].as_str().unwrap()) && ids.len() == 2);
    let by_key = server.get(&key, "/v1/me/organizations").await.ok();
    assert_eq!(by_key["organizations"].as_array().unwrap().len(), 1, "a key shows its own organization only");

    let foreign = format!("/v1/organizations/{}", other.organization);
    server.get(&key, &foreign).await.refused("not_found");
    server.get(&key, &format!("{foreign}/members")).await.refused("not_found");
    server.patch(&key, &foreign, &json!({"name": "stolen"})).await.refused("not_found");
    server.delete(&key, &format!("{foreign}/members/{}", other.id)).await.refused("not_found");
}

#[tokio::test]
async fn a_removed_members_sign_ins_end() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let member = server.user(owner.organization, Role::Member).await;
    let refresh = server.refresh_token(&member).await;
    let tokens = server.refresh(&refresh, &[]).await.ok();
    let key = server.key(&owner).await;
    server.delete(&key, &format!("/v1/organizations/{}/members/{}", owner.organization, member.id)).await;
    server.get(tokens["access_token"].as_str().unwrap(), "/v1/me").await.refused("unauthenticated");
    let refused = server.refresh(tokens["refresh_token"].as_str().unwrap(), &[]).await;
    assert_eq!(refused.body["error"], "invalid_grant");
}

#[tokio::test]
async fn a_sign_in_that_moved_on_outlives_the_membership_it_left() {
    for_each_server(|server| async move {
        let (left, right) = (server.organization("lab").await, server.organization("other").await);
        let member = server.user(left.organization, Role::Member).await;
        let mut write = server.state.store.write().await.unwrap();
        organizations::add_member(&mut write, right.organization, member.id, Role::Member, 1).await.unwrap();
        write.commit().await.unwrap();
        let remove = |of: TestUser| {
            let (server, member) = (&server, member.id);
            async move {
                let path = format!("/v1/organizations/{}/members/{member}", of.organization);
                assert_eq!(server.delete(&server.key(&of).await, &path).await.status, StatusCode::NO_CONTENT);
            }
        };
        let first = server.refresh_token(&member).await;
        let moved = server.refresh(&first, &[("organization_id", &right.organization.to_string())]).await.ok();
        remove(left).await;
        server.get(moved["access_token"].as_str().unwrap(), "/v1/me").await.ok();
        let next = server.refresh(moved["refresh_token"].as_str().unwrap(), &[]).await.ok();
        server.get(next["access_token"].as_str().unwrap(), "/v1/me").await.ok();

        // A family of which any token is revoked gives no tokens that would be refused everywhere.
        remove(right).await;
        assert_eq!(server.refresh(next["refresh_token"].as_str().unwrap(), &[]).await.body["error"], "invalid_grant");
        assert_eq!(server.refresh(&first, &[]).await.body["error_description"], "this sign-in was ended; sign in again");
    })
    .await;
}

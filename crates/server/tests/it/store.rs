//! The store's identity part, on both databases.

use rlm_core::error::{Code, Error};
use rlm_core::ids::{OrganizationId, UserId};
use rlm_server::app::access::{Actor, Role};
use rlm_server::app::audit;
use rlm_server::store::Store;
use rlm_server::store::organizations::{self, Organization};
use rlm_server::store::sessions::{self, BrowserSession, DeviceGrant, GrantState, RefreshToken};
use rlm_server::store::users::{self, User};
use serde_json::json;

use crate::common::{for_each_store, postgres_url};

async fn owner(store: &Store, email: &str) -> (User, Organization) {
    let user = User {
        id: UserId::generate(),
        email: email.to_owned(),
        first_name: "Ä".to_owned(),
        last_name: "\u{1f600}".to_owned(),
        created_at: 5,
        disabled_at: None,
    };
    let organization = Organization { id: OrganizationId::generate(), name: format!("of {email}"), created_at: 6 };
    let mut write = store.write().await.unwrap();
    users::insert(&mut write, &user, "hash").await.unwrap();
    organizations::insert(&mut write, &organization).await.unwrap();
    assert!(organizations::add_member(&mut write, organization.id, user.id, Role::Owner, 7).await.unwrap());
    assert!(!organizations::add_member(&mut write, organization.id, user.id, Role::Viewer, 8).await.unwrap());
    write.commit().await.unwrap();
    (user, organization)
}

#[tokio::test]
async fn the_epoch_is_kept_and_uncommitted_writes_are_not() {
    for_each_store(|store| async move {
        assert_eq!(store.meta_or_insert("epoch", "one").await.unwrap(), "one");
        assert_eq!(store.meta_or_insert("epoch", "two").await.unwrap(), "one");
        assert_eq!(store.meta("other").await.unwrap(), None);
        let organization = Organization { id: OrganizationId::generate(), name: "gone".to_owned(), created_at: 1 };
        let mut write = store.write().await.unwrap();
        organizations::insert(&mut write, &organization).await.unwrap();
        drop(write);
        assert_eq!(organizations::by_id(&store, organization.id).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn users_and_members_read_back() {
    for_each_store(|store| async move {
        assert!(!users::any(&store).await.unwrap());
        let (user, organization) = owner(&store, "a@example.com").await;
        assert!(users::any(&store).await.unwrap());
        assert_eq!(users::by_id(&store, user.id).await.unwrap(), Some(user.clone()));
        assert_eq!(users::by_email(&store, "a@example.com").await.unwrap(), Some((user.clone(), "hash".to_owned())));
        assert_eq!(organizations::of_user(&store, user.id).await.unwrap(), [(organization.clone(), Role::Owner)]);
        assert_eq!(organizations::active_role(&store, organization.id, user.id).await.unwrap(), Some(Role::Owner));

        let mut write = store.write().await.unwrap();
        let twin = User { id: UserId::generate(), ..user.clone() };
        assert!(users::insert(&mut write, &twin, "hash").await.unwrap_err().is_unique_violation());
        drop(write);

        let mut write = store.write().await.unwrap();
        users::set_disabled(&mut write, user.id, Some(9)).await.unwrap();
        users::set_password(&mut write, user.id, "other").await.unwrap();
        write.commit().await.unwrap();
        assert_eq!(organizations::active_role(&store, organization.id, user.id).await.unwrap(), None);
        assert_eq!(users::by_email(&store, "a@example.com").await.unwrap().unwrap().1, "other");
    })
    .await;
}

#[tokio::test]
async fn device_grants_are_decided_once() {
    for_each_store(|store| async move {
        let (user, organization) = owner(&store, "a@example.com").await;
        let grant = DeviceGrant {
            device_code_hash: "d".to_owned(),
            user_code: "BBBB-CCCC".to_owned(),
            client_id: "c".to_owned(),
            created_at: 10,
            expires_at: 100,
            interval_ms: 5,
            last_poll_at: None,
            state: GrantState::Pending,
        };
        let mut write = store.write().await.unwrap();
        sessions::insert_grant(&mut write, &grant).await.unwrap();
        assert_eq!(sessions::poll_grant(&mut write, "d", 20).await.unwrap(), Some(grant.clone()));
        assert_eq!(sessions::poll_grant(&mut write, "x", 20).await.unwrap(), None);
        write.commit().await.unwrap();
        assert_eq!(sessions::grant_by_user_code(&store, "BBBB-CCCC").await.unwrap().unwrap().last_poll_at, Some(20));
        assert_eq!(sessions::count_pending_grants(&store, 50).await.unwrap(), 1);
        assert_eq!(sessions::count_pending_grants(&store, 100).await.unwrap(), 0);

        let approved = GrantState::Approved { user_id: user.id, organization_id: organization.id };
        let mut write = store.write().await.unwrap();
        assert!(!sessions::decide_grant(&mut write, "BBBB-CCCC", approved, 100).await.unwrap(), "expired");
        assert!(sessions::decide_grant(&mut write, "BBBB-CCCC", approved, 50).await.unwrap());
        assert!(!sessions::decide_grant(&mut write, "BBBB-CCCC", GrantState::Denied, 50).await.unwrap(), "decided");
        assert_eq!(sessions::poll_grant(&mut write, "d", 60).await.unwrap().unwrap().state, approved);
        sessions::use_grant(&mut write, "d").await.unwrap();
        write.commit().await.unwrap();
        assert_eq!(sessions::grant_by_user_code(&store, "BBBB-CCCC").await.unwrap().unwrap().state, GrantState::Used);
        let mut write = store.write().await.unwrap();
        sessions::sweep(&mut write, 101).await.unwrap();
        write.commit().await.unwrap();
        assert_eq!(sessions::grant_by_user_code(&store, "BBBB-CCCC").await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn refresh_tokens_and_browser_sessions() {
    for_each_store(|store| async move {
        let (user, organization) = owner(&store, "a@example.com").await;
        let token = |hash: &str, family: &str| RefreshToken {
            hash: hash.to_owned(),
            family_id: family.to_owned(),
            user_id: user.id,
            organization_id: organization.id,
            client_id: "c".to_owned(),
            issued_at: 1,
            expires_at: 100,
            used_at: None,
            revoked_at: None,
        };
        let mut write = store.write().await.unwrap();
        for (hash, family) in [("a1", "a"), ("a2", "a"), ("b1", "b")] {
            sessions::insert_refresh(&mut write, &token(hash, family)).await.unwrap();
        }
        assert_eq!(sessions::refresh_for_update(&mut write, "a1").await.unwrap(), Some(token("a1", "a")));
        sessions::use_refresh(&mut write, "a1", 10).await.unwrap();
        assert_eq!(sessions::refresh_for_update(&mut write, "a1").await.unwrap().unwrap().used_at, Some(10));
        sessions::revoke_family(&mut write, "a", 11).await.unwrap();
        assert_eq!(sessions::refresh_for_update(&mut write, "a2").await.unwrap().unwrap().revoked_at, Some(11));
        write.commit().await.unwrap();
        assert!(!sessions::family_is_live(&store, "a").await.unwrap());
        assert!(sessions::family_is_live(&store, "b").await.unwrap());
        assert!(!sessions::family_is_live(&store, "unknown").await.unwrap());

        let session =
            BrowserSession { hash: "s".to_owned(), user_id: user.id, organization_id: organization.id, created_at: 1, expires_at: 100 };
        let mut write = store.write().await.unwrap();
        sessions::insert_browser(&mut write, &session).await.unwrap();
        write.commit().await.unwrap();
        assert_eq!(sessions::browser(&store, "s", 99).await.unwrap(), Some(session));
        assert_eq!(sessions::browser(&store, "s", 100).await.unwrap(), None);
        let mut write = store.write().await.unwrap();
        sessions::revoke_of_member(&mut write, organization.id, user.id, 12).await.unwrap();
        write.commit().await.unwrap();
        assert!(!sessions::family_is_live(&store, "b").await.unwrap());
        assert_eq!(sessions::browser(&store, "s", 50).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn the_audit_log_is_newest_first_and_apart() {
    for_each_store(|store| async move {
        let (_, organization) = owner(&store, "a@example.com").await;
        let (_, other) = owner(&store, "b@example.com").await;
        let mut write = store.write().await.unwrap();
        for number in 0..3 {
            let actor = Actor { remote_address: "::1".to_owned(), ..Actor::system(organization.id) };
            audit::record(&mut write, number, &actor, "thing.change", &number.to_string(), json!({"n": number})).await.unwrap();
        }
        audit::record(&mut write, 9, &Actor::system(other.id), "thing.change", "other", json!({})).await.unwrap();
        write.commit().await.unwrap();
        let first = audit::list(&store, organization.id, None, 2).await.unwrap();
        let subjects: Vec<&str> = first.iter().map(|record| record.subject.as_str()).collect();
        assert_eq!(subjects, ["2", "1"]);
        assert_eq!((first[0].details["n"].as_i64(), first[0].remote_address.as_str()), (Some(2), "::1"));
        let rest = audit::list(&store, organization.id, Some(&first[1].id), 2).await.unwrap();
        assert_eq!((rest.len(), rest[0].subject.as_str()), (1, "0"));
    })
    .await;
}

#[tokio::test]
async fn waiting_for_a_lock_of_postgres_ends() {
    let Some(url) = postgres_url().await else { return };
    let store = Store::open(&url).await.unwrap();
    let organization = Organization { id: OrganizationId::generate(), name: "same".to_owned(), created_at: 1 };
    let mut holder = store.write().await.unwrap();
    organizations::insert(&mut holder, &organization).await.unwrap();
    let waits = async {
        let mut write = store.write().await.unwrap();
        organizations::insert(&mut write, &organization).await
    };
    let error = tokio::time::timeout(std::time::Duration::from_secs(25), waits).await.expect("the wait has an end").unwrap_err();
    assert_eq!(Error::from(error).code, Code::Unavailable);
}

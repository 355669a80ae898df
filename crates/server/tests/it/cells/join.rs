use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;

use super::plane::{Plane, code, in_dir, secret};
use crate::common::{postgres_url, uuid_text};

async fn one_of_a_hundred_wins(plane: &Plane) {
    let cluster = plane.cluster("lab").await;
    let token = plane.token(cluster).await;
    let mut joins = tokio::task::JoinSet::new();
    let client = plane.client().await;
    for number in 0..100 {
        let (mut client, token) = (client.clone(), token.clone());
        joins.spawn(async move {
            let message = rlm_api::cluster::v1::JoinRequest {
                nonce: format!("{number:032}"),
                purposes: vec!["control".to_owned()],
                ..Default::default()
            };
            client.join(super::plane::authorized(message, &token)).await
        });
    }
    let (mut won, mut codes) = (0, BTreeSet::new());
    while let Some(joined) = joins.join_next().await {
        match joined.unwrap() {
            Ok(_) => won += 1,
            Err(status) => {
                codes.insert(code(&status));
            }
        }
    }
    assert_eq!((won, codes), (1, BTreeSet::from(["token_used".to_owned()])));
    assert_eq!(plane.server.state.store.cluster_credentials(cluster).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_a_hundred_agents_wins_a_token() {
    one_of_a_hundred_wins(&Plane::start().await).await;
    let Some(url) = postgres_url().await else { return };
    eprintln!("on PostgreSQL");
    let plane = Plane::with(|config| config.database_url = url).await;
    one_of_a_hundred_wins(&plane).await;
}

#[tokio::test]
async fn a_lost_reply_is_answered_again_until_the_hour_ends() {
    let plane = Plane::start().await;
    let cluster = plane.cluster("lab").await;
    let token = plane.token(cluster).await;
    let nonce = uuid_text();
    let first = plane.join_as(&token, &nonce, "uid-1", &["control", "pull", "relay"]).await.unwrap();
    plane.server.advance(Duration::from_secs(3590));
    let again = plane.join_as(&token, &nonce, "uid-1", &["control", "pull", "relay"]).await.unwrap();
    assert_eq!(first, again);
    assert_eq!(first.cluster_id, cluster.to_string());
    let pull = secret(&first, "pull");
    assert!(pull.starts_with("rlm_pc_") && first.docker_config_json.contains(&pull));
    assert!(secret(&first, "relay").starts_with("rlm_rc_"));

    let other = plane.join(&token, &uuid_text()).await.unwrap_err();
    assert_eq!(code(&other), "token_used");
    assert!(other.message().contains("issue a new install command"), "{other:?}");
    plane.server.advance(Duration::from_secs(10));
    assert_eq!(code(&plane.join(&token, &nonce).await.unwrap_err()), "token_expired");
}

#[tokio::test]
async fn each_token_that_opens_nothing_says_why() {
    let plane = Plane::start().await;
    let cluster = plane.cluster("lab").await;
    let refused = |token: String| {
        let plane = &plane;
        async move { code(&plane.join(&token, &uuid_text()).await.unwrap_err()) }
    };
    let older = plane.token(cluster).await;
    let newer = plane.token(cluster).await;
    assert_eq!(refused(older).await, "token_superseded");
    let listed = plane.server.get(&plane.key, &format!("/v1/clusters/{cluster}/join-tokens")).await.ok();
    let statuses: Vec<&str> = listed["items"].as_array().unwrap().iter().map(|one| one["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["unused", "superseded"]);
    let id = listed["items"][0]["id"].as_str().unwrap();
    let path = format!("/v1/clusters/{cluster}/join-tokens/{id}");
    assert_eq!(plane.server.delete(&plane.key, &path).await.status, 204);
    assert_eq!(plane.server.delete(&plane.key, &path).await.status, 204, "twice is fine");
    assert_eq!(refused(newer).await, "token_revoked");
    let late = plane.token(cluster).await;
    plane.server.advance(Duration::from_secs(3600));
    assert_eq!(refused(late).await, "token_expired");
    let unknown = rlm_core::tokens::Secret::generate(rlm_core::tokens::SecretKind::JoinToken);
    assert_eq!(refused(unknown.expose().to_owned()).await, "token_unknown");
    assert_eq!(refused("rlm_jt_short".to_owned()).await, "token_unknown");
    assert_eq!(refused(plane.key.clone()).await, "token_unknown");
}

#[tokio::test]
async fn a_token_is_not_for_the_kubernetes_cluster_of_another_registration() {
    let plane = Plane::start().await;
    let (one, two) = (plane.cluster("one").await, plane.cluster("two").await);
    plane.join_as(&plane.token(one).await, &uuid_text(), "uid-1", &["control"]).await.unwrap();
    let token = plane.token(two).await;
    let refused = plane.join_as(&token, &uuid_text(), "uid-1", &["control"]).await.unwrap_err();
    assert_eq!(code(&refused), "token_other_cluster");
    assert!(refused.message().contains("registered as one"), "{refused:?}");
    plane.join_as(&token, &uuid_text(), "uid-2", &["control"]).await.expect("the refusal did not spend the token");
}

#[tokio::test]
async fn rest_makes_the_same_exchange() {
    let plane = Plane::start().await;
    let cluster = plane.cluster("lab").await;
    let token = plane.token(cluster).await;
    let nonce = uuid_text();
    let body = json!({"nonce": nonce, "purposes": ["control", "pull"], "versions": {"agent": "0.1.0"}});
    let over_rest = plane.server.post(&token, "/v1/clusters/join", &body).await;
    assert_eq!(over_rest.headers["cache-control"], "no-store");
    let over_rest = over_rest.ok();
    let over_grpc = plane.join(&token, &nonce).await.unwrap();
    assert_eq!(over_rest["clusterId"], cluster.to_string());
    assert_eq!(over_rest["dockerConfigJson"], over_grpc.docker_config_json);
    assert_eq!(over_rest["credentials"][0]["secret"], secret(&over_grpc, "control"));
    let other = json!({"nonce": uuid_text(), "purposes": ["control"]});
    plane.server.post(&token, "/v1/clusters/join", &other).await.refused("token_used");
    let wrong = json!({"nonce": "x", "purposes": ["root"]});
    let answer = plane.server.post(&token, "/v1/clusters/join", &wrong).await.refused("invalid_request");
    assert_eq!(answer.body["error"]["details"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_rejoin_keeps_the_old_credentials_for_a_day() {
    let plane = Plane::start().await;
    let mut cell = plane.joined("lab").await;
    let old = cell.control.clone();
    drop(cell.connect(&plane).await);
    let rejoined = plane.join(&plane.token(cell.cluster).await, &uuid_text()).await.unwrap();
    assert_eq!(rejoined.cluster_id, cell.cluster.to_string());
    drop(cell.connect(&plane).await);
    cell.control = secret(&rejoined, "control");
    drop(cell.connect(&plane).await);
    plane.server.advance(Duration::from_secs(24 * 3600));
    drop(cell.connect(&plane).await);
    cell.control = old;
    let refused = cell.connect_with(&plane, cell.hello()).await.err().unwrap();
    assert_eq!(code(&refused), "unauthenticated");
    assert!(refused.message().contains("replaced"), "{refused:?}");
}

#[tokio::test]
async fn credentials_are_the_same_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let token = plane.token(plane.cluster("lab").await).await;
    let nonce = uuid_text();
    let first = plane.join(&token, &nonce).await.unwrap();
    let (owner, key) = plane.stop().await;
    let plane = Plane::again(dir.path(), &owner, &key, Duration::from_secs(60)).await;
    assert_eq!(plane.join(&token, &nonce).await.unwrap(), first);
}

#[tokio::test]
async fn a_rejoin_retires_what_it_does_not_ask_for() {
    let plane = Plane::start().await;
    let cluster = plane.cluster("lab").await;
    let token = plane.token(cluster).await;
    plane.join_as(&token, &uuid_text(), "uid-1", &["control", "pull", "relay"]).await.unwrap();
    let token = plane.token(cluster).await;
    plane.join_as(&token, &uuid_text(), "uid-1", &["control"]).await.unwrap();
    let credentials = plane.server.state.store.cluster_credentials(cluster).await.unwrap();
    assert_eq!(credentials.iter().filter(|credential| credential.retires_at.is_some()).count(), 3);
    assert_eq!(credentials.len(), 4);
}

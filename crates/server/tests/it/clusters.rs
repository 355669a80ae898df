//! Clusters over REST: registering, isolation, audit, the install command.

use reqwest::Method;
use rlm_server::app;
use rlm_server::app::access::Role;
use serde_json::json;

use crate::cells::plane::Plane;
use crate::common::TestServer;

#[tokio::test]
async fn clusters_are_registered_renamed_and_listed_in_pages() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let key = server.key(&owner).await;
    let mut ids = Vec::new();
    for name in ["a", "b", "c"] {
        let created = server.post(&key, "/v1/clusters", &json!({"name": name})).await;
        assert_eq!(created.status, 201);
        let created = created.ok();
        assert_eq!((&created["status"], &created["draining"]), (&json!("pending"), &json!(false)));
        ids.push(created["id"].as_str().unwrap().to_owned());
    }
    server.post(&key, "/v1/clusters", &json!({"name": " a "})).await.refused("already_exists");
    server.post(&key, "/v1/clusters", &json!({"name": ""})).await.refused("invalid_request");
    server.post(&key, "/v1/clusters", &json!({"name": "d", "colour": 1})).await.refused("invalid_request");
    let path = format!("/v1/clusters/{}", ids[0]);
    assert_eq!(server.patch(&key, &path, &json!({"name": "z"})).await.ok()["name"], "z");
    server.patch(&key, &path, &json!({"name": "b"})).await.refused("already_exists");
    let first = server.get(&key, "/v1/clusters?limit=2").await.ok();
    assert_eq!(first["items"].as_array().unwrap().len(), 2);
    let cursor = first["nextCursor"].as_str().unwrap();
    let second = server.get(&key, &format!("/v1/clusters?limit=2&cursor={cursor}")).await.ok();
    assert_eq!((&second["items"][0]["id"], &second["nextCursor"]), (&json!(ids[2]), &json!(null)));
    server.get(&key, "/v1/clusters?cursor=x").await.refused("bad_request");
}

#[tokio::test]
async fn another_organization_finds_nothing() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let stranger = plane.server.organization("others").await;
    let key = plane.server.key(&stranger).await;
    let path = format!("/v1/clusters/{}", cell.cluster);
    assert_eq!(plane.server.get(&key, "/v1/clusters").await.ok()["items"], json!([]));
    for below in ["", "/join-tokens", "/credentials"] {
        plane.server.get(&key, &format!("{path}{below}")).await.refused("not_found");
    }
    for below in ["/drain", "/resume", "/archive", "/join-tokens"] {
        plane.server.post(&key, &format!("{path}{below}"), &json!({})).await.refused("not_found");
    }
    plane.server.post(&key, &format!("{path}/credentials/rotate"), &json!({"purpose": "control"})).await.refused("not_found");
    plane.server.patch(&key, &path, &json!({"name": "mine"})).await.refused("not_found");
    plane.server.delete(&key, &format!("{path}/join-tokens/jt_0")).await.refused("not_found");
    assert_eq!(plane.get_cluster(cell.cluster).await["draining"], false);
    // A viewer of the same organization reads and changes nothing.
    let viewer = plane.server.user(plane.owner.organization, Role::Viewer).await;
    let key = plane.server.key(&viewer).await;
    plane.server.get(&key, &path).await.ok();
    let refused = plane.server.post(&key, &format!("{path}/drain"), &json!({})).await.refused("forbidden");
    assert!(refused.message().contains("clusters:write"), "{}", refused.message());
}

#[tokio::test]
async fn every_change_is_in_the_audit_log_and_no_secret_is() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let path = format!("/v1/clusters/{}", cell.cluster);
    let token = plane.token(cell.cluster).await;
    plane.server.patch(&plane.key, &path, &json!({"name": "lab 2"})).await.ok();
    plane.server.post(&plane.key, &format!("{path}/drain"), &json!({})).await.ok();
    plane.server.post(&plane.key, &format!("{path}/drain"), &json!({})).await.ok();
    plane.server.post(&plane.key, &format!("{path}/resume"), &json!({})).await.ok();
    plane.server.post(&plane.key, &format!("{path}/credentials/rotate"), &json!({"purpose": "pull"})).await.ok();
    plane.server.post(&plane.key, &format!("{path}/archive"), &json!({})).await.ok();
    let log = plane.server.get(&plane.key, "/v1/audit?limit=200").await.ok();
    let mut actions: Vec<&str> = log["items"].as_array().unwrap().iter().map(|one| one["action"].as_str().unwrap()).collect();
    actions.reverse();
    let ours: Vec<&str> = actions
        .into_iter()
        .filter(|action| ["cluster.", "joinToken.", "credential."].iter().any(|noun| action.starts_with(noun)))
        .collect();
    assert_eq!(
        ours,
        [
            "cluster.create",
            "joinToken.create",
            "cluster.join",
            "joinToken.create",
            "cluster.rename",
            "cluster.drain",
            "cluster.resume",
            "credential.rotate",
            "cluster.archive"
        ]
    );
    let text = log.to_string();
    assert!(!text.contains("rlm_") && !text.contains(&token));
}

#[tokio::test]
async fn the_install_command_follows_the_platform_and_its_token_is_never_cached() {
    let plane = Plane::with(|config| config.public_url = "https://api.rlmesh.dev".to_owned()).await;
    let (state, caller) = (&plane.server.state, plane.caller());
    let cluster = app::clusters::create(state, &caller, "lab").await.unwrap().id;
    let created = app::clusters::issue_join_token(state, &caller, &cluster).await.unwrap();
    assert!(created.command.starts_with("helm install rlmesh oci://"), "{}", created.command);
    assert!(created.command.ends_with(&format!("--set joinToken={}", created.token)), "{}", created.command);

    let local = Plane::start().await;
    let path = format!("/v1/clusters/{}/join-tokens", local.cluster("lab").await);
    let answer = local.server.send(local.server.request(Method::POST, &path).bearer_auth(&local.key)).await;
    assert_eq!((answer.status.as_u16(), &answer.headers["cache-control"]), (201, &"no-store".parse().unwrap()));
    let body = answer.ok();
    assert!(body["command"].as_str().unwrap().contains("rlmesh-cluster-agent --executor process"), "{body}");
}

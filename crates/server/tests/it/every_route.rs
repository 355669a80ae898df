//! One table over every route of the API: who may call it. A route that is not in the table fails the test.

use std::collections::BTreeSet;
use std::time::Duration;

use reqwest::Method;
use rlm_core::ids::{ClusterId, EvaluationId, KeyId, OrganizationId, RunId, UserId};
use rlm_server::app::access::{Role, Scope};
use rlm_server::http::openapi;
use serde_json::{Value, json};

use crate::common::{TestServer, TestUser};

/// What a route asks of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Nothing, or a credential of its own kind (a join token, a form).
    Open,
    /// To be signed in.
    SignedIn,
    /// To have the scope.
    Needs(Scope),
}

struct Route {
    method: Method,
    path: &'static str,
    access: Access,
    body: Option<Value>,
}

fn route(method: Method, path: &'static str, access: Access, body: Option<Value>) -> Route {
    Route { method, path, access, body }
}

fn table() -> Vec<Route> {
    use Access::{Needs, Open, SignedIn};
    use Scope::{AuditRead, KeysWrite, OrganizationRead, OrganizationWrite};
    let (get, put, post, patch, delete) = (Method::GET, Method::PUT, Method::POST, Method::PATCH, Method::DELETE);
    let mut routes = vec![
        route(get.clone(), "/v1/info", Open, None),
        route(get.clone(), "/v1/openapi.json", Open, None),
        route(post.clone(), "/v1/oauth/device/authorize", Open, None),
        route(post.clone(), "/v1/oauth/token", Open, None),
        route(post.clone(), "/v1/oauth/revoke", Open, None),
        route(get.clone(), "/v1/me", SignedIn, None),
        route(get.clone(), "/v1/me/organizations", SignedIn, None),
        route(get.clone(), "/v1/me/session", SignedIn, None),
        route(put, "/v1/me/session", SignedIn, Some(json!({"organizationId": "org_0"}))),
        route(delete.clone(), "/v1/me/session", SignedIn, None),
        route(get.clone(), "/v1/registry/info", SignedIn, None),
        route(get.clone(), "/v1/audit", Needs(AuditRead), None),
        route(get.clone(), "/v1/keys", Needs(KeysWrite), None),
        route(post.clone(), "/v1/keys", Needs(KeysWrite), Some(json!({"name": "k"}))),
        route(get.clone(), "/v1/keys/{id}", Needs(KeysWrite), None),
        route(delete.clone(), "/v1/keys/{id}", Needs(KeysWrite), None),
        route(post.clone(), "/v1/organizations", Needs(OrganizationWrite), Some(json!({"name": ""}))),
        route(get.clone(), "/v1/organizations/{id}", Needs(OrganizationRead), None),
        route(patch.clone(), "/v1/organizations/{id}", Needs(OrganizationWrite), Some(json!({"name": ""}))),
        route(get, "/v1/organizations/{id}/members", Needs(OrganizationRead), None),
        route(post, "/v1/organizations/{id}/members", Needs(OrganizationWrite), Some(json!({"email": "x", "role": "viewer"}))),
        route(patch, "/v1/organizations/{id}/members/{user}", Needs(OrganizationWrite), Some(json!({"role": "viewer"}))),
        route(delete, "/v1/organizations/{id}/members/{user}", Needs(OrganizationWrite), None),
    ];
    routes.extend(evaluation_routes());
    routes.extend(cluster_routes());
    routes
}

fn evaluation_routes() -> Vec<Route> {
    use Access::Needs;
    use Scope::{EvaluationsRead, EvaluationsWrite, ModelsRead, ModelsWrite};
    let (get, put, post, patch, delete) = (Method::GET, Method::PUT, Method::POST, Method::PATCH, Method::DELETE);
    let empty = || Some(json!({}));
    let one = "/v1/evaluations/{id}";
    let mut routes = vec![
        route(post.clone(), "/v1/evaluation-previews", Needs(EvaluationsRead), empty()),
        route(post.clone(), "/v1/evaluations/imports", Needs(EvaluationsWrite), empty()),
        route(get.clone(), "/v1/evaluations", Needs(EvaluationsRead), None),
        route(post.clone(), "/v1/evaluations", Needs(EvaluationsWrite), empty()),
        route(get.clone(), one, Needs(EvaluationsRead), None),
        route(patch, one, Needs(EvaluationsWrite), empty()),
        route(delete, one, Needs(EvaluationsWrite), None),
        route(post.clone(), "/v1/evaluations/{id}/cancellations", Needs(EvaluationsWrite), empty()),
        route(post.clone(), "/v1/evaluations/{id}/retries", Needs(EvaluationsWrite), empty()),
        route(post.clone(), "/v1/evaluations/{id}/extensions", Needs(EvaluationsWrite), Some(json!({"episodes": 1}))),
        route(post.clone(), "/v1/evaluations/{id}/clones", Needs(EvaluationsWrite), empty()),
        route(get.clone(), "/v1/evaluations/{id}/scores", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/metrics", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/rows", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/rows/{row}", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/rows/{row}/reproduction", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/export", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/events", Needs(EvaluationsRead), None),
        route(get.clone(), "/v1/evaluations/{id}/logs", Needs(EvaluationsRead), None),
    ];
    for (list, one, describe) in [
        ("/v1/models", "/v1/models/{name}", "/v1/models/{name}/describe"),
        ("/v1/environments", "/v1/environments/{name}", "/v1/environments/{name}/describe"),
    ] {
        routes.push(route(get.clone(), list, Needs(ModelsRead), None));
        routes.push(route(post.clone(), list, Needs(ModelsWrite), Some(json!({"name": "", "definition": {}}))));
        routes.push(route(get.clone(), one, Needs(ModelsRead), None));
        routes.push(route(put.clone(), describe, Needs(ModelsWrite), empty()));
    }
    routes
}

fn cluster_routes() -> Vec<Route> {
    use Access::{Needs, Open};
    use Scope::{ClustersRead, ClustersWrite};
    let (get, post) = (Method::GET, Method::POST);
    vec![
        route(get.clone(), "/v1/clusters", Needs(ClustersRead), None),
        route(post.clone(), "/v1/clusters", Needs(ClustersWrite), Some(json!({"name": ""}))),
        route(get.clone(), "/v1/clusters/{id}", Needs(ClustersRead), None),
        route(Method::PATCH, "/v1/clusters/{id}", Needs(ClustersWrite), Some(json!({"name": "x"}))),
        route(post.clone(), "/v1/clusters/{id}/drain", Needs(ClustersWrite), None),
        route(post.clone(), "/v1/clusters/{id}/resume", Needs(ClustersWrite), None),
        route(post.clone(), "/v1/clusters/{id}/archive", Needs(ClustersWrite), None),
        route(get.clone(), "/v1/clusters/{id}/join-tokens", Needs(ClustersRead), None),
        route(post.clone(), "/v1/clusters/{id}/join-tokens", Needs(ClustersWrite), None),
        route(Method::DELETE, "/v1/clusters/{id}/join-tokens/{token}", Needs(ClustersWrite), None),
        route(get, "/v1/clusters/{id}/credentials", Needs(ClustersRead), None),
        route(post.clone(), "/v1/clusters/{id}/credentials/rotate", Needs(ClustersWrite), Some(json!({"purpose": "control"}))),
        route(post, "/v1/clusters/join", Open, Some(json!({"nonce": "0123456789abcdef", "purposes": ["control"]}))),
    ]
}

/// A path with ids that name nothing, except the organization: that is the caller's own.
fn fill(path: &str, organization: OrganizationId) -> String {
    let id = if path.starts_with("/v1/organizations/") {
        organization.to_string()
    } else if path.starts_with("/v1/keys/") {
        KeyId::generate().to_string()
    } else if path.starts_with("/v1/clusters/") {
        ClusterId::generate().to_string()
    } else if path.starts_with("/v1/evaluations/") {
        EvaluationId::generate().to_string()
    } else {
        "nothing".to_owned()
    };
    path.replace("{id}", &id)
        .replace("{user}", &UserId::generate().to_string())
        .replace("{run}", &RunId::generate().to_string())
        .replace("{row}", "0")
        .replace("{token}", "nothing")
        .replace("{name}", "nothing")
        .replace("{version}", "1")
}

async fn status(server: &TestServer, route: &Route, organization: OrganizationId, token: Option<&str>) -> (u16, String) {
    let mut request = server.request(route.method.clone(), &fill(route.path, organization));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    if let Some(body) = &route.body {
        request = request.json(body);
    }
    let answer = server.send(request).await;
    (answer.status.as_u16(), answer.text)
}

#[test]
fn every_route_is_in_the_table() {
    let document = openapi::document();
    let documented: BTreeSet<(String, String)> = document
        .paths
        .paths
        .iter()
        .flat_map(|(path, item)| openapi::operations(item).map(|(method, _)| (method.to_owned(), path.clone())))
        .collect();
    let listed: BTreeSet<(String, String)> = table().iter().map(|route| (route.method.to_string(), route.path.to_owned())).collect();
    assert_eq!(listed.len(), table().len(), "a route is listed twice");
    let missing: Vec<_> = documented.difference(&listed).collect();
    assert!(missing.is_empty(), "add to the table in this file: {missing:#?}");
    let gone: Vec<_> = listed.difference(&documented).collect();
    assert!(gone.is_empty(), "no such routes: {gone:#?}");

    for route in table() {
        let item = &document.paths.paths[route.path];
        let (_, operation) = openapi::operations(item).find(|(method, _)| *method == route.method.as_str()).unwrap();
        let secured = operation.security.as_ref().is_some_and(|security| !security.is_empty());
        let expected = route.access != Access::Open;
        assert_eq!(secured, expected, "security of {} {} in the document", route.method, route.path);
        assert!(operation.summary.is_some(), "{} {} has no summary", route.method, route.path);
    }
}

#[tokio::test]
async fn without_a_valid_credential_every_route_is_closed() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let expired = server.access_token(&owner).await;
    let ended = server.access_token(&owner).await;
    server.advance(Duration::from_secs(16 * 60));
    let live = server.access_token(&owner).await;
    server.get(&live, "/v1/me").await.ok();
    let ended_now = server.access_token(&owner).await;
    server.delete(&ended_now, "/v1/me/session").await;
    let revoked = server.key(&owner).await;
    let list = server.get(&live, "/v1/keys").await.ok();
    server.delete(&live, &format!("/v1/keys/{}", list["items"][0]["id"].as_str().unwrap())).await;
    let removed = {
        let gone = server.user(owner.organization, Role::Admin).await;
        let key = server.key(&gone).await;
        server.delete(&live, &format!("/v1/organizations/{}/members/{}", owner.organization, gone.id)).await;
        key
    };
    let credentials = [
        ("none", None),
        ("malformed", Some("rlm_key_nonsense".to_owned())),
        ("no token", Some("nonsense".to_owned())),
        ("expired", Some(expired)),
        ("long ended", Some(ended)),
        ("ended", Some(ended_now)),
        ("revoked", Some(revoked)),
        ("of a removed member", Some(removed)),
    ];
    for route in table().iter().filter(|route| route.access != Access::Open) {
        for (name, token) in &credentials {
            let (status, text) = status(&server, route, owner.organization, token.as_deref()).await;
            assert_eq!(status, 401, "{} {} with a credential that is {name}: {text}", route.method, route.path);
        }
    }
}

#[tokio::test]
async fn every_role_and_key_reaches_what_it_may_and_no_more() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let mut callers: Vec<(String, TestUser, Vec<Scope>)> = Vec::new();
    for role in Role::ALL {
        let user = server.user(owner.organization, role).await;
        callers.push((format!("a {} ", role.as_str()), user, role.scopes().to_vec()));
    }
    for route in table() {
        for (name, user, scopes) in &callers {
            // A token of its own each time: some routes end it.
            let token = server.access_token(user).await;
            expect(&server, &route, user, &token, name, scopes).await;
        }
        for scope in Scope::ALL {
            let key = server.key_with(&owner, &[*scope]).await;
            expect(&server, &route, &owner, &key, &format!("a key with {scope} alone"), &[*scope]).await;
        }
        // The limit of token requests is not what is tested.
        server.advance(Duration::from_secs(60));
    }
}

/// Real things of one organization, by the path that names them.
async fn things(server: &TestServer, owner: &TestUser) -> impl Fn(&str) -> String + use<> {
    let key = server.key(owner).await;
    let made = async |path: &str, body: Value| server.post(&key, path, &body).await.ok();
    let id = |value: &Value| value["id"].as_str().unwrap().to_owned();
    let cluster = id(&made("/v1/clusters", json!({"name": "cell"})).await);
    let token = id(&made(&format!("/v1/clusters/{cluster}/join-tokens"), json!({})).await);
    let api_key = id(&made("/v1/keys", json!({"name": "theirs"})).await);
    let definition = json!({"image": "registry.example.com/one:1"});
    made("/v1/models", json!({"name": "secret-one", "definition": definition})).await;
    made("/v1/environments", json!({"name": "secret-one", "definition": definition})).await;
    let request = json!({
        "name": "secret-one",
        "models": [{"id": "m", "image": "registry.example.com/m:1"}],
        "environments": [{"id": "e", "image": "registry.example.com/e:1"}],
        "tasks": [{"env": "e", "taskId": "t/0", "params": {}, "episodes": 1}],
    });
    let evaluation = id(&made("/v1/evaluations", request).await);
    let (organization, user) = (owner.organization.to_string(), owner.id.to_string());
    move |path: &str| {
        let id = match path.split('/').nth(2) {
            Some("organizations") => &organization,
            Some("keys") => &api_key,
            Some("clusters") => &cluster,
            Some("evaluations") => &evaluation,
            _ => "",
        };
        path.replace("{id}", id).replace("{user}", &user).replace("{token}", &token).replace("{name}", "secret-one").replace("{row}", "0")
    }
}

#[tokio::test]
async fn nobody_reaches_another_organizations_things() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let path_of = things(&server, &owner).await;
    let stranger = server.organization("strangers").await;
    let stranger_key = server.key(&stranger).await;
    let owner_key = server.key(&owner).await;
    let mut reached = 0;
    for route in table().iter().filter(|route| route.access != Access::Open) {
        let path = path_of(route.path);
        assert!(!path.contains('{'), "fill in {path}");
        let ask = |token: &str| {
            let request = server.request(route.method.clone(), &path).bearer_auth(token);
            match &route.body {
                Some(body) => request.json(body),
                None => request,
            }
        };
        if route.path.contains('{') {
            let answer = server.send(ask(&stranger_key)).await;
            assert_eq!(answer.code(), "not_found", "{} {path} by a stranger: {} {}", route.method, answer.status, answer.text);
            if route.method == Method::GET && !route.path.ends_with("/events") {
                let owners = server.http.execute(ask(&owner_key).build().unwrap()).await.unwrap();
                reached += usize::from(owners.status().is_success());
            }
        } else if route.method == Method::GET {
            let answer = server.send(ask(&stranger_key)).await;
            let own = [owner.organization.to_string(), owner.id.to_string(), "secret-one".to_owned()];
            assert!(own.iter().all(|text| !answer.text.contains(text)), "{path} shows a stranger: {}", answer.text);
        }
    }
    assert!(reached >= 10, "the paths name real things: their owner reaches {reached}");
}

#[tokio::test]
async fn event_streams_end_with_the_server() {
    let server = TestServer::start().await;
    let owner = server.organization("lab").await;
    let path = things(&server, &owner).await("/v1/evaluations/{id}/events");
    let key = server.key(&owner).await;
    let mut stream = server.request(Method::GET, &path).bearer_auth(&key).send().await.unwrap();
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    assert!(stream.chunk().await.unwrap().is_some(), "it begins with where things stand");
    server.stop();
    let ended = async { while stream.chunk().await.unwrap().is_some() {} };
    tokio::time::timeout(Duration::from_secs(5), ended).await.unwrap();
}

async fn expect(server: &TestServer, route: &Route, user: &TestUser, token: &str, name: &str, scopes: &[Scope]) {
    let (status, text) = status(server, route, user.organization, Some(token)).await;
    let what = format!("{} {} by {name}: {status} {text}", route.method, route.path);
    match route.access {
        Access::Needs(scope) if !scopes.contains(&scope) => assert_eq!(status, 403, "{what}"),
        Access::Needs(_) | Access::SignedIn => assert!(![401, 403, 405].contains(&status) && status < 500, "{what}"),
        Access::Open => assert!(status != 405 && status < 500, "{what}"),
    }
}

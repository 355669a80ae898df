//! Registered models and environments, and requests that name them.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::{Lab, request};
use crate::common::{TestServer, postgres_url};

pub fn catalogue() -> Value {
    json!({
        "schema_version": 1,
        "kind": "env",
        "target": {"entrypoint": "envs:Walk", "qualname": "Walk"},
        "env": {"env_spec": {"observation_space": {}, "action_space": {}}, "env_tags": null},
        "params": {"param_spec": {"params": [{"name": "map", "type": "str", "required": false}], "extra": "forbid"}, "signature_tier": []},
        "variants": {"catalog": [{"id": "walk/a", "params": {"map": "a"}, "metadata": {}}, {"id": "walk/b", "params": {"map": "b"}, "metadata": {}}], "variations": {}},
        "runtime": {},
    })
}

#[tokio::test]
async fn versions_count_up_and_never_change() {
    let mut labs = vec![Lab::start().await];
    if let Some(url) = postgres_url().await {
        labs.push(Lab::on(TestServer::with(|config| config.database_url = url).await).await);
    }
    for lab in labs {
        for noun in ["models", "environments"] {
            let path = format!("/v1/{noun}");
            let first =
                lab.server.post(&lab.token, &path, &json!({"name": "one", "definition": {"image": "registry.example.com/one:1"}})).await;
            assert_eq!(
                (first.status, &first.body["version"], &first.body["described"]),
                (StatusCode::CREATED, &json!(1), &json!(false)),
                "{}",
                first.text
            );
            let again =
                lab.server.post(&lab.token, &path, &json!({"name": "one", "definition": {"image": "registry.example.com/one:1"}})).await;
            assert_eq!((again.status, &again.body["version"]), (StatusCode::OK, &json!(1)));
            let next =
                lab.server.post(&lab.token, &path, &json!({"name": "one", "definition": {"image": "registry.example.com/one:2"}})).await;
            assert_eq!((next.status, &next.body["version"]), (StatusCode::CREATED, &json!(2)));
            lab.server
                .post(&lab.token, &path, &json!({"name": "group/two", "definition": {"image": "registry.example.com/two:1"}}))
                .await
                .ok();
            let list = lab.get(&path).await;
            let shown: Vec<String> = list["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|item| format!("{}:{}", item["name"].as_str().unwrap(), item["version"]))
                .collect();
            assert_eq!(shown, ["group/two:1", "one:2"]);
            let page = lab.get(&format!("{path}?limit=1")).await;
            assert_eq!(page["nextCursor"], "group/two");
            assert_eq!(lab.get(&format!("{path}?limit=1&cursor=group/two")).await["items"][0]["name"], "one");
            assert_eq!(lab.get(&format!("{path}?q=TWO")).await["items"].as_array().unwrap().len(), 1);
            let one = lab.get(&format!("{path}/one")).await;
            assert_eq!((&one["version"], one["versions"].as_array().unwrap().len()), (&json!(2), 2));
            assert_eq!(lab.get(&format!("{path}/one?version=1")).await["definition"]["image"], "registry.example.com/one:1");
            assert_eq!(lab.get(&format!("{path}/group%2Ftwo")).await["version"], 1);
            for missing in ["one?version=3", "three"] {
                lab.server.get(&lab.token, &format!("{path}/{missing}")).await.refused("not_found");
            }
            let stranger = lab.server.organization(&format!("strangers to {noun}")).await;
            let key = lab.server.key(&stranger).await;
            lab.server.get(&key, &format!("{path}/one")).await.refused("not_found");
            assert_eq!(lab.server.get(&key, &path).await.ok()["items"], json!([]));
        }
        let audit = lab.get("/v1/audit").await;
        assert!(audit["items"].as_array().unwrap().iter().any(|entry| entry["action"] == "model.register" && entry["subject"] == "one:2"));
    }
}

#[tokio::test]
async fn definitions_that_can_not_run_are_refused() {
    let lab = Lab::start().await;
    for bad in [
        json!({"name": "", "definition": {"image": "a"}}),
        json!({"name": "a b", "definition": {"image": "a"}}),
        json!({"name": "x", "definition": {}}),
        json!({"name": "x", "definition": {"image": "a", "colour": "red"}}),
        json!({"name": "x", "definition": 7}),
        json!({"name": "x"}),
        json!({"name": "x", "definition": {"image": "a"}, "colour": 1}),
        json!({"name": "x", "definition": {"image": "a"}, "describe": catalogue()}),
    ] {
        let answer = lab.server.post(&lab.token, "/v1/models", &bad).await.refused("invalid_request");
        assert!(!answer.message().is_empty());
    }
    assert_eq!(lab.get("/v1/models").await["items"], json!([]));
}

#[tokio::test]
async fn a_request_may_name_what_is_registered() {
    let lab = Lab::start().await;
    lab.server.post(&lab.token, "/v1/models", &json!({"name": "push", "definition": {"image": "registry.example.com/push:1"}})).await.ok();
    lab.server
        .post(
            &lab.token,
            "/v1/environments",
            &json!({"name": "walks", "definition": {"image": "registry.example.com/walks:1"}, "describe": catalogue()}),
        )
        .await
        .ok();
    let named = |task: &str| json!({"models": [{"ref": "push:1"}], "tasks": [{"env": "walks", "taskId": task, "episodes": 2}, {"env": "walks:1", "taskId": "walk/b", "episodes": 2}]});
    let id = lab.submit(&named("walk/a")).await;
    let detail = lab.get(&format!("/v1/evaluations/{id}")).await;
    assert_eq!(detail["effective"]["tasks"][0]["params"], json!({"map": "a"}));
    assert_eq!(detail["effective"]["models"][0]["image"], "registry.example.com/push:1");
    let refused = lab.server.post(&lab.token, "/v1/evaluations", &named("walk/c")).await.refused("invalid_request");
    assert!(refused.message().contains("tasks[0].taskId"), "{}", refused.message());
    let mut other = request("other", 1);
    other["models"] = json!([{"ref": "push:2"}]);
    lab.server.post(&lab.token, "/v1/evaluations", &other).await.refused("invalid_request");
    // Another organization has no such model.
    let stranger = lab.server.organization("strangers").await;
    let key = lab.server.key(&stranger).await;
    lab.server.post(&key, "/v1/evaluations", &named("walk/a")).await.refused("invalid_request");
}

#[tokio::test]
async fn a_describe_document_can_come_later() {
    let lab = Lab::start().await;
    lab.server
        .post(&lab.token, "/v1/environments", &json!({"name": "walks", "definition": {"image": "registry.example.com/walks:1"}}))
        .await
        .ok();
    let put = |name: &str, body: Value| {
        lab.server.send(lab.server.request(Method::PUT, &format!("/v1/environments/{name}/describe")).bearer_auth(&lab.token).json(&body))
    };
    put("nothing", catalogue()).await.refused("not_found");
    put("walks", json!([])).await.refused("invalid_request");
    let mut model = catalogue();
    model["kind"] = json!("model");
    put("walks", model).await.refused("invalid_request");
    let described = put("walks", catalogue()).await.ok();
    assert_eq!((&described["described"], &described["describe"]["kind"]), (&json!(true), &json!("env")));
    let one = json!({"models": [{"id": "m", "image": "registry.example.com/m:1"}], "tasks": [{"env": "walks", "taskId": "walk/b", "episodes": 1}]});
    let id = lab.submit(&one).await;
    assert_eq!(lab.get(&format!("/v1/evaluations/{id}")).await["effective"]["tasks"][0]["params"], json!({"map": "b"}));
}

//! Definitions with an entrypoint are described by the connected local cell before anything is stored.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use reqwest::StatusCode;
use rlm_api::cluster::v1::agent_message::Message as FromAgent;
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_api::cluster::v1::{self};
use rlm_core::failure::{Failure, FailureCode};
use rlm_server::app::access::Scope;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::definitions::catalogue;
use crate::cells::plane::{Agent, Plane};

fn model_document() -> Value {
    json!({
        "schema_version": 1,
        "kind": "model",
        "target": {"entrypoint": "policies:Chunks", "qualname": "Chunks"},
        "model": {"model_spec": null, "corners": ["predict", "predict_chunk"], "native_chunk": 4},
        "params": null,
        "variants": null,
        "runtime": {},
    })
}

/// Describes what it is asked about: `*:Broken` can't be imported, `*:Unlucky` fails for another reason, `*:Edited` can be
/// imported every other time.
fn describing(mut agent: Agent) -> (Arc<AtomicUsize>, JoinHandle<()>) {
    let mut edits = 0;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let task = tokio::spawn(async move {
        while let Some(message) = agent.next().await {
            let ToAgent::Describe(request) = message else { continue };
            count.fetch_add(1, Ordering::SeqCst);
            let failure = |code| Failure::new(code, "policies.py has no module torch").of("describe");
            let failure = match request.definition_json.as_str() {
                text if text.contains(":Edited") => {
                    edits += 1;
                    (edits % 2 == 0).then(|| failure(FailureCode::InvalidEntrypoint))
                }
                text if text.contains(":Broken") => Some(failure(FailureCode::InvalidEntrypoint)),
                text if text.contains(":Unlucky") => Some(failure(FailureCode::AgentError)),
                _ => None,
            };
            let document = if request.kind == "model" { model_document() } else { catalogue() };
            let reply = v1::DescribeReply {
                request_id: request.request_id,
                document_json: if failure.is_none() { document.to_string() } else { String::new() },
                failure: failure.as_ref().map(Into::into),
            };
            agent.send(FromAgent::DescribeReply(reply)).await;
        }
    });
    (asked, task)
}

fn inline(model: &str, task: &str) -> Value {
    json!({
        "models": [{"id": "m", "entrypoint": model}],
        "environments": [{"id": "walks", "entrypoint": "envs:Walk", "pythonPath": "/srv/walks"}],
        "tasks": [{"env": "walks", "taskId": task, "episodes": 1}, {"env": "walks", "taskId": "walk/b", "params": {"map": "c"}, "episodes": 1}],
    })
}

async fn nothing_stored(plane: &Plane) {
    assert_eq!(plane.server.get(&plane.key, "/v1/evaluations").await.ok()["items"], json!([]));
}

#[tokio::test]
async fn a_catalogue_is_read_from_the_code() {
    let plane = Plane::start().await;
    let cell = plane.joined("laptop").await;
    let (asked, _agent) = describing(cell.connect(&plane).await);
    let preview = plane.server.post(&plane.key, "/v1/evaluation-previews", &inline("policies:Chunks", "walk/a")).await.ok();
    assert_eq!(preview["workloads"][0]["params"], json!({"map": "a"}));
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    let created = plane.server.post(&plane.key, "/v1/evaluations", &inline("policies:Chunks", "walk/a")).await;
    assert_eq!((created.status, &created.body["warnings"]), (StatusCode::CREATED, &json!([])), "{}", created.text);
    let detail = plane.server.get(&plane.key, &format!("/v1/evaluations/{}", created.body["id"].as_str().unwrap())).await.ok();
    assert_eq!(
        (&detail["effective"]["tasks"][0]["params"], &detail["effective"]["tasks"][1]["params"]),
        (&json!({"map": "a"}), &json!({"map": "c"}))
    );
}

#[tokio::test]
async fn a_class_that_was_edited_is_looked_at_anew() {
    let plane = Plane::start().await;
    let cell = plane.joined("laptop").await;
    let (asked, _agent) = describing(cell.connect(&plane).await);
    let request = inline("policies:Edited", "walk/a");
    for path in ["/v1/evaluation-previews", "/v1/evaluations"] {
        plane.server.post(&plane.key, path, &request).await.ok();
        let refused = plane.server.post(&plane.key, path, &request).await.refused("invalid_request");
        assert!(refused.message().contains("no module torch"), "{}", refused.message());
    }
    assert_eq!(asked.load(Ordering::SeqCst), 8, "model and environment, each time");
}

#[tokio::test]
async fn what_the_code_refuses_is_refused_at_once() {
    let plane = Plane::start().await;
    let cell = plane.joined("laptop").await;
    let (_, _agent) = describing(cell.connect(&plane).await);
    let refused =
        plane.server.post(&plane.key, "/v1/evaluations", &inline("policies:Broken", "walk/zero")).await.refused("invalid_request");
    let problems = refused.body["error"]["details"].as_array().unwrap();
    let message = |path: &str| {
        problems.iter().find(|problem| problem["path"] == path).unwrap_or_else(|| panic!("{path} in {problems:?}"))["message"].to_string()
    };
    assert!(message("models[0].entrypoint").contains("no module torch"));
    assert!(message("tasks[0].taskId").contains("selects nothing"));
    // An id that stands there twice: both are looked at, and the broken one is blamed.
    let mut twice = inline("policies:Chunks", "walk/a");
    twice["models"] = json!([{"id": "m", "entrypoint": "policies:Chunks"}, {"id": "m", "entrypoint": "policies:Broken"}]);
    let refused = plane.server.post(&plane.key, "/v1/evaluations", &twice).await.refused("invalid_request");
    let paths: Vec<&Value> = refused.body["error"]["details"].as_array().unwrap().iter().map(|problem| &problem["path"]).collect();
    assert_eq!(paths, ["models[1].entrypoint", "models[1].id"]);
    let mut deep = inline("policies:Chunks", "walk/a");
    deep["models"][0]["executionHorizon"] = json!(8);
    let refused = plane.server.post(&plane.key, "/v1/evaluations", &deep).await.refused("invalid_request");
    assert!(refused.message().starts_with("models[0].executionHorizon"), "{}", refused.message());
    nothing_stored(&plane).await;
}

#[tokio::test]
async fn who_may_not_submit_has_nothing_run() {
    let plane = Plane::start().await;
    let cell = plane.joined("laptop").await;
    let (asked, _agent) = describing(cell.connect(&plane).await);
    let reader = plane.server.key_with(&plane.owner, &[Scope::EvaluationsRead]).await;
    let mut request = inline("policies:Broken", "walk/b");
    request["tasks"] = json!([{"env": "walks", "taskId": "walk/b", "episodes": 1}]);
    let preview = plane.server.post(&reader, "/v1/evaluation-previews", &request).await.ok();
    assert!(preview["warnings"].to_string().contains("were not tried"), "{preview}");
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_cell_that_can_not_answer_is_a_warning() {
    let plane = Plane::start().await;
    let cell = plane.joined("laptop").await;
    let (_, agent) = describing(cell.connect(&plane).await);
    let created = plane.server.post(&plane.key, "/v1/evaluations", &inline("policies:Unlucky", "walk/a")).await;
    assert_eq!(created.status, StatusCode::CREATED, "{}", created.text);
    assert!(created.body["warnings"].to_string().contains("could not be described"), "{}", created.text);
    // Without a cell nothing is asked, and nothing is known.
    agent.abort();
    plane.session_ended(cell.cluster).await;
    plane.server.post(&plane.key, "/v1/evaluations", &inline("policies:Broken", "walk/a")).await.ok();
    // What was registered then is looked at when it is used.
    let broken = json!({"name": "broken", "definition": {"entrypoint": "policies:Broken"}});
    assert_eq!(plane.server.post(&plane.key, "/v1/models", &broken).await.ok()["described"], false);
    let (_, _agent) = describing(cell.connect(&plane).await);
    let mut registered = inline("policies:Chunks", "walk/a");
    registered["models"] = json!([{"ref": "broken"}]);
    let refused = plane.server.post(&plane.key, "/v1/evaluations", &registered).await.refused("invalid_request");
    assert!(refused.message().starts_with("models[0]: policies.py has no module torch"), "{}", refused.message());
}

#[tokio::test]
async fn registering_asks_the_cell_too() {
    let plane = Plane::start().await;
    let cell = plane.joined("laptop").await;
    let (asked, _agent) = describing(cell.connect(&plane).await);
    let environment = json!({"name": "walks", "definition": {"entrypoint": "envs:Walk"}});
    assert_eq!(plane.server.post(&plane.key, "/v1/environments", &environment).await.ok()["described"], true);
    let image = json!({"name": "image", "definition": {"image": "registry.example.com/walks:1"}});
    assert_eq!(plane.server.post(&plane.key, "/v1/environments", &image).await.ok()["described"], false);
    let broken = json!({"name": "broken", "definition": {"entrypoint": "policies:Broken"}});
    let refused = plane.server.post(&plane.key, "/v1/models", &broken).await.refused("invalid_request");
    assert!(refused.message().starts_with("definition.entrypoint: policies.py has no module torch"), "{}", refused.message());
    plane.server.get(&plane.key, "/v1/models/broken").await.refused("not_found");
    let unlucky = json!({"name": "unlucky", "definition": {"entrypoint": "policies:Unlucky"}});
    let stored = plane.server.post(&plane.key, "/v1/models", &unlucky).await.ok();
    assert!(stored["warnings"].to_string().contains("could not be described"), "{stored}");
    assert_eq!(asked.load(Ordering::SeqCst), 3);
}

use std::time::Duration;

use chrono::{DateTime, Utc};
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::agent_message::Message as FromAgent;
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_core::error::Code;
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;
use rlm_core::run::EvaluationStatus;
use rlm_server::app::cells::Described;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::plane::{Agent, Cell, Plane, authorized, code, held};
use crate::common::uuid_text;

#[tokio::test]
async fn the_same_agent_takes_over_from_its_older_session() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut older = cell.connect(&plane).await;
    let newer = cell.connect(&plane).await;
    assert_eq!((older.welcome.session_generation, newer.welcome.session_generation), (1, 2));
    assert_eq!(older.goodbye().await.code, "conflict");
    plane.server.advance(Duration::from_secs(20));
    newer.heartbeat(0).await;
    let seen = plane.get_cluster(cell.cluster).await;
    assert_eq!(seen["status"], "connected");
}

#[tokio::test]
async fn another_agent_is_refused_while_the_first_is_connected() {
    another_agent_is_refused_while_the_first_is_connected_on(&Plane::start().await).await;
}

pub async fn another_agent_is_refused_while_the_first_is_connected_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let mut first = cell.connect(plane).await;
    let evaluation = plane.submit(3, json!({})).await;
    let (run, _) = first.assigned().await;
    let other = Cell { instance: uuid_text(), ..cell.clone() };
    let refused = other.connect_with(plane, other.hello()).await.err().unwrap();
    assert_eq!(code(&refused), "cluster_has_live_agent");
    first.heartbeat(0).await;
    plane.server.advance(Duration::from_secs(10));
    drop(first);
    let refused = other.connect_with(plane, other.hello()).await.err().unwrap();
    assert_eq!(code(&refused), "cluster_has_live_agent", "a broken connection is no loss yet");
    plane.server.advance(Duration::from_secs(30));
    let mut second = other.connect(plane).await;
    assert!(second.welcome.runs.is_empty(), "what the first held, this one does not");
    let (again, rows) = second.assigned().await;
    assert_eq!((again.run_id, again.generation), (run.run_id, 2));
    assert_eq!(rows.iter().map(|block| block.count).sum::<u32>(), 3);
    assert_eq!(plane.status(evaluation).await, EvaluationStatus::Queued);
}

#[tokio::test]
async fn loss_is_shown_within_thirty_seconds_and_by_the_servers_clock() {
    loss_is_shown_within_thirty_seconds_and_by_the_servers_clock_on(&Plane::start().await).await;
}

pub async fn loss_is_shown_within_thirty_seconds_and_by_the_servers_clock_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    assert_eq!(plane.get_cluster(cell.cluster).await["status"], "pending");
    let mut agent = cell.connect(plane).await;
    let before = plane.cluster_is(cell.cluster, "connected", |seen| seen["status"] == "connected").await;
    plane.server.advance(Duration::from_secs(20));
    agent.heartbeat(0).await;
    let after = plane.cluster_is(cell.cluster, "a later lastSeenAt", |seen| seen["lastSeenAt"] != before["lastSeenAt"]).await;
    assert_eq!(after["status"], "connected");
    // The connection stays open, and nothing is said.
    plane.server.advance(Duration::from_secs(30));
    let lost = plane.cluster_is(cell.cluster, "disconnected", |seen| seen["status"] == "disconnected").await;
    assert_eq!(agent.goodbye().await.code, "deadline_exceeded");
    assert!(lost["lastSeenAt"].as_str().unwrap() >= after["lastSeenAt"].as_str().unwrap());
    let _agent = cell.connect(plane).await;
    plane.cluster_is(cell.cluster, "connected again", |seen| seen["status"] == "connected").await;
}

#[tokio::test]
async fn an_archived_cluster_is_told_and_let_in_no_more() {
    an_archived_cluster_is_told_and_let_in_no_more_on(&Plane::start().await).await;
}

pub async fn an_archived_cluster_is_told_and_let_in_no_more_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let token = plane.token(cell.cluster).await;
    let mut agent = cell.connect(plane).await;
    let evaluation = plane.submit(3, json!({"cluster": cell.cluster.to_string()})).await;
    agent.assigned().await;
    let path = format!("/v1/clusters/{}/archive", cell.cluster);
    assert_eq!(plane.server.post(&plane.key, &path, &json!({})).await.ok()["status"], "archived");
    let goodbye = agent.goodbye().await;
    assert_eq!(goodbye.code, "cluster_archived");
    let refused = cell.connect_with(plane, cell.hello()).await.err().unwrap();
    assert_eq!(code(&refused), "cluster_archived");
    assert_eq!(code(&plane.join(&token, &uuid_text()).await.unwrap_err()), "cluster_archived");
    plane.becomes(evaluation, EvaluationStatus::Failed).await;
    plane.server.post(&plane.key, &format!("/v1/clusters/{}/drain", cell.cluster), &json!({})).await.refused("conflict");
    plane.cluster("lab").await;
    let listed = plane.server.get(&plane.key, "/v1/clusters").await.ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 1, "archived ones are shown on request");
    let all = plane.server.get(&plane.key, "/v1/clusters?archived=true").await.ok();
    assert_eq!(all["items"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_rotated_credential_is_handed_over_and_the_old_one_works_for_a_day() {
    a_rotated_credential_is_handed_over_and_the_old_one_works_for_a_day_on(&Plane::start().await).await;
}

pub async fn a_rotated_credential_is_handed_over_and_the_old_one_works_for_a_day_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(plane).await;
    let path = format!("/v1/clusters/{}/credentials", cell.cluster);
    let rotated = plane.server.post(&plane.key, &format!("{path}/rotate"), &json!({"purpose": "control"})).await.ok();
    assert_eq!(rotated["delivered"], true);
    match agent.next().await {
        Some(ToAgent::Rotate(v1::Rotate { credential: Some(credential) })) => assert_eq!(rotated["secret"], credential.secret),
        other => panic!("{other:?}"),
    }
    plane.server.post(&plane.key, &format!("{path}/rotate"), &json!({"purpose": "control"})).await.refused("conflict");
    plane.server.post(&plane.key, &format!("{path}/rotate"), &json!({"purpose": "relay"})).await.refused("conflict");
    plane.server.post(&plane.key, &format!("{path}/rotate"), &json!({"purpose": "root"})).await.refused("invalid_request");
    // An agent that missed it is told when it connects, until it uses the new one.
    let mut late = cell.connect(plane).await;
    assert!(matches!(late.next().await, Some(ToAgent::Rotate(_))));
    let new = Cell { control: rotated["secret"].as_str().unwrap().to_owned(), ..cell.clone() };
    let mut renewed = new.connect(plane).await;
    renewed.hears_nothing().await;
    let old = cell.connect(plane).await;
    drop(renewed);
    let listed = plane.server.get(&plane.key, &path).await.ok();
    let statuses: Vec<(&str, &str)> =
        listed["items"].as_array().unwrap().iter().map(|one| (one["purpose"].as_str().unwrap(), one["status"].as_str().unwrap())).collect();
    assert!(statuses.contains(&("control", "active")) && statuses.contains(&("control", "retiring")), "{statuses:?}");
    assert!(!listed.to_string().contains("rlm_"), "no value is listed");
    let mut old = old;
    plane.server.advance(Duration::from_secs(24 * 3600));
    let code_of_end = old.goodbye().await.code;
    assert!(["unauthenticated", "deadline_exceeded"].contains(&code_of_end.as_str()), "{code_of_end}");
    assert_eq!(code(&cell.connect_with(plane, cell.hello()).await.err().unwrap()), "unauthenticated");
    new.connect(plane).await;
    plane.server.post(&plane.key, &format!("{path}/rotate"), &json!({"purpose": "control"})).await.ok();
}

#[tokio::test]
async fn strangers_and_wrong_first_messages_are_refused() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    for wrong in ["", "rlm_cc_short", plane.key.as_str()] {
        let stranger = Cell { control: wrong.to_owned(), ..cell.clone() };
        let refused = stranger.connect_with(&plane, stranger.hello()).await.err().unwrap();
        assert_eq!(code(&refused), "unauthenticated", "{wrong}");
    }
    let no_executor = v1::Hello { executor: "cloud".to_owned(), ..cell.hello() };
    assert_eq!(code(&cell.connect_with(&plane, no_executor).await.err().unwrap()), "bad_request");
    let (out, queue) = mpsc::channel(4);
    let heartbeat = v1::AgentMessage { message: Some(FromAgent::Heartbeat(v1::Heartbeat::default())) };
    out.send(heartbeat).await.unwrap();
    let mut inbound = plane.client().await.session(authorized(ReceiverStream::new(queue), &cell.control)).await.unwrap().into_inner();
    assert_eq!(code(&inbound.message().await.unwrap_err()), "bad_request");
}

#[tokio::test]
async fn questions_are_answered_within_their_deadline() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let cells = std::sync::Arc::clone(&plane.server.state.cells);
    let (cluster, run) = (cell.cluster, RunId::generate());
    let ask = |deadline: u64| {
        let cells = std::sync::Arc::clone(&cells);
        async move { cells.logs(cluster, run, "model-0", 10, Duration::from_millis(deadline)).await }
    };
    assert_eq!(ask(1000).await.unwrap_err().code, Code::ClusterDisconnected);
    let mut agent = cell.connect(&plane).await;
    plane.cluster_is(cluster, "connected", |seen| seen["status"] == "connected").await;

    let asked = tokio::spawn(ask(30_000));
    let Some(ToAgent::LogRequest(request)) = agent.next().await else { panic!("no log request") };
    assert_eq!((request.run_id, request.component.as_str(), request.tail_lines), (run.to_string(), "model-0", 10));
    let file = v1::LogFile { component: "model-0".to_owned(), text: "hello".to_owned(), ..v1::LogFile::default() };
    let reply = v1::LogReply { request_id: request.request_id, files: vec![file.clone()], ..v1::LogReply::default() };
    agent.send(FromAgent::LogReply(reply)).await;
    assert_eq!(asked.await.unwrap().unwrap(), vec![file]);

    assert_eq!(ask(50).await.unwrap_err().code, Code::DeadlineExceeded);
    assert!(matches!(agent.next().await, Some(ToAgent::LogRequest(_))));

    let definition = serde_json::from_value(json!({
        "kind": "model", "id": "m", "image": null, "entrypoint": "p:M", "pythonPath": null, "python": null, "address": null, "params": {},
        "checkpoints": [], "executionHorizon": 1, "prefetchLead": 0, "workflowEdition": null, "resources": {"cpu": null, "memory": null,
        "gpu": 0, "gpuProduct": null, "shm": null}, "env": {}, "secretEnv": {}, "startupTimeoutMs": 1000, "replicas": 1
    }))
    .unwrap();
    let describing = {
        let cells = std::sync::Arc::clone(&cells);
        tokio::spawn(async move { cells.describe(cluster, &definition, Duration::from_secs(30)).await })
    };
    let Some(ToAgent::Describe(request)) = agent.next().await else { panic!("no describe") };
    assert_eq!(request.kind, "model");
    let reply = v1::DescribeReply { request_id: request.request_id, document_json: "{\"a\": 1}".to_owned(), failure: None };
    agent.send(FromAgent::DescribeReply(reply)).await;
    assert_eq!(describing.await.unwrap().unwrap(), Described::Document(json!({"a": 1})));

    let orphaned = tokio::spawn(ask(30_000));
    assert!(matches!(agent.next().await, Some(ToAgent::LogRequest(_))));
    drop(agent);
    assert_eq!(orphaned.await.unwrap().unwrap_err().code, Code::ClusterDisconnected, "who waits learns of the end at once");
}

#[tokio::test]
async fn logs_without_a_run_are_of_one_that_failed() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let models = json!([{"id": "bad", "address": "tcp://127.0.0.1:1"}, {"id": "good", "address": "tcp://127.0.0.1:3"}]);
    let evaluation = plane.submit(2, json!({"models": models})).await;
    let (bad, rows) = agent.assigned().await;
    let (good, _) = agent.assigned().await;
    assert_eq!((bad.model.id.as_str(), good.model.id.as_str()), ("bad", "good"));
    let path = format!("/v1/evaluations/{evaluation}/logs");
    let ask = async |agent: &mut Agent| {
        let answering = async {
            let request_id = loop {
                match agent.next().await {
                    Some(ToAgent::LogRequest(request)) => break request.request_id,
                    Some(_) => {}
                    None => panic!("no log request"),
                }
            };
            agent.send(FromAgent::LogReply(v1::LogReply { request_id, ..v1::LogReply::default() })).await;
        };
        tokio::join!(plane.server.get(&plane.key, &path), answering).0.ok()["run"].clone()
    };
    assert_eq!(ask(&mut agent).await, json!(good.run_id), "the one taken last, as long as none has failed");
    let failure = Failure::new(FailureCode::EnvironmentCrashed, "it ended").of("env-0-0");
    let episode = v1::Episode {
        row: rows[0].to_segment(0).first_row,
        seed: 100,
        outcome: Some(v1::episode::Outcome::Errored((&failure).into())),
        ..v1::Episode::default()
    };
    let payload = Some(v1::record::Payload::Episode(episode));
    agent.records(&[v1::Record { sequence: 1, run_id: bad.run_id.to_string(), generation: bad.generation, payload }]).await;
    agent.acknowledged(1).await;
    assert_eq!(ask(&mut agent).await, json!(bad.run_id));
}

#[tokio::test]
async fn a_heartbeat_shows_nodes_and_conditions() {
    a_heartbeat_shows_nodes_and_conditions_on(&Plane::start().await).await;
}

pub async fn a_heartbeat_shows_nodes_and_conditions_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let node =
        v1::Node { name: "n1".to_owned(), gpu_product: "H100".to_owned(), gpu_count: 8, memory_bytes: 1 << 40, ..v1::Node::default() };
    let hello = v1::Hello { inventory: Some(v1::Inventory { nodes: vec![node] }), ..cell.hello() };
    let agent = cell.connect_with(plane, hello).await.unwrap();
    let condition = v1::Condition {
        r#type: "SpoolHealthy".to_owned(),
        status: "False".to_owned(),
        reason: "Full".to_owned(),
        message: "no room".to_owned(),
    };
    agent
        .send(FromAgent::Heartbeat(v1::Heartbeat {
            conditions: vec![condition],
            spool_unacknowledged_records: 7,
            ..v1::Heartbeat::default()
        }))
        .await;
    let mut seen = plane.cluster_is(cell.cluster, "conditions", |seen| seen["unacknowledgedRecords"] == 7).await;
    let since = seen["conditions"][0].as_object_mut().and_then(|one| one.remove("since")).unwrap_or_default();
    assert!(since.as_str().is_some_and(|since| since.parse::<DateTime<Utc>>().is_ok()), "{since}");
    assert_eq!(seen["conditions"], json!([{"type": "SpoolHealthy", "status": "False", "reason": "Full", "message": "no room"}]));
    assert_eq!((&seen["nodes"][0]["gpuCount"], &seen["nodes"][0]["memoryBytes"]), (&json!(8), &json!(1_u64 << 40)));
    assert_eq!(seen["agentVersion"], "0.1.0");
}

#[tokio::test]
async fn a_lease_that_the_agent_does_not_name_is_given_out_anew() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    plane.submit(3, json!({})).await;
    let (run, _) = agent.assigned().await;
    drop(agent);
    let mut knows = cell.connect_with(&plane, v1::Hello { runs: vec![held(&run)], ..cell.hello() }).await.unwrap();
    assert_eq!(knows.welcome.runs, vec![held(&run)]);
    knows.hears_nothing().await;
    let mut forgot = cell.connect(&plane).await;
    assert!(forgot.welcome.runs.is_empty());
    let (again, _) = forgot.assigned().await;
    assert_eq!((again.run_id, again.generation), (run.run_id, run.generation + 1));
}

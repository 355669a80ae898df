//! Evaluations through REST and the agents' records: a lab with a cluster whose agent is the test itself.

mod definitions;
mod ingest;
mod large;
mod lifecycle;
mod probing;
mod results;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use reqwest::StatusCode;
use rlm_api::cluster::v1::{self, record::Payload};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::{ClusterId, EvaluationId, RunId};
use rlm_core::rows::Row;
use rlm_server::app::ingest as records;
use rlm_server::store::StoreError;
use rlm_server::store::clusters::{ClusterRow, SessionStart, Versions};
use serde_json::{Value, json};

use crate::common::{TestServer, TestUser};

pub const INSTANCE: &str = "agent-1";

/// An organization with an owner and a cluster.
pub struct Lab {
    pub server: TestServer,
    pub owner: TestUser,
    pub token: String,
    pub cluster: ClusterId,
    sequence: AtomicU64,
}

/// A run that the cluster holds.
#[derive(Debug, Clone)]
pub struct Leased {
    pub id: RunId,
    pub generation: u64,
    pub rows: Vec<Row>,
}

impl Lab {
    pub async fn start() -> Self {
        Self::on(TestServer::start().await).await
    }

    pub async fn on(server: TestServer) -> Self {
        let owner = server.organization("lab").await;
        let token = server.key(&owner).await;
        let cluster = cluster(&server, &owner, "cell").await;
        Self { server, owner, token, cluster, sequence: AtomicU64::new(0) }
    }

    pub async fn get(&self, path: &str) -> Value {
        self.server.get(&self.token, path).await.ok()
    }

    pub async fn submit(&self, request: &Value) -> EvaluationId {
        let answer = self.server.post(&self.token, "/v1/evaluations", request).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text);
        answer.body["id"].as_str().unwrap().parse().unwrap()
    }

    pub async fn status(&self, id: EvaluationId) -> String {
        self.get(&format!("/v1/evaluations/{id}")).await["status"].as_str().unwrap().to_owned()
    }

    /// Hands every queued run of the evaluation to the cluster, with the rows that are open.
    pub async fn lease(&self, id: EvaluationId) -> Vec<Leased> {
        let store = &self.server.state.store;
        let mut leased = Vec::new();
        for run in store.run_heads(id, 1_000).await.unwrap() {
            let mut write = store.write().await.unwrap();
            let generation = write.lease_run(run.id, self.cluster, self.server.state.clock.now_ms()).await.unwrap();
            write.commit().await.unwrap();
            let Some(generation) = generation else { continue };
            let open = store.open_segments(run.id).await.unwrap();
            let rows = open.iter().flat_map(|segment| (0..segment.count).map(|offset| segment.row(offset).unwrap())).collect();
            leased.push(Leased { id: run.id, generation, rows });
        }
        leased
    }

    /// Sends these payloads as the agent's next records.
    pub async fn send(&self, payloads: Vec<(RunId, u64, Payload)>) -> Result<u64, StoreError> {
        let first = self.sequence.fetch_add(payloads.len() as u64, Ordering::SeqCst) + 1;
        self.send_at(first, payloads).await
    }

    pub async fn send_at(&self, first: u64, payloads: Vec<(RunId, u64, Payload)>) -> Result<u64, StoreError> {
        let batch = numbered(first, payloads);
        records::records(&self.server.state, &self.cluster, INSTANCE, batch).await
    }

    /// Runs everything that is queued to its end; `score` says what each row brings.
    pub async fn play(&self, id: EvaluationId, score: impl Fn(&Row) -> v1::episode::Outcome) {
        for run in self.lease(id).await {
            let mut payloads = vec![(run.id, run.generation, status(v1::run_status::Phase::Running, None))];
            payloads.extend(run.rows.iter().map(|row| (run.id, run.generation, episode(row, 0, score(row)))));
            payloads.push((run.id, run.generation, status(v1::run_status::Phase::Finished, None)));
            self.send(payloads).await.unwrap();
        }
    }
}

pub fn numbered(first: u64, payloads: Vec<(RunId, u64, Payload)>) -> Vec<v1::Record> {
    (first..)
        .zip(payloads)
        .map(|(sequence, (run, generation, payload))| v1::Record { sequence, run_id: run.to_string(), generation, payload: Some(payload) })
        .collect()
}

/// A cluster whose agent is connected.
pub async fn cluster(server: &TestServer, owner: &TestUser, name: &str) -> ClusterId {
    let id = ClusterId::generate();
    let now_ms = server.state.clock.now_ms();
    let row = ClusterRow {
        id,
        organization: owner.organization,
        name: name.to_owned(),
        created_at: now_ms,
        created_by: owner.id.to_string(),
        archived_at: None,
        draining: false,
        last_seen_at: None,
        disconnected_at: None,
        session_generation: 0,
        instance_id: None,
        executor: None,
        kube_system_uid: None,
        agent_version: None,
        chart_version: None,
        kubernetes_version: None,
        nodes: Vec::new(),
        conditions: Vec::new(),
        unacknowledged_records: 0,
    };
    let mut write = server.state.store.write().await.unwrap();
    write.insert_cluster(&row).await.unwrap();
    let start = SessionStart {
        instance_id: INSTANCE.to_owned(),
        executor: "kubernetes".to_owned(),
        versions: Versions::default(),
        nodes: Vec::new(),
        now_ms,
    };
    write.begin_session(id, &start).await.unwrap();
    write.commit().await.unwrap();
    id
}

pub fn episode(row: &Row, attempt: u32, outcome: v1::episode::Outcome) -> Payload {
    Payload::Episode(v1::Episode {
        row: row.row,
        attempt,
        seed: row.seed,
        started_unix_ms: 1_700_000_000_000 + 1_000 * row.row as i64,
        ended_unix_ms: 1_700_000_000_500 + 1_000 * row.row as i64,
        outcome: Some(outcome),
    })
}

pub fn scored(reward: f64, success: Option<bool>) -> v1::episode::Outcome {
    v1::episode::Outcome::Scored(v1::Scored {
        reward,
        steps: 10,
        terminated: true,
        truncated: false,
        success,
        first_observation_sha256: vec![1, 2, 3].into(),
        conformance_warnings: 0,
    })
}

pub fn errored(message: &str) -> v1::episode::Outcome {
    v1::episode::Outcome::Errored((&failure(message)).into())
}

pub fn failure(message: &str) -> Failure {
    Failure::new(FailureCode::EnvironmentCrashed, message).of("env-0-0")
}

pub fn status(phase: v1::run_status::Phase, failure: Option<Failure>) -> Payload {
    Payload::RunStatus(v1::RunStatus {
        phase: phase.into(),
        failure: failure.as_ref().map(Into::into),
        at_unix_ms: 1_700_000_000_000,
        ..Default::default()
    })
}

/// What a row brings, from its seed and model alone.
pub fn deterministic(row: &Row) -> v1::episode::Outcome {
    let reward = (row.seed % 7) as f64 + 0.5 * f64::from(row.model);
    scored(reward, Some((row.seed + u64::from(row.model)).is_multiple_of(3)))
}

/// Two models, one environment with two tasks, `episodes` each: 4 x `episodes` rows.
pub fn request(name: &str, episodes: u64) -> Value {
    json!({
        "name": name,
        "tags": {"suite": "smoke"},
        "models": [{"id": "a", "image": "registry.example.com/a:1"}, {"id": "b", "image": "registry.example.com/b:1"}],
        "environments": [{"id": "env", "image": "registry.example.com/env:1"}],
        "tasks": [
            {"env": "env", "taskId": "walk/0", "params": {"level": 0}, "episodes": episodes, "seed": 100, "metadata": {"benchmark": "walk"}},
            {"env": "env", "taskId": "walk/1", "params": {"level": 1}, "episodes": episodes, "seed": 200, "success": {"metric": "reward", "atLeast": 3}},
        ],
    })
}

/// Outcome counts as the database has them, beside the counters of the evaluation.
pub async fn counts(lab: &Lab, id: EvaluationId) -> BTreeMap<&'static str, (u64, u64)> {
    let head = lab.server.state.store.evaluation(lab.owner.organization, id).await.unwrap().unwrap();
    let sums = lab.server.state.store.cell_sums(id).await.unwrap();
    BTreeMap::from([
        ("scored", (head.rows_scored, sums.iter().map(|sum| sum.scored).sum())),
        ("errored", (head.rows_errored, sums.iter().map(|sum| sum.errored).sum())),
    ])
}

pub async fn export(lab: &Lab, id: EvaluationId, format: &str) -> String {
    let answer = lab.server.get(&lab.token, &format!("/v1/evaluations/{id}/export?format={format}")).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    answer.text
}

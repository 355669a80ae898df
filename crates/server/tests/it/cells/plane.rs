//! A control plane with its background work, and agents that speak the real protocol to it and do nothing by themselves.

use std::path::Path;
use std::time::Duration;

use reqwest::Method;
use rlm_api::cluster::v1::agent_message::Message as FromAgent;
use rlm_api::cluster::v1::cluster_service_client::ClusterServiceClient;
use rlm_api::cluster::v1::record::Payload;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_api::cluster::v1::{self, AgentMessage, Record};
use rlm_core::evaluation::RunSpec;
use rlm_core::ids::{ClusterId, EvaluationId};
use rlm_core::run::EvaluationStatus;
use rlm_server::app::access::{Caller, Credential, Role};
use rlm_server::app::evaluations;
use rlm_server::config::Config;
use rlm_server::store::outcomes::OutcomeFilter;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, Streaming};

use crate::common::{TestServer, TestUser, uuid_text};

/// Longest wait for anything that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `look` gives something; says what it saw last.
pub async fn until<T, F, Fut>(what: &str, mut look: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let started = std::time::Instant::now();
    loop {
        match look().await {
            Ok(found) => return found,
            Err(seen) => assert!(started.elapsed() < PATIENCE, "waited for {what}; seen last: {seen}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub struct Plane {
    pub server: TestServer,
    pub owner: TestUser,
    pub key: String,
    stop: CancellationToken,
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Plane {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(adjust: impl FnOnce(&mut Config)) -> Self {
        let server = TestServer::with(adjust).await;
        let owner = server.organization(&format!("lab {}", uuid_text())).await;
        let key = server.key(&owner).await;
        Self::run(server, owner, key)
    }

    fn run(server: TestServer, owner: TestUser, key: String) -> Self {
        let stop = CancellationToken::new();
        server.state.start_tasks(&stop);
        Self { server, owner, key, stop }
    }

    /// A control plane on the state that another one left in `dir`, after it was down for `downtime`.
    pub async fn again(dir: &Path, owner: &TestUser, key: &str, downtime: Duration) -> Self {
        let server = TestServer::with(|config| in_dir(config, dir)).await;
        server.advance(downtime);
        Self::run(server, owner.clone(), key.to_owned())
    }

    /// Ends it as a signal would: sessions end, the state stays.
    pub async fn stop(self) -> (TestUser, String) {
        self.stop.cancel();
        let cells = std::sync::Arc::clone(&self.server.state.cells);
        until("sessions to end", || async { if cells.connected().is_empty() { Ok(()) } else { Err(format!("{:?}", cells.connected())) } })
            .await;
        self.server.state.store.close().await;
        (self.owner.clone(), self.key.clone())
    }

    pub async fn cluster(&self, name: &str) -> ClusterId {
        let created = self.server.post(&self.key, "/v1/clusters", &json!({"name": name})).await.ok();
        created["id"].as_str().unwrap().parse().unwrap()
    }

    /// A new join token of the cluster.
    pub async fn token(&self, cluster: ClusterId) -> String {
        let path = format!("/v1/clusters/{cluster}/join-tokens");
        self.server.send(self.server.request(Method::POST, &path).bearer_auth(&self.key)).await.ok()["token"].as_str().unwrap().to_owned()
    }

    pub async fn client(&self) -> ClusterServiceClient<tonic::transport::Channel> {
        ClusterServiceClient::connect(self.server.url.clone()).await.unwrap()
    }

    pub async fn join(&self, token: &str, nonce: &str) -> Result<v1::JoinResponse, Status> {
        self.join_as(token, nonce, "", &["control", "pull"]).await
    }

    pub async fn join_as(&self, token: &str, nonce: &str, kube_system_uid: &str, purposes: &[&str]) -> Result<v1::JoinResponse, Status> {
        let message = v1::JoinRequest {
            nonce: nonce.to_owned(),
            kube_system_uid: kube_system_uid.to_owned(),
            versions: Some(v1::Versions { agent: "0.1.0".to_owned(), ..v1::Versions::default() }),
            purposes: purposes.iter().map(|&purpose| purpose.to_owned()).collect(),
        };
        Ok(self.client().await.join(authorized(message, token)).await?.into_inner())
    }

    /// A registered cluster whose agent has joined.
    pub async fn joined(&self, name: &str) -> Cell {
        let cluster = self.cluster(name).await;
        let joined = self.join(&self.token(cluster).await, &uuid_text()).await.unwrap();
        Cell { cluster, control: secret(&joined, "control"), instance: uuid_text(), executor: "process".to_owned() }
    }

    /// Waits until the loss of the agent is noted: from then on its time runs.
    pub async fn lost(&self, cluster: ClusterId) {
        until("the loss to be noted", || async {
            let row = self.server.state.store.cluster(cluster).await.unwrap().unwrap();
            if row.disconnected_at.is_some() { Ok(()) } else { Err(format!("{row:?}")) }
        })
        .await;
        assert_eq!(self.get_cluster(cluster).await["status"], "disconnected");
    }

    /// Waits until the server has noticed that the agent's connection is gone.
    pub async fn session_ended(&self, cluster: ClusterId) {
        until("the session to end", || async {
            if self.server.state.cells.is_connected(cluster) { Err("it is there".to_owned()) } else { Ok(()) }
        })
        .await;
    }

    pub async fn get_cluster(&self, cluster: ClusterId) -> Value {
        self.server.get(&self.key, &format!("/v1/clusters/{cluster}")).await.ok()
    }

    pub async fn cluster_is(&self, cluster: ClusterId, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        until(what, || async {
            let seen = self.get_cluster(cluster).await;
            if holds(&seen) { Ok(seen) } else { Err(seen.to_string()) }
        })
        .await
    }

    pub fn caller(&self) -> Caller {
        Caller {
            user_id: self.owner.id,
            organization_id: self.owner.organization,
            role: Role::Owner,
            scopes: Role::Owner.scopes(),
            actor: format!("user:{}", self.owner.id),
            remote_address: String::new(),
            credential: Credential::ApiKey { id: String::new() },
        }
    }

    /// One model, one environment, `episodes` rows from seed 100, at addresses that nothing listens on.
    pub async fn submit(&self, episodes: u64, more: Value) -> EvaluationId {
        let mut request = json!({
            "name": "test",
            "models": [{"id": "m", "address": "tcp://127.0.0.1:1"}],
            "environments": [{"id": "e", "address": "tcp://127.0.0.1:2"}],
            "tasks": [{"env": "e", "taskId": "t/0", "params": {}, "episodes": episodes, "seed": 100}],
        });
        for (key, value) in more.as_object().unwrap() {
            request[key] = value.clone();
        }
        let created = evaluations::create(&self.server.state, &self.caller(), request, None).await.unwrap();
        created.answer.id.parse().unwrap()
    }

    pub async fn cancel(&self, evaluation: EvaluationId) {
        evaluations::cancel(&self.server.state, &self.caller(), &evaluation.to_string()).await.unwrap();
    }

    pub async fn status(&self, evaluation: EvaluationId) -> EvaluationStatus {
        self.server.state.store.evaluation(self.owner.organization, evaluation).await.unwrap().unwrap().status
    }

    pub async fn becomes(&self, evaluation: EvaluationId, status: EvaluationStatus) {
        until(&format!("the evaluation to be {}", status.as_str()), || async {
            let head = self.server.state.store.evaluation(self.owner.organization, evaluation).await.unwrap().unwrap();
            let runs = self.server.state.store.run_heads(evaluation, 10).await.unwrap();
            if head.status == status { Ok(()) } else { Err(format!("{head:?} {runs:?}")) }
        })
        .await;
    }

    /// (row, seed, reward) of every scored row.
    pub async fn scores(&self, evaluation: EvaluationId) -> Vec<(u64, u64, f64)> {
        use rlm_server::store::outcomes::RowOutcome;
        let rows =
            self.server.state.store.outcomes(evaluation, (0, 1_000_000), (None, None), OutcomeFilter::Scored, 1_000_000).await.unwrap();
        rows.into_iter()
            .filter_map(|row| match row.result {
                RowOutcome::Scored { reward, .. } => Some((row.row, row.seed, reward)),
                RowOutcome::Errored(_) => None,
            })
            .collect()
    }
}

/// Puts a configuration's state into `dir`.
pub fn in_dir(config: &mut Config, dir: &Path) {
    config.state_dir = dir.to_owned();
    config.database_url = format!("sqlite://{}", dir.join("test.db").display());
}

pub fn secret(joined: &v1::JoinResponse, purpose: &str) -> String {
    joined.credentials.iter().find(|one| one.purpose == purpose).unwrap().secret.clone()
}

pub fn authorized<T>(message: T, secret: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse().unwrap());
    request
}

/// The stable code of a refusal.
pub fn code(status: &Status) -> String {
    status.metadata().get("rlmesh-code").map(|code| code.to_str().unwrap().to_owned()).unwrap_or_default()
}

/// A cluster whose agent has joined, and what that agent keeps.
#[derive(Debug, Clone)]
pub struct Cell {
    pub cluster: ClusterId,
    pub control: String,
    pub instance: String,
    pub executor: String,
}

impl Cell {
    pub fn hello(&self) -> v1::Hello {
        v1::Hello {
            instance_id: self.instance.clone(),
            executor: self.executor.clone(),
            versions: Some(v1::Versions { agent: "0.1.0".to_owned(), ..v1::Versions::default() }),
            ..v1::Hello::default()
        }
    }

    pub async fn connect(&self, plane: &Plane) -> Agent {
        self.connect_with(plane, self.hello()).await.unwrap()
    }

    pub async fn connect_with(&self, plane: &Plane, hello: v1::Hello) -> Result<Agent, Status> {
        let (out, queue) = mpsc::channel(1024);
        out.send(AgentMessage { message: Some(FromAgent::Hello(hello)) }).await.unwrap();
        let mut inbound = plane.client().await.session(authorized(ReceiverStream::new(queue), &self.control)).await?.into_inner();
        match timeout(PATIENCE, inbound.message()).await.unwrap()? {
            Some(v1::ServerMessage { message: Some(ToAgent::Welcome(welcome)) }) => Ok(Agent { out, inbound, welcome }),
            other => panic!("instead of a welcome: {other:?}"),
        }
    }
}

pub struct Agent {
    out: mpsc::Sender<AgentMessage>,
    inbound: Streaming<v1::ServerMessage>,
    pub welcome: v1::Welcome,
}

impl Agent {
    pub async fn send(&self, message: FromAgent) {
        self.out.send(AgentMessage { message: Some(message) }).await.unwrap();
    }

    pub async fn records(&self, records: &[Record]) {
        self.send(FromAgent::Records(v1::Records { records: records.to_vec() })).await;
    }

    pub async fn heartbeat(&self, unacknowledged: u64) {
        self.send(FromAgent::Heartbeat(v1::Heartbeat { spool_unacknowledged_records: unacknowledged, ..v1::Heartbeat::default() })).await;
    }

    /// The next message; None at the end of the session.
    pub async fn next(&mut self) -> Option<ToAgent> {
        let message = timeout(PATIENCE, self.inbound.message()).await.expect("a message in time");
        message.ok().flatten().and_then(|message| message.message)
    }

    pub async fn assigned(&mut self) -> (RunSpec, Vec<v1::RowBlock>) {
        match self.next().await {
            Some(ToAgent::Assign(assign)) => (serde_json::from_str(&assign.run_json).unwrap(), assign.rows),
            other => panic!("instead of an assignment: {other:?}"),
        }
    }

    /// Reads acknowledgements up to `durable`.
    pub async fn acknowledged(&mut self, durable: u64) {
        loop {
            match self.next().await {
                Some(ToAgent::Ack(ack)) if ack.durable >= durable => {
                    assert_eq!(ack.durable, durable);
                    return;
                }
                Some(ToAgent::Ack(_)) => {}
                other => panic!("instead of an acknowledgement: {other:?}"),
            }
        }
    }

    pub async fn goodbye(&mut self) -> v1::Goodbye {
        loop {
            match self.next().await {
                Some(ToAgent::Goodbye(goodbye)) => {
                    assert!(self.next().await.is_none(), "nothing follows a goodbye");
                    return goodbye;
                }
                Some(_) => {}
                None => panic!("the session ended without a goodbye"),
            }
        }
    }

    /// Whether nothing arrives for a while in which it would have.
    pub async fn hears_nothing(&mut self) {
        let heard = timeout(Duration::from_millis(400), self.inbound.message()).await;
        assert!(heard.is_err(), "{heard:?}");
    }
}

/// The records of an agent, in order from 1.
#[derive(Debug, Clone, Default)]
pub struct Spool(pub Vec<Record>);

impl Spool {
    fn push(&mut self, run: &RunSpec, payload: Payload) {
        let sequence = self.0.len() as u64 + 1;
        self.0.push(Record { sequence, run_id: run.run_id.to_string(), generation: run.generation, payload: Some(payload) });
    }

    pub fn status(&mut self, run: &RunSpec, phase: Phase) {
        self.push(run, Payload::RunStatus(v1::RunStatus { phase: phase.into(), at_unix_ms: 1, ..v1::RunStatus::default() }));
    }

    /// A score for each of the rows `from..to` of these blocks; the reward follows from the seed.
    pub fn scores(&mut self, run: &RunSpec, rows: &[v1::RowBlock], from: u64, to: u64) {
        for block in rows {
            let segment = block.to_segment(0);
            for row in (0..segment.count).map(|offset| segment.row(offset).unwrap()).filter(|row| (from..to).contains(&row.row)) {
                let scored = v1::Scored { reward: row.seed as f64 / 2.0, steps: 10, success: Some(true), ..v1::Scored::default() };
                self.push(
                    run,
                    Payload::Episode(v1::Episode {
                        row: row.row,
                        attempt: 0,
                        seed: row.seed,
                        outcome: Some(v1::episode::Outcome::Scored(scored)),
                        started_unix_ms: 1,
                        ended_unix_ms: 2,
                    }),
                );
            }
        }
    }

    pub fn last(&self) -> u64 {
        self.0.len() as u64
    }

    pub fn after(&self, durable: u64) -> &[Record] {
        &self.0[usize::try_from(durable).unwrap()..]
    }
}

pub fn expected(rows: std::ops::Range<u64>) -> Vec<(u64, u64, f64)> {
    rows.map(|row| (row, 100 + row, (100 + row) as f64 / 2.0)).collect()
}

pub fn held(run: &RunSpec) -> v1::RunRef {
    v1::RunRef { run_id: run.run_id.to_string(), generation: run.generation }
}

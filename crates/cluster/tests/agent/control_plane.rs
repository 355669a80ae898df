//! A control plane in this process: just enough of the protocol, with switches for what can go wrong.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::agent_message::Message as FromAgent;
use rlm_api::cluster::v1::cluster_service_server::{ClusterService, ClusterServiceServer};
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_core::error::Code;
use rlm_core::tokens::{Secret, SecretKind};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

pub struct State {
    pub token: Secret,
    pub nonce: Option<String>,
    pub control: Vec<Secret>,
    /// Joins to fail before one succeeds.
    pub failing_joins: u32,
    pub joins: u32,
    pub epoch: String,
    /// Records by (instance, sequence).
    pub records: BTreeMap<(String, u64), v1::Record>,
    pub durable: BTreeMap<String, u64>,
    pub assigned: BTreeMap<String, v1::Assign>,
    /// Runs named in the next welcome.
    pub leased: Vec<v1::RunRef>,
    pub hellos: Vec<v1::Hello>,
    pub heartbeats: Vec<v1::Heartbeat>,
    pub replies: Vec<v1::AgentMessage>,
    /// Records are stored and not acknowledged.
    pub lose_acks: bool,
    pub sessions: u64,
    live: Option<(mpsc::Sender<Result<v1::ServerMessage, Status>>, CancellationToken)>,
}

#[derive(Clone)]
pub struct ControlPlane {
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<u64>>,
}

pub struct Running {
    pub port: u16,
    pub stop: CancellationToken,
}

impl ControlPlane {
    pub fn new() -> Self {
        let state = State {
            token: Secret::generate(SecretKind::JoinToken),
            nonce: None,
            control: vec![Secret::generate(SecretKind::ControlCredential)],
            failing_joins: 0,
            joins: 0,
            epoch: "epoch-1".to_owned(),
            records: BTreeMap::new(),
            durable: BTreeMap::new(),
            assigned: BTreeMap::new(),
            leased: Vec::new(),
            hellos: Vec::new(),
            heartbeats: Vec::new(),
            replies: Vec::new(),
            lose_acks: false,
            sessions: 0,
            live: None,
        };
        Self { state: Arc::new(Mutex::new(state)), changed: Arc::new(watch::channel(0).0) }
    }

    pub fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let value = act(&mut self.state.lock().unwrap());
        self.changed.send_modify(|count| *count += 1);
        value
    }

    /// Serves on `port`, 0 for any.
    pub async fn serve(&self, port: u16) -> Running {
        let mut tries = 0;
        let listener = loop {
            match tokio::net::TcpListener::bind(("127.0.0.1", port)).await {
                Ok(listener) => break listener,
                Err(error) if tries > 50 => panic!("{error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
            tries += 1;
        };
        let port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        let ended = stop.clone();
        let service = ClusterServiceServer::new(self.clone());
        tokio::spawn(async move {
            let serve = tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener));
            tokio::select! { _ = serve => {}, () = ended.cancelled() => {} }
        });
        Running { port, stop }
    }

    /// Waits until `condition` holds; a wait that fails says what it saw last.
    pub async fn wait(&self, what: &str, condition: impl Fn(&State) -> bool) {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if condition(&self.state.lock().unwrap()) {
                    return;
                }
                let _ = tokio::time::timeout(Duration::from_millis(200), changed.changed()).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(60), wait).await.is_err() {
            let state = self.state.lock().unwrap();
            let statuses: Vec<_> =
                statuses(&state).into_iter().map(|status| (status.phase(), status.waiting_cause, status.failure)).collect();
            panic!(
                "{what}: not within 60 s. joins {}, sessions {}, records {}, statuses {statuses:#?}, hellos {:?}",
                state.joins,
                state.sessions,
                state.records.len(),
                state.hellos.last()
            );
        }
    }

    pub fn send(&self, message: ToAgent) {
        let live = self.with(|state| state.live.as_ref().map(|(sender, _)| sender.clone()));
        live.expect("a live session").try_send(Ok(v1::ServerMessage { message: Some(message) })).unwrap();
    }

    /// Ends the live session without a word.
    pub fn cut(&self) {
        if let Some((_, ended)) = self.with(|state| state.live.take()) {
            ended.cancel();
        }
    }

    /// Leases the run to the agent and assigns it, now or at its next session.
    pub fn assign(&self, assign: v1::Assign, run: v1::RunRef) {
        let live = self.with(|state| {
            state.leased.push(run.clone());
            state.assigned.insert(run.run_id.clone(), assign.clone());
            state.live.is_some()
        });
        if live {
            self.send(ToAgent::Assign(assign));
        }
    }
}

pub fn statuses(state: &State) -> Vec<v1::RunStatus> {
    let status = |record: &v1::Record| match &record.payload {
        Some(v1::record::Payload::RunStatus(status)) => Some(status.clone()),
        _ => None,
    };
    state.records.values().filter_map(status).collect()
}

pub fn phases(state: &State) -> Vec<v1::run_status::Phase> {
    statuses(state).iter().map(v1::RunStatus::phase).collect()
}

/// (row, attempt, reward) of every scored episode, each key once.
pub fn scored(state: &State) -> BTreeMap<(u64, u32), f64> {
    let score = |record: &v1::Record| match &record.payload {
        Some(v1::record::Payload::Episode(episode)) => match &episode.outcome {
            Some(v1::episode::Outcome::Scored(scored)) => Some(((episode.row, episode.attempt), scored.reward)),
            _ => None,
        },
        _ => None,
    };
    state.records.values().filter_map(score).collect()
}

fn refused(code: Code, message: &str) -> Status {
    let mut status = Status::new(tonic::Code::from_i32(code.grpc()), message);
    status.metadata_mut().insert("rlmesh-code", code.as_str().parse().unwrap());
    status
}

fn bearer<T>(request: &Request<T>) -> Result<Secret, Status> {
    let text = request.metadata().get("authorization").and_then(|value| value.to_str().ok()).unwrap_or("");
    Secret::parse(text.strip_prefix("Bearer ").unwrap_or("")).map_err(|_| refused(Code::Unauthenticated, "no credential"))
}

#[tonic::async_trait]
impl ClusterService for ControlPlane {
    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
        let token = bearer(&request)?;
        let nonce = request.into_inner().nonce;
        self.with(|state| {
            state.joins += 1;
            if token != state.token {
                return Err(refused(Code::TokenUnknown, "this join token is not known"));
            }
            if *state.nonce.get_or_insert_with(|| nonce.clone()) != nonce {
                return Err(refused(Code::TokenUsed, "this join token was used by another agent"));
            }
            // The exchange has happened, and its answer is lost.
            if state.failing_joins > 0 {
                state.failing_joins -= 1;
                return Err(Status::unavailable("going down"));
            }
            let secret = state.control.last().unwrap().expose().to_owned();
            let credentials = vec![v1::Credential { purpose: "control".to_owned(), id: "cred_1".to_owned(), secret }];
            Ok(Response::new(v1::JoinResponse { cluster_id: "cl_test".to_owned(), credentials, docker_config_json: String::new() }))
        })
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::ServerMessage, Status>> + Send>>;

    async fn session(&self, request: Request<Streaming<v1::AgentMessage>>) -> Result<Response<Self::SessionStream>, Status> {
        let credential = bearer(&request)?;
        if !self.with(|state| state.control.contains(&credential)) {
            return Err(refused(Code::Unauthenticated, "this credential is not known"));
        }
        let mut incoming = request.into_inner();
        let first = incoming.message().await?.and_then(|first| first.message);
        let Some(FromAgent::Hello(hello)) = first else { return Err(Status::invalid_argument("hello first")) };
        let (sender, receiver) = mpsc::channel(64);
        let ended = CancellationToken::new();
        let instance = hello.instance_id.clone();
        self.with(|state| {
            state.sessions += 1;
            if let Some((_, older)) = state.live.take() {
                older.cancel();
            }
            let known: Vec<String> = hello.runs.iter().map(|run| run.run_id.clone()).collect();
            let welcome = v1::Welcome {
                cluster_id: "cl_test".to_owned(),
                epoch: state.epoch.clone(),
                durable: state.durable.get(&instance).copied().unwrap_or(0),
                session_generation: state.sessions,
                draining: false,
                runs: state.leased.clone(),
            };
            sender.try_send(Ok(v1::ServerMessage { message: Some(ToAgent::Welcome(welcome)) })).unwrap();
            for (_, assign) in state.assigned.iter().filter(|(run, _)| !known.contains(run)) {
                sender.try_send(Ok(v1::ServerMessage { message: Some(ToAgent::Assign(assign.clone())) })).unwrap();
            }
            state.hellos.push(hello);
            state.live = Some((sender.clone(), ended.clone()));
        });
        let plane = self.clone();
        let task_ended = ended.clone();
        tokio::spawn(async move {
            loop {
                let message = tokio::select! {
                    () = task_ended.cancelled() => return,
                    message = incoming.message() => message,
                };
                let Ok(Some(v1::AgentMessage { message: Some(message) })) = message else { return };
                let ack = plane.with(|state| match message {
                    FromAgent::Records(records) => {
                        let durable = state.durable.entry(instance.clone()).or_insert(0);
                        for record in records.records {
                            assert!(record.sequence <= *durable + 1, "a gap before {}", record.sequence);
                            *durable = record.sequence.max(*durable);
                            state.records.entry((instance.clone(), record.sequence)).or_insert(record);
                        }
                        (!state.lose_acks).then_some(*durable)
                    }
                    FromAgent::Heartbeat(heartbeat) => {
                        state.heartbeats.push(heartbeat);
                        None
                    }
                    other => {
                        state.replies.push(v1::AgentMessage { message: Some(other) });
                        None
                    }
                });
                if let Some(durable) = ack {
                    let _ = sender.send(Ok(v1::ServerMessage { message: Some(ToAgent::Ack(v1::Ack { durable })) })).await;
                }
            }
        });
        let outgoing = ReceiverStream::new(receiver);
        let stream = async_until(outgoing, ended);
        Ok(Response::new(Box::pin(stream)))
    }
}

/// The stream until the token is cancelled.
fn async_until<T: Send + 'static>(
    stream: impl Stream<Item = T> + Send + 'static,
    ended: CancellationToken,
) -> impl Stream<Item = T> + Send {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut stream = std::pin::pin!(stream);
        loop {
            tokio::select! {
                () = ended.cancelled() => return,
                item = stream.next() => match item {
                    Some(item) => if sender.send(item).await.is_err() { return },
                    None => return,
                },
            }
        }
    });
    ReceiverStream::new(receiver)
}

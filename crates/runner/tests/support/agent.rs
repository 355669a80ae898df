//! A stand-in agent: starts stand-in models and environments as the runner asks, keeps what it reports, and can be broken
//! in every way at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rlm_api::cluster::v1::agent_command::Command;
use rlm_api::cluster::v1::component::Phase;
use rlm_api::cluster::v1::runner_message::Message;
use rlm_api::cluster::v1::runner_service_server::{RunnerService, RunnerServiceServer};
use rlm_api::cluster::v1::*;
use rlm_core::evaluation::{Binding, EnvironmentDefinition, Limits, ModelDefinition, Recording, Resources, RunSpec, RunTask};
use rlm_core::failure::{Failure as DomainFailure, FailureCode};
use rlm_core::ids::{EvaluationId, RunId};
use rlm_runner::{Address, Identity, Start, Token, Tuning};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::Process;
use super::env::{EnvSettings, StubEnv};
use super::model::{ModelSettings, StubModel};

pub const TOKEN: &str = "one-time token";

pub fn model_definition() -> ModelDefinition {
    ModelDefinition {
        id: "model".into(),
        image: None,
        entrypoint: Some("stub".into()),
        python_path: None,
        python: None,
        address: None,
        params: serde_json::Map::new(),
        checkpoints: Vec::new(),
        execution_horizon: 1,
        prefetch_lead: 0,
        workflow_edition: None,
        resources: Resources::default(),
        env: BTreeMap::new(),
        secret_env: BTreeMap::new(),
        startup_timeout_ms: 60_000,
        replicas: 1,
    }
}

pub fn env_definition(lanes_per_pod: Option<u32>) -> EnvironmentDefinition {
    EnvironmentDefinition {
        id: "env".into(),
        image: None,
        entrypoint: Some("stub".into()),
        python_path: None,
        python: None,
        address: None,
        params: serde_json::Map::new(),
        resources: Resources::default(),
        share_model_gpu: false,
        lanes_per_pod,
        env: BTreeMap::new(),
        secret_env: BTreeMap::new(),
        startup_timeout_ms: 60_000,
    }
}

pub fn task(binding: u32, max_episode_steps: Option<u32>) -> RunTask {
    RunTask {
        task_index: binding,
        task_id: format!("task/{binding}"),
        binding,
        max_episode_steps,
        max_episode_seconds: None,
        instruction: None,
        success: None,
    }
}

pub fn run_spec(lanes: u32, lanes_per_pod: Option<u32>, tasks: Vec<RunTask>) -> RunSpec {
    let bindings: BTreeSet<u32> = tasks.iter().map(|task| task.binding).collect();
    RunSpec {
        run_id: RunId::generate(),
        evaluation_id: EvaluationId::generate(),
        generation: 1,
        model: model_definition(),
        environment: env_definition(lanes_per_pod),
        bindings: bindings.into_iter().map(|index| Binding { index, params: serde_json::Map::new() }).collect(),
        tasks,
        lanes,
        limits: Limits { progress_timeout_ms: 60_000, ..Limits::default() },
        recording: Recording::default(),
    }
}

pub fn block(first_row: u64, count: u32, task: u32, seed: u64) -> RowBlock {
    RowBlock { first_row, count, task, seed, seeds: Vec::new(), trial_index: 5 }
}

type MakeEnv = Arc<dyn Fn(u32, u32) -> EnvSettings + Send + Sync>;

enum Running {
    Process(Process),
    /// Started elsewhere.
    Given(String),
}

struct Held {
    attempt: u32,
    running: Option<Running>,
    lanes: u32,
}

#[derive(Default)]
struct Inner {
    components: BTreeMap<String, Held>,
    stream: Option<mpsc::Sender<Result<AgentCommand, Status>>>,
    episodes: Vec<Episode>,
    sequences: BTreeMap<u64, Vec<u8>>,
    done: Option<Done>,
    pub acquired: Vec<AcquireBinding>,
    released: Vec<u32>,
    restarts: Vec<RestartComponent>,
    provenance: Option<String>,
    metrics: Option<String>,
    attaches: u32,
    withhold_acks: bool,
    attempt_base: u32,
    starting_fails: BTreeMap<String, FailureCode>,
}

struct Shared {
    spec: RunSpec,
    rows: Vec<RowBlock>,
    folder: PathBuf,
    make_env: Mutex<MakeEnv>,
    make_model: Mutex<ModelSettings>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// The agent; clones are handles on the same one.
#[derive(Clone)]
pub struct Agent {
    shared: Arc<Shared>,
    server: Arc<Mutex<Option<Process>>>,
    _folder: Arc<tempfile::TempDir>,
}

impl Agent {
    pub fn new(
        spec: RunSpec,
        rows: Vec<RowBlock>,
        make_env: impl Fn(u32, u32) -> EnvSettings + Send + Sync + 'static,
        model: ModelSettings,
    ) -> Self {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let shared = Shared {
            spec,
            rows,
            folder: folder.path().to_owned(),
            make_env: Mutex::new(Arc::new(make_env)),
            make_model: Mutex::new(model),
            inner: Mutex::default(),
            changed: Condvar::new(),
        };
        let agent = Self { shared: Arc::new(shared), server: Arc::default(), _folder: folder };
        agent.serve();
        agent
    }

    fn path(&self) -> PathBuf {
        self.shared.folder.join("agent.sock")
    }

    /// Starts to listen (again).
    pub fn serve(&self) {
        let service = RunnerServiceServer::new(Service(Arc::clone(&self.shared)));
        let mut server = self.server.lock().unwrap();
        *server = None;
        *server = Some(Process::serve(&self.path(), tonic::service::Routes::new(service)));
    }

    /// The agent's process is killed; its spool, and what it started, stay.
    pub fn kill_server(&self) {
        *self.server.lock().unwrap() = None;
        self.shared.inner.lock().unwrap().stream = None;
    }

    pub fn break_stream(&self) {
        self.shared.inner.lock().unwrap().stream = None;
    }

    pub fn start(&self, tuning: Tuning) -> Start {
        Start {
            agent: Address::parse(&self.socket()).unwrap(),
            identity: Identity { run_id: self.shared.spec.run_id.to_string(), token: Token::Once(TOKEN.to_owned()), pin: None },
            tuning,
            cores: 2,
        }
    }

    /// Runs the runner to its end, on its own thread as in real life.
    pub fn run(&self, tuning: Tuning) -> anyhow::Result<()> {
        self.run_until(tuning, CancellationToken::new())
    }

    pub fn run_until(&self, tuning: Tuning, stop: CancellationToken) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let start = self.start(tuning);
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(120), rlm_runner::run(start, stop)).await.expect("the run came to no end")
        })
    }

    /// The next runner to attach is a new process: its sequences and attempts are its own.
    pub fn expect_new_runner(&self) {
        let mut inner = self.shared.inner.lock().unwrap();
        inner.attempt_base += 1000;
        inner.sequences.clear();
        inner.stream = None;
    }

    pub fn socket(&self) -> String {
        format!("unix://{}", self.path().display())
    }

    pub fn run_id(&self) -> String {
        self.shared.spec.run_id.to_string()
    }

    /// Uses servers that run already instead of stand-ins.
    pub fn give(&self, component: &str, address: &str) {
        let held = Held { attempt: 1, running: Some(Running::Given(address.to_owned())), lanes: 0 };
        self.shared.inner.lock().unwrap().components.insert(component.to_owned(), held);
    }

    /// The component's start fails for good.
    pub fn fail_start(&self, component: &str, code: FailureCode) {
        self.shared.inner.lock().unwrap().starting_fails.insert(component.to_owned(), code);
    }

    pub fn withhold_acks(&self, withhold: bool) {
        self.shared.inner.lock().unwrap().withhold_acks = withhold;
    }

    /// The process ends in this way; the next attempt starts.
    pub fn end(&self, component: &str, code: FailureCode) {
        self.shared.end(component, code);
    }

    /// Breaks the process's connections and starts it again at once, without a word about its end for a while.
    pub fn cancel(&self, reason: &str) {
        let inner = self.shared.inner.lock().unwrap();
        inner.say(Command::Cancel(CancelRun { reason: reason.to_owned() }));
    }

    pub fn components(&self) -> Vec<String> {
        self.shared.inner.lock().unwrap().components.keys().cloned().collect()
    }

    pub fn episodes(&self) -> Vec<Episode> {
        self.shared.inner.lock().unwrap().episodes.clone()
    }

    pub fn done(&self) -> Option<Done> {
        self.shared.inner.lock().unwrap().done.clone()
    }

    pub fn acquired(&self) -> Vec<AcquireBinding> {
        self.shared.inner.lock().unwrap().acquired.clone()
    }

    pub fn released(&self) -> Vec<u32> {
        self.shared.inner.lock().unwrap().released.clone()
    }

    pub fn restarts(&self) -> Vec<RestartComponent> {
        self.shared.inner.lock().unwrap().restarts.clone()
    }

    pub fn attaches(&self) -> u32 {
        self.shared.inner.lock().unwrap().attaches
    }

    pub fn provenance(&self) -> rlm_core::evaluation::Provenance {
        serde_json::from_str(self.shared.inner.lock().unwrap().provenance.as_deref().unwrap()).unwrap()
    }

    pub fn metrics(&self) -> rlm_core::evaluation::RunMetrics {
        serde_json::from_str(self.shared.inner.lock().unwrap().metrics.as_deref().unwrap()).unwrap()
    }

    /// Waits until so many episodes are there.
    pub fn wait_for_episodes(&self, count: usize) {
        let until = Instant::now() + Duration::from_secs(60);
        let mut inner = self.shared.inner.lock().unwrap();
        while inner.episodes.len() < count {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{} of {count} episodes after a minute; acquired {:?}", inner.episodes.len(), inner.acquired);
            inner = self.shared.changed.wait_timeout(inner, left).unwrap().0;
        }
    }
}

impl Inner {
    fn say(&self, command: Command) {
        if let Some(stream) = &self.stream {
            let _ = stream.try_send(Ok(AgentCommand { command: Some(command) }));
        }
    }

    fn say_component(&self, name: &str, phase: Phase, failure: Option<&DomainFailure>) {
        let held = &self.components[name];
        let address = match (&held.running, phase) {
            (Some(Running::Process(process)), Phase::Ready) => process.address(),
            (Some(Running::Given(address)), Phase::Ready) => address.clone(),
            _ => String::new(),
        };
        self.say(Command::Component(Component {
            name: name.to_owned(),
            attempt: held.attempt,
            phase: phase.into(),
            address,
            failure: failure.map(Failure::from),
            node: "node".to_owned(),
        }));
    }
}

impl Shared {
    fn end(self: &Arc<Self>, name: &str, code: FailureCode) {
        let mut failure = DomainFailure::new(code, format!("{name} ended: {}", code.as_str())).of(name);
        failure.exit_code = Some(3);
        failure.log_lines = vec!["last words".to_owned()];
        {
            let mut inner = self.inner.lock().unwrap();
            let Some(held) = inner.components.get_mut(name) else { return };
            held.running = None;
            inner.say_component(name, Phase::Restarting, Some(&failure));
            inner.components.get_mut(name).unwrap().attempt += 1;
        }
        self.start(name, Some(&failure));
    }

    /// Starts the component's current attempt.
    fn start(self: &Arc<Self>, name: &str, last: Option<&DomainFailure>) {
        let (attempt, lanes) = {
            let mut inner = self.inner.lock().unwrap();
            if let Some(code) = inner.starting_fails.get(name).copied() {
                inner.components.entry(name.to_owned()).or_insert(Held { attempt: 1, running: None, lanes: 1 });
                inner.say_component(name, Phase::Failed, Some(&DomainFailure::new(code, format!("{name} did not start")).of(name)));
                return;
            }
            let Some(held) = inner.components.get(name) else { return };
            let (attempt, lanes) = (held.attempt, held.lanes);
            inner.say_component(name, Phase::Starting, last);
            (attempt, lanes)
        };
        let path = self.folder.join(format!("{name}-{attempt}.sock"));
        let crash: Arc<dyn Fn() + Send + Sync> = {
            let (shared, name) = (Arc::downgrade(self), name.to_owned());
            Arc::new(move || {
                let (shared, name) = (shared.clone(), name.clone());
                // Not on the dying process's own thread.
                std::thread::spawn(move || {
                    let code = if name.starts_with("model") { FailureCode::ModelCrashed } else { FailureCode::EnvironmentCrashed };
                    if let Some(shared) = shared.upgrade() {
                        shared.end(&name, code);
                    }
                });
            })
        };
        let routes = if name.starts_with("model") {
            StubModel::routes(ModelSettings { crash, ..self.make_model.lock().unwrap().clone() })
        } else {
            let binding = name.split('-').nth(1).unwrap().parse().unwrap();
            let make = Arc::clone(&self.make_env.lock().unwrap());
            StubEnv::routes(EnvSettings { crash, ..make(binding, lanes) })
        };
        let process = Process::serve(&path, routes);
        let mut inner = self.inner.lock().unwrap();
        match inner.components.get_mut(name) {
            Some(held) if held.attempt == attempt => {
                held.running = Some(Running::Process(process));
                inner.say_component(name, Phase::Ready, last);
            }
            _ => {}
        }
    }

    /// The rows without an outcome.
    fn plan(&self) -> Plan {
        let inner = self.inner.lock().unwrap();
        let mut done: Vec<u64> = inner.episodes.iter().map(|episode| episode.row).collect();
        done.sort_unstable();
        let segments: Vec<_> = self.rows.iter().map(|block| block.to_segment(0)).collect();
        let rows = rlm_core::rows::without(&segments, &done)
            .iter()
            .map(|segment| RowBlock::from_segment(segment, segment.task).unwrap())
            .collect();
        Plan { run_json: serde_json::to_string(&self.spec).unwrap(), rows, attempt_base: inner.attempt_base }
    }

    fn attach(self: &Arc<Self>) {
        let known = self.inner.lock().unwrap().components.contains_key("model-0");
        if !known {
            self.inner.lock().unwrap().components.insert("model-0".to_owned(), Held { attempt: 1, running: None, lanes: 0 });
            self.start("model-0", None);
        } else {
            let inner = self.inner.lock().unwrap();
            for (name, held) in &inner.components {
                if held.running.is_some() {
                    inner.say_component(name, Phase::Ready, None);
                }
            }
        }
    }

    fn took(self: &Arc<Self>, message: Message) {
        match message {
            Message::Attach(_) => {}
            Message::Acquire(acquire) => {
                let mut new = Vec::new();
                {
                    let mut inner = self.inner.lock().unwrap();
                    inner.acquired.push(acquire);
                    for pod in 0..acquire.pods {
                        let name = format!("env-{}-{pod}", acquire.binding);
                        match inner.components.get(&name) {
                            Some(held) => {
                                if held.running.is_some() {
                                    inner.say_component(&name, Phase::Ready, None);
                                }
                            }
                            None => {
                                inner.components.insert(name.clone(), Held { attempt: 1, running: None, lanes: acquire.lanes_per_pod });
                                new.push(name);
                            }
                        }
                    }
                }
                for name in new {
                    self.start(&name, None);
                }
            }
            Message::Release(release) => {
                let mut inner = self.inner.lock().unwrap();
                inner.released.push(release.binding);
                let prefix = format!("env-{}-", release.binding);
                inner.components.retain(|name, held| !name.starts_with(&prefix) || matches!(held.running, Some(Running::Given(_))));
            }
            Message::Restart(restart) => {
                let current = {
                    let mut inner = self.inner.lock().unwrap();
                    inner.restarts.push(restart.clone());
                    inner.components.get(&restart.component).map(|held| held.attempt)
                };
                if current == Some(restart.attempt) {
                    self.end(&restart.component, FailureCode::ProcessKilled);
                }
            }
            Message::Episodes(batch) => {
                let mut inner = self.inner.lock().unwrap();
                let bytes = format!("{:?}", batch.episodes).into_bytes();
                match inner.sequences.get(&batch.sequence) {
                    Some(known) => assert_eq!(known, &bytes, "a sequence came again with other episodes"),
                    None => {
                        inner.sequences.insert(batch.sequence, bytes);
                        inner.episodes.extend(batch.episodes);
                    }
                }
                if !inner.withhold_acks {
                    inner.say(Command::Ack(EpisodesAck { sequence: batch.sequence }));
                }
                self.changed.notify_all();
            }
            Message::Progress(_) => {}
            Message::Metrics(metrics) => self.inner.lock().unwrap().metrics = Some(metrics.metrics_json),
            Message::Provenance(provenance) => self.inner.lock().unwrap().provenance = Some(provenance.provenance_json),
            Message::Done(done) => {
                let mut inner = self.inner.lock().unwrap();
                inner.say(Command::Ack(EpisodesAck { sequence: done.sequence }));
                inner.done = Some(done);
            }
        }
    }
}

struct Service(Arc<Shared>);

#[tonic::async_trait]
impl RunnerService for Service {
    type AttachStream = ReceiverStream<Result<AgentCommand, Status>>;

    async fn attach(&self, request: Request<Streaming<RunnerMessage>>) -> Result<Response<Self::AttachStream>, Status> {
        let mut messages = request.into_inner();
        let Some(Ok(RunnerMessage { message: Some(Message::Attach(attach)) })) = messages.next().await else {
            return Err(Status::invalid_argument("attach first"));
        };
        if attach.token != TOKEN || attach.run_id != self.0.spec.run_id.to_string() {
            return Err(Status::unauthenticated("not a run of this agent"));
        }
        let (sender, receiver) = mpsc::channel(4096);
        let plan = self.0.plan();
        sender.send(Ok(AgentCommand { command: Some(Command::Plan(plan)) })).await.unwrap();
        {
            let mut inner = self.0.inner.lock().unwrap();
            inner.stream = Some(sender.clone());
            inner.attaches += 1;
        }
        let shared = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || shared.attach()).await.unwrap();
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            while let Some(Ok(RunnerMessage { message: Some(message) })) = messages.next().await {
                let shared = Arc::clone(&shared);
                tokio::task::spawn_blocking(move || shared.took(message)).await.unwrap();
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

//! Runs as child processes of the agent: the local cell's executor. Queues runs, hands out devices, and keeps one actor per
//! run; what a run came to goes to the spool.

mod child;
mod classify;
mod component;
mod components;
mod describe;
mod devices;
mod launch;
mod leftovers;
mod logs;
mod policy;
mod recipes;
mod report;
mod run;
mod runner;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use self::devices::{Grant, Need, Wait, grant, may_start};
use self::run::{Ask, Assignment};
use super::Executor;
use crate::inventory;
use crate::runners::Runners;
use crate::spool::{HeldRun, NewRecord, RunEnd, RunKey, Spool, SpoolError};

pub use self::child::exec_child;
pub use self::classify::{EXEC_FAILED, EXEC_FAILED_STATUS};

/// How long, and how much of, the logs of finished runs are kept.
const LOG_AGE: Duration = Duration::from_secs(14 * 24 * 3600);
const LOG_BYTES: u64 = 1 << 30;
const LOG_PRUNING: Duration = Duration::from_secs(3600);
/// Most of a log reply.
const LOG_REPLY: usize = 256 << 10;

/// How the cell is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// The agent's state folder, absolute.
    pub state: PathBuf,
    /// A folder with a short path for sockets.
    pub sockets: PathBuf,
    /// This binary, for `exec-child`.
    pub exec_child: PathBuf,
    pub runner: PathBuf,
    pub python: PathBuf,
    pub cuda_devices: u32,
    pub max_runs: usize,
    pub node: String,
    pub version: &'static str,
}

/// What the actors of runs share.
pub(crate) struct Context {
    pub(crate) spool: Spool,
    pub(crate) runners: Runners,
    launcher: child::Launcher,
    cell: launch::Cell,
    state: PathBuf,
    sockets: PathBuf,
    socket_number: AtomicU64,
    runner: PathBuf,
    runner_socket: PathBuf,
    node: String,
    gpu_product: Option<String>,
    gpu_driver: Option<String>,
    version: &'static str,
    tasks: TaskTracker,
}

impl Context {
    fn next_socket(&self) -> PathBuf {
        self.sockets.join(format!("{}.sock", self.socket_number.fetch_add(1, Ordering::Relaxed)))
    }

    fn log_folder(&self, run: RunId) -> PathBuf {
        self.state.join("logs").join(run.to_string())
    }
}

pub(crate) fn now_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

struct Queued {
    assignment: Assignment,
    /// The cause it was last reported to wait for.
    reported: Option<Wait>,
}

impl Queued {
    fn server(&self) -> Option<&String> {
        self.assignment.spec.environment.address.as_ref()
    }
}

struct Active {
    asks: mpsc::Sender<Ask>,
    /// It was asked to end already.
    ending: bool,
    /// The environment's server that it uses, where that runs already.
    server: Option<String>,
}

struct State {
    queue: VecDeque<Queued>,
    active: HashMap<RunKey, Active>,
    free: BTreeSet<u32>,
    closing: bool,
}

/// The local cell.
#[derive(Clone)]
pub struct ProcessExecutor {
    context: Arc<Context>,
    state: Arc<Mutex<State>>,
    inventory: v1::Inventory,
    devices: u32,
    max_runs: usize,
}

impl ProcessExecutor {
    /// Ends what an earlier agent left running, and makes the cell ready.
    pub fn new(options: Options, spool: Spool, runners: Runners) -> anyhow::Result<Self> {
        let records = options.state.join("processes");
        let ended = leftovers::end_all(&records);
        if ended > 0 {
            tracing::info!(ended, "ended processes that an earlier agent left running");
        }
        // Folders of runs that an earlier agent had under way; they are made anew.
        let _ = std::fs::remove_dir_all(options.state.join("work"));
        let inventory = inventory::of_this_machine(&options.node, options.cuda_devices);
        let gpu = inventory.nodes.first().filter(|node| node.gpu_count > 0);
        let filled = |text: &String| (!text.is_empty()).then(|| text.clone());
        let context = Context {
            spool,
            runners,
            launcher: child::Launcher { exec_child: options.exec_child, records },
            cell: launch::Cell {
                python: options.python,
                python_path: std::env::var("PYTHONPATH").ok(),
                omp_threads_set: std::env::var_os("OMP_NUM_THREADS").is_some(),
                cuda_devices: options.cuda_devices,
            },
            runner_socket: options.sockets.join("agent.sock"),
            sockets: options.sockets,
            socket_number: AtomicU64::new(0),
            state: options.state,
            runner: options.runner,
            gpu_product: gpu.and_then(|node| filled(&node.gpu_product)),
            gpu_driver: gpu.and_then(|node| filled(&node.gpu_driver)),
            node: options.node,
            version: options.version,
            tasks: TaskTracker::new(),
        };
        let state = State { queue: VecDeque::new(), active: HashMap::new(), free: (0..options.cuda_devices).collect(), closing: false };
        Ok(Self {
            context: Arc::new(context),
            state: Arc::new(Mutex::new(state)),
            inventory,
            devices: options.cuda_devices,
            max_runs: options.max_runs.max(1),
        })
    }

    /// The socket that runners attach to.
    #[must_use]
    pub fn runner_socket(&self) -> PathBuf {
        self.context.runner_socket.clone()
    }

    /// Goes on with the runs that the spool holds.
    pub async fn resume(&self) -> anyhow::Result<()> {
        for held in self.context.spool.held().await?.into_iter().filter(|held| !held.ended) {
            match read(&held.assign) {
                Ok(assignment) => {
                    tracing::info!(run = %held.key, "going on with a run");
                    self.enqueue(assignment);
                }
                Err(problem) => self.refuse(held.key, &problem),
            }
        }
        self.schedule();
        Ok(())
    }

    /// Deletes old logs, now and then, until the agent stops.
    pub async fn prune_logs(&self, stop: tokio_util::sync::CancellationToken) {
        loop {
            let kept: BTreeSet<String> = self.with(|state| {
                let queued = state.queue.iter().map(|queued| queued.assignment.key);
                state.active.keys().copied().chain(queued).map(|key| key.run_id.to_string()).collect()
            });
            let root = self.context.state.join("logs");
            let pruned = tokio::task::spawn_blocking(move || logs::prune(&root, LOG_AGE, LOG_BYTES, |run| kept.contains(run))).await;
            if let Err(error) = pruned {
                tracing::warn!(%error, "old logs could not be looked through");
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(LOG_PRUNING) => {}
            }
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn enqueue(&self, assignment: Assignment) {
        self.with(|state| state.queue.push_back(Queued { assignment, reported: None }));
    }

    /// Starts what may start, in order, and says why the rest waits.
    fn schedule(&self) {
        let mut waiting = Vec::new();
        let mut impossible = Vec::new();
        self.with(|state| {
            if state.closing {
                return;
            }
            loop {
                // A server of an environment admits one session: a run that waits for one holds nobody else up.
                let in_use = |server: &String| state.active.values().any(|active| active.server.as_ref() == Some(server));
                let Some(at) = state.queue.iter().position(|queued| !queued.server().is_some_and(in_use)) else {
                    for queued in state.queue.iter_mut().filter(|queued| queued.reported != Some(Wait::Server)) {
                        queued.reported = Some(Wait::Server);
                        waiting.push((queued.assignment.key, Wait::Server, Need::default()));
                    }
                    return;
                };
                let Some(need) = state.queue.get(at).map(|queued| Need::of(&queued.assignment.spec)) else { return };
                if need.total() > self.devices {
                    if let Some(queued) = state.queue.remove(at) {
                        impossible.push((queued.assignment.key, need));
                    }
                    continue;
                }
                match may_start(state.active.len(), self.max_runs, state.free.len(), need) {
                    Ok(()) => {
                        let (Some(next), Some(grant)) = (state.queue.remove(at), grant(&mut state.free, need)) else { return };
                        let (asks, inbox) = mpsc::channel(4);
                        let server = next.server().cloned();
                        state.active.insert(next.assignment.key, Active { asks, ending: false, server });
                        self.spawn(next.assignment, grant, inbox);
                    }
                    Err(wait) => {
                        for queued in &mut state.queue {
                            if queued.reported != Some(wait) {
                                queued.reported = Some(wait);
                                waiting.push((queued.assignment.key, wait, need));
                            }
                        }
                        return;
                    }
                }
            }
        });
        for (key, wait, need) in waiting {
            let (cause, message) = match wait {
                Wait::Capacity => ("capacity", format!("{} runs are going on, as many as this cell takes at once", self.max_runs)),
                Wait::Server => ("serverInUse", "another run uses the environment's server, which admits one at a time".to_owned()),
                Wait::Gpu => {
                    ("gpu", format!("the next run needs {} GPUs and fewer of this cell's {} are free", need.total(), self.devices))
                }
            };
            let status = report::status(Phase::Waiting, cause, &message, now_ms(), None, None);
            let spool = self.context.spool.clone();
            self.context.tasks.spawn(async move {
                if let Err(error) = spool.append(vec![NewRecord::status(key, status)]).await {
                    tracing::error!(run = %key, %error, "a status could not be stored");
                }
            });
        }
        for (key, need) in impossible {
            let message = format!(
                "the run needs {} GPUs and this machine has {}: ask for fewer, or run it on a cluster that has them",
                need.total(),
                self.devices
            );
            let failure = Failure::new(FailureCode::Unschedulable, message);
            let executor = self.clone();
            self.context.tasks.spawn(async move { executor.fail(key, &failure).await });
        }
    }

    fn spawn(&self, assignment: Assignment, grant: Grant, asks: mpsc::Receiver<Ask>) {
        let executor = self.clone();
        self.context.tasks.spawn(async move {
            let key = assignment.key;
            let devices: Vec<u32> = grant.model.iter().chain(&grant.environment).copied().collect();
            // A task of its own: a run whose actor panics must not keep its place and devices.
            let ended = tokio::spawn(run::carry_out(Arc::clone(&executor.context), assignment, grant, asks)).await;
            if let Err(error) = ended {
                tracing::error!(run = %key, %error, "a run's actor failed");
                executor
                    .fail(key, &Failure::new(FailureCode::Internal, "the agent failed while it carried out the run; see the agent's log"))
                    .await;
            }
            executor.with(|state| {
                state.active.remove(&key);
                state.free.extend(devices);
            });
            executor.schedule();
        });
    }

    async fn fail(&self, key: RunKey, failure: &Failure) {
        let status = report::status(Phase::Failed, "", "", now_ms(), Some(failure), None);
        report::record_end(&self.context, key, NewRecord::status(key, status), RunEnd::Failed).await;
    }

    /// Stores a run's end aside: a full spool makes room only as the session goes on, and the session asked for this.
    fn record_end(&self, key: RunKey, status: v1::RunStatus, end: RunEnd) {
        let context = Arc::clone(&self.context);
        self.context.tasks.spawn(async move { report::record_end(&context, key, NewRecord::status(key, status), end).await });
    }

    fn refuse(&self, key: RunKey, problem: &str) {
        tracing::error!(run = %key, problem, "an assignment can't be read");
        let message = format!("this agent (version {}) can't read the run: {problem}", self.context.version);
        let failure = Failure::new(FailureCode::Internal, message);
        self.record_end(key, report::status(Phase::Failed, "", "", now_ms(), Some(&failure), None), RunEnd::Failed);
    }

    /// Asks a run to end. False: it is neither queued nor active.
    fn ask(&self, key: RunKey, ask: Ask) -> bool {
        self.with(|state| {
            if let Some(active) = state.active.get_mut(&key) {
                if !active.ending {
                    active.ending = true;
                    // The channel holds more than it is ever sent: one.
                    let _ = active.asks.try_send(ask);
                }
                return true;
            }
            false
        })
    }

    fn take_queued(&self, key: RunKey) -> bool {
        self.with(|state| {
            let before = state.queue.len();
            state.queue.retain(|queued| queued.assignment.key != key);
            state.queue.len() < before
        })
    }

    async fn held(&self, key: RunKey) -> Option<HeldRun> {
        self.context.spool.held().await.ok()?.into_iter().find(|held| held.key == key)
    }

    /// Generations of a run that are queued or active here.
    fn generations(&self, run: RunId) -> Vec<RunKey> {
        self.with(|state| {
            let queued = state.queue.iter().map(|queued| queued.assignment.key);
            state.active.keys().copied().chain(queued).filter(|key| key.run_id == run).collect()
        })
    }
}

/// An assignment as it came over the wire or out of the spool.
fn read(assign: &v1::Assign) -> Result<Assignment, String> {
    let spec: RunSpec = serde_json::from_str(&assign.run_json).map_err(|error| error.to_string())?;
    let key = RunKey { run_id: spec.run_id, generation: spec.generation };
    Ok(Assignment { key, spec: Arc::new(spec), rows: assign.rows.clone() })
}

/// The run that an assignment is about, when nothing else of it can be read.
fn key_of(assign: &v1::Assign) -> Option<RunKey> {
    let document: serde_json::Value = serde_json::from_str(&assign.run_json).ok()?;
    Some(RunKey { run_id: document["runId"].as_str()?.parse().ok()?, generation: document["generation"].as_u64()? })
}

#[async_trait]
impl Executor for ProcessExecutor {
    fn name(&self) -> &'static str {
        "process"
    }

    async fn assign(&self, assign: v1::Assign) -> Result<(), SpoolError> {
        let assignment = match read(&assign) {
            Ok(assignment) => assignment,
            Err(problem) => {
                match key_of(&assign) {
                    Some(key) => self.refuse(key, &problem),
                    None => tracing::error!(%problem, "an assignment without a run came"),
                }
                return Ok(());
            }
        };
        let key = assignment.key;
        let others = self.generations(key.run_id);
        if others.iter().any(|other| other.generation > key.generation) {
            tracing::info!(run = %key, "an assignment of an older generation came late");
            return Ok(());
        }
        if !self.context.spool.hold(key, assign).await? {
            // Repeated.
            return Ok(());
        }
        for older in others.into_iter().filter(|other| other.generation < key.generation) {
            self.stop(older).await;
        }
        tracing::info!(run = %key, model = %assignment.spec.model.id, environment = %assignment.spec.environment.id, "run assigned");
        self.enqueue(assignment);
        self.schedule();
        Ok(())
    }

    async fn cancel(&self, key: RunKey) {
        if self.ask(key, Ask::Cancel) {
            return;
        }
        let queued = self.take_queued(key);
        if !queued && self.held(key).await.is_some_and(|held| held.ended) {
            return;
        }
        let status = report::status(Phase::Cancelled, "", "", now_ms(), None, None);
        self.record_end(key, status, RunEnd::Cancelled);
        self.schedule();
    }

    async fn stop(&self, key: RunKey) {
        if self.ask(key, Ask::Stop) {
            return;
        }
        self.take_queued(key);
        if let Err(error) = self.context.spool.end(key, RunEnd::Stopped).await {
            tracing::error!(run = %key, %error, "the end of a stopped run could not be stored");
        }
        self.schedule();
    }

    async fn logs(&self, request: v1::LogRequest) -> v1::LogReply {
        let id = request.request_id.clone();
        let Ok(run) = request.run_id.parse::<RunId>() else {
            return no_logs(id, "not_found", format!("'{}' is not a run's id", request.run_id));
        };
        let folder = self.context.log_folder(run);
        let read = tokio::task::spawn_blocking(move || {
            let files: Vec<_> = logs::list(&folder)
                .into_iter()
                .filter(|(component, _, _)| request.component.is_empty() || *component == request.component)
                .collect();
            let share = LOG_REPLY / files.len().clamp(1, LOG_REPLY);
            let lines = request.tail_lines as usize;
            files
                .into_iter()
                .filter_map(|(component, attempt, path)| {
                    let (text, truncated) = logs::read_tail(&path, share, lines).ok()?;
                    Some(v1::LogFile { component, attempt, text, truncated })
                })
                .collect::<Vec<_>>()
        });
        match read.await {
            Ok(files) if files.is_empty() => {
                no_logs(id, "not_found", format!("this cell has no logs of run {run}; they may have been deleted"))
            }
            Ok(files) => v1::LogReply { request_id: id, files, error_code: String::new(), error_message: String::new() },
            Err(error) => no_logs(id, "internal", format!("the logs could not be read: {error}")),
        }
    }

    async fn describe(&self, request: v1::Describe) -> v1::DescribeReply {
        describe::describe(&self.context, request).await
    }

    fn inventory(&self) -> v1::Inventory {
        self.inventory.clone()
    }

    fn running(&self) -> u32 {
        u32::try_from(self.with(|state| state.active.len())).unwrap_or(u32::MAX)
    }

    async fn shutdown(&self) {
        let active: Vec<RunKey> = self.with(|state| {
            state.closing = true;
            state.active.keys().copied().collect()
        });
        for key in active {
            self.ask(key, Ask::Shutdown);
        }
        self.context.tasks.close();
        self.context.tasks.wait().await;
    }
}

fn no_logs(request_id: String, code: &str, message: String) -> v1::LogReply {
    v1::LogReply { request_id, files: Vec::new(), error_code: code.to_owned(), error_message: message }
}

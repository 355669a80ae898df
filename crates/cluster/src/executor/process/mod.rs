//! Runs as child processes of the agent: the local cell's executor. Hands out devices and servers.

mod child;
pub(crate) mod classify;
mod component;
mod describe;
mod devices;
mod launch;
mod leftovers;
mod logs;
mod place;
mod runner;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use rlm_api::cluster::v1;
use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;
use tokio_util::task::TaskTracker;

use self::devices::{Grant, Need, grant, may_start};
use super::run::{Assignment, Prepared, Shared};
use super::runs::{Admission, Cell, Runs, Wait};
use super::{Executor, no_component, no_logs};
use crate::inventory;
use crate::runners::Runners;
use crate::spool::{RunKey, Spool, SpoolError};

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
struct Context {
    shared: Shared,
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
    max_runs: usize,
    gate: Mutex<Gate>,
}

impl Context {
    fn next_socket(&self) -> PathBuf {
        self.sockets.join(format!("{}.sock", self.socket_number.fetch_add(1, Ordering::Relaxed)))
    }

    fn log_folder(&self, run: RunId) -> PathBuf {
        self.state.join("logs").join(run.to_string())
    }
}

/// Devices that are free, and servers that are in use.
struct Gate {
    free: BTreeSet<u32>,
    servers: BTreeSet<String>,
}

/// What a run holds while it goes on.
#[derive(Clone)]
struct Held {
    devices: Grant,
    /// The environment's server, where that runs already: it admits one session.
    server: Option<String>,
}

impl Context {
    fn gate<T>(&self, act: impl FnOnce(&mut Gate) -> T) -> T {
        act(&mut self.gate.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Cell for Context {
    type Place = place::ProcessRun;
    type Grant = Held;

    fn admit(&self, spec: &RunSpec, active: usize) -> Admission<Held> {
        let need = Need::of(spec);
        let devices = self.cell.cuda_devices;
        if need.total() > devices {
            let message = format!(
                "the run needs {} GPUs and this machine has {devices}: ask for fewer, or run it on a cluster that has them",
                need.total()
            );
            return Admission::Never(Failure::new(FailureCode::Unschedulable, message));
        }
        let server = spec.environment.address.clone();
        self.gate(|gate| {
            let used = server.as_ref().is_some_and(|server| gate.servers.contains(server));
            let wait = if used { Err(devices::Wait::Server) } else { may_start(active, self.max_runs, gate.free.len(), need) };
            match wait.map(|()| grant(&mut gate.free, need)) {
                Ok(Some(devices)) => {
                    gate.servers.extend(server.clone());
                    Admission::Start(Held { devices, server })
                }
                Ok(None) | Err(devices::Wait::Gpu) => Admission::Wait(Wait {
                    cause: "gpu",
                    message: format!("the next run needs {} GPUs and fewer of this cell's {devices} are free", need.total()),
                    holds_others: true,
                }),
                Err(devices::Wait::Capacity) => Admission::Wait(Wait {
                    cause: "capacity",
                    message: format!("{} runs are going on, as many as this cell takes at once", self.max_runs),
                    holds_others: true,
                }),
                Err(devices::Wait::Server) => Admission::Wait(Wait {
                    cause: "serverInUse",
                    message: "another run uses the environment's server, which admits one at a time".to_owned(),
                    holds_others: false,
                }),
            }
        })
    }

    fn release(&self, held: Held) {
        self.gate(|gate| {
            gate.free.extend(held.devices.model.iter().chain(&held.devices.environment));
            if let Some(server) = held.server {
                gate.servers.remove(&server);
            }
        });
    }

    fn prepare(self: Arc<Self>, assignment: Assignment, held: Held) -> BoxFuture<'static, Result<Prepared<place::ProcessRun>, Failure>> {
        place::prepare(self, assignment, held.devices).boxed()
    }
}

/// The local cell.
#[derive(Clone)]
pub struct ProcessExecutor {
    context: Arc<Context>,
    runs: Runs<Context>,
    inventory: v1::Inventory,
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
            shared: Shared { spool, runners, tasks: TaskTracker::new() },
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
            max_runs: options.max_runs.max(1),
            gate: Mutex::new(Gate { free: (0..options.cuda_devices).collect(), servers: BTreeSet::new() }),
        };
        let context = Arc::new(context);
        let runs = Runs::new(Arc::clone(&context), context.shared.clone(), context.version);
        Ok(Self { context, runs, inventory })
    }

    /// The socket that runners attach to.
    #[must_use]
    pub fn runner_socket(&self) -> PathBuf {
        self.context.runner_socket.clone()
    }

    /// Goes on with the runs that the spool holds.
    pub async fn resume(&self) -> anyhow::Result<()> {
        self.runs.resume().await
    }

    /// Deletes old logs, now and then, until the agent stops.
    pub async fn prune_logs(&self, stop: tokio_util::sync::CancellationToken) {
        loop {
            let kept: BTreeSet<String> = self.runs.keys().iter().map(|key| key.run_id.to_string()).collect();
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
}

#[async_trait]
impl Executor for ProcessExecutor {
    fn name(&self) -> &'static str {
        "process"
    }

    async fn assign(&self, assign: v1::Assign) -> Result<(), SpoolError> {
        self.runs.assign(assign).await
    }

    async fn cancel(&self, key: RunKey) {
        self.runs.cancel(key).await;
    }

    async fn stop(&self, key: RunKey) {
        self.runs.stop(key).await;
    }

    async fn logs(&self, request: v1::LogRequest) -> v1::LogReply {
        let id = request.request_id.clone();
        let Ok(run) = request.run_id.parse::<RunId>() else {
            return no_logs(id, "not_found", format!("'{}' is not a run's id", request.run_id));
        };
        let folder = self.context.log_folder(run);
        let wanted = request.component.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut files = logs::list(&folder);
            let components: BTreeSet<String> = files.iter().map(|(component, _, _)| component.clone()).collect();
            files.retain(|(component, _, _)| request.component.is_empty() || *component == request.component);
            let share = LOG_REPLY / files.len().clamp(1, LOG_REPLY);
            let lines = request.tail_lines as usize;
            let files = files.into_iter().filter_map(|(component, attempt, path)| {
                let (text, truncated) = logs::read_tail(&path, share, lines).ok()?;
                Some(v1::LogFile { component, attempt, text, truncated })
            });
            (files.collect::<Vec<_>>(), components)
        });
        match read.await {
            Ok((files, components)) if files.is_empty() && !components.is_empty() && !components.contains(&wanted) => {
                no_logs(id, "not_found", no_component(run, &wanted, components))
            }
            Ok((files, _)) if files.is_empty() => {
                no_logs(id, "not_found", format!("this cell has no logs of run {run}; they may have been deleted"))
            }
            Ok((files, _)) => v1::LogReply { request_id: id, files, error_code: String::new(), error_message: String::new() },
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
        self.runs.running()
    }

    async fn shutdown(&self) {
        self.runs.shutdown().await;
    }
}

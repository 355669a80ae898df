//! One run from attaching to its end: the model stays up throughout, bindings take turns, every row gets its outcome.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::Context as _;
use rlm_api::cluster::v1::Plan;
use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureClass, FailureCode};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::agent::{Agent, Identity, LinkError};
use crate::board::{Board, unix_ms};
use crate::components::MODEL;
use crate::hub::{Hub, HubSettings, ModelState};
use crate::metrics::Metrics;
use crate::pod::{Pod, PodEnd};
use crate::provenance::Book;
use crate::rows::{Retries, Rows, Spread};
use crate::session::Setting;
use crate::transport::Address;
use crate::tuning::Tuning;

/// How a run is started.
pub struct Start {
    pub agent: Address,
    pub identity: Identity,
    pub tuning: Tuning,
    /// Processors that environments may be spread over.
    pub cores: u32,
}

/// Runs to the end. `Ok`: the agent has acknowledged that the run is over, however it went. `stop` ends it early.
pub async fn run(start: Start, stop: CancellationToken) -> anyhow::Result<()> {
    let Start { agent: address, identity, tuning, cores } = start;
    let tuning = Arc::new(tuning);
    let agent = Agent::new(&tuning);
    let (sender, plan) = oneshot::channel();
    let line = {
        let (agent, tuning) = (agent.clone(), Arc::clone(&tuning));
        tokio::spawn(async move { agent.run(&address, &identity, &tuning, sender).await })
    };
    let mut line = line;
    let over = tokio::select! {
        plan = plan => match plan {
            Ok(plan) => tokio::select! {
                failure = carry_out(&agent, plan, &tuning, cores) => Over::Done(failure),
                lost = &mut line => Over::Lost(lost),
                () = stop.cancelled() => Over::Told,
            },
            // The line ended before a plan came; its result says why.
            Err(_) => Over::Lost((&mut line).await),
        },
        lost = &mut line => Over::Lost(lost),
        () = stop.cancelled() => Over::Told,
    };
    let ended = match over {
        Over::Done(failure) => {
            agent.done(failure.as_ref());
            line.await
        }
        Over::Lost(ended) => ended,
        Over::Told => {
            // The run is not over: its rows go on in the next runner. What is finished is delivered first.
            let delivered = agent.deliver(tuning.goodbye).await;
            line.abort();
            anyhow::bail!(
                "told to stop before the run was over; {}",
                if delivered { "all finished episodes are delivered" } else { "some finished episodes could not be delivered" }
            );
        }
    };
    ended.context("the task that talks to the agent ended")?.context("the run could not be carried out")
}

/// How the work of a runner ends.
enum Over {
    Done(Option<Failure>),
    Lost(Result<Result<(), LinkError>, tokio::task::JoinError>),
    Told,
}

/// Does the plan; the failure of the run as a whole, if it has one.
async fn carry_out(agent: &Agent, plan: Plan, tuning: &Arc<Tuning>, cores: u32) -> Option<Failure> {
    let failure = match serde_json::from_str::<RunSpec>(&plan.run_json) {
        Ok(spec) => Driver::new(agent.clone(), spec, plan, Arc::clone(tuning), cores).run().await,
        Err(error) => Some(
            Failure::new(FailureCode::Internal, format!("the run's specification can't be read by this version of the runner: {error}"))
                .of("runner"),
        ),
    };
    if let Some(failure) = &failure {
        tracing::warn!(code = failure.code.as_str(), reason = %failure.message, "the run ends early");
    }
    failure
}

struct Driver {
    agent: Agent,
    spec: Arc<RunSpec>,
    plan: Plan,
    tuning: Arc<Tuning>,
    cores: u32,
    metrics: Arc<Metrics>,
    book: Arc<Book>,
    stop: CancellationToken,
    sessions: Arc<AtomicU64>,
}

impl Driver {
    fn new(agent: Agent, spec: RunSpec, plan: Plan, tuning: Arc<Tuning>, cores: u32) -> Self {
        let spec = Arc::new(spec);
        let book = Arc::new(Book::new(agent.clone(), &spec));
        let stop = agent.cancel.child_token();
        Self { agent, spec, plan, tuning, cores, metrics: Arc::new(Metrics::default()), book, stop, sessions: Arc::new(AtomicU64::new(1)) }
    }

    /// The failure of the run as a whole, if it has one.
    async fn run(self) -> Option<Failure> {
        let (hub, hub_task) = Hub::start(HubSettings {
            agent: self.agent.clone(),
            metrics: Arc::clone(&self.metrics),
            tuning: (*self.tuning).clone(),
            run_id: self.spec.run_id.to_string(),
            horizon: self.spec.model.execution_horizon.max(1),
            progress_timeout: Duration::from_millis(self.spec.limits.progress_timeout_ms.max(1)),
        });
        let reporter = self.report_regularly();
        let failure = tokio::select! {
            biased;
            complete = self.bindings(&hub) => if complete { None } else { Some(self.interruption(&hub).await) },
            failure = self.interruption(&hub) => Some(failure),
        };
        self.stop.cancel();
        reporter.abort();
        self.agent.progress(self.metrics.progress());
        self.report_metrics();
        drop(hub);
        // The hub says goodbye to the adapters, unless it is stuck.
        let _ = tokio::time::timeout(self.tuning.goodbye, hub_task).await;
        failure
    }

    /// Returns when the run can't go on, with the reason.
    async fn interruption(&self, hub: &Hub) -> Failure {
        tokio::select! {
            failure = model_failed(hub) => failure,
            () = self.agent.cancel.cancelled() => {
                let reason = self.agent.cancel_reason().unwrap_or_else(|| "no reason given".to_owned());
                Failure::new(FailureCode::Cancelled, format!("the run was cancelled: {reason}"))
            }
        }
    }

    fn report_metrics(&self) {
        match serde_json::to_string(&self.metrics.report()) {
            Ok(json) => self.agent.metrics(json, unix_ms()),
            Err(error) => tracing::warn!(%error, "the metrics can't be written"),
        }
    }

    fn report_regularly(&self) -> tokio::task::JoinHandle<()> {
        let (agent, metrics, tuning) = (self.agent.clone(), Arc::clone(&self.metrics), Arc::clone(&self.tuning));
        tokio::spawn(async move {
            let mut progress = tokio::time::interval(tuning.progress_every);
            let mut full = tokio::time::interval(tuning.metrics_every);
            let mut last = None;
            loop {
                tokio::select! {
                    _ = progress.tick() => {
                        let now = metrics.progress();
                        if last != Some(now) {
                            last = Some(now);
                            agent.progress(now);
                        }
                    }
                    _ = full.tick() => match serde_json::to_string(&metrics.report()) {
                        Ok(json) => agent.metrics(json, unix_ms()),
                        Err(error) => tracing::warn!(%error, "the metrics can't be written"),
                    },
                }
            }
        })
    }

    /// Runs all rows. False when it had to stop before each had an outcome.
    async fn bindings(&self, hub: &Hub) -> bool {
        let with_rows: BTreeSet<u32> = self
            .plan
            .rows
            .iter()
            .filter(|block| block.count > 0)
            .filter_map(|block| Some(self.spec.tasks.get(block.task as usize)?.binding))
            .collect();
        for binding in with_rows {
            if !self.binding(hub, binding).await {
                return false;
            }
        }
        true
    }

    async fn binding(&self, hub: &Hub, binding: u32) -> bool {
        let retries = Retries { counted: self.spec.limits.environment_crash_retries, uncounted: self.tuning.infrastructure_retries };
        let of_binding = |task: u32| self.spec.tasks.get(task as usize).is_some_and(|task| task.binding == binding);
        let rows = Rows::new(&self.plan.rows, of_binding, self.plan.attempt_base, retries);
        let board = Arc::new(Board::new(rows, self.agent.clone()));
        // A server that runs already is one process, and admits one session.
        let cores = if self.spec.environment.address.is_some() { 1 } else { self.cores };
        let chosen = Spread::choose(self.spec.lanes, board.open(), self.spec.environment.lanes_per_pod, cores);
        let mut spread = chosen;
        loop {
            self.book.spread(spread);
            match self.with_processes(hub, binding, spread, &board).await {
                Outcome::Done => return board.open() == 0,
                Outcome::OneLane if spread.lanes_per_pod > 1 => {
                    self.book.warn(format!(
                        "the environment can't be served as {} lanes of one process; one process per lane is used",
                        spread.lanes_per_pod
                    ));
                    spread = chosen.one_lane_each(self.cores);
                }
                Outcome::OneLane => {
                    let message = "the environment serves a vector in lockstep even with one environment per process, so rows can't be run with their seeds";
                    board.close(&Failure::new(FailureCode::Unsupported, message)).await;
                    return true;
                }
                Outcome::Hopeless(failure) => {
                    board.close(&failure).await;
                    return true;
                }
            }
        }
    }

    /// Runs a binding's rows on processes of this spread.
    async fn with_processes(&self, hub: &Hub, binding: u32, spread: Spread, board: &Arc<Board>) -> Outcome {
        let stop = self.stop.child_token();
        // Whatever way this is left, the processes are given back.
        let _guard = stop.clone().drop_guard();
        let setting = Arc::new(Setting {
            agent: self.agent.clone(),
            hub: hub.clone(),
            board: Arc::clone(board),
            metrics: Arc::clone(&self.metrics),
            spec: Arc::clone(&self.spec),
            tuning: Arc::clone(&self.tuning),
            stop: stop.clone(),
        });
        // A model that can't run spares the environments.
        match hub.up().await {
            Ok((_, facts)) => self.book.model(&facts, self.spec.model.execution_horizon),
            // The run ends with the model's failure.
            Err(_) => std::future::pending().await,
        }
        self.agent.acquire(binding, spread.pods, spread.lanes_per_pod);
        let mut pods = JoinSet::new();
        for number in 0..spread.pods {
            let pod = Pod {
                setting: Arc::clone(&setting),
                book: Arc::clone(&self.book),
                binding,
                number,
                lanes: spread.lanes_of(number),
                sessions: Arc::clone(&self.sessions),
                stop: stop.clone(),
            };
            pods.spawn(pod.run());
        }
        let mut outcome = Outcome::Done;
        let mut last_failure = None;
        while let Some(ended) = pods.join_next().await {
            match ended {
                Ok(PodEnd::Finished | PodEnd::Stopped) => {}
                Ok(PodEnd::Lockstep) => {
                    outcome = Outcome::OneLane;
                    break;
                }
                Ok(PodEnd::Retired(failure)) => {
                    let ours = spread.lanes_per_pod > 1 && self.spec.environment.lanes_per_pod.is_none();
                    if ours && failure.code == FailureCode::EnvironmentStartFailed {
                        // Not every environment can be made several times in one process.
                        outcome = Outcome::OneLane;
                        break;
                    }
                    if failure.class == FailureClass::User {
                        outcome = Outcome::Hopeless(failure);
                        break;
                    }
                    tracing::warn!(code = failure.code.as_str(), reason = %failure.message, "an environment process is given up");
                    last_failure = Some(failure);
                }
                Err(error) => {
                    last_failure = Some(Failure::new(FailureCode::Internal, format!("a task of the runner failed: {error}")).of("runner"))
                }
            }
        }
        stop.cancel();
        while pods.join_next().await.is_some() {}
        self.agent.release(binding);
        match (outcome, last_failure) {
            (Outcome::Done, Some(failure)) if board.open() > 0 && !self.stop.is_cancelled() => Outcome::Hopeless(failure),
            (outcome, _) => outcome,
        }
    }
}

enum Outcome {
    Done,
    /// Try again with one lane per process.
    OneLane,
    /// The rows that are left can't be run.
    Hopeless(Failure),
}

/// Returns when the model will not come back.
async fn model_failed(hub: &Hub) -> Failure {
    let mut state = hub.state();
    match state.wait_for(|state| matches!(state, ModelState::Failed(_))).await.map(|state| state.clone()) {
        Ok(ModelState::Failed(failure)) => failure,
        Ok(ModelState::Starting | ModelState::Up { .. }) | Err(_) => {
            Failure::new(FailureCode::Internal, "the model's task ended without a word").of(MODEL)
        }
    }
}

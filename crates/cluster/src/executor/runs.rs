//! The runs of an agent, wherever they happen: taken, queued, started in order, asked to end, and gone on with after a
//! restart. Keeps one actor per run; what a run came to goes to the spool.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::now_ms;
use super::run::report::{record_end, status};
use super::run::{Ask, Assignment, Place, Prepared, Shared, carry_out};
use crate::spool::{HeldRun, NewRecord, RunEnd, RunKey, SpoolError};

/// Whether the next run of the queue may start.
pub enum Admission<G> {
    Start(G),
    Wait(Wait),
    /// It never can.
    Never(Failure),
}

/// Why a queued run does not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// As the control plane shows it.
    pub cause: &'static str,
    pub message: String,
    /// Nobody overtakes it: what it waits for would never be there.
    pub holds_others: bool,
}

/// What carries runs out: decides what may start, and makes it ready.
pub trait Cell: Send + Sync + 'static {
    type Place: Place;
    /// What a run holds while it goes on.
    type Grant: Clone + Send + 'static;

    fn admit(&self, spec: &RunSpec, active: usize) -> Admission<Self::Grant>;

    /// A run has ended.
    fn release(&self, grant: Self::Grant);

    /// Everything that can fail before anything is started.
    fn prepare(self: Arc<Self>, assignment: Assignment, grant: Self::Grant) -> BoxFuture<'static, Result<Prepared<Self::Place>, Failure>>;
}

struct Queued {
    assignment: Assignment,
    /// The cause it was last reported to wait for.
    reported: Option<&'static str>,
    /// That report on its way to the spool: what is said of the run next waits for it.
    telling: Telling,
}

type Telling = Option<JoinHandle<()>>;

async fn told(telling: Telling) {
    if let Some(telling) = telling {
        // One that panicked has nothing more to say either.
        let _ = telling.await;
    }
}

struct Active {
    asks: mpsc::Sender<Ask>,
    /// It was asked to end already.
    ending: bool,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    active: HashMap<RunKey, Active>,
    closing: bool,
}

/// The runs of one agent. Cheap to clone.
pub struct Runs<C> {
    pub cell: Arc<C>,
    shared: Shared,
    state: Arc<Mutex<State>>,
    version: &'static str,
}

impl<C> Clone for Runs<C> {
    fn clone(&self) -> Self {
        Self { cell: Arc::clone(&self.cell), shared: self.shared.clone(), state: Arc::clone(&self.state), version: self.version }
    }
}

impl<C: Cell> Runs<C> {
    pub fn new(cell: Arc<C>, shared: Shared, version: &'static str) -> Self {
        Self { cell, shared, state: Arc::default(), version }
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Goes on with the runs that the spool holds.
    pub async fn resume(&self) -> anyhow::Result<()> {
        for held in self.shared.spool.held().await?.into_iter().filter(|held| !held.ended) {
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

    /// Every run that is queued or active.
    pub fn keys(&self) -> Vec<RunKey> {
        self.with(|state| state.active.keys().copied().chain(state.queue.iter().map(|queued| queued.assignment.key)).collect())
    }

    pub fn running(&self) -> u32 {
        u32::try_from(self.with(|state| state.active.len())).unwrap_or(u32::MAX)
    }

    fn enqueue(&self, assignment: Assignment) {
        self.with(|state| state.queue.push_back(Queued { assignment, reported: None, telling: None }));
    }

    /// Starts what may start, in order, and says why the rest waits.
    pub fn schedule(&self) {
        let mut impossible = Vec::new();
        self.with(|state| {
            let mut at = 0;
            while let Some(queued) = state.queue.get_mut(at).filter(|_| !state.closing) {
                // An older generation of the run is still being ended, and what it clears away has the same names.
                if state.active.keys().any(|key| key.run_id == queued.assignment.key.run_id) {
                    at += 1;
                    continue;
                }
                match self.cell.admit(&queued.assignment.spec, state.active.len()) {
                    Admission::Start(grant) => {
                        let Some(next) = state.queue.remove(at) else { return };
                        let (asks, inbox) = mpsc::channel(4);
                        state.active.insert(next.assignment.key, Active { asks, ending: false });
                        self.spawn(next, grant, inbox);
                    }
                    Admission::Never(failure) => {
                        if let Some(queued) = state.queue.remove(at) {
                            impossible.push((queued, failure));
                        }
                    }
                    Admission::Wait(wait) => {
                        let held = if wait.holds_others { state.queue.len() } else { at + 1 };
                        for queued in state.queue.range_mut(at..held) {
                            if queued.reported != Some(wait.cause) {
                                queued.reported = Some(wait.cause);
                                queued.telling = Some(self.tell_waiting(queued.assignment.key, &wait, queued.telling.take()));
                            }
                        }
                        at = held;
                    }
                }
            }
        });
        for (queued, failure) in impossible {
            let runs = self.clone();
            self.shared.tasks.spawn(async move {
                told(queued.telling).await;
                runs.fail(queued.assignment.key, &failure).await;
            });
        }
    }

    fn tell_waiting(&self, key: RunKey, wait: &Wait, before: Telling) -> JoinHandle<()> {
        let status = status(Phase::Waiting, wait.cause, &wait.message, now_ms(), None, None);
        let spool = self.shared.spool.clone();
        self.shared.tasks.spawn(async move {
            told(before).await;
            if let Err(error) = spool.append(vec![NewRecord::status(key, status)]).await {
                tracing::error!(run = %key, %error, "a status could not be stored");
            }
        })
    }

    fn spawn(&self, Queued { assignment, telling, .. }: Queued, grant: C::Grant, asks: mpsc::Receiver<Ask>) {
        let runs = self.clone();
        self.shared.tasks.spawn(async move {
            told(telling).await;
            let key = assignment.key;
            let preparing = Arc::clone(&runs.cell).prepare(assignment.clone(), grant.clone());
            // A task of its own: a run whose actor panics must not keep its place.
            let ended = tokio::spawn(carry_out(runs.shared.clone(), assignment, preparing, asks)).await;
            if let Err(error) = ended {
                tracing::error!(run = %key, %error, "a run's actor failed");
                runs.fail(key, &Failure::new(FailureCode::Internal, "the agent failed while it carried out the run; see the agent's log"))
                    .await;
            }
            runs.with(|state| state.active.remove(&key));
            runs.cell.release(grant);
            runs.schedule();
        });
    }

    async fn fail(&self, key: RunKey, failure: &Failure) {
        let status = status(Phase::Failed, "", "", now_ms(), Some(failure), None);
        record_end(&self.shared.spool, key, NewRecord::status(key, status), RunEnd::Failed).await;
    }

    /// Stores a run's end aside: a full spool makes room only as the session goes on, and the session asked for this.
    fn record_end(&self, key: RunKey, status: v1::RunStatus, end: RunEnd, telling: Telling) {
        let spool = self.shared.spool.clone();
        self.shared.tasks.spawn(async move {
            told(telling).await;
            record_end(&spool, key, NewRecord::status(key, status), end).await;
        });
    }

    fn refuse(&self, key: RunKey, problem: &str) {
        tracing::error!(run = %key, problem, "an assignment can't be read");
        let message = format!("this agent (version {}) can't read the run: {problem}", self.version);
        let failure = Failure::new(FailureCode::Internal, message);
        self.record_end(key, status(Phase::Failed, "", "", now_ms(), Some(&failure), None), RunEnd::Failed, None);
    }

    /// Asks a run to end. False: it is not active.
    fn ask(&self, key: RunKey, ask: Ask) -> bool {
        self.with(|state| {
            let Some(active) = state.active.get_mut(&key) else { return false };
            if !active.ending {
                active.ending = true;
                // The channel holds more than it is ever sent: one.
                let _ = active.asks.try_send(ask);
            }
            true
        })
    }

    fn take_queued(&self, key: RunKey) -> Option<Queued> {
        self.with(|state| {
            let at = state.queue.iter().position(|queued| queued.assignment.key == key)?;
            state.queue.remove(at)
        })
    }

    async fn held(&self, key: RunKey) -> Option<HeldRun> {
        self.shared.spool.held().await.ok()?.into_iter().find(|held| held.key == key)
    }

    /// Generations of a run that are queued or active here.
    fn generations(&self, run: RunId) -> Vec<RunKey> {
        self.keys().into_iter().filter(|key| key.run_id == run).collect()
    }

    pub async fn assign(&self, assign: v1::Assign) -> Result<(), SpoolError> {
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
        if !self.shared.spool.hold(key, assign).await? {
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

    pub async fn cancel(&self, key: RunKey) {
        if self.ask(key, Ask::Cancel) {
            return;
        }
        let queued = self.take_queued(key);
        if queued.is_none() && self.held(key).await.is_some_and(|held| held.ended) {
            return;
        }
        self.record_end(
            key,
            status(Phase::Cancelled, "", "", now_ms(), None, None),
            RunEnd::Cancelled,
            queued.and_then(|queued| queued.telling),
        );
        self.schedule();
    }

    pub async fn stop(&self, key: RunKey) {
        if self.ask(key, Ask::Stop) {
            return;
        }
        self.take_queued(key);
        if let Err(error) = self.shared.spool.end(key, RunEnd::Stopped).await {
            tracing::error!(run = %key, %error, "the end of a stopped run could not be stored");
        }
        self.schedule();
    }

    /// Ends every run's actor without a word to the control plane, and waits for all that must have ended.
    pub async fn shutdown(&self) {
        let active: Vec<RunKey> = self.with(|state| {
            state.closing = true;
            state.active.keys().copied().collect()
        });
        for key in active {
            self.ask(key, Ask::Shutdown);
        }
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
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

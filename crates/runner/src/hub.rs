//! The model's side of a run: one task that holds the model's stream, gathers the predicts of all lanes into groups, and
//! brings the model back after a failure. It never closes the participant: other adapters may share the server.

mod serve;

use std::sync::Arc;

use rlm_core::failure::{Failure, FailureCode, Retry};
use rlmesh_proto::core::v1::EnvSpec;
use rlmesh_proto::spaces::v1::SpaceValue;
use tokio::sync::{mpsc, oneshot, watch};

use crate::agent::Agent;
use crate::chunk::Ask;
use crate::components::{MODEL, Ready};
use crate::facts::{self, PeerFacts};
use crate::metrics::Metrics;
use crate::rows::Blame;
use crate::transport::Address;
use crate::tuning::{Backoff, Tuning};
use crate::wire::{ModelStream, OpenError};

use serve::Serving;

/// Who asked: a lane of an environment session, in a certain episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub session: u64,
    pub lane: usize,
    pub generation: u64,
}

/// One observation to act on.
#[derive(Debug)]
pub struct Predict {
    pub ticket: Ticket,
    pub alone: bool,
    /// The lane's adapter.
    pub route: String,
    pub episode_id: String,
    pub seed: u64,
    pub ask: Ask,
}

/// The answer for one lane.
#[derive(Debug)]
pub struct Predicted {
    pub lane: usize,
    pub generation: u64,
    pub result: Result<Vec<SpaceValue>, (Failure, Blame)>,
}

/// What a session hears from the hub.
#[derive(Debug)]
pub enum Heard {
    Predicted(Vec<Predicted>),
    /// All that was asked is void; lanes not listed were bystanders.
    Down {
        failure: Failure,
        blamed: Vec<(usize, u64, Blame)>,
    },
}

/// A bound adapter's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// The model has to see each observation.
    pub history: bool,
}

#[derive(Debug)]
pub enum BindError {
    /// The model went away; bind again when it is back.
    Later,
    Refused(Failure),
}

pub enum Call {
    Open {
        session: u64,
        heard: mpsc::Sender<Heard>,
    },
    Close {
        session: u64,
        routes: Vec<String>,
    },
    /// Calls of another epoch than the hub's are void.
    Bind {
        epoch: u64,
        routes: Vec<String>,
        spec: Box<EnvSpec>,
        edition: String,
        reply: oneshot::Sender<Result<Bound, BindError>>,
    },
    Predict {
        epoch: u64,
        jobs: Vec<Predict>,
    },
    EndEpisode {
        route: String,
        episode_id: String,
    },
}

/// Where the model stands.
#[derive(Debug, Clone)]
pub enum ModelState {
    Starting,
    /// The epoch rises whenever adapters have to be bound anew.
    Up {
        epoch: u64,
        facts: Arc<PeerFacts>,
    },
    Failed(Failure),
}

#[derive(Clone)]
pub struct Hub {
    calls: mpsc::Sender<Call>,
    state: watch::Receiver<ModelState>,
}

impl Hub {
    /// The hub's task ends when every handle is dropped or the model has failed for good.
    pub fn start(settings: HubSettings) -> (Self, tokio::task::JoinHandle<()>) {
        let (calls, inbox) = mpsc::channel(4096);
        let (state, watch) = watch::channel(ModelState::Starting);
        let task = tokio::spawn(settings.run(inbox, state));
        (Self { calls, state: watch }, task)
    }

    /// False when the hub is gone; its state says why.
    pub async fn call(&self, call: Call) -> bool {
        self.calls.send(call).await.is_ok()
    }

    #[must_use]
    pub fn state(&self) -> watch::Receiver<ModelState> {
        self.state.clone()
    }

    /// Waits for the model.
    pub async fn up(&self) -> Result<(u64, Arc<PeerFacts>), Failure> {
        let mut state = self.state.clone();
        let gone = || Failure::new(FailureCode::Internal, "the model's task ended without a word").of(MODEL);
        let found = state.wait_for(|state| !matches!(state, ModelState::Starting)).await.map_err(|_| gone())?.clone();
        match found {
            ModelState::Up { epoch, facts } => Ok((epoch, facts)),
            ModelState::Failed(failure) => Err(failure),
            ModelState::Starting => Err(gone()),
        }
    }
}

pub struct HubSettings {
    pub agent: Agent,
    pub metrics: Arc<Metrics>,
    pub tuning: Tuning,
    pub run_id: String,
    pub horizon: u32,
    pub progress_timeout: std::time::Duration,
}

/// How a stream to the model ended.
enum Ended {
    /// All handles are gone.
    Unused,
    /// The process is to be judged by the agent.
    Lost(String),
    /// It answered nothing for too long.
    Hung,
    /// A new stream to the same process is wanted.
    Reconnect(Failure),
}

impl HubSettings {
    async fn run(self, mut inbox: mpsc::Receiver<Call>, state: watch::Sender<ModelState>) {
        let mut serving = Serving::new(&self);
        let mut after = None;
        let mut epoch = 0;
        let mut fruitless = 0;
        loop {
            // Calls that come while no model serves are answered, not kept.
            let ready = tokio::select! {
                ready = self.agent.components.ready(MODEL, after) => ready,
                () = serving.refuse_calls(&mut inbox) => return,
            };
            let ready = match ready {
                Ok(ready) => ready,
                Err(failure) => {
                    serving.fail(&failure);
                    state.send_replace(ModelState::Failed(failure));
                    serving.refuse_calls(&mut inbox).await;
                    return;
                }
            };
            let failure = match self.serve_attempt(&ready, &mut serving, &mut inbox, &state, &mut epoch, &mut fruitless).await {
                Ok(()) => return,
                Err(failure) => failure,
            };
            // A fault of the request is final; everything else waits for the model's next attempt.
            let hopeless = matches!(failure.code.retry(), Retry::Never) || fruitless > self.tuning.fruitless_restarts;
            if hopeless {
                serving.fail(&failure);
                state.send_replace(ModelState::Failed(failure));
                serving.refuse_calls(&mut inbox).await;
                return;
            }
            after = Some(ready.attempt);
        }
    }

    /// Serves with one attempt of the model until it has ended; `Err` says how. `Ok`: nobody needs the model any more.
    async fn serve_attempt(
        &self,
        ready: &Ready,
        serving: &mut Serving,
        inbox: &mut mpsc::Receiver<Call>,
        state: &watch::Sender<ModelState>,
        epoch: &mut u64,
        fruitless: &mut u32,
    ) -> Result<(), Failure> {
        let address = match Address::parse(&ready.address) {
            Ok(address) => address,
            Err(error) => return Err(Failure::new(FailureCode::AgentError, format!("the agent's address of the model: {error}")).of(MODEL)),
        };
        let mut backoff = Backoff::new(self.tuning.backoff);
        let mut refusals = 0;
        loop {
            let opened = tokio::select! {
                opened = ModelStream::connect(MODEL, &address, 1024, &self.tuning) => opened,
                () = serving.refuse_calls(inbox) => return Ok(()),
                () = self.agent.components.gone(MODEL, ready.attempt) => {
                    *fruitless += 1;
                    let unsaid = || Failure::new(FailureCode::ConnectionLost, "the model was replaced; the agent did not say why").of(MODEL);
                    return Err(self.agent.components.verdict(MODEL, ready.attempt, std::time::Duration::ZERO).await.unwrap_or_else(unsaid));
                }
            };
            let stream = match opened {
                Ok(stream) => stream,
                Err(OpenError::Never(failure)) => return Err(failure),
                Err(OpenError::Later(message)) => {
                    refusals += 1;
                    if let Some(failure) = self.agent.components.verdict(MODEL, ready.attempt, std::time::Duration::ZERO).await {
                        *fruitless += 1;
                        return Err(failure);
                    }
                    if refusals > 5 {
                        *fruitless += 1;
                        return Err(self.replace(ready, FailureCode::ConnectionLost, message).await);
                    }
                    tracing::warn!(reason = %message, "the model can't be used yet; trying again");
                    tokio::time::sleep(backoff.pause()).await;
                    continue;
                }
            };
            facts::check_horizon(stream.facts.corners().as_deref(), None, self.horizon).map_err(|failure| failure.of(MODEL))?;
            *epoch += 1;
            let before = serving.flown();
            state.send_replace(ModelState::Up { epoch: *epoch, facts: Arc::new(stream.facts.clone()) });
            let ended = serving.serve(stream, *epoch, inbox, || self.agent.components.gone(MODEL, ready.attempt)).await;
            state.send_replace(ModelState::Starting);
            let fruitful = serving.flown() > before;
            if fruitful {
                *fruitless = 0;
                refusals = 0;
            } else {
                *fruitless += 1;
            }
            match ended {
                Ended::Unused => return Ok(()),
                Ended::Hung => {
                    let message =
                        format!("the model answered nothing for {} s; its process is replaced", self.progress_timeout.as_secs_f64());
                    let failure = self.replace(ready, FailureCode::ModelHung, message).await;
                    serving.down(&failure);
                    return Err(failure);
                }
                Ended::Reconnect(failure) => {
                    serving.down(&failure);
                    if *fruitless > self.tuning.fruitless_restarts {
                        return Err(failure);
                    }
                    tokio::time::sleep(backoff.pause()).await;
                }
                Ended::Lost(message) => {
                    let verdict = self.agent.components.verdict(MODEL, ready.attempt, self.tuning.verdict).await;
                    let lives = verdict.is_none();
                    let failure = verdict.unwrap_or_else(|| {
                        Failure::new(
                            FailureCode::ConnectionLost,
                            format!("the connection to the model broke ({message}); its process was not seen to end"),
                        )
                        .of(MODEL)
                    });
                    serving.down(&failure);
                    if !lives || *fruitless > self.tuning.fruitless_restarts {
                        return Err(failure);
                    }
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }

    /// Asks for a new process; the failure carries the last output of the old one.
    async fn replace(&self, ready: &Ready, code: FailureCode, message: String) -> Failure {
        self.agent.restart(MODEL, ready.attempt, &message);
        let mut failure = Failure::new(code, message).of(MODEL);
        if let Some(verdict) = self.agent.components.verdict(MODEL, ready.attempt, self.tuning.verdict).await {
            failure.log_lines = verdict.log_lines;
            failure.events = verdict.events;
        }
        failure
    }
}

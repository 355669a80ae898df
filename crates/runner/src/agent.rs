//! The runner's line to its agent: attaches, keeps attaching, delivers what the outbox holds, takes plan, component states,
//! acknowledgements and cancellation.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rlm_api::cluster::v1::{
    AcquireBinding, AgentCommand, Episode, Failure as WireFailure, Plan, Progress, RestartComponent, RunMetrics, RunnerMessage,
    agent_command::Command, runner_service_client::RunnerServiceClient,
};
use rlm_core::failure::Failure;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming};

use crate::components::Components;
use crate::outbox::{Next, Outbox};
use crate::pinned::CertificatePin;
use crate::transport::{self, Address};
use crate::tuning::{Backoff, Tuning};

/// Room for one finished episode until the agent has acknowledged it. A lane takes it before it begins a row, so that
/// finishing never waits.
#[derive(Debug)]
pub struct Permit(#[expect(dead_code, reason = "held until dropped")] OwnedSemaphorePermit);

/// Who this runner is to its agent.
pub struct Identity {
    pub run_id: String,
    pub token: Token,
    /// The agent's certificate, where it is reached over TLS.
    pub pin: Option<CertificatePin>,
}

/// What the runner attaches with; never logged.
pub enum Token {
    /// The one-time secret of this start.
    Once(String),
    /// A service account's token, which the kubelet renews in place.
    File(PathBuf),
}

impl Token {
    fn read(&self) -> Result<String, Break> {
        match self {
            Self::Once(token) => Ok(token.clone()),
            Self::File(path) => std::fs::read_to_string(path)
                .map(|token| token.trim().to_owned())
                .map_err(|error| Break::Lost(format!("the token {} can't be read: {error}", path.display()))),
        }
    }
}

/// Why the line is given up.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the agent refused this runner ({code:?}): {message}")]
    Refused { code: Code, message: String },
    #[error("no agent for {seconds} s, last: {last}")]
    Lost { seconds: u64, last: String },
    #[error("the agent answered something other than a plan at first")]
    NoPlan,
}

#[derive(Clone)]
pub struct Agent {
    outbox: Arc<Mutex<Outbox<Permit>>>,
    changed: Arc<Notify>,
    room: Arc<Semaphore>,
    pub components: Components,
    /// Cancelled when the agent cancels the run.
    pub cancel: CancellationToken,
    cancel_reason: Arc<Mutex<Option<String>>>,
}

impl Agent {
    #[must_use]
    pub fn new(tuning: &Tuning) -> Self {
        Self {
            outbox: Arc::new(Mutex::new(Outbox::new(tuning.flush))),
            changed: Arc::new(Notify::new()),
            room: Arc::new(Semaphore::new(tuning.unacknowledged.max(1))),
            components: Components::default(),
            cancel: CancellationToken::new(),
            cancel_reason: Arc::new(Mutex::new(None)),
        }
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox<Permit>> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, change: impl FnOnce(&mut Outbox<Permit>)) {
        change(&mut self.outbox());
        self.changed.notify_one();
    }

    /// Room for an episode, if there is any now.
    #[must_use]
    pub fn try_room(&self) -> Option<Permit> {
        Arc::clone(&self.room).try_acquire_owned().ok().map(Permit)
    }

    /// Room for an episode, when acknowledgements make some.
    pub async fn room(&self) -> Option<Permit> {
        Arc::clone(&self.room).acquire_owned().await.ok().map(Permit)
    }

    pub fn report(&self, episode: Episode, permit: Permit) {
        self.tell(|outbox| outbox.episode(episode, permit, Instant::now()));
    }

    pub fn acquire(&self, binding: u32, pods: u32, lanes_per_pod: u32) {
        self.tell(|outbox| outbox.acquire(AcquireBinding { binding, pods, lanes_per_pod }));
    }

    pub fn release(&self, binding: u32) {
        self.tell(|outbox| outbox.release(binding));
        self.components.forget(binding);
    }

    pub fn restart(&self, component: &str, attempt: u32, reason: &str) {
        tracing::warn!(component, attempt, reason, "asking for a new process");
        self.tell(|outbox| outbox.restart(RestartComponent { component: component.to_owned(), attempt, reason: reason.to_owned() }));
    }

    pub fn progress(&self, (episodes_finished, env_steps, active_lanes): (u64, u64, u32)) {
        self.tell(|outbox| outbox.progress(Progress { episodes_finished, env_steps, active_lanes }));
    }

    pub fn metrics(&self, metrics_json: String, at_unix_ms: i64) {
        self.tell(|outbox| outbox.metrics(RunMetrics { metrics_json, at_unix_ms }));
    }

    pub fn provenance(&self, document: String) {
        self.tell(|outbox| outbox.provenance(document));
    }

    pub fn done(&self, failure: Option<&Failure>) {
        self.tell(|outbox| outbox.done(failure.map(WireFailure::from)));
    }

    /// Why the run was cancelled.
    #[must_use]
    pub fn cancel_reason(&self) -> Option<String> {
        self.cancel_reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until everything reported is acknowledged; false when that takes longer than `deadline`.
    pub async fn deliver(&self, deadline: Duration) -> bool {
        let all = async {
            while !self.outbox().delivered() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(deadline, all).await.is_ok()
    }

    fn cancel_for(&self, reason: &str) {
        self.cancel_reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.to_owned());
        self.cancel.cancel();
    }

    /// Keeps the line until the end of the run is acknowledged. The first plan goes to `plan`.
    pub async fn run(&self, address: &Address, identity: &Identity, tuning: &Tuning, plan: oneshot::Sender<Plan>) -> Result<(), LinkError> {
        let mut plan = Some(plan);
        let mut backoff = Backoff::new(tuning.backoff);
        let mut alone_since = Instant::now();
        loop {
            let error = match self.session(address, identity, tuning, &mut plan, &mut backoff, &mut alone_since).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let last = match error {
                Break::Refused { code, message } if plan.is_some() => return Err(LinkError::Refused { code, message }),
                Break::NoPlan if plan.is_some() => return Err(LinkError::NoPlan),
                Break::Refused { code, message } => format!("{code:?}: {message}"),
                Break::NoPlan => "no plan came first".to_owned(),
                Break::Lost(message) => message,
            };
            if alone_since.elapsed() >= tuning.agent_patience {
                return Err(LinkError::Lost { seconds: alone_since.elapsed().as_secs(), last });
            }
            let pause = backoff.pause();
            tracing::warn!(reason = %last, pause_ms = pause.as_millis(), "the line to the agent is down; attaching again");
            tokio::time::sleep(pause).await;
        }
    }

    async fn session(
        &self,
        address: &Address,
        identity: &Identity,
        tuning: &Tuning,
        plan: &mut Option<oneshot::Sender<Plan>>,
        backoff: &mut Backoff,
        alone_since: &mut Instant,
    ) -> Result<(), Break> {
        let channel = transport::dial_pinned(address, identity.pin, tuning.connect).await.map_err(Break::Lost)?;
        let mut client = RunnerServiceClient::new(channel)
            .max_decoding_message_size(transport::MAX_MESSAGE)
            .max_encoding_message_size(transport::MAX_MESSAGE);
        let (outgoing, stream) = mpsc::channel::<RunnerMessage>(16);
        let attach = Outbox::<Permit>::attach(&identity.run_id, &identity.token.read()?);
        outgoing.send(attach).await.map_err(|_| Break::Lost("the stream closed at once".to_owned()))?;
        let mut incoming = within(tuning.handshake, client.attach(ReceiverStream::new(stream))).await?.into_inner();
        let first = within(tuning.handshake, incoming.message()).await?;
        let Some(AgentCommand { command: Some(Command::Plan(first)) }) = first else { return Err(Break::NoPlan) };
        if let Some(waiting) = plan.take() {
            let _ = waiting.send(first);
        }
        self.outbox().attached();
        backoff.reset();
        let result = self.exchange(&outgoing, &mut incoming).await;
        *alone_since = Instant::now();
        result
    }

    async fn exchange(&self, outgoing: &mpsc::Sender<RunnerMessage>, incoming: &mut Streaming<AgentCommand>) -> Result<(), Break> {
        let mut pending: Option<RunnerMessage> = None;
        loop {
            let mut wake = None;
            if pending.is_none() {
                match self.outbox().next(Instant::now()) {
                    Next::Send(message) => pending = Some(*message),
                    Next::At(at) => wake = Some(at),
                    Next::Nothing => {}
                }
            }
            tokio::select! {
                slot = outgoing.reserve(), if pending.is_some() => match slot {
                    Ok(slot) => if let Some(message) = pending.take() { slot.send(message) },
                    Err(_) => return Err(Break::Lost("the stream was closed".to_owned())),
                },
                command = incoming.message() => match command {
                    Ok(Some(command)) => {
                        self.take(command);
                        if self.outbox().finished() {
                            return Ok(());
                        }
                    }
                    Ok(None) => return Err(Break::Lost("the agent ended the stream".to_owned())),
                    Err(status) => return Err(Break::from(status)),
                },
                () = until(wake) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    fn take(&self, command: AgentCommand) {
        match command.command {
            Some(Command::Component(component)) => {
                tracing::debug!(component = %component.name, attempt = component.attempt, phase = ?component.phase(), "component");
                self.outbox().attempt_seen(&component.name, component.attempt);
                self.components.update(&component);
            }
            Some(Command::Ack(ack)) => self.outbox().acknowledged(ack.sequence),
            Some(Command::Cancel(cancel)) => self.cancel_for(&cancel.reason),
            // A plan that comes again holds nothing new: what is open is known here.
            Some(Command::Plan(_)) => {}
            None => tracing::warn!("a command of a newer agent was ignored"),
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

enum Break {
    Refused { code: Code, message: String },
    NoPlan,
    Lost(String),
}

impl From<tonic::Status> for Break {
    fn from(status: tonic::Status) -> Self {
        let message = status.message().to_owned();
        match status.code() {
            code @ (Code::Unauthenticated
            | Code::PermissionDenied
            | Code::NotFound
            | Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::Unimplemented) => Self::Refused { code, message },
            code => Self::Lost(format!("{code:?}: {message}")),
        }
    }
}

async fn within<T>(deadline: Duration, call: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, Break> {
    match tokio::time::timeout(deadline, call).await {
        Ok(result) => result.map_err(Break::from),
        Err(_) => Err(Break::Lost(format!("the agent did not answer within {} s", deadline.as_secs_f64()))),
    }
}

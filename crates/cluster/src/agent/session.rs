//! One session with the control plane: opened, fed from the spool, and followed until it ends. Owns no result: what is sent
//! stays in the spool until it is acknowledged.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::agent_message::Message as Outgoing;
use rlm_api::cluster::v1::cluster_service_client::ClusterServiceClient;
use rlm_api::cluster::v1::server_message::Message as Incoming;
use rlm_core::tokens::Secret;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use super::backoff::Backoff;
use super::connect::{Refusal, Server, authorized, refusal};
use super::decide::{self, Window};
use super::health::Health;
use super::state_dir::{StateDir, StoredCredential};
use crate::executor::Executor;
use crate::spool::{RunKey, Spool, Stats};

/// From the request to the welcome.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// A peer that takes no message for this long is gone.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Records that stay unacknowledged for this long: something is wrong with this session.
const ACK_TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of one batch of records; messages stay under 1 MiB.
const BATCH_BYTES: usize = 512 << 10;
/// Describes at once, and log requests at once: a describe may take minutes, and logs must not wait for it.
const SIDE_TASKS: usize = 4;

/// What every session of this agent uses.
#[derive(Clone)]
pub struct Setup {
    pub server: Server,
    pub spool: Spool,
    pub executor: Arc<dyn Executor>,
    pub state: Arc<StateDir>,
    pub health: Health,
    pub versions: v1::Versions,
    pub heartbeat: Duration,
    pub max_backoff: Duration,
    pub side_tasks: SideTasks,
}

/// Room for what is done beside the session.
#[derive(Clone)]
pub struct SideTasks {
    describes: Arc<Semaphore>,
    logs: Arc<Semaphore>,
}

impl Default for SideTasks {
    fn default() -> Self {
        Self { describes: Arc::new(Semaphore::new(SIDE_TASKS)), logs: Arc::new(Semaphore::new(SIDE_TASKS)) }
    }
}

/// A session that was welcomed.
pub struct Live {
    outgoing: mpsc::Sender<v1::AgentMessage>,
    incoming: Streaming<v1::ServerMessage>,
    welcome: v1::Welcome,
    instance_id: String,
    durable: u64,
}

/// How a session ended.
pub enum End {
    /// To be opened again, at once or after a pause.
    Lost { message: String, retry_after: Option<Duration>, good: bool },
    /// Not to be opened again with this credential.
    Refused { code: String, message: String },
    /// A session with a newer credential took its place.
    Replaced(Box<Live>),
    /// The agent stops.
    Stopped,
}

fn lost(message: impl Into<String>) -> Refusal {
    Refusal::Transient { message: message.into(), retry_after: None }
}

/// Opens a session: hello, welcome, and what the welcome says about positions.
pub async fn open(setup: &Setup, secret: &Secret) -> Result<Live, Refusal> {
    tokio::time::timeout(OPEN_TIMEOUT, open_slowly(setup, secret))
        .await
        .unwrap_or_else(|_| Err(lost("the session was not welcomed in time")))
}

async fn open_slowly(setup: &Setup, secret: &Secret) -> Result<Live, Refusal> {
    let channel = setup.server.connect().await.map_err(|error| lost(format!("{error:#}")))?;
    let spool_failed = |error: crate::spool::SpoolError| lost(error.to_string());
    let held = setup.spool.held().await.map_err(spool_failed)?;
    let position = setup.spool.position().borrow().clone();
    let instance_id = position.instance_id.clone();
    let hello = v1::Hello {
        instance_id: position.instance_id,
        versions: Some(setup.versions.clone()),
        epoch: position.epoch,
        acknowledged: position.acknowledged,
        runs: decide::to_announce(&held).into_iter().map(to_ref).collect(),
        executor: setup.executor.name().to_owned(),
        inventory: Some(setup.executor.inventory()),
    };
    let (outgoing, queue) = mpsc::channel(16);
    let first = v1::AgentMessage { message: Some(Outgoing::Hello(hello)) };
    outgoing.send(first).await.map_err(|_| lost("the session closed at once"))?;
    let request = authorized(ReceiverStream::new(queue), secret).map_err(|error| lost(format!("{error:#}")))?;
    let mut incoming = ClusterServiceClient::new(channel).session(request).await.map_err(|status| refusal(&status))?.into_inner();
    let welcome = match incoming.message().await.map_err(|status| refusal(&status))?.and_then(|first| first.message) {
        Some(Incoming::Welcome(welcome)) => welcome,
        Some(Incoming::Goodbye(goodbye)) => return Err(farewell(&goodbye)),
        Some(_) => return Err(lost("the first message of the control plane was not a welcome")),
        None => return Err(lost("the control plane closed the session without a welcome")),
    };
    let position = setup.spool.welcome(welcome.epoch.clone(), welcome.durable).await.map_err(spool_failed)?;
    if position.instance_id != instance_id {
        return Err(lost("the control plane has records that this spool does not have; going on under a new name"));
    }
    Ok(Live { outgoing, incoming, welcome, instance_id, durable: position.acknowledged })
}

fn farewell(goodbye: &v1::Goodbye) -> Refusal {
    let terminal =
        rlm_core::error::Code::ALL.iter().copied().find(|code| code.as_str() == goodbye.code).is_some_and(super::connect::is_terminal);
    if terminal {
        return Refusal::Terminal { code: goodbye.code.clone(), message: goodbye.message.clone() };
    }
    let retry_after = (goodbye.retry_after_ms > 0).then(|| Duration::from_millis(goodbye.retry_after_ms));
    Refusal::Transient { message: format!("{}: {}", goodbye.code, goodbye.message), retry_after }
}

fn to_ref(key: RunKey) -> v1::RunRef {
    v1::RunRef { run_id: key.run_id.to_string(), generation: key.generation }
}

fn from_ref(run: &v1::RunRef) -> Option<RunKey> {
    Some(RunKey { run_id: run.run_id.parse().ok()?, generation: run.generation })
}

struct Session<'a> {
    setup: &'a Setup,
    live: Live,
    window: Window,
    replies: mpsc::Sender<v1::AgentMessage>,
    stats: Stats,
    draining: bool,
    /// Something was acknowledged, or it lived long enough: the next failure starts the back-off anew.
    good: bool,
}

type Candidate = BoxFuture<'static, Result<Live, Refusal>>;

/// Follows a session until it ends. `credential` changes when the file does; `None` never comes once there was one.
pub async fn follow(setup: &Setup, live: Live, credential: &mut watch::Receiver<Option<Secret>>, stop: &CancellationToken) -> End {
    let (replies, mut ready_replies) = mpsc::channel(16);
    let durable = live.durable;
    let mut session =
        Session { setup, live, window: Window::from(durable), replies, stats: Stats::default(), draining: false, good: false };
    if let Err(end) = session.begin().await {
        return end;
    }
    let mut position = setup.spool.position();
    let mut heartbeat = tokio::time::interval(setup.heartbeat);
    heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let started = Instant::now();
    let mut candidate: Option<Candidate> = None;
    let mut watching = true;
    loop {
        let behind = position.borrow_and_update().last > session.window.sent && session.window.has_room();
        if position.borrow().instance_id != session.live.instance_id {
            return End::Lost { message: "the spool was replaced".to_owned(), retry_after: Some(Duration::ZERO), good: true };
        }
        let overdue = session.window.oldest().map(|sent| sent + ACK_TIMEOUT);
        let step = tokio::select! {
            () = stop.cancelled() => return session.leave().await,
            message = session.live.incoming.message() => match message {
                Ok(Some(message)) => session.on_message(message).await,
                Ok(None) => Err(session.ended("the control plane closed the session", None)),
                Err(status) => Err(session.refused(refusal(&status))),
            },
            changed = position.changed(), if !behind => changed.map_err(|_| session.ended("the spool is closed", None)),
            () = std::future::ready(()), if behind => session.send_records().await,
            reply = ready_replies.recv() => match reply {
                Some(reply) => session.send(reply).await,
                None => Ok(()),
            },
            _ = heartbeat.tick() => {
                session.good |= started.elapsed() > Duration::from_secs(10);
                session.beat().await
            }
            () = async { match overdue { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {
                Err(session.ended("records were not acknowledged in time", None))
            }
            changed = credential.changed(), if watching => {
                // The watcher ends with the agent.
                watching = changed.is_ok();
                let newer = credential.borrow_and_update().clone();
                if let (true, Some(secret)) = (watching, newer) {
                    tracing::info!("the control credential changed; opening a session with the new one");
                    candidate = Some(Box::pin(reopen(setup.clone(), secret)));
                }
                Ok(())
            }
            opened = async { match &mut candidate { Some(candidate) => candidate.await, None => std::future::pending().await } } => {
                candidate = None;
                match opened {
                    Ok(live) => return End::Replaced(Box::new(live)),
                    Err(error) => {
                        session.keep_old(&error);
                        Ok(())
                    }
                }
            }
        };
        if let Err(end) = step {
            // Opening the newer session ends the older one: its end is then no loss.
            if let Some(candidate) = candidate.take()
                && let Ok(Ok(live)) = tokio::time::timeout(OPEN_TIMEOUT, candidate).await
            {
                return End::Replaced(Box::new(live));
            }
            return end;
        }
    }
}

/// Opens a session with a newer credential, for as long as only the connection is in the way.
async fn reopen(setup: Setup, secret: Secret) -> Result<Live, Refusal> {
    let mut backoff = Backoff::new(setup.max_backoff);
    loop {
        match open(&setup, &secret).await {
            Err(Refusal::Transient { message, retry_after }) => {
                tracing::warn!(%message, "the session with the new credential is not open yet");
                tokio::time::sleep(backoff.next(retry_after)).await;
            }
            other => return other,
        }
    }
}

type Step = Result<(), End>;

impl Session<'_> {
    fn ended(&self, message: &str, retry_after: Option<Duration>) -> End {
        End::Lost { message: message.to_owned(), retry_after, good: self.good }
    }

    fn refused(&self, refusal: Refusal) -> End {
        match refusal {
            Refusal::Transient { message, retry_after } => End::Lost { message, retry_after, good: self.good },
            Refusal::Terminal { code, message } => End::Refused { code, message },
        }
    }

    fn keep_old(&self, error: &Refusal) {
        let (Refusal::Transient { message, .. } | Refusal::Terminal { message, .. }) = error;
        tracing::error!(%message, "the new control credential was refused; the session goes on with the old one");
        self.setup.health.new_credential_refused(message);
    }

    async fn begin(&mut self) -> Step {
        let welcome = self.live.welcome.clone();
        tracing::info!(cluster = %welcome.cluster_id, session = welcome.session_generation, durable = welcome.durable, "session open");
        self.setup.health.connected();
        self.draining = welcome.draining;
        let leased: Vec<RunKey> = welcome.runs.iter().filter_map(from_ref).collect();
        let held = self.setup.spool.held().await.map_err(|error| self.ended(&error.to_string(), None))?;
        for key in decide::to_stop(&held, &leased) {
            tracing::warn!(run = %key, "the run is not this cluster's any more; stopping it");
            self.setup.executor.stop(key).await;
        }
        Ok(())
    }

    async fn send(&self, message: v1::AgentMessage) -> Step {
        match tokio::time::timeout(SEND_TIMEOUT, self.live.outgoing.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(self.ended("the session is closed", None)),
            Err(_) => Err(self.ended("the control plane takes no messages", None)),
        }
    }

    async fn send_records(&mut self) -> Step {
        let records =
            self.setup.spool.read(self.window.sent + 1, BATCH_BYTES).await.map_err(|error| self.ended(&error.to_string(), None))?;
        let Some(last) = records.last().map(|record| record.sequence) else { return Ok(()) };
        self.window.sent(last, Instant::now());
        self.send(v1::AgentMessage { message: Some(Outgoing::Records(v1::Records { records })) }).await
    }

    async fn beat(&mut self) -> Step {
        // A spool that is busy with its disk must not stop the heartbeats.
        if let Ok(Ok(stats)) = tokio::time::timeout(Duration::from_secs(2), self.setup.spool.stats()).await {
            self.stats = stats;
        }
        let runs = self.setup.executor.running();
        self.setup.health.measured(self.stats, runs);
        self.setup.health.draining(self.draining, runs == 0 && self.stats.unacknowledged == 0);
        let heartbeat = v1::Heartbeat {
            clock_unix_ms: chrono::Utc::now().timestamp_millis(),
            running_runs: runs,
            spool_unacknowledged_records: self.stats.unacknowledged,
            spool_bytes: self.stats.bytes,
            oldest_unacknowledged_unix_ms: self.stats.oldest_unacknowledged_ms,
            inventory: Some(self.setup.executor.inventory()),
            conditions: self.setup.health.conditions(),
        };
        self.send(v1::AgentMessage { message: Some(Outgoing::Heartbeat(heartbeat)) }).await
    }

    async fn on_message(&mut self, message: v1::ServerMessage) -> Step {
        match message.message {
            Some(Incoming::Assign(assign)) => {
                self.setup
                    .executor
                    .assign(assign)
                    .await
                    .map_err(|error| self.ended(&format!("a run could not be taken: {error}"), None))?;
            }
            Some(Incoming::Cancel(cancel)) => match cancel.run_id.parse() {
                Ok(run_id) => {
                    let key = RunKey { run_id, generation: cancel.generation };
                    tracing::info!(run = %key, "run cancelled");
                    self.setup.executor.cancel(key).await;
                }
                Err(error) => tracing::error!(%error, "a cancel can't be read"),
            },
            Some(Incoming::Ack(ack)) => {
                self.good = true;
                self.window.acknowledged(ack.durable);
                self.setup.spool.acknowledge(ack.durable).await.map_err(|error| self.ended(&error.to_string(), None))?;
            }
            Some(Incoming::Drain(drain)) => {
                tracing::info!(draining = drain.draining, "drain");
                self.draining = drain.draining;
                return self.beat().await;
            }
            Some(Incoming::Rotate(rotate)) => self.rotate(rotate),
            Some(Incoming::LogRequest(request)) => {
                let executor = Arc::clone(&self.setup.executor);
                self.aside(&self.setup.side_tasks.logs, async move { Outgoing::LogReply(executor.logs(request).await) });
            }
            Some(Incoming::Describe(request)) => {
                let executor = Arc::clone(&self.setup.executor);
                self.aside(&self.setup.side_tasks.describes, async move { Outgoing::DescribeReply(executor.describe(request).await) });
            }
            Some(Incoming::Goodbye(goodbye)) => return Err(self.refused(farewell(&goodbye))),
            Some(Incoming::Welcome(_)) => tracing::warn!("a second welcome on one session"),
            // A newer control plane's message that this version does not know.
            None => {}
        }
        Ok(())
    }

    /// Works on a request beside the session; the reply goes out on this session or is lost with it.
    fn aside(&self, limit: &Arc<Semaphore>, work: impl Future<Output = Outgoing> + Send + 'static) {
        let (replies, limit) = (self.replies.clone(), Arc::clone(limit));
        tokio::spawn(async move {
            let Ok(_permit) = limit.acquire_owned().await else { return };
            tokio::select! {
                // The session is gone, and whoever asked with it.
                () = replies.closed() => {}
                message = work => drop(replies.send(v1::AgentMessage { message: Some(message) }).await),
            }
        });
    }

    /// Stores a new credential; the file's watcher then opens the session with it.
    fn rotate(&self, rotate: v1::Rotate) {
        let Some(credential) = rotate.credential else { return };
        let stored = StoredCredential { purpose: credential.purpose, id: credential.id, secret: credential.secret };
        let store = || -> anyhow::Result<()> {
            let mut credentials = self.setup.state.credentials()?.ok_or_else(|| anyhow::anyhow!("there are no credentials to replace"))?;
            rlm_core::tokens::Secret::parse(&stored.secret).map_err(|error| anyhow::anyhow!("the new credential is not one: {error}"))?;
            credentials.credentials.retain(|known| known.purpose != stored.purpose);
            credentials.credentials.push(stored.clone());
            self.setup.state.store_credentials(&credentials)
        };
        match store() {
            Ok(()) => tracing::info!(purpose = %stored.purpose, "a new credential was stored"),
            Err(error) => {
                tracing::error!(%error, purpose = %stored.purpose, "a new credential could not be stored");
                self.setup.health.new_credential_refused(&format!("{error:#}"));
            }
        }
    }

    /// The agent stops: what the runs' ends still brought is sent if the control plane takes it quickly.
    async fn leave(mut self) -> End {
        let deadline = Instant::now() + Duration::from_secs(2);
        let position = self.setup.spool.position();
        while Instant::now() < deadline {
            let (last, acknowledged) = {
                let position = position.borrow();
                (position.last, position.acknowledged)
            };
            if acknowledged >= last {
                break;
            }
            if last > self.window.sent && self.window.has_room() && self.send_records().await.is_err() {
                break;
            }
            match tokio::time::timeout(Duration::from_millis(100), self.live.incoming.message()).await {
                Ok(Ok(Some(v1::ServerMessage { message: Some(Incoming::Ack(ack)) }))) => {
                    self.window.acknowledged(ack.durable);
                    if self.setup.spool.acknowledge(ack.durable).await.is_err() {
                        break;
                    }
                }
                Ok(Ok(Some(_))) | Err(_) => {}
                Ok(Ok(None) | Err(_)) => break,
            }
        }
        End::Stopped
    }
}

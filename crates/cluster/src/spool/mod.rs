//! The spool: what the agent must not lose, on disk before it is acknowledged to anyone.
//!
//! One thread owns the database; everyone else sends it requests over a bounded channel and waits. Results and status are
//! never dropped: when there is no room their senders wait. Telemetry goes first, oldest first, and is counted. A database
//! that can't be read is set aside under another name, never deleted.

mod db;
mod quarantine;
mod quota;
mod verify;
mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use rlm_api::cluster::v1;
use rlm_core::ids::RunId;
use tokio::sync::{mpsc, oneshot, watch};

pub use quota::{Step, Usage, next_step};
pub use verify::{Report, verify};

/// The database's name in the state folder.
pub const FILE: &str = "spool.db";
/// Requests that wait for the spool's thread.
const QUEUE: usize = 256;

/// One run as this cluster holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunKey {
    pub run_id: RunId,
    pub generation: u64,
}

impl std::fmt::Display for RunKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}@{}", self.run_id, self.generation)
    }
}

/// What the spool is allowed to use, and its time source.
#[derive(Clone)]
pub struct Options {
    /// Bytes that the database may grow to.
    pub quota_bytes: u64,
    /// How long acknowledged records stay, so that a control plane restored from a backup gets them again.
    pub retain: Duration,
    /// Unix milliseconds.
    pub clock: Arc<dyn Fn() -> i64 + Send + Sync>,
}

impl Default for Options {
    fn default() -> Self {
        Self { quota_bytes: 10 << 30, retain: Duration::from_secs(72 * 3600), clock: Arc::new(|| chrono::Utc::now().timestamp_millis()) }
    }
}

/// Whether a record may be dropped for lack of room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Episode,
    Status,
    Telemetry,
    Loss,
}

impl Kind {
    const fn to_sql(self) -> i64 {
        match self {
            Self::Episode => 1,
            Self::Status => 2,
            Self::Telemetry => 3,
            Self::Loss => 4,
        }
    }
}

/// A record without its position.
#[derive(Debug, Clone, PartialEq)]
pub struct NewRecord {
    key: Option<RunKey>,
    kind: Kind,
    attempt: Option<(u64, u32)>,
    payload: Vec<u8>,
}

impl NewRecord {
    fn encode(key: Option<RunKey>, kind: Kind, attempt: Option<(u64, u32)>, payload: v1::record::Payload) -> Self {
        let record = v1::Record {
            sequence: 0,
            run_id: key.map(|key| key.run_id.to_string()).unwrap_or_default(),
            generation: key.map(|key| key.generation).unwrap_or_default(),
            payload: Some(payload),
        };
        Self { key, kind, attempt, payload: record.encode_to_vec() }
    }

    /// A finished attempt; its key is (run, generation, row, attempt), and the first one stored stays.
    #[must_use]
    pub fn episode(key: RunKey, episode: v1::Episode) -> Self {
        let attempt = Some((episode.row, episode.attempt));
        Self::encode(Some(key), Kind::Episode, attempt, v1::record::Payload::Episode(episode))
    }

    #[must_use]
    pub fn status(key: RunKey, status: v1::RunStatus) -> Self {
        Self::encode(Some(key), Kind::Status, None, v1::record::Payload::RunStatus(status))
    }

    #[must_use]
    pub fn metrics(key: RunKey, metrics: v1::RunMetrics) -> Self {
        Self::encode(Some(key), Kind::Telemetry, None, v1::record::Payload::RunMetrics(metrics))
    }

    #[must_use]
    pub fn loss(reason: impl Into<String>, records: u64) -> Self {
        let loss = v1::SpoolLoss { reason: reason.into(), records };
        Self::encode(None, Kind::Loss, None, v1::record::Payload::SpoolLoss(loss))
    }
}

/// How a run stands in the spool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    Finished,
    Failed,
    Cancelled,
    /// Stopped without a word to the control plane, which gave its lease to someone else.
    Stopped,
}

impl RunEnd {
    const fn to_sql(self) -> i64 {
        match self {
            Self::Finished => 1,
            Self::Failed => 2,
            Self::Cancelled => 3,
            Self::Stopped => 4,
        }
    }
}

/// A run that the spool knows.
#[derive(Debug, Clone, PartialEq)]
pub struct HeldRun {
    pub key: RunKey,
    /// The assignment as it came.
    pub assign: v1::Assign,
    /// None: goes on.
    pub ended: bool,
    /// Ended, and the control plane acknowledged its last record.
    pub settled: bool,
}

/// What a run's attempts came to so far.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcomes {
    /// Rows with an outcome, ascending. A runner reports a row once it has decided it.
    pub done: Vec<u64>,
    /// Highest attempt of any row; None: there is none.
    pub max_attempt: Option<u32>,
}

/// Where the spool stands. Changes are watched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Position {
    /// Names this spool to the control plane; a new one after the database was set aside.
    pub instance_id: String,
    /// Control plane that last acknowledged; empty at first.
    pub epoch: String,
    /// Highest sequence on disk.
    pub last: u64,
    /// Highest sequence that the control plane has.
    pub acknowledged: u64,
}

/// What heartbeats and metrics say about the spool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub bytes: u64,
    pub unacknowledged: u64,
    pub oldest_unacknowledged_ms: i64,
    /// Appends that wait for room.
    pub waiting: u64,
    pub telemetry_dropped: u64,
}

/// Why the spool did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpoolError {
    #[error("the spool is closed")]
    Closed,
    #[error("the spool at {path} failed: {problem}")]
    Failed { path: PathBuf, problem: String },
}

type Reply<T> = oneshot::Sender<Result<T, SpoolError>>;

enum Request {
    Append { records: Vec<NewRecord>, end: Option<(RunKey, RunEnd)>, reply: Reply<()> },
    Hold { key: RunKey, assign: v1::Assign, reply: Reply<bool> },
    End { key: RunKey, end: RunEnd, reply: Reply<()> },
    Held { reply: Reply<Vec<HeldRun>> },
    Outcomes { key: RunKey, reply: Reply<Outcomes> },
    Read { from: u64, max_bytes: usize, reply: Reply<Vec<v1::Record>> },
    Acknowledge { durable: u64, reply: Reply<()> },
    Welcome { epoch: String, durable: u64, reply: Reply<Position> },
    Stats { reply: Reply<Stats> },
}

/// A handle to the spool. Cheap to clone; the thread ends when the last one is dropped.
#[derive(Clone)]
pub struct Spool {
    requests: mpsc::Sender<Request>,
    position: watch::Receiver<Position>,
}

impl Spool {
    /// Opens the spool in `folder`, or starts one. A database that can't be read is set aside, and what could be read of it
    /// goes on in the new one.
    pub fn open(folder: &Path, options: Options) -> anyhow::Result<Self> {
        let (requests, inbox) = mpsc::channel(QUEUE);
        let (announce, position) = watch::channel(Position::default());
        let worker = worker::Worker::start(folder.join(FILE), options, announce)?;
        std::thread::Builder::new().name("spool".to_owned()).spawn(move || worker.run(inbox))?;
        Ok(Self { requests, position })
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, SpoolError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).await.map_err(|_| SpoolError::Closed)?;
        answer.await.map_err(|_| SpoolError::Closed)?
    }

    /// Stores the records; returns once they are on disk. Waits while there is no room.
    pub async fn append(&self, records: Vec<NewRecord>) -> Result<(), SpoolError> {
        self.ask(|reply| Request::Append { records, end: None, reply }).await
    }

    /// Stores the records and, in the same transaction, that the run has ended.
    pub async fn append_end(&self, records: Vec<NewRecord>, key: RunKey, end: RunEnd) -> Result<(), SpoolError> {
        self.ask(|reply| Request::Append { records, end: Some((key, end)), reply }).await
    }

    /// Notes an assigned run, so that a restart goes on with it. False: it was known already.
    pub async fn hold(&self, key: RunKey, assign: v1::Assign) -> Result<bool, SpoolError> {
        self.ask(|reply| Request::Hold { key, assign, reply }).await
    }

    /// Notes that a run has ended, without a record.
    pub async fn end(&self, key: RunKey, end: RunEnd) -> Result<(), SpoolError> {
        self.ask(|reply| Request::End { key, end, reply }).await
    }

    /// All the runs that it knows.
    pub async fn held(&self) -> Result<Vec<HeldRun>, SpoolError> {
        self.ask(|reply| Request::Held { reply }).await
    }

    /// What the run's attempts came to.
    pub async fn outcomes(&self, key: RunKey) -> Result<Outcomes, SpoolError> {
        self.ask(|reply| Request::Outcomes { key, reply }).await
    }

    /// Records from sequence `from` on, at most `max_bytes` of them (at least one when there is one). A record that can't be
    /// read stands as a loss at its own position, so that it never blocks the ones behind it.
    pub async fn read(&self, from: u64, max_bytes: usize) -> Result<Vec<v1::Record>, SpoolError> {
        self.ask(|reply| Request::Read { from, max_bytes, reply }).await
    }

    /// The control plane has everything up to `durable`.
    pub async fn acknowledge(&self, durable: u64) -> Result<(), SpoolError> {
        self.ask(|reply| Request::Acknowledge { durable, reply }).await
    }

    /// A session began with this epoch and durable position: decides what is to be offered again.
    pub async fn welcome(&self, epoch: String, durable: u64) -> Result<Position, SpoolError> {
        self.ask(|reply| Request::Welcome { epoch, durable, reply }).await
    }

    pub async fn stats(&self) -> Result<Stats, SpoolError> {
        self.ask(|reply| Request::Stats { reply }).await
    }

    /// Where it stands, now and at each change.
    #[must_use]
    pub fn position(&self) -> watch::Receiver<Position> {
        self.position.clone()
    }
}

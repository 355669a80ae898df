//! Live agent sessions of this process: who is connected, what can be asked of them, how they are ended.
//!
//! Holds no durable state: everything here can be lost at any moment and is made again when agents reconnect. Must never
//! hold its lock across an await, and never wait for an agent without a deadline.

pub mod link;
mod requests;
pub mod session;
pub mod watch;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rlm_api::cluster::v1::{self, ServerMessage, server_message};
use rlm_core::error::{Code, Error};
use rlm_core::ids::{ClusterId, CredentialId, RunId};
use tokio::sync::{Notify, mpsc, watch as watched};

pub use requests::Described;

/// Messages that may wait for an agent that reads slowly.
pub const OUTBOUND: usize = 64;
/// Places of [`OUTBOUND`] that assignments leave free for everything else.
const RESERVED: usize = 8;

/// What goes to an agent.
#[derive(Debug)]
pub enum Outbound {
    Message(ServerMessage),
    /// The session is refused; nothing follows.
    Refused(Error),
}

impl From<server_message::Message> for Outbound {
    fn from(message: server_message::Message) -> Self {
        Self::Message(ServerMessage { message: Some(message) })
    }
}

/// Why the control plane ends a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The same agent opened a newer one.
    Superseded,
    Archived,
    /// The overlap of its credential ended.
    CredentialRetired,
    /// Nothing was heard for too long.
    Silent,
    Shutdown,
    /// The control plane could not store what the agent sent.
    StoreFailed,
}

impl Ending {
    fn goodbye(self) -> v1::Goodbye {
        let (code, message, retry_after_ms) = match self {
            Self::Superseded => (Code::Conflict, "this agent opened a newer session; that one goes on", 0),
            Self::Archived => (
                Code::ClusterArchived,
                "the cluster's registration was archived and its credentials are revoked; connect it again as a new cluster",
                0,
            ),
            Self::CredentialRetired => {
                (Code::Unauthenticated, "the control credential of this session was replaced and its overlap has ended; use the new one", 0)
            }
            Self::Silent => (Code::DeadlineExceeded, "nothing was heard from this agent for too long; connect again", 0),
            Self::Shutdown => (Code::Unavailable, "the control plane is restarting; connect again", 1000),
            Self::StoreFailed => (Code::Unavailable, "the control plane could not store what was sent; send it again", 1000),
        };
        v1::Goodbye { code: code.as_str().to_owned(), message: message.to_owned(), retry_after_ms }
    }
}

/// One connected agent.
pub(crate) struct Live {
    pub cluster: ClusterId,
    pub session_generation: u64,
    pub credential: CredentialId,
    out: mpsc::Sender<Outbound>,
    ending: watched::Sender<Option<Ending>>,
    last_seen: AtomicI64,
    /// When its credential stops to be valid; `i64::MAX` while nothing replaces it.
    credential_ends: AtomicI64,
    pending: requests::Pending,
    /// Cancellations told in this session.
    cancels: Mutex<HashSet<link::Held>>,
}

impl Live {
    fn end(&self, why: Ending) {
        self.ending.send_if_modified(|ending| {
            let first = ending.is_none();
            if first {
                *ending = Some(why);
            }
            first
        });
    }

    pub(crate) fn seen(&self, now_ms: i64) {
        self.last_seen.fetch_max(now_ms, Ordering::Relaxed);
    }

    pub(crate) fn last_seen(&self) -> i64 {
        self.last_seen.load(Ordering::Relaxed)
    }
}

/// A place in the queue of one session, for one assignment.
pub struct Place {
    session_generation: u64,
    permit: mpsc::OwnedPermit<Outbound>,
    live: Arc<Live>,
}

impl Place {
    /// The lease is stored only while this is the cluster's newest session: a later one reads it from the database.
    #[must_use]
    pub const fn session_generation(&self) -> u64 {
        self.session_generation
    }

    /// Tells the agent of a lease that is stored.
    pub fn send(self, assign: v1::Assign) {
        self.permit.send(server_message::Message::Assign(assign).into());
    }

    /// A lease is stored that the agent can't be told of: ends the session.
    pub fn give_up(self) {
        self.live.end(Ending::StoreFailed);
    }
}

/// The live sessions of this process.
#[derive(Default)]
pub struct Cells {
    live: Mutex<HashMap<ClusterId, Arc<Live>>>,
    /// Something changed that the scheduler should look at.
    work: Notify,
    /// Since when this process has listened to agents.
    listening_since: AtomicI64,
    downtime_ms: AtomicI64,
    closing: AtomicBool,
}

impl std::fmt::Debug for Cells {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Cells").field("connected", &self.connected().len()).finish_non_exhaustive()
    }
}

impl Cells {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<ClusterId, Arc<Live>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, cluster: ClusterId) -> Option<Arc<Live>> {
        self.sessions().get(&cluster).cloned()
    }

    /// Lets the scheduler look at once.
    pub fn wake(&self) {
        self.work.notify_one();
    }

    /// Waits for [`Cells::wake`].
    pub async fn woken(&self) {
        self.work.notified().await;
    }

    /// Clusters with a live session.
    #[must_use]
    pub fn connected(&self) -> Vec<ClusterId> {
        self.sessions().keys().copied().collect()
    }

    #[must_use]
    pub fn is_connected(&self, cluster: ClusterId) -> bool {
        self.sessions().contains_key(&cluster)
    }

    /// When the agent was heard last, as far as this process knows.
    #[must_use]
    pub fn last_seen(&self, cluster: ClusterId) -> Option<i64> {
        self.get(cluster).map(|live| live.last_seen())
    }

    #[must_use]
    pub fn listening_since(&self) -> i64 {
        self.listening_since.load(Ordering::Relaxed)
    }

    /// Whether the losses of agents have been set right for the time that the control plane was down.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.listening_since() > 0
    }

    /// How long the control plane was down before this process.
    #[must_use]
    pub fn downtime_ms(&self) -> i64 {
        self.downtime_ms.load(Ordering::Relaxed)
    }

    fn listen_from(&self, now_ms: i64, downtime_ms: i64) {
        self.downtime_ms.store(downtime_ms, Ordering::Relaxed);
        self.listening_since.store(now_ms, Ordering::Relaxed);
        self.wake();
    }

    /// Makes `live` the cluster's session. False, and nothing changes, when a newer one is there or the process ends.
    fn enter(&self, live: &Arc<Live>) -> bool {
        if self.closing.load(Ordering::Acquire) {
            return false;
        }
        let older = {
            let mut sessions = self.sessions();
            if sessions.get(&live.cluster).is_some_and(|other| other.session_generation > live.session_generation) {
                return false;
            }
            sessions.insert(live.cluster, Arc::clone(live))
        };
        if let Some(older) = older {
            older.end(Ending::Superseded);
        }
        // A shutdown that began meanwhile has not seen this session.
        !self.closing.load(Ordering::Acquire)
    }

    fn leave(&self, live: &Live) {
        let mut sessions = self.sessions();
        if sessions.get(&live.cluster).is_some_and(|other| other.session_generation == live.session_generation) {
            sessions.remove(&live.cluster);
        }
        drop(sessions);
        live.pending.close();
    }

    /// Ends the cluster's session.
    pub fn end(&self, cluster: ClusterId, why: Ending) {
        if let Some(live) = self.get(cluster) {
            live.end(why);
        }
    }

    /// Ends every session and lets no new one begin: the process ends.
    pub fn shutdown(&self) {
        self.closing.store(true, Ordering::Release);
        let all: Vec<Arc<Live>> = self.sessions().values().cloned().collect();
        for live in all {
            live.end(Ending::Shutdown);
        }
    }

    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The control credentials of this cluster but `replacement` are valid until `until` only.
    pub fn control_replaced(&self, cluster: ClusterId, replacement: CredentialId, until: i64) {
        if let Some(live) = self.get(cluster)
            && live.credential != replacement
        {
            live.credential_ends.fetch_min(until, Ordering::Relaxed);
        }
    }

    /// Sends what may be lost: the agent is told again when it reconnects. False when it was not sent.
    pub(crate) fn tell(&self, cluster: ClusterId, message: server_message::Message) -> bool {
        self.get(cluster).is_some_and(|live| live.out.try_send(message.into()).is_ok())
    }

    /// Tells the agent to stop a run, once per session.
    pub fn cancel(&self, cluster: ClusterId, run: RunId, generation: u64) {
        let Some(live) = self.get(cluster) else { return };
        let mut told = live.cancels.lock().unwrap_or_else(PoisonError::into_inner);
        if told.contains(&(run, generation)) {
            return;
        }
        let message = server_message::Message::Cancel(v1::Cancel { run_id: run.to_string(), generation });
        if live.out.try_send(message.into()).is_ok() {
            told.insert((run, generation));
        }
    }

    /// A place for one assignment to the cluster; None when it is not connected or reads too slowly.
    #[must_use]
    pub fn place(&self, cluster: ClusterId) -> Option<Place> {
        let live = self.get(cluster)?;
        if live.out.capacity() <= RESERVED {
            return None;
        }
        let permit = live.out.clone().try_reserve_owned().ok()?;
        Some(Place { session_generation: live.session_generation, permit, live })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(cluster: ClusterId, session_generation: u64) -> (Arc<Live>, mpsc::Receiver<Outbound>) {
        let (out, receiver) = mpsc::channel(OUTBOUND);
        let live = Live {
            cluster,
            session_generation,
            credential: CredentialId::generate(),
            out,
            ending: watched::channel(None).0,
            last_seen: AtomicI64::new(0),
            credential_ends: AtomicI64::new(i64::MAX),
            pending: requests::Pending::default(),
            cancels: Mutex::default(),
        };
        (Arc::new(live), receiver)
    }

    #[test]
    fn the_newest_session_is_the_one() {
        let cells = Cells::new();
        let cluster = ClusterId::generate();
        let ((older, _a), (newer, _b)) = (live(cluster, 1), live(cluster, 2));
        assert!(cells.enter(&newer));
        assert!(!cells.enter(&older), "an older one that comes late does not replace it");
        let (newest, _c) = live(cluster, 3);
        assert!(cells.enter(&newest));
        assert_eq!(*newer.ending.borrow(), Some(Ending::Superseded));
        cells.leave(&newer);
        assert!(cells.is_connected(cluster), "an old session that ends does not remove the new one");
        cells.leave(&newest);
        assert!(!cells.is_connected(cluster));
    }

    #[test]
    fn assignments_leave_room_and_cancels_are_told_once() {
        let cells = Cells::new();
        let cluster = ClusterId::generate();
        let (session, mut receiver) = live(cluster, 1);
        assert!(cells.enter(&session));
        let places: Vec<Place> = std::iter::from_fn(|| cells.place(cluster)).collect();
        assert_eq!(places.len(), OUTBOUND - RESERVED);
        let run = RunId::generate();
        cells.cancel(cluster, run, 1);
        cells.cancel(cluster, run, 1);
        cells.cancel(cluster, run, 2);
        drop(places);
        assert!(receiver.try_recv().is_ok());
        assert!(receiver.try_recv().is_ok());
        assert!(receiver.try_recv().is_err());
    }

    #[test]
    fn nothing_begins_in_a_shutdown() {
        let cells = Cells::new();
        let (session, _receiver) = live(ClusterId::generate(), 1);
        cells.shutdown();
        assert!(!cells.enter(&session));
    }
}

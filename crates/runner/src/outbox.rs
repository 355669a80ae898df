//! What the agent still has to be told, and what it has not acknowledged. Pure.
//!
//! Episodes are kept until their sequence is acknowledged and go again, unchanged and in order, on a new stream. Progress,
//! metrics and provenance are replaced by their newest value. Everything here is bounded by the permits that episodes hold.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use rlm_api::cluster::v1::{
    AcquireBinding, Attach, Done, Episode, Episodes, Failure as WireFailure, Progress, ProvenanceReport, ReleaseBinding, RestartComponent,
    RunMetrics, RunnerMessage, runner_message::Message,
};

/// Most bytes of episodes in one message; the agent reads up to 4 MiB.
const BATCH_BYTES: usize = 1 << 20;

/// What to do next on the stream.
#[derive(Debug, PartialEq)]
pub enum Next {
    Send(Box<RunnerMessage>),
    /// Nothing before this moment.
    At(Instant),
    Nothing,
}

struct Batch<P> {
    sequence: u64,
    episodes: Vec<Episode>,
    _permits: Vec<P>,
}

/// `P` is what an episode holds while it is unacknowledged.
pub struct Outbox<P> {
    flush_after: Duration,
    flush_at: usize,
    open: Vec<Episode>,
    open_permits: Vec<P>,
    open_since: Option<Instant>,
    unacknowledged: VecDeque<Batch<P>>,
    next_sequence: u64,
    /// Highest sequence that went out on this stream.
    sent: u64,
    acquire: Option<AcquireBinding>,
    acquire_sent: bool,
    released: BTreeSet<u32>,
    releases: VecDeque<u32>,
    restarts: VecDeque<RestartComponent>,
    /// Restarts whose next attempt has not been seen.
    wanted: Vec<RestartComponent>,
    progress: Option<Progress>,
    metrics: Option<RunMetrics>,
    provenance: Option<String>,
    provenance_sent: bool,
    done: Option<(u64, Option<WireFailure>)>,
    done_sent: bool,
    finished: bool,
}

impl<P> Outbox<P> {
    #[must_use]
    pub fn new((flush_after, flush_at): (Duration, usize)) -> Self {
        Self {
            flush_after,
            flush_at: flush_at.max(1),
            open: Vec::new(),
            open_permits: Vec::new(),
            open_since: None,
            unacknowledged: VecDeque::new(),
            next_sequence: 1,
            sent: 0,
            acquire: None,
            acquire_sent: false,
            released: BTreeSet::new(),
            releases: VecDeque::new(),
            restarts: VecDeque::new(),
            wanted: Vec::new(),
            progress: None,
            metrics: None,
            provenance: None,
            provenance_sent: false,
            done: None,
            done_sent: false,
            finished: false,
        }
    }

    /// The first message of each stream.
    #[must_use]
    pub fn attach(run_id: &str, token: &str) -> RunnerMessage {
        message(Message::Attach(Attach { run_id: run_id.to_owned(), token: token.to_owned() }))
    }

    /// A new stream begins: the agent may have forgotten everything but its spool.
    pub fn attached(&mut self) {
        self.sent = 0;
        self.acquire_sent = false;
        self.provenance_sent = false;
        self.done_sent = false;
        self.releases = self.released.iter().copied().collect();
        self.restarts = self.wanted.iter().cloned().collect();
    }

    pub fn episode(&mut self, episode: Episode, permit: P, now: Instant) {
        self.open.push(episode);
        self.open_permits.push(permit);
        self.open_since.get_or_insert(now);
    }

    pub fn acquire(&mut self, acquire: AcquireBinding) {
        self.released.remove(&acquire.binding);
        self.acquire = Some(acquire);
        self.acquire_sent = false;
    }

    pub fn release(&mut self, binding: u32) {
        if self.acquire.as_ref().is_some_and(|acquire| acquire.binding == binding) {
            self.acquire = None;
        }
        self.released.insert(binding);
        self.releases.push_back(binding);
        let others = |restart: &RestartComponent| !restart.component.starts_with(&format!("env-{binding}-"));
        self.restarts.retain(others);
        self.wanted.retain(others);
    }

    pub fn restart(&mut self, restart: RestartComponent) {
        self.restarts.retain(|known| known.component != restart.component);
        self.wanted.retain(|known| known.component != restart.component);
        self.wanted.push(restart.clone());
        self.restarts.push_back(restart);
    }

    /// The agent speaks of this attempt: restarts of earlier ones are done.
    pub fn attempt_seen(&mut self, component: &str, attempt: u32) {
        self.wanted.retain(|restart| restart.component != component || restart.attempt >= attempt);
    }

    pub fn progress(&mut self, progress: Progress) {
        self.progress = Some(progress);
    }

    pub fn metrics(&mut self, metrics: RunMetrics) {
        self.metrics = Some(metrics);
    }

    pub fn provenance(&mut self, document: String) {
        if self.provenance.as_ref() != Some(&document) {
            self.provenance = Some(document);
            self.provenance_sent = false;
        }
    }

    /// The run is over. Everything reported before goes first.
    pub fn done(&mut self, failure: Option<WireFailure>) {
        if self.done.is_none() {
            self.close_batch();
            let sequence = self.take_sequence();
            self.done = Some((sequence, failure));
        }
    }

    /// All up to `sequence` is durable at the agent.
    pub fn acknowledged(&mut self, sequence: u64) {
        while self.unacknowledged.front().is_some_and(|batch| batch.sequence <= sequence) {
            self.unacknowledged.pop_front();
        }
        if self.done.as_ref().is_some_and(|(done, _)| *done <= sequence) {
            self.finished = true;
        }
    }

    /// The end of the run is acknowledged.
    #[must_use]
    pub const fn finished(&self) -> bool {
        self.finished
    }

    /// Every episode is acknowledged.
    #[must_use]
    pub fn delivered(&self) -> bool {
        self.open.is_empty() && self.unacknowledged.is_empty()
    }

    fn take_sequence(&mut self) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        sequence
    }

    fn close_batch(&mut self) {
        self.open_since = None;
        while !self.open.is_empty() {
            // At least one, and as many more as fit: a message that the agent can't read would be sent again for ever.
            let mut bytes = 0;
            let fits = self.open.iter().take_while(|episode| {
                bytes += prost::Message::encoded_len(*episode);
                bytes <= BATCH_BYTES
            });
            let size = fits.count().clamp(1, self.flush_at);
            let sequence = self.take_sequence();
            let batch =
                Batch { sequence, episodes: self.open.drain(..size).collect(), _permits: self.open_permits.drain(..size).collect() };
            self.unacknowledged.push_back(batch);
        }
    }

    /// The next message for the stream.
    pub fn next(&mut self, now: Instant) -> Next {
        if let Some(acquire) = self.acquire.filter(|_| !self.acquire_sent) {
            // A binding is given back before the next is asked for.
            if let Some(binding) = self.releases.pop_front() {
                return send(Message::Release(ReleaseBinding { binding }));
            }
            self.acquire_sent = true;
            return send(Message::Acquire(acquire));
        }
        if let Some(binding) = self.releases.pop_front() {
            return send(Message::Release(ReleaseBinding { binding }));
        }
        if let Some(restart) = self.restarts.pop_front() {
            return send(Message::Restart(restart));
        }
        if self.open.len() >= self.flush_at || self.open_since.is_some_and(|since| now >= since + self.flush_after) {
            self.close_batch();
        }
        if let Some(batch) = self.unacknowledged.iter().find(|batch| batch.sequence > self.sent) {
            self.sent = batch.sequence;
            return send(Message::Episodes(Episodes { sequence: batch.sequence, episodes: batch.episodes.clone() }));
        }
        if let Some(document) = self.provenance.as_ref().filter(|_| !self.provenance_sent) {
            let report = ProvenanceReport { provenance_json: document.clone() };
            self.provenance_sent = true;
            return send(Message::Provenance(report));
        }
        if let Some(metrics) = self.metrics.take() {
            return send(Message::Metrics(metrics));
        }
        if let Some(progress) = self.progress.take() {
            return send(Message::Progress(progress));
        }
        if let Some((sequence, failure)) = self.done.as_ref().filter(|_| !self.done_sent) {
            let done = Done { sequence: *sequence, failure: failure.clone() };
            self.done_sent = true;
            return send(Message::Done(done));
        }
        self.open_since.map_or(Next::Nothing, |since| Next::At(since + self.flush_after))
    }
}

fn message(message: Message) -> RunnerMessage {
    RunnerMessage { message: Some(message) }
}

fn send(inner: Message) -> Next {
    Next::Send(Box::new(message(inner)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn outbox() -> Outbox<()> {
        Outbox::new((Duration::from_millis(20), 4))
    }

    fn drain(outbox: &mut Outbox<()>, now: Instant) -> Vec<Message> {
        std::iter::from_fn(|| match outbox.next(now) {
            Next::Send(message) => message.message,
            Next::At(_) | Next::Nothing => None,
        })
        .collect()
    }

    fn rows(messages: &[Message]) -> Vec<(u64, u64)> {
        messages
            .iter()
            .filter_map(|message| match message {
                Message::Episodes(batch) => Some(batch.episodes.iter().map(|episode| (batch.sequence, episode.row)).collect::<Vec<_>>()),
                _ => None,
            })
            .flatten()
            .collect()
    }

    #[test]
    fn episodes_wait_for_company_but_not_for_long() {
        let (mut outbox, now) = (outbox(), Instant::now());
        outbox.episode(Episode { row: 1, ..Episode::default() }, (), now);
        assert!(matches!(outbox.next(now), Next::At(at) if at == now + Duration::from_millis(20)));
        assert_eq!(rows(&drain(&mut outbox, now + Duration::from_millis(20))), [(1, 1)]);
        for row in 2..7 {
            outbox.episode(Episode { row, ..Episode::default() }, (), now);
        }
        assert_eq!(rows(&drain(&mut outbox, now)), [(2, 2), (2, 3), (2, 4), (2, 5), (3, 6)]);
    }

    #[test]
    fn what_is_unacknowledged_goes_again_on_a_new_stream() {
        let (mut outbox, now) = (outbox(), Instant::now());
        let later = now + Duration::from_secs(1);
        outbox.acquire(AcquireBinding { binding: 0, pods: 1, lanes_per_pod: 1 });
        outbox.release(0);
        outbox.acquire(AcquireBinding { binding: 1, pods: 1, lanes_per_pod: 1 });
        for row in 0..6 {
            outbox.episode(Episode { row, ..Episode::default() }, (), now);
        }
        let first = drain(&mut outbox, later);
        assert!(matches!(first[0], Message::Release(ReleaseBinding { binding: 0 })), "{first:?}");
        assert!(matches!(first[1], Message::Acquire(AcquireBinding { binding: 1, .. })));
        outbox.acknowledged(1);
        outbox.attached();
        let again = drain(&mut outbox, later);
        assert!(matches!(again[0], Message::Release(_)) && matches!(again[1], Message::Acquire(_)), "{again:?}");
        assert_eq!(rows(&again), [(2, 4), (2, 5)]);
    }

    #[test]
    fn the_end_comes_last_and_needs_its_own_acknowledgement() {
        let (mut outbox, now) = (outbox(), Instant::now());
        outbox.episode(Episode { row: 1, ..Episode::default() }, (), now);
        outbox.done(None);
        let messages = drain(&mut outbox, now);
        assert!(matches!(messages.last(), Some(Message::Done(Done { sequence: 2, failure: None }))));
        outbox.acknowledged(1);
        assert!(!outbox.finished());
        outbox.acknowledged(2);
        assert!(outbox.finished());
    }

    proptest! {
        /// With streams breaking anywhere, the agent sees every row, and each sequence always with the same rows.
        #[test]
        fn no_row_is_lost(events in proptest::collection::vec(0_u8..5, 1..200)) {
            let mut outbox = outbox();
            let mut now = Instant::now();
            let mut next_row = 0_u64;
            let mut seen: std::collections::BTreeMap<u64, Vec<u64>> = std::collections::BTreeMap::new();
            let mut note = |messages: &[Message]| {
                for message in messages {
                    if let Message::Episodes(batch) = message {
                        let rows: Vec<u64> = batch.episodes.iter().map(|episode| episode.row).collect();
                        assert_eq!(seen.entry(batch.sequence).or_insert_with(|| rows.clone()), &rows);
                    }
                }
                seen.len()
            };
            let mut delivered = 0;
            for event in events {
                match event {
                    0 | 1 => { outbox.episode(Episode { row: next_row, ..Episode::default() }, (), now); next_row += 1; }
                    2 => { now += Duration::from_millis(30); delivered = note(&drain(&mut outbox, now)); }
                    3 => outbox.acknowledged(delivered as u64),
                    _ => outbox.attached(),
                }
            }
            outbox.done(None);
            outbox.attached();
            note(&drain(&mut outbox, now));
            let rows: Vec<u64> = seen.into_values().flatten().collect();
            prop_assert_eq!(rows, (0..next_row).collect::<Vec<_>>());
        }
    }
}

//! What a session's messages mean for the runs and records held here. Pure.

use crate::spool::{HeldRun, RunKey};

/// The runs to name in a hello: those that the control plane has not heard the end of.
#[must_use]
pub fn to_announce(held: &[HeldRun]) -> Vec<RunKey> {
    held.iter().filter(|run| !run.settled).map(|run| run.key).collect()
}

/// The runs to stop after a welcome: those that go on here and are not leased to this cluster, or not at this generation.
#[must_use]
pub fn to_stop(held: &[HeldRun], leased: &[RunKey]) -> Vec<RunKey> {
    held.iter().filter(|run| !run.ended).map(|run| run.key).filter(|key| !leased.contains(key)).collect()
}

/// Batches of records on their way: how many, and up to where.
#[derive(Debug, Default)]
pub struct Window {
    batches: std::collections::VecDeque<(u64, tokio::time::Instant)>,
    /// Highest sequence that was sent.
    pub sent: u64,
}

impl Window {
    /// Batches that may be unacknowledged at once.
    const LIMIT: usize = 8;

    /// Nothing above `durable` is on its way.
    #[must_use]
    pub fn from(durable: u64) -> Self {
        Self { batches: std::collections::VecDeque::new(), sent: durable }
    }

    #[must_use]
    pub fn has_room(&self) -> bool {
        self.batches.len() < Self::LIMIT
    }

    pub fn sent(&mut self, last: u64, now: tokio::time::Instant) {
        self.sent = last;
        self.batches.push_back((last, now));
    }

    pub fn acknowledged(&mut self, durable: u64) {
        while self.batches.front().is_some_and(|(last, _)| *last <= durable) {
            self.batches.pop_front();
        }
        self.sent = self.sent.max(durable);
    }

    /// When the oldest batch was sent.
    #[must_use]
    pub fn oldest(&self) -> Option<tokio::time::Instant> {
        self.batches.front().map(|(_, sent)| *sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlm_api::cluster::v1;
    use rlm_core::ids::RunId;

    #[test]
    fn stale_runs_are_stopped_and_unheard_ends_announced() {
        let run = |generation, ended, settled| HeldRun {
            key: RunKey { run_id: RunId::generate(), generation },
            assign: v1::Assign::default(),
            ended,
            settled,
        };
        let held = [run(1, false, false), run(2, false, false), run(1, true, false), run(1, true, true)];
        let newer = RunKey { generation: 3, ..held[1].key };
        let leased = [held[0].key, newer];
        assert_eq!(to_stop(&held, &leased), [held[1].key]);
        assert_eq!(to_stop(&held, &[]), [held[0].key, held[1].key]);
        assert_eq!(to_announce(&held), [held[0].key, held[1].key, held[2].key]);
    }

    #[tokio::test]
    async fn the_window_bounds_what_is_on_its_way() {
        let mut window = Window::from(10);
        let now = tokio::time::Instant::now();
        for batch in 1..=8 {
            assert!(window.has_room());
            window.sent(10 + batch, now);
        }
        assert!(!window.has_room());
        window.acknowledged(12);
        assert!(window.has_room());
        assert_eq!(window.sent, 18);
        window.acknowledged(100);
        assert_eq!((window.sent, window.oldest()), (100, None));
    }
}

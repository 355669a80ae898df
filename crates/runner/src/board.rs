//! The rows of a binding as its environment processes share them: who takes one, who gives one back, and that each outcome
//! is reported once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rlm_api::cluster::v1::{Episode, Failure as WireFailure, Scored, episode::Outcome};
use rlm_core::failure::Failure;
use tokio::sync::watch;

use crate::agent::{Agent, Permit};
use crate::episode::Score;
use crate::rows::{Blame, Rows, Verdict, Work};

/// Rows of a failure that concerns many, which keep the last output of the process.
const WHOLE_FAILURES: usize = 20;

/// Unix time in milliseconds.
#[must_use]
pub fn unix_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

/// A row's time on a lane.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    pub started_unix_ms: i64,
    pub ended_unix_ms: i64,
}

pub struct Board {
    rows: Mutex<Rows>,
    changed: watch::Sender<u64>,
    agent: Agent,
}

impl Board {
    #[must_use]
    pub fn new(rows: Rows, agent: Agent) -> Self {
        Self { rows: Mutex::new(rows), changed: watch::Sender::new(0), agent }
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Told whenever a row may have become free or the last one is done.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn touch(&self) {
        self.changed.send_modify(|version| *version += 1);
    }

    /// Rows without an outcome.
    #[must_use]
    pub fn open(&self) -> u64 {
        self.rows().open()
    }

    pub fn take(&self, running: usize, occupied: bool) -> Option<Work> {
        self.rows().take(running, occupied)
    }

    pub fn scored(&self, work: &Work, score: &Score, first_observation: [u8; 32], span: Span, permit: Permit) {
        let outcome = Outcome::Scored(Scored {
            reward: score.reward,
            steps: score.steps,
            terminated: score.terminated,
            truncated: score.truncated,
            success: score.success,
            first_observation_sha256: first_observation.to_vec().into(),
            conformance_warnings: score.conformance_warnings,
        });
        self.report(work, outcome, span, permit);
    }

    /// A running row was interrupted: it runs again or is errored, as its past and the failure say. True when it is errored.
    pub fn interrupted(&self, work: Work, failure: &Failure, blame: Blame, span: Span, permit: Permit) -> bool {
        let (verdict, failure) = {
            let mut rows = self.rows();
            let verdict = rows.interrupted(work, failure.code, blame);
            let failure = match (rows.closed(), blame) {
                // It fell with the binding, not by itself.
                (Some(closed), Blame::Bystander) => closed.clone(),
                (Some(_) | None, _) => failure.clone(),
            };
            (verdict, failure)
        };
        match verdict {
            Verdict::Again => {
                drop(permit);
                self.touch();
                false
            }
            Verdict::Errored(work) => {
                tracing::info!(row = work.row, attempt = work.attempt, code = failure.code.as_str(), reason = %failure.message, "row errored");
                self.report(&work, Outcome::Errored(WireFailure::from(&failure)), span, permit);
                true
            }
        }
    }

    /// Every row that waits is errored with this failure; rows that run are when they are interrupted.
    pub async fn close(&self, failure: &Failure) {
        let waiting = self.rows().close(failure.clone());
        self.touch();
        let whole = WireFailure::from(failure);
        let brief = WireFailure { log_lines: Vec::new(), events: Vec::new(), ..whole.clone() };
        for (index, work) in waiting.into_iter().enumerate() {
            let Some(permit) = self.agent.room().await else { return };
            let now = unix_ms();
            // All have the same reason; the output that shows it is kept with the first of them.
            let outcome = Outcome::Errored(if index < WHOLE_FAILURES { whole.clone() } else { brief.clone() });
            self.report(&work, outcome, Span { started_unix_ms: now, ended_unix_ms: now }, permit);
        }
    }

    fn report(&self, work: &Work, outcome: Outcome, span: Span, permit: Permit) {
        let episode = Episode {
            row: work.row,
            attempt: work.attempt,
            seed: work.seed,
            outcome: Some(outcome),
            started_unix_ms: span.started_unix_ms,
            ended_unix_ms: span.ended_unix_ms,
        };
        self.agent.report(episode, permit);
        self.rows().finished();
        self.touch();
    }
}

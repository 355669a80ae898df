//! States of evaluations and runs, and the pure functions that move them.
//!
//! SDK clients know exactly the six states of [`EvaluationStatus`] and poll for ever on any other, so detail lives in
//! [`Waiting`], never in a new state.

use serde::{Deserialize, Serialize};

/// The states that SDK clients see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EvaluationStatus {
    Queued,
    Running,
    Cancelling,
    Completed,
    Failed,
    Cancelled,
}

impl EvaluationStatus {
    pub const ALL: [Self; 6] = [Self::Queued, Self::Running, Self::Cancelling, Self::Completed, Self::Failed, Self::Cancelled];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Cancelling => "cancelling",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }

    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// Where a run stands at the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Waits for a cluster.
    Queued,
    /// Leased to a cluster, which has not begun an episode yet.
    Leased,
    Running,
    /// All its rows have an outcome.
    Finished,
    /// It could not go on; its open rows are errored with its failure.
    Failed,
    Cancelled,
}

impl RunState {
    pub const ALL: [Self; 6] = [Self::Queued, Self::Leased, Self::Running, Self::Finished, Self::Failed, Self::Cancelled];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Leased => "leased",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == text)
    }

    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Finished | Self::Failed | Self::Cancelled)
    }

    /// Whether a cluster holds it.
    #[must_use]
    pub const fn is_placed(self) -> bool {
        matches!(self, Self::Leased | Self::Running)
    }

    /// The state after the cluster reported `event`; None when the event changes nothing (late, repeated).
    #[must_use]
    pub const fn after(self, event: RunEvent) -> Option<Self> {
        match (self, event) {
            (Self::Leased, RunEvent::Started) => Some(Self::Running),
            (Self::Leased | Self::Running, RunEvent::Finished) => Some(Self::Finished),
            (Self::Leased | Self::Running, RunEvent::Failed) => Some(Self::Failed),
            (Self::Leased | Self::Running, RunEvent::LeaseGivenUp) => Some(Self::Queued),
            (Self::Queued | Self::Leased | Self::Running, RunEvent::Cancelled) => Some(Self::Cancelled),
            (Self::Queued, RunEvent::Leased) => Some(Self::Leased),
            (Self::Queued, RunEvent::Failed) => Some(Self::Failed),
            (
                Self::Finished | Self::Failed | Self::Cancelled,
                RunEvent::Leased | RunEvent::Started | RunEvent::Finished | RunEvent::Failed | RunEvent::LeaseGivenUp | RunEvent::Cancelled,
            )
            | (Self::Queued, RunEvent::Started | RunEvent::Finished | RunEvent::LeaseGivenUp)
            | (Self::Leased | Self::Running, RunEvent::Leased)
            | (Self::Running, RunEvent::Started) => None,
        }
    }
}

/// What happens to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEvent {
    Leased,
    Started,
    Finished,
    Failed,
    /// The cluster does not know the run, or was away for too long: unfinished rows go elsewhere.
    LeaseGivenUp,
    Cancelled,
}

/// Why something waits, since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// Stable. Before a cluster has it: `noCluster`, `clusterDisconnected`, `clusterDraining`, `capacity`, `gpu`. At its
    /// cluster: `capacity`, `gpu`, `serverInUse`, `modelStarting`, `environmentStarting`, `imagePull`, `unschedulable`, `quota`,
    /// `secretMissing`, `artifacts`, `apiUnavailable`, `controllerAway`. While its results can't come: `clusterDisconnected`,
    /// `spoolFull`.
    pub cause: String,
    pub since: chrono::DateTime<chrono::Utc>,
    pub message: String,
}

/// What an evaluation's status follows from.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EvaluationCounts {
    pub rows: u64,
    pub scored: u64,
    pub errored: u64,
    pub runs: u64,
    /// Runs that a cluster holds.
    pub runs_placed: u64,
    pub runs_running: u64,
    pub cancel_requested: bool,
    pub max_errored_fraction: f64,
}

/// The status that follows. Total: each combination has one.
#[must_use]
pub fn status(counts: &EvaluationCounts) -> EvaluationStatus {
    let finished = counts.scored + counts.errored;
    if finished >= counts.rows && counts.runs_placed == 0 && !counts.cancel_requested {
        let errored_share = if counts.rows == 0 { 0.0 } else { counts.errored as f64 / counts.rows as f64 };
        let nothing_scored = counts.rows > 0 && counts.scored == 0;
        return if nothing_scored || errored_share > counts.max_errored_fraction {
            EvaluationStatus::Failed
        } else {
            EvaluationStatus::Completed
        };
    }
    if counts.cancel_requested {
        return if counts.runs_placed > 0 { EvaluationStatus::Cancelling } else { EvaluationStatus::Cancelled };
    }
    if counts.runs_running > 0 || finished > 0 { EvaluationStatus::Running } else { EvaluationStatus::Queued }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_evaluation_without_a_score_has_failed() {
        let counts = EvaluationCounts { rows: 2, errored: 2, max_errored_fraction: 1.0, ..EvaluationCounts::default() };
        assert_eq!(status(&counts), EvaluationStatus::Failed);
        assert_eq!(status(&EvaluationCounts { scored: 1, errored: 1, ..counts }), EvaluationStatus::Completed);
    }

    #[test]
    fn terminal_states_stay() {
        for state in RunState::ALL.into_iter().filter(|state| state.is_terminal()) {
            for event in
                [RunEvent::Leased, RunEvent::Started, RunEvent::Finished, RunEvent::Failed, RunEvent::LeaseGivenUp, RunEvent::Cancelled]
            {
                assert_eq!(state.after(event), None);
            }
        }
    }

    #[test]
    fn one_errored_row_fails_by_default_and_passes_within_the_share() {
        let mut counts = EvaluationCounts { rows: 100, scored: 99, errored: 1, ..EvaluationCounts::default() };
        assert_eq!(status(&counts), EvaluationStatus::Failed);
        counts.max_errored_fraction = 0.01;
        assert_eq!(status(&counts), EvaluationStatus::Completed);
    }

    proptest! {
        #[test]
        fn never_terminal_while_a_cluster_holds_a_run(rows in 1_u64..5, scored in 0_u64..5, errored in 0_u64..5, placed in 1_u64..3, cancel: bool) {
            let counts = EvaluationCounts { rows, scored, errored, runs: 3, runs_placed: placed, runs_running: placed, cancel_requested: cancel, max_errored_fraction: 0.0 };
            prop_assert!(!status(&counts).is_terminal());
        }
    }
}

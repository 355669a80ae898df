//! What a reported attempt does to a row. Pure: the same reports give the same outcomes in any order and however often they
//! are repeated.

use rlm_core::run::RunState;

use crate::store::outcomes::Held;

/// What to do with an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is the outcome now.
    Counts,
    /// It is kept among the row's attempts.
    Kept,
    /// It was stored before.
    Repeated,
}

/// The attempt at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reported {
    pub generation: u64,
    pub attempt: i64,
    pub scored: bool,
    /// State of the run that reports it.
    pub run: RunState,
}

/// The first scored attempt stored counts and is final. An errored one holds only while there is none; of several, the
/// latest by generation and attempt. An errored attempt of a run that has ended as finished or failed never opens an
/// outcome: all of that run's rows had one then, so a row without one was given free for a retry since.
#[must_use]
pub fn decide(held: Option<&Held>, reported: Reported) -> Verdict {
    match held {
        None if reported.scored => Verdict::Counts,
        None => match reported.run {
            RunState::Queued | RunState::Leased | RunState::Running | RunState::Cancelled => Verdict::Counts,
            RunState::Finished | RunState::Failed => Verdict::Kept,
        },
        Some(held) if held.scored => {
            if reported.scored && (held.generation, held.attempt) == (reported.generation, reported.attempt) {
                Verdict::Repeated
            } else {
                Verdict::Kept
            }
        }
        Some(_) if reported.scored => Verdict::Counts,
        Some(held) => match (reported.generation, reported.attempt).cmp(&(held.generation, held.attempt)) {
            std::cmp::Ordering::Greater => Verdict::Counts,
            std::cmp::Ordering::Equal => Verdict::Repeated,
            std::cmp::Ordering::Less => Verdict::Kept,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn replay(reports: &[(u64, i64, bool)]) -> Option<Held> {
        let mut held: Option<Held> = None;
        for &(generation, attempt, scored) in reports {
            let reported = Reported { generation, attempt, scored, run: RunState::Running };
            if decide(held.as_ref(), reported) == Verdict::Counts {
                held = Some(Held { row: 0, generation, attempt, scored });
            }
        }
        held
    }

    proptest! {
        #[test]
        fn order_and_repetition_change_nothing(
            (reports, shuffled) in proptest::collection::btree_set((0_u64..4, 0_i64..4), 0..8)
                .prop_flat_map(|keys| {
                    let keys: Vec<_> = keys.into_iter().collect();
                    let scored = proptest::option::of(0..keys.len().max(1));
                    (Just(keys), scored)
                })
                .prop_flat_map(|(keys, scored)| {
                    let reports: Vec<(u64, i64, bool)> = keys.iter().enumerate().map(|(at, key)| (key.0, key.1, scored == Some(at))).collect();
                    let twice: Vec<_> = reports.iter().chain(&reports).copied().collect();
                    (Just(reports), Just(twice).prop_shuffle())
                })
        ) {
            prop_assert_eq!(replay(&reports), replay(&shuffled));
        }

        #[test]
        fn a_score_is_final(reports in proptest::collection::vec((0_u64..4, 0_i64..4, any::<bool>()), 0..12)) {
            let mut held: Option<Held> = None;
            for (generation, attempt, scored) in reports {
                let verdict = decide(held.as_ref(), Reported { generation, attempt, scored, run: RunState::Leased });
                if held.is_some_and(|held| held.scored) {
                    prop_assert_ne!(verdict, Verdict::Counts);
                }
                if verdict == Verdict::Counts {
                    held = Some(Held { row: 0, generation, attempt, scored });
                }
            }
        }
    }

    #[test]
    fn an_ended_run_opens_no_errored_outcome_but_its_scores_count() {
        let ended: BTreeSet<bool> = [RunState::Finished, RunState::Failed]
            .into_iter()
            .map(|run| decide(None, Reported { generation: 1, attempt: 0, scored: false, run }) == Verdict::Kept)
            .collect();
        assert_eq!(ended, BTreeSet::from([true]));
        assert_eq!(decide(None, Reported { generation: 1, attempt: 0, scored: true, run: RunState::Failed }), Verdict::Counts);
    }
}

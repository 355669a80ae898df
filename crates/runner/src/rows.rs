//! The rows of a binding: which is next, and what follows when one is interrupted. Pure.
//!
//! A row is blamed only when nothing else ran in what failed. When several rows shared it, each of them is run again
//! *alone* before anything is counted, so that no row pays for its neighbour and the outcome does not depend on how many
//! lanes there are. The seed never changes.

use std::collections::VecDeque;

use rlm_api::cluster::v1::RowBlock;
use rlm_core::failure::{Failure, FailureCode, Retry};

/// A row to run, with its past.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    pub row: u64,
    pub task: u32,
    pub seed: u64,
    pub trial_index: u64,
    /// Number of the attempt that runs or is next.
    pub attempt: u32,
    /// It has to run with nothing beside it.
    pub alone: bool,
    counted: u32,
    uncounted: u32,
}

/// How surely a failure is this row's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Nothing else ran in what failed.
    Sole,
    /// Other rows ran in it too.
    Shared,
    /// The row only lost its place.
    Bystander,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    pub counted: u32,
    pub uncounted: u32,
}

/// What follows an interruption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Again,
    Errored(Work),
}

/// The rows of one binding.
#[derive(Debug)]
pub struct Rows {
    fresh: VecDeque<Work>,
    alone: VecDeque<Work>,
    /// Rows without an outcome, running ones included.
    open: u64,
    retries: Retries,
    /// Set when no further row can be run.
    closed: Option<Failure>,
}

impl Rows {
    /// The rows of `blocks` that belong to tasks for which `of_binding` holds.
    #[must_use]
    pub fn new(blocks: &[RowBlock], of_binding: impl Fn(u32) -> bool, attempt_base: u32, retries: Retries) -> Self {
        let mut fresh = VecDeque::new();
        for block in blocks.iter().filter(|block| of_binding(block.task)) {
            let segment = block.to_segment(0);
            fresh.extend((0..segment.count).filter_map(|offset| segment.row(offset)).map(|row| Work {
                row: row.row,
                task: row.task,
                seed: row.seed,
                trial_index: row.trial_index,
                attempt: attempt_base,
                alone: false,
                counted: 0,
                uncounted: 0,
            }));
        }
        let open = fresh.len() as u64;
        Self { fresh, alone: VecDeque::new(), open, retries, closed: None }
    }

    #[must_use]
    pub const fn open(&self) -> u64 {
        self.open
    }

    /// The next row for a process in which `running` rows run, one of them alone if `occupied`.
    pub fn take(&mut self, running: usize, occupied: bool) -> Option<Work> {
        if occupied {
            return None;
        }
        match self.fresh.pop_front() {
            Some(work) => Some(work),
            None if running == 0 => self.alone.pop_front(),
            None => None,
        }
    }

    /// A row was taken but not begun.
    pub fn put_back(&mut self, work: Work) {
        if work.alone { self.alone.push_front(work) } else { self.fresh.push_front(work) }
    }

    /// A row has its outcome.
    pub fn finished(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    /// A running row was interrupted. An errored row still has to be reported and counted as finished.
    pub fn interrupted(&mut self, mut work: Work, code: FailureCode, blame: Blame) -> Verdict {
        if self.closed.is_some() {
            return Verdict::Errored(work);
        }
        // Nothing runs beside a row that runs alone.
        let blame = if work.alone && blame == Blame::Shared { Blame::Sole } else { blame };
        let errored = match (code.retry(), blame) {
            (_, Blame::Bystander) => false,
            (Retry::Always, Blame::Sole | Blame::Shared) => {
                work.uncounted += 1;
                work.uncounted > self.retries.uncounted
            }
            (Retry::Counted | Retry::Never, Blame::Shared) => {
                work.alone = true;
                false
            }
            (Retry::Counted, Blame::Sole) => {
                work.counted += 1;
                work.counted > self.retries.counted
            }
            (Retry::Never, Blame::Sole) => true,
        };
        if errored {
            return Verdict::Errored(work);
        }
        work.attempt = work.attempt.saturating_add(1);
        self.put_back(work);
        Verdict::Again
    }

    /// No further row can be run: gives those that wait. Rows interrupted later are errored at once.
    pub fn close(&mut self, failure: Failure) -> Vec<Work> {
        self.closed.get_or_insert(failure);
        self.fresh.drain(..).chain(self.alone.drain(..)).collect()
    }

    #[must_use]
    pub const fn closed(&self) -> Option<&Failure> {
        self.closed.as_ref()
    }
}

/// How many environment processes of how many lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread {
    pub pods: u32,
    pub lanes_per_pod: u32,
    /// Lanes in all; the last process may use fewer than it has.
    pub lanes: u32,
}

impl Spread {
    /// Lanes are spread evenly over at most `cores` processes, unless the request says how many a process has.
    #[must_use]
    pub fn choose(lanes: u32, rows: u64, lanes_per_pod: Option<u32>, cores: u32) -> Self {
        let lanes = lanes.max(1).min(u32::try_from(rows).unwrap_or(u32::MAX).max(1));
        let lanes_per_pod = match lanes_per_pod {
            Some(wanted) => wanted.max(1),
            None => lanes.div_ceil(lanes.min(cores.max(1))),
        };
        Self { pods: lanes.div_ceil(lanes_per_pod), lanes_per_pod, lanes }
    }

    /// The same with one lane per process, for servers that can't do more: as many processes as there are cores.
    #[must_use]
    pub fn one_lane_each(self, cores: u32) -> Self {
        let pods = self.lanes.min(cores.max(1));
        Self { pods, lanes_per_pod: 1, lanes: pods }
    }

    /// Lanes that process number `pod` uses.
    #[must_use]
    pub fn lanes_of(self, pod: u32) -> u32 {
        self.lanes.saturating_sub(pod * self.lanes_per_pod).min(self.lanes_per_pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(count: u32) -> Rows {
        let block = RowBlock { first_row: 10, count, task: 0, seed: 7, seeds: Vec::new(), trial_index: 3 };
        let other = RowBlock { first_row: 900, count: 5, task: 1, seed: 0, seeds: Vec::new(), trial_index: 0 };
        Rows::new(&[block, other], |task| task == 0, 4, Retries { counted: 1, uncounted: 2 })
    }

    #[test]
    fn rows_come_in_order_with_their_seeds() {
        let mut rows = rows(3);
        let first = rows.take(0, false).unwrap();
        assert_eq!((first.row, first.seed, first.trial_index, first.attempt), (10, 7, 3, 4));
        assert_eq!(rows.take(1, false).unwrap().seed, 8);
        assert_eq!(rows.take(2, true), None);
        assert_eq!(rows.open(), 3);
    }

    #[test]
    fn a_crash_in_company_is_counted_against_nobody() {
        let mut rows = rows(2);
        let (one, two) = (rows.take(0, false).unwrap(), rows.take(1, false).unwrap());
        let crashed = FailureCode::EnvironmentCrashed;
        assert_eq!(rows.interrupted(one, crashed, Blame::Shared), Verdict::Again);
        assert_eq!(rows.interrupted(two, crashed, Blame::Shared), Verdict::Again);
        let suspect = rows.take(0, false).unwrap();
        assert!(suspect.alone);
        assert_eq!(rows.take(1, true), None);
        assert_eq!(rows.interrupted(suspect, crashed, Blame::Sole), Verdict::Again);
        let other = rows.take(0, false).unwrap();
        let again = if other.row == 10 {
            other
        } else {
            rows.put_back(other);
            rows.take(0, false).unwrap()
        };
        assert!(matches!(rows.interrupted(again, crashed, Blame::Sole), Verdict::Errored(work) if work.attempt == 6));
    }

    #[test]
    fn bystanders_are_never_charged() {
        let mut rows = rows(1);
        for _ in 0..100 {
            let work = rows.take(0, false).unwrap();
            assert!(!work.alone);
            assert_eq!(rows.interrupted(work, FailureCode::EnvironmentCrashed, Blame::Bystander), Verdict::Again);
        }
    }

    #[test]
    fn faults_of_the_machine_are_bounded() {
        let mut rows = rows(1);
        for _ in 0..2 {
            let work = rows.take(0, false).unwrap();
            assert_eq!(rows.interrupted(work, FailureCode::ProcessKilled, Blame::Shared), Verdict::Again);
        }
        let work = rows.take(0, false).unwrap();
        assert!(matches!(rows.interrupted(work, FailureCode::ProcessKilled, Blame::Shared), Verdict::Errored(_)));
    }

    #[test]
    fn after_closing_nothing_runs() {
        let mut rows = rows(4);
        let running = rows.take(0, false).unwrap();
        assert_eq!(rows.close(Failure::new(FailureCode::InvalidParams, "x")).len(), 3);
        assert!(rows.take(0, false).is_none());
        assert!(matches!(rows.interrupted(running, FailureCode::ProcessKilled, Blame::Bystander), Verdict::Errored(_)));
    }

    proptest! {
        #[test]
        fn every_lane_has_a_process(lanes in 1_u32..200, rows in 1_u64..500, wanted in proptest::option::of(1_u32..40), cores in 1_u32..64) {
            let spread = Spread::choose(lanes, rows, wanted, cores);
            let used: u32 = (0..spread.pods).map(|pod| spread.lanes_of(pod)).sum();
            prop_assert_eq!(used, spread.lanes);
            prop_assert!(u64::from(spread.lanes) <= rows && spread.lanes <= lanes);
            prop_assert!((0..spread.pods).all(|pod| spread.lanes_of(pod) >= 1));
            if wanted.is_none() {
                prop_assert!(spread.pods <= cores);
            }
        }

        /// Whatever happens to rows in whatever order, each gets exactly one outcome.
        #[test]
        fn every_row_has_one_outcome(count in 1_u32..20, events in proptest::collection::vec((0_u8..6, any::<u8>()), 0..400)) {
            let mut rows = rows(count);
            let mut running: Vec<Work> = Vec::new();
            let mut outcomes = std::collections::BTreeMap::new();
            for (event, pick) in events {
                match event {
                    0 | 1 => running.extend(rows.take(running.len(), running.iter().any(|work| work.alone))),
                    2 if !running.is_empty() => {
                        let work = running.remove(usize::from(pick) % running.len());
                        *outcomes.entry(work.row).or_insert(0) += 1;
                        rows.finished();
                    }
                    3..=5 if !running.is_empty() => {
                        let work = running.remove(usize::from(pick) % running.len());
                        let code = [FailureCode::EnvironmentCrashed, FailureCode::ProcessKilled, FailureCode::ModelInvalidAction][usize::from(event - 3)];
                        let blame = [Blame::Sole, Blame::Shared, Blame::Bystander][usize::from(pick) % 3];
                        if let Verdict::Errored(work) = rows.interrupted(work, code, blame) {
                            *outcomes.entry(work.row).or_insert(0) += 1;
                            rows.finished();
                        }
                    }
                    _ => {}
                }
            }
            while let Some(work) = running.pop().or_else(|| rows.take(running.len(), running.iter().any(|work| work.alone))) {
                *outcomes.entry(work.row).or_insert(0) += 1;
                rows.finished();
            }
            prop_assert_eq!(rows.open(), 0);
            prop_assert_eq!(outcomes.len(), count as usize);
            prop_assert!(outcomes.values().all(|times| *times == 1));
        }
    }
}

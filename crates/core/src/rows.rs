//! Rows: which episodes an evaluation consists of, and how they are handed out.
//!
//! The list is a function of the checked request alone. Nothing about lanes, workers, clusters, retries or time enters it,
//! so equal requests have equal rows and two evaluations pair. It is kept as segments, not row by row: a million rows of one
//! cell are one segment.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::evaluation::{EvaluationSpec, Pair, Task};

/// Most rows that one evaluation may have.
pub const MAX_ROWS: u64 = 1_000_000;
/// Seeds are below this: many environments seed NumPy's legacy generator.
pub const SEED_LIMIT: u64 = 1 << 32;
/// Most rows of one run: bounds what an assignment and a lost lease carry.
pub const MAX_RUN_ROWS: u64 = 20_000;

/// Consecutive rows of one cell (model x task).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Segment {
    pub first_row: u64,
    pub count: u64,
    /// Position in the evaluation's models.
    pub model: u32,
    /// Position in the evaluation's tasks.
    pub task: u32,
    /// Trial number of the first row within its cell, from 0.
    pub first_trial: u64,
    /// Seed of the first row; the next have +1 each, unless `seeds` is given.
    pub seed: u64,
    pub seeds: Option<Vec<u64>>,
    /// `trial_index` of the first row for environments that take one.
    pub trial_index: u64,
}

/// One row: which episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    pub row: u64,
    pub model: u32,
    pub task: u32,
    /// Number of the row within its cell, from 0: rows of two models pair by (task, trial).
    pub trial: u64,
    pub seed: u64,
    pub trial_index: u64,
}

impl Segment {
    /// Row number after the last.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.first_row + self.count
    }

    /// The row at `first_row + offset`; None outside the segment.
    #[must_use]
    pub fn row(&self, offset: u64) -> Option<Row> {
        if offset >= self.count {
            return None;
        }
        let seed = match &self.seeds {
            Some(seeds) => *seeds.get(usize::try_from(offset).ok()?)?,
            None => self.seed + offset,
        };
        Some(Row {
            row: self.first_row + offset,
            model: self.model,
            task: self.task,
            trial: self.first_trial + offset,
            seed,
            trial_index: self.trial_index + offset,
        })
    }

    /// The rows of this segment with numbers in `from..to`, as a block.
    #[must_use]
    pub fn slice(&self, from: u64, to: u64) -> Option<Segment> {
        let first = from.max(self.first_row);
        let end = to.min(self.end());
        if first >= end {
            return None;
        }
        let offset = first - self.first_row;
        let count = end - first;
        let seeds = self.seeds.as_ref().map(|seeds| seeds.iter().skip(offset as usize).take(count as usize).copied().collect());
        Some(Segment {
            first_row: first,
            count,
            model: self.model,
            task: self.task,
            first_trial: self.first_trial + offset,
            seed: self.seed + offset,
            seeds,
            trial_index: self.trial_index + offset,
        })
    }
}

/// Whether this model meets this environment.
#[must_use]
pub fn meets(pairs: Option<&[Pair]>, model: &str, env: &str) -> bool {
    pairs.is_none_or(|pairs| pairs.iter().any(|pair| pair.model == model && pair.env == env))
}

/// The segments of a new evaluation: tasks in order, within a task the models in order.
#[must_use]
pub fn segments(spec: &EvaluationSpec) -> Vec<Segment> {
    append(spec, 0, |_, task| (0, task.episodes))
}

/// The segments that `more` further episodes per cell append after `total` rows. Changes no existing row: trials and seeds
/// go on where each cell ended (`done` episodes per cell so far). Tasks with explicit seeds can't be extended.
#[must_use]
pub fn extension(spec: &EvaluationSpec, total: u64, done: impl Fn(u32) -> u64, more: u64) -> Vec<Segment> {
    append(spec, total, |index, _| (done(index), more))
}

fn append(spec: &EvaluationSpec, total: u64, trials: impl Fn(u32, &Task) -> (u64, u64)) -> Vec<Segment> {
    let mut next = total;
    let mut segments = Vec::new();
    for (task_index, task) in (0_u32..).zip(&spec.tasks) {
        let (first_trial, count) = trials(task_index, task);
        for (model_index, model) in (0_u32..).zip(&spec.models) {
            if count == 0 || !meets(spec.pairs.as_deref(), &model.id, &task.env) {
                continue;
            }
            segments.push(Segment {
                first_row: next,
                count,
                model: model_index,
                task: task_index,
                first_trial,
                seed: task.seed + first_trial,
                seeds: if first_trial == 0 { task.seeds.clone() } else { None },
                trial_index: task.trial_index_base + first_trial,
            });
            next += count;
        }
    }
    segments
}

/// The segment that holds this row; `segments` ascend and do not overlap.
#[must_use]
pub fn find(segments: &[Segment], row: u64) -> Option<Row> {
    let position = segments.partition_point(|segment| segment.end() <= row);
    let segment = segments.get(position)?;
    segment.row(row.checked_sub(segment.first_row)?)
}

/// What remains of `segments` without the rows of `done` (ascending row numbers).
#[must_use]
pub fn without(segments: &[Segment], done: &[u64]) -> Vec<Segment> {
    let mut left = Vec::new();
    let mut done = done.iter().copied().peekable();
    for segment in segments {
        let mut from = segment.first_row;
        while let Some(&row) = done.peek() {
            if row >= segment.end() {
                break;
            }
            done.next();
            if row >= from {
                left.extend(segment.slice(from, row));
                from = row + 1;
            }
        }
        left.extend(segment.slice(from, segment.end()));
    }
    left
}

/// The rows of one run of an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRows {
    /// Position in the evaluation's models.
    pub model: u32,
    /// Id of the environment.
    pub env: String,
    pub segments: Vec<Segment>,
}

/// Cuts segments into runs: one model x one environment each, a model's `replicas` side by side, at most
/// [`MAX_RUN_ROWS`] rows.
#[must_use]
pub fn runs(spec: &EvaluationSpec, segments: &[Segment]) -> Vec<RunRows> {
    let mut cells: HashMap<(&str, u32), Vec<&Segment>> = HashMap::new();
    for segment in segments {
        if let Some(task) = spec.tasks.get(segment.task as usize) {
            cells.entry((&task.env, segment.model)).or_default().push(segment);
        }
    }
    let mut runs = Vec::new();
    for environment in &spec.environments {
        for (model_index, model) in (0_u32..).zip(&spec.models) {
            let cell = cells.remove(&(environment.id.as_str(), model_index)).unwrap_or_default();
            let total: u64 = cell.iter().map(|segment| segment.count).sum();
            if total == 0 {
                continue;
            }
            let size = total.div_ceil(u64::from(model.replicas.max(1))).clamp(1, MAX_RUN_ROWS);
            let mut block: Vec<Segment> = Vec::new();
            let mut filled = 0;
            for segment in cell {
                let mut from = segment.first_row;
                while from < segment.end() {
                    let to = segment.end().min(from + (size - filled));
                    block.extend(segment.slice(from, to));
                    filled += to - from;
                    from = to;
                    if filled == size {
                        runs.push(RunRows { model: model_index, env: environment.id.clone(), segments: std::mem::take(&mut block) });
                        filled = 0;
                    }
                }
            }
            if !block.is_empty() {
                runs.push(RunRows { model: model_index, env: environment.id.clone(), segments: block });
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segment(first_row: u64, count: u64, seeds: Option<Vec<u64>>) -> Segment {
        Segment { first_row, count, model: 0, task: 0, first_trial: 3, seed: 10, seeds, trial_index: 100 }
    }

    proptest! {
        #[test]
        fn slices_hold_the_same_rows(count in 1_u64..50, from in 0_u64..80, to in 0_u64..80, explicit: bool) {
            let seeds = explicit.then(|| (0..count).map(|i| i * 7).collect());
            let whole = segment(20, count, seeds);
            let expected: Vec<Row> = (0..count).filter_map(|i| whole.row(i)).filter(|row| (from..to).contains(&row.row)).collect();
            let part = whole.slice(from, to);
            let got: Vec<Row> = part.iter().flat_map(|part| (0..part.count).map(|i| part.row(i).unwrap())).collect();
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn done_rows_are_taken_out_and_no_other(mut done in proptest::collection::btree_set(0_u64..60, 0..40)) {
            let all = [segment(0, 20, None), segment(20, 25, Some((0..25).collect()))];
            done.retain(|row| *row < 45);
            let done: Vec<u64> = done.into_iter().collect();
            let left: Vec<Row> = without(&all, &done).iter().flat_map(|part| (0..part.count).map(|i| part.row(i).unwrap())).collect();
            let expected: Vec<Row> = (0..45).filter(|row| !done.contains(row)).map(|row| find(&all, row).unwrap()).collect();
            prop_assert_eq!(left, expected);
        }
    }
}

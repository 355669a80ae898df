//! Rows with their outcomes, in order of row number, read a batch at a time: pages, exports and imports of any size hold
//! one batch in memory.

use std::collections::HashMap;

use chrono::DateTime;
use rlm_api::rest::{RowOutcome as Kind, RowResult};
use rlm_core::ids::EvaluationId;
use rlm_core::rows::{self, Row, Segment};

use super::Labels;
use crate::store::outcomes::{OutcomeFilter, OutcomeRow, RUN_FAILURE, RowOutcome};
use crate::store::{Store, StoreError};

/// Segments read at once.
const SEGMENTS: u32 = 512;
/// Row numbers that one query may reach across.
const WINDOW: u64 = 20_000;
/// Row numbers that are passed over at once where none is pending.
const SKIPPED: u64 = 100_000;

/// What a page is narrowed to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowFilter {
    pub outcome: Option<Kind>,
    pub model: Option<u32>,
    pub task: Option<u32>,
}

/// A row with what is stored of it.
#[derive(Debug, Clone, PartialEq)]
pub struct RowWithOutcome {
    pub row: Row,
    pub outcome: Option<OutcomeRow>,
}

/// Reads on from a row number.
pub struct RowReader {
    store: Store,
    evaluation: EvaluationId,
    filter: RowFilter,
    next: u64,
    total: u64,
    segments: Vec<Segment>,
}

impl RowReader {
    #[must_use]
    pub const fn new(store: Store, evaluation: EvaluationId, total: u64, from: u64, filter: RowFilter) -> Self {
        Self { store, evaluation, filter, next: from, total, segments: Vec::new() }
    }

    /// The next rows, at most `limit`; empty at the end.
    pub async fn next(&mut self, limit: u32) -> Result<Vec<RowWithOutcome>, StoreError> {
        let limit = limit.max(1) as usize;
        let mut found = Vec::new();
        while found.len() < limit && self.next < self.total {
            match self.filter.outcome {
                Some(Kind::Scored) => self.stored(OutcomeFilter::Scored, limit, &mut found).await?,
                Some(Kind::Errored) => self.stored(OutcomeFilter::Errored, limit, &mut found).await?,
                None | Some(Kind::Pending) => self.window(limit, &mut found).await?,
            }
        }
        Ok(found)
    }

    /// Number of the row that the next batch starts at; None at the end.
    #[must_use]
    pub fn position(&self) -> Option<u64> {
        (self.next < self.total).then_some(self.next)
    }

    /// Rows of one window of segments, with or without an outcome.
    async fn window(&mut self, limit: usize, found: &mut Vec<RowWithOutcome>) -> Result<(), StoreError> {
        if self.segments.last().is_none_or(|last| last.end() <= self.next) {
            self.segments = self.store.segments_from(self.evaluation, self.next, self.filter.model, self.filter.task, SEGMENTS).await?;
        }
        let Some(first) = self.segments.iter().find(|segment| segment.end() > self.next) else {
            self.next = self.total;
            return Ok(());
        };
        let pending_only = self.filter.outcome == Some(Kind::Pending);
        if pending_only {
            // Rows are numbered without gaps: a stretch with as many outcomes as rows has no pending one.
            let end = self.total.min(self.next + SKIPPED);
            if self.store.count_finished(self.evaluation, self.next, end).await? == end - self.next {
                self.next = end;
                return Ok(());
            }
        }
        let from = first.first_row.max(self.next);
        // Rows that a page can still take; when looking for pending ones, as many as one query may reach across.
        let wanted = if pending_only { WINDOW } else { (limit - found.len()) as u64 };
        let mut to = from;
        let mut rows = Vec::new();
        for segment in self.segments.iter().filter(|segment| segment.end() > from) {
            if rows.len() as u64 >= wanted || segment.first_row.saturating_sub(from) >= WINDOW {
                break;
            }
            let Some(part) = segment.slice(from, segment.end().min(segment.first_row.max(from) + (wanted - rows.len() as u64))) else {
                continue;
            };
            to = part.end();
            rows.extend((0..part.count).filter_map(|offset| part.row(offset)));
        }
        if pending_only {
            let finished = self.store.finished_between(self.evaluation, from, to).await?;
            for row in rows {
                if finished.binary_search(&row.row).is_err() {
                    if found.len() == limit {
                        self.next = row.row;
                        return Ok(());
                    }
                    found.push(RowWithOutcome { row, outcome: None });
                }
            }
        } else {
            let limit = u32::try_from(to - from).unwrap_or(u32::MAX);
            let outcomes =
                self.store.outcomes(self.evaluation, (from, to), (self.filter.model, self.filter.task), OutcomeFilter::All, limit).await?;
            let mut outcomes: HashMap<u64, OutcomeRow> = outcomes.into_iter().map(|outcome| (outcome.row, outcome)).collect();
            found.extend(rows.into_iter().map(|row| RowWithOutcome { outcome: outcomes.remove(&row.row), row }));
        }
        self.next = to;
        Ok(())
    }

    /// Rows that have an outcome of one kind.
    async fn stored(&mut self, kind: OutcomeFilter, limit: usize, found: &mut Vec<RowWithOutcome>) -> Result<(), StoreError> {
        let wanted = u32::try_from(limit - found.len()).unwrap_or(u32::MAX);
        let outcomes =
            self.store.outcomes(self.evaluation, (self.next, self.total), (self.filter.model, self.filter.task), kind, wanted).await?;
        let complete = outcomes.len() < wanted as usize;
        for outcome in outcomes {
            if rows::find(&self.segments, outcome.row).is_none() {
                self.segments =
                    self.store.segments_from(self.evaluation, outcome.row, self.filter.model, self.filter.task, SEGMENTS).await?;
            }
            let row = rows::find(&self.segments, outcome.row).ok_or_else(|| StoreError::Inconsistent {
                table: "outcomes",
                column: "row_number",
                row: format!("{} row {}", self.evaluation, outcome.row),
                problem: "the evaluation has no such row".to_owned(),
            })?;
            self.next = outcome.row + 1;
            found.push(RowWithOutcome { row, outcome: Some(outcome) });
        }
        if complete {
            self.next = self.total;
        }
        Ok(())
    }
}

/// How many attempts there were: those kept, and the scored one that counts.
#[must_use]
pub fn attempts(kept: u64, outcome: Option<&OutcomeRow>) -> u32 {
    let counted = u64::from(outcome.is_some_and(|outcome| outcome.is_scored() && outcome.attempt != RUN_FAILURE));
    u32::try_from(kept + counted).unwrap_or(u32::MAX)
}

/// A row as REST shows it.
#[must_use]
pub fn result(labels: &Labels, item: RowWithOutcome, kept: u64) -> RowResult {
    let RowWithOutcome { row, outcome } = item;
    let (env, task_id) = labels.task(row.task);
    let mut result = RowResult {
        row: row.row,
        model: labels.model(row.model).to_owned(),
        env: env.to_owned(),
        task_id: task_id.to_owned(),
        trial: row.trial,
        seed: row.seed,
        trial_index: row.trial_index,
        outcome: Kind::Pending,
        reward: None,
        steps: None,
        terminated: None,
        truncated: None,
        success: None,
        first_observation_sha256: None,
        conformance_warnings: 0,
        failure: None,
        attempts: attempts(kept, outcome.as_ref()),
        started_at: None,
        duration_ms: None,
    };
    let Some(outcome) = outcome else { return result };
    result.started_at = DateTime::from_timestamp_millis(outcome.started_at);
    result.duration_ms = u64::try_from(outcome.ended_at.saturating_sub(outcome.started_at)).ok();
    match outcome.result {
        RowOutcome::Scored { reward, steps, terminated, truncated, success, first_observation_sha256, conformance_warnings } => {
            result.outcome = Kind::Scored;
            result.reward = Some(reward);
            result.steps = u32::try_from(steps).ok();
            result.terminated = Some(terminated);
            result.truncated = Some(truncated);
            result.success = success;
            result.first_observation_sha256 = first_observation_sha256;
            result.conformance_warnings = u32::try_from(conformance_warnings).unwrap_or(u32::MAX);
        }
        RowOutcome::Errored(failure) => {
            result.outcome = Kind::Errored;
            result.failure = Some(failure);
        }
    }
    result
}

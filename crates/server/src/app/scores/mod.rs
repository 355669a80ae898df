//! Scores of an evaluation: rates and means by group, and paired comparisons of its models.
//!
//! Everything is a function of the stored outcomes. Errored, pending and unknown rows stay outside every rate and are shown
//! beside it with the bounds they imply. One computation at a time holds at most the values of one evaluation; what was
//! computed is kept until the counters change.

mod groups;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rlm_api::rest::{Comparison, Scores};
use rlm_core::error::{Code, Error};
use rlm_core::ids::{EvaluationId, OrganizationId};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::app::access::Caller;
use crate::app::evaluations::{find, labels};
use crate::state::AppState;
use crate::store::evaluations::EvaluationHead;
use crate::store::{Store, StoreError};

pub use groups::{Cell, CellValues, GroupBy, Value, compute};

/// Rows read at once.
const BLOCK: u32 = 20_000;
const KEPT: usize = 128;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(25);
/// While an evaluation runs, scores may be this old at most, and no older than four times what computing them costs.
const OLDEST: Duration = Duration::from_secs(10);
/// Rows from which scores are computed as soon as the evaluation has ended, before anybody asks.
const LARGE: u64 = 50_000;

/// Counters and name changes that scores depend on.
type Version = (u64, u64, u64);

struct Entry {
    version: Version,
    at: Instant,
    took: Duration,
    scores: Arc<Scores>,
}

/// Scores that were computed lately, and whose turn it is.
pub struct ScoreCache {
    entries: Mutex<HashMap<(EvaluationId, GroupBy), Entry>>,
    /// The last comparisons: they are the same for every grouping.
    comparisons: Mutex<Option<(EvaluationId, Version, Vec<Comparison>)>>,
    turn: Arc<Semaphore>,
}

impl Default for ScoreCache {
    fn default() -> Self {
        Self { entries: Mutex::default(), comparisons: Mutex::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

impl ScoreCache {
    /// What is known and still true: of the same counters, or, while rows come in, of a moment ago.
    fn get(&self, head: &EvaluationHead, group_by: GroupBy) -> Option<Arc<Scores>> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(&(head.id, group_by))?;
        let recent = !head.status.is_terminal() && entry.at.elapsed() < OLDEST.min(entry.took * 4);
        (entry.version == version(head) || recent).then(|| Arc::clone(&entry.scores))
    }

    fn comparisons(&self, head: &EvaluationHead) -> Option<Vec<Comparison>> {
        let known = self.comparisons.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().filter(|(id, at, _)| *id == head.id && *at == version(head)).map(|(.., comparisons)| comparisons.clone())
    }

    fn put(&self, key: (EvaluationId, GroupBy), entry: Entry) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= KEPT && !entries.contains_key(&key) {
            let oldest = entries.iter().min_by_key(|(_, entry)| entry.at).map(|(key, _)| *key);
            if let Some(oldest) = oldest {
                entries.remove(&oldest);
            }
        }
        entries.insert(key, entry);
    }
}

const fn version(head: &EvaluationHead) -> Version {
    (head.rows_total, head.rows_scored, head.rows_errored)
}

/// The scores of an evaluation.
pub async fn scores(state: &AppState, caller: &Caller, id: &str, group_by: GroupBy) -> Result<Arc<Scores>, Error> {
    let head = find(state, caller, id).await?;
    of(state, head.organization, head.id, group_by).await
}

async fn head_of(state: &AppState, organization: OrganizationId, id: EvaluationId) -> Result<EvaluationHead, Error> {
    let head = state.store.evaluation(organization, id).await?;
    head.ok_or_else(|| Error::new(Code::NotFound, format!("the evaluation {id} was deleted")))
}

async fn of(state: &AppState, organization: OrganizationId, id: EvaluationId, group_by: GroupBy) -> Result<Arc<Scores>, Error> {
    let head = head_of(state, organization, id).await?;
    if let Some(known) = state.scores.get(&head, group_by) {
        return Ok(known);
    }
    let Ok(Ok(turn)) = tokio::time::timeout(PATIENCE, Arc::clone(&state.scores.turn).acquire_owned()).await else {
        return Err(Error::new(Code::Unavailable, "the server is computing other scores; ask again in a moment"));
    };
    // Whoever had the turn before may have computed the same.
    let head = head_of(state, organization, id).await?;
    if let Some(known) = state.scores.get(&head, group_by) {
        return Ok(known);
    }
    let started = Instant::now();
    let labels = labels(state, head.id).await?;
    let cells = read(&state.store, &head).await?;
    let known = state.scores.comparisons(&head);
    // The turn goes with the work, which goes on when the request goes away, and comes back for what is stored below.
    let work = move || (compute(&labels, &cells, group_by, known), turn);
    let (computed, _turn) = tokio::task::spawn_blocking(work).await.map_err(|error| {
        tracing::error!(%error, "computing scores failed");
        Error::new(Code::Internal, "the scores could not be computed; the server's log says why under this request's id")
    })?;
    let computed = computed?;
    *state.scores.comparisons.lock().unwrap_or_else(PoisonError::into_inner) =
        Some((head.id, version(&head), computed.comparisons.clone()));
    let scores = Arc::new(computed);
    let entry = Entry { version: version(&head), at: Instant::now(), took: started.elapsed(), scores: Arc::clone(&scores) };
    state.scores.put((head.id, group_by), entry);
    Ok(scores)
}

/// Computes what people look at first, of a large evaluation that has just ended. Failing here is no harm: whoever asks
/// computes it then.
pub fn prepare(state: &AppState, organization: OrganizationId, id: EvaluationId) {
    let state = state.clone();
    tokio::spawn(async move {
        let Ok(head) = head_of(&state, organization, id).await else { return };
        if !head.status.is_terminal() || head.rows_total < LARGE {
            return;
        }
        for group_by in [GroupBy::Task, GroupBy::Model] {
            if let Err(error) = of(&state, organization, id, group_by).await {
                tracing::debug!(evaluation = %id, %error, "scores were not prepared");
            }
        }
    });
}

/// Values and counters per (model, task).
async fn read(store: &Store, head: &EvaluationHead) -> Result<Vec<Cell>, StoreError> {
    let mut cells: HashMap<(u32, u32), Cell> = HashMap::new();
    let mut order = Vec::new();
    for (model, task, rows) in store.cells(head.id).await? {
        order.push((model, task));
        cells.insert((model, task), Cell { model, task, rows, errored: 0, steps: 0, values: CellValues::default() });
    }
    for sum in store.cell_sums(head.id).await? {
        if let Some(cell) = cells.get_mut(&(sum.model, sum.task)) {
            cell.errored = sum.errored;
            cell.steps = sum.steps_sum;
        }
    }
    let mut from = 0;
    let mut segments: Vec<rlm_core::rows::Segment> = Vec::new();
    loop {
        let values = store.scored_values(head.id, from, head.rows_total, BLOCK).await?;
        let Some(last) = values.last().map(|value| value.0) else { break };
        for (number, reward, success) in values {
            if rlm_core::rows::find(&segments, number).is_none() {
                segments = store.segments_from(head.id, number, None, None, 1_000).await?;
            }
            let Some(row) = rlm_core::rows::find(&segments, number) else { continue };
            if let Some(cell) = cells.get_mut(&(row.model, row.task)) {
                cell.values.push(row.trial, row.seed, reward, success);
            }
        }
        from = last + 1;
    }
    Ok(order.into_iter().filter_map(|key| cells.remove(&key)).map(Cell::sorted).collect())
}

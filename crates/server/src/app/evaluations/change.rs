//! Changes of an evaluation after its submission: rename, cancel, retry errored rows, add episodes, clone, delete.

use std::collections::BTreeMap;
use std::time::Duration;

use rlm_api::rest::EvaluationSummary;
use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::{ClusterId, EvaluationId};
use rlm_core::request::tag_problems;
use rlm_core::rows::{self, MAX_ROWS, SEED_LIMIT, Segment};
use rlm_core::run::EvaluationStatus;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::submit::{Created, Submission, repeated, request_hash, store};
use super::{find, new_runs, read};
use crate::app::access::Caller;
use crate::app::{audit, ingest};
use crate::state::AppState;
use crate::store::evaluations::{EvaluationHead, LockedEvaluation};
use crate::store::{StoreError, Write};

const LONGEST_NAME: usize = 200;
/// How long a deleted evaluation's data is kept.
const KEPT_MS: i64 = 7 * 24 * 3_600_000;

/// Renames, and replaces tags; what is None stays.
pub async fn change(
    state: &AppState,
    caller: &Caller,
    id: &str,
    name: Option<String>,
    tags: Option<BTreeMap<String, String>>,
) -> Result<EvaluationSummary, Error> {
    let head = find(state, caller, id).await?;
    let mut problems = Vec::new();
    if let Some(name) = &name
        && (name.is_empty() || name.chars().count() > LONGEST_NAME || name.chars().any(char::is_control))
    {
        problems.push(Problem::new("name", format!("must have 1 to {LONGEST_NAME} characters, none of them a control character")));
    }
    if let Some(tags) = &tags {
        problems.extend(tag_problems(tags));
    }
    if !problems.is_empty() {
        return Err(Error::invalid(problems));
    }
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    lock(&mut write, &head).await?;
    if let Some(name) = &name {
        write.rename_evaluation(head.id, name).await?;
    }
    if let Some(tags) = &tags {
        write.set_tags(head.id, tags).await?;
    }
    audit::record(&mut write, now_ms, &caller.actor(), "evaluation.change", &head.id.to_string(), json!({"name": name, "tags": tags}))
        .await?;
    write.commit().await?;
    state.events.publish(head.id);
    read::summary(state, &find(state, caller, id).await?).await
}

/// Stops an evaluation: nothing more is started, and clusters stop what runs. Results that are there stay. Repeating it is
/// fine.
pub async fn cancel(state: &AppState, caller: &Caller, id: &str) -> Result<EvaluationSummary, Error> {
    let head = find(state, caller, id).await?;
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let mut evaluation = lock(&mut write, &head).await?;
    let ended = write.cancel_queued_runs(head.id, now_ms).await?;
    match evaluation.status {
        EvaluationStatus::Cancelling | EvaluationStatus::Cancelled => drop(write),
        EvaluationStatus::Completed | EvaluationStatus::Failed => {
            return Err(Error::new(
                Code::Conflict,
                format!("{} is {} already, so there is nothing to cancel", head.id, evaluation.status.as_str()),
            ));
        }
        EvaluationStatus::Queued | EvaluationStatus::Running => {
            evaluation.cancel_requested_at = Some(now_ms);
            ingest::settle_locked(&mut write, &mut evaluation, 0.0, now_ms).await?;
            audit::record(
                &mut write,
                now_ms,
                &caller.actor(),
                "evaluation.cancel",
                &head.id.to_string(),
                json!({"queuedRunsEnded": ended}),
            )
            .await?;
            write.commit().await?;
            state.events.publish(head.id);
            state.cells.wake();
        }
    }
    read::summary(state, &find(state, caller, id).await?).await
}

/// Locks what was found before: it may have been deleted since.
async fn lock(write: &mut Write, head: &EvaluationHead) -> Result<LockedEvaluation, Error> {
    write.lock_evaluation(head.id).await?.filter(|evaluation| evaluation.deleted_at.is_none()).ok_or_else(|| gone(head))
}

fn gone(head: &EvaluationHead) -> Error {
    Error::new(Code::NotFound, format!("the evaluation {} was deleted", head.id))
}

/// The numbers of these rows as segments.
fn select(segments: &[Segment], numbers: &[u64]) -> Vec<Segment> {
    let mut selected = Vec::new();
    let mut at = 0;
    while let Some(&from) = numbers.get(at) {
        let mut to = from + 1;
        at += 1;
        while numbers.get(at) == Some(&to) {
            to += 1;
            at += 1;
        }
        let first = segments.partition_point(|segment| segment.end() <= from);
        selected
            .extend(segments.iter().skip(first).take_while(|segment| segment.first_row < to).filter_map(|segment| segment.slice(from, to)));
    }
    selected
}

async fn all_segments(state: &AppState, id: EvaluationId) -> Result<Vec<Segment>, StoreError> {
    state.store.segments_from(id, 0, None, None, u32::try_from(MAX_ROWS).unwrap_or(u32::MAX)).await
}

/// Runs the errored rows of a completed or failed evaluation again, with their seeds.
pub async fn retry(state: &AppState, caller: &Caller, id: &str) -> Result<EvaluationSummary, Error> {
    let head = find(state, caller, id).await?;
    refuse_imported(state, &head).await?;
    let spec = state.store.spec_as(head.id).await?.ok_or_else(|| gone(&head))?;
    let segments = all_segments(state, head.id).await?;
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let mut evaluation = lock(&mut write, &head).await?;
    match evaluation.status {
        EvaluationStatus::Completed | EvaluationStatus::Failed => {}
        EvaluationStatus::Cancelling | EvaluationStatus::Cancelled => {
            return Err(Error::new(Code::Conflict, format!("{} was cancelled and stays so; clone it to run it again", head.id)));
        }
        EvaluationStatus::Queued | EvaluationStatus::Running => {
            return Err(Error::new(
                Code::Conflict,
                format!("{} is {}; errored rows can be retried once it has ended", head.id, evaluation.status.as_str()),
            ));
        }
    }
    let errored = write.take_errored(head.id).await?;
    if errored.is_empty() {
        return Err(Error::new(Code::Conflict, format!("{} has no errored rows to retry", head.id)));
    }
    let generation = write.highest_generation(head.id).await?;
    let runs = new_runs(&spec, &select(&segments, &errored), head.id, caller, generation, now_ms);
    write.insert_runs(&runs).await?;
    evaluation.rows_errored = evaluation.rows_errored.saturating_sub(errored.len() as u64);
    ingest::settle_locked(&mut write, &mut evaluation, spec.limits.max_errored_fraction, now_ms).await?;
    let details = json!({"rows": errored.len(), "runs": runs.len()});
    finish(state, write, caller, head.id, "evaluation.retry", details, now_ms).await?;
    read::summary(state, &find(state, caller, id).await?).await
}

/// Appends `episodes` rows to each cell of an evaluation that was not cancelled.
pub async fn extend(state: &AppState, caller: &Caller, id: &str, episodes: u64) -> Result<EvaluationSummary, Error> {
    let head = find(state, caller, id).await?;
    refuse_imported(state, &head).await?;
    if episodes == 0 || episodes > MAX_ROWS {
        return Err(Error::invalid(vec![Problem::new("episodes", format!("must be 1 to {MAX_ROWS}: that many more per model and task"))]));
    }
    let mut write = state.store.write().await?;
    let mut evaluation = lock(&mut write, &head).await?;
    if matches!(evaluation.status, EvaluationStatus::Cancelling | EvaluationStatus::Cancelled) {
        return Err(Error::new(Code::Conflict, format!("{} was cancelled and stays so; clone it to run it again", head.id)));
    }
    // Read under the lock: another extension changes it.
    let mut spec = write.spec(head.id).await?;
    let problems: Vec<Problem> = spec
        .tasks
        .iter()
        .enumerate()
        .filter_map(|(index, task)| {
            let path = format!("tasks[{index}]");
            if task.seeds.is_some() {
                return Some(Problem::new(
                    path,
                    format!("{} has explicit seeds, so it is not known which seeds further episodes should have", task.task_id),
                ));
            }
            (task.seed + task.episodes + episodes > SEED_LIMIT).then(|| {
                Problem::new(path, format!("{} would reach seeds of 2^32 and above, which many environments refuse", task.task_id))
            })
        })
        .collect();
    if !problems.is_empty() {
        return Err(Error::invalid(problems));
    }
    let episodes_of = |task: u32| spec.tasks.get(task as usize).map_or(0, |task| task.episodes);
    let segments = rows::extension(&spec, evaluation.rows_total, episodes_of, episodes);
    let total = segments.last().map_or(evaluation.rows_total, Segment::end);
    if total > MAX_ROWS {
        return Err(Error::invalid(vec![Problem::new("episodes", format!("{total} rows in all; an evaluation has at most {MAX_ROWS}"))]));
    }
    for task in &mut spec.tasks {
        task.episodes += episodes;
    }
    let now_ms = state.clock.now_ms();
    let runs = new_runs(&spec, &segments, head.id, caller, 0, now_ms);
    write.insert_segments(head.id, &segments).await?;
    write.insert_runs(&runs).await?;
    write.set_spec(head.id, &spec).await?;
    let added = total - evaluation.rows_total;
    evaluation.rows_total = total;
    ingest::settle_locked(&mut write, &mut evaluation, spec.limits.max_errored_fraction, now_ms).await?;
    let details = json!({"episodesPerCell": episodes, "rows": added, "runs": runs.len()});
    finish(state, write, caller, head.id, "evaluation.extend", details, now_ms).await?;
    read::summary(state, &find(state, caller, id).await?).await
}

async fn finish(
    state: &AppState,
    mut write: Write,
    caller: &Caller,
    id: EvaluationId,
    action: &str,
    details: Value,
    now_ms: i64,
) -> Result<(), Error> {
    audit::record(&mut write, now_ms, &caller.actor(), action, &id.to_string(), details).await?;
    write.commit().await?;
    state.events.publish(id);
    state.cells.wake();
    Ok(())
}

/// What a clone may have of its own.
#[derive(Debug, Clone, Default)]
pub struct CloneChanges {
    pub name: Option<String>,
    pub cluster: Option<Option<ClusterId>>,
    pub client_token: Option<String>,
}

/// A new evaluation of the same rows, from the checked request as it was stored: what is registered now does not matter.
pub async fn clone(state: &AppState, caller: &Caller, id: &str, changes: CloneChanges) -> Result<Created, Error> {
    let head = find(state, caller, id).await?;
    refuse_imported(state, &head).await?;
    let documents = state.store.evaluation_documents(head.id).await?.ok_or_else(|| gone(&head))?;
    let mut spec = documents.spec;
    spec.name = changes.name.unwrap_or_else(|| head.name.clone());
    spec.tags = head.tags.clone();
    if let Some(cluster) = changes.cluster {
        let known = state.store.cluster_conditions(caller.organization_id).await?;
        if let Some(cluster) = cluster.filter(|cluster| !known.iter().any(|known| known.id == *cluster)) {
            return Err(Error::invalid(vec![Problem::new("cluster", format!("there is no cluster {cluster} in this organization"))]));
        }
        spec.cluster = cluster;
    }
    let hash = request_hash(&json!({"clone": head.id, "name": spec.name, "cluster": spec.cluster}));
    if let Some(created) = repeated(state, caller, changes.client_token.as_deref(), &hash).await? {
        return Ok(created);
    }
    let submission = Submission {
        request: documents.request,
        spec,
        warnings: documents.warnings,
        token: changes.client_token,
        hash,
        action: "evaluation.clone",
    };
    store(state, caller, submission).await
}

async fn refuse_imported(state: &AppState, head: &EvaluationHead) -> Result<(), Error> {
    let request: super::import::ImportMark = state.store.request_as(head.id).await?.ok_or_else(|| gone(head))?;
    if request.is_imported() {
        return Err(Error::new(
            Code::Conflict,
            format!("{} was imported from a result file: its models and environments are known by name only, so it can't be run", head.id),
        ));
    }
    Ok(())
}

/// Hides an evaluation that has ended; its data is removed after a week.
pub async fn delete(state: &AppState, caller: &Caller, id: &str) -> Result<(), Error> {
    let head = find(state, caller, id).await?;
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let evaluation = lock(&mut write, &head).await?;
    if !evaluation.status.is_terminal() {
        return Err(Error::new(Code::Conflict, format!("{} is {}; cancel it first, then delete it", head.id, evaluation.status.as_str())));
    }
    write.delete_evaluation(head.id, now_ms).await?;
    audit::record(
        &mut write,
        now_ms,
        &caller.actor(),
        "evaluation.delete",
        &head.id.to_string(),
        json!({"name": head.name, "rows": head.rows_total}),
    )
    .await?;
    write.commit().await?;
    state.events.publish(head.id);
    Ok(())
}

/// Removes the data of evaluations that were deleted a week ago or earlier, one transaction each; says how many.
pub async fn purge_deleted(state: &AppState) -> Result<u64, StoreError> {
    let mut purged = 0;
    for id in state.store.deleted_evaluations(state.clock.now_ms() - KEPT_MS, 100).await? {
        let mut write = state.store.write().await?;
        write.lock_evaluation(id).await?;
        write.purge_evaluation(id).await?;
        write.commit().await?;
        purged += 1;
    }
    Ok(purged)
}

/// Removes what was deleted long ago, every hour until `stop`.
pub async fn sweep(state: AppState, stop: CancellationToken) {
    loop {
        if let Err(error) = purge_deleted(&state).await {
            tracing::warn!(%error, "deleted evaluations could not be removed; trying again later");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(Duration::from_secs(3_600)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_selected_as_blocks() {
        let segment =
            |first_row, model| Segment { first_row, count: 10, model, task: 0, first_trial: 0, seed: 100, seeds: None, trial_index: 0 };
        let segments = [segment(0, 0), segment(10, 1)];
        let selected = select(&segments, &[1, 2, 9, 10, 11, 19]);
        let shape: Vec<(u64, u64, u32, u64)> = selected.iter().map(|part| (part.first_row, part.count, part.model, part.seed)).collect();
        assert_eq!(shape, vec![(1, 2, 0, 101), (9, 1, 0, 109), (10, 2, 1, 100), (19, 1, 1, 109)]);
    }
}

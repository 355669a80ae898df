//! What the scheduler does to runs: hands them over, takes them back, ends them. Each is one transaction that checks that
//! the run still stands where the decision saw it, so that a late decision changes nothing.

use std::collections::BTreeSet;

use prost::Message as _;
use rlm_api::cluster::v1::{Assign, RowBlock};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::{ClusterId, EvaluationId, OrganizationId, RunId};
use rlm_core::run::RunEvent;

use crate::app::ingest;
use crate::state::AppState;
use crate::store::StoreError;
use crate::store::runs::Run;

/// Largest assignment: agents read messages of up to 4 MiB.
const LARGEST: usize = 3_500_000;

/// Whether a run moved.
type Moved = bool;

/// The clusters' leases change: who watches the evaluation hears of it, and the scheduler looks again.
fn changed(state: &AppState, evaluation: EvaluationId) {
    state.events.publish(evaluation);
    state.cells.wake();
}

/// Applies `event` to a run that stands at `generation`.
async fn apply(state: &AppState, id: RunId, generation: u64, event: RunEvent) -> Result<Moved, StoreError> {
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    write.lock_evaluations_of(&[id]).await?;
    let Some(mut run) = write.lock_run(id).await? else { return Ok(false) };
    let Some(next) = run.head.state.after(event).filter(|_| run.head.generation == generation) else { return Ok(false) };
    run.head.state = next;
    run.head.waiting = None;
    if next.is_terminal() {
        run.head.finished_at = Some(now_ms);
    } else if event == RunEvent::LeaseGivenUp {
        run.head.cluster = None;
        run.head.leased_at = None;
    }
    write.save_run(&run.head).await?;
    ingest::settle(&mut write, run.head.evaluation, now_ms).await?;
    write.commit().await?;
    changed(state, run.head.evaluation);
    Ok(true)
}

/// The lease ends; the rows that are still open go on elsewhere, in a new generation.
pub async fn give_up(state: &AppState, id: RunId, generation: u64) -> Result<(), StoreError> {
    if apply(state, id, generation, RunEvent::LeaseGivenUp).await? {
        tracing::warn!(run = %id, generation, "a lease was given up; the run's open rows go on in a new one");
    }
    Ok(())
}

/// The run of a cancelled evaluation ends without its cluster's word.
pub async fn cancel(state: &AppState, id: RunId, generation: u64) -> Result<(), StoreError> {
    apply(state, id, generation, RunEvent::Cancelled).await.map(|_| ())
}

/// Generations above this were never given out: nothing is leased so often.
const HIGHEST_GENERATION: u64 = 1_000_000;

/// Runs at generations that an agent was given. Those that this database does not know, because it was restored from a
/// backup, are never given out a second time.
pub async fn were_given_out(state: &AppState, organization: OrganizationId, given: &[(RunId, u64)]) -> Result<(), StoreError> {
    let now_ms = state.clock.now_ms();
    let mut given: Vec<(RunId, u64)> = given.iter().filter(|(_, generation)| *generation <= HIGHEST_GENERATION).copied().collect();
    given.sort_unstable();
    let mut write = state.store.write().await?;
    write.lock_evaluations_of(&given.iter().map(|(run, _)| *run).collect::<Vec<_>>()).await?;
    let mut raised: BTreeSet<EvaluationId> = BTreeSet::new();
    for (run, generation) in given {
        if let Some(evaluation) = write.raise_generation(run, organization, generation).await? {
            tracing::warn!(%run, generation, "an agent holds a lease that is not known here (a restored database?)");
            raised.insert(evaluation);
        }
    }
    if raised.is_empty() {
        return Ok(());
    }
    for evaluation in &raised {
        ingest::settle(&mut write, *evaluation, now_ms).await?;
    }
    write.commit().await?;
    for evaluation in raised {
        changed(state, evaluation);
    }
    Ok(())
}

/// The run can't be done: its open rows are errored with `failure`.
pub async fn fail(state: &AppState, id: RunId, evaluation: EvaluationId, failure: Failure) -> Result<(), StoreError> {
    let now_ms = state.clock.now_ms();
    tracing::warn!(run = %id, code = failure.code.as_str(), "a run failed at the control plane: {}", failure.message);
    let mut write = state.store.write().await?;
    let Some(_) = ingest::fail_run(&mut write, id, failure, now_ms).await? else { return Ok(()) };
    write.commit().await?;
    changed(state, evaluation);
    Ok(())
}

/// Hands a queued run to the agent of this session. None: the run, its evaluation, the cluster or the session changed
/// meanwhile.
pub async fn lease(state: &AppState, id: RunId, cluster: ClusterId, session_generation: u64) -> Result<Option<u64>, StoreError> {
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    write.lock_evaluations_of(&[id]).await?;
    let Some(generation) = write.lease_run(id, cluster, now_ms).await? else { return Ok(None) };
    let Some(run) = write.lock_run(id).await? else { return Ok(None) };
    let Some(evaluation) = write.lock_evaluation(run.head.evaluation).await? else { return Ok(None) };
    if evaluation.cancel_requested_at.is_some() || !write.takes_runs(cluster, session_generation).await? {
        return Ok(None);
    }
    ingest::settle(&mut write, run.head.evaluation, now_ms).await?;
    write.commit().await?;
    state.events.publish(run.head.evaluation);
    Ok(Some(generation))
}

/// What a cluster is told about its lease. None: the lease is gone, or there was nothing to tell and the run is over.
pub async fn assignment(state: &AppState, id: RunId, generation: u64) -> Result<Option<Assign>, StoreError> {
    let Some(run) = state.store.run(id).await? else { return Ok(None) };
    if run.head.generation != generation || !run.head.state.is_placed() {
        return Ok(None);
    }
    let open = state.store.open_segments(id).await?;
    if open.is_empty() {
        // Late results of an earlier lease filled every row.
        apply(state, id, generation, RunEvent::Finished).await?;
        return Ok(None);
    }
    match compose(&run, &open) {
        Ok(assign) => Ok(Some(assign)),
        Err(failure) => {
            fail(state, id, run.head.evaluation, failure).await?;
            Ok(None)
        }
    }
}

/// The message that carries a run and its open rows. Pure.
fn compose(run: &Run, open: &[rlm_core::rows::Segment]) -> Result<Assign, Failure> {
    let broken = |problem: String| Failure::new(FailureCode::Internal, format!("{} can't be handed to a cluster: {problem}", run.head.id));
    let run_json = serde_json::to_string(&run.spec).map_err(|error| broken(error.to_string()))?;
    let rows = open
        .iter()
        .map(|segment| {
            let place = run.spec.tasks.iter().position(|task| task.task_index == segment.task).and_then(|place| u32::try_from(place).ok());
            let task = place.ok_or_else(|| broken(format!("its rows name task {}, its specification does not", segment.task)))?;
            RowBlock::from_segment(segment, task).map_err(|error| broken(error.to_string()))
        })
        .collect::<Result<Vec<RowBlock>, Failure>>()?;
    let assign = Assign { run_json, rows };
    let size = assign.encoded_len();
    if size > LARGEST {
        return Err(Failure::new(
            FailureCode::Unsupported,
            format!(
                "{} is too large to be handed to a cluster ({size} bytes, at most {LARGEST}): its params, env or explicit seeds are too long; \
                 shorten them, or split its tasks over several evaluations",
                run.head.id
            ),
        ));
    }
    Ok(assign)
}

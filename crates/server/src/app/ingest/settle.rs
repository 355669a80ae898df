//! Ends of runs, and the status of the evaluation that follows. Runs in the caller's transaction; decides by
//! `rlm_core::run` alone.

use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::{EvaluationId, RunId};
use rlm_core::rows::Segment;
use rlm_core::run::{EvaluationCounts, EvaluationStatus, RunEvent, RunState, status};

use super::{count, document};
use crate::store::evaluations::LockedEvaluation;
use crate::store::outcomes::{AttemptRow, OutcomeRow, RUN_FAILURE, RowOutcome};
use crate::store::runs::Run;
use crate::store::{StoreError, Write};

/// Moves the run's state; a lease that was given up leaves it queued without a cluster.
pub(super) fn end(run: &mut Run, event: RunEvent, at_ms: i64) {
    let Some(state) = run.head.state.after(event) else { return };
    run.head.state = state;
    run.head.waiting = None;
    if state == RunState::Queued {
        run.head.cluster = None;
        run.head.leased_at = None;
    } else if state.is_terminal() {
        run.head.finished_at = Some(at_ms);
    }
}

/// A placed run that its cluster reports as finished, or as failed with `failure`; outcomes of the batch are stored already.
///
/// Rows left open by a failure are errored with it. Rows left open by a run that says it has finished go on in a new
/// generation as long as each generation brings some; one that brings none has lost its runner.
///
/// Returns the rows that it errored.
pub(super) async fn finish(
    write: &mut Write,
    run: &mut Run,
    evaluation: &mut LockedEvaluation,
    failure: Option<Failure>,
    at_ms: i64,
) -> Result<Vec<Segment>, StoreError> {
    if evaluation.cancel_requested_at.is_some() {
        end(run, RunEvent::Cancelled, at_ms);
        return Ok(Vec::new());
    }
    let open = write.open_of(evaluation.id, &run.segments).await?;
    if open.is_empty() {
        run.head.failure = failure.clone();
        end(run, if failure.is_some() { RunEvent::Failed } else { RunEvent::Finished }, at_ms);
        return Ok(Vec::new());
    }
    let failure = match failure {
        Some(failure) => failure,
        None if write.has_outcome_of(evaluation.id, run.head.id, run.head.generation, &run.segments).await? => {
            end(run, RunEvent::LeaseGivenUp, at_ms);
            return Ok(Vec::new());
        }
        None => Failure::new(
            FailureCode::RunnerLost,
            format!(
                "{} ended without an outcome of any of its {} open rows; see its logs, then retry the errored rows",
                run.head.id,
                open.iter().map(|segment| segment.count).sum::<u64>()
            ),
        )
        .of("runner"),
    };
    errored(write, run, evaluation, &open, &failure, at_ms).await?;
    run.head.failure = Some(failure);
    end(run, RunEvent::Failed, at_ms);
    Ok(open)
}

/// Rows that get the whole failure. The others have the same reason; the output that shows it is kept with the first of them.
const WHOLE_FAILURES: usize = 50;

/// Gives each open row the failure of its run.
async fn errored(
    write: &mut Write,
    run: &Run,
    evaluation: &mut LockedEvaluation,
    open: &[Segment],
    failure: &Failure,
    at_ms: i64,
) -> Result<(), StoreError> {
    let brief = Failure { events: Vec::new(), log_lines: Vec::new(), ..failure.clone() };
    let mut wholes = std::iter::repeat_n(failure, WHOLE_FAILURES);
    for segment in open {
        let outcomes: Vec<OutcomeRow> = (0..segment.count)
            .filter_map(|offset| segment.row(offset))
            .map(|row| OutcomeRow {
                row: row.row,
                model: row.model,
                task: row.task,
                run: run.head.id,
                generation: run.head.generation,
                attempt: RUN_FAILURE,
                seed: row.seed,
                result: RowOutcome::Errored(wholes.next().unwrap_or(&brief).clone()),
                started_at: at_ms,
                ended_at: at_ms,
            })
            .collect();
        for outcomes in outcomes.chunks(1_000) {
            write.put_outcomes(evaluation.id, outcomes).await?;
            let attempts: Vec<AttemptRow> = outcomes
                .iter()
                .map(|outcome| AttemptRow {
                    row: outcome.row,
                    generation: outcome.generation,
                    attempt: outcome.attempt,
                    run: outcome.run,
                    episode: document(outcome),
                })
                .collect();
            write.put_attempts(evaluation.id, &attempts).await?;
        }
        for _ in 0..outcomes.len() {
            count(evaluation, false, 1);
        }
    }
    Ok(())
}

/// Ends a run that is not over (queued or placed) as failed: its open rows become errored. For what the control plane finds
/// out by itself, such as a queue timeout. The caller then publishes the change.
pub async fn fail_run(write: &mut Write, id: RunId, failure: Failure, now_ms: i64) -> Result<Option<EvaluationStatus>, StoreError> {
    write.lock_evaluations_of(&[id]).await?;
    let Some(mut run) = write.lock_run(id).await? else { return Ok(None) };
    if run.head.state.is_terminal() {
        return Ok(None);
    }
    let Some(mut evaluation) = write.lock_evaluation(run.head.evaluation).await? else { return Ok(None) };
    let open = write.open_of(evaluation.id, &run.segments).await?;
    errored(write, &run, &mut evaluation, &open, &failure, now_ms).await?;
    run.head.failure = Some(failure);
    end(&mut run, RunEvent::Failed, now_ms);
    write.save_run(&run.head).await?;
    let fraction = run.spec.limits.max_errored_fraction;
    settle_locked(write, &mut evaluation, fraction, now_ms).await.map(Some)
}

/// The status of the evaluation after something changed its runs. The caller then publishes the change.
pub async fn settle(write: &mut Write, id: EvaluationId, now_ms: i64) -> Result<Option<EvaluationStatus>, StoreError> {
    let Some(mut evaluation) = write.lock_evaluation(id).await? else { return Ok(None) };
    let fraction = write.max_errored_fraction(id).await?;
    settle_locked(write, &mut evaluation, fraction, now_ms).await.map(Some)
}

/// As [`settle`], of an evaluation that is locked and whose counters may have changed in memory.
pub(crate) async fn settle_locked(
    write: &mut Write,
    evaluation: &mut LockedEvaluation,
    max_errored_fraction: f64,
    now_ms: i64,
) -> Result<EvaluationStatus, StoreError> {
    let runs = write.run_counts(evaluation.id).await?;
    let next = status(&EvaluationCounts {
        rows: evaluation.rows_total,
        scored: evaluation.rows_scored,
        errored: evaluation.rows_errored,
        runs: runs.all,
        runs_placed: runs.placed,
        runs_running: runs.running,
        cancel_requested: evaluation.cancel_requested_at.is_some(),
        max_errored_fraction,
    });
    if next.is_terminal() && runs.queued > 0 {
        // Each of their rows has an outcome, from late results of an earlier lease.
        write.end_queued_runs(evaluation.id, RunState::Finished, now_ms).await?;
    }
    evaluation.finished_at = if next.is_terminal() { evaluation.finished_at.or(Some(now_ms)) } else { None };
    evaluation.status = next;
    write.save_evaluation(evaluation).await?;
    Ok(next)
}

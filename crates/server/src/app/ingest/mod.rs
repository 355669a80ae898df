//! Agents' records become outcomes, run states and metrics.
//!
//! One transaction per batch: outcomes, counters, run states and the agent's position change together or not at all.
//! Results are accepted of any generation, late, repeated and out of order; only status is fenced by generation. A record
//! that can't be used is put aside with a log line: it must never stop those behind it.

mod decide;
mod settle;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::record::Payload;
use rlm_core::evaluation::{Provenance, RunMetrics};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::{ClusterId, EvaluationId, OrganizationId, RunId};
use rlm_core::rows::{self, Segment};
use rlm_core::run::{RunEvent, RunState, Waiting};
use serde_json::json;

pub use decide::{Reported, Verdict, decide};
pub(crate) use settle::settle_locked;
pub use settle::{fail_run, settle};

use crate::app::scores;
use crate::state::AppState;
use crate::store::evaluations::LockedEvaluation;
use crate::store::outcomes::{AttemptRow, Held, OutcomeRow, RUN_FAILURE, RowOutcome};
use crate::store::runs::Run;
use crate::store::{StoreError, Write};

/// Stores these records, which follow each other without a gap, and answers the highest position that is durable now.
/// Records up to the durable position are skipped; a gap refuses the batch.
pub async fn records(state: &AppState, cluster: &ClusterId, instance_id: &str, records: Vec<v1::Record>) -> Result<u64, StoreError> {
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let durable = write.lock_position(*cluster, instance_id).await?;
    let fresh: Vec<v1::Record> = records.into_iter().filter(|record| record.sequence > durable).collect();
    let Some(last) = fresh.last().map(|record| record.sequence) else { return Ok(durable) };
    for (expected, record) in (durable + 1..).zip(&fresh) {
        if record.sequence != expected {
            return Err(StoreError::Inconsistent {
                table: "agent_positions",
                column: "durable",
                row: format!("{cluster} {instance_id}"),
                problem: format!("record {} came where {expected} was expected; the agent has to send again from there", record.sequence),
            });
        }
    }
    let mut batch = Batch::open(&mut write, *cluster, &fresh, now_ms).await?;
    for record in fresh {
        batch.take(&mut write, record).await?;
    }
    let changed = batch.close(&mut write).await?;
    write.save_position(*cluster, instance_id, last).await?;
    write.commit().await?;
    let wake = changed.runs_ended;
    for evaluation in changed.evaluations {
        state.events.publish(evaluation);
    }
    for (organization, evaluation) in changed.ended {
        scores::prepare(state, organization, evaluation);
    }
    if wake {
        state.cells.wake();
    }
    Ok(last)
}

struct Changed {
    evaluations: BTreeSet<EvaluationId>,
    ended: Vec<(OrganizationId, EvaluationId)>,
    runs_ended: bool,
}

/// An evaluation's part of a batch: what is stored of the rows at hand, and what is to be written.
struct Open {
    evaluation: LockedEvaluation,
    max_errored_fraction: f64,
    held: HashMap<u64, Held>,
    outcomes: BTreeMap<u64, OutcomeRow>,
    attempts: Vec<AttemptRow>,
    first_start: Option<i64>,
    touched: bool,
}

struct Batch {
    cluster: ClusterId,
    now_ms: i64,
    runs: BTreeMap<RunId, Run>,
    evaluations: BTreeMap<EvaluationId, Open>,
    dirty_runs: BTreeSet<RunId>,
    runs_ended: bool,
}

impl Batch {
    /// Locks the evaluations and runs that the records are about, and reads what is stored of their rows.
    async fn open(write: &mut Write, cluster: ClusterId, records: &[v1::Record], now_ms: i64) -> Result<Self, StoreError> {
        let mut batch =
            Self { cluster, now_ms, runs: BTreeMap::new(), evaluations: BTreeMap::new(), dirty_runs: BTreeSet::new(), runs_ended: false };
        let organization = write.cluster_organization(cluster).await?;
        let mut rows: BTreeMap<RunId, Vec<u64>> = BTreeMap::new();
        for record in records {
            let Ok(id) = record.run_id.parse::<RunId>() else { continue };
            let rows = rows.entry(id).or_default();
            if let Some(Payload::Episode(episode)) = &record.payload {
                rows.push(episode.row);
            }
        }
        write.lock_evaluations_of(&rows.keys().copied().collect::<Vec<_>>()).await?;
        for id in rows.keys() {
            match write.lock_run(*id).await? {
                Some(run) if Some(run.head.organization) == organization => {
                    batch.runs.insert(*id, run);
                }
                Some(_) => tracing::error!(%cluster, run = %id, "records of a run of another organization are put aside"),
                None => tracing::error!(%cluster, run = %id, "records of a run that is not known here are put aside"),
            }
        }
        let mut wanted: BTreeMap<EvaluationId, (Vec<u64>, f64)> = BTreeMap::new();
        for (id, run) in &batch.runs {
            let entry = wanted.entry(run.head.evaluation).or_insert_with(|| (Vec::new(), run.spec.limits.max_errored_fraction));
            entry.0.extend(rows.remove(id).unwrap_or_default());
        }
        for (id, (mut rows, max_errored_fraction)) in wanted {
            let Some(evaluation) = write.lock_evaluation(id).await? else { continue };
            rows.sort_unstable();
            rows.dedup();
            rows.retain(|row| *row < evaluation.rows_total);
            let held = write.held(id, &rows).await?.into_iter().map(|held| (held.row, held)).collect();
            let open = Open {
                evaluation,
                max_errored_fraction,
                held,
                outcomes: BTreeMap::new(),
                attempts: Vec::new(),
                first_start: None,
                touched: false,
            };
            batch.evaluations.insert(id, open);
        }
        Ok(batch)
    }

    async fn take(&mut self, write: &mut Write, record: v1::Record) -> Result<(), StoreError> {
        let sequence = record.sequence;
        let aside = |problem: &str| {
            tracing::error!(cluster = %self.cluster, run = record.run_id, sequence, problem, "a record is put aside");
        };
        if let Some(Payload::SpoolLoss(loss)) = &record.payload {
            tracing::warn!(cluster = %self.cluster, records = loss.records, reason = loss.reason, "the agent's spool lost telemetry or set records aside");
            return Ok(());
        }
        let Ok(id) = record.run_id.parse::<RunId>() else {
            aside("its run id can't be read");
            return Ok(());
        };
        // Unknown runs were logged when the batch was opened.
        if !self.runs.contains_key(&id) {
            return Ok(());
        }
        match record.payload {
            Some(Payload::Episode(episode)) => {
                if let Err(problem) = self.episode(id, record.generation, episode) {
                    tracing::error!(cluster = %self.cluster, run = %id, sequence, problem, "a result is put aside");
                }
                Ok(())
            }
            Some(Payload::RunStatus(status)) => self.status(write, id, record.generation, status).await,
            Some(Payload::RunMetrics(metrics)) => {
                match serde_json::from_str::<RunMetrics>(&metrics.metrics_json) {
                    Ok(metrics) => {
                        if let Some(run) = self.runs.get_mut(&id).filter(|run| record.generation <= run.head.generation) {
                            run.head.metrics.insert(record.generation, metrics);
                            self.dirty_runs.insert(id);
                        }
                    }
                    Err(error) => aside(&format!("its metrics can't be read: {error}")),
                }
                Ok(())
            }
            Some(Payload::SpoolLoss(_)) => Ok(()),
            None => {
                aside("it has no payload that this version knows");
                Ok(())
            }
        }
    }

    /// Decides about one attempt; nothing is written yet.
    fn episode(&mut self, id: RunId, generation: u64, episode: v1::Episode) -> Result<(), String> {
        let Some(run) = self.runs.get(&id) else { return Ok(()) };
        let Some(open) = self.evaluations.get_mut(&run.head.evaluation) else { return Ok(()) };
        let Some(row) = rows::find(&run.segments, episode.row) else {
            return Err(format!("row {} is not one of the run's", episode.row));
        };
        if row.seed != episode.seed {
            return Err(format!("row {} has seed {}, the result says {}", episode.row, row.seed, episode.seed));
        }
        if generation > run.head.generation {
            return Err(format!("generation {generation} was never given out; the run is at {}", run.head.generation));
        }
        let Some(result) = outcome_of(&episode) else { return Err(format!("row {} has no outcome", episode.row)) };
        let outcome = OutcomeRow {
            row: row.row,
            model: row.model,
            task: row.task,
            run: id,
            generation,
            attempt: i64::from(episode.attempt),
            seed: row.seed,
            result,
            started_at: episode.started_unix_ms,
            ended_at: episode.ended_unix_ms,
        };
        open.take(outcome, run.head.state);
        Ok(())
    }

    /// A run's status; ignored unless it is of the current generation.
    async fn status(&mut self, write: &mut Write, id: RunId, generation: u64, status: v1::RunStatus) -> Result<(), StoreError> {
        let Some(run) = self.runs.get_mut(&id) else { return Ok(()) };
        if run.head.generation != generation || !run.head.state.is_placed() {
            return Ok(());
        }
        let Some(open) = self.evaluations.get_mut(&run.head.evaluation) else { return Ok(()) };
        self.dirty_runs.insert(id);
        open.touched = true;
        if !status.provenance_json.is_empty() {
            match serde_json::from_str::<Provenance>(&status.provenance_json) {
                Ok(provenance) => run.head.provenance = Some(provenance),
                Err(error) => tracing::error!(run = %id, %error, "a run's provenance can't be read and is put aside"),
            }
        }
        let at = if status.at_unix_ms > 0 { status.at_unix_ms } else { self.now_ms };
        match status.phase() {
            v1::run_status::Phase::Unspecified => {}
            v1::run_status::Phase::Waiting => {
                let since = if status.since_unix_ms > 0 { status.since_unix_ms } else { at };
                run.head.waiting = Some(Waiting {
                    cause: status.waiting_cause,
                    since: chrono::DateTime::from_timestamp_millis(since).unwrap_or_default(),
                    message: status.waiting_message,
                });
            }
            v1::run_status::Phase::Running => {
                if let Some(state) = run.head.state.after(RunEvent::Started) {
                    run.head.state = state;
                }
                run.head.waiting = None;
                run.head.started_at = run.head.started_at.or(Some(at));
                open.first_start = Some(open.first_start.map_or(at, |first| first.min(at)));
            }
            v1::run_status::Phase::Finished => {
                open.flush(write).await?;
                let errored = settle::finish(write, run, &mut open.evaluation, None, at).await?;
                open.hold(&errored, run.head.generation);
                self.runs_ended = true;
            }
            v1::run_status::Phase::Failed => {
                open.flush(write).await?;
                let failure = status.failure.as_ref().map_or_else(
                    || Failure::new(FailureCode::Internal, "the agent reported the run as failed without saying why; see the run's logs"),
                    Failure::from,
                );
                let errored = settle::finish(write, run, &mut open.evaluation, Some(failure), at).await?;
                open.hold(&errored, run.head.generation);
                self.runs_ended = true;
            }
            v1::run_status::Phase::Cancelled => {
                let event = if open.evaluation.cancel_requested_at.is_some() { RunEvent::Cancelled } else { RunEvent::LeaseGivenUp };
                settle::end(run, event, at);
                self.runs_ended = true;
            }
        }
        Ok(())
    }

    async fn close(mut self, write: &mut Write) -> Result<Changed, StoreError> {
        for id in &self.dirty_runs {
            if let Some(run) = self.runs.get(id) {
                write.save_run(&run.head).await?;
            }
        }
        let mut changed = Changed { evaluations: BTreeSet::new(), ended: Vec::new(), runs_ended: self.runs_ended };
        for (id, open) in &mut self.evaluations {
            open.flush(write).await?;
            if open.touched {
                open.evaluation.started_at = open.evaluation.started_at.or(open.first_start);
                let status = settle::settle_locked(write, &mut open.evaluation, open.max_errored_fraction, self.now_ms).await?;
                changed.evaluations.insert(*id);
                if status.is_terminal() {
                    changed.ended.push((open.evaluation.organization, *id));
                }
            }
        }
        Ok(changed)
    }
}

impl Open {
    /// Notes rows that were errored together with their run: results of them may follow in this batch.
    fn hold(&mut self, errored: &[Segment], generation: u64) {
        for row in errored.iter().flat_map(|segment| segment.first_row..segment.end()) {
            self.held.insert(row, Held { row, generation, attempt: RUN_FAILURE, scored: false });
        }
    }

    fn take(&mut self, outcome: OutcomeRow, run: RunState) {
        let scored = outcome.is_scored();
        let reported = Reported { generation: outcome.generation, attempt: outcome.attempt, scored, run };
        let held = self.held.get(&outcome.row).copied();
        let verdict = decide(held.as_ref(), reported);
        if verdict == Verdict::Repeated {
            return;
        }
        self.touched = true;
        if !scored || verdict == Verdict::Kept {
            self.attempts.push(AttemptRow {
                row: outcome.row,
                generation: outcome.generation,
                attempt: outcome.attempt,
                run: outcome.run,
                episode: document(&outcome),
            });
        }
        if verdict == Verdict::Kept {
            return;
        }
        self.first_start = Some(self.first_start.map_or(outcome.started_at, |first| first.min(outcome.started_at)));
        if let Some(held) = held {
            count(&mut self.evaluation, held.scored, -1);
        }
        count(&mut self.evaluation, scored, 1);
        self.held.insert(outcome.row, Held { row: outcome.row, generation: outcome.generation, attempt: outcome.attempt, scored });
        self.outcomes.insert(outcome.row, outcome);
    }

    async fn flush(&mut self, write: &mut Write) -> Result<(), StoreError> {
        let id = self.evaluation.id;
        let outcomes: Vec<OutcomeRow> = std::mem::take(&mut self.outcomes).into_values().collect();
        write.put_outcomes(id, &outcomes).await?;
        let attempts = std::mem::take(&mut self.attempts);
        write.put_attempts(id, &attempts).await
    }
}

fn count(evaluation: &mut LockedEvaluation, scored: bool, by: i64) {
    let counter = if scored { &mut evaluation.rows_scored } else { &mut evaluation.rows_errored };
    *counter = counter.saturating_add_signed(by);
}

/// A score that is no number can't be a score: it breaks the environment's contract.
fn outcome_of(episode: &v1::Episode) -> Option<RowOutcome> {
    match episode.outcome.as_ref()? {
        v1::episode::Outcome::Scored(scored) if scored.reward.is_finite() => Some(RowOutcome::Scored {
            reward: scored.reward,
            steps: u64::from(scored.steps),
            terminated: scored.terminated,
            truncated: scored.truncated,
            success: scored.success,
            first_observation_sha256: (!scored.first_observation_sha256.is_empty()).then(|| hex::encode(&scored.first_observation_sha256)),
            conformance_warnings: u64::from(scored.conformance_warnings),
        }),
        v1::episode::Outcome::Scored(scored) => Some(RowOutcome::Errored(Failure::new(
            FailureCode::EnvironmentContract,
            format!("the episode's reward adds up to {}, which is not a finite number; check the environment's rewards", scored.reward),
        ))),
        v1::episode::Outcome::Errored(failure) => Some(RowOutcome::Errored(Failure::from(failure))),
    }
}

/// An attempt as it is kept and shown.
pub(crate) fn document(outcome: &OutcomeRow) -> serde_json::Value {
    let mut document = json!({
        "seed": outcome.seed,
        "startedAt": rfc3339(outcome.started_at),
        "durationMs": outcome.ended_at.saturating_sub(outcome.started_at).max(0),
    });
    match &outcome.result {
        RowOutcome::Scored { reward, steps, terminated, truncated, success, first_observation_sha256, conformance_warnings } => {
            document["outcome"] = json!("scored");
            document["reward"] = json!(reward);
            document["steps"] = json!(steps);
            document["terminated"] = json!(terminated);
            document["truncated"] = json!(truncated);
            document["success"] = json!(success);
            document["firstObservationSha256"] = json!(first_observation_sha256);
            document["conformanceWarnings"] = json!(conformance_warnings);
        }
        RowOutcome::Errored(failure) => {
            document["outcome"] = json!("errored");
            document["failure"] = json!(failure);
        }
    }
    document
}

fn rfc3339(unix_ms: i64) -> Option<chrono::DateTime<chrono::Utc>> {
    chrono::DateTime::from_timestamp_millis(unix_ms)
}

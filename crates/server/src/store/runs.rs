//! Runs: what is leased to clusters. Leasing itself is in `leases`. Who changes runs begins with
//! [`Write::lock_evaluations_of`] or [`Write::lock_evaluation`].

use std::collections::{BTreeMap, BTreeSet};

use rlm_core::evaluation::{Provenance, RunMetrics, RunSpec};
use rlm_core::failure::Failure;
use rlm_core::ids::{ClusterId, EvaluationId, OrganizationId, RunId};
use rlm_core::rows::{self, Segment};
use rlm_core::run::{RunState, Waiting};
use sqlx::AssertSqlSafe;
use sqlx::any::AnyRow;

use super::codec::{column, from_json, parsed, placeholders, signed, to_json, unsigned, value_lists};
use super::{Attempt as _, Store, StoreError, Write};

/// Metrics of a run by generation; each is cumulative for its own.
pub type MetricsByGeneration = BTreeMap<u64, RunMetrics>;

/// What lists show of a run: everything but its specification and rows.
#[derive(Debug, Clone, PartialEq)]
pub struct RunHead {
    pub id: RunId,
    pub evaluation: EvaluationId,
    pub organization: OrganizationId,
    pub state: RunState,
    pub generation: u64,
    pub cluster: Option<ClusterId>,
    pub model: String,
    pub env: String,
    pub rows_total: u64,
    pub created_at: i64,
    pub leased_at: Option<i64>,
    pub started_at: Option<i64>,
    pub finished_at: Option<i64>,
    pub waiting: Option<Waiting>,
    pub failure: Option<Failure>,
    pub provenance: Option<Provenance>,
    pub metrics: MetricsByGeneration,
}

/// A run with its specification and rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub head: RunHead,
    pub spec: RunSpec,
    pub segments: Vec<Segment>,
}

/// A run to store.
#[derive(Debug, Clone)]
pub struct NewRun {
    pub organization: OrganizationId,
    pub spec: RunSpec,
    pub segments: Vec<Segment>,
    pub priority: i64,
    /// For fair shares.
    pub submitter: String,
    pub created_at: i64,
}

/// How many runs of an evaluation are in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunCounts {
    pub all: u64,
    /// Held by a cluster.
    pub placed: u64,
    pub running: u64,
    pub queued: u64,
}

const HEAD: &str =
    "id, evaluation_id, organization_id, state, generation, cluster_id, model, env, rows_total, created_at, leased_at, started_at,
    finished_at, waiting, failure, provenance, metrics";

fn document<T: serde::de::DeserializeOwned>(row: &AnyRow, index: usize, name: &'static str, id: &str) -> Result<Option<T>, StoreError> {
    let text: Option<String> = column(row, index)?;
    text.map(|text| from_json("runs", name, id, &text)).transpose()
}

fn head(row: &AnyRow) -> Result<RunHead, StoreError> {
    let id: String = column(row, 0)?;
    let (evaluation, organization, state): (String, String, String) = (column(row, 1)?, column(row, 2)?, column(row, 3)?);
    let cluster: Option<String> = column(row, 5)?;
    Ok(RunHead {
        evaluation: parsed("runs", "evaluation_id", &id, &evaluation, |text| text.parse().ok())?,
        organization: parsed("runs", "organization_id", &id, &organization, |text| text.parse().ok())?,
        state: parsed("runs", "state", &id, &state, RunState::parse)?,
        generation: unsigned(row, 4)?,
        cluster: cluster.map(|text| parsed("runs", "cluster_id", &id, &text, |text| text.parse().ok())).transpose()?,
        model: column(row, 6)?,
        env: column(row, 7)?,
        rows_total: unsigned(row, 8)?,
        created_at: column(row, 9)?,
        leased_at: column(row, 10)?,
        started_at: column(row, 11)?,
        finished_at: column(row, 12)?,
        waiting: document(row, 13, "waiting", &id)?,
        failure: document(row, 14, "failure", &id)?,
        provenance: document(row, 15, "provenance", &id)?,
        metrics: document(row, 16, "metrics", &id)?.unwrap_or_default(),
        id: parsed("runs", "id", &id, &id, |text| text.parse().ok())?,
    })
}

fn run(row: &AnyRow) -> Result<Run, StoreError> {
    let head = head(row)?;
    let id = head.id.to_string();
    let (spec, segments): (String, String) = (column(row, 17)?, column(row, 18)?);
    let mut spec: RunSpec = from_json("runs", "spec", &id, &spec)?;
    spec.generation = head.generation;
    Ok(Run { spec, segments: from_json("runs", "segments", &id, &segments)?, head })
}

impl Store {
    /// The runs of an evaluation, in order of creation, at most `limit`.
    pub async fn run_heads(&self, evaluation: EvaluationId, limit: u32) -> Result<Vec<RunHead>, StoreError> {
        let rows = sqlx::query(AssertSqlSafe(format!("SELECT {HEAD} FROM runs WHERE evaluation_id = $1 ORDER BY id LIMIT $2")))
            .bind(evaluation.to_string())
            .bind(i64::from(limit))
            .fetch_all(self.read())
            .await
            .attempt("read an evaluation's runs")?;
        rows.iter().map(head).collect()
    }

    /// The oldest run of each of these evaluations that waits or runs; running ones first.
    pub async fn leading_runs(&self, evaluations: &[EvaluationId]) -> Result<Vec<RunHead>, StoreError> {
        let mut found = Vec::new();
        for part in evaluations.chunks(200) {
            let sql = format!(
                "SELECT {HEAD} FROM runs WHERE id IN (
                     SELECT COALESCE(MIN(CASE WHEN state = 'running' THEN id END), MIN(CASE WHEN state = 'leased' THEN id END), MIN(id))
                     FROM runs WHERE evaluation_id IN ({}) AND state IN ('queued', 'leased', 'running') GROUP BY evaluation_id)",
                placeholders(part.len(), 1)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql));
            for id in part {
                query = query.bind(id.to_string());
            }
            for row in &query.fetch_all(self.read()).await.attempt("read what evaluations wait for")? {
                found.push(head(row)?);
            }
        }
        Ok(found)
    }

    pub async fn run(&self, id: RunId) -> Result<Option<Run>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(format!("SELECT {HEAD}, spec, segments FROM runs WHERE id = $1")))
            .bind(id.to_string())
            .fetch_optional(self.read())
            .await
            .attempt("read a run")?;
        row.as_ref().map(run).transpose()
    }

    /// The rows of this run that have no outcome yet, as blocks. An errored row has one, unless it was given free for a retry.
    pub async fn open_segments(&self, id: RunId) -> Result<Vec<Segment>, StoreError> {
        let Some(run) = self.run(id).await? else { return Ok(Vec::new()) };
        let mut connection = self.read().acquire().await.attempt("get a connection")?;
        let done = super::outcomes::finished_rows(&mut connection, run.head.evaluation, &run.segments).await?;
        Ok(rows::without(&run.segments, &done))
    }
}

impl Write {
    pub async fn insert_runs(&mut self, runs: &[NewRun]) -> Result<(), StoreError> {
        for part in runs.chunks(50) {
            let sql = format!(
                "INSERT INTO runs (id, evaluation_id, organization_id, state, generation, model, env, rows_total, spec, segments, priority, submitter,
                 created_at) VALUES {}",
                value_lists(part.len(), 13, 1)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
            for new in part {
                let id = new.spec.run_id.to_string();
                query = query
                    .bind(id.clone())
                    .bind(new.spec.evaluation_id.to_string())
                    .bind(new.organization.to_string())
                    .bind(RunState::Queued.as_str())
                    .bind(signed(new.spec.generation))
                    .bind(new.spec.model.id.clone())
                    .bind(new.spec.environment.id.clone())
                    .bind(signed(new.segments.iter().map(|segment| segment.count).sum()))
                    .bind(to_json("runs", "spec", &id, &new.spec)?)
                    .bind(to_json("runs", "segments", &id, &new.segments)?)
                    .bind(new.priority)
                    .bind(new.submitter.clone())
                    .bind(new.created_at);
            }
            query.execute(&mut *self.tx).await.attempt("store an evaluation's runs")?;
        }
        Ok(())
    }

    /// Locks the evaluations of these runs. What changes runs begins here: everybody locks evaluations in the order of their
    /// ids, then runs, then clusters, so that no two transactions wait for each other.
    pub async fn lock_evaluations_of(&mut self, runs: &[RunId]) -> Result<(), StoreError> {
        let mut evaluations = BTreeSet::new();
        for part in runs.chunks(100) {
            let sql = format!("SELECT DISTINCT evaluation_id FROM runs WHERE id IN ({})", placeholders(part.len(), 1));
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
            for run in part {
                query = query.bind(run.to_string());
            }
            for row in &query.fetch_all(&mut *self.tx).await.attempt("find the evaluations of runs")? {
                evaluations.insert(column::<String>(row, 0)?);
            }
        }
        for evaluation in evaluations {
            sqlx::query("UPDATE evaluations SET rows_total = rows_total WHERE id = $1")
                .bind(evaluation)
                .execute(&mut *self.tx)
                .await
                .attempt("lock an evaluation")?;
        }
        Ok(())
    }

    /// The run, under a lock that lasts until the transaction ends; its evaluation is locked already.
    pub async fn lock_run(&mut self, id: RunId) -> Result<Option<Run>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(format!("UPDATE runs SET state = state WHERE id = $1 RETURNING {HEAD}, spec, segments")))
            .bind(id.to_string())
            .fetch_optional(&mut *self.tx)
            .await
            .attempt("lock a run")?;
        row.as_ref().map(run).transpose()
    }

    /// Writes state, times, documents of a locked run. A run without a cluster holds no lease.
    pub async fn save_run(&mut self, run: &RunHead) -> Result<(), StoreError> {
        let id = run.id.to_string();
        sqlx::query(
            "UPDATE runs SET state = $2, cluster_id = $3, leased_at = $4, started_at = $5, finished_at = $6, waiting = $7, failure = $8,
             provenance = $9, metrics = $10 WHERE id = $1",
        )
        .bind(id.clone())
        .bind(run.state.as_str())
        .bind(run.cluster.map(|cluster| cluster.to_string()))
        .bind(run.leased_at)
        .bind(run.started_at)
        .bind(run.finished_at)
        .bind(run.waiting.as_ref().map(|value| to_json("runs", "waiting", &id, value)).transpose()?)
        .bind(run.failure.as_ref().map(|value| to_json("runs", "failure", &id, value)).transpose()?)
        .bind(run.provenance.as_ref().map(|value| to_json("runs", "provenance", &id, value)).transpose()?)
        .bind((!run.metrics.is_empty()).then(|| to_json("runs", "metrics", &id, &run.metrics)).transpose()?)
        .execute(&mut *self.tx)
        .await
        .attempt("store a run's state")?;
        Ok(())
    }

    /// Cancels the runs that no cluster holds.
    pub async fn cancel_queued_runs(&mut self, evaluation: EvaluationId, now_ms: i64) -> Result<u64, StoreError> {
        self.end_queued_runs(evaluation, RunState::Cancelled, now_ms).await
    }

    /// Ends the runs that no cluster holds, as cancelled, or as finished once none of their rows is open.
    pub async fn end_queued_runs(&mut self, evaluation: EvaluationId, state: RunState, now_ms: i64) -> Result<u64, StoreError> {
        let done =
            sqlx::query("UPDATE runs SET state = $2, finished_at = $3, waiting = NULL WHERE evaluation_id = $1 AND state = 'queued'")
                .bind(evaluation.to_string())
                .bind(state.as_str())
                .bind(now_ms)
                .execute(&mut *self.tx)
                .await
                .attempt("end queued runs")?;
        Ok(done.rows_affected())
    }

    pub async fn run_counts(&mut self, evaluation: EvaluationId) -> Result<RunCounts, StoreError> {
        let rows = sqlx::query("SELECT state, COUNT(*) FROM runs WHERE evaluation_id = $1 GROUP BY state")
            .bind(evaluation.to_string())
            .fetch_all(&mut *self.tx)
            .await
            .attempt("count an evaluation's runs")?;
        let mut counts = RunCounts::default();
        for row in &rows {
            let text: String = column(row, 0)?;
            let state = parsed("runs", "state", &evaluation.to_string(), &text, RunState::parse)?;
            let count = unsigned(row, 1)?;
            counts.all += count;
            match state {
                RunState::Queued => counts.queued += count,
                RunState::Leased => counts.placed += count,
                RunState::Running => {
                    counts.placed += count;
                    counts.running += count;
                }
                RunState::Finished | RunState::Failed | RunState::Cancelled => {}
            }
        }
        Ok(counts)
    }

    /// The highest generation among an evaluation's runs: runs for a retry start above it, so that attempts never share a key.
    pub async fn highest_generation(&mut self, evaluation: EvaluationId) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT COALESCE(MAX(generation), 0) FROM runs WHERE evaluation_id = $1")
            .bind(evaluation.to_string())
            .fetch_one(&mut *self.tx)
            .await
            .attempt("read an evaluation's generations")?;
        unsigned(&row, 0)
    }

    /// The share of errored rows above which the evaluation is failed.
    pub async fn max_errored_fraction(&mut self, evaluation: EvaluationId) -> Result<f64, StoreError> {
        let row = sqlx::query("SELECT spec FROM evaluations WHERE id = $1")
            .bind(evaluation.to_string())
            .fetch_one(&mut *self.tx)
            .await
            .attempt("read an evaluation's limits")?;
        let text: String = column(&row, 0)?;
        let spec: LimitsOnly = from_json("evaluations", "spec", &evaluation.to_string(), &text)?;
        Ok(spec.limits.max_errored_fraction)
    }
}

#[derive(serde::Deserialize)]
struct LimitsOnly {
    limits: rlm_core::evaluation::Limits,
}

//! Leases: which runs wait, which a cluster holds, and the statement that hands one over. A run is locked before its
//! evaluation (see `runs`).

use rlm_core::evaluation::RunSpec;
use rlm_core::ids::{ClusterId, EvaluationId, OrganizationId, RunId};
use rlm_core::run::{RunState, Waiting};
use sqlx::AssertSqlSafe;
use sqlx::any::AnyRow;

use super::codec::{column, from_json, parsed, placeholders, signed, to_json, unsigned};
use super::{Attempt as _, Store, StoreError, Write};

/// A run that waits for a cluster or is held by one.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenRun {
    pub id: RunId,
    pub evaluation: EvaluationId,
    pub organization: OrganizationId,
    pub state: RunState,
    pub generation: u64,
    /// The cluster that holds it.
    pub cluster: Option<ClusterId>,
    /// The only cluster that may take it.
    pub pinned: Option<ClusterId>,
    pub priority: i64,
    pub submitter: String,
    pub created_at: i64,
    pub leased_at: Option<i64>,
    pub waiting: Option<Waiting>,
    pub cancel_requested: bool,
}

const OPEN: &str =
    "r.id, r.evaluation_id, r.organization_id, r.state, r.generation, r.cluster_id, e.cluster_id, r.priority, r.submitter, r.created_at,
    r.leased_at, r.waiting, e.cancel_requested_at";

fn cluster(row: &AnyRow, index: usize, id: &str) -> Result<Option<ClusterId>, StoreError> {
    let text: Option<String> = column(row, index)?;
    text.map(|text| parsed("runs", "cluster_id", id, &text, |text| text.parse().ok())).transpose()
}

fn open(row: &AnyRow) -> Result<OpenRun, StoreError> {
    let id: String = column(row, 0)?;
    let (evaluation, organization, state): (String, String, String) = (column(row, 1)?, column(row, 2)?, column(row, 3)?);
    let waiting: Option<String> = column(row, 11)?;
    Ok(OpenRun {
        evaluation: parsed("runs", "evaluation_id", &id, &evaluation, |text| text.parse().ok())?,
        organization: parsed("runs", "organization_id", &id, &organization, |text| text.parse().ok())?,
        state: parsed("runs", "state", &id, &state, RunState::parse)?,
        generation: unsigned(row, 4)?,
        cluster: cluster(row, 5, &id)?,
        pinned: cluster(row, 6, &id)?,
        priority: column(row, 7)?,
        submitter: column(row, 8)?,
        created_at: column(row, 9)?,
        leased_at: column(row, 10)?,
        waiting: waiting.map(|text| from_json("runs", "waiting", &id, &text)).transpose()?,
        cancel_requested: column::<Option<i64>>(row, 12)?.is_some(),
        id: parsed("runs", "id", &id, &id, |text| text.parse().ok())?,
    })
}

impl Store {
    /// Runs that wait for a cluster, most urgent first, at most `limit`, and at most `each` of one organization that are pinned
    /// to one cluster (or to none): nobody's queue hides another's.
    pub async fn queued_runs(&self, limit: u32, each: u32) -> Result<Vec<OpenRun>, StoreError> {
        let sql = format!(
            "SELECT {OPEN} FROM
             (SELECT q.id, ROW_NUMBER() OVER (PARTITION BY q.organization_id, p.cluster_id ORDER BY q.priority DESC, q.created_at, q.id) AS turn
              FROM runs q JOIN evaluations p ON p.id = q.evaluation_id WHERE q.state = 'queued') t
             JOIN runs r ON r.id = t.id JOIN evaluations e ON e.id = r.evaluation_id WHERE t.turn <= $2
             ORDER BY r.priority DESC, r.created_at, r.id LIMIT $1"
        );
        let query = sqlx::query(AssertSqlSafe(sql)).bind(i64::from(limit)).bind(i64::from(each));
        let rows = query.fetch_all(self.read()).await.attempt("read queued runs")?;
        rows.iter().map(open).collect()
    }

    /// Runs that clusters hold.
    pub async fn placed_runs(&self) -> Result<Vec<OpenRun>, StoreError> {
        let sql = format!(
            "SELECT {OPEN} FROM runs r JOIN evaluations e ON e.id = r.evaluation_id WHERE r.state IN ('leased', 'running') ORDER BY r.id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(self.read()).await.attempt("read placed runs")?;
        rows.iter().map(open).collect()
    }

    /// Runs that this cluster holds.
    pub async fn runs_of_cluster(&self, cluster: ClusterId) -> Result<Vec<OpenRun>, StoreError> {
        let sql = format!(
            "SELECT {OPEN} FROM runs r JOIN evaluations e ON e.id = r.evaluation_id WHERE r.cluster_id = $1 AND r.state IN ('leased', 'running')
             ORDER BY r.id"
        );
        let rows =
            sqlx::query(AssertSqlSafe(sql)).bind(cluster.to_string()).fetch_all(self.read()).await.attempt("read a cluster's runs")?;
        rows.iter().map(open).collect()
    }

    /// Specifications of these runs.
    pub async fn run_specs(&self, runs: &[RunId]) -> Result<Vec<RunSpec>, StoreError> {
        let mut found = Vec::with_capacity(runs.len());
        for part in runs.chunks(100) {
            let sql = format!("SELECT id, spec FROM runs WHERE id IN ({})", placeholders(part.len(), 1));
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
            for run in part {
                query = query.bind(run.to_string());
            }
            for row in &query.fetch_all(self.read()).await.attempt("read run specifications")? {
                let (id, spec): (String, String) = (column(row, 0)?, column(row, 1)?);
                found.push(from_json("runs", "spec", &id, &spec)?);
            }
        }
        Ok(found)
    }
}

impl Write {
    /// Hands a queued run to a cluster: its new generation, or None when it is not queued any more.
    pub async fn lease_run(&mut self, run: RunId, cluster: ClusterId, now_ms: i64) -> Result<Option<u64>, StoreError> {
        let row = sqlx::query(
            "UPDATE runs SET state = 'leased', generation = generation + 1, cluster_id = $2, leased_at = $3, waiting = NULL
             WHERE id = $1 AND state = 'queued' RETURNING generation",
        )
        .bind(run.to_string())
        .bind(cluster.to_string())
        .bind(now_ms)
        .fetch_optional(&mut *self.tx)
        .await
        .attempt("lease a run")?;
        row.as_ref().map(|row| unsigned(row, 0)).transpose()
    }

    /// Whether the cluster may take a run now, and this is its newest session. Under a lock, so that a session that begins
    /// next finds the lease.
    pub async fn takes_runs(&mut self, cluster: ClusterId, session_generation: u64) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE clusters SET session_generation = session_generation WHERE id = $1 AND session_generation = $2 AND archived_at IS NULL
             AND draining = 0",
        )
        .bind(cluster.to_string())
        .bind(signed(session_generation))
        .execute(&mut *self.tx)
        .await
        .attempt("read a cluster's state")?;
        Ok(done.rows_affected() > 0)
    }

    /// Notes why a queued run waits; nothing when it is not queued any more.
    pub async fn note_waiting(&mut self, run: RunId, generation: u64, waiting: &Waiting) -> Result<bool, StoreError> {
        let id = run.to_string();
        let done = sqlx::query("UPDATE runs SET waiting = $3 WHERE id = $1 AND generation = $2 AND state = 'queued'")
            .bind(id.clone())
            .bind(signed(generation))
            .bind(to_json("runs", "waiting", &id, waiting)?)
            .execute(&mut *self.tx)
            .await
            .attempt("note why a run waits")?;
        Ok(done.rows_affected() > 0)
    }

    /// A generation of a run that was given out and is not known here (a restored database): the next one is above it, and a
    /// lease below it is none any more. The run's evaluation, when this changed something.
    pub async fn raise_generation(
        &mut self,
        run: RunId,
        organization: OrganizationId,
        generation: u64,
    ) -> Result<Option<EvaluationId>, StoreError> {
        let id = run.to_string();
        let row = sqlx::query(
            "UPDATE runs SET generation = $3, cluster_id = CASE WHEN state IN ('leased', 'running') THEN NULL ELSE cluster_id END,
             leased_at = CASE WHEN state IN ('leased', 'running') THEN NULL ELSE leased_at END,
             state = CASE WHEN state IN ('leased', 'running') THEN 'queued' ELSE state END
             WHERE id = $1 AND organization_id = $2 AND generation < $3 RETURNING evaluation_id",
        )
        .bind(id.clone())
        .bind(organization.to_string())
        .bind(signed(generation))
        .fetch_optional(&mut *self.tx)
        .await
        .attempt("raise a run's generation")?;
        let Some(row) = row else { return Ok(None) };
        let evaluation: String = column(&row, 0)?;
        Ok(Some(parsed("runs", "evaluation_id", &id, &evaluation, |text| text.parse().ok())?))
    }
}

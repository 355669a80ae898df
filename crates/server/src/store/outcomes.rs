//! Outcomes of rows, and the attempts behind them. What counts is decided in `app::ingest`; this stores and reads it.

use rlm_core::failure::Failure;
use rlm_core::ids::{EvaluationId, RunId};
use rlm_core::rows::Segment;
use serde_json::Value;
use sqlx::any::AnyRow;
use sqlx::{AnyConnection, AssertSqlSafe};

use super::codec::{column, flag, from_json, optional_flag, parsed, placeholders, signed, to_json, unsigned, value_lists};
use super::evaluations::position;
use super::{Attempt as _, Store, StoreError, Write};

/// Number of an outcome that is the failure of a whole run, not of an attempt.
pub const RUN_FAILURE: i64 = -1;

/// Rows in one `INSERT`. SQLite and its driver look names of placeholders up one by one: few large statements cost more than
/// many middling ones.
const INSERTED: usize = 40;

/// The outcome of a row that counts.
#[derive(Debug, Clone, PartialEq)]
pub struct OutcomeRow {
    pub row: u64,
    pub model: u32,
    pub task: u32,
    pub run: RunId,
    pub generation: u64,
    /// [`RUN_FAILURE`] when the run as a whole failed.
    pub attempt: i64,
    pub seed: u64,
    pub result: RowOutcome,
    pub started_at: i64,
    pub ended_at: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum RowOutcome {
    Scored {
        reward: f64,
        steps: u64,
        terminated: bool,
        truncated: bool,
        success: Option<bool>,
        first_observation_sha256: Option<String>,
        conformance_warnings: u64,
    },
    Errored(Failure),
}

impl OutcomeRow {
    #[must_use]
    pub const fn is_scored(&self) -> bool {
        matches!(self.result, RowOutcome::Scored { .. })
    }
}

/// What is stored of a row, as far as deciding about another attempt needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    pub row: u64,
    pub generation: u64,
    pub attempt: i64,
    pub scored: bool,
}

/// An attempt that does not count.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptRow {
    pub row: u64,
    pub generation: u64,
    pub attempt: i64,
    pub run: RunId,
    pub episode: Value,
}

/// Sums over the outcomes of one (model, task).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CellSums {
    pub model: u32,
    pub task: u32,
    pub scored: u64,
    pub errored: u64,
    pub successes: u64,
    pub unknown_success: u64,
    pub reward_sum: f64,
    pub steps_sum: u64,
}

/// How many rows failed with a code, and one of them.
#[derive(Debug, Clone, PartialEq)]
pub struct FailureExample {
    pub count: u64,
    pub row: u64,
    pub failure: Failure,
    pub run: RunId,
}

/// Narrows a page of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutcomeFilter {
    All,
    Scored,
    Errored,
}

const COLUMNS: &str = "row_number, model, task, run_id, generation, attempt, seed, scored, reward, steps, terminated, truncated, success,
    first_observation_sha256, conformance_warnings, failure, started_at, ended_at";

fn outcome(evaluation: EvaluationId, row: &AnyRow) -> Result<OutcomeRow, StoreError> {
    let number = unsigned(row, 0)?;
    let name = || format!("{evaluation} row {number}");
    let run: String = column(row, 3)?;
    let result = if flag(row, 7)? {
        RowOutcome::Scored {
            reward: column(row, 8)?,
            steps: unsigned(row, 9)?,
            terminated: flag(row, 10)?,
            truncated: flag(row, 11)?,
            success: optional_flag(row, 12)?,
            first_observation_sha256: column(row, 13)?,
            conformance_warnings: unsigned(row, 14)?,
        }
    } else {
        let text: Option<String> = column(row, 15)?;
        RowOutcome::Errored(from_json("outcomes", "failure", &name(), text.as_deref().unwrap_or("null"))?)
    };
    Ok(OutcomeRow {
        row: number,
        model: position(row, 1)?,
        task: position(row, 2)?,
        run: parsed("outcomes", "run_id", &name(), &run, |text| text.parse().ok())?,
        generation: unsigned(row, 4)?,
        attempt: column(row, 5)?,
        seed: unsigned(row, 6)?,
        result,
        started_at: column(row, 16)?,
        ended_at: column(row, 17)?,
    })
}

/// Row numbers among those of `segments` that have an outcome, ascending.
pub(crate) async fn finished_rows(
    connection: &mut AnyConnection,
    evaluation: EvaluationId,
    segments: &[Segment],
) -> Result<Vec<u64>, StoreError> {
    let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return Ok(Vec::new()) };
    let mut done = Vec::new();
    // One query per stretch without a large gap: segments of a run can lie far apart.
    let mut stretch = (first.first_row, first.end());
    let mut stretches = Vec::new();
    for segment in segments.iter().skip(1) {
        if segment.first_row < stretch.1.saturating_add(10_000) {
            stretch.1 = segment.end();
        } else {
            stretches.push(stretch);
            stretch = (segment.first_row, segment.end());
        }
    }
    debug_assert!(last.end() >= stretch.1);
    stretches.push(stretch);
    for (from, to) in stretches {
        let rows = sqlx::query(
            "SELECT row_number FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3 ORDER BY row_number",
        )
        .bind(evaluation.to_string())
        .bind(signed(from))
        .bind(signed(to))
        .fetch_all(&mut *connection)
        .await
        .attempt("read which rows have an outcome")?;
        for row in &rows {
            let number = unsigned(row, 0)?;
            let at = segments.partition_point(|segment| segment.end() <= number);
            if segments.get(at).is_some_and(|segment| segment.first_row <= number) {
                done.push(number);
            }
        }
    }
    Ok(done)
}

impl Store {
    /// Outcomes of rows `from..to` of one kind, in order, at most `limit`; of one model or task where given.
    pub async fn outcomes(
        &self,
        evaluation: EvaluationId,
        (from, to): (u64, u64),
        (model, task): (Option<u32>, Option<u32>),
        filter: OutcomeFilter,
        limit: u32,
    ) -> Result<Vec<OutcomeRow>, StoreError> {
        let condition = match filter {
            OutcomeFilter::All => "",
            OutcomeFilter::Scored => " AND scored = 1",
            OutcomeFilter::Errored => " AND scored = 0",
        };
        let sql = format!(
            "SELECT {COLUMNS} FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3
             AND (model = $4 OR $4 = -1) AND (task = $5 OR $5 = -1){condition} ORDER BY row_number LIMIT $6"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(evaluation.to_string())
            .bind(signed(from))
            .bind(signed(to))
            .bind(model.map_or(-1, i64::from))
            .bind(task.map_or(-1, i64::from))
            .bind(i64::from(limit))
            .fetch_all(self.read())
            .await
            .attempt("read outcomes")?;
        rows.iter().map(|row| outcome(evaluation, row)).collect()
    }

    /// Whether each of rows `from..to` has an outcome: the numbers of those that have.
    pub async fn finished_between(&self, evaluation: EvaluationId, from: u64, to: u64) -> Result<Vec<u64>, StoreError> {
        let rows = sqlx::query(
            "SELECT row_number FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3 ORDER BY row_number",
        )
        .bind(evaluation.to_string())
        .bind(signed(from))
        .bind(signed(to))
        .fetch_all(self.read())
        .await
        .attempt("read which rows have an outcome")?;
        rows.iter().map(|row| unsigned(row, 0)).collect()
    }

    /// How many of rows `from..to` have an outcome.
    pub async fn count_finished(&self, evaluation: EvaluationId, from: u64, to: u64) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT COUNT(*) FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3")
            .bind(evaluation.to_string())
            .bind(signed(from))
            .bind(signed(to))
            .fetch_one(self.read())
            .await
            .attempt("count rows with an outcome")?;
        unsigned(&row, 0)
    }

    /// Attempts that do not count, of rows `from..to`: how many per row.
    pub async fn attempt_counts(&self, evaluation: EvaluationId, from: u64, to: u64) -> Result<Vec<(u64, u64)>, StoreError> {
        let rows = sqlx::query(
            "SELECT row_number, COUNT(*) FROM attempts WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3 AND attempt >= 0
             GROUP BY row_number ORDER BY row_number",
        )
        .bind(evaluation.to_string())
        .bind(signed(from))
        .bind(signed(to))
        .fetch_all(self.read())
        .await
        .attempt("count attempts")?;
        rows.iter().map(|row| Ok((unsigned(row, 0)?, unsigned(row, 1)?))).collect()
    }

    /// Attempts at a row that do not count, oldest first, at most 200.
    pub async fn attempts(&self, evaluation: EvaluationId, number: u64) -> Result<Vec<AttemptRow>, StoreError> {
        let rows = sqlx::query(
            "SELECT generation, attempt, run_id, episode FROM attempts WHERE evaluation_id = $1 AND row_number = $2 ORDER BY generation, attempt LIMIT 200",
        )
        .bind(evaluation.to_string())
        .bind(signed(number))
        .fetch_all(self.read())
        .await
        .attempt("read attempts")?;
        rows.iter()
            .map(|row| {
                let name = format!("{evaluation} row {number}");
                let (run, episode): (String, String) = (column(row, 2)?, column(row, 3)?);
                Ok(AttemptRow {
                    row: number,
                    generation: unsigned(row, 0)?,
                    attempt: column(row, 1)?,
                    run: parsed("attempts", "run_id", &name, &run, |text| text.parse().ok())?,
                    episode: from_json("attempts", "episode", &name, &episode)?,
                })
            })
            .collect()
    }

    /// Sums per (model, task).
    pub async fn cell_sums(&self, evaluation: EvaluationId) -> Result<Vec<CellSums>, StoreError> {
        let rows = sqlx::query(
            "SELECT model, task, CAST(SUM(scored) AS BIGINT), CAST(SUM(1 - scored) AS BIGINT), CAST(COALESCE(SUM(success), 0) AS BIGINT),
             CAST(SUM(CASE WHEN scored = 1 AND success IS NULL THEN 1 ELSE 0 END) AS BIGINT), COALESCE(SUM(reward), 0.0),
             CAST(COALESCE(SUM(steps), 0) AS BIGINT)
             FROM outcomes WHERE evaluation_id = $1 GROUP BY model, task",
        )
        .bind(evaluation.to_string())
        .fetch_all(self.read())
        .await
        .attempt("sum outcomes")?;
        rows.iter()
            .map(|row| {
                Ok(CellSums {
                    model: position(row, 0)?,
                    task: position(row, 1)?,
                    scored: unsigned(row, 2)?,
                    errored: unsigned(row, 3)?,
                    successes: unsigned(row, 4)?,
                    unknown_success: unsigned(row, 5)?,
                    reward_sum: column(row, 6)?,
                    steps_sum: unsigned(row, 7)?,
                })
            })
            .collect()
    }

    /// (row, reward, success) of the scored rows in `from..to`, in order, at most `limit`.
    pub async fn scored_values(
        &self,
        evaluation: EvaluationId,
        from: u64,
        to: u64,
        limit: u32,
    ) -> Result<Vec<(u64, f64, Option<bool>)>, StoreError> {
        let rows = sqlx::query(
            "SELECT row_number, reward, success FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3 AND scored = 1
             ORDER BY row_number LIMIT $4",
        )
        .bind(evaluation.to_string())
        .bind(signed(from))
        .bind(signed(to))
        .bind(i64::from(limit))
        .fetch_all(self.read())
        .await
        .attempt("read rewards")?;
        rows.iter().map(|row| Ok((unsigned(row, 0)?, column(row, 1)?, optional_flag(row, 2)?))).collect()
    }

    /// Failures of errored rows by code, most frequent first. The example is the first row that carries output (of the first
    /// thousand: more are not worth reading for it), else the first row.
    pub async fn failure_counts(&self, evaluation: EvaluationId, limit: u32) -> Result<Vec<FailureExample>, StoreError> {
        // The field's name can't stand in a message: there its quotes are escaped.
        let rows = sqlx::query(
            "SELECT c.count, o.row_number, o.failure, o.run_id FROM (
                 SELECT failure_code, COUNT(*) AS count, MIN(row_number) AS first_row FROM outcomes
                 WHERE evaluation_id = $1 AND scored = 0 GROUP BY failure_code) c
             JOIN outcomes o ON o.evaluation_id = $1 AND o.row_number = COALESCE((
                 SELECT MIN(e.row_number) FROM (
                     SELECT row_number, failure FROM outcomes WHERE evaluation_id = $1 AND scored = 0 AND failure_code = c.failure_code
                     ORDER BY row_number LIMIT 1000) e
                 WHERE e.failure LIKE '%\"logLines\":%'), c.first_row)
             ORDER BY c.count DESC, c.first_row LIMIT $2",
        )
        .bind(evaluation.to_string())
        .bind(i64::from(limit))
        .fetch_all(self.read())
        .await
        .attempt("count failures")?;
        rows.iter()
            .map(|row| {
                let (text, run): (Option<String>, String) = (column(row, 2)?, column(row, 3)?);
                let name = evaluation.to_string();
                Ok(FailureExample {
                    count: unsigned(row, 0)?,
                    row: unsigned(row, 1)?,
                    failure: from_json("outcomes", "failure", &name, text.as_deref().unwrap_or("null"))?,
                    run: parsed("outcomes", "run_id", &name, &run, |text| text.parse().ok())?,
                })
            })
            .collect()
    }

    /// Runs that have errored rows.
    pub async fn runs_with_errored(&self, evaluation: EvaluationId) -> Result<Vec<RunId>, StoreError> {
        let rows = sqlx::query("SELECT DISTINCT run_id FROM outcomes WHERE evaluation_id = $1 AND scored = 0")
            .bind(evaluation.to_string())
            .fetch_all(self.read())
            .await
            .attempt("look for runs with errored rows")?;
        rows.iter()
            .map(|row| {
                let run: String = column(row, 0)?;
                parsed("outcomes", "run_id", &evaluation.to_string(), &run, |text| text.parse().ok())
            })
            .collect()
    }
}

impl Write {
    /// What is stored of these rows.
    pub async fn held(&mut self, evaluation: EvaluationId, rows: &[u64]) -> Result<Vec<Held>, StoreError> {
        let (Some(&low), Some(&high)) = (rows.iter().min(), rows.iter().max()) else { return Ok(Vec::new()) };
        let mut found = Vec::with_capacity(rows.len());
        let read = |row: &AnyRow| -> Result<Held, StoreError> {
            Ok(Held { row: unsigned(row, 0)?, generation: unsigned(row, 1)?, attempt: column(row, 2)?, scored: flag(row, 3)? })
        };
        if high - low <= 4 * rows.len() as u64 + 200 {
            let stored = sqlx::query("SELECT row_number, generation, attempt, scored FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number <= $3")
                .bind(evaluation.to_string())
                .bind(signed(low))
                .bind(signed(high))
                .fetch_all(&mut *self.tx)
                .await
                .attempt("read outcomes")?;
            for row in &stored {
                found.push(read(row)?);
            }
            return Ok(found);
        }
        for part in rows.chunks(500) {
            let sql = format!(
                "SELECT row_number, generation, attempt, scored FROM outcomes WHERE evaluation_id = $1 AND row_number IN ({})",
                placeholders(part.len(), 2)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(part.len() == 500).bind(evaluation.to_string());
            for row in part {
                query = query.bind(signed(*row));
            }
            for row in &query.fetch_all(&mut *self.tx).await.attempt("read outcomes")? {
                found.push(read(row)?);
            }
        }
        Ok(found)
    }

    /// Stores outcomes of distinct rows, in place of what is stored of them.
    ///
    /// Scored and errored ones are two statements: neither then binds a NULL number, whose type the driver would have to guess.
    pub async fn put_outcomes(&mut self, evaluation: EvaluationId, outcomes: &[OutcomeRow]) -> Result<(), StoreError> {
        let id = evaluation.to_string();
        let (scored, errored): (Vec<&OutcomeRow>, Vec<&OutcomeRow>) = outcomes.iter().partition(|outcome| outcome.is_scored());
        for part in scored.chunks(INSERTED) {
            let sql = format!(
                "INSERT INTO outcomes (evaluation_id, row_number, model, task, run_id, generation, attempt, seed, scored, conformance_warnings, started_at,
                 ended_at, reward, steps, terminated, truncated, success, first_observation_sha256) VALUES {}
                 ON CONFLICT (evaluation_id, row_number) DO UPDATE SET model = excluded.model, task = excluded.task, run_id = excluded.run_id,
                 generation = excluded.generation, attempt = excluded.attempt, seed = excluded.seed, scored = 1,
                 conformance_warnings = excluded.conformance_warnings, started_at = excluded.started_at, ended_at = excluded.ended_at,
                 reward = excluded.reward, steps = excluded.steps, terminated = excluded.terminated, truncated = excluded.truncated,
                 success = excluded.success, first_observation_sha256 = excluded.first_observation_sha256, failure = NULL, failure_code = NULL",
                value_lists(part.len(), 18, 1)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(part.len() == INSERTED);
            for outcome in part {
                let RowOutcome::Scored { reward, steps, terminated, truncated, success, first_observation_sha256, conformance_warnings } =
                    &outcome.result
                else {
                    continue;
                };
                query = query
                    .bind(id.clone())
                    .bind(signed(outcome.row))
                    .bind(i64::from(outcome.model))
                    .bind(i64::from(outcome.task))
                    .bind(outcome.run.to_string())
                    .bind(signed(outcome.generation))
                    .bind(outcome.attempt)
                    .bind(signed(outcome.seed))
                    .bind(1_i64)
                    .bind(signed(*conformance_warnings))
                    .bind(outcome.started_at)
                    .bind(outcome.ended_at)
                    .bind(*reward)
                    .bind(signed(*steps))
                    .bind(i64::from(*terminated))
                    .bind(i64::from(*truncated))
                    .bind(success.map(i64::from))
                    .bind(first_observation_sha256.clone());
            }
            query.execute(&mut *self.tx).await.attempt("store scored rows")?;
        }
        for part in errored.chunks(INSERTED) {
            let sql = format!(
                "INSERT INTO outcomes (evaluation_id, row_number, model, task, run_id, generation, attempt, seed, scored, conformance_warnings, started_at,
                 ended_at, failure, failure_code) VALUES {}
                 ON CONFLICT (evaluation_id, row_number) DO UPDATE SET model = excluded.model, task = excluded.task, run_id = excluded.run_id,
                 generation = excluded.generation, attempt = excluded.attempt, seed = excluded.seed, scored = 0, conformance_warnings = 0,
                 started_at = excluded.started_at, ended_at = excluded.ended_at, failure = excluded.failure, failure_code = excluded.failure_code,
                 reward = NULL, steps = NULL, terminated = NULL, truncated = NULL, success = NULL, first_observation_sha256 = NULL",
                value_lists(part.len(), 14, 1)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(part.len() == INSERTED);
            for outcome in part {
                let RowOutcome::Errored(failure) = &outcome.result else { continue };
                query = query
                    .bind(id.clone())
                    .bind(signed(outcome.row))
                    .bind(i64::from(outcome.model))
                    .bind(i64::from(outcome.task))
                    .bind(outcome.run.to_string())
                    .bind(signed(outcome.generation))
                    .bind(outcome.attempt)
                    .bind(signed(outcome.seed))
                    .bind(0_i64)
                    .bind(0_i64)
                    .bind(outcome.started_at)
                    .bind(outcome.ended_at)
                    .bind(to_json("outcomes", "failure", &id, failure)?)
                    .bind(failure.code.as_str());
            }
            query.execute(&mut *self.tx).await.attempt("store errored rows")?;
        }
        Ok(())
    }

    /// Stores attempts; one that is there already stays as it is.
    pub async fn put_attempts(&mut self, evaluation: EvaluationId, attempts: &[AttemptRow]) -> Result<(), StoreError> {
        let id = evaluation.to_string();
        for part in attempts.chunks(INSERTED) {
            let sql = format!(
                "INSERT INTO attempts (evaluation_id, row_number, generation, attempt, run_id, episode) VALUES {}
                 ON CONFLICT (evaluation_id, row_number, generation, attempt) DO NOTHING",
                value_lists(part.len(), 6, 1)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(part.len() == INSERTED);
            for attempt in part {
                query = query
                    .bind(id.clone())
                    .bind(signed(attempt.row))
                    .bind(signed(attempt.generation))
                    .bind(attempt.attempt)
                    .bind(attempt.run.to_string())
                    .bind(to_json("attempts", "episode", &id, &attempt.episode)?);
            }
            query.execute(&mut *self.tx).await.attempt("store attempts")?;
        }
        Ok(())
    }

    /// Rows of `segments` without an outcome, read in this transaction.
    pub async fn open_of(&mut self, evaluation: EvaluationId, segments: &[Segment]) -> Result<Vec<Segment>, StoreError> {
        let done = finished_rows(&mut self.tx, evaluation, segments).await?;
        Ok(rlm_core::rows::without(segments, &done))
    }

    /// Whether this generation of the run has brought any outcome.
    pub async fn has_outcome_of(
        &mut self,
        evaluation: EvaluationId,
        run: RunId,
        generation: u64,
        segments: &[Segment],
    ) -> Result<bool, StoreError> {
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return Ok(false) };
        let row = sqlx::query(
            "SELECT COUNT(*) FROM (SELECT 1 FROM outcomes WHERE evaluation_id = $1 AND row_number >= $2 AND row_number < $3 AND run_id = $4
             AND generation = $5 LIMIT 1) found",
        )
        .bind(evaluation.to_string())
        .bind(signed(first.first_row))
        .bind(signed(last.end()))
        .bind(run.to_string())
        .bind(signed(generation))
        .fetch_one(&mut *self.tx)
        .await
        .attempt("look for results of a run")?;
        Ok(unsigned(&row, 0)? > 0)
    }

    /// Takes the outcomes of errored rows away (their attempts stay) and says which rows those were, ascending.
    pub async fn take_errored(&mut self, evaluation: EvaluationId) -> Result<Vec<u64>, StoreError> {
        let rows = sqlx::query("DELETE FROM outcomes WHERE evaluation_id = $1 AND scored = 0 RETURNING row_number")
            .bind(evaluation.to_string())
            .fetch_all(&mut *self.tx)
            .await
            .attempt("free errored rows")?;
        let mut numbers = rows.iter().map(|row| unsigned(row, 0)).collect::<Result<Vec<_>, _>>()?;
        numbers.sort_unstable();
        Ok(numbers)
    }
}

//! Evaluations: their documents, tags, counters and segments. Rows' outcomes are in `outcomes`, runs in `runs`.

use std::collections::BTreeMap;

use rlm_core::evaluation::EvaluationSpec;
use rlm_core::ids::{ClusterId, EvaluationId, OrganizationId};
use rlm_core::rows::Segment;
use rlm_core::run::EvaluationStatus;
use serde_json::Value;
use sqlx::any::AnyRow;
use sqlx::{AnyConnection, AssertSqlSafe};

use super::clusters::Condition;
use super::codec::{column, flag, from_json, parsed, placeholders, signed, to_json, unsigned, value_lists};
use super::{Attempt as _, Store, StoreError, Write};

/// Longest piece of a segment with explicit seeds, so that a page of rows reads little.
const SEEDED_PIECE: u64 = 2_000;

/// What lists show of an evaluation: everything but its documents.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationHead {
    pub id: EvaluationId,
    pub organization: OrganizationId,
    pub name: String,
    pub tags: BTreeMap<String, String>,
    pub created_at: i64,
    pub created_by: String,
    pub cluster: Option<ClusterId>,
    pub priority: i64,
    pub status: EvaluationStatus,
    pub cancel_requested_at: Option<i64>,
    pub rows_total: u64,
    pub rows_scored: u64,
    pub rows_errored: u64,
    pub started_at: Option<i64>,
    pub finished_at: Option<i64>,
}

/// The documents of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationDocuments {
    pub request: Value,
    pub spec: EvaluationSpec,
    pub warnings: Vec<String>,
}

/// A new evaluation.
#[derive(Debug, Clone)]
pub struct NewEvaluation<'a> {
    pub id: EvaluationId,
    pub organization: OrganizationId,
    pub created_at: i64,
    pub created_by: String,
    pub client_token: Option<String>,
    pub request_hash: String,
    pub request: &'a Value,
    pub spec: &'a EvaluationSpec,
    pub warnings: &'a [String],
    pub rows_total: u64,
}

/// What a list is narrowed to.
#[derive(Debug, Clone, Default)]
pub struct EvaluationFilter {
    pub status: Option<EvaluationStatus>,
    /// Part of the name, in either case.
    pub q: String,
    pub tags: Vec<(String, String)>,
    /// Only older ones than this.
    pub before: Option<EvaluationId>,
    pub limit: u32,
}

/// Counters and state, read under a lock that lasts until the transaction ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LockedEvaluation {
    pub id: EvaluationId,
    pub organization: OrganizationId,
    pub status: EvaluationStatus,
    pub cancel_requested_at: Option<i64>,
    pub rows_total: u64,
    pub rows_scored: u64,
    pub rows_errored: u64,
    pub created_at: i64,
    pub started_at: Option<i64>,
    pub finished_at: Option<i64>,
    pub deleted_at: Option<i64>,
}

/// What an evaluation needs to know of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterCondition {
    pub id: ClusterId,
    pub name: String,
    pub connected: bool,
    /// When the loss of its agent was noticed, while that lasts.
    pub disconnected_at: Option<i64>,
    /// Since when its agent can store no results, and what it says of that.
    pub full: Option<(Option<i64>, String)>,
    pub draining: bool,
    /// A local cell: it starts entrypoints, and can describe them.
    pub runs_processes: bool,
}

/// `q` as a pattern for `LOWER(column) LIKE ... ESCAPE '\'`.
pub(crate) fn like_pattern(q: &str) -> String {
    let mut pattern = String::with_capacity(q.len() + 2);
    pattern.push('%');
    for letter in q.to_lowercase().chars() {
        if matches!(letter, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern.push('%');
    pattern
}

const HEAD: &str =
    "id, organization_id, name, created_at, created_by, cluster_id, priority, status, cancel_requested_at, rows_total, rows_scored,
    rows_errored, started_at, finished_at";

fn head(row: &AnyRow) -> Result<EvaluationHead, StoreError> {
    let id: String = column(row, 0)?;
    let organization: String = column(row, 1)?;
    let cluster: Option<String> = column(row, 5)?;
    let status: String = column(row, 7)?;
    Ok(EvaluationHead {
        organization: parsed("evaluations", "organization_id", &id, &organization, |text| text.parse().ok())?,
        name: column(row, 2)?,
        tags: BTreeMap::new(),
        created_at: column(row, 3)?,
        created_by: column(row, 4)?,
        cluster: cluster.map(|text| parsed("evaluations", "cluster_id", &id, &text, |text| text.parse().ok())).transpose()?,
        priority: column(row, 6)?,
        status: parsed("evaluations", "status", &id, &status, EvaluationStatus::parse)?,
        cancel_requested_at: column(row, 8)?,
        rows_total: unsigned(row, 9)?,
        rows_scored: unsigned(row, 10)?,
        rows_errored: unsigned(row, 11)?,
        started_at: column(row, 12)?,
        finished_at: column(row, 13)?,
        id: parsed("evaluations", "id", &id, &id, |text| text.parse().ok())?,
    })
}

async fn add_tags(connection: &mut AnyConnection, heads: &mut [EvaluationHead]) -> Result<(), StoreError> {
    for part in heads.chunks_mut(200) {
        let sql = format!("SELECT evaluation_id, key, value FROM evaluation_tags WHERE evaluation_id IN ({})", placeholders(part.len(), 1));
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for head in part.iter() {
            query = query.bind(head.id.to_string());
        }
        let mut tags: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for row in query.fetch_all(&mut *connection).await.attempt("read tags")? {
            tags.entry(column(&row, 0)?).or_default().insert(column(&row, 1)?, column(&row, 2)?);
        }
        for head in part {
            head.tags = tags.remove(&head.id.to_string()).unwrap_or_default();
        }
    }
    Ok(())
}

fn segment(evaluation: EvaluationId, row: &AnyRow) -> Result<Segment, StoreError> {
    let text: String = column(row, 0)?;
    from_json("segments", "segment", &evaluation.to_string(), &text)
}

impl Store {
    /// One evaluation of this organization that is not deleted.
    pub async fn evaluation(&self, organization: OrganizationId, id: EvaluationId) -> Result<Option<EvaluationHead>, StoreError> {
        let mut connection = self.read().acquire().await.attempt("get a connection")?;
        let sql = format!("SELECT {HEAD} FROM evaluations WHERE id = $1 AND organization_id = $2 AND deleted_at IS NULL");
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(id.to_string())
            .bind(organization.to_string())
            .fetch_optional(&mut *connection)
            .await
            .attempt("read an evaluation")?;
        let Some(row) = row else { return Ok(None) };
        let mut found = [head(&row)?];
        add_tags(&mut connection, &mut found).await?;
        let [found] = found;
        Ok(Some(found))
    }

    /// The request, the checked request and its warnings.
    pub async fn evaluation_documents(&self, id: EvaluationId) -> Result<Option<EvaluationDocuments>, StoreError> {
        let row = sqlx::query("SELECT request, spec, warnings FROM evaluations WHERE id = $1 AND deleted_at IS NULL")
            .bind(id.to_string())
            .fetch_optional(self.read())
            .await
            .attempt("read an evaluation's request")?;
        let Some(row) = row else { return Ok(None) };
        let id = id.to_string();
        let (request, spec, warnings): (String, String, String) = (column(&row, 0)?, column(&row, 1)?, column(&row, 2)?);
        Ok(Some(EvaluationDocuments {
            request: from_json("evaluations", "request", &id, &request)?,
            spec: from_json("evaluations", "spec", &id, &spec)?,
            warnings: from_json("evaluations", "warnings", &id, &warnings)?,
        }))
    }

    /// The checked request, read as `T`: a part of it, where the whole is not needed.
    pub async fn spec_as<T: serde::de::DeserializeOwned>(&self, id: EvaluationId) -> Result<Option<T>, StoreError> {
        self.document_as(id, "spec").await
    }

    /// The parts of an evaluation's request, as it came, that `T` has.
    pub async fn request_as<T: serde::de::DeserializeOwned>(&self, id: EvaluationId) -> Result<Option<T>, StoreError> {
        self.document_as(id, "request").await
    }

    async fn document_as<T: serde::de::DeserializeOwned>(
        &self,
        id: EvaluationId,
        column_name: &'static str,
    ) -> Result<Option<T>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(format!("SELECT {column_name} FROM evaluations WHERE id = $1")))
            .bind(id.to_string())
            .fetch_optional(self.read())
            .await
            .attempt("read an evaluation's request")?;
        let Some(row) = row else { return Ok(None) };
        let text: String = column(&row, 0)?;
        Ok(Some(from_json("evaluations", column_name, &id.to_string(), &text)?))
    }

    /// Newest first.
    pub async fn evaluations(&self, organization: OrganizationId, filter: &EvaluationFilter) -> Result<Vec<EvaluationHead>, StoreError> {
        let mut connection = self.read().acquire().await.attempt("get a connection")?;
        let mut sql = format!(
            "SELECT {HEAD} FROM evaluations e WHERE organization_id = $1 AND deleted_at IS NULL AND (status = $2 OR $2 = '')
             AND (id < $3 OR $3 = '') AND LOWER(name) LIKE $4 ESCAPE '\\'"
        );
        for place in 0..filter.tags.len() {
            sql.push_str(&format!(
                " AND EXISTS (SELECT 1 FROM evaluation_tags t WHERE t.evaluation_id = e.id AND t.key = ${} AND t.value = ${})",
                6 + 2 * place,
                7 + 2 * place
            ));
        }
        sql.push_str(" ORDER BY id DESC LIMIT $5");
        let mut query = sqlx::query(AssertSqlSafe(sql))
            .bind(organization.to_string())
            .bind(filter.status.map_or("", EvaluationStatus::as_str))
            .bind(filter.before.map_or_else(String::new, |id| id.to_string()))
            .bind(like_pattern(&filter.q))
            .bind(i64::from(filter.limit));
        for (key, value) in &filter.tags {
            query = query.bind(key.clone()).bind(value.clone());
        }
        let rows = query.fetch_all(&mut *connection).await.attempt("list evaluations")?;
        let mut heads = rows.iter().map(head).collect::<Result<Vec<_>, _>>()?;
        add_tags(&mut connection, &mut heads).await?;
        Ok(heads)
    }

    /// The evaluation that this client token made, with the hash of its request; also a deleted one.
    pub async fn evaluation_by_client_token(
        &self,
        organization: OrganizationId,
        token: &str,
    ) -> Result<Option<(EvaluationId, String)>, StoreError> {
        let row = sqlx::query("SELECT id, request_hash FROM evaluations WHERE organization_id = $1 AND client_token = $2")
            .bind(organization.to_string())
            .bind(token.to_owned())
            .fetch_optional(self.read())
            .await
            .attempt("look a client token up")?;
        let Some(row) = row else { return Ok(None) };
        let id: String = column(&row, 0)?;
        Ok(Some((parsed("evaluations", "id", &id, &id, |text| text.parse().ok())?, column(&row, 1)?)))
    }

    /// The newest evaluation made since `since` from an equal request that is under way or has come to its end: one that failed or
    /// was cancelled is rightly submitted again.
    pub async fn equal_evaluation_since(
        &self,
        organization: OrganizationId,
        request_hash: &str,
        since: i64,
    ) -> Result<Option<EvaluationId>, StoreError> {
        let row = sqlx::query(
            "SELECT id FROM evaluations WHERE organization_id = $1 AND request_hash = $2 AND created_at >= $3 AND deleted_at IS NULL
             AND status NOT IN ('failed', 'cancelled') ORDER BY id DESC LIMIT 1",
        )
        .bind(organization.to_string())
        .bind(request_hash.to_owned())
        .bind(since)
        .fetch_optional(self.read())
        .await
        .attempt("look for an equal request")?;
        let Some(row) = row else { return Ok(None) };
        let id: String = column(&row, 0)?;
        Ok(Some(parsed("evaluations", "id", &id, &id, |text| text.parse().ok())?))
    }

    /// Segments that reach into rows `from..`, in order, at most `limit`; of one model or task where given.
    pub async fn segments_from(
        &self,
        id: EvaluationId,
        from: u64,
        model: Option<u32>,
        task: Option<u32>,
        limit: u32,
    ) -> Result<Vec<Segment>, StoreError> {
        let rows = sqlx::query(
            "SELECT segment FROM segments WHERE evaluation_id = $1
             AND first_row >= COALESCE((SELECT MAX(first_row) FROM segments WHERE evaluation_id = $1 AND first_row <= $2), 0)
             AND first_row + row_count > $2 AND (model = $3 OR $3 = -1) AND (task = $4 OR $4 = -1) ORDER BY first_row LIMIT $5",
        )
        .bind(id.to_string())
        .bind(signed(from))
        .bind(model.map_or(-1, i64::from))
        .bind(task.map_or(-1, i64::from))
        .bind(i64::from(limit))
        .fetch_all(self.read())
        .await
        .attempt("read an evaluation's segments")?;
        rows.iter().map(|row| segment(id, row)).collect()
    }

    /// Rows of each (model, task), in order.
    pub async fn cells(&self, id: EvaluationId) -> Result<Vec<(u32, u32, u64)>, StoreError> {
        let rows = sqlx::query(
            "SELECT model, task, CAST(SUM(row_count) AS BIGINT) FROM segments WHERE evaluation_id = $1 GROUP BY model, task ORDER BY task, model",
        )
        .bind(id.to_string())
        .fetch_all(self.read())
        .await
        .attempt("count an evaluation's rows")?;
        rows.iter().map(|row| Ok((position(row, 0)?, position(row, 1)?, unsigned(row, 2)?))).collect()
    }

    /// Evaluations deleted before `before` whose data is still there.
    pub async fn deleted_evaluations(&self, before: i64, limit: u32) -> Result<Vec<EvaluationId>, StoreError> {
        let rows = sqlx::query("SELECT id FROM evaluations WHERE deleted_at IS NOT NULL AND deleted_at < $1 ORDER BY id LIMIT $2")
            .bind(before)
            .bind(i64::from(limit))
            .fetch_all(self.read())
            .await
            .attempt("look for deleted evaluations")?;
        rows.iter()
            .map(|row| {
                let id: String = column(row, 0)?;
                parsed("evaluations", "id", &id, &id, |text| text.parse().ok())
            })
            .collect()
    }

    /// The organization's clusters that are not archived.
    pub async fn cluster_conditions(&self, organization: OrganizationId) -> Result<Vec<ClusterCondition>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, CASE WHEN last_seen_at IS NOT NULL AND disconnected_at IS NULL THEN CAST(1 AS BIGINT) ELSE CAST(0 AS BIGINT) END, draining,
             CASE WHEN executor = 'process' THEN CAST(1 AS BIGINT) ELSE CAST(0 AS BIGINT) END, disconnected_at, conditions, name
             FROM clusters WHERE organization_id = $1 AND archived_at IS NULL ORDER BY id",
        )
        .bind(organization.to_string())
        .fetch_all(self.read())
        .await
        .attempt("read the state of clusters")?;
        rows.iter()
            .map(|row| {
                let (id, conditions): (String, String) = (column(row, 0)?, column(row, 5)?);
                let conditions: Vec<Condition> = from_json("clusters", "conditions", &id, &conditions)?;
                let full = conditions.into_iter().find(|one| one.kind == "SpoolHasRoom" && one.status == "False");
                Ok(ClusterCondition {
                    name: column(row, 6)?,
                    disconnected_at: column(row, 4)?,
                    full: full.map(|one| (one.since.map(|since| since.timestamp_millis()), one.message)),
                    id: parsed("clusters", "id", &id, &id, |text| text.parse().ok())?,
                    connected: flag(row, 1)?,
                    draining: flag(row, 2)?,
                    runs_processes: flag(row, 3)?,
                })
            })
            .collect()
    }
}

/// A position in a list of models or tasks.
pub(crate) fn position(row: &AnyRow, index: usize) -> Result<u32, StoreError> {
    Ok(u32::try_from(column::<i64>(row, index)?).unwrap_or(u32::MAX))
}

impl Write {
    pub async fn insert_evaluation(&mut self, new: &NewEvaluation<'_>) -> Result<(), StoreError> {
        let id = new.id.to_string();
        sqlx::query(
            "INSERT INTO evaluations (id, organization_id, name, created_at, created_by, client_token, request_hash, request, spec, warnings, cluster_id,
             priority, status, rows_total, rows_scored, rows_errored) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, 'queued', $13, 0, 0)",
        )
        .bind(id.clone())
        .bind(new.organization.to_string())
        .bind(new.spec.name.clone())
        .bind(new.created_at)
        .bind(new.created_by.clone())
        .bind(new.client_token.clone())
        .bind(new.request_hash.clone())
        .bind(to_json("evaluations", "request", &id, new.request)?)
        .bind(to_json("evaluations", "spec", &id, new.spec)?)
        .bind(to_json("evaluations", "warnings", &id, &new.warnings)?)
        .bind(new.spec.cluster.map(|cluster| cluster.to_string()))
        .bind(i64::from(new.spec.priority))
        .bind(signed(new.rows_total))
        .execute(&mut *self.tx)
        .await
        .attempt("store an evaluation")?;
        self.set_tags(new.id, &new.spec.tags).await
    }

    /// Replaces the tags.
    pub async fn set_tags(&mut self, id: EvaluationId, tags: &BTreeMap<String, String>) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM evaluation_tags WHERE evaluation_id = $1")
            .bind(id.to_string())
            .execute(&mut *self.tx)
            .await
            .attempt("replace tags")?;
        for (key, value) in tags {
            sqlx::query("INSERT INTO evaluation_tags (evaluation_id, key, value) VALUES ($1, $2, $3)")
                .bind(id.to_string())
                .bind(key.clone())
                .bind(value.clone())
                .execute(&mut *self.tx)
                .await
                .attempt("store a tag")?;
        }
        Ok(())
    }

    pub async fn insert_segments(&mut self, id: EvaluationId, segments: &[Segment]) -> Result<(), StoreError> {
        let mut pieces: Vec<Segment> = Vec::with_capacity(segments.len());
        for segment in segments {
            if segment.seeds.is_none() || segment.count <= SEEDED_PIECE {
                pieces.push(segment.clone());
                continue;
            }
            let mut from = segment.first_row;
            while from < segment.end() {
                pieces.extend(segment.slice(from, from + SEEDED_PIECE));
                from += SEEDED_PIECE;
            }
        }
        let id = id.to_string();
        for part in pieces.chunks(500) {
            let sql = format!(
                "INSERT INTO segments (evaluation_id, first_row, row_count, model, task, segment) VALUES {}",
                value_lists(part.len(), 6, 1)
            );
            let mut query = sqlx::query(AssertSqlSafe(sql));
            for segment in part {
                query = query
                    .bind(id.clone())
                    .bind(signed(segment.first_row))
                    .bind(signed(segment.count))
                    .bind(i64::from(segment.model))
                    .bind(i64::from(segment.task))
                    .bind(to_json("segments", "segment", &id, segment)?);
            }
            query.execute(&mut *self.tx).await.attempt("store an evaluation's rows")?;
        }
        Ok(())
    }

    /// Reads the counters under a lock: nobody else changes this evaluation until the transaction ends. Also a deleted one.
    pub async fn lock_evaluation(&mut self, id: EvaluationId) -> Result<Option<LockedEvaluation>, StoreError> {
        let row = sqlx::query(
            "UPDATE evaluations SET rows_total = rows_total WHERE id = $1
             RETURNING organization_id, status, cancel_requested_at, rows_total, rows_scored, rows_errored, created_at, started_at, finished_at,
             deleted_at",
        )
        .bind(id.to_string())
        .fetch_optional(&mut *self.tx)
        .await
        .attempt("lock an evaluation")?;
        let Some(row) = row else { return Ok(None) };
        let text = id.to_string();
        let (organization, status): (String, String) = (column(&row, 0)?, column(&row, 1)?);
        Ok(Some(LockedEvaluation {
            id,
            organization: parsed("evaluations", "organization_id", &text, &organization, |text| text.parse().ok())?,
            status: parsed("evaluations", "status", &text, &status, EvaluationStatus::parse)?,
            cancel_requested_at: column(&row, 2)?,
            rows_total: unsigned(&row, 3)?,
            rows_scored: unsigned(&row, 4)?,
            rows_errored: unsigned(&row, 5)?,
            created_at: column(&row, 6)?,
            started_at: column(&row, 7)?,
            finished_at: column(&row, 8)?,
            deleted_at: column(&row, 9)?,
        }))
    }

    /// Writes the counters, state and times of a locked evaluation.
    pub async fn save_evaluation(&mut self, evaluation: &LockedEvaluation) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE evaluations SET status = $2, cancel_requested_at = $3, rows_total = $4, rows_scored = $5, rows_errored = $6, started_at = $7,
             finished_at = $8 WHERE id = $1",
        )
        .bind(evaluation.id.to_string())
        .bind(evaluation.status.as_str())
        .bind(evaluation.cancel_requested_at)
        .bind(signed(evaluation.rows_total))
        .bind(signed(evaluation.rows_scored))
        .bind(signed(evaluation.rows_errored))
        .bind(evaluation.started_at)
        .bind(evaluation.finished_at)
        .execute(&mut *self.tx)
        .await
        .attempt("store an evaluation's state")?;
        Ok(())
    }

    /// The checked request, read in this transaction.
    pub async fn spec(&mut self, id: EvaluationId) -> Result<EvaluationSpec, StoreError> {
        let row = sqlx::query("SELECT spec FROM evaluations WHERE id = $1")
            .bind(id.to_string())
            .fetch_one(&mut *self.tx)
            .await
            .attempt("read an evaluation's request")?;
        let text: String = column(&row, 0)?;
        from_json("evaluations", "spec", &id.to_string(), &text)
    }

    pub async fn rename_evaluation(&mut self, id: EvaluationId, name: &str) -> Result<(), StoreError> {
        sqlx::query("UPDATE evaluations SET name = $2 WHERE id = $1")
            .bind(id.to_string())
            .bind(name.to_owned())
            .execute(&mut *self.tx)
            .await
            .attempt("rename an evaluation")?;
        Ok(())
    }

    /// Replaces the checked request (more episodes).
    pub async fn set_spec(&mut self, id: EvaluationId, spec: &EvaluationSpec) -> Result<(), StoreError> {
        let text = id.to_string();
        sqlx::query("UPDATE evaluations SET spec = $2 WHERE id = $1")
            .bind(text.clone())
            .bind(to_json("evaluations", "spec", &text, spec)?)
            .execute(&mut *self.tx)
            .await
            .attempt("store an evaluation's request")?;
        Ok(())
    }

    /// Hides the evaluation and gives its client token free; its data stays until [`Write::purge_evaluation`].
    pub async fn delete_evaluation(&mut self, id: EvaluationId, now_ms: i64) -> Result<(), StoreError> {
        sqlx::query("UPDATE evaluations SET deleted_at = $2, client_token = NULL WHERE id = $1")
            .bind(id.to_string())
            .bind(now_ms)
            .execute(&mut *self.tx)
            .await
            .attempt("delete an evaluation")?;
        Ok(())
    }

    /// Removes everything of a deleted evaluation.
    pub async fn purge_evaluation(&mut self, id: EvaluationId) -> Result<(), StoreError> {
        for sql in [
            "DELETE FROM outcomes WHERE evaluation_id = $1",
            "DELETE FROM attempts WHERE evaluation_id = $1",
            "DELETE FROM runs WHERE evaluation_id = $1",
            "DELETE FROM segments WHERE evaluation_id = $1",
            "DELETE FROM evaluation_tags WHERE evaluation_id = $1",
            "DELETE FROM evaluations WHERE id = $1 AND deleted_at IS NOT NULL",
        ] {
            sqlx::query(sql).bind(id.to_string()).execute(&mut *self.tx).await.attempt("purge a deleted evaluation")?;
        }
        Ok(())
    }
}

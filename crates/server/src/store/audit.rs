//! SQL of the audit log. Records are only ever added.

use rlm_core::ids::OrganizationId;
use serde_json::Value;
use sqlx::Row;

use super::{Attempt, Store, StoreError, Write};

/// One line of the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRecord {
    /// A UUIDv7: sorts by time.
    pub id: String,
    pub at: i64,
    pub actor: String,
    pub action: String,
    pub subject: String,
    pub details: Value,
    pub remote_address: String,
}

pub async fn insert(write: &mut Write, organization_id: OrganizationId, record: &AuditRecord) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO audit_log (id, at, organization_id, actor, action, subject, details, remote_address)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(&record.id)
    .bind(record.at)
    .bind(organization_id.to_string())
    .bind(&record.actor)
    .bind(&record.action)
    .bind(&record.subject)
    .bind(record.details.to_string())
    .bind(&record.remote_address)
    .execute(&mut *write.tx)
    .await
    .attempt("store an audit record")?;
    Ok(())
}

/// Newest first.
pub async fn list(
    store: &Store,
    organization_id: OrganizationId,
    before: Option<&str>,
    limit: u32,
) -> Result<Vec<AuditRecord>, StoreError> {
    let rows = sqlx::query(
        "SELECT id, at, actor, action, subject, details, remote_address FROM audit_log
         WHERE organization_id = $1 AND ($2 = '' OR id < $2) ORDER BY id DESC LIMIT $3",
    )
    .bind(organization_id.to_string())
    .bind(before.unwrap_or(""))
    .bind(i64::from(limit))
    .fetch_all(store.read())
    .await
    .attempt("read the audit log")?;
    rows.into_iter()
        .map(|row| {
            let id: String = row.try_get("id").attempt("read the audit log")?;
            let details: String = row.try_get("details").attempt("read the audit log")?;
            let details = serde_json::from_str(&details).map_err(|error| StoreError::Inconsistent {
                table: "audit_log",
                column: "details",
                row: id.clone(),
                problem: error.to_string(),
            })?;
            Ok(AuditRecord {
                at: row.try_get("at").attempt("read the audit log")?,
                actor: row.try_get("actor").attempt("read the audit log")?,
                action: row.try_get("action").attempt("read the audit log")?,
                subject: row.try_get("subject").attempt("read the audit log")?,
                remote_address: row.try_get("remote_address").attempt("read the audit log")?,
                id,
                details,
            })
        })
        .collect()
}

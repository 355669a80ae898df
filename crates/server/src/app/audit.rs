//! The audit log: who changed what, when, from where. A record is part of the change's own transaction, so there is no
//! change without one. Never a secret in `details`.

use rlm_core::error::Error;
use rlm_core::ids::OrganizationId;
use serde_json::Value;
use uuid::Uuid;

use crate::app::access::Actor;
use crate::store::audit::{self, AuditRecord};
use crate::store::{Store, StoreError, Write};

/// Records a change. `action` is `<noun>.<verb>` (`cluster.archive`), `subject` the id of the thing.
pub async fn record(write: &mut Write, now_ms: i64, actor: &Actor, action: &str, subject: &str, details: Value) -> Result<(), StoreError> {
    let record = AuditRecord {
        id: Uuid::now_v7().to_string(),
        at: now_ms,
        actor: actor.name.clone(),
        action: action.to_owned(),
        subject: subject.to_owned(),
        details,
        remote_address: actor.remote_address.clone(),
    };
    audit::insert(write, actor.organization_id, &record).await
}

/// Newest first, at most `limit`, before the record `before`.
pub async fn list(store: &Store, organization_id: OrganizationId, before: Option<&str>, limit: u32) -> Result<Vec<AuditRecord>, Error> {
    Ok(audit::list(store, organization_id, before, limit).await?)
}

//! The audit log.

use axum::extract::State;
use chrono::{DateTime, Utc};
use rlm_api::rest::Page;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::audit;
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Query};
use crate::http::page::{PageQuery, page};
use crate::http::time::rfc3339;
use crate::state::AppState;
use crate::store::audit::AuditRecord;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_audit))
}

/// One change.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    pub id: String,
    pub at: DateTime<Utc>,
    /// `user:<id>`, `key:<id>`, `cluster:<id>`, `system`.
    pub actor: String,
    pub action: String,
    pub subject: String,
    #[schema(value_type = Object)]
    pub details: Value,
    pub remote_address: String,
}

impl From<AuditRecord> for AuditEntry {
    fn from(record: AuditRecord) -> Self {
        Self {
            id: record.id,
            at: rfc3339(record.at),
            actor: record.actor,
            action: record.action,
            subject: record.subject,
            details: record.details,
            remote_address: record.remote_address,
        }
    }
}

/// Every change in the organization, newest first.
#[utoipa::path(
    get, path = "/v1/audit", tag = "organization", params(PageQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Page<AuditEntry>))
)]
async fn list_audit(State(state): State<AppState>, caller: Caller, Query(query): Query<PageQuery>) -> ApiResult<Json<Page<AuditEntry>>> {
    caller.require(Scope::AuditRead)?;
    let limit = query.limit()?;
    let before = query.cursor::<uuid::Uuid>()?.map(|id| id.to_string());
    let records = audit::list(&state.store, caller.organization_id, before.as_deref(), limit + 1).await?;
    Ok(Json(page(records, limit, |record| record.id.clone(), AuditEntry::from)))
}

//! Where the container registry is, and what of it the caller may use.

use axum::extract::State;
use rlm_core::ids::OrganizationId;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::Caller;
use crate::http::extract::Json;
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_registry))
}

/// The namespace of an organization: its id, in the letters that repository names allow.
#[must_use]
pub fn namespace(organization: OrganizationId) -> String {
    organization.to_string().replace('_', "-")
}

#[derive(Debug, Serialize, ToSchema)]
pub struct RegistryInfo {
    pub host: String,
    /// `host/<namespace>/...` is what the caller may push to.
    pub namespaces: Vec<String>,
}

/// The container registry.
#[utoipa::path(
    get, path = "/v1/registry/info", tag = "registry", security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = RegistryInfo))
)]
async fn get_registry(State(state): State<AppState>, caller: Caller) -> Json<RegistryInfo> {
    Json(RegistryInfo { host: state.config.registry_host.clone(), namespaces: vec![namespace(caller.organization_id)] })
}

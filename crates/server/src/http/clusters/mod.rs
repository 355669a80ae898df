//! REST: clusters, their join tokens and credentials.

mod tokens;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use rlm_api::rest::{Cluster, Page};
use rlm_core::ids::ClusterId;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::clusters;
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Path, Query};
use crate::http::page::PageQuery;
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list_clusters, create_cluster))
        .routes(routes!(get_cluster, change_cluster))
        .routes(routes!(drain_cluster))
        .routes(routes!(resume_cluster))
        .routes(routes!(archive_cluster))
        .merge(tokens::router())
}

#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Most items on the page, 1 to 200 (50 unless given).
    limit: Option<u32>,
    /// `nextCursor` of the page before.
    cursor: Option<String>,
    /// Whether archived clusters are listed too.
    archived: Option<bool>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClusterName {
    name: String,
}

/// Clusters of the organization, oldest first.
#[utoipa::path(
    get, path = "/v1/clusters", tag = "clusters", params(ListQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Page<Cluster>))
)]
async fn list_clusters(State(state): State<AppState>, caller: Caller, Query(query): Query<ListQuery>) -> ApiResult<Json<Page<Cluster>>> {
    caller.require(Scope::ClustersRead)?;
    let page = PageQuery { limit: query.limit, cursor: query.cursor };
    let after = page.cursor::<ClusterId>()?;
    Ok(Json(clusters::list(&state, &caller, query.archived.unwrap_or(false), after, page.limit()?).await?))
}

/// Register a cluster. A join token connects it.
#[utoipa::path(
    post, path = "/v1/clusters", tag = "clusters", security(("bearer" = []), ("session" = [])),
    request_body = ClusterName, responses((status = 201, body = Cluster), (status = 409, description = "A cluster of this name exists"))
)]
async fn create_cluster(State(state): State<AppState>, caller: Caller, Json(request): Json<ClusterName>) -> ApiResult<Response> {
    caller.require(Scope::ClustersWrite)?;
    let cluster = clusters::create(&state, &caller, &request.name).await?;
    Ok((StatusCode::CREATED, axum::Json(cluster)).into_response())
}

/// One cluster.
#[utoipa::path(
    get, path = "/v1/clusters/{id}", tag = "clusters", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Cluster))
)]
async fn get_cluster(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<Json<Cluster>> {
    caller.require(Scope::ClustersRead)?;
    Ok(Json(clusters::get(&state, &caller, &id).await?))
}

/// Rename a cluster.
#[utoipa::path(
    patch, path = "/v1/clusters/{id}", tag = "clusters", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    request_body = ClusterName,
    responses((status = 200, body = Cluster), (status = 409, description = "A cluster of this name exists, or it is archived"))
)]
async fn change_cluster(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<ClusterName>,
) -> ApiResult<Json<Cluster>> {
    caller.require(Scope::ClustersWrite)?;
    Ok(Json(clusters::rename(&state, &caller, &id, &request.name).await?))
}

/// Stop placing runs on the cluster; those that are there finish. `drained` says when nothing is left.
#[utoipa::path(
    post, path = "/v1/clusters/{id}/drain", tag = "clusters", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Cluster), (status = 409, description = "It is archived"))
)]
async fn drain_cluster(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<Json<Cluster>> {
    caller.require(Scope::ClustersWrite)?;
    Ok(Json(clusters::drain(&state, &caller, &id, true).await?))
}

/// Place runs on the cluster again.
#[utoipa::path(
    post, path = "/v1/clusters/{id}/resume", tag = "clusters", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Cluster), (status = 409, description = "It is archived"))
)]
async fn resume_cluster(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<Json<Cluster>> {
    caller.require(Scope::ClustersWrite)?;
    Ok(Json(clusters::drain(&state, &caller, &id, false).await?))
}

/// Archive the registration: every credential and token of the cluster is revoked at once, for good.
#[utoipa::path(
    post, path = "/v1/clusters/{id}/archive", tag = "clusters", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Cluster))
)]
async fn archive_cluster(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<Json<Cluster>> {
    caller.require(Scope::ClustersWrite)?;
    Ok(Json(clusters::archive(&state, &caller, &id).await?))
}

//! REST: registered environments.

use axum::extract::State;
use axum::http::StatusCode;
use rlm_api::rest::Page;
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::definitions::{self, DefinitionDetail};
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Path, Query};
use crate::http::registrations::{ListQuery, Register, VersionQuery};
use crate::state::AppState;
use crate::store::definitions::DefinitionKind;

const KIND: DefinitionKind = DefinitionKind::Environment;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(register_environment, list_environments))
        .routes(routes!(get_environment))
        .routes(routes!(describe_environment))
}

/// Register an environment, or its next version. Registering what the newest version says already changes nothing.
#[utoipa::path(
    post, path = "/v1/environments", tag = "environments", security(("bearer" = []), ("session" = [])), request_body = Register,
    responses((status = 201, body = DefinitionDetail), (status = 200, description = "The newest version says so already", body = DefinitionDetail),
        (status = 409, description = "Another version is being registered at this moment"))
)]
async fn register_environment(
    State(state): State<AppState>,
    caller: Caller,
    Json(new): Json<Register, { Register::LIMIT }>,
) -> ApiResult<(StatusCode, Json<DefinitionDetail>)> {
    caller.require(Scope::ModelsWrite)?;
    let (detail, fresh) = definitions::register(&state, &caller, KIND, &new.name, new.definition, new.describe).await?;
    Ok((if fresh { StatusCode::CREATED } else { StatusCode::OK }, Json(detail)))
}

/// Registered environments in order of name, the newest version of each.
#[utoipa::path(
    get, path = "/v1/environments", tag = "environments", params(ListQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Page<DefinitionDetail>))
)]
async fn list_environments(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> ApiResult<Json<Page<DefinitionDetail>>> {
    caller.require(Scope::ModelsRead)?;
    let limit = query.limit()?;
    let (q, after) = (query.q.unwrap_or_default(), query.cursor.unwrap_or_default());
    Ok(Json(definitions::list(&state, &caller, KIND, &q, &after, limit).await?))
}

/// One registered environment with its describe document and its versions.
#[utoipa::path(
    get, path = "/v1/environments/{name}", tag = "environments", params(("name" = String, Path), VersionQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = DefinitionDetail))
)]
async fn get_environment(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Query(query): Query<VersionQuery>,
) -> ApiResult<Json<DefinitionDetail>> {
    caller.require(Scope::ModelsRead)?;
    Ok(Json(definitions::get(&state, &caller, KIND, &name, query.version).await?))
}

/// Store the describe document of a version (the newest, unless given), as `rlmesh describe` prints it.
#[utoipa::path(
    put, path = "/v1/environments/{name}/describe", tag = "environments", params(("name" = String, Path), VersionQuery),
    security(("bearer" = []), ("session" = [])), request_body = Object, responses((status = 200, body = DefinitionDetail))
)]
async fn describe_environment(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Query(query): Query<VersionQuery>,
    Json(document): Json<Value, { Register::LIMIT }>,
) -> ApiResult<Json<DefinitionDetail>> {
    caller.require(Scope::ModelsWrite)?;
    Ok(Json(definitions::describe(&state, &caller, KIND, &name, query.version, document).await?))
}

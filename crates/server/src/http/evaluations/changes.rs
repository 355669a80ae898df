//! REST: what may happen to an evaluation after its submission. Each is a POST that answers with the evaluation as it is
//! then; clones and imports answer like a submission.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use bytes::Bytes;
use rlm_api::rest::{EvaluationCreated, EvaluationSummary};
use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::ClusterId;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{answer, idempotency_key};
use crate::app::access::{Caller, Scope};
use crate::app::evaluations::{self, CloneChanges};
use crate::http::error::{ApiError, ApiResult};
use crate::http::extract::{Json, LARGE_LIMIT, Path, Query, parse_json};
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(cancel_evaluation))
        .routes(routes!(retry_evaluation))
        .routes(routes!(extend_evaluation))
        .routes(routes!(clone_evaluation))
        .routes(routes!(import_evaluation))
}

/// A body without fields; it may be left out.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NoFields {}

fn no_fields(body: &Bytes) -> Result<(), Error> {
    if !body.is_empty() {
        let NoFields {} = parse_json(body)?;
    }
    Ok(())
}

/// Cancel an evaluation. Results that are there stay; cancelling again is fine.
#[utoipa::path(
    post, path = "/v1/evaluations/{id}/cancellations", tag = "evaluations", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), request_body = Option<NoFields>, responses((status = 200, body = EvaluationSummary), (status = 409, description = "It has ended otherwise"))
)]
async fn cancel_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    body: Bytes,
) -> ApiResult<Json<EvaluationSummary>> {
    caller.require(Scope::EvaluationsWrite)?;
    no_fields(&body)?;
    Ok(Json(evaluations::cancel(&state, &caller, &id).await?))
}

/// Run the errored rows of a completed or failed evaluation again, with the same seeds.
#[utoipa::path(
    post, path = "/v1/evaluations/{id}/retries", tag = "evaluations", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), request_body = Option<NoFields>, responses((status = 200, body = EvaluationSummary), (status = 409, description = "It has not ended, was cancelled or imported, or has no errored rows"))
)]
async fn retry_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    body: Bytes,
) -> ApiResult<Json<EvaluationSummary>> {
    caller.require(Scope::EvaluationsWrite)?;
    no_fields(&body)?;
    Ok(Json(evaluations::retry(&state, &caller, &id).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Extension {
    /// Further episodes per model and task.
    episodes: u64,
}

/// Add episodes to each model and task. Existing rows stay as they are; seeds and trials go on where they ended.
#[utoipa::path(
    post, path = "/v1/evaluations/{id}/extensions", tag = "evaluations", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), request_body = Extension, responses((status = 200, body = EvaluationSummary), (status = 409, description = "It was cancelled or imported"))
)]
async fn extend_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(extension): Json<Extension>,
) -> ApiResult<Json<EvaluationSummary>> {
    caller.require(Scope::EvaluationsWrite)?;
    Ok(Json(evaluations::extend(&state, &caller, &id, extension.episodes).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CloneEvaluation {
    /// Left out: the same name.
    name: Option<String>,
    /// Left out: the same cluster; null: any.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    cluster: Option<Option<String>>,
    client_token: Option<String>,
}

/// Tells null from left out.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Launch a new evaluation of the same rows.
#[utoipa::path(
    post, path = "/v1/evaluations/{id}/clones", tag = "evaluations",
    params(("id" = String, Path), ("Idempotency-Key" = Option<String>, Header, description = "The client token, where the body has none")),
    security(("bearer" = []), ("session" = [])), request_body = CloneEvaluation,
    responses(
        (status = 201, body = EvaluationCreated),
        (status = 200, description = "It was made before", body = EvaluationCreated),
        (status = 409, description = "It was imported")
    )
)]
async fn clone_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(request): Json<CloneEvaluation>,
) -> ApiResult<(StatusCode, Json<EvaluationCreated>)> {
    caller.require(Scope::EvaluationsWrite)?;
    let cluster = match request.cluster {
        None => None,
        Some(None) => Some(None),
        Some(Some(text)) => {
            let parsed: ClusterId = text.parse().map_err(|error| Error::invalid(vec![Problem::new("cluster", format!("{error}"))]))?;
            Some(Some(parsed))
        }
    };
    let client_token = request.client_token.or(idempotency_key(&headers)?);
    if client_token.as_ref().is_some_and(|token| token.is_empty() || token.len() > 200) {
        return Err(Error::invalid(vec![Problem::new("clientToken", "must have 1 to 200 characters")]).into());
    }
    if let Some(name) = &request.name
        && (name.trim().is_empty() || name.chars().count() > 200 || name.chars().any(char::is_control))
    {
        return Err(Error::invalid(vec![Problem::new("name", "must have 1 to 200 characters, none of them a control character")]).into());
    }
    let created = evaluations::clone(&state, &caller, &id, CloneChanges { name: request.name, cluster, client_token }).await?;
    Ok(answer(created))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// Name of the evaluation; left out: one made of the result set's id.
    name: Option<String>,
}

/// Import an SDK result file (`rlmesh.result.v1`) as a completed evaluation. Importing it again answers with the same one.
#[utoipa::path(
    post, path = "/v1/evaluations/imports", tag = "evaluations", params(ImportQuery), security(("bearer" = []), ("session" = [])),
    request_body = Object,
    responses(
        (status = 201, body = EvaluationCreated),
        (status = 200, description = "It was imported before", body = EvaluationCreated),
        (status = 409, description = "The same file is being imported at this moment")
    )
)]
async fn import_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<ImportQuery>,
    Json(file): Json<Value, { 8 * LARGE_LIMIT }>,
) -> ApiResult<(StatusCode, Json<EvaluationCreated>)> {
    caller.require(Scope::EvaluationsWrite)?;
    if query.name.as_ref().is_some_and(|name| name.trim().is_empty() || name.chars().count() > 200 || name.chars().any(char::is_control)) {
        return Err(ApiError::new(
            Code::BadRequest,
            "the parameter 'name' must have 1 to 200 characters, none of them a control character",
        ));
    }
    Ok(answer(evaluations::import(&state, &caller, query.name, file).await?))
}

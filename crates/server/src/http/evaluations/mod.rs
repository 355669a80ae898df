//! REST: evaluations. Submitting, listing, reading, changing; rows and scores are in `results`, streams in `live`.

mod changes;
mod live;
mod results;

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use rlm_api::rest::{EvaluationCreated, EvaluationDetail, EvaluationSummary, Page};
use rlm_core::error::Code;
use rlm_core::evaluation::EvaluationSpec;
use rlm_core::ids::EvaluationId;
use rlm_core::request::{Estimates, Workload};
use rlm_core::run::EvaluationStatus;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::evaluations;
use crate::http::error::{ApiError, ApiResult};
use crate::http::extract::{Json, LARGE_LIMIT, Path, Query};
use crate::http::page::PageQuery;
use crate::state::AppState;
use crate::store::evaluations::EvaluationFilter;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(preview_evaluation))
        .routes(routes!(create_evaluation, list_evaluations))
        .routes(routes!(get_evaluation, change_evaluation, delete_evaluation))
        .merge(changes::router())
        .merge(results::router())
        .merge(live::router())
}

/// The longest that a request may wait for a change.
pub(super) const LONGEST_WAIT: u64 = 60;

/// What a request would run. Nothing was stored.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PreviewAnswer {
    /// One per model and task that meet.
    #[schema(value_type = Vec<Object>)]
    pub workloads: Vec<Workload>,
    #[schema(value_type = Object)]
    pub estimates: Estimates,
    pub rows: u64,
    /// The checked request with every default.
    #[schema(value_type = Object)]
    pub effective: EvaluationSpec,
    pub warnings: Vec<String>,
}

/// Check and size a request without launching it.
#[utoipa::path(
    post, path = "/v1/evaluation-previews", tag = "evaluations", security(("bearer" = []), ("session" = [])),
    request_body = Object, responses((status = 200, body = PreviewAnswer))
)]
async fn preview_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Json(request): Json<Value, LARGE_LIMIT>,
) -> ApiResult<Json<PreviewAnswer>> {
    caller.require(Scope::EvaluationsRead)?;
    let (preview, effective, warnings) = evaluations::preview(&state, &caller, &request).await?;
    Ok(Json(PreviewAnswer { workloads: preview.workloads, estimates: preview.estimates, rows: preview.rows, effective, warnings }))
}

/// Launch an evaluation. Sending a request again with the same client token (in the body or as `Idempotency-Key`) answers
/// with the same evaluation.
#[utoipa::path(
    post, path = "/v1/evaluations", tag = "evaluations", security(("bearer" = []), ("session" = [])),
    params(("Idempotency-Key" = Option<String>, Header, description = "The client token, where the body has none")),
    request_body = Object,
    responses(
        (status = 201, body = EvaluationCreated),
        (status = 200, description = "It was made before", body = EvaluationCreated),
        (status = 409, description = "The same request is being handled at this moment")
    )
)]
async fn create_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Json(request): Json<Value, LARGE_LIMIT>,
) -> ApiResult<(StatusCode, Json<EvaluationCreated>)> {
    caller.require(Scope::EvaluationsWrite)?;
    let created = evaluations::create(&state, &caller, request, idempotency_key(&headers)?).await?;
    Ok(answer(created))
}

pub(super) fn answer(created: evaluations::Created) -> (StatusCode, Json<EvaluationCreated>) {
    (if created.fresh { StatusCode::CREATED } else { StatusCode::OK }, Json(created.answer))
}

pub(super) fn idempotency_key(headers: &HeaderMap) -> ApiResult<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let text = value.to_str().map_err(|_| ApiError::new(Code::BadRequest, "the header Idempotency-Key must be plain text"))?;
    Ok(Some(text.trim().to_owned()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// `queued`, `running`, `cancelling`, `completed`, `failed`, `cancelled`.
    status: Option<String>,
    /// Part of the name.
    q: Option<String>,
    /// `key:value`; given more than once, an evaluation must have all of them.
    #[serde(default)]
    tag: Vec<String>,
    /// Most items on the page, 1 to 200 (50 unless given).
    limit: Option<u32>,
    /// `nextCursor` of the page before.
    cursor: Option<String>,
}

/// Evaluations, newest first.
#[utoipa::path(
    get, path = "/v1/evaluations", tag = "evaluations", params(ListQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Page<EvaluationSummary>))
)]
async fn list_evaluations(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> ApiResult<Json<Page<EvaluationSummary>>> {
    caller.require(Scope::EvaluationsRead)?;
    let page = PageQuery { limit: query.limit, cursor: query.cursor };
    let status = match query.status.as_deref() {
        None | Some("") => None,
        Some(text) => Some(EvaluationStatus::parse(text).ok_or_else(|| {
            let known: Vec<&str> = EvaluationStatus::ALL.into_iter().map(EvaluationStatus::as_str).collect();
            ApiError::new(Code::BadRequest, format!("the parameter 'status' must be one of {}", known.join(", ")))
        })?),
    };
    let tags = query
        .tag
        .iter()
        .map(|tag| tag.split_once(':').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| ApiError::new(Code::BadRequest, "the parameter 'tag' must be key:value"))?;
    if tags.len() > 20 {
        return Err(ApiError::new(Code::BadRequest, "the parameter 'tag' may be given 20 times at most"));
    }
    let filter =
        EvaluationFilter { status, q: query.q.unwrap_or_default(), tags, before: page.cursor::<EvaluationId>()?, limit: page.limit()? };
    Ok(Json(evaluations::list(&state, &caller, &filter).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct GetQuery {
    /// Seconds, at most 60: answer when the status changes or the evaluation has ended, after this time at the latest.
    wait: Option<u64>,
}

/// One evaluation: status, progress, request, effective configuration, runs.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}", tag = "evaluations", params(("id" = String, Path), GetQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = EvaluationDetail))
)]
async fn get_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<GetQuery>,
) -> ApiResult<Json<EvaluationDetail>> {
    caller.require(Scope::EvaluationsRead)?;
    match query.wait.unwrap_or(0) {
        0 => Ok(Json(evaluations::detail(&state, &caller, &id).await?)),
        seconds @ 1..=LONGEST_WAIT => Ok(Json(evaluations::wait(&state, &caller, &id, Duration::from_secs(seconds)).await?)),
        _ => Err(ApiError::new(Code::BadRequest, format!("the parameter 'wait' is a number of seconds up to {LONGEST_WAIT}"))),
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ChangeEvaluation {
    name: Option<String>,
    /// Replaces all tags.
    tags: Option<BTreeMap<String, String>>,
}

/// Rename an evaluation, or replace its tags.
#[utoipa::path(
    patch, path = "/v1/evaluations/{id}", tag = "evaluations", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    request_body = ChangeEvaluation, responses((status = 200, body = EvaluationSummary))
)]
async fn change_evaluation(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(change): Json<ChangeEvaluation>,
) -> ApiResult<Json<EvaluationSummary>> {
    caller.require(Scope::EvaluationsWrite)?;
    Ok(Json(evaluations::change(&state, &caller, &id, change.name, change.tags).await?))
}

/// Delete an evaluation that has ended. Its data is removed after a week.
#[utoipa::path(
    delete, path = "/v1/evaluations/{id}", tag = "evaluations", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 204), (status = 409, description = "It has not ended"))
)]
async fn delete_evaluation(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<StatusCode> {
    caller.require(Scope::EvaluationsWrite)?;
    evaluations::delete(&state, &caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

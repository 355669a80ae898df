//! REST: what came of an evaluation: scores, timings, rows, exports.

use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use rlm_api::rest::{Page, RowOutcome, RowResult, Scores};
use rlm_core::error::Code;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::evaluations::{self, Format, Metrics, Reproduction, RowDetail, RowQuery};
use crate::app::scores::{self, GroupBy};
use crate::http::error::{ApiError, ApiResult};
use crate::http::extract::{Json, Path, Query};
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(get_scores))
        .routes(routes!(get_metrics))
        .routes(routes!(list_rows))
        .routes(routes!(get_row))
        .routes(routes!(get_reproduction))
        .routes(routes!(export_rows))
}

/// Most rows on a page.
const MOST_ROWS: u32 = 1_000;
const DEFAULT_ROWS: u32 = 100;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ScoresQuery {
    /// `task` (unless given), `scenario`, `benchmark`, `perturbation`, `model`.
    group_by: Option<GroupBy>,
}

/// Scores by group, with intervals, and paired comparisons of the models.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/scores", tag = "evaluations", params(("id" = String, Path), ScoresQuery),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Scores))
)]
async fn get_scores(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<ScoresQuery>,
) -> ApiResult<Response> {
    caller.require(Scope::EvaluationsRead)?;
    let scores = scores::scores(&state, &caller, &id, query.group_by.unwrap_or(GroupBy::Task)).await?;
    Ok(axum::Json(&*scores).into_response())
}

/// Throughput and timings over every run.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/metrics", tag = "evaluations", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Metrics))
)]
async fn get_metrics(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<Json<Metrics>> {
    caller.require(Scope::EvaluationsRead)?;
    Ok(Json(evaluations::metrics(&state, &caller, &id).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RowsQuery {
    /// `pending`, `scored` or `errored` alone.
    #[param(value_type = Option<String>)]
    outcome: Option<RowOutcome>,
    /// Rows of this model alone.
    model: Option<String>,
    /// Rows of this task alone: its `taskId`, or `env:taskId`.
    task: Option<String>,
    /// Most rows on the page, 1 to 1000 (100 unless given).
    limit: Option<u32>,
    /// `nextCursor` of the page before, or the number of the row to begin with.
    cursor: Option<u64>,
}

/// Rows with their outcomes, in order of row number.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/rows", tag = "evaluations", params(("id" = String, Path), RowsQuery),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Page<RowResult>))
)]
async fn list_rows(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<RowsQuery>,
) -> ApiResult<Json<Page<RowResult>>> {
    caller.require(Scope::EvaluationsRead)?;
    let limit = query.limit.unwrap_or(DEFAULT_ROWS);
    if !(1..=MOST_ROWS).contains(&limit) {
        return Err(ApiError::new(Code::BadRequest, format!("the parameter 'limit' must be from 1 to {MOST_ROWS}")));
    }
    let query = RowQuery { outcome: query.outcome, model: query.model, task: query.task, from: query.cursor.unwrap_or(0), limit };
    Ok(Json(evaluations::rows_page(&state, &caller, &id, &query).await?))
}

/// One row with all its attempts.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/rows/{row}", tag = "evaluations", params(("id" = String, Path), ("row" = u64, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = RowDetail))
)]
async fn get_row(State(state): State<AppState>, caller: Caller, Path((id, row)): Path<(String, u64)>) -> ApiResult<Json<RowDetail>> {
    caller.require(Scope::EvaluationsRead)?;
    Ok(Json(evaluations::row_detail(&state, &caller, &id, row).await?))
}

/// A command that runs this row on a workstation.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/rows/{row}/reproduction", tag = "evaluations", params(("id" = String, Path), ("row" = u64, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Reproduction), (status = 409, description = "Its model or environment is known by name only"))
)]
async fn get_reproduction(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, row)): Path<(String, u64)>,
) -> ApiResult<Json<Reproduction>> {
    caller.require(Scope::EvaluationsRead)?;
    Ok(Json(evaluations::reproduction(&state, &caller, &id, row).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ExportQuery {
    /// `jsonl` (unless given), `csv`: rows without times and attempts; `result`: the SDK's `rlmesh.result.v1`.
    #[param(value_type = Option<String>)]
    format: Option<Format>,
}

/// All rows as one file, in order of row number.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/export", tag = "evaluations", params(("id" = String, Path), ExportQuery),
    security(("bearer" = []), ("session" = [])),
    responses((status = 200, description = "The file", content((String = "application/x-ndjson"), (String = "text/csv"), (Object = "application/json"))))
)]
async fn export_rows(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<ExportQuery>,
) -> ApiResult<Response> {
    caller.require(Scope::EvaluationsRead)?;
    let format = query.format.unwrap_or(Format::Jsonl);
    let exporter = evaluations::export(&state, &caller, &id, format).await?;
    // A failure on the way breaks the answer off, so that no client takes a part for the whole.
    let parts = futures::stream::try_unfold(exporter, |mut exporter| async move {
        let part = exporter.next().await.map_err(|error| std::io::Error::other(error.message))?;
        Ok::<_, std::io::Error>(part.map(|part| (part, exporter)))
    });
    let disposition = format!("attachment; filename=\"{id}.{}\"", format.extension());
    let headers = [(header::CONTENT_TYPE, format.content_type().to_owned()), (header::CONTENT_DISPOSITION, disposition)];
    Ok((headers, Body::from_stream(parts)).into_response())
}

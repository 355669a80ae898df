//! REST: what happens now: changes of an evaluation as server-sent events, logs of its runs.

use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use rlm_core::ids::{EvaluationId, RunId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::evaluations;
use crate::app::events::Listener;
use crate::app::identity::authenticate;
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Path, Query};
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(stream_events)).routes(routes!(get_logs))
}

/// Between two events of one stream at least; what changes meanwhile comes as one.
const BETWEEN: Duration = Duration::from_millis(250);
/// Without a change the state is read anew this often: what it waits for also follows from clusters.
const REREAD: Duration = Duration::from_secs(5);

struct Stream {
    state: AppState,
    caller: Caller,
    id: String,
    evaluation: EvaluationId,
    listener: Listener,
    /// Id of the last event that the client has.
    seen: Option<String>,
    ended: bool,
}

impl Stream {
    /// The next event; None at the end.
    async fn next(mut self) -> Option<(Result<Event, std::convert::Infallible>, Self)> {
        while !self.ended {
            // At each turn, so at least every few seconds: a stream does not outlive what it was opened with.
            if !authenticate::still_stands(&self.state, &self.caller).await.ok()? {
                return None;
            }
            let head = evaluations::find(&self.state, &self.caller, &self.id).await.ok()?;
            let summary = evaluations::summary(&self.state, &head).await.ok()?;
            let text = serde_json::to_string(&summary).ok()?;
            let version: String = hex::encode(Sha256::digest(&text)).chars().take(16).collect();
            self.ended = summary.status.is_terminal();
            if self.seen.as_ref() != Some(&version) {
                self.seen = Some(version.clone());
                return Some((Ok(Event::default().id(version).event("evaluation").data(text)), self));
            }
            if self.ended {
                return None;
            }
            self.listener.changed(self.evaluation, Instant::now() + REREAD).await;
            tokio::time::sleep(BETWEEN).await;
        }
        None
    }
}

/// Changes of an evaluation as server-sent events: its summary now, and whenever it changes, until it has ended. With
/// `Last-Event-ID` the first event comes when something differs from that one.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/events", tag = "evaluations",
    params(("id" = String, Path), ("Last-Event-ID" = Option<String>, Header, description = "Id of the last event that the client has")),
    security(("bearer" = []), ("session" = [])),
    responses((status = 200, description = "Events named `evaluation`; data: an evaluation's summary", content_type = "text/event-stream", body = String))
)]
async fn stream_events(State(state): State<AppState>, caller: Caller, Path(id): Path<String>, headers: HeaderMap) -> ApiResult<Response> {
    caller.require(Scope::EvaluationsRead)?;
    let listener = state.events.subscribe();
    let evaluation = evaluations::find(&state, &caller, &id).await?.id;
    let seen = headers.get("last-event-id").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let stream = Stream { state, caller, id, evaluation, listener, seen, ended: false };
    let events = futures::stream::unfold(stream, Stream::next);
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogsQuery {
    /// Left out: the run that a cluster took last.
    #[param(value_type = Option<String>)]
    run: Option<RunId>,
    /// `model-0`, `env-0-1`, `runner`; left out: all.
    component: Option<String>,
    /// Last lines of each component, at most 10000 (200 unless given).
    tail_lines: Option<u32>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Logs {
    pub run: String,
    pub cluster: String,
    pub files: Vec<LogFile>,
}

/// The end of what one component wrote.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LogFile {
    pub component: String,
    pub attempt: u32,
    pub text: String,
    /// There is more before it.
    pub truncated: bool,
}

/// The end of a run's logs, as the cluster that holds it has them now.
#[utoipa::path(
    get, path = "/v1/evaluations/{id}/logs", tag = "evaluations", params(("id" = String, Path), LogsQuery),
    security(("bearer" = []), ("session" = [])),
    responses(
        (status = 200, body = Logs),
        (status = 409, description = "No cluster has taken a run yet"),
        (status = 503, description = "The cluster is not connected"),
        (status = 504, description = "The cluster did not answer in time")
    )
)]
async fn get_logs(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<LogsQuery>,
) -> ApiResult<Json<Logs>> {
    caller.require(Scope::EvaluationsRead)?;
    let tail = query.tail_lines.unwrap_or(200);
    let (run, cluster, files) = evaluations::logs(&state, &caller, &id, query.run, query.component.as_deref().unwrap_or(""), tail).await?;
    let files = files
        .into_iter()
        .map(|file| LogFile { component: file.component, attempt: file.attempt, text: file.text, truncated: file.truncated })
        .collect();
    Ok(Json(Logs { run: run.to_string(), cluster: cluster.to_string(), files }))
}

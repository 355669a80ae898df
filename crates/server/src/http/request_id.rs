//! A request's id: made here for every request, in each log line of it, in the answer's `x-request-id` and in error bodies.
//! A client's own id is not taken over: it would let a caller write into the log.

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;
use uuid::Uuid;

tokio::task_local! {
    static REQUEST_ID: String;
}

const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// The id of the request that the current task answers; empty outside one.
#[must_use]
pub fn current() -> String {
    REQUEST_ID.try_with(Clone::clone).unwrap_or_default()
}

/// Middleware: gives the request its id and its span, and logs how it went. Neither query nor headers are logged: they may
/// hold secrets.
pub async fn layer(request: Request, next: Next) -> Response {
    let id = format!("req_{}", Uuid::now_v7().simple());
    let span = tracing::info_span!("request", id, method = %request.method(), path = request.uri().path());
    let started = std::time::Instant::now();
    let future = async move {
        let response = next.run(request).await;
        let status = response.status().as_u16();
        let milliseconds = started.elapsed().as_millis() as u64;
        if status >= 500 {
            tracing::warn!(status, milliseconds, "answered");
        } else {
            tracing::debug!(status, milliseconds, "answered");
        }
        response
    };
    let mut response = REQUEST_ID.scope(id.clone(), future.instrument(span)).await;
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

//! REST and pages over the use cases in `app`. Handlers read a request, call one use case, and shape its answer.
//!
//! Each noun is a module with a `router()`; its handlers carry `#[utoipa::path]`, so a route that is not in the OpenAPI
//! document can't be added.

pub mod audit;
pub mod auth;
pub mod clusters;
pub mod environments;
pub mod error;
pub mod evaluations;
pub mod extract;
pub mod info;
pub mod keys;
pub mod me;
pub mod models;
pub mod oauth;
pub mod openapi;
pub mod organizations;
pub mod origin;
pub mod page;
pub mod pages;
pub mod query;
pub mod registrations;
pub mod registry;
pub mod request_id;
pub mod serve;
pub mod time;

use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use tower::ServiceExt as _;
use utoipa_axum::router::OpenApiRouter;

use crate::grpc;
use crate::http::error::ApiError;
use crate::state::AppState;

/// Every REST route, and the document that describes them.
pub fn api() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(openapi::base())
        .merge(info::router())
        .merge(oauth::router())
        .merge(me::router())
        .merge(organizations::router())
        .merge(keys::router())
        .merge(audit::router())
        .merge(registry::router())
        .merge(models::router())
        .merge(environments::router())
        .merge(evaluations::router())
        .merge(clusters::router())
        .merge(openapi::router())
}

/// Everything that the one port serves: REST, pages, gRPC.
pub fn app(state: AppState) -> axum::Router {
    let (rest, document) = api().split_for_parts();
    let declared = openapi::Declared::new(&document);
    let grpc = grpc::routes(state.clone());
    rest.route_layer(from_fn_with_state(std::sync::Arc::new(declared), openapi::refuse_undeclared_parameters))
        .merge(pages::router())
        .fallback(nothing_here)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(grpc, split_grpc))
        .layer(from_fn_with_state(state.clone(), origin::layer))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(panicked))
        .layer(from_fn(request_id::layer))
        .with_state(state)
}

/// gRPC calls go to the cell protocol, all others go on.
async fn split_grpc(State(grpc): State<axum::Router>, request: Request, next: Next) -> Response {
    let is_grpc = request.headers().get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    if !is_grpc {
        return next.run(request).await;
    }
    match grpc.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

async fn nothing_here(request: Request) -> ApiError {
    extract::not_found(request.uri().path())
}

async fn method_not_allowed(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::new(rlm_core::error::Code::MethodNotAllowed, format!("{} is not possible at {path}", request.method()))
}

fn panicked(cause: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let text = cause.downcast_ref::<String>().map(String::as_str).or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("unknown");
    tracing::error!(panic = text, "a handler panicked");
    ApiError::new(rlm_core::error::Code::Internal, "the server failed on this request; its log says why under this request's id")
        .into_response()
}

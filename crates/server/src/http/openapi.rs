//! The OpenAPI document: made from the handlers, served, and enforced for query parameters.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rlm_api::rest::{ErrorBody, ErrorDetail};
use rlm_core::error::Code;
use utoipa::PartialSchema as _;
use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, Content, InfoBuilder, License, OpenApi, OpenApiBuilder, Ref, RefOr, ResponseBuilder};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::error::ApiError;
use crate::state::AppState;

/// The parts of the document that are no routes.
#[must_use]
pub fn base() -> OpenApi {
    OpenApiBuilder::new()
        .info(
            InfoBuilder::new()
                .title("RLMesh")
                .version(env!("CARGO_PKG_VERSION"))
                .description(Some(
                    "Evaluate policies in environments. Errors are `{error: {code, message, details, requestId}}`; times are \
                     RFC 3339 in UTC; lists are pages `{items, nextCursor}`.",
                ))
                .license(Some(License::new("Apache-2.0")))
                .build(),
        )
        .components(Some(
            ComponentsBuilder::new()
                .security_scheme("bearer", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)))
                .security_scheme("session", SecurityScheme::ApiKey(ApiKey::Cookie(ApiKeyValue::new(crate::http::auth::SESSION_COOKIE))))
                .build(),
        ))
        .build()
}

/// The whole document.
#[must_use]
pub fn document() -> OpenApi {
    complete(super::api().into_openapi())
}

/// Adds to each operation the errors that its kind can give, so that handlers list only what is special about them.
fn complete(mut document: OpenApi) -> OpenApi {
    let components = document.components.get_or_insert_default();
    components.schemas.insert("ErrorBody".to_owned(), ErrorBody::schema());
    components.schemas.insert("ErrorDetail".to_owned(), ErrorDetail::schema());
    for item in document.paths.paths.values_mut() {
        let reads = [(&mut item.get, false)];
        let changes = [&mut item.put, &mut item.post, &mut item.delete, &mut item.patch].map(|operation| (operation, true));
        for (operation, changes) in reads.into_iter().chain(changes) {
            let Some(operation) = operation else { continue };
            for (status, meaning) in possible_errors(operation, changes) {
                operation.responses.responses.entry(status.to_owned()).or_insert_with(|| {
                    RefOr::T(ResponseBuilder::new().description(meaning).content("application/json", error_content()).build())
                });
            }
            for (status, response) in &mut operation.responses.responses {
                if let RefOr::T(response) = response
                    && status.starts_with(['4', '5'])
                    && response.content.is_empty()
                {
                    response.content.insert("application/json".to_owned(), RefOr::T(error_content()));
                }
            }
        }
    }
    document
}

fn error_content() -> Content {
    Content::new(Some(Ref::from_schema_name("ErrorBody")))
}

fn possible_errors(operation: &Operation, changes: bool) -> Vec<(&'static str, &'static str)> {
    let mut errors = vec![
        ("400", "the request can't be read, or names an unknown parameter"),
        ("403", "a page of another origin asks, or the caller lacks the scope"),
        ("500", "the server failed"),
        ("503", "try again after the time in Retry-After"),
    ];
    if operation.security.as_ref().is_some_and(|security| !security.is_empty()) {
        errors.push(("401", "not signed in, or the credential is malformed, unknown, expired or revoked"));
        if changes {
            errors.push(("409", "the thing is in a state that does not allow this, or one of this name exists"));
        }
    }
    let mut parameters = operation.parameters.iter().flatten();
    if parameters.any(|parameter| matches!(parameter, RefOr::T(parameter) if parameter.parameter_in == ParameterIn::Path)) {
        errors.push(("404", "there is no such thing, or none that the caller may see"));
    }
    let json = operation.request_body.as_ref().is_some_and(|body| match body {
        RefOr::T(body) => body.content.contains_key("application/json"),
        RefOr::Ref(_) => true,
    });
    if json {
        errors.push(("413", "the body is too large"));
        errors.push(("422", "fields of the request are wrong; details names each"));
    }
    errors
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_json().unwrap_or_default());

/// This API's OpenAPI document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "platform", responses((status = 200, description = "OpenAPI 3.1 document", content_type = "application/json")))]
async fn get_openapi() -> Response {
    ([(axum::http::header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str()).into_response()
}

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_openapi))
}

/// The query parameters that each operation declares.
#[derive(Debug, Default)]
pub struct Declared(HashMap<(String, String), HashSet<String>>);

impl Declared {
    #[must_use]
    pub fn new(document: &OpenApi) -> Self {
        let mut declared = HashMap::new();
        for (path, item) in &document.paths.paths {
            for (method, operation) in operations(item) {
                let names = operation
                    .parameters
                    .iter()
                    .flatten()
                    .filter_map(|parameter| match parameter {
                        RefOr::T(parameter) if parameter.parameter_in == ParameterIn::Query => Some(parameter.name.clone()),
                        RefOr::T(_) | RefOr::Ref(_) => None,
                    })
                    .collect();
                declared.insert((method.to_owned(), path.clone()), names);
            }
        }
        Self(declared)
    }

    fn unknown(&self, method: &str, path: &str, query: &str) -> Option<(String, Vec<String>)> {
        // HEAD is answered by GET's handler.
        let method = if method == "HEAD" { "GET" } else { method };
        let names = self.0.get(&(method.to_owned(), path.to_owned()))?;
        let (unknown, _) = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| !names.contains(name.as_ref()))?;
        let mut known: Vec<String> = names.iter().cloned().collect();
        known.sort();
        Some((unknown.chars().take(60).collect(), known))
    }
}

/// Each operation of a path with its method.
pub fn operations(item: &utoipa::openapi::PathItem) -> impl Iterator<Item = (&'static str, &Operation)> {
    [("GET", &item.get), ("PUT", &item.put), ("POST", &item.post), ("DELETE", &item.delete), ("PATCH", &item.patch)]
        .into_iter()
        .filter_map(|(method, operation)| operation.as_ref().map(|operation| (method, operation)))
}

/// Middleware: a query parameter that the document does not name is an error, never ignored.
pub async fn refuse_undeclared_parameters(
    State(declared): State<Arc<Declared>>,
    path: MatchedPath,
    request: Request,
    next: Next,
) -> Response {
    if let Some(query) = request.uri().query()
        && let Some((unknown, known)) = declared.unknown(request.method().as_str(), path.as_str(), query)
    {
        let known = if known.is_empty() { "there are none".to_owned() } else { format!("known: {}", known.join(", ")) };
        return ApiError::new(Code::BadRequest, format!("there is no parameter '{unknown}' here; {known}")).into_response();
    }
    next.run(request).await
}

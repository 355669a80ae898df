//! REST: join tokens, the join itself, and credentials. Answers that hold a secret are never cached.

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rlm_api::rest::{
    CredentialRotated, CredentialSummary, JoinRequest, JoinTokenCreated, JoinTokenSummary, Joined, JoinedCredential, Page,
};
use rlm_core::error::{Error, Problem};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::clusters::{self, credentials, join};
use crate::http::auth::RemoteAddress;
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Path};
use crate::http::time::rfc3339;
use crate::state::AppState;
use crate::store::clusters::Versions;
use crate::store::join_tokens::{CredentialRow, JoinToken, Purpose};

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list_join_tokens, create_join_token))
        .routes(routes!(revoke_join_token))
        .routes(routes!(join_cluster))
        .routes(routes!(list_credentials))
        .routes(routes!(rotate_credential))
}

fn secret_answer(status: StatusCode, body: impl Serialize) -> Response {
    let mut response = (status, axum::Json(body)).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn token_summary(token: JoinToken, now_ms: i64) -> JoinTokenSummary {
    let status = if token.revoked_at.is_some() {
        "revoked"
    } else if token.used_at.is_some() {
        "used"
    } else if token.superseded_at.is_some() {
        "superseded"
    } else if now_ms >= token.expires_at {
        "expired"
    } else {
        "unused"
    };
    JoinTokenSummary {
        id: token.id.to_string(),
        status: status.to_owned(),
        created_at: rfc3339(token.created_at),
        created_by: token.created_by,
        expires_at: rfc3339(token.expires_at),
        used_at: token.used_at.map(rfc3339),
    }
}

fn credential_summary(credential: &CredentialRow, now_ms: i64) -> CredentialSummary {
    let status = match (credential.revoked_at, credential.retires_at) {
        (Some(_), _) => "revoked",
        (None, None) => "active",
        (None, Some(until)) if now_ms < until => "retiring",
        (None, Some(_)) => "retired",
    };
    CredentialSummary {
        id: credential.id.to_string(),
        purpose: credential.purpose.as_str().to_owned(),
        status: status.to_owned(),
        created_at: rfc3339(credential.created_at),
        retires_at: credential.retires_at.map(rfc3339),
        revoked_at: credential.revoked_at.map(rfc3339),
        last_used_at: credential.last_used_at.map(rfc3339),
    }
}

/// The cluster's join tokens, newest first, without their values; at most 100.
#[utoipa::path(
    get, path = "/v1/clusters/{id}/join-tokens", tag = "clusters", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Page<JoinTokenSummary>))
)]
async fn list_join_tokens(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> ApiResult<Json<Page<JoinTokenSummary>>> {
    caller.require(Scope::ClustersRead)?;
    let now_ms = state.clock.now_ms();
    let tokens = clusters::join_tokens(&state, &caller, &id).await?;
    Ok(Json(Page { items: tokens.into_iter().map(|token| token_summary(token, now_ms)).collect(), next_cursor: None }))
}

/// Issue a new install command. Its token is shown this once, works once, for an hour, and supersedes unused older ones.
#[utoipa::path(
    post, path = "/v1/clusters/{id}/join-tokens", tag = "clusters", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), 
    responses((status = 201, body = JoinTokenCreated), (status = 409, description = "The cluster is archived"))
)]
async fn create_join_token(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> ApiResult<Response> {
    caller.require(Scope::ClustersWrite)?;
    let created = clusters::issue_join_token(&state, &caller, &id).await?;
    Ok(secret_answer(StatusCode::CREATED, created))
}

/// Revoke a join token. Credentials that it was exchanged for stay valid.
#[utoipa::path(
    delete, path = "/v1/clusters/{id}/join-tokens/{token}", tag = "clusters", params(("id" = String, Path), ("token" = String, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 204))
)]
async fn revoke_join_token(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, token)): Path<(String, String)>,
) -> ApiResult<StatusCode> {
    caller.require(Scope::ClustersWrite)?;
    clusters::revoke_join_token(&state, &caller, &id, &token).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Exchange a join token (as bearer) for the cluster's own credentials. The same nonce may ask again until the token expires.
#[utoipa::path(
    post, path = "/v1/clusters/join", tag = "clusters", request_body = JoinRequest,
    responses(
        (status = 200, body = Joined),
        (status = 401, description = "The token is unknown, expired or revoked"),
        (status = 403, description = "The cluster is archived"),
        (status = 409, description = "The token was used by another agent, superseded, or is of another cluster"),
        (status = 429, description = "Too many joins from this address")
    )
)]
async fn join_cluster(
    State(state): State<AppState>,
    RemoteAddress(remote): RemoteAddress,
    headers: HeaderMap,
    Json(request): Json<JoinRequest>,
) -> ApiResult<Response> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    let asked = join::Request {
        nonce: request.nonce,
        kube_system_uid: request.kube_system_uid,
        versions: Versions { agent: request.versions.agent, chart: request.versions.chart, kubernetes: request.versions.kubernetes },
        purposes: request.purposes,
    };
    let joined = join::join(&state, bearer, &asked, &remote).await?;
    let credentials =
        joined.credentials.into_iter().map(|one| JoinedCredential { purpose: one.purpose, id: one.id, secret: one.secret }).collect();
    let body = Joined { cluster_id: joined.cluster_id, credentials, docker_config_json: joined.docker_config_json };
    Ok(secret_answer(StatusCode::OK, body))
}

/// The cluster's credentials, newest first, without their values; at most 100.
#[utoipa::path(
    get, path = "/v1/clusters/{id}/credentials", tag = "clusters", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Page<CredentialSummary>))
)]
async fn list_credentials(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> ApiResult<Json<Page<CredentialSummary>>> {
    caller.require(Scope::ClustersRead)?;
    let now_ms = state.clock.now_ms();
    let all = credentials::list(&state, &caller, &id).await?;
    Ok(Json(Page { items: all.iter().map(|one| credential_summary(one, now_ms)).collect(), next_cursor: None }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RotateRequest {
    /// `control`, `pull` or `relay`.
    purpose: String,
}

/// Replace the credential of one purpose. The new value is shown this once; the old one works for another 24 hours.
#[utoipa::path(
    post, path = "/v1/clusters/{id}/credentials/rotate", tag = "clusters", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), request_body = RotateRequest, 
    responses((status = 201, body = CredentialRotated), (status = 409, description = "The overlap of the last rotation runs, there is nothing to rotate, or it is archived"))
)]
async fn rotate_credential(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<RotateRequest>,
) -> ApiResult<Response> {
    caller.require(Scope::ClustersWrite)?;
    let purpose =
        Purpose::parse(&request.purpose).ok_or_else(|| Error::invalid(vec![Problem::new("purpose", "must be control, pull or relay")]))?;
    let rotated = credentials::rotate(&state, &caller, &id, purpose).await?;
    let body = CredentialRotated {
        credential: credential_summary(&rotated.credential, state.clock.now_ms()),
        secret: rotated.secret.expose().to_owned(),
        overlap_ends_at: rfc3339(rotated.overlap_ends),
        delivered: rotated.delivered,
    };
    Ok(secret_answer(StatusCode::CREATED, body))
}

//! API keys.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use rlm_api::rest::Page;
use rlm_core::ids::KeyId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Scope};
use crate::app::identity::api_keys::{self, NewKey};
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Path, Query};
use crate::http::page::{PageQuery, page};
use crate::http::time::rfc3339;
use crate::state::AppState;
use crate::store::keys::ApiKey;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_keys, create_key)).routes(routes!(get_key, revoke_key))
}

/// An API key, without its secret.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Key {
    pub id: String,
    pub name: String,
    pub user_id: String,
    pub organization_id: String,
    #[schema(value_type = Vec<String>)]
    pub scopes: Vec<Scope>,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    /// To the minute.
    pub last_used_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
}

impl From<ApiKey> for Key {
    fn from(key: ApiKey) -> Self {
        Self {
            id: key.id.to_string(),
            name: key.name,
            user_id: key.user_id.to_string(),
            organization_id: key.organization_id.to_string(),
            scopes: key.scopes.to_vec(),
            created_at: rfc3339(key.created_at),
            expires_at: key.expires_at.map(rfc3339),
            last_used_at: key.last_used_at.map(rfc3339),
            revoked_at: key.revoked_at.map(rfc3339),
        }
    }
}

/// A new key: the only answer that holds its secret.
#[derive(Serialize, ToSchema)]
pub struct KeyCreated {
    #[serde(flatten)]
    pub key: Key,
    /// The key itself. It is not stored and can't be shown again.
    pub secret: String,
    /// What to set so that the SDK uses the key. Without `RLMESH_PLATFORM_URL` it would send the key to the default platform.
    pub environment: Environment,
}

#[derive(Serialize, ToSchema)]
pub struct Environment {
    #[serde(rename = "RLMESH_API_KEY")]
    pub api_key: String,
    #[serde(rename = "RLMESH_PLATFORM_URL")]
    pub platform_url: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateKey {
    pub name: String,
    /// What the key may do, at most what its maker may; left out: all that its maker may.
    pub scopes: Option<Vec<String>>,
    /// Left out: until revoked.
    pub expires_at: Option<DateTime<Utc>>,
}

/// The caller's keys, or all of the organization's for its admins; newest first.
#[utoipa::path(
    get, path = "/v1/keys", tag = "keys", params(PageQuery), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Page<Key>))
)]
async fn list_keys(State(state): State<AppState>, caller: Caller, Query(query): Query<PageQuery>) -> ApiResult<Json<Page<Key>>> {
    caller.require(Scope::KeysWrite)?;
    let limit = query.limit()?;
    let keys = api_keys::list(&state, &caller, query.cursor::<KeyId>()?, limit + 1).await?;
    Ok(Json(page(keys, limit, |key| key.id.to_string(), Key::from)))
}

/// Make an API key. Its secret is shown this once.
#[utoipa::path(
    post, path = "/v1/keys", tag = "keys", security(("bearer" = []), ("session" = [])),
    request_body = CreateKey, responses((status = 201, body = KeyCreated))
)]
async fn create_key(State(state): State<AppState>, caller: Caller, Json(request): Json<CreateKey>) -> ApiResult<Response> {
    let new = NewKey { name: request.name, scopes: request.scopes, expires_at: request.expires_at.map(|at| at.timestamp_millis()) };
    let (key, secret) = api_keys::create(&state, &caller, new).await?;
    let body = KeyCreated {
        key: Key::from(key),
        secret: secret.expose().to_owned(),
        environment: Environment { api_key: secret.expose().to_owned(), platform_url: state.config.public_url.clone() },
    };
    let mut response = (StatusCode::CREATED, axum::Json(body)).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// One key.
#[utoipa::path(
    get, path = "/v1/keys/{id}", tag = "keys", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Key))
)]
async fn get_key(State(state): State<AppState>, caller: Caller, Path(id): Path<KeyId>) -> ApiResult<Json<Key>> {
    caller.require(Scope::KeysWrite)?;
    Ok(Json(Key::from(api_keys::get(&state, &caller, id).await?)))
}

/// Revoke a key, at once and for good.
#[utoipa::path(
    delete, path = "/v1/keys/{id}", tag = "keys", params(("id" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 204))
)]
async fn revoke_key(State(state): State<AppState>, caller: Caller, Path(id): Path<KeyId>) -> ApiResult<StatusCode> {
    api_keys::revoke(&state, &caller, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

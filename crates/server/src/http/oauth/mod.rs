//! The OAuth endpoints. Their answers and errors are OAuth's own: `{error, error_description}`.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rlm_core::error::{Code, Error};
use rlm_core::ids::OrganizationId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::identity::device::{self, OAuthError, Tokens};
use crate::http::auth::RemoteAddress;
use crate::http::error::ApiError;
use crate::http::extract::Form;
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(authorize_device)).routes(routes!(token)).routes(routes!(revoke))
}

/// An error as OAuth shapes it.
#[derive(Debug, Serialize, ToSchema)]
pub struct OAuthErrorBody {
    pub error: String,
    pub error_description: String,
}

impl IntoResponse for OAuthError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::InvalidClient => StatusCode::UNAUTHORIZED,
            Self::Other(error) => StatusCode::from_u16(error.code.http()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            Self::InvalidRequest(_)
            | Self::InvalidGrant(_)
            | Self::UnsupportedGrantType
            | Self::AuthorizationPending
            | Self::SlowDown
            | Self::AccessDenied
            | Self::ExpiredToken => StatusCode::BAD_REQUEST,
        };
        let (error, error_description) = match &self {
            // Clients that poll know this word, and wait longer.
            Self::Other(Error { code: Code::RateLimited, message, .. }) => ("slow_down", message.clone()),
            _ => self.parts(),
        };
        let body = OAuthErrorBody { error: error.to_owned(), error_description };
        let mut response = private((status, axum::Json(body)));
        if let Self::Other(Error { code: Code::RateLimited | Code::Unavailable, .. }) = self {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
        }
        response
    }
}

/// Tokens are never cached.
fn private(answer: impl IntoResponse) -> Response {
    let mut response = answer.into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A form, whose errors are OAuth's too.
fn read<T>(form: Result<Form<T>, ApiError>) -> Result<T, OAuthError> {
    form.map(|Form(value)| value).map_err(|error| OAuthError::InvalidRequest(error.error().message.clone()))
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct AuthorizeForm {
    pub client_id: String,
    /// Accepted for compatibility; a sign-in has what its user's role gives.
    #[serde(default)]
    pub scope: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct AuthorizeAnswer {
    pub device_code: String,
    pub user_code: String,
    pub verification_uri: String,
    pub verification_uri_complete: String,
    pub expires_in: i64,
    pub interval: i64,
}

/// Begin a sign-in on a device without a browser (RFC 8628).
#[utoipa::path(
    post, path = "/v1/oauth/device/authorize", tag = "sign-in",
    request_body(content = AuthorizeForm, content_type = "application/x-www-form-urlencoded"),
    responses(
        (status = 200, body = AuthorizeAnswer),
        (status = 400, body = OAuthErrorBody), (status = 401, body = OAuthErrorBody), (status = 429, body = OAuthErrorBody),
        (status = 503, body = OAuthErrorBody),
    )
)]
async fn authorize_device(
    State(state): State<AppState>,
    RemoteAddress(remote): RemoteAddress,
    form: Result<Form<AuthorizeForm>, ApiError>,
) -> Result<Response, OAuthError> {
    let form = read(form)?;
    let begun = device::authorize(&state, &form.client_id, &remote).await?;
    let verification_uri = format!("{}/device", state.config.public_url);
    Ok(private(axum::Json(AuthorizeAnswer {
        verification_uri_complete: format!("{verification_uri}?user_code={}", begun.user_code),
        verification_uri,
        device_code: begun.device_code,
        user_code: begun.user_code,
        expires_in: begun.expires_in,
        interval: begun.interval,
    })))
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct TokenForm {
    /// `urn:ietf:params:oauth:grant-type:device_code` or `refresh_token`.
    pub grant_type: String,
    pub client_id: String,
    pub device_code: Option<String>,
    pub refresh_token: Option<String>,
    /// With `refresh_token`: go on in this organization.
    pub organization_id: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct TokenAnswer {
    pub access_token: String,
    pub token_type: String,
    pub expires_in: i64,
    /// Works once; each answer has the next.
    pub refresh_token: String,
    pub organization_id: String,
    pub user: TokenUser,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct TokenUser {
    pub id: String,
    pub email: String,
    pub first_name: String,
    pub last_name: String,
}

impl From<Tokens> for TokenAnswer {
    fn from(tokens: Tokens) -> Self {
        Self {
            access_token: tokens.access_token,
            token_type: "Bearer".to_owned(),
            expires_in: tokens.expires_in,
            refresh_token: tokens.refresh_token.expose().to_owned(),
            organization_id: tokens.organization_id.to_string(),
            user: TokenUser {
                id: tokens.user.id.to_string(),
                email: tokens.user.email,
                first_name: tokens.user.first_name,
                last_name: tokens.user.last_name,
            },
        }
    }
}

/// Exchange an approved device code, or a refresh token, for an access token.
#[utoipa::path(
    post, path = "/v1/oauth/token", tag = "sign-in",
    request_body(content = TokenForm, content_type = "application/x-www-form-urlencoded"),
    responses(
        (status = 200, body = TokenAnswer),
        (status = 400, body = OAuthErrorBody), (status = 401, body = OAuthErrorBody), (status = 429, body = OAuthErrorBody),
        (status = 503, body = OAuthErrorBody),
    )
)]
async fn token(
    State(state): State<AppState>,
    RemoteAddress(remote): RemoteAddress,
    form: Result<Form<TokenForm>, ApiError>,
) -> Result<Response, OAuthError> {
    let form = read(form)?;
    let missing = |name: &str| OAuthError::InvalidRequest(format!("the parameter '{name}' is missing"));
    let tokens = match form.grant_type.as_str() {
        "urn:ietf:params:oauth:grant-type:device_code" => {
            let code = form.device_code.ok_or_else(|| missing("device_code"))?;
            device::exchange_device_code(&state, &form.client_id, &code, &remote).await?
        }
        "refresh_token" => {
            let token = form.refresh_token.ok_or_else(|| missing("refresh_token"))?;
            let organization = form
                .organization_id
                .map(|id| id.parse::<OrganizationId>())
                .transpose()
                .map_err(|error| OAuthError::InvalidGrant(error.to_string()))?;
            device::refresh(&state, &form.client_id, &token, organization, &remote).await?
        }
        _ => return Err(OAuthError::UnsupportedGrantType),
    };
    Ok(private(axum::Json(TokenAnswer::from(tokens))))
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct RevokeForm {
    /// A refresh token or an access token.
    pub token: String,
    #[serde(default)]
    pub token_type_hint: Option<String>,
    #[serde(default)]
    pub client_id: Option<String>,
}

/// End the sign-in that a token belongs to (RFC 7009). An unknown token is no error.
#[utoipa::path(
    post, path = "/v1/oauth/revoke", tag = "sign-in",
    request_body(content = RevokeForm, content_type = "application/x-www-form-urlencoded"),
    responses((status = 200, description = "ended, or unknown"), (status = 400, body = OAuthErrorBody), (status = 429, body = OAuthErrorBody))
)]
async fn revoke(
    State(state): State<AppState>,
    RemoteAddress(remote): RemoteAddress,
    form: Result<Form<RevokeForm>, ApiError>,
) -> Result<Response, OAuthError> {
    let form = read(form)?;
    device::revoke(&state, &form.token, &remote).await?;
    Ok(private(StatusCode::OK))
}

//! Who calls: the [`Caller`] extractor, from a bearer token or a browser's session cookie. A handler that takes no `Caller`
//! is open to all.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request::Parts;
use axum::http::{Method, header};
use axum_extra::extract::CookieJar;

pub use crate::app::access::{Actor, Caller, Credential, Role, Scope, Scopes};
use crate::app::identity::authenticate;
use crate::http::error::ApiError;
use crate::http::origin;
use crate::state::AppState;

/// Name of the browser session's cookie.
pub const SESSION_COOKIE: &str = "rlmesh_session";

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let remote = remote_address(parts);
        if let Some(value) = parts.headers.get(header::AUTHORIZATION) {
            let token = value.to_str().ok().and_then(bearer_token).ok_or_else(|| {
                ApiError::new(rlm_core::error::Code::Unauthenticated, "the Authorization header must be `Bearer <access token or API key>`")
            })?;
            return Ok(authenticate::bearer(state, token, &remote).await?);
        }
        let jar = CookieJar::from_headers(&parts.headers);
        let Some(cookie) = jar.get(SESSION_COOKIE) else { return Err(authenticate::missing().into()) };
        if parts.method != Method::GET && parts.method != Method::HEAD {
            origin::require_own_page(parts, &state.config)?;
        }
        Ok(authenticate::browser(state, cookie.value(), &remote).await?)
    }
}

fn bearer_token(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

/// The peer's address, for the audit log and rate limits.
#[must_use]
pub fn remote_address(parts: &Parts) -> String {
    parts.extensions.get::<ConnectInfo<SocketAddr>>().map_or_else(String::new, |info| info.0.ip().to_string())
}

/// The peer's address as an extractor.
#[derive(Debug, Clone)]
pub struct RemoteAddress(pub String);

impl<S: Send + Sync> FromRequestParts<S> for RemoteAddress {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        Ok(Self(remote_address(parts)))
    }
}

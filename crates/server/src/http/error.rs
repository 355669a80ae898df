//! Errors as answers: `{error: {code, message, details, requestId}}`, the shape that SDK clients read. What is for the log
//! only never gets into an answer.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rlm_api::rest::{ErrorBody, ErrorDetail};
use rlm_core::error::{Code, Error};

use crate::http::request_id;
use crate::store::StoreError;

/// An error on its way to the client.
#[derive(Debug)]
pub struct ApiError {
    error: Error,
    retry_after_seconds: Option<u64>,
}

/// What a handler answers.
pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Error::new(code, message).into()
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    /// Tells the client when to try again.
    #[must_use]
    pub const fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_seconds = Some(seconds);
        self
    }

    #[must_use]
    pub const fn error(&self) -> &Error {
        &self.error
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let retry_after_seconds = match error.code {
            Code::Unavailable | Code::ClusterDisconnected | Code::DeadlineExceeded => Some(1),
            Code::RateLimited => Some(10),
            _ => None,
        };
        Self { error, retry_after_seconds }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Error::from(error).into()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { error, retry_after_seconds } = self;
        let status = StatusCode::from_u16(error.code.http()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = ErrorBody {
            error: ErrorDetail { code: error.code, message: error.message, details: error.details, request_id: request_id::current() },
        };
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(seconds) = retry_after_seconds {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"rlmesh\""));
        }
        response
    }
}

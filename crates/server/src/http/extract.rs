//! Reading requests: JSON bodies, query parameters, path parameters and forms. Whatever can't be read is refused in our
//! error shape, naming the field.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use rlm_core::error::{Code, Error, Problem};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::error::ApiError;
use crate::http::query;

/// Largest JSON body unless a handler says otherwise.
pub const DEFAULT_LIMIT: usize = 2 * 1024 * 1024;
/// Largest evaluation request: a million explicit seeds fit.
pub const LARGE_LIMIT: usize = 32 * 1024 * 1024;

/// A body arrives within this time, and one second more for each `SLOWEST` bytes that it may have.
const BODY_TIME: Duration = Duration::from_secs(30);
const SLOWEST: u64 = 128 * 1024;

/// A JSON body of at most `LIMIT` bytes; also a JSON answer.
#[derive(Debug, Clone)]
pub struct Json<T, const LIMIT: usize = DEFAULT_LIMIT>(pub T);

/// Query parameters. Parameters that the OpenAPI document does not name are refused before the handler is reached.
#[derive(Debug, Clone)]
pub struct Query<T>(pub T);

/// Path parameters. A text that can't be the id of anything is answered as *not found*.
#[derive(Debug, Clone)]
pub struct Path<T>(pub T);

/// A form body (`application/x-www-form-urlencoded`), at most 64 KiB.
#[derive(Debug, Clone)]
pub struct Form<T>(pub T);

fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Reads a whole body of at most `limit` bytes, which arrives in time.
pub(crate) async fn read_body(body: Body, limit: usize) -> Result<bytes::Bytes, Error> {
    read_body_within(body, limit, BODY_TIME + Duration::from_secs(limit as u64 / SLOWEST)).await
}

async fn read_body_within(body: Body, limit: usize, time: Duration) -> Result<bytes::Bytes, Error> {
    let Ok(read) = tokio::time::timeout(time, Limited::new(body, limit).collect()).await else {
        let message = format!("the request's body did not arrive within {} s; send it again over a faster connection", time.as_secs());
        return Err(Error::new(Code::DeadlineExceeded, message));
    };
    match read {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.downcast_ref::<LengthLimitError>().is_some() => Err(too_large(limit)),
        Err(_) => Err(Error::new(Code::BadRequest, "the request's body ended before it was complete; send it again")),
    }
}

fn too_large(limit: usize) -> Error {
    let (size, unit) = if limit >= 1024 * 1024 { (limit / (1024 * 1024), "MiB") } else { (limit / 1024, "KiB") };
    Error::new(Code::TooLarge, format!("the request's body is larger than {size} {unit}, the most that is accepted here"))
}

fn check_length(headers: &HeaderMap, limit: usize) -> Result<(), Error> {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()).and_then(|text| text.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limit as u64) { Err(too_large(limit)) } else { Ok(()) }
}

/// Parses JSON text; problems name the field.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Error::new(Code::BadRequest, "the request's body is empty; JSON is expected"));
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|error| Error::new(Code::BadRequest, format!("the request's body is not UTF-8 (at byte {})", error.valid_up_to())))?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match inner.classify() {
            serde_json::error::Category::Data => {
                let path = if path == "." { String::new() } else { path };
                Error::invalid(vec![Problem::new(path, inner.to_string())])
            }
            _ => Error::new(Code::BadRequest, format!("the request's body is not JSON: {inner}")),
        }
    })?;
    deserializer.end().map_err(|error| Error::new(Code::BadRequest, format!("the request's body is not JSON: {error}")))?;
    Ok(value)
}

impl<S: Send + Sync, T: DeserializeOwned, const LIMIT: usize> FromRequest<S> for Json<T, LIMIT> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, ApiError> {
        let kind = media_type(request.headers());
        if !(kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))) {
            let got = if kind.is_empty() { "none".to_owned() } else { format!("'{}'", kind.chars().take(60).collect::<String>()) };
            return Err(ApiError::new(Code::BadRequest, format!("the content type must be application/json; the request has {got}")));
        }
        check_length(request.headers(), LIMIT)?;
        let bytes = read_body(request.into_body(), LIMIT).await?;
        Ok(Self(parse_json(&bytes)?))
    }
}

impl<T: Serialize, const LIMIT: usize> IntoResponse for Json<T, LIMIT> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Form<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, ApiError> {
        const LIMIT: usize = 64 * 1024;
        if media_type(request.headers()) != "application/x-www-form-urlencoded" {
            return Err(ApiError::new(Code::BadRequest, "the content type must be application/x-www-form-urlencoded"));
        }
        check_length(request.headers(), LIMIT)?;
        let bytes = read_body(request.into_body(), LIMIT).await?;
        let text = std::str::from_utf8(&bytes).map_err(|_| ApiError::new(Code::BadRequest, "the form is not UTF-8"))?;
        Ok(Self(query::parse(text)?))
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        Ok(Self(query::parse(parts.uri.query().unwrap_or_default())?))
    }
}

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = parts.uri.path().to_owned();
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(_) => Err(not_found(&path)),
        }
    }
}

/// The answer where nothing is.
pub fn not_found(path: &str) -> ApiError {
    let path: String = path.chars().take(200).collect();
    ApiError::not_found(format!("there is nothing at {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Body {
        name: String,
        list: Vec<u8>,
    }

    fn code(bytes: &[u8]) -> (Code, String) {
        let error = parse_json::<Body>(bytes).unwrap_err();
        (error.code, error.message)
    }

    #[tokio::test]
    async fn a_body_that_trickles_is_given_up() {
        let trickle = || {
            futures::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(10)).await;
                Some((Ok::<_, std::io::Error>(bytes::Bytes::from_static(b" ")), ()))
            })
        };
        let error = read_body_within(axum::body::Body::from_stream(trickle()), 1_000_000, Duration::from_millis(100)).await.unwrap_err();
        assert_eq!(error.code, Code::DeadlineExceeded);
        let whole = axum::body::Body::from_stream(futures::StreamExt::take(trickle(), 2));
        assert_eq!(read_body_within(whole, 10, Duration::from_secs(20)).await.unwrap().len(), 2);
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(code(b" ").0, Code::BadRequest);
        assert_eq!(code(b"{").0, Code::BadRequest);
        assert!(code(b"{\"name\": \"\xff\"}").1.contains("not UTF-8"));
        assert!(code(b"{\"name\": \"a\", \"list\": []} x").1.contains("trailing"));
        let (kind, message) = code(b"{\"name\": \"a\", \"list\": [1, -1]}");
        assert_eq!(kind, Code::InvalidRequest);
        assert!(message.starts_with("list[1]: "), "{message}");
        let (kind, message) = code(b"{\"nam\": 1}");
        assert_eq!(kind, Code::InvalidRequest);
        assert!(message.contains("unknown field `nam`"), "{message}");
        let deep = "[".repeat(100_000);
        assert_eq!(parse_json::<serde_json::Value>(deep.as_bytes()).unwrap_err().code, Code::BadRequest);
    }
}

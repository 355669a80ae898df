//! Protection against web pages of others. On loopback the server answers only to its own names (a page that rebinds its
//! DNS name to 127.0.0.1 is refused), and a request that changes something must not come from another origin's page:
//! submitting an evaluation is running code.

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rlm_core::error::{Code, Error};

use crate::config::Config;
use crate::http::error::ApiError;
use crate::state::AppState;

/// Middleware for every request.
pub async fn layer(State(state): State<AppState>, request: Request, next: Next) -> Response {
    match judge(request.method(), request.uri(), request.headers(), &state.config) {
        Ok(()) => next.run(request).await,
        Err(error) => ApiError::from(error).into_response(),
    }
}

fn foreign(message: String) -> Error {
    Error::new(Code::ForeignOrigin, message)
}

/// Decides whether a request may be answered at all.
fn judge(method: &Method, uri: &Uri, headers: &HeaderMap, config: &Config) -> Result<(), Error> {
    let host = authority(uri, headers);
    if config.listen.ip().is_loopback() && !host.as_deref().is_some_and(|host| is_own_host(host, config)) {
        return Err(foreign(format!(
            "this server listens on loopback and answers to localhost, 127.0.0.1, [::1] and its configured names only, not to '{}'",
            host.unwrap_or_default().chars().take(100).collect::<String>()
        )));
    }
    if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    if let Some(origin) = header_text(headers, header::ORIGIN)
        && !is_own_origin(&origin, host.as_deref(), config)
    {
        return Err(foreign(format!("a page of '{}' may not change anything here", origin.chars().take(100).collect::<String>())));
    }
    match header_text(headers, header::HeaderName::from_static("sec-fetch-site")).as_deref() {
        None | Some("same-origin" | "none") => Ok(()),
        Some(_) => Err(foreign("a page of another site may not change anything here".to_owned())),
    }
}

/// Extractor: the request comes from a page of this server.
#[derive(Debug, Clone, Copy)]
pub struct OwnPage;

impl FromRequestParts<AppState> for OwnPage {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        require_own_page(parts, &state.config)?;
        Ok(Self)
    }
}

/// For requests that a cookie authenticates: the browser must say that they come from a page of this server.
pub fn require_own_page(parts: &Parts, config: &Config) -> Result<(), Error> {
    let host = authority(&parts.uri, &parts.headers);
    let origin = header_text(&parts.headers, header::ORIGIN);
    let site = header_text(&parts.headers, header::HeaderName::from_static("sec-fetch-site"));
    let own = match (origin, site.as_deref()) {
        (Some(origin), _) => is_own_origin(&origin, host.as_deref(), config),
        (None, Some("same-origin")) => true,
        (None, _) => false,
    };
    if own {
        Ok(())
    } else {
        Err(foreign("this must come from a page of this server, and the browser did not say that it does".to_owned()))
    }
}

fn header_text(headers: &HeaderMap, name: header::HeaderName) -> Option<String> {
    // A header that is no text is as foreign as they come.
    headers.get(name).map(|value| value.to_str().unwrap_or("?").to_owned())
}

/// Host and port that the client believes it talks to.
fn authority(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    uri.authority().map(|authority| authority.as_str().to_owned()).or_else(|| header_text(headers, header::HOST))
}

fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.is_empty() => host,
        _ => authority,
    }
}

fn is_own_host(authority: &str, config: &Config) -> bool {
    let host = without_port(authority).to_ascii_lowercase();
    matches!(host.as_str(), "localhost" | "127.0.0.1" | "[::1]")
        || host == without_port(config.public_authority()).to_ascii_lowercase()
        || config.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(&host))
}

fn is_own_origin(origin: &str, host: Option<&str>, config: &Config) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    if !matches!(scheme, "http" | "https") {
        return false;
    }
    origin.eq_ignore_ascii_case(config.public_url.trim_end_matches('/')) || host.is_some_and(|host| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(listen: &str) -> Config {
        Config { listen: listen.parse().unwrap(), public_url: "https://mesh.example".to_owned(), ..Config::for_tests() }
    }

    fn ask(config: &Config, method: Method, headers: &[(&'static str, &str)]) -> Option<Code> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        judge(&method, &Uri::from_static("/v1/evaluations"), &map, config).err().map(|error| error.code)
    }

    #[test]
    fn loopback_answers_to_its_own_names_only() {
        let local = config("127.0.0.1:7474");
        for host in ["localhost:7474", "127.0.0.1:7474", "[::1]:7474", "LOCALHOST", "mesh.example"] {
            assert_eq!(ask(&local, Method::GET, &[("host", host)]), None, "{host}");
        }
        for host in ["evil.example:7474", "127.0.0.1.evil.example", "localhost.evil.example:7474", "", "127.0.0.1@evil.example"] {
            assert_eq!(ask(&local, Method::GET, &[("host", host)]), Some(Code::ForeignOrigin), "{host}");
        }
        assert_eq!(ask(&local, Method::GET, &[]), Some(Code::ForeignOrigin));
        assert_eq!(ask(&config("0.0.0.0:443"), Method::GET, &[("host", "any.example")]), None);
    }

    #[test]
    fn pages_of_others_change_nothing() {
        for listen in ["127.0.0.1:7474", "0.0.0.0:443"] {
            let config = config(listen);
            let host = ("host", "localhost:7474");
            assert_eq!(ask(&config, Method::POST, &[host]), None);
            assert_eq!(ask(&config, Method::POST, &[host, ("origin", "http://localhost:7474"), ("sec-fetch-site", "same-origin")]), None);
            assert_eq!(ask(&config, Method::POST, &[host, ("origin", "https://mesh.example")]), None);
            for origin in ["http://evil.example", "null", "http://localhost:8080", "https://mesh.example.evil", "file://localhost:7474"] {
                assert_eq!(ask(&config, Method::POST, &[host, ("origin", origin)]), Some(Code::ForeignOrigin), "{origin}");
                assert_eq!(ask(&config, Method::GET, &[host, ("origin", origin)]), None, "{origin}");
            }
            for site in ["cross-site", "same-site", "new-value"] {
                assert_eq!(ask(&config, Method::DELETE, &[host, ("sec-fetch-site", site)]), Some(Code::ForeignOrigin), "{site}");
            }
        }
    }
}

//! The REST client: authorization, one refresh on 401, deadlines, errors.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reqwest::{Method, StatusCode};
use rlm_api::rest::Info;
use rlm_core::error::{Code, Error};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::{self, Session, Target};
use crate::error::CliError;

enum Credential {
    /// A key of the environment.
    Key(String),
    /// State folder of a local server, which gets a new key each time `rlmesh up` starts.
    Local(PathBuf),
    Profile(String),
}

/// How long `rlmesh up` may take from replacing the key to writing it down.
const NEW_KEY: Duration = Duration::from_secs(10);

/// A client of one platform.
pub struct Client {
    http: reqwest::Client,
    pub url: String,
    credential: Credential,
}

fn http() -> Result<reqwest::Client, CliError> {
    reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(10))
        .read_timeout(Duration::from_secs(60))
        .user_agent(concat!("rlmesh/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| CliError::other(format!("the HTTP client could not start: {error}")))
}

impl Client {
    pub fn new(target: &Target) -> Result<Self, CliError> {
        let config = config::load()?;
        if let Some(state) = &target.state {
            let endpoint = config::local_endpoint(state)?;
            return Ok(Self { http: http()?, url: endpoint.url, credential: Credential::Local(state.clone()) });
        }
        let url = config::platform(target, &config);
        let credential = match std::env::var("RLMESH_API_KEY") {
            Ok(key) if !key.is_empty() => Credential::Key(key),
            _ => Credential::Profile(config::profile_name(target, &config)),
        };
        Ok(Self { http: http()?, url, credential })
    }

    /// A client without credentials, for signing in.
    pub fn anonymous(url: &str) -> Result<Self, CliError> {
        Ok(Self { http: http()?, url: url.to_owned(), credential: Credential::Key(String::new()) })
    }

    pub async fn info(&self) -> Result<Info, CliError> {
        let response = self
            .http
            .get(format!("{}/v1/info", self.url))
            .timeout(Duration::from_secs(30))
            .send()
            .await
            .map_err(|error| CliError::unreachable(&self.url, &error))?;
        let status = response.status();
        let body = response.bytes().await.map_err(|error| CliError::unreachable(&self.url, &error))?;
        if !status.is_success() {
            return Err(CliError::answer(status.as_u16(), &body));
        }
        serde_json::from_slice(&body)
            .map_err(|error| CliError::other(format!("{} is not an RLMesh platform: /v1/info can't be read ({error})", self.url)))
    }

    /// POST of a form, as OAuth has it: the status and the JSON body.
    pub async fn form(&self, url: &str, fields: &[(&str, &str)]) -> Result<(StatusCode, Value), CliError> {
        let response = self
            .http
            .post(url)
            .form(fields)
            .timeout(Duration::from_secs(30))
            .send()
            .await
            .map_err(|error| CliError::unreachable(url, &error))?;
        let status = response.status();
        let body = response.bytes().await.map_err(|error| CliError::unreachable(url, &error))?;
        Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
    }

    pub async fn get(&self, path: &str) -> Result<Value, CliError> {
        self.json(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, CliError> {
        self.json(Method::POST, path, Some(body)).await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Result<Value, CliError> {
        self.json(Method::PATCH, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Result<(), CliError> {
        self.send(Method::DELETE, path, None).await.map(drop)
    }

    pub async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, CliError> {
        let value = self.get(path).await?;
        serde_json::from_value(value)
            .map_err(|error| CliError::other(format!("the answer of {path} can't be read: {error}; is this CLI older than the server?")))
    }

    async fn json(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, CliError> {
        let response = self.send(method, path, body).await?;
        let bytes = response.bytes().await.map_err(|error| CliError::unreachable(&self.url, &error))?;
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes).map_err(|error| CliError::other(format!("the answer of {path} is not JSON: {error}")))
    }

    /// Sends a request; an answer that is not a success is an error. A 401 of a profile's session refreshes it once.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<reqwest::Response, CliError> {
        let mut refreshed = false;
        loop {
            let token = self.token().await?;
            // A local server that was started again may have another address.
            let url = match &self.credential {
                Credential::Local(state) => config::local_endpoint(state)?.url,
                Credential::Key(_) | Credential::Profile(_) => self.url.clone(),
            };
            let mut request = self.http.request(method.clone(), format!("{url}{path}")).bearer_auth(&token);
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = request.send().await.map_err(|error| CliError::unreachable(&url, &error))?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if let (StatusCode::UNAUTHORIZED, false, Credential::Profile(profile)) = (status, refreshed, &self.credential) {
                self.refresh(profile, &token, &[]).await?;
                refreshed = true;
                continue;
            }
            if let (StatusCode::UNAUTHORIZED, false, Credential::Local(state)) = (status, refreshed, &self.credential) {
                new_key(state, &token).await?;
                refreshed = true;
                continue;
            }
            let body = response.bytes().await.unwrap_or_default();
            return Err(CliError::answer(status.as_u16(), &body));
        }
    }

    /// A token that is good for at least a minute.
    pub async fn token(&self) -> Result<String, CliError> {
        match &self.credential {
            Credential::Key(key) => Ok(key.clone()),
            Credential::Local(state) => Ok(config::local_endpoint(state)?.api_key),
            Credential::Profile(profile) => {
                let session = config::session(profile)?.ok_or_else(|| not_signed_in(profile))?;
                if expires_at(&session.access_token).is_none_or(|at| at <= chrono::Utc::now().timestamp() + 60) {
                    self.refresh(profile, &session.access_token, &[]).await
                } else {
                    Ok(session.access_token)
                }
            }
        }
    }

    /// Exchanges the refresh token under the profile's lock; another process may have done it meanwhile.
    pub async fn refresh(&self, profile: &str, stale: &str, extra: &[(&str, &str)]) -> Result<String, CliError> {
        let _lock = config::Lock::acquire(profile).await?;
        let session = config::session(profile)?.ok_or_else(|| not_signed_in(profile))?;
        if session.access_token != stale && extra.is_empty() {
            return Ok(session.access_token);
        }
        let info = self.info().await?;
        let mut fields = vec![
            ("grant_type", "refresh_token"),
            ("refresh_token", session.refresh_token.as_str()),
            ("client_id", info.auth.cli.client_id.as_str()),
        ];
        fields.extend_from_slice(extra);
        let (status, body) = self.form(&info.auth.token_endpoint, &fields).await?;
        if !status.is_success() {
            return Err(refresh_refused(profile, status, &body, !extra.is_empty()));
        }
        let session = session_of(&body)?;
        let token = session.access_token.clone();
        config::store_session(profile, Some(session))?;
        Ok(token)
    }

    /// The profile whose session is used; None with a key.
    pub fn profile(&self) -> Option<&str> {
        match &self.credential {
            Credential::Key(_) | Credential::Local(_) => None,
            Credential::Profile(profile) => Some(profile),
        }
    }
}

/// What a refused refresh means. A server that is away or busy has not ended the session, and one that refuses another
/// organization has not either.
fn refresh_refused(profile: &str, status: StatusCode, body: &Value, switching: bool) -> CliError {
    let said = body["error_description"].as_str().or_else(|| body["error"].as_str()).unwrap_or("refused");
    if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        return CliError::from(Error::new(Code::Unavailable, format!("the sign-in could not be renewed now ({status}): {said}")));
    }
    if switching && said.contains("organization") {
        return CliError { exit: 3, ..CliError::other(format!("{said}; `rlmesh org list` shows yours")) };
    }
    CliError::sign_in(format!("the session of profile {profile} has ended ({said}); sign in with `rlmesh login`"))
}

/// Waits until the local server's key is another one than `old`; gives up in silence, so that the server's answer counts.
async fn new_key(state: &Path, old: &str) -> Result<(), CliError> {
    let started = Instant::now();
    while started.elapsed() < NEW_KEY && config::local_endpoint(state)?.api_key == old {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// The session of a token endpoint's answer.
pub fn session_of(body: &Value) -> Result<Session, CliError> {
    match (body["access_token"].as_str(), body["refresh_token"].as_str()) {
        (Some(access), Some(refresh)) => Ok(Session { access_token: access.to_owned(), refresh_token: refresh.to_owned() }),
        _ => Err(CliError::other("the token endpoint's answer has no tokens; is this an RLMesh platform?")),
    }
}

/// Expiry of a JWT in Unix seconds, read without checking the signature (the server does that).
pub fn expires_at(token: &str) -> Option<i64> {
    use base64::Engine;
    let payload = token.split('.').nth(1)?;
    let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(payload).ok()?;
    serde_json::from_slice::<Value>(&bytes).ok()?["exp"].as_i64()
}

fn not_signed_in(profile: &str) -> CliError {
    CliError::sign_in(format!("profile {profile} is not signed in: use `rlmesh login`, or `--state DIR` for a local `rlmesh up`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_of_the_token_itself_ends_a_session() {
        let exit = |status: u16, body: Value, switching| {
            let error = refresh_refused("default", StatusCode::from_u16(status).unwrap(), &body, switching);
            (error.exit, error.is_transient())
        };
        let invalid = serde_json::json!({"error": "invalid_grant", "error_description": "you are in no organization org_x"});
        assert_eq!(exit(400, invalid.clone(), false), (4, false));
        assert_eq!(exit(400, invalid, true), (3, false));
        for status in [429, 500, 502, 503] {
            assert!(exit(status, Value::Null, false).1, "{status}");
        }
    }
}

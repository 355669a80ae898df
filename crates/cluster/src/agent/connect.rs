//! The connection to the control plane, and what its errors mean. Plain HTTP goes to this machine alone.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use rlm_core::error::Code;
use rlm_core::tokens::Secret;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Uri};
use tonic::{Request, Status};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Metadata key that carries the stable error code.
const CODE_KEY: &str = "rlmesh-code";

/// Where the control plane is.
#[derive(Debug, Clone)]
pub struct Server {
    pub url: String,
    /// PEM certificates to trust in place of the system's; read at each connection.
    pub ca_bundle: Option<PathBuf>,
}

impl Server {
    /// Checks the URL: https, or http to this machine.
    pub fn check(&self) -> anyhow::Result<()> {
        let uri: Uri = self.url.parse().with_context(|| format!("--server '{}' is not a URL", self.url))?;
        let host = uri.host().unwrap_or("");
        match uri.scheme_str() {
            Some("https") => Ok(()),
            Some("http") if is_loopback(host) => Ok(()),
            Some("http") => anyhow::bail!("--server {}: plain http would send credentials readable over the network; use https", self.url),
            _ => anyhow::bail!("--server '{}' must start with https:// (or http:// for this machine)", self.url),
        }
    }

    /// Connects, with keepalive that also notices a silent peer.
    pub async fn connect(&self) -> anyhow::Result<Channel> {
        let mut endpoint = Endpoint::from_shared(self.url.clone())?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        if self.url.starts_with("https://") {
            let tls = match &self.ca_bundle {
                None => ClientTlsConfig::new().with_native_roots(),
                Some(path) => {
                    let pem = std::fs::read(path).with_context(|| format!("the CA bundle {} can't be read", path.display()))?;
                    ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem))
                }
            };
            endpoint = endpoint.tls_config(tls)?;
        }
        let connected = tokio::time::timeout(CONNECT_TIMEOUT * 2, endpoint.connect()).await;
        connected.context("the connection took too long")?.map_err(|error| anyhow::anyhow!(chain(&error)))
    }
}

/// An error with its causes: tonic's own text says "transport error" alone.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A request that carries `secret`, marked so that nothing prints it.
pub fn authorized<T>(message: T, secret: &Secret) -> anyhow::Result<Request<T>> {
    let mut value: MetadataValue<Ascii> = format!("Bearer {}", secret.expose()).parse().context("the credential can't be sent")?;
    value.set_sensitive(true);
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", value);
    Ok(request)
}

/// What an error of the control plane means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Try again.
    Transient { message: String, retry_after: Option<Duration> },
    /// Trying again changes nothing: another token or credential is needed.
    Terminal { code: String, message: String },
}

/// Reads an error's stable code, or goes by its gRPC code.
#[must_use]
pub fn refusal(status: &Status) -> Refusal {
    let named = status.metadata().get(CODE_KEY).and_then(|value| value.to_str().ok());
    // Without the metadata (a proxy may drop it) the message may still start with the code.
    let prefix = status.message().split_once(':').map(|(code, _)| code.trim());
    let find = |text: &str| Code::ALL.iter().copied().find(|code| code.as_str() == text);
    let code = named.and_then(find).or_else(|| prefix.and_then(find));
    let retry_after =
        status.metadata().get("retry-after-ms").and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_millis);
    let transient = || Refusal::Transient { message: status.message().to_owned(), retry_after };
    let terminal = |code: &str| Refusal::Terminal { code: code.to_owned(), message: status.message().to_owned() };
    if let Some(code) = code {
        return if is_terminal(code) { terminal(code.as_str()) } else { transient() };
    }
    match status.code() {
        tonic::Code::Unauthenticated => terminal(Code::Unauthenticated.as_str()),
        tonic::Code::PermissionDenied => terminal(Code::Forbidden.as_str()),
        tonic::Code::InvalidArgument => terminal(Code::InvalidRequest.as_str()),
        tonic::Code::FailedPrecondition => terminal(Code::Conflict.as_str()),
        _ => transient(),
    }
}

/// Whether an answer with this code would come again however often one asks.
#[must_use]
pub const fn is_terminal(code: Code) -> bool {
    match code {
        Code::Unauthenticated
        | Code::Forbidden
        | Code::ForeignOrigin
        | Code::TokenUsed
        | Code::TokenExpired
        | Code::TokenRevoked
        | Code::TokenSuperseded
        | Code::TokenUnknown
        | Code::TokenOtherCluster
        | Code::ClusterArchived
        | Code::BadRequest
        | Code::InvalidRequest
        | Code::IdempotencyMismatch => true,
        Code::TooLarge
        | Code::NotFound
        | Code::MethodNotAllowed
        | Code::Conflict
        | Code::AlreadyExists
        | Code::RateLimited
        | Code::ClusterHasLiveAgent
        | Code::ClusterDisconnected
        | Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Internal => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(url: &str) -> Server {
        Server { url: url.to_owned(), ca_bundle: None }
    }

    #[test]
    fn plain_http_stays_on_this_machine() {
        for good in ["https://api.example.com", "http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:1"] {
            server(good).check().unwrap();
        }
        for bad in ["http://10.0.0.1:80", "http://localhost.example.com", "ftp://x", "api.example.com"] {
            assert!(server(bad).check().is_err(), "{bad}");
        }
    }

    #[test]
    fn codes_say_whether_to_try_again() {
        let with = |grpc: tonic::Code, code: Option<&str>, message: &str| {
            let mut status = Status::new(grpc, message);
            if let Some(code) = code {
                status.metadata_mut().insert(CODE_KEY, code.parse().unwrap());
            }
            matches!(refusal(&status), Refusal::Terminal { .. })
        };
        assert!(with(tonic::Code::FailedPrecondition, Some("token_used"), "used"));
        assert!(with(tonic::Code::Unknown, None, "token_used: the token was used"));
        assert!(!with(tonic::Code::AlreadyExists, Some("cluster_has_live_agent"), "live"));
        assert!(!with(tonic::Code::Unavailable, None, "down"));
        assert!(with(tonic::Code::Unauthenticated, None, "no"));
        let mut status = Status::unavailable("busy");
        status.metadata_mut().insert("retry-after-ms", "1500".parse().unwrap());
        assert_eq!(refusal(&status), Refusal::Transient { message: "busy".to_owned(), retry_after: Some(Duration::from_millis(1500)) });
    }
}

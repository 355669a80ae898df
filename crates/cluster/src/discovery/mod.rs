//! GPU discovery: one process on each node, which tells the agent what GPUs the node has. It asks the Kubernetes API nothing,
//! listens nowhere, writes nothing, and never ends because there is no GPU or no agent.
//!
//! It knows the agent by address and certificate, which the agent leaves in the ConfigMap `rlmesh-cell`; the agent knows it by
//! its pod's token, which is made for the agent alone.

pub mod intake;
mod scan;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::discovery_service_client::DiscoveryServiceClient;
use rlm_process::LogFormat;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

pub use self::scan::scan;
use crate::agent::backoff::Backoff;

/// Key of `rlmesh-cell`: `address:port` of the agent.
pub const ADDRESS: &str = "agentAddress";
/// Key of `rlmesh-cell`: the agent's certificate, PEM.
pub const CERTIFICATE: &str = "agentCertificate";
/// The name in that certificate.
pub const AGENT: &str = "rlmesh-cluster-agent";
/// Audience of the token.
pub const AUDIENCE: &str = "rlmesh-agent-gpus";
/// The service account whose pods may report.
pub const ACCOUNT: &str = "rlmesh-gpu-discovery";

/// How often the node is looked at.
const LOOK: Duration = Duration::from_secs(15);
/// How often the agent is told again what has not changed: it keeps no reports across a restart.
const AGAIN: Duration = Duration::from_secs(120);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Of one look: a driver whose GPU hangs may not answer.
const SCAN: Duration = Duration::from_secs(20);
/// Of one report, with the connection for it.
const REPORT: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Folder with what the agent leaves in ConfigMap rlmesh-cell
    #[arg(long, default_value = "/etc/rlmesh/cell")]
    pub cell: PathBuf,
    /// File with the token to show the agent; it is read for each report
    #[arg(long, default_value = "/var/run/secrets/rlmesh/token")]
    pub token_file: PathBuf,
    /// Folder with the node's sys and proc
    #[arg(long, default_value = "/")]
    pub root: PathBuf,
    /// Log lines as text or json
    #[arg(long, default_value = "text")]
    pub log_format: LogFormat,
}

/// Looks and reports until `stop`.
pub async fn run(options: Options, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        never = keep_telling(options) => match never {},
    }
}

async fn keep_telling(options: Options) -> Infallible {
    let mut look = Look { root: options.root.clone(), running: None };
    let mut backoff = Backoff::new(LONGEST_PAUSE);
    let mut reported: Option<(Vec<v1::GpuKind>, Instant)> = None;
    let mut told: Option<String> = None;
    loop {
        let next = match look.once().await {
            Ok(found) if !due(reported.as_ref(), &found, Instant::now()) => Ok(()),
            Ok(found) => match report(&options.cell, &options.token_file, &found).await {
                Ok(()) => {
                    if told.take().is_some() || reported.as_ref().is_none_or(|(known, _)| *known != found) {
                        tracing::info!(gpus = %words(&found), "told the agent");
                    }
                    reported = Some((found, Instant::now()));
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        let pause = match next {
            Ok(()) => {
                backoff.reset();
                LOOK
            }
            Err(error) => {
                let problem = format!("{error:#}");
                if told.as_ref() != Some(&problem) {
                    tracing::warn!("the agent can't be told which GPUs this node has: {problem}; it is tried again");
                }
                told = Some(problem);
                backoff.next(None).max(Duration::from_secs(1))
            }
        };
        tokio::time::sleep(pause).await;
    }
}

fn due(reported: Option<&(Vec<v1::GpuKind>, Instant)>, found: &[v1::GpuKind], now: Instant) -> bool {
    reported.is_none_or(|(known, at)| *known != found || now.duration_since(*at) >= AGAIN)
}

/// `2 NVIDIA L4`; `none`.
#[must_use]
pub fn words(gpus: &[v1::GpuKind]) -> String {
    let kind = |gpu: &v1::GpuKind| format!("{} {}", gpu.count, if gpu.product.is_empty() { &gpu.vendor } else { &gpu.product });
    if gpus.is_empty() { "none".to_owned() } else { gpus.iter().map(kind).collect::<Vec<_>>().join(", ") }
}

/// One look at a time, on a thread of its own: one that hangs is waited for, not repeated beside it.
struct Look {
    root: PathBuf,
    running: Option<JoinHandle<Vec<v1::GpuKind>>>,
}

impl Look {
    async fn once(&mut self) -> anyhow::Result<Vec<v1::GpuKind>> {
        let root = self.root.clone();
        let running = self.running.get_or_insert_with(|| tokio::task::spawn_blocking(move || scan(&root)));
        let found = tokio::time::timeout(SCAN, running).await.context("a driver does not answer")?;
        self.running = None;
        found.context("the look at the node failed")
    }
}

/// Tells the agent once.
///
/// # Errors
/// If it is not known yet where the agent is, if it can't be reached or is not the one of the certificate, or if it refuses.
pub async fn report(cell: &Path, token_file: &Path, gpus: &[v1::GpuKind]) -> anyhow::Result<()> {
    tokio::time::timeout(REPORT, async {
        let read = async |path: PathBuf| {
            tokio::fs::read_to_string(&path)
                .await
                .with_context(|| format!("{} can't be read (the agent writes it when it runs)", path.display()))
        };
        let (address, certificate) = (read(cell.join(ADDRESS)).await?, read(cell.join(CERTIFICATE)).await?);
        let token = tokio::fs::read_to_string(token_file).await.with_context(|| format!("{} can't be read", token_file.display()))?;
        // Nobody else is trusted: neither the system's authorities nor the name.
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(certificate)).domain_name(AGENT);
        let endpoint = Endpoint::from_shared(format!("https://{}", address.trim()))?.tls_config(tls)?.connect_timeout(CONNECT);
        let channel = endpoint.connect().await.map_err(|error| anyhow::anyhow!(crate::agent::chain(&error)))?;
        let mut request = tonic::Request::new(v1::GpuReport { gpus: gpus.to_vec() });
        let mut value: MetadataValue<Ascii> = format!("Bearer {}", token.trim()).parse().context("the token can't be sent")?;
        value.set_sensitive(true);
        request.metadata_mut().insert("authorization", value);
        let answer = DiscoveryServiceClient::new(channel).report(request).await;
        answer.map(drop).map_err(|status| anyhow::anyhow!("the agent refuses: {}", status.message()))
    })
    .await
    .with_context(|| format!("no answer within {} s", REPORT.as_secs()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_told_at_first_on_change_and_now_and_then() {
        let now = Instant::now();
        let gpus = vec![v1::GpuKind { vendor: "nvidia".to_owned(), count: 1, ..v1::GpuKind::default() }];
        assert!(due(None, &[], now));
        assert!(!due(Some(&(Vec::new(), now)), &[], now));
        assert!(due(Some(&(Vec::new(), now)), &gpus, now));
        assert!(!due(Some(&(gpus.clone(), now)), &gpus, now + AGAIN - LOOK));
        assert!(due(Some(&(gpus.clone(), now)), &gpus, now + AGAIN));
        assert_eq!((words(&gpus).as_str(), words(&[]).as_str()), ("1 nvidia", "none"));
    }
}

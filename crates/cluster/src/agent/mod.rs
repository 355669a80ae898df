//! The agent: its parts put together. Session, join, spool and executor know each other through what is passed here alone.

pub(crate) mod backoff;
mod cell;
mod connect;
mod decide;
mod health;
mod join;
pub mod options;
mod session;
mod state_dir;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rlm_api::cluster::v1;
use rlm_core::tokens::Secret;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use self::backoff::Backoff;
pub(crate) use self::connect::chain;
use self::connect::{Refusal, Server};
use self::health::Health;
use self::join::Joiner;
use self::options::{ExecutorKind, Options};
use self::session::{End, Setup, follow, open};
use self::state_dir::StateDir;
use crate::crd::run::AgentEndpoint;
use crate::discovery::intake::Reports;
use crate::executor::Executor;
use crate::executor::kubernetes::{self, Caps, KubernetesExecutor};
use crate::executor::process::{self, ProcessExecutor};
use crate::inventory;
use crate::runners::Runners;
use crate::spool::{self, Spool};

/// Runs the agent until `stop`.
pub async fn run(options: Options, admin: rlm_process::Admin, stop: CancellationToken) -> anyhow::Result<()> {
    let server = Server { url: options.server.clone(), ca_bundle: options.ca_bundle.clone() };
    server.check()?;
    let state = Arc::new(StateDir::open(&options.state)?);
    let health = Health::new(admin);
    let spool = Spool::open(state.path(), spool::Options { quota_bytes: options.spool_bytes, ..spool::Options::default() })?;
    let mut parts = tokio::task::JoinSet::new();
    let Started { executor, serving, _sockets } = match options.executor {
        ExecutorKind::Process => on_this_machine(&options, &state, &spool, &mut parts, &stop).await?,
        ExecutorKind::Kubernetes => on_the_cluster(&options, &state, &spool, &health).await?,
    };
    let versions = v1::Versions { agent: env!("CARGO_PKG_VERSION").to_owned(), chart: String::new(), kubernetes: String::new() };
    let joined = Arc::new(Notify::new());
    if let Some(token_file) = options.join_token_file.clone() {
        let joiner = Joiner {
            server: server.clone(),
            state: Arc::clone(&state),
            token_file,
            versions: versions.clone(),
            purposes: vec!["control".to_owned()],
            max_backoff: options.max_backoff(),
            poll: options.poll(),
            health: health.clone(),
            joined: Arc::clone(&joined),
        };
        let stop = stop.clone();
        parts.spawn(async move { joiner.run(stop).await });
    }
    let (announce, credential) = watch::channel(None);
    let watcher = CredentialWatcher {
        path: options.credential_file.clone().unwrap_or_else(|| state.credentials_path()),
        announce,
        poll: options.poll(),
        joined,
        health: health.clone(),
        stop: stop.clone(),
    };
    parts.spawn(watcher.run());
    let setup = Setup {
        server,
        spool,
        executor: Arc::clone(&executor),
        state,
        health,
        versions,
        heartbeat: options.heartbeat(),
        max_backoff: options.max_backoff(),
        side_tasks: session::SideTasks::default(),
    };
    // The session outlives the runs a little, so that what their ends bring still goes out.
    let ends = CancellationToken::new();
    let sessions = tokio::spawn({
        let ends = ends.clone();
        async move { keep_session(&setup, credential, &ends).await }
    });
    tokio::select! {
        () = stop.cancelled() => {}
        served = serving => anyhow::bail!("the runners' socket failed: {served:?}"),
    }
    executor.shutdown().await;
    ends.cancel();
    if let Err(error) = sessions.await {
        tracing::error!(%error, "the session's task failed");
    }
    while parts.join_next().await.is_some() {}
    Ok(())
}

/// An executor, and what serves its runners.
struct Started {
    executor: Arc<dyn Executor>,
    serving: tokio::task::JoinHandle<anyhow::Result<()>>,
    /// Goes with the agent.
    _sockets: Option<SocketFolder>,
}

async fn on_this_machine(
    options: &Options,
    state: &Arc<StateDir>,
    spool: &Spool,
    parts: &mut tokio::task::JoinSet<()>,
    stop: &CancellationToken,
) -> anyhow::Result<Started> {
    let runners = Runners::default();
    let sockets = SocketFolder::make(state.path())?;
    let executor = ProcessExecutor::new(
        process::Options {
            state: state.path().to_owned(),
            sockets: sockets.path.clone(),
            exec_child: PathBuf::from("/proc/self/exe"),
            runner: options.runner()?,
            python: options.python.clone(),
            cuda_devices: options.cuda_devices.unwrap_or_else(inventory::cuda_devices),
            max_runs: options.max_runs as usize,
            node: inventory::node_name(),
            version: env!("CARGO_PKG_VERSION"),
        },
        spool.clone(),
        runners.clone(),
    )?;
    let serving = tokio::spawn({
        let socket = executor.runner_socket();
        async move { runners.serve(&socket, CancellationToken::new()).await }
    });
    executor.resume().await?;
    parts.spawn({
        let (executor, stop) = (executor.clone(), stop.clone());
        async move { executor.prune_logs(stop).await }
    });
    Ok(Started { executor: Arc::new(executor), serving, _sockets: Some(sockets) })
}

async fn on_the_cluster(options: &Options, state: &Arc<StateDir>, spool: &Spool, health: &Health) -> anyhow::Result<Started> {
    let client = kube::Client::try_default().await.context("how to reach the Kubernetes API is not known")?;
    let certificate = state.runner_certificate()?;
    let listener = tokio::net::TcpListener::bind(options.runner_listen)
        .await
        .with_context(|| format!("runners can't be listened for on {}", options.runner_listen))?;
    let address = options.runner_address.context("--runner-address is needed with --executor kubernetes")?;
    let runners = Runners::reviewed_by(Arc::new(kubernetes::TokenReviewer::of_runs(client.clone(), &options.runs_namespace)));
    let reports = Reports::new(kubernetes::TokenReviewer::of_discovery(client.clone(), &options.system_namespace));
    let executor = KubernetesExecutor::new(
        &client,
        kubernetes::Options {
            namespace: options.runs_namespace.clone(),
            endpoint: AgentEndpoint { address: address.to_string(), certificate_sha256: certificate.sha256.clone() },
            caps: Caps { runs: options.max_runs, pods: options.max_pods, gpus: options.max_gpus },
            require_enforcement: options.require_enforcement,
            version: env!("CARGO_PKG_VERSION"),
        },
        spool.clone(),
        runners.clone(),
        reports.clone(),
    );
    tokio::spawn(cell::keep_written(client, options.system_namespace.clone(), cell::content(address, &certificate.certificate)));
    let identity = tonic::transport::Identity::from_pem(&certificate.certificate, &certificate.key);
    let serving = tokio::spawn(runners.serve_tls(listener, identity, reports, CancellationToken::new()));
    executor.resume().await?;
    let (mut walls, health) = (executor.walls(), health.clone());
    tokio::spawn(async move {
        loop {
            health.walls(&walls.borrow_and_update().clone());
            if walls.changed().await.is_err() {
                return;
            }
        }
    });
    Ok(Started { executor: Arc::new(executor), serving, _sockets: None })
}

/// Keeps a session open, from the first credential on.
async fn keep_session(setup: &Setup, mut credential: watch::Receiver<Option<Secret>>, stop: &CancellationToken) {
    let mut backoff = Backoff::new(setup.max_backoff);
    let mut next = None;
    loop {
        let secret = credential.borrow_and_update().clone();
        let Some(secret) = secret else {
            tokio::select! {
                () = stop.cancelled() => return,
                changed = credential.changed() => if changed.is_err() { return },
            }
            continue;
        };
        let opened = match next.take() {
            Some(live) => Ok(live),
            None => tokio::select! {
                () = stop.cancelled() => return,
                opened = open(setup, &secret) => opened,
            },
        };
        let end = match opened {
            Ok(live) => follow(setup, live, &mut credential, stop).await,
            Err(Refusal::Transient { message, retry_after }) => End::Lost { message, retry_after, good: false },
            Err(Refusal::Terminal { code, message }) => End::Refused { code, message },
        };
        match end {
            End::Stopped => return,
            End::Replaced(live) => next = Some(*live),
            End::Lost { message, retry_after, good } => {
                if good {
                    backoff.reset();
                }
                let pause = backoff.next(retry_after);
                setup.health.disconnected(&message);
                tracing::warn!(%message, pause_s = pause.as_secs_f64(), "no session with the control plane; runs go on, trying again");
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                    changed = credential.changed() => if changed.is_err() { return },
                }
            }
            End::Refused { code, message } => {
                let revoked = code == rlm_core::error::Code::ClusterArchived.as_str();
                let what = if revoked { "revoked: this cluster was archived" } else { "the control credential was refused" };
                setup.health.refused(&format!("{what} ({code}): {message}"));
                tracing::error!(code, message, "{what}; waiting for another credential or a new join token");
                tokio::select! {
                    () = stop.cancelled() => return,
                    changed = credential.changed() => if changed.is_err() { return },
                }
            }
        }
    }
}

/// Follows the credentials file by looking: it may be replaced whole, and more than once, by others too.
struct CredentialWatcher {
    path: PathBuf,
    announce: watch::Sender<Option<Secret>>,
    poll: Duration,
    /// Woken when this agent itself has stored new credentials.
    joined: Arc<Notify>,
    health: Health,
    stop: CancellationToken,
}

impl CredentialWatcher {
    async fn run(self) {
        let mut seen = None;
        let mut complained = false;
        loop {
            match state_dir::read_credentials(&self.path).and_then(|read| match read {
                Some((digest, credentials)) if seen != Some(digest) => Ok(Some((digest, credentials.control()?))),
                Some(_) | None => Ok(None),
            }) {
                Ok(Some((digest, secret))) => {
                    seen = Some(digest);
                    complained = false;
                    self.announce.send_if_modified(|known| {
                        let changed = known.as_ref() != Some(&secret);
                        *known = Some(secret);
                        changed
                    });
                }
                Ok(None) => {}
                Err(error) => {
                    // It may be in the middle of being written; said once.
                    if !complained {
                        tracing::error!("{error:#}; the credential known so far stays in use");
                        self.health.new_credential_refused(&format!("{error:#}"));
                    }
                    complained = true;
                }
            }
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.joined.notified() => {}
                () = tokio::time::sleep(self.poll) => {}
            }
        }
    }
}

/// A folder with a short path, since a unix socket's path is short: under the system's temporary folder, noted in the state
/// folder so that the next agent removes what this one leaves.
struct SocketFolder {
    path: PathBuf,
}

impl SocketFolder {
    fn make(state: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let note = state.join("sockets");
        if let Ok(old) = std::fs::read_to_string(&note)
            && Path::new(old.trim()).file_name().is_some_and(|name| name.to_string_lossy().starts_with("rlm-"))
        {
            // Gone with the machine's last start, as a rule.
            let _ = std::fs::remove_dir_all(old.trim());
        }
        let mut folder = std::env::temp_dir();
        if folder.as_os_str().len() > 60 {
            folder = PathBuf::from("/tmp");
        }
        let path = folder.join(format!("rlm-{}", hex::encode(rand::random::<[u8; 8]>())));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("the folder for sockets {} can't be made", path.display()))?;
        std::fs::write(&note, path.to_string_lossy().as_bytes()).with_context(|| format!("{} can't be written", note.display()))?;
        Ok(Self { path })
    }
}

impl Drop for SocketFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

//! The runners' way in: `RunnerService` on a unix socket, or over TLS for pods. Checks who attaches and hands each message to the run's actor;
//! decides nothing about a run.
//!
//! A stream's messages reach the actor in order over a bounded channel, so a runner that is faster than the spool waits.

use std::collections::HashMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use futures::{Stream, StreamExt as _};
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::discovery_service_server::DiscoveryServiceServer;
use rlm_api::cluster::v1::runner_service_server::{RunnerService, RunnerServiceServer};
use rlm_core::ids::RunId;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Identity, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use crate::discovery::intake::Reports;

/// Commands that wait for a runner. One that does not take them is taken for stuck.
pub const COMMANDS: usize = 1024;
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// The secret that one start of a runner attaches with. It can't be printed.
pub struct RunnerToken(String);

impl RunnerToken {
    #[must_use]
    pub fn generate() -> Self {
        Self(hex::encode(rand::random::<[u8; 32]>()))
    }

    /// For the runner's standard input alone.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.0.as_bytes()).into()
    }
}

/// What a run's actor hears of its runner.
#[derive(Debug)]
pub enum FromRunner {
    /// The stream ends when the guard is dropped.
    Attached {
        stream: u64,
        commands: mpsc::Sender<v1::AgentCommand>,
        guard: DropGuard,
    },
    Message {
        stream: u64,
        message: v1::runner_message::Message,
    },
    Detached {
        stream: u64,
    },
}

/// Says which pod a token was made for.
#[tonic::async_trait]
pub trait Reviewer: Send + Sync {
    async fn pod_of(&self, token: &str) -> Result<String, Status>;
}

/// Who may attach.
enum Expected {
    /// Whoever has the token of this SHA-256.
    Token([u8; 32]),
    /// The pod of this name.
    Pod(String),
}

struct Registration {
    expected: Expected,
    messages: mpsc::Sender<FromRunner>,
}

/// Runs whose runners may attach. Cheap to clone.
#[derive(Clone, Default)]
pub struct Runners {
    runs: Arc<Mutex<HashMap<RunId, Registration>>>,
    streams: Arc<AtomicU64>,
    reviewer: Option<Arc<dyn Reviewer>>,
}

impl Runners {
    /// From now on `token` alone attaches to this run.
    pub fn register(&self, run: RunId, token: &RunnerToken, messages: mpsc::Sender<FromRunner>) {
        self.expect(run, Expected::Token(token.digest()), messages);
    }

    /// From now on the pod of this name alone attaches to this run.
    pub fn register_pod(&self, run: RunId, pod: String, messages: mpsc::Sender<FromRunner>) {
        self.expect(run, Expected::Pod(pod), messages);
    }

    fn expect(&self, run: RunId, expected: Expected, messages: mpsc::Sender<FromRunner>) {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).insert(run, Registration { expected, messages });
    }

    /// Runners that show a service account's token, which this reviewer knows.
    #[must_use]
    pub fn reviewed_by(reviewer: Arc<dyn Reviewer>) -> Self {
        Self { reviewer: Some(reviewer), ..Self::default() }
    }

    /// Nobody attaches to this run any more, unless another actor registered it since.
    pub fn forget(&self, run: RunId, messages: &mpsc::Sender<FromRunner>) {
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        if runs.get(&run).is_some_and(|registration| registration.messages.same_channel(messages)) {
            runs.remove(&run);
        }
    }

    async fn admit(&self, attach: &v1::Attach) -> Result<mpsc::Sender<FromRunner>, Status> {
        let refused = || Status::unauthenticated(format!("no runner of run '{}' is expected with this token", attach.run_id));
        let run: RunId = attach.run_id.parse().map_err(|_| refused())?;
        let given: [u8; 32] = Sha256::digest(attach.token.as_bytes()).into();
        let pod = match &self.reviewer {
            Some(reviewer) => Some(reviewer.pod_of(&attach.token).await?),
            None => None,
        };
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        let registration = runs.get(&run).ok_or_else(refused)?;
        let admitted = match (&registration.expected, pod) {
            (Expected::Token(token), None) => bool::from(token.ct_eq(&given)),
            (Expected::Pod(expected), Some(pod)) => *expected == pod,
            (Expected::Token(_), Some(_)) | (Expected::Pod(_), None) => false,
        };
        if admitted { Ok(registration.messages.clone()) } else { Err(refused()) }
    }

    /// Serves over TLS until `stop` is cancelled, and what discovery reports beside it.
    pub async fn serve_tls(
        self,
        listener: tokio::net::TcpListener,
        identity: Identity,
        reports: Reports,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        tonic::transport::Server::builder()
            .tls_config(ServerTlsConfig::new().identity(identity))
            .context("the runners' TLS can't be set up")?
            .http2_keepalive_interval(Some(Duration::from_secs(30)))
            .add_service(RunnerServiceServer::new(self).max_decoding_message_size(4 << 20))
            .add_service(DiscoveryServiceServer::new(reports).max_decoding_message_size(64 << 10))
            .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
            .await
            .context("the runners' port failed")
    }

    /// Serves on the socket until `stop` is cancelled.
    pub async fn serve(self, socket: &Path, stop: CancellationToken) -> anyhow::Result<()> {
        let listener =
            tokio::net::UnixListener::bind(socket).with_context(|| format!("the runners' socket {} can't be made", socket.display()))?;
        tonic::transport::Server::builder()
            .add_service(RunnerServiceServer::new(self).max_decoding_message_size(4 << 20))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned())
            .await
            .context("the runners' socket failed")
    }
}

#[tonic::async_trait]
impl RunnerService for Runners {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<v1::AgentCommand, Status>> + Send>>;

    async fn attach(&self, request: Request<Streaming<v1::RunnerMessage>>) -> Result<Response<Self::AttachStream>, Status> {
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(ATTACH_TIMEOUT, incoming.message())
            .await
            .map_err(|_| Status::deadline_exceeded("nothing was sent: the first message must be `attach`"))??;
        let Some(v1::runner_message::Message::Attach(attach)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message must be `attach`"));
        };
        let messages = self.admit(&attach).await?;
        let stream = self.streams.fetch_add(1, Ordering::Relaxed) + 1;
        let (commands, outgoing) = mpsc::channel(COMMANDS);
        let gone = || Status::unavailable("the run has ended");
        let released = CancellationToken::new();
        let guard = released.clone().drop_guard();
        messages.send(FromRunner::Attached { stream, commands, guard }).await.map_err(|_| gone())?;
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    // The actor let go of this stream: a newer one took its place, or the run has ended.
                    () = released.cancelled() => break,
                    received = incoming.next() => match received {
                        Some(Ok(v1::RunnerMessage { message: Some(message) })) => {
                            if messages.send(FromRunner::Message { stream, message }).await.is_err() {
                                break;
                            }
                        }
                        // A message of a newer runner that this version does not know.
                        Some(Ok(v1::RunnerMessage { message: None })) => {}
                        Some(Err(_)) | None => break,
                    },
                }
            }
            // The actor may have gone.
            let _ = messages.send(FromRunner::Detached { stream }).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing).map(Ok))))
    }
}

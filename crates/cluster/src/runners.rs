//! The runners' way in: `RunnerService` on a unix socket. Checks who attaches and hands each message to the run's actor;
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
use rlm_api::cluster::v1::runner_service_server::{RunnerService, RunnerServiceServer};
use rlm_core::ids::RunId;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, Streaming};

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

struct Registration {
    token: [u8; 32],
    messages: mpsc::Sender<FromRunner>,
}

/// Runs whose runners may attach. Cheap to clone.
#[derive(Clone, Default)]
pub struct Runners {
    runs: Arc<Mutex<HashMap<RunId, Registration>>>,
    streams: Arc<AtomicU64>,
}

impl Runners {
    /// From now on `token` alone attaches to this run.
    pub fn register(&self, run: RunId, token: &RunnerToken, messages: mpsc::Sender<FromRunner>) {
        let registration = Registration { token: token.digest(), messages };
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).insert(run, registration);
    }

    /// Nobody attaches to this run any more, unless another actor registered it since.
    pub fn forget(&self, run: RunId, messages: &mpsc::Sender<FromRunner>) {
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        if runs.get(&run).is_some_and(|registration| registration.messages.same_channel(messages)) {
            runs.remove(&run);
        }
    }

    fn admit(&self, attach: &v1::Attach) -> Result<mpsc::Sender<FromRunner>, Status> {
        let refused = || Status::unauthenticated(format!("no runner of run '{}' is expected with this token", attach.run_id));
        let run: RunId = attach.run_id.parse().map_err(|_| refused())?;
        let given: [u8; 32] = Sha256::digest(attach.token.as_bytes()).into();
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        let registration = runs.get(&run).ok_or_else(refused)?;
        if bool::from(registration.token.ct_eq(&given)) { Ok(registration.messages.clone()) } else { Err(refused()) }
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
        let messages = self.admit(&attach)?;
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

//! Joining: a join token becomes this cluster's own credentials. The nonce is on disk before the first try, so a lost answer
//! or a crash can't burn the token; the token itself is never stored.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::cluster_service_client::ClusterServiceClient;
use rlm_core::tokens::{Secret, SecretKind};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::backoff::Backoff;
use super::connect::{Refusal, Server, authorized, refusal};
use super::health::Health;
use super::state_dir::{Credentials, StateDir, StoredCredential};

const JOIN_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_TOKEN_FILE: u64 = 64 << 10;

/// Follows the join token: joins with each new one.
pub struct Joiner {
    pub server: Server,
    pub state: Arc<StateDir>,
    /// A file, which is followed, or `/dev/stdin`, which is read once.
    pub token_file: PathBuf,
    pub versions: v1::Versions,
    pub purposes: Vec<String>,
    pub max_backoff: Duration,
    pub poll: Duration,
    pub health: Health,
    /// Told when new credentials are stored, so that nobody waits for the next look at the file.
    pub joined: Arc<Notify>,
}

impl Joiner {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        // Tokens that were refused for good, by hash; asking again changes nothing.
        let mut refused: Option<String> = None;
        let once = self.token_file == Path::new("/dev/stdin");
        loop {
            if let Some(token) = self.read_token(once).await
                && refused.as_ref() != Some(&token.hash())
                && !self.joined_with(&token)
            {
                tokio::select! {
                    () = stop.cancelled() => return,
                    joined = self.join(&token) => if joined { self.joined.notify_one() } else { refused = Some(token.hash()) },
                }
            }
            if once {
                return;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.poll) => {}
            }
        }
    }

    fn joined_with(&self, token: &Secret) -> bool {
        match self.state.credentials() {
            Ok(stored) => stored.is_some_and(|stored| stored.token_sha256 == token.hash()),
            Err(error) => {
                tracing::error!(%error, "the stored credentials can't be read; joining anew");
                false
            }
        }
    }

    async fn read_token(&self, once: bool) -> Option<Secret> {
        let path = self.token_file.clone();
        // Standard input may stay open for ever: a thread of its own, which does not hold the runtime up.
        let (sender, receiver) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || drop(sender.send(read_limited(&path))));
        let text = match receiver.await.ok()? {
            Ok(text) => text,
            Err(error) => {
                if once || error.kind() != std::io::ErrorKind::NotFound {
                    tracing::error!(%error, path = %self.token_file.display(), "the join token can't be read");
                }
                return None;
            }
        };
        if text.trim().is_empty() {
            return None;
        }
        match Secret::parse(&text) {
            Ok(secret) if secret.kind() == SecretKind::JoinToken => Some(secret),
            Ok(_) => {
                self.health.join_refused("this is a secret of another kind, not a join token (rlm_jt_...)");
                None
            }
            Err(error) => {
                self.health.join_refused(&format!("the join token is not one: {error}"));
                None
            }
        }
    }

    /// Tries until the control plane says yes (true) or no.
    async fn join(&self, token: &Secret) -> bool {
        let mut backoff = Backoff::new(self.max_backoff);
        loop {
            let (message, retry_after) = match self.attempt(token).await {
                Ok(()) => return true,
                Err(Refusal::Terminal { code, message }) => {
                    self.health.join_refused(&format!("{code}: {message}"));
                    tracing::error!(
                        code,
                        message,
                        "joining was refused; a new install command from the dashboard or `rlmesh clusters join-command` is needed"
                    );
                    return false;
                }
                Err(Refusal::Transient { message, retry_after }) => (message, retry_after),
            };
            let pause = backoff.next(retry_after);
            tracing::warn!(%message, pause_s = pause.as_secs_f64(), "joining failed; trying again");
            tokio::time::sleep(pause).await;
        }
    }

    async fn attempt(&self, token: &Secret) -> Result<(), Refusal> {
        let local = |error: anyhow::Error| Refusal::Transient { message: format!("{error:#}"), retry_after: None };
        let join = self.state.join_for(token).map_err(local)?;
        let channel = self.server.connect().await.map_err(local)?;
        let request = v1::JoinRequest {
            nonce: join.nonce,
            kube_system_uid: String::new(),
            versions: Some(self.versions.clone()),
            purposes: self.purposes.clone(),
        };
        let mut request = authorized(request, token).map_err(local)?;
        request.set_timeout(JOIN_TIMEOUT);
        let answer = tokio::time::timeout(JOIN_TIMEOUT, ClusterServiceClient::new(channel).join(request)).await;
        let answer = match answer {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(refusal(&status)),
            Err(_) => return Err(Refusal::Transient { message: "no answer in time".to_owned(), retry_after: None }),
        };
        let cluster_id = answer.cluster_id;
        let credentials = Credentials {
            cluster_id: cluster_id.clone(),
            credentials: answer
                .credentials
                .into_iter()
                .map(|credential| StoredCredential { purpose: credential.purpose, id: credential.id, secret: credential.secret })
                .collect(),
            docker_config_json: answer.docker_config_json,
            token_sha256: token.hash(),
        };
        credentials.control().map_err(local)?;
        self.state.store_credentials(&credentials).map_err(local)?;
        tracing::info!(cluster = %cluster_id, "joined");
        Ok(())
    }
}

fn read_limited(path: &Path) -> std::io::Result<String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_TOKEN_FILE).read_to_string(&mut text)?;
    Ok(text)
}

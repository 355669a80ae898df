//! Questions to agents that are answered within a deadline: logs of a run, describing a definition.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rlm_api::cluster::v1::{self, LogFile, server_message};
use rlm_core::error::{Code, Error};
use rlm_core::evaluation::Definition;
use rlm_core::failure::Failure;
use rlm_core::ids::{ClusterId, RunId};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Cells, Live};

/// Most questions open at one agent.
const MOST: usize = 64;

/// What an agent answered.
#[derive(Debug)]
pub(crate) enum Reply {
    Logs(v1::LogReply),
    Describe(v1::DescribeReply),
}

/// The questions open in one session. None once the session has ended.
pub(crate) struct Pending(Mutex<Option<HashMap<String, oneshot::Sender<Reply>>>>);

impl Default for Pending {
    fn default() -> Self {
        Self(Mutex::new(Some(HashMap::new())))
    }
}

impl Pending {
    fn open(&self, id: &str) -> Option<oneshot::Receiver<Reply>> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.as_mut()?;
        if open.len() >= MOST {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        open.insert(id.to_owned(), sender);
        Some(receiver)
    }

    fn forget(&self, id: &str) {
        if let Some(open) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            open.remove(id);
        }
    }

    /// Hands an answer to whoever asked; an answer that nobody waits for any more is dropped.
    pub(crate) fn answer(&self, id: &str, reply: Reply) {
        let asked = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|open| open.remove(id));
        if let Some(asked) = asked {
            let _ = asked.send(reply);
        }
    }

    /// The session has ended: whoever waits learns it at once.
    pub(crate) fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Forgets a question however its asker ends.
struct Asked<'a> {
    live: &'a Live,
    id: String,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.live.pending.forget(&self.id);
    }
}

/// What came of describing a definition.
#[derive(Debug, Clone, PartialEq)]
pub enum Described {
    /// The describe document as the SDK printed it.
    Document(Value),
    /// The definition could not be started or described.
    Failed(Failure),
}

fn disconnected(cluster: ClusterId) -> Error {
    Error::new(
        Code::ClusterDisconnected,
        format!("no agent of cluster {cluster} is connected, so nothing can be asked of it now; try again when it is back"),
    )
}

impl Cells {
    async fn ask(
        &self,
        cluster: ClusterId,
        deadline: Duration,
        message: impl FnOnce(String) -> server_message::Message,
    ) -> Result<Reply, Error> {
        let until = Instant::now() + deadline;
        let live: Arc<Live> = self.get(cluster).ok_or_else(|| disconnected(cluster))?;
        let id = Uuid::now_v7().to_string();
        let busy = || Error::new(Code::Unavailable, format!("cluster {cluster} has too many open requests; try again"));
        let receiver = live.pending.open(&id).ok_or_else(busy)?;
        let asked = Asked { live: &live, id };
        match tokio::time::timeout_at(until, live.out.send(message(asked.id.clone()).into())).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(disconnected(cluster)),
            Err(_) => return Err(busy()),
        }
        match tokio::time::timeout_at(until, receiver).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(_)) => Err(disconnected(cluster)),
            Err(_) => Err(Error::new(
                Code::DeadlineExceeded,
                format!("cluster {cluster} did not answer within {} s; try again", deadline.as_secs_f64()),
            )),
        }
    }

    /// The end of a run's logs, from the agent that holds them. `component` empty: all.
    pub async fn logs(
        &self,
        cluster: ClusterId,
        run: RunId,
        component: &str,
        tail_lines: u32,
        deadline: Duration,
    ) -> Result<Vec<LogFile>, Error> {
        let question = |request_id| {
            server_message::Message::LogRequest(v1::LogRequest {
                request_id,
                run_id: run.to_string(),
                component: component.to_owned(),
                tail_lines,
            })
        };
        match self.ask(cluster, deadline, question).await? {
            Reply::Logs(reply) if reply.error_code.is_empty() => Ok(reply.files),
            Reply::Logs(reply) => Err(agents_error(&reply.error_code, reply.error_message)),
            Reply::Describe(_) => Err(mixed_up(cluster)),
        }
    }

    /// The describe document of a definition, from a probe on the cluster.
    pub async fn describe(&self, cluster: ClusterId, definition: &Definition, deadline: Duration) -> Result<Described, Error> {
        let definition_json = serde_json::to_string(definition)
            .map_err(|error| Error::new(Code::Internal, format!("the definition can't be written as JSON: {error}")))?;
        let kind = match definition {
            Definition::Model(_) => "model",
            Definition::Environment(_) => "environment",
        };
        let question = |request_id| server_message::Message::Describe(v1::Describe { request_id, kind: kind.to_owned(), definition_json });
        match self.ask(cluster, deadline, question).await? {
            Reply::Describe(v1::DescribeReply { failure: Some(failure), .. }) => Ok(Described::Failed(Failure::from(&failure))),
            Reply::Describe(reply) => serde_json::from_str(&reply.document_json).map(Described::Document).map_err(|error| {
                Error::new(Code::Internal, format!("cluster {cluster} answered with a describe document that is not JSON: {error}"))
            }),
            Reply::Logs(_) => Err(mixed_up(cluster)),
        }
    }
}

/// An agent's error under its own code where it is one of ours.
fn agents_error(code: &str, message: String) -> Error {
    let code = Code::ALL.iter().copied().find(|known| known.as_str() == code).unwrap_or(Code::Internal);
    Error::new(code, message)
}

fn mixed_up(cluster: ClusterId) -> Error {
    Error::new(Code::Internal, format!("the agent of cluster {cluster} gave an answer of another kind"))
}

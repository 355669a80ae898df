//! The cell protocol over gRPC: reads credentials and messages, calls `app`, shapes answers. Decides nothing.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::extract::ConnectInfo;
use futures::{Stream, StreamExt as _};
use rlm_api::cluster::v1::cluster_service_server::{ClusterService, ClusterServiceServer};
use rlm_api::cluster::v1::{AgentMessage, JoinRequest, JoinResponse, ServerMessage};
use rlm_core::error::{Code, Error};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::CompressionEncoding;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status, Streaming};

use crate::app::cells::{OUTBOUND, Outbound, session};
use crate::app::clusters::{credentials, join};
use crate::state::AppState;
use crate::store::clusters::Versions;

/// Largest message that an agent may send; the protocol asks for less than 1 MiB.
const LARGEST: usize = 4 * 1024 * 1024;
/// Metadata that carries `rlm_core::error::Code`.
const CODE: &str = "rlmesh-code";
/// Metadata that says after how many milliseconds to try again.
const RETRY_AFTER: &str = "retry-after-ms";

/// Every gRPC service, as one router.
pub fn routes(state: AppState) -> axum::Router {
    let service = ClusterServiceServer::new(Cluster { state })
        .max_decoding_message_size(LARGEST)
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip);
    tonic::service::Routes::new(service).into_axum_router()
}

struct Cluster {
    state: AppState,
}

fn status(error: &Error) -> Status {
    let mut metadata = MetadataMap::new();
    if let Ok(code) = MetadataValue::try_from(error.code.as_str()) {
        metadata.insert(CODE, code);
    }
    if error.code == Code::Unavailable {
        metadata.insert(RETRY_AFTER, MetadataValue::from_static("1000"));
    }
    Status::with_metadata(tonic::Code::from_i32(error.code.grpc()), error.message.clone(), metadata)
}

fn bearer(metadata: &MetadataMap) -> Option<&str> {
    let (scheme, token) = metadata.get("authorization")?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

fn remote_address<T>(request: &Request<T>) -> String {
    request.extensions().get::<ConnectInfo<SocketAddr>>().map_or_else(String::new, |info| info.0.ip().to_string())
}

/// Messages to one agent. After a refusal nothing follows.
struct Replies(ReceiverStream<Outbound>);

impl Stream for Replies {
    type Item = Result<ServerMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next_unpin(context).map(|item| {
            item.map(|outbound| match outbound {
                Outbound::Message(message) => Ok(message),
                Outbound::Refused(error) => Err(status(&error)),
            })
        })
    }
}

#[tonic::async_trait]
impl ClusterService for Cluster {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let remote = remote_address(&request);
        let (metadata, _, message) = request.into_parts();
        let versions = message.versions.unwrap_or_default();
        let asked = join::Request {
            nonce: message.nonce,
            kube_system_uid: message.kube_system_uid,
            versions: Versions { agent: versions.agent, chart: versions.chart, kubernetes: versions.kubernetes },
            purposes: message.purposes,
        };
        let joined = join::join(&self.state, bearer(&metadata), &asked, &remote).await;
        joined.map(Response::new).map_err(|error| status(&error))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<ServerMessage, Status>> + Send>>;

    async fn session(&self, request: Request<Streaming<AgentMessage>>) -> Result<Response<Self::SessionStream>, Status> {
        if self.state.cells.is_closing() {
            return Err(status(&Error::new(Code::Unavailable, "the control plane is restarting; connect again")));
        }
        let agent = credentials::authenticate(&self.state, bearer(request.metadata())).await.map_err(|error| status(&error))?;
        let inbound = request.into_inner().map(|message| message.map_err(|error| error.to_string()));
        let (out, replies) = mpsc::channel(OUTBOUND);
        tokio::spawn(session::serve(self.state.clone(), agent, inbound, out));
        Ok(Response::new(Box::pin(Replies(ReceiverStream::new(replies)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_carry_their_code() {
        let status = status(&Error::new(Code::TokenUsed, "used"));
        assert_eq!(status.metadata().get(CODE).unwrap(), "token_used");
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    }

    #[test]
    fn only_bearer_credentials_are_read() {
        for (text, expected) in [("Bearer x", Some("x")), ("bearer  x ", Some("x")), ("Basic x", None), ("Bearer ", None), ("x", None)] {
            let mut metadata = MetadataMap::new();
            metadata.insert("authorization", text.parse().unwrap());
            assert_eq!(bearer(&metadata), expected, "{text}");
        }
    }
}

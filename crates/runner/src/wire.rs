//! Opening the SDK's streams: handshake and Join of environments and models. The loops that use them are elsewhere.

use std::time::Duration;

use rlm_core::failure::{Failure, FailureCode};
use rlmesh_proto::core::v1::{EnvContract, HandshakeResponse};
use rlmesh_proto::env::v1 as env;
use rlmesh_proto::env::v1::env_service_client::EnvServiceClient;
use rlmesh_proto::model::v1 as model;
use rlmesh_proto::model::v1::model_service_client::ModelServiceClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::classify::{self, EnvCall, EnvRemedy};
use crate::facts::PeerFacts;
use crate::transport::{self, Address, MAX_MESSAGE};
use crate::tuning::Tuning;

/// Why a server can't be used.
#[derive(Debug, Clone)]
pub enum OpenError {
    /// It may be reached later.
    Later(String),
    /// It will never do.
    Never(Failure),
}

impl OpenError {
    fn status(what: &str, status: &Status) -> Self {
        Self::Later(format!("{what} failed ({:?}): {}", status.code(), status.message()))
    }
}

/// An environment server after its handshake.
pub struct EnvPeer {
    channel: Channel,
    pub facts: PeerFacts,
    pub contract: EnvContract,
}

/// An open session with an environment.
pub struct EnvStream {
    pub requests: mpsc::Sender<env::JoinRequest>,
    pub responses: Streaming<env::JoinResponse>,
}

impl EnvPeer {
    pub async fn connect(component: &str, address: &Address, tuning: &Tuning) -> Result<Self, OpenError> {
        let channel = transport::dial(address, tuning.connect).await.map_err(OpenError::Later)?;
        let mut client = EnvServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        let request = env::HandshakeRequest { base: Some(rlmesh_proto::core_handshake_request("rlmesh-runner", &[], None)) };
        let response = within("the handshake", tuning.handshake, client.handshake(request)).await?.into_inner();
        let base = compatible(component, response.base)?;
        let contract = response.env_contract.ok_or_else(|| protocol(component, "its handshake has no environment contract"))?;
        Ok(Self { channel, facts: PeerFacts::read(&base), contract })
    }

    /// Opens the session and pins the edition. Only one session at a time is admitted by the server: until the last one has
    /// ended there, this is tried again.
    pub async fn join(&self, component: &str, edition: &str, requests_in_flight: usize, tuning: &Tuning) -> Result<EnvStream, OpenError> {
        let mut client =
            EnvServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE);
        let (requests, stream) = mpsc::channel(requests_in_flight + 8);
        let mut responses = within("opening the session", tuning.handshake, client.join(ReceiverStream::new(stream))).await?.into_inner();
        let configure = env::ConfigureEnvRequest { selected_workflow_edition: edition.to_owned() };
        let request = env::JoinRequest { kind: Some(env::join_request::Kind::Configure(configure)), request_id: "configure".to_owned() };
        requests.send(request).await.map_err(|_| OpenError::Later("the session closed at once".to_owned()))?;
        let answer = within("pinning the edition", tuning.configure, responses.message()).await?;
        match answer.and_then(|answer| answer.kind) {
            Some(env::join_response::Kind::Configure(_)) => Ok(EnvStream { requests, responses }),
            // An older server that knows no pin runs at its own edition.
            Some(env::join_response::Kind::Error(error)) if error.code() == env::EnvErrorCode::Unsupported && error.is_recoverable => {
                Ok(EnvStream { requests, responses })
            }
            Some(env::join_response::Kind::Error(error)) => Err(match classify::env_error(component, EnvCall::Configure, &error) {
                (failure, EnvRemedy::Reconnect | EnvRemedy::Restart) => OpenError::Later(failure.message),
                (failure, EnvRemedy::Reset) => OpenError::Never(
                    Failure::new(
                        FailureCode::IncompatibleVersions,
                        format!("the environment can't run at edition {edition}: {}", failure.message),
                    )
                    .of(component),
                ),
            }),
            Some(other) => Err(protocol(component, &format!("it answered our configuration with {}", env_kind(&other)))),
            None => Err(OpenError::Later("the session ended while it was configured".to_owned())),
        }
    }
}

/// Name of an answer, for messages.
#[must_use]
pub const fn env_kind(kind: &env::join_response::Kind) -> &'static str {
    use env::join_response::Kind;
    match kind {
        Kind::Reset(_) => "a reset",
        Kind::Step(_) => "a step",
        Kind::Render(_) => "a rendering",
        Kind::Close(_) => "a close",
        Kind::Configure(_) => "a configuration",
        Kind::Error(_) => "an error",
    }
}

/// A model server after its handshake, with its stream open.
pub struct ModelStream {
    pub facts: PeerFacts,
    pub requests: mpsc::Sender<model::JoinRequest>,
    pub responses: Streaming<model::JoinResponse>,
}

impl ModelStream {
    pub async fn connect(component: &str, address: &Address, requests_in_flight: usize, tuning: &Tuning) -> Result<Self, OpenError> {
        let channel = transport::dial(address, tuning.connect).await.map_err(OpenError::Later)?;
        let mut client = ModelServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE);
        let request = model::HandshakeRequest { base: Some(rlmesh_proto::core_handshake_request("rlmesh-runner", &[], None)) };
        let response = within("the handshake", tuning.handshake, client.handshake(request)).await?.into_inner();
        let base = compatible(component, response.base)?;
        let (requests, stream) = mpsc::channel(requests_in_flight);
        let responses = within("opening the stream", tuning.handshake, client.join(ReceiverStream::new(stream))).await?.into_inner();
        Ok(Self { facts: PeerFacts::read(&base), requests, responses })
    }
}

fn compatible(component: &str, base: Option<HandshakeResponse>) -> Result<HandshakeResponse, OpenError> {
    let base = base.ok_or_else(|| protocol(component, "its handshake is empty"))?;
    if base.compatible {
        return Ok(base);
    }
    let reason = base.error_message.unwrap_or_else(|| "it gave no reason".to_owned());
    let message = format!(
        "{component} speaks another wire protocol than {}: {reason}; rebuild it with a current rlmesh release",
        rlmesh_proto::PROTOCOL_GENERATION
    );
    Err(OpenError::Never(Failure::new(FailureCode::IncompatibleVersions, message).of(component)))
}

fn protocol(component: &str, problem: &str) -> OpenError {
    OpenError::Never(
        Failure::new(FailureCode::IncompatibleVersions, format!("{component} is not a server of this wire protocol: {problem}"))
            .of(component),
    )
}

async fn within<T>(what: &str, deadline: Duration, call: impl Future<Output = Result<T, Status>>) -> Result<T, OpenError> {
    match tokio::time::timeout(deadline, call).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(status)) if status.code() == Code::Unimplemented => Err(protocol("the server", &format!("{what} is not implemented there"))),
        Ok(Err(status)) => Err(OpenError::status(what, &status)),
        Err(_) => Err(OpenError::Later(format!("{what} took longer than {} s", deadline.as_secs_f64()))),
    }
}

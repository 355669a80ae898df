//! A stand-in model of the SDK's protocol.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rlmesh_proto::core::v1::HandshakeResponse as CoreHandshake;
use rlmesh_proto::model::v1::grouped_predict_result::Outcome;
use rlmesh_proto::model::v1::join_request::Kind as Request_;
use rlmesh_proto::model::v1::join_response::Kind as Answer;
use rlmesh_proto::model::v1::model_service_server::{ModelService, ModelServiceServer};
use rlmesh_proto::model::v1::*;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{floats, policy, read};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mischief {
    /// The forward raises: all of a group fail.
    Raise,
    Crash,
    Hang,
    WrongShape,
    NoAction,
}

pub type Plan = Arc<Mutex<HashMap<(u64, u64), (Mischief, u32)>>>;

pub fn plan(entries: &[(u64, u64, Mischief, u32)]) -> Plan {
    Arc::new(Mutex::new(entries.iter().map(|(seed, predict, mischief, times)| ((*seed, *predict), (*mischief, *times))).collect()))
}

#[derive(Clone)]
pub struct ModelSettings {
    pub corners: Vec<String>,
    pub native_chunk: Option<u32>,
    pub editions: Vec<String>,
    pub knows_groups: bool,
    pub forward: Duration,
    pub plan: Plan,
    pub crash: Arc<dyn Fn() + Send + Sync>,
    pub refuse_adapter: Option<String>,
}

impl Default for ModelSettings {
    fn default() -> Self {
        Self {
            corners: vec!["predict_batch".to_owned(), "predict_chunk_batch".to_owned()],
            native_chunk: None,
            editions: vec!["2026.06".to_owned()],
            knows_groups: true,
            forward: Duration::ZERO,
            plan: Plan::default(),
            crash: Arc::new(|| {}),
            refuse_adapter: None,
        }
    }
}

#[derive(Default)]
struct State {
    routes: HashMap<String, u32>,
    predicts: HashMap<String, u64>,
    largest_group: usize,
}

struct Shared {
    settings: ModelSettings,
    state: Mutex<State>,
}

#[derive(Clone)]
pub struct StubModel(Arc<Shared>);

enum Forward {
    Actions(Vec<PredictResponse>),
    Error(ModelError),
    Silence,
}

impl StubModel {
    pub fn routes(settings: ModelSettings) -> tonic::service::Routes {
        let limit = 256 << 20;
        let service = ModelServiceServer::new(Self(Arc::new(Shared { settings, state: Mutex::default() })));
        tonic::service::Routes::new(service.max_decoding_message_size(limit).max_encoding_message_size(limit))
    }

    fn error(code: ModelErrorCode, message: &str) -> ModelError {
        ModelError { code: code.into(), message: message.to_owned(), ..ModelError::default() }
    }

    fn forward(&self, requests: Vec<PredictRequest>) -> Forward {
        let mut state = self.0.state.lock().unwrap();
        state.largest_group = state.largest_group.max(requests.len());
        let mut responses = Vec::new();
        for request in requests {
            let context = request.context.clone().unwrap();
            let [episode] = &request.episode_info[..] else { panic!("one row per request") };
            let Some(horizon) = state.routes.get(&context.env_id).copied() else {
                return Forward::Error(Self::error(ModelErrorCode::Internal, "model env adapter was not resolved"));
            };
            let seed = u64::try_from(episode.seed.unwrap()).unwrap();
            let count = state.predicts.entry(episode.episode_id.clone()).or_insert(0);
            let predict = *count;
            *count += 1;
            let mischief = {
                let mut plan = self.0.settings.plan.lock().unwrap();
                plan.get_mut(&(seed, predict)).filter(|(_, times)| *times > 0).map(|(mischief, times)| {
                    *times -= 1;
                    *mischief
                })
            };
            let hint = read(&request.observation.as_ref().unwrap().leaves[0])[1];
            let mut actions: Vec<_> =
                (0..horizon.max(1)).map(|part| floats(&[policy(seed, predict * 1000 + u64::from(part), hint)])).collect();
            match mischief {
                Some(Mischief::Raise) => return Forward::Error(Self::error(ModelErrorCode::Internal, "RuntimeError: as ordered")),
                Some(Mischief::Crash) => {
                    (self.0.settings.crash)();
                    return Forward::Silence;
                }
                Some(Mischief::Hang) => return Forward::Silence,
                Some(Mischief::WrongShape) => actions = vec![floats(&[1.0, 1.0])],
                Some(Mischief::NoAction) => actions.clear(),
                None => {}
            }
            responses.push(PredictResponse { context: Some(context), actions });
        }
        Forward::Actions(responses)
    }

    fn answer(&self, request: Request_) -> Option<Answer> {
        Some(match request {
            Request_::ResolveAdapter(resolve) => {
                if let Some(message) = &self.0.settings.refuse_adapter {
                    return Some(Answer::Error(Self::error(ModelErrorCode::InvalidRequest, message)));
                }
                assert!(self.0.settings.editions.contains(&resolve.selected_workflow_edition));
                assert!(resolve.env_spec.is_some());
                self.0.state.lock().unwrap().routes.insert(resolve.context.unwrap().env_id, resolve.execution_horizon);
                Answer::ResolveAdapter(ResolveAdapterResponse { native_chunk: self.0.settings.native_chunk, history: None })
            }
            Request_::Predict(predict) => match self.forward(vec![predict]) {
                Forward::Actions(mut responses) => Answer::Predict(responses.pop().unwrap()),
                Forward::Error(error) => Answer::Error(error),
                Forward::Silence => return None,
            },
            Request_::GroupedPredict(_) if !self.0.settings.knows_groups => {
                Answer::Error(Self::error(ModelErrorCode::Unsupported, "empty or unrecognized Join request"))
            }
            Request_::GroupedPredict(grouped) => {
                let count = grouped.groups.len();
                let outcomes = match self.forward(grouped.groups) {
                    Forward::Actions(responses) => responses.into_iter().map(Outcome::Response).collect(),
                    Forward::Error(error) => vec![Outcome::Error(error); count],
                    Forward::Silence => return None,
                };
                Answer::GroupedPredict(GroupedPredictResponse {
                    results: outcomes.into_iter().map(|outcome| GroupedPredictResult { outcome: Some(outcome) }).collect(),
                })
            }
            Request_::ResetAdapter(reset) => {
                let mut state = self.0.state.lock().unwrap();
                for episode in reset.episode_ids {
                    state.predicts.remove(&episode);
                }
                Answer::ResetAdapter(ResetAdapterResponse {})
            }
            Request_::ReleaseAdapter(release) => {
                self.0.state.lock().unwrap().routes.remove(&release.context.unwrap().env_id);
                Answer::ReleaseAdapter(ReleaseAdapterResponse {})
            }
            Request_::Close(_) => panic!("a shared model is never closed"),
        })
    }
}

#[tonic::async_trait]
impl ModelService for StubModel {
    async fn handshake(&self, _: Request<HandshakeRequest>) -> Result<Response<HandshakeResponse>, Status> {
        let mut peer = rlmesh_proto::peer_info("stub-model");
        peer.extra.insert("rlmesh.describe.v1".to_owned(), serde_json::json!({"corners": self.0.settings.corners}).to_string());
        let base = CoreHandshake {
            compatible: true,
            supported_workflow_editions: self.0.settings.editions.clone(),
            peer_info: Some(peer),
            ..CoreHandshake::default()
        };
        Ok(Response::new(HandshakeResponse { base: Some(base) }))
    }

    type JoinStream = ReceiverStream<Result<JoinResponse, Status>>;

    async fn join(&self, request: Request<Streaming<JoinRequest>>) -> Result<Response<Self::JoinStream>, Status> {
        let mut requests = request.into_inner();
        let stub = self.clone();
        let (sender, receiver) = mpsc::channel(64);
        tokio::spawn(async move {
            while let Some(Ok(request)) = requests.next().await {
                let kind = request.kind.unwrap();
                let forward = matches!(kind, Request_::Predict(_) | Request_::GroupedPredict(_));
                let until = Instant::now() + stub.0.settings.forward;
                let Some(kind) = stub.answer(kind) else { continue };
                if forward {
                    compute(until);
                }
                let response = JoinResponse { kind: Some(kind), request_id: request.request_id, ..JoinResponse::default() };
                if sender.send(Ok(response)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Result<Response<ShutdownResponse>, Status> {
        Err(Status::unimplemented("a platform ends processes"))
    }
}

/// Is busy until then, to the microsecond: sleeping alone oversleeps by a part of a millisecond.
fn compute(until: Instant) {
    if let Some(long) = until.saturating_duration_since(Instant::now()).checked_sub(Duration::from_millis(1)) {
        std::thread::sleep(long);
    }
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

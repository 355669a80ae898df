//! A stand-in environment of the SDK's protocol, with lanes.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rlmesh_proto::core::v1::{AutoresetMode, EnvContract, EnvSpec, HandshakeResponse as CoreHandshake};
use rlmesh_proto::env::v1::env_service_server::{EnvService, EnvServiceServer};
use rlmesh_proto::env::v1::join_request::Kind as Request_;
use rlmesh_proto::env::v1::join_response::Kind as Answer;
use rlmesh_proto::env::v1::*;
use rlmesh_proto::spaces::v1::{MetaList, MetaMap, MetaValue, SpaceValue, meta_value::Kind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use super::{Plot, box_space, floats, read};

/// What goes wrong in a step (counted from 1; 0 is the reset) of the episodes with a seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mischief {
    Raise,
    Crash,
    Hang,
    NanReward,
    WrongShape,
    InvalidAction,
    Break,
}

/// Mischief by (seed, step), each for so many times.
pub type Plan = Arc<Mutex<HashMap<(u64, u32), (Mischief, u32)>>>;

pub fn plan(entries: &[(u64, u32, Mischief, u32)]) -> Plan {
    Arc::new(Mutex::new(entries.iter().map(|(seed, step, mischief, times)| ((*seed, *step), (*mischief, *times))).collect()))
}

#[derive(Clone)]
pub struct EnvSettings {
    pub lanes: u32,
    pub subset: bool,
    pub autoreset: AutoresetMode,
    pub editions: Vec<String>,
    pub trial_option: bool,
    pub plan: Plan,
    pub step_time: Duration,
    /// Called when the environment crashes by itself.
    pub crash: Arc<dyn Fn() + Send + Sync>,
    /// Floats of an observation; the first three matter.
    pub observation: usize,
    /// Steps of every episode; else they are as the plot has it.
    pub length: Option<u32>,
}

impl EnvSettings {
    pub fn new(lanes: u32) -> Self {
        Self {
            lanes,
            subset: true,
            autoreset: AutoresetMode::Disabled,
            editions: vec!["2026.06".to_owned()],
            trial_option: true,
            plan: Plan::default(),
            step_time: Duration::ZERO,
            crash: Arc::new(|| {}),
            observation: 4,
            length: None,
        }
    }
}

#[derive(Clone, Copy)]
struct Lane {
    seed: u64,
    trial: u64,
    plot: Plot,
    step: u32,
    hits: u32,
}

struct Shared {
    settings: EnvSettings,
    lanes: Mutex<Vec<Option<Lane>>>,
    joined: Mutex<bool>,
}

#[derive(Clone)]
pub struct StubEnv(Arc<Shared>);

impl StubEnv {
    pub fn routes(settings: EnvSettings) -> tonic::service::Routes {
        let lanes = Mutex::new(vec![None; settings.lanes as usize]);
        let limit = 256 << 20;
        let service = EnvServiceServer::new(Self(Arc::new(Shared { settings, lanes, joined: Mutex::new(false) })));
        tonic::service::Routes::new(service.max_decoding_message_size(limit).max_encoding_message_size(limit))
    }

    fn observation(&self, lane: &Lane) -> Vec<f32> {
        let (_, hint, _) = lane.plot.at(lane.step);
        let mut values = vec![lane.step as f32, hint, lane.trial as f32];
        values.resize(self.0.settings.observation.max(3), 0.5);
        values
    }

    fn due(&self, seed: u64, step: u32) -> Option<Mischief> {
        let mut plan = self.0.settings.plan.lock().unwrap();
        let (mischief, times) = plan.get_mut(&(seed, step))?;
        if *times == 0 {
            return None;
        }
        *times -= 1;
        Some(*mischief)
    }

    fn error(code: EnvErrorCode, message: &str, is_recoverable: bool) -> Answer {
        Answer::Error(EnvError { code: code.into(), message: message.to_owned(), is_recoverable, ..EnvError::default() })
    }

    /// None: never answers.
    fn mischief(&self, mischief: Mischief) -> Option<Answer> {
        match mischief {
            Mischief::Raise => Some(Self::error(EnvErrorCode::Internal, "RuntimeError: as ordered", false)),
            Mischief::InvalidAction => Some(Self::error(EnvErrorCode::InvalidAction, "action: NaN", true)),
            Mischief::Crash => {
                (self.0.settings.crash)();
                None
            }
            Mischief::Hang | Mischief::Break | Mischief::NanReward | Mischief::WrongShape => None,
        }
    }

    fn lanes_of(&self, indices: &[u32]) -> Vec<usize> {
        if indices.is_empty() {
            (0..self.0.settings.lanes as usize).collect()
        } else {
            indices.iter().map(|index| *index as usize).collect()
        }
    }

    fn reset(&self, reset: &ResetRequest) -> Option<Answer> {
        let mut all = self.0.lanes.lock().unwrap();
        let mut observations = Vec::new();
        for (position, number) in self.lanes_of(&reset.env_indices).into_iter().enumerate() {
            let seed = u64::try_from(reset.seeds[position]).unwrap();
            let trial =
                match reset.options.as_ref().and_then(|options| options.entries.get("trial_index")).and_then(|value| value.kind.clone()) {
                    Some(Kind::Integer(trial)) => u64::try_from(trial).unwrap(),
                    None => 0,
                    other => panic!("{other:?}"),
                };
            assert_eq!(reset.options.is_some(), self.0.settings.trial_option);
            if let Some(mischief) = self.due(seed, 0) {
                return self.mischief(mischief);
            }
            let mut plot = Plot::new(seed, trial);
            plot.length = self.0.settings.length.unwrap_or(plot.length);
            let lane = Lane { seed, trial, plot, step: 0, hits: 0 };
            observations.extend(self.observation(&lane));
            all[number] = Some(lane);
        }
        Some(Answer::Reset(ResetResponse { observation: Some(floats(&observations)), infos: None }))
    }

    fn step(&self, step: &StepRequest) -> Option<Answer> {
        let mut all = self.0.lanes.lock().unwrap();
        let lanes = self.lanes_of(&step.env_indices);
        let width = lanes.len();
        let actions = read(&step.action.as_ref().unwrap().leaves[0]);
        assert_eq!(actions.len(), width);
        let mut response = StepResponse { env_indices: step.env_indices.clone(), ..StepResponse::default() };
        let (mut observations, mut infos) = (Vec::new(), Vec::new());
        let mut wrong_shape = false;
        for (number, action) in lanes.into_iter().zip(actions) {
            // A step of a lane that was never reset is this test's fault.
            let lane = all[number].as_mut().unwrap();
            let mischief = self.due(lane.seed, lane.step + 1);
            let (right, _, points) = lane.plot.at(lane.step);
            lane.step += 1;
            let mut reward = 0.0;
            if action == right {
                reward = points;
                lane.hits += 1;
            }
            match mischief {
                Some(Mischief::NanReward) => reward = f64::NAN,
                Some(Mischief::WrongShape) => wrong_shape = true,
                Some(other) => return self.mischief(other),
                None => {}
            }
            let done = lane.step >= lane.plot.length;
            response.rewards.push(reward);
            response.terminated_mask.push(u8::from(done));
            response.truncated_mask.push(0);
            let mut info = MetaMap::default();
            if done {
                info.entries.insert("is_success".to_owned(), MetaValue { kind: Some(Kind::Bool(lane.hits * 2 > lane.plot.length)) });
            }
            infos.push(info);
            observations.extend(self.observation(lane));
        }
        if wrong_shape {
            observations.pop();
        }
        response.observation = Some(floats(&observations));
        response.infos = Some(if width == 1 {
            infos.remove(0)
        } else {
            let list = |kinds: Vec<Kind>| MetaValue {
                kind: Some(Kind::List(MetaList { items: kinds.into_iter().map(|kind| MetaValue { kind: Some(kind) }).collect() })),
            };
            let done = response.terminated_mask.iter().map(|mark| Kind::Bool(*mark != 0)).collect();
            MetaMap {
                entries: [
                    ("final_info".to_owned(), list(infos.into_iter().map(Kind::Map).collect())),
                    ("_final_info".to_owned(), list(done)),
                ]
                .into(),
            }
        });
        Some(Answer::Step(response))
    }

    fn answer(&self, request: &JoinRequest) -> Option<Answer> {
        match request.kind.as_ref().unwrap() {
            Request_::Configure(configure) => {
                assert!(self.0.settings.editions.contains(&configure.selected_workflow_edition));
                Some(Answer::Configure(ConfigureEnvResponse {}))
            }
            Request_::Reset(reset) => self.reset(reset),
            Request_::Step(step) => self.step(step),
            Request_::Close(_) => Some(Answer::Close(CloseEnvsResponse::default())),
            Request_::Render(_) => panic!("nobody renders"),
        }
    }
}

/// Frees the only session when the stream ends.
struct Slot(Arc<Shared>);

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.joined.lock().unwrap() = false;
    }
}

#[tonic::async_trait]
impl EnvService for StubEnv {
    async fn handshake(&self, _: Request<HandshakeRequest>) -> Result<Response<HandshakeResponse>, Status> {
        let settings = &self.0.settings;
        let mut metadata = MetaMap::default();
        if settings.trial_option {
            metadata
                .entries
                .insert("rlmesh.env.v1.reset_options".to_owned(), MetaValue { kind: Some(Kind::Text("trial_index".to_owned())) });
        }
        let spec = EnvSpec {
            id: "stub".to_owned(),
            action_space: Some(box_space(1)),
            observation_space: Some(box_space(i64::try_from(settings.observation.max(3)).unwrap())),
            metadata: Some(metadata),
        };
        let contract =
            EnvContract { spec: Some(spec), num_envs: settings.lanes, autoreset_mode: settings.autoreset.into(), ..EnvContract::default() };
        let base = CoreHandshake {
            compatible: true,
            capabilities: if settings.subset { rlmesh_proto::capability_map(&["subset_step"]) } else { HashMap::new() },
            supported_workflow_editions: settings.editions.clone(),
            peer_info: Some(rlmesh_proto::peer_info("stub-env")),
            ..CoreHandshake::default()
        };
        Ok(Response::new(HandshakeResponse { base: Some(base), env_contract: Some(contract) }))
    }

    type JoinStream = Pin<Box<dyn Stream<Item = Result<JoinResponse, Status>> + Send>>;

    async fn join(&self, request: Request<Streaming<JoinRequest>>) -> Result<Response<Self::JoinStream>, Status> {
        if std::mem::replace(&mut *self.0.joined.lock().unwrap(), true) {
            return Err(Status::failed_precondition("one session at a time"));
        }
        let slot = Slot(Arc::clone(&self.0));
        let mut requests = request.into_inner();
        let stub = self.clone();
        let (sender, receiver) = mpsc::channel(64);
        tokio::spawn(async move {
            let _slot = slot;
            while let Some(Ok(request)) = requests.next().await {
                if !stub.0.settings.step_time.is_zero() {
                    tokio::time::sleep(stub.0.settings.step_time).await;
                }
                let Some(kind) = stub.answer(&request) else { continue };
                let fatal = matches!(&kind, Answer::Error(error) if !error.is_recoverable && stub.0.settings.lanes == 1);
                let response = JoinResponse {
                    kind: Some(kind),
                    request_id: request.request_id,
                    endpoint_total_ns: Some(1000),
                    ..JoinResponse::default()
                };
                if sender.send(Ok(response)).await.is_err() || fatal {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Result<Response<ShutdownResponse>, Status> {
        Err(Status::unimplemented("a platform ends processes"))
    }
}

pub fn unit(value: f32) -> SpaceValue {
    floats(&[value])
}

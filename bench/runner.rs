//! Speed of the runner, beside a bare loop over the same wire and the SDK's own `rlmesh.run`. Without Python the figures that
//! need real SDK servers are reported as skipped.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a benchmark ends where it can't go on")]

#[path = "../crates/runner/tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rlm_bench::{Goal, figure, median, note};
use rlm_runner::{Address, Tuning, dial};
use rlmesh_proto::core::v1::EnvSpec;
use rlmesh_proto::env::v1 as env;
use rlmesh_proto::model::v1 as model;
use rlmesh_proto::spaces::v1::{BoxSpec, DataType, DictSpec, MetaMap, SpaceSpec, SpaceValue, box_spec::Bounds, space_spec::Spec};
use support::agent::{Agent, block, run_spec, task};
use support::env::EnvSettings;
use support::model::ModelSettings;
use support::python::{Server, interpreter, root};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

const STEPS: u32 = 200;
/// Long enough that opening the streams does not count.
const EPISODES: u32 = 40;

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// As the runner's own `main` has it.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

struct ModelLine {
    requests: mpsc::Sender<model::JoinRequest>,
    responses: Streaming<model::JoinResponse>,
    route: String,
    count: u64,
}

impl ModelLine {
    async fn open(address: &str, spec: EnvSpec) -> Self {
        let channel = dial(&Address::parse(address).unwrap(), Duration::from_secs(10)).await.unwrap();
        let mut client = model::model_service_client::ModelServiceClient::new(channel)
            .max_decoding_message_size(256 << 20)
            .max_encoding_message_size(256 << 20);
        let base = Some(rlmesh_proto::core_handshake_request("bench", &[], None));
        client.handshake(model::HandshakeRequest { base }).await.unwrap();
        let (requests, stream) = mpsc::channel(16);
        let responses = client.join(ReceiverStream::new(stream)).await.unwrap().into_inner();
        let mut line = Self { requests, responses, route: uuid::Uuid::now_v7().to_string(), count: 0 };
        let context = Some(line.context());
        let resolve = model::ResolveAdapterRequest {
            context,
            env_spec: Some(spec),
            selected_workflow_edition: "2026.06".into(),
            execution_horizon: 1,
            delivers_history: false,
        };
        match line.call(model::join_request::Kind::ResolveAdapter(resolve)).await {
            model::join_response::Kind::ResolveAdapter(_) => line,
            other => panic!("{other:?}"),
        }
    }

    fn context(&mut self) -> model::AdapterContext {
        self.count += 1;
        model::AdapterContext { session_id: "bench".into(), env_id: self.route.clone(), request_id: self.count.to_string() }
    }

    async fn call(&mut self, kind: model::join_request::Kind) -> model::join_response::Kind {
        let request_id = self.count.to_string();
        self.requests.send(model::JoinRequest { kind: Some(kind), request_id }).await.unwrap();
        self.responses.message().await.unwrap().unwrap().kind.unwrap()
    }

    async fn predict(&mut self, observation: SpaceValue, episode_id: &str, seed: i64) -> SpaceValue {
        let context = Some(self.context());
        let episode_info = vec![model::EpisodeInfo { episode_id: episode_id.to_owned(), seed: Some(seed) }];
        let request = model::PredictRequest { context, observation: Some(observation), episode_info, history: Vec::new(), step: None };
        match self.call(model::join_request::Kind::Predict(request)).await {
            model::join_response::Kind::Predict(response) => response.actions.into_iter().next().unwrap(),
            other => panic!("{other:?}"),
        }
    }
}

/// The barest loop over the same wire: predict, step, nothing else.
async fn bare_loop(model_address: &str, env_address: &str, episodes: u32) -> f64 {
    let channel = dial(&Address::parse(env_address).unwrap(), Duration::from_secs(10)).await.unwrap();
    let mut client = env::env_service_client::EnvServiceClient::new(channel);
    let base = Some(rlmesh_proto::core_handshake_request("bench", &[], None));
    let contract = client.handshake(env::HandshakeRequest { base }).await.unwrap().into_inner().env_contract.unwrap();
    let (requests, stream) = mpsc::channel::<env::JoinRequest>(16);
    let mut responses = client.join(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let mut line = ModelLine::open(model_address, contract.spec.unwrap()).await;
    let mut steps = 0_u64;
    let mut call = async |kind: env::join_request::Kind| {
        requests.send(env::JoinRequest { kind: Some(kind), request_id: "1".into() }).await.unwrap();
        responses.message().await.unwrap().unwrap().kind.unwrap()
    };
    let started = Instant::now();
    for seed in 0..i64::from(episodes) {
        let episode_id = uuid::Uuid::now_v7().to_string();
        let reset = env::ResetRequest { seeds: vec![seed], episode_ids: vec![episode_id.clone()], ..env::ResetRequest::default() };
        let env::join_response::Kind::Reset(reset) = call(env::join_request::Kind::Reset(reset)).await else { panic!() };
        let mut observation = reset.observation.unwrap();
        for _ in 0..STEPS {
            let action = line.predict(observation, &episode_id, seed).await;
            let step = env::StepRequest { action: Some(action), episode_ids: vec![episode_id.clone()], ..env::StepRequest::default() };
            let env::join_response::Kind::Step(step) = call(env::join_request::Kind::Step(step)).await else { panic!() };
            steps += 1;
            observation = step.observation.unwrap();
            if step.terminated_mask.first() == Some(&1) || step.truncated_mask.first() == Some(&1) {
                break;
            }
        }
    }
    steps as f64 / started.elapsed().as_secs_f64()
}

fn through_runner(model: &Server, env: &Server, lanes: u32, episodes: u32) -> f64 {
    let spec = run_spec(lanes, Some(lanes), vec![task(0, Some(STEPS))]);
    let agent = Agent::new(spec, vec![block(0, episodes, 0, 0)], |_, lanes| EnvSettings::new(lanes), ModelSettings::default());
    agent.give("model-0", &model.address);
    agent.give("env-0-0", &env.address);
    agent.run(Tuning::default()).unwrap();
    assert_eq!(agent.done().unwrap().failure, None);
    let metrics = agent.metrics();
    assert_eq!(metrics.episodes, u64::from(episodes));
    metrics.env_steps_per_second
}

fn cartpole(python: &Path) {
    let tcp = || format!("tcp://127.0.0.1:{}", free_port());
    let start = |name: &str, lanes: Option<u32>| Server::start(python, "quickstart", name, lanes, "{}", &tcp());
    let model = start("policies:Balancer", None);
    let env = start("envs:CartPole", Some(1));
    let rounds = 5;
    let (mut bare, mut ours, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        // Turn about, so that what else the machine does meets both alike.
        let one = runtime().block_on(bare_loop(&model.address, &env.address, EPISODES));
        let other = through_runner(&model, &env, 1, EPISODES);
        bare.push(one);
        ours.push(other);
        ratios.push(other / one);
    }
    note("cartpole_bare_loop_steps_per_second", median(bare));
    let one_lane = median(ours);
    note("cartpole_runner_one_lane_steps_per_second", one_lane);
    figure("cartpole_runner_to_bare_loop", median(ratios), Goal::AtLeast(0.95));
    let output = Command::new(python)
        .arg(root().join("bench/python/sdk_run.py"))
        .args([&model.address, &env.address, &EPISODES.to_string(), &STEPS.to_string()])
        .output()
        .unwrap();
    let sdk: f64 = match String::from_utf8_lossy(&output.stdout).trim().parse() {
        Ok(value) => value,
        Err(_) => panic!("rlmesh.run did not run: {}", String::from_utf8_lossy(&output.stderr)),
    };
    note("cartpole_sdk_run_steps_per_second", sdk);
    figure("cartpole_runner_to_sdk_run", one_lane / sdk, Goal::AtLeast(3.0));
    drop(env);
    let env = start("envs:CartPole", Some(8));
    let eight = median((0..3).map(|_| through_runner(&model, &env, 8, 64)).collect());
    note("cartpole_runner_eight_lanes_steps_per_second", eight);
    note("cartpole_runner_eight_lanes_to_sdk_run", eight / sdk);
}

fn camera_predicts(python: &Path) {
    let image = SpaceSpec {
        shape: vec![224, 224, 3],
        dtype: DataType::Uint8.into(),
        spec: Some(Spec::Box(BoxSpec { bounds: Some(Bounds::Unbounded(true)) })),
    };
    let state = SpaceSpec {
        shape: vec![8],
        dtype: DataType::Float32.into(),
        spec: Some(Spec::Box(BoxSpec { bounds: Some(Bounds::Unbounded(true)) })),
    };
    let observation_space = SpaceSpec {
        spec: Some(Spec::Dict(DictSpec {
            keys: vec!["front".into(), "wrist".into(), "state".into()],
            spaces: vec![image.clone(), image, state.clone()],
        })),
        ..SpaceSpec::default()
    };
    let action_space = SpaceSpec { shape: vec![7], ..state };
    let spec = EnvSpec {
        id: "cameras".into(),
        observation_space: Some(observation_space),
        action_space: Some(action_space),
        metadata: Some(MetaMap::default()),
    };
    let observation =
        SpaceValue { leaves: vec![Bytes::from(vec![7; 224 * 224 * 3]), Bytes::from(vec![9; 224 * 224 * 3]), Bytes::from(vec![0; 32])] };
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut times = Vec::new();
    for address in [format!("tcp://127.0.0.1:{port}"), format!("unix://{}/model.sock", folder.path().display())] {
        let server = Server::start_in(python, &root().join("bench/python"), "cameras:Blind", None, "{}", &address);
        times.push(runtime().block_on(async {
            let mut line = ModelLine::open(&server.address, spec.clone()).await;
            let mut times = Vec::new();
            for round in 0..320 {
                let started = Instant::now();
                line.predict(observation.clone(), "episode", 1).await;
                if round >= 20 {
                    times.push(started.elapsed().as_secs_f64() * 1e3);
                }
            }
            median(times)
        }));
    }
    figure("predict_301_kb_tcp_p50_ms", times[0], Goal::AtMost(2.0));
    note("predict_301_kb_unix_p50_ms", times[1]);
    note("predict_301_kb_tcp_to_unix", times[0] / times[1]);
}

fn many_lanes() {
    let forward = Duration::from_millis(5);
    let spec = run_spec(64, Some(64), vec![task(0, None)]);
    let env = |_: u32, lanes: u32| EnvSettings { length: Some(150), ..EnvSettings::new(lanes) };
    let model = ModelSettings { forward, ..ModelSettings::default() };
    let agent = Agent::new(spec, vec![block(0, 64 * 8, 0, 0)], env, model);
    agent.run(Tuning::default()).unwrap();
    let metrics = agent.metrics();
    let possible = 64.0 / forward.as_secs_f64();
    note("lanes_64_steps_per_second", metrics.env_steps_per_second);
    figure("lanes_64_of_possible", metrics.env_steps_per_second / possible, Goal::AtLeast(0.9));
    for series in metrics.series {
        println!("# {} {} p50 {:.3} {}", series.op, series.metric, series.p50, series.unit);
    }
}

fn main() {
    if rlm_bench::only_tested() {
        return;
    }
    many_lanes();
    if let Some(python) = interpreter("requirements.txt") {
        cartpole(&python);
        camera_predicts(&python);
    }
}

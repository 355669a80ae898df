//! Stand-ins for what a runner talks to: an environment, a model and an agent, each served for real over unix sockets. A
//! "process" is an async runtime of its own, so that killing it closes its sockets at once, as a killed process does.

#![expect(dead_code, reason = "each test program uses a part of it")]

pub mod agent;
pub mod env;
pub mod model;
pub mod python;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use rlmesh_proto::spaces::v1::{BoxSpec, DataType, SpaceSpec, SpaceValue, space_spec::Spec};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;

/// A served endpoint; dropping it kills it.
pub struct Process {
    runtime: Option<tokio::runtime::Runtime>,
    path: PathBuf,
}

impl Process {
    pub fn serve(path: &Path, routes: Routes) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let _ = std::fs::remove_file(path);
        let listener = {
            let _entered = runtime.enter();
            tokio::net::UnixListener::bind(path).unwrap()
        };
        runtime.spawn(async move {
            tonic::transport::Server::builder().add_routes(routes).serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
        });
        Self { runtime: Some(runtime), path: path.to_owned() }
    }

    pub fn address(&self) -> String {
        format!("unix://{}", self.path.display())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// 64 well-mixed bits.
pub fn mix(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

pub fn floats(values: &[f32]) -> SpaceValue {
    SpaceValue { leaves: vec![Bytes::from(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())] }
}

pub fn read(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

pub fn box_space(elements: i64) -> SpaceSpec {
    SpaceSpec { shape: vec![elements], dtype: DataType::Float32.into(), spec: Some(Spec::Box(BoxSpec::default())) }
}

/// What an episode is made of: a function of seed and trial alone.
#[derive(Debug, Clone, Copy)]
pub struct Plot {
    code: u64,
    pub length: u32,
}

impl Plot {
    pub fn new(seed: u64, trial: u64) -> Self {
        let code = mix(seed ^ mix(trial));
        Self { code, length: 3 + (code >> 56) as u32 % 12 }
    }

    /// What is right at a step, what the observation hints, and the score of a right guess.
    pub fn at(self, step: u32) -> (f32, f32, f64) {
        let bits = mix(self.code ^ u64::from(step));
        let right = if bits & 1 == 1 { 1.0 } else { -1.0 };
        let hint = if bits & 6 == 0 { -right } else { right };
        // Not exact in binary on purpose: the order of the sum shows.
        (right, hint, ((bits >> 8) % 100) as f64 / 10.0 + 0.1)
    }
}

/// The action of the stand-in model: follows the hint, except where episode seed and number of the predict say otherwise.
pub fn policy(seed: u64, predict: u64, hint: f32) -> f32 {
    if mix(seed.wrapping_mul(31) ^ predict).is_multiple_of(5) { -hint } else { hint }
}

/// What a row must come to, computed without any runner.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    pub reward: u64,
    pub steps: u32,
    pub success: Option<bool>,
    pub terminated: bool,
    pub truncated: bool,
}

pub fn expected(seed: u64, trial: u64, horizon: u32, max_steps: u32) -> Expected {
    let plot = Plot::new(seed, trial);
    let (mut reward, mut hits, mut step) = (0.0_f64, 0, 0);
    let mut predict = 0;
    let mut chunk: Vec<f32> = Vec::new();
    loop {
        if chunk.is_empty() {
            let (_, hint, _) = plot.at(step);
            chunk = (0..horizon).map(|part| policy(seed, predict * 1000 + u64::from(part), hint)).collect();
            predict += 1;
        }
        let action = chunk.remove(0);
        let (right, _, points) = plot.at(step);
        step += 1;
        if action == right {
            reward += points;
            hits += 1;
        }
        let terminated = step >= plot.length;
        if terminated || step >= max_steps {
            return Expected {
                reward: reward.to_bits(),
                steps: step,
                success: terminated.then_some(hits * 2 > plot.length),
                terminated,
                truncated: !terminated,
            };
        }
    }
}

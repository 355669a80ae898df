//! The request after reading: the same fields as the tables, with defaults. None where a field is absent or was wrong.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::evaluation::{Checkpoint, Limits, Params, Recording, Resources, SuccessRule};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawRequest {
    pub name: Option<String>,
    pub tags: BTreeMap<String, String>,
    pub client_token: Option<String>,
    pub cluster: Option<String>,
    pub models: Option<Vec<Option<RawModel>>>,
    pub environments: Vec<Option<RawEnvironment>>,
    pub tasks: Option<Vec<Option<RawTask>>>,
    pub limits: RawLimits,
    pub pairs: Option<Vec<Option<RawPair>>>,
    pub recording: Recording,
    pub priority: i32,
    pub metadata: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawModel {
    pub id: Option<String>,
    #[serde(rename = "ref")]
    pub reference: Option<String>,
    pub image: Option<String>,
    pub entrypoint: Option<String>,
    pub python_path: Option<String>,
    pub python: Option<String>,
    pub address: Option<String>,
    pub params: Params,
    pub checkpoints: Vec<Option<RawCheckpoint>>,
    pub checkpoint_sets: Option<BTreeMap<String, Vec<Option<RawCheckpoint>>>>,
    pub execution_horizon: u32,
    pub prefetch_lead: u32,
    pub workflow_edition: Option<String>,
    pub resources: Resources,
    pub env: BTreeMap<String, String>,
    pub secret_env: BTreeMap<String, String>,
    pub startup_timeout: u64,
    pub replicas: u32,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawEnvironment {
    pub id: Option<String>,
    #[serde(rename = "ref")]
    pub reference: Option<String>,
    pub image: Option<String>,
    pub entrypoint: Option<String>,
    pub python_path: Option<String>,
    pub python: Option<String>,
    pub address: Option<String>,
    pub params: Params,
    pub resources: Resources,
    pub share_model_gpu: bool,
    pub lanes_per_pod: Option<u32>,
    pub env: BTreeMap<String, String>,
    pub secret_env: BTreeMap<String, String>,
    pub startup_timeout: u64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawCheckpoint {
    pub param: Option<String>,
    pub uri: Option<String>,
    pub revision: Option<String>,
    pub sha256: Option<String>,
}

impl RawCheckpoint {
    pub fn read(&self) -> Option<Checkpoint> {
        Some(Checkpoint {
            param: self.param.clone()?,
            uri: self.uri.clone()?,
            revision: self.revision.clone(),
            sha256: self.sha256.as_ref().map(|hex| hex.to_ascii_lowercase()),
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawTask {
    pub env: Option<String>,
    pub task_id: Option<String>,
    pub params: Option<Params>,
    pub episodes: Option<u64>,
    pub seed: u64,
    pub seeds: Option<Vec<u64>>,
    pub trial_index_base: u64,
    pub workers: Option<u32>,
    pub max_episode_steps: Option<u32>,
    pub instruction: Option<String>,
    pub success: Option<RawSuccess>,
    pub metadata: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawSuccess {
    pub metric: Option<crate::evaluation::SuccessMetric>,
    pub at_least: Option<f64>,
}

impl RawSuccess {
    pub fn read(&self) -> Option<SuccessRule> {
        Some(SuccessRule { metric: self.metric?, at_least: self.at_least? })
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawLimits {
    pub max_episode_steps: Option<u32>,
    pub max_episode_seconds: Option<f64>,
    pub queue_timeout: u64,
    pub progress_timeout: u64,
    pub max_errored_fraction: f64,
    pub environment_crash_retries: u32,
    pub reassign_after: u64,
}

impl RawLimits {
    pub fn read(&self) -> Limits {
        Limits {
            max_episode_steps: self.max_episode_steps,
            max_episode_seconds: self.max_episode_seconds,
            queue_timeout_ms: self.queue_timeout,
            progress_timeout_ms: self.progress_timeout,
            max_errored_fraction: self.max_errored_fraction,
            environment_crash_retries: self.environment_crash_retries,
            reassign_after_ms: self.reassign_after,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawPair {
    pub model: Option<String>,
    pub env: Option<String>,
}

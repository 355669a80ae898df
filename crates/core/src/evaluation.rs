//! What an evaluation is, once its request has been checked: definitions, tasks, limits, and the specification of a run.
//!
//! These types are the one document form of an evaluation: SQL stores them as JSON, the cell protocol carries them as JSON,
//! REST shows them. They never hold a secret value, only names of secrets.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::ids::{ClusterId, EvaluationId, RunId};

/// Construction keyword arguments, as JSON.
pub type Params = Map<String, Value>;

/// A checked request with every default filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EvaluationSpec {
    pub name: String,
    pub tags: BTreeMap<String, String>,
    /// None: any connected cluster that fits.
    #[schemars(with = "Option<String>")]
    pub cluster: Option<ClusterId>,
    pub models: Vec<ModelDefinition>,
    pub environments: Vec<EnvironmentDefinition>,
    pub tasks: Vec<Task>,
    pub limits: Limits,
    /// None: every model meets every task.
    pub pairs: Option<Vec<Pair>>,
    pub recording: Recording,
    pub priority: i32,
    #[schemars(with = "BTreeMap<String, Value>")]
    pub metadata: Map<String, Value>,
}

/// How a model or environment is started, and with what.
///
/// Exactly one of `image`, `entrypoint`, `address` is what runs: an image on a cluster, an entrypoint or a running server's
/// address on a local cell. An image and an entrypoint together are allowed: each kind of cluster takes its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelDefinition {
    pub id: String,
    pub image: Option<String>,
    /// `module:Class` for `python -m rlmesh.serve`.
    pub entrypoint: Option<String>,
    /// Absolute folder put first on the interpreter's module path.
    pub python_path: Option<String>,
    /// The interpreter; None: the cell's own.
    pub python: Option<String>,
    /// `tcp://host:port` or `unix:///path` of a server that runs already.
    pub address: Option<String>,
    #[schemars(with = "BTreeMap<String, Value>")]
    pub params: Params,
    pub checkpoints: Vec<Checkpoint>,
    /// Actions replayed per predict; 1: none ahead.
    pub execution_horizon: u32,
    /// Actions left in the chunk when the next is predicted; results at different leads are not comparable.
    pub prefetch_lead: u32,
    pub workflow_edition: Option<String>,
    pub resources: Resources,
    pub env: BTreeMap<String, String>,
    /// Variable -> `secret/key`.
    pub secret_env: BTreeMap<String, String>,
    pub startup_timeout_ms: u64,
    pub replicas: u32,
}

/// See [`ModelDefinition`] for the fields in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvironmentDefinition {
    pub id: String,
    pub image: Option<String>,
    pub entrypoint: Option<String>,
    pub python_path: Option<String>,
    pub python: Option<String>,
    pub address: Option<String>,
    #[schemars(with = "BTreeMap<String, Value>")]
    pub params: Params,
    pub resources: Resources,
    pub share_model_gpu: bool,
    /// `RLMESH_NUM_ENVS`; None: the platform chooses.
    pub lanes_per_pod: Option<u32>,
    pub env: BTreeMap<String, String>,
    pub secret_env: BTreeMap<String, String>,
    pub startup_timeout_ms: u64,
}

/// A definition of either kind, for describing it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Definition {
    Model(ModelDefinition),
    Environment(EnvironmentDefinition),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Checkpoint {
    /// The `load()` keyword argument that receives the path.
    pub param: String,
    pub uri: String,
    pub revision: Option<String>,
    pub sha256: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// Kubernetes quantity.
    pub cpu: Option<String>,
    /// Kubernetes quantity.
    pub memory: Option<String>,
    pub gpu: u32,
    pub gpu_product: Option<String>,
    /// Kubernetes quantity, size of `/dev/shm`.
    pub shm: Option<String>,
}

/// `episodes` rows of one environment, for each model that meets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Task {
    /// Id of an environment of this evaluation.
    pub env: String,
    /// Name of the task; unique together with `env`.
    pub task_id: String,
    /// What the environment is constructed with: the definition's params, the catalogue entry's, then the task's.
    #[schemars(with = "BTreeMap<String, Value>")]
    pub params: Params,
    pub episodes: u64,
    pub seed: u64,
    /// Explicit seeds, one per episode; None: seed + i.
    pub seeds: Option<Vec<u64>>,
    pub trial_index_base: u64,
    /// Environment lanes in all; None: the platform chooses.
    pub workers: Option<u32>,
    pub max_episode_steps: Option<u32>,
    pub instruction: Option<String>,
    pub success: Option<SuccessRule>,
    #[schemars(with = "BTreeMap<String, Value>")]
    pub metadata: Map<String, Value>,
}

/// A recorded rule that decides success in place of the environment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SuccessRule {
    pub metric: SuccessMetric,
    pub at_least: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum SuccessMetric {
    /// Sum of the episode's rewards.
    Reward,
    /// Steps of the episode.
    Steps,
}

impl SuccessRule {
    /// Whether an episode with this reward and this many steps is a success.
    #[must_use]
    pub fn decide(&self, reward: f64, steps: u32) -> bool {
        match self.metric {
            SuccessMetric::Reward => reward >= self.at_least,
            SuccessMetric::Steps => f64::from(steps) >= self.at_least,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    pub max_episode_steps: Option<u32>,
    pub max_episode_seconds: Option<f64>,
    pub queue_timeout_ms: u64,
    pub progress_timeout_ms: u64,
    /// Share of errored rows above which the evaluation is *failed*.
    pub max_errored_fraction: f64,
    pub environment_crash_retries: u32,
    pub reassign_after_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        const MINUTE: u64 = 60_000;
        Self {
            max_episode_steps: None,
            max_episode_seconds: None,
            queue_timeout_ms: 24 * 60 * MINUTE,
            progress_timeout_ms: 20 * MINUTE,
            max_errored_fraction: 0.0,
            environment_crash_retries: 1,
            reassign_after_ms: 60 * MINUTE,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pair {
    pub model: String,
    pub env: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Recording {
    /// `none`, `failures`, `all`, `sample:K`.
    pub video: String,
    /// `none`, `failures`, `all`.
    pub steps: String,
}

impl Default for Recording {
    fn default() -> Self {
        Self { video: "none".to_owned(), steps: "none".to_owned() }
    }
}

/// What a run is: one model, one environment and its bindings in turn. Rows travel beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunSpec {
    pub run_id: RunId,
    pub evaluation_id: EvaluationId,
    pub generation: u64,
    pub model: ModelDefinition,
    pub environment: EnvironmentDefinition,
    /// Distinct construction arguments of the tasks, in order of first use.
    pub bindings: Vec<Binding>,
    /// The evaluation's tasks of this environment; row blocks name them by position here.
    pub tasks: Vec<RunTask>,
    /// Environment lanes in all, at least 1.
    pub lanes: u32,
    pub limits: Limits,
    pub recording: Recording,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Binding {
    pub index: u32,
    pub params: Params,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunTask {
    /// Position of the task in the evaluation's `tasks`.
    pub task_index: u32,
    pub task_id: String,
    /// Index into [`RunSpec::bindings`].
    pub binding: u32,
    pub max_episode_steps: Option<u32>,
    pub max_episode_seconds: Option<f64>,
    pub instruction: Option<String>,
    pub success: Option<SuccessRule>,
}

/// What a run really ran with.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Provenance {
    pub model_image_digest: Option<String>,
    pub environment_image_digest: Option<String>,
    pub checkpoint_digests: BTreeMap<String, String>,
    /// SHA-256 of the describe documents on the handshakes.
    pub model_describe_sha256: Option<String>,
    pub environment_describe_sha256: Option<String>,
    pub workflow_edition: Option<String>,
    pub execution_horizon: Option<u32>,
    pub prefetch_lead: Option<u32>,
    pub lanes: Option<u32>,
    pub lanes_per_pod: Option<u32>,
    pub node: Option<String>,
    pub gpu_product: Option<String>,
    pub gpu_driver: Option<String>,
    /// Package versions as the peers reported them.
    pub model_sdk_version: Option<String>,
    pub environment_sdk_version: Option<String>,
    pub agent_version: Option<String>,
    /// Start-up marks of the peers, milliseconds.
    pub model_startup_ms: BTreeMap<String, u64>,
    pub environment_startup_ms: BTreeMap<String, u64>,
    pub warnings: Vec<String>,
}

/// Throughput and timings of a run, cumulative for one generation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RunMetrics {
    pub active_ms: u64,
    pub episodes: u64,
    pub env_steps: u64,
    pub env_steps_per_second: f64,
    pub episodes_per_second: f64,
    /// Series by operation, for example `model.predict` `rpc.total`.
    pub series: Vec<MetricSeries>,
}

impl RunMetrics {
    /// Adds what another stretch of the same work measured. Rates stay as they are. Percentiles can't be joined: the higher
    /// one counts.
    pub fn add(&mut self, other: &Self) {
        self.active_ms += other.active_ms;
        self.episodes += other.episodes;
        self.env_steps += other.env_steps;
        let mut series: BTreeMap<(String, String, String), MetricSeries> =
            std::mem::take(&mut self.series).into_iter().map(|series| (series.key(), series)).collect();
        for more in &other.series {
            series.entry(more.key()).and_modify(|sum| sum.add(more)).or_insert_with(|| more.clone());
        }
        self.series = series.into_values().collect();
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricSeries {
    pub op: String,
    pub component: String,
    pub metric: String,
    pub unit: String,
    pub count: u64,
    pub avg: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
}

impl MetricSeries {
    fn key(&self) -> (String, String, String) {
        (self.op.clone(), self.component.clone(), self.metric.clone())
    }

    fn add(&mut self, other: &Self) {
        let count = self.count + other.count;
        if count > 0 {
            self.avg = (self.avg * self.count as f64 + other.avg * other.count as f64) / count as f64;
        }
        self.count = count;
        self.p50 = self.p50.max(other.p50);
        self.p95 = self.p95.max(other.p95);
        self.p99 = self.p99.max(other.p99);
    }
}

//! REST types that more than one crate uses. Requests and answers are camelCase, times RFC 3339 UTC.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use rlm_core::error::{Code, Problem};
use rlm_core::evaluation::{EvaluationSpec, Provenance, RunMetrics};
use rlm_core::failure::Failure;
use rlm_core::run::{EvaluationStatus, RunState, Waiting};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Every error answer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ErrorDetail {
    #[schema(value_type = String)]
    pub code: Code,
    pub message: String,
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    pub details: Vec<Problem>,
    pub request_id: String,
}

/// One page of a list; `nextCursor` is null at the end.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next_cursor: Option<String>,
}

/// `GET /v1/info`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    pub version: String,
    pub auth: InfoAuth,
    pub urls: InfoUrls,
    pub grpc: InfoGrpc,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct InfoAuth {
    pub cli: InfoCli,
    pub device_authorization_endpoint: String,
    pub token_endpoint: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct InfoCli {
    pub client_id: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct InfoUrls {
    pub api: String,
    pub dashboard: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct InfoGrpc {
    pub host: String,
    pub port: u16,
    pub tls: bool,
}

/// Answer to `POST /v1/evaluations`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EvaluationCreated {
    pub id: String,
    #[schema(value_type = String)]
    pub status: EvaluationStatus,
    pub warnings: Vec<String>,
    /// `<urls.dashboard>/evaluations/<id>`.
    pub url: String,
}

/// An evaluation in a list.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EvaluationSummary {
    pub id: String,
    pub name: String,
    pub evaluation_label: String,
    #[schema(value_type = String)]
    pub status: EvaluationStatus,
    pub progress: Progress,
    pub tags: BTreeMap<String, String>,
    pub cluster: Option<String>,
    #[schema(value_type = Option<Object>)]
    pub waiting: Option<Waiting>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
    pub created_by: String,
}

/// Errored rows count as completed episodes (SDK clients read `completedEpisodes`).
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    pub completed_episodes: u64,
    pub total_episodes: u64,
    pub scored_episodes: u64,
    pub errored_episodes: u64,
}

/// `GET /v1/evaluations/{id}`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EvaluationDetail {
    #[serde(flatten)]
    pub summary: EvaluationSummary,
    /// The request as it was sent.
    #[schema(value_type = Object)]
    pub request: Value,
    /// The checked request with every default.
    #[schema(value_type = Object)]
    pub effective: EvaluationSpec,
    pub warnings: Vec<String>,
    pub runs: Vec<RunSummary>,
    /// Failures of errored rows, most frequent first, at most 20.
    pub failures: Vec<FailureCount>,
    /// Seconds from submission to the first episode, and from there to the end.
    pub queued_seconds: f64,
    pub active_seconds: f64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunSummary {
    pub id: String,
    pub model: String,
    pub env: String,
    #[schema(value_type = String)]
    pub state: RunState,
    pub generation: u64,
    pub cluster: Option<String>,
    pub rows: u64,
    #[schema(value_type = Option<Object>)]
    pub waiting: Option<Waiting>,
    #[schema(value_type = Option<Object>)]
    pub failure: Option<Failure>,
    #[schema(value_type = Option<Object>)]
    pub provenance: Option<Provenance>,
    #[schema(value_type = Option<Object>)]
    pub metrics: Option<RunMetrics>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailureCount {
    pub count: u64,
    #[schema(value_type = Object)]
    pub example: Failure,
    pub example_row: u64,
    /// The run of that row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub example_run: Option<String>,
}

/// One row with its outcome (`GET /v1/evaluations/{id}/rows`, one line of an export).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RowResult {
    pub row: u64,
    pub model: String,
    pub env: String,
    pub task_id: String,
    pub trial: u64,
    pub seed: u64,
    pub trial_index: u64,
    /// `pending`, `scored`, `errored`.
    pub outcome: RowOutcome,
    pub reward: Option<f64>,
    pub steps: Option<u32>,
    pub terminated: Option<bool>,
    pub truncated: Option<bool>,
    /// Null: the environment said nothing and the task has no rule.
    pub success: Option<bool>,
    pub first_observation_sha256: Option<String>,
    pub conformance_warnings: u32,
    #[schema(value_type = Option<Object>)]
    pub failure: Option<Failure>,
    /// Attempts that ended and said how, the one that counts among them. One cut off before that (its runner was killed) said
    /// nothing and was run again under the same seed.
    pub attempts: u32,
    pub started_at: Option<DateTime<Utc>>,
    pub duration_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum RowOutcome {
    Pending,
    Scored,
    Errored,
}

/// `GET /v1/evaluations/{id}/scores`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Scores {
    pub group_by: String,
    pub groups: Vec<ScoreGroup>,
    /// Paired differences of every two models that share rows, per task and over all tasks.
    pub comparisons: Vec<Comparison>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScoreGroup {
    /// The value of `groupBy` for this group.
    pub key: String,
    pub model: String,
    pub env: Option<String>,
    pub task_id: Option<String>,
    pub episodes: u64,
    pub scored: u64,
    pub errored: u64,
    pub pending: u64,
    /// Scored rows without a success flag.
    pub unknown_success: u64,
    pub successes: u64,
    /// Null when any scored row lacks the flag, or none is scored.
    pub success_rate: Option<f64>,
    /// Wilson, 95 %.
    pub success_interval: Option<[f64; 2]>,
    /// Lowest and highest rate that the errored, unknown and pending rows still allow.
    pub success_bounds: Option<[f64; 2]>,
    pub mean_reward: Option<f64>,
    pub reward_interval: Option<[f64; 2]>,
    pub mean_steps: Option<f64>,
    pub total_steps: u64,
    /// The rule behind `successRate`, in words.
    pub success_rule: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    pub baseline: String,
    pub candidate: String,
    /// Null: over all tasks that both ran.
    pub task_id: Option<String>,
    pub env: Option<String>,
    /// What `rlm_core::stats` computed; see its documentation for each field.
    #[schema(value_type = Object)]
    pub result: Value,
    /// Holm-adjusted over the tasks of this pair of models; null for the overall line.
    pub adjusted_p: Option<f64>,
}

/// `GET /v1/clusters`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cluster {
    pub id: String,
    pub name: String,
    /// `pending`, `connected`, `disconnected`, `archived`.
    pub status: String,
    pub draining: bool,
    pub drained: bool,
    pub executor: Option<String>,
    pub created_at: DateTime<Utc>,
    pub last_seen_at: Option<DateTime<Utc>>,
    pub agent_version: Option<String>,
    pub kubernetes_version: Option<String>,
    pub running_runs: u64,
    pub queued_runs: u64,
    pub unacknowledged_records: u64,
    #[schema(value_type = Vec<Object>)]
    pub nodes: Value,
    #[schema(value_type = Vec<Object>)]
    pub conditions: Value,
}

/// Answer to `POST /v1/clusters/{id}/join-tokens`: the token is shown this once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JoinTokenCreated {
    pub id: String,
    pub cluster_id: String,
    pub token: String,
    pub expires_at: DateTime<Utc>,
    pub command: String,
}

/// `GET /v1/clusters/{id}/join-tokens`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JoinTokenSummary {
    pub id: String,
    /// `unused`, `used`, `expired`, `superseded`, `revoked`.
    pub status: String,
    pub created_at: DateTime<Utc>,
    pub created_by: String,
    pub expires_at: DateTime<Utc>,
    pub used_at: Option<DateTime<Utc>>,
}

/// `POST /v1/clusters/join`, with the join token as bearer: the same exchange as the cell protocol's `Join`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JoinRequest {
    /// Random, 16 to 200 characters, made once: the same nonce may ask again until the token expires.
    pub nonce: String,
    /// UID of the namespace kube-system, where there is one.
    #[serde(default)]
    pub kube_system_uid: String,
    #[serde(default)]
    pub versions: JoinVersions,
    /// `control`, `pull`, `relay`.
    pub purposes: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct JoinVersions {
    pub agent: String,
    pub chart: String,
    pub kubernetes: String,
}

/// The cluster's own credentials.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Joined {
    pub cluster_id: String,
    pub credentials: Vec<JoinedCredential>,
    /// For a Secret of type `kubernetes.io/dockerconfigjson`; empty without the purpose `pull`.
    pub docker_config_json: String,
}

#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JoinedCredential {
    pub purpose: String,
    pub id: String,
    pub secret: String,
}

/// `GET /v1/clusters/{id}/credentials`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CredentialSummary {
    pub id: String,
    /// `control`, `pull`, `relay`.
    pub purpose: String,
    /// `active`, `retiring` (the overlap runs), `retired`, `revoked`.
    pub status: String,
    pub created_at: DateTime<Utc>,
    /// End of the overlap.
    pub retires_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
    pub last_used_at: Option<DateTime<Utc>>,
}

/// Answer to `POST /v1/clusters/{id}/credentials/rotate`: the value is shown this once.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CredentialRotated {
    pub credential: CredentialSummary,
    pub secret: String,
    /// Until then the old value works too.
    pub overlap_ends_at: DateTime<Utc>,
    /// Whether the connected agent was handed the new value.
    pub delivered: bool,
}

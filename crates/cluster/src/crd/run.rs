//! `RLMeshRun`: one run of an evaluation. The agent writes `spec` and `status.artifacts`, the controller the rest of
//! `status`, each by server-side apply under a field manager of its own.
//!
//! Components are named `model-<replica>`, `env-<binding>-<pod>`, `runner` and `describe`, as in the runner's protocol; a run
//! has one environment image, so a binding says enough. Their pods are named `<name of the run>-<component>-<attempt>`.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Condition, Time};

/// Field manager of the controller's part of `status`.
pub const CONTROLLER_MANAGER: &str = "rlmesh-cluster-controller";
/// Field manager of `status.artifacts`.
pub const AGENT_MANAGER: &str = "rlmesh-cluster-agent";

/// RLMeshRun is one run: a model, the environments it is evaluated in, and the runner that drives them. The agent makes and
/// deletes it; the controller makes its pods.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rlmesh.dev",
    version = "v1beta1",
    kind = "RLMeshRun",
    plural = "rlmeshruns",
    singular = "rlmeshrun",
    shortname = "rlrun",
    category = "rlmesh",
    namespaced,
    status = "RunStatus",
    derive = "PartialEq",
    doc = "RLMeshRun is one run: a model, the environments it is evaluated in, and the runner that drives them. The agent makes and deletes it; the controller makes its pods.",
    validation = Rule::new("self.metadata.name.matches('^run-[0-9a-hjkmnp-tv-z]{26}$')").message("the name is the run's id with - for _"),
    printcolumn(name = "Evaluation", type_ = "string", json_path = ".spec.evaluationID"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Pods ready", type_ = "string", json_path = ".status.podsReady"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"PodsReady\")].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.evaluationID == oldSelf.evaluationID").message("evaluationID can't be changed"))]
#[x_kube(validation = Rule::new("self.mode == oldSelf.mode").message("mode can't be changed"))]
#[x_kube(validation = Rule::new("self.generation >= oldSelf.generation").message("generation only grows"))]
#[x_kube(validation = Rule::new("has(self.model) == has(oldSelf.model) && (!has(self.model) || self.model == oldSelf.model)").message("model can't be changed"))]
#[x_kube(validation = Rule::new("has(self.environments) == has(oldSelf.environments) && (!has(self.environments) || self.environments == oldSelf.environments)").message("environments can't be changed"))]
#[x_kube(validation = Rule::new("oldSelf.restarts.all(name, name in self.restarts && self.restarts[name] >= oldSelf.restarts[name])").message("restarts only grow"))]
#[x_kube(validation = Rule::new("oldSelf.releasedAttempts.all(name, name in self.releasedAttempts && self.releasedAttempts[name] >= oldSelf.releasedAttempts[name])").message("releasedAttempts only grow"))]
#[x_kube(validation = Rule::new("!oldSelf.cancel || self.cancel").message("a cancelled run stays cancelled"))]
#[x_kube(validation = Rule::new("self.activeBindings.all(active, self.bindings.exists(binding, binding.index == active.index))").message("activeBindings must be listed in bindings"))]
#[x_kube(validation = Rule::new("self.mode != 'evaluate' || (has(self.agent) && has(self.model) && has(self.environments))").message("a run of mode evaluate has an agent, a model and environments"))]
#[x_kube(validation = Rule::new("self.mode != 'describe' || has(self.model) != has(self.environments)").message("a run of mode describe has either a model or environments"))]
pub struct RLMeshRunSpec {
    /// evaluationID is the evaluation that this run is a part of; required, can't be changed.
    #[serde(rename = "evaluationID")]
    #[schemars(regex(pattern = r"^eval_[0-9a-hjkmnp-tv-z]{26}$"), length(max = 31))]
    pub evaluation_id: String,
    /// generation is that of the control plane's lease; it only grows.
    #[schemars(range(min = 0))]
    pub generation: u64,
    /// mode is what is done: the evaluation, or one image's describe document.
    pub mode: Mode,
    /// agent is where the runner reports to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentEndpoint>,
    /// model is what is evaluated; can't be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
    /// environments is how environment servers are started, the same for each binding; can't be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environments: Option<Environments>,
    /// bindings are the construction arguments that environments may be started with. One that is listed keeps its params;
    /// the agent may list those alone that are about to be active.
    #[serde(default)]
    #[schemars(length(max = 512), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["index"]))]
    pub bindings: Vec<Binding>,
    /// activeBindings are the bindings that environment pods exist for now. When one comes back, `restarts` of its components
    /// are raised with it: an attempt is never made again.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["index"]))]
    pub active_bindings: Vec<ActiveBinding>,
    /// restarts is the attempt that each component is at; one that is not named is at attempt 1. They only grow.
    #[serde(default)]
    #[schemars(schema_with = "attempts")]
    pub restarts: BTreeMap<String, u32>,
    /// releasedAttempts says up to which attempt a component's logs are kept elsewhere, so that its ended pods may go. They
    /// only grow.
    #[serde(default)]
    #[schemars(schema_with = "attempts")]
    pub released_attempts: BTreeMap<String, u32>,
    /// cancel ends every pod of the run, for good.
    #[serde(default)]
    pub cancel: bool,
}

const fn one() -> u32 {
    1
}

/// A map from component to attempt; bounded, because CEL rules walk it.
fn attempts(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object", "default": {}, "maxProperties": 8192,
        "additionalProperties": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 1_000_000},
    })
}

/// A map of environment variables; `longest` bounds a value.
fn variables(longest: u32) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object", "default": {}, "maxProperties": 128,
        "additionalProperties": {"type": "string", "maxLength": longest},
    })
}

fn env(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    variables(8192)
}

fn secret_env(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = variables(512);
    if let Some(values) = schema.pointer_mut("/additionalProperties").and_then(serde_json::Value::as_object_mut) {
        values.insert("pattern".to_owned(), r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+$".into());
    }
    schema
}

/// Construction arguments as the text of a JSON object. Text, because the API server would rewrite numbers: 1.0 would reach
/// the constructor as the integer 1.
fn params_text(longest: u32) -> schemars::Schema {
    schemars::json_schema!({"type": "string", "default": "{}", "minLength": 2, "maxLength": longest, "pattern": r"^\{[\s\S]*\}$"})
}

fn params(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    params_text(131_072)
}

fn binding_params(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    params_text(32_768)
}

fn no_params() -> String {
    "{}".to_owned()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// Model, environments and runner.
    Evaluate,
    /// One pod that writes the image's describe document to standard output and ends.
    Describe,
}

/// How a server is started. Exactly what model and environments have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Program {
    /// image is the container image.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// entrypoint is `module:Class` for `python3 -m rlmesh.serve`; left out: the image's own command serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub entrypoint: Option<String>,
    /// python is the interpreter inside the image; left out: `python3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub python: Option<String>,
    /// pythonPath is a folder inside the image, put first on the interpreter's module path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub python_path: Option<String>,
    /// env are variables; those that RLMesh sets itself win.
    #[serde(default)]
    #[schemars(schema_with = "env")]
    pub env: BTreeMap<String, String>,
    /// secretEnv are variables from Secrets of the pods' namespace: name to `secret/key`.
    #[serde(default)]
    #[schemars(schema_with = "secret_env")]
    pub secret_env: BTreeMap<String, String>,
    /// resources are requested; memory and GPUs are limits too.
    #[serde(default)]
    pub resources: Resources,
    /// startupTimeoutSeconds is how long a pod has, from when its image is there, until it serves.
    #[serde(default = "ten_minutes")]
    #[schemars(range(min = 1, max = 86_400))]
    pub startup_timeout_seconds: u32,
}

const fn ten_minutes() -> u32 {
    600
}

/// The model's pods.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    #[serde(flatten)]
    pub program: Program,
    /// params are the keyword arguments of `load()`, as the text of a JSON object.
    #[serde(default = "no_params")]
    #[schemars(schema_with = "params")]
    pub params: String,
    /// workflowEdition pins the edition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub workflow_edition: Option<String>,
    /// replicas is the number of model pods.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
    /// artifacts are what the model loads; its pods wait until each is ready.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub artifacts: Vec<Artifact>,
}

/// A folder or file that the model loads, mounted read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Artifact {
    /// name is its folder under /artifacts.
    #[schemars(length(max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// param is the keyword argument of `load()` that receives the path.
    #[schemars(length(min = 1, max = 256))]
    pub param: String,
    /// volume is a claim of the pods' namespace to mount instead of an entry of the artifact cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<Volume>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// claim is the PersistentVolumeClaim.
    #[schemars(length(max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub claim: String,
    /// subPath inside the volume; empty: all of it.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub sub_path: String,
}

/// The environment pods.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Environments {
    #[serde(flatten)]
    pub program: Program,
    /// shareModelGpu puts the pods on the model's node and shows them its GPUs.
    #[serde(default)]
    pub share_model_gpu: bool,
}

/// What a pod needs of its node, as Kubernetes quantities.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub cpu: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub memory: Option<String>,
    /// gpu is the number of whole GPUs.
    #[serde(default)]
    #[schemars(range(max = 64))]
    pub gpu: u32,
    /// gpuVendor names the resource that GPUs are requested by.
    #[serde(default)]
    pub gpu_vendor: GpuVendor,
    /// gpuProduct is a product name as the vendor's node labels say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63), regex(pattern = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"))]
    pub gpu_product: Option<String>,
    /// gpuNodes are further nodes to take: what they have is what was asked for, although their label does not say gpuProduct.
    #[serde(default)]
    #[schemars(length(max = 256), inner(length(max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub gpu_nodes: Vec<String>,
    /// shm is the size of /dev/shm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub shm: Option<String>,
}

fn quantity(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "string", "nullable": true, "maxLength": 32, "pattern": r"^[0-9]+(\.[0-9]+)?([eE][0-9]+|[numkMGTPE]|[KMGTPE]i)?$"})
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum GpuVendor {
    #[default]
    Nvidia,
    Amd,
}

/// Construction arguments of environments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{"rule": "self.params == oldSelf.params", "message": "the params of a binding can't be changed"}]))]
pub struct Binding {
    pub index: u32,
    /// params are the keyword arguments, as the text of a JSON object.
    #[serde(default = "no_params")]
    #[schemars(schema_with = "binding_params")]
    pub params: String,
}

/// Where runners report to, and the certificate that they take for the agent's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentEndpoint {
    /// address is `host:port`, by a cluster IP: run pods have no DNS.
    #[schemars(length(min = 1, max = 256))]
    pub address: String,
    /// certificateSha256 is the SHA-256 of the agent's certificate (DER).
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"), length(max = 64))]
    pub certificate_sha256: String,
}

/// A binding that environment pods exist for. How many there are is the runner's choice: it knows how many environments the
/// servers take at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ActiveBinding {
    pub index: u32,
    /// pods is the number of environment pods.
    #[schemars(range(min = 1, max = 256))]
    pub pods: u32,
    /// lanesPerPod is the number of environments in one pod; one that changes takes a new attempt of the pods.
    #[schemars(range(min = 1, max = 4096))]
    pub lanes_per_pod: u32,
}

/// What agent and controller know of the run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunStatus {
    /// phase sums the components up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<RunPhase>,
    /// podsReady is `ready/wanted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub pods_ready: Option<String>,
    /// observedGeneration is the `metadata.generation` that this was decided from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// components are the attempts that exist or are wanted, and those whose logs are not released yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16384), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name", "attempt"]))]
    pub components: Vec<Component>,
    /// artifacts is the agent's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub artifacts: Vec<ArtifactStatus>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RunPhase {
    /// Pods are not there yet, or do not serve yet.
    Starting,
    /// Each wanted pod serves.
    Running,
    /// The runner ended well.
    Finished,
    /// A component failed; the agent may restart it.
    Failed,
    Cancelled,
}

/// One attempt at one component.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Component {
    #[schemars(length(min = 1, max = 40))]
    pub name: String,
    #[schemars(range(min = 1))]
    pub attempt: u32,
    /// pod is its pod, once that has been seen; then an attempt is never started again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod: Option<String>,
    /// address is where it serves, `tcp://host:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub address: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
    pub phase: ComponentPhase,
    /// since is when `phase` or `reason` changed last.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub since: Time,
    /// readyAt is when it served first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub ready_at: Option<Time>,
    /// reason is why it does not serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub message: Option<String>,
    /// imageID is what the tag stood for when the image was pulled.
    #[serde(rename = "imageID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub image_id: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ComponentPhase {
    /// There is no pod, or it does not run yet.
    Pending,
    /// Its container runs and does not serve yet.
    Starting,
    Ready,
    /// Ended with status 0.
    Succeeded,
    /// Over, whatever the pod may still say; only a restart goes on.
    Failed,
}

impl ComponentPhase {
    /// Nothing more comes of this attempt.
    #[must_use]
    pub const fn over(self) -> bool {
        match self {
            Self::Succeeded | Self::Failed => true,
            Self::Pending | Self::Starting | Self::Ready => false,
        }
    }
}

/// Why a component does not serve. `controller::run::classify` maps each to the failure taxonomy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Reason {
    /// The pod is being made.
    Creating,
    /// The artifact cache does not have everything yet.
    ArtifactsNotReady,
    /// A ResourceQuota leaves no room; it is tried again.
    QuotaExceeded,
    /// The API server could not be asked; it is tried again.
    ApiUnavailable,
    /// The API server or an admission controller refuses the pod.
    AdmissionRefused,
    /// The cluster's owner allows this image, Secret or volume to no run.
    NotAllowed,
    /// The definition can't run as a pod.
    InvalidDefinition,
    Unschedulable,
    /// Volumes, image and container are being prepared.
    ContainerCreating,
    ImagePullFailed,
    InvalidImageName,
    /// A Secret or key that secretEnv names is not there.
    SecretMissing,
    /// The container's program can't be started.
    CannotStart,
    StartTimeout,
    OutOfMemory,
    /// Ended by itself with a status other than 0.
    Exited,
    /// Ended by a signal from outside.
    Killed,
    Evicted,
    NodeLost,
    /// The pod was deleted, and not by the controller.
    PodDeleted,
}

impl Reason {
    /// As `reason` of a condition.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "Creating",
            Self::ArtifactsNotReady => "ArtifactsNotReady",
            Self::QuotaExceeded => "QuotaExceeded",
            Self::ApiUnavailable => "ApiUnavailable",
            Self::AdmissionRefused => "AdmissionRefused",
            Self::NotAllowed => "NotAllowed",
            Self::InvalidDefinition => "InvalidDefinition",
            Self::Unschedulable => "Unschedulable",
            Self::ContainerCreating => "ContainerCreating",
            Self::ImagePullFailed => "ImagePullFailed",
            Self::InvalidImageName => "InvalidImageName",
            Self::SecretMissing => "SecretMissing",
            Self::CannotStart => "CannotStart",
            Self::StartTimeout => "StartTimeout",
            Self::OutOfMemory => "OutOfMemory",
            Self::Exited => "Exited",
            Self::Killed => "Killed",
            Self::Evicted => "Evicted",
            Self::NodeLost => "NodeLost",
            Self::PodDeleted => "PodDeleted",
        }
    }
}

/// Where an artifact of the model is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ArtifactStatus {
    #[schemars(length(max = 63))]
    pub name: String,
    pub ready: bool,
    /// subPath of the cache's volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub sub_path: Option<String>,
    /// node that the cache's volume is bound to; left out: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
    /// message says how far it is, or why it can't be had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub message: Option<String>,
}

//! From an attempt to its pod. Pure: the same run and settings give the same pod.
//!
//! A pod of a run meets Pod Security *restricted*, has no API token but the runner's audience-bound one, and gets what an
//! unmodified Python image needs to work as a user that image has never heard of: a HOME, a /tmp and a /dev/shm to write to.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, GRPCAction, LocalObjectReference,
    PersistentVolumeClaimVolumeSource, Pod, PodDNSConfig, PodSecurityContext, PodSpec, Probe, ProjectedVolumeSource, ResourceRequirements,
    SeccompProfile, SecretKeySelector, SecurityContext, ServiceAccountTokenProjection, TCPSocketAction, Toleration, Volume, VolumeMount,
    VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource as _;
use kube::api::ObjectMeta;
use serde_json::{Map, Value};

use super::classify::{CONTAINER, PORT};
use super::component::{Attempt, Role};
use super::placement;
use crate::controller::settings::Settings;
use crate::crd::run::{Environments, GpuVendor, Model, Program, RLMeshRun, Reason, Resources};

pub const LABEL_EVALUATION: &str = "rlmesh.dev/evaluation";
pub const LABEL_RUN: &str = "rlmesh.dev/run";
/// `model`, `environment`, `runner`, `describe`: what static network policies and scrapes select by.
pub const LABEL_COMPONENT: &str = "rlmesh.dev/component";
/// `model-0`, `env-0-0`, ...
pub const LABEL_INSTANCE: &str = "rlmesh.dev/instance";
/// Audience of the runner's token.
pub const AUDIENCE: &str = "rlmesh-agent";

const VISIBLE_GPUS: &str = "NVIDIA_VISIBLE_DEVICES";
const HOME: &str = "/home/rlmesh";
const ARTIFACTS: &str = "/artifacts";
const TOKEN_FOLDER: &str = "/var/run/secrets/rlmesh";
const GRACE_SECONDS: i64 = 15;
const LOST_NODE_SECONDS: i64 = 30;
const TOKEN_SECONDS: i64 = 3600;
/// The kernel's limit for one `NAME=value` string.
const LONGEST_VARIABLE: usize = 128 * 1024 - 1;

/// Why there can be no pod, and whether that is for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoPod {
    pub reason: Reason,
    pub message: String,
}

fn no<T>(reason: Reason, message: impl Into<String>) -> Result<T, NoPod> {
    Err(NoPod { reason, message: message.into() })
}

/// What the parts of a run differ in.
struct Shape {
    image: String,
    /// Empty: the image's own.
    command: Vec<String>,
    env: BTreeMap<String, String>,
    secret_env: BTreeMap<String, String>,
    resources: Resources,
    startup: Option<Probe>,
    volumes: Vec<(Volume, VolumeMount)>,
    /// Sees the GPUs of its node without asking for one.
    sees_gpus: bool,
    read_only: bool,
}

/// The pod of an attempt.
pub fn build(run: &RLMeshRun, attempt: Attempt, settings: &Settings) -> Result<Pod, NoPod> {
    let name = run.metadata.name.as_deref().unwrap_or_default();
    let shape = match attempt.role {
        Role::Model { .. } => match &run.spec.model {
            Some(model) => model_shape(run, model, settings)?,
            None => return no(Reason::InvalidDefinition, "the run has no model"),
        },
        Role::Environment { binding, .. } => match &run.spec.environments {
            Some(environments) => environment_shape(run, environments, binding, settings)?,
            None => return no(Reason::InvalidDefinition, "the run has no environments"),
        },
        Role::Runner => runner_shape(run, name, settings)?,
        Role::Describe => describe_shape(run, settings)?,
    };
    let mut spec = pod_spec(settings, &shape);
    placement::place(&mut spec, run, attempt.role, &shape.resources, settings);
    Ok(Pod {
        metadata: ObjectMeta {
            name: Some(attempt.pod_name(name)),
            namespace: Some(settings.namespace.clone()),
            labels: Some(labels(run, attempt.role, settings)),
            owner_references: owner(run).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    })
}

/// `run_...`, as labels and the runner's protocol have it.
#[must_use]
pub fn run_id(name: &str) -> String {
    name.replace('-', "_")
}

fn labels(run: &RLMeshRun, role: Role, settings: &Settings) -> BTreeMap<String, String> {
    let mut labels = settings.runs.labels.clone();
    labels.extend([
        ("app.kubernetes.io/managed-by".to_owned(), "rlmesh-cluster-controller".to_owned()),
        (LABEL_EVALUATION.to_owned(), run.spec.evaluation_id.clone()),
        (LABEL_RUN.to_owned(), run_id(run.metadata.name.as_deref().unwrap_or_default())),
        (LABEL_COMPONENT.to_owned(), role.kind().to_owned()),
        (LABEL_INSTANCE.to_owned(), role.to_string()),
    ]);
    labels
}

/// Without `blockOwnerDeletion`, which would need a right on finalizers.
#[must_use]
pub fn owner(run: &RLMeshRun) -> Option<OwnerReference> {
    run.controller_owner_ref(&()).map(|owner| OwnerReference { block_owner_deletion: None, ..owner })
}

fn pod_spec(settings: &Settings, shape: &Shape) -> PodSpec {
    let (mut volumes, mounts): (Vec<Volume>, Vec<VolumeMount>) = shape.volumes.iter().cloned().unzip();
    // Several artifacts may lie on one claim.
    let mut names = std::collections::BTreeSet::new();
    volumes.retain(|volume| names.insert(volume.name.clone()));
    let ids = settings.pod_security;
    let runs = &settings.runs;
    PodSpec {
        containers: vec![container(shape, mounts)],
        volumes: Some(volumes),
        restart_policy: Some("Never".to_owned()),
        automount_service_account_token: Some(false),
        service_account_name: Some(settings.service_account.clone()),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        // Run pods may not ask a name server. One that refuses at once beats one that is silent for seconds.
        dns_policy: Some("None".to_owned()),
        dns_config: Some(PodDNSConfig { nameservers: Some(vec!["127.0.0.1".to_owned()]), ..PodDNSConfig::default() }),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: ids.map(|ids| ids.run_as_user),
            run_as_group: ids.map(|ids| ids.run_as_user),
            fs_group: ids.map(|ids| ids.fs_group),
            fs_group_change_policy: ids.map(|_| "OnRootMismatch".to_owned()),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() }),
            ..PodSecurityContext::default()
        }),
        image_pull_secrets: (!runs.image_pull_secrets.is_empty())
            .then(|| runs.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() }).collect()),
        node_selector: (!runs.node_selector.is_empty()).then(|| runs.node_selector.clone()),
        runtime_class_name: runs.runtime_class_name.clone(),
        priority_class_name: runs.priority_class_name.clone(),
        tolerations: Some(tolerations(settings)),
        ..PodSpec::default()
    }
}

fn tolerations(settings: &Settings) -> Vec<Toleration> {
    let brief = |key: &str| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(LOST_NODE_SECONDS),
        value: None,
    };
    let lost = [brief("node.kubernetes.io/unreachable"), brief("node.kubernetes.io/not-ready")];
    settings.runs.tolerations.iter().cloned().chain(lost).collect()
}

/// Kubernetes replaces `$(NAME)` and `$$` in commands and variables; a container gets them as they were written.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

fn container(shape: &Shape, mounts: Vec<VolumeMount>) -> Container {
    let plain = shape.env.iter().map(|(name, value)| EnvVar { name: name.clone(), value: Some(literal(value)), value_from: None });
    let secret = shape.secret_env.iter().filter_map(|(name, source)| {
        let (secret, key) = source.split_once('/')?;
        let selector = SecretKeySelector { name: secret.to_owned(), key: key.to_owned(), optional: None };
        let value_from = Some(EnvVarSource { secret_key_ref: Some(selector), ..EnvVarSource::default() });
        Some(EnvVar { name: name.clone(), value: None, value_from })
    });
    Container {
        name: CONTAINER.to_owned(),
        image: Some(shape.image.clone()),
        command: (!shape.command.is_empty()).then(|| shape.command.iter().map(|word| literal(word)).collect()),
        env: Some(plain.chain(secret).collect()),
        ports: shape.startup.is_some().then(|| {
            vec![ContainerPort {
                name: Some("rlmesh".to_owned()),
                container_port: PORT.into(),
                protocol: Some("TCP".to_owned()),
                ..ContainerPort::default()
            }]
        }),
        resources: Some(resources(&shape.resources)),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities { add: None, drop: Some(vec!["ALL".to_owned()]) }),
            read_only_root_filesystem: shape.read_only.then_some(true),
            ..SecurityContext::default()
        }),
        startup_probe: shape.startup.clone(),
        // A traceback is in the logs, which the agent reads; this is for those who look with kubectl.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounts),
        ..Container::default()
    }
}

fn resources(wanted: &Resources) -> ResourceRequirements {
    let quantity = |text: &String| Quantity(text.clone());
    let mut requests = BTreeMap::new();
    let mut limits = BTreeMap::new();
    // No limit on cpu: throttling would only waste what is idle.
    requests.extend(wanted.cpu.as_ref().map(|cpu| ("cpu".to_owned(), quantity(cpu))));
    if let Some(memory) = &wanted.memory {
        requests.insert("memory".to_owned(), quantity(memory));
        limits.insert("memory".to_owned(), quantity(memory));
    }
    // Zero GPUs are not mentioned: some device plugins act on the name alone.
    if wanted.gpu > 0 {
        limits.insert(placement::gpu_resource(wanted.gpu_vendor).to_owned(), Quantity(wanted.gpu.to_string()));
    }
    let some = |map: BTreeMap<_, _>| (!map.is_empty()).then_some(map);
    ResourceRequirements { claims: None, limits: some(limits), requests: some(requests) }
}

/// Image, variables and folders that models, environments and describes have in common.
fn program_shape(program: &Program, noun: &str, settings: &Settings) -> Result<Shape, NoPod> {
    if !settings.allows_image(&program.image) {
        return no(
            Reason::NotAllowed,
            format!("the {noun}'s image {} is not among runs.allowedImages of this cluster; ask its owner to add it", program.image),
        );
    }
    for (variable, source) in &program.secret_env {
        let allowed = source.split_once('/').is_some_and(|(secret, key)| settings.allows_secret(secret, key));
        if !allowed {
            return no(
                Reason::NotAllowed,
                format!(
                    "{variable} of the {noun} is to come from the Secret {source}, which is not among runs.allowedSecrets of this cluster; ask its owner to add it"
                ),
            );
        }
    }
    let resources = program.resources.clone();
    let (mut env, mut secret_env) = (program.env.clone(), program.secret_env.clone());
    // Which GPUs a container is shown is the device plugin's to say.
    env.remove(VISIBLE_GPUS);
    secret_env.remove(VISIBLE_GPUS);
    let mut default = |name: &str, value: &str| {
        env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
    };
    default("PYTHONUNBUFFERED", "1");
    default("HOME", HOME);
    default("XDG_CACHE_HOME", &format!("{HOME}/.cache"));
    default("TMPDIR", "/tmp");
    for (name, value) in proxy_variables(settings) {
        env.insert(name, value);
    }
    if let Some(folder) = &program.python_path {
        let given = env.get("PYTHONPATH").filter(|path| !path.is_empty()).map(|path| format!(":{path}")).unwrap_or_default();
        env.insert("PYTHONPATH".to_owned(), format!("{folder}{given}"));
    }
    let shm = Quantity(resources.shm.clone().unwrap_or_else(|| "64Mi".to_owned()));
    Ok(Shape {
        image: program.image.clone(),
        command: Vec::new(),
        env,
        secret_env,
        resources,
        startup: None,
        volumes: vec![scratch("home", HOME), scratch("tmp", "/tmp"), memory("shm", "/dev/shm", shm)],
        sees_gpus: false,
        read_only: false,
    })
}

fn proxy_variables(settings: &Settings) -> Vec<(String, String)> {
    let Some(proxy) = &settings.egress_proxy else { return Vec::new() };
    let url = format!("http://{proxy}");
    let pairs = [("HTTP_PROXY", url.as_str()), ("HTTPS_PROXY", url.as_str()), ("NO_PROXY", "localhost,127.0.0.1,::1")];
    pairs.into_iter().flat_map(|(name, value)| [(name.to_owned(), value.to_owned()), (name.to_lowercase(), value.to_owned())]).collect()
}

fn scratch(name: &str, path: &str) -> (Volume, VolumeMount) {
    let volume = Volume { name: name.to_owned(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() };
    (volume, mount(name, path))
}

fn memory(name: &str, path: &str, size: Quantity) -> (Volume, VolumeMount) {
    let source = EmptyDirVolumeSource { medium: Some("Memory".to_owned()), size_limit: Some(size) };
    (Volume { name: name.to_owned(), empty_dir: Some(source), ..Volume::default() }, mount(name, path))
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.to_owned(), mount_path: path.to_owned(), ..VolumeMount::default() }
}

/// `python3 -m rlmesh.serve [--env] module:Class`; nothing when the image's own command serves.
fn serve(program: &Program, environment: bool) -> Vec<String> {
    let Some(entrypoint) = &program.entrypoint else { return Vec::new() };
    let python = program.python.as_deref().unwrap_or("python3");
    let mut command = vec![python, "-m", "rlmesh.serve"];
    command.extend(environment.then_some("--env"));
    command.push(entrypoint);
    command.into_iter().map(str::to_owned).collect()
}

/// Serving servers have no other probe: nothing routes to them by readiness, and a busy one must not be ended by a probe.
fn startup(program: &Program, grpc: bool) -> Probe {
    Probe {
        grpc: grpc.then(|| GRPCAction { port: PORT.into(), service: None }),
        // Environment servers do not answer health calls.
        tcp_socket: (!grpc).then(|| TCPSocketAction { port: IntOrString::Int(PORT.into()), host: None }),
        period_seconds: Some(1),
        timeout_seconds: Some(1),
        failure_threshold: Some(i32::try_from(program.startup_timeout_seconds).unwrap_or(i32::MAX).max(1)),
        ..Probe::default()
    }
}

fn serving(mut shape: Shape, noun: &str, params: &Map<String, Value>) -> Result<Shape, NoPod> {
    let kwargs = Value::Object(params.clone()).to_string();
    if "RLMESH_MAKE_KWARGS=".len() + kwargs.len() > LONGEST_VARIABLE {
        return no(
            Reason::InvalidDefinition,
            format!(
                "the params of the {noun} are {} bytes of JSON; a process takes at most 128 KiB: put what is large in an artifact",
                kwargs.len()
            ),
        );
    }
    shape.env.insert("RLMESH_MAKE_KWARGS".to_owned(), kwargs);
    shape.env.insert("RLMESH_ADDRESS".to_owned(), format!("0.0.0.0:{PORT}"));
    Ok(with_gpu_variables(shape))
}

/// Images of a CUDA base say `all`, which shows every GPU of a node to a pod that asked for none.
fn with_gpu_variables(mut shape: Shape) -> Shape {
    if shape.resources.gpu_vendor == GpuVendor::Nvidia {
        let seen = match (shape.resources.gpu, shape.sees_gpus) {
            (0, false) => Some("void"),
            (0, true) => Some("all"),
            // The device plugin says it.
            _ => None,
        };
        shape.env.extend(seen.map(|seen| (VISIBLE_GPUS.to_owned(), seen.to_owned())));
        if seen != Some("void") {
            // `graphics` is EGL: simulators render off-screen.
            shape.env.insert("NVIDIA_DRIVER_CAPABILITIES".to_owned(), "compute,utility,graphics".to_owned());
        }
    }
    shape
}

fn object(text: &str, noun: &str) -> Result<Map<String, Value>, NoPod> {
    serde_json::from_str(text).map_err(|error| NoPod {
        reason: Reason::InvalidDefinition,
        message: format!("the params of the {noun} are no JSON object: {error}"),
    })
}

fn model_shape(run: &RLMeshRun, model: &Model, settings: &Settings) -> Result<Shape, NoPod> {
    let mut shape = program_shape(&model.program, "model", settings)?;
    let mut params = object(&model.params, "model")?;
    for artifact in &model.artifacts {
        let path = format!("{ARTIFACTS}/{}", artifact.name);
        let (claim, sub_path) = match &artifact.volume {
            Some(volume) if settings.allows_volume(&volume.claim, &volume.sub_path) => (volume.claim.clone(), volume.sub_path.clone()),
            Some(volume) => {
                return no(
                    Reason::NotAllowed,
                    format!(
                        "artifact {} is on the claim {}, which is not among runs.allowedVolumes of this cluster; ask its owner to add it",
                        artifact.name, volume.claim
                    ),
                );
            }
            None => cached(run, &artifact.name, settings)?,
        };
        let name = format!("artifact-{claim}");
        let name = name.get(..63).unwrap_or(&name).trim_end_matches(['-', '.']).replace('.', "-");
        let source = PersistentVolumeClaimVolumeSource { claim_name: claim, read_only: Some(true) };
        let volume = Volume { name: name.clone(), persistent_volume_claim: Some(source), ..Volume::default() };
        let sub_path = (!sub_path.is_empty()).then_some(sub_path);
        shape.volumes.push((volume, VolumeMount { read_only: Some(true), sub_path, ..mount(&name, &path) }));
        params.insert(artifact.param.clone(), Value::String(path));
    }
    shape.command = serve(&model.program, false);
    shape.startup = Some(startup(&model.program, true));
    if let Some(edition) = &model.workflow_edition {
        shape.env.insert("RLMESH_WORKFLOW_EDITION".to_owned(), edition.clone());
    }
    serving(shape, "model", &params)
}

/// The cache's claim and the entry's place in it, once the agent says that it is whole.
fn cached(run: &RLMeshRun, name: &str, settings: &Settings) -> Result<(String, String), NoPod> {
    let Some(claim) = &settings.cache_claim else {
        return no(Reason::NotAllowed, format!("artifact {name} is to come from the artifact cache, which this cluster does not have"));
    };
    let entry = run.status.iter().flat_map(|status| &status.artifacts).find(|entry| entry.name == name);
    match entry {
        Some(entry) if entry.ready => Ok((claim.clone(), entry.sub_path.clone().unwrap_or_default())),
        Some(entry) => no(Reason::ArtifactsNotReady, format!("artifact {name}: {}", entry.message.as_deref().unwrap_or("on its way"))),
        None => no(Reason::ArtifactsNotReady, format!("artifact {name}: the cache was not asked yet")),
    }
}

fn environment_shape(run: &RLMeshRun, environments: &Environments, binding: u32, settings: &Settings) -> Result<Shape, NoPod> {
    let lanes = run.spec.active_bindings.iter().find(|active| active.index == binding).map_or(1, |active| active.lanes_per_pod);
    let Some(binding) = run.spec.bindings.iter().find(|known| known.index == binding) else {
        return no(Reason::InvalidDefinition, format!("binding {binding} is active and not listed"));
    };
    let mut shape = program_shape(&environments.program, "environment", settings)?;
    shape.command = serve(&environments.program, true);
    shape.startup = Some(startup(&environments.program, false));
    shape.sees_gpus = environments.share_model_gpu;
    shape.env.insert("RLMESH_NUM_ENVS".to_owned(), lanes.to_string());
    // Many environment processes side by side: one thread each.
    shape.env.entry("OMP_NUM_THREADS".to_owned()).or_insert_with(|| "1".to_owned());
    serving(shape, "environment", &object(&binding.params, "environment")?)
}

fn describe_shape(run: &RLMeshRun, settings: &Settings) -> Result<Shape, NoPod> {
    let (program, noun, kind) = match (&run.spec.model, &run.spec.environments) {
        (Some(model), _) => (&model.program, "model", "--model"),
        (None, Some(environments)) => (&environments.program, "environment", "--env"),
        (None, None) => return no(Reason::InvalidDefinition, "the run has nothing to describe"),
    };
    let Some(entrypoint) = &program.entrypoint else {
        return no(
            Reason::InvalidDefinition,
            format!(
                "the {noun} names no entrypoint (module:Class), so its image can't be asked to describe itself; add one, or label the image"
            ),
        );
    };
    let mut shape = program_shape(program, noun, settings)?;
    let python = program.python.as_deref().unwrap_or("python3");
    shape.command = [python, "-m", "rlmesh._describe", kind, entrypoint, "--out", "/dev/stdout"].map(str::to_owned).to_vec();
    Ok(with_gpu_variables(shape))
}

/// `rlmesh-runner --agent ADDRESS --run ID --agent-key KEY --token-file PATH`.
fn runner_shape(run: &RLMeshRun, name: &str, settings: &Settings) -> Result<Shape, NoPod> {
    let Some(agent) = &run.spec.agent else { return no(Reason::InvalidDefinition, "the run names no agent to report to") };
    let token = ServiceAccountTokenProjection {
        audience: Some(AUDIENCE.to_owned()),
        expiration_seconds: Some(TOKEN_SECONDS),
        path: "token".to_owned(),
    };
    let source = ProjectedVolumeSource {
        sources: Some(vec![VolumeProjection { service_account_token: Some(token), ..VolumeProjection::default() }]),
        default_mode: None,
    };
    let volume = Volume { name: "token".to_owned(), projected: Some(source), ..Volume::default() };
    let command = [
        "rlmesh-runner",
        "--agent",
        &format!("tcp://{}", agent.address),
        "--agent-key",
        &agent.certificate_sha256,
        "--run",
        &run_id(name),
        "--token-file",
        &format!("{TOKEN_FOLDER}/token"),
        "--log-format",
        "json",
    ];
    Ok(Shape {
        image: settings.runner_image.clone(),
        command: command.map(str::to_owned).to_vec(),
        env: BTreeMap::new(),
        secret_env: BTreeMap::new(),
        resources: Resources { cpu: Some("250m".to_owned()), memory: Some("256Mi".to_owned()), ..Resources::default() },
        startup: None,
        volumes: vec![scratch("tmp", "/tmp"), (volume, VolumeMount { read_only: Some(true), ..mount("token", TOKEN_FOLDER) })],
        sees_gpus: false,
        read_only: true,
    })
}

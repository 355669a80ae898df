//! What a pod's status says of its component. Pure; the logs, which say more of an exit, are the agent's to read.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rlm_core::failure::FailureCode;

use super::component::{Attempt, Role};
use crate::crd::run::{Component, ComponentPhase, Reason};
use crate::crd::{Time, message};

/// Port that models and environments serve on.
pub const PORT: u16 = 50051;
/// Name of the one container of a pod.
pub const CONTAINER: &str = "main";

/// What was seen of an attempt. `since` is when it was looked at; `status` knows since when that holds.
pub struct Seen {
    pub component: Component,
    /// When the pod has to be looked at again although nothing happens to it.
    pub deadline: Option<Timestamp>,
}

/// An attempt of which there is nothing to see.
#[must_use]
pub fn component(attempt: Attempt, phase: ComponentPhase, reason: Option<Reason>, why: Option<&str>, now: Timestamp) -> Component {
    Component {
        name: attempt.role.to_string(),
        attempt: attempt.number,
        pod: None,
        address: None,
        node: None,
        phase,
        since: Time(now),
        ready_at: None,
        reason,
        exit_code: None,
        message: why.map(message),
        image_id: None,
    }
}

struct Verdict {
    phase: ComponentPhase,
    reason: Option<Reason>,
    message: Option<String>,
    exit_code: Option<i32>,
    deadline: Option<Timestamp>,
}

impl Verdict {
    fn new(phase: ComponentPhase, reason: Reason, message: impl Into<String>) -> Self {
        Self { phase, reason: Some(reason), message: Some(message.into()), exit_code: None, deadline: None }
    }

    const fn plain(phase: ComponentPhase) -> Self {
        Self { phase, reason: None, message: None, exit_code: None, deadline: None }
    }
}

/// Reads a pod. `served`: it was ready before. `patience`: how long it may take to start.
#[must_use]
pub fn see(attempt: Attempt, pod: &Pod, served: bool, patience: SignedDuration, now: Timestamp) -> Seen {
    let empty = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&empty);
    let container = status.container_statuses.iter().flatten().find(|container| container.name == CONTAINER);
    let verdict = judge(attempt, pod, status, container, served, patience, now);
    let serves = verdict.phase == ComponentPhase::Ready && matches!(attempt.role, Role::Model { .. } | Role::Environment { .. });
    let component = Component {
        pod: pod.metadata.name.clone(),
        address: status.pod_ip.as_deref().filter(|_| serves).map(address),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        exit_code: verdict.exit_code,
        image_id: container.map(|container| container.image_id.clone()).filter(|id| !id.is_empty()),
        ..component(attempt, verdict.phase, verdict.reason, verdict.message.as_deref(), now)
    };
    Seen { component, deadline: verdict.deadline }
}

fn address(ip: &str) -> String {
    if ip.contains(':') { format!("tcp://[{ip}]:{PORT}") } else { format!("tcp://{ip}:{PORT}") }
}

fn judge(
    attempt: Attempt,
    pod: &Pod,
    status: &PodStatus,
    container: Option<&ContainerStatus>,
    served: bool,
    patience: SignedDuration,
    now: Timestamp,
) -> Verdict {
    let state = container.and_then(|container| container.state.as_ref());
    if let Some(lost) = lost(pod, status) {
        return Verdict { exit_code: terminated(state).map(|end| end.exit_code), ..lost };
    }
    if let Some(end) = terminated(state) {
        return ended(end, served, patience);
    }
    // The kubelet ended it before there was a container (admission on the node, deadline).
    if status.phase.as_deref() == Some("Failed") {
        let why = status.message.clone().or_else(|| status.reason.clone()).unwrap_or_default();
        return Verdict::new(ComponentPhase::Failed, Reason::Evicted, format!("the node refused or ended the pod: {why}"));
    }
    if status.phase.as_deref() == Some("Succeeded") {
        return Verdict::plain(ComponentPhase::Succeeded);
    }
    if let Some(ContainerState { running: Some(_), .. }) = state {
        return match attempt.role {
            Role::Model { .. } | Role::Environment { .. } if !container.is_some_and(|container| container.ready) && !served => {
                Verdict::plain(ComponentPhase::Starting)
            }
            Role::Model { .. } | Role::Environment { .. } | Role::Runner | Role::Describe => Verdict::plain(ComponentPhase::Ready),
        };
    }
    if let Some(refused) = condition(status, "PodScheduled").filter(|condition| condition.status == "False") {
        let why = refused.message.as_deref().unwrap_or("the scheduler has not found a node yet");
        return Verdict::new(ComponentPhase::Pending, Reason::Unschedulable, why);
    }
    waiting(status, state, patience, now)
}

/// The pod is on its way out, and the controller did not send it there (plan looks at pods that it deletes no more).
fn lost(pod: &Pod, status: &PodStatus) -> Option<Verdict> {
    let failed = |reason, why: &str| Some(Verdict::new(ComponentPhase::Failed, reason, why));
    let disruption = condition(status, "DisruptionTarget").filter(|condition| condition.status == "True");
    if let Some(disruption) = disruption {
        let why = disruption.message.as_deref().unwrap_or("the pod was ended by the cluster");
        return match disruption.reason.as_deref() {
            Some("DeletionByTaintManager" | "DeletionByPodGC") => failed(Reason::NodeLost, why),
            _ => failed(Reason::Evicted, why),
        };
    }
    match status.reason.as_deref() {
        Some("NodeLost") => return failed(Reason::NodeLost, "the node of the pod does not answer"),
        Some("Evicted" | "Preempting" | "Shutdown" | "Terminated") => {
            return failed(Reason::Evicted, status.message.as_deref().unwrap_or("the node evicted the pod"));
        }
        _ => {}
    }
    pod.metadata.deletion_timestamp.as_ref()?;
    failed(Reason::PodDeleted, "the pod was deleted, and not by RLMesh; it is replaced")
}

fn terminated(state: Option<&ContainerState>) -> Option<&ContainerStateTerminated> {
    state?.terminated.as_ref()
}

fn condition<'a>(status: &'a PodStatus, name: &str) -> Option<&'a k8s_openapi::api::core::v1::PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == name)
}

fn ended(end: &ContainerStateTerminated, served: bool, patience: SignedDuration) -> Verdict {
    const KILLED: i32 = 128 + 9;
    const TERMINATED: i32 = 128 + 15;
    let lasted = match (&end.started_at, &end.finished_at) {
        (Some(started), Some(finished)) => finished.0.duration_since(started.0),
        _ => SignedDuration::ZERO,
    };
    let what = end.message.as_deref().map(|message| format!(": {message}")).unwrap_or_default();
    let code = end.exit_code;
    let verdict = match (end.reason.as_deref(), code) {
        (Some("OOMKilled"), _) => Verdict::new(
            ComponentPhase::Failed,
            Reason::OutOfMemory,
            "the container went over its memory limit; ask for more memory in resources.memory",
        ),
        (Some("StartError" | "ContainerCannotRun"), _) => {
            Verdict::new(ComponentPhase::Failed, Reason::CannotStart, format!("the container could not be started{what}"))
        }
        // The kubelet ends what did not serve in time.
        _ if !served && lasted >= patience && !patience.is_zero() => Verdict::new(
            ComponentPhase::Failed,
            Reason::StartTimeout,
            format!("it did not serve within {} s; raise startupTimeout if it needs longer to load", patience.as_secs()),
        ),
        (_, 0) => Verdict::plain(ComponentPhase::Succeeded),
        (_, KILLED | TERMINATED) => {
            Verdict::new(ComponentPhase::Failed, Reason::Killed, format!("the container was killed from outside (status {code}){what}"))
        }
        _ => Verdict::new(ComponentPhase::Failed, Reason::Exited, format!("the container exited with status {code}{what}")),
    };
    Verdict { exit_code: Some(code), ..verdict }
}

fn waiting(status: &PodStatus, state: Option<&ContainerState>, patience: SignedDuration, now: Timestamp) -> Verdict {
    use ComponentPhase::{Failed, Pending};
    let Some(waiting) = state.and_then(|state| state.waiting.as_ref()) else {
        return if condition(status, "PodScheduled").is_some() {
            Verdict::new(Pending, Reason::ContainerCreating, "the node prepares the pod")
        } else {
            Verdict::new(Pending, Reason::Creating, "the scheduler has not looked at the pod yet")
        };
    };
    let why = waiting.message.as_deref().unwrap_or("no message");
    match waiting.reason.as_deref() {
        Some("InvalidImageName") => Verdict::new(Failed, Reason::InvalidImageName, format!("the image's name is not valid: {why}")),
        Some("ErrImageNeverPull") => Verdict::new(Failed, Reason::ImagePullFailed, why),
        Some("ErrImagePull" | "ImagePullBackOff" | "RegistryUnavailable" | "ImageInspectError") => {
            // Registries come back: it has as long as starting may take.
            let scheduled = condition(status, "PodScheduled").and_then(|condition| condition.last_transition_time.as_ref());
            let until = scheduled.map_or(now, |scheduled| scheduled.0).saturating_add(patience).unwrap_or(now);
            let over = now >= until;
            let limit = if over { format!(" within {} s (startupTimeout)", patience.as_secs()) } else { String::new() };
            let why = format!("the image can't be pulled{limit}: {}", pull_error(why));
            Verdict {
                deadline: (!over).then_some(until),
                ..Verdict::new(if over { Failed } else { Pending }, Reason::ImagePullFailed, why)
            }
        }
        // A Secret may still come, and the kubelet tries again; the agent's patience decides.
        Some("CreateContainerConfigError") if why.contains("secret") || why.contains("couldn't find key") => {
            Verdict::new(Pending, Reason::SecretMissing, why)
        }
        Some("CreateContainerConfigError") => Verdict::new(Failed, Reason::CannotStart, format!("the container can't be made: {why}")),
        Some("CreateContainerError" | "RunContainerError" | "PostStartHookError" | "CrashLoopBackOff") => {
            Verdict::new(Failed, Reason::CannotStart, format!("the container can't be started: {why}"))
        }
        _ => Verdict::new(Pending, Reason::ContainerCreating, "the node prepares the pod's volumes, image and container"),
    }
}

/// The kubelet says the same error by itself and, between two tries, behind a prefix: said once, it is one message.
fn pull_error(why: &str) -> &str {
    match why.strip_prefix("Back-off pulling image ").and_then(|rest| rest.split_once(": ErrImagePull: ")) {
        Some((_, error)) => error,
        None => why,
    }
}

/// Who is to blame when an attempt is over for this reason. None: it only waits.
#[must_use]
pub fn failure_code(role: Role, reason: Reason, served: bool) -> Option<FailureCode> {
    use FailureCode as Code;
    Some(match reason {
        Reason::Creating | Reason::ContainerCreating | Reason::ArtifactsNotReady | Reason::ApiUnavailable => return None,
        Reason::QuotaExceeded | Reason::AdmissionRefused | Reason::Unschedulable => Code::Unschedulable,
        Reason::NotAllowed | Reason::InvalidDefinition | Reason::SecretMissing => Code::NotRunnableHere,
        Reason::ImagePullFailed | Reason::InvalidImageName => Code::ImagePullFailed,
        Reason::CannotStart => Code::InvalidEntrypoint,
        Reason::OutOfMemory => Code::OutOfMemory,
        Reason::Killed => Code::ProcessKilled,
        Reason::Evicted | Reason::NodeLost | Reason::PodDeleted => Code::PodLost,
        Reason::StartTimeout => match role {
            Role::Environment { .. } => Code::EnvironmentStartTimeout,
            Role::Model { .. } | Role::Describe => Code::ModelStartTimeout,
            Role::Runner => Code::RunnerLost,
        },
        Reason::Exited => match (role, served) {
            (Role::Environment { .. }, true) => Code::EnvironmentCrashed,
            (Role::Environment { .. }, false) => Code::EnvironmentStartFailed,
            (Role::Model { .. }, true) => Code::ModelCrashed,
            (Role::Model { .. } | Role::Describe, _) => Code::ModelStartFailed,
            (Role::Runner, _) => Code::RunnerLost,
        },
    })
}

#[cfg(test)]
#[path = "classify_tests.rs"]
mod tests;

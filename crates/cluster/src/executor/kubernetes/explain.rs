//! What the controller says of an attempt, in the words that users read: why it is over, or what it waits for, and what can be
//! done about it. Pure; the words of the scheduler, the kubelet and the API server are passed on as they are.

use std::time::Duration;

use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};

use crate::controller::run::classify::failure_code;
use crate::controller::run::component::Role as PodRole;
use crate::crd::run::{Component, Reason};
use crate::executor::process::classify::{Ended, Exit, classify};
use crate::executor::run::components::{ComponentKind, Role, Waits};

/// How long the controller may say nothing of an attempt before that is what it waits for.
pub const SILENCE: Duration = Duration::from_secs(10);

/// Why an attempt is over. `log_lines` are the last of its output.
pub fn failure(run: &RunSpec, role: Role, component: &Component, served: bool, log_lines: Vec<String>) -> Failure {
    let name = &component.name;
    let exited = matches!(component.reason, None | Some(Reason::Exited));
    if let Some(code) = component.exit_code.filter(|_| exited) {
        let kind = role.kind();
        return classify(Exit {
            component: name,
            kind,
            ended: Ended::Code(code),
            ready: served,
            out_of_memory: false,
            log_lines: &log_lines,
        });
    }
    let code = component.reason.and_then(|reason| failure_code(pod_role(role), reason, served)).unwrap_or(role.kind().start_failed());
    let message = match (component.reason, memory(run, role)) {
        (Some(Reason::OutOfMemory), Some(memory)) => {
            format!("{name} went over its memory limit ({memory}); ask for more in resources.memory, or for fewer workers")
        }
        _ => sentence(component),
    };
    Failure { exit_code: component.exit_code, log_lines, ..Failure::new(code, message).of(name) }
}

/// An attempt that waited longer than `limits.queueTimeout`. `waits` is what for, as far as that is known.
pub fn out_of_patience(role: PodRole, component: Option<&Component>, waits: Option<&Waits>, patience: Duration) -> Failure {
    let name = role.to_string();
    let code = component.and_then(|component| component.reason).and_then(|reason| failure_code(role, reason, false));
    let why = match (waits, component) {
        (Some(waits), _) => waits.message.clone(),
        (None, Some(component)) => sentence(component),
        (None, None) => format!("{name}: the cluster controller has said nothing of it"),
    };
    let message = format!("{why} (waited {} s, limits.queueTimeout)", patience.as_secs());
    Failure::new(code.unwrap_or(FailureCode::QueueTimeout), message).of(name)
}

/// What an attempt waits for, where that is more than its own start. `silent`: the controller has said nothing of it for
/// [`SILENCE`]. `problem`: why what is wanted could not be written.
pub fn waits(name: &str, seen: Option<&Component>, silent: bool, problem: Option<&str>) -> Option<Waits> {
    let say = |cause, message| Some(Waits { cause, message, since_ms: None });
    let Some(component) = seen else {
        return match problem {
            Some(problem) => say("apiUnavailable", format!("{name}: the Kubernetes API server can't be asked for a pod: {problem}")),
            None if silent => say(
                "controllerAway",
                format!(
                    "{name}: the cluster controller has not answered for {} s; is rlmesh-cluster-controller running?",
                    SILENCE.as_secs()
                ),
            ),
            None => None,
        };
    };
    let cause = match component.reason? {
        Reason::ImagePullFailed => "imagePull",
        Reason::Unschedulable => "unschedulable",
        Reason::QuotaExceeded => "quota",
        Reason::SecretMissing => "secretMissing",
        Reason::ApiUnavailable => "apiUnavailable",
        Reason::ArtifactsNotReady => "artifacts",
        _ => return None,
    };
    Some(Waits { cause, message: sentence(component), since_ms: Some(component.since.0.as_millisecond()) })
}

/// `env-0-0: <what happened>; <what to do>`.
fn sentence(component: &Component) -> String {
    let why = component.message.as_deref().unwrap_or("its pod did not come to run");
    let why = why.trim_end_matches(['.', ' ']);
    match component.reason.and_then(|reason| advice(reason, why, component.phase.over())) {
        Some(advice) => format!("{}: {why}; {advice}", component.name),
        None => format!("{}: {why}", component.name),
    }
}

/// What can be done, where the words of the cluster do not say it. Those are the words of Kubernetes 1.30 and later and of
/// containerd; other words get no advice, or the general one. `over`: it
/// is not tried again.
fn advice(reason: Reason, why: &str, over: bool) -> Option<&'static str> {
    let says = |any: &[&str]| any.iter().any(|words| why.contains(words));
    Some(match reason {
        Reason::ImagePullFailed if says(&["no match for platform", "exec format error"]) => {
            "the image is not built for this node's architecture: build it for linux/amd64, or for every architecture of the cluster"
        }
        Reason::ImagePullFailed
            if says(&["401", "403", "nauthorized", "authorization failed", "insufficient_scope", "access denied", "orbidden"]) =>
        {
            "the registry refuses: a cluster admin names a Secret that may pull it in runs.imagePullSecrets"
        }
        Reason::ImagePullFailed if says(&["not found", "manifest unknown", "does not exist"]) => {
            "the registry has no such image: check its name, and push it"
        }
        Reason::ImagePullFailed if says(&["x509", "certificate"]) => "the nodes must trust the registry's certificate",
        Reason::ImagePullFailed
            if says(&["connection refused", "no such host", "timeout", "no route to host", "deadline", "unreachable", "EOF"]) =>
        {
            if over {
                "the registry does not answer: retry the rows when it does"
            } else {
                "the registry does not answer: it is tried again"
            }
        }
        Reason::Unschedulable if says(&["untolerated taint"]) => {
            "a cluster admin removes the taint, or lets runs onto such nodes by runs.tolerations"
        }
        Reason::Unschedulable if says(&["Insufficient", "Too many pods"]) => "ask for less in resources, or add nodes",
        Reason::Unschedulable if says(&["node affinity", "node selector"]) => {
            "compare resources.gpuProduct and runs.nodeSelector to the nodes' labels"
        }
        Reason::QuotaExceeded => "it is tried again; a cluster admin can raise the ResourceQuota of the runs' namespace",
        Reason::AdmissionRefused => "a cluster admin knows the rule that refuses it",
        Reason::CannotStart if says(&["exec format error"]) => {
            "the image is not built for this node's architecture: build it for linux/amd64"
        }
        Reason::SecretMissing => "it goes on once the Secret is there",
        Reason::ApiUnavailable => "it is tried again",
        _ => return None,
    })
}

pub const fn pod_role(role: Role) -> PodRole {
    match role {
        Role::Model => PodRole::Model { replica: 0 },
        Role::Environment { binding, pod } => PodRole::Environment { binding, pod },
    }
}

fn memory(run: &RunSpec, role: Role) -> Option<&str> {
    let resources = match role.kind() {
        ComponentKind::Model => &run.model.resources,
        ComponentKind::Environment => &run.environment.resources,
    };
    resources.memory.as_deref()
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;

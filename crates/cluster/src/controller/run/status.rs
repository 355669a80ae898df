//! The status that follows from an applied plan. Pure; times of what has not changed are kept, so that an unchanged run
//! gives an unchanged status.

use k8s_openapi::jiff::Timestamp;

use super::apply::{Applied, whole_seconds};
use crate::crd::run::{Component, ComponentPhase, RLMeshRun, RunPhase, RunStatus};
use crate::crd::{Condition, ConditionStatus, message};

/// Each wanted pod serves.
pub const PODS_READY: &str = "PodsReady";
/// The run's NetworkPolicy is as it should be.
pub const NETWORK_POLICY_APPLIED: &str = "NetworkPolicyApplied";

/// The controller's part of the status.
#[must_use]
pub fn status(run: &RLMeshRun, applied: &Applied, now: Timestamp) -> RunStatus {
    let before = run.status.as_ref();
    let known = |component: &Component| {
        before.and_then(|status| status.components.iter().find(|old| old.name == component.name && old.attempt == component.attempt))
    };
    let components: Vec<Component> = applied
        .components
        .iter()
        .map(|component| {
            let old = known(component);
            let unchanged = old.filter(|old| (old.phase, old.reason) == (component.phase, component.reason));
            let ready_at = old.and_then(|old| old.ready_at.clone());
            let first = (component.phase == ComponentPhase::Ready).then(|| whole_seconds(now));
            Component {
                since: unchanged.map_or_else(|| whole_seconds(now), |old| old.since.clone()),
                ready_at: ready_at.or(first),
                // What was known of a pod that is gone stays known.
                pod: component.pod.clone().or_else(|| old.and_then(|old| old.pod.clone())),
                node: component.node.clone().or_else(|| old.and_then(|old| old.node.clone())),
                image_id: component.image_id.clone().or_else(|| old.and_then(|old| old.image_id.clone())),
                ..component.clone()
            }
        })
        .collect();
    let current = &components[..applied.wanted.min(components.len())];
    let ready = current.iter().filter(|component| component.phase == ComponentPhase::Ready).count();
    let conditions = vec![pods_ready(run, current, ready, now), network(run, applied, now)];
    RunStatus {
        phase: Some(phase(run, current, ready)),
        pods_ready: Some(format!("{ready}/{}", applied.wanted)),
        observed_generation: run.metadata.generation,
        conditions,
        components,
        artifacts: Vec::new(),
    }
}

fn phase(run: &RLMeshRun, current: &[Component], ready: usize) -> RunPhase {
    let runner_succeeded =
        |component: &Component| matches!(component.name.as_str(), "runner" | "describe") && component.phase == ComponentPhase::Succeeded;
    if run.spec.cancel {
        RunPhase::Cancelled
    } else if current.iter().any(runner_succeeded) {
        RunPhase::Finished
    } else if current.iter().any(|component| component.phase == ComponentPhase::Failed) {
        RunPhase::Failed
    } else if ready == current.len() {
        RunPhase::Running
    } else {
        RunPhase::Starting
    }
}

/// What hinders most comes first: what failed, then what waits.
fn pods_ready(run: &RLMeshRun, current: &[Component], ready: usize, now: Timestamp) -> Condition {
    let worst = current.iter().filter(|component| component.phase != ComponentPhase::Ready).max_by_key(|component| match component.phase {
        ComponentPhase::Failed => 3,
        ComponentPhase::Pending => 2,
        ComponentPhase::Starting => 1,
        ComponentPhase::Succeeded | ComponentPhase::Ready => 0,
    });
    let (holds, reason, text) = match worst {
        _ if run.spec.cancel => (false, "Cancelled", "the run was cancelled; its pods are being deleted".to_owned()),
        None => (true, "AllReady", format!("{ready} of {} pods serve", current.len())),
        Some(component) => {
            let reason = component.reason.map_or(phase_word(component.phase), crate::crd::run::Reason::as_str);
            let why = component.message.as_deref().unwrap_or(phase_sentence(component.phase));
            (false, reason, format!("{} (attempt {}): {why}", component.name, component.attempt))
        }
    };
    condition(run, PODS_READY, holds, reason, &text, now)
}

const fn phase_word(phase: ComponentPhase) -> &'static str {
    match phase {
        ComponentPhase::Pending => "Pending",
        ComponentPhase::Starting => "Starting",
        ComponentPhase::Ready => "Ready",
        ComponentPhase::Succeeded => "Finished",
        ComponentPhase::Failed => "Failed",
    }
}

const fn phase_sentence(phase: ComponentPhase) -> &'static str {
    match phase {
        ComponentPhase::Pending => "its pod does not run yet",
        ComponentPhase::Starting => "it runs and does not serve yet",
        ComponentPhase::Ready => "it serves",
        ComponentPhase::Succeeded => "it has ended well",
        ComponentPhase::Failed => "it has failed",
    }
}

fn network(run: &RLMeshRun, applied: &Applied, now: Timestamp) -> Condition {
    match &applied.policy {
        Ok(()) => condition(run, NETWORK_POLICY_APPLIED, true, "Applied", "the run's NetworkPolicy is in place", now),
        Err(error) => {
            condition(run, NETWORK_POLICY_APPLIED, false, "Refused", &format!("the run's NetworkPolicy could not be applied: {error}"), now)
        }
    }
}

fn condition(run: &RLMeshRun, name: &str, holds: bool, reason: &str, text: &str, now: Timestamp) -> Condition {
    let status = ConditionStatus::from(holds);
    let old = run.status.iter().flat_map(|status| &status.conditions).find(|old| old.type_ == name && old.status == status);
    Condition {
        type_: name.to_owned(),
        status,
        reason: reason.to_owned(),
        message: message(text),
        last_transition_time: old.map_or_else(|| whole_seconds(now), |old| old.last_transition_time.clone()),
        observed_generation: run.metadata.generation.unwrap_or(0),
    }
}

/// Whether the API server has this already.
#[must_use]
pub fn current(run: &RLMeshRun, wanted: &RunStatus) -> bool {
    let artifacts = Vec::new();
    run.status.as_ref().is_some_and(|found| RunStatus { artifacts, ..found.clone() } == *wanted)
}

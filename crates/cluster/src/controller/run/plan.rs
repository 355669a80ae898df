//! What should change, from what was seen. Pure and total: the same observation gives the same plan, and a plan that was
//! carried out in part is completed by the next one.
//!
//! An attempt has one pod, ever. Its pod's name is the attempt's, so making it twice makes one; and once `status` names the
//! pod, an attempt whose pod is gone is over. Only the agent starts the next attempt.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::classify::{component, see};
use super::component::{Attempt, Role, wanted};
use super::{pod, policy};
use crate::controller::settings::Settings;
use crate::crd::run::{Component, ComponentPhase, RLMeshRun, Reason};

/// What `gather` found. A pod that `status` names and that is not here was looked for, and does not exist.
#[derive(Debug, Clone)]
pub struct Observed {
    pub run: Arc<RLMeshRun>,
    /// The run's own pods; not those of an earlier run of this name.
    pub pods: Vec<Arc<Pod>>,
    pub policy: Option<Arc<NetworkPolicy>>,
}

/// A pod to delete. With its UID: a pod of the same name that is another one stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deletion {
    pub name: String,
    pub uid: String,
}

/// What is to be done, in this order, and what the status says when all of it worked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    pub policy: Option<Box<NetworkPolicy>>,
    pub create: Vec<(Attempt, Pod)>,
    pub delete: Vec<Deletion>,
    pub components: Vec<Component>,
    /// Attempts that should serve.
    pub wanted: usize,
    /// When time alone changes something.
    pub look_again: Option<Timestamp>,
}

/// Decides.
#[must_use]
pub fn plan(observed: &Observed, settings: &Settings, now: Timestamp) -> Plan {
    let run = &observed.run;
    let mut plan = Plan::default();
    if run.metadata.deletion_timestamp.is_some() {
        // The garbage collector does the rest, by owner references.
        return plan;
    }
    let wanted = wanted(run);
    plan.wanted = wanted.len();
    if !wanted.is_empty() {
        let policy = policy::build(run, settings);
        plan.policy = observed.policy.as_deref().is_none_or(|found| !policy::current(found, &policy)).then(|| Box::new(policy));
    }
    let before = Before::of(run);
    let name = run.metadata.name.as_deref().unwrap_or_default();
    let pods: BTreeMap<Attempt, &Pod> =
        observed.pods.iter().filter_map(|pod| Some((Attempt::of_pod(name, pod.metadata.name.as_deref()?)?, pod.as_ref()))).collect();
    for &attempt in &wanted {
        let found = pods.get(&attempt).copied();
        let component = match (found, before.of_attempt(attempt)) {
            (found, Some(known)) if known.phase.over() => {
                if let Some(pod) = found.filter(|_| released(run, attempt)) {
                    plan.delete(pod);
                }
                known.clone()
            }
            (Some(pod), known) => plan.see(run, attempt, pod, known, now),
            (None, Some(known)) if known.pod.is_some() => Component {
                address: None,
                since: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now),
                phase: ComponentPhase::Failed,
                reason: Some(Reason::PodDeleted),
                message: Some("the pod is gone, and RLMesh did not delete it".to_owned()),
                ..known.clone()
            },
            (None, _) => plan.make(run, attempt, settings, now),
        };
        plan.components.push(component);
    }
    let wanted: BTreeSet<Attempt> = wanted.into_iter().collect();
    for (&attempt, &pod) in pods.iter().filter(|(attempt, _)| !wanted.contains(attempt)) {
        plan.leftover(run, attempt, pod, before.of_attempt(attempt), now);
    }
    plan
}

impl Plan {
    fn see(&mut self, run: &RLMeshRun, attempt: Attempt, pod: &Pod, known: Option<&Component>, now: Timestamp) -> Component {
        let served = known.is_some_and(|known| known.ready_at.is_some());
        let seen = see(attempt, pod, served, patience(run, attempt.role), now);
        self.again(seen.deadline);
        seen.component
    }

    fn again(&mut self, at: Option<Timestamp>) {
        self.look_again = self.look_again.into_iter().chain(at).min();
    }

    fn make(&mut self, run: &RLMeshRun, attempt: Attempt, settings: &Settings, now: Timestamp) -> Component {
        match pod::build(run, attempt, settings) {
            Ok(pod) => {
                self.create.push((attempt, pod));
                component(attempt, ComponentPhase::Pending, Some(Reason::Creating), Some("the pod is being made"), now)
            }
            Err(no) => {
                let phase = if no.reason == Reason::ArtifactsNotReady { ComponentPhase::Pending } else { ComponentPhase::Failed };
                component(attempt, phase, Some(no.reason), Some(&no.message), now)
            }
        }
    }

    /// A pod that is not wanted any more: an earlier attempt, a binding that is done with, a cancelled run. One that ended by
    /// itself stays until its logs are kept elsewhere.
    fn leftover(&mut self, run: &RLMeshRun, attempt: Attempt, pod: &Pod, known: Option<&Component>, now: Timestamp) {
        if pod.metadata.deletion_timestamp.is_some() {
            return;
        }
        let component = match known {
            Some(known) if known.phase.over() => known.clone(),
            _ => self.see(run, attempt, pod, known, now),
        };
        if run.spec.cancel || !component.phase.over() || released(run, attempt) {
            self.delete(pod);
        } else {
            self.components.push(component);
        }
    }

    fn delete(&mut self, pod: &Pod) {
        if let (None, Some(name), Some(uid)) = (&pod.metadata.deletion_timestamp, &pod.metadata.name, &pod.metadata.uid) {
            self.delete.push(Deletion { name: name.clone(), uid: uid.clone() });
        }
    }
}

/// What the status knows from before.
struct Before<'a>(BTreeMap<(&'a str, u32), &'a Component>);

impl<'a> Before<'a> {
    fn of(run: &'a RLMeshRun) -> Self {
        let components = run.status.iter().flat_map(|status| &status.components);
        Self(components.map(|component| ((component.name.as_str(), component.attempt), component)).collect())
    }

    fn of_attempt(&self, attempt: Attempt) -> Option<&'a Component> {
        self.0.get(&(attempt.role.to_string().as_str(), attempt.number)).copied()
    }
}

fn released(run: &RLMeshRun, attempt: Attempt) -> bool {
    run.spec.released_attempts.get(&attempt.role.to_string()).is_some_and(|&released| released >= attempt.number)
}

/// How long a pod of this part may take to serve, and to get its image.
fn patience(run: &RLMeshRun, role: Role) -> SignedDuration {
    let model = run.spec.model.as_ref().map(|model| &model.program);
    let environments = run.spec.environments.as_ref().map(|environments| &environments.program);
    let program = match role {
        Role::Model { .. } => model,
        Role::Environment { .. } => environments,
        Role::Describe => model.or(environments),
        Role::Runner => None,
    };
    SignedDuration::from_secs(program.map_or(600, |program| program.startup_timeout_seconds).into())
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

//! Carries a plan out: the only place that writes, apart from the status. Decides nothing but what a refusal means.
//!
//! Pods are created and not applied: a pod of that name that is there already is the attempt's pod, and stays as it is.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::component::Attempt;
use super::plan::{Deletion, Plan};
use crate::crd::message;
use crate::crd::run::{Component, ComponentPhase, Reason, RunStatus};

/// How long until a pod that a quota left no room for is tried again; nothing tells when there is room.
const QUOTA_PAUSE: SignedDuration = SignedDuration::from_secs(30);

/// A write that did not happen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// It will not be accepted either when it is repeated.
    #[error("refused: {0}")]
    Refused(String),
    #[error("no room: {0}")]
    Quota(String),
    /// Not known to have happened; it is safe to repeat.
    #[error("{0}")]
    Unavailable(String),
}

/// The cluster as the controller writes it. Every write may be repeated, and one that finds its work done has worked.
#[async_trait]
pub trait Writes: Send + Sync {
    async fn apply_policy(&self, policy: &NetworkPolicy) -> Result<(), WriteError>;
    async fn create_pod(&self, pod: &Pod) -> Result<(), WriteError>;
    async fn delete_pod(&self, deletion: &Deletion) -> Result<(), WriteError>;
    async fn apply_status(&self, run: &str, status: &RunStatus) -> Result<(), WriteError>;
}

/// A plan after it was carried out. Only from this can a status be computed.
#[derive(Debug)]
pub struct Applied {
    pub components: Vec<Component>,
    pub wanted: usize,
    /// Why the policy is not in force, if it is not.
    pub policy: Result<(), WriteError>,
    pub look_again: Option<Timestamp>,
}

/// Writes the policy, makes pods, deletes pods. Without the policy no pod is made: its first connection would be refused.
pub async fn apply(plan: Plan, writes: &dyn Writes, now: Timestamp) -> Result<Applied, WriteError> {
    let Plan { policy, create, delete, mut components, wanted, mut look_again } = plan;
    let policy = match policy {
        Some(policy) => writes.apply_policy(&policy).await,
        None => Ok(()),
    };
    match &policy {
        Err(error @ (WriteError::Unavailable(_) | WriteError::Quota(_))) => return Err(error.clone()),
        Err(WriteError::Refused(why)) => {
            let why = format!("the run's NetworkPolicy was refused: {why}");
            create.iter().for_each(|(attempt, _)| fail(&mut components, *attempt, ComponentPhase::Failed, Reason::AdmissionRefused, &why));
        }
        Ok(()) => {
            for (attempt, pod) in &create {
                match writes.create_pod(pod).await {
                    Ok(()) => {}
                    Err(WriteError::Refused(why)) => {
                        fail(&mut components, *attempt, ComponentPhase::Failed, Reason::AdmissionRefused, &why)
                    }
                    Err(WriteError::Quota(why)) => {
                        fail(&mut components, *attempt, ComponentPhase::Pending, Reason::QuotaExceeded, &why);
                        look_again = look_again.into_iter().chain(now.checked_add(QUOTA_PAUSE).ok()).min();
                    }
                    Err(error @ WriteError::Unavailable(_)) => return Err(error),
                }
            }
        }
    }
    for deletion in &delete {
        match writes.delete_pod(deletion).await {
            Ok(()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Applied { components, wanted, policy, look_again })
}

fn fail(components: &mut [Component], attempt: Attempt, phase: ComponentPhase, reason: Reason, why: &str) {
    let name = attempt.role.to_string();
    for component in components.iter_mut().filter(|component| component.name == name && component.attempt == attempt.number) {
        component.phase = phase;
        component.reason = Some(reason);
        component.message = Some(message(why));
    }
}

/// Times are kept to the second, as the API server shows them.
#[must_use]
pub fn whole_seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

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
const QUOTA_PAUSE: SignedDuration = SignedDuration::from_secs(10);
/// How long until what the API server could not do is tried again.
const UNAVAILABLE_PAUSE: SignedDuration = SignedDuration::from_secs(3);

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

impl WriteError {
    /// The API server's words.
    fn why(&self) -> &str {
        match self {
            Self::Refused(why) | Self::Quota(why) | Self::Unavailable(why) => why,
        }
    }

    fn about(&self, what: &str) -> Self {
        match self {
            Self::Refused(why) => Self::Refused(format!("{what} was refused: {why}")),
            Self::Quota(why) => Self::Quota(format!("{what}: {why}")),
            Self::Unavailable(why) => Self::Unavailable(format!("{what}: {why}")),
        }
    }
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
    /// The first deletion that did not happen.
    pub deleted: Result<(), WriteError>,
    pub look_again: Option<Timestamp>,
}

/// Writes the policy, makes pods, deletes pods. Without the policy no pod is made: its first connection would be refused.
///
/// What could not be made is said of its component. Where nothing at all can be written, the status can't be either, and that
/// is the error.
pub async fn apply(plan: Plan, writes: &dyn Writes, now: Timestamp) -> Result<Applied, WriteError> {
    let Plan { policy, create, delete, mut components, wanted, mut look_again } = plan;
    let policy = match policy {
        Some(policy) => writes.apply_policy(&policy).await,
        None => Ok(()),
    };
    // After the first write that was not answered the others would wait as long each.
    let mut unavailable = None;
    for (attempt, pod) in &create {
        let made = match (&policy, &unavailable) {
            (Err(error), _) => Err(error.about("the run's NetworkPolicy")),
            (Ok(()), Some(error)) => Err(WriteError::clone(error)),
            (Ok(()), None) => writes.create_pod(pod).await,
        };
        let Err(error) = made else { continue };
        let (phase, reason, pause) = match &error {
            WriteError::Refused(_) => (ComponentPhase::Failed, Reason::AdmissionRefused, None),
            WriteError::Quota(_) => (ComponentPhase::Pending, Reason::QuotaExceeded, Some(QUOTA_PAUSE)),
            WriteError::Unavailable(_) => (ComponentPhase::Pending, Reason::ApiUnavailable, Some(UNAVAILABLE_PAUSE)),
        };
        fail(&mut components, *attempt, phase, reason, error.why());
        look_again = look_again.into_iter().chain(pause.and_then(|pause| now.checked_add(pause).ok())).min();
        if matches!(error, WriteError::Unavailable(_)) {
            tracing::warn!(attempt = %attempt.role, "{error}; it is repeated");
            unavailable = Some(error);
        }
    }
    if let (Err(WriteError::Unavailable(_) | WriteError::Quota(_)), true) = (&policy, create.is_empty()) {
        look_again = look_again.into_iter().chain(now.checked_add(UNAVAILABLE_PAUSE).ok()).min();
    }
    let mut deleted = Ok(());
    for deletion in &delete {
        deleted = deleted.and(writes.delete_pod(deletion).await);
    }
    Ok(Applied { components, wanted, policy, deleted, look_again })
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

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;

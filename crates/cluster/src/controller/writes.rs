//! The controller's writes to the Kubernetes API: each with a deadline, none without the lease.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Resource as _};
use serde_json::json;

use super::lease::Leadership;
use super::run::apply::{WriteError, Writes};
use super::run::plan::Deletion;
use crate::crd::run::{CONTROLLER_MANAGER, RLMeshRun, RunStatus};

/// Longest that a write may take. Together with the renewal deadline it is no longer than the lease, so that a controller
/// that lost the lease has stopped writing before the next one starts.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(5);

pub struct KubeWrites {
    runs: Api<RLMeshRun>,
    pods: Api<Pod>,
    policies: Api<NetworkPolicy>,
    leadership: Leadership,
}

impl KubeWrites {
    #[must_use]
    pub fn new(client: &Client, namespace: &str, leadership: Leadership) -> Self {
        Self {
            runs: Api::namespaced(client.clone(), namespace),
            pods: Api::namespaced(client.clone(), namespace),
            policies: Api::namespaced(client.clone(), namespace),
            leadership,
        }
    }

    /// `done`: the API server's reasons that mean that there is nothing left to do.
    async fn write<T: Send>(
        &self,
        what: &str,
        done: &[&str],
        call: impl Future<Output = kube::Result<T>> + Send,
    ) -> Result<(), WriteError> {
        if !self.leadership.held() {
            return Err(WriteError::Unavailable(format!("{what}: another controller has the lease")));
        }
        match tokio::time::timeout(WRITE_DEADLINE, call).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kube::Error::Api(status))) if done.contains(&status.reason.as_str()) => Ok(()),
            Ok(Err(error)) => Err(refusal(what, &error)),
            Err(_) => Err(WriteError::Unavailable(format!("{what}: no answer within {} s", WRITE_DEADLINE.as_secs()))),
        }
    }
}

/// What an answer of the API server means for a write that may be repeated.
fn refusal(what: &str, error: &kube::Error) -> WriteError {
    let kube::Error::Api(status) = error else {
        return WriteError::Unavailable(format!("{what}: {error}"));
    };
    let said = format!("{what}: {}", status.message);
    match status.code {
        // A quota that was made just now has no status yet, and lets nothing through until it has.
        403 if status.message.contains("exceeded quota") || status.message.contains("status unknown for quota") => WriteError::Quota(said),
        403 if status.message.contains("is being terminated") => WriteError::Unavailable(said),
        400 | 403 | 413 | 422 => WriteError::Refused(said),
        _ => WriteError::Unavailable(said),
    }
}

#[async_trait]
impl Writes for KubeWrites {
    async fn apply_policy(&self, policy: &NetworkPolicy) -> Result<(), WriteError> {
        let name = policy.metadata.name.as_deref().unwrap_or_default();
        let params = PatchParams::apply(CONTROLLER_MANAGER).force();
        self.write(&format!("apply NetworkPolicy {name}"), &[], self.policies.patch(name, &params, &Patch::Apply(policy))).await
    }

    async fn create_pod(&self, pod: &Pod) -> Result<(), WriteError> {
        let params = PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() };
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        self.write(&format!("create pod {name}"), &["AlreadyExists"], self.pods.create(&params, pod)).await
    }

    async fn delete_pod(&self, deletion: &Deletion) -> Result<(), WriteError> {
        let preconditions = Some(Preconditions { uid: Some(deletion.uid.clone()), resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        // A conflict: another pod has this name by now, and the one that was meant is gone.
        let done = ["NotFound", "Conflict"];
        self.write(&format!("delete pod {}", deletion.name), &done, self.pods.delete(&deletion.name, &params)).await
    }

    async fn apply_status(&self, run: &str, status: &RunStatus) -> Result<(), WriteError> {
        let body = json!({
            "apiVersion": RLMeshRun::api_version(&()), "kind": RLMeshRun::kind(&()), "metadata": {"name": run}, "status": status,
        });
        let params = PatchParams::apply(CONTROLLER_MANAGER).force();
        self.write(&format!("apply the status of {run}"), &["NotFound"], self.runs.patch_status(run, &params, &Patch::Apply(&body))).await
    }
}

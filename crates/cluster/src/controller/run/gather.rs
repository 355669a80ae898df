//! What there is of one run, from the watches' stores. Writes nothing and decides nothing.
//!
//! Stores lag behind each other: a status may already name a pod that the pods' watch has not shown. So before a pod counts
//! as gone the API server is asked for it; nothing else is ever asked here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::Api;
use kube::runtime::reflector::{ObjectRef, Store};

use super::apply::WriteError;
use super::plan::Observed;
use crate::controller::pods::PodIndex;
use crate::crd::run::RLMeshRun;

const DEADLINE: Duration = Duration::from_secs(10);

/// Where things are looked up.
#[derive(Clone)]
pub struct Stores {
    pub runs: Store<RLMeshRun>,
    pub policies: Store<NetworkPolicy>,
    pub pods: PodIndex,
    /// For the proof that a pod is gone.
    pub api: Api<Pod>,
}

impl Stores {
    /// Returns once each first list is complete.
    pub async fn ready(&self) -> Result<(), WriteError> {
        let gone = |_| WriteError::Unavailable("the watches have ended".to_owned());
        self.runs.wait_until_ready().await.map_err(gone)?;
        self.policies.wait_until_ready().await.map_err(gone)?;
        self.pods.ready().await;
        Ok(())
    }
}

/// Gathers.
pub async fn gather(run: Arc<RLMeshRun>, stores: &Stores) -> Result<Observed, WriteError> {
    let name = run.metadata.name.as_deref().unwrap_or_default();
    let mut pods = stores.pods.of_run(name);
    let seen: BTreeSet<String> = pods.iter().filter_map(|pod| pod.metadata.name.clone()).collect();
    let named = run.status.iter().flat_map(|status| &status.components).filter(|component| !component.phase.over());
    for pod in named.filter_map(|component| component.pod.as_ref()).filter(|pod| !seen.contains(*pod)) {
        let asked = tokio::time::timeout(DEADLINE, stores.api.get_opt(pod)).await;
        let answer =
            asked.map_err(|_| WriteError::Unavailable(format!("no answer within {} s whether pod {pod} is there", DEADLINE.as_secs())))?;
        let found = answer.map_err(|error| WriteError::Unavailable(format!("whether pod {pod} is there is not known: {error}")))?;
        pods.extend(found.map(Arc::new));
    }
    pods.retain(|pod| owned(pod, &run));
    let policy = stores.policies.get(&ObjectRef::new(name).within(run.metadata.namespace.as_deref().unwrap_or_default()));
    Ok(Observed { run, pods, policy })
}

/// A run of the same name may have been deleted just now, and its pods still go.
#[must_use]
pub fn owned(pod: &Pod, run: &RLMeshRun) -> bool {
    run.metadata.uid.as_ref().is_some_and(|uid| pod.metadata.owner_references.iter().flatten().any(|owner| owner.uid == *uid))
}

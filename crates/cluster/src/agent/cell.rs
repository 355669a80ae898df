//! ConfigMap `rlmesh-cell`: how the cell's other parts find the agent and know that it is the agent. Its parts mount it; there is
//! nothing secret in it. The chart makes it; the agent may write this one object and can't read it.

use std::net::SocketAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::discovery::{ADDRESS, CERTIFICATE};

const NAME: &str = "rlmesh-cell";
const DEADLINE: Duration = Duration::from_secs(10);
/// It may be made anew, empty, at any time.
const AGAIN: Duration = Duration::from_secs(120);
const RETRY: Duration = Duration::from_secs(5);

/// What is to be in it.
#[must_use]
pub fn content(address: SocketAddr, certificate: &str) -> Value {
    json!({"data": {ADDRESS: address.to_string(), CERTIFICATE: certificate}})
}

/// Keeps it written, for as long as the agent lives.
pub async fn keep_written(client: Client, namespace: String, content: Value) {
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let mut told = false;
    loop {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&content));
        let problem = match tokio::time::timeout(DEADLINE, maps.patch(NAME, &parameters, &patch)).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no answer within {} s", DEADLINE.as_secs())),
        };
        match &problem {
            Some(problem) if !std::mem::replace(&mut told, true) => {
                tracing::warn!(
                    problem,
                    "ConfigMap {namespace}/{NAME} can't be written, so GPU discovery does not find this agent; trying again"
                );
            }
            Some(problem) => tracing::debug!(problem, "ConfigMap {NAME} can't be written"),
            None if std::mem::take(&mut told) => tracing::info!("ConfigMap {NAME} is written"),
            None => {}
        }
        tokio::time::sleep(if problem.is_some() { RETRY } else { AGAIN }).await;
    }
}

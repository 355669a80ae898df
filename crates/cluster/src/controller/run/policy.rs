//! The run's NetworkPolicy: its runner reaches its models and environments on their port, and nobody else does. Pure.
//!
//! It says who may come in and nothing of what goes out: the namespace is default-deny, and what every run may reach is in the
//! chart's static policies. One policy that says both would let a run's pods reach each other on networks (kube-router) that
//! take a policy's way out for a way in wherever it selects both ends.

use std::collections::BTreeMap;

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ObjectMeta;

use super::classify::PORT;
use super::component::Role;
use super::pod::{LABEL_COMPONENT, LABEL_EVALUATION, LABEL_RUN, owner, run_id};
use crate::controller::settings::Settings;
use crate::crd::run::RLMeshRun;

#[must_use]
pub fn build(run: &RLMeshRun, settings: &Settings) -> NetworkPolicy {
    let name = run.metadata.name.clone().unwrap_or_default();
    let id = run_id(&name);
    let own = BTreeMap::from([(LABEL_RUN.to_owned(), id.clone())]);
    let runner = BTreeMap::from([(LABEL_RUN.to_owned(), id), (LABEL_COMPONENT.to_owned(), Role::Runner.kind().to_owned())]);
    let labels = [(LABEL_EVALUATION.to_owned(), run.spec.evaluation_id.clone())].into_iter().chain(own.clone()).collect();
    NetworkPolicy {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(settings.namespace.clone()),
            labels: Some(labels),
            owner_references: owner(run).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(selector(own)),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(vec![NetworkPolicyIngressRule { from: Some(vec![peer(runner)]), ports: Some(vec![port()]) }]),
            egress: None,
        }),
    }
}

fn selector(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector { match_labels: Some(labels), match_expressions: None }
}

fn peer(labels: BTreeMap<String, String>) -> NetworkPolicyPeer {
    NetworkPolicyPeer { pod_selector: Some(selector(labels)), ..NetworkPolicyPeer::default() }
}

fn port() -> NetworkPolicyPort {
    NetworkPolicyPort { port: Some(IntOrString::Int(PORT.into())), protocol: Some("TCP".to_owned()), end_port: None }
}

/// Whether what is there is what should be. The API server fills in nothing that is not written here.
#[must_use]
pub fn current(found: &NetworkPolicy, wanted: &NetworkPolicy) -> bool {
    found.spec == wanted.spec && found.metadata.owner_references == wanted.metadata.owner_references
}

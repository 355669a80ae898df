//! On which nodes a pod may go: the cluster owner's rules, and within them the run's needs. Pure.
//!
//! Node selector terms are alternatives, so two sets of them hold together as their product. `shareModelGpu` is a required
//! pod affinity to the run's model on the same node; the environment asks for no GPU of its own and is shown the node's, as
//! the NVIDIA runtime does for `NVIDIA_VISIBLE_DEVICES=all` (a runtime class that forbids this to pods that request nothing
//! shows none).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodAffinityTerm, PodSpec, Toleration,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::component::Role;
use super::pod::{LABEL_COMPONENT, LABEL_RUN, run_id};
use crate::controller::settings::Settings;
use crate::crd::run::{GpuVendor, RLMeshRun, Resources};

/// The extended resource that counts a vendor's GPUs.
#[must_use]
pub const fn gpu_resource(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Nvidia => "nvidia.com/gpu",
        GpuVendor::Amd => "amd.com/gpu",
    }
}

/// The label that the vendor's discovery puts a product's name in.
#[must_use]
pub const fn product_label(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Nvidia => "nvidia.com/gpu.product",
        GpuVendor::Amd => "amd.com/gpu.product-name",
    }
}

/// Sets the pod's affinity.
pub fn place(spec: &mut PodSpec, run: &RLMeshRun, role: Role, resources: &Resources, settings: &Settings) {
    let mut affinity = settings.runs.affinity.clone().unwrap_or_default();
    for terms in [gpu_terms(resources), volume_terms(run, role)] {
        if !terms.is_empty() {
            require(affinity.node_affinity.get_or_insert_default(), terms);
        }
    }
    let shares =
        matches!(role, Role::Environment { .. }) && run.spec.environments.as_ref().is_some_and(|environments| environments.share_model_gpu);
    if shares {
        let terms = &mut affinity.pod_affinity.get_or_insert_default().required_during_scheduling_ignored_during_execution;
        terms.get_or_insert_default().push(beside_the_model(run));
        // Admission lets those onto a GPU node who ask for its GPUs, and this one asks for none.
        spec.tolerations.get_or_insert_default().push(Toleration {
            key: Some(gpu_resource(resources.gpu_vendor).to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some("NoSchedule".to_owned()),
            ..Toleration::default()
        });
    }
    spec.affinity = (affinity != Affinity::default()).then_some(affinity);
}

fn beside_the_model(run: &RLMeshRun) -> PodAffinityTerm {
    let labels = BTreeMap::from([
        (LABEL_RUN.to_owned(), run_id(run.metadata.name.as_deref().unwrap_or_default())),
        (LABEL_COMPONENT.to_owned(), Role::Model { replica: 0 }.kind().to_owned()),
    ]);
    PodAffinityTerm {
        topology_key: "kubernetes.io/hostname".to_owned(),
        label_selector: Some(LabelSelector { match_labels: Some(labels), match_expressions: None }),
        ..PodAffinityTerm::default()
    }
}

/// Nodes with the product: by the vendor's label, or by name where that does not say it.
fn gpu_terms(resources: &Resources) -> Vec<NodeSelectorTerm> {
    if resources.gpu == 0 {
        return Vec::new();
    }
    let by_label = resources.gpu_product.as_ref().map(|product| {
        let label = requirement(product_label(resources.gpu_vendor), product);
        NodeSelectorTerm { match_expressions: Some(vec![label]), match_fields: None }
    });
    by_label.into_iter().chain(resources.gpu_nodes.iter().map(|node| node_term(node))).collect()
}

/// The node that holds what the model loads, where the cache's volume is bound to one.
fn volume_terms(run: &RLMeshRun, role: Role) -> Vec<NodeSelectorTerm> {
    let (Role::Model { .. }, Some(model), Some(status)) = (role, &run.spec.model, &run.status) else { return Vec::new() };
    let cached = |name: &str| model.artifacts.iter().any(|artifact| artifact.name == name && artifact.volume.is_none());
    let node = status.artifacts.iter().filter(|entry| cached(&entry.name)).find_map(|entry| entry.node.as_ref());
    node.map(|node| node_term(node)).into_iter().collect()
}

fn node_term(node: &str) -> NodeSelectorTerm {
    NodeSelectorTerm { match_expressions: None, match_fields: Some(vec![requirement("metadata.name", node)]) }
}

fn requirement(key: &str, value: &str) -> NodeSelectorRequirement {
    NodeSelectorRequirement { key: key.to_owned(), operator: "In".to_owned(), values: Some(vec![value.to_owned()]) }
}

/// Adds the alternatives to what is required already.
fn require(affinity: &mut NodeAffinity, terms: Vec<NodeSelectorTerm>) {
    let selector = affinity.required_during_scheduling_ignored_during_execution.get_or_insert_with(NodeSelector::default);
    if selector.node_selector_terms.is_empty() {
        selector.node_selector_terms = terms;
        return;
    }
    let both = |one: &NodeSelectorTerm, other: &NodeSelectorTerm| {
        let join = |one: &Option<Vec<NodeSelectorRequirement>>, other: &Option<Vec<NodeSelectorRequirement>>| {
            let all: Vec<_> = one.iter().chain(other).flatten().cloned().collect();
            (!all.is_empty()).then_some(all)
        };
        NodeSelectorTerm {
            match_expressions: join(&one.match_expressions, &other.match_expressions),
            match_fields: join(&one.match_fields, &other.match_fields),
        }
    };
    let product = selector.node_selector_terms.iter().flat_map(|one| terms.iter().map(move |other| both(one, other))).collect();
    selector.node_selector_terms = product;
}

//! A node as the control plane is told of it. Pure.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use rlm_api::cluster::v1;

use super::gpus::{Offer, vendor_name};

/// `offers` are the node's own; one vendor's are told: those that pods can ask for before others.
#[must_use]
pub fn told(node: &Node, offers: &[Offer]) -> v1::Node {
    let gpus = offers.iter().find(|offer| offer.count > 0).or(offers.first());
    let gpu = gpus.cloned().unwrap_or_default();
    v1::Node {
        name: node.name_any(),
        arch: node.labels().get("kubernetes.io/arch").cloned().unwrap_or_default(),
        cpu_millis: millis(&quantity(node, "cpu")),
        memory_bytes: bytes(&quantity(node, "memory")),
        gpu_vendor: gpus.map_or("", |gpus| vendor_name(gpus.vendor)).to_owned(),
        gpu_product: gpu.product,
        gpu_count: gpu.count,
        gpu_memory_bytes: gpu.memory_bytes,
        gpu_driver: gpu.driver,
    }
}

/// Of what pods may ask for; empty: nothing.
#[must_use]
pub fn quantity(node: &Node, name: &str) -> String {
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    allocatable.and_then(|all| all.get(name)).map(|quantity| quantity.0.clone()).unwrap_or_default()
}

/// `2` or `1500m`.
fn millis(quantity: &str) -> u64 {
    match quantity.strip_suffix('m') {
        Some(millis) => millis.parse().unwrap_or(0),
        None => quantity.parse::<f64>().map_or(0, |cpus| (cpus * 1_000.0) as u64),
    }
}

/// `16Gi`, `24605448Ki`, `1000000000`.
fn bytes(quantity: &str) -> u64 {
    let units =
        [("Ki", 1_u64 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30), ("Ti", 1 << 40), ("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];
    for (unit, factor) in units {
        if let Some(number) = quantity.strip_suffix(unit) {
            return number.parse::<f64>().map_or(0, |number| (number * factor as f64) as u64);
        }
    }
    quantity.parse().unwrap_or(0)
}

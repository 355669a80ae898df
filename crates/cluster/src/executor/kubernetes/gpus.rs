//! Which GPUs the cluster's nodes have, and which of them a run gets. Pure.
//!
//! The device plugin says how many a node offers, the vendor's labels which; what they leave open, discovery fills in. A request
//! names a number and, if it likes, a product; the vendor follows from what there is. Whether they are free is the scheduler's.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use rlm_api::cluster::v1::GpuKind;
use rlm_core::evaluation::{EnvironmentDefinition, ModelDefinition, Resources};
use rlm_core::gpu;

use super::node::quantity;
use crate::controller::run::placement::{gpu_resource, product_label};
use crate::crd::run::{self as crd, GpuVendor, RLMeshRunSpec};

/// Nodes that a run's object names at most.
const NODES: usize = 256;
const VENDORS: [GpuVendor; 2] = [GpuVendor::Nvidia, GpuVendor::Amd];
/// AMD's label before it left beta. Even older labellers put the product into its name: `.../gpu.product-name.PRODUCT`.
const BETA: &str = "beta.amd.com/gpu.product-name";

#[must_use]
pub const fn vendor_name(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Nvidia => "nvidia",
        GpuVendor::Amd => "amd",
    }
}

/// One vendor's GPUs of one node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offer {
    pub node: String,
    pub vendor: GpuVendor,
    /// Empty: not known.
    pub product: String,
    /// The label that the controller selects by says the product.
    pub labelled: bool,
    /// That pods can ask for. 0: the node has some, and no device plugin offers them.
    pub count: u32,
    /// Of each; 0: not known.
    pub memory_bytes: u64,
    pub driver: String,
}

/// What the node offers, by vendor; `found` is what discovery says of it.
#[must_use]
pub fn offers(node: &Node, found: &[GpuKind]) -> Vec<Offer> {
    VENDORS.iter().filter_map(|&vendor| offer(node, vendor, found)).collect()
}

fn offer(node: &Node, vendor: GpuVendor, found: &[GpuKind]) -> Option<Offer> {
    let found: Vec<&GpuKind> = found.iter().filter(|kind| kind.vendor == vendor_name(vendor)).collect();
    let count = quantity(node, gpu_resource(vendor)).parse().unwrap_or(0);
    if count == 0 && found.is_empty() {
        return None;
    }
    let label = |name: &str| node.labels().get(name).filter(|value| !value.is_empty()).cloned();
    let (own, other, memory, driver) = match vendor {
        GpuVendor::Nvidia => (
            label(product_label(vendor)),
            None,
            label("nvidia.com/gpu.memory").and_then(|text| text.parse::<u64>().ok()).map(|mib| mib.saturating_mul(1 << 20)),
            label("nvidia.com/cuda.driver-version.full"),
        ),
        GpuVendor::Amd => (
            label(product_label(vendor)),
            label(BETA).or_else(|| in_a_name(node)),
            label("amd.com/gpu.vram").and_then(|text| text.strip_suffix('G')?.parse::<u64>().ok()).map(|gib| gib.saturating_mul(1 << 30)),
            label("amd.com/gpu.driver-version"),
        ),
    };
    // Of several kinds nobody can ask for one: then the product is not known. Those without a name are displays.
    let named: BTreeSet<&str> = found.iter().map(|kind| kind.product.as_str()).filter(|product| !product.is_empty()).collect();
    let only = named.iter().next().copied().filter(|_| named.len() == 1);
    let memory_found = found.iter().filter(|kind| named.is_empty() || !kind.product.is_empty()).map(|kind| kind.memory_bytes).min();
    Some(Offer {
        node: node.name_any(),
        vendor,
        labelled: own.is_some(),
        product: own.or(other).or(only.map(str::to_owned)).unwrap_or_default(),
        count,
        memory_bytes: memory.or(memory_found).unwrap_or_default(),
        driver: driver.or(found.first().map(|kind| kind.driver.clone())).unwrap_or_default(),
    })
}

/// The product of labels such as `beta.amd.com/gpu.product-name.AMD_Instinct_MI250X=8`, if they name one.
fn in_a_name(node: &Node) -> Option<String> {
    let mut names = node.labels().keys().filter_map(|label| label.strip_prefix(BETA)?.strip_prefix('.'));
    let first = names.next()?;
    names.next().is_none().then(|| first.to_owned())
}

/// Where one definition's pods get their GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Source {
    pub vendor: GpuVendor,
    /// Any node whose label says this,
    pub product: Option<String>,
    /// or one of these. Neither: any node that offers the vendor's GPUs.
    pub nodes: Vec<String>,
}

/// A run's sources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chosen {
    pub model: Source,
    pub environment: Source,
}

impl Chosen {
    /// What was chosen for an object that is there already: it can't be changed.
    #[must_use]
    pub fn of(run: &RLMeshRunSpec) -> Self {
        let source = |resources: &crd::Resources| Source {
            vendor: resources.gpu_vendor,
            product: resources.gpu_product.clone(),
            nodes: resources.gpu_nodes.clone(),
        };
        Self {
            model: run.model.as_ref().map(|model| source(&model.program.resources)).unwrap_or_default(),
            environment: run.environments.as_ref().map(|environments| source(&environments.program.resources)).unwrap_or_default(),
        }
    }
}

/// Chooses for the run.
///
/// # Errors
/// If no node has what the model or the environment asks for: a sentence. A node that comes may have it.
pub fn choose(model: &ModelDefinition, environment: &EnvironmentDefinition, offers: &[Offer]) -> Result<Chosen, String> {
    let EnvironmentDefinition { id, resources, share_model_gpu, .. } = environment;
    let model = source(&format!("model '{}'", model.id), &model.resources, offers)?;
    let environment = if *share_model_gpu {
        // It asks for none, and is shown the model's.
        Source { vendor: model.vendor, ..Source::default() }
    } else {
        source(&format!("environment '{id}'"), resources, offers)?
    };
    Ok(Chosen { model, environment })
}

fn source(who: &str, wanted: &Resources, offers: &[Offer]) -> Result<Source, String> {
    if wanted.gpu == 0 {
        return Ok(Source::default());
    }
    let product = wanted.gpu_product.as_deref();
    let fits = |offer: &&Offer| offer.count >= wanted.gpu && product.is_none_or(|product| gpu::matches(product, &offer.product));
    let fitting: Vec<&Offer> = offers.iter().filter(fits).collect();
    let Some(vendor) = VENDORS.into_iter().find(|vendor| fitting.iter().any(|offer| offer.vendor == *vendor)) else {
        return Err(nobody_has(who, wanted, offers));
    };
    if product.is_none() {
        return Ok(Source { vendor, ..Source::default() });
    }
    // The label of most nodes covers those that come, too; the others are named.
    let mut labels = BTreeMap::<&str, usize>::new();
    for offer in fitting.iter().filter(|offer| offer.vendor == vendor && offer.labelled) {
        *labels.entry(&offer.product).or_default() += 1;
    }
    let label = labels.into_iter().rev().max_by_key(|(_, nodes)| *nodes).map(|(label, _)| label.to_owned());
    let covered = |offer: &Offer| offer.labelled && label.as_ref() == Some(&offer.product);
    let mut nodes: Vec<String> =
        fitting.iter().filter(|offer| offer.vendor == vendor && !covered(offer)).map(|offer| offer.node.clone()).collect();
    nodes.sort_unstable();
    nodes.truncate(NODES);
    Ok(Source { vendor, product: label, nodes })
}

fn nobody_has(who: &str, wanted: &Resources, offers: &[Offer]) -> String {
    let product = wanted.gpu_product.as_ref().map_or_else(String::new, |product| format!(" ({product})"));
    let plural = if wanted.gpu == 1 { "" } else { "s" };
    let there_are = gpu::there_are(offers.iter().map(|offer| (offer.product.as_str(), offer.count)));
    let idle: BTreeSet<&str> = offers.iter().filter(|offer| offer.count == 0).map(|offer| gpu_resource(offer.vendor)).collect();
    let hint = match idle.into_iter().collect::<Vec<_>>().join(" and ") {
        none if none.is_empty() => String::new(),
        resources => format!("; nodes have GPUs that no device plugin offers as {resources}"),
    };
    format!("no node has the GPUs: {who} needs {} GPU{plural}{product}; {there_are}{hint}; it goes on when such a node comes", wanted.gpu)
}

#[cfg(test)]
#[path = "gpus_tests.rs"]
mod tests;

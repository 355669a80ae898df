use serde_json::{Value, json};

use super::*;

fn node(name: &str, allocatable: Value, labels: Value) -> Node {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}, "status": {"allocatable": allocatable}})).unwrap()
}

fn found(vendor: &str, product: &str, memory_bytes: u64) -> GpuKind {
    GpuKind { vendor: vendor.to_owned(), product: product.to_owned(), count: 2, memory_bytes, driver: "1.2".to_owned() }
}

fn only(node: &Node, reports: &[GpuKind]) -> Offer {
    let all = offers(node, reports);
    assert_eq!(all.len(), 1, "{all:?}");
    all.into_iter().next().unwrap()
}

#[test]
fn labels_win_and_discovery_fills_in() {
    let labels =
        json!({"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034", "nvidia.com/cuda.driver-version.full": "550.1"});
    let labelled = node("a", json!({"nvidia.com/gpu": "4"}), labels);
    let expected = Offer {
        node: "a".to_owned(),
        vendor: GpuVendor::Nvidia,
        product: "NVIDIA-L4".to_owned(),
        labelled: true,
        count: 4,
        memory_bytes: 23_034 << 20,
        driver: "550.1".to_owned(),
    };
    for reports in [vec![], vec![found("nvidia", "another", 1)], vec![found("amd", "", 1)]] {
        assert_eq!(offers(&labelled, &reports)[0], expected);
    }
    let bare = node("a", json!({"nvidia.com/gpu": "4"}), json!({}));
    let filled = only(&bare, &[found("nvidia", "NVIDIA L4", 7)]);
    assert_eq!((filled.product.as_str(), filled.labelled, filled.count), ("NVIDIA L4", false, 4), "the device plugin says how many");
    assert_eq!((filled.memory_bytes, filled.driver.as_str()), (7, "1.2"));
    assert_eq!(only(&bare, &[]).product, "");
    assert_eq!(offers(&node("a", json!({"cpu": "4"}), json!({})), &[]), []);
    let idle = only(&node("a", json!({}), json!({})), &[found("amd", "MI300X", 7)]);
    assert_eq!((idle.count, idle.product.as_str()), (0, "MI300X"), "seen, and offered by nobody");
}

#[test]
fn amd_has_said_its_product_in_three_ways() {
    let amd = |labels| only(&node("a", json!({"amd.com/gpu": "8"}), labels), &[]);
    let vendor = amd(json!({"amd.com/gpu.product-name": "MI300X", "beta.amd.com/gpu.product-name": "B", "amd.com/gpu.vram": "192G"}));
    assert_eq!((vendor.product.as_str(), vendor.labelled, vendor.memory_bytes), ("MI300X", true, 192 << 30));
    let beta = amd(json!({"beta.amd.com/gpu.product-name": "MI250X", "beta.amd.com/gpu.product-name.MI250X": "8"}));
    assert_eq!((beta.product.as_str(), beta.labelled), ("MI250X", false));
    let old = amd(json!({"beta.amd.com/gpu.product-name.MI100": "8", "beta.amd.com/gpu.vram.32G": "8"}));
    assert_eq!((old.product.as_str(), old.labelled), ("MI100", false));
    assert_eq!(amd(json!({"beta.amd.com/gpu.product-name.A": "4", "beta.amd.com/gpu.product-name.B": "4"})).product, "");
}

#[test]
fn of_several_kinds_none_can_be_asked_for_and_displays_do_not_count() {
    let bare = node("a", json!({"amd.com/gpu": "2"}), json!({}));
    assert_eq!(only(&bare, &[found("amd", "MI300X", 9), found("amd", "MI210", 7)]).product, "");
    let beside_a_display = only(&bare, &[found("amd", "", 1), found("amd", "MI300X", 9)]);
    assert_eq!((beside_a_display.product.as_str(), beside_a_display.memory_bytes), ("MI300X", 9));
}

fn offer(node: &str, vendor: GpuVendor, product: &str, labelled: bool, count: u32) -> Offer {
    Offer { node: node.to_owned(), vendor, product: product.to_owned(), labelled, count, ..Offer::default() }
}

/// Both vendors, with and without labels.
fn cluster() -> Vec<Offer> {
    vec![
        offer("h1", GpuVendor::Nvidia, "NVIDIA-H100-80GB-HBM3", true, 8),
        offer("h2", GpuVendor::Nvidia, "NVIDIA-H100-80GB-HBM3", true, 8),
        offer("h3", GpuVendor::Nvidia, "NVIDIA-H100-PCIe", true, 2),
        offer("h4", GpuVendor::Nvidia, "NVIDIA H100 80GB HBM3", false, 8),
        offer("l1", GpuVendor::Nvidia, "NVIDIA-L4", true, 1),
        offer("m1", GpuVendor::Amd, "AMD_Instinct_MI300X_OAM", true, 16),
        offer("m2", GpuVendor::Amd, "AMD_Instinct_MI250X", false, 4),
    ]
}

fn wants(gpu: u32, product: Option<&str>) -> Resources {
    Resources { gpu, gpu_product: product.map(str::to_owned), ..Resources::default() }
}

fn get(gpu: u32, product: Option<&str>, offers: &[Offer]) -> Result<Source, String> {
    source("model 'm'", &wants(gpu, product), offers)
}

fn from(vendor: GpuVendor, product: Option<&str>, nodes: &[&str]) -> Result<Source, String> {
    Ok(Source { vendor, product: product.map(str::to_owned), nodes: nodes.iter().map(|&node| node.to_owned()).collect() })
}

#[test]
fn the_product_says_which_nodes_and_so_the_vendor() {
    let cluster = cluster();
    let whole = Some("NVIDIA-H100-80GB-HBM3");
    assert_eq!(get(1, whole, &cluster), from(GpuVendor::Nvidia, whole, &["h4"]));
    assert_eq!(get(1, Some("h100"), &cluster), from(GpuVendor::Nvidia, whole, &["h3", "h4"]), "the label of most, others by name");
    assert_eq!(get(4, Some("H100"), &cluster), from(GpuVendor::Nvidia, whole, &["h4"]), "h3 has too few");
    assert_eq!(get(1, Some("mi300x"), &cluster), from(GpuVendor::Amd, Some("AMD_Instinct_MI300X_OAM"), &[]));
    assert_eq!(get(1, Some("MI250X"), &cluster), from(GpuVendor::Amd, None, &["m2"]));
    let many: Vec<Offer> = (0..300).map(|number| offer(&format!("n{number:03}"), GpuVendor::Nvidia, "NVIDIA L4", false, 1)).collect();
    assert_eq!(get(1, Some("L4"), &many).unwrap().nodes.len(), NODES);
}

#[test]
fn without_a_product_nvidia_comes_first_where_it_is_enough() {
    let cluster = cluster();
    assert_eq!(get(1, None, &cluster), from(GpuVendor::Nvidia, None, &[]));
    assert_eq!(get(16, None, &cluster), from(GpuVendor::Amd, None, &[]), "no NVIDIA node has as many");
    assert_eq!(get(1, None, &cluster[5..]), from(GpuVendor::Amd, None, &[]));
    assert_eq!(get(0, Some("H100"), &cluster), Ok(Source::default()), "a product without GPUs asks for nothing");
    assert_eq!(get(0, Some("B200"), &[]), Ok(Source::default()));
}

#[test]
fn what_nobody_has_is_said_with_what_there_is() {
    assert_eq!(
        get(2, Some("B200"), &cluster()[4..]).unwrap_err(),
        "no node has the GPUs: model 'm' needs 2 GPUs (B200); there are at most, on one machine: 4 AMD_Instinct_MI250X, 16 \
         AMD_Instinct_MI300X_OAM, 1 NVIDIA-L4; it goes on when such a node comes"
    );
    assert_eq!(
        get(1, None, &[]).unwrap_err(),
        "no node has the GPUs: model 'm' needs 1 GPU; there are none; it goes on when such a node comes"
    );
    let idle = [offer("a", GpuVendor::Nvidia, "NVIDIA L4", false, 0)];
    let said = get(1, Some("L4"), &idle).unwrap_err();
    assert!(said.contains("there are none; nodes have GPUs that no device plugin offers as nvidia.com/gpu"), "{said}");
}

#[test]
fn a_run_chooses_for_model_and_environment_each_unless_they_share() {
    let resources = |gpu: u32, product: &str| json!({"cpu": null, "memory": null, "gpu": gpu, "gpuProduct": product, "shm": null});
    let model: ModelDefinition = serde_json::from_value(json!({
        "id": "m", "image": "m", "entrypoint": null, "pythonPath": null, "python": null, "address": null, "params": {}, "checkpoints": [],
        "executionHorizon": 1, "prefetchLead": 0, "workflowEdition": null, "resources": resources(1, "MI300X"), "env": {}, "secretEnv": {},
        "startupTimeoutMs": 1000, "replicas": 1
    }))
    .unwrap();
    let environment = |share: bool, product: &str| -> EnvironmentDefinition {
        serde_json::from_value(json!({
            "id": "e", "image": "e", "entrypoint": null, "pythonPath": null, "python": null, "address": null, "params": {},
            "resources": resources(1, product), "shareModelGpu": share, "lanesPerPod": null, "env": {}, "secretEnv": {},
            "startupTimeoutMs": 1000
        }))
        .unwrap()
    };
    let cluster = cluster();
    let each = choose(&model, &environment(false, "L4"), &cluster).unwrap();
    assert_eq!((each.model.vendor, each.environment.vendor), (GpuVendor::Amd, GpuVendor::Nvidia));
    assert_eq!(each.environment.product.as_deref(), Some("NVIDIA-L4"));
    let shared = choose(&model, &environment(true, "B200"), &cluster).unwrap();
    assert_eq!(shared.environment, Source { vendor: GpuVendor::Amd, ..Source::default() }, "it asks for none of its own");
    let said = choose(&model, &environment(false, "B200"), &cluster).unwrap_err();
    assert!(said.contains("environment 'e' needs 1 GPU (B200)"), "{said}");
}

//! GPUs on a real Kubernetes whose nodes only say that they have some: who may report them, which node and which vendor's GPUs
//! a request gets, and what one waits for that nobody can have.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use rlm_e2e::bed::Node;
use rlm_e2e::bed::lab::Lab;
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{on, pod, with_space};
use rlm_e2e::wait_for;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(150);
const NVIDIA: &str = "nvidia.com/gpu";
const AMD: &str = "amd.com/gpu";
const LABEL: &str = "amd.com/gpu.product-name";
const ACCOUNT: &str = "rlmesh-gpu-discovery";

#[tokio::test]
async fn gpus_are_reported_chosen_and_waited_for() -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _alone = shared.alone().await;
    let ended = with_space(&shared.bed, "gpus", async |space| {
        let lab = Lab::new(shared, space).await?;
        let ended = scenario(&lab, shared).await;
        ended.with_context(|| lab.logs())
    })
    .await;
    let cleaned = async {
        offer(shared, Node::One, &json!({NVIDIA: null}), Value::Null).await?;
        offer(shared, Node::Two, &json!({AMD: null}), Value::Null).await
    };
    ended.and(cleaned.await)
}

/// What a device plugin and a labeller would do.
async fn offer(shared: &Shared, node: Node, gpus: &Value, label: Value) -> anyhow::Result<()> {
    let bed = &shared.bed;
    let status = json!({"status": {"capacity": gpus, "allocatable": gpus}}).to_string();
    bed.kubectl(&["patch", "node", node.name(), "--subresource=status", "--type=merge", "--patch", &status]).await?;
    let labels = json!({"metadata": {"labels": {LABEL: label}}}).to_string();
    bed.kubectl(&["patch", "node", node.name(), "--type=merge", "--patch", &labels]).await.map(drop)
}

/// A node with two NVIDIA GPUs, as far as its files say.
fn tree(root: &Path) -> anyhow::Result<()> {
    for address in ["0000:17:00.0", "0000:65:00.0"] {
        let device = root.join("sys/bus/pci/devices").join(address);
        std::fs::create_dir_all(&device)?;
        std::fs::write(device.join("vendor"), "0x10de\n")?;
        std::fs::write(device.join("class"), "0x030200\n")?;
        let driver = root.join("proc/driver/nvidia/gpus").join(address);
        std::fs::create_dir_all(&driver)?;
        std::fs::write(driver.join("information"), "Model: \t\t NVIDIA H100 80GB HBM3\n")?;
    }
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n";
    Ok(std::fs::write(root.join("proc/driver/nvidia/version"), version)?)
}

async fn scenario(lab: &Lab<'_>, shared: &Shared) -> anyhow::Result<()> {
    offer(shared, Node::One, &json!({NVIDIA: "2"}), Value::Null).await?;
    offer(shared, Node::Two, &json!({AMD: "2"}), json!("AMD_Instinct_MI300X_OAM")).await?;
    let names = ["configmap", "rlmesh-cell", "--namespace", &lab.space.name];
    shared.bed.kubectl(&[&["create"], &names[..]].concat()).await?;
    let _server = lab.start_server()?;
    lab.register().await?;
    let _agent = lab.start_agent()?;
    let _controller = lab.start_controller()?;
    lab.connected().await?;
    let folder = tempfile::tempdir()?;
    reports(lab, shared, folder.path()).await?;
    requests(lab, shared).await
}

/// The pod of discovery on node-1 reports for it; nobody else does, whoever made the token.
async fn reports(lab: &Lab<'_>, shared: &Shared, folder: &Path) -> anyhow::Result<()> {
    let (bed, namespace) = (&shared.bed, lab.space.name.as_str());
    let cell = folder.join("cell");
    std::fs::create_dir(&cell)?;
    let data = wait_for("the agent to say where it is", LIMIT, async || {
        let text = bed.kubectl(&["get", "configmap", "rlmesh-cell", "--namespace", namespace, "--output=json"]).await?;
        Ok(serde_json::from_str::<Value>(&text)?["data"].as_object().cloned())
    })
    .await?;
    for (key, value) in &data {
        std::fs::write(cell.join(key), value.as_str().context("no text")?)?;
    }
    tree(folder)?;
    let image = shared.image("user/quickstart-env")?;
    for account in [ACCOUNT, "somebody"] {
        bed.kubectl(&["create", "serviceaccount", account, "--namespace", namespace]).await?;
        let mut spec = on(Node::One);
        spec["serviceAccountName"] = json!(account);
        lab.space.run(pod(account, image, &["sleep", "3600"], spec)).await?;
    }
    // What discovery reads is the node's own in a pod that mounts nothing of it; both nodes are this machine.
    let list = "import os; print(*sorted(os.listdir('/sys/bus/pci/devices') + os.listdir('/proc/driver')))";
    let mut here: Vec<String> = ["/sys/bus/pci/devices", "/proc/driver"]
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    here.sort_unstable();
    let there = lab.space.python("somebody", list).await?;
    ensure!(there == here.join(" "), "a pod sees {there}, its node has {here:?}");
    let tell = async |name: &str, account: &str, audience: &str, more: &[&str]| {
        let asked = ["create", "token", account, "--namespace", namespace, "--audience", audience];
        let token = bed.kubectl(&[&asked, more].concat()).await?;
        let file = folder.join(name);
        std::fs::write(&file, token)?;
        let arguments = ["--cell", &cell.display().to_string(), "--token-file", &file.display().to_string()];
        lab.start_discovery(name, folder, &arguments)
    };
    let bound = |pod: &'static str| ["--bound-object-kind", "Pod", "--bound-object-name", pod];
    let audience = "rlmesh-agent-gpus";
    let impostors = [
        ("another-account", tell("another-account", "somebody", audience, &bound("somebody")).await?),
        ("another-audience", tell("another-audience", ACCOUNT, "rlmesh-agent", &bound(ACCOUNT)).await?),
        ("no-pod", tell("no-pod", ACCOUNT, audience, &[]).await?),
    ];
    for (name, _) in &impostors {
        wait_for(&format!("{name} to be refused"), LIMIT, async || {
            let log = std::fs::read_to_string(lab.log(name))?;
            ensure!(!log.contains("told the agent"), "{log}");
            Ok(log.contains("the agent refuses: the token is not one of a pod that this is for").then_some(()))
        })
        .await?;
    }
    let taken = |agent: &str| agent.lines().filter(|line| line.contains("a node's GPUs were reported")).count();
    ensure!(taken(&std::fs::read_to_string(lab.log("agent"))?) == 0, "a report was taken");
    drop(impostors);
    let _discovery = tell("discovery", ACCOUNT, audience, &bound(ACCOUNT)).await?;
    let clusters = lab.get("/v1/clusters").await?;
    let id = clusters["items"][0]["id"].as_str().context("no cluster")?.to_owned();
    let nodes = wait_for("both vendors to be known", LIMIT, async || {
        let mut nodes = lab.get(&format!("/v1/clusters/{id}")).await?["nodes"].as_array().cloned().unwrap_or_default();
        nodes.sort_by_key(|node| node["name"].to_string());
        Ok((nodes.len() == 2 && nodes.iter().all(|node| node["gpuProduct"] != "")).then_some(nodes))
    })
    .await?;
    let gpus = |node: &Value| json!([node["gpuVendor"], node["gpuProduct"], node["gpuCount"], node["gpuDriver"]]);
    ensure!(gpus(&nodes[0]) == json!(["nvidia", "NVIDIA H100 80GB HBM3", 2, "550.54.15"]), "{}", nodes[0]);
    ensure!(gpus(&nodes[1]) == json!(["amd", "AMD_Instinct_MI300X_OAM", 2, ""]), "{}", nodes[1]);
    Ok(())
}

fn request(shared: &Shared, resources: &Value) -> anyhow::Result<Value> {
    Ok(json!({
        "name": "with GPUs",
        "models": [{"id": "balancer", "image": shared.image("user/quickstart-model")?, "resources": resources}],
        "environments": [{"id": "cartpole", "image": shared.image("user/quickstart-env")?, "shareModelGpu": true}],
        "tasks": [{"env": "cartpole", "taskId": "cartpole/balance", "params": {}, "episodes": 20_000, "seed": 0, "workers": 2,
                   "maxEpisodeSteps": 50, "success": {"metric": "reward", "atLeast": 50}}],
    }))
}

async fn requests(lab: &Lab<'_>, shared: &Shared) -> anyhow::Result<()> {
    // By the word of discovery, by the label, and by what there is.
    for (wanted, node, resource) in [
        (json!({"gpu": 1, "gpuProduct": "h100"}), Node::One, NVIDIA),
        (json!({"gpu": 2, "gpuProduct": "MI300X"}), Node::Two, AMD),
        (json!({"gpu": 1}), Node::One, NVIDIA),
    ] {
        let id = lab.submit(&request(shared, &wanted)?).await?;
        let began = |detail: &Value| detail["progress"]["completedEpisodes"].as_u64() >= Some(5);
        lab.until(&id, "at its first rows", LIMIT, began).await?;
        for (component, has) in [("model", true), ("environment", false)] {
            let names = lab.pods(&id, component).await?;
            ensure!(!names.is_empty(), "no {component} pod");
            for name in names {
                let pod: Pod = lab.space.pods().get(&name).await?;
                let spec = pod.spec.context("no spec")?;
                ensure!(spec.node_name.as_deref() == Some(node.name()), "{wanted}: {name} is on {:?}", spec.node_name);
                let limits = spec.containers[0].resources.as_ref().and_then(|all| all.limits.clone()).unwrap_or_default();
                let gpus: Vec<_> =
                    limits.iter().filter(|(name, _)| name.ends_with("/gpu")).map(|(name, one)| (name.as_str(), &*one.0)).collect();
                let expected: &[(&str, &str)] = if has { &[(resource, if wanted["gpu"] == 2 { "2" } else { "1" })] } else { &[] };
                ensure!(gpus == expected, "{wanted}: {name} asks for {gpus:?}");
            }
        }
        lab.rlmesh(&["eval", "cancel", &id]).await?;
        lab.ended(&id, LIMIT).await?;
    }
    // Half a word is no product.
    for wanted in ["B200", "MI300"] {
        let id = lab.submit(&request(shared, &json!({"gpu": 1, "gpuProduct": wanted}))?).await?;
        let says = |detail: &Value| detail["waiting"].to_string().contains("has the GPUs");
        let waiting = lab.until(&id, "waiting for GPUs", LIMIT, says).await?["waiting"].to_string();
        for words in ["\"gpu\"", wanted, "2 NVIDIA H100 80GB HBM3", "2 AMD_Instinct_MI300X_OAM"] {
            ensure!(waiting.contains(words), "it does not say {words}: {waiting}");
        }
        lab.rlmesh(&["eval", "cancel", &id]).await?;
        lab.ended(&id, LIMIT).await?;
    }
    Ok(())
}

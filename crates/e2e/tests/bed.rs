//! The bed itself: what the tests of the agent and the controller rely on.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use rlm_e2e::bed::faults::Link;
use rlm_e2e::bed::names::{API_HOST, REGISTRY_HOST, RWO_CLASS, RWX_CLASS};
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{Space, on, pod, with_space};
use rlm_e2e::bed::{Component, Node, Place};
use rlm_e2e::wait_for;
use serde_json::{Value, json};

const ENV: &str = "user/quickstart-env";
const LIMIT: Duration = Duration::from_secs(60);
const SLEEP: [&str; 2] = ["sleep", "3600"];
const SERVE: [&str; 6] = ["python3", "-m", "http.server", "8000", "--directory", "/"];

/// Runs a test in a namespace of the shared bed, while nothing goes wrong in it.
async fn calmly(name: &str, test: impl AsyncFnOnce(&Shared, Space<'_>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _calm = shared.calm().await;
    with_space(&shared.bed, name, async |space| test(shared, space).await).await
}

/// The same, with the bed for itself.
async fn alone(name: &str, test: impl AsyncFnOnce(&Shared, Space<'_>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _alone = shared.alone().await;
    with_space(&shared.bed, name, async |space| test(shared, space).await).await
}

fn merged(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}

async fn becomes(space: &Space<'_>, from: &str, host: &str, port: u16, expected: &str) -> anyhow::Result<()> {
    wait_for(&format!("{host}:{port} from {from} to be: {expected}"), LIMIT, async || {
        Ok((space.connect(from, host, port).await? == expected).then_some(()))
    })
    .await
}

async fn claim(space: &Space<'_>, name: &str, class: Option<&str>, mode: &str, size: &str) -> anyhow::Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(space.client.clone(), &space.name);
    let mut claim = json!({
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": size}}},
    });
    if let Some(class) = class {
        claim["spec"]["storageClassName"] = json!(class);
    }
    claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    Ok(())
}

/// A pod with a claim at `/data`.
fn with_volume(mut pod: Value, claim: &str) -> Value {
    pod["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

#[tokio::test]
async fn a_restricted_pod_with_a_private_image_runs_on_each_node() -> anyhow::Result<()> {
    calmly("private", async |shared, space| {
        let image = shared.image(ENV)?;
        for node in Node::ALL {
            shared.bed.node_ready(node, true).await?;
            let address = space.run(pod(node.name(), image, &SLEEP, on(node))).await?;
            ensure!(address.starts_with(node.pod_cidr().trim_end_matches("0/24")), "{address} is not of {}", node.pod_cidr());
            ensure!(space.exec(node.name(), &["id", "-u"]).await?.trim() == "10001");
        }
        // The same image without credentials; by a tag that no node has seen.
        let bare = merged(on(Node::One), json!({"imagePullSecrets": []}));
        let unseen = format!("{REGISTRY_HOST}/user/quickstart-model:test");
        space.create(pod("bare", &unseen, &SLEEP, bare)).await?;
        let said = space.waits("bare", "ErrImagePull").await?;
        ensure!(said.contains("401") || said.contains("authorization failed"), "{said}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_image_that_names_root_is_not_run_where_root_may_not_be() -> anyhow::Result<()> {
    calmly("root", async |shared, space| {
        let context = json!({"securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}}});
        space.create(pod("root", shared.image("user/root-env")?, &SLEEP, context)).await?;
        let said = space.waits("root", "CreateContainerConfigError").await?;
        ensure!(said.contains("root"), "{said}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn pods_reach_each_other_across_nodes_by_name_until_a_policy_forbids_it() -> anyhow::Result<()> {
    calmly("network", async |shared, space| {
        let image = shared.image(ENV)?;
        let server = space.run(pod("server", image, &SERVE, on(Node::One))).await?;
        space.run(pod("near", image, &SLEEP, on(Node::One))).await?;
        space.run(pod("far", image, &SLEEP, on(Node::Two))).await?;
        let services: Api<Service> = Api::namespaced(space.client.clone(), &space.name);
        let service =
            json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]}});
        services.create(&PostParams::default(), &serde_json::from_value(service)?).await?;
        let name = format!("web.{}.svc.cluster.local", space.name);
        for from in ["near", "far"] {
            becomes(&space, from, &server, 8000, "open").await?;
            becomes(&space, from, &name, 80, "open").await?;
        }
        ensure!(space.connect("far", "no-such-host.example.com", 80).await? == "no name");
        // The real names lead to the bed.
        for (host, address) in [(API_HOST, "10.77.0.1"), (REGISTRY_HOST, "10.77.0.2")] {
            let found = space.python("far", &format!("import socket; print(socket.gethostbyname('{host}'))")).await?;
            ensure!(found == address, "{host} is {found}");
        }
        ensure!(space.connect("far", REGISTRY_HOST, 443).await? == "open");

        let policies: Api<NetworkPolicy> = Api::namespaced(space.client.clone(), &space.name);
        let policy = json!({
            "metadata": {"name": "near-only"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "server"}},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "near"}}}]}],
            },
        });
        policies.create(&PostParams::default(), &serde_json::from_value(policy)?).await?;
        becomes(&space, "far", &server, 8000, "refused").await?;
        ensure!(space.connect("near", &server, 8000).await? == "open");
        policies.delete("near-only", &DeleteParams::default()).await?;
        becomes(&space, "far", &server, 8000, "open").await
    })
    .await
}

#[tokio::test]
async fn nothing_leads_out_of_the_bed() -> anyhow::Result<()> {
    calmly("walls", async |shared, space| {
        space.run(pod("inside", shared.image(ENV)?, &SLEEP, json!({}))).await?;
        // Of this machine: its own addresses, and whatever its network has.
        let own = shared.bed.shell(Place::Machine, "ip -4 -o addr show scope global | sed 's/.*inet \\([0-9.]*\\).*/\\1/'").await?;
        for host in own.lines().chain(["1.1.1.1", "169.254.169.254"]) {
            let found = space.connect("inside", host, 443).await?;
            ensure!(found == "no route" || found == "silence", "{host} is {found} from a pod");
        }
        let links = shared.bed.shell(Place::Gateway, "ip -o link show | sed 's/^[0-9]*: \\([^@:]*\\).*/\\1/' | sort").await?;
        let known = ["bed0", "lo", "to-node-1", "to-node-2"];
        // A kernel with ifb gives each namespace two of its devices, which lead nowhere.
        let found: Vec<&str> = links.lines().filter(|link| !link.starts_with("ifb")).collect();
        ensure!(found == known, "the gateway has {found:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn claims_of_both_classes_bind_to_volumes_of_root_and_of_their_size() -> anyhow::Result<()> {
    calmly("volumes", async |shared, space| {
        let image = shared.image(ENV)?;
        claim(&space, "own", None, "ReadWriteOnce", "16Mi").await?;
        space.run(with_volume(pod("own", image, &SLEEP, on(Node::One)), "own")).await?;
        let looks = "import os; s = os.stat('/data'); print(s.st_uid, s.st_gid, os.access('/data', os.W_OK))";
        let found = space.python("own", looks).await?;
        ensure!(found == "0 0 False", "without fsGroup /data is {found}");
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(space.client.clone(), &space.name);
        let class = claims.get("own").await?.spec.and_then(|spec| spec.storage_class_name);
        ensure!(class.as_deref() == Some(RWO_CLASS), "the default class is {class:?}");

        claim(&space, "both", Some(RWX_CLASS), "ReadWriteMany", "8Mi").await?;
        for node in Node::ALL {
            let mut with_group = with_volume(pod(node.name(), image, &SLEEP, on(node)), "both");
            with_group["spec"]["securityContext"]["fsGroup"] = json!(10001);
            space.run(with_group).await?;
        }
        space.python("node-1", "open('/data/from', 'w').write('one')").await?;
        ensure!(space.python("node-2", "print(open('/data/from').read())").await? == "one");

        let writes = "import errno
try:
    open('/data/big', 'wb').write(b'x' * 65536); print('written')
except OSError as e: print(errno.errorcode[e.errno])";
        shared.bed.fill(&space.name, "both").await?;
        ensure!(space.python("node-2", writes).await? == "ENOSPC");
        shared.bed.free(&space.name, "both").await?;
        ensure!(space.python("node-2", writes).await? == "written");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_environment_of_the_sdk_is_stepped_from_another_pod() -> anyhow::Result<()> {
    calmly("sdk", async |shared, space| {
        let image = shared.image(ENV)?;
        let mut served = pod("env", image, &[], on(Node::One));
        served["spec"]["containers"][0]["env"] = json!([{"name": "RLMESH_ADDRESS", "value": "0.0.0.0:50051"}]);
        let address = space.run(served).await?;
        space.run(pod("client", image, &SLEEP, on(Node::Two))).await?;
        becomes(&space, "client", &address, 50051, "open").await?;
        let steps = format!(
            "import numpy, rlmesh.numpy
env = rlmesh.numpy.RemoteEnv('{address}:50051', connect_timeout_seconds=20)
env.reset(seed=1)
print(len(env.step(numpy.ones(1, dtype=numpy.float32))))
env.close()"
        );
        let found = space.python("client", &steps).await?;
        ensure!(found == "5", "a step gave {found} values");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_stopped_node_is_not_ready_and_comes_back() -> anyhow::Result<()> {
    alone("node", async |shared, space| {
        space.run(pod("stays", shared.image(ENV)?, &SLEEP, on(Node::Two))).await?;
        shared.bed.stop_node(Node::Two).await?;
        shared.bed.node_ready(Node::One, true).await?;
        shared.bed.start_node(Node::Two).await?;
        space.run(pod("after", shared.image(ENV)?, &SLEEP, on(Node::Two))).await.map(drop)
    })
    .await
}

#[tokio::test]
async fn a_link_is_cut_slowed_and_whole_again() -> anyhow::Result<()> {
    alone("link", async |shared, space| {
        let image = shared.image(ENV)?;
        let server = space.run(pod("server", image, &SERVE, on(Node::Two))).await?;
        space.run(pod("client", image, &SLEEP, on(Node::One))).await?;
        becomes(&space, "client", &server, 8000, "open").await?;
        let fetch = format!(
            "import time, urllib.request
t = time.monotonic(); f = urllib.request.urlopen('http://{server}:8000/usr/bin/python3.11', timeout=30); f.read(262144); print(time.monotonic() - t)"
        );
        shared.bed.link(Node::Two, Link::Slow { kilobits: 1024 }).await?;
        let took: f64 = space.python("client", &fetch).await?.parse()?;
        // 256 KiB at 128 KiB/s; what the kernels' buffers hold comes at once.
        ensure!(took >= 1.0, "over a slow link it took {took} s");
        shared.bed.link(Node::Two, Link::Cut).await?;
        let cut = space.connect("client", &server, 8000).await?;
        shared.bed.link(Node::Two, Link::Whole).await?;
        ensure!(cut != "open", "a cut link is {cut}");
        becomes(&space, "client", &server, 8000, "open").await?;
        shared.bed.node_ready(Node::Two, true).await
    })
    .await
}

#[tokio::test]
async fn the_registry_is_off_refuses_and_serves_again() -> anyhow::Result<()> {
    alone("registry", async |shared, space| {
        // An image that this test pushes, so that no node has it.
        let registry = shared.bed.registry()?;
        let folder = tempfile::tempdir()?;
        let files = rlm_e2e::bed::images::Files::default().bytes("own", space.name.clone().into_bytes());
        let image = rlm_e2e::bed::images::Image::new(vec![files.write(&folder.path().join("own.tar.gz"))?], &Default::default());
        let pushed = registry.push(&image, "user/own", "test").await?;
        let command = ["/none"];

        shared.bed.registry_refuses(true)?;
        space.create(pod("refused", &pushed, &command, on(Node::One))).await?;
        let said = space.waits("refused", "ErrImagePull").await?;
        shared.bed.registry_refuses(false)?;
        ensure!(said.contains("401") || said.contains("authorization failed"), "{said}");

        shared.bed.registry_off().await?;
        space.create(pod("off", &pushed, &command, on(Node::Two))).await?;
        let said = space.waits("off", "ErrImagePull").await?;
        shared.bed.registry_on().await?;
        ensure!(said.contains("connection refused"), "{said}");

        // Pulled: the only thing wrong with it is that there is no such program in it.
        space.create(pod("served", &pushed, &command, on(Node::One))).await?;
        wait_for("the image to be pulled", LIMIT, async || {
            let found: Pod = space.pods().get("served").await?;
            let ended = found
                .status
                .into_iter()
                .flat_map(|status| status.container_statuses.into_iter().flatten())
                .find_map(|one| one.state?.terminated);
            Ok(ended.and_then(|one| one.message).filter(|message| message.contains("/none")))
        })
        .await
        .map(drop)
    })
    .await
}

#[tokio::test]
async fn names_do_not_resolve_while_dns_is_off() -> anyhow::Result<()> {
    alone("dns", async |shared, space| {
        space.run(pod("asks", shared.image(ENV)?, &SLEEP, json!({}))).await?;
        becomes(&space, "asks", REGISTRY_HOST, 443, "open").await?;
        shared.bed.dns_off().await?;
        let off = space.connect("asks", REGISTRY_HOST, 443).await;
        shared.bed.dns_on().await?;
        ensure!(off? == "no name");
        becomes(&space, "asks", REGISTRY_HOST, 443, "open").await
    })
    .await
}

#[tokio::test]
async fn killed_components_come_back_and_pods_outlive_them() -> anyhow::Result<()> {
    alone("kill", async |shared, space| {
        let image = shared.image(ENV)?;
        space.run(pod("outlives", image, &SLEEP, on(Node::One))).await?;
        let uid = async || space.pods().get("outlives").await?.metadata.uid.context("no uid");
        let before = uid().await?;
        shared.bed.restart_api_server().await?;
        for component in
            [Component::ControllerManager, Component::Scheduler, Component::Containerd(Node::One), Component::KubeProxy(Node::One)]
        {
            shared.bed.restart(component).await?;
            ensure!(shared.bed.layout.processes.find(component).is_some(), "{} does not run", component.name());
        }
        space.run(pod("new", image, &SLEEP, on(Node::One))).await?;
        ensure!(before == uid().await?);

        space.bed.evict(&space.name, "outlives").await?;
        wait_for("the evicted pod to be gone", LIMIT, async || Ok(space.pods().get_opt("outlives").await?.is_none().then_some(()))).await
    })
    .await
}

#[tokio::test]
async fn the_same_input_is_the_same_image() -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let tools = rlm_e2e::tools().context("the programs are there, since there is a bed")?;
    let folder = tempfile::tempdir()?;
    let mut again = rlm_e2e::bed::images::ours(&tools.bin, &folder.path().join("a")).await?;
    again.extend(rlm_e2e::bed::images::users(&tools.root, &folder.path().join("b")).await?);
    for (repository, image) in again {
        let pushed = shared.image(&repository)?;
        ensure!(pushed.ends_with(&image.digest()), "{repository}: {pushed} was pushed, and is now {}", image.digest());
    }
    Ok(())
}

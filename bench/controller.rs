//! The controller at 100, 1,000 and 5,000 runs on nodes that KWOK pretends: how fast it makes their pods, beside bare API calls
//! that make the same pods, and how much memory it takes.
//!
//! Kubernetes is real but for the nodes. Where there can be no test bed, it says so and measures nothing.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use rlm_bench::{Goal, figure, median, memory_mib, note};
use rlm_cluster::crd::run::{ComponentPhase, RLMeshRun};
use rlm_e2e::bed::lab;
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{Space, with_space};
use rlm_e2e::processes::{Process, clean_command, tail};
use rlm_e2e::wait_for;
use serde_json::{Value, json};

/// As many calls at once as the controller makes.
const CONCURRENCY: usize = 32;
/// Pods of a run: a model, an environment, the runner.
const PODS: usize = 3;
const LIMIT: Duration = Duration::from_secs(1_200);
const SETTLED: Duration = Duration::from_secs(10);
const NODES: usize = 10;
/// Pairs of measurements, one after the other, since a machine has faster and slower minutes.
const PAIRS: usize = 3;

fn main() -> anyhow::Result<()> {
    if rlm_bench::only_tested() {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(async {
        let Some(shared) = shared().await? else { return Ok(()) };
        // Each real node would hold every policy of the pretended pods; nothing here needs a wall.
        shared.bed.policies_off().await?;
        let measured = with_space(&shared.bed, "scale", async |space| measure(shared, &space).await).await;
        shared.bed.policies_on().await?;
        measured
    })
}

struct Scale<'a> {
    shared: &'a Shared,
    space: &'a Space<'a>,
    tools: rlm_e2e::Tools,
    folder: PathBuf,
}

async fn measure(shared: &Shared, space: &Space<'_>) -> anyhow::Result<()> {
    let tools = rlm_e2e::tools().context("the programs are not built")?;
    let folder = tempfile::tempdir()?;
    lab::define(space, &tools).await?;
    lab::account(space, &tools, "controller", "admin", folder.path()).await?;
    settings(&lab::settings(shared, space, folder.path())?)?;
    let scale = Scale { shared, space, tools, folder: folder.path().to_owned() };
    let _kwok = scale.pretend_nodes().await?;
    let ended = scale.figures().await;
    let nodes: Api<Node> = Api::all(space.client.clone());
    nodes.delete_collection(&DeleteParams::default(), &ListParams::default().labels("rlmesh.dev/pretended")).await?;
    ended.with_context(|| format!("the controller's log ends:\n{}", tail(&folder.path().join("controller.log"), 10)))
}

/// Lets pods onto pretended nodes alone.
fn settings(file: &Path) -> anyhow::Result<()> {
    let mut settings: Value = serde_json::from_slice(&std::fs::read(file)?)?;
    settings["runs"]["nodeSelector"] = json!({"rlmesh.dev/pretended": "true"});
    settings["runs"]["tolerations"] = json!([{"key": "rlmesh.dev/pretended", "operator": "Exists"}]);
    Ok(std::fs::write(file, settings.to_string())?)
}

impl Scale<'_> {
    async fn pretend_nodes(&self) -> anyhow::Result<Process> {
        let kwok = std::env::var("RLMESH_KWOK").context("RLMESH_KWOK does not name KWOK's folder; use `make bench-controller`")?;
        let mut command = clean_command(&Path::new(&kwok).join("kwok"));
        command.arg("--config").arg(self.tools.root.join("testbed/kwok/stages.yaml"));
        command.arg("--kubeconfig").arg(self.space.bed.layout.kubeconfig("admin"));
        command.args(["--manage-all-nodes=false", "--manage-nodes-with-label-selector=rlmesh.dev/pretended=true"]);
        command.args(["--cidr=10.240.0.0/12", "--node-ip=10.239.0.1", "--server-address="]).env("HOME", &self.folder);
        let kwok = Process::start("kwok", &mut command, &self.folder.join("kwok.log"))?;
        let nodes: Api<Node> = Api::all(self.space.client.clone());
        for number in 0..NODES {
            let node = json!({
                "metadata": {"name": format!("pretended-{number}"), "labels": {
                    "rlmesh.dev/pretended": "true", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                }},
                "spec": {"taints": [{"key": "rlmesh.dev/pretended", "effect": "NoSchedule"}]},
            });
            nodes.create(&PostParams::default(), &serde_json::from_value(node)?).await?;
        }
        wait_for("the pretended nodes", LIMIT, async || {
            let listed = nodes.list(&ListParams::default().labels("rlmesh.dev/pretended")).await?;
            let ready = listed.iter().filter(|node| {
                let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
                conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
            });
            Ok((ready.count() == NODES).then_some(()))
        })
        .await
        .with_context(|| tail(&self.folder.join("kwok.log"), 10))?;
        Ok(kwok)
    }

    async fn figures(&self) -> anyhow::Result<()> {
        let idle = self.controller()?;
        tokio::time::sleep(SETTLED).await;
        let idle = resident(idle).await?;
        figure("controller_idle_mib", idle, Goal::AtMost(48.0));
        let mut ratios = Vec::new();
        for pair in 0..PAIRS {
            let ours = self.ours(1_000).await?;
            if pair == 0 {
                self.memory(1_000, idle, ours.memory);
            }
            let bare = self.bare(ours.pods).await?;
            note("controller_pods_per_second", ours.rate);
            note("bare_pods_per_second", bare);
            ratios.push(ours.rate / bare);
        }
        figure("controller_to_bare_calls", median(ratios), Goal::AtLeast(0.8));
        for runs in [100, 5_000] {
            let ours = self.ours(runs).await?;
            note(&format!("controller_pods_per_second_{runs}_runs"), ours.rate);
            self.memory(runs, idle, ours.memory);
        }
        Ok(())
    }

    fn memory(&self, runs: usize, idle: f64, resident: f64) {
        note(&format!("controller_{runs}_runs_mib"), resident);
        figure(&format!("controller_kib_per_run_at_{runs}"), (resident - idle) * 1024.0 / runs as f64, Goal::AtMost(50.0));
    }

    fn controller(&self) -> anyhow::Result<Process> {
        lab::controller(self.space, &self.tools, "controller", &self.folder)
    }

    fn runs(&self) -> Api<RLMeshRun> {
        Api::namespaced(self.space.client.clone(), &self.space.name)
    }

    /// The runs are there before the controller is; its time is from its start to its last pod.
    async fn ours(&self, runs: usize) -> anyhow::Result<Ours> {
        let api = self.runs();
        let create = |number| {
            let api = api.clone();
            async move { api.create(&PostParams::default(), &self.run(number)?).await.map(drop).map_err(anyhow::Error::from) }
        };
        stream::iter(0..runs).map(create).buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
        let started = Instant::now();
        let controller = self.controller()?;
        self.all_made(runs * PODS).await?;
        let rate = (runs * PODS) as f64 / started.elapsed().as_secs_f64();
        wait_for("the status of every run", LIMIT, async || {
            let ready = |run: &RLMeshRun| {
                let components = run.status.as_ref().map(|status| status.components.as_slice()).unwrap_or_default();
                components.len() == PODS && components.iter().all(|one| one.phase == ComponentPhase::Ready)
            };
            let listed = api.list(&ListParams::default()).await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(listed.iter().all(ready).then_some(()))
        })
        .await?;
        tokio::time::sleep(SETTLED).await;
        let memory = resident(controller).await?;
        let pods = self.space.pods().list(&ListParams::default()).await?.items;
        ensure!(pods.len() == runs * PODS, "{} pods", pods.len());
        api.delete_collection(&DeleteParams::background(), &ListParams::default()).await?;
        self.clear().await?;
        Ok(Ours { rate, memory, pods })
    }

    async fn clear(&self) -> anyhow::Result<()> {
        let pods = self.space.pods();
        pods.delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await?;
        wait_for("the pods to go", LIMIT, async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok((pods.list(&ListParams::default().limit(1)).await?.items.is_empty()).then_some(()))
        })
        .await
    }

    /// Pods per second of bare calls.
    async fn bare(&self, pods: Vec<Pod>) -> anyhow::Result<f64> {
        let count = pods.len();
        let api = self.space.pods();
        let started = Instant::now();
        let create = |pod: Pod| {
            let api = api.clone();
            async move { api.create(&PostParams::default(), &again(pod)).await.map(drop) }
        };
        stream::iter(pods).map(create).buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
        let rate = count as f64 / started.elapsed().as_secs_f64();
        // The scheduler and KWOK end their work as they did beside ours.
        tokio::time::sleep(SETTLED).await;
        self.clear().await?;
        Ok(rate)
    }

    async fn all_made(&self, count: usize) -> anyhow::Result<()> {
        let made = async {
            let pods: Api<PartialObjectMeta<Pod>> = Api::namespaced(self.space.client.clone(), &self.space.name);
            let mut events = std::pin::pin!(watcher(pods, watcher::Config::default()));
            let mut names = HashSet::new();
            while names.len() < count {
                if let Event::InitApply(pod) | Event::Apply(pod) = events.try_next().await?.context("the watch ended")? {
                    names.extend(pod.metadata.name);
                }
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(LIMIT, made).await.context("not all pods were made in time")?
    }

    fn run(&self, number: usize) -> anyhow::Result<RLMeshRun> {
        let run = json!({
            "apiVersion": "rlmesh.dev/v1beta1",
            "kind": "RLMeshRun",
            "metadata": {"name": format!("run-01j{number:023}"), "namespace": self.space.name},
            "spec": {
                "evaluationID": "eval_01j0000000000000000000000b",
                "generation": 1,
                "mode": "evaluate",
                "agent": {"address": "10.96.0.250:7443", "certificateSha256": "0".repeat(64)},
                "model": {"image": self.shared.image("user/quickstart-model")?},
                "environments": {"image": self.shared.image("user/quickstart-env")?},
                "bindings": [{"index": 0}],
                "activeBindings": [{"index": 0, "pods": 1, "lanesPerPod": 2}],
            },
        });
        Ok(serde_json::from_value(run)?)
    }
}

struct Ours {
    rate: f64,
    /// Resident memory with every pod running, MiB.
    memory: f64,
    pods: Vec<Pod>,
}

/// Resident memory of a controller at its end.
async fn resident(mut controller: Process) -> anyhow::Result<f64> {
    let memory = memory_mib(controller.id(), "VmRSS").context("no memory figure")?;
    controller.kill().await?;
    Ok(memory)
}

/// The pod as it was asked for, without the run that owned it.
fn again(mut pod: Pod) -> Pod {
    pod.metadata = ObjectMeta { name: pod.metadata.name, labels: pod.metadata.labels, ..ObjectMeta::default() };
    pod.status = None;
    if let Some(spec) = &mut pod.spec {
        spec.node_name = None;
    }
    pod
}

//! Evaluations over pods, on real nodes with real images: from submit to the first step, steps per second beside the same
//! lanes as local processes, and the size of our images.
//!
//! Where there can be no test bed, it says so and measures nothing.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use chrono::{DateTime, Utc};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use reqwest::Method;
use rlm_bench::{Goal, figure, median, note};
use rlm_e2e::bed::images::ours;
use rlm_e2e::bed::lab::Lab;
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{connect_from, with_space};
use rlm_e2e::stack::{Options, Stack};
use rlm_e2e::{Tools, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(300);
/// Starts that are measured, after one that pulls the images.
const STARTS: usize = 5;
/// Pairs of measurements, one after the other, since a machine has faster and slower minutes.
const PAIRS: usize = 3;
const STEPS: u32 = 50;
const EPISODES: u32 = 1_000;

fn main() -> anyhow::Result<()> {
    if rlm_bench::only_tested() {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(async {
        let tools = rlm_e2e::tools().context("the programs are not built")?;
        let Some(shared) = shared().await? else { return Ok(()) };
        sizes(&tools).await?;
        with_space(&shared.bed, "figures", async |space| {
            let lab = Lab::new(shared, space).await?;
            let _server = lab.start_server()?;
            let _controller = lab.start_controller()?;
            lab.register().await?;
            let _agent = lab.start_agent()?;
            lab.connected().await?;
            let ended = measure(shared, &lab, &tools).await;
            ended.with_context(|| lab.logs())
        })
        .await
    })
}

async fn measure(shared: &Shared, lab: &Lab<'_>, tools: &Tools) -> anyhow::Result<()> {
    first_step(shared, lab).await?;
    let mut beyond = Vec::new();
    for _ in 0..STARTS {
        let start = first_step(shared, lab).await?;
        note("pods_ready_s", start.pods_ready);
        note("policy_in_force_s", start.policy);
        note("first_step_s", start.first_step);
        beyond.push(start.first_step - start.pods_ready.max(start.policy));
    }
    figure("first_step_beyond_pods_and_policy_s", median(beyond), Goal::AtMost(1.0));
    for lanes in [8, 32] {
        let mut ratios = Vec::new();
        for _ in 0..PAIRS {
            let pods = over_pods(shared, lab, lanes).await?;
            let local = as_processes(tools, lanes).await?;
            note(&format!("pods_{lanes}_lanes_steps_per_second"), pods);
            note(&format!("processes_{lanes}_lanes_steps_per_second"), local);
            ratios.push(pods / local);
        }
        figure(&format!("pods_to_processes_{lanes}_lanes"), median(ratios), Goal::AtLeast(0.9));
    }
    Ok(())
}

/// Compressed sizes, as a registry has them.
async fn sizes(tools: &Tools) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    for (name, image) in ours(&tools.bin, folder.path()).await? {
        let name = name.trim_start_matches("rlmesh/").replace('-', "_");
        figure(&format!("{name}_image_mib"), image.size() as f64 / f64::from(1 << 20), Goal::AtMost(20.0));
    }
    Ok(())
}

/// Seconds after the submit.
struct Start {
    pods_ready: f64,
    /// The runner's pod can connect to the environment's.
    policy: f64,
    first_step: f64,
}

async fn first_step(shared: &Shared, lab: &Lab<'_>) -> anyhow::Result<Start> {
    let submitted = Utc::now();
    let since = |time: DateTime<Utc>| (time - submitted).as_seconds_f64();
    // Of one step each, and so many that the pods stay.
    let id = lab.submit(&request(&images(shared)?, 1, 100_000, 1)).await?;
    let pods = lab.space.pods();
    let selector = ListParams::default().labels(&format!("rlmesh.dev/evaluation={id}"));
    let (pods_ready, policy) = (Cell::new(None), Cell::new(None));
    let (pods_ready, policy) = wait_for("the pods to be ready and the policy to be in force", LIMIT, async || {
        let listed = pods.list(&selector).await?.items;
        if pods_ready.get().is_none() && listed.len() == 3 && listed.iter().all(ready) {
            pods_ready.set(Some(since(Utc::now())));
        }
        let pod = |kind: &str| listed.iter().find(|pod| is(pod, kind) && ready(pod));
        if let (None, Some(runner), Some(environment)) = (policy.get(), pod("runner"), pod("environment")) {
            let address = environment.status.as_ref().and_then(|status| status.pod_ip.as_deref()).context("no address")?;
            if connect_from(runner, &[(address, 50051)]).await? == ["open"] {
                policy.set(Some(since(Utc::now())));
            }
        }
        Ok(pods_ready.get().zip(policy.get()))
    })
    .await?;
    let first_step = wait_for("the first row", LIMIT, async || {
        let rows = lab.rows(&id).await?;
        let first = rows.iter().find(|row| row["row"] == 0 && row["durationMs"].is_u64());
        let ended = first.and_then(|row| {
            let started: DateTime<Utc> = row["startedAt"].as_str()?.parse().ok()?;
            Some(started + Duration::from_millis(row["durationMs"].as_u64()?))
        });
        Ok(ended)
    })
    .await?;
    lab.rlmesh(&["eval", "cancel", &id]).await?;
    wait_for("the pods to go", LIMIT, async || Ok(pods.list(&selector).await?.items.is_empty().then_some(()))).await?;
    Ok(Start { pods_ready, policy, first_step: since(first_step) })
}

fn is(pod: &Pod, kind: &str) -> bool {
    pod.metadata.labels.as_ref().and_then(|labels| labels.get("rlmesh.dev/component")).is_some_and(|label| label == kind)
}

/// As the kubelet says it.
fn ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Steps per second, as the runner measured them.
async fn over_pods(shared: &Shared, lab: &Lab<'_>, lanes: u32) -> anyhow::Result<f64> {
    let id = lab.submit(&request(&images(shared)?, STEPS, EPISODES, lanes)).await?;
    let ended = lab.ended(&id, LIMIT).await?;
    ensure!(ended["status"] == "completed", "{ended:#}");
    steps_per_second(&lab.get(&format!("/v1/evaluations/{id}/metrics")).await?)
}

async fn as_processes(tools: &Tools, lanes: u32) -> anyhow::Result<f64> {
    let stack = Stack::start(tools, Options::default()).await?;
    let folder = tools.example("quickstart");
    let programs =
        [json!({"entrypoint": "policies:Balancer", "pythonPath": folder}), json!({"entrypoint": "envs:CartPole", "pythonPath": folder})];
    let id = stack.submit(&request(&programs, STEPS, EPISODES, lanes)).await?;
    let ended = stack.wait(&id, LIMIT).await?;
    ensure!(ended["status"] == "completed", "{ended:#}");
    let rate = steps_per_second(&stack.ok(Method::GET, &format!("/v1/evaluations/{id}/metrics"), None).await?)?;
    stack.end().await?;
    Ok(rate)
}

fn steps_per_second(metrics: &Value) -> anyhow::Result<f64> {
    metrics["runs"][0]["metrics"]["envStepsPerSecond"].as_f64().with_context(|| format!("no rate in {metrics}"))
}

/// A model and an environment as pods.
fn images(shared: &Shared) -> anyhow::Result<[Value; 2]> {
    Ok([json!({"image": shared.image("user/quickstart-model")?}), json!({"image": shared.image("user/quickstart-env")?})])
}

/// Of `lanes` lanes, four in each environment process.
fn request([model, environment]: &[Value; 2], steps: u32, episodes: u32, lanes: u32) -> Value {
    let (mut model, mut environment) = (model.clone(), environment.clone());
    model["id"] = json!("balancer");
    environment["id"] = json!("cartpole");
    environment["lanesPerPod"] = json!(lanes.min(4));
    json!({
        "name": "figures",
        "models": [model],
        "environments": [environment],
        "tasks": [{"env": "cartpole", "taskId": "cartpole/balance", "params": {}, "episodes": episodes, "seed": 0, "workers": lanes,
                   "maxEpisodeSteps": steps, "success": {"metric": "reward", "atLeast": steps}}],
    })
}

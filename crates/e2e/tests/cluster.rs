//! The main job on a real Kubernetes: control plane, agent and controller as they are, with the rights of the chart, and the
//! same numbers as on one machine.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rlm_e2e::bed::lab::Lab;
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::with_space;
use rlm_e2e::{Signal, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(150);

fn request(shared: &Shared, episodes: u64) -> anyhow::Result<Value> {
    Ok(json!({
        "name": "on the cluster",
        "models": [{"id": "balancer", "image": shared.image("user/quickstart-model")?}],
        "environments": [{"id": "cartpole", "image": shared.image("user/quickstart-env")?}],
        "tasks": [{"env": "cartpole", "taskId": "cartpole/balance", "params": {}, "episodes": episodes, "seed": 0, "workers": 2,
                   "maxEpisodeSteps": 50, "success": {"metric": "reward", "atLeast": 50}}],
    }))
}

#[tokio::test]
async fn an_evaluation_runs_as_pods_and_outlives_its_agent_and_controller() -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _calm = shared.calm().await;
    with_space(&shared.bed, "cluster", async |space| {
        let lab = Lab::new(shared, space).await?;
        let ended = scenario(&lab, shared).await;
        ended.with_context(|| lab.logs())
    })
    .await
}

async fn scenario(lab: &Lab<'_>, shared: &Shared) -> anyhow::Result<()> {
    let _server = lab.start_server()?;
    lab.register().await?;
    let mut agent = lab.start_agent()?;
    let mut controller = lab.start_controller()?;
    lab.connected().await?;
    let file = lab.file("request.json", &request(shared, 300)?.to_string())?;
    let id = lab.rlmesh(&["eval", "submit", &file, "-o", "name"]).await?.trim().to_owned();
    let began = |detail: &Value| detail["progress"]["completedEpisodes"].as_u64() >= Some(20);
    ensure!(lab.until(&id, "at its first rows", LIMIT, began).await?["status"] != "failed", "it failed");
    // Whoever dies: the pods go on, and their results wait.
    agent.kill().await?;
    controller.kill().await?;
    let _controller = lab.start_controller()?;
    let agent = lab.start_agent()?;
    let ended = lab.ended(&id, LIMIT).await?;
    ensure!(ended["status"] == "completed", "{ended:#}");
    let export = lab.rlmesh(&["eval", "export", &id]).await?;
    let rows: Vec<Value> = export.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(rows.len() == 300, "{} rows", rows.len());
    for (seed, row) in (0_u64..).zip(&rows) {
        ensure!(row["seed"] == seed && row["reward"] == 50.0 && row["steps"] == 50 && row["success"] == true, "{row}");
    }
    wait_for("the pods to go with their run", LIMIT, async || {
        let left = lab.space.bed.kubectl(&["get", "rlmeshruns,pods", "--namespace", &lab.space.name, "--output=name"]).await?;
        Ok(left.trim().is_empty().then_some(()))
    })
    .await?;
    agent.signal(Signal::TERM)
}

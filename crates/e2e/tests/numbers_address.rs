//! A server of an environment that runs already: models share it one after the other, and the rows are those of an environment
//! that the cell starts itself.

use std::time::Duration;

use rlm_e2e::processes::{Process, clean_command};
use rlm_e2e::stack::{free_port, same};
use rlm_e2e::{Options, Stack, tools};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn two_models_share_a_server_that_runs_already() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let folder = tools.example("quickstart");
    let port = free_port()?;
    let mut command = clean_command(&tools.python);
    command.args(["-m", "rlmesh.serve", "--env", "envs:CartPole"]).current_dir(&folder);
    command.env("RLMESH_ADDRESS", format!("127.0.0.1:{port}"));
    let mut server = Process::start("the environment's server", &mut command, &stack.folder().join("environment.log"))?;
    let started = std::time::Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        anyhow::ensure!(server.ended().is_none() && started.elapsed() < Duration::from_secs(30), "the server does not serve");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut rows = Vec::new();
    for source in [json!({"address": format!("tcp://127.0.0.1:{port}")}), json!({"entrypoint": "envs:CartPole", "pythonPath": folder})] {
        let mut environment = source.clone();
        environment["id"] = json!("cartpole");
        let request = json!({
            "name": "shared",
            "models": [
                {"id": "balancer", "entrypoint": "policies:Balancer", "pythonPath": folder},
                {"id": "distracted", "entrypoint": "policies:Distracted", "pythonPath": folder},
            ],
            "environments": [environment],
            "tasks": [{"env": "cartpole", "taskId": "cartpole/balance", "params": {}, "episodes": 6, "seed": 3, "maxEpisodeSteps": 200,
                "success": {"metric": "reward", "atLeast": 195}}],
        });
        let id = stack.submit(&request).await?;
        let ended = stack.wait(&id, Duration::from_secs(120)).await?;
        assert_eq!(ended["status"], "completed", "{source}: {ended}");
        rows.push(stack.results(&id).await?);
    }
    assert_eq!(rows[0].len(), 12);
    same(&rows[1], &rows[0])?;
    server.kill().await?;
    stack.end().await
}

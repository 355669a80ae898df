//! Long outages change no result: the agent cut off from the server, and a server put back to yesterday's backup.

use std::time::Duration;

use rlm_e2e::proxy::Wire;
use rlm_e2e::{Component, Options, Stack, requests, stack, tools, wait_for};
use serde_json::{Value, json};

const EPISODES: u64 = 500;
const LIMIT: Duration = Duration::from_secs(120);

fn request(tools: &rlm_e2e::Tools, name: &str, limits: Value) -> Value {
    let mut request = requests::counter(tools, &["Follower", "Doubter"], EPISODES, 4);
    request["name"] = name.into();
    request["limits"] = limits;
    request
}

/// The undisturbed results.
async fn expected(stack: &Stack) -> anyhow::Result<Vec<String>> {
    let id = stack.submit(&request(&stack.tools, "undisturbed", json!({}))).await?;
    assert_eq!(stack.wait(&id, LIMIT).await?["status"], "completed");
    stack.results(&id).await
}

/// Rows that the agent's processes have finished do not reach the server while the wire is cut: the runs end all the same.
async fn runs_end_alone(stack: &Stack) -> anyhow::Result<()> {
    wait_for("the end of the runs while the agent is cut off", LIMIT, || async { Ok(stack.running().is_empty().then_some(())) }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_cut_off_for_long_works_on_and_its_rows_arrive() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let mut stack = Stack::start(&tools, Options::default()).await?;
    let expected = expected(&stack).await?;
    // Leases survive the outage (default), or are given up in it: results of the old generation count all the same.
    for (name, wire, limits, killed) in [
        ("cut", Wire::Cut, json!({}), false),
        ("silent", Wire::Silent, json!({}), false),
        ("cut, and its lease given up", Wire::Cut, json!({"reassignAfter": "1s"}), false),
        ("cut, and the agent killed meanwhile", Wire::Cut, json!({}), true),
    ] {
        let id = stack.submit(&request(&tools, name, limits)).await?;
        assert!(stack.reaches(&id, 100, LIMIT).await?, "{name}: over before the outage");
        stack.wire(wire);
        stack.wait_for_cluster("disconnected", Duration::from_secs(20)).await?;
        let before = stack.evaluation(&id).await?.unwrap_or_default()["progress"]["completedEpisodes"].clone();
        if killed {
            stack.kill(Component::Agent, 0).await?;
            stack.start_agent()?;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        runs_end_alone(&stack).await?;
        // Ten times what makes an agent disconnected, in all: hours, scaled.
        tokio::time::sleep(Duration::from_secs(4)).await;
        let during = stack.evaluation(&id).await?.unwrap_or_default();
        assert_eq!(during["progress"]["completedEpisodes"], before, "{name}: rows came through a wire that is cut");
        assert_eq!(during["status"], "running", "{name}");
        stack.wire(Wire::Pass);
        let evaluation = stack.wait(&id, LIMIT).await?;
        assert_eq!(evaluation["status"], "completed", "{name}");
        stack::same(&expected, &stack.results(&id).await?)?;
        stack.wait_for_cluster("connected", Duration::from_secs(20)).await?;
    }
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_wire_changes_nothing() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let expected = expected(&stack).await?;
    stack.wire(Wire::Slow(Duration::from_millis(120)));
    let id = stack.submit(&request(&tools, "slow", json!({}))).await?;
    assert_eq!(stack.wait(&id, LIMIT).await?["status"], "completed");
    stack::same(&expected, &stack.results(&id).await?)?;
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_restored_from_yesterdays_backup_gets_todays_rows_again() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let mut stack = Stack::start(&tools, Options::default()).await?;
    let expected = expected(&stack).await?;
    let id = stack.submit(&request(&tools, "yesterday", json!({}))).await?;
    assert!(stack.reaches(&id, 150, LIMIT).await?, "over before the backup");
    let backup = stack.backup("backup").await?;
    assert_eq!(stack.wait(&id, LIMIT).await?["status"], "completed");
    let today = stack.results(&id).await?;
    stack::same(&expected, &today)?;
    stack.quiet().await?;

    stack.restore(&backup).await?;
    let restored = stack.evaluation(&id).await?.unwrap_or_default();
    let evaluation = stack.wait(&id, LIMIT).await?;
    assert_eq!(evaluation["status"], "completed");
    stack::same(&today, &stack.results(&id).await?)?;
    println!("after the restore: {}", restored["progress"]);
    // They were in the agent's spool: nothing had to be run a second time.
    assert_eq!(evaluation["progress"]["scoredEpisodes"], 2 * EPISODES);
    let logs = stack.component_logs().len();
    stack.quiet().await?;
    assert_eq!(stack.component_logs().len(), logs);
    stack.end().await
}

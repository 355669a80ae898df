//! Random kills (-9) of runner, environment, model, agent and server change no result: 20 seeded schedules over 2,000 rows.
//!
//! `RLMESH_E2E_SEED=<n>` runs one schedule alone, the one that a failure names.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use rlm_e2e::faults::{Blow, schedule};
use rlm_e2e::{Component, Options, Stack, counter, requests, stack, tools, wait_for};

const EPISODES: u64 = 1_050;
const SCHEDULES: u64 = 20;
const LIMIT: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn kills_change_no_result() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let mut stack = Stack::start(&tools, Options::default()).await?;
    let request = requests::counter(&tools, &["Follower", "Doubter"], EPISODES, 8);
    let undisturbed = stack.submit(&request).await?;
    assert_eq!(stack.wait(&undisturbed, LIMIT).await?["status"], "completed");
    let expected = stack.results(&undisturbed).await?;
    assert_eq!(expected.len() as u64, 2 * EPISODES);
    for row in stack.rows(&undisturbed).await?.iter().filter(|row| row["model"] == "follower") {
        counter::check_follower(row)?;
    }

    let seeds: Vec<u64> = match std::env::var("RLMESH_E2E_SEED") {
        Ok(seed) => vec![seed.parse().context("RLMESH_E2E_SEED")?],
        Err(_) => (1..=SCHEDULES).collect(),
    };
    let mut hits: BTreeMap<Component, u32> = BTreeMap::new();
    for seed in &seeds {
        let started = std::time::Instant::now();
        let done = disturbed(&mut stack, &request, *seed, &expected, &mut hits).await;
        done.with_context(|| format!("schedule {seed}; RLMESH_E2E_SEED={seed} repeats it:\n{:#?}", schedule(*seed)))?;
        println!("schedule {seed}: {:.1} s", started.elapsed().as_secs_f64());
    }
    println!("kills: {hits:?}");
    if seeds.len() as u64 == SCHEDULES {
        for component in Component::ALL {
            let hit = hits.get(&component).copied().unwrap_or(0);
            assert!(hit >= 15, "{component:?} was killed {hit} times only: the schedules came too late");
        }
    }
    stack.end().await
}

/// Runs the evaluation under the blows of a seed and compares.
async fn disturbed(
    stack: &mut Stack,
    request: &serde_json::Value,
    seed: u64,
    expected: &[String],
    hits: &mut BTreeMap<Component, u32>,
) -> anyhow::Result<()> {
    let mut request = request.clone();
    request["name"] = format!("schedule {seed}").into();
    let id = stack.submit(&request).await?;
    for blow in schedule(seed) {
        if !stack.reaches(&id, blow.at, LIMIT).await? {
            break;
        }
        tokio::time::sleep(blow.later).await;
        strike(stack, &id, &blow, hits).await?;
    }
    let evaluation = stack.wait(&id, LIMIT).await?;
    anyhow::ensure!(evaluation["status"] == "completed", "the evaluation ended {}", evaluation["status"]);
    let progress = &evaluation["progress"];
    let scored = progress["scoredEpisodes"].as_u64();
    anyhow::ensure!(scored == Some(expected.len() as u64) && progress["erroredEpisodes"] == 0, "wrong counts: {progress}");
    stack::same(expected, &stack.results(&id).await?)?;
    stack.quiet().await
}

async fn strike(stack: &mut Stack, id: &str, blow: &Blow, hits: &mut BTreeMap<Component, u32>) -> anyhow::Result<()> {
    for component in &blow.components {
        // What was just killed may be about to start again: wait for it, as long as there is work for it.
        let hit = if stack.kill(*component, blow.choice).await? {
            true
        } else if blow.components.len() == 1 {
            comes(stack, id, *component).await? && stack.kill(*component, blow.choice).await?
        } else {
            false
        };
        if hit {
            *hits.entry(*component).or_default() += 1;
        }
    }
    if blow.components.iter().any(|one| matches!(one, Component::Server | Component::Agent)) {
        tokio::time::sleep(blow.away).await;
    }
    if blow.components.contains(&Component::Server) {
        stack.start_server().await?;
    }
    if blow.components.contains(&Component::Agent) {
        stack.start_agent()?;
    }
    Ok(())
}

/// Waits for a component to run. False: the evaluation is over.
async fn comes(stack: &Stack, id: &str, component: Component) -> anyhow::Result<bool> {
    wait_for(&format!("a {component:?}"), Duration::from_secs(30), || async {
        if stack.running().iter().any(|one| one.component() == Some(component)) {
            return Ok(Some(true));
        }
        Ok(stack.evaluation(id).await?.filter(stack::is_over).map(|_| false))
    })
    .await
}

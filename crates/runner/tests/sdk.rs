//! Runs against real servers of the Python SDK.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use rlm_api::cluster::v1::{Scored, episode::Outcome};
use rlm_core::evaluation::{SuccessMetric, SuccessRule};
use rlm_runner::Tuning;
use support::agent::{Agent, block, run_spec, task};
use support::env::EnvSettings;
use support::model::ModelSettings;
use support::python::{Server, interpreter};

/// An agent whose model and environment run already.
fn agent(spec: rlm_core::evaluation::RunSpec, rows: u32, env: &Server, model: &Server) -> Agent {
    let agent = Agent::new(spec, vec![block(0, rows, 0, 0)], |_, lanes| EnvSettings::new(lanes), ModelSettings::default());
    agent.give("model-0", &model.address);
    agent.give("env-0-0", &env.address);
    agent
}

fn scores(agent: &Agent) -> BTreeMap<u64, Scored> {
    agent
        .episodes()
        .into_iter()
        .map(|episode| match episode.outcome {
            Some(Outcome::Scored(scored)) => (episode.row, scored),
            other => panic!("row {}: {other:?}", episode.row),
        })
        .collect()
}

fn tuning() -> Tuning {
    Tuning { verdict: Duration::from_millis(500), ..Tuning::default() }
}

#[test]
fn the_quickstart_comes_out_alike_on_one_lane_and_on_eight() {
    let Some(python) = interpreter("requirements.txt") else { return };
    let folder = tempfile::tempdir().unwrap();
    let address = |name: &str| format!("unix://{}/{name}.sock", folder.path().display());
    for (env, policy, rule) in [
        ("envs:CartPole", "policies:Distracted", Some(SuccessRule { metric: SuccessMetric::Reward, at_least: 60.0 })),
        ("envs:FrozenLake", "policies:CarefulWalker", None),
    ] {
        let model = Server::start(&python, "quickstart", policy, None, "{}", &address("model"));
        let mut all = Vec::new();
        for lanes in [1, 8] {
            let env = Server::start(&python, "quickstart", env, Some(lanes), "{}", &address(&format!("env-{lanes}")));
            let mut task = task(0, Some(100));
            task.success = rule;
            let agent = agent(run_spec(lanes, Some(lanes), vec![task]), 16, &env, &model);
            agent.run(tuning()).unwrap();
            assert_eq!(agent.done().unwrap().failure, None);
            let provenance = agent.provenance();
            assert_eq!(
                (provenance.model_sdk_version.as_deref(), provenance.environment_sdk_version.as_deref()),
                (Some("0.1.0"), Some("0.1.0"))
            );
            assert!(provenance.environment_describe_sha256.is_some() && !provenance.model_startup_ms.is_empty(), "{provenance:?}");
            all.push(scores(&agent));
        }
        assert_eq!(all[0].len(), 16);
        assert_eq!(all[0], all[1], "{policy}");
        assert!(all[0].values().all(|scored| scored.success.is_some()) || rule.is_none());
        assert!(all[0].values().any(|scored| scored.success == Some(true)), "{:?}", all[0]);
    }
}

#[test]
fn chunks_of_a_real_model_are_replayed() {
    let Some(python) = interpreter("requirements.txt") else { return };
    let folder = tempfile::tempdir().unwrap();
    let address = |name: &str| format!("unix://{}/{name}.sock", folder.path().display());
    let model = Server::start(&python, "chunks", "policies:Planner", None, "{}", &address("model"));
    for (horizon, lead) in [(8, 0), (4, 2)] {
        let mut all = Vec::new();
        for lanes in [1, 4] {
            let env = Server::start(&python, "chunks", "envs:Rail", Some(lanes), "{}", &address(&format!("env-{horizon}-{lanes}")));
            let mut spec = run_spec(lanes, Some(lanes), vec![task(0, None)]);
            spec.model.execution_horizon = horizon;
            spec.model.prefetch_lead = lead;
            let agent = agent(spec, 8, &env, &model);
            agent.run(tuning()).unwrap();
            all.push(scores(&agent));
        }
        assert_eq!(all[0].len(), 8);
        assert_eq!(all[0], all[1]);
    }
    let env = Server::start(&python, "chunks", "envs:Rail", Some(1), "{}", &address("env-long"));
    let mut spec = run_spec(1, None, vec![task(0, None)]);
    spec.model.execution_horizon = 9;
    let agent = agent(spec, 1, &env, &model);
    agent.run(tuning()).unwrap();
    let Some(Outcome::Errored(failure)) = &agent.episodes()[0].outcome else { panic!() };
    assert_eq!(failure.code, "unsupported", "{}", failure.message);
}

/// What the SDK says about code that misbehaves gets the right class.
#[test]
fn misbehaviour_is_classified() {
    let Some(python) = interpreter("requirements.txt") else { return };
    let folder = tempfile::tempdir().unwrap();
    let address = |name: &str| format!("unix://{}/{name}.sock", folder.path().display());
    let follower = Server::start(&python, "misbehaving", "policies:Follower", None, "{}", &address("follower"));
    let counter = Server::start(&python, "misbehaving", "envs:Counter", Some(3), "{}", &address("counter"));
    let env_modes = [
        ("raise", "environment_error", "raised in step 2"),
        ("raise_reset", "environment_error", "raised in reset"),
        ("wrong_shape", "environment_contract", ""),
        ("nan_observation", "environment_contract", ""),
        ("nan_reward", "environment_contract", "reward"),
    ];
    for (mode, code, words) in env_modes {
        for lanes in [1, 3] {
            let kwargs = format!(r#"{{"mode":"{mode}","seed":2}}"#);
            let env = Server::start(&python, "misbehaving", "envs:Misbehaving", Some(lanes), &kwargs, &address(&format!("{mode}-{lanes}")));
            let agent = agent(run_spec(lanes, Some(lanes), vec![task(0, None)]), 5, &env, &follower);
            agent.run(tuning()).unwrap();
            only_row_two(&agent, code, words, mode);
        }
    }
    for (mode, code, words) in [
        ("raise", "model_error", "raised"),
        ("wrong_shape", "model_invalid_action", ""),
        ("nan_action", "model_invalid_action", ""),
        ("short_batch", "model_error", ""),
    ] {
        let kwargs = format!(r#"{{"mode":"{mode}","seed":2}}"#);
        let model = Server::start(&python, "misbehaving", "policies:Misbehaving", None, &kwargs, &address(&format!("model-{mode}")));
        let agent = agent(run_spec(3, Some(3), vec![task(0, None)]), 5, &counter, &model);
        agent.run(tuning()).unwrap();
        only_row_two(&agent, code, words, mode);
    }
    let env = Server::start(&python, "misbehaving", "envs:Misbehaving", Some(1), r#"{"mode":"no_success"}"#, &address("no_success"));
    let agent = agent(run_spec(1, None, vec![task(0, None)]), 3, &env, &follower);
    agent.run(tuning()).unwrap();
    assert!(scores(&agent).values().all(|scored| scored.success.is_none() && scored.terminated));
}

fn only_row_two(agent: &Agent, code: &str, words: &str, mode: &str) {
    let episodes = agent.episodes();
    assert_eq!(episodes.len(), 5, "{mode}");
    for episode in episodes {
        match (episode.row, episode.outcome) {
            (2, Some(Outcome::Errored(failure))) => {
                assert_eq!(failure.code, code, "{mode}: {}", failure.message);
                assert!(failure.message.contains(words), "{mode}: {}", failure.message);
            }
            (row, Some(Outcome::Scored(_))) if row != 2 => {}
            (row, outcome) => panic!("{mode}: row {row}: {outcome:?}"),
        }
    }
}

/// The older SDK generation, where it can be had.
#[test]
fn the_release_candidate_is_driven() {
    let Some(python) = interpreter("requirements-rc5.txt") else { return };
    let folder = tempfile::tempdir().unwrap();
    let address = |name: &str| format!("unix://{}/{name}.sock", folder.path().display());
    let model = Server::start(&python, "quickstart", "policies:Balancer", None, "{}", &address("model"));
    let env = Server::start(&python, "quickstart", "envs:CartPole", Some(1), "{}", &address("env"));
    let agent = agent(run_spec(1, None, vec![task(0, Some(50))]), 4, &env, &model);
    agent.run(tuning()).unwrap();
    assert_eq!(agent.done().unwrap().failure, None);
    assert_eq!(scores(&agent).len(), 4);
    assert!(agent.provenance().workflow_edition.unwrap().starts_with("2026.06"));
}

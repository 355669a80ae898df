//! Whole runs against stand-ins: the numbers, and what faults do to them.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rlm_api::cluster::v1::{Episode, RowBlock, episode::Outcome};
use rlm_core::failure::{FailureClass, FailureCode};
use rlm_runner::Tuning;
use rlmesh_proto::core::v1::AutoresetMode;
use support::agent::{Agent, block, run_spec, task};
use support::env::{self, EnvSettings};
use support::model::{self, ModelSettings};
use support::{Expected, expected, mix};

fn tuning() -> Tuning {
    Tuning { verdict: Duration::from_secs(2), backoff: (Duration::from_millis(2), Duration::from_millis(100)), ..Tuning::default() }
}

/// Rows with their seeds and trials.
fn rows_of(blocks: &[RowBlock]) -> BTreeMap<u64, (u64, u64, u32)> {
    blocks
        .iter()
        .flat_map(|block| {
            (0..u64::from(block.count))
                .map(|offset| (block.first_row + offset, (block.seed + offset, block.trial_index + offset, block.task)))
        })
        .collect()
}

/// Each row exactly once, with what it must come to; `errored` maps rows to their failure codes.
fn check(agent: &Agent, blocks: &[RowBlock], horizon: u32, max_steps: u32, errored: &BTreeMap<u64, FailureCode>) {
    let episodes = agent.episodes();
    let rows = rows_of(blocks);
    let mut seen = BTreeMap::new();
    for episode in &episodes {
        assert!(seen.insert(episode.row, episode).is_none(), "row {} twice", episode.row);
    }
    assert_eq!(seen.keys().collect::<Vec<_>>(), rows.keys().collect::<Vec<_>>());
    for (row, (seed, trial, _)) in rows {
        let episode = seen[&row];
        assert_eq!(episode.seed, seed);
        match (episode.outcome.as_ref().unwrap(), errored.get(&row)) {
            (Outcome::Scored(scored), None) => {
                let got = Expected {
                    reward: scored.reward.to_bits(),
                    steps: scored.steps,
                    success: scored.success,
                    terminated: scored.terminated,
                    truncated: scored.truncated,
                };
                assert_eq!(got, expected(seed, trial, horizon, max_steps), "row {row}");
                assert_eq!(scored.first_observation_sha256.len(), 32);
            }
            (Outcome::Errored(failure), Some(code)) => assert_eq!(failure.code, code.as_str(), "row {row}: {}", failure.message),
            (outcome, wanted) => panic!("row {row}: {outcome:?}, wanted {wanted:?}"),
        }
    }
    let done = agent.done().unwrap();
    assert_eq!(done.failure, None);
}

const STEPS: u32 = 100_000;

fn failure_of(episodes: &[Episode], row: u64) -> rlm_api::cluster::v1::Failure {
    match episodes.iter().find(|episode| episode.row == row).and_then(|episode| episode.outcome.clone()) {
        Some(Outcome::Errored(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn results_do_not_depend_on_lanes_or_processes() {
    let blocks = [block(100, 30, 0, 0), block(400, 25, 1, 77)];
    for (lanes, per_pod) in [(1, None), (2, None), (4, Some(1)), (8, Some(8)), (8, Some(3)), (64, None)] {
        let agent = Agent::new(
            run_spec(lanes, per_pod, vec![task(0, None), task(1, None)]),
            blocks.to_vec(),
            |_, lanes| EnvSettings::new(lanes),
            ModelSettings::default(),
        );
        agent.run(tuning()).unwrap();
        check(&agent, &blocks, 1, STEPS, &BTreeMap::new());
        assert_eq!(agent.released(), [0, 1]);
        let provenance = agent.provenance();
        assert_eq!(provenance.workflow_edition.as_deref(), Some("2026.06"));
        assert_eq!((provenance.lanes, provenance.execution_horizon), (Some(lanes.min(30)), Some(1)));
        assert!(provenance.model_describe_sha256.is_some());
        let metrics = agent.metrics();
        assert_eq!(metrics.episodes, 55);
        assert!(metrics.series.iter().any(|series| series.op == "env.step"));
    }
}

#[test]
fn chunks_limits_and_plain_models_come_out_right() {
    let blocks = [block(0, 40, 0, 1000)];
    for (horizon, corners, steps) in
        [(1, &["predict"][..], 6), (4, &["predict_chunk_batch"], 9), (3, &["predict_chunk"], STEPS), (1, &["predict_batch"], 1)]
    {
        let mut spec = run_spec(5, Some(5), vec![task(0, Some(steps))]);
        spec.model.execution_horizon = horizon;
        let model = ModelSettings { corners: corners.iter().map(|corner| (*corner).to_owned()).collect(), ..ModelSettings::default() };
        let agent = Agent::new(spec, blocks.to_vec(), |_, lanes| EnvSettings::new(lanes), model);
        agent.run(tuning()).unwrap();
        check(&agent, &blocks, horizon, steps, &BTreeMap::new());
    }
}

#[test]
fn explicit_seeds_are_taken_from_their_list() {
    let seeds = vec![4_000_000_000, 3, 99, 3];
    let rows = RowBlock { first_row: 8, count: 4, task: 0, seed: 0, seeds: seeds.clone(), trial_index: 0 };
    let agent = Agent::new(
        run_spec(2, None, vec![task(0, None)]),
        vec![rows],
        |_, lanes| EnvSettings { trial_option: false, ..EnvSettings::new(lanes) },
        ModelSettings::default(),
    );
    agent.run(tuning()).unwrap();
    for episode in agent.episodes() {
        let seed = seeds[usize::try_from(episode.row - 8).unwrap()];
        assert_eq!(episode.seed, seed);
        let Some(Outcome::Scored(scored)) = episode.outcome else { panic!() };
        assert_eq!(scored.reward.to_bits(), expected(seed, 0, 1, STEPS).reward);
    }
    assert_eq!(agent.episodes().len(), 4);
}

#[test]
fn servers_without_lanes_get_one_process_per_lane() {
    let blocks = [block(0, 12, 0, 5)];
    // Asked for eight lanes, it serves a vector in lockstep; alone it serves one environment.
    let lockstep = |_: u32, lanes: u32| EnvSettings { subset: false, ..EnvSettings::new(lanes) };
    let agent = Agent::new(run_spec(8, Some(8), vec![task(0, None)]), blocks.to_vec(), lockstep, ModelSettings::default());
    agent.run(tuning()).unwrap();
    check(&agent, &blocks, 1, STEPS, &BTreeMap::new());
    assert_eq!(agent.acquired().last().map(|acquire| (acquire.pods, acquire.lanes_per_pod)), Some((2, 1)));
    assert!(agent.provenance().warnings.iter().any(|warning| warning.contains("one process per lane")));
}

#[test]
fn a_model_without_grouped_predicts_is_asked_one_by_one() {
    let blocks = [block(0, 20, 0, 5)];
    let agent = Agent::new(
        run_spec(6, Some(6), vec![task(0, None)]),
        blocks.to_vec(),
        |_, lanes| EnvSettings::new(lanes),
        ModelSettings { knows_groups: false, ..ModelSettings::default() },
    );
    agent.run(tuning()).unwrap();
    check(&agent, &blocks, 1, STEPS, &BTreeMap::new());
}

#[test]
fn what_an_environment_does_wrong_is_charged_to_its_row_alone() {
    use env::Mischief as M;
    let always = 100;
    let blocks = [block(0, 24, 0, 0)];
    let plan = [
        (2, 2, M::Raise, always),
        (5, 1, M::Crash, always),
        (7, 3, M::NanReward, always),
        (9, 2, M::WrongShape, always),
        (11, 0, M::Raise, always),
        (13, 1, M::Crash, 1),
        (15, 2, M::Raise, 1),
        (17, 2, M::InvalidAction, always),
    ];
    let errored: BTreeMap<u64, FailureCode> = [
        (2, FailureCode::EnvironmentError),
        (5, FailureCode::EnvironmentCrashed),
        (7, FailureCode::EnvironmentContract),
        (9, FailureCode::EnvironmentContract),
        (11, FailureCode::EnvironmentError),
        (17, FailureCode::ModelInvalidAction),
    ]
    .into();
    for (lanes, per_pod) in [(1, None), (6, Some(6)), (6, Some(2)), (4, Some(1))] {
        let plan = env::plan(&plan);
        let agent = Agent::new(
            run_spec(lanes, per_pod, vec![task(0, None)]),
            blocks.to_vec(),
            move |_, lanes| EnvSettings { plan: Arc::clone(&plan), ..EnvSettings::new(lanes) },
            ModelSettings::default(),
        );
        agent.run(tuning()).unwrap();
        check(&agent, &blocks, 1, STEPS, &errored);
        let crashed = failure_of(&agent.episodes(), 5);
        assert_eq!(
            (crashed.class.as_str(), crashed.exit_code, &crashed.log_lines[..]),
            ("environment", Some(3), &["last words".to_owned()][..])
        );
        let raised = failure_of(&agent.episodes(), 2);
        assert!(raised.message.contains("as ordered") && raised.component.starts_with("env-0-"), "{raised:?}");
    }
}

#[test]
fn what_a_model_does_wrong_is_charged_to_its_row_alone() {
    use model::Mischief as M;
    let always = 100;
    let blocks = [block(0, 20, 0, 0)];
    let entries = [
        (3, 1, M::Raise, always),
        (6, 0, M::Crash, always),
        (8, 2, M::WrongShape, always),
        (10, 1, M::NoAction, always),
        (12, 1, M::Raise, 1),
        (14, 0, M::Crash, 1),
    ];
    let errored: BTreeMap<u64, FailureCode> =
        [(3, FailureCode::ModelError), (6, FailureCode::ModelCrashed), (8, FailureCode::ModelInvalidAction), (10, FailureCode::ModelError)]
            .into();
    for (lanes, per_pod) in [(1, None), (6, Some(6)), (4, Some(2))] {
        let model = ModelSettings { plan: model::plan(&entries), ..ModelSettings::default() };
        let agent = Agent::new(run_spec(lanes, per_pod, vec![task(0, None)]), blocks.to_vec(), |_, lanes| EnvSettings::new(lanes), model);
        agent.run(tuning()).unwrap();
        check(&agent, &blocks, 1, STEPS, &errored);
        assert_eq!(failure_of(&agent.episodes(), 3).class, "model");
    }
}

#[test]
fn what_hangs_is_replaced() {
    let blocks = [block(0, 10, 0, 0)];
    let mut spec = run_spec(3, Some(3), vec![task(0, None)]);
    spec.limits.progress_timeout_ms = 300;
    let env_plan = env::plan(&[(4, 2, env::Mischief::Hang, 100), (6, 0, env::Mischief::Hang, 1)]);
    let model = ModelSettings {
        plan: model::plan(&[(1, 1, model::Mischief::Hang, 100), (8, 0, model::Mischief::Hang, 1)]),
        ..ModelSettings::default()
    };
    let agent =
        Agent::new(spec, blocks.to_vec(), move |_, lanes| EnvSettings { plan: Arc::clone(&env_plan), ..EnvSettings::new(lanes) }, model);
    agent.run(tuning()).unwrap();
    check(&agent, &blocks, 1, STEPS, &[(4, FailureCode::EnvironmentHung), (1, FailureCode::ModelHung)].into());
    assert!(failure_of(&agent.episodes(), 4).log_lines.contains(&"last words".to_owned()));
    assert!(agent.restarts().iter().any(|restart| restart.component == "model-0"));
}

#[test]
fn components_that_never_start_end_what_needs_them() {
    let blocks = [block(0, 5, 0, 0), block(50, 5, 1, 0)];
    let agent = Agent::new(
        run_spec(2, Some(2), vec![task(0, None), task(1, None)]),
        blocks.to_vec(),
        |_, lanes| EnvSettings::new(lanes),
        ModelSettings::default(),
    );
    agent.fail_start("env-0-0", FailureCode::InvalidParams);
    agent.run(tuning()).unwrap();
    check(&agent, &blocks, 1, STEPS, &(0..5).map(|row| (row, FailureCode::InvalidParams)).collect());

    let agent = Agent::new(
        run_spec(2, None, vec![task(0, None)]),
        vec![block(0, 5, 0, 0)],
        |_, lanes| EnvSettings::new(lanes),
        ModelSettings::default(),
    );
    agent.fail_start("model-0", FailureCode::ModelStartFailed);
    agent.run(tuning()).unwrap();
    assert_eq!(agent.done().unwrap().failure.unwrap().code, "model_start_failed");
    assert!(agent.episodes().is_empty() && agent.acquired().is_empty());
}

#[test]
fn what_does_not_fit_is_refused_before_an_episode() {
    let rows = vec![block(0, 3, 0, 0)];
    let env = |_: u32, lanes: u32| EnvSettings::new(lanes);
    let all = |code: FailureCode| (0..3).map(move |row| (row, code)).collect::<BTreeMap<_, _>>();

    let mut spec = run_spec(1, None, vec![task(0, None)]);
    spec.model.execution_horizon = 4;
    let agent = Agent::new(spec.clone(), rows.clone(), env, ModelSettings { corners: vec!["predict".into()], ..ModelSettings::default() });
    agent.run(tuning()).unwrap();
    let failure = agent.done().unwrap().failure.unwrap();
    assert_eq!((failure.code.as_str(), failure.class.as_str()), ("unsupported", FailureClass::User.as_str()));

    let agent = Agent::new(spec, rows.clone(), env, ModelSettings { native_chunk: Some(2), ..ModelSettings::default() });
    agent.run(tuning()).unwrap();
    check(&agent, &rows, 1, STEPS, &all(FailureCode::Unsupported));

    let agent = Agent::new(
        run_spec(1, None, vec![task(0, None)]),
        rows.clone(),
        env,
        ModelSettings { refuse_adapter: Some("the action space must be a flat Box".into()), ..ModelSettings::default() },
    );
    agent.run(tuning()).unwrap();
    check(&agent, &rows, 1, STEPS, &all(FailureCode::IncompatibleSpecs));

    let agent = Agent::new(
        run_spec(1, None, vec![task(0, None)]),
        rows.clone(),
        env,
        ModelSettings { editions: vec!["2031.01".into()], ..ModelSettings::default() },
    );
    agent.run(tuning()).unwrap();
    check(&agent, &rows, 1, STEPS, &all(FailureCode::IncompatibleVersions));

    let agent = Agent::new(
        run_spec(1, None, vec![task(0, None)]),
        rows.clone(),
        |_, lanes| EnvSettings { autoreset: AutoresetMode::NextStep, ..EnvSettings::new(lanes) },
        ModelSettings::default(),
    );
    agent.run(tuning()).unwrap();
    check(&agent, &rows, 1, STEPS, &all(FailureCode::Unsupported));
}

#[test]
fn release_candidates_are_driven() {
    let cohort = || vec!["2026.06-0.1.0-rc.5".to_owned()];
    let rows = [block(0, 6, 0, 3)];
    let agent = Agent::new(
        run_spec(2, Some(1), vec![task(0, None)]),
        rows.to_vec(),
        move |_, lanes| EnvSettings { editions: cohort(), subset: false, ..EnvSettings::new(lanes) },
        ModelSettings { editions: cohort(), ..ModelSettings::default() },
    );
    agent.run(tuning()).unwrap();
    check(&agent, &rows, 1, STEPS, &BTreeMap::new());
    assert_eq!(agent.provenance().workflow_edition.as_deref(), Some("2026.06-0.1.0-rc.5"));
}

#[test]
fn a_cancelled_run_ends_at_once_and_keeps_what_is_done() {
    let mut settings = EnvSettings::new(4);
    settings.step_time = Duration::from_millis(5);
    let agent = Agent::new(
        run_spec(4, Some(4), vec![task(0, None)]),
        vec![block(0, 5000, 0, 0)],
        move |_, _| settings.clone(),
        ModelSettings::default(),
    );
    let handle = {
        let agent = agent.clone();
        std::thread::spawn(move || agent.run(tuning()))
    };
    agent.wait_for_episodes(5);
    let asked = std::time::Instant::now();
    agent.cancel("the user changed their mind");
    handle.join().unwrap().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    let failure = agent.done().unwrap().failure.unwrap();
    assert_eq!(failure.code, "cancelled");
    assert!(failure.message.contains("changed their mind"));
    assert!(agent.episodes().iter().all(|episode| matches!(episode.outcome, Some(Outcome::Scored(_)))));
}

#[test]
fn without_acknowledgements_the_runner_waits_and_loses_nothing() {
    let blocks = [block(0, 60, 0, 0)];
    let agent = Agent::new(
        run_spec(4, Some(4), vec![task(0, None)]),
        blocks.to_vec(),
        |_, lanes| EnvSettings::new(lanes),
        ModelSettings::default(),
    );
    agent.withhold_acks(true);
    let handle = {
        let agent = agent.clone();
        std::thread::spawn(move || agent.run(Tuning { unacknowledged: 10, ..tuning() }))
    };
    agent.wait_for_episodes(10);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(agent.episodes().len(), 10, "more went out than may be unacknowledged");
    agent.withhold_acks(false);
    agent.break_stream();
    handle.join().unwrap().unwrap();
    check(&agent, &blocks, 1, STEPS, &BTreeMap::new());
}

#[test]
fn a_wrong_token_is_final() {
    let agent = Agent::new(
        run_spec(1, None, vec![task(0, None)]),
        vec![block(0, 1, 0, 0)],
        |_, lanes| EnvSettings::new(lanes),
        ModelSettings::default(),
    );
    let mut start = agent.start(tuning());
    start.identity.token = rlm_runner::Token::Once("guessed".to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(rlm_runner::run(start, tokio_util::sync::CancellationToken::new())).unwrap_err();
    assert!(format!("{error:#}").contains("refused this runner"), "{error:#}");
}

#[test]
fn an_agent_that_stays_away_is_given_up() {
    let agent = Agent::new(
        run_spec(1, None, vec![task(0, None)]),
        vec![block(0, 100_000, 0, 0)],
        |_, lanes| EnvSettings { step_time: Duration::from_millis(1), ..EnvSettings::new(lanes) },
        ModelSettings::default(),
    );
    let handle = {
        let agent = agent.clone();
        std::thread::spawn(move || agent.run(Tuning { agent_patience: Duration::from_millis(500), ..tuning() }))
    };
    agent.wait_for_episodes(1);
    agent.kill_server();
    let error = handle.join().unwrap().unwrap_err();
    assert!(format!("{error:#}").contains("no agent for"), "{error:#}");
}

/// The same numbers with processes killed and lines cut at seeded moments.
#[test]
fn random_kills_change_no_number() {
    let blocks = [block(0, 150, 0, 0), block(1000, 100, 1, 500)];
    let mut disturbances = 0;
    for schedule in 0..12_u64 {
        let (lanes, per_pod) = [(1, None), (2, Some(1)), (4, Some(2)), (8, Some(8))][usize::try_from(schedule % 4).unwrap()];
        let mut spec = run_spec(lanes, per_pod, vec![task(0, None), task(1, None)]);
        spec.model.execution_horizon = 1 + u32::try_from(schedule % 3).unwrap();
        let horizon = spec.model.execution_horizon;
        let agent = Agent::new(spec, blocks.to_vec(), |_, lanes| EnvSettings::new(lanes), ModelSettings::default());
        let running = {
            let agent = agent.clone();
            std::thread::spawn(move || agent.run(Tuning { infrastructure_retries: 1000, ..tuning() }))
        };
        let mut random = mix(schedule);
        for _ in 0..10 {
            random = mix(random);
            std::thread::sleep(Duration::from_millis(3 + random % 40));
            if running.is_finished() {
                break;
            }
            disturbances += 1;
            match random >> 32 & 7 {
                0..=2 => {
                    let envs: Vec<String> = agent.components().into_iter().filter(|name| name.starts_with("env")).collect();
                    if !envs.is_empty() {
                        agent.end(&envs[usize::try_from(random >> 40).unwrap() % envs.len()], FailureCode::ProcessKilled);
                    }
                }
                3 | 4 => agent.end("model-0", FailureCode::ProcessKilled),
                5 | 6 => agent.break_stream(),
                _ => {
                    agent.kill_server();
                    std::thread::sleep(Duration::from_millis(random % 50));
                    agent.serve();
                }
            }
        }
        running.join().unwrap().unwrap();
        check(&agent, &blocks, horizon, STEPS, &BTreeMap::new());
    }
    assert!(disturbances > 40, "only {disturbances} disturbances happened");
}

/// The program itself, as an agent starts it.
struct Runner(std::process::Child);

impl Runner {
    fn start(agent: &Agent, token: &str) -> Self {
        use std::io::Write as _;
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_rlmesh-runner"))
            .args(["--agent", &agent.socket(), "--run", &agent.run_id(), "--agent-patience", "5"])
            .stdin(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        writeln!(child.stdin.take().unwrap(), "{token}").unwrap();
        Self(child)
    }

    fn wait(mut self) -> (std::process::ExitStatus, String) {
        use std::io::Read as _;
        let mut words = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        (self.0.wait().unwrap(), words)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn slow(lanes: u32) -> EnvSettings {
    EnvSettings { step_time: Duration::from_micros(100), ..EnvSettings::new(lanes) }
}

#[test]
fn a_killed_runner_is_followed_by_one_that_goes_on() {
    let blocks = [block(0, 120, 0, 0)];
    let agent = Agent::new(run_spec(3, Some(3), vec![task(0, None)]), blocks.to_vec(), |_, lanes| slow(lanes), ModelSettings::default());
    for so_far in [10, 40] {
        let mut runner = Runner::start(&agent, support::agent::TOKEN);
        agent.wait_for_episodes(so_far);
        runner.0.kill().unwrap();
        runner.0.wait().unwrap();
        agent.expect_new_runner();
    }
    let (status, words) = Runner::start(&agent, support::agent::TOKEN).wait();
    assert!(status.success(), "{words}");
    check(&agent, &blocks, 1, STEPS, &BTreeMap::new());
    let bases: std::collections::BTreeSet<u32> = agent.episodes().iter().map(|episode| episode.attempt / 1000).collect();
    assert_eq!(bases, [0, 1, 2].into());
}

#[test]
fn a_runner_told_to_stop_delivers_what_it_has_and_ends_nothing() {
    let blocks = [block(0, 200, 0, 0)];
    let agent = Agent::new(run_spec(3, Some(3), vec![task(0, None)]), blocks.to_vec(), |_, lanes| slow(lanes), ModelSettings::default());
    let runner = Runner::start(&agent, support::agent::TOKEN);
    agent.wait_for_episodes(5);
    let pid = rustix::process::Pid::from_raw(i32::try_from(runner.0.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let (status, words) = runner.wait();
    assert_eq!(status.code(), Some(1), "{words}");
    assert!(words.contains("all finished episodes are delivered"), "{words}");
    assert!(agent.done().is_none());
    agent.expect_new_runner();
    let (status, words) = Runner::start(&agent, support::agent::TOKEN).wait();
    assert!(status.success(), "{words}");
    check(&agent, &blocks, 1, STEPS, &BTreeMap::new());
}

#[test]
fn the_program_refuses_what_it_cannot_use() {
    let agent = Agent::new(
        run_spec(1, None, vec![task(0, None)]),
        vec![block(0, 1, 0, 0)],
        |_, lanes| EnvSettings::new(lanes),
        ModelSettings::default(),
    );
    let (status, words) = Runner::start(&agent, "guessed").wait();
    assert_eq!(status.code(), Some(1));
    assert!(words.contains("refused this runner") && !words.contains("guessed"), "{words}");
    let (status, words) = Runner::start(&agent, "").wait();
    assert_eq!(status.code(), Some(64));
    assert!(words.contains("token"), "{words}");
}

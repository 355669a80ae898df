//! Environments and models that misbehave on order: the right class, code, message and last log lines per row, and never a
//! wrong score. The rows beside the one that misbehaves are scored as ever.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rlm_e2e::{Options, Stack, Tools, counter, tools};
use serde_json::{Value, json};

/// Seeds of the rows of a cell; the one that misbehaves.
const SEEDS: [u64; 4] = [1, 2, 3, 4];
const BAD: u64 = 3;
const LIMIT: Duration = Duration::from_secs(180);

/// What the bad row (or, for what never starts, every row) must say.
#[derive(Debug, Clone, Copy)]
enum Expect {
    /// Scored as `Follower` is.
    Right,
    /// Scored, but for the success flag.
    WithoutSuccess,
    /// Cut at the step limit.
    Truncated,
    Errored {
        class: &'static str,
        code: &'static str,
        message: &'static str,
        log: &'static str,
        exit: Option<i64>,
        rows: Rows,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    Bad,
    All,
}

const fn errored(class: &'static str, code: &'static str, message: &'static str, log: &'static str) -> Expect {
    Expect::Errored { class, code, message, log, exit: None, rows: Rows::Bad }
}

const fn exits(class: &'static str, code: &'static str, message: &'static str, log: &'static str, exit: i64) -> Expect {
    Expect::Errored { class, code, message, log, exit: Some(exit), rows: Rows::Bad }
}

const fn never_starts(class: &'static str, code: &'static str, message: &'static str, log: &'static str, exit: Option<i64>) -> Expect {
    Expect::Errored { class, code, message, log, exit, rows: Rows::All }
}

const ENVIRONMENT: [(&str, Expect); 16] = [
    ("none", Expect::Right),
    ("exit", exits("environment", "environment_crashed", "exited with status 3", "exiting with status 3 in step 2", 3)),
    ("exit_zero", exits("environment", "environment_crashed", "exited with status 0", "", 0)),
    ("raise", errored("environment", "environment_error", "raised in step 2, as ordered", "")),
    ("raise_reset", errored("environment", "environment_error", "raised in reset, as ordered", "")),
    ("hang", errored("environment", "environment_hung", "", "hanging, as ordered")),
    ("hang_reset", errored("environment", "environment_hung", "", "hanging, as ordered")),
    ("slow_step", Expect::Right),
    ("wrong_shape", errored("environment", "environment_contract", "", "")),
    ("nan_observation", errored("environment", "environment_contract", "NaN", "")),
    ("nan_reward", errored("environment", "environment_contract", "reward", "")),
    ("no_success", Expect::WithoutSuccess),
    ("never_ends", Expect::Truncated),
    ("garbage", Expect::Right),
    (
        "raise_make",
        never_starts(
            "environment",
            "environment_start_failed",
            "raised while being constructed, as ordered",
            "RuntimeError: misbehaving environment: raised while being constructed",
            Some(1),
        ),
    ),
    ("exit_make", never_starts("environment", "environment_start_failed", "exited with status 0", "", Some(0))),
];

const MODEL: [(&str, Expect); 12] = [
    ("none", Expect::Right),
    ("exit", exits("model", "model_crashed", "exited with status 3", "exiting with status 3 in predict 2", 3)),
    ("exit_zero", exits("model", "model_crashed", "exited with status 0", "", 0)),
    ("raise", errored("model", "model_error", "raised in predict 2, as ordered", "")),
    ("hang", errored("model", "model_hung", "", "hanging, as ordered")),
    ("slow_predict", Expect::Right),
    ("wrong_shape", errored("model", "model_invalid_action", "", "")),
    ("nan_action", errored("model", "model_invalid_action", "NaN", "")),
    ("short_batch", errored("model", "model_error", "batch", "")),
    ("garbage", Expect::Right),
    (
        "raise_load",
        never_starts(
            "model",
            "model_start_failed",
            "raised while loading, as ordered",
            "RuntimeError: misbehaving model: raised while loading",
            Some(1),
        ),
    ),
    ("exit_load", never_starts("model", "model_start_failed", "exited with status 0", "", Some(0))),
];

fn params(mode: &str) -> Value {
    let once_per_process = matches!(
        mode,
        "raise_make"
            | "exit_make"
            | "raise_load"
            | "exit_load"
            | "no_success"
            | "never_ends"
            | "garbage"
            | "slow_make"
            | "slow_load"
            | "hang_make"
            | "hang_load"
    );
    if once_per_process { json!({"mode": mode, "seconds": 1.5}) } else { json!({"mode": mode, "at": 2, "seconds": 0.3, "seed": BAD}) }
}

fn limits() -> Value {
    json!({"environmentCrashRetries": 0, "progressTimeout": "3s", "maxErroredFraction": 1.0, "maxEpisodeSteps": 20})
}

fn task(env: &str, task: &str, params: &Value) -> Value {
    json!({"env": env, "taskId": task, "params": params, "episodes": SEEDS.len(), "seeds": SEEDS, "workers": 2})
}

fn environment_request(tools: &Tools) -> Value {
    let folder = tools.example("misbehaving");
    let tasks: Vec<Value> = ENVIRONMENT.iter().map(|(mode, _)| task("misbehaving", mode, &params(mode))).collect();
    json!({
        "name": "environments that misbehave",
        "models": [{"id": "follower", "entrypoint": "policies:Follower", "pythonPath": folder}],
        "environments": [{"id": "misbehaving", "entrypoint": "envs:Misbehaving", "pythonPath": folder, "lanesPerPod": 2}],
        "tasks": tasks, "limits": limits(),
    })
}

fn model_request(tools: &Tools) -> Value {
    let folder = tools.example("misbehaving");
    let models: Vec<Value> = MODEL
        .iter()
        .map(|(mode, _)| json!({"id": mode.replace('_', "-"), "entrypoint": "policies:Misbehaving", "pythonPath": folder, "params": params(mode)}))
        .collect();
    json!({
        "name": "models that misbehave",
        "models": models,
        "environments": [{"id": "counter", "entrypoint": "envs:Counter", "pythonPath": folder, "lanesPerPod": 2}],
        "tasks": [task("counter", "counter", &json!({}))], "limits": limits(),
    })
}

/// What is wrong with the rows of a cell.
fn check(mode: &str, expect: Expect, rows: &[&Value]) -> anyhow::Result<()> {
    ensure!(rows.len() == SEEDS.len(), "{mode}: {} rows", rows.len());
    for row in rows {
        let bad = row["seed"] == BAD;
        check_row(expect, row, bad).with_context(|| format!("mode {mode}, seed {}", row["seed"]))?;
    }
    Ok(())
}

fn check_row(expect: Expect, row: &Value, bad: bool) -> anyhow::Result<()> {
    let scored = counter::follower(row["seed"].as_u64().unwrap_or(0), row["trialIndex"].as_u64().unwrap_or(0));
    match expect {
        Expect::Errored { class, code, message, log, exit, rows } if bad || rows == Rows::All => {
            ensure!(row["outcome"] == "errored" && row["reward"].is_null() && row["success"].is_null(), "it is scored: {row}");
            let failure = &row["failure"];
            ensure!(failure["class"] == class && failure["code"] == code, "blamed otherwise than {class}/{code}: {failure:#}");
            let text = failure["message"].as_str().unwrap_or_default();
            ensure!(!text.is_empty() && text.contains(message), "the message lacks '{message}': {failure:#}");
            let lines = failure["logLines"].as_array().map_or(&[][..], Vec::as_slice);
            ensure!(
                log.is_empty() || lines.iter().any(|line| line.as_str().is_some_and(|line| line.contains(log))),
                "the last lines lack '{log}': {failure:#}"
            );
            ensure!(lines.len() <= 200, "{} lines", lines.len());
            let component = failure["component"].as_str().unwrap_or_default();
            ensure!(component.starts_with(if class == "model" { "model-" } else { "env-" }), "blames component '{component}'");
            ensure!(exit.is_none() || failure["exitCode"].as_i64() == exit, "exit code: {failure:#}");
            Ok(())
        }
        Expect::Right | Expect::Errored { .. } => counter::check_follower(row),
        Expect::WithoutSuccess => {
            let right =
                row["outcome"] == "scored" && row["reward"].as_f64() == Some(scored.reward) && row["steps"].as_u64() == Some(scored.steps);
            ensure!(right && row["success"].is_null(), "a missing flag is null and nothing else: {row}");
            Ok(())
        }
        Expect::Truncated => {
            ensure!(
                row["outcome"] == "scored"
                    && row["steps"] == 20
                    && row["truncated"] == true
                    && row["terminated"] == false
                    && row["success"].is_null(),
                "not cut at the limit: {row}"
            );
            Ok(())
        }
    }
}

/// Everything that is wrong, at once.
fn verdict(problems: Vec<anyhow::Error>) -> anyhow::Result<()> {
    let text: Vec<String> = problems.iter().map(|problem| format!("{problem:#}")).collect();
    ensure!(text.is_empty(), "{} of the modes are wrong:\n\n{}", text.len(), text.join("\n\n"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_misbehaviour_has_its_class_code_message_and_log() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options { max_runs: 4, ..Options::default() }).await?;
    let environments = stack.submit(&environment_request(&tools)).await?;
    let models = stack.submit(&model_request(&tools)).await?;
    let mut problems = Vec::new();
    for (id, by, modes) in [(&environments, "taskId", &ENVIRONMENT[..]), (&models, "model", &MODEL[..])] {
        let evaluation = stack.wait(id, LIMIT).await?;
        assert_eq!(evaluation["status"], "completed", "errored rows are within maxErroredFraction");
        let rows = stack.rows(id).await?;
        for (mode, expect) in modes {
            let cell = if by == "model" { mode.replace('_', "-") } else { (*mode).to_owned() };
            let rows: Vec<&Value> = rows.iter().filter(|row| row[by] == cell.as_str()).collect();
            problems.extend(check(mode, *expect, &rows).err());
        }
        let errored = rows.iter().filter(|row| row["outcome"] == "errored").count();
        assert_eq!(evaluation["progress"]["erroredEpisodes"], errored);
        assert_eq!(rows.iter().filter(|row| row["outcome"] == "pending").count(), 0);
    }
    verdict(problems)?;
    stack.quiet().await?;
    stack.end().await
}

/// Slow starts are waited for; starts that never end are ended by `startupTimeout`; what kills itself is run again.
#[tokio::test(flavor = "multi_thread")]
async fn slow_and_endless_starts_and_kills_from_inside() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options { max_runs: 4, ..Options::default() }).await?;
    let folder = tools.example("misbehaving");
    let marks = |name: &str| stack.folder().join(name);
    let model = |id: &str, params: Value, startup: &str| json!({"id": id, "entrypoint": "policies:Misbehaving", "pythonPath": folder, "params": params, "startupTimeout": startup});
    let env = |id: &str, params: Value, startup: &str| json!({"id": id, "entrypoint": "envs:Misbehaving", "pythonPath": folder, "params": params, "startupTimeout": startup});
    let kill = |mark: &str| json!({"mode": "kill", "at": 2, "seed": BAD, "once": marks(mark)});
    let request = json!({
        "name": "starts",
        "models": [
            model("good", json!({}), "1m"), model("slow", params("slow_load"), "1m"), model("endless", params("hang_load"), "15s"), model("killed", kill("model"), "1m"),
        ],
        "environments": [
            env("plain", json!({}), "1m"), env("slow", params("slow_make"), "1m"), env("endless", params("hang_make"), "15s"), env("killed", kill("env"), "1m"),
        ],
        "tasks": [
            task("plain", "plain", &json!({})), task("slow", "slow", &json!({})), task("endless", "endless", &json!({})), task("killed", "killed", &json!({})),
        ],
        "pairs": [
            {"model": "slow", "env": "plain"}, {"model": "endless", "env": "plain"}, {"model": "killed", "env": "plain"},
            {"model": "good", "env": "slow"}, {"model": "good", "env": "endless"}, {"model": "good", "env": "killed"},
        ],
        "limits": limits(),
    });
    let id = stack.submit(&request).await?;
    assert_eq!(stack.wait(&id, LIMIT).await?["status"], "completed");
    let rows = stack.rows(&id).await?;
    let cells = [
        ("slow", "plain", Expect::Right),
        ("killed", "plain", Expect::Right),
        ("good", "slow", Expect::Right),
        ("good", "killed", Expect::Right),
        ("endless", "plain", never_starts("model", "model_start_timeout", "15 s", "hanging, as ordered", None)),
        ("good", "endless", never_starts("environment", "environment_start_timeout", "15 s", "hanging, as ordered", None)),
    ];
    let mut problems = Vec::new();
    for (model, env, expect) in cells {
        let rows: Vec<&Value> = rows.iter().filter(|row| row["model"] == model && row["env"] == env).collect();
        problems.extend(check(&format!("{model} x {env}"), expect, &rows).err());
    }
    verdict(problems)?;
    assert!(marks("model").exists() && marks("env").exists(), "neither killed itself");
    stack.end().await
}

//! The SDK's own command and client, unchanged, against our server: evaluations.

use std::path::Path;

use anyhow::Context as _;
use rlm_e2e::cli::{Ran, Shell};
use rlm_e2e::{Options, Stack, Tools, tools};
use serde_json::{Value, json};

fn request(tools: &Tools, episodes: u64) -> Value {
    let folder = tools.example("catalogue");
    json!({
        "name": "sdk", "tags": {"suite": "sdk"},
        "models": [
            {"id": "straight", "entrypoint": "policies:Straight", "pythonPath": folder},
            {"id": "explorer", "entrypoint": "policies:Explorer", "pythonPath": folder},
        ],
        "environments": [{"id": "walks", "entrypoint": "envs:Walks", "pythonPath": folder, "lanesPerPod": 2}],
        "tasks": [{"env": "walks", "taskId": "walk/field", "episodes": episodes, "seed": 0, "workers": 2, "maxEpisodeSteps": 60}],
        "limits": {"maxEpisodeSteps": 60},
    })
}

/// Runs the SDK's command with the key in the environment.
async fn sdk(stack: &Stack, arguments: &[&str]) -> anyhow::Result<Ran> {
    let (home, url) = stack.shell()?;
    Shell { home: home.path(), url: Some(&url), key: Some(stack.key()) }.run(&stack.tools.sdk_command(), arguments).await
}

/// The first id in a text.
fn id_in(text: &str) -> anyhow::Result<&str> {
    let from = text.find("eval_").with_context(|| format!("no evaluation's id in: {text}"))?;
    let rest = &text[from..];
    Ok(rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').map_or(rest, |end| &rest[..end]))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sdks_command_previews_submits_waits_lists_gets_and_cancels() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let file = stack.file("request.json", request(&tools, 5).to_string())?;

    let preview = sdk(&stack, &["eval", "submit", &file, "--preview"]).await?.expect(0)?;
    let said = format!("{}{}", preview.stdout, preview.stderr);
    assert!(said.contains('2'), "the number of cells is not in: {said}");
    let stored = stack.ok(reqwest::Method::GET, "/v1/evaluations", None).await?;
    assert_eq!(stored["items"], json!([]), "a preview stores nothing");

    // The same as `python -m rlmesh`.
    let (home, url) = stack.shell()?;
    let shell = Shell { home: home.path(), url: Some(&url), key: Some(stack.key()) };
    let waited = shell.run(&tools.python, &["-m", "rlmesh", "eval", "submit", &file, "--wait"]).await?.expect(0)?;
    let text = format!("{}{}", waited.stdout, waited.stderr);
    let id = id_in(&text)?.to_owned();
    assert!(text.contains("completed"), "{text}");
    assert_eq!(stack.results(&id).await?.len(), 10);

    let listed = sdk(&stack, &["eval", "list"]).await?.expect(0)?;
    assert!(listed.stdout.contains(&id) && listed.stdout.contains("completed"), "{}", listed.stdout);
    let shown = sdk(&stack, &["eval", "get", &id]).await?.expect(0)?;
    assert!(shown.stdout.contains(&id), "{}", shown.stdout);

    let long = stack.file("long.json", request(&tools, 20_000).to_string())?;
    let submitted = sdk(&stack, &["eval", "submit", &long]).await?.expect(0)?;
    let text = format!("{}{}", submitted.stdout, submitted.stderr);
    let long = id_in(&text)?.to_owned();
    sdk(&stack, &["eval", "cancel", &long]).await?.expect(0)?;
    let ended = stack.wait(&long, std::time::Duration::from_secs(30)).await?;
    assert_eq!(ended["status"], "cancelled");
    stack.quiet().await?;

    let unknown = sdk(&stack, &["eval", "get", "eval_00000000000000000000000000"]).await?;
    assert!(unknown.status != 0 && unknown.stderr.contains("no evaluation"), "{unknown:?}");
    let broken = stack.file("broken.json", json!({"models": [], "tasks": [{"env": "x", "episodes": -1}]}).to_string())?;
    let refused = sdk(&stack, &["eval", "submit", &broken]).await?;
    assert!(refused.status != 0 && refused.stderr.contains("tasks[0].episodes"), "{refused:?}");
    let (home, url) = stack.shell()?;
    let stranger =
        Shell { home: home.path(), url: Some(&url), key: Some("rlm_key_wrong") }.run(&tools.sdk_command(), &["eval", "list"]).await?;
    assert!(stranger.status != 0 && stranger.stdout.is_empty(), "{stranger:?}");
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sdks_client_reads_everything_it_asks_for() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let file = stack.file("request.json", request(&tools, 1).to_string())?;
    let (home, url) = stack.shell()?;
    let shell = Shell { home: home.path(), url: Some(&url), key: Some(stack.key()) };
    let script = tools.test_python().join("platform_client.py");
    let ran = shell.run(&tools.python, &[script.to_str().context("path")?, &file]).await?.expect(0)?;
    let seen = ran.json()?;
    assert_eq!(seen["url"], url);
    assert_eq!(seen["preview"]["workloads"].as_array().map(Vec::len), Some(6), "{:#}", seen["preview"]);
    assert_eq!(seen["preview"]["rows"], 36);
    assert!(seen["created"]["warnings"].as_array().is_some_and(|all| all.iter().all(Value::is_string)), "{:#}", seen["created"]);
    assert_eq!(seen["ended"], json!(["completed", "completed", "cancelled"]));
    let evaluation = &seen["evaluation"];
    assert_eq!(evaluation["progress"]["completedEpisodes"], 36);
    assert_eq!(evaluation["request"]["tasks"][1]["metadata"]["environmentId"], "walks:walk/wall");

    let groups = |by: &str| seen["scores"][by]["groups"].as_array().cloned().unwrap_or_default();
    for (by, count) in [("task", 6), ("model", 2)] {
        assert_eq!(groups(by).len(), count, "{by}: {:#}", seen["scores"][by]);
        assert_eq!(seen["scores"][by]["groupBy"], by);
    }
    for by in ["task", "scenario", "benchmark", "perturbation", "model"] {
        let episodes: u64 = groups(by).iter().filter_map(|group| group["episodes"].as_u64()).sum();
        assert_eq!(episodes, 36, "{by}: {:#}", seen["scores"][by]);
    }
    check_scores(&stack, seen["created"]["id"].as_str().context("id")?, &groups("task")).await?;
    assert!(seen["metrics"].is_object() && seen["metrics"] != json!({}), "{:#}", seen["metrics"]);

    let created: Vec<&Value> = seen["listed"].as_array().context("listed")?.iter().collect();
    assert_eq!(created.len(), 3, "the iterator follows the cursor: {created:?}");
    assert_eq!(created[2], &seen["created"]["id"], "newest first");
    assert_eq!(seen["by_status"], json!([created[1]]));

    let errors = &seen["errors"];
    for (name, status, text) in [("unknown", 404, "eval_"), ("invalid", 422, "colour"), ("grouping", 400, "groupBy"), ("key", 401, "")] {
        assert_eq!(errors[name][0], status, "{name}: {errors:#}");
        assert!(errors[name][1].as_str().is_some_and(|message| message.contains(text)), "{name}: {errors:#}");
    }
    stack.end().await
}

/// The scores say what the rows say.
async fn check_scores(stack: &Stack, id: &str, groups: &[Value]) -> anyhow::Result<()> {
    let rows = stack.rows(id).await?;
    for group in groups {
        let cell: Vec<&Value> = rows.iter().filter(|row| row["model"] == group["model"] && row["taskId"] == group["taskId"]).collect();
        anyhow::ensure!(cell.len() == 6, "{group:#}: {} rows", cell.len());
        let rewards: f64 = cell.iter().filter_map(|row| row["reward"].as_f64()).sum();
        let successes = cell.iter().filter(|row| row["success"] == true).count();
        let mean = group["meanReward"].as_f64().context("meanReward")?;
        anyhow::ensure!((mean - rewards / 6.0).abs() < 1e-9, "{group:#}: mean {mean} of {rewards}");
        anyhow::ensure!(group["successes"].as_u64() == Some(successes as u64), "{group:#}: {successes}");
        anyhow::ensure!(group["successRate"].as_f64() == Some(successes as f64 / 6.0), "{group:#}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sdk_finds_its_own_classes_sound() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let (home, folder) = (tempfile::tempdir()?, tools.test_python());
    for class in ["counted:Rooms", "counted:Walker"] {
        let mut command = Shell { home: home.path(), url: None, key: None }.command(&tools.python, &["-m", "rlmesh", "check", class]);
        command.env("PYTHONPATH", Path::new(&folder)).env("NOTES", home.path().join("notes"));
        rlm_e2e::cli::finish(command, class).await?.expect(0)?;
    }
    Ok(())
}

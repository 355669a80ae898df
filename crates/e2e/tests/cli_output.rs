//! Our command: standard output is data only, forms and exit statuses are as documented, waiting survives the server.

use std::time::Duration;

use reqwest::Method;
use rlm_e2e::cli::{Shell, ran};
use rlm_e2e::{Component, Options, Stack, requests, tools};
use serde_json::Value;

#[tokio::test(flavor = "multi_thread")]
async fn output_is_data_only_in_every_form() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let file = stack.file("request.json", requests::counter(&tools, &["Follower", "Doubter"], 5, 2).to_string())?;
    let waited = stack.rlmesh(&["eval", "submit", &file, "--wait"]).await?.expect(0)?;
    assert!(waited.stdout.contains("follower") && waited.stdout.contains("MODEL"), "{}", waited.stdout);
    assert!(!waited.stdout.contains("Submitted") && !waited.stdout.contains('\u{1b}'), "{}", waited.stdout);
    assert!(waited.stderr.contains("10/10 episodes"), "{}", waited.stderr);

    let names = stack.rlmesh(&["eval", "list", "-o", "name"]).await?.expect(0)?;
    let id = names.stdout.trim().to_owned();
    assert!(id.starts_with("eval_") && !id.contains('\n'), "{names:?}");
    let cluster = stack.cluster().unwrap_or_default().to_owned();
    for command in [
        vec!["eval", "list"],
        vec!["eval", "get", &id],
        vec!["eval", "results", &id],
        vec!["eval", "rows", &id],
        vec!["eval", "logs", &id],
        vec!["eval", "reproduce", &id, "3"],
        vec!["eval", "submit", &file, "--preview"],
        vec!["clusters", "list"],
        vec!["clusters", "get", &cluster],
        vec!["keys", "list"],
        vec!["models", "list"],
        vec!["envs", "list"],
        vec!["org", "list"],
        vec!["registry", "info"],
        vec!["whoami"],
    ] {
        let json = [&command[..], &["-o", "json"]].concat();
        let json = stack.rlmesh(&json).await?.expect(0)?;
        assert!(json.json().is_ok_and(|value| value.is_object() || value.is_array()), "{command:?}: {json:?}");
        assert!(json.stderr.is_empty(), "{command:?}: {json:?}");
        let yaml = stack.rlmesh(&[&command[..], &["-o", "yaml"]].concat()).await?.expect(0)?;
        assert!(!yaml.stdout.trim_start().starts_with(['{', '[']) || matches!(yaml.stdout.trim(), "[]" | "{}"), "{command:?}: {yaml:?}");
        let table = stack.rlmesh(&command).await?.expect(0)?;
        assert!(table.stderr.is_empty() && !table.stdout.contains('\u{1b}'), "{command:?}: {table:?}");
    }
    let logs = stack.rlmesh(&["eval", "logs", &id, "--component", "model-0", "--tail", "50"]).await?.expect(0)?;
    assert!(logs.stdout.contains("==> run_") && logs.stdout.contains("RLMesh serving model"), "{logs:?}");
    let export = stack.rlmesh(&["eval", "export", &id]).await?.expect(0)?;
    assert_eq!(
        export.stdout.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok_and(|row| row["outcome"] == "scored")).count(),
        10
    );
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn exit_statuses_are_as_documented() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    // A key is shown once, and works.
    let added = stack.rlmesh(&["keys", "add", "ci", "--scope", "evaluations:read"]).await?.expect(0)?;
    let key = added.stdout.lines().find_map(|line| line.strip_prefix("export RLMESH_API_KEY=")).unwrap_or_default();
    let (home, url) = stack.shell()?;
    Shell { home: home.path(), url: Some(&url), key: Some(key) }.run(&tools.program("rlmesh"), &["eval", "list"]).await?.expect(0)?;
    // 2: the command line.
    for command in [
        &["eval"][..],
        &["nonsense"],
        &["a\u{20ac}"],
        &["eval", "results", "eval_x", "--group-by", "colour"],
        &["eval", "list", "--limit", "many"],
    ] {
        let ran = stack.rlmesh(command).await?.expect(2)?;
        assert!(ran.stdout.is_empty() && !ran.stderr.is_empty(), "{command:?}: {ran:?}");
    }
    // 3: not found.
    for command in [
        &["eval", "get", "eval_00000000000000000000000000"][..],
        &["clusters", "get", "cl_00000000000000000000000000"],
        &["models", "get", "nobody"],
    ] {
        let ran = stack.rlmesh(command).await?.expect(3)?;
        assert!(ran.stdout.is_empty() && ran.stderr.starts_with("error: "), "{command:?}: {ran:?}");
    }
    // 4: nobody is signed in, or with a key that is none.
    let (home, url) = stack.shell()?;
    for key in [None, Some("rlm_key_wrong")] {
        let ran = Shell { home: home.path(), url: Some(&url), key }.run(&tools.program("rlmesh"), &["eval", "list"]).await?.expect(4)?;
        assert!(ran.stdout.is_empty() && ran.stderr.starts_with("error: "), "{ran:?}");
    }
    // 1: no server.
    let nowhere = format!("http://127.0.0.1:{}", rlm_e2e::stack::free_port()?);
    let ran = Shell { home: home.path(), url: Some(&nowhere), key: Some(stack.key()) }
        .run(&tools.program("rlmesh"), &["eval", "list"])
        .await?
        .expect(1)?;
    assert!(ran.stderr.contains("does not answer") && ran.stdout.is_empty(), "{ran:?}");
    // 8: still pending; 5: cancelled.
    let long = stack.submit(&requests::counter(&tools, &["Follower"], 20_000, 2)).await?;
    stack.rlmesh(&["eval", "wait", &long, "--timeout", "1"]).await?.expect(8)?;
    stack.rlmesh(&["eval", "cancel", &long, "-o", "name"]).await?.expect(0)?;
    stack.rlmesh(&["eval", "wait", &long]).await?.expect(5)?;
    // 5: rows are errored.
    let mut request = requests::counter(&tools, &["Misbehaving"], 3, 1);
    request["models"][0]["params"] = serde_json::json!({"mode": "raise_load"});
    let file = stack.file("request.json", request.to_string())?;
    let ran = stack.rlmesh(&["eval", "submit", &file, "--wait"]).await?.expect(5)?;
    assert!(ran.stderr.contains("model_start_failed") && ran.stderr.contains("raised while loading"), "{ran:?}");
    // With `-o json` errors are JSON too.
    let ran = stack.rlmesh(&["eval", "get", "eval_00000000000000000000000000", "-o", "json"]).await?.expect(3)?;
    let error: Value = serde_json::from_str(&ran.stderr)?;
    assert_eq!(error["error"]["code"], "not_found", "{ran:?}");
    stack.end().await
}

/// What a user sees of code that does not work: at once when it is submitted, with its place when it fails later.
#[tokio::test(flavor = "multi_thread")]
async fn broken_code_is_named_with_its_place_and_repaired_code_is_taken() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    std::fs::create_dir(stack.folder().join("code"))?;
    let good = format!(
        "import os\nimport sys\nsys.path.insert(0, {:?})\nfrom policies import Follower\n# Only a server has it.\nif 'RLMESH_ADDRESS' in os.environ and {}:\n    import broken\n\nclass Mine(Follower):\n    pass\n",
        tools.example("misbehaving"),
        "os.path.exists(os.path.join(os.path.dirname(__file__), 'broken.py'))",
    );
    stack.file("code/mine.py", &good)?;
    let mut request = requests::counter(&tools, &["Mine", "Follower"], 60, 2);
    request["models"][0]["entrypoint"] = "mine:Mine".into();
    request["models"][0]["pythonPath"] = stack.folder().join("code").display().to_string().into();
    let file = stack.file("request.json", request.to_string())?;
    let preview = ["eval", "submit", &file, "--preview"];
    let sized = stack.rlmesh(&preview).await?.expect(0)?;
    assert!(sized.stdout.contains("runs 2") && !sized.stdout.contains('{'), "{sized:?}");
    stack.file("code/mine.py", format!("{good}def broken(:\n"))?;
    for command in [&preview[..], &preview[..3]] {
        let refused = stack.rlmesh(command).await?.expect(2)?;
        assert!(refused.stderr.contains("models[0]") && refused.stderr.contains("SyntaxError"), "{refused:?}");
    }
    stack.file("code/mine.py", &good)?;
    stack.rlmesh(&preview).await?.expect(0)?;

    // Whole runs fail, of more rows than get the output: the failure shows it all the same.
    stack.file("code/broken.py", "fine = 1\nbroken = = 2\n")?;
    let ended = stack.rlmesh(&["eval", "submit", &file, "--wait"]).await?.expect(5)?;
    assert!(ended.stderr.contains("SyntaxError: invalid syntax. `rlmesh eval rows"), "{ended:?}");
    let id = stack.rlmesh(&["eval", "list", "-o", "name"]).await?.expect(0)?.stdout.trim().to_owned();
    let list = stack.rlmesh(&["eval", "list"]).await?.expect(0)?;
    assert!(list.stdout.contains("120/120, 60 errored"), "{list:?}");
    let shown = stack.rlmesh(&["eval", "get", &id]).await?.expect(0)?.stdout;
    assert!(shown.contains("broken.py\", line 2") && shown.contains("last output: SyntaxError: invalid syntax"), "{shown}");
    // The command that it names shows the logs of the run that failed, and so does the one without a run.
    let command = shown.lines().find_map(|line| line.trim().strip_prefix("logs: rlmesh ")).unwrap_or_default();
    for command in [command.split(' ').collect::<Vec<_>>(), vec!["eval", "logs", &id]] {
        let logs = stack.rlmesh(&command).await?.expect(0)?;
        assert!(logs.stdout.contains("broken = = 2"), "{command:?}: {logs:?}");
    }
    let missing = stack.rlmesh(&["eval", "logs", &id, "--component", "foo"]).await?.expect(3)?;
    assert!(missing.stderr.contains("'foo'; it has those of ") && missing.stderr.contains("model-0"), "{missing:?}");

    // What is not shown is counted.
    for (outcome, all) in [(&[][..], 120), (&["--outcome", "errored"], 60), (&["--outcome", "scored"], 60)] {
        let rows = stack.rlmesh(&[&["eval", "rows", &id, "--limit", "7", "-o", "name"], outcome].concat()).await?.expect(0)?;
        assert_eq!((rows.stdout.lines().count(), rows.stderr), (7, format!("7 of {all} rows; --limit N shows more\n")));
        let rows = stack.rlmesh(&[&["eval", "rows", &id, "--limit", "120", "-o", "name"], outcome].concat()).await?.expect(0)?;
        assert_eq!((rows.stdout.lines().count(), rows.stderr.as_str()), (all, ""));
    }
    stack.rlmesh(&["eval", "rows", &id, "--limit", "0"]).await?.expect(2)?;

    // Problems once each, in the order of their paths.
    let task =
        |at| serde_json::json!({"env": "counter", "taskId": format!("t/{at}"), "params": {}, "episodes": u8::from(at != 2 && at != 10)});
    request["tasks"] = (0..12).map(task).collect();
    let file = stack.file("request.json", request.to_string())?;
    let refused = stack.rlmesh(&["eval", "submit", &file]).await?.expect(2)?;
    let lines: Vec<&str> = refused.stderr.lines().map(|line| line.split(": ").next().unwrap_or_default()).collect();
    assert_eq!(lines, ["error", "  tasks[2].episodes", "  tasks[10].episodes"], "{refused:?}");
    stack.end().await
}

/// Hints that need no server.
#[tokio::test]
async fn wrong_commands_say_what_would_be_right() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let home = tempfile::tempdir()?;
    let shell = Shell { home: home.path(), url: None, key: None };
    let program = tools.program("rlmesh");
    let delete = shell.run(&program, &["eval", "delete", "eval_x"]).await?.expect(2)?;
    assert!(delete.stderr.contains("'rm'"), "{delete:?}");
    let nowhere = shell.run(&program, &["--state", "nowhere", "eval", "list"]).await?.expect(1)?;
    assert!(nowhere.stderr.contains("there is no `rlmesh up` with state folder nowhere"), "{nowhere:?}");
    assert!(!nowhere.stderr.contains("os error"), "{nowhere:?}");
    for (command, parts) in [
        (&["up", "--help"][..], &["[default: python3]", "by default ~/.local/share/rlmesh/local"][..]),
        (&["eval", "--help"], &["Stop it for good"]),
        (&["eval", "rows", "--help"], &["Id of the evaluation", "Most rows to show"]),
    ] {
        let help = shell.run(&program, command).await?.expect(0)?;
        let text = help.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(parts.iter().all(|part| text.contains(part)), "{command:?}: {text}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_survives_the_servers_restart() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let mut stack = Stack::start(&tools, Options::default()).await?;
    let id = stack.submit(&requests::counter(&tools, &["Follower"], 2_000, 4)).await?;
    let (home, url) = stack.shell()?;
    let shell = Shell { home: home.path(), url: Some(&url), key: Some(stack.key()) };
    let waiting = shell.command(&tools.program("rlmesh"), &["eval", "wait", &id]).spawn()?;
    for kill in [true, false] {
        assert!(stack.reaches(&id, if kill { 50 } else { 300 }, Duration::from_secs(60)).await?, "over too early");
        if kill {
            stack.kill(Component::Server, 0).await?;
        } else {
            stack.stop(Component::Server).await?;
        }
        tokio::time::sleep(Duration::from_millis(600)).await;
        stack.start_server().await?;
    }
    let output = tokio::time::timeout(Duration::from_secs(90), waiting.wait_with_output()).await??;
    let ran = ran(&output).expect(0)?;
    assert!(ran.stdout.contains("follower"), "{ran:?}");
    let shown = stack.ok(Method::GET, &format!("/v1/evaluations/{id}"), None).await?;
    assert_eq!(shown["status"], "completed");
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_ends_when_asked_also_while_the_server_says_nothing() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", silent.local_addr()?);
    let home = tempfile::tempdir()?;
    let shell = Shell { home: home.path(), url: Some(&url), key: Some("rlm_key_x") };
    let program = tools.program("rlmesh");
    let late = shell.run(&program, &["eval", "wait", "eval_00000000000000000000000000", "--timeout", "1"]).await?.expect(8)?;
    assert!(late.stderr.contains("is not over after 1 s"), "{late:?}");

    let waiting = shell.command(&program, &["eval", "wait", "eval_00000000000000000000000000"]).spawn()?;
    // The request is under way once it has connected; the first connection was the command before.
    for _ in 0..2 {
        silent.accept().await?;
    }
    let process = rustix::process::Pid::from_raw(waiting.id().unwrap_or_default().try_into()?).ok_or_else(|| anyhow::anyhow!("no id"))?;
    rustix::process::kill_process(process, rustix::process::Signal::INT)?;
    let output = tokio::time::timeout(Duration::from_secs(20), waiting.wait_with_output()).await??;
    let interrupted = ran(&output).expect(130)?;
    assert!(interrupted.stderr.contains("stopped waiting"), "{interrupted:?}");
    Ok(())
}

//! Bad input: a clear error that names the path in the request, all problems at once, status 400, 413 or 422 (the command's
//! exit status is 2), and nothing stored.

use reqwest::Method;
use rlm_e2e::{Options, Stack, Tools, tools};
use serde_json::{Value, json};

/// A request in which nothing is wrong.
fn good(tools: &Tools) -> Value {
    let (walks, chunks) = (tools.example("catalogue"), tools.example("chunks"));
    json!({
        "models": [
            {"id": "straight", "entrypoint": "policies:Straight", "pythonPath": walks},
            {"id": "planner", "entrypoint": "policies:Planner", "pythonPath": chunks},
        ],
        "environments": [{"id": "walks", "entrypoint": "envs:Walks", "pythonPath": walks}],
        "tasks": [{"env": "walks", "taskId": "walk/field", "episodes": 2, "seed": 0}],
        "pairs": [{"model": "straight", "env": "walks"}],
    })
}

/// The request with one value put at a pointer; `null` takes it away.
fn with(mut request: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap_or(("", pointer));
    match request.pointer_mut(parent) {
        Some(Value::Object(fields)) => {
            fields.insert(key.to_owned(), value);
        }
        Some(Value::Array(items)) => items.push(value),
        _ => {}
    }
    request
}

/// What is changed, to what, the path that the answer must name, and a part of its sentence.
fn cases(tools: &Tools) -> Vec<(&'static str, Value, &'static str, &'static str)> {
    let folder = tools.example("catalogue");
    let task = json!({"env": "walks", "taskId": "walk/field", "episodes": 1});
    vec![
        ("/colour", json!(1), "colour", "not a field"),
        ("/tasks/0/colour", json!(1), "tasks[0].colour", "not a field"),
        ("/tasks/0/episodes", json!("ten"), "tasks[0].episodes", "must be a whole number"),
        ("/tasks/0/episodes", json!(1.5), "tasks[0].episodes", "must be a whole number"),
        ("/tasks/0/episodes", json!(-1), "tasks[0].episodes", "at least 1"),
        ("/tasks/0/episodes", json!(0), "tasks[0].episodes", "at least 1"),
        ("/tasks/0/episodes", json!(1_000_000_000), "tasks[0].episodes", "at most"),
        ("/tasks/0/seed", json!(4_294_967_295_u64), "tasks[0].seed", "2^32"),
        (
            "/models/-",
            json!({"id": "straight", "entrypoint": "policies:Straight", "pythonPath": folder}),
            "models[2].id",
            "another model is called 'straight'",
        ),
        (
            "/environments/-",
            json!({"id": "walks", "entrypoint": "envs:Walks", "pythonPath": folder}),
            "environments[1].id",
            "another environment is called 'walks'",
        ),
        ("/tasks/-", task, "tasks[1].taskId", "tasks[0] already"),
        ("/models/-", json!("nobody"), "models[2]", "nobody"),
        ("/tasks/0/env", json!("nowhere"), "tasks[0].env", "no environment 'nowhere'"),
        ("/tasks/0/taskId", json!("walk/moon"), "tasks[0].taskId", "selects nothing"),
        ("/tasks/0/params", json!({"layout": "moon"}), "tasks[0].params.layout", "field"),
        ("/tasks/0/params", json!({"wind": 1}), "tasks[0].params.wind", "wind"),
        ("/environments/0/params", json!({"gusts": "much"}), "environments[0].params.gusts", "number"),
        ("/models/1/executionHorizon", json!(100), "models[1].executionHorizon", "8"),
        ("/models/0/entrypoint", json!("policies"), "models[0].entrypoint", "module"),
        ("/models/0/entrypoint", json!("nosuch:Straight"), "models[0].entrypoint", "nosuch"),
        ("/models/0/entrypoint", json!("policies:Nobody"), "models[0].entrypoint", "Nobody"),
        ("/models/0/pythonPath", json!("relative"), "models[0].pythonPath", "absolute"),
        ("/models/0/pythonPath", json!("/nonexistent/folder"), "models[0].entrypoint", "/nonexistent/folder"),
        ("/pairs/0/model", json!("ghost"), "pairs[0].model", "ghost"),
        ("/limits", json!({"progressTimeout": "soon"}), "limits.progressTimeout", "time"),
    ]
}

/// The problems of an answer, as `path: message`.
fn problems(answer: &Value) -> Vec<String> {
    let details = answer["error"]["details"].as_array().map_or(&[][..], Vec::as_slice);
    details.iter().map(|one| format!("{}: {}", one["path"].as_str().unwrap_or("?"), one["message"].as_str().unwrap_or("?"))).collect()
}

async fn nothing_is_stored(stack: &Stack) -> anyhow::Result<()> {
    let list = stack.ok(Method::GET, "/v1/evaluations", None).await?;
    anyhow::ensure!(list["items"] == json!([]), "a refused request was stored: {list}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_fields_are_named_over_rest_and_by_the_command() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let (status, answer) = stack.request(Method::POST, "/v1/evaluation-previews", Some(&good(&tools))).await?;
    assert!(status.is_success(), "the good request is refused: {answer}");
    let mut wrong = Vec::new();
    for (number, (pointer, value, path, text)) in cases(&tools).into_iter().enumerate() {
        let request = with(good(&tools), pointer, value.clone());
        for route in ["/v1/evaluations", "/v1/evaluation-previews"] {
            let (status, answer) = stack.request(Method::POST, route, Some(&request)).await?;
            let found = problems(&answer);
            let named = found.iter().any(|problem| problem.starts_with(&format!("{path}: ")) && problem.contains(text));
            if status != 422 || answer["error"]["code"] != "invalid_request" || !named || found.len() != 1 {
                wrong.push(format!("{route} {pointer} = {value}: {status}, expected {path} with '{text}': {answer}"));
            }
        }
        // The command is the same code for all of them: every third is enough. It makes relative paths absolute by itself.
        if number % 3 == 0 && value != "relative" {
            let file = stack.file("request.json", request.to_string())?;
            let ran = stack.rlmesh(&["eval", "submit", &file]).await?;
            if ran.status != 2 || !ran.stdout.is_empty() || !ran.stderr.contains(path) {
                wrong.push(format!("rlmesh eval submit, {pointer} = {value}: {ran:?}"));
            }
        }
    }
    nothing_is_stored(&stack).await?;
    assert!(wrong.is_empty(), "{} answers are wrong:\n{}", wrong.len(), wrong.join("\n"));
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn all_problems_come_at_once() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let mut request = good(&tools);
    for (pointer, value) in [
        ("/colour", json!(1)),
        ("/tasks/0/episodes", json!(-1)),
        ("/models/1/executionHorizon", json!(100)),
        ("/environments/0/params", json!({"gusts": "much"})),
        ("/models/0/entrypoint", json!("nosuch:Straight")),
    ] {
        request = with(request, pointer, value);
    }
    let (status, answer) = stack.request(Method::POST, "/v1/evaluations", Some(&request)).await?;
    assert_eq!(status, 422, "{answer}");
    let found = problems(&answer);
    for path in
        ["colour: ", "tasks[0].episodes: ", "models[1].executionHorizon: ", "environments[0].params.gusts: ", "models[0].entrypoint: "]
    {
        assert!(found.iter().any(|problem| problem.starts_with(path)), "{path} is missing: {found:#?}");
    }
    assert!(answer["error"]["message"].as_str().is_some_and(|message| message.contains("5 problems")), "{answer}");
    let file = stack.file("request.json", request.to_string())?;
    let ran = stack.rlmesh(&["eval", "submit", &file, "-o", "json"]).await?.expect(2)?;
    let error: Value = serde_json::from_str(&ran.stderr)?;
    assert_eq!(error["error"]["details"].as_array().map(Vec::len), Some(5), "{error:#}");
    nothing_is_stored(&stack).await?;
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_files_that_are_no_request() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options { agent: false, ..Options::default() }).await?;
    let mut large = br#"{"name": ""#.to_vec();
    large.resize(50 << 20, b'x');
    large.extend_from_slice(br#""}"#);
    let bodies: [(&str, Vec<u8>, u16); 7] = [
        ("empty", Vec::new(), 400),
        ("blanks", b" \n ".to_vec(), 400),
        ("not JSON", b"{\"models\": ".to_vec(), 400),
        ("not UTF-8", b"{\"name\": \"\xff\xfe\"}".to_vec(), 400),
        ("no object", b"[]".to_vec(), 422),
        ("zeros", vec![0; 100], 400),
        ("50 MB", large, 413),
    ];
    for (name, body, expected) in &bodies {
        let sent = stack
            .http()
            .post(format!("{}/v1/evaluations", stack.url()))
            .bearer_auth(stack.key())
            .header("content-type", "application/json")
            .body(body.clone())
            .send()
            .await;
        match sent {
            Ok(answer) => {
                let status = answer.status().as_u16();
                let text = answer.text().await?;
                let error: Value = serde_json::from_str(&text).unwrap_or_default();
                assert!(status == *expected && error["error"]["code"].is_string(), "{name}: {status} {text}");
                assert!(error["error"]["message"].as_str().is_some_and(|message| message.len() > 10), "{name}: {text}");
            }
            // The answer may come before all of the body was taken, and be lost with the connection.
            Err(error) => assert!(*name == "50 MB", "{name}: {error:#}"),
        }
        let file = stack.file("request.json", body)?;
        let ran = stack.rlmesh(&["eval", "submit", &file]).await?.expect(2)?;
        assert!(ran.stdout.is_empty() && ran.stderr.starts_with("error: "), "{name}: {ran:?}");
    }
    let missing = stack.folder().join("missing.json").display().to_string();
    let folder = stack.folder().display().to_string();
    for (path, text) in [(&missing, "missing.json"), (&folder, "can't be read")] {
        let ran = stack.rlmesh(&["eval", "submit", path]).await?.expect(2)?;
        assert!(ran.stderr.contains(text) && ran.stdout.is_empty(), "{ran:?}");
    }
    let wrong_type = stack
        .http()
        .post(format!("{}/v1/evaluations", stack.url()))
        .bearer_auth(stack.key())
        .header("content-type", "text/plain")
        .body("{}")
        .send()
        .await?;
    assert_eq!(wrong_type.status().as_u16(), 400);
    nothing_is_stored(&stack).await?;
    stack.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_submits_nothing() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options { agent: false, ..Options::default() }).await?;
    let port = stack.url().rsplit_once(':').map(|(_, port)| port.to_owned()).unwrap_or_default();
    let good = good(&tools).to_string();
    let foreign: [&[(&str, &str)]; 5] = [
        &[("origin", "https://evil.example")],
        &[("origin", "null")],
        &[("origin", "http://127.0.0.1:1")],
        &[("sec-fetch-site", "cross-site")],
        // A name that was rebound to loopback.
        &[("host", "evil.example")],
    ];
    for headers in foreign {
        // What a page can send without asking first, and what it would ask for.
        for content_type in ["text/plain", "application/json"] {
            let mut request =
                stack.http().post(format!("{}/v1/evaluations", stack.url())).bearer_auth(stack.key()).header("content-type", content_type);
            for (name, value) in headers {
                let value = if *name == "host" { format!("{value}:{port}") } else { (*value).to_owned() };
                request = request.header(*name, value);
            }
            let answer = request.body(good.clone()).send().await?;
            let (status, allowed) = (answer.status().as_u16(), answer.headers().contains_key("access-control-allow-origin"));
            let error: Value = serde_json::from_str(&answer.text().await?)?;
            assert!(
                status == 403 && error["error"]["code"] == "foreign_origin" && !allowed,
                "{headers:?} {content_type}: {status} {error}"
            );
        }
    }
    let asked = stack
        .http()
        .request(Method::OPTIONS, format!("{}/v1/evaluations", stack.url()))
        .header("origin", "https://evil.example")
        .header("access-control-request-method", "POST")
        .send()
        .await?;
    assert!(!asked.headers().contains_key("access-control-allow-origin"), "{asked:?}");
    nothing_is_stored(&stack).await?;
    stack.end().await
}

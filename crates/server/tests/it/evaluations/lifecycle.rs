//! Submitting, reading and changing evaluations through REST.

use std::time::Duration;

use reqwest::{Method, StatusCode};
use rlm_api::cluster::v1::run_status::Phase;
use rlm_server::app::evaluations::purge_deleted;
use serde_json::{Value, json};

use super::{Lab, counts, deterministic, episode, errored, export, request, status};
use crate::common::{TestServer, postgres_url};

async fn labs() -> Vec<Lab> {
    let mut labs = vec![Lab::start().await];
    if let Some(url) = postgres_url().await {
        labs.push(Lab::on(TestServer::with(|config| config.database_url = url).await).await);
    }
    labs
}

#[tokio::test]
async fn submitting_shows_what_the_sdk_reads() {
    let lab = Lab::start().await;
    let answer = lab.server.post(&lab.token, "/v1/evaluations", &request("first", 2)).await;
    assert_eq!(answer.status, StatusCode::CREATED);
    let id = answer.body["id"].as_str().unwrap();
    assert!(id.starts_with("eval_"));
    assert_eq!(answer.body["status"], "queued");
    assert!(answer.body["warnings"].as_array().unwrap().iter().all(Value::is_string));
    assert!(answer.body["url"].as_str().unwrap().ends_with(&format!("/evaluations/{id}")));
    let detail = lab.get(&format!("/v1/evaluations/{id}")).await;
    assert_eq!((&detail["evaluationLabel"], &detail["name"]), (&json!("first"), &json!("first")));
    assert_eq!(detail["progress"]["totalEpisodes"], 8);
    assert_eq!(detail["request"], request("first", 2));
    assert_eq!(detail["effective"]["limits"]["environmentCrashRetries"], 1);
    assert_eq!(detail["effective"]["tasks"][1]["success"]["atLeast"], 3.0);
    assert_eq!(detail["tags"], json!({"suite": "smoke"}));
    assert_eq!(detail["runs"].as_array().unwrap().len(), 2);
    let audit = lab.get("/v1/audit").await;
    assert_eq!((&audit["items"][0]["action"], &audit["items"][0]["subject"]), (&json!("evaluation.create"), &json!(id)));
}

#[tokio::test]
async fn a_preview_sizes_and_stores_nothing() {
    let lab = Lab::start().await;
    let preview = lab.server.post(&lab.token, "/v1/evaluation-previews", &request("sized", 5)).await.ok();
    assert_eq!(preview["workloads"].as_array().unwrap().len(), 4);
    assert_eq!(preview["estimates"]["episodes"], 20);
    assert_eq!(preview["effective"]["name"], "sized");
    assert_eq!(lab.get("/v1/evaluations").await["items"], json!([]));
}

#[tokio::test]
async fn a_repeat_is_the_same_evaluation() {
    for lab in labs().await {
        let mut first = request("once", 1);
        first["clientToken"] = json!("mine");
        let id = lab.submit(&first).await.to_string();
        let again = lab.server.post(&lab.token, "/v1/evaluations", &first).await;
        assert_eq!((again.status, &again.body["id"]), (StatusCode::OK, &json!(id)));
        // The header means the same as the field.
        let by_header = lab
            .server
            .request(Method::POST, "/v1/evaluations")
            .bearer_auth(&lab.token)
            .header("Idempotency-Key", "mine")
            .json(&request("once", 1));
        assert_eq!(lab.server.send(by_header).await.ok()["id"], json!(id));
        let mut other = request("other", 1);
        other["clientToken"] = json!("mine");
        let refused = lab.server.post(&lab.token, "/v1/evaluations", &other).await.refused("idempotency_mismatch");
        assert!(refused.message().contains(&id), "{}", refused.message());
        let both = lab.server.request(Method::POST, "/v1/evaluations").bearer_auth(&lab.token).header("Idempotency-Key", "x").json(&first);
        lab.server.send(both).await.refused("invalid_request");
        assert_eq!(lab.get("/v1/evaluations").await["items"].as_array().unwrap().len(), 1);
        // Another organization's token is its own.
        let stranger = lab.server.organization("strangers").await;
        let key = lab.server.key(&stranger).await;
        let theirs = lab.server.post(&key, "/v1/evaluations", &first).await;
        assert_eq!(theirs.status, StatusCode::CREATED);
        assert_ne!(theirs.body["id"], json!(id));
        // Many at once are one.
        let mut racing = request("race", 1);
        racing["clientToken"] = json!("race");
        let sends = (0..6).map(|_| lab.server.post(&lab.token, "/v1/evaluations", &racing));
        let ids: std::collections::BTreeSet<String> =
            futures::future::join_all(sends).await.into_iter().map(|answer| answer.ok()["id"].as_str().unwrap().to_owned()).collect();
        assert_eq!(ids.len(), 1);
    }
}

#[tokio::test]
async fn an_equal_request_soon_after_is_worth_a_warning() {
    let lab = Lab::start().await;
    let first = lab.submit(&request("twin", 1)).await.to_string();
    let second = lab.server.post(&lab.token, "/v1/evaluations", &request("twin", 1)).await.ok();
    assert!(second["warnings"].to_string().contains(&first), "{second}");
    lab.server.advance(Duration::from_secs(61));
    let third = lab.server.post(&lab.token, "/v1/evaluations", &request("twin", 1)).await.ok();
    assert_eq!(third["warnings"], json!([]));
    // What failed is submitted again on purpose.
    let id = lab.submit(&request("failing", 1)).await;
    lab.play(id, |_| errored("crashed")).await;
    assert_eq!(lab.status(id).await, "failed");
    let again = lab.server.post(&lab.token, "/v1/evaluations", &request("failing", 1)).await.ok();
    assert_eq!(again["warnings"], json!([]));
}

#[tokio::test]
async fn bad_requests_name_everything_and_store_nothing() {
    let lab = Lab::start().await;
    let mut bad = request("bad", 1);
    bad["colour"] = json!("red");
    bad["tasks"][0]["episodes"] = json!(-1);
    bad["tasks"][1]["env"] = json!("nowhere");
    bad["models"][1]["id"] = json!("a");
    let answer = lab.server.post(&lab.token, "/v1/evaluations", &bad).await.refused("invalid_request");
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    let paths: Vec<&str> =
        answer.body["error"]["details"].as_array().unwrap().iter().map(|problem| problem["path"].as_str().unwrap()).collect();
    for path in ["colour", "tasks[0].episodes", "tasks[1].env", "models[1].id"] {
        assert!(paths.contains(&path), "{path} in {paths:?}");
    }
    let mut many = request("many", 1_000_000_000);
    many["clientToken"] = json!("many");
    lab.server.post(&lab.token, "/v1/evaluations", &many).await.refused("invalid_request");
    for body in ["", "{", "\u{feff}nonsense", "[]", "7"] {
        let sent = lab
            .server
            .request(Method::POST, "/v1/evaluations")
            .bearer_auth(&lab.token)
            .header("content-type", "application/json")
            .body(body);
        let answer = lab.server.send(sent).await;
        assert!([400, 422].contains(&answer.status.as_u16()), "{body:?}: {} {}", answer.status, answer.text);
    }
    let mut foreign = request("foreign", 1);
    foreign["cluster"] = json!(rlm_core::ids::ClusterId::generate().to_string());
    let answer = lab.server.post(&lab.token, "/v1/evaluations", &foreign).await.refused("invalid_request");
    assert_eq!(answer.body["error"]["details"][0]["path"], "cluster");
    let huge = "x".repeat(33 * 1024 * 1024);
    let sent =
        lab.server.request(Method::POST, "/v1/evaluations").bearer_auth(&lab.token).header("content-type", "application/json").body(huge);
    lab.server.send(sent).await.refused("too_large");
    assert_eq!(lab.get("/v1/evaluations").await["items"], json!([]));
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    for lab in labs().await {
        let mut ids = Vec::new();
        for number in 0..5 {
            let mut one = request(&format!("Run 10%_{number}"), 1);
            one["tags"] = json!({"suite": if number < 3 { "smoke" } else { "full" }, "n": number.to_string()});
            ids.push(lab.submit(&one).await.to_string());
        }
        ids.reverse();
        let listed =
            |page: &Value| page["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
        assert_eq!(listed(&lab.get("/v1/evaluations").await), ids);
        let first = lab.get("/v1/evaluations?limit=2").await;
        let cursor = first["nextCursor"].as_str().unwrap();
        let second = lab.get(&format!("/v1/evaluations?limit=3&cursor={cursor}")).await;
        assert_eq!((listed(&first), listed(&second)), (ids[..2].to_vec(), ids[2..].to_vec()));
        assert!(second["nextCursor"].is_null());
        assert_eq!(listed(&lab.get("/v1/evaluations?tag=suite:full").await), ids[..2]);
        assert_eq!(listed(&lab.get("/v1/evaluations?tag=suite:smoke&tag=n:1").await), [ids[3].clone()]);
        assert_eq!(listed(&lab.get("/v1/evaluations?q=run%2010%25_4").await), [ids[0].clone()]);
        assert_eq!(listed(&lab.get("/v1/evaluations?q=nothing").await), Vec::<String>::new());
        lab.server.post(&lab.token, &format!("/v1/evaluations/{}/cancellations", ids[4]), &json!({})).await.ok();
        assert_eq!(listed(&lab.get("/v1/evaluations?status=cancelled").await), [ids[4].clone()]);
        assert_eq!(listed(&lab.get("/v1/evaluations?status=queued").await), ids[..4]);
        for query in ["limit=0", "limit=201", "status=done", "tag=suite", "cursor=7", "colour=red"] {
            lab.server.get(&lab.token, &format!("/v1/evaluations?{query}")).await.refused("bad_request");
        }
    }
}

#[tokio::test]
async fn names_and_tags_change() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("old", 1)).await;
    let path = format!("/v1/evaluations/{id}");
    let changed = lab.server.patch(&lab.token, &path, &json!({"name": "new"})).await.ok();
    assert_eq!((&changed["name"], &changed["tags"]), (&json!("new"), &json!({"suite": "smoke"})));
    let changed = lab.server.patch(&lab.token, &path, &json!({"tags": {"a": "b"}})).await.ok();
    assert_eq!((&changed["name"], &changed["tags"]), (&json!("new"), &json!({"a": "b"})));
    for bad in
        [json!({"name": ""}), json!({"name": "a\nb"}), json!({"tags": {"": "x"}}), json!({"tags": {"a": 1}}), json!({"colour": "red"})]
    {
        lab.server.patch(&lab.token, &path, &bad).await.refused("invalid_request");
    }
    assert_eq!(lab.get(&path).await["name"], "new");
}

#[tokio::test]
async fn cancelling_ends_what_waits_and_asks_clusters_to_stop() {
    for lab in labs().await {
        let waiting = lab.submit(&request("waiting", 1)).await;
        let cancel = |id| format!("/v1/evaluations/{id}/cancellations");
        assert_eq!(lab.server.post(&lab.token, &cancel(waiting), &json!({})).await.ok()["status"], "cancelled");
        assert_eq!(lab.server.post(&lab.token, &cancel(waiting), &json!({})).await.ok()["status"], "cancelled", "again is fine");
        let bare = lab.server.request(Method::POST, &cancel(waiting)).bearer_auth(&lab.token);
        lab.server.send(bare).await.ok();
        lab.server.post(&lab.token, &cancel(waiting), &json!({"force": true})).await.refused("invalid_request");

        let running = lab.submit(&request("running", 2)).await;
        let runs = lab.lease(running).await;
        lab.send(vec![(runs[0].id, 1, status(Phase::Running, None))]).await.unwrap();
        assert_eq!(lab.server.post(&lab.token, &cancel(running), &json!({})).await.ok()["status"], "cancelling");
        // Results on their way count; rows without one stay open.
        lab.send(vec![
            (runs[0].id, 1, episode(&runs[0].rows[0], 0, deterministic(&runs[0].rows[0]))),
            (runs[0].id, 1, status(Phase::Cancelled, None)),
        ])
        .await
        .unwrap();
        assert_eq!(lab.status(running).await, "cancelling");
        lab.send(vec![(runs[1].id, 1, status(Phase::Failed, None))]).await.unwrap();
        assert_eq!(lab.status(running).await, "cancelled");
        assert_eq!(counts(&lab, running).await, [("scored", (1, 1)), ("errored", (0, 0))].into());
        for change in ["retries", "extensions"] {
            let body = if change == "retries" { json!({}) } else { json!({"episodes": 1}) };
            lab.server.post(&lab.token, &format!("/v1/evaluations/{running}/{change}"), &body).await.refused("conflict");
        }
        let done = lab.submit(&request("done", 1)).await;
        lab.play(done, deterministic).await;
        lab.server.post(&lab.token, &cancel(done), &json!({})).await.refused("conflict");
    }
}

#[tokio::test]
async fn a_stopped_run_that_nobody_cancelled_goes_to_the_queue() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("stopped", 1)).await;
    let runs = lab.lease(id).await;
    lab.send(vec![(runs[0].id, 1, status(Phase::Cancelled, None))]).await.unwrap();
    assert_eq!(lab.server.state.store.run(runs[0].id).await.unwrap().unwrap().head.state, rlm_core::run::RunState::Queued);
}

#[tokio::test]
async fn only_errored_rows_are_retried_with_their_seeds() {
    for lab in labs().await {
        let id = lab.submit(&request("retry", 4)).await;
        let retries = format!("/v1/evaluations/{id}/retries");
        lab.server.post(&lab.token, &retries, &json!({})).await.refused("conflict");
        lab.play(id, |row| if row.row % 3 == 0 { errored("crashed") } else { deterministic(row) }).await;
        assert_eq!(lab.status(id).await, "failed");
        let before: Vec<String> =
            export(&lab, id, "jsonl").await.lines().filter(|line| line.contains("\"scored\"")).map(str::to_owned).collect();
        let answer = lab.server.post(&lab.token, &retries, &json!({})).await.ok();
        assert_eq!((&answer["status"], &answer["progress"]["erroredEpisodes"]), (&json!("running"), &json!(0)));
        lab.server.post(&lab.token, &retries, &json!({})).await.refused("conflict");
        let again = lab.lease(id).await;
        let rows: std::collections::BTreeSet<u64> = again.iter().flat_map(|run| run.rows.iter().map(|row| row.row)).collect();
        assert_eq!(rows, (0..16).filter(|row| row % 3 == 0).collect());
        for run in &again {
            let mut payloads: Vec<_> = run.rows.iter().map(|row| (run.id, run.generation, episode(row, 0, deterministic(row)))).collect();
            payloads.push((run.id, run.generation, status(Phase::Finished, None)));
            lab.send(payloads).await.unwrap();
        }
        assert_eq!(lab.status(id).await, "completed");
        let after = export(&lab, id, "jsonl").await;
        assert!(before.iter().all(|line| after.contains(line)), "scored rows stay as they were");
        // The same as if nothing had gone wrong.
        let calm = lab.submit(&request("calm", 4)).await;
        lab.play(calm, deterministic).await;
        assert_eq!(after, export(&lab, calm, "jsonl").await);
        lab.server.post(&lab.token, &retries, &json!({})).await.refused("conflict");
    }
}

#[tokio::test]
async fn an_extension_appends_rows_and_changes_none() {
    for lab in labs().await {
        let id = lab.submit(&request("longer", 2)).await;
        lab.play(id, deterministic).await;
        let before = export(&lab, id, "jsonl").await;
        let extensions = format!("/v1/evaluations/{id}/extensions");
        for bad in
            [json!({"episodes": 0}), json!({}), json!({"episodes": -1}), json!({"episodes": 1_000_000}), json!({"episodes": 1, "x": 1})]
        {
            lab.server.post(&lab.token, &extensions, &bad).await.refused("invalid_request");
        }
        let answer = lab.server.post(&lab.token, &extensions, &json!({"episodes": 3})).await.ok();
        assert_eq!((&answer["status"], &answer["progress"]["totalEpisodes"]), (&json!("running"), &json!(20)));
        lab.play(id, deterministic).await;
        assert_eq!(lab.status(id).await, "completed");
        let after = export(&lab, id, "jsonl").await;
        assert!(after.starts_with(&before));
        // The same rows as one evaluation of five episodes, in another order.
        let whole = lab.submit(&request("whole", 5)).await;
        lab.play(whole, deterministic).await;
        let rows = |text: &str| {
            let mut rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            for row in &mut rows {
                row["row"] = Value::Null;
            }
            rows.sort_by_key(ToString::to_string);
            rows
        };
        assert_eq!(rows(&after), rows(&export(&lab, whole, "jsonl").await));
    }
    let lab = Lab::start().await;
    let mut seeded = request("seeded", 2);
    seeded["tasks"][0]["seeds"] = json!([5, 9]);
    let id = lab.submit(&seeded).await;
    lab.server.post(&lab.token, &format!("/v1/evaluations/{id}/extensions"), &json!({"episodes": 1})).await.refused("invalid_request");
}

#[tokio::test]
async fn a_clone_has_the_same_rows() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("original", 2)).await;
    lab.play(id, deterministic).await;
    let clones = format!("/v1/evaluations/{id}/clones");
    let body = json!({"name": "copy", "clientToken": "c"});
    let made = lab.server.post(&lab.token, &clones, &body).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let copy: rlm_core::ids::EvaluationId = made.body["id"].as_str().unwrap().parse().unwrap();
    assert_eq!(lab.server.post(&lab.token, &clones, &body).await.ok()["id"], made.body["id"]);
    lab.server.post(&lab.token, &clones, &json!({"name": "x", "clientToken": "c"})).await.refused("idempotency_mismatch");
    lab.play(copy, deterministic).await;
    assert_eq!(export(&lab, copy, "csv").await, export(&lab, id, "csv").await);
    assert_eq!(lab.get(&format!("/v1/evaluations/{copy}")).await["name"], "copy");
    for bad in [
        json!({"name": ""}),
        json!({"cluster": "cl_x"}),
        json!({"cluster": rlm_core::ids::ClusterId::generate().to_string()}),
        json!({"colour": 1}),
    ] {
        lab.server.post(&lab.token, &clones, &bad).await.refused("invalid_request");
    }
    let pinned = lab.server.post(&lab.token, &clones, &json!({"cluster": lab.cluster.to_string()})).await.ok();
    let detail = lab.get(&format!("/v1/evaluations/{}", pinned["id"].as_str().unwrap())).await;
    assert_eq!(detail["cluster"], lab.cluster.to_string());
}

#[tokio::test]
async fn deleting_hides_at_once_and_removes_after_a_week() {
    for lab in labs().await {
        let mut tokened = request("gone", 1);
        tokened["clientToken"] = json!("again");
        let id = lab.submit(&tokened).await;
        let path = format!("/v1/evaluations/{id}");
        lab.server.delete(&lab.token, &path).await.refused("conflict");
        lab.play(id, |row| if row.row == 0 { errored("x") } else { deterministic(row) }).await;
        assert_eq!(lab.server.delete(&lab.token, &path).await.status, StatusCode::NO_CONTENT);
        for path in [path.clone(), format!("{path}/rows"), format!("{path}/scores"), format!("{path}/export")] {
            lab.server.get(&lab.token, &path).await.refused("not_found");
        }
        assert_eq!(lab.get("/v1/evaluations").await["items"], json!([]));
        assert_ne!(lab.submit(&tokened).await, id, "the token is free again");
        assert_eq!(purge_deleted(&lab.server.state).await.unwrap(), 0);
        lab.server.advance(Duration::from_secs(8 * 24 * 3600));
        assert_eq!(purge_deleted(&lab.server.state).await.unwrap(), 1);
        assert!(lab.server.state.store.cell_sums(id).await.unwrap().is_empty());
        assert!(lab.server.state.store.run_heads(id, 10).await.unwrap().is_empty());
        assert_eq!(purge_deleted(&lab.server.state).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn nothing_of_another_organization_is_there() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("mine", 1)).await;
    let stranger = lab.server.organization("strangers").await;
    let key = lab.server.key(&stranger).await;
    let path = format!("/v1/evaluations/{id}");
    for rest in ["", "?wait=1", "/scores", "/metrics", "/rows", "/rows/0", "/rows/0/reproduction", "/export", "/events", "/logs"] {
        lab.server.get(&key, &format!("{path}{rest}")).await.refused("not_found");
    }
    for (rest, body) in
        [("/cancellations", json!({})), ("/retries", json!({})), ("/extensions", json!({"episodes": 1})), ("/clones", json!({}))]
    {
        lab.server.post(&key, &format!("{path}{rest}"), &body).await.refused("not_found");
    }
    lab.server.patch(&key, &path, &json!({"name": "theirs"})).await.refused("not_found");
    lab.server.delete(&key, &path).await.refused("not_found");
    assert_eq!(lab.server.get(&key, "/v1/evaluations").await.ok()["items"], json!([]));
    assert_eq!(lab.get(&path).await["name"], "mine");
    for nonsense in ["eval_x", "nonsense", "run_01h455vb4pex5vsknk084sn02q"] {
        lab.server.get(&lab.token, &format!("/v1/evaluations/{nonsense}")).await.refused("not_found");
    }
}

#[tokio::test]
async fn waiting_for_the_end_answers_when_it_comes() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("waited", 1)).await;
    let started = std::time::Instant::now();
    assert_eq!(lab.get(&format!("/v1/evaluations/{id}?wait=1")).await["status"], "queued");
    assert!(started.elapsed() >= Duration::from_secs(1));
    let path = format!("/v1/evaluations/{id}?wait=20");
    let (waited, ()) = tokio::join!(lab.get(&path), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        lab.play(id, deterministic).await;
    });
    assert_ne!(waited["status"], "queued");
    assert!(started.elapsed() < Duration::from_secs(15));
    assert_eq!(lab.get(&format!("/v1/evaluations/{id}?wait=20")).await["status"], "completed");
    lab.server.get(&lab.token, &format!("/v1/evaluations/{id}?wait=61")).await.refused("bad_request");
}

#[tokio::test]
async fn what_is_deleted_meanwhile_is_not_changed() {
    for lab in labs().await {
        for (method, path, body) in [
            (Method::POST, "/cancellations", json!({})),
            (Method::POST, "/retries", json!({})),
            (Method::POST, "/extensions", json!({"episodes": 1})),
            (Method::PATCH, "", json!({"name": "new"})),
            (Method::DELETE, "", json!({})),
        ] {
            let id = lab.submit(&request("brief", 1)).await;
            let mut write = lab.server.state.store.write().await.unwrap();
            // The request finds the evaluation, then waits for its lock.
            write.delete_evaluation(id, 1).await.unwrap();
            let deleting = async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                write.commit().await.unwrap();
            };
            let sent = lab.server.request(method, &format!("/v1/evaluations/{id}{path}")).bearer_auth(&lab.token).json(&body);
            let (answer, ()) = tokio::join!(lab.server.send(sent), deleting);
            assert!(answer.refused("not_found").message().contains("was deleted"), "{path}");
        }
    }
}

#[tokio::test]
async fn tags_are_changed_to_what_a_request_may_have() {
    let lab = Lab::start().await;
    let path = format!("/v1/evaluations/{}", lab.submit(&request("tagged", 1)).await);
    let many =
        |count: u32| -> Value { (0..count).map(|number| (format!("t{number}"), json!("x"))).collect::<serde_json::Map<_, _>>().into() };
    for (tags, fine) in [
        (many(64), true),
        (many(65), false),
        (json!({"a": "v".repeat(256)}), true),
        (json!({"a": "v".repeat(257)}), false),
        (json!({"k".repeat(64): "v"}), true),
        (json!({"k".repeat(65): "v"}), false),
        (json!({"white space": "v"}), false),
    ] {
        let mut whole = request("tagged", 1);
        whole["tags"] = tags.clone();
        assert_eq!(lab.server.post(&lab.token, "/v1/evaluation-previews", &whole).await.status.is_success(), fine, "{tags}");
        assert_eq!(lab.server.patch(&lab.token, &path, &json!({"tags": tags})).await.status.is_success(), fine, "{tags}");
    }
}

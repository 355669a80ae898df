//! Rows, scores, exports, imports, event streams.

use std::time::Duration;

use futures::StreamExt as _;
use reqwest::{Method, StatusCode};
use rlm_core::rows::Row;
use serde_json::{Value, json};

use super::{Lab, deterministic, episode, errored, export, request, scored, status};
use crate::common::{TestServer, postgres_url};
use rlm_api::cluster::v1::run_status::Phase;

async fn labs() -> Vec<Lab> {
    let mut labs = vec![Lab::start().await];
    if let Some(url) = postgres_url().await {
        labs.push(Lab::on(TestServer::with(|config| config.database_url = url).await).await);
    }
    labs
}

fn numbers(page: &Value) -> Vec<u64> {
    page["items"].as_array().unwrap().iter().map(|row| row["row"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn rows_are_paged_and_filtered() {
    for lab in labs().await {
        let id = lab.submit(&request("rows", 5)).await;
        let path = format!("/v1/evaluations/{id}/rows");
        let run = lab.lease(id).await.remove(0);
        // Of model a's ten rows: seven scored, one errored, two open.
        let mut payloads: Vec<_> = run.rows[..7].iter().map(|row| (run.id, 1, episode(row, 0, deterministic(row)))).collect();
        payloads.push((run.id, 1, episode(&run.rows[7], 3, errored("crashed"))));
        lab.send(payloads).await.unwrap();
        let all = lab.get(&path).await;
        assert_eq!(numbers(&all), (0..20).collect::<Vec<_>>());
        assert!(all["nextCursor"].is_null());
        let mut seen = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let page = lab.get(&format!("{path}?limit=3&cursor={cursor}")).await;
            seen.extend(numbers(&page));
            match page["nextCursor"].as_str() {
                Some(next) => cursor = next.to_owned(),
                None => break,
            }
        }
        assert_eq!(seen, (0..20).collect::<Vec<_>>());
        let finished: Vec<u64> = run.rows[..8].iter().map(|row| row.row).collect();
        let open: Vec<u64> = (0..20).filter(|row| !finished.contains(row)).collect();
        assert_eq!(numbers(&lab.get(&format!("{path}?outcome=scored")).await), finished[..7]);
        assert_eq!(numbers(&lab.get(&format!("{path}?outcome=errored")).await), finished[7..]);
        let pending = lab.get(&format!("{path}?outcome=pending&limit=4")).await;
        assert_eq!(numbers(&pending), open[..4]);
        let rest = lab.get(&format!("{path}?outcome=pending&cursor={}", pending["nextCursor"].as_str().unwrap())).await;
        assert_eq!(numbers(&rest), open[4..]);
        for outcome in ["", "&outcome=scored", "&outcome=errored", "&outcome=pending"] {
            let page = lab.get(&format!("{path}?model=b&task=walk/1{outcome}")).await;
            assert!(page["items"].as_array().unwrap().iter().all(|row| row["model"] == "b" && row["taskId"] == "walk/1"), "{page}");
        }
        assert_eq!(lab.get(&format!("{path}?model=b&task=env:walk/1&limit=2")).await["items"].as_array().unwrap().len(), 2);
        assert_eq!(numbers(&lab.get(&format!("{path}?cursor=999")).await), Vec::<u64>::new());
        for query in ["limit=0", "limit=1001", "outcome=won", "model=z", "task=z", "cursor=x", "colour=red"] {
            lab.server.get(&lab.token, &format!("{path}?{query}")).await.refused("bad_request");
        }
        let errored = lab.get(&format!("{path}/{}", finished[7])).await;
        assert_eq!(
            (&errored["outcome"], &errored["attempts"], &errored["history"][0]["attempt"]),
            (&json!("errored"), &json!(1), &json!(3))
        );
        assert_eq!(errored["history"][0]["episode"]["failure"]["component"], "env-0-0");
        let scored = lab.get(&format!("{path}/{}", finished[0])).await;
        assert_eq!((&scored["attempts"], &scored["history"][0]["counts"], &scored["durationMs"]), (&json!(1), &json!(true), &json!(500)));
        assert_eq!(scored["firstObservationSha256"], "010203");
        let pending = lab.get(&format!("{path}/19")).await;
        assert_eq!((&pending["outcome"], &pending["history"], &pending["seed"]), (&json!("pending"), &json!([]), &json!(204)));
        lab.server.get(&lab.token, &format!("{path}/20")).await.refused("not_found");
        lab.server.get(&lab.token, &format!("{path}/-1")).await.refused("not_found");
    }
}

#[tokio::test]
async fn scores_by_each_group() {
    for lab in labs().await {
        let id = lab.submit(&request("scores", 40)).await;
        // Model b always succeeds, a never does.
        lab.play(id, |row| scored(f64::from(row.model) + (row.seed % 2) as f64, Some(row.model == 1))).await;
        let scores = |by: &str| format!("/v1/evaluations/{id}/scores{by}");
        let by_task = lab.get(&scores("")).await;
        assert_eq!((&by_task["groupBy"], by_task["groups"].as_array().unwrap().len()), (&json!("task"), 4));
        let group = &by_task["groups"][0];
        assert_eq!(
            (&group["key"], &group["model"], &group["episodes"], &group["successRate"]),
            (&json!("walk/0"), &json!("a"), &json!(40), &json!(0.0))
        );
        assert!(group["successInterval"][1].as_f64().unwrap() > 0.0 && group["rewardInterval"][0].as_f64().unwrap() < 0.5);
        assert_eq!((&group["meanReward"], &group["meanSteps"], &group["totalSteps"]), (&json!(0.5), &json!(10.0), &json!(400)));
        assert_eq!(by_task["groups"][2]["successRule"], "reward at least 3");
        for (by, keys) in [
            ("scenario", vec!["walk", "walk"]),
            ("model", vec!["a", "b"]),
            ("benchmark", vec!["walk", "walk", "none", "none"]),
            ("perturbation", vec!["none", "none"]),
        ] {
            let grouped = lab.get(&scores(&format!("?groupBy={by}"))).await;
            let found: Vec<&str> = grouped["groups"].as_array().unwrap().iter().map(|group| group["key"].as_str().unwrap()).collect();
            assert_eq!(found, keys, "{by}");
        }
        let comparisons = by_task["comparisons"].as_array().unwrap();
        assert_eq!(comparisons.len(), 3, "overall and per task");
        assert_eq!(
            (&comparisons[0]["baseline"], &comparisons[0]["candidate"], &comparisons[0]["result"]["pairs"]),
            (&json!("a"), &json!("b"), &json!(80))
        );
        assert_eq!(comparisons[0]["result"]["verdict"], "better");
        assert!(comparisons[0]["adjustedP"].is_null() && comparisons[1]["adjustedP"].as_f64().unwrap() < 0.001);
        lab.server.get(&lab.token, &scores("?groupBy=colour")).await.refused("bad_request");
        let unfinished = lab.submit(&request("unfinished", 3)).await;
        let empty = lab.get(&format!("/v1/evaluations/{unfinished}/scores")).await;
        assert_eq!(
            (&empty["groups"][0]["pending"], &empty["groups"][0]["successRate"], &empty["groups"][0]["meanReward"]),
            (&json!(3), &Value::Null, &Value::Null)
        );
    }
}

#[tokio::test]
async fn scores_follow_the_rows() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("following", 2)).await;
    let path = format!("/v1/evaluations/{id}/scores?groupBy=model");
    assert_eq!(lab.get(&path).await["groups"][0]["scored"], 0);
    lab.play(id, |row| if row.row == 0 { errored("x") } else { deterministic(row) }).await;
    // An evaluation that has ended has no scores of a moment ago.
    let groups = lab.get(&path).await["groups"].clone();
    let pending = lab.get(&format!("/v1/evaluations/{id}/rows?outcome=pending")).await;
    assert_eq!(pending, json!({"items": [], "nextCursor": null}));
    assert_eq!((&groups[0]["scored"], &groups[0]["errored"], &groups[1]["scored"]), (&json!(3), &json!(1), &json!(4)));
    let bounds = &groups[0]["successBounds"];
    assert!(bounds[1].as_f64().unwrap() - bounds[0].as_f64().unwrap() > 0.24, "one row of four is unknown: {bounds}");
}

#[tokio::test]
async fn exports_hold_what_is_a_function_of_the_rows() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("export", 3)).await;
    lab.play(id, |row| if row.row == 4 { errored("at 12:00:00") } else { deterministic(row) }).await;
    let jsonl = export(&lab, id, "jsonl").await;
    assert_eq!(jsonl.lines().count(), 12);
    let line: Value = serde_json::from_str(jsonl.lines().nth(4).unwrap()).unwrap();
    assert_eq!((&line["outcome"], &line["failureCode"], &line["seed"]), (&json!("errored"), &json!("environment_crashed"), &json!(101)));
    assert!(!jsonl.contains("12:00:00") && !jsonl.contains("startedAt") && !jsonl.contains("attempt"));
    let csv = export(&lab, id, "csv").await;
    assert_eq!(csv.lines().count(), 13);
    assert!(csv.lines().nth(1).unwrap().starts_with("0,a,env,walk/0,0,100,0,scored,2.0,10,true,false,false,010203,0,,"), "{csv}");
    let answer = lab.server.get(&lab.token, &format!("/v1/evaluations/{id}/export?format=csv")).await;
    assert_eq!(answer.headers["content-type"], "text/csv; charset=utf-8");
    assert!(answer.headers["content-disposition"].to_str().unwrap().contains(&format!("{id}.csv")));
    lab.server.get(&lab.token, &format!("/v1/evaluations/{id}/export?format=xml")).await.refused("bad_request");
}

#[tokio::test]
async fn a_result_file_goes_out_and_comes_back() {
    for lab in labs().await {
        let id = lab.submit(&request("there", 3)).await;
        lab.play(id, |row| match row.row {
            4 => errored("x"),
            5 => scored(1.25, None),
            _ => deterministic(row),
        })
        .await;
        let file: Value = serde_json::from_str(&export(&lab, id, "result").await).unwrap();
        assert_eq!((&file["schema"], file["workloads"].as_array().unwrap().len()), (&json!("rlmesh.result.v1"), 4));
        let errored = &file["workloads"][1];
        assert_eq!(
            (&errored["numEpisodes"], &errored["config"]["erroredEpisodes"], &errored["metrics"]["successRate"]),
            (&json!(2), &json!(1), &Value::Null)
        );
        assert_eq!(errored["episodes"][0]["index"], 0);
        assert_eq!(file["workloads"][0]["metrics"]["totalSteps"], 30);
        let made = lab.server.post(&lab.token, "/v1/evaluations/imports?name=back", &file).await;
        assert_eq!((made.status, &made.body["status"]), (StatusCode::CREATED, &json!("completed")), "{}", made.text);
        let back = made.body["id"].as_str().unwrap().to_owned();
        let again = lab.server.post(&lab.token, "/v1/evaluations/imports", &file).await;
        assert_eq!((again.status, &again.body["id"]), (StatusCode::OK, &json!(back)));
        let mut other = file.clone();
        other["workloads"][0]["episodes"][0]["reward"] = json!(-7.0);
        lab.server.post(&lab.token, "/v1/evaluations/imports", &other).await.refused("idempotency_mismatch");
        let again: Value = serde_json::from_str(&export(&lab, back.parse().unwrap(), "result").await).unwrap();
        for (there, here) in file["workloads"].as_array().unwrap().iter().zip(again["workloads"].as_array().unwrap()) {
            for said in ["params", "seed", "successRule", "maxEpisodeSteps", "trialIndexBase", "executionHorizon"] {
                assert_eq!(here["config"][said], there["config"][said], "{said}");
            }
        }
        assert_eq!(again["workloads"][2]["config"]["successRule"], json!({"metric": "reward", "atLeast": 3.0}));
        let detail = lab.get(&format!("/v1/evaluations/{back}")).await;
        assert_eq!((&detail["name"], &detail["progress"]["completedEpisodes"]), (&json!("back"), &json!(11)));
        let values = |text: &str| {
            let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).filter(|row| row["outcome"] == "scored");
            let mut rows: Vec<String> = rows
                .map(|row| json!([row["model"], row["taskId"], row["seed"], row["reward"], row["steps"], row["success"]]).to_string())
                .collect();
            rows.sort();
            rows
        };
        assert_eq!(values(&export(&lab, id, "jsonl").await), values(&export(&lab, back.parse().unwrap(), "jsonl").await));
        let theirs = lab.get(&format!("/v1/evaluations/{back}/scores?groupBy=model")).await;
        assert_eq!(
            theirs["groups"][1]["successes"],
            lab.get(&format!("/v1/evaluations/{id}/scores?groupBy=model")).await["groups"][1]["successes"]
        );
        for change in ["retries", "clones"] {
            lab.server.post(&lab.token, &format!("/v1/evaluations/{back}/{change}"), &json!({})).await.refused("conflict");
        }
        lab.server.get(&lab.token, &format!("/v1/evaluations/{back}/rows/0/reproduction")).await.refused("conflict");
        lab.server.delete(&lab.token, &format!("/v1/evaluations/{back}")).await;
        assert_eq!(
            lab.server.post(&lab.token, "/v1/evaluations/imports", &file).await.status,
            StatusCode::CREATED,
            "a deleted import can be made again"
        );
    }
}

#[tokio::test]
async fn result_files_that_are_none_are_refused() {
    let lab = Lab::start().await;
    let episode = json!({"index": 0, "seed": null, "steps": 3, "reward": 1.0, "terminated": true, "truncated": false, "success": null, "durationS": 0.1, "includedInMetrics": true});
    let file = |episodes: Value| json!({"schema": "rlmesh.result.v1", "resultSetId": "s", "recordedAt": "2026-01-01T00:00:00Z", "workloads": [{"model": "m", "env": "e", "episodes": episodes}]});
    let mut negative = episode.clone();
    negative["seed"] = json!(-1);
    let mut other = file(json!([episode]));
    other["schema"] = json!("rlmesh.result.v2");
    for bad in [
        json!({}),
        json!([]),
        other,
        file(json!([])),
        file(json!([negative])),
        file(json!([episode, episode])),
        file(json!([{"index": 0}])),
    ] {
        lab.server.post(&lab.token, "/v1/evaluations/imports", &bad).await.refused("invalid_request");
    }
    assert_eq!(lab.get("/v1/evaluations").await["items"], json!([]));
    let good = lab.server.post(&lab.token, "/v1/evaluations/imports", &file(json!([episode]))).await.ok();
    assert!(good["warnings"][0].as_str().unwrap().contains("no seed"), "{good}");
}

#[tokio::test]
async fn imported_models_pair_by_what_the_file_calls_their_episodes() {
    let lab = Lab::start().await;
    let episode = |index: u64, reward: f64| json!({"index": index, "seed": null, "steps": 3, "reward": reward, "terminated": true, "truncated": false, "success": reward > 0.0, "durationS": 0.1, "includedInMetrics": true});
    // Model "a" lacks episode 1.
    let file = json!({"schema": "rlmesh.result.v1", "resultSetId": "gap", "recordedAt": "2026-01-01T00:00:00Z", "workloads": [
        {"model": "a", "env": "e", "episodes": [episode(2, 1.0), episode(0, 0.0)]},
        {"model": "b", "env": "e", "episodes": [episode(0, 0.0), episode(1, 0.0), episode(2, 1.0)]},
    ]});
    let id = lab.server.post(&lab.token, "/v1/evaluations/imports", &file).await.ok()["id"].as_str().unwrap().to_owned();
    let rows = lab.get(&format!("/v1/evaluations/{id}/rows")).await;
    let trials: Vec<u64> = rows["items"].as_array().unwrap().iter().map(|row| row["trial"].as_u64().unwrap()).collect();
    assert_eq!(trials, [0, 2, 0, 1, 2]);
    let scores = lab.get(&format!("/v1/evaluations/{id}/scores")).await;
    let result = &scores["comparisons"][0]["result"];
    assert_eq!((&result["pairs"], &result["leftOut"]), (&json!(2), &json!(1)), "{scores}");
    let table = &result["success"]["table"];
    assert_eq!((&table["both"], &table["neither"]), (&json!(1), &json!(1)), "{scores}");
    let mut far = file;
    far["resultSetId"] = json!("far");
    far["workloads"][0]["episodes"][0]["index"] = json!(1_u64 << 40);
    lab.server.post(&lab.token, "/v1/evaluations/imports", &far).await.refused("invalid_request");
}

#[tokio::test]
async fn nobodys_metadata_makes_an_evaluation_an_imported_one() {
    let lab = Lab::start().await;
    let mut marked = request("marked", 1);
    marked["metadata"] = json!({"importedResultSet": "x"});
    let id = lab.submit(&marked).await;
    lab.play(id, deterministic).await;
    lab.server.post(&lab.token, &format!("/v1/evaluations/{id}/extensions"), &json!({"episodes": 1})).await.ok();
}

#[tokio::test]
async fn a_row_can_be_reproduced() {
    let lab = Lab::start().await;
    let mut one = request("again", 2);
    one["models"][0] = json!({"id": "a", "entrypoint": "policies:It's", "pythonPath": "/tmp/a b", "python": "/usr/bin/python3", "executionHorizon": 1, "params": {"k": "it's"}});
    one["models"][0]["entrypoint"] = json!("policies:Push");
    one["environments"][0] = json!({"id": "env", "entrypoint": "envs:Walk", "pythonPath": "/tmp/e"});
    one["tasks"][0]["maxEpisodeSteps"] = json!(60);
    let id = lab.submit(&one).await;
    let found = lab.get(&format!("/v1/evaluations/{id}/rows/1/reproduction")).await;
    assert_eq!((&found["model"], &found["seed"], &found["trialIndex"]), (&json!("a"), &json!(101), &json!(1)));
    let command = found["command"].as_str().unwrap();
    for part in ["-m rlmesh.serve policies:Push", "--env envs:Walk", "seeds=[101]", "max_episode_steps=60", "trial_index_base=1"] {
        assert!(command.contains(part), "{part} in {command}");
    }
    // Bash takes it as one command.
    let parsed = std::process::Command::new("bash").args(["-n", "-c", command]).status().unwrap();
    assert!(parsed.success(), "{command}");
    // The request in it is one that can be submitted, and has that one row.
    let alone = lab.server.post(&lab.token, "/v1/evaluations", &found["request"]).await;
    assert_eq!(alone.status, StatusCode::CREATED, "{}", alone.text);
    let row = lab.get(&format!("/v1/evaluations/{}/rows", alone.body["id"].as_str().unwrap())).await;
    assert_eq!(
        (row["items"].as_array().unwrap().len(), &row["items"][0]["seed"], &row["items"][0]["trialIndex"]),
        (1, &json!(101), &json!(1))
    );
    lab.server.get(&lab.token, &format!("/v1/evaluations/{id}/rows/99/reproduction")).await.refused("not_found");
}

#[tokio::test]
async fn changes_are_streamed_until_the_end() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("streamed", 2)).await;
    let stream = |last: Option<String>| {
        let mut sent = lab.server.request(Method::GET, &format!("/v1/evaluations/{id}/events")).bearer_auth(&lab.token);
        if let Some(last) = last {
            sent = sent.header("Last-Event-ID", last);
        }
        sent.send()
    };
    let answer = stream(None).await.unwrap();
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let (text, ()) = tokio::join!(
        async {
            let mut parts = answer.bytes_stream();
            let mut text = String::new();
            while let Some(part) = parts.next().await {
                text.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
            }
            text
        },
        async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let runs = lab.lease(id).await;
            let first: Row = runs[0].rows[0];
            lab.send(vec![(runs[0].id, 1, episode(&first, 0, deterministic(&first)))]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(600)).await;
            for run in runs {
                let mut rest: Vec<_> = run.rows.iter().map(|row| (run.id, 1, episode(row, 0, deterministic(row)))).collect();
                rest.push((run.id, 1, status(Phase::Finished, None)));
                lab.send(rest).await.unwrap();
            }
        }
    );
    let events: Vec<Value> =
        text.lines().filter_map(|line| line.strip_prefix("data: ")).map(|data| serde_json::from_str(data).unwrap()).collect();
    assert!(events.len() >= 3, "{text}");
    assert_eq!((&events[0]["status"], &events[events.len() - 1]["status"]), (&json!("queued"), &json!("completed")));
    assert!(events.iter().any(|event| event["progress"]["completedEpisodes"] == 1), "{text}");
    // Whoever has the last event gets none.
    let last = text.lines().filter_map(|line| line.strip_prefix("id: ")).next_back().unwrap().to_owned();
    assert_eq!(stream(Some(last)).await.unwrap().text().await.unwrap(), "");
    assert!(stream(Some("older".to_owned())).await.unwrap().text().await.unwrap().contains("completed"));
}

#[tokio::test]
async fn logs_come_from_the_cluster_that_holds_the_run() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("logs", 1)).await;
    let path = format!("/v1/evaluations/{id}/logs");
    lab.server.get(&lab.token, &path).await.refused("conflict");
    lab.server.get(&lab.token, &format!("{path}?tailLines=0")).await.refused("bad_request");
    lab.server.get(&lab.token, &format!("{path}?run={}", rlm_core::ids::RunId::generate())).await.refused("not_found");
    lab.lease(id).await;
    // No agent of the cluster is connected to this process.
    lab.server.get(&lab.token, &path).await.refused("cluster_disconnected");
}

#[tokio::test]
async fn an_event_stream_ends_with_its_credential() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("watched", 1)).await;
    let refresh = lab.server.refresh_token(&lab.owner).await;
    let access = lab.server.refresh(&refresh, &[]).await.ok()["access_token"].as_str().unwrap().to_owned();
    let request = lab.server.request(Method::GET, &format!("/v1/evaluations/{id}/events")).bearer_auth(&access);
    let mut stream = request.send().await.unwrap();
    assert!(stream.chunk().await.unwrap().is_some());
    lab.server.delete(&access, "/v1/me/session").await;
    let rest = async { while stream.chunk().await.unwrap().is_some() {} };
    tokio::time::timeout(Duration::from_secs(10), rest).await.expect("the stream ends");
}

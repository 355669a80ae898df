//! Agents' records: whatever order they come in, however often, of whichever generation, the outcomes are the same.

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use rlm_api::cluster::v1::{self, record::Payload, run_status::Phase};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;
use rlm_server::app::ingest;
use serde_json::json;

use super::{INSTANCE, Lab, cluster, counts, deterministic, episode, errored, export, numbered, request, scored, status};
use crate::common::{TestServer, postgres_url};

/// A lab on SQLite, and one on PostgreSQL where there is one.
async fn labs() -> Vec<Lab> {
    let mut labs = vec![Lab::start().await];
    if let Some(url) = postgres_url().await {
        labs.push(Lab::on(TestServer::with(|config| config.database_url = url).await).await);
    }
    labs
}

fn sample<T: std::fmt::Debug>(runner: &mut TestRunner, strategy: impl Strategy<Value = T>) -> T {
    strategy.new_tree(runner).unwrap().current()
}

#[tokio::test]
async fn a_run_to_its_end() {
    for lab in labs().await {
        let id = lab.submit(&request("whole", 3)).await;
        assert_eq!(lab.status(id).await, "queued");
        lab.play(id, deterministic).await;
        assert_eq!(lab.status(id).await, "completed");
        assert_eq!(counts(&lab, id).await["scored"], (12, 12));
        let detail = lab.get(&format!("/v1/evaluations/{id}")).await;
        assert_eq!(detail["progress"], json!({"completedEpisodes": 12, "totalEpisodes": 12, "scoredEpisodes": 12, "erroredEpisodes": 0}));
        assert!(detail["runs"].as_array().unwrap().iter().all(|run| run["state"] == "finished"), "{}", detail["runs"]);
        assert!(!detail["startedAt"].is_null() && !detail["finishedAt"].is_null() && detail["waiting"].is_null());
    }
}

#[tokio::test]
async fn agents_and_people_at_once_never_wait_for_each_other() {
    for lab in labs().await {
        let lab = &lab;
        let ids = [lab.submit(&request("one", 40)).await, lab.submit(&request("two", 40)).await];
        let mut per_row = Vec::new();
        for (round, id) in ids.iter().enumerate() {
            for run in lab.lease(*id).await {
                per_row.extend(run.rows.iter().map(|row| (row.row, round, (run.id, run.generation, episode(row, 0, deterministic(row))))));
            }
        }
        per_row.sort_by_key(|(row, round, _)| (*row, *round));
        // Four agents, each with rows of both evaluations in every batch; two of them with the second evaluation's first.
        let agents = (0..4).map(|agent| {
            let mut mine: Vec<_> = per_row.iter().filter(|(row, ..)| row % 4 == agent).cloned().collect();
            if agent % 2 == 1 {
                mine.chunks_mut(2).for_each(|pair| pair.reverse());
            }
            async move {
                let cluster = cluster(&lab.server, &lab.owner, &format!("cell-{agent}")).await;
                let mut first = 1;
                for part in mine.chunks(8) {
                    let batch = numbered(first, part.iter().map(|(.., payload)| payload.clone()).collect());
                    first += part.len() as u64;
                    ingest::records(&lab.server.state, &cluster, INSTANCE, batch).await.unwrap();
                }
            }
        });
        let extended = async {
            for _ in 0..8 {
                for id in ids {
                    lab.server.post(&lab.token, &format!("/v1/evaluations/{id}/extensions"), &json!({"episodes": 1})).await.ok();
                }
            }
        };
        let cancelled = async {
            for round in 0..8 {
                let id = lab.submit(&request(&format!("short {round}"), 2)).await;
                lab.server.post(&lab.token, &format!("/v1/evaluations/{id}/cancellations"), &json!({})).await.ok();
            }
        };
        futures::join!(futures::future::join_all(agents), extended, cancelled);
        for id in ids {
            assert_eq!(counts(lab, id).await["scored"], (160, 160));
            lab.play(id, deterministic).await;
            assert_eq!(counts(lab, id).await["scored"], (192, 192));
        }
    }
}

#[tokio::test]
async fn any_order_repetition_and_generation_give_the_same_rows() {
    for lab in labs().await {
        let calm = lab.submit(&request("calm", 8)).await;
        lab.play(calm, deterministic).await;
        let expected = export(&lab, calm, "jsonl").await;
        let mut runner = TestRunner::deterministic();
        for round in 0..6 {
            let id = lab.submit(&request(&format!("round {round}"), 8)).await;
            // Two generations of each run: the first lease was given up.
            let first = lab.lease(id).await;
            let mut write = lab.server.state.store.write().await.unwrap();
            for run in &first {
                let mut run = write.lock_run(run.id).await.unwrap().unwrap();
                run.head.state = rlm_core::run::RunState::Queued;
                run.head.cluster = None;
                write.save_run(&run.head).await.unwrap();
            }
            write.commit().await.unwrap();
            let second = lab.lease(id).await;
            assert!(second.iter().all(|run| run.generation == 2));
            // Every row once scored in either generation, with errored attempts and repeats between.
            let mut payloads: Vec<(RunId, u64, Payload)> = Vec::new();
            for (run, again) in first.iter().zip(&second) {
                for row in &run.rows {
                    let score = if row.row % 3 == 0 { (run.id, 1) } else { (again.id, 2) };
                    payloads.push((score.0, score.1, episode(row, 1, deterministic(row))));
                    payloads.push((again.id, 2, episode(row, 0, errored("first try"))));
                    if row.row % 2 == 0 {
                        payloads.push((score.0, score.1, episode(row, 1, deterministic(row))));
                    }
                    if row.row % 5 == 0 {
                        payloads.push((run.id, 1, episode(row, 0, errored("of old"))));
                    }
                }
            }
            let mut payloads = sample(&mut runner, Just(payloads).prop_shuffle());
            while !payloads.is_empty() {
                let size = sample(&mut runner, 1_usize..40).min(payloads.len());
                lab.send(payloads.drain(..size).collect()).await.unwrap();
                for (name, (counter, count)) in counts(&lab, id).await {
                    assert_eq!(counter, count, "{name} in round {round}");
                }
            }
            assert_eq!(lab.status(id).await, "running", "clusters hold its runs");
            lab.send(second.iter().map(|run| (run.id, 2, status(Phase::Finished, None))).collect()).await.unwrap();
            assert_eq!(lab.status(id).await, "completed");
            assert_eq!(export(&lab, id, "jsonl").await, expected, "round {round}");
        }
    }
}

#[tokio::test]
async fn records_are_taken_once_and_without_gaps() {
    for lab in labs().await {
        let id = lab.submit(&request("gaps", 2)).await;
        let run = lab.lease(id).await.remove(0);
        let take = |at: usize| (run.id, run.generation, episode(&run.rows[at], 0, scored(1.0, None)));
        assert_eq!(lab.send_at(1, vec![take(0), take(1)]).await.unwrap(), 2);
        assert_eq!(lab.send_at(1, vec![take(0), take(1)]).await.unwrap(), 2, "known records are skipped");
        assert_eq!(lab.send_at(2, vec![take(1), take(2)]).await.unwrap(), 3, "the new part of a batch is taken");
        assert!(lab.send_at(5, vec![take(3)]).await.is_err(), "a gap");
        assert!(lab.send_at(4, numbers(&[take(3), take(3)])).await.is_ok());
        assert_eq!(counts(&lab, id).await["scored"], (4, 4));
        let store = &lab.server.state.store;
        assert_eq!(store.durable_position(lab.cluster, INSTANCE).await.unwrap(), 5);
        // A server that was restored from a backup gets everything again.
        let mut write = store.write().await.unwrap();
        write.save_position(lab.cluster, INSTANCE, 0).await.unwrap();
        write.commit().await.unwrap();
        let before = export(&lab, id, "jsonl").await;
        assert_eq!(lab.send_at(1, vec![take(0), take(1), take(2), take(3), take(3)]).await.unwrap(), 5);
        assert_eq!(export(&lab, id, "jsonl").await, before);
        assert_eq!(counts(&lab, id).await["scored"], (4, 4));
    }
}

fn numbers<T: Clone>(items: &[T]) -> Vec<T> {
    items.to_vec()
}

#[tokio::test]
async fn a_poisoned_record_does_not_stop_those_behind_it() {
    for lab in labs().await {
        let id = lab.submit(&request("poison", 2)).await;
        let run = lab.lease(id).await.remove(0);
        let good = run.rows[0];
        let stranger = rlm_core::rows::Row { row: 9_999, ..good };
        let wrong_seed = rlm_core::rows::Row { seed: good.seed + 1, ..good };
        let nothing = Payload::Episode(v1::Episode { row: good.row, seed: good.seed, ..Default::default() });
        let batch = vec![
            (run.id, run.generation, episode(&stranger, 0, scored(1.0, None))),
            (run.id, run.generation, episode(&wrong_seed, 0, scored(1.0, None))),
            (run.id, 77, episode(&good, 0, scored(1.0, None))),
            (run.id, run.generation, nothing),
            (RunId::generate(), 1, episode(&good, 0, scored(1.0, None))),
            (run.id, run.generation, Payload::RunMetrics(v1::RunMetrics { metrics_json: "{".to_owned(), at_unix_ms: 1 })),
            (run.id, run.generation, episode(&good, 0, scored(2.0, None))),
        ];
        let mut records = numbered(1, batch);
        records.push(v1::Record { sequence: 8, run_id: "nonsense".to_owned(), generation: 1, payload: None });
        records.push(v1::Record { sequence: 9, run_id: run.id.to_string(), generation: 1, payload: None });
        assert_eq!(ingest::records(&lab.server.state, &lab.cluster, INSTANCE, records).await.unwrap(), 9);
        assert_eq!(counts(&lab, id).await["scored"], (1, 1));
        let rows = lab.get(&format!("/v1/evaluations/{id}/rows?outcome=scored")).await;
        assert_eq!(rows["items"][0]["reward"], 2.0);
    }
}

#[tokio::test]
async fn another_organizations_cluster_changes_nothing() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("mine", 1)).await;
    let run = lab.lease(id).await.remove(0);
    let stranger = lab.server.organization("strangers").await;
    let theirs = cluster(&lab.server, &stranger, "theirs").await;
    let batch = vec![
        (run.id, run.generation, episode(&run.rows[0], 0, scored(1.0, None))),
        (run.id, run.generation, status(Phase::Failed, Some(Failure::new(FailureCode::Internal, "x")))),
    ];
    assert_eq!(ingest::records(&lab.server.state, &theirs, "other", numbered(1, batch)).await.unwrap(), 2);
    assert_eq!(counts(&lab, id).await, [("scored", (0, 0)), ("errored", (0, 0))].into());
    assert_eq!(lab.server.state.store.run(run.id).await.unwrap().unwrap().head.state, rlm_core::run::RunState::Leased);
}

#[tokio::test]
async fn a_failed_run_errors_its_open_rows_and_late_scores_still_count() {
    for lab in labs().await {
        let id = lab.submit(&request("failed", 2)).await;
        let mut runs = lab.lease(id).await;
        let run = runs.remove(0);
        let mut payloads = vec![
            (run.id, run.generation, episode(&run.rows[0], 0, scored(1.0, Some(true)))),
            (
                run.id,
                run.generation,
                status(Phase::Failed, Some(Failure::new(FailureCode::ModelStartFailed, "no such file").of("model-0"))),
            ),
            // In the same batch, behind the failure.
            (run.id, run.generation, episode(&run.rows[1], 0, scored(2.0, Some(true)))),
        ];
        for other in &runs {
            payloads.extend(other.rows.iter().map(|row| (other.id, other.generation, episode(row, 0, scored(0.0, Some(false))))));
            payloads.push((other.id, other.generation, status(Phase::Finished, None)));
        }
        lab.send(payloads).await.unwrap();
        let rows = run.rows.len() as u64;
        assert_eq!(counts(&lab, id).await["errored"], (rows - 2, rows - 2));
        let detail = lab.get(&format!("/v1/evaluations/{id}")).await;
        assert_eq!(detail["status"], "failed");
        assert_eq!(
            (detail["failures"][0]["count"].as_u64(), &detail["failures"][0]["example"]["code"]),
            (Some(rows - 2), &json!("model_start_failed"))
        );
        let state = detail["runs"].as_array().unwrap().iter().find(|one| one["id"] == run.id.to_string()).unwrap();
        assert_eq!((&state["state"], &state["failure"]["message"]), (&json!("failed"), &json!("no such file")));
        // Results that were on their way are in time for the rows, and for the evaluation.
        lab.send(run.rows[2..].iter().map(|row| (run.id, run.generation, episode(row, 0, scored(3.0, Some(true))))).collect())
            .await
            .unwrap();
        assert_eq!(counts(&lab, id).await["errored"], (0, 0));
        assert_eq!(lab.status(id).await, "completed");
    }
}

#[tokio::test]
async fn output_of_a_failure_is_shown_by_its_first_rows_and_by_the_evaluation() {
    for lab in labs().await {
        // The run as a whole fails: its first rows have the output, however many rows there are.
        let id = lab.submit(&request("whole", 60)).await;
        let run = lab.lease(id).await.remove(0);
        let lines = vec!["File \"policies.py\", line 3".to_owned(), "SyntaxError: invalid syntax".to_owned()];
        let broken =
            Failure { log_lines: lines.clone(), ..Failure::new(FailureCode::InvalidEntrypoint, "can't be imported").of("model-0") };
        lab.send(vec![(run.id, run.generation, status(Phase::Failed, Some(broken)))]).await.unwrap();
        let rows = lab.get(&format!("/v1/evaluations/{id}/rows?outcome=errored&limit=1000")).await;
        let with: Vec<bool> = rows["items"].as_array().unwrap().iter().map(|row| row["failure"]["logLines"] == json!(lines)).collect();
        assert_eq!((with.len(), with.iter().filter(|with| **with).count(), with[49], with[50]), (120, 50, true, false));
        let failure = lab.get(&format!("/v1/evaluations/{id}")).await["failures"][0].clone();
        assert_eq!((&failure["example"]["logLines"], &failure["exampleRun"]), (&json!(lines), &json!(run.id.to_string())));
        // Single rows fail the same way: the one that has output is the example.
        let id = lab.submit(&request("single", 2)).await;
        let run = lab.lease(id).await.remove(0);
        let silent = |row: usize| (run.id, run.generation, episode(&run.rows[row], 0, errored("says \"logLines\":[] itself")));
        let told = Failure { log_lines: lines.clone(), ..super::failure("crashed") };
        let told = (run.id, run.generation, episode(&run.rows[2], 0, v1::episode::Outcome::Errored((&told).into())));
        lab.send(vec![silent(0), silent(1), told, silent(3)]).await.unwrap();
        let failure = lab.get(&format!("/v1/evaluations/{id}")).await["failures"][0].clone();
        assert_eq!(
            (&failure["count"], &failure["exampleRow"], &failure["example"]["logLines"]),
            (&json!(4), &json!(run.rows[2].row), &json!(lines))
        );
    }
}

#[tokio::test]
async fn a_run_that_ends_early_goes_on_while_it_brings_rows() {
    for lab in labs().await {
        let mut one = request("early", 4);
        one["models"].as_array_mut().unwrap().pop();
        let id = lab.submit(&one).await;
        let run = lab.lease(id).await.remove(0);
        assert_eq!(run.rows.len(), 8);
        lab.send(vec![(run.id, 1, episode(&run.rows[0], 0, scored(1.0, None))), (run.id, 1, status(Phase::Finished, None))]).await.unwrap();
        let state = lab.server.state.store.run(run.id).await.unwrap().unwrap().head;
        assert_eq!((state.state, state.cluster), (rlm_core::run::RunState::Queued, None));
        assert_eq!(lab.status(id).await, "running");
        let again = lab.lease(id).await.remove(0);
        assert_eq!((again.generation, again.rows.len()), (2, 7));
        // A status of the generation before is ignored.
        lab.send(vec![(run.id, 1, status(Phase::Failed, Some(Failure::new(FailureCode::Internal, "late"))))]).await.unwrap();
        assert_eq!(lab.server.state.store.run(run.id).await.unwrap().unwrap().head.state, rlm_core::run::RunState::Leased);
        // This one brings nothing: its rows are errored instead of going round for ever.
        lab.send(vec![(run.id, 2, status(Phase::Finished, None))]).await.unwrap();
        assert_eq!(counts(&lab, id).await["errored"], (7, 7));
        let detail = lab.get(&format!("/v1/evaluations/{id}")).await;
        assert_eq!((&detail["status"], &detail["failures"][0]["example"]["code"]), (&json!("failed"), &json!("runner_lost")));
    }
}

#[tokio::test]
async fn a_late_error_of_an_ended_run_does_not_close_a_row_that_is_retried() {
    for lab in labs().await {
        let id = lab.submit(&request("retried", 1)).await;
        let old = lab.lease(id).await;
        for run in &old {
            let mut payloads: Vec<_> = run.rows.iter().map(|row| (run.id, 1, episode(row, 0, errored("crashed")))).collect();
            payloads.push((run.id, 1, status(Phase::Finished, None)));
            lab.send(payloads).await.unwrap();
        }
        assert_eq!(lab.status(id).await, "failed");
        lab.server.post(&lab.token, &format!("/v1/evaluations/{id}/retries"), &json!({})).await.ok();
        assert_eq!(counts(&lab, id).await["errored"], (0, 0));
        let late: Vec<_> = old.iter().flat_map(|run| run.rows.iter().map(|row| (run.id, 1, episode(row, 5, errored("late"))))).collect();
        lab.send(late).await.unwrap();
        assert_eq!(counts(&lab, id).await["errored"], (0, 0));
        let retried = lab.lease(id).await;
        assert!(retried.iter().all(|run| run.generation > 1), "attempts of a retry have keys of their own");
        lab.send(
            retried
                .iter()
                .flat_map(|run| run.rows.iter().map(|row| (run.id, run.generation, episode(row, 0, deterministic(row)))))
                .collect(),
        )
        .await
        .unwrap();
        lab.send(retried.iter().map(|run| (run.id, run.generation, status(Phase::Finished, None))).collect()).await.unwrap();
        assert_eq!(lab.status(id).await, "completed");
        let row = lab.get(&format!("/v1/evaluations/{id}/rows/0")).await;
        assert_eq!(row["attempts"], 3, "{row}");
        assert_eq!(row["history"].as_array().unwrap().iter().filter(|attempt| attempt["counts"] == true).count(), 1);
        assert_eq!(row["seed"], 100);
    }
}

#[tokio::test]
async fn a_reward_that_is_no_number_is_an_error_of_the_environment() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("nan", 1)).await;
    let run = lab.lease(id).await.remove(0);
    lab.send(vec![
        (run.id, 1, episode(&run.rows[0], 0, scored(f64::NAN, Some(true)))),
        (run.id, 1, episode(&run.rows[1], 0, scored(f64::INFINITY, None))),
    ])
    .await
    .unwrap();
    assert_eq!(counts(&lab, id).await["errored"], (2, 2));
    let rows = lab.get(&format!("/v1/evaluations/{id}/rows?outcome=errored")).await;
    assert_eq!(rows["items"][0]["failure"]["code"], "environment_contract");
}

#[tokio::test]
async fn waiting_metrics_and_provenance_are_shown() {
    let lab = Lab::start().await;
    let id = lab.submit(&request("shown", 1)).await;
    let path = format!("/v1/evaluations/{id}");
    assert_eq!(lab.get(&path).await["waiting"]["cause"], "capacity");
    let runs = lab.lease(id).await;
    let run = &runs[0];
    let waiting = Payload::RunStatus(v1::RunStatus {
        phase: Phase::Waiting.into(),
        waiting_cause: "imagePull".to_owned(),
        waiting_message: "pulling".to_owned(),
        since_unix_ms: 1_700_000_000_000,
        ..Default::default()
    });
    lab.send(vec![(run.id, 1, waiting)]).await.unwrap();
    let detail = lab.get(&path).await;
    let shown = detail["runs"].as_array().unwrap().iter().find(|one| one["id"] == run.id.to_string()).unwrap();
    assert_eq!(shown["waiting"]["cause"], "imagePull");
    let metrics = |episodes: u64| {
        let metrics = json!({"activeMs": 1000, "episodes": episodes, "envSteps": 10 * episodes, "series":
            [{"op": "env.step", "component": "env", "metric": "rpc.total", "unit": "ms", "count": 10, "avg": 1.0, "p50": 1.0, "p95": 2.0, "p99": 3.0}]});
        Payload::RunMetrics(v1::RunMetrics { metrics_json: metrics.to_string(), at_unix_ms: 1 })
    };
    let provenance = Payload::RunStatus(v1::RunStatus {
        phase: Phase::Running.into(),
        provenance_json: json!({"modelImageDigest": "sha256:1", "lanes": 8}).to_string(),
        at_unix_ms: 1_700_000_001_000,
        ..Default::default()
    });
    lab.send(vec![(run.id, 1, provenance), (run.id, 1, metrics(1)), (run.id, 1, metrics(3)), (runs[1].id, 1, metrics(2))]).await.unwrap();
    let detail = lab.get(&path).await;
    let shown = detail["runs"].as_array().unwrap().iter().find(|one| one["id"] == run.id.to_string()).unwrap();
    assert_eq!((&shown["provenance"]["modelImageDigest"], &shown["metrics"]["episodes"]), (&json!("sha256:1"), &json!(3)));
    assert!(detail["waiting"].is_null() && detail["status"] == "running");
    let metrics = lab.get(&format!("{path}/metrics")).await;
    assert_eq!(
        (metrics["episodes"].as_u64(), metrics["envSteps"].as_u64(), metrics["series"][0]["count"].as_u64()),
        (Some(5), Some(50), Some(20))
    );
}

#[tokio::test]
async fn a_thousand_records_in_one_batch_are_stored_quickly() {
    for lab in labs().await {
        let mut one = request("batch", 1_000);
        one["models"].as_array_mut().unwrap().pop();
        let id = lab.submit(&one).await;
        let run = lab.lease(id).await.remove(0);
        let payloads: Vec<_> = run.rows.iter().map(|row| (run.id, 1, episode(row, 0, deterministic(row)))).collect();
        let started = std::time::Instant::now();
        for batch in payloads.chunks(1_000) {
            lab.send(batch.to_vec()).await.unwrap();
        }
        let took = started.elapsed();
        eprintln!("2,000 records in {took:?}");
        assert!(took < std::time::Duration::from_secs(10), "{took:?}");
        assert_eq!(counts(&lab, id).await["scored"], (2_000, 2_000));
    }
}

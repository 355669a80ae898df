//! The agent as a process, against a control plane in this one, with stand-ins for runner, models and environments.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod control_plane;
mod fake_runner;
mod support;

use std::time::{Duration, Instant};

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::agent_message::Message as FromAgent;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_core::evaluation::Provenance;
use rlm_core::tokens::{Secret, SecretKind};
use serde_json::json;

use control_plane::{ControlPlane, State, phases, scored, statuses};
use support::{Cell, processes_with, run_ref};

fn expect_rows(plane: &ControlPlane, rows: u64) {
    let scored = plane.with(|state| scored(state));
    let mut seen: Vec<u64> = scored.keys().map(|(row, _)| *row).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..rows).collect::<Vec<_>>(), "each row once");
    assert!(scored.iter().all(|((row, _), reward)| *reward == (row + 1000) as f64), "each row with its own seed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joins_despite_lost_answers_carries_a_run_out_and_stays_small() {
    let plane = ControlPlane::new();
    plane.with(|state| state.failing_joins = 2);
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    plane.with(|state| assert_eq!(state.joins, 3));
    plane.wait("a heartbeat", |state| !state.heartbeats.is_empty()).await;
    let idle = agent.rss_kib();
    println!("figure agent_idle_rss_kib {idle} goal <=32768");
    let run = cell.run(json!({}), json!({}), 50);
    plane.assign(run.assign.clone(), run.reference());
    plane.wait("the end", |state| phases(state).contains(&Phase::Finished)).await;
    expect_rows(&plane, 50);
    let statuses = plane.with(|state| statuses(state));
    let phases: Vec<Phase> = statuses.iter().map(v1::RunStatus::phase).collect();
    assert_eq!(phases[0], Phase::Waiting);
    assert_eq!(statuses[0].waiting_cause, "modelStarting");
    assert!(phases.contains(&Phase::Running));
    let provenance: Provenance = serde_json::from_str(&statuses.last().unwrap().provenance_json).unwrap();
    assert_eq!(provenance.model_sdk_version.as_deref(), Some("0.1.0"));
    assert!(provenance.node.is_some() && provenance.agent_version.is_some());
    // The same assignment again changes nothing.
    plane.send(ToAgent::Assign(run.assign.clone()));
    plane.send(ToAgent::LogRequest(v1::LogRequest {
        request_id: "l".to_owned(),
        run_id: run.id(),
        component: "env-0-0".to_owned(),
        tail_lines: 10,
    }));
    plane.wait("logs", |state| !state.replies.is_empty()).await;
    let reply = plane.with(|state| state.replies.pop()).unwrap();
    let Some(FromAgent::LogReply(reply)) = reply.message else { panic!("{reply:?}") };
    let text = &reply.files[0].text;
    assert!(text.contains("serving env envs:Env lanes 2") && text.contains("\u{fffd}\u{fffd} garbage"), "{text}");
    assert!(text.contains("omp 1 cuda None framework None") && !text.contains("SECRET"), "{text}");
    assert_eq!(plane.with(|state| control_plane::phases(state)).iter().filter(|phase| **phase == Phase::Finished).count(), 1);
    agent.stop();
    assert!(cell.leftovers().is_empty(), "{:?}", cell.leftovers());
    assert!(cfg!(debug_assertions) || idle <= 32 << 10, "idle agent takes {idle} KiB");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_token_is_said_and_a_new_one_joins() {
    let plane = ControlPlane::new();
    plane.with(|state| state.nonce = Some("somebody else's".to_owned()));
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &["--admin", "127.0.0.1:0"]);
    agent.wait_for_log("token_used").await;
    assert!(agent.is_running());
    let joins = plane.with(|state| state.joins);
    let token = Secret::generate(SecretKind::JoinToken);
    plane.with(|state| {
        state.token = token.clone();
        state.nonce = None;
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(plane.with(|state| state.joins), joins, "a refused token is not tried again");
    cell.write_token(&token);
    plane.wait("a session", |state| state.sessions == 1).await;
    agent.stop();
    let log = agent.log();
    assert!(!log.is_empty() && ["rlm_jt_", "rlm_cc_"].iter().all(|prefix| !log.contains(prefix)), "a secret in the log: {log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_agent_goes_on_where_it_was_and_leaves_nothing_behind() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mark = cell.mark();
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let run = cell.run(json!({"row_ms": 20}), json!({"behave": "grandchild", "mark": mark}), 120);
    plane.assign(run.assign.clone(), run.reference());
    for kill in 1..=3 {
        plane.wait("progress", |state| scored(state).len() >= 15 * kill).await;
        agent.kill();
        agent = cell.start(&plane, &[]);
    }
    plane.wait("the end", |state| phases(state).contains(&Phase::Finished)).await;
    expect_rows(&plane, 120);
    let attempts: std::collections::BTreeSet<u32> = plane.with(|state| scored(state)).keys().map(|(_, attempt)| *attempt).collect();
    assert!(attempts.len() >= 3, "attempts of later runners are new ones: {attempts:?}");
    // Instance and position are kept: one spool all along.
    let instances: std::collections::BTreeSet<String> =
        plane.with(|state| state.hellos.iter().map(|hello| hello.instance_id.clone()).collect());
    assert_eq!(instances.len(), 1);
    agent.stop();
    assert!(cell.leftovers().is_empty(), "{:?}", cell.leftovers());
    assert_eq!(processes_with(&mark), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_go_on_while_cut_off_and_lost_acks_cost_nothing() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let run = cell.run(json!({"row_ms": 10}), json!({}), 200);
    plane.assign(run.assign.clone(), run.reference());
    plane.wait("progress", |state| scored(state).len() >= 20).await;
    plane.with(|state| state.lose_acks = true);
    // Some more arrive, and no more than the agent sends without an answer.
    plane.wait("unanswered records", |state| scored(state).len() >= 24).await;
    server.stop.cancel();
    plane.cut();
    // Long enough for the run to end meanwhile.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let before = plane.with(|state| scored(state).len());
    let server = plane.serve(server.port).await;
    plane.wait("the end", |state| phases(state).contains(&Phase::Finished)).await;
    expect_rows(&plane, 200);
    assert!(before < 200, "the outage came too late to show anything");
    // The last records were not acknowledged: at a new session the control plane says that it has them.
    plane.with(|state| state.lose_acks = false);
    plane.cut();
    plane.wait("an empty spool", |state| state.heartbeats.last().is_some_and(|beat| beat.spool_unacknowledged_records == 0)).await;
    // Put back to yesterday: the same records come again under the new epoch.
    plane.with(|state| {
        state.epoch = "epoch-2".to_owned();
        state.records.clear();
        state.durable.clear();
    });
    plane.cut();
    plane.wait("the records again", |state| phases(state).contains(&Phase::Finished)).await;
    expect_rows(&plane, 200);
    agent.stop();
    drop(server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_runner_is_replaced_and_its_rows_are_not_run_twice() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let run = cell.run(json!({"runner_exit_at": 20, "row_ms": 10}), json!({}), 60);
    plane.assign(run.assign.clone(), run.reference());
    plane.wait("the end", |state| phases(state).contains(&Phase::Finished)).await;
    expect_rows(&plane, 60);
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn components_are_replaced_when_they_crash_and_when_asked() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let once = cell.folder().join("crashed-once");
    let crash = cell.run(json!({"await_env_attempt_at": 5}), json!({"behave": "crash_once", "once": once, "status": 0}), 20);
    plane.assign(crash.assign.clone(), crash.reference());
    plane.wait("the end after a crash", |state| phases(state).contains(&Phase::Finished)).await;
    assert!(agent.log().contains("exited with status 0"), "{}", agent.log());
    let asked = cell.run(json!({"restart_env_attempt": 1}), json!({}), 20);
    plane.assign(asked.assign.clone(), asked.reference());
    plane.wait("the end after a restart", |state| phases(state).iter().filter(|phase| **phase == Phase::Finished).count() == 2).await;
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_say_whose_they_are() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &["--max-runs", "1"]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let table = [
        (json!({"behave": "unknown_param"}), json!({}), "invalid_params"),
        (json!({"behave": "exit", "status": 3}), json!({}), "model_start_failed"),
        (json!({}), json!({"behave": "exit", "status": 0}), "environment_start_failed"),
        (json!({}), json!({"behave": "slow"}), "environment_start_timeout"),
        (json!({"behave": "crash", "status": 1, "await_model_failure": 1}), json!({}), "model_crashed"),
    ];
    for (number, (model, environment, expected)) in table.into_iter().enumerate() {
        let run = cell.run(model, environment, 5);
        plane.assign(run.assign.clone(), run.reference());
        plane.wait(expected, |state| statuses(state).iter().filter(|status| status.phase() == Phase::Failed).count() == number + 1).await;
        let failure = plane.with(|state| statuses(state)).pop().unwrap().failure.unwrap();
        assert_eq!(failure.code, expected, "{failure:?}");
    }
    let image = cell.run_with(|spec| spec["model"]["entrypoint"] = json!(null), 5);
    plane.assign(image.assign.clone(), image.reference());
    plane.wait("a refusal", |state| statuses(state).iter().filter(|status| status.phase() == Phase::Failed).count() == 6).await;
    assert_eq!(plane.with(|state| statuses(state)).pop().unwrap().failure.unwrap().code, "not_runnable_here");
    let python = cell.run_with(|spec| spec["model"]["python"] = json!("/no/such/python"), 5);
    plane.assign(python.assign.clone(), python.reference());
    plane.wait("a refusal", |state| statuses(state).iter().filter(|status| status.phase() == Phase::Failed).count() == 7).await;
    let failure = plane.with(|state| statuses(state)).pop().unwrap().failure.unwrap();
    assert!(failure.code == "invalid_entrypoint" && failure.message.contains("/no/such/python"), "{failure:?}");
    let gpu = cell.run_with(|spec| spec["model"]["resources"]["gpu"] = json!(64), 5);
    plane.assign(gpu.assign.clone(), gpu.reference());
    plane.wait("a refusal", |state| statuses(state).iter().filter(|status| status.phase() == Phase::Failed).count() == 8).await;
    assert_eq!(plane.with(|state| statuses(state)).pop().unwrap().failure.unwrap().code, "unschedulable");
    agent.stop();
}

/// What is said of a run comes in order, however closely a wait and its end follow each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_said_of_a_run_after_its_end() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &["--max-runs", "1"]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let first = cell.run(json!({"row_ms": 50}), json!({}), 1000);
    plane.assign(first.assign.clone(), first.reference());
    plane.wait("the first works", |state| scored(state).len() > 3).await;
    let others: Vec<_> = (0..30).map(|_| cell.run(json!({}), json!({}), 5)).collect();
    for other in &others {
        plane.assign(other.assign.clone(), other.reference());
        plane.send(ToAgent::Cancel(v1::Cancel { run_id: other.id(), generation: 1 }));
    }
    let of = |state: &State, run: &str| -> Vec<Phase> {
        let status = |record: &v1::Record| match &record.payload {
            Some(v1::record::Payload::RunStatus(status)) if record.run_id == run => Some(status.phase()),
            _ => None,
        };
        state.records.values().filter_map(status).collect()
    };
    plane.wait("all waited and ended", |state| others.iter().all(|other| of(state, &other.id()).len() == 2)).await;
    for other in &others {
        assert_eq!(plane.with(|state| of(state, &other.id())), [Phase::Waiting, Phase::Cancelled]);
    }
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_ends_every_process_within_a_second_and_capacity_is_kept() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mark = cell.mark();
    let mut agent = cell.start(&plane, &["--max-runs", "1"]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let first = cell.run(json!({"row_ms": 50}), json!({"behave": "grandchild", "mark": mark}), 1000);
    let second = cell.run(json!({}), json!({}), 10);
    plane.assign(first.assign.clone(), first.reference());
    plane.assign(second.assign.clone(), second.reference());
    plane.wait("the second waits", |state| statuses(state).iter().any(|status| status.waiting_cause == "capacity")).await;
    plane.wait("the first works", |state| scored(state).len() > 3).await;
    assert!(!processes_with(&mark).is_empty());
    let asked = Instant::now();
    plane.send(ToAgent::Cancel(v1::Cancel { run_id: first.id(), generation: 1 }));
    while !processes_with(&mark).is_empty() {
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", processes_with(&mark));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("cancelled after {} ms", asked.elapsed().as_millis());
    plane.wait("cancelled", |state| phases(state).contains(&Phase::Cancelled)).await;
    plane.wait("the second", |state| phases(state).contains(&Phase::Finished)).await;
    // One that nobody knows is confirmed all the same.
    let unknown = run_ref();
    plane.send(ToAgent::Cancel(v1::Cancel { run_id: unknown.run_id.clone(), generation: 9 }));
    plane.wait("the unknown", |state| state.records.values().any(|record| record.run_id == unknown.run_id && record.generation == 9)).await;
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_is_no_longer_leased_is_stopped_and_its_results_stay() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let run = cell.run(json!({"row_ms": 20}), json!({}), 1000);
    plane.assign(run.assign.clone(), run.reference());
    plane.wait("progress", |state| scored(state).len() > 5).await;
    let next = cell.run_again(&run, 2, 1000);
    plane.with(|state| {
        state.leased = vec![next.reference()];
        state.assigned.clear();
    });
    plane.cut();
    plane.wait("the hello", |state| state.hellos.last().is_some_and(|hello| hello.runs.iter().any(|known| known.generation == 1))).await;
    agent.wait_for_log("not this cluster's any more").await;
    plane.wait("nothing runs", |state| state.heartbeats.last().is_some_and(|beat| beat.running_runs == 0)).await;
    plane.send(ToAgent::Assign(next.assign.clone()));
    plane.wait("the next generation", |state| state.records.values().any(|record| record.generation == 2)).await;
    // The one after that comes while it runs, and waits until it has gone: both would use the same names.
    let last = cell.run_again(&run, 3, 1000);
    plane.with(|state| state.leased = vec![last.reference()]);
    plane.send(ToAgent::Assign(last.assign.clone()));
    plane.wait("the last generation", |state| state.records.values().any(|record| record.generation == 3)).await;
    let most = plane.with(|state| state.heartbeats.iter().map(|beat| beat.running_runs).max());
    assert_eq!(most, Some(1), "two generations of a run at once");
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_credential_is_followed_and_a_wrong_one_changes_nothing() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    cell.change_control(&Secret::generate(SecretKind::ControlCredential));
    plane
        .wait("the condition", |state| {
            state.heartbeats.last().is_some_and(|beat| {
                beat.conditions.iter().any(|condition| condition.r#type == "CredentialValid" && condition.status == "False")
            })
        })
        .await;
    assert_eq!(plane.with(|state| state.sessions), 1);
    let newer = Secret::generate(SecretKind::ControlCredential);
    plane.with(|state| state.control.push(newer.clone()));
    let credential = v1::Credential { purpose: "control".to_owned(), id: "cred_2".to_owned(), secret: newer.expose().to_owned() };
    plane.send(ToAgent::Rotate(v1::Rotate { credential: Some(credential) }));
    plane.wait("the new session", |state| state.sessions == 2).await;
    plane.with(|state| state.control = vec![newer]);
    plane.cut();
    plane.wait("a third", |state| state.sessions == 3).await;
    // Archived: it says so and stays.
    plane.send(ToAgent::Goodbye(v1::Goodbye { code: "cluster_archived".to_owned(), message: "archived".to_owned(), retry_after_ms: 0 }));
    agent.wait_for_log("revoked: this cluster was archived").await;
    assert!(agent.is_running());
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_are_described() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &[]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let ask = async |entrypoint: &str| {
        let request = v1::Describe {
            request_id: entrypoint.to_owned(),
            kind: "model".to_owned(),
            definition_json: cell.model(entrypoint).to_string(),
        };
        plane.send(ToAgent::Describe(request));
        plane.wait("a reply", |state| !state.replies.is_empty()).await;
        match plane.with(|state| state.replies.pop()).unwrap().message {
            Some(FromAgent::DescribeReply(reply)) => reply,
            other => panic!("{other:?}"),
        }
    };
    let good = ask("policies:Push").await;
    assert_eq!(good.document_json, "{\"kind\": \"--model\", \"target\": {\"entrypoint\": \"policies:Push\"}}");
    assert_eq!(ask("bad:Thing").await.failure.unwrap().code, "invalid_entrypoint");
    assert_eq!(ask("slow:Thing").await.failure.unwrap().code, "model_start_timeout");
    agent.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_on_one_server_go_one_after_the_other_and_hold_nobody_up() {
    let plane = ControlPlane::new();
    let server = plane.serve(0).await;
    let cell = Cell::new(server.port);
    let mut agent = cell.start(&plane, &["--max-runs", "3"]);
    plane.wait("a session", |state| state.sessions == 1).await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let on_server = |rows, row_ms: u32| {
        cell.run_with(
            |spec| {
                spec["environment"]["entrypoint"] = json!(null);
                spec["environment"]["address"] = json!(address);
                spec["model"]["params"] = json!({"row_ms": row_ms});
            },
            rows,
        )
    };
    let (first, second, other) = (on_server(60, 50), on_server(5, 1), cell.run(json!({}), json!({}), 5));
    for run in [&first, &second, &other] {
        plane.assign(run.assign.clone(), run.reference());
    }
    plane.wait("the second waits", |state| statuses(state).iter().any(|status| status.waiting_cause == "serverInUse")).await;
    let order = |state: &control_plane::State| {
        let ended = |record: &&v1::Record| matches!(&record.payload, Some(v1::record::Payload::RunStatus(status)) if status.phase() == Phase::Finished);
        state.records.values().filter(ended).map(|record| record.run_id.clone()).collect::<Vec<_>>()
    };
    plane.wait("all three", |state| order(state).len() == 3).await;
    assert_eq!(plane.with(|state| order(state)), [other.id(), first.id(), second.id()]);
    agent.stop();
}

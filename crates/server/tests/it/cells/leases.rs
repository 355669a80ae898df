use std::time::Duration;

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_core::failure::FailureCode;
use rlm_core::run::{EvaluationStatus, RunState};
use serde_json::json;

use super::plane::{Plane, Spool, expected, held, until};

#[tokio::test]
async fn a_run_is_assigned_and_its_results_count() {
    a_run_is_assigned_and_its_results_count_on(&Plane::start().await).await;
}

pub async fn a_run_is_assigned_and_its_results_count_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(plane).await;
    assert_eq!((agent.welcome.durable, agent.welcome.session_generation), (0, 1));
    assert_eq!(agent.welcome.epoch, &*plane.server.state.epoch);
    let evaluation = plane.submit(5, json!({})).await;
    let (run, rows) = agent.assigned().await;
    assert_eq!((run.evaluation_id, run.generation), (evaluation, 1));
    assert_eq!(rows.iter().map(|block| block.count).sum::<u32>(), 5);
    let mut spool = Spool::default();
    spool.status(&run, Phase::Running);
    spool.scores(&run, &rows, 0, 5);
    agent.records(spool.after(0)).await;
    agent.acknowledged(6).await;
    assert_eq!(plane.status(evaluation).await, EvaluationStatus::Running);
    assert_eq!(plane.get_cluster(cell.cluster).await["runningRuns"], 1);
    spool.status(&run, Phase::Finished);
    agent.records(spool.after(6)).await;
    agent.acknowledged(7).await;
    plane.becomes(evaluation, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..5));
    agent.hears_nothing().await;
}

#[tokio::test]
async fn results_that_are_sent_again_count_once_and_acknowledgements_are_merged() {
    results_that_are_sent_again_count_once_and_acknowledgements_are_merged_on(&Plane::start().await).await;
}

pub async fn results_that_are_sent_again_count_once_and_acknowledgements_are_merged_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(plane).await;
    let evaluation = plane.submit(5000, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 5000);
    spool.status(&run, Phase::Finished);
    for batch in spool.0.chunks(100) {
        agent.records(batch).await;
    }
    agent.acknowledged(5001).await;
    agent.records(&spool.0[1000..2000]).await;
    agent.acknowledged(5001).await;
    plane.becomes(evaluation, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..5000));
}

#[tokio::test]
async fn a_gap_in_the_records_is_refused_and_nothing_of_it_stored() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    plane.submit(5, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 5);
    agent.records(&spool.0[2..]).await;
    assert_eq!(agent.goodbye().await.code, "unavailable");
    let again = cell.connect_with(&plane, v1::Hello { runs: vec![held(&run)], ..cell.hello() }).await.unwrap();
    assert_eq!(again.welcome.durable, 0);
}

#[tokio::test]
async fn a_cancelled_evaluation_ends_when_the_cluster_says_so() {
    a_cancelled_evaluation_ends_when_the_cluster_says_so_on(&Plane::start().await).await;
}

pub async fn a_cancelled_evaluation_ends_when_the_cluster_says_so_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(plane).await;
    let evaluation = plane.submit(5, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let mut spool = Spool::default();
    spool.status(&run, Phase::Running);
    spool.scores(&run, &rows, 0, 2);
    agent.records(spool.after(0)).await;
    agent.acknowledged(3).await;
    plane.cancel(evaluation).await;
    assert_eq!(plane.status(evaluation).await, EvaluationStatus::Cancelling);
    match agent.next().await {
        Some(ToAgent::Cancel(cancel)) => assert_eq!((cancel.run_id, cancel.generation), (run.run_id.to_string(), 1)),
        other => panic!("{other:?}"),
    }
    agent.hears_nothing().await;
    spool.status(&run, Phase::Cancelled);
    agent.records(spool.after(3)).await;
    agent.acknowledged(4).await;
    plane.becomes(evaluation, EvaluationStatus::Cancelled).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..2), "what was there stays");
}

#[tokio::test]
async fn a_cancellation_reaches_an_agent_that_was_away_and_ends_without_one_in_time() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let evaluation = plane.submit(5, json!({"cluster": cell.cluster.to_string()})).await;
    let (run, _) = agent.assigned().await;
    drop(agent);
    plane.session_ended(cell.cluster).await;
    plane.cancel(evaluation).await;
    let mut agent = cell.connect_with(&plane, v1::Hello { runs: vec![held(&run)], ..cell.hello() }).await.unwrap();
    assert!(matches!(agent.next().await, Some(ToAgent::Cancel(_))));
    drop(agent);
    plane.server.advance(Duration::from_secs(30));
    plane.lost(cell.cluster).await;
    assert_eq!(plane.status(evaluation).await, EvaluationStatus::Cancelling);
    plane.server.advance(Duration::from_secs(3601));
    plane.becomes(evaluation, EvaluationStatus::Cancelled).await;
}

#[tokio::test]
async fn a_cancelled_run_that_the_agent_never_got_ends_at_once() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let evaluation = plane.submit(5, json!({})).await;
    agent.assigned().await;
    drop(agent);
    plane.cancel(evaluation).await;
    let agent = cell.connect(&plane).await;
    assert!(agent.welcome.runs.is_empty());
    assert_eq!(plane.status(evaluation).await, EvaluationStatus::Cancelled);
}

#[tokio::test]
async fn drain_places_nothing_and_is_done_when_nothing_is_left() {
    drain_places_nothing_and_is_done_when_nothing_is_left_on(&Plane::start().await).await;
}

pub async fn drain_places_nothing_and_is_done_when_nothing_is_left_on(plane: &Plane) {
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(plane).await;
    let first = plane.submit(2, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let path = format!("/v1/clusters/{}", cell.cluster);
    let drained = plane.server.post(&plane.key, &format!("{path}/drain"), &json!({})).await.ok();
    assert_eq!((&drained["draining"], &drained["drained"]), (&json!(true), &json!(false)));
    assert!(matches!(agent.next().await, Some(ToAgent::Drain(v1::Drain { draining: true }))));
    let second = plane.submit(2, json!({"name": "later"})).await;
    agent.hears_nothing().await;
    until("its reason", || async {
        let waiting = plane.server.state.store.run_heads(second, 1).await.unwrap().remove(0).waiting;
        if waiting.as_ref().is_some_and(|waiting| waiting.cause == "clusterDraining") { Ok(()) } else { Err(format!("{waiting:?}")) }
    })
    .await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 2);
    spool.status(&run, Phase::Finished);
    agent.heartbeat(3).await;
    agent.records(spool.after(0)).await;
    agent.acknowledged(3).await;
    plane.becomes(first, EvaluationStatus::Completed).await;
    plane.cluster_is(cell.cluster, "the heartbeat", |seen| seen["unacknowledgedRecords"] == 3 && seen["drained"] == false).await;
    agent.heartbeat(0).await;
    plane.cluster_is(cell.cluster, "drained", |seen| seen["drained"] == true).await;
    plane.server.post(&plane.key, &format!("{path}/resume"), &json!({})).await.ok();
    assert!(matches!(agent.next().await, Some(ToAgent::Drain(v1::Drain { draining: false }))));
    assert_eq!(agent.assigned().await.0.evaluation_id, second);
}

#[tokio::test]
async fn a_disconnected_clusters_run_moves_after_its_time_and_late_results_count() {
    a_disconnected_clusters_run_moves_after_its_time_and_late_results_count_on(&Plane::start().await).await;
}

pub async fn a_disconnected_clusters_run_moves_after_its_time_and_late_results_count_on(plane: &Plane) {
    let (one, two) = (plane.joined("one").await, plane.joined("two").await);
    let mut first = one.connect(plane).await;
    let evaluation = plane.submit(6, json!({"limits": {"reassignAfter": "10m"}})).await;
    let (run, rows) = first.assigned().await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 2);
    first.records(spool.after(0)).await;
    first.acknowledged(2).await;
    drop(first);
    plane.server.advance(Duration::from_secs(30));
    plane.lost(one.cluster).await;
    let mut second = two.connect(plane).await;
    second.hears_nothing().await;
    plane.server.advance(Duration::from_secs(600));
    let mut second = two.connect(plane).await;
    let (moved, open) = second.assigned().await;
    assert_eq!((moved.run_id, moved.generation), (run.run_id, 2));
    assert_eq!(open.iter().map(|block| (block.first_row, block.count)).collect::<Vec<_>>(), [(2, 4)], "finished rows do not move");
    // The first comes back with results of its generation, and is told that it holds nothing any more.
    spool.scores(&run, &rows, 2, 4);
    let mut first = one.connect_with(plane, v1::Hello { runs: vec![held(&run)], acknowledged: 2, ..one.hello() }).await.unwrap();
    assert!(first.welcome.runs.is_empty() && first.welcome.durable == 2);
    first.records(spool.after(2)).await;
    first.acknowledged(4).await;
    let mut others = Spool::default();
    others.scores(&moved, &open, 2, 6);
    others.status(&moved, Phase::Finished);
    second.records(others.after(0)).await;
    second.acknowledged(5).await;
    plane.becomes(evaluation, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..6));
}

#[tokio::test]
async fn an_evaluation_bound_to_a_cluster_waits_for_it() {
    let plane = Plane::start().await;
    let (one, two) = (plane.joined("one").await, plane.joined("two").await);
    let mut other = two.connect(&plane).await;
    let evaluation = plane.submit(2, json!({"cluster": one.cluster.to_string()})).await;
    other.hears_nothing().await;
    let mut agent = one.connect(&plane).await;
    let (run, _) = agent.assigned().await;
    drop(agent);
    plane.server.advance(Duration::from_secs(30));
    plane.lost(one.cluster).await;
    plane.server.advance(Duration::from_secs(7200));
    let mut other = two.connect(&plane).await;
    other.hears_nothing().await;
    assert_eq!(plane.server.state.store.run(run.run_id).await.unwrap().unwrap().head.state, RunState::Leased);
    assert_eq!(plane.status(evaluation).await, EvaluationStatus::Queued);
}

#[tokio::test]
async fn what_can_not_run_fails_with_the_reason() {
    what_can_not_run_fails_with_the_reason_on(&Plane::start().await).await;
}

pub async fn what_can_not_run_fails_with_the_reason_on(plane: &Plane) {
    let mut cell = plane.joined("k").await;
    cell.executor = "kubernetes".to_owned();
    let _agent = cell.connect(plane).await;
    let wrong_kind = plane.submit(2, json!({"cluster": cell.cluster.to_string()})).await;
    plane.becomes(wrong_kind, EvaluationStatus::Failed).await;
    let run = plane.server.state.store.run_heads(wrong_kind, 1).await.unwrap().remove(0);
    assert_eq!(run.failure.as_ref().map(|failure| failure.code), Some(FailureCode::NotRunnableHere), "{run:?}");

    let away = plane.joined("away").await;
    drop(away.connect(plane).await);
    plane.session_ended(away.cluster).await;
    let late = plane.submit(2, json!({"cluster": away.cluster.to_string(), "limits": {"queueTimeout": "1h"}})).await;
    plane.server.advance(Duration::from_secs(3601));
    plane.becomes(late, EvaluationStatus::Failed).await;
    let run = plane.server.state.store.run_heads(late, 1).await.unwrap().remove(0);
    assert_eq!(run.failure.as_ref().map(|failure| failure.code), Some(FailureCode::QueueTimeout), "{run:?}");
}

#[tokio::test]
async fn no_more_runs_are_leased_than_a_cluster_may_hold() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let models: Vec<_> = (0..70).map(|number| json!({"id": format!("m{number}"), "address": "tcp://127.0.0.1:1"})).collect();
    let evaluation = plane.submit(1, json!({"models": models})).await;
    let mut agent = cell.connect(&plane).await;
    let mut runs = Vec::new();
    for _ in 0..64 {
        runs.push(agent.assigned().await);
    }
    agent.hears_nothing().await;
    let (run, rows) = &runs[0];
    let mut spool = Spool::default();
    spool.scores(run, rows, 0, 70);
    spool.status(run, Phase::Finished);
    agent.records(spool.after(0)).await;
    agent.acknowledged(2).await;
    assert_eq!(agent.assigned().await.0.evaluation_id, evaluation, "one more takes the place of one that is done");
}

#[tokio::test]
async fn a_long_queue_for_one_cluster_hides_no_other() {
    let plane = Plane::start().await;
    let away = plane.joined("away").await;
    let models: Vec<_> = (0..70).map(|number| json!({"id": format!("m{number}"), "address": "tcp://127.0.0.1:1"})).collect();
    let many = plane.submit(1, json!({"models": models, "cluster": away.cluster.to_string(), "priority": 100})).await;
    let few = plane.submit(1, json!({})).await;
    let queued = plane.server.state.store.queued_runs(50, 10).await.unwrap();
    let of = |evaluation| queued.iter().filter(|run| run.evaluation == evaluation).count();
    assert_eq!((of(many), of(few)), (10, 1));
    assert_eq!(queued.last().map(|run| run.evaluation), Some(few), "the most urgent first");
}

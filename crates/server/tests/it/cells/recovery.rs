use std::time::Duration;

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_core::run::{EvaluationStatus, RunState};
use serde_json::json;

use super::plane::{Plane, Spool, expected, held, in_dir};

#[tokio::test]
async fn a_cut_connection_loses_and_doubles_nothing() {
    let plane = Plane::start().await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let evaluation = plane.submit(40, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let mut spool = Spool::default();
    spool.status(&run, Phase::Running);
    let mut acknowledged = 0;
    for cut in 0..8 {
        spool.scores(&run, &rows, cut * 5, cut * 5 + 5);
        agent.records(spool.after(acknowledged)).await;
        // Some were read, some are on their way: who knows.
        if cut % 2 == 0 {
            agent.acknowledged(spool.last()).await;
            acknowledged = spool.last();
        }
        drop(agent);
        let hello = v1::Hello { runs: vec![held(&run)], acknowledged, epoch: plane.server.state.epoch.to_string(), ..cell.hello() };
        agent = cell.connect_with(&plane, hello).await.unwrap();
        assert!((acknowledged..=spool.last()).contains(&agent.welcome.durable));
        acknowledged = agent.welcome.durable;
    }
    spool.status(&run, Phase::Finished);
    agent.records(spool.after(acknowledged)).await;
    agent.acknowledged(spool.last()).await;
    plane.becomes(evaluation, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..40));
}

#[tokio::test]
async fn a_restart_keeps_leases_and_positions() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let epoch = agent.welcome.epoch.clone();
    let evaluation = plane.submit(10, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 4);
    agent.records(spool.after(0)).await;
    agent.acknowledged(4).await;
    let ended = tokio::spawn(async move { agent.goodbye().await });
    let (owner, key) = plane.stop().await;
    let goodbye = ended.await.unwrap();
    assert_eq!((goodbye.code.as_str(), goodbye.retry_after_ms), ("unavailable", 1000));

    // Down for longer than `reassignAfter`: that is not the agent's fault.
    let plane = Plane::again(dir.path(), &owner, &key, Duration::from_secs(7200)).await;
    let other = plane.joined("other").await;
    let mut bystander = other.connect(&plane).await;
    bystander.hears_nothing().await;
    spool.scores(&run, &rows, 4, 10);
    spool.status(&run, Phase::Finished);
    let hello = v1::Hello { runs: vec![held(&run)], acknowledged: 4, epoch: epoch.clone(), ..cell.hello() };
    let mut agent = cell.connect_with(&plane, hello).await.unwrap();
    assert_eq!((agent.welcome.durable, agent.welcome.session_generation, agent.welcome.epoch.as_str()), (4, 2, epoch.as_str()));
    assert_eq!(agent.welcome.runs, vec![held(&run)]);
    agent.records(spool.after(4)).await;
    agent.acknowledged(11).await;
    plane.becomes(evaluation, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..10));
}

#[tokio::test]
async fn an_agent_lost_before_a_downtime_keeps_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    plane.submit(2, json!({"limits": {"reassignAfter": "1h"}})).await;
    let (run, _) = agent.assigned().await;
    drop(agent);
    plane.server.advance(Duration::from_secs(30));
    plane.lost(cell.cluster).await;
    let (owner, key) = plane.stop().await;
    let plane = Plane::again(dir.path(), &owner, &key, Duration::from_secs(7200)).await;
    let state = |plane: &Plane| {
        let store = plane.server.state.store.clone();
        async move { store.run(run.run_id).await.unwrap().unwrap().head.state }
    };
    let other = plane.joined("other").await;
    let mut second = other.connect(&plane).await;
    second.hears_nothing().await;
    assert_eq!(state(&plane).await, RunState::Leased, "two hours of downtime are not the agent's");
    plane.server.advance(Duration::from_secs(3700));
    let mut second = other.connect(&plane).await;
    assert_eq!(second.assigned().await.0.run_id, run.run_id);
}

#[tokio::test]
async fn runs_do_not_time_out_in_the_queue_while_the_control_plane_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let cell = plane.joined("lab").await;
    let evaluation = plane.submit(2, json!({"limits": {"queueTimeout": "1h"}})).await;
    let (owner, key) = plane.stop().await;
    let plane = Plane::again(dir.path(), &owner, &key, Duration::from_secs(7200)).await;
    let mut agent = cell.connect(&plane).await;
    assert_eq!(agent.assigned().await.0.evaluation_id, evaluation);
}

#[tokio::test]
async fn a_restored_backup_gets_todays_records_again() {
    let dir = tempfile::tempdir().unwrap();
    let backup = tempfile::tempdir().unwrap();
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let evaluation = plane.submit(12, json!({})).await;
    let (run, rows) = agent.assigned().await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 3);
    agent.records(spool.after(0)).await;
    agent.acknowledged(3).await;
    drop(agent);
    let (owner, key) = plane.stop().await;
    copy(dir.path(), backup.path());

    // A day goes by on the original.
    let plane = Plane::again(dir.path(), &owner, &key, Duration::ZERO).await;
    let hello = v1::Hello { runs: vec![held(&run)], acknowledged: 3, ..cell.hello() };
    let mut agent = cell.connect_with(&plane, hello).await.unwrap();
    spool.scores(&run, &rows, 3, 9);
    agent.records(spool.after(3)).await;
    agent.acknowledged(9).await;
    drop(agent);
    plane.stop().await;

    let plane = Plane::again(backup.path(), &owner, &key, Duration::from_secs(24 * 3600)).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..3));
    let hello = v1::Hello { runs: vec![held(&run)], acknowledged: 9, ..cell.hello() };
    let mut agent = cell.connect_with(&plane, hello).await.unwrap();
    assert_eq!(agent.welcome.durable, 3, "behind what the agent remembers: it sends again");
    spool.scores(&run, &rows, 9, 12);
    spool.status(&run, Phase::Finished);
    agent.records(spool.after(3)).await;
    agent.acknowledged(13).await;
    plane.becomes(evaluation, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(evaluation).await, expected(0..12));
}

/// The state folder as a backup of it would be.
fn copy(from: &std::path::Path, to: &std::path::Path) {
    for file in ["test.db", "server.key", "tokens.key"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

#[tokio::test]
async fn a_backup_from_before_the_lease_takes_the_results_of_it() {
    let (dir, backup) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let cell = plane.joined("lab").await;
    let done = plane.submit(4, json!({"name": "done"})).await;
    let going = plane.submit(6, json!({"name": "going"})).await;
    let (owner, key) = plane.stop().await;
    copy(dir.path(), backup.path());

    let plane = Plane::again(dir.path(), &owner, &key, Duration::ZERO).await;
    let mut agent = cell.connect(&plane).await;
    let (first, first_rows) = agent.assigned().await;
    let (second, second_rows) = agent.assigned().await;
    assert_eq!((first.evaluation_id, second.evaluation_id), (done, going));
    let mut spool = Spool::default();
    spool.scores(&first, &first_rows, 0, 4);
    spool.status(&first, Phase::Finished);
    spool.scores(&second, &second_rows, 0, 2);
    agent.records(spool.after(0)).await;
    agent.acknowledged(7).await;
    plane.becomes(done, EvaluationStatus::Completed).await;
    drop(agent);
    plane.stop().await;

    // In the backup both runs are queued, and nobody was given a lease.
    let plane = Plane::again(backup.path(), &owner, &key, Duration::from_secs(24 * 3600)).await;
    spool.scores(&second, &second_rows, 2, 4);
    let hello = v1::Hello { runs: vec![held(&second)], acknowledged: 7, ..cell.hello() };
    let mut agent = cell.connect_with(&plane, hello).await.unwrap();
    assert_eq!((agent.welcome.durable, agent.welcome.runs.len()), (0, 0));
    agent.records(spool.after(0)).await;
    let mut others = Spool(spool.0.clone());
    let mut finished = 0;
    while finished < 1 || plane.status(done).await != EvaluationStatus::Completed {
        match agent.next().await {
            Some(rlm_api::cluster::v1::server_message::Message::Assign(assign)) => {
                let run: rlm_core::evaluation::RunSpec = serde_json::from_str(&assign.run_json).unwrap();
                assert!(run.evaluation_id == done || run.generation == 2, "a generation is given out once: {run:?}");
                others.scores(&run, &assign.rows, 0, 100);
                others.status(&run, Phase::Finished);
                agent.records(&others.0[usize::try_from(spool.last()).unwrap()..]).await;
                spool = others.clone();
                finished += u32::from(run.evaluation_id == going);
            }
            Some(rlm_api::cluster::v1::server_message::Message::Ack(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    plane.becomes(going, EvaluationStatus::Completed).await;
    assert_eq!(plane.scores(done).await, expected(0..4));
    assert_eq!(plane.scores(going).await, expected(0..6));
}

#[tokio::test]
async fn a_lease_whose_end_was_forgotten_goes_on_once_everything_came_again() {
    let (dir, backup) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let plane = Plane::with(|config| in_dir(config, dir.path())).await;
    let cell = plane.joined("lab").await;
    let mut agent = cell.connect(&plane).await;
    let evaluation = plane.submit(4, json!({})).await;
    let (run, rows) = agent.assigned().await;
    drop(agent);
    let (owner, key) = plane.stop().await;
    copy(dir.path(), backup.path());

    // The agent knows that it stopped the run (it was given to another cluster), and sent two rows of it.
    let plane = Plane::again(backup.path(), &owner, &key, Duration::ZERO).await;
    let mut spool = Spool::default();
    spool.scores(&run, &rows, 0, 2);
    let mut agent = cell.connect_with(&plane, v1::Hello { acknowledged: 2, ..cell.hello() }).await.unwrap();
    agent.hears_nothing().await;
    agent.records(spool.after(0)).await;
    agent.acknowledged(2).await;
    let (again, open) = agent.assigned().await;
    assert_eq!((again.run_id, again.generation), (run.run_id, 2));
    assert_eq!(open.iter().map(|block| (block.first_row, block.count)).collect::<Vec<_>>(), [(2, 2)]);
    assert_eq!(plane.scores(evaluation).await, expected(0..2));
}

use futures::future::BoxFuture;
use rlm_core::failure::FailureCode;
use v1::component::Phase;

use super::*;
use crate::executor::run::RunnerExit;
use crate::runners::FromRunner;

/// Attempts that last until they are asked to end; the tests report what "happened".
struct Nowhere;

impl Place for Nowhere {
    fn start(&self, role: Role, lanes: u32, attempt: u32, stop: Stop, news: mpsc::Sender<News>) -> Result<BoxFuture<'static, ()>, Failure> {
        if lanes == 99 {
            return Err(Failure::new(FailureCode::InvalidParams, "no such lanes"));
        }
        Ok(Box::pin(async move {
            stop.stop.cancelled().await;
            drop(news.send(News { name: role.name(), attempt, happened: Happened::Ended { failure: None } }).await);
        }))
    }

    fn runner(&self, _: Stop, _: mpsc::Sender<FromRunner>, _: mpsc::Sender<News>) -> BoxFuture<'static, RunnerExit> {
        Box::pin(std::future::pending())
    }

    fn clean_up(&self, _: bool) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

fn components() -> (Components<Nowhere>, mpsc::Receiver<News>) {
    let (news, inbox) = mpsc::channel(8);
    (Components::new(Arc::new(Nowhere), HashMap::from([("env-0-0".to_owned(), 3)]), news), inbox)
}

fn shown(messages: &[v1::Component]) -> Vec<(String, u32, Phase)> {
    messages.iter().map(|message| (message.name.clone(), message.attempt, message.phase())).collect()
}

fn ended(name: &str, attempt: u32, code: FailureCode) -> News {
    News { name: name.to_owned(), attempt, happened: Happened::Ended { failure: Some(Failure::new(code, "x")) } }
}

fn ready(name: &str, attempt: u32) -> News {
    News { name: name.to_owned(), attempt, happened: Happened::Ready { address: "unix:///s".to_owned(), node: "here".to_owned() } }
}

const ENV: Role = Role::Environment { binding: 0, pod: 0 };

#[tokio::test]
async fn attempts_count_on_and_late_news_changes_nothing() {
    let (mut components, mut inbox) = components();
    assert_eq!(shown(&components.ensure(ENV, 2)), [("env-0-0".to_owned(), 4, Phase::Starting)]);
    assert!(components.on_news(ready("env-0-0", 3)).is_empty());
    assert_eq!(shown(&components.on_news(ready("env-0-0", 4))), [("env-0-0".to_owned(), 4, Phase::Ready)]);
    assert!(components.restart("env-0-0", 3).is_empty());
    assert_eq!(components.snapshot()[0].phase(), Phase::Ready);
    components.end_all(true, Duration::from_secs(5), &mut inbox).await;
}

#[tokio::test]
async fn a_crash_is_followed_by_the_next_attempt_until_there_are_too_many() {
    let (mut components, mut inbox) = components();
    components.ensure(Role::Model, 1);
    components.on_news(ready(MODEL, 1));
    let messages = components.on_news(ended(MODEL, 1, FailureCode::ModelCrashed));
    assert_eq!(shown(&messages), [(MODEL.to_owned(), 1, Phase::Restarting), (MODEL.to_owned(), 2, Phase::Starting)]);
    assert_eq!(messages[0].failure.as_ref().unwrap().code, "model_crashed");
    components.on_news(ready(MODEL, 2));
    components.progress();
    for attempt in 2..6 {
        assert_eq!(shown(&components.on_news(ended(MODEL, attempt, FailureCode::ModelCrashed)))[0].2, Phase::Restarting);
        components.on_timer(Instant::now() + Duration::from_secs(60));
    }
    assert_eq!(shown(&components.on_news(ended(MODEL, 6, FailureCode::ModelCrashed))), [(MODEL.to_owned(), 6, Phase::Failed)]);
    assert_eq!(components.model_failure().unwrap().code, FailureCode::ModelCrashed);
    components.end_all(true, Duration::from_secs(5), &mut inbox).await;
}

#[tokio::test]
async fn faults_of_the_request_fail_at_once() {
    let (mut components, mut inbox) = components();
    components.ensure(Role::Model, 1);
    assert_eq!(shown(&components.on_news(ended(MODEL, 1, FailureCode::InvalidParams))), [(MODEL.to_owned(), 1, Phase::Failed)]);
    assert_eq!(shown(&components.ensure(Role::Model, 1)), [(MODEL.to_owned(), 1, Phase::Failed)]);
    assert_eq!(shown(&components.ensure(ENV, 99)), [("env-0-0".to_owned(), 4, Phase::Failed)]);
    components.end_all(true, Duration::from_secs(5), &mut inbox).await;
}

#[tokio::test]
async fn a_requested_restart_waits_for_the_end_and_a_release_forgets() {
    let (mut components, mut inbox) = components();
    components.ensure(ENV, 2);
    components.on_news(ready("env-0-0", 4));
    assert!(components.restart("env-0-0", 4).is_empty());
    assert_eq!(components.snapshot()[0].phase(), Phase::Restarting);
    let news = inbox.recv().await.unwrap();
    assert_eq!(
        shown(&components.on_news(news)),
        [("env-0-0".to_owned(), 4, Phase::Restarting), ("env-0-0".to_owned(), 5, Phase::Starting)]
    );
    components.release(|role| role == ENV);
    assert!(components.snapshot().is_empty());
    let news = inbox.recv().await.unwrap();
    assert!(components.on_news(news).is_empty());
    assert_eq!(shown(&components.ensure(ENV, 2)), [("env-0-0".to_owned(), 6, Phase::Starting)]);
    components.end_all(true, Duration::from_secs(5), &mut inbox).await;
}

#[tokio::test]
async fn what_a_start_waits_for_is_known_until_it_serves_or_waits_no_more() {
    let (mut components, mut inbox) = components();
    let waits = |cause: Option<&'static str>| News {
        name: MODEL.to_owned(),
        attempt: 1,
        happened: Happened::Waits(cause.map(|cause| Waits { cause, message: "m".to_owned(), since_ms: Some(7) })),
    };
    components.ensure(Role::Model, 1);
    let mut after = |news| {
        components.on_news(news);
        components.waits().map(|waits| waits.cause)
    };
    assert_eq!(after(waits(Some("quota"))), Some("quota"));
    assert_eq!(after(waits(Some("unschedulable"))), Some("unschedulable"));
    assert_eq!(after(waits(None)), None);
    assert_eq!(after(waits(Some("imagePull"))), Some("imagePull"));
    assert_eq!(after(ready(MODEL, 1)), None);
    assert_eq!(after(waits(Some("imagePull"))), None, "late news");
    components.end_all(true, Duration::from_secs(5), &mut inbox).await;
}

//! A million rows: what an evaluation costs does not grow with its rows, but for the rows that are read.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Lab, deterministic, episode, request};

/// The bench holds each page to 300 ms; a test build on a busy machine gets more.
const PAGE: Duration = Duration::from_secs(3);

async fn timed(lab: &Lab, path: &str) -> Value {
    let started = Instant::now();
    let answer = lab.get(path).await;
    let took = started.elapsed();
    eprintln!("{path}: {took:?}");
    assert!(took < PAGE, "{path} took {took:?}");
    answer
}

#[tokio::test]
async fn a_million_rows_are_submitted_and_paged() {
    let lab = Lab::start().await;
    let started = Instant::now();
    let id = lab.submit(&request("million", 250_000)).await;
    eprintln!("submitted in {:?}", started.elapsed());
    assert!(started.elapsed() < PAGE);
    let path = format!("/v1/evaluations/{id}");
    assert_eq!(timed(&lab, &path).await["progress"]["totalEpisodes"], 1_000_000);
    let run = lab.lease(id).await.remove(0);
    let payloads: Vec<_> = run.rows.iter().take(4_000).map(|row| (run.id, 1, episode(row, 0, deterministic(row)))).collect();
    lab.send(payloads).await.unwrap();
    for (query, first) in [
        ("", 0),
        ("?limit=1000", 0),
        ("?limit=1000&cursor=999500", 999_500),
        ("?limit=1000&outcome=pending", 4_000),
        ("?limit=1000&outcome=scored&cursor=3999", 3_999),
        ("?model=b&task=walk/1&cursor=10", 750_000),
    ] {
        let page = timed(&lab, &format!("{path}/rows{query}")).await;
        assert_eq!(page["items"][0]["row"], first, "{query}");
    }
    assert_eq!(timed(&lab, &format!("{path}/rows/999999")).await["seed"], 250_199);
    let scores = timed(&lab, &format!("{path}/scores")).await;
    assert_eq!((&scores["groups"][0]["scored"], &scores["groups"][0]["pending"]), (&json!(4_000), &json!(246_000)));
}

#[tokio::test]
async fn a_million_explicit_seeds_are_rows_like_others() {
    let lab = Lab::start().await;
    let mut one = request("seeds", 1);
    one["models"].as_array_mut().unwrap().pop();
    one["tasks"].as_array_mut().unwrap().pop();
    let seeds: Vec<u64> = (0..100_000).map(|i| (i * 7) % 4_000_000).collect();
    one["tasks"][0]["episodes"] = json!(seeds.len());
    one["tasks"][0].as_object_mut().unwrap().remove("seed");
    one["tasks"][0]["seeds"] = json!(seeds);
    let id = lab.submit(&one).await;
    let page = timed(&lab, &format!("/v1/evaluations/{id}/rows?limit=10&cursor=99990")).await;
    assert_eq!((&page["items"][0]["seed"], &page["items"][9]["seed"]), (&json!(99_990 * 7), &json!(99_999 * 7)));
    let open = lab.lease(id).await;
    assert_eq!(open.iter().map(|run| run.rows.len()).sum::<usize>(), 100_000);
}

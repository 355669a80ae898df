//! Equal requests have equal rows and results, however many environments work side by side.

use std::time::Duration;

use rlm_e2e::{Options, Stack, counter, requests, stack, tools};

const EPISODES: u64 = 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn one_two_four_and_eight_workers_give_equal_rows() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    let mut first: Option<Vec<String>> = None;
    for workers in [1, 2, 4, 8] {
        let id = stack.submit(&requests::counter(&tools, &["Follower", "Doubter"], EPISODES, workers)).await?;
        let evaluation = stack.wait(&id, Duration::from_secs(180)).await?;
        assert_eq!(evaluation["status"], "completed", "{workers} workers");
        let results = stack.results(&id).await?;
        assert_eq!(results.len() as u64, 2 * EPISODES);
        match &first {
            None => {
                for row in stack.rows(&id).await?.iter().filter(|row| row["model"] == "follower") {
                    counter::check_follower(row)?;
                }
                assert!(results.iter().all(|result| result.contains(r#""outcome":"scored""#)));
                first = Some(results);
            }
            Some(first) => stack::same(first, &results)?,
        }
    }
    stack.end().await
}

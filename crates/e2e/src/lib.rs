//! The harness of the whole-system tests: real server, real agent, real runner, real SDK processes, on free ports and in
//! throw-away folders.
//!
//! It ends only processes that it started, waits for conditions and never for fixed times, and prints what it saw last when
//! a test fails. A machine without the programs or the Python environment gets `skipped, because ...`; where `CI=true` that
//! is a failure.

pub mod bed;
pub mod cli;
pub mod counter;
pub mod faults;
pub mod processes;
pub mod proxy;
pub mod requests;
pub mod stack;
pub mod tools;

pub use processes::Component;
pub use rustix::process::Signal;
pub use stack::{Options, Stack};
pub use tools::{Tools, tools};

use std::time::{Duration, Instant};

/// Asks until `look` gives something; after `limit` it fails and says what was waited for.
pub async fn wait_for<T, F>(what: &str, limit: Duration, mut look: impl FnMut() -> F) -> anyhow::Result<T>
where
    F: Future<Output = anyhow::Result<Option<T>>>,
{
    let started = Instant::now();
    loop {
        if let Some(found) = look().await? {
            return Ok(found);
        }
        anyhow::ensure!(started.elapsed() < limit, "waited {} s in vain for {what}", limit.as_secs_f64());
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

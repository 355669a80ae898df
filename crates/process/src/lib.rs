//! What every daemon does alike: logging, build info, the admin port, signals, the end of its parent, and the drain.
//!
//! It knows nothing of evaluations, databases or Kubernetes, and opens no port that its caller did not ask for.
//!
//! ```no_run
//! # async fn serve(_: tokio_util::sync::CancellationToken) -> anyhow::Result<()> { Ok(()) }
//! # fn main() -> anyhow::Result<()> {
//! let build = rlm_process::build_info!("rlmesh-example");
//! rlm_process::init_logging(rlm_process::LogFormat::Text)?;
//! rlm_process::runtime(2)?.block_on(async move {
//!     let stop = rlm_process::stop_on_signals()?;
//!     let admin = rlm_process::Admin::new(build);
//!     let port = admin.listen("127.0.0.1:0".parse()?, stop.clone()).await?;
//!     tracing::info!(%port, "admin port");
//!     admin.set_ready();
//!     rlm_process::drain(stop.clone(), std::time::Duration::from_secs(10), serve(stop)).await
//! })
//! # }
//! ```

mod admin;

use std::future::Future;
use std::time::Duration;

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

pub use admin::Admin;

/// Exit status of a daemon whose flags or configuration are wrong (`EX_USAGE`); no port was opened then.
pub const EXIT_CONFIG: u8 = 64;

/// Which program this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildInfo {
    pub name: &'static str,
    pub version: &'static str,
    /// Commit it was built from; `unknown` outside a release build.
    pub commit: &'static str,
}

/// The [`BuildInfo`] of the crate that calls it: its version, and `RLMESH_COMMIT` as set while it was compiled.
#[macro_export]
macro_rules! build_info {
    ($name:literal) => {
        $crate::BuildInfo {
            name: $name,
            version: env!("CARGO_PKG_VERSION"),
            commit: match option_env!("RLMESH_COMMIT") {
                Some(commit) => commit,
                None => "unknown",
            },
        }
    };
}

/// How log lines look; both go to standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("'{other}' is not a log format; use text or json")),
        }
    }
}

/// Starts logging. `RLMESH_LOG` filters (`info`, `rlm_cluster=debug,warn`); without it: `info`.
pub fn init_logging(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var("RLMESH_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text).with_context(|| format!("RLMESH_LOG '{text}' is not a log filter"))?,
        Ok(_) | Err(_) => EnvFilter::new("info"),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    let result = match format {
        LogFormat::Text => {
            use std::io::IsTerminal as _;
            builder.with_ansi(std::io::stderr().is_terminal()).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    result.map_err(|error| anyhow::anyhow!("logging could not be started: {error}"))
}

/// A runtime with this many worker threads. Worker threads live as long as the runtime, so processes started on one keep
/// their parent-death signal.
pub fn runtime(workers: usize) -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers.max(1))
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .context("the async runtime could not be started")
}

/// A token that is cancelled at the first SIGTERM or SIGINT. A second one ends the process at once with status 130.
pub fn stop_on_signals() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM can't be handled")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT can't be handled")?;
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if first {
                tracing::info!(signal = name, "stopping; a second signal ends the process at once");
                stop.cancel();
            }
        }
        tracing::warn!("second signal: ending at once");
        std::process::exit(130);
    });
    Ok(token)
}

/// Runs `work` to its end. Once `stop` is cancelled it has `deadline` left, then it is dropped and the drain fails.
pub async fn drain<T>(stop: CancellationToken, deadline: Duration, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        result = &mut work => return result,
        () = stop.cancelled() => {}
    }
    match tokio::time::timeout(deadline, work).await {
        Ok(result) => result,
        Err(_) => anyhow::bail!("still busy {} s after the stop signal; ended anyway", deadline.as_secs_f64()),
    }
}

/// Asks the kernel to send this process `signal` when the thread that started it ends, and checks that this has not
/// happened already. `parent` is the process id that the parent passed down, when it did.
#[cfg(target_os = "linux")]
pub fn die_with_parent(signal: ParentDeath, parent: Option<i32>) -> anyhow::Result<()> {
    let signal = match signal {
        ParentDeath::Terminate => rustix::process::Signal::TERM,
        ParentDeath::Kill => rustix::process::Signal::KILL,
    };
    let before = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    rustix::process::set_parent_process_death_signal(Some(signal)).context("the parent-death signal can't be set")?;
    let after = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if before != after || parent.is_some_and(|parent| after != Some(parent)) {
        anyhow::bail!("the parent process has ended already");
    }
    Ok(())
}

/// Which signal follows the end of the parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParentDeath {
    Terminate,
    Kill,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn drain_waits_for_work_and_not_for_ever() {
        let stop = CancellationToken::new();
        stop.cancel();
        let quick = drain(stop.clone(), Duration::from_secs(5), async {
            tokio::task::yield_now().await;
            Ok(7)
        });
        assert_eq!(quick.await.unwrap(), 7);
        let endless = drain(stop, Duration::from_millis(20), std::future::pending::<anyhow::Result<()>>());
        assert!(endless.await.unwrap_err().to_string().contains("still busy"));
    }

    #[test]
    fn log_formats_are_named() {
        assert_eq!("json".parse::<LogFormat>(), Ok(LogFormat::Json));
        assert!("yaml".parse::<LogFormat>().unwrap_err().contains("text or json"));
    }
}

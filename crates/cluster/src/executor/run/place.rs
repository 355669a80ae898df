//! What an actor needs of the place where its run's components are. Decides nothing.

use std::collections::HashMap;
use std::sync::Arc;

use futures::future::BoxFuture;
use rlm_core::evaluation::Provenance;
use rlm_core::failure::Failure;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::components::{News, Role, Stop};
use crate::runners::{FromRunner, Runners};
use crate::spool::Spool;

/// The runner's name, as a component.
pub const RUNNER: &str = "runner";

/// What the actors of an agent share.
#[derive(Clone)]
pub struct Shared {
    pub spool: Spool,
    pub runners: Runners,
    /// Whatever must have ended before the agent does.
    pub tasks: TaskTracker,
}

/// Where the components of one run are: child processes, or pods.
pub trait Place: Send + Sync + 'static {
    /// Starts an attempt at a component. The future says once that it serves and once that it has ended, and ends then.
    ///
    /// # Errors
    /// If nothing can be started.
    fn start(&self, role: Role, lanes: u32, number: u32, stop: Stop, news: mpsc::Sender<News>) -> Result<BoxFuture<'static, ()>, Failure>;

    /// Starts a runner and lets it, and no earlier one, attach to the run; the future ends once it has ended. Until it runs
    /// the news of [`RUNNER`] say what it waits for.
    fn runner(&self, stop: Stop, messages: mpsc::Sender<FromRunner>, news: mpsc::Sender<News>) -> BoxFuture<'static, RunnerExit>;

    /// The actor ends, and nothing of the run is left running; `over` says that the run is.
    fn clean_up(&self, over: bool) -> BoxFuture<'static, ()>;
}

/// A run that may be started.
pub struct Prepared<P> {
    pub place: Arc<P>,
    pub provenance: Provenance,
    /// Highest attempt so far by component.
    pub attempts: HashMap<String, u32>,
}

/// A runner that has ended.
#[derive(Debug)]
pub struct RunnerExit {
    /// `exited with status 1`.
    pub how: String,
    pub log_lines: Vec<String>,
    /// Why the run ends with it. None: another runner goes on.
    pub for_good: Option<Failure>,
}

impl RunnerExit {
    pub fn new(how: impl Into<String>) -> Self {
        Self { how: how.into(), log_lines: Vec::new(), for_good: None }
    }
}

/// A running runner.
pub(super) struct RunnerHandle {
    stop: Stop,
    pub(super) ended: CancellationToken,
}

impl RunnerHandle {
    pub(super) fn start<P: Place>(
        shared: &Shared,
        place: &P,
        messages: &mpsc::Sender<FromRunner>,
        news: mpsc::Sender<News>,
        exits: mpsc::Sender<RunnerExit>,
    ) -> Self {
        let handle = Self { stop: Stop::default(), ended: CancellationToken::new() };
        let (running, ended) = (place.runner(handle.stop.clone(), messages.clone(), news), handle.ended.clone());
        shared.tasks.spawn(async move {
            let exit = running.await;
            ended.cancel();
            // The actor may have gone.
            let _ = exits.send(exit).await;
        });
        handle
    }

    /// Asks it to end. The tracker of the agent's tasks sees that it does.
    pub(super) fn end(&self, hurry: bool) {
        if hurry {
            self.stop.hurry.cancel();
        }
        self.stop.stop.cancel();
    }
}

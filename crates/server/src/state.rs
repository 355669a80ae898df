//! What every request handler shares. Cheap to clone; holds no request's data.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::cells::{Cells, watch};
use crate::app::evaluations;
use crate::app::events::Events;
use crate::app::identity::{self, Identity};
use crate::app::scheduler;
use crate::app::scores::ScoreCache;
use crate::config::Config;
use crate::store::Store;

/// Shared state of the control plane.
#[derive(Clone)]
pub struct AppState {
    pub config: Arc<Config>,
    pub store: Store,
    pub clock: Clock,
    /// Which life of the database this is: made at first start, and anew after a restore.
    pub epoch: Arc<str>,
    /// Signs and checks access tokens, hashes passwords.
    pub identity: Arc<Identity>,
    /// Live agent sessions.
    pub cells: Arc<Cells>,
    /// Changes of evaluations, for event streams and waiters.
    pub events: Arc<Events>,
    /// What local cells said of definitions lately.
    /// Scores that were computed lately.
    pub scores: Arc<ScoreCache>,
}

impl AppState {
    /// Opens keys and database.
    pub async fn open(config: Config, clock: Clock) -> anyhow::Result<Self> {
        let identity = Identity::open(&config.state_dir)?;
        let store = Store::open(&config.database_url).await?;
        let epoch = store.meta_or_insert("epoch", &uuid::Uuid::new_v4().to_string()).await?;
        Ok(Self {
            config: Arc::new(config),
            store,
            clock,
            epoch: epoch.into(),
            identity: Arc::new(identity),
            cells: Arc::new(Cells::new()),
            events: Arc::new(Events::new()),
            scores: Arc::default(),
        })
    }
}

impl AppState {
    /// Starts the work that no request asks for; it ends with `stop`.
    pub fn start_tasks(&self, stop: &CancellationToken) -> TaskTracker {
        let tasks = TaskTracker::new();
        tasks.spawn(identity::sweep(self.clone(), stop.clone()));
        tasks.spawn(evaluations::sweep(self.clone(), stop.clone()));
        tasks.spawn(watch::run(self.clone(), stop.clone()));
        tasks.spawn(scheduler::run(self.clone(), stop.clone()));
        tasks
    }
}

/// The time source: the system's, or a test's.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> i64 + Send + Sync>);

impl Clock {
    /// The system clock.
    #[must_use]
    pub fn system() -> Self {
        Self(Arc::new(|| chrono::Utc::now().timestamp_millis()))
    }

    /// A clock that answers what `now` returns, in Unix milliseconds.
    pub fn from_fn(now: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Unix milliseconds.
    #[must_use]
    pub fn now_ms(&self) -> i64 {
        (self.0)()
    }
}

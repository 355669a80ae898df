//! The components of one run and what becomes of each: the state machine between the runner's wishes, the attempts' news
//! and the restart policy. Starts attempts as tasks; talks to nobody.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use rlm_api::cluster::v1;
use rlm_core::failure::{Failure, FailureCode};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use tokio_util::sync::CancellationToken;

use super::Place;
use super::policy::{After, after_exit};

/// The model's name; a local cell has one.
pub const MODEL: &str = "model-0";

/// What something waits for before it can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waits {
    /// A stable cause of `rlm_core::run::Waiting`.
    pub cause: &'static str,
    pub message: String,
    /// None: since it is said.
    pub since_ms: Option<i64>,
}

/// What became of an attempt.
#[derive(Debug)]
pub enum Happened {
    Ready {
        address: String,
        node: String,
    },
    /// It does not run yet, and why. None: for nothing any more but its own start.
    Waits(Option<Waits>),
    /// Also with the last output of one that was asked to end. None: there was no process.
    Ended {
        failure: Option<Failure>,
    },
}

/// An attempt's news.
#[derive(Debug)]
pub struct News {
    pub name: String,
    pub attempt: u32,
    pub happened: Happened,
}

/// How an attempt is asked to end.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    pub stop: CancellationToken,
    pub hurry: CancellationToken,
}

/// What a component is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComponentKind {
    Model,
    Environment,
}

impl ComponentKind {
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Environment => "environment",
        }
    }

    #[must_use]
    pub const fn start_failed(self) -> FailureCode {
        match self {
            Self::Model => FailureCode::ModelStartFailed,
            Self::Environment => FailureCode::EnvironmentStartFailed,
        }
    }

    #[must_use]
    pub const fn start_timeout(self) -> FailureCode {
        match self {
            Self::Model => FailureCode::ModelStartTimeout,
            Self::Environment => FailureCode::EnvironmentStartTimeout,
        }
    }

    #[must_use]
    pub const fn crashed(self) -> FailureCode {
        match self {
            Self::Model => FailureCode::ModelCrashed,
            Self::Environment => FailureCode::EnvironmentCrashed,
        }
    }
}

/// Which component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Model,
    Environment { binding: u32, pod: u32 },
}

impl Role {
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Model => MODEL.to_owned(),
            Self::Environment { binding, pod } => format!("env-{binding}-{pod}"),
        }
    }

    #[must_use]
    pub const fn kind(self) -> ComponentKind {
        match self {
            Self::Model => ComponentKind::Model,
            Self::Environment { .. } => ComponentKind::Environment,
        }
    }
}

enum State {
    Starting(Stop),
    Ready(Stop, String),
    /// Asked to end; what then.
    Ending(Stop, Then),
    /// Ended by itself; the next attempt starts then.
    Pausing(Instant),
    Failed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Restart,
    Remove,
}

struct Component {
    role: Role,
    lanes: u32,
    attempt: u32,
    /// Where the last attempt that served was.
    node: String,
    state: State,
    /// Why it does not run yet, where that is known.
    waits: Option<Waits>,
    /// How the last attempt ended by itself, or why there is none.
    failure: Option<Failure>,
    /// Since the last episode, this one included.
    starts: u32,
}

/// The components of one run.
pub struct Components<P> {
    place: Arc<P>,
    news: mpsc::Sender<News>,
    map: BTreeMap<String, Component>,
    /// Highest attempt of each name, also of those that are gone.
    attempts: HashMap<String, u32>,
    tasks: JoinSet<()>,
}

impl<P: Place> Components<P> {
    pub fn new(place: Arc<P>, attempts: HashMap<String, u32>, news: mpsc::Sender<News>) -> Self {
        Self { place, news, map: BTreeMap::new(), attempts, tasks: JoinSet::new() }
    }

    /// Starts the component unless it is there already; says where it stands.
    pub fn ensure(&mut self, role: Role, lanes: u32) -> Vec<v1::Component> {
        let name = role.name();
        match self.map.get_mut(&name) {
            Some(component) if component.lanes == lanes => {
                if let State::Ending(_, then) = &mut component.state {
                    *then = Then::Restart;
                }
                vec![self.message(&name)].into_iter().flatten().collect()
            }
            Some(component) => {
                component.lanes = lanes;
                let attempt = component.attempt;
                self.restart(&name, attempt)
            }
            None => {
                let attempt = self.attempts.get(&name).copied().unwrap_or(0);
                let component =
                    Component { role, lanes, attempt, node: String::new(), state: State::Failed, waits: None, failure: None, starts: 0 };
                self.map.insert(name.clone(), component);
                self.start(&name)
            }
        }
    }

    /// Starts the next attempt.
    fn start(&mut self, name: &str) -> Vec<v1::Component> {
        self.reap();
        let Some(component) = self.map.get_mut(name) else { return Vec::new() };
        component.attempt += 1;
        component.starts += 1;
        component.waits = None;
        self.attempts.insert(name.to_owned(), component.attempt);
        let stop = Stop::default();
        match self.place.start(component.role, component.lanes, component.attempt, stop.clone(), self.news.clone()) {
            Ok(attempt) => {
                component.state = State::Starting(stop);
                self.tasks.spawn(attempt);
            }
            Err(failure) => {
                component.state = State::Failed;
                component.failure = Some(failure.of(name));
            }
        }
        self.message(name).into_iter().collect()
    }

    fn reap(&mut self) {
        while self.tasks.try_join_next().is_some() {}
    }

    /// What an attempt reported; news of an attempt that is not the current one changes nothing.
    pub fn on_news(&mut self, news: News) -> Vec<v1::Component> {
        let Some(component) = self.map.get_mut(&news.name).filter(|component| component.attempt == news.attempt) else {
            return Vec::new();
        };
        match (news.happened, &mut component.state) {
            (Happened::Ready { address, node }, State::Starting(stop)) => {
                component.node = node;
                component.waits = None;
                component.state = State::Ready(stop.clone(), address);
                self.message(&news.name).into_iter().collect()
            }
            (Happened::Waits(waits), State::Starting(_)) => {
                component.waits = waits;
                Vec::new()
            }
            (Happened::Waits(_), State::Ready(..) | State::Ending(..) | State::Pausing(_) | State::Failed) => Vec::new(),
            (Happened::Ready { .. }, State::Ready(..) | State::Ending(..) | State::Pausing(_) | State::Failed) => Vec::new(),
            (Happened::Ended { .. }, State::Ending(_, Then::Remove)) => {
                self.map.remove(&news.name);
                Vec::new()
            }
            (Happened::Ended { failure }, State::Ending(_, Then::Restart)) => {
                component.failure = failure;
                let mut messages: Vec<v1::Component> = self.message(&news.name).into_iter().collect();
                messages.extend(self.start(&news.name));
                messages
            }
            (Happened::Ended { failure: Some(failure) }, State::Starting(_) | State::Ready(..)) => {
                tracing::warn!(component = %news.name, attempt = news.attempt, code = failure.code.as_str(), message = %failure.message, "component ended");
                let after = after_exit(failure.code, component.starts);
                component.failure = Some(failure);
                match after {
                    After::GiveUp => {
                        component.state = State::Failed;
                        self.message(&news.name).into_iter().collect()
                    }
                    After::Restart(pause) => {
                        component.state = State::Pausing(Instant::now() + pause);
                        let mut messages: Vec<v1::Component> = self.message(&news.name).into_iter().collect();
                        messages.extend(self.on_timer(Instant::now()));
                        messages
                    }
                }
            }
            // Ended as asked while nobody asks any more, or twice: nothing is left to do.
            (Happened::Ended { .. }, State::Starting(_) | State::Ready(..) | State::Pausing(_) | State::Failed) => Vec::new(),
        }
    }

    /// Replaces the component if `attempt` is its current one. Said once it has ended, with its last output.
    pub fn restart(&mut self, name: &str, attempt: u32) -> Vec<v1::Component> {
        let Some(component) = self.map.get_mut(name).filter(|component| component.attempt == attempt) else { return Vec::new() };
        match &mut component.state {
            State::Starting(stop) | State::Ready(stop, _) => {
                // It hangs or is broken: no reason to be patient with it.
                stop.hurry.cancel();
                stop.stop.cancel();
                component.failure = None;
                component.state = State::Ending(stop.clone(), Then::Restart);
                Vec::new()
            }
            State::Ending(_, then) => {
                *then = Then::Restart;
                Vec::new()
            }
            // It starts anyway, or was given up for good.
            State::Pausing(_) | State::Failed => Vec::new(),
        }
    }

    /// Ends the environments that `which` selects and forgets them.
    pub fn release(&mut self, which: impl Fn(Role) -> bool) {
        let names: Vec<String> = self
            .map
            .iter()
            .filter(|(_, component)| component.role != Role::Model && which(component.role))
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            let Some(component) = self.map.get_mut(&name) else { continue };
            match &mut component.state {
                State::Starting(stop) | State::Ready(stop, _) => {
                    stop.stop.cancel();
                    component.state = State::Ending(stop.clone(), Then::Remove);
                }
                State::Ending(_, then) => *then = Then::Remove,
                State::Pausing(_) | State::Failed => {
                    self.map.remove(&name);
                }
            }
        }
    }

    /// An episode was finished: what has been started so far was not in vain.
    pub fn progress(&mut self) {
        for component in self.map.values_mut() {
            component.starts = component.starts.min(1);
        }
    }

    /// When something is to be started.
    #[must_use]
    pub fn next_timer(&self) -> Option<Instant> {
        self.map
            .values()
            .filter_map(|component| match component.state {
                State::Pausing(until) => Some(until),
                State::Starting(_) | State::Ready(..) | State::Ending(..) | State::Failed => None,
            })
            .min()
    }

    /// Starts what is due.
    pub fn on_timer(&mut self, now: Instant) -> Vec<v1::Component> {
        let due: Vec<String> = self
            .map
            .iter()
            .filter(|(_, component)| matches!(component.state, State::Pausing(until) if until <= now))
            .map(|(name, _)| name.clone())
            .collect();
        due.iter().flat_map(|name| self.start(name)).collect()
    }

    /// All of them, as a runner that attaches is told.
    #[must_use]
    pub fn snapshot(&self) -> Vec<v1::Component> {
        self.map.keys().filter_map(|name| self.message(name)).collect()
    }

    /// Whether the model serves, and whether an environment does.
    #[must_use]
    pub fn ready(&self) -> (bool, bool) {
        let ready =
            |want: fn(Role) -> bool| self.map.values().any(|component| want(component.role) && matches!(component.state, State::Ready(..)));
        (ready(|role| role == Role::Model), ready(|role| role != Role::Model))
    }

    /// What a component that starts waits for, where that is known.
    #[must_use]
    pub fn waits(&self) -> Option<&Waits> {
        self.map.values().filter(|component| matches!(component.state, State::Starting(_))).find_map(|component| component.waits.as_ref())
    }

    /// Why the model is given up; None: it is not.
    #[must_use]
    pub fn model_failure(&self) -> Option<&Failure> {
        let model = self.map.get(MODEL)?;
        match model.state {
            State::Failed => model.failure.as_ref(),
            State::Starting(_) | State::Ready(..) | State::Ending(..) | State::Pausing(_) => None,
        }
    }

    fn message(&self, name: &str) -> Option<v1::Component> {
        use v1::component::Phase;
        let component = self.map.get(name)?;
        let (phase, address) = match &component.state {
            State::Starting(_) => (Phase::Starting, ""),
            State::Ready(_, address) => (Phase::Ready, address.as_str()),
            State::Ending(_, Then::Restart) | State::Pausing(_) => (Phase::Restarting, ""),
            // Released: the runner asked for it and hears no more of it.
            State::Ending(_, Then::Remove) => return None,
            State::Failed => (Phase::Failed, ""),
        };
        Some(v1::Component {
            name: name.to_owned(),
            attempt: component.attempt,
            phase: phase.into(),
            address: address.to_owned(),
            failure: component.failure.as_ref().map(v1::Failure::from),
            node: component.node.clone(),
        })
    }

    /// Ends everything and waits for it, at most `limit`. `inbox` is emptied meanwhile, so that no task waits to be heard.
    pub async fn end_all(&mut self, hurry: bool, limit: Duration, inbox: &mut mpsc::Receiver<News>) {
        for component in self.map.values() {
            match &component.state {
                State::Starting(stop) | State::Ready(stop, _) | State::Ending(stop, _) => {
                    if hurry {
                        stop.hurry.cancel();
                    }
                    stop.stop.cancel();
                }
                State::Pausing(_) | State::Failed => {}
            }
        }
        self.map.clear();
        let deadline = tokio::time::sleep(limit);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                ended = self.tasks.join_next() => if ended.is_none() { return },
                _ = inbox.recv() => {}
                () = &mut deadline => {
                    tracing::error!(left = self.tasks.len(), "components did not end in time; killed with their handles");
                    self.tasks.shutdown().await;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "components_tests.rs"]
mod tests;

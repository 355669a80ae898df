//! What the agent has said about the run's processes: which attempt runs where, and how earlier ones ended.

use std::collections::BTreeMap;
use std::time::Duration;

use rlm_api::cluster::v1::{Component, component::Phase};
use rlm_core::failure::{Failure, FailureCode};
use tokio::sync::watch;

/// The model of a run.
pub const MODEL: &str = "model-0";

/// Name of an environment process.
#[must_use]
pub fn env_name(binding: u32, pod: u32) -> String {
    format!("env-{binding}-{pod}")
}

#[derive(Debug, Clone, Default, PartialEq)]
struct View {
    attempt: u32,
    ready: Option<String>,
    node: String,
    /// It ended for good.
    failed: Option<Failure>,
    /// The current attempt has ended, the next has not begun.
    restarting: bool,
    /// How attempts ended, newest last.
    ended: BTreeMap<u32, Failure>,
}

/// A process that serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    pub attempt: u32,
    pub address: String,
    pub node: String,
}

#[derive(Debug, Clone)]
pub struct Components {
    views: watch::Sender<BTreeMap<String, View>>,
}

impl Default for Components {
    fn default() -> Self {
        Self { views: watch::Sender::new(BTreeMap::new()) }
    }
}

impl Components {
    /// Takes the agent's word; older words than what is known are dropped.
    pub fn update(&self, message: &Component) {
        let failure = message.failure.as_ref().map(Failure::from);
        let phase = message.phase();
        self.views.send_modify(|views| {
            let view = views.entry(message.name.clone()).or_default();
            if message.attempt < view.attempt {
                return;
            }
            view.attempt = message.attempt;
            view.node.clone_from(&message.node);
            view.ready = (phase == Phase::Ready && !message.address.is_empty()).then(|| message.address.clone());
            view.restarting = phase == Phase::Restarting;
            match phase {
                Phase::Failed => {
                    let failure = failure.unwrap_or_else(|| {
                        Failure::new(FailureCode::Internal, format!("{} ended for good; the agent did not say why", message.name))
                            .of(&message.name)
                    });
                    view.ended.insert(message.attempt, failure.clone());
                    view.failed = Some(failure);
                }
                Phase::Restarting => {
                    if let Some(failure) = failure {
                        view.ended.insert(message.attempt, failure);
                    }
                }
                Phase::Starting | Phase::Ready | Phase::Unspecified => {
                    if let (Some(failure), Some(before)) = (failure, message.attempt.checked_sub(1)) {
                        view.ended.insert(before, failure);
                    }
                }
            }
            while view.ended.len() > 4 {
                view.ended.pop_first();
            }
        });
    }

    /// Forgets the environments of a binding that is given back.
    pub fn forget(&self, binding: u32) {
        let prefix = format!("env-{binding}-");
        self.views.send_modify(|views| views.retain(|name, _| !name.starts_with(&prefix)));
    }

    /// Waits for an attempt after `after` to serve. The agent knows the start-up time-out and says when it is over.
    pub async fn ready(&self, name: &str, after: Option<u32>) -> Result<Ready, Failure> {
        let mut views = self.views.subscribe();
        let found = views
            .wait_for(|views| views.get(name).is_some_and(|view| view.failed.is_some() || Self::serves(view, after).is_some()))
            .await
            .ok()
            .and_then(|views| views.get(name).cloned());
        let gone = || Failure::new(FailureCode::AgentError, format!("the agent's word on {name} can't be had any more")).of(name);
        let view = found.ok_or_else(gone)?;
        match view.failed.clone() {
            Some(failure) => Err(failure),
            None => Self::serves(&view, after).ok_or_else(gone),
        }
    }

    fn serves(view: &View, after: Option<u32>) -> Option<Ready> {
        let address = view.ready.clone()?;
        after.is_none_or(|after| view.attempt > after).then(|| Ready { attempt: view.attempt, address, node: view.node.clone() })
    }

    /// How `attempt` ended, as soon as the agent says it; None when it says nothing in time.
    pub async fn verdict(&self, name: &str, attempt: u32, wait: Duration) -> Option<Failure> {
        let mut views = self.views.subscribe();
        let over = |views: &BTreeMap<String, View>| {
            views
                .get(name)
                .is_some_and(|view| view.attempt > attempt || view.failed.is_some() || (view.attempt == attempt && view.restarting))
        };
        let views = tokio::time::timeout(wait, views.wait_for(over)).await.ok()?.ok()?;
        let view = views.get(name)?;
        view.ended.range(attempt..).next().map(|(_, failure)| failure.clone()).or_else(|| view.failed.clone())
    }

    /// Returns when `attempt` is no longer the one that serves.
    pub async fn gone(&self, name: &str, attempt: u32) {
        let mut views = self.views.subscribe();
        let over = |views: &BTreeMap<String, View>| {
            views.get(name).is_none_or(|view| view.attempt > attempt || view.failed.is_some() || view.restarting)
        };
        let _ = views.wait_for(over).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlm_api::cluster::v1;

    fn word(attempt: u32, phase: Phase, failure: Option<FailureCode>) -> Component {
        Component {
            name: "env-0-0".to_owned(),
            attempt,
            phase: phase.into(),
            address: if phase == Phase::Ready { format!("unix:///{attempt}") } else { String::new() },
            failure: failure.map(|code| v1::Failure::from(&Failure::new(code, "x"))),
            node: String::new(),
        }
    }

    #[tokio::test]
    async fn the_verdict_on_an_attempt_is_found_however_it_is_said() {
        for words in [
            vec![word(1, Phase::Restarting, Some(FailureCode::EnvironmentCrashed))],
            vec![word(2, Phase::Starting, Some(FailureCode::EnvironmentCrashed))],
            vec![word(1, Phase::Failed, Some(FailureCode::EnvironmentCrashed))],
            vec![word(2, Phase::Restarting, Some(FailureCode::EnvironmentCrashed))],
        ] {
            let components = Components::default();
            components.update(&word(1, Phase::Ready, None));
            assert_eq!(components.verdict("env-0-0", 1, Duration::ZERO).await, None);
            for word in words {
                components.update(&word);
            }
            assert_eq!(components.verdict("env-0-0", 1, Duration::from_secs(5)).await.unwrap().code, FailureCode::EnvironmentCrashed);
        }
    }

    #[tokio::test]
    async fn an_older_word_changes_nothing() {
        let components = Components::default();
        components.update(&word(2, Phase::Ready, None));
        components.update(&word(1, Phase::Failed, None));
        assert_eq!(components.ready("env-0-0", Some(1)).await.unwrap().attempt, 2);
        components.update(&word(2, Phase::Failed, None));
        assert_eq!(components.ready("env-0-0", Some(1)).await.unwrap_err().code, FailureCode::Internal);
        components.forget(0);
        components.update(&word(1, Phase::Ready, None));
        assert_eq!(components.ready("env-0-0", None).await.unwrap().address, "unix:///1");
    }
}

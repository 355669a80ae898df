//! Changes of evaluations, for event streams and waiters. It says *that* an evaluation changed, never what: whoever listens
//! reads the state anew, so a lost or merged signal loses nothing.

use std::time::Duration;

use rlm_core::ids::EvaluationId;
use tokio::sync::broadcast;
use tokio::time::Instant;

/// Signals kept for a slow listener; one that falls further behind is told so and reads the state anew.
const KEPT: usize = 1024;

/// Who listens to which evaluation.
#[derive(Debug)]
pub struct Events {
    changes: broadcast::Sender<EvaluationId>,
}

impl Default for Events {
    fn default() -> Self {
        Self { changes: broadcast::channel(KEPT).0 }
    }
}

impl Events {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Says that the evaluation changed.
    pub fn publish(&self, evaluation: EvaluationId) {
        // Without listeners there is nobody to tell.
        let _ = self.changes.send(evaluation);
    }

    /// Changes from now on. Subscribe before reading the state, or a change in between is missed.
    #[must_use]
    pub fn subscribe(&self) -> Listener {
        Listener { changes: self.changes.subscribe() }
    }
}

/// A subscription.
#[derive(Debug)]
pub struct Listener {
    changes: broadcast::Receiver<EvaluationId>,
}

impl Listener {
    /// Waits until `evaluation` has (or may have) changed; false when `deadline` came first.
    pub async fn changed(&mut self, evaluation: EvaluationId, deadline: Instant) -> bool {
        loop {
            match tokio::time::timeout_at(deadline, self.changes.recv()).await {
                Ok(Ok(changed)) if changed == evaluation => return true,
                Ok(Ok(_)) => {}
                Ok(Err(broadcast::error::RecvError::Lagged(_))) => return true,
                Ok(Err(broadcast::error::RecvError::Closed)) => {
                    tokio::time::sleep_until(deadline).await;
                    return false;
                }
                Err(_) => return false,
            }
        }
    }

    /// As [`Listener::changed`] within `time`.
    pub async fn changed_within(&mut self, evaluation: EvaluationId, time: Duration) -> bool {
        self.changed(evaluation, Instant::now() + time).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_evaluation_listened_to_wakes() {
        let events = Events::new();
        let mut listener = events.subscribe();
        let (mine, other) = (EvaluationId::generate(), EvaluationId::generate());
        events.publish(other);
        assert!(!listener.changed_within(mine, Duration::from_secs(1)).await);
        events.publish(mine);
        assert!(listener.changed_within(mine, Duration::from_secs(1)).await);
    }

    #[tokio::test]
    async fn a_listener_that_fell_behind_is_woken() {
        let events = Events::new();
        let mut listener = events.subscribe();
        for _ in 0..2 * KEPT {
            events.publish(EvaluationId::generate());
        }
        assert!(listener.changed_within(EvaluationId::generate(), Duration::from_secs(1)).await);
    }
}

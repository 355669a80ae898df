//! Every time-out and bound of the runner in one place, so that tests can shorten them.

use std::time::Duration;

#[derive(Debug, Clone)]
pub struct Tuning {
    /// For reaching a server whose address the agent has announced.
    pub connect: Duration,
    /// For a handshake and for opening a stream.
    pub handshake: Duration,
    /// For binding an adapter or pinning an edition.
    pub configure: Duration,
    /// How long a goodbye to a server may take.
    pub goodbye: Duration,
    /// How long to wait for the agent's word on how a lost component ended.
    pub verdict: Duration,
    /// First and longest pause between tries to reach something.
    pub backoff: (Duration, Duration),
    /// How long the runner goes on without an agent.
    pub agent_patience: Duration,
    /// Finished episodes are sent after this time or when there are so many.
    pub flush: (Duration, usize),
    /// Most finished or running episodes that the agent has not acknowledged.
    pub unacknowledged: usize,
    /// How often a row is begun anew after faults that are nobody's.
    pub infrastructure_retries: u32,
    /// How often a component may end in turn without having done anything.
    pub fruitless_restarts: u32,
    pub progress_every: Duration,
    pub metrics_every: Duration,
    /// Most actions, observations or groups in one message.
    pub group: usize,
    /// Most predicts in flight on a model that does not fuse them.
    pub singles: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(20),
            handshake: Duration::from_secs(60),
            configure: Duration::from_secs(600),
            goodbye: Duration::from_secs(2),
            verdict: Duration::from_secs(10),
            backoff: (Duration::from_millis(50), Duration::from_secs(5)),
            agent_patience: Duration::from_secs(15 * 60),
            flush: (Duration::from_millis(20), 256),
            unacknowledged: 4096,
            infrastructure_retries: 20,
            fruitless_restarts: 20,
            progress_every: Duration::from_millis(300),
            metrics_every: Duration::from_secs(1),
            group: 256,
            singles: 32,
        }
    }
}

/// Pauses that double, each with full jitter.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    first: Duration,
    longest: Duration,
}

impl Backoff {
    #[must_use]
    pub fn new((first, longest): (Duration, Duration)) -> Self {
        Self { next: first, first, longest }
    }

    /// The next pause: between nothing and twice the last bound.
    pub fn pause(&mut self) -> Duration {
        let bound = self.next;
        self.next = (bound * 2).min(self.longest);
        bound.mul_f64(rand::random::<f64>().clamp(0.1, 1.0))
    }

    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

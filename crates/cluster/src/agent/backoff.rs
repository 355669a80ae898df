//! How long to wait before the next try. Pure: the random number is a parameter.

use std::time::Duration;

/// First ceiling; it doubles with each try.
const BASE: Duration = Duration::from_secs(1);
/// Nobody is asked more often than this.
const FLOOR: Duration = Duration::from_millis(100);

/// Full jitter: evenly between 0 and a ceiling that doubles from 1 s to `cap`. A delay that the server named is a lower
/// bound, and the jitter comes on top of it.
#[must_use]
pub fn delay(failures: u32, cap: Duration, server: Option<Duration>, random: f64) -> Duration {
    let ceiling = BASE.saturating_mul(1 << failures.min(16)).min(cap);
    let jitter = ceiling.mul_f64(random.clamp(0.0, 1.0));
    match server {
        Some(server) => server + jitter.min(BASE),
        None => jitter.max(FLOOR.min(cap)),
    }
}

/// Counts tries.
#[derive(Debug)]
pub struct Backoff {
    failures: u32,
    cap: Duration,
}

impl Backoff {
    #[must_use]
    pub const fn new(cap: Duration) -> Self {
        Self { failures: 0, cap }
    }

    /// The delay after one more failure.
    pub fn next(&mut self, server: Option<Duration>) -> Duration {
        let delay = delay(self.failures, self.cap, server, rand::random());
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// After a session that was good.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stays_under_the_cap_and_over_what_the_server_said(failures in 0_u32..100, cap_ms in 100_u64..120_000, server_ms in 0_u64..60_000, random in 0.0..1.0_f64) {
            let cap = Duration::from_millis(cap_ms);
            prop_assert!(delay(failures, cap, None, random) <= cap);
            let server = Duration::from_millis(server_ms);
            let named = delay(failures, cap, Some(server), random);
            prop_assert!(named >= server && named <= server + BASE);
        }
    }

    #[test]
    fn the_ceiling_doubles() {
        let cap = Duration::from_secs(120);
        let ceilings: Vec<u64> = (0..9).map(|failures| delay(failures, cap, None, 1.0).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 16, 32, 64, 120, 120]);
    }
}

//! Whether something that ended is started again, and when. Pure.
//!
//! A component that ends while it serves is always replaced without being asked, so that the runner only waits for the next
//! attempt. A start that fails by the user's own doing is not repeated. What keeps ending is given up: after
//! [`CRASH_STARTS`] starts without an episode in between when its own code is to blame, after [`KILL_STARTS`] otherwise.

use std::time::Duration;

use rlm_core::failure::{FailureCode, Retry};

/// Starts without progress that a component gets when its own code ends it.
pub const CRASH_STARTS: u32 = 5;
/// Starts without progress that a component gets when something else ends it.
pub const KILL_STARTS: u32 = 25;
/// Starts without progress that a runner gets.
pub const RUNNER_STARTS: u32 = 8;

/// What follows an end that nobody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    Restart(Duration),
    GiveUp,
}

/// `starts`: starts since the last episode, this one included.
#[must_use]
pub fn after_exit(code: FailureCode, starts: u32) -> After {
    let limit = match code.retry() {
        Retry::Never => return After::GiveUp,
        Retry::Counted => CRASH_STARTS,
        Retry::Always => KILL_STARTS,
    };
    if starts >= limit { After::GiveUp } else { After::Restart(pause(starts)) }
}

#[must_use]
pub fn after_runner_exit(starts: u32) -> After {
    if starts >= RUNNER_STARTS { After::GiveUp } else { After::Restart(pause(starts)) }
}

/// At once, then 0.2 s, doubled up to 5 s.
fn pause(starts: u32) -> Duration {
    match starts {
        0 | 1 => Duration::ZERO,
        more => Duration::from_millis(200 << (more - 2).min(5)).min(Duration::from_secs(5)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_loops_end_and_kills_do_not_count_against_the_user() {
        assert_eq!(after_exit(FailureCode::EnvironmentCrashed, 1), After::Restart(Duration::ZERO));
        assert!(matches!(after_exit(FailureCode::ModelCrashed, 4), After::Restart(_)));
        assert_eq!(after_exit(FailureCode::ModelCrashed, 5), After::GiveUp);
        assert!(matches!(after_exit(FailureCode::ProcessKilled, 24), After::Restart(_)));
        assert_eq!(after_exit(FailureCode::ProcessKilled, 25), After::GiveUp);
        for code in [
            FailureCode::InvalidParams,
            FailureCode::InvalidEntrypoint,
            FailureCode::ModelStartFailed,
            FailureCode::EnvironmentStartTimeout,
        ] {
            assert_eq!(after_exit(code, 1), After::GiveUp, "{}", code.as_str());
        }
        assert_eq!(after_runner_exit(RUNNER_STARTS), After::GiveUp);
    }

    #[test]
    fn pauses_grow_to_five_seconds() {
        let pauses: Vec<u128> = (1..9).map(|starts| pause(starts).as_millis()).collect();
        assert_eq!(pauses, [0, 200, 400, 800, 1600, 3200, 5000, 5000]);
    }
}

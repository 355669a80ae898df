//! Decisions about an agent's link: who may open a session, whether a cluster counts as connected. Pure.

use rlm_core::error::{Code, Error};
use rlm_core::ids::RunId;

/// What is known of the agent that was connected last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Last<'a> {
    pub instance_id: Option<&'a str>,
    /// Last message, by the server's clock; None before the first.
    pub last_seen_at: Option<i64>,
    pub disconnected_at: Option<i64>,
}

/// How a session may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The agent that was here before, or the first one.
    Welcome,
    /// Another agent in place of one that is gone: it knows nothing of the runs that the cluster holds.
    Replaces,
}

/// Whether the last agent counts as connected. Silence counts from `listening_since` at the earliest: before, this server
/// could not have heard it.
#[must_use]
pub fn is_connected(last: Last<'_>, listening_since: i64, now_ms: i64, disconnected_after_ms: i64) -> bool {
    match (last.last_seen_at, last.disconnected_at) {
        (Some(seen), None) => now_ms - seen.max(listening_since) < disconnected_after_ms,
        (None, _) | (Some(_), Some(_)) => false,
    }
}

/// Decides on the agent `instance_id` that opens a session.
pub fn admit(
    cluster: &str,
    instance_id: &str,
    last: Last<'_>,
    listening_since: i64,
    now_ms: i64,
    disconnected_after_ms: i64,
) -> Result<Admission, Error> {
    match last.instance_id {
        None => Ok(Admission::Welcome),
        Some(known) if known == instance_id => Ok(Admission::Welcome),
        Some(known) if is_connected(last, listening_since, now_ms, disconnected_after_ms) => Err(Error::new(
            Code::ClusterHasLiveAgent,
            format!(
                "another agent of cluster {cluster} is connected (instance {known}); only one may be. Stop that one, or register this cluster as \
                 one of its own; an agent that is gone makes way after {} s",
                disconnected_after_ms / 1000
            ),
        )),
        Some(_) => Ok(Admission::Replaces),
    }
}

/// A run at a generation.
pub type Held = (RunId, u64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn last(instance: Option<&str>, seen: Option<i64>, lost: Option<i64>) -> Last<'_> {
        Last { instance_id: instance, last_seen_at: seen, disconnected_at: lost }
    }

    #[test]
    fn the_same_agent_always_may() {
        for seen in [None, Some(0), Some(1000)] {
            assert_eq!(admit("cl", "a", last(Some("a"), seen, None), 0, 1000, 30_000).unwrap(), Admission::Welcome);
        }
        assert_eq!(admit("cl", "a", last(None, None, None), 0, 1000, 30_000).unwrap(), Admission::Welcome);
    }

    #[test]
    fn another_agent_waits_until_the_first_is_gone() {
        let refused =
            |seen, lost, since, now| admit("cl", "b", last(Some("a"), Some(seen), lost), since, now, 30_000).err().map(|error| error.code);
        assert_eq!(refused(0, None, 0, 29_999), Some(Code::ClusterHasLiveAgent));
        assert_eq!(refused(0, None, 0, 30_000), None);
        assert_eq!(refused(0, Some(5), 0, 10), None, "its loss was noted");
        assert_eq!(refused(0, None, 100_000, 110_000), Some(Code::ClusterHasLiveAgent), "a restarted server has not listened long enough");
    }

    proptest! {
        #[test]
        fn connected_ends_once_and_for_all_with_silence(seen in 0_i64..1000, since in 0_i64..1000, now in 0_i64..5000, after in 1_i64..1000) {
            let here = |now| is_connected(last(Some("a"), Some(seen), None), since, now, after);
            if !here(now) {
                prop_assert!(!here(now + 1) || now < seen.max(since));
            }
            prop_assert_eq!(here(seen.max(since) + after), false);
        }
    }
}

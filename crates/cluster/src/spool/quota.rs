//! What goes first when room is short. Pure.

/// How full the spool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub used: u64,
    pub quota: u64,
    /// Acknowledged records that are still kept.
    pub retained: u64,
    /// Unacknowledged telemetry records.
    pub telemetry: bool,
    /// The disk takes no more, whatever the quota says.
    pub disk_full: bool,
}

/// The next thing to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There is room.
    Enough,
    /// Delete the oldest acknowledged records.
    DropRetained,
    /// Replace the oldest telemetry by a note of its loss.
    DropTelemetry,
    /// Nothing may be dropped: senders wait.
    Wait,
}

/// Acknowledged records may fill half the quota; telemetry goes when the quota is reached; results and status never.
#[must_use]
pub const fn next_step(usage: Usage) -> Step {
    if usage.disk_full && usage.retained > 0 {
        Step::DropRetained
    } else if usage.used <= usage.quota / 2 {
        Step::Enough
    } else if usage.retained > 0 {
        Step::DropRetained
    } else if usage.used <= usage.quota {
        Step::Enough
    } else if usage.telemetry {
        Step::DropTelemetry
    } else {
        Step::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_is_dropped_below_half_and_results_never(used in 0_u64..400, retained in 0_u64..3, telemetry: bool, disk_full: bool) {
            let step = next_step(Usage { used, quota: 200, retained, telemetry, disk_full });
            match step {
                Step::Enough => prop_assert!(used <= 200),
                Step::DropRetained => prop_assert!(retained > 0 && (used > 100 || disk_full)),
                Step::DropTelemetry => prop_assert!(telemetry && retained == 0 && used > 200),
                Step::Wait => prop_assert!(!telemetry && retained == 0 && used > 200),
            }
        }
    }
}

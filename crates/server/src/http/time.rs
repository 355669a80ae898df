//! Stored times (Unix milliseconds) as RFC 3339.

use chrono::{DateTime, Utc};

/// The time that is `ms` Unix milliseconds; beyond the calendar, its end.
#[must_use]
pub fn rfc3339(ms: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(ms).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

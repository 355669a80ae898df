//! Rate limits of the endpoints that guess-work would attack: sign-in, device codes, tokens. Token buckets by name, bounded
//! in number; the decision is a pure function of the bucket and the time.

use std::collections::HashMap;
use std::sync::Mutex;

use rlm_core::error::{Code, Error};
use sha2::{Digest as _, Sha256};

/// Most buckets held; beyond it the fullest (least used) go first.
const MOST: usize = 10_000;

/// How many requests at once, and how many more per minute.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    pub burst: f64,
    pub per_minute: f64,
}

/// Password attempts for one account, and from one address.
pub const SIGN_IN: Rate = Rate { burst: 10.0, per_minute: 10.0 };
/// Token requests from one address.
pub const TOKEN: Rate = Rate { burst: 120.0, per_minute: 240.0 };
/// Device codes asked for from one address.
pub const DEVICE: Rate = Rate { burst: 30.0, per_minute: 30.0 };
/// User codes tried by one signed-in user.
pub const USER_CODE: Rate = Rate { burst: 20.0, per_minute: 10.0 };

#[derive(Debug, Clone, Copy, PartialEq)]
struct Bucket {
    tokens: f64,
    at_ms: i64,
}

/// Takes one token at `now_ms`; `Err` says after how many seconds there is one.
fn take(bucket: Option<Bucket>, rate: Rate, now_ms: i64) -> (Bucket, Result<(), u64>) {
    let tokens = match bucket {
        None => rate.burst,
        Some(bucket) => {
            let minutes = (now_ms - bucket.at_ms).max(0) as f64 / 60_000.0;
            (bucket.tokens + minutes * rate.per_minute).min(rate.burst)
        }
    };
    if tokens >= 1.0 {
        (Bucket { tokens: tokens - 1.0, at_ms: now_ms }, Ok(()))
    } else {
        let wait = ((1.0 - tokens) / rate.per_minute * 60.0).ceil().max(1.0);
        (Bucket { tokens, at_ms: now_ms }, Err(wait as u64))
    }
}

/// Longest subject that is kept as it is.
const LONGEST_SUBJECT: usize = 64;

/// Subjects come from requests: a long one is kept as its hash, so that the buckets stay small.
fn bounded(subject: &str) -> String {
    if subject.len() <= LONGEST_SUBJECT { subject.to_owned() } else { hex::encode(Sha256::digest(subject)) }
}

/// The buckets of a server.
#[derive(Debug, Default)]
pub struct Limits {
    buckets: Mutex<HashMap<(&'static str, String), Bucket>>,
}

impl Limits {
    /// Counts one request of `subject` against `rate`, under the name `what`.
    pub fn check(&self, what: &'static str, subject: &str, rate: Rate, now_ms: i64) -> Result<(), Error> {
        let mut buckets = self.buckets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if buckets.len() >= MOST {
            let half = rate.burst / 2.0;
            buckets.retain(|_, bucket| bucket.tokens < half && now_ms - bucket.at_ms < 600_000);
            if buckets.len() >= MOST {
                buckets.clear();
            }
        }
        let key = (what, bounded(subject));
        let (bucket, verdict) = take(buckets.get(&key).copied(), rate, now_ms);
        buckets.insert(key, bucket);
        verdict.map_err(|seconds| Error::new(Code::RateLimited, format!("too many attempts ({what}); try again in {seconds} s")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_a_trickle() {
        let limits = Limits::default();
        let rate = Rate { burst: 3.0, per_minute: 6.0 };
        for _ in 0..3 {
            assert!(limits.check("sign-in", "a", rate, 0).is_ok());
        }
        let refused = limits.check("sign-in", "a", rate, 0).err().map(|error| (error.code, error.message.contains("10 s")));
        assert_eq!(refused, Some((Code::RateLimited, true)));
        assert!(limits.check("sign-in", "b", rate, 0).is_ok(), "others are not held up");
        assert!(limits.check("sign-in", "a", rate, 9_999).is_err());
        assert!(limits.check("sign-in", "a", rate, 10_001).is_ok());
        assert!(limits.check("sign-in", "a", rate, 10_001).is_err());
    }

    #[test]
    fn long_subjects_are_kept_short_and_apart() {
        let limits = Limits::default();
        let rate = Rate { burst: 1.0, per_minute: 1.0 };
        let (one, two) = ("a".repeat(100_000), format!("{}b", "a".repeat(99_999)));
        assert!(limits.check("sign-in", &one, rate, 0).is_ok() && limits.check("sign-in", &two, rate, 0).is_ok());
        assert!(limits.check("sign-in", &one, rate, 0).is_err());
        assert!(limits.buckets.lock().unwrap().keys().all(|(_, subject)| subject.len() <= LONGEST_SUBJECT));
    }

    #[test]
    fn the_number_of_buckets_is_bounded() {
        let limits = Limits::default();
        for number in 0..(MOST + 50) {
            let _ = limits.check("sign-in", &number.to_string(), SIGN_IN, 0);
        }
        assert!(limits.buckets.lock().is_ok_and(|buckets| buckets.len() <= MOST));
    }
}

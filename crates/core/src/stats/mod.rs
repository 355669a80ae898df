//! Statistics of evaluations: how sure a rate or a mean is, and whether one model is shown to be better than another.
//!
//! Pure functions of numbers. It must never read a clock, an environment or a random source of the machine: the same
//! rows give the same answer on every machine and in every version (the bootstrap draws from a generator written out
//! here, with a fixed seed). It must never turn "we do not know" into a number: what can't be estimated is `None`, and
//! values that are not finite are refused.
//!
//! What is used, and why:
//! - rate: Wilson score interval ([`proportion()`]);
//! - two rates of different rows: Newcombe's hybrid score interval ([`unpaired`]);
//! - two rates of the same rows: exact McNemar test, Newcombe's paired score interval ([`mcnemar`], [`newcombe_paired`]);
//! - mean, and mean of paired differences: Student's t for few values, percentile bootstrap for a middling number,
//!   Student's t again for many ([`mean_interval`] says where the borders are);
//! - several comparisons at once: Holm's step-down adjustment ([`holm`]).

mod adjust;
mod compare;
pub mod distribution;
mod mean;
mod proportion;
pub mod random;

use serde::{Deserialize, Serialize};

pub use adjust::{adjust, holm};
pub use compare::{
    Basis, Comparison, DifferenceBounds, Outcome, PairedRow, RewardComparison, SuccessComparison, compare, episodes_for_mean,
    episodes_for_success,
};
pub use mean::{BOOTSTRAP_MAX, BOOTSTRAP_MIN, MeanDifference, MeanEstimate, Method, RESAMPLES, mean_difference, mean_interval};
pub use proportion::{
    Discordant, McNemar, PairedTable, Proportion, RateBounds, UnpairedDifference, mcnemar, newcombe, newcombe_paired, proportion,
    rate_bounds, unpaired, wilson,
};

use crate::error::{Code, Error};

/// Largest count that is accepted: a hundred evaluations of the largest size. Bounds the work of the exact test.
pub const MAX_COUNT: u64 = 100 * crate::rows::MAX_ROWS;

/// Why no statistic can be given.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Invalid {
    #[error(
        "value {position} is {value}, which is not a finite number; statistics need finite values, so leave that row out or correct it"
    )]
    NotFinite { position: usize, value: f64 },
    #[error("the values are so large that their interval exceeds the range of numbers; scale them down")]
    OutOfRange,
    #[error("{part} of {total} is not a share; the part must be at most the total")]
    PartOverTotal { part: u64, total: u64 },
    #[error("the count {count} is over the limit of {MAX_COUNT}")]
    CountTooLarge { count: u64 },
    #[error("the confidence level is {level}; it must be between {} and {}, for example 0.95", Confidence::LOWEST, Confidence::HIGHEST)]
    Level { level: f64 },
    #[error("p-value {position} is {value}; it must be between 0 and 1")]
    NotAPValue { position: usize, value: f64 },
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        let code = match invalid {
            Invalid::Level { .. } | Invalid::NotFinite { .. } | Invalid::OutOfRange | Invalid::CountTooLarge { .. } => Code::InvalidRequest,
            Invalid::PartOverTotal { .. } | Invalid::NotAPValue { .. } => Code::Internal,
        };
        Self::new(code, invalid.to_string())
    }
}

/// A checked confidence level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Confidence(f64);

impl Confidence {
    pub const LOWEST: f64 = 0.5;
    /// Beyond it the tails hold too few of the bootstrap's resamples.
    pub const HIGHEST: f64 = 0.999;

    /// # Errors
    /// If the level is outside `LOWEST..=HIGHEST`, or NaN.
    pub fn new(level: f64) -> Result<Self, Invalid> {
        if (Self::LOWEST..=Self::HIGHEST).contains(&level) { Ok(Self(level)) } else { Err(Invalid::Level { level }) }
    }

    #[must_use]
    pub const fn level(self) -> f64 {
        self.0
    }

    /// Share of true null hypotheses that may be rejected.
    #[must_use]
    pub fn alpha(self) -> f64 {
        1.0 - self.0
    }

    /// Two-sided quantile of the normal distribution: 1.96 for 0.95.
    #[must_use]
    pub fn z(self) -> f64 {
        distribution::normal_upper_quantile(self.alpha() / 2.0)
    }
}

impl Default for Confidence {
    /// 95 %.
    fn default() -> Self {
        Self(0.95)
    }
}

/// A two-sided interval; `lower <= upper`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Interval {
    pub lower: f64,
    pub upper: f64,
}

impl Interval {
    #[must_use]
    pub fn contains(self, value: f64) -> bool {
        self.lower <= value && value <= self.upper
    }

    #[must_use]
    pub fn width(self) -> f64 {
        self.upper - self.lower
    }
}

/// What a comparison says of the candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    Better,
    Worse,
    /// No difference is shown. That is not the same as "no difference".
    NotShown,
}

impl Verdict {
    /// The rule for all comparisons: a difference is shown if the p-value (adjusted, if several are made) is below alpha
    /// *and* the interval leaves zero out. A test and an interval of different construction disagree now and then; this
    /// way no verdict contradicts a number printed beside it, and the share of false verdicts stays at most alpha.
    #[must_use]
    pub fn of(difference: f64, p: Option<f64>, interval: Option<Interval>, confidence: Confidence) -> Self {
        let (Some(p), Some(interval)) = (p, interval) else { return Self::NotShown };
        if p >= confidence.alpha() || interval.contains(0.0) {
            Self::NotShown
        } else if difference > 0.0 {
            Self::Better
        } else if difference < 0.0 {
            Self::Worse
        } else {
            Self::NotShown
        }
    }
}

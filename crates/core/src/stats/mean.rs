//! Means: an interval of a mean, and the mean of paired differences with a p-value.
//!
//! Must never let a value that is not finite through, nor work longer than `BOOTSTRAP_MAX * RESAMPLES` draws.

use serde::{Deserialize, Serialize};

use super::distribution::{student_two_sided, student_upper_quantile};
use super::random::Xoshiro256;
use super::{Confidence, Interval, Invalid};

/// Fewest values that are resampled. The percentile bootstrap is too narrow for few: it lacks both the factor
/// `sqrt(n / (n - 1))` and the wider quantile of Student's t. Below this number Student's t is used.
pub const BOOTSTRAP_MIN: usize = 30;
/// Most values that are resampled. Above it the mean is so close to normal that Student's t gives the same interval, in a
/// single pass.
pub const BOOTSTRAP_MAX: usize = 2_000;
/// Resamples of a bootstrap: the smallest p-value is `2 / (RESAMPLES + 1)`, small enough for Holm over 200 tasks.
pub const RESAMPLES: usize = 10_000;
const SEED: u64 = 0x0052_4c4d_6573_6801;

/// How an interval of a mean came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Method {
    /// Fewer than two values: no interval.
    TooFew,
    /// No two values differ. The interval is that value alone, which says that no spread was seen, not that there is none.
    AllEqual,
    /// Student's t with n - 1 degrees of freedom.
    StudentT,
    /// Percentile bootstrap.
    Bootstrap,
}

/// A mean with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeanEstimate {
    pub count: u64,
    /// None: of no values there is no mean.
    pub mean: Option<f64>,
    /// Of the sample, with n - 1; None for fewer than two values.
    pub standard_deviation: Option<f64>,
    pub interval: Option<Interval>,
    pub method: Method,
}

/// A mean of paired differences with its interval and p-value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeanDifference {
    #[serde(flatten)]
    pub estimate: MeanEstimate,
    /// Two-sided, of the hypothesis that the mean difference is zero; None for fewer than two pairs.
    pub p: Option<f64>,
}

/// The mean of these values and its interval: Student's t for 2 to 29 values, the percentile bootstrap for 30 to 2,000
/// (B. Efron, R. J. Tibshirani, An introduction to the bootstrap, 1993, chapter 13), Student's t above.
///
/// # Errors
/// If a value is not finite, or the interval exceeds the range of numbers.
pub fn mean_interval(values: &[f64], confidence: Confidence) -> Result<MeanEstimate, Invalid> {
    mean_difference(values, confidence).map(|difference| difference.estimate)
}

/// The mean of paired differences (candidate minus baseline), its interval as of [`mean_interval`], and a two-sided p-value:
/// - Student's t: the paired t test;
/// - bootstrap: twice the smaller share of resampled means on either side of zero, resamples and the sample itself counted
///   (`(count + 1) / (RESAMPLES + 1)`): the level at which the percentile interval just touches zero;
/// - all differences equal: the exact sign-flip test, `2^(1 - n)`, or 1 if they are zero.
///
/// # Errors
/// If a value is not finite, or the interval exceeds the range of numbers.
pub fn mean_difference(differences: &[f64], confidence: Confidence) -> Result<MeanDifference, Invalid> {
    if let Some((position, &value)) = differences.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        return Err(Invalid::NotFinite { position, value });
    }
    let count = differences.len() as u64;
    let Some(&first) = differences.first() else {
        let estimate = MeanEstimate { count, mean: None, standard_deviation: None, interval: None, method: Method::TooFew };
        return Ok(MeanDifference { estimate, p: None });
    };
    if differences.len() == 1 {
        let estimate = MeanEstimate { count, mean: Some(first), standard_deviation: None, interval: None, method: Method::TooFew };
        return Ok(MeanDifference { estimate, p: None });
    }
    #[expect(clippy::float_cmp, reason = "exact equality is what is asked")]
    if differences.iter().all(|&value| value == first) {
        let estimate = MeanEstimate {
            count,
            mean: Some(first),
            standard_deviation: Some(0.0),
            interval: Some(Interval { lower: first, upper: first }),
            method: Method::AllEqual,
        };
        let p = if first == 0.0 { 1.0 } else { (0.5_f64).powf(count as f64 - 1.0) };
        return Ok(MeanDifference { estimate, p: Some(p) });
    }

    let sample = Sample::of(differences);
    let (interval, method, p) = if (BOOTSTRAP_MIN..=BOOTSTRAP_MAX).contains(&differences.len()) {
        let (interval, p) = sample.bootstrap(confidence);
        (interval, Method::Bootstrap, p)
    } else {
        let (interval, p) = sample.student(confidence);
        (interval, Method::StudentT, p)
    };
    let scaled = [sample.mean, sample.deviation, interval.lower, interval.upper].map(|value| value * sample.scale);
    let [mean, deviation, lower, upper] = scaled;
    if scaled.iter().any(|value| !value.is_finite()) {
        return Err(Invalid::OutOfRange);
    }
    let estimate =
        MeanEstimate { count, mean: Some(mean), standard_deviation: Some(deviation), interval: Some(Interval { lower, upper }), method };
    Ok(MeanDifference { estimate, p: Some(p) })
}

/// At least two values that are not all equal, divided by a power of two so that squares neither overflow nor vanish.
struct Sample {
    /// Ascending, so that the answer does not depend on the order of rows.
    values: Vec<f64>,
    scale: f64,
    mean: f64,
    deviation: f64,
}

impl Sample {
    fn of(values: &[f64]) -> Self {
        let largest = values.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        // The exponent alone: dividing by it changes no digit.
        let power = f64::from_bits(largest.to_bits() & 0x7ff0_0000_0000_0000);
        let scale = if power > 0.0 { power } else { 1.0 };
        let mut values: Vec<f64> = values.iter().map(|value| value / scale).collect();
        values.sort_unstable_by(f64::total_cmp);
        let n = values.len() as f64;
        let mean = sum(values.iter().copied()) / n;
        let squares = sum(values.iter().map(|value| (value - mean) * (value - mean)));
        Self { values, scale, mean, deviation: (squares / (n - 1.0)).sqrt() }
    }

    fn student(&self, confidence: Confidence) -> (Interval, f64) {
        let n = self.values.len() as f64;
        let error = self.deviation / n.sqrt();
        let half = student_upper_quantile(confidence.alpha() / 2.0, n - 1.0) * error;
        let p = if error > 0.0 { student_two_sided(self.mean / error, n - 1.0) } else { 1.0 };
        (Interval { lower: self.mean - half, upper: self.mean + half }, p)
    }

    fn bootstrap(&self, confidence: Confidence) -> (Interval, f64) {
        let n = self.values.len();
        let mut generator = Xoshiro256::seeded(SEED);
        let mut means: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let mut sum = 0.0;
                for _ in 0..n {
                    sum += self.values[generator.below(n)];
                }
                sum / n as f64
            })
            .collect();
        means.sort_unstable_by(f64::total_cmp);
        let tail = confidence.alpha() / 2.0;
        let interval = Interval { lower: quantile(&means, tail), upper: quantile(&means, 1.0 - tail) };
        let at_most = means.partition_point(|&mean| mean <= 0.0);
        let at_least = means.len() - means.partition_point(|&mean| mean < 0.0);
        let p = 2.0 * (at_most.min(at_least) + 1) as f64 / (RESAMPLES + 1) as f64;
        (interval, p.min(1.0))
    }
}

/// Compensated sum: off by about one rounding however many values there are, and exact for whole numbers (A. Neumaier,
/// Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen, ZAMM 54, 1974, 39-51).
fn sum(values: impl Iterator<Item = f64>) -> f64 {
    let (mut total, mut lost) = (0.0_f64, 0.0_f64);
    for value in values {
        let next = total + value;
        lost += if total.abs() >= value.abs() { (total - next) + value } else { (value - next) + total };
        total = next;
    }
    total + lost
}

/// Quantile of ascending values, linear between them (type 7 of Hyndman and Fan; the default of NumPy and R).
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the position is between 0 and the length")]
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let position = share.clamp(0.0, 1.0) * (ascending.len() as f64 - 1.0);
    let below = position.floor();
    let lower = ascending.get(below as usize).copied().unwrap_or(f64::NAN);
    let upper = ascending.get(position.ceil() as usize).copied().unwrap_or(f64::NAN);
    lower + (upper - lower) * (position - below)
}

//! Rates: score intervals of one rate and of the difference of two, the exact McNemar test, bounds with unknown rows.
//!
//! Must never report an interval outside the possible values, nor a rate of nothing.

use serde::{Deserialize, Serialize};
use statrs::function::factorial::ln_binomial;

use super::{Confidence, Interval, Invalid, MAX_COUNT, Verdict};

/// A rate with its Wilson interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Proportion {
    pub successes: u64,
    pub total: u64,
    /// None: of no rows there is no rate.
    pub rate: Option<f64>,
    pub interval: Option<Interval>,
}

fn check(part: u64, total: u64) -> Result<(), Invalid> {
    if total > MAX_COUNT {
        return Err(Invalid::CountTooLarge { count: total });
    }
    if part > total { Err(Invalid::PartOverTotal { part, total }) } else { Ok(()) }
}

/// A rate with its Wilson interval.
///
/// # Errors
/// If `successes > total`, or `total` is over [`MAX_COUNT`].
pub fn proportion(successes: u64, total: u64, confidence: Confidence) -> Result<Proportion, Invalid> {
    check(successes, total)?;
    let rate = (total > 0).then(|| successes as f64 / total as f64);
    Ok(Proportion { successes, total, rate, interval: wilson(successes, total, confidence)? })
}

/// Wilson score interval, without continuity correction; None without rows.
///
/// E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927) 209-212; method 3 of
/// R. G. Newcombe, Two-sided confidence intervals for the single proportion, Statistics in Medicine 17 (1998) 857-872.
///
/// # Errors
/// If `successes > total`, or `total` is over [`MAX_COUNT`].
pub fn wilson(successes: u64, total: u64, confidence: Confidence) -> Result<Option<Interval>, Invalid> {
    check(successes, total)?;
    if total == 0 {
        return Ok(None);
    }
    let n = total as f64;
    let failures = total - successes;
    let rate = successes as f64 / n;
    let z = confidence.z();
    let z2 = z * z;
    let centre = (successes as f64 + z2 / 2.0) / (n + z2);
    let half = z / (n + z2) * (successes as f64 * (failures as f64 / n) + z2 / 4.0).sqrt();
    // Exactly 0 and 1 at the ends, which rounding would miss; and never past the rate itself.
    let lower = if successes == 0 { 0.0 } else { (centre - half).clamp(0.0, rate) };
    let upper = if failures == 0 { 1.0 } else { (centre + half).clamp(rate, 1.0) };
    Ok(Some(Interval { lower, upper }))
}

/// Difference of two rates that were measured on different rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnpairedDifference {
    pub baseline: Proportion,
    pub candidate: Proportion,
    /// Candidate minus baseline; None if one of them has no rows.
    pub difference: Option<f64>,
    pub interval: Option<Interval>,
    /// By the interval alone.
    pub verdict: Verdict,
}

/// Compares two rates of different rows: (successes, total) of baseline and candidate.
///
/// # Errors
/// As [`proportion`].
pub fn unpaired(baseline: (u64, u64), candidate: (u64, u64), confidence: Confidence) -> Result<UnpairedDifference, Invalid> {
    let first = proportion(baseline.0, baseline.1, confidence)?;
    let second = proportion(candidate.0, candidate.1, confidence)?;
    let difference = second.rate.zip(first.rate).map(|(second, first)| second - first);
    let interval = newcombe(candidate, baseline, confidence)?;
    // The interval is the test here: p is taken as 0 when it leaves zero out.
    let verdict = difference.map_or(Verdict::NotShown, |difference| Verdict::of(difference, Some(0.0), interval, confidence));
    Ok(UnpairedDifference { baseline: first, candidate: second, difference, interval, verdict })
}

/// Newcombe's hybrid score interval for the difference `first - second` of two independent rates; None if one has no rows.
///
/// Method 10 of R. G. Newcombe, Interval estimation for the difference between independent proportions: comparison of
/// eleven methods, Statistics in Medicine 17 (1998) 873-890.
///
/// # Errors
/// As [`wilson`].
pub fn newcombe(first: (u64, u64), second: (u64, u64), confidence: Confidence) -> Result<Option<Interval>, Invalid> {
    let intervals = wilson(first.0, first.1, confidence)?.zip(wilson(second.0, second.1, confidence)?);
    Ok(intervals.map(|(one, two)| square_and_add(first.0 as f64 / first.1 as f64, one, second.0 as f64 / second.1 as f64, two, 0.0)))
}

/// Interval of `p1 - p2` from the intervals of each and the correlation `phi` of the two estimates.
fn square_and_add(p1: f64, one: Interval, p2: f64, two: Interval, phi: f64) -> Interval {
    let join = |a: f64, b: f64| (a * a - 2.0 * phi * a * b + b * b).max(0.0).sqrt();
    let difference = p1 - p2;
    Interval {
        lower: (difference - join(p1 - one.lower, two.upper - p2)).max(-1.0),
        upper: (difference + join(one.upper - p1, p2 - two.lower)).min(1.0),
    }
}

/// What two models did on the same rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PairedTable {
    /// Both succeeded.
    pub both: u64,
    pub only_baseline: u64,
    pub only_candidate: u64,
    pub neither: u64,
}

impl PairedTable {
    #[must_use]
    pub const fn pairs(&self) -> u64 {
        self.both.saturating_add(self.only_baseline).saturating_add(self.only_candidate).saturating_add(self.neither)
    }

    #[must_use]
    pub const fn discordant(&self) -> Discordant {
        Discordant { only_baseline: self.only_baseline, only_candidate: self.only_candidate }
    }

    /// Rate of the candidate minus rate of the baseline; None without pairs.
    #[must_use]
    pub fn difference(&self) -> Option<f64> {
        let pairs = self.pairs();
        (pairs > 0).then(|| (self.only_candidate as f64 - self.only_baseline as f64) / pairs as f64)
    }
}

/// Newcombe's score interval for the difference of two rates of the same rows, candidate minus baseline; None without pairs.
///
/// Method 10 of R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on
/// paired data, Statistics in Medicine 17 (1998) 2635-2650: Wilson intervals of both rates, joined with the correlation
/// phi, which is corrected for continuity where positive.
///
/// # Errors
/// If there are more than [`MAX_COUNT`] pairs.
pub fn newcombe_paired(table: &PairedTable, confidence: Confidence) -> Result<Option<Interval>, Invalid> {
    let pairs = table.pairs();
    check(0, pairs)?;
    let candidate = table.both + table.only_candidate;
    let baseline = table.both + table.only_baseline;
    let intervals = wilson(candidate, pairs, confidence)?.zip(wilson(baseline, pairs, confidence)?);
    Ok(intervals.map(|(one, two)| {
        let n = pairs as f64;
        square_and_add(candidate as f64 / n, one, baseline as f64 / n, two, phi(table))
    }))
}

fn phi(table: &PairedTable) -> f64 {
    let [both, only_baseline, only_candidate, neither] =
        [table.both, table.only_baseline, table.only_candidate, table.neither].map(|count| count as f64);
    let margins = (both + only_candidate) * (only_baseline + neither) * (both + only_baseline) * (only_candidate + neither);
    if margins <= 0.0 {
        return 0.0;
    }
    let half = (both + only_baseline + only_candidate + neither) / 2.0;
    let excess = both * neither - only_baseline * only_candidate;
    let corrected = if excess > half { excess - half } else { excess.min(0.0) };
    corrected / margins.sqrt()
}

/// Pairs in which exactly one of the two succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Discordant {
    pub only_baseline: u64,
    pub only_candidate: u64,
}

/// Two-sided p-values of McNemar's test.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct McNemar {
    /// Exact: rejects a true null hypothesis at most as often as said.
    pub p: f64,
    /// Mid-p: half of the observed outcome's probability on either side; less conservative, not strictly guaranteed.
    pub mid_p: f64,
}

/// The exact conditional (binomial) McNemar test, and its mid-p version.
///
/// M. W. Fagerland, S. Lydersen, P. Laake, The McNemar test for binary matched-pairs data: mid-p and asymptotic are better
/// than exact conditional, BMC Medical Research Methodology 13 (2013) 91. Without discordant pairs both are 1.
///
/// # Errors
/// If there are more than [`MAX_COUNT`] discordant pairs.
pub fn mcnemar(discordant: Discordant) -> Result<McNemar, Invalid> {
    let fewer = discordant.only_baseline.min(discordant.only_candidate);
    let total = discordant.only_baseline.saturating_add(discordant.only_candidate);
    check(fewer, total)?;
    if total == 0 {
        return Ok(McNemar { p: 1.0, mid_p: 1.0 });
    }
    let observed = (ln_binomial(total, fewer) - total as f64 * std::f64::consts::LN_2).exp();
    if fewer == total - fewer {
        return Ok(McNemar { p: 1.0, mid_p: 1.0 - observed / 2.0 });
    }
    // The lower tail from the observed count downwards; each term follows from the one before.
    let mut term = observed;
    let mut tail = observed;
    let mut count = fewer;
    while count > 0 && term > tail * 1e-18 {
        term *= count as f64 / (total - count + 1) as f64;
        tail += term;
        count -= 1;
    }
    let p = (2.0 * tail).min(1.0);
    Ok(McNemar { p, mid_p: (2.0 * tail - observed).clamp(0.0, p) })
}

/// What a rate could be if the rows without a known success were known.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RateBounds {
    /// Rows that errored, or whose environment said nothing of success.
    pub unknown: u64,
    pub if_all_failed: f64,
    pub if_all_succeeded: f64,
    /// From the lower end of the Wilson interval of the one to the upper end of that of the other.
    pub interval: Interval,
}

/// Bounds of a rate with `successes` of `known` rows and `unknown` further ones; None without any row.
///
/// # Errors
/// As [`wilson`].
pub fn rate_bounds(successes: u64, known: u64, unknown: u64, confidence: Confidence) -> Result<Option<RateBounds>, Invalid> {
    check(successes, known)?;
    let total = known.saturating_add(unknown);
    let low = wilson(successes, total, confidence)?;
    let high = wilson(successes.saturating_add(unknown), total, confidence)?;
    Ok(low.zip(high).map(|(low, high)| RateBounds {
        unknown,
        if_all_failed: successes as f64 / total as f64,
        if_all_succeeded: (successes + unknown) as f64 / total as f64,
        interval: Interval { lower: low.lower, upper: high.upper },
    }))
}

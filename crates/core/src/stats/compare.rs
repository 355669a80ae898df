//! Two models on the same rows: is the candidate shown to be better than the baseline?
//!
//! Rows pair by (task, trial), so both met the same episode. Must never count a row that one of the two did not finish as a
//! success or a failure: such rows are left out, counted, and bounded.

use serde::{Deserialize, Serialize};

use super::distribution::normal_upper_quantile;
use super::{
    Confidence, Interval, Invalid, MeanDifference, PairedTable, Proportion, Verdict, mcnemar, mean_difference, newcombe_paired, proportion,
};
use crate::rows::MAX_ROWS;

/// The chance of showing a difference that the estimate of further episodes aims at.
const POWER: f64 = 0.8;

/// How one episode ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// None: the environment says nothing of success.
    pub success: Option<bool>,
    pub reward: f64,
}

/// One row as both models met it; None: errored, or not finished.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedRow {
    pub baseline: Option<Outcome>,
    pub candidate: Option<Outcome>,
}

/// What the headline verdict rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Basis {
    Success,
    /// No pair has a known success on both sides.
    Reward,
    /// There is no pair.
    Nothing,
}

/// Candidate against baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Rows that both finished.
    pub pairs: u64,
    /// Rows that one of them or both did not finish.
    pub left_out: u64,
    /// Confidence level of every interval here.
    pub level: f64,
    pub basis: Basis,
    /// The verdict on the basis.
    pub verdict: Verdict,
    /// None if no pair has a known success on both sides.
    pub success: Option<SuccessComparison>,
    /// None if there is no pair.
    pub reward: Option<RewardComparison>,
}

/// Success of candidate against baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SuccessComparison {
    /// Pairs whose success is known on both sides.
    pub pairs: u64,
    pub table: PairedTable,
    /// Rates over these pairs.
    pub baseline: Proportion,
    pub candidate: Proportion,
    /// Rate of the candidate minus rate of the baseline.
    pub difference: f64,
    /// Newcombe's paired score interval.
    pub interval: Interval,
    /// Exact McNemar test, two-sided.
    pub p: f64,
    pub mid_p: f64,
    /// Holm's, if it was compared together with others.
    pub adjusted_p: Option<f64>,
    pub verdict: Verdict,
    /// Further episodes per model after which a difference like this would be shown with a chance of 80 %; only where none
    /// is shown, and None if no evaluation may be that large. See [`episodes_for_success`].
    pub more_episodes: Option<u64>,
    /// What the difference could be if every unknown success were known.
    pub bounds: DifferenceBounds,
}

/// Bounds of a difference over all rows, unknown ones taken at their worst and at their best.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DifferenceBounds {
    /// Rows with an unknown success on at least one side.
    pub unknown: u64,
    pub lower: f64,
    pub upper: f64,
}

/// Reward of candidate against baseline; higher is better.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RewardComparison {
    /// Mean of the differences, candidate minus baseline.
    #[serde(flatten)]
    pub estimate: MeanDifference,
    /// Holm's, if it was compared together with others.
    pub adjusted_p: Option<f64>,
    pub verdict: Verdict,
    /// As of success. See [`episodes_for_mean`].
    pub more_episodes: Option<u64>,
}

/// Compares two models on the same rows.
///
/// # Errors
/// If a reward is not finite, or so large that differences exceed the range of numbers.
pub fn compare(rows: &[PairedRow], confidence: Confidence) -> Result<Comparison, Invalid> {
    let mut table = PairedTable::default();
    let mut differences = Vec::new();
    let (mut unknown, mut lowest, mut highest) = (0_u64, 0_i64, 0_i64);
    for (position, row) in rows.iter().enumerate() {
        let baseline = row.baseline.and_then(|outcome| outcome.success);
        let candidate = row.candidate.and_then(|outcome| outcome.success);
        match (baseline, candidate) {
            (Some(true), Some(true)) => table.both += 1,
            (Some(true), Some(false)) => table.only_baseline += 1,
            (Some(false), Some(true)) => table.only_candidate += 1,
            (Some(false), Some(false)) => table.neither += 1,
            (None, _) | (_, None) => unknown += 1,
        }
        lowest += i64::from(candidate.unwrap_or(false)) - i64::from(baseline.unwrap_or(true));
        highest += i64::from(candidate.unwrap_or(true)) - i64::from(baseline.unwrap_or(false));
        if let (Some(baseline), Some(candidate)) = (row.baseline, row.candidate) {
            for value in [baseline.reward, candidate.reward] {
                if !value.is_finite() {
                    return Err(Invalid::NotFinite { position, value });
                }
            }
            let difference = candidate.reward - baseline.reward;
            if !difference.is_finite() {
                return Err(Invalid::OutOfRange);
            }
            differences.push(difference);
        }
    }
    let total = rows.len() as f64;
    let bounds = DifferenceBounds { unknown, lower: lowest as f64 / total, upper: highest as f64 / total };
    let pairs = differences.len() as u64;
    let mut comparison = Comparison {
        pairs,
        left_out: rows.len() as u64 - pairs,
        level: confidence.level(),
        basis: Basis::Nothing,
        verdict: Verdict::NotShown,
        success: compare_success(&table, bounds, confidence)?,
        reward: compare_reward(&differences, confidence)?,
    };
    comparison.judge(confidence);
    Ok(comparison)
}

fn compare_success(table: &PairedTable, bounds: DifferenceBounds, confidence: Confidence) -> Result<Option<SuccessComparison>, Invalid> {
    let Some((difference, interval)) = table.difference().zip(newcombe_paired(table, confidence)?) else { return Ok(None) };
    let pairs = table.pairs();
    let test = mcnemar(table.discordant())?;
    Ok(Some(SuccessComparison {
        pairs,
        table: *table,
        baseline: proportion(table.both + table.only_baseline, pairs, confidence)?,
        candidate: proportion(table.both + table.only_candidate, pairs, confidence)?,
        difference,
        interval,
        p: test.p,
        mid_p: test.mid_p,
        adjusted_p: None,
        verdict: Verdict::NotShown,
        more_episodes: None,
        bounds,
    }))
}

fn compare_reward(differences: &[f64], confidence: Confidence) -> Result<Option<RewardComparison>, Invalid> {
    if differences.is_empty() {
        return Ok(None);
    }
    let estimate = mean_difference(differences, confidence)?;
    Ok(Some(RewardComparison { estimate, adjusted_p: None, verdict: Verdict::NotShown, more_episodes: None }))
}

impl Comparison {
    /// Sets every verdict, the basis and the further episodes from the numbers.
    pub(super) fn judge(&mut self, confidence: Confidence) {
        if let Some(success) = &mut self.success {
            let p = success.adjusted_p.unwrap_or(success.p);
            success.verdict = Verdict::of(success.difference, Some(p), Some(success.interval), confidence);
            success.more_episodes = more(success.verdict, episodes_for_success(&success.table, confidence), success.pairs);
        }
        if let Some(reward) = &mut self.reward {
            let MeanDifference { estimate, p } = reward.estimate;
            reward.verdict = Verdict::of(estimate.mean.unwrap_or(0.0), reward.adjusted_p.or(p), estimate.interval, confidence);
            let needed =
                estimate.mean.zip(estimate.standard_deviation).and_then(|(mean, deviation)| episodes_for_mean(mean, deviation, confidence));
            reward.more_episodes = more(reward.verdict, needed, estimate.count);
        }
        (self.basis, self.verdict) = match (&self.success, &self.reward) {
            (Some(success), _) => (Basis::Success, success.verdict),
            (None, Some(reward)) => (Basis::Reward, reward.verdict),
            (None, None) => (Basis::Nothing, Verdict::NotShown),
        };
    }
}

fn more(verdict: Verdict, needed: Option<u64>, done: u64) -> Option<u64> {
    match verdict {
        Verdict::Better | Verdict::Worse => None,
        Verdict::NotShown => needed.map(|needed| needed.saturating_sub(done).max(1)),
    }
}

/// Pairs in all after which McNemar's test would show a difference like the one of this table with a chance of 80 %, if it
/// is real; None if there is none, or it takes more rows than an evaluation may have.
///
/// `n = (z_a * sqrt(d) + z_b * sqrt(d - e^2))^2 / e^2`, where `d` is the share of discordant pairs, `e` the difference, `z_a`
/// the two-sided quantile of the level and `z_b` that of the power (R. J. Connor, Sample size for testing differences in
/// proportions for the paired-sample design, Biometrics 43 (1987) 207-211). A plan, not a promise: the difference seen
/// so far is itself uncertain, and an adjustment for several comparisons is not in it.
#[must_use]
pub fn episodes_for_success(table: &PairedTable, confidence: Confidence) -> Option<u64> {
    let difference = table.difference()?;
    let discordant = (table.only_baseline as f64 + table.only_candidate as f64) / table.pairs() as f64;
    let square = difference * difference;
    let root = confidence.z() * discordant.sqrt() + normal_upper_quantile(1.0 - POWER) * (discordant - square).max(0.0).sqrt();
    // The exact test can't reject with fewer discordant pairs than 2^(1 - n) < alpha asks for.
    let least = ((2.0 / confidence.alpha()).log2().floor() + 1.0) / discordant;
    episodes((root * root / square).max(least))
}

/// Pairs in all after which the mean difference would be shown with a chance of 80 %, if it is real; None as of
/// [`episodes_for_success`].
///
/// `n = ((z_a + z_b) * deviation / mean)^2 + z_a^2 / 2`: the normal sample size with Guenther's correction for Student's t
/// (W. C. Guenther, Sample size formulas for normal theory t tests, The American Statistician 35 (1981) 243-244).
#[must_use]
pub fn episodes_for_mean(mean: f64, deviation: f64, confidence: Confidence) -> Option<u64> {
    let z = confidence.z();
    let ratio = (z + normal_upper_quantile(1.0 - POWER)) * (deviation / mean);
    // With no spread the sign-flip test decides.
    let least = (2.0 / confidence.alpha()).log2().floor() + 1.0;
    episodes(if deviation > 0.0 {
        ratio * ratio + z * z / 2.0
    } else if mean == 0.0 {
        f64::INFINITY
    } else {
        least
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and MAX_ROWS")]
fn episodes(needed: f64) -> Option<u64> {
    let needed = needed.ceil();
    (needed <= MAX_ROWS as f64).then_some(needed as u64)
}

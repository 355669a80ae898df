//! Several comparisons at once.
//!
//! Must never make a p-value smaller than it came.

use super::{Comparison, Confidence, Invalid};

/// Holm's step-down adjustment, in the order given (S. Holm, A simple sequentially rejective multiple test procedure,
/// Scandinavian Journal of Statistics 6 (1979) 65-70): rejecting what is below alpha keeps the chance of *any* false
/// rejection at most alpha.
///
/// # Errors
/// If a value is not between 0 and 1.
pub fn holm(p_values: &[f64]) -> Result<Vec<f64>, Invalid> {
    if let Some((position, &value)) = p_values.iter().enumerate().find(|(_, p)| !(0.0..=1.0).contains(*p)) {
        return Err(Invalid::NotAPValue { position, value });
    }
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&left, &right| p_values[left].total_cmp(&p_values[right]));
    let mut adjusted = vec![0.0; p_values.len()];
    let mut largest = 0.0_f64;
    for (rank, &position) in order.iter().enumerate() {
        largest = largest.max(p_values[position] * (p_values.len() - rank) as f64).min(1.0);
        adjusted[position] = largest;
    }
    Ok(adjusted)
}

/// Adjusts comparisons that are shown together, one per task, and renews their verdicts. Success and reward are two
/// families; a comparison without a p-value belongs to none.
///
/// # Errors
/// If a p-value is not between 0 and 1, or a level is none.
pub fn adjust(comparisons: &mut [Comparison]) -> Result<(), Invalid> {
    let success = holm(&comparisons.iter().filter_map(|one| one.success.as_ref().map(|success| success.p)).collect::<Vec<_>>())?;
    let reward = holm(&comparisons.iter().filter_map(|one| one.reward.as_ref().and_then(|reward| reward.estimate.p)).collect::<Vec<_>>())?;
    let (mut success, mut reward) = (success.into_iter(), reward.into_iter());
    for comparison in comparisons {
        let confidence = Confidence::new(comparison.level)?;
        if let Some(one) = &mut comparison.success {
            one.adjusted_p = success.next();
        }
        if let Some(one) = &mut comparison.reward
            && one.estimate.p.is_some()
        {
            one.adjusted_p = reward.next();
        }
        comparison.judge(confidence);
    }
    Ok(())
}

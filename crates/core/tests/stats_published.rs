//! Statistics against values printed in the papers that introduced them.
#![expect(clippy::unwrap_used, reason = "tests")]

use rlm_core::stats::{Confidence, Discordant, Interval, PairedTable, holm, mcnemar, mean_interval, newcombe, newcombe_paired, wilson};

/// Equal in the four decimals that are printed.
#[track_caller]
fn printed(interval: Option<Interval>, lower: f64, upper: f64) {
    let interval = interval.unwrap();
    assert!((interval.lower - lower).abs() <= 5.1e-5, "{interval:?} is not {lower}, {upper}");
    assert!((interval.upper - upper).abs() <= 5.1e-5, "{interval:?} is not {lower}, {upper}");
}

fn confidence() -> Confidence {
    Confidence::default()
}

/// R. G. Newcombe, Two-sided confidence intervals for the single proportion, Statistics in Medicine 17 (1998) 857-872,
/// Table I, method 3.
#[test]
fn wilson_of_newcombe_1998() {
    for (successes, total, lower, upper) in
        [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
    {
        printed(wilson(successes, total, confidence()).unwrap(), lower, upper);
    }
}

/// R. G. Newcombe, Interval estimation for the difference between independent proportions, Statistics in Medicine 17
/// (1998) 873-890, Table II, method 10, examples (a) to (h).
#[test]
fn independent_rates_of_newcombe_1998() {
    for (first, second, lower, upper) in [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((0, 10), (0, 10), -0.2775, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ] {
        printed(newcombe(first, second, confidence()).unwrap(), lower, upper);
    }
}

/// R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired data,
/// Statistics in Medicine 17 (1998) 2635-2650, method 10: the examples e, f, g, h = 36, 12, 2, 0; 18, 12, 2, 18; 53, 0, 0, 1.
/// The last line: M. W. Fagerland, S. Lydersen, P. Laake, Statistical analysis of contingency tables, 2017, chapter 8
/// (complete response before and after consolidation therapy).
#[test]
fn paired_rates_of_newcombe_1998() {
    for (both, first, second, neither, lower, upper) in
        [(36, 12, 2, 0, 0.0569, 0.3404), (18, 12, 2, 18, 0.0562, 0.3290), (53, 0, 0, 1, -0.0729, 0.0729), (59, 6, 16, 80, -0.1186, -0.0046)]
    {
        let table = PairedTable { both, only_candidate: first, only_baseline: second, neither };
        printed(newcombe_paired(&table, confidence()).unwrap(), lower, upper);
    }
}

/// M. W. Fagerland, S. Lydersen, P. Laake, BMC Medical Research Methodology 13 (2013) 91: airway hyper-responsiveness
/// before and after stem cell transplantation (1 and 7 discordant pairs): exact 0.070, mid-p 0.039. The other lines by
/// hand: 2 * (C(14,0) + C(14,1) + C(14,2)) / 2^14 for 2 and 12, and 2^(1-n) for none against n.
#[test]
fn mcnemar_of_textbooks() {
    for (fewer, more, p, mid_p, tolerance) in [
        (1, 7, 0.070, 0.039, 5e-4),
        (2, 12, 212.0 / 16_384.0, 121.0 / 16_384.0, 1e-13),
        (0, 6, 0.031_25, 0.015_625, 1e-13),
        (0, 0, 1.0, 1.0, 0.0),
    ] {
        for (only_baseline, only_candidate) in [(fewer, more), (more, fewer)] {
            let test = mcnemar(Discordant { only_baseline, only_candidate }).unwrap();
            assert!((test.p - p).abs() <= tolerance && (test.mid_p - mid_p).abs() <= tolerance, "{fewer}, {more}: {test:?}");
        }
    }
}

/// Student (W. S. Gosset), The probable error of a mean, Biometrika 6 (1908) 1-25: additional hours of sleep, difference of
/// two drugs, mean 1.58, as R and many textbooks give it: 95 % interval 0.7001 to 2.4599, p 0.00283.
#[test]
fn sleep_of_student_1908() {
    let differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4];
    let estimate = mean_interval(&differences, confidence()).unwrap();
    assert!((estimate.mean.unwrap() - 1.58).abs() < 1e-12);
    printed(estimate.interval, 0.7001, 2.4599);
    let test = rlm_core::stats::mean_difference(&differences, confidence()).unwrap();
    assert!((test.p.unwrap() - 0.002_833).abs() < 5e-7, "{test:?}");
}

/// Four hypotheses, each step by hand: 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04 * 1 raised to the 0.06 before it.
#[test]
fn holm_by_hand() {
    let adjusted = holm(&[0.01, 0.04, 0.03, 0.005]).unwrap();
    for (ours, expected) in adjusted.iter().zip([0.03, 0.06, 0.06, 0.02]) {
        assert!((ours - expected).abs() < 1e-15, "{adjusted:?}");
    }
}

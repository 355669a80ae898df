//! Statistics against SciPy and statsmodels: `data/reference.json`, made by `data/reference.py`.
#![expect(clippy::unwrap_used, reason = "tests")]

use rlm_core::stats::{
    BOOTSTRAP_MAX, Confidence, Discordant, Interval, Method, PairedTable, distribution, episodes_for_mean, episodes_for_success, holm,
    mcnemar, mean_difference, newcombe, wilson,
};
use serde_json::Value;

/// The cases of a section; every caller goes through them all.
fn cases(section: &str) -> Vec<Value> {
    let text = include_str!("data/reference.json");
    let document: Value = serde_json::from_str(text).unwrap();
    let cases = document.pointer(section).unwrap().as_array().unwrap().clone();
    assert!(cases.len() >= 4, "{section} has only {} cases", cases.len());
    cases
}

fn number(case: &Value, name: &str) -> f64 {
    case[name].as_f64().unwrap()
}

fn count(case: &Value, name: &str) -> u64 {
    case[name].as_u64().unwrap()
}

fn pair(case: &Value, name: &str) -> (u64, u64) {
    (case[name][0].as_u64().unwrap(), case[name][1].as_u64().unwrap())
}

fn confidence(case: &Value) -> Confidence {
    Confidence::new(number(case, "level")).unwrap()
}

fn numbers(case: &Value, name: &str) -> Vec<f64> {
    case[name].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

#[track_caller]
fn close(ours: f64, theirs: f64, tolerance: f64, case: &Value) {
    assert!((ours - theirs).abs() <= tolerance, "{ours} is not {theirs} within {tolerance}: {case}");
}

#[track_caller]
fn same_interval(ours: Interval, case: &Value, tolerance: f64) {
    close(ours.lower, number(case, "lower"), tolerance, case);
    close(ours.upper, number(case, "upper"), tolerance, case);
}

#[test]
fn wilson_as_statsmodels() {
    for case in cases("/wilson") {
        let interval = wilson(count(&case, "successes"), count(&case, "total"), confidence(&case)).unwrap().unwrap();
        same_interval(interval, &case, 1e-12);
    }
}

#[test]
fn newcombe_as_statsmodels() {
    for case in cases("/newcombe") {
        let interval = newcombe(pair(&case, "first"), pair(&case, "second"), confidence(&case)).unwrap().unwrap();
        same_interval(interval, &case, 1e-12);
    }
}

#[test]
fn mcnemar_as_statsmodels() {
    for case in cases("/mcnemar") {
        let discordant = Discordant { only_baseline: count(&case, "onlyBaseline"), only_candidate: count(&case, "onlyCandidate") };
        let test = mcnemar(discordant).unwrap();
        close(test.p, number(&case, "p"), 1e-7 * number(&case, "p"), &case);
        close(test.mid_p, number(&case, "midP"), 1e-7 * number(&case, "midP"), &case);
    }
}

#[test]
fn normal_quantiles_as_scipy() {
    for case in cases("/normal") {
        close(distribution::normal_upper_quantile(number(&case, "tail")), number(&case, "z"), 1e-12, &case);
    }
}

#[test]
fn student_as_scipy() {
    for case in cases("/student") {
        let (degrees, t) = (number(&case, "degrees"), number(&case, "t"));
        if let Some(tail) = case["tail"].as_f64() {
            close(distribution::student_upper_quantile(tail, degrees), t, 1e-9 * t, &case);
        }
        close(distribution::student_two_sided(t, degrees), number(&case, "twoSided"), 1e-8 * number(&case, "twoSided"), &case);
    }
}

#[test]
fn means_with_student_as_scipy() {
    for case in cases("/mean") {
        let values = match case["made"].as_u64() {
            Some(made) => (0..made).map(|index| ((index * 7919) % 10_007) as f64 / 100.0 - 49.0).collect(),
            None => numbers(&case, "values"),
        };
        let ours = mean_difference(&values, confidence(&case)).unwrap();
        assert_eq!(ours.estimate.method, Method::StudentT, "{case}");
        let width = number(&case, "upper") - number(&case, "lower");
        close(ours.estimate.mean.unwrap(), number(&case, "mean"), 1e-9 * width, &case);
        close(ours.estimate.standard_deviation.unwrap(), number(&case, "deviation"), 1e-9 * width, &case);
        same_interval(ours.estimate.interval.unwrap(), &case, 1e-9 * width);
        close(ours.p.unwrap(), number(&case, "p"), 1e-8 * number(&case, "p"), &case);
    }
}

#[test]
fn bootstrap_as_written_a_second_time_and_as_scipy() {
    for case in cases("/bootstrap") {
        let values = numbers(&case, "values");
        assert!(values.len() <= BOOTSTRAP_MAX);
        let ours = mean_difference(&values, Confidence::default()).unwrap();
        assert_eq!(ours.estimate.method, Method::Bootstrap, "{case}");
        let interval = ours.estimate.interval.unwrap();
        same_interval(interval, &case, 1e-12 * interval.width().max(1.0) * 10.0);
        close(ours.p.unwrap(), number(&case, "p"), 1e-12, &case);
        // Another generator, ten times the resamples: the ends may differ by the noise of 10,000 resamples.
        close(interval.lower, number(&case, "scipyLower"), 0.03 * interval.width(), &case);
        close(interval.upper, number(&case, "scipyUpper"), 0.03 * interval.width(), &case);
    }
}

#[test]
fn holm_as_statsmodels() {
    for case in cases("/holm") {
        let ours = holm(&numbers(&case, "p")).unwrap();
        let theirs = numbers(&case, "adjusted");
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            close(*ours, theirs, 1e-12, &case);
        }
    }
}

#[test]
fn planned_episodes_have_the_planned_power() {
    for case in cases("/episodes/success") {
        let table = &case["table"];
        let at = |position: usize| table[position].as_u64().unwrap();
        let table = PairedTable { both: at(0), only_baseline: at(1), only_candidate: at(2), neither: at(3) };
        assert_eq!(episodes_for_success(&table, Confidence::default()).unwrap(), count(&case, "needed"), "{case}");
        // The power of the exact test at that size, over all outcomes: the formula aims at 0.8.
        close(number(&case, "power"), 0.8, 0.04, &case);
    }
    for case in cases("/episodes/mean") {
        let ours = episodes_for_mean(number(&case, "effect"), 1.0, Confidence::default()).unwrap() as f64;
        close(ours, number(&case, "needed").ceil(), 1.0, &case);
    }
}

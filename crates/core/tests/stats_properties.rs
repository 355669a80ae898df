//! What must hold of the statistics for any input.
#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use rlm_core::stats::{
    BOOTSTRAP_MAX, BOOTSTRAP_MIN, Basis, Confidence, Discordant, Invalid, MAX_COUNT, Method, Outcome, PairedRow, PairedTable, Verdict,
    adjust, compare, holm, mcnemar, mean_difference, mean_interval, newcombe, newcombe_paired, proportion, rate_bounds, unpaired, wilson,
};

fn levels() -> impl Strategy<Value = Confidence> {
    prop_oneof![Just(0.5), Just(0.8), Just(0.9), Just(0.95), Just(0.99), Just(0.999)].prop_map(|level| Confidence::new(level).unwrap())
}

fn share() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![1_u64..40, 1_u64..MAX_COUNT].prop_flat_map(|total| (0..=total, Just(total)))
}

fn tables() -> impl Strategy<Value = PairedTable> {
    let counts = || prop_oneof![Just(0_u64), 0_u64..30, 0_u64..1_000_000];
    (counts(), counts(), counts(), counts()).prop_map(|(both, only_baseline, only_candidate, neither)| PairedTable {
        both,
        only_baseline,
        only_candidate,
        neither,
    })
}

fn outcomes() -> impl Strategy<Value = Option<Outcome>> {
    let outcome = (prop::option::weighted(0.9, any::<bool>()), -100.0..100.0_f64).prop_map(|(success, reward)| Outcome { success, reward });
    prop::option::weighted(0.95, outcome)
}

fn rows() -> impl Strategy<Value = Vec<PairedRow>> {
    prop::collection::vec((outcomes(), outcomes()).prop_map(|(baseline, candidate)| PairedRow { baseline, candidate }), 0..80)
}

fn swapped(rows: &[PairedRow]) -> Vec<PairedRow> {
    rows.iter().map(|row| PairedRow { baseline: row.candidate, candidate: row.baseline }).collect()
}

const fn reversed(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Better => Verdict::Worse,
        Verdict::Worse => Verdict::Better,
        Verdict::NotShown => Verdict::NotShown,
    }
}

fn near(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn wilson_holds_the_rate_and_mirrors((successes, total) in share(), confidence in levels()) {
        let interval = wilson(successes, total, confidence).unwrap().unwrap();
        prop_assert!(interval.contains(successes as f64 / total as f64));
        prop_assert!(0.0 <= interval.lower && interval.upper <= 1.0 && interval.width() > 0.0);
        let mirror = wilson(total - successes, total, confidence).unwrap().unwrap();
        prop_assert!(near(interval.lower, 1.0 - mirror.upper) && near(interval.upper, 1.0 - mirror.lower));
    }

    #[test]
    fn more_confidence_and_fewer_rows_are_wider(successes in 0_u64..1000, failures in 0_u64..1000) {
        prop_assume!(successes + failures > 0);
        let total = successes + failures;
        let at = |factor: u64, level: f64| wilson(successes * factor, total * factor, Confidence::new(level).unwrap()).unwrap().unwrap().width();
        prop_assert!(at(1, 0.99) > at(1, 0.95));
        prop_assert!(at(1, 0.95) > at(4, 0.95));
    }

    #[test]
    fn newcombe_holds_the_difference_and_turns(first in share(), second in share(), confidence in levels()) {
        let interval = newcombe(first, second, confidence).unwrap().unwrap();
        let difference = first.0 as f64 / first.1 as f64 - second.0 as f64 / second.1 as f64;
        prop_assert!(interval.contains(difference) && interval.lower >= -1.0 && interval.upper <= 1.0);
        let turned = newcombe(second, first, confidence).unwrap().unwrap();
        prop_assert!(near(interval.lower, -turned.upper) && near(interval.upper, -turned.lower));
        let verdict = unpaired(second, first, confidence).unwrap().verdict;
        prop_assert_eq!(verdict == Verdict::NotShown, interval.contains(0.0));
        prop_assert_eq!(reversed(verdict), unpaired(first, second, confidence).unwrap().verdict);
    }

    #[test]
    fn paired_interval_holds_the_difference_and_turns(table in tables(), confidence in levels()) {
        prop_assume!(table.pairs() > 0);
        let interval = newcombe_paired(&table, confidence).unwrap().unwrap();
        prop_assert!(interval.contains(table.difference().unwrap()), "{:?} {:?}", interval, table.difference());
        prop_assert!(-1.0 <= interval.lower && interval.upper <= 1.0);
        let turned = PairedTable { only_baseline: table.only_candidate, only_candidate: table.only_baseline, ..table };
        let turned = newcombe_paired(&turned, confidence).unwrap().unwrap();
        prop_assert!(near(interval.lower, -turned.upper) && near(interval.upper, -turned.lower));
    }

    #[test]
    fn mcnemar_is_a_symmetric_probability(only_baseline in 0_u64..2_000_000, only_candidate in 0_u64..2_000_000) {
        let test = mcnemar(Discordant { only_baseline, only_candidate }).unwrap();
        prop_assert!((0.0..=1.0).contains(&test.p) && test.mid_p <= test.p && test.mid_p >= 0.0);
        prop_assert_eq!(test, mcnemar(Discordant { only_baseline: only_candidate, only_candidate: only_baseline }).unwrap());
    }

    #[test]
    fn mcnemar_falls_as_the_split_grows(total in 2_u64..400) {
        let half = total / 2;
        let p: Vec<f64> = (0..=half).map(|fewer| mcnemar(Discordant { only_baseline: fewer, only_candidate: total - fewer }).unwrap().p).collect();
        prop_assert!(p.windows(2).all(|pair| pair[0] <= pair[1]));
        // The probabilities of all outcomes are counted once: the test rejects at most as often as it says.
        for (fewer, &level) in p.iter().enumerate() {
            let tails = 2.0 * (0..=fewer).map(|k| statrs::function::factorial::binomial(total, k as u64)).sum::<f64>() * 0.5_f64.powf(total as f64);
            prop_assert!((level - tails.min(1.0)).abs() < 1e-9);
        }
    }

    #[test]
    fn bounds_hold_whatever_the_unknown_are(successes in 0_u64..500, failures in 0_u64..500, good in 0_u64..50, bad in 0_u64..50) {
        let known = successes + failures;
        let total = known + good + bad;
        prop_assume!(total > 0);
        let bounds = rate_bounds(successes, known, good + bad, Confidence::default()).unwrap().unwrap();
        let truth = (successes + good) as f64 / total as f64;
        prop_assert!(bounds.if_all_failed <= truth && truth <= bounds.if_all_succeeded);
        let interval = wilson(successes + good, total, Confidence::default()).unwrap().unwrap();
        prop_assert!(bounds.interval.lower <= interval.lower + 1e-12 && interval.upper <= bounds.interval.upper + 1e-12);
    }

    #[test]
    fn holm_only_raises_and_keeps_the_order(p in prop::collection::vec(0.0..=1.0_f64, 0..30)) {
        let adjusted = holm(&p).unwrap();
        prop_assert_eq!(adjusted.len(), p.len());
        for (index, (&raw, &one)) in p.iter().zip(&adjusted).enumerate() {
            prop_assert!(raw <= one && one <= (raw * p.len() as f64).min(1.0) + 1e-15);
            for (&other_raw, &other) in p.iter().zip(&adjusted).skip(index) {
                prop_assert!((raw <= other_raw) == (one <= other) || (one - other).abs() < 1e-15);
            }
        }
    }

    #[test]
    fn t_interval_moves_and_scales_with_the_values(values in prop::collection::vec(-1e3..1e3_f64, 2..BOOTSTRAP_MIN), shift in -1e3..1e3_f64, scale in 0.01..100.0_f64) {
        let one = mean_interval(&values, Confidence::default()).unwrap();
        prop_assume!(one.method == Method::StudentT);
        let moved: Vec<f64> = values.iter().map(|value| value * scale + shift).collect();
        let two = mean_interval(&moved, Confidence::default()).unwrap();
        let tolerance = 1e-6 * (1.0 + one.interval.unwrap().width() * scale);
        prop_assert!((two.interval.unwrap().lower - (one.interval.unwrap().lower * scale + shift)).abs() < tolerance);
        prop_assert!((two.interval.unwrap().upper - (one.interval.unwrap().upper * scale + shift)).abs() < tolerance);
        prop_assert!(one.interval.unwrap().contains(one.mean.unwrap()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bootstrap_is_inside_the_values_and_ignores_their_order(values in prop::collection::vec(-1e6..1e6_f64, BOOTSTRAP_MIN..90)) {
        let one = mean_difference(&values, Confidence::default()).unwrap();
        prop_assert_eq!(one.estimate.method, Method::Bootstrap);
        let interval = one.estimate.interval.unwrap();
        let (least, most) = values.iter().fold((f64::MAX, f64::MIN), |(least, most), &value| (least.min(value), most.max(value)));
        prop_assert!(least <= interval.lower && interval.lower <= interval.upper && interval.upper <= most);
        // p and interval agree, but for p-values within the interpolation between two resamples of alpha.
        let p = one.p.unwrap();
        prop_assert!((p - 0.05).abs() < 0.001 || (p < 0.05) != interval.contains(0.0), "{} {:?}", p, interval);
        let mut turned = values.clone();
        turned.reverse();
        turned.rotate_left(values.len() / 3);
        prop_assert_eq!(one, mean_difference(&turned, Confidence::default()).unwrap());
    }

    #[test]
    fn a_comparison_adds_up_and_turns(rows in rows(), confidence in levels()) {
        let one = compare(&rows, confidence).unwrap();
        let two = compare(&swapped(&rows), confidence).unwrap();
        prop_assert_eq!(one.pairs + one.left_out, rows.len() as u64);
        prop_assert_eq!(one.basis, two.basis);
        prop_assert_eq!(one.basis == Basis::Nothing, one.pairs == 0);
        if let (Some(ours), Some(theirs)) = (&one.success, &two.success) {
            prop_assert_eq!(ours.verdict, reversed(theirs.verdict));
            prop_assert_eq!(ours.table.pairs() + ours.bounds.unknown, rows.len() as u64);
            let known = ours.pairs as f64 / rows.len() as f64;
            prop_assert!(near(ours.bounds.upper - ours.bounds.lower, 0.0) == (ours.bounds.unknown == 0));
            prop_assert!(ours.bounds.lower <= ours.difference * known + 1e-12 && ours.difference * known <= ours.bounds.upper + 1e-12);
            prop_assert_eq!((ours.baseline, ours.candidate), (theirs.candidate, theirs.baseline));
            prop_assert!(ours.verdict == Verdict::NotShown || (ours.p < confidence.alpha() && !ours.interval.contains(0.0) && ours.more_episodes.is_none()));
            prop_assert!(ours.more_episodes.is_none_or(|more| more >= 1));
        }
        if let (Some(ours), Some(theirs)) = (&one.reward, &two.reward) {
            prop_assert!(near(ours.estimate.estimate.mean.unwrap(), -theirs.estimate.estimate.mean.unwrap()));
        }
        let json = serde_json::to_string(&one).unwrap();
        prop_assert_eq!(serde_json::from_str::<rlm_core::stats::Comparison>(&json).unwrap(), one);
    }
}

fn row(baseline: (bool, f64), candidate: (bool, f64)) -> PairedRow {
    let outcome = |(success, reward)| Some(Outcome { success: Some(success), reward });
    PairedRow { baseline: outcome(baseline), candidate: outcome(candidate) }
}

#[test]
fn nothing_is_said_of_nothing() {
    let confidence = Confidence::default();
    assert_eq!(wilson(0, 0, confidence).unwrap(), None);
    assert_eq!(proportion(0, 0, confidence).unwrap().rate, None);
    assert_eq!(newcombe((0, 0), (1, 2), confidence).unwrap(), None);
    assert_eq!(unpaired((1, 2), (0, 0), confidence).unwrap().verdict, Verdict::NotShown);
    assert_eq!(newcombe_paired(&PairedTable::default(), confidence).unwrap(), None);
    assert_eq!(rate_bounds(0, 0, 0, confidence).unwrap(), None);
    let none = mean_interval(&[], confidence).unwrap();
    assert_eq!((none.count, none.mean, none.interval, none.method), (0, None, None, Method::TooFew));
    let one = mean_difference(&[4.5], confidence).unwrap();
    assert_eq!((one.estimate.mean, one.estimate.interval, one.p, one.estimate.method), (Some(4.5), None, None, Method::TooFew));
    assert_eq!(holm(&[]).unwrap(), Vec::<f64>::new());
    let empty = compare(&[], confidence).unwrap();
    assert_eq!((empty.basis, empty.verdict, empty.success, empty.reward), (Basis::Nothing, Verdict::NotShown, None, None));
    let errored = compare(&[PairedRow { baseline: None, candidate: None }], confidence).unwrap();
    assert_eq!((errored.pairs, errored.left_out, errored.basis), (0, 1, Basis::Nothing));
}

#[test]
fn equal_values_have_that_value_as_interval_and_the_sign_flip_p() {
    for count in [2_usize, 29, 30, 1000, BOOTSTRAP_MAX + 1] {
        let equal = mean_difference(&vec![0.1; count], Confidence::default()).unwrap();
        let interval = equal.estimate.interval.unwrap();
        assert_eq!((equal.estimate.mean, interval.lower, interval.upper), (Some(0.1), 0.1, 0.1));
        assert_eq!(equal.estimate.method, Method::AllEqual);
        assert!((equal.p.unwrap() - 2.0_f64.powf(1.0 - count as f64)).abs() < 1e-15);
    }
    assert_eq!(mean_difference(&[0.0; 50], Confidence::default()).unwrap().p, Some(1.0));
    // Five equal differences can't show anything at 95 % (p = 1/16); six can (1/32).
    let rows = |count| {
        vec![
            PairedRow { baseline: Some(Outcome { success: None, reward: 1.0 }), candidate: Some(Outcome { success: None, reward: 3.0 }) };
            count
        ]
    };
    let five = compare(&rows(5), Confidence::default()).unwrap();
    assert_eq!((five.basis, five.verdict, five.reward.unwrap().more_episodes), (Basis::Reward, Verdict::NotShown, Some(1)));
    assert_eq!(compare(&rows(6), Confidence::default()).unwrap().verdict, Verdict::Better);
}

#[test]
fn what_is_not_a_number_is_refused() {
    let confidence = Confidence::default();
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert!(matches!(mean_interval(&[1.0, bad], confidence), Err(Invalid::NotFinite { position: 1, .. })));
        assert!(matches!(
            compare(&[row((true, 1.0), (true, 1.0)), row((true, 1.0), (false, bad))], confidence),
            Err(Invalid::NotFinite { position: 1, .. })
        ));
        assert!(matches!(holm(&[0.1, bad]), Err(Invalid::NotAPValue { position: 1, .. })));
        assert!(matches!(Confidence::new(bad), Err(Invalid::Level { .. })));
    }
    assert!(matches!(compare(&[row((true, -1e308), (true, 1e308))], confidence), Err(Invalid::OutOfRange)));
    assert!(matches!(mean_interval(&[f64::MAX, -f64::MAX], confidence), Err(Invalid::OutOfRange)));
    for level in [0.0, 0.49, 0.9999, 1.0, 95.0, -1.0] {
        assert!(matches!(Confidence::new(level), Err(Invalid::Level { .. })));
    }
    assert!(matches!(wilson(3, 2, confidence), Err(Invalid::PartOverTotal { part: 3, total: 2 })));
    assert!(matches!(wilson(3, u64::MAX, confidence), Err(Invalid::CountTooLarge { .. })));
    assert!(matches!(mcnemar(Discordant { only_baseline: u64::MAX, only_candidate: u64::MAX }), Err(Invalid::CountTooLarge { .. })));
    assert!(matches!(rate_bounds(1, 1, u64::MAX, confidence), Err(Invalid::CountTooLarge { .. })));
    let huge = PairedTable { both: u64::MAX, only_baseline: 1, only_candidate: 1, neither: 1 };
    assert!(matches!(newcombe_paired(&huge, confidence), Err(Invalid::CountTooLarge { .. })));
    let error = rlm_core::error::Error::from(Invalid::Level { level: 95.0 });
    assert_eq!(error.message, "the confidence level is 95; it must be between 0.5 and 0.999, for example 0.95");
    assert_eq!(error.code, rlm_core::error::Code::InvalidRequest);
}

#[test]
fn the_method_follows_the_number_of_values() {
    let method =
        |count: usize| mean_interval(&(0..count).map(|index| index as f64).collect::<Vec<_>>(), Confidence::default()).unwrap().method;
    assert_eq!(method(1), Method::TooFew);
    assert_eq!(method(BOOTSTRAP_MIN - 1), Method::StudentT);
    assert_eq!(method(BOOTSTRAP_MIN), Method::Bootstrap);
    assert_eq!(method(BOOTSTRAP_MAX), Method::Bootstrap);
    assert_eq!(method(BOOTSTRAP_MAX + 1), Method::StudentT);
}

#[test]
fn a_mean_has_no_noise_in_its_digits() {
    let values: Vec<f64> = (0..2000_u64).map(|index| ((index * 7919) % 1009) as f64).collect();
    assert_eq!(mean_interval(&values, Confidence::default()).unwrap().mean, Some(values.iter().sum::<f64>() / 2000.0));
    let tenths = mean_interval(&[vec![0.1; 500_000], vec![0.3; 500_000]].concat(), Confidence::default()).unwrap();
    assert!((tenths.mean.unwrap() - 0.2).abs() < 1e-16, "{tenths:?}");
}

#[test]
fn the_methods_agree_where_they_meet() {
    let values: Vec<f64> = (0..BOOTSTRAP_MAX as u64 + 1).map(|index| ((index * 7919) % 1009) as f64).collect();
    let student = mean_interval(&values, Confidence::default()).unwrap();
    let bootstrap = mean_interval(&values[1..], Confidence::default()).unwrap();
    assert_eq!((student.method, bootstrap.method), (Method::StudentT, Method::Bootstrap));
    let (one, two) = (student.interval.unwrap(), bootstrap.interval.unwrap());
    assert!((one.width() / two.width() - 1.0).abs() < 0.04, "{one:?} {two:?}");
}

#[test]
fn a_clear_winner_is_better_and_a_small_lead_says_how_many_more() {
    let mut rows = vec![row((false, 10.0), (true, 190.0)); 40];
    rows.extend(vec![row((true, 200.0), (true, 199.0)); 60]);
    let clear = compare(&rows, Confidence::default()).unwrap();
    assert_eq!((clear.verdict, clear.basis), (Verdict::Better, Basis::Success));
    assert_eq!(clear.reward.as_ref().unwrap().verdict, Verdict::Better);
    assert_eq!(compare(&swapped(&rows), Confidence::default()).unwrap().verdict, Verdict::Worse);

    let mut rows = vec![row((true, 1.0), (false, 0.0)); 10];
    rows.extend(vec![row((false, 0.0), (true, 1.0)); 16]);
    rows.extend(vec![row((true, 1.0), (true, 1.0)); 60]);
    rows.extend(vec![row((false, 0.0), (false, 0.0)); 14]);
    let small = compare(&rows, Confidence::default()).unwrap().success.unwrap();
    assert_eq!((small.verdict, small.pairs, small.more_episodes), (Verdict::NotShown, 100, Some(465)));
    // The same shares after that many more are shown.
    let table = PairedTable { both: 339, only_baseline: 57, only_candidate: 90, neither: 79 };
    assert!(
        mcnemar(table.discordant()).unwrap().p < 0.05 && !newcombe_paired(&table, Confidence::default()).unwrap().unwrap().contains(0.0)
    );

    let level = vec![row((true, 1.0), (true, 1.0)); 100];
    let level = compare(&level, Confidence::default()).unwrap();
    assert_eq!(level.verdict, Verdict::NotShown);
    assert_eq!(level.success.unwrap().more_episodes, None);
    assert_eq!(level.reward.unwrap().more_episodes, None);
}

#[test]
fn many_tasks_need_more_than_one() {
    // Six against none: p = 1/32, shown alone, not among five tasks.
    let mut rows = vec![row((false, 0.0), (true, 1.0)); 6];
    rows.extend(vec![row((true, 1.0), (true, 1.0)); 20]);
    let alone = compare(&rows, Confidence::default()).unwrap();
    assert_eq!(alone.verdict, Verdict::Better);
    let nothing = compare(&[PairedRow { baseline: None, candidate: None }], Confidence::default()).unwrap();
    let mut tasks = vec![alone.clone(), nothing, alone.clone(), alone.clone(), alone.clone(), alone];
    adjust(&mut tasks).unwrap();
    for (index, task) in tasks.iter().enumerate() {
        assert_eq!(task.verdict, Verdict::NotShown);
        match &task.success {
            Some(success) => {
                assert!((success.adjusted_p.unwrap() - 5.0 / 32.0).abs() < 1e-12);
                assert!(success.more_episodes.is_some());
            }
            None => assert_eq!(index, 1),
        }
    }
}

#[test]
fn the_largest_evaluation_is_compared_in_bounded_time() {
    let rows: Vec<PairedRow> =
        (0..1_000_000_u64).map(|index| row((index % 3 == 0, (index % 101) as f64), ((index * 7) % 20 < 7, (index % 103) as f64))).collect();
    let start = std::time::Instant::now();
    let comparison = compare(&rows, Confidence::default()).unwrap();
    let took = start.elapsed();
    assert_eq!(comparison.pairs, 1_000_000);
    assert_eq!(comparison.verdict, Verdict::Better);
    assert_eq!(comparison.reward.unwrap().estimate.estimate.method, Method::StudentT);
    // A resampling of a million values would take minutes.
    assert!(took.as_secs() < 20, "{took:?}");
}

#[test]
fn the_json_is_flat_and_in_camel_case() {
    let json =
        serde_json::to_value(compare(&[row((true, 1.0), (false, 0.5)), row((true, 1.0), (true, 0.25))], Confidence::default()).unwrap())
            .unwrap();
    assert_eq!(json["verdict"], "notShown");
    assert_eq!(json["basis"], "success");
    assert_eq!(json["success"]["table"]["onlyBaseline"], 1);
    assert_eq!(json["success"]["midP"], 0.5);
    assert_eq!(json["reward"]["method"], "studentT");
    assert_eq!(json["reward"]["mean"], -0.625);
    assert_eq!(json["reward"]["count"], 2);
    assert!(json["reward"]["p"].is_number() && json["reward"]["interval"]["lower"].is_number());
}

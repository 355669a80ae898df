//! The account of one episode: what its steps add up to, when it is over, and whether it succeeded. Pure.

use std::time::Duration;

use rlm_core::evaluation::{Limits, RunTask, SuccessRule};
use rlmesh_proto::spaces::v1::{MetaMap, meta_value::Kind};
use rlmesh_proto::{Edition, defaults};

/// Where an episode ends at the latest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLimits {
    pub steps: u32,
    pub duration: Option<Duration>,
}

impl StepLimits {
    /// The stricter of task and evaluation; without any, the SDK's own bound.
    #[must_use]
    pub fn of(task: &RunTask, limits: &Limits) -> Self {
        let own = u32::try_from(defaults(Edition::E2026_06).default_max_episode_steps).unwrap_or(100_000);
        let steps = [task.max_episode_steps, limits.max_episode_steps].into_iter().flatten().min().unwrap_or(own).max(1);
        let seconds = [task.max_episode_seconds, limits.max_episode_seconds]
            .into_iter()
            .flatten()
            .filter(|seconds| *seconds > 0.0)
            .min_by(f64::total_cmp);
        Self { steps, duration: seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) }
    }
}

/// What one step brought.
#[derive(Debug, Clone, Copy)]
pub struct StepResult {
    pub reward: f64,
    pub terminated: bool,
    pub truncated: bool,
}

/// A finished episode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    pub reward: f64,
    pub steps: u32,
    pub terminated: bool,
    pub truncated: bool,
    pub success: Option<bool>,
    pub conformance_warnings: u32,
}

/// How an episode stands after a step.
#[derive(Debug, Clone, PartialEq)]
pub enum After {
    GoesOn,
    Over(Score),
    /// The environment broke its contract; the sentence says how.
    Broken(String),
}

/// The running account. Rewards are added in step order as doubles, so that the sum is the same wherever it is made.
#[derive(Debug, Clone, Default)]
pub struct Account {
    reward: f64,
    steps: u32,
    warnings: u32,
}

impl Account {
    /// Counts the warnings in a reset's or step's info.
    pub fn note(&mut self, info: Option<&MetaMap>) {
        let key = defaults(Edition::E2026_06).conformance_warning_info_key;
        let Some(value) = info.and_then(|info| info.entries.get(key)).and_then(|value| value.kind.as_ref()) else { return };
        let count = match value {
            Kind::List(list) => u32::try_from(list.items.len()).unwrap_or(u32::MAX),
            _ => 1,
        };
        self.warnings = self.warnings.saturating_add(count);
    }

    /// Adds a step. `info` is the lane's info of this step, `elapsed` the episode's age.
    pub fn step(
        &mut self,
        result: StepResult,
        info: Option<&MetaMap>,
        elapsed: Duration,
        limits: StepLimits,
        rule: Option<&SuccessRule>,
    ) -> After {
        self.note(info);
        self.steps += 1;
        if !result.reward.is_finite() {
            return After::Broken(format!(
                "the environment returned the reward {} in step {}; a reward has to be a finite number",
                result.reward, self.steps
            ));
        }
        self.reward += result.reward;
        let over = result.terminated || result.truncated;
        let cut = !over && (self.steps >= limits.steps || limits.duration.is_some_and(|limit| elapsed >= limit));
        if !over && !cut {
            return After::GoesOn;
        }
        if !self.reward.is_finite() {
            return After::Broken(format!("the rewards of {} steps add up to {}, which is no finite number", self.steps, self.reward));
        }
        let success = match rule {
            Some(rule) => Some(rule.decide(self.reward, self.steps)),
            None => success(info),
        };
        After::Over(Score {
            reward: self.reward,
            steps: self.steps,
            terminated: result.terminated,
            truncated: result.truncated || cut,
            success,
            conformance_warnings: self.warnings,
        })
    }
}

/// What the environment says about success in its last info; None when it says nothing.
#[must_use]
pub fn success(info: Option<&MetaMap>) -> Option<bool> {
    let info = info?;
    defaults(Edition::E2026_06).success_info_keys.iter().find_map(|key| match info.entries.get(*key)?.kind.as_ref()? {
        Kind::Bool(value) => Some(*value),
        Kind::Integer(value) => Some(*value != 0),
        // A number that is none says nothing.
        Kind::Number(value) => (!value.is_nan()).then_some(*value != 0.0),
        Kind::Text(_) | Kind::Bytes(_) | Kind::List(_) | Kind::Map(_) | Kind::Null(_) => None,
    })
}

/// The info of the lane at `position` among the `width` lanes that a reset or step covered. Unlike the SDK's final info it
/// is there for running lanes too.
#[must_use]
pub fn lane_info(info: Option<&MetaMap>, position: usize, width: usize) -> Option<MetaMap> {
    let whole = info?;
    if width > 1
        && let Some(Kind::List(list)) = whole.entries.get("final_info").and_then(|value| value.kind.as_ref())
    {
        return match list.items.get(position)?.kind.as_ref()? {
            Kind::Map(map) => Some(map.clone()),
            _ => None,
        };
    }
    rlmesh_proto::lane_final_info(info, position, width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rlm_core::evaluation::SuccessMetric;
    use rlmesh_proto::spaces::v1::{MetaList, MetaValue};

    fn info(entries: &[(&str, Kind)]) -> MetaMap {
        MetaMap { entries: entries.iter().map(|(key, kind)| ((*key).to_owned(), MetaValue { kind: Some(kind.clone()) })).collect() }
    }

    const OPEN: StepLimits = StepLimits { steps: 1000, duration: None };

    fn step(reward: f64) -> StepResult {
        StepResult { reward, terminated: false, truncated: false }
    }

    #[test]
    fn success_is_what_the_environment_says() {
        assert_eq!(success(None), None);
        assert_eq!(success(Some(&info(&[]))), None);
        assert_eq!(success(Some(&info(&[("is_success", Kind::Bool(false)), ("success", Kind::Bool(true))]))), Some(false));
        assert_eq!(success(Some(&info(&[("success", Kind::Integer(1))]))), Some(true));
        assert_eq!(success(Some(&info(&[("task_success", Kind::Number(0.0))]))), Some(false));
        assert_eq!(success(Some(&info(&[("is_success", Kind::Text("yes".into()))]))), None);
        assert_eq!(success(Some(&info(&[("is_success", Kind::Number(f64::NAN))]))), None);
    }

    #[test]
    fn a_rule_decides_in_place_of_the_environment() {
        let rule = SuccessRule { metric: SuccessMetric::Reward, at_least: 2.0 };
        let mut account = Account::default();
        assert_eq!(account.step(step(1.0), None, Duration::ZERO, OPEN, Some(&rule)), After::GoesOn);
        let last = StepResult { reward: 1.0, terminated: true, truncated: false };
        let flag = info(&[("is_success", Kind::Bool(false))]);
        let After::Over(score) = account.step(last, Some(&flag), Duration::ZERO, OPEN, Some(&rule)) else { unreachable!() };
        assert_eq!((score.success, score.reward, score.steps, score.terminated, score.truncated), (Some(true), 2.0, 2, true, false));
    }

    #[test]
    fn limits_truncate() {
        let limits = StepLimits { steps: 2, duration: None };
        let mut account = Account::default();
        assert_eq!(account.step(step(1.0), None, Duration::ZERO, limits, None), After::GoesOn);
        let After::Over(score) = account.step(step(1.0), None, Duration::ZERO, limits, None) else { unreachable!() };
        assert!(score.truncated && !score.terminated && score.success.is_none());

        let limits = StepLimits { steps: 100, duration: Some(Duration::from_secs(1)) };
        let mut account = Account::default();
        assert_eq!(account.step(step(1.0), None, Duration::from_millis(999), limits, None), After::GoesOn);
        assert!(matches!(account.step(step(1.0), None, Duration::from_secs(1), limits, None), After::Over(_)));
    }

    #[test]
    fn rewards_that_are_no_numbers_break_the_contract() {
        for reward in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(matches!(Account::default().step(step(reward), None, Duration::ZERO, OPEN, None), After::Broken(_)));
        }
        let mut account = Account::default();
        assert_eq!(account.step(step(f64::MAX), None, Duration::ZERO, OPEN, None), After::GoesOn);
        let last = StepResult { reward: f64::MAX, terminated: true, truncated: false };
        assert!(matches!(account.step(last, None, Duration::ZERO, OPEN, None), After::Broken(_)));
    }

    #[test]
    fn warnings_are_counted_in_every_info() {
        let key = "rlmesh.conformance.warning";
        let two = info(&[(key, Kind::List(MetaList { items: vec![MetaValue::default(), MetaValue::default()] }))]);
        let mut account = Account::default();
        account.note(Some(&two));
        let last = StepResult { reward: 0.0, terminated: true, truncated: false };
        let After::Over(score) = account.step(last, Some(&two), Duration::ZERO, OPEN, None) else { unreachable!() };
        assert_eq!(score.conformance_warnings, 4);
    }

    #[test]
    fn a_lane_finds_its_info_among_several() {
        let list =
            |items: Vec<Kind>| Kind::List(MetaList { items: items.into_iter().map(|kind| MetaValue { kind: Some(kind) }).collect() });
        let batched = info(&[
            ("final_info", list(vec![Kind::Map(info(&[("is_success", Kind::Bool(true))])), Kind::Map(info(&[("x", Kind::Integer(1))]))])),
            ("_final_info", list(vec![Kind::Bool(true), Kind::Bool(false)])),
        ]);
        assert_eq!(success(lane_info(Some(&batched), 0, 2).as_ref()), Some(true));
        assert!(lane_info(Some(&batched), 1, 2).unwrap().entries.contains_key("x"));
        assert_eq!(success(lane_info(Some(&info(&[("success", Kind::Bool(true))])), 0, 1).as_ref()), Some(true));
    }

    proptest! {
        #[test]
        fn the_sum_is_that_of_the_steps_in_order(rewards in proptest::collection::vec(-1e6_f64..1e6, 1..40)) {
            let mut account = Account::default();
            let mut expected = 0.0;
            let limits = StepLimits { steps: u32::try_from(rewards.len()).unwrap(), duration: None };
            let mut last = After::GoesOn;
            for reward in &rewards {
                expected += reward;
                last = account.step(step(*reward), None, Duration::ZERO, limits, None);
            }
            let After::Over(score) = last else { unreachable!() };
            prop_assert_eq!(score.reward.to_bits(), expected.to_bits());
        }
    }
}

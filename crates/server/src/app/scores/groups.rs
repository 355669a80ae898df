//! From values per (model, task) to scores. Pure; the statistics themselves are `rlm_core::stats`.

use std::collections::BTreeMap;

use rlm_api::rest::{Comparison, ScoreGroup, Scores};
use rlm_core::error::{Code, Error};
use rlm_core::evaluation::{SuccessMetric, SuccessRule};
use rlm_core::stats::{self, Basis, Confidence, Outcome, PairedRow};

use crate::app::evaluations::Labels;

/// Up to this many models each is compared with each; beyond, each with the first.
const ALL_PAIRS: usize = 8;
/// Most comparisons in one answer.
const MOST_COMPARISONS: usize = 2_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum GroupBy {
    Task,
    /// What a `taskId` says before its last `/`.
    Scenario,
    /// `metadata.benchmark` of the tasks.
    Benchmark,
    /// `metadata.perturbation` of the tasks.
    Perturbation,
    Model,
}

impl GroupBy {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Scenario => "scenario",
            Self::Benchmark => "benchmark",
            Self::Perturbation => "perturbation",
            Self::Model => "model",
        }
    }
}

/// One scored row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Value {
    /// Trial within the cell: rows of two models pair by it.
    pub trial: u32,
    /// Equal in rows that pair. An imported evaluation may lack episodes of one model, and then its trials are others.
    pub seed: u64,
    pub success: Option<bool>,
    pub reward: f64,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct CellValues(Vec<Value>);

impl CellValues {
    pub fn push(&mut self, trial: u64, seed: u64, reward: f64, success: Option<bool>) {
        self.0.push(Value { trial: u32::try_from(trial).unwrap_or(u32::MAX), seed, success, reward });
    }
}

/// The rows of one model and task.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    pub model: u32,
    pub task: u32,
    pub rows: u64,
    pub errored: u64,
    pub steps: u64,
    /// Of scored rows, by trial.
    pub values: CellValues,
}

impl Cell {
    #[must_use]
    pub fn sorted(mut self) -> Self {
        self.values.0.sort_by_key(|value| value.trial);
        self
    }
}

/// Scores of these cells; `known` are their comparisons, where they were computed before.
pub fn compute(labels: &Labels, cells: &[Cell], group_by: GroupBy, known: Option<Vec<Comparison>>) -> Result<Scores, Error> {
    let mut groups: Vec<((String, u32), Vec<&Cell>)> = Vec::new();
    let mut places: BTreeMap<(String, u32), usize> = BTreeMap::new();
    for cell in cells {
        let key = (key(labels, cell, group_by), cell.model);
        let place = *places.entry(key.clone()).or_insert_with(|| {
            groups.push((key, Vec::new()));
            groups.len() - 1
        });
        if let Some((_, cells)) = groups.get_mut(place) {
            cells.push(cell);
        }
    }
    let groups = groups.into_iter().map(|((key, model), cells)| group(labels, key, model, &cells)).collect::<Result<Vec<_>, Error>>()?;
    let comparisons = match known {
        Some(known) => known,
        None => comparisons(labels, cells)?,
    };
    Ok(Scores { group_by: group_by.as_str().to_owned(), groups, comparisons })
}

fn key(labels: &Labels, cell: &Cell, group_by: GroupBy) -> String {
    let task = labels.tasks.get(cell.task as usize);
    let task_id = task.map_or("", |task| task.task_id.as_str());
    let named = |name: &str| match task.and_then(|task| task.metadata.get(name)) {
        None | Some(serde_json::Value::Null) => "none".to_owned(),
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    match group_by {
        GroupBy::Task => {
            let same_name = labels.tasks.iter().filter(|other| other.task_id == task_id).count();
            if same_name > 1 { format!("{}:{task_id}", task.map_or("", |task| task.env.as_str())) } else { task_id.to_owned() }
        }
        GroupBy::Scenario => task_id.rsplit_once('/').map_or(task_id, |(scenario, _)| scenario).to_owned(),
        GroupBy::Benchmark => named("benchmark"),
        GroupBy::Perturbation => named("perturbation"),
        GroupBy::Model => labels.model(cell.model).to_owned(),
    }
}

/// What all share, if they do.
fn common<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Option<T> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

fn group(labels: &Labels, key: String, model: u32, cells: &[&Cell]) -> Result<ScoreGroup, Error> {
    let confidence = Confidence::default();
    let values = || cells.iter().flat_map(|cell| &cell.values.0);
    let scored = values().count() as u64;
    let errored: u64 = cells.iter().map(|cell| cell.errored).sum();
    let episodes: u64 = cells.iter().map(|cell| cell.rows).sum();
    let pending = episodes.saturating_sub(scored + errored);
    let successes = values().filter(|value| value.success == Some(true)).count() as u64;
    let unknown_success = values().filter(|value| value.success.is_none()).count() as u64;
    let known = scored - unknown_success;
    let rated = scored > 0 && unknown_success == 0;
    let rate = if rated { Some(stats::proportion(successes, scored, confidence)?) } else { None };
    // Where the environment never says anything, "between 0 and 1" is no news.
    let bounds = if known > 0 { stats::rate_bounds(successes, known, unknown_success + errored + pending, confidence)? } else { None };
    let rewards: Vec<f64> = values().map(|value| value.reward).collect();
    let reward = stats::mean_interval(&rewards, confidence)?;
    let steps: u64 = cells.iter().map(|cell| cell.steps).sum();
    let task = |cell: &Cell| labels.task(cell.task);
    Ok(ScoreGroup {
        key,
        model: labels.model(model).to_owned(),
        env: common(cells.iter().map(|cell| task(cell).0)).map(str::to_owned),
        task_id: common(cells.iter().map(|cell| task(cell).1)).map(str::to_owned),
        episodes,
        scored,
        errored,
        pending,
        unknown_success,
        successes,
        success_rate: rate.and_then(|rate| rate.rate),
        success_interval: rate.and_then(|rate| rate.interval).map(|interval| [interval.lower, interval.upper]),
        success_bounds: bounds.map(|bounds| [bounds.if_all_failed, bounds.if_all_succeeded]),
        mean_reward: reward.mean,
        reward_interval: reward.interval.map(|interval| [interval.lower, interval.upper]),
        mean_steps: (scored > 0).then(|| steps as f64 / scored as f64),
        total_steps: steps,
        success_rule: common(cells.iter().map(|cell| rule(labels, cell.task))).unwrap_or_else(|| "differs by task".to_owned()),
    })
}

fn rule(labels: &Labels, task: u32) -> String {
    match labels.tasks.get(task as usize).and_then(|task| task.success) {
        None => "what the environment says".to_owned(),
        Some(SuccessRule { metric: SuccessMetric::Reward, at_least }) => format!("reward at least {at_least}"),
        Some(SuccessRule { metric: SuccessMetric::Steps, at_least }) => format!("at least {at_least} steps"),
    }
}

/// Paired comparisons, per task and over all tasks that both models ran.
fn comparisons(labels: &Labels, cells: &[Cell]) -> Result<Vec<Comparison>, Error> {
    let by_key: BTreeMap<(u32, u32), &Cell> = cells.iter().map(|cell| ((cell.task, cell.model), cell)).collect();
    let mut models: Vec<u32> = cells.iter().map(|cell| cell.model).collect();
    models.sort_unstable();
    models.dedup();
    let baselines = if models.len() <= ALL_PAIRS { models.len() } else { 1 };
    let mut compared = Vec::new();
    for (at, baseline) in models.iter().enumerate().take(baselines) {
        for candidate in models.iter().skip(at + 1) {
            let shared: Vec<(u32, &Cell, &Cell)> = by_key
                .range((0, 0)..)
                .filter(|((_, model), _)| model == baseline)
                .filter_map(|((task, _), one)| by_key.get(&(*task, *candidate)).map(|other| (*task, *one, *other)))
                .collect();
            if shared.is_empty() || compared.len() + shared.len() > MOST_COMPARISONS {
                continue;
            }
            pair(labels, *baseline, *candidate, &shared, &mut compared)?;
        }
    }
    Ok(compared)
}

fn pair(
    labels: &Labels,
    baseline: u32,
    candidate: u32,
    shared: &[(u32, &Cell, &Cell)],
    compared: &mut Vec<Comparison>,
) -> Result<(), Error> {
    let confidence = Confidence::default();
    let mut per_task = Vec::with_capacity(shared.len());
    for (_, one, other) in shared {
        per_task.push(stats::compare(&paired(one, other), confidence)?);
    }
    let overall = match (per_task.as_slice(), shared) {
        ([only], [_]) => only.clone(),
        _ => {
            let all: Vec<PairedRow> = shared.iter().flat_map(|(_, one, other)| paired(one, other)).collect();
            stats::compare(&all, confidence)?
        }
    };
    stats::adjust(&mut per_task)?;
    let mut push = |task: Option<u32>, result: &stats::Comparison, adjusted_p: Option<f64>| -> Result<(), Error> {
        compared.push(Comparison {
            baseline: labels.model(baseline).to_owned(),
            candidate: labels.model(candidate).to_owned(),
            task_id: task.map(|task| labels.task(task).1.to_owned()),
            env: task.map(|task| labels.task(task).0.to_owned()),
            result: serde_json::to_value(result)
                .map_err(|error| Error::new(Code::Internal, format!("a comparison can't be written as JSON: {error}")))?,
            adjusted_p,
        });
        Ok(())
    };
    push(None, &overall, None)?;
    for ((task, ..), result) in shared.iter().zip(&per_task) {
        let adjusted = match result.basis {
            Basis::Success => result.success.as_ref().and_then(|success| success.adjusted_p),
            Basis::Reward => result.reward.as_ref().and_then(|reward| reward.adjusted_p),
            Basis::Nothing => None,
        };
        push(Some(*task), result, adjusted)?;
    }
    Ok(())
}

/// Rows of two cells of the same task, matched by trial and seed. A trial that one lacks, or whose seeds differ, is left out.
fn paired(baseline: &Cell, candidate: &Cell) -> Vec<PairedRow> {
    let outcome = |value: &Value| Some(Outcome { success: value.success, reward: value.reward });
    let (mut one, mut other) = (baseline.values.0.iter().peekable(), candidate.values.0.iter().peekable());
    let mut rows = Vec::new();
    while let Some(trial) = [one.peek(), other.peek()].into_iter().flatten().map(|value| value.trial).min() {
        let (baseline, candidate) = (one.next_if(|value| value.trial == trial), other.next_if(|value| value.trial == trial));
        rows.push(match baseline.zip(candidate) {
            Some((baseline, candidate)) if baseline.seed == candidate.seed => {
                PairedRow { baseline: outcome(baseline), candidate: outcome(candidate) }
            }
            Some(_) => PairedRow { baseline: None, candidate: None },
            None => PairedRow { baseline: baseline.and_then(outcome), candidate: candidate.and_then(outcome) },
        });
    }
    let all = usize::try_from(baseline.rows.max(candidate.rows)).unwrap_or(usize::MAX);
    rows.resize(all.max(rows.len()), PairedRow { baseline: None, candidate: None });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::evaluations::{ModelLabel, TaskLabel};

    fn labels() -> Labels {
        let model = |id: &str| ModelLabel { id: id.into(), execution_horizon: 1, prefetch_lead: 0 };
        let task = |task_id: &str, benchmark: Option<&str>| TaskLabel {
            env: "e".into(),
            task_id: task_id.into(),
            success: None,
            metadata: benchmark.map(|name| ("benchmark".to_owned(), name.into())).into_iter().collect(),
        };
        Labels { models: vec![model("a"), model("b")], tasks: vec![task("s/0", Some("x")), task("s/1", None)] }
    }

    fn cell(model: u32, task: u32, rows: u64, values: &[(u64, f64, Option<bool>)]) -> Cell {
        let mut cell = Cell { model, task, rows, errored: 0, steps: 10 * values.len() as u64, values: CellValues::default() };
        for (trial, reward, success) in values {
            cell.values.push(*trial, 100 + *trial, *reward, *success);
        }
        cell.sorted()
    }

    #[test]
    fn an_unknown_flag_takes_the_rate_away_and_leaves_bounds() {
        let mut one = cell(0, 0, 4, &[(0, 1.0, Some(true)), (1, 0.0, None)]);
        one.errored = 1;
        let scores = compute(&labels(), &[one], GroupBy::Task, None).unwrap();
        let group = &scores.groups[0];
        assert_eq!((group.episodes, group.scored, group.errored, group.pending, group.unknown_success), (4, 2, 1, 1, 1));
        assert_eq!(group.success_rate, None);
        assert_eq!(group.success_bounds, Some([0.25, 1.0]));
        assert_eq!(group.mean_reward, Some(0.5));
        assert_eq!(group.mean_steps, Some(10.0));
    }

    #[test]
    fn groups_join_what_they_name() {
        let cells =
            [cell(0, 0, 1, &[(0, 1.0, Some(true))]), cell(1, 0, 1, &[(0, 0.0, Some(false))]), cell(0, 1, 1, &[(0, 3.0, Some(true))])];
        let keys = |by| {
            let scores = compute(&labels(), &cells, by, None).unwrap();
            scores.groups.iter().map(|group| format!("{}/{}/{}", group.key, group.model, group.episodes)).collect::<Vec<_>>()
        };
        assert_eq!(keys(GroupBy::Task), ["s/0/a/1", "s/0/b/1", "s/1/a/1"]);
        assert_eq!(keys(GroupBy::Scenario), ["s/a/2", "s/b/1"]);
        assert_eq!(keys(GroupBy::Benchmark), ["x/a/1", "x/b/1", "none/a/1"]);
        assert_eq!(keys(GroupBy::Perturbation), ["none/a/2", "none/b/1"]);
        assert_eq!(keys(GroupBy::Model), ["a/a/2", "b/b/1"]);
    }

    #[test]
    fn rows_pair_by_trial_and_open_ones_are_left_out() {
        let one = cell(0, 0, 3, &[(2, 1.0, Some(true)), (0, 1.0, Some(true))]);
        let other = cell(1, 0, 3, &[(0, 0.0, Some(false)), (1, 0.0, Some(false))]);
        let scores = compute(&labels(), &[one, other], GroupBy::Task, None).unwrap();
        assert_eq!(scores.comparisons.len(), 2);
        let overall = &scores.comparisons[0];
        assert_eq!(
            (overall.task_id.as_deref(), overall.result["pairs"].as_u64(), overall.result["leftOut"].as_u64()),
            (None, Some(1), Some(2))
        );
        assert_eq!(overall.result["success"]["table"]["onlyBaseline"], 1);
    }

    #[test]
    fn equal_trials_of_other_seeds_are_no_pair() {
        let one = cell(0, 0, 2, &[(0, 1.0, Some(true)), (1, 1.0, Some(true))]);
        let mut other = cell(1, 0, 2, &[(0, 0.0, Some(false)), (1, 0.0, Some(false))]);
        other.values.0[1].seed = 999;
        let scores = compute(&labels(), &[one, other], GroupBy::Task, None).unwrap();
        let result = &scores.comparisons[0].result;
        assert_eq!((result["pairs"].as_u64(), result["leftOut"].as_u64()), (Some(1), Some(1)));
    }
}

//! What a checked request comes to: workloads, bindings and lanes. Nothing here may depend on a cluster, the time or chance.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::evaluation::{Binding, EvaluationSpec, Params, RunTask};
use crate::rows;

/// Lanes that the platform chooses at most.
const DEFAULT_LANES: u64 = 8;

/// What a request would run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// One per model and task that meet, tasks in order.
    pub workloads: Vec<Workload>,
    pub estimates: Estimates,
    pub rows: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    pub model: String,
    pub env: String,
    pub task_id: String,
    pub episodes: u64,
    /// Number of its first row.
    pub first_row: u64,
    /// Seed of its first episode.
    pub seed: u64,
    /// What the environment is constructed with.
    #[schemars(with = "std::collections::BTreeMap<String, serde_json::Value>")]
    pub params: Params,
    /// Environments side by side.
    pub lanes: u32,
    pub max_episode_steps: Option<u32>,
}

/// Sizes that follow from the request alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Estimates {
    pub episodes: u64,
    pub models: u64,
    pub environments: u64,
    pub tasks: u64,
    /// Placements: each loads its model once.
    pub runs: u64,
    /// Distinct ways in which environments are constructed.
    pub bindings: u64,
    /// Most environment steps; null where an episode has no limit.
    pub max_env_steps: Option<u64>,
    /// GPUs of the models of all runs at once.
    pub model_gpus: u64,
}

#[must_use]
pub fn preview(spec: &EvaluationSpec) -> Preview {
    let segments = rows::segments(spec);
    let runs = rows::runs(spec, &segments);
    let mut cells: HashMap<(u32, &str), u64> = HashMap::new();
    for run in &runs {
        let size: u64 = run.segments.iter().map(|segment| segment.count).sum();
        let most = cells.entry((run.model, run.env.as_str())).or_default();
        *most = size.max(*most);
    }
    let mut widest: HashMap<(u32, &str), u32> = HashMap::new();
    for ((model, env), rows) in &cells {
        widest.insert((*model, env), lanes(spec, env, *rows));
    }
    let mut workloads = Vec::with_capacity(segments.len());
    let mut max_env_steps = Some(0_u64);
    for segment in &segments {
        let (Some(model), Some(task)) = (spec.models.get(segment.model as usize), spec.tasks.get(segment.task as usize)) else { continue };
        let limit = smaller(task.max_episode_steps, spec.limits.max_episode_steps);
        max_env_steps = max_env_steps.zip(limit).map(|(sum, limit)| sum.saturating_add(segment.count.saturating_mul(u64::from(limit))));
        workloads.push(Workload {
            model: model.id.clone(),
            env: task.env.clone(),
            task_id: task.task_id.clone(),
            episodes: segment.count,
            first_row: segment.first_row,
            seed: segment.row(0).map_or(task.seed, |row| row.seed),
            params: task.params.clone(),
            lanes: widest.get(&(segment.model, task.env.as_str())).copied().unwrap_or(1),
            max_episode_steps: limit,
        });
    }
    let total: u64 = segments.iter().map(|segment| segment.count).sum();
    let estimates = Estimates {
        episodes: total,
        models: spec.models.len() as u64,
        environments: spec.environments.len() as u64,
        tasks: spec.tasks.len() as u64,
        runs: runs.len() as u64,
        bindings: spec.environments.iter().map(|environment| plan_bindings(spec, &environment.id).0.len() as u64).sum(),
        max_env_steps,
        model_gpus: runs.iter().filter_map(|run| spec.models.get(run.model as usize)).map(|model| u64::from(model.resources.gpu)).sum(),
    };
    Preview { workloads, estimates, rows: total }
}

/// The distinct construction arguments of the tasks of an environment, in order of first use, and its tasks.
#[must_use]
pub fn plan_bindings(spec: &EvaluationSpec, env_id: &str) -> (Vec<Binding>, Vec<RunTask>) {
    let mut known: HashMap<String, u32> = HashMap::new();
    let mut bindings: Vec<Binding> = Vec::new();
    let mut tasks = Vec::new();
    for (task_index, task) in (0_u32..).zip(&spec.tasks).filter(|(_, task)| task.env == env_id) {
        let key = serde_json::Value::Object(task.params.clone()).to_string();
        let binding = *known.entry(key).or_insert_with(|| {
            let index = u32::try_from(bindings.len()).unwrap_or(u32::MAX);
            bindings.push(Binding { index, params: task.params.clone() });
            index
        });
        tasks.push(RunTask {
            task_index,
            task_id: task.task_id.clone(),
            binding,
            max_episode_steps: smaller(task.max_episode_steps, spec.limits.max_episode_steps),
            max_episode_seconds: spec.limits.max_episode_seconds,
            instruction: task.instruction.clone(),
            success: task.success,
        });
    }
    (bindings, tasks)
}

/// Environments side by side in a run of an environment with this many rows: what its tasks ask for at most, else the
/// platform's choice. More than there are rows would stand idle.
#[must_use]
pub fn lanes(spec: &EvaluationSpec, env_id: &str, rows: u64) -> u32 {
    let wanted = spec.tasks.iter().filter(|task| task.env == env_id).filter_map(|task| task.workers).max();
    let most = wanted.map_or(DEFAULT_LANES, u64::from);
    u32::try_from(most.min(rows).max(1)).unwrap_or(u32::MAX)
}

fn smaller(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

//! Requests that several tests submit.

use serde_json::{Value, json};

use crate::tools::Tools;

/// `models` of `examples/misbehaving/policies.py` in its `Counter`, `episodes` each, seeds from 1000.
#[must_use]
pub fn counter(tools: &Tools, models: &[&str], episodes: u64, workers: u32) -> Value {
    let folder = tools.example("misbehaving");
    let models: Vec<Value> = models
        .iter()
        .map(|class| json!({"id": class.to_lowercase(), "entrypoint": format!("policies:{class}"), "pythonPath": folder}))
        .collect();
    json!({
        "name": "counter",
        "models": models,
        "environments": [{"id": "counter", "entrypoint": "envs:Counter", "pythonPath": folder, "lanesPerPod": workers.min(4)}],
        "tasks": [{"env": "counter", "taskId": "counter/all", "params": {}, "episodes": episodes, "seed": 1000, "trialIndexBase": 7, "workers": workers}],
    })
}

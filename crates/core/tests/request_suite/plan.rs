//! Previews, bindings and lanes.

use super::common::{good, object, shelf, small, with};
use rlm_core::request::{EmptyCatalogue, lanes, plan_bindings, preview};
use serde_json::{Value, json};

fn three_walks() -> Value {
    let task =
        |id: &str, params: Value| json!({"env": "walks", "taskId": id, "params": params, "episodes": 5, "seed": 9, "maxEpisodeSteps": 60});
    json!({
        "models": ["walker", {"ref": "planner:2", "resources": {"gpu": 2}}],
        "environments": [{"id": "pole", "image": "i"}],
        "tasks": [
            task("walk/field", json!(null)), {"env": "pole", "episodes": 3}, task("walk/maze", json!(null)), task("again", json!({"layout": "field"})),
            task("windy", json!({"gusts": 1})),
        ],
        "limits": {"maxEpisodeSteps": 50, "maxEpisodeSeconds": 4},
    })
}

#[test]
fn bindings_are_distinct_params_in_order_of_use() {
    let spec = good(&three_walks(), &shelf()).spec;
    let (bindings, tasks) = plan_bindings(&spec, "walks");
    let params: Vec<Value> = bindings.iter().map(|binding| Value::Object(binding.params.clone())).collect();
    assert_eq!(params, [json!({"layout": "field"}), json!({"layout": "maze"}), json!({"gusts": 1})]);
    assert_eq!(bindings.iter().map(|binding| binding.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(tasks.iter().all(|task| task.max_episode_steps == Some(50) && task.max_episode_seconds == Some(4.0)));
    let tasks: Vec<(u32, &str, u32)> = tasks.iter().map(|task| (task.task_index, task.task_id.as_str(), task.binding)).collect();
    assert_eq!(tasks, [(0, "walk/field", 0), (2, "walk/maze", 1), (3, "again", 0), (4, "windy", 2)]);
    let (bindings, tasks) = plan_bindings(&spec, "pole");
    assert_eq!((bindings.len(), bindings[0].params.len(), tasks[0].task_index, tasks[0].max_episode_steps), (1, 0, 1, Some(50)));
    assert_eq!(plan_bindings(&spec, "nothing"), (Vec::new(), Vec::new()));
}

#[test]
fn a_preview_lists_what_would_run() {
    let preview = preview(&good(&three_walks(), &shelf()).spec);
    assert_eq!((preview.rows, preview.workloads.len()), (46, 10));
    let order: Vec<(&str, &str)> =
        preview.workloads.iter().take(4).map(|workload| (workload.task_id.as_str(), workload.model.as_str())).collect();
    assert_eq!(order, [("walk/field", "walker"), ("walk/field", "planner"), ("pole", "walker"), ("pole", "planner")]);
    assert_eq!((preview.workloads[4].first_row, preview.workloads[4].seed, preview.workloads[4].lanes), (16, 9, 8));
    assert_eq!(preview.workloads[2].lanes, 3);
    assert_eq!(preview.workloads[4].params, object(json!({"layout": "maze"})));
    let estimates = serde_json::to_value(&preview.estimates).unwrap();
    assert_eq!(
        estimates,
        json!({"episodes": 46, "models": 2, "environments": 2, "tasks": 5, "runs": 4, "bindings": 4, "maxEnvSteps": 46 * 50, "modelGpus": 4})
    );
    let unbounded = super::common::with(small(), "/tasks/0/maxEpisodeSteps", None);
    let json = serde_json::to_value(rlm_core::request::preview(&good(&unbounded, &EmptyCatalogue).spec)).unwrap();
    assert_eq!(json["estimates"]["maxEnvSteps"], Value::Null);
    assert_eq!((json["workloads"][0]["taskId"].as_str(), json["rows"].as_u64()), (Some("pole"), Some(10)));
}

#[test]
fn lanes_are_asked_for_or_chosen() {
    let spec = good(&small(), &EmptyCatalogue).spec;
    for (rows, expected) in [(0, 1), (1, 1), (5, 5), (8, 8), (1_000_000, 8)] {
        assert_eq!(lanes(&spec, "pole", rows), expected);
    }
    let mut request = with(small(), "/tasks/0/workers", Some(json!(3)));
    request = with(request, "/tasks/-", Some(json!({"env": "pole", "taskId": "b", "params": {}, "episodes": 1, "workers": 12})));
    let asked = good(&request, &EmptyCatalogue).spec;
    assert_eq!((lanes(&asked, "pole", 100), lanes(&asked, "pole", 5), lanes(&asked, "other", 100)), (12, 5, 8));
    assert_eq!(rlm_core::rows::segments(&spec)[0].count, rlm_core::rows::segments(&asked)[0].count);
}

//! A catalogue and requests that the tests of requests share.

use std::collections::BTreeMap;

use rlm_core::evaluation::Definition;
use rlm_core::request::{Catalogue, Checked, Registered, check};
use serde_json::{Map, Value, json};

/// Registered things by name, and describe documents of inline definitions by entrypoint.
#[derive(Default)]
pub struct Shelf {
    pub models: BTreeMap<String, Registered>,
    pub environments: BTreeMap<String, Registered>,
    pub probed: BTreeMap<String, Value>,
}

impl Catalogue for Shelf {
    fn model(&self, name: &str) -> Option<Registered> {
        self.models.get(name).cloned()
    }

    fn environment(&self, name: &str) -> Option<Registered> {
        self.environments.get(name).cloned()
    }

    fn describe(&self, definition: &Definition) -> Option<Value> {
        let entrypoint = match definition {
            Definition::Model(model) => model.entrypoint.as_ref(),
            Definition::Environment(environment) => environment.entrypoint.as_ref(),
        };
        self.probed.get(entrypoint?).cloned()
    }
}

/// A describe document that the SDK's `rlmesh describe` wrote for a class of `examples/`.
pub fn described(name: &str) -> Value {
    // Tests run in their package's folder.
    let path = format!("tests/request_suite/describe/{name}.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Everything of `examples/` that has a document, by entrypoint.
pub fn shelf() -> Shelf {
    let mut shelf = Shelf::default();
    for (entrypoint, name) in [
        ("envs:Walks", "walks"),
        ("envs:Rail", "rail"),
        ("envs:CartPole", "cartpole"),
        ("policies:Planner", "planner"),
        ("policies:Linear", "linear"),
        ("policies:Misbehaving", "misbehaving"),
    ] {
        shelf.probed.insert(entrypoint.to_owned(), described(name));
    }
    shelf.models.insert(
        "walker".to_owned(),
        Registered {
            definition: json!({"image": "example.com/walker:1", "params": {"gain": 1, "bias": 2}, "startupTimeoutMs": 90_000}),
            describe: None,
        },
    );
    shelf.models.insert(
        "planner:2".to_owned(),
        Registered { definition: json!({"image": "example.com/planner:2"}), describe: Some(described("planner")) },
    );
    shelf
        .environments
        .insert("walks".to_owned(), Registered { definition: json!({"image": "example.com/walks:3"}), describe: Some(described("walks")) });
    shelf.environments.insert("plain".to_owned(), Registered { definition: json!({"image": "example.com/plain:1"}), describe: None });
    shelf.environments.insert("plain:1".to_owned(), Registered { definition: json!({"image": "example.com/plain:1"}), describe: None });
    shelf
}

/// The smallest request.
pub fn small() -> Value {
    json!({
        "models": [{"id": "push", "entrypoint": "policies:Push"}],
        "environments": [{"id": "pole", "entrypoint": "envs:Pole"}],
        "tasks": [{"env": "pole", "params": {}, "episodes": 10}],
    })
}

/// Each field of a request, with a value that is none of its defaults.
pub fn full() -> Value {
    let digest = "ab".repeat(32);
    json!({
        "name": "cartpole smoke", "tags": {"suite": "smoke"}, "clientToken": "any string",
        "cluster": rlm_core::ids::ClusterId::generate().to_string(),
        "models": [{
            "id": "push-left", "ref": null, "image": format!("registry.example.com/team/push@sha256:{digest}"), "entrypoint": "policies:PushLeft",
            "pythonPath": "/srv/policies", "python": "/opt/venv/bin/python", "address": null,
            "checkpoints": [{"param": "weights", "uri": "hf://team/policy", "revision": "v1", "sha256": digest}],
            "params": {"gain": 2.5}, "executionHorizon": 8, "prefetchLead": 3, "workflowEdition": "2026.06",
            "resources": {"cpu": "500m", "memory": "1Gi", "gpu": 1, "gpuProduct": "L4", "shm": "64Mi"},
            "env": {"LOG": "1"}, "secretEnv": {"HF_TOKEN": "hub/token"}, "startupTimeout": "15m", "replicas": 2,
            "checkpointSets": {"early": [{"param": "weights", "uri": "s3://bucket/early"}], "late": [{"param": "head", "uri": "file:///data/late.npz"}]},
        }],
        "environments": [{
            "id": "cartpole", "ref": null, "image": "registry.example.com/cartpole:1", "entrypoint": "envs:CartPole", "pythonPath": "/srv/envs",
            "python": "python3.11", "address": null, "params": {}, "resources": {"cpu": 1}, "shareModelGpu": true, "lanesPerPod": 4,
            "env": {"RLMESH_FRAMEWORK": "numpy"}, "secretEnv": {}, "startupTimeout": 90,
        }],
        "tasks": [{
            "env": "cartpole", "taskId": "cartpole/0", "params": null, "episodes": 3, "seed": 7, "seeds": [4, 5, 6], "trialIndexBase": 2, "workers": 4,
            "maxEpisodeSteps": 500, "instruction": "keep it up", "success": {"metric": "reward", "atLeast": 475}, "metadata": {"benchmark": "smoke"},
        }],
        "limits": {
            "maxEpisodeSteps": 400, "maxEpisodeSeconds": 30.5, "queueTimeout": "12h", "progressTimeout": "1m30s", "maxErroredFraction": 0.25,
            "environmentCrashRetries": 2, "reassignAfter": "250ms",
        },
        "pairs": [{"model": "push-left", "env": "cartpole"}],
        "recording": {"video": "sample:10", "steps": "failures"}, "priority": -5, "metadata": {"anything": [1, {"goes": null}]},
    })
}

/// `request` with the value at `pointer` (as in JSON Pointer) replaced, or removed for None.
pub fn with(mut request: Value, pointer: &str, value: Option<Value>) -> Value {
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = request.pointer_mut(parent).unwrap();
    match (parent, value) {
        (Value::Object(map), Some(value)) => drop(map.insert(name.replace("~1", "/"), value)),
        (Value::Object(map), None) => drop(map.remove(name)),
        (Value::Array(list), Some(value)) if name == "-" => list.push(value),
        (Value::Array(list), Some(value)) => list[name.parse::<usize>().unwrap()] = value,
        (other, _) => unreachable!("{pointer}: {other}"),
    }
    request
}

/// Each problem as `path: message`.
pub fn problems(request: &Value, catalogue: &dyn Catalogue) -> Vec<String> {
    match check(request, catalogue) {
        Ok(_) => Vec::new(),
        Err(problems) => problems.into_iter().map(|problem| format!("{}: {}", problem.path, problem.message)).collect(),
    }
}

pub fn good(request: &Value, catalogue: &dyn Catalogue) -> Checked {
    check(request, catalogue).unwrap_or_else(|problems| unreachable!("{problems:#?}"))
}

/// Asserts that these are all the problems, each given by how it begins and a text that it contains.
pub fn refused(request: &Value, catalogue: &dyn Catalogue, expected: &[(&str, &str)]) {
    let found = problems(request, catalogue);
    let matches = found.len() == expected.len()
        && expected.iter().all(|(path, text)| found.iter().any(|found| found.starts_with(&format!("{path}: ")) && found.contains(text)));
    assert!(matches, "expected {expected:#?}\nfound {found:#?}");
}

pub fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

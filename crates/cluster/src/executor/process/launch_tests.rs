use super::*;
use serde_json::json;

fn cell() -> Cell {
    Cell { python: "python3".into(), python_path: Some("/already".to_owned()), omp_threads_set: false, cuda_devices: 0 }
}

fn model_definition(more: Value) -> ModelDefinition {
    let mut base = json!({
        "id": "push", "image": null, "entrypoint": "policies:Push", "pythonPath": null, "python": null, "address": null,
        "params": {}, "checkpoints": [], "executionHorizon": 1, "prefetchLead": 0, "workflowEdition": null,
        "resources": {"cpu": null, "memory": null, "gpu": 0, "gpuProduct": null, "shm": null},
        "env": {}, "secretEnv": {}, "startupTimeoutMs": 1000, "replicas": 1
    });
    base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(base).unwrap()
}

fn environment_definition(more: Value) -> EnvironmentDefinition {
    let mut base = json!({
        "id": "cartpole", "image": null, "entrypoint": "envs:CartPole", "pythonPath": "/code", "python": "/venv/bin/python",
        "address": null, "params": {}, "resources": {"cpu": null, "memory": null, "gpu": 0, "gpuProduct": null, "shm": null},
        "shareModelGpu": false, "lanesPerPod": null, "env": {}, "secretEnv": {}, "startupTimeoutMs": 1000
    });
    base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(base).unwrap()
}

fn started(source: Source) -> Launch {
    match source {
        Source::Start(launch) => launch,
        Source::Address(address) => unreachable!("{address}"),
    }
}

#[test]
fn an_environment_is_served_with_its_own_python_and_the_bindings_params() {
    let params = json!({"size": 4}).as_object().unwrap().clone();
    let source = environment(&environment_definition(json!({"env": {"A": "b"}})), &params, 8, &cell(), Path::new("/r/e.sock"), &[]);
    let launch = started(source.unwrap());
    assert_eq!(launch.program, Path::new("/venv/bin/python"));
    assert_eq!(launch.args, ["-m", "rlmesh.serve", "--env", "envs:CartPole"]);
    assert_eq!(launch.folder.as_deref(), Some(Path::new("/code")));
    let expected = [
        ("A", "b"),
        ("OMP_NUM_THREADS", "1"),
        ("PYTHONPATH", "/code:/already"),
        ("PYTHONUNBUFFERED", "1"),
        ("RLMESH_ADDRESS", "unix:///r/e.sock"),
        ("RLMESH_MAKE_KWARGS", "{\"size\":4}"),
        ("RLMESH_NUM_ENVS", "8"),
    ];
    assert_eq!(launch.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect::<Vec<_>>(), expected);
}

#[test]
fn devices_are_named_only_where_there_are_any() {
    let definition = model_definition(json!({}));
    let with = |cuda_devices, devices: &[u32]| {
        let cell = Cell { cuda_devices, ..cell() };
        started(model(&definition, &Params::new(), &cell, Path::new("/s"), devices).unwrap()).env.get("CUDA_VISIBLE_DEVICES").cloned()
    };
    assert_eq!(with(0, &[]), None);
    assert_eq!(with(2, &[]), Some(String::new()));
    assert_eq!(with(2, &[0, 1]), Some("0,1".to_owned()));
}

#[test]
fn a_running_server_is_used_as_it_is() {
    let definition = model_definition(json!({"address": "tcp://127.0.0.1:9"}));
    assert_eq!(model(&definition, &Params::new(), &cell(), Path::new("/s"), &[]), Ok(Source::Address("tcp://127.0.0.1:9".to_owned())));
}

#[test]
fn what_a_local_cell_cannot_run_says_why() {
    for (more, expected) in [
        (json!({"entrypoint": null, "image": "r/i@sha256:0"}), "add its entrypoint"),
        (json!({"entrypoint": null}), "neither entrypoint nor address"),
        (json!({"secretEnv": {"HF_TOKEN": "hf/token"}}), "takes HF_TOKEN from a secret"),
    ] {
        let failure = model(&model_definition(more), &Params::new(), &cell(), Path::new("/s"), &[]).unwrap_err();
        assert_eq!(failure.code, FailureCode::NotRunnableHere);
        assert!(failure.message.contains(expected), "{}", failure.message);
    }
    let large = json!({"x": "y".repeat(200_000)}).as_object().unwrap().clone();
    let failure = model(&model_definition(json!({})), &large, &cell(), Path::new("/s"), &[]).unwrap_err();
    assert_eq!(failure.code, FailureCode::InvalidParams);
}

#[test]
fn checkpoints_become_paths_and_are_verified() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.bin");
    std::fs::write(&file, b"abc").unwrap();
    let good = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let with = |uri: String, sha256: Option<&str>| {
        with_checkpoints(&model_definition(
            json!({"params": {"k": 1}, "checkpoints": [{"param": "weights", "uri": uri, "revision": null, "sha256": sha256}]}),
        ))
    };
    let (params, digests) = with(format!("file://{}", file.display()), Some(good)).unwrap();
    assert_eq!(params["weights"], json!(file.to_str().unwrap()));
    assert_eq!(params["k"], json!(1));
    assert_eq!(digests["weights"], good);
    let changed = with(format!("file://{}", file.display()), Some(&"0".repeat(64))).unwrap_err();
    assert!(changed.code == FailureCode::InvalidCheckpoint && changed.message.contains("expected 000"), "{}", changed.message);
    assert_eq!(with("file:///no/such/file".to_owned(), None).unwrap_err().code, FailureCode::InvalidCheckpoint);
    assert_eq!(with("hf://org/model".to_owned(), None).unwrap_err().code, FailureCode::NotRunnableHere);
    assert_eq!(with("file://relative".to_owned(), None).unwrap_err().code, FailureCode::NotRunnableHere);
    let (params, digests) = with(format!("file://{}", folder.path().display()), None).unwrap();
    assert!(params["weights"].is_string() && digests.is_empty());
}

#[test]
fn describe_needs_an_entrypoint() {
    use rlm_core::evaluation::Definition;
    let launch = describe(&Definition::Model(model_definition(json!({"python": "/p"}))), &cell(), Path::new("/o")).unwrap();
    assert_eq!(launch.args, ["-m", "rlmesh._describe", "--model", "policies:Push", "--out", "/o"]);
    let failure =
        describe(&Definition::Model(model_definition(json!({"entrypoint": null, "address": "tcp://h:1"}))), &cell(), Path::new("/o"))
            .unwrap_err();
    assert!(failure.message.contains("describes itself"), "{}", failure.message);
}

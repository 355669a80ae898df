//! Rules of an evaluation request, one table row each.
use super::common::{full, good, object, problems, refused, shelf, small, with};
use rlm_core::evaluation::{Definition, Limits, SuccessMetric};
use rlm_core::request::{self, EmptyCatalogue, check, definitions};
use serde_json::{Value, json};

#[test]
fn a_request_with_every_field_is_read_as_written() {
    let checked = good(&full(), &EmptyCatalogue);
    assert_eq!(checked.warnings, ["recording: videos and steps are not kept yet; results are"]);
    assert_eq!(checked.client_token.as_deref(), Some("any string"));
    let spec = &checked.spec;
    let ids: Vec<&str> = spec.models.iter().map(|model| model.id.as_str()).collect();
    assert_eq!(ids, ["push-left@early", "push-left@late"]);
    let params = |at: usize| spec.models[at].checkpoints.iter().map(|c| (c.param.as_str(), c.uri.as_str())).collect::<Vec<_>>();
    assert_eq!(params(0), [("weights", "s3://bucket/early")]);
    assert_eq!(params(1), [("weights", "hf://team/policy"), ("head", "file:///data/late.npz")]);
    let model = &spec.models[0];
    assert_eq!((model.execution_horizon, model.prefetch_lead, model.replicas, model.startup_timeout_ms), (8, 3, 2, 900_000));
    assert_eq!((model.resources.cpu.as_deref(), model.resources.gpu, model.resources.shm.as_deref()), (Some("500m"), 1, Some("64Mi")));
    assert_eq!(model.secret_env["HF_TOKEN"], "hub/token");
    let environment = &spec.environments[0];
    assert_eq!(
        (environment.resources.cpu.as_deref(), environment.lanes_per_pod, environment.share_model_gpu, environment.startup_timeout_ms),
        (Some("1"), Some(4), true, 90_000)
    );
    let task = &spec.tasks[0];
    assert_eq!((task.task_id.as_str(), task.episodes, task.seed, task.trial_index_base, task.workers), ("cartpole/0", 3, 7, 2, Some(4)));
    assert_eq!(task.seeds.as_deref(), Some(&[4, 5, 6][..]));
    assert_eq!(task.success.unwrap().metric, SuccessMetric::Reward);
    let limits = &spec.limits;
    assert_eq!(
        (limits.max_episode_steps, limits.queue_timeout_ms, limits.progress_timeout_ms, limits.reassign_after_ms),
        (Some(400), 43_200_000, 90_000, 250)
    );
    assert_eq!((limits.max_episode_seconds, limits.max_errored_fraction, limits.environment_crash_retries), (Some(30.5), 0.25, 2));
    assert_eq!((spec.recording.video.as_str(), spec.recording.steps.as_str(), spec.priority), ("sample:10", "failures", -5));
    let pairs: Vec<&str> = spec.pairs.as_ref().unwrap().iter().map(|pair| pair.model.as_str()).collect();
    assert_eq!(pairs, ["push-left@early", "push-left@late"]);
}

#[test]
fn the_smallest_request_has_the_documented_defaults() {
    let checked = good(&small(), &EmptyCatalogue);
    assert_eq!(checked.warnings, Vec::<String>::new());
    let spec = checked.spec;
    assert_eq!(spec.name, "push on pole");
    assert_eq!(spec.limits, Limits::default());
    assert_eq!(spec.recording, rlm_core::evaluation::Recording::default());
    assert_eq!((spec.models[0].execution_horizon, spec.models[0].replicas, spec.models[0].startup_timeout_ms), (1, 1, 600_000));
    assert_eq!((spec.tasks[0].task_id.as_str(), spec.tasks[0].seed), ("pole", 0));
    assert_eq!(spec.pairs, None);
}

#[test]
fn null_is_the_same_as_leaving_out() {
    let mut nulls = small();
    for (table, pointer) in [
        (&request::fields::REQUEST, ""),
        (&request::fields::MODEL, "/models/0"),
        (&request::fields::ENVIRONMENT, "/environments/0"),
        (&request::fields::TASK, "/tasks/0"),
    ] {
        let map = nulls.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
        for field in table.fields {
            map.entry(field.name).or_insert(Value::Null);
        }
    }
    assert_eq!(good(&nulls, &EmptyCatalogue), good(&small(), &EmptyCatalogue));
}

#[test]
fn each_wrong_field_is_named() {
    let long = "x".repeat(201);
    let big_argument = "x".repeat(100_001);
    let cases: Vec<(&str, Option<Value>, &str, &str)> = vec![
        // Form.
        ("/nmae", Some(json!("x")), "nmae", "is not a field of the request; did you mean 'name'?"),
        ("/zzz", Some(json!(1)), "zzz", "is not a field of the request"),
        ("/models/0/exec_horizon", Some(json!(1)), "models[0].exec_horizon", "is not a field of a model"),
        ("/models/0/execution_horizon", Some(json!(1)), "models[0].execution_horizon", "did you mean 'executionHorizon'?"),
        ("/environments/0/replicas", Some(json!(1)), "environments[0].replicas", "is not a field of an environment"),
        ("/tasks/0/max_episode_steps", Some(json!(1)), "tasks[0].max_episode_steps", "did you mean 'maxEpisodeSteps'?"),
        ("/tasks/0/a b", Some(json!(1)), "tasks[0]['a b']", "is not a field of a task"),
        ("/name", Some(json!(7)), "name", "must be text in quotes, not the number 7"),
        ("/name", Some(json!(long)), "name", "at most 200"),
        ("/name", Some(json!("  ")), "name", "is empty"),
        ("/name", Some(json!("a\nb")), "name", "must be one line"),
        ("/tags", Some(json!(["a"])), "tags", "must be an object, not a list"),
        ("/tags", Some(json!({"a": 1})), "tags.a", "must be text"),
        ("/tags", Some(json!({"a:b": "c"})), "tags['a:b']", "as a name, must be letters"),
        ("/clientToken", Some(json!("")), "clientToken", "is empty"),
        ("/cluster", Some(json!("mine")), "cluster", "cl_ and 26 characters"),
        ("/models", None, "models", "is missing"),
        ("/models", Some(json!(null)), "models", "is missing"),
        ("/models", Some(json!([])), "models", "is empty"),
        ("/models", Some(json!({})), "models", "must be a list"),
        ("/models/0", Some(json!(5)), "models[0]", "must be a model or the name of a registered one, not the number 5"),
        ("/tasks", None, "tasks", "is missing"),
        ("/tasks", Some(json!([])), "tasks", "is empty"),
        ("/tasks/0", Some(json!("pole")), "tasks[0]", "must be an object"),
        ("/environments", Some(json!("pole")), "environments", "must be a list"),
        ("/pairs", Some(json!([])), "pairs", "is empty"),
        ("/priority", Some(json!(101)), "priority", "must be at most 100, not 101"),
        ("/priority", Some(json!(-101)), "priority", "must be at least -100, not -101"),
        ("/metadata", Some(json!([])), "metadata", "must be an object"),
        ("/metadata", Some(json!({"a": "x".repeat(65_536)})), "metadata", "is too large"),
        ("/recording", Some(json!({"video": "some"})), "recording.video", "none, failures, all or sample:K"),
        ("/recording", Some(json!({"video": "sample:0"})), "recording.video", "sample:K"),
        ("/recording", Some(json!({"steps": "al"})), "recording.steps", "did you mean 'all'?"),
        // Ids.
        ("/models/0/id", None, "models[0].id", "is missing"),
        ("/models/0/id", Some(json!("")), "models[0].id", "must be letters"),
        ("/models/0/id", Some(json!("a b")), "models[0].id", "must be letters"),
        ("/models/0/id", Some(json!("a".repeat(129))), "models[0].id", "at most 128"),
        ("/environments/0/id", Some(json!("-a")), "environments[0].id", "beginning with a letter or digit"),
        ("/models/-", Some(json!({"id": "push", "image": "i"})), "models[1].id", "another model is called 'push' too"),
        ("/environments/-", Some(json!({"id": "pole", "image": "i"})), "environments[1].id", "another environment is called 'pole' too"),
        ("/tasks/-", Some(json!({"env": "pole", "params": {"a": 1}, "episodes": 1})), "tasks[1].taskId", "is tasks[0] already"),
        (
            "/tasks/0/env",
            Some(json!("poel")),
            "tasks[0].env",
            "no environment 'poel' is in `environments` or registered; did you mean 'pole'?",
        ),
        ("/tasks/0/env", None, "tasks[0].env", "is missing"),
        (
            "/pairs",
            Some(json!([{"model": "pusj", "env": "pole"}])),
            "pairs[0].model",
            "no model 'pusj' is in `models`; did you mean 'push'?",
        ),
        ("/pairs", Some(json!([{"model": "push", "env": "pol"}])), "pairs[0].env", "did you mean 'pole'?"),
        ("/pairs", Some(json!([{"model": "push", "env": "pole"}, {"model": "push", "env": "pole"}])), "pairs[1]", "by pairs[0] already"),
        ("/pairs", Some(json!([{"model": "push"}])), "pairs[0].env", "is missing"),
        ("/models/0/ref", Some(json!("nobody:1")), "models[0].ref", "no model 'nobody:1' is registered"),
        ("/models/0", Some(json!("nobody")), "models[0]", "no model 'nobody' is registered"),
        ("/models/0", Some(json!("no body")), "models[0]", "must be an id, or name:version"),
        ("/models/0/ref", Some(json!(5)), "models[0].ref", "must be text"),
        // What runs.
        ("/models/0/entrypoint", None, "models[0]", "says nothing that runs"),
        ("/models/0/address", Some(json!("tcp://h:1")), "models[0].address", "can't stand beside it"),
        ("/environments/0", Some(json!({"id": "pole", "image": "i", "pythonPath": "/a"})), "environments[0].pythonPath", "there is none"),
        ("/environments/0", Some(json!({"id": "pole", "image": "i", "python": "python3"})), "environments[0].python", "there is none"),
        ("/models/0/entrypoint", Some(json!("policies")), "models[0].entrypoint", "module.path:Name"),
        ("/models/0/entrypoint", Some(json!("policies.py:A")), "", ""),
        ("/models/0/entrypoint", Some(json!("a/b:C")), "models[0].entrypoint", "module.path:Name"),
        ("/models/0/entrypoint", Some(json!("a:B:C")), "models[0].entrypoint", "module.path:Name"),
        ("/models/0/entrypoint", Some(json!("a..b:C")), "models[0].entrypoint", "module.path:Name"),
        ("/models/0/entrypoint", Some(json!("a.b:C.D")), "", ""),
        ("/models/0/pythonPath", Some(json!("policies")), "models[0].pythonPath", "must be an absolute path"),
        ("/models/0/pythonPath", Some(json!("/a:/b")), "models[0].pythonPath", "without ':'"),
        ("/models/0/python", Some(json!("./venv/bin/python")), "models[0].python", "absolute path or a program's name"),
        ("/models/0/image", Some(json!("a b")), "models[0].image", "image's name"),
        ("/models/0/image", Some(json!("a@sha256:12")), "models[0].image", "image's name"),
        ("/models/0", Some(json!({"id": "push", "address": "localhost:50051"})), "models[0].address", "tcp://host:port"),
        ("/models/0", Some(json!({"id": "push", "address": "tcp://h:70000"})), "models[0].address", "tcp://host:port"),
        ("/models/0", Some(json!({"id": "push", "address": "unix://a"})), "models[0].address", "unix:///absolute"),
        ("/models/0", Some(json!({"id": "push", "address": "tcp://[::1]:5"})), "", ""),
        ("/models/0", Some(json!({"id": "push", "address": "unix:///a", "params": {"a": 1}})), "models[0].params", "runs already"),
        ("/models/0", Some(json!({"id": "push", "address": "unix:///a", "env": {"A": "1"}})), "models[0].env", "runs already"),
        (
            "/models/0",
            Some(json!({"id": "push", "address": "unix:///a", "checkpoints": [{"param": "w", "uri": "s3://a/b"}]})),
            "models[0].checkpoints",
            "runs already",
        ),
        // Arguments and variables.
        ("/models/0/params", Some(json!([])), "models[0].params", "must be an object"),
        ("/models/0/params", Some(json!({"device": "cpu"})), "models[0].params.device", "set by the platform"),
        ("/environments/0/params", Some(json!({"num_envs": 4})), "environments[0].params.num_envs", "`lanesPerPod`"),
        ("/tasks/0/params", Some(json!({"framework": "torch"})), "tasks[0].params.framework", "set by the platform"),
        ("/tasks/0/params", Some(json!({"vectorization_mode": "sync"})), "tasks[0].params.vectorization_mode", "set by the platform"),
        ("/tasks/0/params", Some(json!({"a": big_argument})), "tasks[0].params", "is too large"),
        ("/models/0/env", Some(json!({"A": 1})), "models[0].env.A", "must be text in quotes, not the number 1"),
        ("/models/0/env", Some(json!({"1A": "x"})), "models[0].env['1A']", "name of an environment variable"),
        ("/models/0/env", Some(json!({"A": "a\u{0}b"})), "models[0].env.A", "NUL"),
        ("/models/0/env", Some(json!({"RLMESH_ADDRESS": "x"})), "models[0].env.RLMESH_ADDRESS", "the platform's to set"),
        ("/models/0/env", Some(json!({"RLMESH_MAKE_KWARGS": "{}"})), "models[0].env.RLMESH_MAKE_KWARGS", "`params`"),
        ("/models/0/env", Some(json!({"RLMESH_DEVICE": "cpu"})), "models[0].env.RLMESH_DEVICE", "keeps a model from starting"),
        ("/environments/0/env", Some(json!({"RLMESH_DEVICE": "cpu"})), "", ""),
        ("/environments/0/env", Some(json!({"RLMESH_VALIDATION_POLICY": "strict"})), "", ""),
        ("/environments/0/env", Some(json!({"RLMESH_NUM_ENVS": "4"})), "environments[0].env.RLMESH_NUM_ENVS", "`lanesPerPod`"),
        (
            "/environments/0/secretEnv",
            Some(json!({"RLMESH_API_KEY": "a/b"})),
            "environments[0].secretEnv.RLMESH_API_KEY",
            "the platform's to set",
        ),
        ("/environments/0/secretEnv", Some(json!({"TOKEN": "hunter2"})), "environments[0].secretEnv.TOKEN", "secret/key"),
        // Checkpoints.
        ("/models/0/checkpoints", Some(json!([{"uri": "s3://a/b"}])), "models[0].checkpoints[0].param", "is missing"),
        ("/models/0/checkpoints", Some(json!([{"param": "w"}])), "models[0].checkpoints[0].uri", "is missing"),
        ("/models/0/checkpoints", Some(json!([{"param": "w", "uri": "http://a/b"}])), "models[0].checkpoints[0].uri", "use https"),
        (
            "/models/0/checkpoints",
            Some(json!([{"param": "w", "uri": "ftp://a/b"}])),
            "models[0].checkpoints[0].uri",
            "'ftp' is not one of the schemes",
        ),
        ("/models/0/checkpoints", Some(json!([{"param": "w", "uri": "file:a.npz"}])), "models[0].checkpoints[0].uri", "relative file"),
        ("/models/0/checkpoints", Some(json!([{"param": "w", "uri": "/a.npz"}])), "models[0].checkpoints[0].uri", "no scheme"),
        (
            "/models/0/checkpoints",
            Some(json!([{"param": "w", "uri": "https://me:secret@h/a"}])),
            "models[0].checkpoints[0].uri",
            "holds credentials",
        ),
        (
            "/models/0/checkpoints",
            Some(json!([{"param": "w", "uri": "s3://a/b", "sha256": "12"}])),
            "models[0].checkpoints[0].sha256",
            "64 hex digits",
        ),
        ("/models/0/checkpoints", Some(json!([{"param": "w-1", "uri": "s3://a/b"}])), "models[0].checkpoints[0].param", "Python argument"),
        (
            "/models/0/checkpoints",
            Some(json!([{"param": "device", "uri": "s3://a/b"}])),
            "models[0].checkpoints[0].param",
            "set by the platform",
        ),
        (
            "/models/0/checkpoints",
            Some(json!([{"param": "w", "uri": "s3://a/b"}, {"param": "w", "uri": "s3://a/c"}])),
            "models[0].checkpoints[1].param",
            "already",
        ),
        ("/models/0/checkpointSets", Some(json!({})), "models[0].checkpointSets", "is empty"),
        ("/models/0/checkpointSets", Some(json!({"a": []})), "models[0].checkpointSets.a", "is empty"),
        (
            "/models/0/checkpointSets",
            Some(json!({"a@b": [{"param": "w", "uri": "s3://a/b"}]})),
            "models[0].checkpointSets['a@b']",
            "as a name",
        ),
        // Numbers and times.
        ("/models/0/executionHorizon", Some(json!(0)), "models[0].executionHorizon", "must be at least 1, not 0"),
        ("/models/0/executionHorizon", Some(json!(1025)), "models[0].executionHorizon", "must be at most 1024"),
        ("/models/0/prefetchLead", Some(json!(1)), "models[0].prefetchLead", "must be less than executionHorizon (1), not 1"),
        ("/models/0/workflowEdition", Some(json!("latest")), "models[0].workflowEdition", "workflow edition"),
        ("/models/0/replicas", Some(json!(0)), "models[0].replicas", "must be at least 1"),
        ("/models/0/startupTimeout", Some(json!("ten minutes")), "models[0].startupTimeout", "must be a time such as 10m"),
        ("/models/0/startupTimeout", Some(json!("500ms")), "models[0].startupTimeout", "must be between 1s and 1d"),
        ("/models/0/startupTimeout", Some(json!(-1)), "models[0].startupTimeout", "must be between 1s and 1d"),
        ("/models/0/startupTimeout", Some(json!(1e300)), "models[0].startupTimeout", "must be between 1s and 1d"),
        ("/models/0/startupTimeout", Some(json!(true)), "models[0].startupTimeout", "a number of seconds, not true"),
        ("/models/0/resources", Some(json!({"cpu": "1 core"})), "models[0].resources.cpu", "Kubernetes quantity"),
        ("/models/0/resources", Some(json!({"memory": "1GiB"})), "models[0].resources.memory", "Kubernetes quantity"),
        ("/models/0/resources", Some(json!({"cpu": 0})), "models[0].resources.cpu", "above zero"),
        ("/models/0/resources", Some(json!({"shm": true})), "models[0].resources.shm", "must be a quantity"),
        ("/models/0/resources", Some(json!({"gpu": -1})), "models[0].resources.gpu", "must be at least 0"),
        ("/environments/0/lanesPerPod", Some(json!(0)), "environments[0].lanesPerPod", "must be at least 1"),
        ("/environments/0/shareModelGpu", Some(json!("yes")), "environments[0].shareModelGpu", "must be true or false"),
        ("/tasks/0/episodes", None, "tasks[0].episodes", "is missing"),
        ("/tasks/0/episodes", Some(json!(-5)), "tasks[0].episodes", "must be at least 1, not -5"),
        ("/tasks/0/episodes", Some(json!(0)), "tasks[0].episodes", "must be at least 1, not 0"),
        ("/tasks/0/episodes", Some(json!(1_000_000_000)), "tasks[0].episodes", "must be at most 1000000, not 1000000000"),
        ("/tasks/0/episodes", Some(json!(18_446_744_073_709_551_615_u64)), "tasks[0].episodes", "not 18446744073709551615"),
        ("/tasks/0/episodes", Some(json!(1e20)), "tasks[0].episodes", "1e20 is too large"),
        ("/tasks/0/episodes", Some(json!(10.5)), "tasks[0].episodes", "must be a whole number, not 10.5"),
        ("/tasks/0/episodes", Some(json!("10")), "tasks[0].episodes", "must be a whole number, not the text '10'"),
        ("/tasks/0/episodes", Some(json!(10.0)), "", ""),
        ("/tasks/0/seed", Some(json!(-1)), "tasks[0].seed", "must be at least 0"),
        ("/tasks/0/seed", Some(json!(4_294_967_296_u64)), "tasks[0].seed", "must be at most 4294967295"),
        ("/tasks/0/seed", Some(json!(4_294_967_290_u64)), "tasks[0].seed", "4294967290 + 10 episodes goes past 2^32"),
        ("/tasks/0/seed", Some(json!(4_294_967_286_u64)), "", ""),
        ("/tasks/0/seed", Some(json!(1.8446744073709552e19)), "tasks[0].seed", "is too large; it must be at most 4294967295"),
        ("/tasks/0/seeds", Some(json!([1, 2])), "tasks[0].seeds", "has 2 seeds for 10 episodes"),
        ("/tasks/0/seeds", Some(json!([])), "tasks[0].seeds", "is empty"),
        ("/tasks/0/seeds", Some(json!([1, -2])), "tasks[0].seeds[1]", "must be at least 0"),
        ("/tasks/0/trialIndexBase", Some(json!(4_294_967_295_u64)), "tasks[0].trialIndexBase", "goes past 2^32"),
        ("/tasks/0/workers", Some(json!(0)), "tasks[0].workers", "must be at least 1"),
        ("/tasks/0/workers", Some(json!(1025)), "tasks[0].workers", "must be at most 1024"),
        ("/tasks/0/maxEpisodeSteps", Some(json!(0)), "tasks[0].maxEpisodeSteps", "must be at least 1"),
        ("/tasks/0/success", Some(json!({"metric": "return", "atLeast": 1})), "tasks[0].success.metric", "must be one of reward, steps"),
        ("/tasks/0/success", Some(json!({"metric": "reward"})), "tasks[0].success.atLeast", "is missing"),
        ("/tasks/0/success", Some(json!({"metric": "reward", "atLeast": "1"})), "tasks[0].success.atLeast", "must be a number"),
        ("/tasks/0/metadata", Some(json!(5)), "tasks[0].metadata", "must be an object"),
        ("/limits", Some(json!(5)), "limits", "must be an object"),
        ("/limits", Some(json!({"maxEpisodeSeconds": 0})), "limits.maxEpisodeSeconds", "must be between"),
        ("/limits", Some(json!({"maxErroredFraction": 1.5})), "limits.maxErroredFraction", "must be between 0 and 1, not 1.5"),
        ("/limits", Some(json!({"queueTimeout": "31d"})), "limits.queueTimeout", "must be between 100ms and 30d"),
        ("/limits", Some(json!({"progressTimeout": "0s"})), "limits.progressTimeout", "must be between"),
        ("/limits", Some(json!({"reassignAfter": "soon"})), "limits.reassignAfter", "must be a time"),
        ("/limits", Some(json!({"environmentCrashRetries": 101})), "limits.environmentCrashRetries", "must be at most 100"),
    ];
    for (pointer, value, path, text) in cases {
        let request = with(small(), pointer, value);
        if path.is_empty() {
            assert_eq!(problems(&request, &EmptyCatalogue), Vec::<String>::new(), "{pointer} in {request}");
        } else {
            refused(&request, &EmptyCatalogue, &[(path, text)]);
        }
    }
}

#[test]
fn what_may_be_a_secret_is_not_repeated() {
    for (pointer, value) in [
        ("/models/0/secretEnv", json!({"TOKEN": "hunter2"})),
        ("/models/0/checkpoints", json!([{"param": "w", "uri": "https://me:hunter2@h/a"}])),
        ("/models/0/checkpoints", json!([{"param": "w", "uri": "ftp://me:hunter2@h/a"}])),
    ] {
        let found = problems(&with(small(), pointer, Some(value)), &EmptyCatalogue);
        assert!(found.len() == 1 && !found[0].contains("hunter2"), "{found:?}");
    }
}

#[test]
fn combinations_are_refused_once_each() {
    let both = with(with(small(), "/models/0/env", Some(json!({"A": "1"}))), "/models/0/secretEnv", Some(json!({"A": "s/k"})));
    refused(&both, &EmptyCatalogue, &[("models[0].secretEnv.A", "in `env` too")]);
    let both = with(
        with(small(), "/models/0/params", Some(json!({"w": 1}))),
        "/models/0/checkpoints",
        Some(json!([{"param": "w", "uri": "s3://a/b"}])),
    );
    refused(&both, &EmptyCatalogue, &[("models[0].checkpoints[0].param", "in `params` too")]);
    let server = with(
        with(small(), "/environments/0", Some(json!({"id": "pole", "address": "tcp://h:5"}))),
        "/tasks/0/params",
        Some(json!({"a": 1})),
    );
    refused(&server, &EmptyCatalogue, &[("tasks[0].params", "can't be constructed anew for a task")]);
    let replaced = with(small(), "/models/0", Some(json!({"ref": "walker", "image": "x", "address": "unix:///a"})));
    refused(&replaced, &shelf(), &[("models[0].image", "beside `ref`"), ("models[0].address", "beside `ref`")]);
}

#[test]
fn all_problems_come_at_once() {
    let request = json!({
        "models": [{"id": "a", "entrypoint": "nope", "params": {"device": 1}}, {"id": "b b", "image": "i"}],
        "environments": [{"id": "e", "image": "i", "params": 5}],
        "tasks": [{"env": "e", "episodes": -1, "colour": 1}, {"env": "f", "params": {}, "episodes": 1}],
        "pairs": [{"model": "zz", "env": "e"}, {"model": "a", "env": "zz"}],
    });
    refused(
        &request,
        &EmptyCatalogue,
        &[
            ("models[0].entrypoint", "module.path:Name"),
            ("models[0].params.device", "set by the platform"),
            ("models[1].id", "must be letters"),
            ("environments[0].params", "must be an object"),
            ("tasks[0].episodes", "at least 1"),
            ("tasks[0].colour", "not a field"),
            ("tasks[1].env", "no environment 'f'"),
            ("pairs[1].env", "no environment 'zz'"),
        ],
    );
    for request in [json!(null), json!(5), json!("x"), json!([])] {
        assert!(problems(&request, &EmptyCatalogue)[0].starts_with(": must be an object"));
    }
    let many = with(small(), "/tasks/0/seeds", Some(json!(vec![-1; 5_000])));
    let found = problems(&many, &EmptyCatalogue);
    assert_eq!((found.len(), found[200].as_str()), (201, ": and 4800 more problems"));
}

#[test]
fn rows_are_bounded_with_their_number() {
    let models: Vec<Value> = (0..200).map(|i| json!({"id": format!("m{i}"), "image": "i"})).collect();
    let request = with(with(small(), "/models", Some(json!(models))), "/tasks/0/episodes", Some(json!(1_000_000)));
    refused(&request, &EmptyCatalogue, &[("tasks", "200000000 rows in all")]);
    let paired = with(request.clone(), "/pairs", Some(json!([{"model": "m3", "env": "pole"}])));
    let checked = good(&paired, &EmptyCatalogue);
    assert_eq!(request::preview(&checked.spec).rows, 1_000_000);
    assert_eq!(checked.warnings.len(), 199, "models without tasks");
    let tasks: Vec<Value> = (0..1000).map(|i| json!({"env": "pole", "taskId": format!("t{i}"), "params": {}, "episodes": 1})).collect();
    refused(&with(request, "/tasks", Some(json!(tasks))), &EmptyCatalogue, &[("tasks", "at most 100000 pairs")]);
}

#[test]
fn unused_things_are_warned_of() {
    let mut request = with(small(), "/environments/-", Some(json!({"id": "spare", "image": "i"})));
    assert_eq!(good(&request, &EmptyCatalogue).warnings, ["environment 'spare' has no tasks"]);
    request = with(request, "/models/-", Some(json!({"id": "idle", "image": "i"})));
    request = with(request, "/tasks/-", Some(json!({"env": "spare", "params": {}, "episodes": 1})));
    request = with(request, "/pairs", Some(json!([{"model": "push", "env": "pole"}])));
    assert_eq!(
        good(&request, &EmptyCatalogue).warnings,
        ["model 'idle' meets no task", "environment 'spare' has tasks, but no pair names it: they have no rows"]
    );
    request = with(small(), "/environments/-", Some(json!({"id": "spare", "image": "i"})));
    request = with(request, "/pairs", Some(json!([{"model": "push", "env": "spare"}])));
    refused(&request, &EmptyCatalogue, &[("tasks", "no model meets any task")]);
    let seeds = with(with(small(), "/tasks/0/seeds", Some(json!([1, 1, 2]))), "/tasks/0/episodes", Some(json!(3)));
    assert!(good(&seeds, &EmptyCatalogue).warnings[0].contains("1 of 3 seeds occur before"));
    let address = json!({"id": "pole", "address": "tcp://h:1", "lanesPerPod": 2, "resources": {"gpu": 1}});
    assert_eq!(good(&with(small(), "/environments/0", Some(address)), &EmptyCatalogue).warnings.len(), 2);
}

#[test]
fn registered_definitions_are_found_and_overridden() {
    let request = json!({
        "models": ["walker", {"ref": "walker", "id": "other", "params": {"bias": null, "new": true}, "startupTimeout": "5m", "replicas": 3}, "planner:2"],
        "tasks": [{"env": "walks", "taskId": "walk/maze", "episodes": 2}, {"env": "plain:1", "params": {"a": 1}, "episodes": 1}, {"env": "plain", "episodes": 1}],
    });
    let spec = good(&request, &shelf()).spec;
    let ids: Vec<&str> = spec.models.iter().map(|model| model.id.as_str()).collect();
    assert_eq!(ids, ["walker", "other", "planner"]);
    assert_eq!((spec.models[0].image.as_deref(), spec.models[0].startup_timeout_ms), (Some("example.com/walker:1"), 90_000));
    assert_eq!(spec.models[1].params, object(json!({"gain": 1, "bias": null, "new": true})));
    assert_eq!((spec.models[1].replicas, spec.models[1].startup_timeout_ms), (3, 300_000));
    let envs: Vec<&str> = spec.environments.iter().map(|environment| environment.id.as_str()).collect();
    assert_eq!(envs, ["walks", "plain:1", "plain"]);
    assert_eq!(spec.tasks[0].params, object(json!({"layout": "maze"})));
    let twice = json!({"models": ["walker", "walker"], "tasks": [{"env": "plain", "episodes": 1}]});
    refused(&twice, &shelf(), &[("models[1].id", "another model is called 'walker' too")]);
    let broken = json!({"models": [{"ref": "planner:2", "executionHorizon": 9}], "tasks": [{"env": "plain", "episodes": 1}]});
    refused(&broken, &shelf(), &[("models[0].executionHorizon", "more than the 8 actions")]);
}

#[test]
fn what_the_sdk_helper_sends_is_read() {
    // rlmesh.platform.scenario_tasks("walks", "walk", task_ids=[...], workers=4)
    let task = |id: &str| json!({"env": "walks", "taskId": id, "episodes": 10, "seed": 0, "workers": 4, "metadata": {"environmentId": format!("walks:{id}")}});
    let request = json!({"models": ["walker"], "tasks": [task("walk/field"), task("walk/wall")]});
    let checked = good(&request, &shelf());
    assert_eq!(checked.warnings, Vec::<String>::new());
    assert_eq!(checked.spec.tasks[1].params, object(json!({"layout": "wall"})));
    refused(&json!({"tasks": [task("walk/field")]}), &shelf(), &[("models", "is missing")]);
}

#[test]
fn definitions_to_probe_are_found_in_a_request_with_problems() {
    let request = json!({
        "models": ["walker", {"id": "a", "entrypoint": "policies:Planner"}, {"id": "b", "entrypoint": "no"}],
        "environments": [{"id": "w", "entrypoint": "envs:Walks", "pythonPath": "/a"}],
        "tasks": [{"env": "w", "taskId": "walk/field", "episodes": 0}],
    });
    let found: Vec<String> = definitions(&request, &shelf())
        .into_iter()
        .map(|(path, definition)| match definition {
            Definition::Model(model) => format!("{path} {}", model.id),
            Definition::Environment(environment) => format!("{path} {}", environment.id),
        })
        .collect();
    assert_eq!(found, ["models[0] walker", "models[1].entrypoint a", "environments[0].entrypoint w"]);
    assert_eq!(definitions(&json!(5), &EmptyCatalogue), []);
}

#[test]
fn definitions_are_checked_alone_for_registration() {
    let model = request::check_model(&json!({"image": "i", "executionHorizon": 8}), Some(super::common::described("planner"))).unwrap();
    assert_eq!((model.image.as_deref(), model.execution_horizon), (Some("i"), 8));
    let problems =
        request::check_model(&json!({"image": "i", "executionHorizon": 9, "x": 1}), Some(super::common::described("planner"))).unwrap_err();
    let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
    assert_eq!(paths, ["x", "executionHorizon"]);
    assert_eq!(request::check_model(&json!({"ref": "x"}), None).unwrap_err()[0].path, "ref");
    assert_eq!(request::check_model(&json!([]), None).unwrap_err()[0].path, "");
    assert!(request::check_model(&json!({"image": "i", "checkpointSets": {"a": [{"param": "w", "uri": "s3://a/b"}]}}), None).is_err());
    let environment = request::check_environment(&json!({"id": "x", "image": "i"}), Some(super::common::described("walks"))).unwrap();
    assert_eq!(environment.id, "x");
    let problems = request::check_environment(&json!({"image": "i"}), Some(super::common::described("planner"))).unwrap_err();
    assert!(problems[0].message.contains("describes itself as a model"));
}

#[test]
fn what_is_checked_survives_registration() {
    let model = good(&full(), &EmptyCatalogue).spec.models.remove(1);
    let mut shelf = super::common::Shelf::default();
    let mut definition = serde_json::to_value(&model).unwrap();
    definition.as_object_mut().unwrap().remove("id");
    shelf.models.insert("m".to_owned(), request::Registered { definition, describe: None });
    let mut again = good(&with(small(), "/models/0", Some(json!("m"))), &shelf).spec.models.remove(0);
    again.id.clone_from(&model.id);
    assert_eq!(again, model);
}

#[test]
fn equal_requests_are_equal_specifications() {
    assert_eq!(check(&small(), &shelf()), check(&small(), &shelf()));
    let resent: Value = serde_json::from_str(&serde_json::to_string(&small()).unwrap()).unwrap();
    assert_eq!(check(&resent, &shelf()), check(&small(), &shelf()));
}

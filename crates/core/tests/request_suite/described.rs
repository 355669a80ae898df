//! What describe documents decide: tasks, arguments, horizons, editions.

use super::common::{described, good, object, problems, refused, shelf, with};
use rlm_core::request::EmptyCatalogue;
use serde_json::{Value, json};

/// A model and an environment of `examples/` and one task.
fn request(model: &str, environment: &str, task: Value) -> Value {
    json!({
        "models": [{"id": "m", "entrypoint": model}],
        "environments": [{"id": "e", "entrypoint": environment}],
        "tasks": [task],
    })
}

fn walks(task: Value) -> Value {
    let mut request = request("policies:Planner", "envs:Walks", task);
    request["tasks"][0]["env"] = json!("e");
    request["tasks"][0]["episodes"] = json!(2);
    request
}

#[test]
fn a_task_selects_a_catalogue_entry_under_its_own_params() {
    let mut request = walks(json!({"taskId": "walk/wall"}));
    request["environments"][0]["params"] = json!({"layout": "field", "gusts": 0.5});
    assert_eq!(good(&request, &shelf()).spec.tasks[0].params, object(json!({"layout": "wall", "gusts": 0.5})));
    request["tasks"][0]["params"] = json!({"gusts": 0, "layout": "maze"});
    assert_eq!(good(&request, &shelf()).spec.tasks[0].params, object(json!({"layout": "maze", "gusts": 0})));
    request["tasks"][0]["taskId"] = json!("my own");
    assert_eq!(good(&request, &shelf()).spec.tasks[0].task_id, "my own");
    let whole = good(&walks(json!({})), &shelf());
    assert_eq!((whole.spec.tasks[0].task_id.as_str(), whole.spec.tasks[0].params.len()), ("e", 0));
}

#[test]
fn a_task_that_selects_nothing_is_refused() {
    refused(
        &walks(json!({"taskId": "walk/feild"})),
        &shelf(),
        &[(
            "tasks[0].taskId",
            "selects nothing here: the environment's catalogue has 'walk/field', 'walk/wall', 'walk/maze'; did you mean 'walk/field'?",
        )],
    );
    refused(&walks(json!({"taskId": "e/0"})), &shelf(), &[("tasks[0].taskId", "selects nothing here")]);
    let mut pole = walks(json!({"taskId": "pole/7"}));
    pole["environments"][0]["entrypoint"] = json!("envs:CartPole");
    refused(&pole, &shelf(), &[("tasks[0].taskId", "'pole/7' selects nothing here: the environment has no catalogue. Say `params`")]);
    for id in ["e", "e/0"] {
        pole["tasks"][0]["taskId"] = json!(id);
        assert_eq!(good(&pole, &shelf()).warnings, Vec::<String>::new());
    }
    let mut shelf = shelf();
    let document = shelf.probed.get_mut("envs:Walks").unwrap();
    document["variants"] = json!({"catalog_error": "boom"});
    refused(&walks(json!({"taskId": "walk/field"})), &shelf, &[("tasks[0].taskId", "its catalogue failed when it was described: 'boom'")]);
    shelf.probed.get_mut("envs:Walks").unwrap()["variants"] = json!({"catalog": [{"id": "walk/field", "params": {}, "error": "bad map"}]});
    refused(&walks(json!({"taskId": "walk/field"})), &shelf, &[("tasks[0].taskId", "'bad map'")]);
}

#[test]
fn without_a_document_a_name_is_only_a_name_and_only_once() {
    let mut request = walks(json!({"taskId": "walk/field"}));
    let warnings = good(&request, &EmptyCatalogue).warnings;
    assert!(
        warnings.len() == 1 && warnings[0].contains("tasks[0].taskId: 'walk/field' is only a name: environment 'e' was not described"),
        "{warnings:?}"
    );
    request = with(request, "/tasks/-", Some(json!({"env": "e", "taskId": "walk/wall", "episodes": 2})));
    refused(&request, &EmptyCatalogue, &[("tasks[1].taskId", "would be the same as tasks[0] ('walk/field')")]);
    assert_eq!(good(&request, &shelf()).warnings, Vec::<String>::new());
    request["tasks"][1]["params"] = json!({});
    assert_eq!(good(&request, &EmptyCatalogue).warnings.len(), 1);
    request["tasks"][0]["taskId"] = json!("e/0");
    assert_eq!(good(&request, &EmptyCatalogue).warnings, Vec::<String>::new());
}

#[test]
fn arguments_follow_the_param_spec() {
    let cases: Vec<(Value, &str)> = vec![
        (json!({"layout": "maze"}), ""),
        (json!({"gusts": 1}), ""),
        (json!({"layout": "mase"}), "must be one of \"field\", \"wall\", \"maze\", not the text 'mase'; did you mean 'maze'?"),
        (json!({"layout": 1}), "must be one of"),
        (json!({"gusts": "much"}), "must be a number, not the text 'much'"),
        (json!({"gusts": true}), "must be a number, not true"),
        (json!({"gust": 0.5}), "is not an argument; it takes 'layout', 'gusts'; did you mean 'gusts'?"),
    ];
    for (params, text) in cases {
        let name = params.as_object().unwrap().keys().next().unwrap().clone();
        let request = walks(json!({"params": params}));
        if text.is_empty() {
            assert_eq!(problems(&request, &shelf()), Vec::<String>::new());
        } else {
            refused(&request, &shelf(), &[(&format!("tasks[0].params.{name}"), text)]);
        }
    }
    let mut request = walks(json!({}));
    request["environments"][0]["params"] = json!({"gusts": []});
    request = with(request, "/tasks/-", Some(json!({"env": "e", "taskId": "walk/field", "episodes": 1})));
    refused(&request, &shelf(), &[("environments[0].params.gusts", "must be a number, not a list")]);
}

#[test]
fn every_type_is_checked_as_the_sdk_does() {
    let param = |kind: &str, more: Value| {
        let mut param = object(json!({"name": "p", "type": kind, "required": false}));
        param.extend(object(more));
        param
    };
    let cases: Vec<(Value, Value, &str)> = vec![
        (json!(param("int", json!({}))), json!(3), ""),
        (json!(param("int", json!({}))), json!(3.0), ""),
        (json!(param("int", json!({}))), json!(3.5), "whole number"),
        (json!(param("int", json!({}))), json!(true), "whole number, not true"),
        (json!(param("bool", json!({}))), json!(1), "true or false"),
        (json!(param("bool", json!({}))), json!(false), ""),
        (json!(param("str", json!({}))), json!(1), "must be text"),
        (json!(param("str", json!({}))), json!(null), "must be text, not null"),
        (json!(param("enum", json!({"choices": [1, 2]}))), json!(1.0), ""),
        (json!(param("enum", json!({"choices": [1, 2]}))), json!(true), "must be one of 1, 2, not true"),
        (json!(param("int", json!({"choices": [1, 2]}))), json!(3), "must be one of 1, 2"),
        (json!(param("vec3", json!({"dim": 3}))), json!([1, 2.5, 3]), ""),
        (json!(param("vec3", json!({"dim": 3}))), json!([1, 2]), "list of 3 numbers, not of 2"),
        (json!(param("vec3", json!({}))), json!([1, 2]), "list of 3 numbers, not of 2"),
        (json!(param("vec3", json!({"dim": 3}))), json!([1, 2, "3"]), "one of them is the text '3'"),
        (json!(param("vec3", json!({"dim": 3}))), json!(1), "must be a list of 3 numbers"),
        (json!(param("vec2", json!({"dim": 2, "unit": true}))), json!([0.6, 0.8]), ""),
        (json!(param("vec2", json!({"dim": 2, "unit": true}))), json!([1, 1]), "of length 1"),
        (json!(param("vec2", json!({"dim": 2, "choices": [[0, 1], [1, 0]]}))), json!([0.0, 1.0]), ""),
        (json!(param("vec2", json!({"dim": 2, "choices": [[0, 1], [1, 0]]}))), json!([1, 1]), "must be one of [0,1], [1,0]"),
        (json!(param("SomeClass", json!({}))), json!({"any": 1}), ""),
    ];
    for (param, value, text) in cases {
        let mut shelf = shelf();
        shelf.probed.get_mut("envs:Walks").unwrap()["params"] =
            json!({"param_spec": {"params": [param], "extra": "forbid"}, "signature_tier": []});
        let request = walks(json!({"params": {"p": value}}));
        if text.is_empty() {
            assert_eq!(problems(&request, &shelf), Vec::<String>::new(), "{param}");
        } else {
            refused(&request, &shelf, &[("tasks[0].params.p", text)]);
        }
    }
}

#[test]
fn undeclared_and_missing_arguments() {
    let tier = json!([{"name": "size", "type": "int", "default": null, "required": true}, {"name": "lit", "type": "bool", "default": false, "required": false}]);
    let mut shelf = shelf();
    let mut set = |spec: Value| {
        shelf.probed.get_mut("envs:Walks").unwrap()["params"] = json!({"param_spec": spec, "signature_tier": tier});
        shelf.probed.clone()
    };
    let forbid = super::common::Shelf { probed: set(json!({"params": [], "extra": "forbid"})), ..Default::default() };
    let passthrough = super::common::Shelf { probed: set(json!({"params": [], "extra": "passthrough"})), ..Default::default() };
    let none = super::common::Shelf { probed: set(json!(null)), ..Default::default() };
    let ask = |params: Value| walks(json!({"params": params}));
    for shelf in [&forbid, &passthrough, &none] {
        refused(&ask(json!({})), shelf, &[("tasks[0].params", "argument 'size' is missing; it has no default")]);
        assert_eq!(good(&ask(json!({"size": 3, "lit": true})), shelf).warnings, Vec::<String>::new());
    }
    refused(&ask(json!({"size": "big"})), &forbid, &[("tasks[0].params.size", "whole number")]);
    refused(&ask(json!({"size": 1, "other": 1})), &forbid, &[("tasks[0].params.other", "is not an argument")]);
    assert_eq!(good(&ask(json!({"size": 1, "other": 1})), &passthrough).warnings, Vec::<String>::new());
    // Without a ParamSpec the SDK checks nothing, and `**kwargs` can't be seen.
    assert_eq!(good(&ask(json!({"size": "big", "other": 1})), &none).warnings.len(), 2);
}

#[test]
fn checkpoints_count_as_arguments_of_load() {
    let mut request = walks(json!({"taskId": "walk/field"}));
    request["models"][0]["entrypoint"] = json!("policies:Linear");
    refused(&request, &shelf(), &[("models[0].params", "argument 'weights' is missing")]);
    request["models"][0]["checkpoints"] = json!([{"param": "weights", "uri": "s3://a/b"}]);
    assert_eq!(problems(&request, &shelf()), Vec::<String>::new());
    request["models"][0]["checkpoints"] = json!([{"param": "weight", "uri": "s3://a/b"}]);
    refused(
        &request,
        &shelf(),
        &[("models[0].checkpoints", "did you mean 'weights'?"), ("models[0].params", "argument 'weights' is missing")],
    );
    request["models"][0]["checkpoints"] = json!(null);
    request["models"][0]["checkpointSets"] =
        json!({"a": [{"param": "weights", "uri": "s3://a/b"}], "b": [{"param": "other", "uri": "s3://a/b"}]});
    refused(
        &request,
        &shelf(),
        &[("models[0].checkpointSets.b", "is not an argument"), ("models[0].params", "argument 'weights' is missing")],
    );
    request["models"][0] = json!({"id": "m", "entrypoint": "policies:Misbehaving", "checkpoints": [{"param": "at", "uri": "s3://a/b"}]});
    refused(&request, &shelf(), &[("models[0].checkpoints", "declares it as int")]);
    request["models"][0] = json!({"id": "m", "entrypoint": "policies:Misbehaving", "params": {"mode": "raise", "at": 2, "seed": 7}});
    assert_eq!(problems(&request, &shelf()), Vec::<String>::new());
}

#[test]
fn the_horizon_fits_the_model() {
    let mut request = walks(json!({"taskId": "walk/field"}));
    let mut horizon = |entrypoint: &str, horizon: u32| {
        request["models"][0]["entrypoint"] = json!(entrypoint);
        request["models"][0]["executionHorizon"] = json!(horizon);
        request.clone()
    };
    assert_eq!(problems(&horizon("policies:Planner", 8), &shelf()), Vec::<String>::new());
    refused(
        &horizon("policies:Planner", 9),
        &shelf(),
        &[("models[0].executionHorizon", "is 9, more than the 8 actions that the model predicts at once")],
    );
    assert_eq!(problems(&horizon("policies:Unknown", 1024), &shelf()), Vec::<String>::new());
    assert_eq!(problems(&horizon("policies:Misbehaving", 1), &shelf()), Vec::<String>::new());
    refused(
        &horizon("policies:Misbehaving", 2),
        &shelf(),
        &[("models[0].executionHorizon", "neither predict_chunk nor predict_chunk_batch")],
    );
}

#[test]
fn errors_of_describing_refuse_or_warn() {
    let mut shelf = shelf();
    shelf.probed.get_mut("envs:Walks").unwrap()["env_spec"] = json!({"error": "no display"});
    refused(&walks(json!({})), &shelf, &[("environments[0]", "its env_spec failed when it was described: 'no display'")]);
    shelf.probed.insert("envs:Walks".to_owned(), described("walks"));
    shelf.probed.get_mut("envs:Walks").unwrap()["env_tags"] = json!({"error": "unregistered role"});
    assert_eq!(good(&walks(json!({})), &shelf).warnings, ["environments[0]: its tags can't be used: 'unregistered role'"]);
    shelf.probed.get_mut("policies:Planner").unwrap()["model_spec"] = json!({"error": "no spec"});
    refused(&walks(json!({})), &shelf, &[("models[0]", "its model_spec failed")]);
    shelf.probed.insert("policies:Planner".to_owned(), described("walks"));
    refused(&walks(json!({})), &shelf, &[("models[0]", "describes itself as an environment; it can't be used as a model")]);
}

#[test]
fn contract_branches_are_chosen_by_the_arguments() {
    let mut shelf = shelf();
    shelf.probed.get_mut("envs:Walks").unwrap()["env_contracts"] = json!({"discriminants": ["layout"], "branches": [
        {"params": {"layout": "field"}, "default": true, "env_tags": {}, "env_spec": {}},
        {"params": {"layout": "wall"}, "default": false, "env_tags": {}, "env_spec": {"error": "no wall"}},
    ]});
    assert_eq!(problems(&walks(json!({})), &shelf), Vec::<String>::new());
    refused(
        &walks(json!({"taskId": "walk/wall"})),
        &shelf,
        &[("tasks[0].params", "selects a branch of the environment that failed when it was described: 'no wall'")],
    );
}

#[test]
fn a_workflow_edition_in_common_is_needed() {
    let mut shelf = shelf();
    let mut request = walks(json!({"taskId": "walk/field"}));
    request["models"][0]["workflowEdition"] = json!("2025.01");
    refused(&request, &shelf, &[("models[0].workflowEdition", "supports 2026.06"), ("models", "no workflow edition in common")]);
    request["models"][0]["workflowEdition"] = json!("2026.06");
    assert_eq!(problems(&request, &shelf), Vec::<String>::new());
    request["models"][0]["workflowEdition"] = json!(null);
    shelf.probed.get_mut("envs:Walks").unwrap()["runtime"]["supported_workflow_editions"] = json!(["2027.01"]);
    refused(
        &request,
        &shelf,
        &[("models", "model 'm' (workflow edition 2026.06) and environment 'e' (2027.01) have no workflow edition in common")],
    );
    request = with(request, "/environments/-", Some(json!({"id": "pole", "entrypoint": "envs:CartPole"})));
    request = with(request, "/tasks/-", Some(json!({"env": "pole", "episodes": 1})));
    request["pairs"] = json!([{"model": "m", "env": "pole"}]);
    assert_eq!(problems(&request, &shelf), Vec::<String>::new());
}

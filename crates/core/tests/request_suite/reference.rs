//! The committed schema and reference page are those of the tables, the examples follow them, and no document panics.

use std::path::PathBuf;

use super::common::{full, good, small};
use proptest::prelude::*;
use rlm_core::request::fields::TABLES;
use rlm_core::request::{
    Catalogue, EmptyCatalogue, Registered, check, check_environment, check_model, definitions, preview, reference_markdown, schema,
};
use serde_json::{Map, Value, json};

fn root() -> PathBuf {
    PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../..")
}

fn committed(name: &str, generated: &str) {
    let path = root().join("docs/reference").join(name);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, generated).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == generated, "{} is not what the tables say; run make generate", path.display());
}

#[test]
fn the_committed_reference_is_current() {
    committed("request.md", &reference_markdown());
    committed("request.schema.json", &format!("{}\n", serde_json::to_string_pretty(&schema()).unwrap()));
}

#[test]
fn every_field_is_in_schema_reference_and_the_full_request() {
    let (schema, page, full) = (schema(), reference_markdown(), full());
    for table in TABLES {
        let object = if table.name == "Request" { &schema } else { &schema["$defs"][table.name] };
        assert_eq!(object["properties"].as_object().unwrap().len(), table.fields.len(), "{}", table.name);
        let section = page.split("\n## ").find(|section| section.starts_with(&format!("{}\n", table.name))).unwrap();
        let pointer = match table.name {
            "Request" => "",
            "Model" => "/models/0",
            "Environment" => "/environments/0",
            "Checkpoint" => "/models/0/checkpoints/0",
            "Resources" => "/models/0/resources",
            "Task" => "/tasks/0",
            "Success" => "/tasks/0/success",
            "Limits" => "/limits",
            "Pair" => "/pairs/0",
            "Recording" => "/recording",
            other => unreachable!("{other}"),
        };
        let example = full.pointer(pointer).unwrap();
        for field in table.fields {
            assert!(object["properties"].get(field.name).is_some(), "{}.{}", table.name, field.name);
            assert!(section.contains(&format!("| `{}` |", field.name)), "{}.{}", table.name, field.name);
            assert!(example.get(field.name).is_some(), "{}.{}", table.name, field.name);
        }
    }
}

/// Paths of an example as `rlmesh eval submit` makes them: absolute.
fn absolute(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if key == "pythonPath" => *text = format!("/srv/{text}"),
                    Value::String(text) if key == "uri" => *text = text.replace("file:", "file:///srv/"),
                    other => absolute(other),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(absolute),
        _ => {}
    }
}

#[test]
fn the_examples_check_clean() {
    let shelf = super::common::shelf();
    let mut seen = Vec::new();
    for entry in std::fs::read_dir(root().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut request: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        absolute(&mut request);
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let checked = good(&request, &shelf);
        assert_eq!(checked.warnings, Vec::<String>::new(), "{name}");
        assert!(preview(&checked.spec).rows > 0);
        seen.push(name);
    }
    assert!(seen.contains(&"quickstart".to_owned()) && seen.contains(&"catalogue".to_owned()), "{seen:?}");
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0_i64..5).prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        prop_oneof![
            Just("10m"),
            Just("a:B"),
            Just("/a"),
            Just("m"),
            Just("e"),
            Just("m@s"),
            Just("unix:///a"),
            Just("file:///a"),
            Just("1Gi")
        ]
        .prop_map(Value::from),
    ];
    let names: Vec<&'static str> = TABLES.iter().flat_map(|table| table.fields).map(|field| field.name).collect();
    leaf.prop_recursive(4, 48, 6, move |inner| {
        let key = prop_oneof![8 => proptest::sample::select(names.clone()).prop_map(str::to_owned), 1 => "\\PC{0,5}"];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(key, inner, 0..6).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Answers everything with the same documents.
struct Everything(Value, Value);

impl Catalogue for Everything {
    fn model(&self, _name: &str) -> Option<Registered> {
        Some(Registered { definition: self.0.clone(), describe: Some(self.1.clone()) })
    }

    fn environment(&self, name: &str) -> Option<Registered> {
        self.model(name)
    }

    fn describe(&self, _definition: &rlm_core::evaluation::Definition) -> Option<Value> {
        Some(self.1.clone())
    }
}

/// Puts `value` somewhere into `target`.
fn graft(target: &mut Value, path: &[u8], value: Value) {
    let Some((step, rest)) = path.split_first() else {
        *target = value;
        return;
    };
    match target {
        Value::Object(map) if !map.is_empty() => {
            let at = usize::from(*step) % map.len();
            if let Some((_, inner)) = map.iter_mut().nth(at) {
                graft(inner, rest, value);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let at = usize::from(*step) % items.len();
            graft(&mut items[at], rest, value);
        }
        other => *other = value,
    }
}

fn total(request: &Value, catalogue: &dyn Catalogue) {
    let _ = definitions(request, catalogue);
    match check(request, catalogue) {
        Ok(checked) => {
            let _ = preview(&checked.spec);
        }
        Err(problems) => assert!(
            !problems.is_empty()
                && problems.iter().all(|problem| !problem.message.is_empty() && !problem.message.contains("can't be read:"))
        ),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_document_panics(request in json_value(), definition in json_value(), describe in json_value()) {
        let catalogue = Everything(definition.clone(), describe.clone());
        total(&request, &EmptyCatalogue);
        total(&request, &catalogue);
        let _ = (check_model(&definition, Some(describe.clone())), check_environment(&definition, Some(describe)));
    }

    #[test]
    fn one_change_anywhere_never_panics(paths in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 1..6), json_value()), 1..3), describe in json_value()) {
        let mut request = full();
        let mut document = super::common::described("walks");
        for (path, value) in paths {
            graft(&mut request, &path, value.clone());
            graft(&mut document, &path, value);
        }
        total(&request, &EmptyCatalogue);
        total(&request, &Everything(json!({"image": "i"}), document));
        total(&request, &Everything(json!({"image": "i"}), describe));
    }

    #[test]
    fn an_unknown_field_anywhere_is_refused(at in 0_usize..10, name in "[a-z]{3,8}X") {
        let mut request = full();
        let places = ["", "/models/0", "/environments/0", "/models/0/checkpoints/0", "/models/0/resources", "/tasks/0", "/tasks/0/success", "/limits", "/pairs/0", "/recording"];
        request.pointer_mut(places[at]).unwrap().as_object_mut().unwrap().insert(name.clone(), json!(1));
        let problems = check(&request, &EmptyCatalogue).unwrap_err();
        prop_assert_eq!(problems.len(), 1);
        prop_assert!(problems[0].path.ends_with(&name));
    }

    #[test]
    fn fan_out_changes_no_row(workers in 1_u32..64, lanes in 1_u32..64, replicas in 1_u32..8) {
        let mut request = small();
        let rows = |request: &Value| rlm_core::rows::segments(&good(request, &EmptyCatalogue).spec);
        let before = rows(&request);
        request["tasks"][0]["workers"] = json!(workers);
        request["environments"][0]["lanesPerPod"] = json!(lanes);
        request["models"][0]["replicas"] = json!(replicas);
        prop_assert_eq!(rows(&request), before);
    }
}

#[test]
fn deep_and_wide_documents_are_answered() {
    let mut deep = json!(1);
    for _ in 0..100 {
        deep = json!({"a": [deep]});
    }
    let mut request = small();
    request["metadata"] = json!({"deep": deep});
    assert!(check(&request, &EmptyCatalogue).is_ok());
    let wide: Map<String, Value> = (0..50_000).map(|i| (format!("field{i}"), json!(i))).collect();
    assert_eq!(check(&Value::Object(wide), &EmptyCatalogue).unwrap_err().len(), 201);
}

#[test]
fn the_largest_requests_are_checked_in_time() {
    let started = std::time::Instant::now();
    let tasks: Vec<Value> =
        (0..10_000).map(|i| json!({"env": "e", "taskId": format!("t{i}"), "params": {"i": i}, "episodes": 10})).collect();
    let models: Vec<Value> = (0..10).map(|i| json!({"id": format!("m{i}"), "image": "i"})).collect();
    let request = json!({"models": models, "environments": [{"id": "e", "image": "i"}], "tasks": tasks});
    let checked = good(&request, &EmptyCatalogue);
    assert_eq!(preview(&checked.spec).rows, 1_000_000);
    let seeds: Vec<u64> = (0..1_000_000).collect();
    let mut request = small();
    request["tasks"][0]["seeds"] = json!(seeds);
    request["tasks"][0]["episodes"] = json!(1_000_000);
    assert!(good(&request, &EmptyCatalogue).warnings.is_empty());
    assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
}

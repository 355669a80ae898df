//! Checks answers against the OpenAPI document: the status must be declared, the content type too, and a JSON body must
//! match its schema. Fields that the document does not name are an error as well.

use std::sync::LazyLock;

use rlm_server::http::openapi;
use serde_json::Value;

use super::Answer;

static DOCUMENT: LazyLock<Value> = LazyLock::new(|| serde_json::to_value(openapi::document()).unwrap());

fn matches(template: &str, path: &str) -> bool {
    let (template, path): (Vec<_>, Vec<_>) = (template.split('/').collect(), path.split('/').collect());
    template.len() == path.len()
        && template.iter().zip(&path).all(|(part, text)| (part.starts_with('{') && !text.is_empty()) || part == text)
}

/// The document's operation for a request.
pub fn operation(method: &str, path: &str) -> Option<&'static Value> {
    let paths = DOCUMENT["paths"].as_object().unwrap();
    // A literal path wins over one with parameters.
    let item = paths.get(path).or_else(|| paths.iter().find(|(template, _)| matches(template, path)).map(|(_, item)| item))?;
    item.get(method.to_lowercase())
}

/// Panics when the answer is not as documented. Paths outside the document (pages, nowhere) are not checked.
pub fn check(method: &str, path: &str, answer: &Answer) {
    let Some(operation) = operation(method, path) else { return };
    let status = answer.status.as_str();
    let what = format!("{method} {path} -> {status}");
    let response = &operation["responses"][status];
    assert!(response.is_object(), "{what}: this status is not documented; body: {}", answer.text);
    let Some(content) = response.get("content").and_then(Value::as_object) else {
        assert!(answer.text.is_empty(), "{what}: no body is documented, but there is one: {}", answer.text);
        return;
    };
    let kind = answer.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default();
    let declared = content.get(kind).unwrap_or_else(|| panic!("{what}: content type '{kind}' is not documented: {}", answer.text));
    if kind == "application/json"
        && let Some(schema) = declared.get("schema")
    {
        let mut problems = Vec::new();
        validate(schema, &answer.body, "", &mut problems);
        assert!(problems.is_empty(), "{what}: not as documented: {problems:#?}\n{}", answer.text);
    }
}

fn resolve(schema: &'static Value) -> &'static Value {
    match schema.get("$ref").and_then(Value::as_str) {
        Some(reference) => {
            let name = reference.strip_prefix("#/components/schemas/").unwrap();
            let found = &DOCUMENT["components"]["schemas"][name];
            assert!(found.is_object(), "the document refers to the schema {name}, which it does not have");
            resolve(found)
        }
        None => schema,
    }
}

/// Every property that the schema names, through `allOf`.
fn properties(schema: &'static Value, into: &mut Vec<(&'static str, &'static Value)>) {
    let schema = resolve(schema);
    into.extend(schema.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(name, part)| (name.as_str(), part)));
    for part in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
        properties(part, into);
    }
}

fn validate(schema: &'static Value, value: &Value, at: &str, problems: &mut Vec<String>) {
    let schema = resolve(schema);
    for key in ["oneOf", "anyOf"] {
        if let Some(choices) = schema.get(key).and_then(Value::as_array) {
            let fits = choices.iter().any(|choice| {
                let mut inner = Vec::new();
                validate(choice, value, at, &mut inner);
                inner.is_empty()
            });
            if !fits {
                problems.push(format!("{at}: fits none of {key}: {value}"));
            }
            return;
        }
    }
    let types: Vec<&str> = match schema.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if !types.is_empty() {
        let is = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        if !(types.contains(&is) || (is == "integer" && types.contains(&"number"))) {
            problems.push(format!("{at}: is {is}, documented as {types:?}"));
            return;
        }
    }
    if let Some(choices) = schema.get("enum").and_then(Value::as_array)
        && !choices.contains(value)
    {
        problems.push(format!("{at}: {value} is not one of {choices:?}"));
    }
    if schema.get("format").and_then(Value::as_str) == Some("date-time")
        && let Some(text) = value.as_str()
        && !(chrono::DateTime::parse_from_rfc3339(text).is_ok() && text.ends_with('Z'))
    {
        problems.push(format!("{at}: '{text}' is not RFC 3339 in UTC"));
    }
    match value {
        Value::Object(fields) => validate_object(schema, fields, at, problems),
        Value::Array(items) => {
            if let Some(item_schema) = schema.get("items") {
                for (place, item) in items.iter().enumerate() {
                    validate(item_schema, item, &format!("{at}[{place}]"), problems);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn validate_object(schema: &'static Value, fields: &serde_json::Map<String, Value>, at: &str, problems: &mut Vec<String>) {
    let mut required = Vec::new();
    collect_required(schema, &mut required);
    for name in required {
        if !fields.contains_key(name) {
            problems.push(format!("{at}.{name}: is required and missing"));
        }
    }
    let mut known = Vec::new();
    properties(schema, &mut known);
    let open = known.is_empty() || schema.get("additionalProperties").is_some();
    for (name, value) in fields {
        match known.iter().find(|(known, _)| known == name) {
            Some((_, part)) => validate(part, value, &format!("{at}.{name}"), problems),
            None if open => {
                if let Some(part) = schema.get("additionalProperties").filter(|part| part.is_object()) {
                    validate(part, value, &format!("{at}.{name}"), problems);
                }
            }
            None => problems.push(format!("{at}.{name}: is not documented")),
        }
    }
}

fn collect_required(schema: &'static Value, into: &mut Vec<&'static str>) {
    let schema = resolve(schema);
    into.extend(schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str));
    for part in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
        collect_required(part, into);
    }
}

//! What a describe document (SDK envelope, version 1) says about a model or environment, and what follows for a request.
//! It never refuses what the SDK would accept: where the document leaves something open, there is a warning at most.

use std::collections::HashMap;

use serde_json::Value;

use super::problems::{Path, Problems};
use super::read::describe;
use super::text::{hint, quote};
use crate::evaluation::Params;

/// A describe document, indexed.
pub struct Described {
    document: Value,
    catalog: HashMap<String, usize>,
}

/// Where an argument's value came from, for the path of a problem.
pub type Origin<'a> = dyn Fn(&str) -> String + 'a;

impl Described {
    #[must_use]
    pub fn new(document: Value) -> Self {
        let mut described = Self { document, catalog: HashMap::new() };
        let ids: Vec<String> = described.entries().iter().map(|entry| text(entry, "id").unwrap_or_default().to_owned()).collect();
        for (index, id) in ids.into_iter().enumerate() {
            described.catalog.entry(id).or_insert(index);
        }
        described
    }

    /// A part of the envelope; some versions nest them below `env` or `model`.
    fn part(&self, name: &str) -> Option<&Value> {
        let nested = |side: &str| self.document.get(side).and_then(|side| side.get(name));
        self.document.get(name).or_else(|| nested("env")).or_else(|| nested("model")).filter(|part| !part.is_null())
    }

    fn entries(&self) -> &[Value] {
        self.part("variants").and_then(|variants| variants.get("catalog")).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// What is wrong with the thing as a whole.
    pub fn check_whole(&self, wanted: &str, path: &Path<'_>, problems: &mut Problems, warnings: &mut Vec<String>) {
        if let Some(kind) = text(&self.document, "kind").filter(|kind| *kind != wanted) {
            let found = if kind == "env" { "an environment" } else { "a model" };
            problems.add(
                path,
                format!("describes itself as {found}; it can't be used as {}", if wanted == "env" { "an environment" } else { "a model" }),
            );
            return;
        }
        for name in ["env_spec", "model_spec"] {
            if let Some(error) = self.part(name).and_then(|spec| text(spec, "error")) {
                problems.add(path, format!("can't run: its {name} failed when it was described: {}", quote(error)));
            }
        }
        if let Some(error) = self.part("env_tags").and_then(|tags| text(tags, "error")) {
            warnings.push(format!("{path}: its tags can't be used: {}", quote(error)));
        }
        if let Some(error) = self.part("runtime").and_then(|runtime| text(runtime, "workflow_edition_error")) {
            warnings.push(format!("{path}: its workflow edition can't be used: {}", quote(error)));
        }
    }

    /// The workflow editions that it supports; None: not said.
    #[must_use]
    pub fn editions(&self) -> Option<Vec<&str>> {
        let list = self.part("runtime")?.get("supported_workflow_editions")?.as_array()?;
        Some(list.iter().filter_map(Value::as_str).collect()).filter(|list: &Vec<&str>| !list.is_empty())
    }

    /// The catalogue entry of this id.
    #[must_use]
    pub fn entry(&self, id: &str) -> Option<&Value> {
        self.entries().get(*self.catalog.get(id)?)
    }

    #[must_use]
    pub fn has_catalogue(&self) -> bool {
        !self.catalog.is_empty()
    }

    /// Why `task_id` is not in the catalogue, and what is.
    #[must_use]
    pub fn missing_entry(&self, task_id: &str) -> String {
        if let Some(error) = self.part("variants").and_then(|variants| text(variants, "catalog_error")) {
            return format!("its catalogue failed when it was described: {}", quote(error));
        }
        if self.catalog.is_empty() {
            return "the environment has no catalogue".to_owned();
        }
        let ids: Vec<&str> = self.entries().iter().filter_map(|entry| text(entry, "id")).collect();
        let shown = ids.iter().take(5).map(|id| quote(id)).collect::<Vec<_>>().join(", ");
        let more = if ids.len() > 5 { format!(" and {} more", ids.len() - 5) } else { String::new() };
        format!("the environment's catalogue has {shown}{more}{}", hint(task_id, ids.iter().copied()))
    }

    /// Checks what a model is asked for.
    pub fn check_horizon(&self, horizon: u32, path: &Path<'_>, problems: &mut Problems) {
        if horizon <= 1 {
            return;
        }
        let corners: Vec<&str> =
            self.part("corners").and_then(Value::as_array).map_or_else(Vec::new, |list| list.iter().filter_map(Value::as_str).collect());
        if !corners.iter().any(|corner| matches!(*corner, "predict_chunk" | "predict_chunk_batch")) {
            problems.add(
                path,
                format!("is {horizon}, but the model has neither predict_chunk nor predict_chunk_batch: it predicts one action at a time"),
            );
        } else if let Some(native) = self.part("native_chunk").and_then(Value::as_u64).filter(|native| u64::from(horizon) > *native) {
            problems.add(path, format!("is {horizon}, more than the {native} actions that the model predicts at once"));
        }
    }

    /// Checks arguments against what `make()` or `load()` takes. `files` are arguments that receive a checkpoint's path.
    pub fn check_arguments(
        &self,
        arguments: &Params,
        files: &[&str],
        missing_at: &str,
        origin: &Origin<'_>,
        problems: &mut Problems,
        warnings: &mut Vec<String>,
    ) {
        let Some(params) = self.part("params") else { return };
        let spec = params.get("param_spec").filter(|spec| !spec.is_null());
        let declared = list(spec.and_then(|spec| spec.get("params")));
        let derived = list(params.get("signature_tier"));
        let names = || declared.iter().chain(derived).filter_map(|param| text(param, "name"));
        let lookup = |within: &'_ [Value], name: &str| within.iter().position(|param| text(param, "name") == Some(name));
        let extra_allowed = spec.and_then(|spec| text(spec, "extra")) == Some("passthrough");
        for name in arguments.keys().map(String::as_str).chain(files.iter().copied()) {
            let value = arguments.get(name);
            if let Some(param) = lookup(declared, name).and_then(|index| declared.get(index)) {
                let problem = match value {
                    Some(value) => argument_problem(param, value),
                    None => file_problem(param),
                };
                if let Some(problem) = problem {
                    problems.add_at(origin(name), problem);
                }
            } else if let Some(param) = lookup(derived, name).and_then(|index| derived.get(index)) {
                // Without a ParamSpec the SDK passes arguments on unchecked.
                if let Some(problem) = value.and_then(|value| argument_problem(param, value)) {
                    if spec.is_some() {
                        problems.add_at(origin(name), problem);
                    } else {
                        warnings.push(format!("{}: {problem}", origin(name)));
                    }
                }
            } else if spec.is_some() && !extra_allowed {
                let known = names().map(quote).collect::<Vec<_>>().join(", ");
                let known = if known.is_empty() { "it takes none".to_owned() } else { format!("it takes {known}") };
                problems.add_at(origin(name), format!("is not an argument; {known}{}", hint(name, names())));
            } else if spec.is_none() {
                warnings.push(format!("{}: is not in the signature that was described; construction may fail", origin(name)));
            }
        }
        for param in declared.iter().chain(derived) {
            let Some(name) = text(param, "name") else { continue };
            if param.get("required") == Some(&Value::Bool(true)) && !arguments.contains_key(name) && !files.contains(&name) {
                problems.add_at(missing_at.to_owned(), format!("argument {} is missing; it has no default", quote(name)));
            }
        }
    }

    /// What is wrong with the contract branch that these arguments choose (spaces that depend on arguments).
    #[must_use]
    pub fn branch_problem(&self, arguments: &Params) -> Option<String> {
        let contracts = self.part("env_contracts")?;
        let discriminants = list(contracts.get("discriminants"));
        let defaults = list(contracts.get("branches")).iter().find(|branch| branch.get("default") == Some(&Value::Bool(true)));
        let wanted = |name: &str| arguments.get(name).or_else(|| defaults?.get("params")?.get(name));
        let branch = list(contracts.get("branches")).iter().find(|branch| {
            discriminants.iter().filter_map(Value::as_str).all(|name| {
                match (branch.get("params").and_then(|params| params.get(name)), wanted(name)) {
                    (Some(has), Some(wanted)) => same(has, wanted),
                    _ => false,
                }
            })
        })?;
        let error = branch.get("env_spec").and_then(|spec| text(spec, "error"))?;
        Some(format!("selects a branch of the environment that failed when it was described: {}", quote(error)))
    }
}

/// Params and error of a catalogue entry.
pub fn entry_params(entry: &Value) -> Result<Params, String> {
    if let Some(error) = entry.get("error").filter(|error| !error.is_null()) {
        return Err(format!("selects an entry that failed when it was described: {}", quote(error.as_str().unwrap_or("unknown error"))));
    }
    Ok(entry.get("params").and_then(Value::as_object).cloned().unwrap_or_default())
}

fn list(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn text<'v>(value: &'v Value, name: &str) -> Option<&'v str> {
    value.get(name)?.as_str()
}

fn file_problem(param: &Value) -> Option<String> {
    let kind = text(param, "type").unwrap_or_default();
    (matches!(kind, "int" | "float" | "bool") || kind.starts_with("vec"))
        .then(|| format!("receives a checkpoint's path, but the model declares it as {kind}"))
}

/// The SDK's own rules for one argument.
fn argument_problem(param: &Value, value: &Value) -> Option<String> {
    let kind = text(param, "type").unwrap_or_default();
    let dim = param.get("dim").and_then(Value::as_u64).or_else(|| kind.strip_prefix("vec").and_then(|dim| dim.parse().ok()));
    let problem = match (kind, dim) {
        ("bool", _) => (!value.is_boolean()).then(|| format!("must be true or false, not {}", describe(value))),
        ("int", _) => (!value.as_f64().is_some_and(|number| number.fract() == 0.0))
            .then(|| format!("must be a whole number, not {}", describe(value))),
        ("float", _) => (!value.is_number()).then(|| format!("must be a number, not {}", describe(value))),
        ("str", _) => (!value.is_string()).then(|| format!("must be text, not {}", describe(value))),
        (kind, Some(dim)) if kind.starts_with("vec") => vector_problem(value, dim, param.get("unit") == Some(&Value::Bool(true))),
        _ => None,
    };
    problem.or_else(|| {
        let choices = param.get("choices").and_then(Value::as_array)?;
        let found = choices.iter().any(|choice| same(choice, value));
        (!found).then(|| {
            let shown = choices.iter().take(12).map(Value::to_string).collect::<Vec<_>>().join(", ");
            let more = if choices.len() > 12 { ", ..." } else { "" };
            let hint = value.as_str().map_or_else(String::new, |value| hint(value, choices.iter().filter_map(Value::as_str)));
            format!("must be one of {shown}{more}, not {}{hint}", describe(value))
        })
    })
}

fn vector_problem(value: &Value, dim: u64, unit: bool) -> Option<String> {
    let Some(items) = value.as_array() else { return Some(format!("must be a list of {dim} numbers, not {}", describe(value))) };
    if items.len() as u64 != dim {
        return Some(format!("must be a list of {dim} numbers, not of {}", items.len()));
    }
    if let Some(item) = items.iter().find(|item| !item.is_number()) {
        return Some(format!("must be a list of {dim} numbers; one of them is {}", describe(item)));
    }
    let norm = items.iter().filter_map(Value::as_f64).map(|x| x * x).sum::<f64>().sqrt();
    (unit && (norm - 1.0).abs() > 1e-3).then(|| format!("must be a vector of length 1, not {norm:.6}"))
}

/// Equality as Python has it, but for true and false, which are no numbers.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        _ => a == b,
    }
}

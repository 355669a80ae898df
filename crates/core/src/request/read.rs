//! Reads a request against the tables of its fields: what is unknown, missing or of a wrong form is a problem, and what is
//! left is a document with every default filled in. It decides nothing that involves two fields.

use serde_json::{Map, Number, Value};

use super::fields::{ENVIRONMENT, MODEL, REQUEST, TAGS};
use super::problems::{Path, Problems};
use super::table::{Kind, Presence, Side, Table};
use super::text::{duration_text, hint, is_quantity, parse_duration, quote};
use super::{Catalogue, Registered};
use crate::evaluation::Params;

/// Arguments that `rlmesh.serve` takes for itself.
pub const RESERVED_ARGUMENTS: [&str; 4] = ["num_envs", "vectorization_mode", "framework", "device"];
/// One environment variable carries the arguments, and Linux bounds it.
const ARGUMENT_BYTES: usize = 100_000;
/// Integers up to here survive a stay as a floating-point number.
const EXACT: f64 = 9_007_199_254_740_992.0;

pub struct Reader<'a> {
    pub catalogue: &'a dyn Catalogue,
    pub problems: Problems,
}

impl Reader<'_> {
    /// The request with every default; parts that could not be read are null or have their default.
    pub fn request(&mut self, request: &Value) -> Option<Value> {
        self.object(request, &REQUEST, &Path::Root)
    }

    /// None: a problem was reported.
    fn value(&mut self, value: &Value, kind: &Kind, path: &Path<'_>) -> Option<Value> {
        match kind {
            Kind::Text(text) => {
                let Some(found) = value.as_str() else { return self.wrong(path, "text in quotes", value) };
                match text.problem(found) {
                    Some(problem) => self.refuse(path, problem),
                    None => Some(value.clone()),
                }
            }
            Kind::Choice(choices) => match value.as_str() {
                Some(found) if choices.contains(&found) => Some(value.clone()),
                Some(found) => self.refuse(
                    path,
                    format!("must be one of {}, not {}{}", choices.join(", "), quote(found), hint(found, choices.iter().copied())),
                ),
                None => self.wrong(path, &format!("one of {}", choices.join(", ")), value),
            },
            Kind::Integer { min, max } => self.integer(value, *min, *max, path),
            Kind::Number { min, max } => match value.as_f64() {
                Some(number) if number.is_finite() && (*min..=*max).contains(&number) => Some(Value::from(number)),
                Some(number) => self.refuse(path, format!("must be between {min} and {max}, not {number}")),
                None => self.wrong(path, "a number", value),
            },
            Kind::Boolean => {
                if value.is_boolean() {
                    Some(value.clone())
                } else {
                    self.wrong(path, "true or false", value)
                }
            }
            Kind::Duration { min_ms, max_ms } => self.duration(value, *min_ms, *max_ms, path),
            Kind::Quantity => {
                let text = match value {
                    Value::String(text) => text.clone(),
                    Value::Number(number) => number.to_string(),
                    _ => return self.wrong(path, "a quantity such as \"500m\" or \"4Gi\"", value),
                };
                if is_quantity(&text) {
                    Some(Value::String(text))
                } else {
                    self.refuse(path, format!("must be a Kubernetes quantity above zero such as 500m, 2 or 4Gi, not {}", quote(&text)))
                }
            }
            Kind::Object(table) => self.object(value, table, path),
            Kind::Definition(side, table) => self.definition(value, *side, table, path),
            Kind::List { of, min, max } => self.list(value, of, *min, *max, path),
            Kind::Map { key, of, max } => {
                let map = self.entries(value, *max, path)?;
                let mut read = Map::new();
                for (name, item) in map {
                    let path = path.key(name);
                    if let Some(problem) = key.problem(name) {
                        self.problems.add(&path, format!("as a name, {problem}"));
                    } else if let Some(item) = self.value(item, of, &path) {
                        read.insert(name.clone(), item);
                    }
                }
                Some(Value::Object(read))
            }
            Kind::Open { max_bytes } => self.open(value, *max_bytes, path),
            Kind::Arguments => {
                let read = self.open(value, ARGUMENT_BYTES, path)?;
                for reserved in RESERVED_ARGUMENTS {
                    if read.get(reserved).is_some() {
                        let instead = if reserved == "num_envs" { "; say `lanesPerPod` of the environment instead" } else { "" };
                        self.problems.add(&path.key(reserved), format!("is set by the platform and can't be an argument{instead}"));
                    }
                }
                Some(read)
            }
        }
    }

    fn object(&mut self, value: &Value, table: &Table, path: &Path<'_>) -> Option<Value> {
        let Some(map) = value.as_object() else { return self.wrong(path, "an object", value) };
        for name in map.keys() {
            if !table.fields.iter().any(|field| field.name == name) {
                let hint = hint(name, table.fields.iter().map(|field| field.name));
                self.problems.add(&path.key(name), format!("is not a field of {}{hint}", article(table.name)));
            }
        }
        let mut read = Map::new();
        for field in table.fields {
            let path = path.key(field.name);
            let found = match map.get(field.name) {
                None | Some(Value::Null) => {
                    if field.presence == Presence::Required {
                        self.problems.add(&path, "is missing");
                    }
                    None
                }
                Some(found) => self.value(found, &field.kind, &path),
            };
            let found = found.or_else(|| match field.presence {
                Presence::Default(text) => {
                    let default: Value = serde_json::from_str(text).ok()?;
                    self.value(&default, &field.kind, &path)
                }
                Presence::Required | Presence::Optional => None,
            });
            read.insert(field.name.to_owned(), found.unwrap_or(Value::Null));
        }
        Some(Value::Object(read))
    }

    /// Objects in a list that can't be read are null, so that the others keep their places; of other lists, none is left.
    fn list(&mut self, value: &Value, of: &Kind, min: usize, max: usize, path: &Path<'_>) -> Option<Value> {
        let Some(items) = value.as_array() else { return self.wrong(path, "a list", value) };
        if items.len() < min {
            return self.refuse(path, if items.is_empty() { "is empty".to_owned() } else { format!("must have at least {min} items") });
        }
        if items.len() > max {
            return self.refuse(path, format!("has {} items; at most {max} are allowed", items.len()));
        }
        let keep = matches!(of, Kind::Object(_) | Kind::Definition(..));
        let mut whole = true;
        let mut read = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            let item = self.value(item, of, &path.index(index));
            whole &= item.is_some();
            read.push(item.unwrap_or(Value::Null));
        }
        (whole || keep).then_some(Value::Array(read))
    }

    fn definition(&mut self, value: &Value, side: Side, table: &Table, path: &Path<'_>) -> Option<Value> {
        let (reference, overrides) = match value {
            Value::String(reference) => (reference.as_str(), None),
            Value::Object(map) => match map.get("ref") {
                Some(Value::String(reference)) => (reference.as_str(), Some(map)),
                _ => return self.object(value, table, path),
            },
            other => return self.wrong(path, &format!("a {} or the name of a registered one", side.noun()), other),
        };
        let field = if overrides.is_some() { path.key("ref") } else { *path };
        if let Some(problem) = super::text::Text::Reference.problem(reference) {
            return self.refuse(&field, problem);
        }
        let Some(registered) = find(self.catalogue, side, reference) else {
            return self.refuse(
                &field,
                format!(
                    "no {} {} is registered; `rlmesh {} list` shows those that are",
                    side.noun(),
                    quote(reference),
                    if side == Side::Model { "models" } else { "envs" }
                ),
            );
        };
        let mut clash = false;
        for name in ["image", "entrypoint", "address"] {
            if overrides.is_some_and(|map| map.get(name).is_some_and(|value| !value.is_null())) {
                self.problems.add(&path.key(name), "can't stand beside `ref`, which says what runs");
                clash = true;
            }
        }
        if clash {
            return None;
        }
        let Some(whole) = expand(&registered, reference, overrides) else {
            return self.refuse(&field, format!("what is registered as {} can't be read; register it again", quote(reference)));
        };
        self.object(&whole, table, path)
    }

    /// A definition outside a request; its `id` may be left out.
    pub fn definition_alone(&mut self, value: &Value, side: Side) -> Option<Value> {
        let table = match side {
            Side::Model => &MODEL,
            Side::Environment => &ENVIRONMENT,
        };
        if value.get("ref").is_some_and(|reference| !reference.is_null()) {
            return self.refuse(&Path::Root.key("ref"), format!("can't stand in a {} that is registered itself", side.noun()));
        }
        let mut value = value.clone();
        if let Some(map) = value.as_object_mut().filter(|map| map.get("id").is_none_or(Value::is_null)) {
            map.insert("id".to_owned(), Value::from(side.noun()));
        }
        self.object(&value, table, &Path::Root)
    }

    /// The tags of a request, without the rest of it.
    pub fn tags_alone(&mut self, tags: &Value) -> Option<Value> {
        self.value(tags, &TAGS, &Path::Root.key("tags"))
    }

    /// A registered definition that only a task names.
    pub fn registered(&mut self, reference: &str, side: Side, table: &Table, path: &Path<'_>) -> Option<Value> {
        let registered = find(self.catalogue, side, reference)?;
        let whole = expand(&registered, reference, None)?;
        self.object(&whole, table, path)
    }

    fn entries<'v>(&mut self, value: &'v Value, max: usize, path: &Path<'_>) -> Option<&'v Map<String, Value>> {
        match value {
            Value::Object(map) if map.len() > max => {
                self.problems.add(path, format!("has {} entries; at most {max} are allowed", map.len()));
                None
            }
            Value::Object(map) => Some(map),
            other => {
                let _: Option<Value> = self.wrong(path, "an object", other);
                None
            }
        }
    }

    fn open(&mut self, value: &Value, max_bytes: usize, path: &Path<'_>) -> Option<Value> {
        self.entries(value, usize::MAX, path)?;
        let bytes = value.to_string().len();
        if bytes > max_bytes {
            return self.refuse(path, format!("is too large: {bytes} bytes as JSON, at most {max_bytes}"));
        }
        Some(value.clone())
    }

    fn integer(&mut self, value: &Value, min: i64, max: i64, path: &Path<'_>) -> Option<Value> {
        let Value::Number(number) = value else { return self.wrong(path, "a whole number", value) };
        if let Some(whole) = whole(number) {
            if (i128::from(min)..=i128::from(max)).contains(&whole) {
                return Some(Value::from(i64::try_from(whole).unwrap_or(max)));
            }
            return self.refuse(path, range(min, max, whole));
        }
        let float = number.as_f64().unwrap_or(f64::INFINITY);
        if float.fract() != 0.0 {
            return self.refuse(path, format!("must be a whole number, not {float}"));
        }
        self.refuse(
            path,
            format!(
                "{float:e} is too large; it must be at most {max} (integers of more than 64 bits arrive as rounded floating-point numbers)"
            ),
        )
    }

    fn duration(&mut self, value: &Value, min_ms: u64, max_ms: u64, path: &Path<'_>) -> Option<Value> {
        let ms = match value {
            Value::String(text) => match parse_duration(text) {
                Some(ms) => ms as f64,
                None => return self.refuse(path, format!("must be a time such as 10m, 1h30m, 20s or 250ms, not {}", quote(text))),
            },
            Value::Number(number) => (number.as_f64().unwrap_or(f64::INFINITY) * 1000.0).round(),
            other => return self.wrong(path, "a time such as \"10m\", or a number of seconds", other),
        };
        if !(min_ms as f64..=max_ms as f64).contains(&ms) {
            return self.refuse(path, format!("must be between {} and {}", duration_text(min_ms), duration_text(max_ms)));
        }
        Some(Value::from(ms as u64))
    }

    fn refuse(&mut self, path: &Path<'_>, message: String) -> Option<Value> {
        self.problems.add(path, message);
        None
    }

    fn wrong(&mut self, path: &Path<'_>, expected: &str, found: &Value) -> Option<Value> {
        self.refuse(path, format!("must be {expected}, not {}", describe(found)))
    }
}

fn find(catalogue: &dyn Catalogue, side: Side, reference: &str) -> Option<Registered> {
    match side {
        Side::Model => catalogue.model(reference),
        Side::Environment => catalogue.environment(reference),
    }
}

fn range(min: i64, max: i64, found: i128) -> String {
    if found < i128::from(min) { format!("must be at least {min}, not {found}") } else { format!("must be at most {max}, not {found}") }
}

/// The number as an exact integer; clients re-serialise some integers as 100.0.
fn whole(number: &Number) -> Option<i128> {
    if let Some(whole) = number.as_i64() {
        return Some(i128::from(whole));
    }
    if let Some(whole) = number.as_u64() {
        return Some(i128::from(whole));
    }
    let float = number.as_f64()?;
    (float.fract() == 0.0 && float.abs() < EXACT).then_some(float as i128)
}

/// What a value is, for a message.
#[must_use]
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the text {}", quote(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

fn article(name: &str) -> String {
    let name = name.to_lowercase();
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    if matches!(name.as_str(), "request") { "the request".to_owned() } else { format!("{article} {name}") }
}

/// A registered definition in request form, under the fields that the request gives itself. Its stored form is that of a
/// request or of a checked definition.
fn expand(registered: &Registered, reference: &str, overrides: Option<&Params>) -> Option<Value> {
    let mut whole = registered.definition.as_object()?.clone();
    if let Some(ms) = whole.remove("startupTimeoutMs").and_then(|ms| ms.as_u64()) {
        whole.insert("startupTimeout".to_owned(), Value::from(duration_text(ms)));
    }
    let name = reference.split(':').next().unwrap_or(reference);
    whole.insert("id".to_owned(), Value::from(name));
    for (key, value) in overrides.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let merged = match (key.as_str(), whole.get(key), value) {
            ("params" | "env" | "secretEnv" | "resources", Some(Value::Object(under)), Value::Object(over)) => {
                let mut merged = under.clone();
                merged.extend(over.iter().map(|(key, value)| (key.clone(), value.clone())));
                Value::Object(merged)
            }
            _ => value.clone(),
        };
        whole.insert(key.clone(), merged);
    }
    whole.insert("ref".to_owned(), Value::from(reference));
    Some(Value::Object(whole))
}

//! The JSON Schema and the reference page of a request, made from the tables of its fields.

use serde_json::{Map, Value, json};

use super::fields::{REQUEST, TABLES};
use super::read::RESERVED_ARGUMENTS;
use super::table::{Field, Kind, Presence, Table};
use super::text::{QUANTITY_PATTERN, Text, duration_text};

/// JSON Schema (2020-12) of an evaluation request. It says what it can; rules that involve several fields are the server's.
#[must_use]
pub fn schema() -> Value {
    let definitions: Map<String, Value> =
        TABLES.iter().filter(|table| !std::ptr::eq(**table, &REQUEST)).map(|table| (table.name.to_owned(), object_schema(table))).collect();
    let mut schema = object_schema(&REQUEST);
    if let Some(map) = schema.as_object_mut() {
        map.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
        map.insert("title".to_owned(), json!("RLMesh evaluation request"));
        map.insert("$defs".to_owned(), Value::Object(definitions));
    }
    schema
}

fn object_schema(table: &Table) -> Value {
    let properties: Map<String, Value> = table.fields.iter().map(|field| (field.name.to_owned(), field_schema(field))).collect();
    let required: Vec<&str> = table.fields.iter().filter(|field| field.presence == Presence::Required).map(|field| field.name).collect();
    let mut schema = json!({"type": "object", "description": table.about, "properties": properties, "additionalProperties": false});
    if let Some(map) = schema.as_object_mut().filter(|_| !required.is_empty()) {
        map.insert("required".to_owned(), json!(required));
    }
    schema
}

fn field_schema(field: &Field) -> Value {
    let kind = kind_schema(&field.kind);
    let mut schema = match field.presence {
        Presence::Required => kind,
        Presence::Optional | Presence::Default(_) => json!({"anyOf": [kind, {"type": "null"}]}),
    };
    if let Some(map) = schema.as_object_mut() {
        map.insert("description".to_owned(), json!(field.about));
        if let Presence::Default(text) = field.presence {
            map.insert("default".to_owned(), serde_json::from_str(text).unwrap_or(Value::Null));
        }
    }
    schema
}

fn text_schema(text: Text) -> Value {
    let mut schema = json!({"type": "string", "maxLength": text.max()});
    if let Some(map) = schema.as_object_mut() {
        if let Some(pattern) = text.pattern() {
            map.insert("pattern".to_owned(), json!(pattern));
        } else if matches!(text, Text::Line(_)) {
            map.insert("minLength".to_owned(), json!(1));
        }
    }
    schema
}

fn kind_schema(kind: &Kind) -> Value {
    match kind {
        Kind::Text(text) => text_schema(*text),
        Kind::Choice(choices) => json!({"enum": choices}),
        Kind::Integer { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
        Kind::Number { min, max } => json!({"type": "number", "minimum": min, "maximum": max}),
        Kind::Boolean => json!({"type": "boolean"}),
        Kind::Duration { min_ms, max_ms } => json!({"anyOf": [
            {"type": "string", "pattern": "^(?=.)([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$"},
            {"type": "number", "minimum": *min_ms as f64 / 1000.0, "maximum": *max_ms as f64 / 1000.0},
        ]}),
        Kind::Quantity => json!({"anyOf": [{"type": "string", "pattern": QUANTITY_PATTERN}, {"type": "number", "exclusiveMinimum": 0}]}),
        Kind::Object(table) => reference(table),
        Kind::Definition(_, table) => json!({"anyOf": [text_schema(Text::Reference), reference(table)]}),
        Kind::List { of, min, max } => json!({"type": "array", "items": kind_schema(of), "minItems": min, "maxItems": max}),
        Kind::Map { key, of, max } => {
            json!({"type": "object", "propertyNames": text_schema(*key), "additionalProperties": kind_schema(of), "maxProperties": max})
        }
        Kind::Open { .. } => json!({"type": "object"}),
        Kind::Arguments => json!({"type": "object", "propertyNames": {"not": {"enum": RESERVED_ARGUMENTS}}}),
    }
}

fn reference(table: &Table) -> Value {
    json!({"$ref": format!("#/$defs/{}", table.name)})
}

/// The reference page.
#[must_use]
pub fn reference_markdown() -> String {
    let mut page = String::from(
        "# Request reference\n\n\
         <!-- Generated from crates/core/src/request/fields.rs. Regenerate: make generate -->\n\n\
         Every field of an evaluation request: the file that `rlmesh eval submit` takes, and the body of `POST /v1/evaluations` and\n\
         `POST /v1/evaluation-previews`. The same as [JSON Schema](request.schema.json).\n\n\
         - A field that is not listed is refused, with its path; all problems are reported at once.\n\
         - `null` means the same as leaving a field out.\n\
         - A time is text such as `10m`, `1h30m`, `20s` or `250ms` (units d, h, m, s, ms), or a number of seconds.\n\
         - A quantity is one of Kubernetes: `500m`, `2`, `4Gi`.\n\
         - Construction arguments are any JSON but ",
    );
    page.push_str(&RESERVED_ARGUMENTS.map(|name| format!("`{name}`")).join(", "));
    page.push_str(
        ", which the platform sets. A task's environment is constructed\n  with the definition's `params`, under those of the catalogue entry that `taskId` selects, under the task's `params`.\n",
    );
    for table in TABLES {
        page.push_str(&format!(
            "\n## {}\n\n{}\n\n| field | value | without it | meaning |\n| --- | --- | --- | --- |\n",
            table.name, table.about
        ));
        for field in table.fields {
            let default = match field.presence {
                Presence::Required => "**required**".to_owned(),
                Presence::Optional => "none".to_owned(),
                Presence::Default(text) => format!("`{text}`"),
            };
            page.push_str(&format!("| `{}` | {} | {default} | {} |\n", field.name, cell(&kind_words(&field.kind)), cell(field.about)));
        }
    }
    page
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

fn link(table: &Table) -> String {
    format!("[{}](#{})", table.name, table.name.to_lowercase())
}

fn kind_words(kind: &Kind) -> String {
    match kind {
        Kind::Text(text @ (Text::Free(_) | Text::Line(_))) => format!("{}, at most {} characters", text.words(), text.max()),
        Kind::Text(text) => text.words().to_owned(),
        Kind::Choice(choices) => choices.iter().map(|choice| format!("`{choice}`")).collect::<Vec<_>>().join(" or "),
        Kind::Integer { min, max } => format!("whole number, {min} to {max}"),
        Kind::Number { min, max } if *max > 1e200 || *min < -1e200 => "number".to_owned(),
        Kind::Number { min, max } => format!("number, {min} to {max}"),
        Kind::Boolean => "true or false".to_owned(),
        Kind::Duration { min_ms, max_ms } => format!("time, {} to {}", duration_text(*min_ms), duration_text(*max_ms)),
        Kind::Quantity => "quantity".to_owned(),
        Kind::Object(table) => link(table),
        Kind::Definition(side, table) => format!("{} or the name of a registered {}", link(table), side.noun()),
        Kind::List { of, min, max } => {
            let least = if *min > 0 { format!("at least {min}, ") } else { String::new() };
            format!("list of {}; {least}at most {max}", kind_words(of))
        }
        Kind::Map { of, max, .. } => format!("object of names to {}; at most {max}", kind_words(of)),
        Kind::Open { max_bytes } => format!("object, at most {max_bytes} bytes"),
        Kind::Arguments => "construction arguments".to_owned(),
    }
}

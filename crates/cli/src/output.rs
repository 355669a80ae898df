//! Data on standard output, everything else on standard error.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use comfy_table::{ContentArrangement, Table, presets};
use rlm_core::error::Code;
use serde_json::{Value, json};

use crate::error::CliError;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Table,
    Json,
    Yaml,
    /// Ids or names alone, one a line.
    Name,
}

/// Where and how a command's data goes.
pub struct Output {
    pub format: Format,
}

/// A column: its heading and how a value of the item is shown.
pub type Column = (&'static str, fn(&Value) -> String);

impl Output {
    pub const fn new(format: Format) -> Self {
        Self { format }
    }

    /// Prints items as rows of a table, or in the chosen form. `name` is the field that `-o name` prints.
    pub fn list(&self, items: &[Value], columns: &[Column], name: &str) -> Result<(), CliError> {
        match self.format {
            Format::Table => print(&table(
                columns.iter().map(|(heading, _)| (*heading).to_owned()),
                items.iter().map(|item| columns.iter().map(|(_, show)| show(item)).collect()),
            )),
            Format::Json => self.document(&Value::Array(items.to_vec())),
            Format::Yaml => self.document(&Value::Array(items.to_vec())),
            Format::Name => items.iter().try_for_each(|item| print(&format!("{}\n", text(&item[name])))),
        }
    }

    /// Prints one item as `field  value` lines, or in the chosen form.
    pub fn item(&self, item: &Value, fields: &[Column], name: &str) -> Result<(), CliError> {
        match self.format {
            Format::Table => {
                let width = fields.iter().map(|(heading, _)| heading.len()).max().unwrap_or(0);
                let lines: String = fields
                    .iter()
                    .map(|(heading, show)| (heading, show(item)))
                    .filter(|(_, shown)| !shown.is_empty())
                    .map(|(heading, shown)| format!("{heading:width$}  {shown}\n"))
                    .collect();
                print(&lines)
            }
            Format::Name => print(&format!("{}\n", text(&item[name]))),
            Format::Json | Format::Yaml => self.document(item),
        }
    }

    fn document(&self, value: &Value) -> Result<(), CliError> {
        match self.format {
            Format::Yaml => {
                let text = serde_yaml_ng::to_string(value)
                    .map_err(|error| CliError::other(format!("the answer can't be shown as YAML: {error}")))?;
                print(&text)
            }
            Format::Json | Format::Table | Format::Name => print(&format!("{value:#}\n")),
        }
    }

    /// Reports the error on standard error (as JSON with `-o json`) and gives its exit status.
    pub fn fail(&self, error: &CliError) -> ExitCode {
        if self.format == Format::Json {
            note(
                &json!({"error": {"code": error.code, "message": error.message, "details": error.details, "requestId": error.request_id}})
                    .to_string(),
            );
        } else {
            let many = error.details.len() > 1;
            // The message names the first of them, for those who show nothing else.
            if many && error.code == Code::InvalidRequest.as_str() {
                note(&format!("error: {} problems in the request:", error.details.len()));
            } else {
                note(&format!("error: {}", error.message));
            }
            if many {
                for problem in &error.details {
                    note(&format!("  {}: {}", problem.path, problem.message));
                }
            }
            if let Some(id) = error.request_id.as_ref().filter(|_| error.exit == 1) {
                note(&format!("  ({}, request {id})", error.code));
            }
        }
        ExitCode::from(error.exit)
    }
}

/// A table without lines between rows.
pub fn table(headings: impl Iterator<Item = String>, rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(if std::io::stdout().is_terminal() {
        ContentArrangement::Dynamic
    } else {
        ContentArrangement::Disabled
    });
    table.set_header(headings);
    for row in rows {
        table.add_row(row);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Writes data to standard output; a closed pipe ends the command quietly.
pub fn print(text: &str) -> Result<(), CliError> {
    print_bytes(text.as_bytes())
}

/// As [`print`], for data that need not be text.
pub fn print_bytes(data: &[u8]) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(data).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        written => written.map_err(|error| CliError { exit: 1, ..CliError::other(format!("standard output: {error}")) }),
    }
}

/// Writes a line to standard error.
pub fn note(text: &str) {
    // Standard error may be closed; there is nowhere left to say so.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A JSON value as plain text.
pub fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(", "),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

/// How long ago a time of the API was: `3 min ago`.
pub fn ago(value: &Value) -> String {
    let Some(at) = value.as_str().and_then(|text| chrono::DateTime::parse_from_rfc3339(text).ok()) else {
        return String::new();
    };
    let seconds = (chrono::Utc::now() - at.to_utc()).num_seconds().max(0);
    match seconds {
        0..=59 => format!("{seconds} s ago"),
        60..=3599 => format!("{} min ago", seconds / 60),
        3600..=86_399 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

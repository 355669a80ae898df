//! One file per noun. Each command reads or changes one thing over REST and shows the answer.

pub mod auth;
pub mod clusters;
pub mod definitions;
pub mod eval;
pub mod keys;
pub mod org;
pub mod profile;
pub mod registry;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use clap::CommandFactory;
use serde_json::Value;

use crate::client::Client;
use crate::error::CliError;

/// Commands that only the SDK can do.
const SDK_COMMANDS: [&str; 3] = ["check", "check-image", "describe"];

pub fn completion(shell: clap_complete::Shell) -> Result<ExitCode, CliError> {
    // Under the name that it was called by: `rlmesh` or `rlmeshctl`.
    let called =
        std::env::args_os().next().and_then(|path| Some(std::path::PathBuf::from(path).file_name()?.to_string_lossy().into_owned()));
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut crate::args::Cli::command(), called.unwrap_or_else(|| "rlmesh".to_owned()), &mut script);
    crate::output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Hands `check`, `check-image` and `describe` to `python -m rlmesh`.
pub fn sdk(arguments: &[OsString]) -> Result<ExitCode, CliError> {
    let name = arguments.first().map(|argument| argument.to_string_lossy().into_owned()).unwrap_or_default();
    if !SDK_COMMANDS.contains(&name.as_str()) {
        let near = nearest(&name).map(|near| format!("did you mean `rlmesh {near}`? ")).unwrap_or_default();
        return Err(CliError::usage(format!("there is no command `{name}`; {near}`rlmesh --help` lists them")));
    }
    let python = std::env::var_os("RLMESH_PYTHON").unwrap_or_else(|| OsString::from("python3"));
    let error = std::process::Command::new(&python).arg("-m").arg("rlmesh").args(arguments).exec();
    Err(CliError::other(format!(
        "`rlmesh {name}` needs the SDK: {} could not be started ({error}); install it with `pip install rlmesh` or set RLMESH_PYTHON",
        python.to_string_lossy()
    )))
}

fn nearest(name: &str) -> Option<String> {
    let start: String = name.chars().take(2).collect();
    crate::args::Cli::command()
        .get_subcommands()
        .map(|command| command.get_name().to_owned())
        .filter(|known| {
            known.len() >= 2 && name.len() >= 2 && (known.starts_with(&start) || name.trim_end_matches('s') == known.trim_end_matches('s'))
        })
        .min_by_key(|known| known.len().abs_diff(name.len()))
}

/// All items of a list, at most `limit`.
pub async fn items(client: &Client, path: &str, query: &[(&str, String)], limit: usize) -> Result<Vec<Value>, CliError> {
    let mut items = Vec::new();
    let mut cursor: Option<String> = None;
    while items.len() < limit {
        let mut parts: Vec<String> = query.iter().map(|(key, value)| format!("{key}={}", encode(value))).collect();
        parts.extend(cursor.as_ref().map(|cursor| format!("cursor={}", encode(cursor))));
        let separator = if parts.is_empty() { "" } else { "?" };
        let page = client.get(&format!("{path}{separator}{}", parts.join("&"))).await?;
        items.extend(page["items"].as_array().into_iter().flatten().cloned());
        cursor = page["nextCursor"].as_str().map(str::to_owned);
        if cursor.is_none() {
            break;
        }
    }
    items.truncate(limit);
    Ok(items)
}

/// Percent-encodes everything but unreserved characters.
pub fn encode(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

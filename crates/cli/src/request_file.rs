//! Reading a request file: JSON or YAML, with paths made absolute against the file's folder.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::CliError;

/// Largest request that the server takes.
pub const REQUEST_LIMIT: u64 = 32 * 1024 * 1024;
/// Largest exported evaluation that the server takes back.
pub const IMPORT_LIMIT: u64 = 256 * 1024 * 1024;

/// Reads and parses `file` (`-`: standard input) of at most `limit` bytes.
pub fn read(file: &Path, limit: u64) -> Result<Value, CliError> {
    let (name, bytes, folder) = if file.as_os_str() == "-" {
        let mut bytes = Vec::new();
        std::io::stdin()
            .take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| CliError::usage(format!("standard input can't be read: {error}")))?;
        ("standard input".to_owned(), bytes, std::env::current_dir())
    } else {
        let name = file.display().to_string();
        let unreadable = |error: std::io::Error| CliError::usage(format!("{name} can't be read: {error}"));
        let mut bytes = Vec::new();
        std::fs::File::open(file).map_err(unreadable)?.take(limit + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        (name.clone(), bytes, std::path::absolute(file).map(|path| path.parent().map_or_else(PathBuf::new, Path::to_path_buf)))
    };
    let folder = folder.map_err(|error| CliError::usage(format!("the current folder can't be read: {error}")))?;
    let yaml = file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
    let mut value = parse(&name, &bytes, yaml, limit)?;
    make_absolute(&mut value, &folder);
    Ok(value)
}

fn parse(name: &str, bytes: &[u8], yaml: bool, limit: u64) -> Result<Value, CliError> {
    if bytes.len() as u64 > limit {
        return Err(CliError::usage(format!("{name} is larger than {} MiB, the most that is taken", limit >> 20)));
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(CliError::usage(format!("{name} is empty; expected a request in JSON or YAML")));
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|error| CliError::usage(format!("{name} is not UTF-8: byte {} is wrong", error.valid_up_to())))?;
    if yaml {
        serde_yaml_ng::from_str(text).map_err(|error| CliError::usage(format!("{name} is not valid YAML: {error}")))
    } else {
        serde_json::from_str(text).map_err(|error| {
            let line: String = text.lines().nth(error.line().saturating_sub(1)).unwrap_or_default().trim().chars().take(200).collect();
            CliError::usage(format!("{name} is not valid JSON: {error}: {line}"))
        })
    }
}

/// Makes `pythonPath`, a `python` with a slash and relative `file://` checkpoints of definitions absolute.
fn make_absolute(request: &mut Value, folder: &Path) {
    for list in ["models", "environments"] {
        let Some(definitions) = request.get_mut(list).and_then(Value::as_array_mut) else { continue };
        for definition in definitions {
            definition_paths(definition, folder);
        }
    }
}

/// The same for one definition.
pub fn definition_paths(definition: &mut Value, folder: &Path) {
    if let Some(path) = definition.get_mut("pythonPath") {
        absolute(path, folder);
    }
    if let Some(python) = definition.get_mut("python").filter(|python| python.as_str().is_some_and(|text| text.contains('/'))) {
        absolute(python, folder);
    }
    let mut lists: Vec<&mut Value> = Vec::new();
    if let Some(object) = definition.as_object_mut() {
        for (key, value) in object.iter_mut() {
            match key.as_str() {
                "checkpoints" => lists.push(value),
                "checkpointSets" => lists.extend(value.as_object_mut().into_iter().flat_map(|sets| sets.values_mut())),
                _ => {}
            }
        }
    }
    for checkpoint in lists.into_iter().filter_map(Value::as_array_mut).flatten() {
        let Some(uri) = checkpoint.get_mut("uri") else { continue };
        let relative = uri
            .as_str()
            .and_then(|text| text.strip_prefix("file://").or_else(|| text.strip_prefix("file:")))
            .filter(|path| !path.starts_with('/'))
            .map(str::to_owned);
        if let Some(relative) = relative {
            *uri = Value::String(format!("file://{}", normal(&folder.join(relative)).display()));
        }
    }
}

fn absolute(value: &mut Value, folder: &Path) {
    if let Some(text) = value.as_str() {
        *value = Value::String(normal(&folder.join(text)).display().to_string());
    }
}

/// The path without `.` and `..` components, by its text alone.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            std::path::Component::CurDir => {}
            std::path::Component::ParentDir => {
                normal.pop();
            }
            other => normal.push(other),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn relative_paths_follow_the_file() {
        let mut request = json!({"models": [{"pythonPath": "../code", "python": "python3", "checkpoints": [{"uri": "file:w.npz"}, {"uri": "https://x/y"}]}],
            "environments": [{"pythonPath": "/abs"}], "other": {"pythonPath": "x"}});
        make_absolute(&mut request, Path::new("/data/requests"));
        assert_eq!(request["models"][0]["pythonPath"], "/data/code");
        assert_eq!(request["models"][0]["python"], "python3");
        assert_eq!(request["models"][0]["checkpoints"][0]["uri"], "file:///data/requests/w.npz");
        assert_eq!(request["models"][0]["checkpoints"][1]["uri"], "https://x/y");
        assert_eq!(request["environments"][0]["pythonPath"], "/abs");
        assert_eq!(request["other"]["pythonPath"], "x");
    }

    #[test]
    fn a_json_error_shows_its_line() {
        let error = parse("request.json", b"{\"a\": 1,\n  \"b\": oops\n}", false, REQUEST_LIMIT).expect_err("refused");
        assert!(error.message.contains("line 2") && error.message.ends_with(": \"b\": oops"), "{}", error.message);
    }

    #[test]
    fn empty_foreign_and_broken_files_are_named() {
        for (bytes, part) in [(&b" \n"[..], "is empty"), (b"\xff\xfe{", "not UTF-8"), (b"{\"a\":", "not valid JSON")] {
            let error = parse("request.json", bytes, false, REQUEST_LIMIT).expect_err("refused");
            assert!(error.message.contains(part) && error.message.contains("request.json"), "{}", error.message);
            assert_eq!(error.exit, 2);
        }
    }
}

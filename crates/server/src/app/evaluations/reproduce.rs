//! How to run one row of an evaluation on a workstation. Pure, but for reading the row: it starts nothing, and names secrets
//! without knowing their values.

use std::collections::BTreeMap;

use rlm_core::error::{Code, Error};
use rlm_core::evaluation::{EnvironmentDefinition, EvaluationSpec, ModelDefinition, Params, Provenance, Task};
use rlm_core::rows::Row;
use serde::Serialize;
use serde_json::{Value, json};

use super::find;
use super::read::one_row;
use crate::app::access::Caller;
use crate::state::AppState;

/// Addresses with free ports, as the command's own shell variables: what listens at a fixed one may be somebody else's.
const MODEL_ADDRESS: &str = "\"$MODEL\"";
const ENV_ADDRESS: &str = "\"$ENVIRONMENT\"";

/// What runs the row again.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reproduction {
    pub row: u64,
    pub model: String,
    pub env: String,
    pub task_id: String,
    pub seed: u64,
    pub trial_index: u64,
    pub execution_horizon: u32,
    pub prefetch_lead: u32,
    /// Bash: starts model and environment, runs the episode with the SDK (Python package `rlmesh`), prints its result.
    pub command: String,
    /// Variables that the command needs and whose values are secret; set them before.
    pub secret_env: BTreeMap<String, String>,
    /// The row as an evaluation of its own, for `rlmesh eval submit`.
    #[schema(value_type = Object)]
    pub request: Value,
    /// What may differ from the run that brought the row's outcome.
    pub notes: Vec<String>,
}

pub async fn reproduction(state: &AppState, caller: &Caller, id: &str, number: u64) -> Result<Reproduction, Error> {
    let head = find(state, caller, id).await?;
    let item = one_row(state, &head, number).await?;
    let spec: EvaluationSpec =
        state.store.spec_as(head.id).await?.ok_or_else(|| Error::new(Code::NotFound, format!("the evaluation {} was deleted", head.id)))?;
    let provenance = match &item.outcome {
        Some(outcome) => state.store.run(outcome.run).await?.and_then(|run| run.head.provenance),
        None => None,
    };
    describe(&spec, item.row, provenance.as_ref()).ok_or_else(|| {
        Error::new(Code::Conflict, format!("row {number} of {} can't be run: its model or environment is known by name only", head.id))
    })
}

fn describe(spec: &EvaluationSpec, row: Row, provenance: Option<&Provenance>) -> Option<Reproduction> {
    let task = spec.tasks.get(row.task as usize)?;
    let mut model = spec.models.get(row.model as usize)?.clone();
    let mut environment = spec.environments.iter().find(|environment| environment.id == task.env)?.clone();
    let mut notes = Vec::new();
    if let Some(provenance) = provenance {
        pin(&mut model.image, provenance.model_image_digest.as_deref());
        pin(&mut environment.image, provenance.environment_image_digest.as_deref());
        if let Some(edition) = &provenance.workflow_edition {
            notes.push(format!("the run used the workflow edition {edition}"));
        }
        for (who, version) in [("model", &provenance.model_sdk_version), ("environment", &provenance.environment_sdk_version)] {
            if let Some(version) = version {
                notes.push(format!("the {who} ran with rlmesh {version}"));
            }
        }
    }
    let mut model_params = model.params.clone();
    for checkpoint in &model.checkpoints {
        let path = checkpoint.uri.strip_prefix("file://").unwrap_or(&checkpoint.uri);
        model_params.insert(checkpoint.param.clone(), json!(path));
        if !checkpoint.uri.starts_with("file://") {
            notes.push(format!("fetch {} yourself and put its path in place of it: `{}` expects a file", checkpoint.uri, checkpoint.param));
        }
    }
    if model.prefetch_lead > 0 {
        notes.push("prefetchLead is not reproduced by this command, only by the request: results with a lead are not comparable with those without".to_owned());
    }
    let own_python = |python: &Option<String>, image: &Option<String>| python.is_none() && image.is_none();
    if own_python(&model.python, &model.image) || own_python(&environment.python, &environment.image) {
        notes.push(
            "the cell used the interpreter that it was started with: put it in place of python3 if that one lacks the SDK".to_owned(),
        );
    }
    let serve_model = serve(Side::Model(&model), &model_params)?;
    let serve_env = serve(Side::Environment(&environment), &task.params)?;
    let secret_env = model.secret_env.iter().chain(&environment.secret_env).map(|(name, from)| (name.clone(), from.clone())).collect();
    let mut arguments = vec![
        format!("seeds=[{}]", row.seed),
        format!("execution_horizon={}", model.execution_horizon),
        format!("trial_index_base={}", row.trial_index),
    ];
    if let Some(steps) = task.max_episode_steps.into_iter().chain(spec.limits.max_episode_steps).min() {
        arguments.push(format!("max_episode_steps={steps}"));
    }
    if let Some(seconds) = spec.limits.max_episode_seconds {
        arguments.push(format!("max_episode_seconds={seconds}"));
    }
    if let Some(instruction) = &task.instruction {
        arguments.push(format!("instruction={}", python_text(instruction)));
    }
    let driver = format!(
        "import sys, rlmesh; print(rlmesh.run(rlmesh.RemoteModel(sys.argv[1]), rlmesh.RemoteEnv(sys.argv[2]), {}))",
        arguments.join(", ")
    );
    // Whichever interpreter has the SDK for certain.
    let python = shell_text(model.python.as_deref().or(environment.python.as_deref()).unwrap_or("python3"));
    let free_port = "import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 0)); print(s.getsockname()[1])";
    let mut lines = vec![
        "set -e".to_owned(),
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT".to_owned(),
        format!("free() {{ {python} -c {}; }}", shell_text(free_port)),
        "MODEL=127.0.0.1:$(free) ENVIRONMENT=127.0.0.1:$(free)".to_owned(),
    ];
    for served in [&serve_model, &serve_env] {
        if let Some(command) = &served.command {
            lines.push(format!("{command} &"));
            lines.push(wait_for(&served.address));
        }
    }
    lines.push(format!("{python} -c {} {} {}", shell_text(&driver), serve_model.address, serve_env.address));
    Some(Reproduction {
        row: row.row,
        model: model.id.clone(),
        env: task.env.clone(),
        task_id: task.task_id.clone(),
        seed: row.seed,
        trial_index: row.trial_index,
        execution_horizon: model.execution_horizon,
        prefetch_lead: model.prefetch_lead,
        command: format!("bash -c {}", shell_text(&lines.join("\n"))),
        secret_env,
        request: one_row_request(spec, &model, &environment, task, row),
        notes,
    })
}

/// The tag's digest, as the run pulled it.
fn pin(image: &mut Option<String>, digest: Option<&str>) {
    if let (Some(name), Some(digest)) = (image.as_mut(), digest)
        && !name.contains('@')
    {
        // A colon after the last slash is a tag's; one before it is a port's.
        let from = name.rfind('/').map_or(0, |slash| slash + 1);
        let bare = name.get(from..).and_then(|last| last.find(':')).map_or(name.len(), |colon| from + colon);
        name.truncate(bare);
        name.push('@');
        name.push_str(digest);
    }
}

enum Side<'a> {
    Model(&'a ModelDefinition),
    Environment(&'a EnvironmentDefinition),
}

struct Served {
    /// None: it runs already.
    command: Option<String>,
    /// As a word of the command.
    address: String,
}

fn serve(side: Side<'_>, params: &Params) -> Option<Served> {
    let (image, entrypoint, python, python_path, address, env, secrets, port, flag) = match side {
        Side::Model(one) => {
            (&one.image, &one.entrypoint, &one.python, &one.python_path, &one.address, &one.env, &one.secret_env, MODEL_ADDRESS, "")
        }
        Side::Environment(one) => {
            (&one.image, &one.entrypoint, &one.python, &one.python_path, &one.address, &one.env, &one.secret_env, ENV_ADDRESS, "--env ")
        }
    };
    if let Some(address) = address {
        return Some(Served { command: None, address: shell_text(address) });
    }
    let params = Value::Object(params.clone()).to_string();
    let mut variables: Vec<(&str, String)> = env.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    variables.push(("RLMESH_MAKE_KWARGS", params));
    if let Some(entrypoint) = entrypoint {
        if let Some(path) = python_path {
            variables.push(("PYTHONPATH", path.clone()));
        }
        let variables = variables.iter().map(|(name, value)| format!("{name}={}", shell_text(value))).collect::<Vec<_>>().join(" ");
        let python = shell_text(python.as_deref().unwrap_or("python3"));
        return Some(Served {
            command: Some(format!("RLMESH_ADDRESS={port} {variables} {python} -m rlmesh.serve {flag}{}", shell_text(entrypoint))),
            address: port.to_owned(),
        });
    }
    let image = image.as_ref()?;
    variables.push(("RLMESH_ADDRESS", "0.0.0.0:50051".to_owned()));
    let mut options: Vec<String> = variables.iter().map(|(name, value)| format!("-e {}", shell_text(&format!("{name}={value}")))).collect();
    options.extend(secrets.keys().map(|name| format!("-e {}", shell_text(name))));
    Some(Served {
        command: Some(format!("docker run --rm -p {port}:50051 {} {}", options.join(" "), shell_text(image))),
        address: port.to_owned(),
    })
}

/// An open port means that the model or environment is constructed.
fn wait_for(address: &str) -> String {
    format!("address={address}; until (exec 3<>/dev/tcp/${{address/://}}) 2>/dev/null; do kill -0 $! || exit 1; sleep 0.2; done")
}

fn one_row_request(spec: &EvaluationSpec, model: &ModelDefinition, environment: &EnvironmentDefinition, task: &Task, row: Row) -> Value {
    let side = |value: Value| {
        // Request form: durations as text; what is null is left out.
        let mut fields = match value {
            Value::Object(fields) => fields,
            _ => Params::new(),
        };
        let timeout = fields.remove("startupTimeoutMs").and_then(|value| value.as_u64());
        if let Some(timeout) = timeout {
            fields.insert("startupTimeout".to_owned(), json!(rlm_core::request::text::duration_text(timeout)));
        }
        fields.retain(|_, value| !value.is_null());
        Value::Object(fields)
    };
    let mut one = json!({
        "env": task.env,
        "taskId": task.task_id,
        "params": task.params,
        "episodes": 1,
        "seeds": [row.seed],
        "trialIndexBase": row.trial_index,
        "metadata": task.metadata,
    });
    if let Some(steps) = task.max_episode_steps {
        one["maxEpisodeSteps"] = json!(steps);
    }
    if let Some(instruction) = &task.instruction {
        one["instruction"] = json!(instruction);
    }
    if let Some(rule) = &task.success {
        one["success"] = json!(rule);
    }
    let mut limits = json!({});
    if let Some(steps) = spec.limits.max_episode_steps {
        limits["maxEpisodeSteps"] = json!(steps);
    }
    if let Some(seconds) = spec.limits.max_episode_seconds {
        limits["maxEpisodeSeconds"] = json!(seconds);
    }
    json!({
        "name": format!("{} row {}", spec.name, row.row),
        "models": [side(json!(model))],
        "environments": [side(json!(environment))],
        "tasks": [one],
        "limits": limits,
    })
}

/// As one word for a POSIX shell.
fn shell_text(text: &str) -> String {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"@%+=:,./-_".contains(&byte));
    if plain { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// As a Python string literal: JSON's are valid ones, but for surrogate pairs, which it does not make here.
fn python_text(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(shell_text("a b'c"), r"'a b'\''c'");
        assert_eq!(shell_text("policies:Push"), "policies:Push");
        assert_eq!(shell_text(""), "''");
    }

    #[test]
    fn a_tag_gives_way_to_the_digest() {
        for (image, pinned) in
            [("reg:5000/a/b:v1", "reg:5000/a/b@sha256:1"), ("reg:5000/a/b", "reg:5000/a/b@sha256:1"), ("b@sha256:0", "b@sha256:0")]
        {
            let mut name = Some(image.to_owned());
            pin(&mut name, Some("sha256:1"));
            assert_eq!(name.as_deref(), Some(pinned));
        }
    }
}

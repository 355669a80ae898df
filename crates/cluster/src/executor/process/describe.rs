//! Describe requests: the SDK's describe in a process of its own, with a deadline. Keeps nothing.
//!
//! An environment is constructed to be described, so this can hang, crash or print; the document comes in a file of its own.

use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use rlm_api::cluster::v1;
use rlm_core::evaluation::{Definition, EnvironmentDefinition, ModelDefinition};
use rlm_core::failure::{Failure, FailureCode};
use tokio_util::sync::CancellationToken;

use super::child::{Child, Start};
use super::classify::{Ended, Exit, classify};
use super::logs::LogSink;
use super::{Context, launch};
use crate::executor::run::components::ComponentKind;

/// Longest that a describe may take, whatever the definition's start-up timeout.
const LONGEST: Duration = Duration::from_secs(600);
/// Messages of a session stay under 1 MiB.
const MAX_DOCUMENT: usize = 900 << 10;
const MAX_READ: u64 = 8 << 20;

pub(super) async fn describe(context: &Context, request: v1::Describe) -> v1::DescribeReply {
    let result = document(context, &request).await;
    let (document_json, failure) = match result {
        Ok(document) => (document, None),
        Err(failure) => (String::new(), Some(v1::Failure::from(&failure))),
    };
    v1::DescribeReply { request_id: request.request_id, document_json, failure }
}

async fn document(context: &Context, request: &v1::Describe) -> Result<String, Failure> {
    let definition = read(request)?;
    let (kind, id, timeout) = match &definition {
        Definition::Model(model) => (ComponentKind::Model, &model.id, model.startup_timeout_ms),
        Definition::Environment(environment) => (ComponentKind::Environment, &environment.id, environment.startup_timeout_ms),
    };
    let name = format!("{} '{id}'", kind.noun());
    let folder = context.state.join("describe");
    let unique = uuid::Uuid::new_v4().simple().to_string();
    let failed = |error: std::io::Error| Failure::new(FailureCode::AgentError, format!("{name} could not be described: {error}"));
    let work = folder.join(&unique);
    let output = work.join("describe.json");
    let launch = launch::describe(&definition, &context.cell, &output)?;
    std::fs::create_dir_all(&work).map_err(failed)?;
    let log = LogSink::create(work.join("describe.log"));
    let start = Start { launch: &launch, folder: &work, log, stdin: None };
    let result = match context.launcher.start(start).await {
        Ok(mut child) => run(&mut child, &output, &name, kind, Duration::from_millis(timeout).min(LONGEST)).await,
        Err(error) => Err(match launch.folder.as_deref().filter(|folder| !folder.is_dir()) {
            Some(folder) => Failure::new(
                FailureCode::InvalidEntrypoint,
                format!("{name}: its pythonPath {} is not a folder of this machine", folder.display()),
            ),
            None => failed(error),
        }),
    };
    if let Err(error) = std::fs::remove_dir_all(&work) {
        tracing::debug!(%error, "a describe's folder can't be deleted");
    }
    result
}

async fn run(child: &mut Child, output: &Path, name: &str, kind: ComponentKind, timeout: Duration) -> Result<String, Failure> {
    let Ok(ended) = tokio::time::timeout(timeout, child.ended()).await else {
        let hurry = CancellationToken::new();
        hurry.cancel();
        let log_lines = child.last_lines();
        child.stop(&hurry).await;
        child.finish().await;
        let message = format!("{name} did not describe itself within {} s", timeout.as_secs_f64());
        return Err(Failure { log_lines, ..Failure::new(kind.start_timeout(), message) });
    };
    let out_of_memory = child.out_of_memory();
    child.finish().await;
    let log_lines = child.last_lines();
    if ended != Ended::Code(0) {
        return Err(classify(Exit { component: name, kind, ended, ready: false, out_of_memory, log_lines: &log_lines }));
    }
    match document_in(output) {
        Some(document) if document.len() <= MAX_DOCUMENT => Ok(document),
        Some(document) => Err(Failure::new(
            FailureCode::Unsupported,
            format!("{name}: its describe document has {} bytes; at most {MAX_DOCUMENT} can be taken", document.len()),
        )),
        None => {
            let message = format!("{name} wrote no describe document; `python -m rlmesh describe` shows what it says");
            Err(Failure { log_lines, ..Failure::new(kind.start_failed(), message) })
        }
    }
}

/// The file's one JSON object, as the SDK wrote it.
fn document_in(path: &Path) -> Option<String> {
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(MAX_READ).read_to_string(&mut text).ok()?;
    let text = text.trim();
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).ok()?;
    Some(text.to_owned())
}

fn read(request: &v1::Describe) -> Result<Definition, Failure> {
    let unreadable = |error: serde_json::Error| Failure::new(FailureCode::Internal, format!("the definition can't be read: {error}"));
    // The document is a tagged definition, or a bare one whose kind the request names.
    if let Ok(definition) = serde_json::from_str::<Definition>(&request.definition_json) {
        return Ok(definition);
    }
    match request.kind.as_str() {
        "environment" => {
            serde_json::from_str::<EnvironmentDefinition>(&request.definition_json).map(Definition::Environment).map_err(unreadable)
        }
        _ => serde_json::from_str::<ModelDefinition>(&request.definition_json).map(Definition::Model).map_err(unreadable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_whole_object_is_a_document() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("d.json");
        assert_eq!(document_in(&path), None);
        std::fs::write(&path, "{\"schema_version\":1}\n").unwrap();
        assert_eq!(document_in(&path).as_deref(), Some("{\"schema_version\":1}"));
        for bad in ["[1]", "{broken", ""] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!(document_in(&path), None, "{bad}");
        }
    }
}

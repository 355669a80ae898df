//! Registered models and environments, and what is known of definitions: their describe documents, registered or from a
//! probe on a local cell.
//!
//! A version never changes; registering again makes the next one. Probing is best effort: without a local cell a definition
//! is taken as it stands.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::StreamExt as _;
use rlm_api::rest::Page;
use rlm_core::error::{Code, Error, Problem};
use rlm_core::evaluation::Definition;
use rlm_core::failure::FailureClass;
use rlm_core::ids::{ClusterId, OrganizationId};
use rlm_core::request::{self, Catalogue, Registered, text::Text};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::app::access::{Caller, Scope};
use crate::app::audit;
use crate::app::cells::Described;
use crate::state::AppState;
use crate::store::definitions::{DefinitionKind, DefinitionRow};

/// For all probes of one request. A probe imports the user's code, which may import a deep-learning framework; clients wait
/// 30 s for an answer.
const PROBE: Duration = Duration::from_secs(20);
const PROBES_AT_ONCE: usize = 4;
/// Largest describe document; the SDK's own limit.
const LARGEST_DESCRIBE: usize = 4 * 1024 * 1024;

/// A registered definition; `describe` and `versions` in the answer about one alone.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DefinitionDetail {
    pub name: String,
    pub version: u64,
    /// As it would stand in a request.
    #[schema(value_type = Object)]
    pub definition: Value,
    /// Whether its describe document is known.
    pub described: bool,
    pub created_at: DateTime<Utc>,
    pub created_by: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub describe: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub versions: Vec<DefinitionVersion>,
    /// What registering found worth a word.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DefinitionVersion {
    pub version: u64,
    pub described: bool,
    pub created_at: DateTime<Utc>,
    pub created_by: String,
}

impl DefinitionDetail {
    fn new(row: DefinitionRow) -> Self {
        Self {
            described: row.describe.is_some(),
            created_at: DateTime::from_timestamp_millis(row.created_at).unwrap_or_default(),
            name: row.name,
            version: row.version,
            definition: row.definition,
            created_by: row.created_by,
            describe: None,
            versions: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

fn entrypoint(definition: &Definition) -> Option<&str> {
    match definition {
        Definition::Model(one) => one.entrypoint.as_deref().filter(|_| one.address.is_none()),
        Definition::Environment(one) => one.entrypoint.as_deref().filter(|_| one.address.is_none()),
    }
}

/// What a definition runs as, without its name and arguments: what its describe document is a function of.
fn knowledge_key(definition: &Definition) -> Value {
    match definition {
        Definition::Model(one) => json!(["model", one.entrypoint, one.python, one.python_path, one.env]),
        Definition::Environment(one) => json!(["environment", one.entrypoint, one.python, one.python_path, one.env]),
    }
}

/// The connected local cell that describes definitions; the pinned cluster, if it is one.
async fn probing_cell(state: &AppState, organization: OrganizationId, pinned: Option<ClusterId>) -> Result<Option<ClusterId>, Error> {
    let cells = state.store.cluster_conditions(organization).await?;
    Ok(cells
        .into_iter()
        .find(|cell| cell.runs_processes && pinned.is_none_or(|pinned| pinned == cell.id) && state.cells.is_connected(cell.id))
        .map(|cell| cell.id))
}

/// Asks the cell anew each time: the files that the definition names may have changed since the last time, and nobody tells.
async fn probe(state: &AppState, cell: ClusterId, definition: &Definition, until: Instant) -> Result<Described, Error> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::new(Code::DeadlineExceeded, "describing the others took too long"));
    }
    state.cells.describe(cell, definition, left).await
}

/// Everything registered that a request mentions, and what local probes say of the definitions in it.
#[derive(Debug, Default)]
pub struct Registry {
    models: BTreeMap<String, Registered>,
    environments: BTreeMap<String, Registered>,
    described: Vec<(Value, Value)>,
    problems: Vec<Problem>,
    warnings: Vec<String>,
}

impl Catalogue for Registry {
    fn model(&self, name: &str) -> Option<Registered> {
        self.models.get(name).cloned()
    }

    fn environment(&self, name: &str) -> Option<Registered> {
        self.environments.get(name).cloned()
    }

    fn describe(&self, definition: &Definition) -> Option<Value> {
        let key = knowledge_key(definition);
        self.described.iter().find(|(known, _)| *known == key).map(|(_, document)| document.clone())
    }
}

impl Registry {
    pub async fn load(state: &AppState, caller: &Caller, request: &Value) -> Result<Self, Error> {
        let organization = caller.organization_id;
        let mut registry = Self::default();
        for (kind, names) in
            [(DefinitionKind::Model, mentioned(request, "models")), (DefinitionKind::Environment, environments_mentioned(request))]
        {
            let names: Vec<String> = names.into_iter().collect();
            let known = match kind {
                DefinitionKind::Model => &mut registry.models,
                DefinitionKind::Environment => &mut registry.environments,
            };
            // Versions ascend, so the last one of a name is what the name alone means.
            for row in state.store.definitions_named(organization, kind, &names).await? {
                let registered = Registered { definition: row.definition, describe: row.describe };
                known.insert(format!("{}:{}", row.name, row.version), registered.clone());
                known.insert(row.name, registered);
            }
        }
        let pinned = request.get("cluster").and_then(Value::as_str).and_then(|text| text.parse().ok());
        let mut to_probe: BTreeMap<String, (Definition, Vec<String>)> = BTreeMap::new();
        for (path, definition) in request::definitions(request, &registry).into_iter().filter(|(_, one)| entrypoint(one).is_some()) {
            to_probe.entry(knowledge_key(&definition).to_string()).or_insert((definition, Vec::new())).1.push(path);
        }
        if to_probe.is_empty() {
            return Ok(registry);
        }
        // A probe runs what the request names. Who may not submit, may not have that run.
        if !caller.scopes.contains(Scope::EvaluationsWrite) {
            registry.warnings.push("the classes were not tried, since this sign-in or key may not submit evaluations".to_owned());
            return Ok(registry);
        }
        let Some(cell) = probing_cell(state, organization, pinned).await? else { return Ok(registry) };
        let until = Instant::now() + PROBE;
        let answers: Vec<(Definition, Vec<String>, Result<Described, Error>)> = futures::stream::iter(to_probe.into_values())
            .map(|(definition, paths)| async move {
                let answer = probe(state, cell, &definition, until).await;
                (definition, paths, answer)
            })
            .buffered(PROBES_AT_ONCE)
            .collect()
            .await;
        for (definition, paths, answer) in answers {
            registry.note(&definition, &paths, answer);
        }
        Ok(registry)
    }

    fn note(&mut self, definition: &Definition, paths: &[String], answer: Result<Described, Error>) {
        let why = match answer {
            Ok(Described::Document(document)) => {
                self.described.push((knowledge_key(definition), document));
                return;
            }
            Ok(Described::Failed(failure)) => match failure.class {
                FailureClass::User | FailureClass::Model | FailureClass::Environment => {
                    self.problems.extend(paths.iter().map(|path| Problem::new(path, &failure.message)));
                    return;
                }
                FailureClass::Infrastructure | FailureClass::Platform => failure.message,
            },
            Err(error) => error.message,
        };
        self.warnings.extend(paths.iter().map(|path| format!("{path} could not be described before it runs: {why}")));
    }

    /// Definitions that a probe found not to work.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Names of what a list of definitions refers to, without versions.
fn mentioned(request: &Value, list: &str) -> BTreeSet<String> {
    let items = request.get(list).and_then(Value::as_array);
    items
        .into_iter()
        .flatten()
        .filter_map(|item| item.as_str().or_else(|| item.get("ref").and_then(Value::as_str)))
        .map(|reference| reference.split(':').next().unwrap_or(reference).to_owned())
        .collect()
}

fn environments_mentioned(request: &Value) -> BTreeSet<String> {
    let mut names = mentioned(request, "environments");
    for task in request.get("tasks").and_then(Value::as_array).into_iter().flatten() {
        if let Some(env) = task.get("env").and_then(Value::as_str) {
            names.insert(env.split(':').next().unwrap_or(env).to_owned());
        }
    }
    names
}

/// Registers a definition as the next version of `name`; registering what the newest version says already changes nothing.
pub async fn register(
    state: &AppState,
    caller: &Caller,
    kind: DefinitionKind,
    name: &str,
    definition: Value,
    describe: Option<Value>,
) -> Result<(DefinitionDetail, bool), Error> {
    let mut problems = Vec::new();
    if let Some(problem) = Text::Id.problem(name) {
        problems.push(Problem::new("name", problem));
    }
    if describe.as_ref().is_some_and(|document| document.to_string().len() > LARGEST_DESCRIBE) {
        problems.push(Problem::new("describe", "is larger than 4 MiB"));
    }
    let mut definition = definition;
    if let Some(fields) = definition.as_object_mut()
        && fields.get("id").is_none_or(Value::is_null)
    {
        fields.insert("id".to_owned(), json!(name));
    }
    let mut warnings = Vec::new();
    let mut describe = describe.filter(|document| !document.is_null());
    match check(kind, &definition, describe.clone()) {
        Err(found) => problems.extend(found.into_iter().map(|problem| {
            let path = if problem.path.is_empty() { "definition".to_owned() } else { format!("definition.{}", problem.path) };
            Problem::new(path, problem.message)
        })),
        Ok(checked) => {
            if describe.is_none()
                && problems.is_empty()
                && entrypoint(&checked).is_some()
                && let Some(cell) = probing_cell(state, caller.organization_id, None).await?
            {
                match probe(state, cell, &checked, Instant::now() + PROBE).await {
                    Ok(Described::Document(document)) => {
                        problems.extend(check(kind, &definition, Some(document.clone())).err().into_iter().flatten());
                        describe = Some(document);
                    }
                    Ok(Described::Failed(failure)) if failure.class == FailureClass::User => {
                        problems.push(Problem::new("definition.entrypoint", failure.message));
                    }
                    Ok(Described::Failed(failure)) => warnings.push(format!("it could not be described: {}", failure.message)),
                    Err(error) => warnings.push(format!("it could not be described: {}", error.message)),
                }
            }
        }
    }
    if !problems.is_empty() {
        return Err(Error::invalid(problems));
    }
    let newest = state.store.definition(caller.organization_id, kind, name, None).await?;
    if let Some(newest) = newest.filter(|newest| newest.definition == definition && (describe.is_none() || newest.describe == describe)) {
        let mut detail = DefinitionDetail::new(newest);
        detail.warnings = warnings;
        return Ok((detail, false));
    }
    let now_ms = state.clock.now_ms();
    let mut row = DefinitionRow {
        name: name.to_owned(),
        version: 0,
        definition,
        describe,
        created_at: now_ms,
        created_by: caller.user_id.to_string(),
    };
    let mut write = state.store.write().await?;
    row.version = match write.insert_definition(caller.organization_id, kind, &row).await {
        Ok(version) => version,
        Err(error) if error.is_unique_violation() => {
            return Err(Error::new(Code::Conflict, format!("another version of {name} is being registered at this moment; send it again")));
        }
        Err(error) => return Err(error.into()),
    };
    let subject = format!("{name}:{}", row.version);
    audit::record(
        &mut write,
        now_ms,
        &caller.actor(),
        &format!("{}.register", kind.as_str()),
        &subject,
        json!({"described": row.describe.is_some()}),
    )
    .await?;
    write.commit().await?;
    let mut detail = DefinitionDetail::new(row);
    detail.warnings = warnings;
    Ok((detail, true))
}

fn check(kind: DefinitionKind, definition: &Value, describe: Option<Value>) -> Result<Definition, Vec<Problem>> {
    match kind {
        DefinitionKind::Model => request::check_model(definition, describe).map(Definition::Model),
        DefinitionKind::Environment => request::check_environment(definition, describe).map(Definition::Environment),
    }
}

/// The newest version of each name, in order of name.
pub async fn list(
    state: &AppState,
    caller: &Caller,
    kind: DefinitionKind,
    q: &str,
    after: &str,
    limit: u32,
) -> Result<Page<DefinitionDetail>, Error> {
    let mut rows = state.store.definitions(caller.organization_id, kind, q, after, limit + 1).await?;
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next_cursor = rows.last().filter(|_| more).map(|row| row.name.clone());
    Ok(Page { items: rows.into_iter().map(DefinitionDetail::new).collect(), next_cursor })
}

/// One version (None: the newest) with its describe document, and which versions there are.
pub async fn get(
    state: &AppState,
    caller: &Caller,
    kind: DefinitionKind,
    name: &str,
    version: Option<u64>,
) -> Result<DefinitionDetail, Error> {
    let row = state.store.definition(caller.organization_id, kind, name, version).await?.ok_or_else(|| missing(kind, name, version))?;
    let versions = state.store.definition_versions(caller.organization_id, kind, name).await?;
    let describe = row.describe.clone();
    let mut detail = DefinitionDetail::new(row);
    detail.describe = describe;
    detail.versions = versions
        .into_iter()
        .map(|row| DefinitionVersion {
            version: row.version,
            described: row.describe.is_some(),
            created_at: DateTime::from_timestamp_millis(row.created_at).unwrap_or_default(),
            created_by: row.created_by,
        })
        .collect();
    Ok(detail)
}

fn missing(kind: DefinitionKind, name: &str, version: Option<u64>) -> Error {
    let shown: String = name.chars().take(64).collect();
    let version = version.map_or_else(String::new, |version| format!(":{version}"));
    Error::new(Code::NotFound, format!("no {} {shown}{version} is registered in this organization", kind.as_str()))
}

/// Stores the describe document of a version that was registered without, or renews it.
pub async fn describe(
    state: &AppState,
    caller: &Caller,
    kind: DefinitionKind,
    name: &str,
    version: Option<u64>,
    document: Value,
) -> Result<DefinitionDetail, Error> {
    let row = state.store.definition(caller.organization_id, kind, name, version).await?.ok_or_else(|| missing(kind, name, version))?;
    if document.to_string().len() > LARGEST_DESCRIBE {
        return Err(Error::invalid(vec![Problem::new("", "the describe document is larger than 4 MiB")]));
    }
    if !document.is_object() {
        return Err(Error::invalid(vec![Problem::new("", "a describe document is a JSON object, as `rlmesh describe` prints it")]));
    }
    check(kind, &row.definition, Some(document.clone())).map_err(Error::invalid)?;
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    write.set_describe(caller.organization_id, kind, name, row.version, &document).await?;
    let subject = format!("{name}:{}", row.version);
    audit::record(&mut write, now_ms, &caller.actor(), &format!("{}.describe", kind.as_str()), &subject, json!({})).await?;
    write.commit().await?;
    get(state, caller, kind, name, Some(row.version)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mention_is_looked_up() {
        let request = json!({
            "models": ["a:2", {"ref": "b"}, {"id": "c", "entrypoint": "m:C"}],
            "environments": [{"ref": "d:1"}],
            "tasks": [{"env": "e:3"}, {"env": "d"}],
        });
        assert_eq!(mentioned(&request, "models"), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
        assert_eq!(environments_mentioned(&request), BTreeSet::from(["d".to_owned(), "e".to_owned()]));
        assert!(mentioned(&json!(7), "models").is_empty());
    }
}

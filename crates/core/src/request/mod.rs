//! Reading and checking an evaluation request: every problem at once, each with the path of its field.
//!
//! [`check`] is a function of the request and the catalogue alone: it reads no files and no clock, starts nothing and draws
//! nothing at random, so equal requests give equal specifications. The tables in [`fields`] are the one list of fields; the
//! reader, the JSON Schema and the reference page follow them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::Value;

use crate::error::Problem;
use crate::evaluation::{Definition, EnvironmentDefinition, EvaluationSpec, ModelDefinition, Pair, Recording, Task};
use crate::rows::MAX_ROWS;

mod definitions;
mod described;
pub mod fields;
mod plan;
mod problems;
mod raw;
mod read;
mod schema;
pub mod table;
mod tasks;
pub mod text;

pub use plan::{Estimates, Preview, Workload, lanes, plan_bindings, preview};
pub use schema::{reference_markdown, schema};

use definitions::Models;
use described::Described;
use problems::{Path, Problems};
use raw::{RawEnvironment, RawModel, RawRequest};
use read::Reader;
use tasks::Known;

/// A model or environment from the catalogue.
#[derive(Debug, Clone, PartialEq)]
pub struct Registered {
    /// In request form (one item of `models` or `environments`) or as stored in a checked specification.
    pub definition: Value,
    /// Its describe document, where one is known.
    pub describe: Option<Value>,
}

/// What is registered, and what is known about definitions.
pub trait Catalogue {
    /// The model registered as `name` (its newest version) or `name:version`.
    fn model(&self, name: &str) -> Option<Registered>;

    /// The environment registered as `name` (its newest version) or `name:version`.
    fn environment(&self, name: &str) -> Option<Registered>;

    /// The describe document of a definition that stands in a request, where it has been probed.
    fn describe(&self, definition: &Definition) -> Option<Value> {
        let _ = definition;
        None
    }
}

/// A catalogue with nothing in it.
#[derive(Debug, Clone, Copy, Default)]
pub struct EmptyCatalogue;

impl Catalogue for EmptyCatalogue {
    fn model(&self, _name: &str) -> Option<Registered> {
        None
    }

    fn environment(&self, _name: &str) -> Option<Registered> {
        None
    }
}

/// A request that can run.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    pub spec: EvaluationSpec,
    pub warnings: Vec<String>,
    pub client_token: Option<String>,
}

/// Checks a request.
///
/// # Errors
/// Everything that is wrong with it, at most 200 problems one by one.
pub fn check(request: &Value, catalogue: &dyn Catalogue) -> Result<Checked, Vec<Problem>> {
    let mut checker = Checker::new(catalogue);
    let checked = checker.request(request);
    let problems = std::mem::take(&mut checker.reader.problems);
    match checked {
        Some(checked) if problems.is_empty() => Ok(checked),
        _ => {
            let mut problems = problems.finish();
            if problems.is_empty() {
                problems.push(Problem::new("", "the request can't be read"));
            }
            Err(problems)
        }
    }
}

/// The definitions in a request that nothing is known about and that can be described on their own, whatever else is wrong
/// with it: those to probe before [`check`], with what the probes say in [`Catalogue::describe`]. Each with the path to blame.
#[must_use]
pub fn definitions(request: &Value, catalogue: &dyn Catalogue) -> Vec<(String, Definition)> {
    let mut checker = Checker::new(catalogue);
    let Some(raw) = checker.read(request) else { return Vec::new() };
    let mut found = Vec::new();
    for (index, model) in raw.models.iter().flatten().enumerate() {
        let mut fresh = Checker::new(catalogue);
        let whole = !checker.spoiled("models", index);
        let Some(raw) = model.as_ref().filter(|_| whole) else { continue };
        let known = raw.reference.as_deref().and_then(|reference| catalogue.model(reference));
        if known.is_none_or(|known| known.describe.is_none())
            && let Some(models) = fresh.model(index, raw)
            && fresh.reader.problems.is_empty()
        {
            let path = blamed("models", index, raw.reference.as_deref());
            found.extend(models.models.into_iter().next().map(|model| (path, Definition::Model(model))));
        }
    }
    for (index, environment) in raw.environments.iter().enumerate() {
        let mut fresh = Checker::new(catalogue);
        let whole = !checker.spoiled("environments", index);
        let Some(raw) = environment.as_ref().filter(|_| whole) else { continue };
        let known = raw.reference.as_deref().and_then(|reference| catalogue.environment(reference));
        if known.is_none_or(|known| known.describe.is_none())
            && let Some(known) = fresh.environment(index, raw)
            && fresh.reader.problems.is_empty()
        {
            found.push((blamed("environments", index, raw.reference.as_deref()), Definition::Environment(known.definition)));
        }
    }
    found
}

fn blamed(list: &str, index: usize, reference: Option<&str>) -> String {
    format!("{list}[{index}]{}", if reference.is_some() { "" } else { ".entrypoint" })
}

/// Checks tags on their own, as they stand in a request.
#[must_use]
pub fn tag_problems(tags: &BTreeMap<String, String>) -> Vec<Problem> {
    let catalogue = EmptyCatalogue;
    let mut checker = Checker::new(&catalogue);
    let tags = tags.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))).collect();
    checker.reader.tags_alone(&Value::Object(tags));
    std::mem::take(&mut checker.reader.problems).finish()
}

/// Checks one definition on its own, as it stands in `models`: for registering it. An `id` is not needed.
///
/// # Errors
/// Everything that is wrong with it.
pub fn check_model(definition: &Value, describe: Option<Value>) -> Result<ModelDefinition, Vec<Problem>> {
    let catalogue = EmptyCatalogue;
    let mut checker = Checker::new(&catalogue);
    let read = checker.reader.definition_alone(definition, table::Side::Model);
    let models = checker.parse::<RawModel>(read).and_then(|raw| {
        if raw.checkpoint_sets.is_some() {
            checker.reader.problems.add(&Path::Root.key("checkpointSets"), "belongs into a request: a registered model is one model");
        }
        let described = describe.map(Described::new);
        definitions::check_model(&raw, &Path::Root, described.as_ref(), &mut checker.reader.problems, &mut checker.warnings)
    });
    let problems = std::mem::take(&mut checker.reader.problems);
    match models.and_then(|models| models.models.into_iter().next()) {
        Some(model) if problems.is_empty() => Ok(model),
        _ => Err(problems.finish()),
    }
}

/// Checks one definition on its own, as it stands in `environments`: for registering it. An `id` is not needed.
///
/// # Errors
/// Everything that is wrong with it.
pub fn check_environment(definition: &Value, describe: Option<Value>) -> Result<EnvironmentDefinition, Vec<Problem>> {
    let catalogue = EmptyCatalogue;
    let mut checker = Checker::new(&catalogue);
    let read = checker.reader.definition_alone(definition, table::Side::Environment);
    let environment = checker.parse::<RawEnvironment>(read).and_then(|raw| {
        let described = describe.map(Described::new);
        definitions::check_environment(&raw, &Path::Root, described.as_ref(), &mut checker.reader.problems, &mut checker.warnings)
    });
    let problems = std::mem::take(&mut checker.reader.problems);
    match environment {
        Some(environment) if problems.is_empty() => Ok(environment),
        _ => Err(problems.finish()),
    }
}

struct Checker<'a> {
    reader: Reader<'a>,
    warnings: Vec<String>,
}

/// The models of a request by the id that it gives them.
struct ModelList {
    models: Vec<ModelDefinition>,
    editions: Vec<Option<Vec<String>>>,
    /// Request id -> ids after checkpoint sets.
    by_id: BTreeMap<String, Vec<String>>,
    /// Whether each item of the list could be read.
    whole: bool,
}

impl<'a> Checker<'a> {
    fn new(catalogue: &'a dyn Catalogue) -> Self {
        Self { reader: Reader { catalogue, problems: Problems::default() }, warnings: Vec::new() }
    }

    fn parse<T: serde::de::DeserializeOwned>(&mut self, value: Option<Value>) -> Option<T> {
        match serde_json::from_value(value?) {
            Ok(parsed) => Some(parsed),
            Err(error) => {
                self.reader.problems.add(&Path::Root, format!("can't be read: {error}"));
                None
            }
        }
    }

    fn read(&mut self, request: &Value) -> Option<RawRequest> {
        let read = self.reader.request(request);
        self.parse(read)
    }

    /// Whether something is wrong below this item of a list.
    fn spoiled(&self, list: &str, index: usize) -> bool {
        self.reader.problems.below(&Path::Root.key(list).index(index).to_string())
    }

    fn request(&mut self, request: &Value) -> Option<Checked> {
        let raw = self.read(request)?;
        let models = self.models(&raw);
        let (mut environments, environments_whole) = self.environments(&raw);
        let tasks = self.tasks(&raw, &mut environments, environments_whole);
        let pairs = self.pairs(&raw, &models, &environments, environments_whole);
        self.rows(&models.models, tasks.as_deref(), pairs.as_deref());
        self.editions(&models, &environments, pairs.as_deref());
        let definitions: Vec<EnvironmentDefinition> = environments.into_iter().map(|known| known.definition).collect();
        let tasks = tasks?;
        self.unused(&models.models, &definitions, &tasks, pairs.as_deref());
        let cluster = match raw.cluster {
            Some(id) => Some(id.parse().ok()?),
            None => None,
        };
        let name = raw.name.unwrap_or_else(|| default_name(&models.models, &tasks));
        let spec = EvaluationSpec {
            name,
            tags: raw.tags,
            cluster,
            models: models.models,
            environments: definitions,
            tasks,
            limits: raw.limits.read(),
            pairs,
            recording: raw.recording,
            priority: raw.priority,
            metadata: raw.metadata,
        };
        if spec.recording != Recording::default() {
            self.warnings.push("recording: videos and steps are not kept yet; results are".to_owned());
        }
        let mut seen = HashSet::new();
        self.warnings.retain(|warning| seen.insert(warning.clone()));
        Some(Checked { spec, warnings: std::mem::take(&mut self.warnings), client_token: raw.client_token })
    }

    fn described(&self, registered: Option<Registered>, definition: impl FnOnce() -> Option<Definition>) -> Option<Described> {
        let document = registered.and_then(|registered| registered.describe).or_else(|| self.reader.catalogue.describe(&definition()?));
        document.filter(Value::is_object).map(Described::new)
    }

    fn model(&mut self, index: usize, raw: &RawModel) -> Option<Models> {
        self.model_with_editions(index, raw).map(|(models, _)| models)
    }

    fn model_with_editions(&mut self, index: usize, raw: &RawModel) -> Option<(Models, Option<Vec<String>>)> {
        let list = Path::Root.key("models");
        let path = list.index(index);
        let registered = raw.reference.as_deref().and_then(|reference| self.reader.catalogue.model(reference));
        let described = self.described(registered, || {
            let mut scratch = Problems::default();
            let models = definitions::check_model(raw, &path, None, &mut scratch, &mut Vec::new())?;
            models.models.into_iter().next().map(Definition::Model)
        });
        let models = definitions::check_model(raw, &path, described.as_ref(), &mut self.reader.problems, &mut self.warnings)?;
        let editions = match &raw.workflow_edition {
            Some(edition) => Some(vec![edition.clone()]),
            None => described.and_then(|described| described.editions().map(|list| list.into_iter().map(str::to_owned).collect())),
        };
        Some((models, editions))
    }

    fn models(&mut self, raw: &RawRequest) -> ModelList {
        let mut list = ModelList { models: Vec::new(), editions: Vec::new(), by_id: BTreeMap::new(), whole: raw.models.is_some() };
        let path = Path::Root.key("models");
        let mut ids = HashSet::new();
        for (index, model) in raw.models.iter().flatten().enumerate() {
            let Some((models, editions)) = model.as_ref().and_then(|model| self.model_with_editions(index, model)) else {
                list.whole = false;
                continue;
            };
            let path = path.index(index);
            let mut made = Vec::new();
            for model in models.models {
                if ids.insert(model.id.clone()) {
                    made.push(model.id.clone());
                    list.models.push(model);
                    list.editions.push(editions.clone());
                } else {
                    self.reader.problems.add(
                        &path.key("id"),
                        format!("another model is called {} too; give each an `id` of its own", text::quote(&model.id)),
                    );
                }
            }
            list.by_id.entry(models.id).or_default().extend(made);
        }
        if list.models.len() > fields::MAX_MODELS {
            self.reader
                .problems
                .add(&path, format!("{} models with their checkpoint sets; at most {} are allowed", list.models.len(), fields::MAX_MODELS));
        }
        list
    }

    fn environment(&mut self, index: usize, raw: &RawEnvironment) -> Option<Known> {
        let list = Path::Root.key("environments");
        self.environment_at(&list.index(index), raw)
    }

    fn environment_at(&mut self, path: &Path<'_>, raw: &RawEnvironment) -> Option<Known> {
        let registered = raw.reference.as_deref().and_then(|reference| self.reader.catalogue.environment(reference));
        let described = self.described(registered, || {
            let mut scratch = Problems::default();
            definitions::check_environment(raw, path, None, &mut scratch, &mut Vec::new()).map(Definition::Environment)
        });
        let definition = definitions::check_environment(raw, path, described.as_ref(), &mut self.reader.problems, &mut self.warnings)?;
        Some(Known { definition, described, path: path.to_string(), named_only: None })
    }

    fn environments(&mut self, raw: &RawRequest) -> (Vec<Known>, bool) {
        let path = Path::Root.key("environments");
        let mut whole = !self.reader.problems.has(&path);
        let mut known: Vec<Known> = Vec::new();
        let mut ids = HashSet::new();
        for (index, environment) in raw.environments.iter().enumerate() {
            match environment.as_ref().and_then(|raw| self.environment(index, raw)) {
                Some(environment) if ids.insert(environment.definition.id.clone()) => known.push(environment),
                Some(environment) => {
                    let id = text::quote(&environment.definition.id);
                    self.reader
                        .problems
                        .add(&path.index(index).key("id"), format!("another environment is called {id} too; give each an `id` of its own"));
                }
                None => whole = false,
            }
        }
        (known, whole)
    }

    fn tasks(&mut self, raw: &RawRequest, environments: &mut Vec<Known>, whole: bool) -> Option<Vec<Task>> {
        let list = Path::Root.key("tasks");
        let mut positions: HashMap<String, usize> =
            environments.iter().enumerate().map(|(at, known)| (known.definition.id.clone(), at)).collect();
        let mut refused = BTreeSet::new();
        let mut names = tasks::Names::default();
        let mut read = Vec::new();
        for (index, task) in raw.tasks.as_ref()?.iter().enumerate() {
            let path = list.index(index);
            let Some(task) = task else { continue };
            let Some(env) = &task.env else { continue };
            if !positions.contains_key(env) && !refused.contains(env) {
                if let Some(known) = self.registered_environment(env, &path) {
                    positions.insert(env.clone(), environments.len());
                    environments.push(known);
                } else {
                    refused.insert(env.clone());
                }
            }
            let Some(known) = positions.get(env).and_then(|at| environments.get_mut(*at)) else {
                // An environment that could not be read may be the one that is meant.
                if whole && self.reader.catalogue.environment(env).is_none() {
                    let hint = text::hint(env, environments.iter().map(|known| known.definition.id.as_str()));
                    self.reader
                        .problems
                        .add(&path.key("env"), format!("no environment {} is in `environments` or registered{hint}", text::quote(env)));
                }
                continue;
            };
            names.check(index, env, task.task_id.as_deref().unwrap_or(env), &path, &mut self.reader.problems);
            read.extend(tasks::check(index, task, known, &path, &mut self.reader.problems, &mut self.warnings));
        }
        Some(read)
    }

    fn registered_environment(&mut self, reference: &str, path: &Path<'_>) -> Option<Known> {
        let path = path.key("env");
        self.reader.catalogue.environment(reference)?;
        let read = self.reader.registered(reference, table::Side::Environment, &fields::ENVIRONMENT, &path);
        let mut raw: RawEnvironment = self.parse(read)?;
        raw.id = Some(reference.to_owned());
        self.environment_at(&path, &raw)
    }

    fn pairs(&mut self, raw: &RawRequest, models: &ModelList, environments: &[Known], environments_whole: bool) -> Option<Vec<Pair>> {
        let list = Path::Root.key("pairs");
        let mut seen = HashMap::new();
        let mut pairs = Vec::new();
        let ids: HashSet<&str> = environments.iter().map(|known| known.definition.id.as_str()).collect();
        let model_ids: HashSet<&str> = models.models.iter().map(|model| model.id.as_str()).collect();
        for (index, pair) in raw.pairs.as_ref()?.iter().enumerate() {
            let path = list.index(index);
            let Some(pair) = pair else { continue };
            let made: Vec<String> = match &pair.model {
                None => Vec::new(),
                Some(id) => match models.by_id.get(id) {
                    Some(made) => made.clone(),
                    None if model_ids.contains(id.as_str()) => vec![id.clone()],
                    None => {
                        if models.whole {
                            let hint = text::hint(id, models.by_id.keys().map(String::as_str));
                            self.reader.problems.add(&path.key("model"), format!("no model {} is in `models`{hint}", text::quote(id)));
                        }
                        Vec::new()
                    }
                },
            };
            let Some(env) = &pair.env else { continue };
            if !ids.contains(env.as_str()) {
                if environments_whole {
                    let hint = text::hint(env, ids.iter().copied());
                    self.reader
                        .problems
                        .add(&path.key("env"), format!("no environment {} is in `environments` or in a task{hint}", text::quote(env)));
                }
                continue;
            }
            for model in made {
                if let Some(first) = seen.insert((model.clone(), env.clone()), index) {
                    self.reader
                        .problems
                        .add(&path, format!("{} and {} are paired by pairs[{first}] already", text::quote(&model), text::quote(env)));
                } else {
                    pairs.push(Pair { model, env: env.clone() });
                }
            }
        }
        Some(pairs)
    }

    /// Bounds the rows and what planning them goes through.
    fn rows(&mut self, models: &[ModelDefinition], tasks: Option<&[Task]>, pairs: Option<&[Pair]>) {
        let path = Path::Root.key("tasks");
        let tasks = tasks.unwrap_or_default();
        let mut met: HashMap<&str, u64> = HashMap::new();
        for pair in pairs.into_iter().flatten() {
            *met.entry(&pair.env).or_default() += 1;
        }
        let meeting =
            |task: &Task| if pairs.is_some() { met.get(task.env.as_str()).copied().unwrap_or_default() } else { models.len() as u64 };
        let rows: u128 = tasks.iter().map(|task| u128::from(task.episodes) * u128::from(meeting(task))).sum();
        let cells: u64 = tasks.iter().map(meeting).sum();
        if rows > u128::from(MAX_ROWS) {
            self.reader
                .problems
                .add(&path, format!("{rows} rows in all (episodes of each task x models that meet it); at most {MAX_ROWS} are allowed"));
        } else if cells.max(models.len() as u64 * tasks.len() as u64) > fields::MAX_CELLS {
            self.reader.problems.add(
                &path,
                format!(
                    "{} tasks x {} models; together they may make at most {} pairs of a model and a task",
                    tasks.len(),
                    models.len(),
                    fields::MAX_CELLS
                ),
            );
        } else if rows == 0 && self.reader.problems.is_empty() {
            self.reader.problems.add(&path, "no model meets any task: `pairs` names only environments without tasks");
        }
    }

    /// A model and an environment that meet need a workflow edition in common, where both are known.
    fn editions(&mut self, models: &ModelList, environments: &[Known], pairs: Option<&[Pair]>) {
        let path = Path::Root.key("models");
        let meets: Option<HashSet<(&str, &str)>> =
            pairs.map(|pairs| pairs.iter().map(|pair| (pair.model.as_str(), pair.env.as_str())).collect());
        for (model, editions) in models.models.iter().zip(&models.editions) {
            let Some(has) = editions else { continue };
            for known in environments {
                let id = known.definition.id.as_str();
                let Some(wants) = known.described.as_ref().and_then(Described::editions) else { continue };
                if meets.as_ref().is_none_or(|meets| meets.contains(&(model.id.as_str(), id)))
                    && !has.iter().any(|edition| wants.contains(&edition.as_str()))
                {
                    self.reader.problems.add(
                        &path,
                        format!(
                            "model {} (workflow edition {}) and environment {} ({}) have no workflow edition in common",
                            text::quote(&model.id),
                            has.join(", "),
                            text::quote(id),
                            wants.join(", ")
                        ),
                    );
                }
            }
        }
    }

    fn unused(&mut self, models: &[ModelDefinition], environments: &[EnvironmentDefinition], tasks: &[Task], pairs: Option<&[Pair]>) {
        let with_tasks: HashSet<&str> = tasks.iter().map(|task| task.env.as_str()).collect();
        for environment in environments.iter().filter(|environment| !with_tasks.contains(environment.id.as_str())) {
            self.warnings.push(format!("environment {} has no tasks", text::quote(&environment.id)));
        }
        let Some(pairs) = pairs else { return };
        let active: HashSet<&str> =
            pairs.iter().filter(|pair| with_tasks.contains(pair.env.as_str())).map(|pair| pair.model.as_str()).collect();
        for model in models.iter().filter(|model| !active.contains(model.id.as_str())) {
            self.warnings.push(format!("model {} meets no task", text::quote(&model.id)));
        }
        let paired: HashSet<&str> = pairs.iter().map(|pair| pair.env.as_str()).collect();
        for environment in environments
            .iter()
            .filter(|environment| with_tasks.contains(environment.id.as_str()) && !paired.contains(environment.id.as_str()))
        {
            self.warnings.push(format!("environment {} has tasks, but no pair names it: they have no rows", text::quote(&environment.id)));
        }
    }
}

/// "models on environments", at most 200 characters.
fn default_name(models: &[ModelDefinition], tasks: &[Task]) -> String {
    let list = |names: Vec<&str>| match names.as_slice() {
        [first, second, third, rest @ ..] if !rest.is_empty() => format!("{first}, {second}, {third} and {} more", rest.len()),
        names => names.join(", "),
    };
    let mut environments: Vec<&str> = Vec::new();
    for task in tasks {
        if !environments.contains(&task.env.as_str()) && environments.len() < 1000 {
            environments.push(&task.env);
        }
    }
    let name = format!("{} on {}", list(models.iter().map(|model| model.id.as_str()).collect()), list(environments));
    name.chars().take(200).collect()
}

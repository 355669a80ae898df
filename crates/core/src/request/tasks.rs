//! Rules about one task: which environment it is of, what that is constructed with, which seeds its episodes have.

use std::collections::{BTreeSet, HashMap};

use super::described::{Described, entry_params};
use super::problems::{Path, Problems};
use super::raw::RawTask;
use super::text::quote;
use crate::evaluation::{EnvironmentDefinition, Params, Task};
use crate::rows::SEED_LIMIT;

/// An environment that tasks may name.
pub struct Known {
    pub definition: EnvironmentDefinition,
    pub described: Option<Described>,
    /// Path of its definition, for problems with its own params.
    pub path: String,
    /// Without a describe document: first task that says nothing but a name, by position.
    pub named_only: Option<(usize, String)>,
}

/// Checks a task of a known environment.
pub fn check(
    index: usize,
    raw: &RawTask,
    known: &mut Known,
    path: &Path<'_>,
    problems: &mut Problems,
    warnings: &mut Vec<String>,
) -> Option<Task> {
    let env = known.definition.id.clone();
    let task_id = raw.task_id.clone().unwrap_or_else(|| env.clone());
    let spoiled = problems.has(&path.key("taskId")) || problems.has(&path.key("params"));
    let entry = if spoiled { Some(Params::new()) } else { select(index, raw, known, &task_id, path, problems, warnings) };
    check_seeds(raw, path, problems, warnings);
    let entry = entry?;
    let own = raw.params.clone().unwrap_or_default();
    let mut params = known.definition.params.clone();
    params.extend(entry.iter().map(|(key, value)| (key.clone(), value.clone())));
    params.extend(own.iter().map(|(key, value)| (key.clone(), value.clone())));
    if known.definition.address.is_some() && !(own.is_empty() && entry.is_empty()) {
        let field = if own.is_empty() { "taskId" } else { "params" };
        problems.add(
            &path.key(field),
            format!("environment {} is a server that runs already and can't be constructed anew for a task", quote(&env)),
        );
    } else if let Some(described) = known.described.as_ref().filter(|_| !spoiled && known.definition.address.is_none()) {
        let params_path = path.key("params");
        let origin = |name: &str| {
            if own.contains_key(name) {
                params_path.key(name).to_string()
            } else if entry.contains_key(name) {
                path.key("taskId").to_string()
            } else {
                let field = Path::Root.key("params");
                format!("{}.{}", known.path, field.key(name))
            }
        };
        described.check_arguments(&params, &[], &params_path.to_string(), &origin, problems, warnings);
        if let Some(problem) = described.branch_problem(&params) {
            problems.add(&params_path, problem);
        }
    }
    Some(Task {
        env,
        task_id,
        params,
        episodes: raw.episodes?,
        seed: raw.seed,
        seeds: raw.seeds.clone(),
        trial_index_base: raw.trial_index_base,
        workers: raw.workers,
        max_episode_steps: raw.max_episode_steps,
        instruction: raw.instruction.clone(),
        success: match &raw.success {
            Some(rule) => Some(rule.read()?),
            None => None,
        },
        metadata: raw.metadata.clone(),
    })
}

/// The params that `taskId` selects. None: it selects nothing, which was reported.
fn select(
    index: usize,
    raw: &RawTask,
    known: &mut Known,
    task_id: &str,
    path: &Path<'_>,
    problems: &mut Problems,
    warnings: &mut Vec<String>,
) -> Option<Params> {
    let field = path.key("taskId");
    if let Some(entry) = known.described.as_ref().and_then(|described| described.entry(task_id)) {
        return match entry_params(entry) {
            Ok(params) => Some(params),
            Err(problem) => {
                problems.add(&field, problem);
                None
            }
        };
    }
    // `params`, even if empty, say what to construct; without a `taskId` it is the definition as it stands.
    if raw.params.is_some() || raw.task_id.is_none() {
        return Some(Params::new());
    }
    let id = &known.definition.id;
    let is_whole = task_id == id || task_id.strip_prefix(id.as_str()) == Some("/0");
    match &known.described {
        Some(described) if is_whole && !described.has_catalogue() => Some(Params::new()),
        Some(described) => {
            let why = described.missing_entry(task_id);
            problems.add(
                &field,
                format!(
                    "{} selects nothing here: {why}. Say `params` ({{}} for the definition's own) if it is only a name",
                    quote(task_id)
                ),
            );
            None
        }
        None => match &known.named_only {
            None => {
                known.named_only = Some((index, task_id.to_owned()));
                if !is_whole {
                    warnings.push(format!(
                        "{field}: {} is only a name: environment {} was not described, so it is constructed as its definition says",
                        quote(task_id),
                        quote(id)
                    ));
                }
                Some(Params::new())
            }
            Some((other, name)) => {
                problems.add(
                    &field,
                    format!(
                        "{} selects nothing here: environment {} was not described, so this would be the same as tasks[{other}] ({}). Register or describe the environment, or say `params`",
                        quote(task_id),
                        quote(id),
                        quote(name)
                    ),
                );
                None
            }
        },
    }
}

fn check_seeds(raw: &RawTask, path: &Path<'_>, problems: &mut Problems, warnings: &mut Vec<String>) {
    let Some(episodes) = raw.episodes else { return };
    match &raw.seeds {
        Some(seeds) => {
            let field = path.key("seeds");
            if seeds.len() as u64 != episodes {
                problems.add(&field, format!("has {} seeds for {episodes} episodes; give one per episode", seeds.len()));
            }
            let distinct: BTreeSet<u64> = seeds.iter().copied().collect();
            if distinct.len() < seeds.len() {
                warnings.push(format!(
                    "{field}: {} of {} seeds occur before; rows with equal seeds are not independent",
                    seeds.len() - distinct.len(),
                    seeds.len()
                ));
            }
        }
        None => {
            if raw.seed.saturating_add(episodes) > SEED_LIMIT && !problems.has(&path.key("seed")) {
                problems.add(&path.key("seed"), format!("{} + {episodes} episodes goes past 2^32; seeds are below it", raw.seed));
            }
        }
    }
    if raw.trial_index_base.saturating_add(episodes) > SEED_LIMIT {
        problems.add(&path.key("trialIndexBase"), format!("{} + {episodes} episodes goes past 2^32", raw.trial_index_base));
    }
}

/// Position of each task by environment and name, to find the same one twice.
#[derive(Default)]
pub struct Names(HashMap<(String, String), usize>);

impl Names {
    pub fn check(&mut self, index: usize, env: &str, task_id: &str, path: &Path<'_>, problems: &mut Problems) {
        match self.0.entry((env.to_owned(), task_id.to_owned())) {
            std::collections::hash_map::Entry::Occupied(first) => {
                problems.add(
                    &path.key("taskId"),
                    format!(
                        "{} of environment {} is tasks[{}] already; give each task a name of its own",
                        quote(task_id),
                        quote(env),
                        first.get()
                    ),
                );
            }
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(index);
            }
        }
    }
}

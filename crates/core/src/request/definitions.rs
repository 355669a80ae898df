//! Rules about one model or environment that involve more than one of its fields.

use std::collections::{BTreeMap, BTreeSet};

use super::described::Described;
use super::problems::{Path, Problems};
use super::raw::{RawCheckpoint, RawEnvironment, RawModel};
use super::table::Side;
use super::text::quote;
use crate::evaluation::{Checkpoint, EnvironmentDefinition, ModelDefinition, Params, Resources};

/// Variables that a user may set, though they begin with `RLMESH_`.
const FREE_VARIABLES: [&str; 3] = ["RLMESH_VALIDATION_POLICY", "RLMESH_EPISODE_CAPACITY", "RLMESH_FRAME_HISTORY_LIMIT_BYTES"];
/// Those that only environment servers accept.
const ENVIRONMENT_VARIABLES: [&str; 2] = ["RLMESH_FRAMEWORK", "RLMESH_DEVICE"];

/// A model of the request: one per checkpoint set.
pub struct Models {
    pub id: String,
    pub models: Vec<ModelDefinition>,
}

struct Common<'a> {
    side: Side,
    id: Option<&'a str>,
    image: bool,
    entrypoint: bool,
    address: bool,
    python_path: bool,
    python: bool,
    params: &'a Params,
    resources: &'a Resources,
    env: &'a BTreeMap<String, String>,
    secret_env: &'a BTreeMap<String, String>,
    lanes_per_pod: bool,
}

fn check_common(common: &Common<'_>, path: &Path<'_>, problems: &mut Problems, warnings: &mut Vec<String>) {
    if common.id.is_none() && !problems.has(&path.key("id")) {
        problems.add(&path.key("id"), "is missing");
    }
    let spoiled = ["image", "entrypoint", "address", "ref"].iter().any(|name| problems.has(&path.key(name)));
    if !spoiled {
        if !(common.image || common.entrypoint || common.address) {
            problems.add(path, "says nothing that runs: give `image`, `entrypoint`, `address` or `ref`");
        }
        if common.address && (common.image || common.entrypoint) {
            problems.add(&path.key("address"), "is a server that runs already, so `image` and `entrypoint` can't stand beside it");
        }
        for (name, given) in [("pythonPath", common.python_path), ("python", common.python)] {
            if given && !common.entrypoint {
                problems.add(&path.key(name), "is for an `entrypoint`, and there is none");
            }
        }
    }
    if common.address {
        if !common.params.is_empty() {
            problems.add(&path.key("params"), "can't reach a server that runs already: start it with them, and leave them out here");
        }
        for (name, given) in [("env", !common.env.is_empty()), ("secretEnv", !common.secret_env.is_empty())] {
            if given {
                problems.add(&path.key(name), "can't reach a server that runs already: start it with them, and leave them out here");
            }
        }
        if *common.resources != Resources::default() {
            warnings.push(format!("{path}.resources: has no effect on a server that runs already"));
        }
        if common.lanes_per_pod {
            warnings
                .push(format!("{path}.lanesPerPod: has no effect on a server that runs already, which has the number it was started with"));
        }
    }
    for (field, names) in [("env", common.env.keys()), ("secretEnv", common.secret_env.keys())] {
        let field = path.key(field);
        for name in names {
            if let Some(problem) = variable_problem(common.side, name) {
                problems.add(&field.key(name), problem);
            }
        }
    }
    for name in common.secret_env.keys().filter(|name| common.env.contains_key(*name)) {
        problems.add(&path.key("secretEnv").key(name), "is in `env` too");
    }
}

fn variable_problem(side: Side, name: &str) -> Option<String> {
    if !name.starts_with("RLMESH_")
        || FREE_VARIABLES.contains(&name)
        || (side == Side::Environment && ENVIRONMENT_VARIABLES.contains(&name))
    {
        return None;
    }
    Some(match (name, side) {
        ("RLMESH_FRAMEWORK" | "RLMESH_DEVICE", Side::Model) => "keeps a model from starting: only environment servers take it".to_owned(),
        ("RLMESH_MAKE_KWARGS", _) => "is set by the platform; say `params` instead".to_owned(),
        ("RLMESH_NUM_ENVS", Side::Environment) => "is set by the platform; say `lanesPerPod` instead".to_owned(),
        ("RLMESH_WORKFLOW_EDITION", _) => "is set by the platform; say `workflowEdition` of the model instead".to_owned(),
        _ => "is the platform's to set".to_owned(),
    })
}

pub fn check_model(
    raw: &RawModel,
    path: &Path<'_>,
    described: Option<&Described>,
    problems: &mut Problems,
    warnings: &mut Vec<String>,
) -> Option<Models> {
    let common = Common {
        side: Side::Model,
        id: raw.id.as_deref(),
        image: raw.image.is_some(),
        entrypoint: raw.entrypoint.is_some(),
        address: raw.address.is_some(),
        python_path: raw.python_path.is_some(),
        python: raw.python.is_some(),
        params: &raw.params,
        resources: &raw.resources,
        env: &raw.env,
        secret_env: &raw.secret_env,
        lanes_per_pod: false,
    };
    check_common(&common, path, problems, warnings);
    if raw.prefetch_lead >= raw.execution_horizon && raw.prefetch_lead > 0 && !problems.has(&path.key("executionHorizon")) {
        problems.add(
            &path.key("prefetchLead"),
            format!("must be less than executionHorizon ({}), not {}", raw.execution_horizon, raw.prefetch_lead),
        );
    }
    let base_path = path.key("checkpoints");
    let base = checkpoints(&raw.checkpoints, &raw.params, &base_path, problems);
    let sets_path = path.key("checkpointSets");
    let mut variants: Vec<(Option<&str>, Vec<Checkpoint>)> = Vec::new();
    match &raw.checkpoint_sets {
        Some(sets) => {
            if sets.is_empty() && !problems.below(&sets_path.to_string()) {
                problems.add(&sets_path, "is empty: leave it out");
            }
            for (name, set) in sets {
                let set_path = sets_path.key(name);
                if set.is_empty() {
                    problems.add(&set_path, "is empty");
                }
                let set = checkpoints(set, &raw.params, &set_path, problems);
                let mut merged: Vec<Checkpoint> =
                    base.iter().filter(|under| !set.iter().any(|over| over.param == under.param)).cloned().collect();
                merged.extend(set);
                variants.push((Some(name), merged));
            }
        }
        None => variants.push((None, base)),
    }
    if raw.address.is_some() && variants.iter().any(|(_, checkpoints)| !checkpoints.is_empty()) {
        problems.add(&base_path, "can't reach a server that runs already");
    }
    if let Some(described) = described {
        described.check_whole("model", path, problems, warnings);
        described.check_horizon(raw.execution_horizon, &path.key("executionHorizon"), problems);
        if let (Some(wanted), Some(known)) = (raw.workflow_edition.as_deref(), described.editions())
            && !known.contains(&wanted)
        {
            problems.add(&path.key("workflowEdition"), format!("is not supported by the model, which supports {}", known.join(", ")));
        }
        // A running server has its arguments already.
        if raw.address.is_none() {
            for (set, checkpoints) in &variants {
                let files: Vec<&str> = checkpoints.iter().map(|checkpoint| checkpoint.param.as_str()).collect();
                let origin = |name: &str| match set {
                    _ if raw.params.contains_key(name) => path.key("params").key(name).to_string(),
                    Some(set) => sets_path.key(set).to_string(),
                    None => base_path.to_string(),
                };
                described.check_arguments(&raw.params, &files, &path.key("params").to_string(), &origin, problems, warnings);
            }
        }
    }
    let id = raw.id.clone()?;
    let models = variants
        .into_iter()
        .map(|(set, checkpoints)| ModelDefinition {
            id: set.map_or_else(|| id.clone(), |set| format!("{id}@{set}")),
            image: raw.image.clone(),
            entrypoint: raw.entrypoint.clone(),
            python_path: raw.python_path.clone(),
            python: raw.python.clone(),
            address: raw.address.clone(),
            params: raw.params.clone(),
            checkpoints,
            execution_horizon: raw.execution_horizon,
            prefetch_lead: raw.prefetch_lead,
            workflow_edition: raw.workflow_edition.clone(),
            resources: raw.resources.clone(),
            env: raw.env.clone(),
            secret_env: raw.secret_env.clone(),
            startup_timeout_ms: raw.startup_timeout,
            replicas: raw.replicas,
        })
        .collect();
    Some(Models { id, models })
}

fn checkpoints(raw: &[Option<RawCheckpoint>], params: &Params, path: &Path<'_>, problems: &mut Problems) -> Vec<Checkpoint> {
    let mut seen = BTreeSet::new();
    let mut read = Vec::new();
    for (index, checkpoint) in raw.iter().enumerate() {
        let path = path.index(index);
        let Some(checkpoint) = checkpoint else { continue };
        if let Some(param) = checkpoint.param.as_deref() {
            if super::read::RESERVED_ARGUMENTS.contains(&param) {
                problems.add(&path.key("param"), "is set by the platform and can't receive a checkpoint");
            }
            if params.contains_key(param) {
                problems.add(&path.key("param"), format!("is in `params` too: {}", quote(param)));
            }
            if !seen.insert(param.to_owned()) {
                problems.add(&path.key("param"), format!("{} has a checkpoint already", quote(param)));
            }
        }
        read.extend(checkpoint.read());
    }
    read
}

pub fn check_environment(
    raw: &RawEnvironment,
    path: &Path<'_>,
    described: Option<&Described>,
    problems: &mut Problems,
    warnings: &mut Vec<String>,
) -> Option<EnvironmentDefinition> {
    let common = Common {
        side: Side::Environment,
        id: raw.id.as_deref(),
        image: raw.image.is_some(),
        entrypoint: raw.entrypoint.is_some(),
        address: raw.address.is_some(),
        python_path: raw.python_path.is_some(),
        python: raw.python.is_some(),
        params: &raw.params,
        resources: &raw.resources,
        env: &raw.env,
        secret_env: &raw.secret_env,
        lanes_per_pod: raw.lanes_per_pod.is_some(),
    };
    check_common(&common, path, problems, warnings);
    if let Some(described) = described {
        described.check_whole("env", path, problems, warnings);
    }
    Some(EnvironmentDefinition {
        id: raw.id.clone()?,
        image: raw.image.clone(),
        entrypoint: raw.entrypoint.clone(),
        python_path: raw.python_path.clone(),
        python: raw.python.clone(),
        address: raw.address.clone(),
        params: raw.params.clone(),
        resources: raw.resources.clone(),
        share_model_gpu: raw.share_model_gpu,
        lanes_per_pod: raw.lanes_per_pod,
        env: raw.env.clone(),
        secret_env: raw.secret_env.clone(),
        startup_timeout_ms: raw.startup_timeout,
    })
}

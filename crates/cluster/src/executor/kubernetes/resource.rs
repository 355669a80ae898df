//! The custom resource of a run: what the agent asks the controller for. Pure.
//!
//! On a cluster an image's own command serves; `entrypoint`, `python` and `pythonPath` are for local cells.

use rlm_core::evaluation::{Params, Resources, RunSpec};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;

use super::gpus::{Chosen, Source};
use crate::crd::run::{self as crd, AgentEndpoint, Binding, Environments, Mode, Model, Program, RLMeshRunSpec};

/// Name of the run's object: object names allow no underscore.
#[must_use]
pub fn name(run: RunId) -> String {
    run.to_string().replace('_', "-")
}

/// The run as an object begins: its model is wanted, no environment yet.
///
/// # Errors
/// If the run can't be carried out by pods.
pub fn spec(run: &RunSpec, agent: &AgentEndpoint, chosen: Chosen) -> Result<RLMeshRunSpec, Failure> {
    let model = &run.model;
    let environment = &run.environment;
    if !model.checkpoints.is_empty() {
        return Err(refused(format!(
            "model '{}' has checkpoints, and this cluster has no artifact cache yet: put them in its image",
            model.id
        )));
    }
    let model_image = image("model", &model.id, model.image.as_deref(), model.address.as_deref())?;
    let environment_image = image("environment", &environment.id, environment.image.as_deref(), environment.address.as_deref())?;
    Ok(RLMeshRunSpec {
        evaluation_id: run.evaluation_id.to_string(),
        generation: run.generation,
        mode: Mode::Evaluate,
        agent: Some(agent.clone()),
        model: Some(Model {
            program: Program {
                image: model_image,
                entrypoint: None,
                python: None,
                python_path: None,
                env: model.env.clone(),
                secret_env: model.secret_env.clone(),
                resources: resources(&model.resources, chosen.model),
                startup_timeout_seconds: seconds(model.startup_timeout_ms),
            },
            params: text(&model.params),
            workflow_edition: model.workflow_edition.clone(),
            // Each replica is a run of its own.
            replicas: 1,
            artifacts: Vec::new(),
        }),
        environments: Some(Environments {
            program: Program {
                image: environment_image,
                entrypoint: None,
                python: None,
                python_path: None,
                env: environment.env.clone(),
                secret_env: environment.secret_env.clone(),
                resources: crd::Resources {
                    // It is shown the model's.
                    gpu: if environment.share_model_gpu { 0 } else { environment.resources.gpu },
                    ..resources(&environment.resources, chosen.environment)
                },
                startup_timeout_seconds: seconds(environment.startup_timeout_ms),
            },
            share_model_gpu: environment.share_model_gpu,
        }),
        bindings: run.bindings.iter().map(|binding| Binding { index: binding.index, params: text(&binding.params) }).collect(),
        active_bindings: Vec::new(),
        restarts: Default::default(),
        released_attempts: Default::default(),
        cancel: false,
    })
}

fn refused(message: String) -> Failure {
    Failure::new(FailureCode::NotRunnableHere, message)
}

fn image(noun: &str, id: &str, image: Option<&str>, address: Option<&str>) -> Result<String, Failure> {
    if address.is_some() {
        return Err(refused(format!("{noun} '{id}' names an address: a server that runs already can be used by a local cell alone")));
    }
    image.map(str::to_owned).ok_or_else(|| refused(format!("{noun} '{id}' names no image: a cluster runs images; add one")))
}

fn resources(resources: &Resources, source: Source) -> crd::Resources {
    crd::Resources {
        cpu: resources.cpu.clone(),
        memory: resources.memory.clone(),
        gpu: resources.gpu,
        gpu_vendor: source.vendor,
        gpu_product: source.product,
        gpu_nodes: source.nodes,
        shm: resources.shm.clone(),
    }
}

fn seconds(milliseconds: u64) -> u32 {
    u32::try_from(milliseconds.div_ceil(1_000)).unwrap_or(u32::MAX).clamp(1, 86_400)
}

fn text(params: &Params) -> String {
    serde_json::Value::Object(params.clone()).to_string()
}

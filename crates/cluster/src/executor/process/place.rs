//! The child processes of one run: what to start for each component, with which folders, socket, log, parameters, devices.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use rlm_core::evaluation::{Params, Provenance, RunSpec};
use rlm_core::failure::{Failure, FailureCode};
use tokio::sync::mpsc;

use super::component::{self, Attempt};
use super::devices::Grant;
use super::{Context, launch, logs, runner};
use crate::executor::run::components::{News, Role, Stop};
use crate::executor::run::{Assignment, Place, Prepared, RunnerExit};
use crate::runners::{FromRunner, RunnerToken};
use crate::spool::RunKey;

/// Longest path of a unix socket.
const MAX_SOCKET: usize = 107;

pub struct ProcessRun {
    context: Arc<Context>,
    key: RunKey,
    spec: Arc<RunSpec>,
    /// With the checkpoints' paths.
    model_params: Params,
    grant: Grant,
    log_folder: PathBuf,
}

/// Everything that can fail before anything is started.
pub async fn prepare(context: Arc<Context>, assignment: Assignment, grant: Grant) -> Result<Prepared<ProcessRun>, Failure> {
    let spec = assignment.spec;
    launch::check(&spec)?;
    let model = spec.model.clone();
    let read = tokio::task::spawn_blocking(move || launch::with_checkpoints(&model)).await;
    let (model_params, checkpoint_digests) =
        read.map_err(|error| Failure::new(FailureCode::AgentError, format!("the checkpoints could not be read: {error}")))??;
    let log_folder = context.log_folder(assignment.key.run_id);
    let attempts = logs::attempts(&log_folder);
    let provenance = Provenance {
        checkpoint_digests,
        execution_horizon: Some(spec.model.execution_horizon),
        prefetch_lead: Some(spec.model.prefetch_lead),
        lanes: Some(spec.lanes),
        node: Some(context.node.clone()),
        gpu_product: context.gpu_product.clone().filter(|_| !grant.model.is_empty()),
        gpu_driver: context.gpu_driver.clone().filter(|_| !grant.model.is_empty()),
        agent_version: Some(context.version.to_owned()),
        ..Provenance::default()
    };
    let place = ProcessRun { context, key: assignment.key, spec, model_params, grant, log_folder };
    let made = std::fs::create_dir_all(&place.log_folder).and_then(|()| std::fs::create_dir_all(place.folder()));
    made.map_err(|error| Failure::new(FailureCode::AgentError, format!("the run's folder can't be made: {error}")))?;
    Ok(Prepared { place: Arc::new(place), provenance, attempts })
}

impl ProcessRun {
    /// An empty folder for components whose definition names none.
    fn folder(&self) -> PathBuf {
        self.context.state.join("work").join(format!("{}-{}", self.spec.run_id, self.spec.generation))
    }

    fn attempt(&self, role: Role, lanes: u32, number: u32) -> Result<Attempt, Failure> {
        let socket = self.context.next_socket();
        if socket.as_os_str().len() > MAX_SOCKET {
            let message = format!("the socket's path {} is too long; start the agent with a shorter TMPDIR", socket.display());
            return Err(Failure::new(FailureCode::AgentError, message));
        }
        let cell = &self.context.cell;
        let (source, timeout_ms) = match role {
            Role::Model => {
                let model = &self.spec.model;
                (launch::model(model, &self.model_params, cell, &socket, &self.grant.model)?, model.startup_timeout_ms)
            }
            Role::Environment { binding, .. } => {
                let environment = &self.spec.environment;
                let params = self.spec.bindings.iter().find(|known| known.index == binding).map(|known| &known.params);
                let Some(params) = params else {
                    return Err(Failure::new(FailureCode::Internal, format!("the run has no binding {binding}")));
                };
                let source = launch::environment(environment, params, lanes, cell, &socket, &self.grant.environment)?;
                (source, environment.startup_timeout_ms)
            }
        };
        let name = role.name();
        logs::forget_old_attempt(&self.log_folder, &name, number);
        Ok(Attempt {
            kind: role.kind(),
            node: self.context.node.clone(),
            log: logs::path(&self.log_folder, &name, number),
            folder: self.folder(),
            startup_timeout: Duration::from_millis(timeout_ms),
            name,
            number,
            source,
            socket,
        })
    }
}

impl Place for ProcessRun {
    fn start(&self, role: Role, lanes: u32, number: u32, stop: Stop, news: mpsc::Sender<News>) -> Result<BoxFuture<'static, ()>, Failure> {
        let attempt = self.attempt(role, lanes, number)?;
        Ok(component::run(attempt, self.context.launcher.clone(), stop, news).boxed())
    }

    fn runner(&self, stop: Stop, messages: mpsc::Sender<FromRunner>, _: mpsc::Sender<News>) -> BoxFuture<'static, RunnerExit> {
        let token = RunnerToken::generate();
        self.context.shared.runners.register(self.key.run_id, &token, messages);
        let (context, key) = (Arc::clone(&self.context), self.key);
        async move { runner::run(&context, key, &token, &stop).await }.boxed()
    }

    fn clean_up(&self, _over: bool) -> BoxFuture<'static, ()> {
        let folder = self.folder();
        async move {
            if let Err(error) = tokio::fs::remove_dir_all(&folder).await {
                tracing::debug!(%error, "a run's working folder can't be deleted");
            }
        }
        .boxed()
    }
}

//! What to start for each component of a run: folders, socket, log, parameters, devices. Starts nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rlm_core::evaluation::{Params, RunSpec};
use rlm_core::failure::{Failure, FailureCode};

use super::component::Attempt;
use super::components::{Recipes, Role};
use super::devices::Grant;
use super::{Context, launch, logs};

/// Longest path of a unix socket.
const MAX_SOCKET: usize = 107;

pub struct RunRecipes {
    pub context: Arc<Context>,
    pub spec: Arc<RunSpec>,
    /// With the checkpoints' paths.
    pub model_params: Params,
    pub grant: Grant,
    pub log_folder: PathBuf,
}

impl RunRecipes {
    /// An empty folder for components whose definition names none.
    fn folder(&self) -> PathBuf {
        self.context.state.join("work").join(format!("{}-{}", self.spec.run_id, self.spec.generation))
    }

    pub fn make_folders(&self) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.log_folder)?;
        std::fs::create_dir_all(self.folder())
    }

    pub fn remove_folders(&self) {
        if let Err(error) = std::fs::remove_dir_all(self.folder()) {
            tracing::debug!(%error, "a run's working folder can't be deleted");
        }
    }
}

impl Recipes for RunRecipes {
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

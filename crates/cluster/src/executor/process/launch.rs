//! From a definition to what is started: program, arguments, environment, folder. Starts nothing; reads checkpoint files.
//!
//! Children get the agent's environment without any `RLMESH_*` variable: some of them are refused by the SDK's servers, and
//! others would change what is evaluated.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rlm_core::evaluation::{Checkpoint, EnvironmentDefinition, ModelDefinition, Params, RunSpec};
use rlm_core::failure::{Failure, FailureCode};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// The kernel's limit for one `NAME=value` string.
const MAX_ENV_STRING: usize = 128 * 1024 - 1;

/// A process to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// None: the component's own empty folder.
    pub folder: Option<PathBuf>,
}

/// How a component comes to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Start(Launch),
    /// A server that runs already.
    Address(String),
}

/// The cell's side of a launch.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Interpreter of definitions that name none.
    pub python: PathBuf,
    /// The agent's own `PYTHONPATH`.
    pub python_path: Option<String>,
    /// The agent's own `OMP_NUM_THREADS` is set.
    pub omp_threads_set: bool,
    /// CUDA devices of this machine; 0: their variable is left alone.
    pub cuda_devices: u32,
}

/// What model and environment definitions have in common.
struct Parts<'a> {
    noun: &'static str,
    id: &'a str,
    entrypoint: Option<&'a str>,
    python: Option<&'a str>,
    python_path: Option<&'a str>,
    address: Option<&'a str>,
    image: Option<&'a str>,
    env: &'a BTreeMap<String, String>,
    secret_env: &'a BTreeMap<String, String>,
}

impl<'a> Parts<'a> {
    fn model(model: &'a ModelDefinition) -> Self {
        Self {
            noun: "model",
            id: &model.id,
            entrypoint: model.entrypoint.as_deref(),
            python: model.python.as_deref(),
            python_path: model.python_path.as_deref(),
            address: model.address.as_deref(),
            image: model.image.as_deref(),
            env: &model.env,
            secret_env: &model.secret_env,
        }
    }

    fn environment(environment: &'a EnvironmentDefinition) -> Self {
        Self {
            noun: "environment",
            id: &environment.id,
            entrypoint: environment.entrypoint.as_deref(),
            python: environment.python.as_deref(),
            python_path: environment.python_path.as_deref(),
            address: environment.address.as_deref(),
            image: environment.image.as_deref(),
            env: &environment.env,
            secret_env: &environment.secret_env,
        }
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |message: String| Err(Failure::new(FailureCode::NotRunnableHere, message));
        if let Some(variable) = self.secret_env.keys().next() {
            return refuse(format!(
                "{} '{}' takes {variable} from a secret, and a local cell has no secrets: set the variable where the cell is started (`rlmesh up`) and leave secretEnv out",
                self.noun, self.id
            ));
        }
        match (self.address, self.entrypoint, self.image) {
            (Some(_), _, _) | (None, Some(_), _) => Ok(()),
            (None, None, Some(image)) => refuse(format!(
                "{} '{}' is the image {image} alone, and a local cell runs processes: add its entrypoint (module:Class)",
                self.noun, self.id
            )),
            (None, None, None) => refuse(format!("{} '{}' has neither entrypoint nor address", self.noun, self.id)),
        }
    }

    fn launch(&self, cell: &Cell, args: Vec<String>, devices: &[u32]) -> Launch {
        let mut env = self.env.clone();
        env.entry("PYTHONUNBUFFERED".to_owned()).or_insert_with(|| "1".to_owned());
        if cell.cuda_devices > 0 {
            let list = devices.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            // What was handed out, whatever the definition says: other runs hold the other devices.
            env.insert("CUDA_VISIBLE_DEVICES".to_owned(), list);
        }
        let given = env.get("PYTHONPATH").cloned().or_else(|| cell.python_path.clone()).filter(|path| !path.is_empty());
        let path: Vec<String> = self.python_path.map(str::to_owned).into_iter().chain(given).collect();
        if !path.is_empty() {
            env.insert("PYTHONPATH".to_owned(), path.join(":"));
        }
        Launch {
            program: self.python.map_or_else(|| cell.python.clone(), PathBuf::from),
            args,
            env,
            // `python -m` puts its folder before PYTHONPATH.
            folder: self.python_path.map(PathBuf::from),
        }
    }
}

/// Whether both sides of the run can be started on a local cell.
pub fn check(spec: &RunSpec) -> Result<(), Failure> {
    Parts::model(&spec.model).check()?;
    Parts::environment(&spec.environment).check()
}

/// The model's process, serving on `socket`. `params` hold the checkpoints' paths.
pub fn model(definition: &ModelDefinition, params: &Params, cell: &Cell, socket: &Path, devices: &[u32]) -> Result<Source, Failure> {
    let parts = Parts::model(definition);
    parts.check()?;
    if let Some(address) = &definition.address {
        return Ok(Source::Address(address.clone()));
    }
    let mut launch = parts.launch(cell, serve(false, definition.entrypoint.as_deref()), devices);
    if let Some(edition) = &definition.workflow_edition {
        launch.env.insert("RLMESH_WORKFLOW_EDITION".to_owned(), edition.clone());
    }
    finish(launch, "model", &definition.id, params, socket)
}

/// An environment's process of `lanes` lanes, constructed with `params`, serving on `socket`.
pub fn environment(
    definition: &EnvironmentDefinition,
    params: &Params,
    lanes: u32,
    cell: &Cell,
    socket: &Path,
    devices: &[u32],
) -> Result<Source, Failure> {
    let parts = Parts::environment(definition);
    parts.check()?;
    if let Some(address) = &definition.address {
        return Ok(Source::Address(address.clone()));
    }
    let mut launch = parts.launch(cell, serve(true, definition.entrypoint.as_deref()), devices);
    launch.env.insert("RLMESH_NUM_ENVS".to_owned(), lanes.to_string());
    if !cell.omp_threads_set {
        // Many environment processes side by side: one thread each.
        launch.env.entry("OMP_NUM_THREADS".to_owned()).or_insert_with(|| "1".to_owned());
    }
    finish(launch, "environment", &definition.id, params, socket)
}

fn serve(environment: bool, entrypoint: Option<&str>) -> Vec<String> {
    let mut args = vec!["-m".to_owned(), "rlmesh.serve".to_owned()];
    if environment {
        args.push("--env".to_owned());
    }
    args.extend(entrypoint.map(str::to_owned));
    args
}

fn finish(mut launch: Launch, noun: &str, id: &str, params: &Params, socket: &Path) -> Result<Source, Failure> {
    let kwargs = Value::Object(params.clone()).to_string();
    if "RLMESH_MAKE_KWARGS=".len() + kwargs.len() > MAX_ENV_STRING {
        let message = format!(
            "the params of {noun} '{id}' are {} bytes of JSON; a process takes at most 128 KiB: put what is large in a file",
            kwargs.len()
        );
        return Err(Failure::new(FailureCode::InvalidParams, message));
    }
    launch.env.insert("RLMESH_MAKE_KWARGS".to_owned(), kwargs);
    launch.env.insert("RLMESH_ADDRESS".to_owned(), format!("unix://{}", socket.display()));
    Ok(Source::Start(launch))
}

/// `python -m rlmesh._describe`, which both SDK generations have, writing its document to `output`.
pub fn describe(definition: &rlm_core::evaluation::Definition, cell: &Cell, output: &Path) -> Result<Launch, Failure> {
    use rlm_core::evaluation::Definition;
    let (parts, kind) = match definition {
        Definition::Model(model) => (Parts::model(model), "--model"),
        Definition::Environment(environment) => (Parts::environment(environment), "--env"),
    };
    parts.check()?;
    let Some(entrypoint) = parts.entrypoint else {
        let message =
            format!("{} '{}' is the address of a running server; it describes itself when a run connects to it", parts.noun, parts.id);
        return Err(Failure::new(FailureCode::NotRunnableHere, message));
    };
    let args = ["-m", "rlmesh._describe", kind, entrypoint, "--out"].map(str::to_owned).into_iter();
    Ok(parts.launch(cell, args.chain([output.to_string_lossy().into_owned()]).collect(), &[]))
}

/// The model's params with the path of each checkpoint, and the digests of those that are files. Reads the files.
pub fn with_checkpoints(definition: &ModelDefinition) -> Result<(Params, BTreeMap<String, String>), Failure> {
    let mut params = definition.params.clone();
    let mut digests = BTreeMap::new();
    for checkpoint in &definition.checkpoints {
        let path = local_path(&definition.id, checkpoint)?;
        let unavailable = |error: std::io::Error| {
            let message =
                format!("checkpoint '{}' of model '{}': {} can't be read: {error}", checkpoint.param, definition.id, path.display());
            Failure::new(FailureCode::InvalidCheckpoint, message)
        };
        let kind = std::fs::metadata(&path).map_err(unavailable)?;
        if kind.is_file() {
            let digest = sha256(&path).map_err(unavailable)?;
            if let Some(expected) = &checkpoint.sha256
                && !expected.eq_ignore_ascii_case(&digest)
            {
                let message = format!(
                    "checkpoint '{}' of model '{}': {} has the SHA-256 {digest}, expected {expected}: it is another file or was changed",
                    checkpoint.param,
                    definition.id,
                    path.display()
                );
                return Err(Failure::new(FailureCode::InvalidCheckpoint, message));
            }
            digests.insert(checkpoint.param.clone(), digest);
        } else if checkpoint.sha256.is_some() {
            let message = format!(
                "checkpoint '{}' of model '{}': {} is not a file, so its sha256 can't be checked: leave sha256 out or name a file",
                checkpoint.param,
                definition.id,
                path.display()
            );
            return Err(Failure::new(FailureCode::InvalidCheckpoint, message));
        }
        params.insert(checkpoint.param.clone(), Value::String(path.to_string_lossy().into_owned()));
    }
    Ok((params, digests))
}

fn local_path(model: &str, checkpoint: &Checkpoint) -> Result<PathBuf, Failure> {
    let refuse = |why: &str| {
        let message = format!("checkpoint '{}' of model '{model}': {}: {why}", checkpoint.param, checkpoint.uri);
        Failure::new(FailureCode::NotRunnableHere, message)
    };
    let Some(rest) = checkpoint.uri.strip_prefix("file://") else {
        return Err(refuse("a local cell reads file:// checkpoints alone; download it and give its path"));
    };
    let path = PathBuf::from(rest.strip_prefix("localhost").unwrap_or(rest));
    if path.is_absolute() { Ok(path) } else { Err(refuse("the path must be absolute (file:///...)")) }
}

fn sha256(path: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hex::encode(hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;

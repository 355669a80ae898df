//! Every field of an evaluation request. A field that is not here does not exist.

use super::table::{Field, Kind, Presence, Side, Table};
use super::text::Text;
use crate::rows::{MAX_ROWS, SEED_LIMIT};

pub const MAX_MODELS: usize = 256;
pub const MAX_TASKS: usize = 10_000;
/// Most pairs of a model and a task: bounds what planning goes through.
pub const MAX_CELLS: u64 = 100_000;
const MAX_PAIRS: usize = 2_000;
const SEED_MAX: i64 = SEED_LIMIT as i64 - 1;
const ROWS_MAX: i64 = MAX_ROWS as i64;
const HOUR: u64 = 3_600_000;
const DAY: u64 = 24 * HOUR;
const OPEN_BYTES: usize = 65_536;

const fn required(name: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { name, kind, presence: Presence::Required, about }
}

const fn optional(name: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { name, kind, presence: Presence::Optional, about }
}

const fn or(name: &'static str, kind: Kind, default: &'static str, about: &'static str) -> Field {
    Field { name, kind, presence: Presence::Default(default), about }
}

/// Tags of an evaluation.
pub const TAGS: Kind = Kind::Map { key: Text::TagKey, of: &Kind::Text(Text::Line(256)), max: 64 };

pub static REQUEST: Table = Table {
    name: "Request",
    about: "An evaluation: models that meet environments in tasks.",
    fields: &[
        optional("name", Kind::Text(Text::Line(200)), "What people call it; without one it is named after its models and environments."),
        or("tags", TAGS, "{}", "Labels to find it by: `tag=key:value` in lists."),
        optional(
            "clientToken",
            Kind::Text(Text::Line(200)),
            "Any text: the same token is the same evaluation, so a submission can be repeated safely.",
        ),
        optional("cluster", Kind::Text(Text::ClusterId), "The cluster that runs it; null: any connected cluster that fits."),
        required(
            "models",
            Kind::List { of: &Kind::Definition(Side::Model, &MODEL), min: 1, max: MAX_MODELS },
            "The models. An item is a model, `{\"ref\": \"name:version\"}` or just `\"name:version\"` of a registered one.",
        ),
        or(
            "environments",
            Kind::List { of: &Kind::Definition(Side::Environment, &ENVIRONMENT), min: 0, max: MAX_MODELS },
            "[]",
            "The environments; registered ones need not be listed, a task's `env` names them.",
        ),
        required("tasks", Kind::List { of: &Kind::Object(&TASK), min: 1, max: MAX_TASKS }, "What the models are evaluated on, in order."),
        or("limits", Kind::Object(&LIMITS), "{}", "Bounds on episodes, waiting and errors."),
        optional(
            "pairs",
            Kind::List { of: &Kind::Object(&PAIR), min: 1, max: MAX_PAIRS },
            "Which model meets which environment; null: every model meets every task.",
        ),
        or("recording", Kind::Object(&RECORDING), "{}", "What is kept of the episodes beside their results."),
        or("priority", Kind::Integer { min: -100, max: 100 }, "0", "Evaluations with a higher number are placed first."),
        or("metadata", Kind::Open { max_bytes: OPEN_BYTES }, "{}", "Anything of yours; kept and shown, never read."),
    ],
};

const REF_ABOUT: &str = "`name` or `name:version` of a registered one, in place of `image`, `entrypoint` and `address`. The other fields given here override what is registered; `params`, `resources`, `env` and `secretEnv` are merged key by key.";
const ID_ABOUT: &str =
    "What tasks, pairs and results call it; unique in its list. Required unless `ref` is given, whose name it then defaults to.";
const IMAGE_ABOUT: &str = "Container image: what runs on a cluster. May stand beside `entrypoint`; each kind of cluster takes its own.";
const PYTHON_PATH_ABOUT: &str = "Absolute folder put first on the module path of `entrypoint`. `rlmesh eval submit` makes relative ones absolute, against the request's file.";
const PYTHON_ABOUT: &str = "Interpreter for `entrypoint`: an absolute path or a program's name; null: the cell's own.";
const ADDRESS_ABOUT: &str =
    "`tcp://host:port` or `unix:///path` of a server that already runs; only on a local cell, and instead of `image` and `entrypoint`.";
const ENV_ABOUT: &str = "Environment variables. `RLMESH_*` variables that the platform sets are refused.";
const SECRET_ENV_ABOUT: &str =
    "Environment variables from the cluster's secrets, each `secret/key`. Never write a secret's value into a request.";
const STARTUP_ABOUT: &str = "How long it may take from start to serving, loading included.";
const STARTUP: Kind = Kind::Duration { min_ms: 1_000, max_ms: DAY };

pub static MODEL: Table = Table {
    name: "Model",
    about: "How a model is started, and with what. One of `image`, `entrypoint`, `address`, `ref` says what runs.",
    fields: &[
        optional("id", Kind::Text(Text::Id), ID_ABOUT),
        optional("ref", Kind::Text(Text::Reference), REF_ABOUT),
        optional("image", Kind::Text(Text::Image), IMAGE_ABOUT),
        optional("entrypoint", Kind::Text(Text::Entrypoint), "`module:Class` that a local cell serves with `python -m rlmesh.serve`."),
        optional("pythonPath", Kind::Text(Text::AbsolutePath), PYTHON_PATH_ABOUT),
        optional("python", Kind::Text(Text::Program), PYTHON_ABOUT),
        optional("address", Kind::Text(Text::Address), ADDRESS_ABOUT),
        or("params", Kind::Arguments, "{}", "Keyword arguments of `load()`."),
        or("checkpoints", CHECKPOINTS, "[]", "Files that are fetched, verified and handed to `load()` as paths."),
        optional(
            "checkpointSets",
            Kind::Map { key: Text::SetName, of: &CHECKPOINTS, max: 64 },
            "Name to checkpoints: makes one model per set, `id@name`. A set's checkpoint replaces the one of `checkpoints` with the same `param`; a pair that names the id means every set.",
        ),
        or(
            "executionHorizon",
            Kind::Integer { min: 1, max: 1024 },
            "1",
            "Actions of a predicted chunk that are carried out before the next prediction; more than 1 needs a model that predicts chunks.",
        ),
        or(
            "prefetchLead",
            Kind::Integer { min: 0, max: 1023 },
            "0",
            "Actions left in the chunk when the next is predicted. Results at different leads are not comparable.",
        ),
        optional("workflowEdition", Kind::Text(Text::Edition), "Pins the SDK workflow edition; null: the newest that both sides have."),
        or("resources", Kind::Object(&RESOURCES), "{}", "What its pod asks for."),
        or("env", VARIABLES, "{}", ENV_ABOUT),
        or("secretEnv", SECRET_VARIABLES, "{}", SECRET_ENV_ABOUT),
        or("startupTimeout", STARTUP, "\"10m\"", STARTUP_ABOUT),
        or("replicas", Kind::Integer { min: 1, max: 64 }, "1", "Copies of the model that work side by side; never changes which rows run."),
    ],
};

pub static ENVIRONMENT: Table = Table {
    name: "Environment",
    about: "How an environment is started, and with what. One of `image`, `entrypoint`, `address`, `ref` says what runs.",
    fields: &[
        optional("id", Kind::Text(Text::Id), ID_ABOUT),
        optional("ref", Kind::Text(Text::Reference), REF_ABOUT),
        optional("image", Kind::Text(Text::Image), IMAGE_ABOUT),
        optional(
            "entrypoint",
            Kind::Text(Text::Entrypoint),
            "`module:Factory` that a local cell serves with `python -m rlmesh.serve --env`.",
        ),
        optional("pythonPath", Kind::Text(Text::AbsolutePath), PYTHON_PATH_ABOUT),
        optional("python", Kind::Text(Text::Program), PYTHON_ABOUT),
        optional("address", Kind::Text(Text::Address), ADDRESS_ABOUT),
        or(
            "params",
            Kind::Arguments,
            "{}",
            "Keyword arguments of `make()` for every task; a task's catalogue entry and `params` go over them.",
        ),
        or("resources", Kind::Object(&RESOURCES), "{}", "What each of its pods asks for."),
        or("shareModelGpu", Kind::Boolean, "false", "Let it use the model's GPU (rendering)."),
        optional("lanesPerPod", Kind::Integer { min: 1, max: 1024 }, "Environments in one process or pod; null: the platform chooses."),
        or("env", VARIABLES, "{}", ENV_ABOUT),
        or("secretEnv", SECRET_VARIABLES, "{}", SECRET_ENV_ABOUT),
        or("startupTimeout", STARTUP, "\"10m\"", STARTUP_ABOUT),
    ],
};

const CHECKPOINTS: Kind = Kind::List { of: &Kind::Object(&CHECKPOINT), min: 0, max: 32 };
const VARIABLES: Kind = Kind::Map { key: Text::VariableName, of: &Kind::Text(Text::Free(32_768)), max: 256 };
const SECRET_VARIABLES: Kind = Kind::Map { key: Text::VariableName, of: &Kind::Text(Text::SecretRef), max: 256 };

pub static CHECKPOINT: Table = Table {
    name: "Checkpoint",
    about: "A file or folder that the model loads.",
    fields: &[
        required("param", Kind::Text(Text::Identifier), "The argument of `load()` that receives the path."),
        required(
            "uri",
            Kind::Text(Text::CheckpointUri),
            "`https://`, `s3://`, `gs://`, `hf://`, `pvc://` or `file:///`. `rlmesh eval submit` makes relative `file:` ones absolute.",
        ),
        optional("revision", Kind::Text(Text::Line(200)), "Commit or tag, for `hf://`."),
        optional("sha256", Kind::Text(Text::Sha256), "What the fetched file must hash to."),
    ],
};

pub static RESOURCES: Table = Table {
    name: "Resources",
    about: "Kubernetes requests and limits of a pod.",
    fields: &[
        optional("cpu", Kind::Quantity, "Cores, for example `500m` or `2`."),
        optional("memory", Kind::Quantity, "Memory, for example `4Gi`."),
        or("gpu", Kind::Integer { min: 0, max: 64 }, "0", "Number of GPUs."),
        optional("gpuProduct", Kind::Text(Text::Line(128)), "Kind of GPU: a product's name or words of it, such as `H100`."),
        optional("shm", Kind::Quantity, "Size of `/dev/shm`."),
    ],
};

pub static TASK: Table = Table {
    name: "Task",
    about: "`episodes` episodes of one environment, for each model that meets it.",
    fields: &[
        required(
            "env",
            Kind::Text(Text::Reference),
            "Id of an environment of this request, else `name` or `name:version` of a registered one.",
        ),
        optional(
            "taskId",
            Kind::Text(Text::Line(256)),
            "Name of the task, unique together with `env`. An entry of the environment's catalogue has its `params` selected by it; otherwise say `params`. Left out: the environment's id, constructed as its definition says.",
        ),
        optional(
            "params",
            Kind::Arguments,
            "Keyword arguments of `make()`, over the catalogue entry's and the definition's. `{}`: the definition's as they are; `taskId` is then only a name.",
        ),
        required(
            "episodes",
            Kind::Integer { min: 1, max: ROWS_MAX },
            "Episodes per model. All rows of an evaluation together are at most 1,000,000.",
        ),
        or("seed", Kind::Integer { min: 0, max: SEED_MAX }, "0", "Episode i is reset with seed + i; all below 2^32."),
        optional(
            "seeds",
            Kind::List { of: &Kind::Integer { min: 0, max: SEED_MAX }, min: 1, max: MAX_ROWS as usize },
            "Explicit seeds, one per episode, in place of `seed`.",
        ),
        or(
            "trialIndexBase",
            Kind::Integer { min: 0, max: SEED_MAX },
            "0",
            "Episode i is reset with `trial_index` base + i where the environment takes one.",
        ),
        optional(
            "workers",
            Kind::Integer { min: 1, max: 1024 },
            "Environments side by side, in all; never changes which rows run. null: the platform chooses.",
        ),
        optional("maxEpisodeSteps", Kind::Integer { min: 1, max: 1_000_000_000 }, "Ends an episode after this many steps."),
        optional("instruction", Kind::Text(Text::Free(4_000)), "Language instruction for the model."),
        optional("success", Kind::Object(&SUCCESS), "A rule that decides success in place of what the environment says."),
        or("metadata", Kind::Open { max_bytes: OPEN_BYTES }, "{}", "Anything of yours; `benchmark` and `perturbation` group scores."),
    ],
};

pub static SUCCESS: Table = Table {
    name: "Success",
    about: "An episode is a success when the metric is at least this.",
    fields: &[
        required("metric", Kind::Choice(&["reward", "steps"]), "`reward`: sum of the episode's rewards; `steps`: its number of steps."),
        required("atLeast", Kind::Number { min: -1e300, max: 1e300 }, "The bound; reaching it counts."),
    ],
};

pub static LIMITS: Table = Table {
    name: "Limits",
    about: "Bounds on episodes, waiting and errors.",
    fields: &[
        optional(
            "maxEpisodeSteps",
            Kind::Integer { min: 1, max: 1_000_000_000 },
            "For every task; the smaller of this and the task's own holds.",
        ),
        optional("maxEpisodeSeconds", Kind::Number { min: 0.001, max: 604_800.0 }, "Ends an episode after this time."),
        or("queueTimeout", Kind::Duration { min_ms: 100, max_ms: 30 * DAY }, "\"24h\"", "How long it may wait for a place to run."),
        or(
            "progressTimeout",
            Kind::Duration { min_ms: 100, max_ms: DAY },
            "\"20m\"",
            "How long a model or an environment may go without an answer before its process is replaced.",
        ),
        or("maxErroredFraction", Kind::Number { min: 0.0, max: 1.0 }, "0", "Share of errored rows above which the evaluation has failed."),
        or(
            "environmentCrashRetries",
            Kind::Integer { min: 0, max: 100 },
            "1",
            "How often a row is tried again after its environment or model crashed or ran out of memory.",
        ),
        or(
            "reassignAfter",
            Kind::Duration { min_ms: 0, max_ms: 30 * DAY },
            "\"1h\"",
            "How long a cluster may be away before its unfinished rows go to another one.",
        ),
    ],
};

pub static PAIR: Table = Table {
    name: "Pair",
    about: "This model meets this environment.",
    fields: &[
        required("model", Kind::Text(Text::ModelName), "Id of a model of this request."),
        required("env", Kind::Text(Text::Reference), "Id of an environment of this request, or what a task's `env` says."),
    ],
};

pub static RECORDING: Table = Table {
    name: "Recording",
    about: "What is kept of the episodes beside their results.",
    fields: &[
        or("video", Kind::Text(Text::Video), "\"none\"", "Videos: `none`, `failures`, `all`, or `sample:K` for K episodes of each task."),
        or("steps", Kind::Choice(&["none", "failures", "all"]), "\"none\"", "Each step's reward and flags."),
    ],
};

/// Every object, in the order of the reference.
pub static TABLES: &[&Table] = &[&REQUEST, &MODEL, &ENVIRONMENT, &CHECKPOINT, &RESOURCES, &TASK, &SUCCESS, &LIMITS, &PAIR, &RECORDING];

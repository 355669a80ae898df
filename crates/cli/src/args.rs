//! The command line: names, flags and help. Holds no behaviour.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::output::Format;

/// Evaluate policies in environments.
#[derive(Debug, Parser)]
#[command(
    name = "rlmesh",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    after_help = "Exit status: 0 done, 1 error, 2 wrong usage or request, 3 not found, 4 sign-in needed, 5 ended unsuccessfully, 8 still pending, 130 interrupted.\n`rlmesh check`, `check-image` and `describe` are handed to the SDK (`python -m rlmesh`)."
)]
pub struct Cli {
    /// Profile to use instead of the default one.
    #[arg(long, global = true, env = "RLMESH_PROFILE", value_name = "NAME")]
    pub profile: Option<String>,
    /// Platform address, for example https://api.rlmesh.dev.
    #[arg(long, global = true, env = "RLMESH_PLATFORM_URL", value_name = "URL")]
    pub platform: Option<String>,
    /// Talk to the server that `rlmesh up --state DIR` runs (with `up`: where it keeps its state, by default ~/.local/share/rlmesh/local).
    #[arg(long, global = true, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Form of the data on standard output.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    pub output: Format,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the control plane and a local cell on this machine.
    Up(Up),
    /// Sign in by browser (OAuth device flow).
    Login {
        /// Print the address only; open no browser.
        #[arg(long)]
        no_browser: bool,
    },
    /// Sign out: end the session at the server and forget it here.
    Logout,
    /// Show who is signed in, verified by the server.
    Whoami,
    /// Print a fresh access token.
    Token {
        /// Print `{platform, token}` as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Manage named platform profiles.
    #[command(subcommand)]
    Profile(Profile),
    /// Organizations of this account.
    #[command(subcommand)]
    Org(Org),
    /// API keys.
    #[command(subcommand)]
    Keys(Keys),
    /// The container registry.
    #[command(subcommand)]
    Registry(Registry),
    /// Registered models.
    #[command(subcommand)]
    Models(Definitions),
    /// Registered environments.
    #[command(subcommand)]
    Envs(Definitions),
    /// Evaluations: submit, watch, compare, repeat.
    #[command(subcommand)]
    Eval(Eval),
    /// Clusters that run evaluations.
    #[command(subcommand)]
    Clusters(Clusters),
    /// Print a shell completion script.
    Completion { shell: clap_complete::Shell },
    #[command(external_subcommand)]
    Sdk(Vec<OsString>),
}

#[derive(Debug, Args)]
pub struct Up {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:7474", value_name = "HOST:PORT")]
    pub listen: std::net::SocketAddr,
    /// Python interpreter for definitions that name none [default: python3].
    #[arg(long, value_name = "FILE")]
    pub python: Option<PathBuf>,
    /// Runs at once on this machine.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub max_runs: u32,
    /// CUDA devices to hand out; by default as many as the machine has.
    #[arg(long, value_name = "N")]
    pub cuda_devices: Option<u32>,
}

#[derive(Debug, Subcommand)]
pub enum Profile {
    /// List profiles; `*` marks the default.
    List,
    /// Make a profile the default.
    Use { name: String },
    /// Delete a profile with its credential.
    Remove { name: String },
}

#[derive(Debug, Subcommand)]
pub enum Org {
    /// List your organizations; `*` marks the active one.
    List,
    /// Make another organization the active one.
    Switch { organization: String },
}

#[derive(Debug, Subcommand)]
pub enum Keys {
    List,
    /// Make a key; its value is shown this once.
    Add {
        name: String,
        /// Scopes, for example `evaluations:read`.
        #[arg(long = "scope", required = true, value_name = "SCOPE")]
        scopes: Vec<String>,
        /// Days until it expires.
        #[arg(long, value_name = "DAYS")]
        expires_in: Option<u32>,
    },
    /// Take a key back for good.
    Revoke {
        /// Id of the key; `rlmesh keys list` shows it.
        id: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Registry {
    /// Let docker sign in to the registry with this session.
    Login,
    /// Show the registry's host and your namespaces.
    Info,
}

#[derive(Debug, Subcommand)]
pub enum Definitions {
    /// Register a definition (a new version if the name exists).
    Add {
        name: String,
        /// JSON file with the definition, as in a request; `-` reads standard input.
        file: PathBuf,
    },
    List,
    Get {
        /// `name` or `name:version`.
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Eval {
    /// Submit a request.
    Submit {
        /// JSON or YAML file; `-` reads standard input.
        file: PathBuf,
        /// Check and size it, start nothing.
        #[arg(long, conflicts_with = "wait")]
        preview: bool,
        /// Stay until it ends, then show the results.
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// List evaluations, newest first.
    List {
        #[arg(long)]
        status: Option<String>,
        /// Words in the name.
        #[arg(long, short)]
        query: Option<String>,
        /// `key:value`; repeatable.
        #[arg(long = "tag", value_name = "KEY:VALUE")]
        tags: Vec<String>,
        /// Most evaluations to show.
        #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Show one evaluation: state, what it waits for, failures.
    Get {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
    },
    /// Stay until it ends.
    Wait {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Stop it for good; the outcomes that it has stay.
    Cancel {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
    },
    /// Success rates, rewards and paired differences, with 95 % intervals.
    Results {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        #[arg(long, default_value = "task", value_parser = ["task", "scenario", "benchmark", "perturbation", "model"])]
        group_by: String,
    },
    /// Rows with their outcomes.
    Rows {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        #[arg(long, value_parser = ["pending", "scored", "errored"])]
        outcome: Option<String>,
        /// Most rows to show.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Output of a run's processes, from its cluster.
    Logs {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        /// `model-0`, `env-0-0`, `runner`; all by default.
        #[arg(long)]
        component: Option<String>,
        /// Id of the run; by default the last one with failures, else the last one.
        #[arg(long)]
        run: Option<String>,
        /// Lines of each component, counted from the end.
        #[arg(long, default_value_t = 200)]
        tail: u32,
    },
    /// Run the errored rows again, with the same seeds.
    Retry {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
    },
    /// Add episodes to each cell; existing rows stay as they are.
    Extend {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        /// How many more for each model and task.
        episodes: u64,
    },
    /// Submit the same request as a new evaluation.
    Clone {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        #[arg(long)]
        name: Option<String>,
    },
    /// Give it another name.
    Rename {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        name: String,
    },
    /// Delete an ended evaluation.
    Rm {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
    },
    /// Print the command that runs one row on a workstation.
    Reproduce {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        /// Number of the row; `rlmesh eval rows` shows it.
        row: u64,
    },
    /// Write all rows to standard output.
    Export {
        /// Id of the evaluation; `rlmesh eval list` shows it.
        id: String,
        #[arg(long, default_value = "jsonl", value_parser = ["jsonl", "csv", "result"])]
        format: String,
    },
    /// Store an SDK result file (`rlmesh.result.v1`) as a completed evaluation.
    Import { file: PathBuf },
}

#[derive(Debug, Args)]
pub struct Timeout {
    /// Seconds to wait; then exit status 8.
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub enum Clusters {
    /// List the organization's clusters.
    List,
    /// Show one cluster: whether it is connected, what it has, what it says.
    Get {
        /// Id of the cluster; `rlmesh clusters list` shows it.
        id: String,
    },
    /// Register a cluster.
    Add { name: String },
    /// Issue a join token and print the command that connects the cluster.
    JoinCommand {
        /// Id of the cluster; `rlmesh clusters list` shows it.
        id: String,
    },
    /// Stop placing runs on it; those that run end.
    Drain {
        /// Id of the cluster; `rlmesh clusters list` shows it.
        id: String,
        /// Stay until nothing runs and every result has arrived.
        #[arg(long)]
        wait: bool,
    },
    /// Place runs on it again.
    Resume {
        /// Id of the cluster; `rlmesh clusters list` shows it.
        id: String,
    },
}

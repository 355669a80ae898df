//! The `rlmesh` command (also installed as `rlmeshctl`): a thin layer over the REST API, and `up`, which runs everything on
//! this machine.
//!
//! Standard output is data only; progress, hints and errors go to standard error. Exit status: 0 done, 1 error, 2 wrong
//! usage or request, 3 not found, 4 sign-in needed, 5 the evaluation ended unsuccessfully, 8 still pending, 130 interrupted.

mod args;
mod client;
mod commands;
mod config;
mod error;
mod output;
mod progress;
mod request_file;
mod results;
mod up;

use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue};

use crate::args::{Cli, Command};
use crate::error::CliError;
use crate::output::Output;

/// Parses the arguments, runs the command, reports its error.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| with_hint(error).exit());
    let output = Output::new(cli.output);
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return output.fail(&CliError::other(format!("the async runtime could not start: {error}"))),
    };
    match runtime.block_on(run(cli, &output)) {
        Ok(code) => code,
        Err(error) => output.fail(&error),
    }
}

/// Says what removes things here to who tries `delete`.
fn with_hint(mut error: clap::Error) -> clap::Error {
    let wrong = error.get(ContextKind::InvalidSubcommand);
    if wrong.is_some_and(|wrong| matches!(wrong, ContextValue::String(name) if name == "delete")) {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec!["rm".to_owned()]));
    }
    error
}

async fn run(cli: Cli, output: &Output) -> Result<ExitCode, CliError> {
    let target = config::Target { profile: cli.profile, platform: cli.platform, state: cli.state };
    match cli.command {
        Command::Up(options) => up::run(target, options).await,
        Command::Login { no_browser } => commands::auth::login(&target, no_browser).await,
        Command::Logout => commands::auth::logout(&target).await,
        Command::Whoami => commands::auth::whoami(&target, output).await,
        Command::Token { json } => commands::auth::token(&target, json).await,
        Command::Profile(command) => commands::profile::run(&target, command, output),
        Command::Org(command) => commands::org::run(&target, command, output).await,
        Command::Keys(command) => commands::keys::run(&target, command, output).await,
        Command::Registry(command) => commands::registry::run(&target, command, output).await,
        Command::Models(command) => commands::definitions::run(&target, "models", command, output).await,
        Command::Envs(command) => commands::definitions::run(&target, "environments", command, output).await,
        Command::Eval(command) => commands::eval::run(&target, command, output).await,
        Command::Clusters(command) => commands::clusters::run(&target, command, output).await,
        Command::Completion { shell } => commands::completion(shell),
        Command::Sdk(arguments) => commands::sdk(&arguments),
    }
}

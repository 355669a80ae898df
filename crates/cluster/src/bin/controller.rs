//! `rlmesh-cluster-controller`: parses flags, starts the controller, drains it; prints the custom resource definitions.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use rlm_cluster::controller::settings::Settings;
use rlm_cluster::controller::{self, Options};
use rlm_cluster::crd;

/// How long the controller has to finish what it is writing and give its lease back.
const DRAIN: Duration = Duration::from_secs(10);

/// Makes the pods of RLMesh runs.
#[derive(Parser)]
#[command(name = "rlmesh-cluster-controller", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the controller
    Run(Box<Options>),
    /// Prints the custom resource definitions as YAML
    Crd,
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(options) => run(*options),
        Command::Crd => match print() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        },
    }
}

fn print() -> anyhow::Result<()> {
    for (_, definition) in crd::definitions() {
        print!("---\n{}", crd::yaml(&definition)?);
    }
    Ok(())
}

fn run(options: Options) -> ExitCode {
    let started = (|| {
        rlm_process::init_logging(options.log_format)?;
        let settings = Settings::read(&options.config)?;
        anyhow::Ok((settings, rlm_process::runtime(2)?))
    })();
    let (settings, runtime) = match started {
        Ok(started) => started,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(rlm_process::EXIT_CONFIG);
        }
    };
    let result: anyhow::Result<()> = runtime.block_on(async move {
        let stop = rlm_process::stop_on_signals()?;
        let admin = rlm_process::Admin::new(rlm_process::build_info!("rlmesh-cluster-controller"));
        if let Some(address) = options.admin {
            let bound = admin.listen(address, stop.clone()).await?;
            tracing::info!(%bound, "admin port");
        }
        rlm_process::drain(stop.clone(), DRAIN, controller::run(options, settings, admin, stop)).await
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! `rlmesh-gpu-discovery`: parses flags, tells the agent of this cluster which GPUs the node has until it is ended.

use std::process::ExitCode;

use clap::Parser;
use rlm_cluster::discovery;

/// Tells the RLMesh agent of this cluster which GPUs this node has.
#[derive(Parser)]
#[command(name = "rlmesh-gpu-discovery", version)]
struct Cli {
    #[command(flatten)]
    options: discovery::Options,
}

fn main() -> ExitCode {
    let options = Cli::parse().options;
    let started = rlm_process::init_logging(options.log_format).and_then(|()| rlm_process::runtime(1));
    let runtime = match started {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(rlm_process::EXIT_CONFIG);
        }
    };
    let ended = runtime.block_on(async {
        discovery::run(options, rlm_process::stop_on_signals()?).await;
        anyhow::Ok(())
    });
    // A look may still wait for a driver.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

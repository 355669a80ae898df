//! `rlmesh-cluster-agent`: parses flags, starts the agent, drains it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory as _, Parser, Subcommand};
use rlm_cluster::agent::{
    self,
    options::{ExecutorKind, Options},
};
use rlm_cluster::executor::process::{EXEC_FAILED, EXEC_FAILED_STATUS, exec_child};
use rlm_cluster::{spool, walls};

/// How long the agent has to end its runs' processes and say goodbye.
const DRAIN: Duration = Duration::from_secs(20);

/// Joins this machine to an RLMesh control plane and carries out its evaluations.
#[derive(Parser)]
#[command(name = "rlmesh-cluster-agent", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    options: Option<Options>,
}

#[derive(Subcommand)]
enum Command {
    /// Looks after the spool while the agent is stopped
    Spool {
        #[command(subcommand)]
        command: SpoolCommand,
    },
    /// Opens the ports by which the agent finds out whether the network enforces policies; runs in a pod of its own
    WallProbe {
        /// address:port that no policy lets this pod reach: the Kubernetes API
        #[arg(long)]
        outside: std::net::SocketAddr,
    },
    #[command(hide = true)]
    ExecChild {
        #[arg(long)]
        parent: i32,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

#[derive(Subcommand)]
enum SpoolCommand {
    /// Checks every page and record; prints what it found as JSON
    Verify {
        /// The agent's state folder
        #[arg(long)]
        state: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match (cli.command, cli.options) {
        (Some(Command::ExecChild { parent, program, args }), _) => {
            let error = exec_child(parent, &program, &args);
            eprintln!("{EXEC_FAILED} {error}");
            ExitCode::from(u8::try_from(EXEC_FAILED_STATUS).unwrap_or(1))
        }
        (Some(Command::Spool { command: SpoolCommand::Verify { state } }), _) => verify(&state),
        (Some(Command::WallProbe { outside }), _) => probe(outside),
        (None, Some(options)) => run(options),
        (None, None) => {
            let _ = Cli::command().print_help();
            ExitCode::from(rlm_process::EXIT_CONFIG)
        }
    }
}

fn verify(state: &std::path::Path) -> ExitCode {
    match spool::verify(state).and_then(|report| Ok((serde_json::to_string_pretty(&report)?, report.problems.is_empty()))) {
        Ok((text, good)) => {
            println!("{text}");
            if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn probe(outside: std::net::SocketAddr) -> ExitCode {
    let ended = (|| {
        rlm_process::init_logging(rlm_process::LogFormat::Json)?;
        rlm_process::runtime(1)?.block_on(async { walls::serve(outside, rlm_process::stop_on_signals()?).await })
    })();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> ExitCode {
    let started = (|| {
        rlm_process::init_logging(options.log_format)?;
        if options.die_with_parent {
            rlm_process::die_with_parent(rlm_process::ParentDeath::Terminate, None)?;
        }
        if options.executor == ExecutorKind::Process {
            options.runner()?;
        }
        rlm_process::runtime(2)
    })();
    let runtime = match started {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(rlm_process::EXIT_CONFIG);
        }
    };
    let result: anyhow::Result<()> = runtime.block_on(async move {
        let stop = rlm_process::stop_on_signals()?;
        let admin = rlm_process::Admin::new(rlm_process::build_info!("rlmesh-cluster-agent"));
        if let Some(address) = options.admin {
            let bound = admin.listen(address, stop.clone()).await?;
            tracing::info!(%bound, "admin port");
        }
        // On a worker thread, like everything that starts processes.
        let work = tokio::spawn(agent::run(options, admin, stop.clone()));
        rlm_process::drain(stop, DRAIN, async move { work.await? }).await
    });
    // A thread may still read standard input.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

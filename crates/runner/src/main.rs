//! `rlmesh-runner`: one run of an evaluation, on behalf of the agent that started it.

use std::io::BufRead as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use rlm_process::{EXIT_CONFIG, LogFormat};
use rlm_runner::{Address, CertificatePin, Identity, Start, Token, Tuning};

/// Runs one run of an evaluation. Started by rlmesh-cluster-agent, not by hand.
#[derive(Parser)]
#[command(name = "rlmesh-runner", version)]
struct Arguments {
    /// Where the agent listens: unix:///path or tcp://host:port
    #[arg(long)]
    agent: String,
    /// SHA-256 of the agent's certificate, 64 hexadecimal digits: then it is reached over TLS
    #[arg(long)]
    agent_key: Option<String>,
    /// File with the token to attach with, read each time; default: the first line of standard input
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Id of the run
    #[arg(long)]
    run: String,
    /// Processors to spread environment processes over; default: those of this machine
    #[arg(long)]
    cores: Option<u32>,
    /// How long to go on without an agent, seconds
    #[arg(long, default_value_t = 900)]
    agent_patience: u64,
    /// How log lines look: text or json
    #[arg(long, default_value = "text")]
    log_format: LogFormat,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let start = match configure(&arguments) {
        Ok(start) => start,
        Err(error) => {
            eprintln!("rlmesh-runner: {error:#}");
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    match execute(start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn configure(arguments: &Arguments) -> anyhow::Result<Start> {
    rlm_process::init_logging(arguments.log_format)?;
    let agent = Address::parse(&arguments.agent).context("--agent")?;
    let run: rlm_core::ids::RunId = arguments.run.parse().context("--run is not the id of a run")?;
    let token = match &arguments.token_file {
        Some(file) => Token::File(file.clone()),
        None => {
            let mut token = String::new();
            std::io::stdin().lock().read_line(&mut token).context("the run's token can't be read from standard input")?;
            let token = token.trim().to_owned();
            anyhow::ensure!(!token.is_empty(), "the first line of standard input has to be the run's token, it is empty");
            Token::Once(token)
        }
    };
    let pin = arguments.agent_key.as_deref().map(CertificatePin::parse).transpose().context("--agent-key")?;
    let cores =
        arguments.cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1)));
    let tuning = Tuning { agent_patience: Duration::from_secs(arguments.agent_patience), ..Tuning::default() };
    Ok(Start { agent, identity: Identity { run_id: run.to_string(), token, pin }, tuning, cores })
}

/// One thread does everything: a step of a lane passes several tasks, and waking another thread for each would cost more
/// than their work.
fn execute(start: Start) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("the async runtime could not be started")?;
    runtime.block_on(async {
        let stop = rlm_process::stop_on_signals()?;
        rlm_runner::run(start, stop).await
    })
}

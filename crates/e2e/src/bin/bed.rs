//! `bed`: the test bed by hand. `bed up`, `bed status`, `bed shell`, `bed down`.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use rlm_e2e::bed::{Bed, Component, Place, component, default_folder, gate, groups};

#[derive(Parser)]
#[command(about = "A real Kubernetes of two nodes on this machine, without an uplink, for tests")]
struct Arguments {
    /// Where all of it lies.
    #[arg(long, global = true, default_value_os_t = default_folder())]
    folder: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start it; clears away an earlier one.
    Up {
        /// Builds the programs that are missing and prints where each lies.
        #[arg(long, default_value = "scripts/bed-tools.sh")]
        tools: PathBuf,
    },
    /// What of it runs.
    Status,
    /// A shell inside it, at the gateway, with kubectl.
    Shell,
    /// End it.
    Down,
    /// (internal) The way in from this machine.
    #[command(hide = true)]
    Gate { listen: SocketAddr, namespace: PathBuf },
    /// (internal) Ends TLS before a control plane.
    #[command(hide = true)]
    Front { listen: SocketAddr, to: SocketAddr, certificate: PathBuf, key: PathBuf },
    /// (internal) Volumes for claims.
    #[command(hide = true)]
    Provision { kubeconfig: PathBuf, volumes: PathBuf },
    /// (internal) Ends this one bed when standard input is closed.
    #[command(hide = true)]
    Guard { id: String },
}

fn main() -> ExitCode {
    match act(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { folder, command } = arguments;
    if let Command::Gate { listen, namespace } = command {
        return gate::serve(listen, &namespace);
    }
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(async {
        match command {
            Command::Gate { .. } => Ok(()),
            Command::Up { tools } => up(&folder, &tools).await,
            Command::Status => status(&folder).await,
            Command::Shell => shell(&folder),
            Command::Down => Bed::down(&folder).await,
            Command::Front { listen, to, certificate, key } => rlm_e2e::bed::front::serve(listen, to, &certificate, &key).await,
            Command::Provision { kubeconfig, volumes } => rlm_e2e::bed::provisioner::serve(&kubeconfig, &volumes).await,
            Command::Guard { id } => {
                tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await?;
                Bed::down_if(&folder, &id).await
            }
        }
    })
}

async fn up(folder: &Path, script: &Path) -> anyhow::Result<()> {
    let built = rlm_e2e::bed::run(&mut tokio::process::Command::new(script), Duration::from_secs(3600)).await?;
    let bed = Bed::up(folder, &built, &std::env::current_exe()?).await?;
    println!("The bed is up. From this machine:\n  export KUBECONFIG={}", bed.layout.kubeconfig("admin"));
    println!("  {} get nodes", bed.layout.tool("kubernetes", "kubectl"));
    Ok(())
}

async fn status(folder: &Path) -> anyhow::Result<()> {
    let bed = Bed::attach(folder)?;
    for one in Component::all() {
        let state = bed.layout.processes.find(one).map_or_else(|| "does not run".to_owned(), |known| format!("process {}", known.pid));
        println!("{:<26} {state}", one.name());
    }
    println!("{} processes in all", groups::processes().len());
    print!("{}", bed.kubectl(&["get", "nodes", "--output=wide"]).await?);
    Ok(())
}

fn shell(folder: &Path) -> anyhow::Result<()> {
    let bed = Bed::attach(folder)?;
    let arguments = bed.enter(Place::Gateway)?;
    let (program, rest) = arguments.split_first().context("no command")?;
    let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    let error = std::process::Command::new(program)
        .args(rest)
        .arg(shell)
        .env("KUBECONFIG", bed.layout.kubeconfig("inside"))
        .env("PATH", format!("{}:{}", bed.layout.tool_path(), component::PATH))
        .exec();
    Err(error).context("no shell could be started in the bed")
}

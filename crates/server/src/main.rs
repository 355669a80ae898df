//! `rlmesh-server`: the control plane. Parses, opens, serves, drains.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use rlm_server::app::identity::accounts::{self, NewAccount};
use rlm_server::config::{Config, ConfigArgs};
use rlm_server::http::{self, openapi};
use rlm_server::state::{AppState, Clock};
use tokio::net::TcpListener;

#[derive(Parser)]
#[command(name = "rlmesh-server", version, about = "The RLMesh control plane")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve REST, pages and the cell protocol on one port
    Serve(ServeArgs),
    /// Print the OpenAPI document
    Openapi,
    /// Make an account that owns an organization, or set its password when it exists
    CreateAdmin(CreateAdminArgs),
    /// Set up a server for this machine alone, and print how to reach it as JSON (used by `rlmesh up`)
    LocalSetup(ConfigArgs),
}

#[derive(Args)]
struct ServeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Address and port for health, metrics and build information
    #[arg(long, env = "RLMESH_SERVER_ADMIN_LISTEN", value_name = "ADDRESS:PORT")]
    admin_listen: Option<SocketAddr>,
    /// How log lines look: text or json
    #[arg(long, env = "RLMESH_SERVER_LOG_FORMAT", default_value = "text")]
    log_format: rlm_process::LogFormat,
    /// Stop when the process that started this one ends
    #[arg(long)]
    die_with_parent: bool,
}

#[derive(Args)]
struct CreateAdminArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[arg(long)]
    email: String,
    /// Read the password from standard input, up to the end of the line
    #[arg(long, required = true)]
    password_stdin: bool,
    /// Name of the organization that the account owns
    #[arg(long, default_value = "local")]
    organization: String,
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(args) => {
            let config = match args.config.clone().load().and_then(|config| rlm_process::init_logging(args.log_format).map(|()| config)) {
                Ok(config) => config,
                Err(error) => return failed(&error, rlm_process::EXIT_CONFIG),
            };
            if args.die_with_parent
                && let Err(error) = rlm_process::die_with_parent(rlm_process::ParentDeath::Terminate, None)
            {
                return failed(&error, 1);
            }
            finish(rlm_process::runtime(workers()).and_then(|runtime| runtime.block_on(serve(config, args.admin_listen))))
        }
        Command::Openapi => finish(print_openapi()),
        Command::CreateAdmin(args) => finish(create_admin(&args)),
        Command::LocalSetup(args) => finish(local_setup(args)),
    }
}

fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error, 1),
    }
}

fn failed(error: &anyhow::Error, status: u8) -> ExitCode {
    eprintln!("rlmesh-server: {error:#}");
    ExitCode::from(status)
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8)
}

async fn serve(config: Config, admin_listen: Option<SocketAddr>) -> anyhow::Result<()> {
    let stop = rlm_process::stop_on_signals()?;
    let admin = rlm_process::Admin::new(rlm_process::build_info!("rlmesh-server"));
    if let Some(address) = admin_listen {
        let port = admin.listen(address, stop.clone()).await?;
        tracing::info!(%port, "admin port");
    }
    config.make_state_dir()?;
    let listener = TcpListener::bind(config.listen).await.with_context(|| format!("could not listen on {}", config.listen))?;
    let config = config.with_bound(listener.local_addr()?);
    let drain = config.timings.drain;
    let state = AppState::open(config, Clock::system()).await?;
    accounts::make_first_admin(&state).await?;
    let tasks = state.start_tasks(&stop);
    admin.set_ready();
    tracing::info!(listen = %state.config.listen, url = state.config.public_url, "serving");
    // For whoever started this process and waits for it.
    let _ = writeln!(std::io::stdout(), "ready {}", state.config.public_url);
    http::serve::serve(listener, http::app(state.clone()), stop, drain).await;
    tasks.close();
    if tokio::time::timeout(drain, tasks.wait()).await.is_err() {
        tracing::warn!("background work was still busy after the drain");
    }
    state.store.close().await;
    tracing::info!("stopped");
    Ok(())
}

fn print_openapi() -> anyhow::Result<()> {
    let document = openapi::document().to_pretty_json().context("the OpenAPI document could not be written")?;
    writeln!(std::io::stdout(), "{document}").context("could not write to standard output")
}

fn create_admin(args: &CreateAdminArgs) -> anyhow::Result<()> {
    let config = args.config.clone().load()?;
    config.make_state_dir()?;
    let mut password = String::new();
    std::io::stdin().take(4096).read_to_string(&mut password).context("could not read the password from standard input")?;
    let password = password.lines().next().unwrap_or_default();
    let account = NewAccount { email: args.email.clone(), first_name: String::new(), last_name: String::new() };
    rlm_process::runtime(1)?.block_on(async {
        let state = AppState::open(config, Clock::system()).await?;
        let done = accounts::ensure_owner(&state, &account, password, &args.organization).await?;
        state.store.close().await;
        eprintln!("{done} {}", account.email);
        Ok(())
    })
}

fn local_setup(args: ConfigArgs) -> anyhow::Result<()> {
    let config = args.load()?;
    config.make_state_dir()?;
    rlm_process::runtime(1)?.block_on(async {
        let state = AppState::open(config, Clock::system()).await?;
        let local = rlm_server::app::local::setup(&state).await?;
        state.store.close().await;
        let answer = serde_json::json!({
            "email": local.email,
            "passwordFile": local.password_file,
            // The one way the key leaves: a pipe to the process that asked.
            "apiKey": local.api_key.expose(),
        });
        writeln!(std::io::stdout(), "{answer}").context("could not write to standard output")
    })
}

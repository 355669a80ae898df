//! `rlmesh up`: the control plane and a local cell on this machine, supervised.
//!
//! The server and the agent are separate processes that talk over the real protocols; this one starts them, restarts what
//! dies, and keeps nothing of its own but the address and key it leaves for `--state`. It never touches a result.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::Up;
use crate::client::Client;
use crate::config::{self, LocalEndpoint, Target};
use crate::error::CliError;
use crate::output::note;

/// Pause before an agent that ended is started again.
const AGENT_RESTART: Duration = Duration::from_millis(100);
/// Longest wait for the server's new join token.
const TOKEN_DEADLINE: Duration = Duration::from_secs(5);
/// Longest wait for the cell before `rlmesh up` says that it runs.
const CELL_DEADLINE: Duration = Duration::from_secs(10);
/// How long a child may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
const START_DEADLINE: Duration = Duration::from_secs(30);
const CELL: &str = "local";

pub async fn run(target: Target, options: Up) -> Result<ExitCode, CliError> {
    check(&options)?;
    let state = match target.state {
        Some(state) => std::path::absolute(&state).map_err(|error| CliError::usage(format!("--state {}: {error}", state.display())))?,
        None => config::default_state()?,
    };
    config::private_dir(&state)?;
    let _lock = lock(&state)?;
    let programs = Programs::find()?;
    let listen = free_port(options.listen)?;
    let url = format!("http://{listen}");

    let setup = local_setup(&programs.server, &state).await?;
    let api_key = setup["apiKey"].as_str().ok_or_else(|| CliError::other("the server's set-up answered without a key"))?.to_owned();
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| CliError::other(format!("signals can't be received: {error}")))?;
    let mut server = Supervised::new("rlmesh-server");
    server.start(programs.server(&state, listen))?;
    wait_until_up(&url, &mut server).await?;
    let endpoint = LocalEndpoint { url: url.clone(), api_key };
    let bytes = serde_json::to_vec(&endpoint).map_err(|error| CliError::other(format!("the endpoint can't be written: {error}")))?;
    config::write_private(&state.join("endpoint.json"), &bytes)?;
    let client = Client::new(&Target { state: Some(state.clone()), ..Target::default() })?;

    let mut agent = Supervised::new("rlmesh-cluster-agent");
    let token = join_token(&client, &state).await?;
    agent.start(programs.agent(&state, &url, &options, token.is_some()))?;
    agent.feed(token).await?;

    let mut said = false;
    let mut agent_ended = None;
    let outcome = loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => break Ok(ExitCode::SUCCESS),
            _ = terminate.recv() => break Ok(ExitCode::SUCCESS),
            () = cell_connected(&client), if !said => {
                banner(&url, &state, &setup);
                said = true;
            }
            ended = server.ended() => {
                if let Err(error) = server.restart(ended, programs.server(&state, listen)).await { break Err(error) }
            }
            ended = agent.ended(), if agent_ended.is_none() => agent_ended = Some(ended),
            () = tokio::time::sleep(AGENT_RESTART), if agent_ended.is_some() => {
                // Before it has joined it needs a token, and for that the server: this comes round until it answers.
                let Ok(Ok(token)) = tokio::time::timeout(TOKEN_DEADLINE, join_token(&client, &state)).await else { continue };
                let command = programs.agent(&state, &url, &options, token.is_some());
                if let Err(error) = agent.restart(agent_ended.take().unwrap_or_default(), command).await { break Err(error) }
                if let Err(error) = agent.feed(token).await { break Err(error) }
            }
        }
    };
    note("Stopping; unfinished evaluations go on at the next start.");
    agent.stop().await;
    server.stop().await;
    outcome
}

/// What can be known to be wrong before anything is written.
fn check(options: &Up) -> Result<(), CliError> {
    if !options.listen.ip().is_loopback() {
        return Err(CliError::usage(format!(
            "--listen {}: `rlmesh up` serves this machine alone; use a loopback address such as 127.0.0.1:7474",
            options.listen
        )));
    }
    if let Some(python) = options.python.as_ref().filter(|python| python.components().count() > 1 && !python.is_file()) {
        return Err(CliError::usage(format!("--python {}: there is no such file", python.display())));
    }
    Ok(())
}

/// One `rlmesh up` per state folder.
fn lock(state: &Path) -> Result<std::fs::File, CliError> {
    let path = state.join("up.lock");
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|error| CliError::other(format!("{} can't be opened: {error}", path.display())))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        CliError::usage(format!("another `rlmesh up` runs with the state folder {}; stop it or choose another --state", state.display()))
    })?;
    Ok(file)
}

/// The address with a free port in place of 0; says so when the port is taken.
fn free_port(listen: SocketAddr) -> Result<SocketAddr, CliError> {
    TcpListener::bind(listen).and_then(|listener| listener.local_addr()).map_err(|error| {
        CliError::usage(format!("{listen} can't be listened on: {error}; choose another with --listen (port 0 takes a free one)"))
    })
}

/// The sibling binaries.
struct Programs {
    server: PathBuf,
    agent: PathBuf,
}

impl Programs {
    fn find() -> Result<Self, CliError> {
        let own = std::env::current_exe().map_err(|error| CliError::other(format!("the folder of this program is unknown: {error}")))?;
        let sibling = |name: &str| {
            let path = own.with_file_name(name);
            if path.is_file() {
                Ok(path)
            } else {
                Err(CliError::other(format!(
                    "{} is missing: `rlmesh up` needs it beside `rlmesh`; build or install all of RLMesh",
                    path.display()
                )))
            }
        };
        sibling("rlmesh-runner")?;
        Ok(Self { server: sibling("rlmesh-server")?, agent: sibling("rlmesh-cluster-agent")? })
    }

    fn server(&self, state: &Path, listen: SocketAddr) -> Command {
        let mut command = Command::new(&self.server);
        command.arg("serve").arg("--state-dir").arg(state.join("server")).arg("--listen").arg(listen.to_string()).arg("--die-with-parent");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    fn agent(&self, state: &Path, url: &str, options: &Up, joins: bool) -> Command {
        let mut command = Command::new(&self.agent);
        command.args(["--executor", "process", "--die-with-parent", "--max-backoff", "5", "--server", url]);
        command.arg("--state").arg(state.join("agent"));
        command.args(["--max-runs", &options.max_runs.to_string()]);
        if let Some(python) = &options.python {
            // Components start in folders of their own. A name alone is looked up on PATH.
            let is_path = python.components().count() > 1;
            command.arg("--python").arg(if is_path {
                std::path::absolute(python).unwrap_or_else(|_| python.clone())
            } else {
                python.clone()
            });
        }
        if let Some(devices) = options.cuda_devices {
            command.args(["--cuda-devices", &devices.to_string()]);
        }
        if joins {
            command.args(["--join-token-file", "/dev/stdin"]).stdin(Stdio::piped());
        } else {
            command.stdin(Stdio::null());
        }
        command
    }
}

/// Makes the local organization, its admin and a key, before the server runs: `{email, passwordFile, apiKey}`.
async fn local_setup(server: &Path, state: &Path) -> Result<Value, CliError> {
    let run = Command::new(server).arg("local-setup").arg("--state-dir").arg(state.join("server")).stdin(Stdio::null()).output();
    let output = tokio::time::timeout(START_DEADLINE, run)
        .await
        .map_err(|_| CliError::other("the server's set-up did not end in time"))?
        .map_err(|error| CliError::other(format!("{} could not be started: {error}", server.display())))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(CliError::other(format!("the server's set-up failed ({}): {}", output.status, said.trim())));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| CliError::other(format!("the server's set-up can't be read: {error}")))
}

async fn wait_until_up(url: &str, server: &mut Supervised) -> Result<(), CliError> {
    let client = Client::anonymous(url)?;
    let started = Instant::now();
    loop {
        if let Ok(info) = client.info().await {
            note(&format!("rlmesh-server {} answers at {url}", info.version));
            return Ok(());
        }
        if let Some(status) = server.try_ended() {
            return Err(CliError::other(format!("rlmesh-server ended at start ({status}); its message is above")));
        }
        if started.elapsed() > START_DEADLINE {
            return Err(CliError::other(format!("rlmesh-server does not answer at {url} after {} s", START_DEADLINE.as_secs())));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A join token for the local cell; None when its agent has joined already.
async fn join_token(client: &Client, state: &Path) -> Result<Option<String>, CliError> {
    let clusters = crate::commands::items(client, "/v1/clusters", &[], 1000).await?;
    let cell = clusters.iter().find(|cluster| cluster["name"] == CELL);
    // A file that can't be read is as good as none: the agent joins anew.
    let credentials = std::fs::read(state.join("agent").join("credentials.json")).unwrap_or_default();
    let joined = serde_json::from_slice::<Value>(&credentials).is_ok_and(|read| read["credentials"].is_array());
    let id = match cell {
        Some(_) if joined => return Ok(None),
        Some(cell) => cell["id"].clone(),
        None => client.post("/v1/clusters", &json!({"name": CELL})).await?["id"].clone(),
    };
    let id = id.as_str().ok_or_else(|| CliError::other("the server's answer has no cluster id"))?.to_owned();
    let token = client.post(&format!("/v1/clusters/{id}/join-tokens"), &json!({})).await?;
    Ok(token["token"].as_str().map(str::to_owned))
}

/// Waits until what is submitted finds the cell; not for long, should it have trouble.
async fn cell_connected(client: &Client) {
    let started = Instant::now();
    while started.elapsed() < CELL_DEADLINE {
        let clusters = crate::commands::items(client, "/v1/clusters", &[], 1000).await.unwrap_or_default();
        if clusters.iter().any(|cluster| cluster["name"] == CELL && cluster["status"] == "connected") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn banner(url: &str, state: &Path, setup: &Value) {
    let state = state.display();
    note(&format!(
        "RLMesh runs on this machine.\n  address   {url}\n  sign in   {} with the password in {}\n  state     {state}\nSubmit:  rlmesh --state {state} eval submit FILE --wait\nThe SDK's own CLI: rlmesh login --platform {url}\nCtrl-C stops it; the state stays.",
        setup["email"].as_str().unwrap_or_default(),
        setup["passwordFile"].as_str().unwrap_or_default(),
    ));
}

/// A child process that is started again when it ends.
struct Supervised {
    name: &'static str,
    child: Option<Child>,
    started: Instant,
    quick_ends: u32,
}

impl Supervised {
    /// A child that lived this long did start.
    const STEADY: Duration = Duration::from_secs(10);
    const MAX_QUICK_ENDS: u32 = 10;

    fn new(name: &'static str) -> Self {
        Self { name, child: None, started: Instant::now(), quick_ends: 0 }
    }

    fn start(&mut self, mut command: Command) -> Result<(), CliError> {
        // A group of its own: Ctrl-C in a terminal is for this program, which then ends its children in order.
        let child = command
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| CliError::other(format!("{} could not be started: {error}", self.name)))?;
        self.child = Some(child);
        self.started = Instant::now();
        Ok(())
    }

    /// Writes the join token to the child's standard input and closes it.
    async fn feed(&mut self, token: Option<String>) -> Result<(), CliError> {
        if let (Some(token), Some(mut stdin)) = (token, self.child.as_mut().and_then(|child| child.stdin.take())) {
            stdin
                .write_all(token.as_bytes())
                .await
                .map_err(|error| CliError::other(format!("{} did not take its join token: {error}", self.name)))?;
        }
        Ok(())
    }

    async fn ended(&mut self) -> String {
        match &mut self.child {
            Some(child) => match child.wait().await {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            },
            None => std::future::pending().await,
        }
    }

    fn try_ended(&mut self) -> Option<String> {
        self.child.as_mut().and_then(|child| child.try_wait().ok().flatten()).map(|status| status.to_string())
    }

    /// Starts the next one; gives up when it keeps ending at once.
    async fn restart(&mut self, ended: String, command: Command) -> Result<(), CliError> {
        self.child = None;
        self.quick_ends = if self.started.elapsed() < Self::STEADY { self.quick_ends + 1 } else { 0 };
        if self.quick_ends > Self::MAX_QUICK_ENDS {
            return Err(CliError::other(format!("{} keeps ending ({ended}); its messages are above", self.name)));
        }
        note(&format!("{} ended ({ended}); starting it again", self.name));
        tokio::time::sleep(Duration::from_millis(100) * self.quick_ends.pow(2)).await;
        self.start(command)
    }

    async fn stop(&mut self) {
        let Some(child) = &mut self.child else { return };
        if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw) {
            // It may have ended by itself meanwhile.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(GRACE, child.wait()).await.is_err() {
            note(&format!("{} did not stop within {} s and is killed", self.name, GRACE.as_secs()));
            let _ = child.kill().await;
        }
    }
}

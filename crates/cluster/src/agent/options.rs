//! The agent's flags. No flag takes a secret: secrets come in files or on standard input.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use rlm_process::LogFormat;

/// Where runs happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExecutorKind {
    /// Child processes of the agent, on this machine.
    Process,
    /// Pods of the cluster that the agent runs in.
    Kubernetes,
}

#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Where the control plane is: https://host, or http://127.0.0.1:port on this machine
    #[arg(long)]
    pub server: String,
    /// Folder for credentials, the spool and logs; made when it does not exist, one agent per folder
    #[arg(long)]
    pub state: PathBuf,
    /// Where runs happen
    #[arg(long, value_enum, default_value = "process")]
    pub executor: ExecutorKind,
    /// Namespace of this agent, where ConfigMap rlmesh-cell and GPU discovery are, with --executor kubernetes
    #[arg(long, default_value = "rlmesh-system")]
    pub system_namespace: String,
    /// Namespace of runs, with --executor kubernetes
    #[arg(long, default_value = "rlmesh-runs")]
    pub runs_namespace: String,
    /// Where runners' pods are listened for, with --executor kubernetes
    #[arg(long, default_value = "0.0.0.0:7443")]
    pub runner_listen: SocketAddr,
    /// address:port by which runners' pods reach this agent: they resolve no names
    #[arg(long, required_if_eq("executor", "kubernetes"))]
    pub runner_address: Option<SocketAddr>,
    /// Pods that runs may have at once, with --executor kubernetes; 0 sets no limit
    #[arg(long, default_value_t = 0)]
    pub max_pods: u32,
    /// GPUs that runs may have at once, with --executor kubernetes; 0 sets no limit
    #[arg(long, default_value_t = 0)]
    pub max_gpus: u32,
    /// With --executor kubernetes: no run starts until the network is known to enforce NetworkPolicies
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub require_enforcement: bool,
    /// File with the control credential, which is followed, in place of the one that joining stores
    #[arg(long)]
    pub credential_file: Option<PathBuf>,
    /// File with the join token, which is followed, or /dev/stdin, which is read once; not needed once joined
    #[arg(long)]
    pub join_token_file: Option<PathBuf>,
    /// The runner's program [default: rlmesh-runner beside this one]
    #[arg(long)]
    pub runner: Option<PathBuf>,
    /// Interpreter of models and environments that name none
    #[arg(long, default_value = "python3")]
    pub python: PathBuf,
    /// CUDA devices to hand out [default: as many as /dev/nvidia0, /dev/nvidia1, ...]
    #[arg(long)]
    pub cuda_devices: Option<u32>,
    /// Runs at once; with --executor kubernetes 0 sets no limit
    #[arg(long, default_value_t = 2)]
    pub max_runs: u32,
    /// Bytes that the spool may use
    #[arg(long, default_value_t = 10 << 30)]
    pub spool_bytes: u64,
    /// PEM certificates to trust in place of the system's
    #[arg(long)]
    pub ca_bundle: Option<PathBuf>,
    /// Longest pause between tries to reach the control plane, in seconds
    #[arg(long, default_value_t = 120.0)]
    pub max_backoff: f64,
    /// Seconds between heartbeats
    #[arg(long, default_value_t = 10.0)]
    pub heartbeat: f64,
    /// Seconds between looks at the credentials file and the join token
    #[arg(long, default_value_t = 2.0, hide = true)]
    pub poll: f64,
    /// Address of the admin port (/livez, /readyz, /metrics); none without it
    #[arg(long)]
    pub admin: Option<SocketAddr>,
    /// Stop when the process that started this one ends
    #[arg(long)]
    pub die_with_parent: bool,
    /// Log lines as text or json
    #[arg(long, default_value = "text")]
    pub log_format: LogFormat,
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::from_secs(1)).max(Duration::from_millis(10))
}

impl Options {
    #[must_use]
    pub fn max_backoff(&self) -> Duration {
        seconds(self.max_backoff)
    }

    #[must_use]
    pub fn heartbeat(&self) -> Duration {
        seconds(self.heartbeat)
    }

    #[must_use]
    pub fn poll(&self) -> Duration {
        seconds(self.poll)
    }

    /// The runner's program.
    pub fn runner(&self) -> anyhow::Result<PathBuf> {
        let path = match &self.runner {
            Some(path) => path.clone(),
            None => {
                let own = std::env::current_exe().context("this program's own path is not known; use --runner")?;
                own.with_file_name("rlmesh-runner")
            }
        };
        let path = std::path::absolute(&path)?;
        anyhow::ensure!(
            path.is_file(),
            "the runner {} does not exist; put rlmesh-runner beside this program, or use --runner",
            path.display()
        );
        Ok(path)
    }
}

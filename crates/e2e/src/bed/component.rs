//! The processes of the bed: what each is started with, in which namespace, and whether it still runs.
//!
//! A process is known by its number and its start time, both written down when it is started: a number that was given to
//! another process since is never signalled.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, WaitOptions};

use super::names::Node;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Component {
    /// Keeps the gateway's namespaces alive.
    Gateway,
    /// Keeps a node's namespaces alive.
    Holder(Node),
    /// The way from this machine's loopback into the bed.
    Gate,
    Etcd,
    ApiServer,
    ControllerManager,
    Scheduler,
    Registry,
    Provisioner,
    Containerd(Node),
    Kubelet(Node),
    KubeProxy(Node),
    KubeRouter(Node),
}

impl Component {
    #[must_use]
    pub fn all() -> Vec<Self> {
        let shared = [
            Self::Gateway,
            Self::Gate,
            Self::Etcd,
            Self::ApiServer,
            Self::ControllerManager,
            Self::Scheduler,
            Self::Registry,
            Self::Provisioner,
        ];
        let per_node = Node::ALL.into_iter().flat_map(|node| {
            [Self::Holder(node), Self::Containerd(node), Self::Kubelet(node), Self::KubeProxy(node), Self::KubeRouter(node)]
        });
        shared.into_iter().chain(per_node).collect()
    }

    #[must_use]
    pub fn name(self) -> String {
        let (name, node) = match self {
            Self::Gateway => ("gateway", None),
            Self::Gate => ("gate", None),
            Self::Etcd => ("etcd", None),
            Self::ApiServer => ("kube-apiserver", None),
            Self::ControllerManager => ("kube-controller-manager", None),
            Self::Scheduler => ("kube-scheduler", None),
            Self::Registry => ("registry", None),
            Self::Provisioner => ("provisioner", None),
            Self::Holder(node) => ("holder", Some(node)),
            Self::Containerd(node) => ("containerd", Some(node)),
            Self::Kubelet(node) => ("kubelet", Some(node)),
            Self::KubeProxy(node) => ("kube-proxy", Some(node)),
            Self::KubeRouter(node) => ("kube-router", Some(node)),
        };
        node.map_or_else(|| name.to_owned(), |node: Node| format!("{name}-{}", node.name()))
    }
}

/// Which process a component is, as long as it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    pub pid: u32,
    started: u64,
}

impl Known {
    fn now(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        // A zombie is gone already. Field 22 of proc(5), of which two came before the bracket.
        (*fields.first()? != "Z").then_some(())?;
        Some(Self { pid, started: fields.get(19)?.parse().ok()? })
    }

    #[must_use]
    pub fn lives(self) -> bool {
        // Where this process is its parent, nobody else can clear it away; where not, the call says so and changes nothing.
        if let Some(pid) = pid(self.pid) {
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
        Self::now(self.pid) == Some(self)
    }

    pub fn signal(self, signal: Signal) {
        if let (true, Some(pid)) = (self.lives(), pid(self.pid)) {
            // It may have ended this moment, which is what was wanted.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

fn pid(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw)
}

/// Where the numbers and the output of the bed's processes lie.
#[derive(Debug, Clone)]
pub struct Processes {
    folder: PathBuf,
}

impl Processes {
    pub fn new(bed: &Path) -> Self {
        Self { folder: bed.join("processes") }
    }

    #[must_use]
    pub fn log(&self, component: Component) -> PathBuf {
        self.folder.join(format!("{}.log", component.name()))
    }

    fn record(&self, component: Component) -> PathBuf {
        self.folder.join(component.name())
    }

    /// None: never started, or ended.
    #[must_use]
    pub fn find(&self, component: Component) -> Option<Known> {
        let text = std::fs::read_to_string(self.record(component)).ok()?;
        let (pid, started) = text.trim().split_once(' ')?;
        Some(Known { pid: pid.parse().ok()?, started: started.parse().ok()? }).filter(|known| known.lives())
    }

    /// Starts it in control group `group` (a `cgroup.procs` file). It outlives this process.
    pub fn start(&self, component: Component, group: &Path, arguments: &[String]) -> anyhow::Result<Known> {
        let name = component.name();
        ensure!(self.find(component).is_none(), "{name} runs already");
        let log = self.log(component);
        let output = std::fs::File::options().create(true).append(true).open(&log).with_context(|| format!("{}", log.display()))?;
        let child = Command::new("/bin/sh")
            .args(["-c", r#"echo $$ > "$0" && exec "$@""#])
            .arg(group)
            .args(arguments)
            .env_clear()
            .env("PATH", PATH)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // Ctrl-C at the terminal is for the command that was started there.
            .process_group(0)
            .spawn()
            .with_context(|| format!("{name} could not be started"))?;
        let known = Known::now(child.id()).with_context(|| format!("{name} ended at once: see {}", log.display()))?;
        std::fs::write(self.record(component), format!("{} {}", known.pid, known.started))?;
        Ok(known)
    }

    /// Ends it by `signal` and waits. One that doesn't run is no error.
    pub async fn end(&self, component: Component, signal: Signal) -> anyhow::Result<()> {
        let Some(known) = self.find(component) else { return Ok(()) };
        known.signal(signal);
        let asked = Instant::now();
        while known.lives() {
            ensure!(asked.elapsed() < Duration::from_secs(20), "{} did not end within 20 s of {signal:?}", component.name());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

/// The programs of Debian that kubelet, containerd and the others call.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

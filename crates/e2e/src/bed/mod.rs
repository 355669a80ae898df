//! The test bed: a real Kubernetes of two nodes in namespaces of its own, without an uplink.
//!
//! Everything of it lies in one folder, runs in one control group, and listens only inside its network; the gate is the way
//! in from this machine. It never touches a process, mount or interface that is not its own.

pub mod component;
pub mod faults;
pub mod front;
pub mod gate;
pub mod groups;
pub mod images;
pub mod lab;
mod launch;
mod layout;
pub mod names;
mod net;
mod pki;
pub mod provisioner;
pub mod shared;
pub mod space;

use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use rustix::process::Signal;
use serde_json::json;

pub use component::Component;
pub use launch::Place;
pub use layout::Layout;
pub use names::Node;

use crate::wait_for;

/// Of one command inside the bed.
const COMMAND: Duration = Duration::from_secs(60);
/// Of one step of the start.
const STEP: Duration = Duration::from_secs(60);

/// A bed that is up.
#[derive(Debug, Clone)]
pub struct Bed {
    pub layout: Layout,
}

/// Where the bed lies if nobody says otherwise.
#[must_use]
pub fn default_folder() -> PathBuf {
    std::env::temp_dir().join("rlmesh-bed")
}

/// Why there can be no bed on this machine. None: there can.
#[must_use]
pub fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("the test bed makes namespaces and control groups, for which it must be root".to_owned());
    }
    groups::missing()
}

impl Bed {
    /// The bed that is up there.
    pub fn attach(folder: &Path) -> anyhow::Result<Self> {
        let layout = Layout::read(folder)?;
        ensure!(layout.processes.find(Component::Gateway).is_some(), "the bed in {} is not up", folder.display());
        Ok(Self { layout })
    }

    /// Clears away what an earlier one has left, and starts a bed. `tools` is what `scripts/bed-tools.sh` printed, `program`
    /// the `bed` program.
    pub async fn up(folder: &Path, tools: &str, program: &Path) -> anyhow::Result<Self> {
        Ok(Self::up_alone(folder, tools, program).await?.0)
    }

    /// The same; nobody else starts or ends a bed there before the file is dropped.
    pub async fn up_alone(folder: &Path, tools: &str, program: &Path) -> anyhow::Result<(Self, std::fs::File)> {
        if let Some(why) = missing() {
            bail!("{why}");
        }
        let held = alone(folder).await?;
        ensure!(
            !["/run", "/var/lib", "/var/log"].iter().any(|hidden| folder.starts_with(hidden)),
            "{} can't hold the bed: its nodes have a /run, a /var/lib and a /var/log of their own",
            folder.display()
        );
        let mut steps = Steps::new();
        Self::end(folder).await?;
        std::fs::DirBuilder::new().mode(0o700).create(folder).with_context(|| format!("{} can't be made", folder.display()))?;
        steps.done("clear away an earlier bed");
        let gate = crate::stack::free_port()?;
        let bed = Self { layout: Layout::create(folder, tools, program, ([127, 0, 0, 1], gate).into())? };
        groups::make()?;
        steps.done("files, certificates, control groups");
        bed.namespaces().await?;
        steps.done("namespaces and links");
        for component in [Component::Gate, Component::Etcd, Component::ApiServer, Component::Registry] {
            bed.start(component)?;
        }
        for node in Node::ALL {
            bed.start(Component::Containerd(node))?;
        }
        bed.containerd_ready().await?;
        bed.import_system_images().await?;
        steps.done("containerd, system images");
        bed.api_ready().await?;
        steps.done("etcd and kube-apiserver");
        bed.register().await?;
        for component in [Component::ControllerManager, Component::Scheduler] {
            bed.start(component)?;
        }
        for node in Node::ALL {
            for component in [Component::Kubelet(node), Component::KubeProxy(node)] {
                bed.start(component)?;
            }
        }
        bed.start(Component::Provisioner)?;
        let manifest = bed.layout.path("bed.yaml");
        layout::write(Path::new(&manifest), include_str!("../../../../testbed/manifests/bed.yaml"))?;
        bed.kubectl(&["create", "--filename", &manifest]).await?;
        for node in Node::ALL {
            bed.node_ready(node, true).await?;
            bed.start(Component::KubeRouter(node))?;
        }
        steps.done("both nodes Ready");
        bed.kubectl(&["rollout", "status", "--namespace=kube-system", "deployment/coredns", "--timeout=50s"]).await?;
        steps.done("names resolve");
        Ok((bed, held))
    }

    /// Ends the bed that lies there, whole, in parts or already gone; removes its folder.
    pub async fn down(folder: &Path) -> anyhow::Result<()> {
        let _alone = alone(folder).await?;
        Self::end(folder).await
    }

    /// Ends the bed that lies there if it is still the one with this [`Layout::id`].
    pub async fn down_if(folder: &Path, id: &str) -> anyhow::Result<()> {
        let _alone = alone(folder).await?;
        match Layout::read(folder) {
            Ok(layout) if layout.id == id => Self::end(folder).await,
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn end(folder: &Path) -> anyhow::Result<()> {
        if let Ok(layout) = Layout::read(folder) {
            // First those that would start again what is ended next.
            for node in Node::ALL {
                layout.processes.end(Component::Kubelet(node), Signal::KILL).await?;
            }
        }
        groups::end().await?;
        // With the last process of a namespace its mounts and links are gone; where one is left, its files are not ours to remove.
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        let below = format!(" {}/", folder.display());
        ensure!(!mounts.contains(&below), "something is mounted below {}: unmount it", folder.display());
        match std::fs::symlink_metadata(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error).with_context(|| format!("{} can't be looked at", folder.display())),
            Ok(found) => {
                let own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
                // An empty one is made, or half made, by an earlier start.
                let bed = folder.join("bed").is_file() || std::fs::read_dir(folder)?.next().is_none();
                ensure!(own && bed, "{} is no folder of a test bed: name another", folder.display());
                std::fs::remove_dir_all(folder).with_context(|| format!("{} can't be removed", folder.display()))
            }
        }
    }

    async fn namespaces(&self) -> anyhow::Result<()> {
        self.hold(Component::Gateway).await?;
        self.shell(Place::Gateway, &net::gateway(&self.layout)).await?;
        for node in Node::ALL {
            let holder = self.hold(Component::Holder(node)).await?;
            self.shell(Place::Gateway, &net::link(node, holder)).await?;
            self.shell(Place::Node(node), &net::node(node, &self.layout)).await?;
        }
        Ok(())
    }

    async fn hold(&self, component: Component) -> anyhow::Result<u32> {
        let known = self.start(component)?;
        let marker = PathBuf::from(self.layout.marker(component));
        wait_for("a namespace", STEP, async || {
            ensure!(known.lives(), "no namespace could be made: see {}", self.layout.processes.log(component).display());
            Ok(marker.exists().then_some(()))
        })
        .await?;
        Ok(known.pid)
    }

    /// Starts a component that does not run.
    pub fn start(&self, component: Component) -> anyhow::Result<component::Known> {
        let mut arguments = self.enter(launch::place(component))?;
        arguments.extend(launch::arguments(component, &self.layout));
        self.layout.processes.start(component, &groups::procs(), &arguments)
    }

    /// What stands before a command so that it runs there.
    pub fn enter(&self, place: Place) -> anyhow::Result<Vec<String>> {
        let holder = match place {
            Place::Machine => return Ok(Vec::new()),
            Place::Gateway => Component::Gateway,
            Place::Node(node) => Component::Holder(node),
        };
        let known = self
            .layout
            .processes
            .find(holder)
            .with_context(|| format!("{} does not run: the bed is broken, start it anew", holder.name()))?;
        Ok(["nsenter", "--target", &known.pid.to_string(), "--net", "--mount", "--"].map(ToOwned::to_owned).to_vec())
    }

    /// Runs a shell script there to its end; its standard output. It ends at the first command that fails.
    pub async fn shell(&self, place: Place, script: &str) -> anyhow::Result<String> {
        let mut arguments = self.enter(place)?;
        arguments.extend(["/bin/sh", "-euc", script].map(ToOwned::to_owned));
        let (program, rest) = arguments.split_first().context("no command")?;
        run(tokio::process::Command::new(program).args(rest).env("PATH", component::PATH), COMMAND)
            .await
            .with_context(|| format!("in {place:?}"))
    }

    /// `kubectl` from this machine; its standard output.
    pub async fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = tokio::process::Command::new(self.layout.tool("kubernetes", "kubectl"));
        run(command.arg("--kubeconfig").arg(self.layout.kubeconfig("admin")).args(arguments), COMMAND).await
    }

    /// Speaks to the bed's apiserver from this machine, as its administrator.
    pub async fn client(&self) -> anyhow::Result<Client> {
        client(Path::new(&self.layout.kubeconfig("admin"))).await
    }

    async fn containerd_ready(&self) -> anyhow::Result<()> {
        for node in Node::ALL {
            wait_for(&format!("containerd of {}", node.name()), STEP, async || Ok(self.shell(Place::Node(node), "ctr version").await.ok()))
                .await?;
        }
        Ok(())
    }

    /// Waits until the apiserver is ready.
    pub async fn api_ready(&self) -> anyhow::Result<()> {
        let client = self.client().await?;
        wait_for("kube-apiserver to be ready", STEP, async || {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            let asked = tokio::time::timeout(Duration::from_secs(2), client.request_text(request)).await;
            ensure!(
                self.layout.processes.find(Component::ApiServer).is_some(),
                "kube-apiserver ended: see {}",
                self.layout.processes.log(Component::ApiServer).display()
            );
            Ok(matches!(asked, Ok(Ok(_))).then_some(()))
        })
        .await
    }

    /// The nodes with their pod networks, before their kubelets find them: no controller need hand these out.
    async fn register(&self) -> anyhow::Result<()> {
        let nodes: Api<KubeNode> = Api::all(self.client().await?);
        for node in Node::ALL {
            let object = serde_json::from_value(json!({
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node.name()},
                "spec": {"podCIDR": node.pod_cidr(), "podCIDRs": [node.pod_cidr()]},
            }))?;
            nodes.create(&PostParams::default(), &object).await.with_context(|| format!("{} can't be registered", node.name()))?;
        }
        Ok(())
    }

    /// Waits until the cluster says that the node is ready, or not.
    pub async fn node_ready(&self, node: Node, ready: bool) -> anyhow::Result<()> {
        let nodes: Api<KubeNode> = Api::all(self.client().await?);
        wait_for(&format!("{} to be ready: {ready}", node.name()), STEP, async || {
            Ok((is_ready(&nodes.get(node.name()).await?) == ready).then_some(()))
        })
        .await
    }
}

/// Beds in one folder are started and ended one at a time; held until it is dropped.
async fn alone(folder: &Path) -> anyhow::Result<std::fs::File> {
    let path = folder.with_extension("lock");
    let file = std::fs::File::create(&path).with_context(|| format!("{} can't be made", path.display()))?;
    tokio::task::spawn_blocking(move || file.lock().map(|()| file)).await?.with_context(|| format!("{} can't be locked", path.display()))
}

fn is_ready(node: &KubeNode) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

pub async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig)?;
    let mut config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    config.connect_timeout = Some(Duration::from_secs(5));
    Ok(Client::try_from(config)?)
}

/// Runs a command to its end; its standard output. One that fails, or takes longer, is an error with what it said.
pub async fn run(command: &mut tokio::process::Command, limit: Duration) -> anyhow::Result<String> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let what = format!("{:?}", command.as_std());
    let output = tokio::time::timeout(limit, command.output())
        .await
        .with_context(|| format!("{what} took longer than {} s", limit.as_secs()))?
        .with_context(|| format!("{what} can't be run"))?;
    ensure!(output.status.success(), "{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Says what took how long.
struct Steps {
    began: Instant,
    last: Instant,
}

impl Steps {
    fn new() -> Self {
        Self { began: Instant::now(), last: Instant::now() }
    }

    fn done(&mut self, what: &str) {
        eprintln!("{:6.1} s  {what} ({:.1} s in all)", self.last.elapsed().as_secs_f64(), self.began.elapsed().as_secs_f64());
        self.last = Instant::now();
    }
}

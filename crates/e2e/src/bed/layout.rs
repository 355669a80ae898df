//! Where the bed's files lie, and the files that its components read.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::json;

use super::component::{Component, Processes};
use super::names::{API_PORT, GATEWAY, HOSTS, Node, REGISTRY, REGISTRY_HOST};
use super::{launch, pki};

#[derive(Debug, Clone)]
pub struct Layout {
    pub folder: PathBuf,
    /// No other bed has it.
    pub id: String,
    pub processes: Processes,
    /// Folder of the built programs, by tool.
    tools: HashMap<String, PathBuf>,
    /// The `bed` program: gate and provisioner are subcommands of it.
    pub program: PathBuf,
    /// Where the gate listens on this machine.
    pub gate: SocketAddr,
}

impl Layout {
    /// Writes all files of a new bed.
    pub fn create(folder: &Path, tools: &str, program: &Path, gate: SocketAddr) -> anyhow::Result<Self> {
        for sub in ["pki", "processes", "volumes", "kubeconfig", "registries", "registry"] {
            std::fs::create_dir_all(folder.join(sub))?;
        }
        let id = format!("{}-{}", std::process::id(), std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos());
        write(&folder.join("bed"), &json!({"id": id, "tools": tools, "program": program, "gate": gate}).to_string())?;
        let layout = Self::read(folder)?;
        pki::make(&folder.join("pki"))?;
        layout.kubeconfigs()?;
        let hosts: String = HOSTS.iter().map(|(name, address)| format!("{address} {name}\n")).collect();
        write(&folder.join("hosts"), &format!("127.0.0.1 localhost\n{hosts}"))?;
        write(&folder.join("resolv.conf"), "nameserver 127.0.0.1\n")?;
        layout.registry()?;
        for node in Node::ALL {
            let own = folder.join(node.name());
            for sub in ["cni", "certificates", "lib/containerd", "lib/kubelet", "lib/cni", "log/pods", "log/containers"] {
                std::fs::create_dir_all(own.join(sub))?;
            }
            write(&own.join("kubelet.yaml"), &launch::kubelet(node, &layout))?;
            write(&own.join("containerd.toml"), &launch::containerd(node, &layout))?;
            write(&own.join("cni/bed.conflist"), &launch::cni(node).to_string())?;
        }
        Ok(layout)
    }

    /// The bed that lies there.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join("bed");
        let text = std::fs::read_to_string(&path).with_context(|| format!("there is no bed in {}", folder.display()))?;
        let said: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
        let field = |name: &str| said[name].as_str().with_context(|| format!("{} says no {name}", path.display()));
        let tools = field("tools")?.lines().filter_map(|line| line.split_once(' '));
        Ok(Self {
            folder: folder.to_owned(),
            id: field("id")?.to_owned(),
            processes: Processes::new(folder),
            tools: tools.map(|(name, place)| (name.to_owned(), PathBuf::from(place))).collect(),
            program: PathBuf::from(field("program")?),
            gate: field("gate")?.parse()?,
        })
    }

    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    #[must_use]
    pub fn node_path(&self, node: Node, name: &str) -> String {
        self.folder.join(node.name()).join(name).display().to_string()
    }

    #[must_use]
    pub fn pki(&self, name: &str) -> String {
        self.folder.join("pki").join(name).display().to_string()
    }

    /// Of `admin` (from this machine, through the gate), `inside` (the same from within the bed), or a component.
    #[must_use]
    pub fn kubeconfig(&self, who: &str) -> String {
        self.folder.join("kubeconfig").join(who).display().to_string()
    }

    pub fn marker(&self, component: Component) -> String {
        self.folder.join("processes").join(format!("{}.there", component.name())).display().to_string()
    }

    #[must_use]
    pub fn tool(&self, tool: &str, program: &str) -> String {
        self.tools.get(tool).map_or_else(|| program.to_owned(), |folder| folder.join(program).display().to_string())
    }

    /// Every folder with programs of the bed, as a `PATH`.
    #[must_use]
    pub fn tool_path(&self) -> String {
        self.tools.values().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(":")
    }

    fn kubeconfigs(&self) -> anyhow::Result<()> {
        let users = [
            ("admin", "admin"),
            ("inside", "admin"),
            ("controller-manager", "controller-manager"),
            ("scheduler", "scheduler"),
            ("proxy", "proxy"),
        ];
        for (who, certificate) in users.into_iter().chain(Node::ALL.map(|node| (node.name(), node.name()))) {
            let mut cluster = json!({
                "server": format!("https://{GATEWAY}:{API_PORT}"),
                "certificate-authority": self.pki("cluster-ca.crt"),
            });
            if who == "admin" {
                cluster["proxy-url"] = json!(format!("http://{}", self.gate));
            }
            let user = json!({
                "client-certificate": self.pki(&format!("{certificate}.crt")),
                "client-key": self.pki(&format!("{certificate}.key")),
            });
            let config = json!({
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "bed", "cluster": cluster}],
                "users": [{"name": who, "user": user}],
                "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": who}}],
                "current-context": "bed",
            });
            write(Path::new(&self.kubeconfig(who)), &config.to_string())?;
        }
        Ok(())
    }

    fn registry(&self) -> anyhow::Result<()> {
        let config = json!({
            "version": "0.1",
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": self.path("registry")}, "delete": {"enabled": true}},
            "http": {
                "addr": format!("{REGISTRY}:443"),
                "secret": "bed",
                "tls": {"certificate": self.pki("registry.crt"), "key": self.pki("registry.key")},
            },
            "auth": {"htpasswd": {"realm": "bed", "path": self.path("htpasswd")}},
        });
        write(&self.folder.join("registry.yaml"), &config.to_string())?;
        self.htpasswd(super::names::REGISTRY_USER)?;
        let hosts = self.folder.join("registries").join(REGISTRY_HOST);
        std::fs::create_dir_all(&hosts)?;
        let text = format!(
            "server = \"https://{REGISTRY_HOST}\"\n[host.\"https://{REGISTRY_HOST}\"]\n  ca = \"{}\"\n",
            self.pki("private-ca.crt")
        );
        write(&hosts.join("hosts.toml"), &text)
    }

    /// Who the registry lets in, with [`super::names::REGISTRY_PASSWORD`], of which this is the bcrypt hash. The registry
    /// reads the file again when it has changed.
    pub fn htpasswd(&self, user: &str) -> anyhow::Result<()> {
        write(&self.folder.join("htpasswd"), &format!("{user}:$2y$05$abcdefghijklmnopqrstuuWnZv18pwdLl1D3WBx.oAp9pkCJgdovS\n"))
    }
}

pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("{} can't be written", path.display()))
}

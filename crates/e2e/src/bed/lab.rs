//! A whole installation in one namespace of the bed: control plane and agent in the bed's network, the controller through the
//! gate, each with the rights of the chart and no others. It ends only processes that it started.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::names::GATEWAY;
use super::shared::Shared;
use super::space::{PULL_SECRET, Space};
use super::{Place, run};
use crate::processes::{Process, clean_command, tail};
use crate::{Tools, wait_for};

const LIMIT: Duration = Duration::from_secs(150);
/// Of one question to the control plane.
const ANSWER: Duration = Duration::from_secs(10);
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(150);

/// Installs the chart's definitions, and waits until they are served.
pub async fn define(space: &Space<'_>, tools: &Tools) -> anyhow::Result<()> {
    let folder = chart(tools).join("crds").display().to_string();
    space.bed.kubectl(&["apply", "--server-side", "--filename", &folder]).await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(space.client.clone());
    for name in ["rlmeshruns.rlmesh.dev", "rlmeshcaches.rlmesh.dev"] {
        wait_for(&format!("{name} to be established"), LIMIT, async || {
            let conditions = definitions.get(name).await?.status.and_then(|status| status.conditions).unwrap_or_default();
            Ok(conditions.iter().any(|one| one.type_ == "Established" && one.status == "True").then_some(()))
        })
        .await?;
    }
    Ok(())
}

fn chart(tools: &Tools) -> PathBuf {
    tools.root.join("charts/rlmesh-runtime")
}

/// Makes an account with the chart's rights (`agent`, `controller`). Writes the kubeconfig of that account, made from the
/// administrator's `reach` (`admin` from this machine, `inside` from the bed), into `folder`.
pub async fn account(space: &Space<'_>, tools: &Tools, kind: &str, reach: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    let account = format!("rlmesh-cluster-{kind}");
    let mut helm = tokio::process::Command::new(space.bed.layout.tool("helm", "helm"));
    helm.arg("template").arg("rlmesh").arg(chart(tools)).args(["--namespace", &space.name, "--kube-version", "1.34.0"]);
    helm.args(["--show-only", &format!("templates/{kind}-rbac.yaml")]);
    for (variable, sub) in [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")] {
        helm.env(variable, folder.join("helm").join(sub));
    }
    let rights = run(&mut helm, LIMIT).await?.replace("namespace: rlmesh-runs", &format!("namespace: {}", space.name));
    let file = folder.join(format!("{kind}-rights.yaml"));
    std::fs::write(&file, rights)?;
    space.bed.kubectl(&["create", "serviceaccount", &account, "--namespace", &space.name]).await?;
    space.bed.kubectl(&["apply", "--filename", &file.display().to_string()]).await?;
    let token = space.bed.kubectl(&["create", "token", &account, "--namespace", &space.name, "--duration", "1h"]).await?;
    let mut config: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(space.bed.layout.kubeconfig(reach))?)?;
    *config.pointer_mut("/users/0/user").context("no user")? = json!({"token": token.trim()});
    let path = folder.join(format!("{kind}.kubeconfig"));
    std::fs::write(&path, serde_yaml_ng::to_string(&config)?)?;
    Ok(path)
}

/// Writes the controller's settings into `folder`.
pub fn settings(shared: &Shared, space: &Space<'_>, folder: &Path) -> anyhow::Result<PathBuf> {
    let settings = json!({
        "namespace": space.name,
        "runnerImage": shared.image("rlmesh/rlmesh-runner")?,
        "podSecurity": {"runAsUser": 65532, "fsGroup": 65532},
        "runs": {"imagePullSecrets": [PULL_SECRET]},
    });
    let path = folder.join("settings.yaml");
    std::fs::write(&path, settings.to_string())?;
    Ok(path)
}

/// Starts a controller that reaches the cluster from this machine.
pub fn controller(space: &Space<'_>, tools: &Tools, identity: &str, folder: &Path) -> anyhow::Result<Process> {
    let mut command = clean_command(&tools.program("rlmesh-cluster-controller"));
    command.args(["run", "--lease-seconds", "3", "--lease-namespace", &space.name, "--identity", identity, "--config"]);
    command.arg(folder.join("settings.yaml")).env("KUBECONFIG", folder.join("controller.kubeconfig"));
    Process::start(identity, &mut command, &folder.join(format!("{identity}.log")))
}

/// A whole installation.
pub struct Lab<'a> {
    pub space: Space<'a>,
    pub tools: Tools,
    folder: tempfile::TempDir,
    server: u16,
    runners: u16,
    key: String,
}

impl<'a> Lab<'a> {
    /// Prepares everything; nothing runs yet.
    pub async fn new(shared: &'a Shared, space: Space<'a>) -> anyhow::Result<Self> {
        let tools = crate::tools().context("the programs are there, since there is a bed")?;
        let folder = tempfile::tempdir()?;
        define(&space, &tools).await?;
        account(&space, &tools, "controller", "admin", folder.path()).await?;
        account(&space, &tools, "agent", "inside", folder.path()).await?;
        settings(shared, &space, folder.path())?;
        let state = folder.path().join("server");
        let setup = run(
            tokio::process::Command::from(clean_command(&tools.program("rlmesh-server"))).arg("local-setup").arg("--state-dir").arg(&state),
            LIMIT,
        )
        .await?;
        let setup: Value = serde_json::from_str(&setup)?;
        let key = setup["apiKey"].as_str().context("no key")?.to_owned();
        // Ports of the bed's own network: nobody else takes them.
        let number = u16::try_from(std::process::id() % 1_000)?;
        let lab = Self { space, tools, folder, server: 20_000 + number, runners: 21_000 + number, key };
        lab.wall_for_runners().await?;
        Ok(lab)
    }

    /// What the chart's static policies allow: runners reach the agent, models and environments.
    async fn wall_for_runners(&self) -> anyhow::Result<()> {
        self.apply(&json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "runner-to-agent", "namespace": self.space.name},
            "spec": {
                "podSelector": {"matchLabels": {"rlmesh.dev/component": "runner"}},
                "policyTypes": ["Egress"],
                "egress": [
                    {"to": [{"ipBlock": {"cidr": format!("{GATEWAY}/32")}}], "ports": [{"port": self.runners}]},
                    {"to": [{"podSelector": {}}], "ports": [{"port": 50051}]},
                ],
            },
        }))
        .await
    }

    /// Applies an object as the cluster's administrator.
    pub async fn apply(&self, object: &Value) -> anyhow::Result<()> {
        let file = self.file("object.json", &object.to_string())?;
        self.space.bed.kubectl(&["apply", "--filename", &file]).await.map(drop)
    }

    /// Writes a file of the test.
    pub fn file(&self, name: &str, content: &str) -> anyhow::Result<String> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content)?;
        Ok(path.display().to_string())
    }

    #[must_use]
    pub fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    /// How the logs of all parts end.
    #[must_use]
    pub fn logs(&self) -> String {
        ["server", "agent", "controller"].map(|name| format!("{name}:\n{}", tail(&self.log(name), 25))).join("\n")
    }

    /// Where the agent keeps what must not be lost.
    #[must_use]
    pub fn agent_state(&self) -> PathBuf {
        self.folder.path().join("agent")
    }

    /// A program of ours inside the bed's network.
    fn inside(&self, program: &str) -> anyhow::Result<std::process::Command> {
        let entered = self.space.bed.enter(Place::Gateway)?;
        let (enter, rest) = entered.split_first().context("no way in")?;
        let mut command = clean_command(Path::new(enter));
        command.args(rest).arg(self.tools.program(program));
        Ok(command)
    }

    pub fn start_server(&self) -> anyhow::Result<Process> {
        let mut command = self.inside("rlmesh-server")?;
        command.arg("serve").arg("--state-dir").arg(self.folder.path().join("server"));
        command.arg("--listen").arg(format!("127.0.0.1:{}", self.server)).arg("--die-with-parent");
        Process::start("server", &mut command, &self.log("server"))
    }

    pub fn start_agent(&self) -> anyhow::Result<Process> {
        let mut command = self.inside("rlmesh-cluster-agent")?;
        command.args(["--executor", "kubernetes", "--max-backoff", "2", "--heartbeat", "2", "--die-with-parent", "--max-runs", "0"]);
        command.arg("--server").arg(format!("http://127.0.0.1:{}", self.server)).arg("--state").arg(self.agent_state());
        command.arg("--join-token-file").arg(self.folder.path().join("join-token"));
        command
            .args(["--runs-namespace", &self.space.name, "--system-namespace", &self.space.name])
            .arg("--runner-listen")
            .arg(format!("{GATEWAY}:{}", self.runners));
        command.arg("--runner-address").arg(format!("{GATEWAY}:{}", self.runners)).arg("--require-enforcement=false");
        command.env("KUBECONFIG", self.folder.path().join("agent.kubeconfig"));
        Process::start("agent", &mut command, &self.log("agent"))
    }

    /// GPU discovery of a node whose sys and proc are in `root`; `arguments` say what it knows and shows.
    pub fn start_discovery(&self, name: &str, root: &Path, arguments: &[&str]) -> anyhow::Result<Process> {
        let mut command = self.inside("rlmesh-gpu-discovery")?;
        command.arg("--root").arg(root).args(arguments);
        Process::start(name, &mut command, &self.log(name))
    }

    pub fn start_controller(&self) -> anyhow::Result<Process> {
        controller(&self.space, &self.tools, "controller", self.folder.path())
    }

    /// Waits until the control plane answers.
    pub async fn serves(&self) -> anyhow::Result<()> {
        wait_for("the server", LIMIT, async || Ok(self.get("/v1/clusters").await.ok())).await.map(drop)
    }

    /// Waits for the control plane, registers the cluster, and leaves its join token where the agent reads it.
    pub async fn register(&self) -> anyhow::Result<()> {
        self.serves().await?;
        let made = self.ask("POST", "/v1/clusters", Some(&json!({"name": "bed"}))).await?;
        let id = made["id"].as_str().context("no id")?;
        let token = self.ask("POST", &format!("/v1/clusters/{id}/join-tokens"), Some(&json!({}))).await?;
        self.file("join-token", token["token"].as_str().context("no token")?).map(drop)
    }

    /// Waits until the agent is connected.
    pub async fn connected(&self) -> anyhow::Result<()> {
        wait_for("the agent to be connected", LIMIT, async || {
            let listed = self.get("/v1/clusters").await?;
            Ok((listed["items"][0]["status"] == "connected").then_some(()))
        })
        .await
    }

    /// Runs `rlmesh`; what it printed.
    pub async fn rlmesh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.inside("rlmesh")?;
        command.args(arguments).env("HOME", self.folder.path()).env("RLMESH_API_KEY", &self.key);
        command.env("RLMESH_PLATFORM_URL", format!("http://127.0.0.1:{}", self.server));
        run(&mut command.into(), LIMIT).await
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.ask("GET", path, None).await
    }

    /// Asks the control plane by REST.
    pub async fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.text(method, path, body).await?)?)
    }

    /// The body of an answer that is a success. The way is the bed's gate, and HTTP 1.0, so that the answer ends with the connection.
    pub async fn text(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<String> {
        let asked = tokio::time::timeout(ANSWER, async {
            let mut way = TcpStream::connect(self.space.bed.layout.gate).await?;
            way.write_all(format!("CONNECT 127.0.0.1:{} HTTP/1.1\r\n\r\n", self.server).as_bytes()).await?;
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(way.read_u8().await?);
            }
            ensure!(head.starts_with(b"HTTP/1.1 200"), "nobody listens there");
            let body = body.map(Value::to_string).unwrap_or_default();
            let request = format!(
                "{method} {path} HTTP/1.0\r\nhost: 127.0.0.1:{}\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{body}",
                self.server,
                self.key,
                body.len()
            );
            way.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            way.read_to_string(&mut answer).await?;
            Ok(answer)
        });
        let answer = asked.await.context("no answer in time").flatten().with_context(|| format!("{method} {path}"))?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
        ensure!(head.split(' ').nth(1).is_some_and(|status| status.starts_with('2')), "{method} {path}: {answer}");
        Ok(body.to_owned())
    }

    /// Submits a request; the evaluation's id.
    pub async fn submit(&self, request: &Value) -> anyhow::Result<String> {
        let made = self.ask("POST", "/v1/evaluations", Some(request)).await?;
        Ok(made["id"].as_str().with_context(|| format!("no id: {made}"))?.to_owned())
    }

    pub async fn evaluation(&self, id: &str) -> anyhow::Result<Value> {
        self.get(&format!("/v1/evaluations/{id}")).await
    }

    /// The evaluation once `is` says so.
    pub async fn until(&self, id: &str, what: &str, limit: Duration, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let started = Instant::now();
        loop {
            let detail = self.evaluation(id).await?;
            if is(&detail) {
                return Ok(detail);
            }
            ensure!(
                started.elapsed() < limit,
                "waited {} s in vain for {id} to be {what}: it is {} and waits for {}; its runs are {}",
                limit.as_secs(),
                detail["status"],
                detail["waiting"],
                detail["runs"]
            );
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The evaluation once it is over.
    pub async fn ended(&self, id: &str, limit: Duration) -> anyhow::Result<Value> {
        self.until(id, "over", limit, |detail| ["completed", "failed", "cancelled"].iter().any(|over| detail["status"] == *over)).await
    }

    /// Its rows, with their failures; a thousand at most.
    pub async fn rows(&self, id: &str) -> anyhow::Result<Vec<Value>> {
        let page = self.get(&format!("/v1/evaluations/{id}/rows?limit=1000")).await?;
        Ok(page["items"].as_array().context("no rows")?.clone())
    }

    /// The lines of the export.
    pub async fn export(&self, id: &str) -> anyhow::Result<Vec<String>> {
        let text = self.text("GET", &format!("/v1/evaluations/{id}/export?format=jsonl"), None).await?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Names of the run's pods that hold a component, newest attempt last.
    pub async fn pods(&self, evaluation: &str, component: &str) -> anyhow::Result<Vec<String>> {
        let labels = format!("rlmesh.dev/evaluation={evaluation},rlmesh.dev/component={component}");
        let listed = self.space.pods().list(&kube::api::ListParams::default().labels(&labels)).await?;
        let mut found: Vec<_> =
            listed.into_iter().map(|pod| (pod.metadata.creation_timestamp, pod.metadata.name.unwrap_or_default())).collect();
        found.sort();
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }
}

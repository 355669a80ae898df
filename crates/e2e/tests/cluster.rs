//! The main job on a real Kubernetes: control plane, agent and controller as they are, with the rights of the chart, and the
//! same numbers as on one machine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{PULL_SECRET, Space, with_space};
use rlm_e2e::bed::{Place, run};
use rlm_e2e::processes::{Process, clean_command, tail};
use rlm_e2e::{Signal, Tools, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(150);
/// The gateway of the bed's network, where control plane and agent run here.
const GATEWAY: &str = "10.77.0.1";

/// A whole installation in one namespace.
struct Lab<'a> {
    space: Space<'a>,
    tools: Tools,
    folder: tempfile::TempDir,
    server: u16,
    runners: u16,
    key: String,
    token: String,
    running: Option<Process>,
}

fn cluster_config(of: &Path, token: &str) -> anyhow::Result<String> {
    let mut config: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(of)?)?;
    *config.pointer_mut("/users/0/user").context("no user")? = json!({"token": token});
    Ok(serde_yaml_ng::to_string(&config)?)
}

impl<'a> Lab<'a> {
    async fn new(shared: &'a Shared, space: Space<'a>) -> anyhow::Result<Self> {
        let tools = rlm_e2e::tools().context("the programs are there, since there is a bed")?;
        let folder = tempfile::tempdir()?;
        let chart = tools.root.join("charts/rlmesh-runtime");
        space.bed.kubectl(&["apply", "--server-side", "--filename", &chart.join("crds").display().to_string()]).await?;
        for (account, admin) in [("rlmesh-cluster-controller", "admin"), ("rlmesh-cluster-agent", "inside")] {
            let kind = account.trim_start_matches("rlmesh-cluster-");
            let rights = std::fs::read_to_string(chart.join(format!("templates/{kind}-rbac.yaml")))?
                .replace("{{ .Release.Namespace }}", &space.name)
                .replace("namespace: rlmesh-runs", &format!("namespace: {}", space.name));
            let file = folder.path().join(format!("{kind}-rights.yaml"));
            std::fs::write(&file, rights)?;
            space.bed.kubectl(&["create", "serviceaccount", account, "--namespace", &space.name]).await?;
            space.bed.kubectl(&["apply", "--filename", &file.display().to_string()]).await?;
            let token = space.bed.kubectl(&["create", "token", account, "--namespace", &space.name, "--duration", "1h"]).await?;
            let config = cluster_config(Path::new(&space.bed.layout.kubeconfig(admin)), token.trim())?;
            std::fs::write(folder.path().join(format!("{kind}.kubeconfig")), config)?;
        }
        let settings = json!({
            "namespace": space.name,
            "runnerImage": shared.image("rlmesh/rlmesh-runner")?,
            "podSecurity": {"runAsUser": 65532, "fsGroup": 65532},
            "runs": {"imagePullSecrets": [PULL_SECRET]},
        });
        std::fs::write(folder.path().join("settings.yaml"), settings.to_string())?;
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
        let mut lab =
            Self { space, tools, folder, server: 20_000 + number, runners: 21_000 + number, key, token: String::new(), running: None };
        lab.wall_for_runners().await?;
        lab.running = Some(lab.start_server()?);
        wait_for("the server", LIMIT, async || Ok(lab.rlmesh(&["clusters", "list", "-o", "json"]).await.ok())).await?;
        let made = lab.rlmesh_body("POST", "/v1/clusters", &json!({"name": "bed"})).await?;
        let id = made["id"].as_str().context("no id")?;
        let token = lab.rlmesh_body("POST", &format!("/v1/clusters/{id}/join-tokens"), &json!({})).await?;
        lab.token = token["token"].as_str().context("no token")?.to_owned();
        std::fs::write(lab.folder.path().join("join-token"), &lab.token)?;
        Ok(lab)
    }

    /// What the chart's static policies allow: runners reach the agent, models and environments.
    async fn wall_for_runners(&self) -> anyhow::Result<()> {
        let policy = json!({
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
        });
        let file = self.folder.path().join("policy.json");
        std::fs::write(&file, policy.to_string())?;
        self.space.bed.kubectl(&["apply", "--filename", &file.display().to_string()]).await.map(drop)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    /// A program of ours inside the bed's network.
    fn inside(&self, program: &str) -> anyhow::Result<std::process::Command> {
        let entered = self.space.bed.enter(Place::Gateway)?;
        let (enter, rest) = entered.split_first().context("no way in")?;
        let mut command = clean_command(Path::new(enter));
        command.args(rest).arg(self.tools.program(program));
        Ok(command)
    }

    fn start_server(&self) -> anyhow::Result<Process> {
        let mut command = self.inside("rlmesh-server")?;
        command.arg("serve").arg("--state-dir").arg(self.folder.path().join("server"));
        command.arg("--listen").arg(format!("127.0.0.1:{}", self.server)).arg("--die-with-parent");
        Process::start("server", &mut command, &self.log("server"))
    }

    fn start_agent(&self) -> anyhow::Result<Process> {
        let mut command = self.inside("rlmesh-cluster-agent")?;
        command.args(["--executor", "kubernetes", "--max-backoff", "2", "--die-with-parent", "--max-runs", "0"]);
        command.arg("--server").arg(format!("http://127.0.0.1:{}", self.server)).arg("--state").arg(self.folder.path().join("agent"));
        command.arg("--join-token-file").arg(self.folder.path().join("join-token"));
        command.args(["--runs-namespace", &self.space.name]).arg("--runner-listen").arg(format!("{GATEWAY}:{}", self.runners));
        command.arg("--runner-address").arg(format!("{GATEWAY}:{}", self.runners)).arg("--require-enforcement=false");
        command.env("KUBECONFIG", self.folder.path().join("agent.kubeconfig"));
        Process::start("agent", &mut command, &self.log("agent"))
    }

    fn start_controller(&self) -> anyhow::Result<Process> {
        let mut command = clean_command(&self.tools.program("rlmesh-cluster-controller"));
        command.args(["run", "--lease-seconds", "3", "--lease-namespace", &self.space.name, "--identity", "one", "--config"]);
        command.arg(self.folder.path().join("settings.yaml")).env("KUBECONFIG", self.folder.path().join("controller.kubeconfig"));
        Process::start("controller", &mut command, &self.log("controller"))
    }

    async fn rlmesh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.inside("rlmesh")?;
        command.args(arguments).env("HOME", self.folder.path()).env("RLMESH_API_KEY", &self.key);
        command.env("RLMESH_PLATFORM_URL", format!("http://127.0.0.1:{}", self.server));
        run(&mut command.into(), LIMIT).await
    }

    async fn rlmesh_body(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let program = "import json, sys, urllib.request
method, url, key, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {'authorization': 'Bearer ' + key, 'content-type': 'application/json'}, method=method)
print(urllib.request.urlopen(request, timeout=20).read().decode())";
        let entered = self.space.bed.enter(Place::Gateway)?;
        let (enter, rest) = entered.split_first().context("no way in")?;
        let mut command = tokio::process::Command::new(enter);
        let url = format!("http://127.0.0.1:{}{path}", self.server);
        command.args(rest).args(["python3", "-c", program, method, &url, &self.key, &body.to_string()]);
        Ok(serde_json::from_str(&run(&mut command, LIMIT).await?)?)
    }

    fn request(&self, shared: &Shared, episodes: u64) -> anyhow::Result<PathBuf> {
        let request = json!({
            "name": "on the cluster",
            "models": [{"id": "balancer", "image": shared.image("user/quickstart-model")?}],
            "environments": [{"id": "cartpole", "image": shared.image("user/quickstart-env")?}],
            "tasks": [{"env": "cartpole", "taskId": "cartpole/balance", "params": {}, "episodes": episodes, "seed": 0, "workers": 2,
                       "maxEpisodeSteps": 50, "success": {"metric": "reward", "atLeast": 50}}],
        });
        let file = self.folder.path().join("request.json");
        std::fs::write(&file, request.to_string())?;
        Ok(file)
    }

    async fn detail(&self, id: &str) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.rlmesh(&["eval", "get", id, "-o", "json"]).await?)?)
    }
}

#[tokio::test]
async fn an_evaluation_runs_as_pods_and_outlives_its_agent_and_controller() -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _calm = shared.calm().await;
    with_space(&shared.bed, "cluster", async |space| {
        let lab = Lab::new(shared, space).await?;
        let ended = scenario(&lab, shared).await;
        ended.with_context(|| {
            let logs = ["server", "agent", "controller"].map(|name| format!("{name}:\n{}", tail(&lab.log(name), 25)));
            logs.join("\n")
        })
    })
    .await
}

async fn scenario(lab: &Lab<'_>, shared: &Shared) -> anyhow::Result<()> {
    let mut agent = lab.start_agent()?;
    let mut controller = lab.start_controller()?;
    wait_for("the agent to be connected", LIMIT, async || {
        let listed: Value = serde_json::from_str(&lab.rlmesh(&["clusters", "list", "-o", "json"]).await?)?;
        Ok(listed[0]["connected"].as_bool().unwrap_or(listed[0]["status"] == "connected").then_some(()))
    })
    .await?;
    let file = lab.request(shared, 300)?;
    let id = lab.rlmesh(&["eval", "submit", &file.display().to_string(), "-o", "name"]).await?.trim().to_owned();
    wait_for("the first rows", LIMIT, async || {
        let detail = lab.detail(&id).await?;
        ensure!(detail["status"] != "failed", "{detail:#}");
        Ok((detail["progress"]["completedEpisodes"].as_u64() >= Some(20)).then_some(()))
    })
    .await?;
    // Whoever dies: the pods go on, and their results wait.
    agent.kill().await?;
    controller.kill().await?;
    let _controller = lab.start_controller()?;
    let agent = lab.start_agent()?;
    wait_for("the end", LIMIT, async || {
        let detail = lab.detail(&id).await?;
        ensure!(detail["status"] != "failed", "{detail:#}");
        Ok((detail["status"] == "completed").then_some(()))
    })
    .await?;
    let export = lab.rlmesh(&["eval", "export", &id]).await?;
    let rows: Vec<Value> = export.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(rows.len() == 300, "{} rows", rows.len());
    for (seed, row) in (0_u64..).zip(&rows) {
        ensure!(row["seed"] == seed && row["reward"] == 50.0 && row["steps"] == 50 && row["success"] == true, "{row}");
    }
    wait_for("the pods to go with their run", LIMIT, async || {
        let left = lab.space.bed.kubectl(&["get", "rlmeshruns,pods", "--namespace", &lab.space.name, "--output=name"]).await?;
        Ok(left.trim().is_empty().then_some(()))
    })
    .await?;
    agent.signal(Signal::TERM)
}

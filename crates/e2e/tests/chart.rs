//! The chart on a real Kubernetes, as it is: a whole installation from images, by Helm, behind the real host name; what each
//! kind of pod can reach; and whether the agent notices that a network enforces nothing.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use rlm_e2e::bed::names::{API_HOST, DNS_SERVICE, GATEWAY, REGISTRY_HOST, REGISTRY_PASSWORD, REGISTRY_USER};
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{connect_from, pod, with_space};
use rlm_e2e::bed::{Node, Place, run};
use rlm_e2e::processes::{Process, clean_command, tail};
use rlm_e2e::{Tools, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(150);
const SYSTEM: &str = "rlmesh-system";
const RUNS: &str = "rlmesh-runs";
const ENVIRONMENT: &str = "user/quickstart-env";

const PARTS: [(&str, &str); 4] = [
    (SYSTEM, "deployment/rlmesh-cluster-agent"),
    (SYSTEM, "deployment/rlmesh-cluster-controller"),
    (SYSTEM, "daemonset/rlmesh-gpu-discovery"),
    (RUNS, "deployment/rlmesh-wall-probe"),
];

struct Installation<'a> {
    shared: &'a Shared,
    tools: Tools,
    folder: tempfile::TempDir,
    port: u16,
    key: String,
}

impl<'a> Installation<'a> {
    fn new(shared: &'a Shared) -> anyhow::Result<Self> {
        let tools = rlm_e2e::tools().context("the programs are there, since there is a bed")?;
        let port = 22_000 + u16::try_from(std::process::id() % 1_000)?;
        Ok(Self { shared, tools, folder: tempfile::tempdir()?, port, key: String::new() })
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// A program of ours inside the bed's network.
    fn inside(&self, program: &str) -> anyhow::Result<std::process::Command> {
        let entered = self.shared.bed.enter(Place::Gateway)?;
        let (enter, rest) = entered.split_first().context("no way in")?;
        let mut command = clean_command(std::path::Path::new(enter));
        command.args(rest).arg(self.tools.program(program));
        Ok(command)
    }

    /// The control plane, and what ends TLS before it.
    async fn start_control_plane(&mut self) -> anyhow::Result<(Process, Process)> {
        let state = self.folder.path().join("server");
        let mut setup = tokio::process::Command::from(clean_command(&self.tools.program("rlmesh-server")));
        let setup = run(setup.arg("local-setup").arg("--state-dir").arg(&state), LIMIT).await?;
        self.key = serde_json::from_str::<Value>(&setup)?["apiKey"].as_str().context("no key")?.to_owned();
        let mut command = self.inside("rlmesh-server")?;
        command.args(["serve", "--die-with-parent", "--public-url", &format!("https://{API_HOST}"), "--allowed-host", API_HOST]);
        let config = self.folder.path().join("server.toml");
        // The agent of `claim` is gone with its session, and makes way sooner.
        std::fs::write(&config, "[timings]\ndisconnected-after = 14\n")?;
        command.arg("--config").arg(&config).arg("--state-dir").arg(&state).arg("--listen").arg(format!("127.0.0.1:{}", self.port));
        let server = Process::start("server", &mut command, &self.log("server"))?;
        let front = self.start_front()?;
        wait_for("the server", LIMIT, async || Ok(self.rlmesh(&["clusters", "list", "-o", "json"]).await.ok())).await?;
        Ok((server, front))
    }

    /// The only way by which the cluster reaches the control plane.
    fn start_front(&self) -> anyhow::Result<Process> {
        let mut command = self.inside("bed")?;
        let layout = &self.shared.bed.layout;
        command.arg("front").arg(format!("{GATEWAY}:443")).arg(format!("127.0.0.1:{}", self.port));
        command.args([layout.pki("api.crt"), layout.pki("api.key")]);
        Process::start("front", &mut command, &self.log("front"))
    }

    async fn rlmesh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.inside("rlmesh")?;
        command.args(arguments).env("HOME", self.folder.path()).env("RLMESH_API_KEY", &self.key);
        command.env("RLMESH_PLATFORM_URL", self.url());
        run(&mut command.into(), LIMIT).await
    }

    async fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.rlmesh(&[arguments, &["-o", "json"]].concat()).await?)?)
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let program = "import json, sys, urllib.request
url, key, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {'authorization': 'Bearer ' + key, 'content-type': 'application/json'})
print(urllib.request.urlopen(request, timeout=20).read().decode())";
        let entered = self.shared.bed.enter(Place::Gateway)?;
        let (enter, rest) = entered.split_first().context("no way in")?;
        let mut command = tokio::process::Command::new(enter);
        command.args(rest).args(["python3", "-c", program, &format!("{}{path}", self.url()), &self.key, &body.to_string()]);
        Ok(serde_json::from_str(&run(&mut command, LIMIT).await?)?)
    }

    /// A cluster's control credential, claimed as an agent does it. Its file.
    async fn claim(&self) -> anyhow::Result<PathBuf> {
        let made = self.post("/v1/clusters", &json!({"name": "bed"})).await?;
        let id = made["id"].as_str().context("no id")?;
        let token = self.post(&format!("/v1/clusters/{id}/join-tokens"), &json!({})).await?;
        let file = self.folder.path().join("join-token");
        std::fs::write(&file, token["token"].as_str().context("no token")?)?;
        let state = self.folder.path().join("claimed");
        let mut command = self.inside("rlmesh-cluster-agent")?;
        command.args(["--server", &self.url(), "--die-with-parent", "--state"]).arg(&state).arg("--join-token-file").arg(&file);
        let mut agent = Process::start("claim", &mut command, &self.log("claim"))?;
        let credentials: Value = wait_for("the credentials", LIMIT, async || {
            Ok(std::fs::read(state.join("credentials.json")).ok().and_then(|text| serde_json::from_slice(&text).ok()))
        })
        .await?;
        agent.kill().await?;
        let control = credentials["credentials"].as_array().into_iter().flatten().find(|one| one["purpose"] == "control");
        let file = self.folder.path().join("control");
        std::fs::write(&file, control.and_then(|one| one["secret"].as_str()).context("no control credential")?)?;
        Ok(file)
    }

    async fn helm(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let layout = &self.shared.bed.layout;
        let mut command = tokio::process::Command::new(layout.tool("helm", "helm"));
        command.arg("--kubeconfig").arg(layout.kubeconfig("admin")).args(["--namespace", SYSTEM]).args(arguments);
        for (variable, folder) in [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")] {
            command.env(variable, self.folder.path().join(folder));
        }
        run(&mut command, LIMIT).await
    }

    /// What an admin with Secrets of their own does, and `helm install`.
    async fn install(&self) -> anyhow::Result<()> {
        let control = self.claim().await?;
        let bed = &self.shared.bed;
        bed.kubectl(&["create", "namespace", SYSTEM]).await?;
        // Stricter than we ask for: every pod of ours is within it.
        bed.kubectl(&["label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=restricted"]).await?;
        let from = format!("--from-file=control={}", control.display());
        bed.kubectl(&["--namespace", SYSTEM, "create", "secret", "generic", "rlmesh-secrets", &from]).await?;
        self.pull_secret(SYSTEM).await?;
        let digest = |repository: &str| anyhow::Ok(self.shared.image(repository)?.split_once('@').context("no digest")?.1.to_owned());
        let values = json!({
            "credentials": {"controlSecret": "rlmesh-secrets"},
            "images": {
                "agent": {"digest": digest("rlmesh/rlmesh-cluster-agent")?},
                "controller": {"digest": digest("rlmesh/rlmesh-cluster-controller")?},
                "runner": {"digest": digest("rlmesh/rlmesh-runner")?},
                "gpuDiscovery": {"digest": digest("rlmesh/rlmesh-gpu-discovery")?},
            },
            "platform": {"caBundle": std::fs::read_to_string(bed.layout.pki("private-ca.crt"))?},
        });
        let file = self.folder.path().join("values.json");
        std::fs::write(&file, values.to_string())?;
        let chart = self.tools.root.join("charts/rlmesh-runtime").display().to_string();
        self.helm(&["install", "rlmesh", &chart, "--values", &file.display().to_string()]).await?;
        self.pull_secret(RUNS).await?;
        for (namespace, what) in PARTS {
            bed.kubectl(&["--namespace", namespace, "rollout", "status", what, "--timeout=55s"])
                .await
                .with_context(|| format!("{what} does not come up"))?;
        }
        Ok(())
    }

    async fn pull_secret(&self, namespace: &str) -> anyhow::Result<()> {
        let bed = &self.shared.bed;
        let (server, user, password) = (
            format!("--docker-server={REGISTRY_HOST}"),
            format!("--docker-username={REGISTRY_USER}"),
            format!("--docker-password={REGISTRY_PASSWORD}"),
        );
        let what = ["--namespace", namespace, "create", "secret", "docker-registry", "rlmesh-registry-pull", &server, &user, &password];
        bed.kubectl(&what).await.map(drop)
    }

    async fn remove(&self) -> anyhow::Result<()> {
        self.helm(&["uninstall", "rlmesh"]).await?;
        let bed = &self.shared.bed;
        // What users keep in it is theirs; here it is ours.
        let kept = bed.kubectl(&["get", "namespace", RUNS, "--output=name"]).await?;
        ensure!(kept.contains(RUNS), "the namespace of runs went with the release");
        bed.kubectl(&["delete", "namespace", RUNS, SYSTEM, "--wait=false"]).await.map(drop)
    }

    async fn condition(&self) -> anyhow::Result<Value> {
        let listed = self.json(&["clusters", "list"]).await?;
        let id = listed[0]["id"].as_str().context("no cluster")?.to_owned();
        let cluster = self.json(&["clusters", "get", &id]).await?;
        let found = cluster["conditions"].as_array().into_iter().flatten().find(|one| one["type"] == "NetworkPolicyEnforced");
        Ok(found.cloned().unwrap_or_default())
    }

    async fn submit(&self, episodes: u64, environment: &str) -> anyhow::Result<String> {
        let request = json!({
            "name": "by the chart",
            "models": [{"id": "balancer", "image": self.shared.image("user/quickstart-model")?}],
            "environments": [{"id": "cartpole", "image": self.shared.image(environment)?}],
            "tasks": [{"env": "cartpole", "taskId": "cartpole/balance", "params": {}, "episodes": episodes, "seed": 0, "workers": 2,
                       "maxEpisodeSteps": 50, "success": {"metric": "reward", "atLeast": 50}}],
        });
        let file = self.folder.path().join("request.json");
        std::fs::write(&file, request.to_string())?;
        Ok(self.rlmesh(&["eval", "submit", &file.display().to_string(), "-o", "name"]).await?.trim().to_owned())
    }

    async fn pods(&self, namespace: &str, selector: &str) -> anyhow::Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.shared.bed.client().await?, namespace);
        Ok(pods.list(&ListParams::default().labels(selector)).await?.items)
    }

    async fn one(&self, namespace: &str, selector: &str) -> anyhow::Result<Pod> {
        self.pods(namespace, selector).await?.pop().with_context(|| format!("no pod {selector}"))
    }

    async fn address(&self, namespace: &str, selector: &str) -> anyhow::Result<String> {
        let address = self.one(namespace, selector).await?.status.and_then(|status| status.pod_ip);
        address.with_context(|| format!("no address of {selector}"))
    }
}

#[tokio::test]
async fn the_chart_installs_runs_evaluations_and_walls_them_off() -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _alone = shared.alone().await;
    let mut installation = Installation::new(shared)?;
    let (_server, mut front) = installation.start_control_plane().await?;
    let ended = match installation.install().await {
        Ok(()) => scenario(&installation, &mut front).await,
        failed => failed,
    };
    if ended.is_err() {
        for (namespace, part) in PARTS {
            for arguments in [["logs", "--tail=20"], ["describe", "--show-events"]] {
                let said = shared.bed.kubectl(&["--namespace", namespace, arguments[0], arguments[1], part]).await;
                eprintln!("{part}: {}", said.unwrap_or_else(|error| format!("{error:#}")));
            }
            let pods = shared.bed.kubectl(&["--namespace", namespace, "get", "pods,events", "--output=wide"]).await;
            eprintln!("{}", pods.unwrap_or_default());
        }
        eprintln!("server: {}", tail(&installation.log("server"), 20));
    }
    let removed = installation.remove().await;
    ended.and(removed)
}

async fn scenario(installation: &Installation<'_>, front: &mut Process) -> anyhow::Result<()> {
    wait_for("the walls to be known to stand", LIMIT, async || Ok((installation.condition().await?["status"] == "True").then_some(())))
        .await?;
    gpu_discovery(installation).await?;
    // The second one's image names root, and is run as nobody in particular all the same.
    let ids = [installation.submit(100_000, ENVIRONMENT).await?, installation.submit(100_000, "user/root-env").await?];
    for id in &ids {
        wait_for("rows", LIMIT, async || {
            let detail = installation.json(&["eval", "get", id]).await?;
            ensure!(detail["status"] != "failed", "{detail:#}");
            Ok((detail["progress"]["completedEpisodes"].as_u64() >= Some(5)).then_some(()))
        })
        .await?;
    }
    what_pods_reach(installation, &ids).await?;
    without_control_plane(installation, front, &ids[0]).await?;
    for id in &ids {
        installation.rlmesh(&["eval", "cancel", id]).await?;
    }
    wait_for("the pods to go", LIMIT, async || Ok(installation.pods(RUNS, "rlmesh.dev/run").await?.is_empty().then_some(()))).await?;
    let id = installation.submit(200, ENVIRONMENT).await?;
    wait_for("the end", LIMIT, async || {
        let detail = installation.json(&["eval", "get", &id]).await?;
        ensure!(detail["status"] != "failed", "{detail:#}");
        Ok((detail["status"] == "completed").then_some(()))
    })
    .await?;
    let export = installation.rlmesh(&["eval", "export", &id]).await?;
    let rows: Vec<Value> = export.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(rows.len() == 200, "{} rows", rows.len());
    for (seed, row) in (0_u64..).zip(&rows) {
        ensure!(row["seed"] == seed && row["reward"] == 50.0 && row["steps"] == 50 && row["success"] == true, "{row}");
    }
    without_enforcement(installation).await
}

/// On each node a pod of discovery finds the agent, which takes its report for that node; here there are no GPUs.
async fn gpu_discovery(installation: &Installation<'_>) -> anyhow::Result<()> {
    let bed = &installation.shared.bed;
    let selector = "app.kubernetes.io/name=rlmesh-gpu-discovery";
    wait_for("a report of each node", LIMIT, async || {
        let log = bed.kubectl(&["--namespace", SYSTEM, "logs", "deployment/rlmesh-cluster-agent"]).await?;
        let reported = |node: Node| {
            log.lines().any(|line| line.contains("a node's GPUs were reported") && line.contains(node.name()) && line.contains("none"))
        };
        Ok(Node::ALL.into_iter().all(reported).then_some(()))
    })
    .await?;
    let pods = installation.pods(SYSTEM, selector).await?;
    ensure!(pods.len() == Node::ALL.len(), "{} pods of discovery", pods.len());
    let agent = installation.address(SYSTEM, "app.kubernetes.io/name=rlmesh-cluster-agent").await?;
    let controller = installation.address(SYSTEM, "app.kubernetes.io/name=rlmesh-cluster-controller").await?;
    let targets = [
        (agent.as_str(), 7443),
        (agent.as_str(), 9090),
        (controller.as_str(), 9090),
        ("10.96.0.1", 443),
        (GATEWAY, 443),
        (DNS_SERVICE, 53),
        ("10.77.0.11", 10250),
    ];
    for pod in &pods {
        let restarts = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten()).map(|one| one.restart_count);
        ensure!(restarts.sum::<i32>() == 0, "{:?} was restarted", pod.metadata.name);
        let found = connect_from(pod, &targets).await?;
        ensure!(found[0] == "open" && found[1..].iter().all(|found| found != "open"), "{targets:?} are {found:?} to discovery");
    }
    Ok(())
}

/// From inside each kind of pod of the first evaluation: what is allowed works, and nothing else does.
async fn what_pods_reach(installation: &Installation<'_>, [id, other]: &[String; 2]) -> anyhow::Result<()> {
    // A pod of another namespace that anybody may reach, to see that what is refused below is refused by the other end.
    let image = installation.shared.image(ENVIRONMENT)?;
    with_space(&installation.shared.bed, "elsewhere", async |space| {
        let listens = ["python3", "-m", "http.server", "8000"];
        let elsewhere = space.run(pod("open", image, &listens, json!({}))).await?;
        wait_for("the open pod to answer", LIMIT, async || Ok((space.connect("open", &elsewhere, 8000).await? == "open").then_some(())))
            .await?;
        let agent = installation.address(SYSTEM, "app.kubernetes.io/name=rlmesh-cluster-agent").await?;
        let probe = installation.address(RUNS, "rlmesh.dev/component=wall-probe").await?;
        let instance = |evaluation: &str, instance: &str| format!("rlmesh.dev/evaluation={evaluation},rlmesh.dev/instance={instance}");
        let environment = installation.address(RUNS, &instance(id, "env-0-0")).await?;
        let model = installation.address(RUNS, &instance(id, "model-0")).await?;
        let others_environment = installation.address(RUNS, &instance(other, "env-0-0")).await?;
        let others_model = installation.address(RUNS, &instance(other, "model-0")).await?;
        let forbidden = [
            ("the Kubernetes API", "10.96.0.1", 443),
            ("the Kubernetes API behind its Service", GATEWAY, 6443),
            ("the control plane", GATEWAY, 443),
            ("the registry", "10.77.0.2", 443),
            ("a node", "10.77.0.11", 10250),
            ("another node", "10.77.0.12", 10250),
            ("the metadata address", "169.254.169.254", 80),
            ("names", DNS_SERVICE, 53),
            ("another namespace", elsewhere.as_str(), 8000),
            ("the agent's admin port", agent.as_str(), 9090),
            ("the wall probe", probe.as_str(), 7080),
            ("another run's environment", others_environment.as_str(), 50051),
            ("another run's model", others_model.as_str(), 50051),
        ];
        let allowed = [("the agent", agent.as_str(), 7443), ("the environment", &environment, 50051), ("the model", &model, 50051)];
        for kind in ["model", "environment", "runner", "wall-probe"] {
            let evaluation = if kind == "wall-probe" { String::new() } else { format!(",rlmesh.dev/evaluation={id}") };
            let from = installation.one(RUNS, &format!("rlmesh.dev/component={kind}{evaluation}")).await?;
            let own = from.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
            // One's own ports are no way out.
            let targets: Vec<_> = forbidden.iter().chain(&allowed).filter(|(_, host, _)| *host != own).collect();
            let addresses: Vec<_> = targets.iter().map(|(_, host, port)| (*host, *port)).collect();
            for ((what, host, port), found) in targets.iter().zip(connect_from(&from, &addresses).await?) {
                let may = kind == "runner" && allowed.iter().any(|one| one.0 == *what);
                ensure!((found == "open") == may, "{what} ({host}:{port}) is {found} to the {kind} pod");
            }
        }
        // A run can't be reached from elsewhere.
        let ports = [
            (environment.as_str(), 50051),
            (model.as_str(), 50051),
            (agent.as_str(), 7443),
            (agent.as_str(), 9090),
            (probe.as_str(), 7080),
        ];
        for (port, found) in ports.iter().zip(connect_from(&space.pods().get("open").await?, &ports).await?) {
            ensure!(found != "open", "{port:?} is open to a pod of another namespace");
        }
        // Our own pods reach what they need and no more.
        let agent_pod = installation.one(SYSTEM, "app.kubernetes.io/name=rlmesh-cluster-agent").await?;
        let needs = [("10.96.0.1", 443), (GATEWAY, 443), (DNS_SERVICE, 53), (probe.as_str(), 7080)];
        ensure!(connect_from(&agent_pod, &needs).await?.iter().all(|found| found == "open"), "the agent does not reach all of {needs:?}");
        let controller = installation.one(SYSTEM, "app.kubernetes.io/name=rlmesh-cluster-controller").await?;
        ensure!(connect_from(&controller, &needs[..1]).await? == ["open"], "the controller does not reach the Kubernetes API");
        for from in [&agent_pod, &controller] {
            let others = [(elsewhere.as_str(), 8000), (environment.as_str(), 50051), ("10.77.0.11", 10250)];
            let found = connect_from(from, &others).await?;
            ensure!(found.iter().all(|found| found != "open"), "{others:?} are {found:?} to {:?}", from.metadata.name);
        }
        Ok(())
    })
    .await
}

/// While the control plane is away a new agent takes results all the same, and they come when it is back.
async fn without_control_plane(installation: &Installation<'_>, front: &mut Process, id: &str) -> anyhow::Result<()> {
    front.kill().await?;
    let selector = "app.kubernetes.io/name=rlmesh-cluster-agent";
    let bed = &installation.shared.bed;
    let uid = |pod: &Pod| pod.metadata.uid.clone();
    let old = uid(&installation.one(SYSTEM, selector).await?);
    bed.kubectl(&["--namespace", SYSTEM, "delete", "pod", "--selector", selector]).await?;
    let service = bed.kubectl(&["--namespace", SYSTEM, "get", "service", "rlmesh-cluster-agent", "--output=jsonpath={.spec.clusterIP}"]);
    let service = service.await?;
    let runner = format!("rlmesh.dev/component=runner,rlmesh.dev/evaluation={id}");
    wait_for("a new agent to take results", LIMIT, async || {
        let agents = installation.pods(SYSTEM, selector).await?;
        let Some(new) = agents.iter().find(|pod| uid(pod) != old) else { return Ok(None) };
        let from = installation.one(RUNS, &runner).await?;
        let open = connect_from(&from, &[(service.trim(), 7443)]).await? == ["open"];
        let conditions = new.status.as_ref().and_then(|status| status.conditions.as_ref());
        ensure!(!conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True"), "an agent alone is ready");
        Ok(open.then_some(()))
    })
    .await?;
    let rows = async || anyhow::Ok(installation.json(&["eval", "get", id]).await?["progress"]["completedEpisodes"].as_u64());
    let before = rows().await?;
    *front = installation.start_front()?;
    wait_for("more rows", LIMIT, async || Ok((rows().await? > before).then_some(()))).await
}

/// A network that enforces nothing is noticed, evaluations wait and say why, and go on when it does.
async fn without_enforcement(installation: &Installation<'_>) -> anyhow::Result<()> {
    let bed = &installation.shared.bed;
    bed.policies_off().await?;
    wait_for("the missing walls to be noticed", LIMIT, async || {
        let condition = installation.condition().await?;
        Ok((condition["status"] == "False" && condition["reason"] == "NotEnforced").then_some(()))
    })
    .await?;
    let id = installation.submit(10, ENVIRONMENT).await?;
    let waiting = wait_for("the evaluation to say what it waits for", LIMIT, async || {
        let detail = installation.json(&["eval", "get", &id]).await?;
        Ok(detail["waiting"]
            .as_array()
            .into_iter()
            .flatten()
            .chain([&detail["waiting"]])
            .find(|one| one["cause"] == "networkPolicy")
            .cloned())
    })
    .await?;
    let message = waiting["message"].as_str().unwrap_or_default();
    ensure!(message.contains("does not enforce NetworkPolicies") && message.contains("requireEnforcement"), "{message}");
    ensure!(waiting["since"].is_string(), "{waiting}");
    let pods = installation.pods(RUNS, "rlmesh.dev/run").await?;
    ensure!(pods.is_empty(), "{} pods of runs without walls", pods.len());
    bed.policies_on().await?;
    wait_for("the evaluation to be carried out behind walls", LIMIT, async || {
        let detail = installation.json(&["eval", "get", &id]).await?;
        if detail["status"] == "failed" {
            bail!("{detail:#}");
        }
        Ok((detail["status"] == "completed").then_some(()))
    })
    .await?;
    Ok(())
}

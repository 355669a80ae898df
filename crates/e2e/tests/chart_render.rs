//! What Helm makes of the chart's values: the whole text for some of them, what holds for all objects whatever the values
//! are, and which values are refused. No cluster and no root; `UPDATE=1` writes the texts anew (`make generate`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Output;

use anyhow::{Context as _, bail, ensure};
use clap::Parser as _;
use rlm_cluster::agent;
use rlm_cluster::controller::{self, settings::Settings};
use rlm_e2e::processes::clean_command;
use rlm_e2e::tools::{skip, source_tree};
use serde_json::{Value, json};

/// Values by name, and the APIs that the cluster has besides.
const SETS: [(&str, &[&str]); 4] =
    [("default", &[]), ("everything", &[]), ("openshift", &["--api-versions", "security.openshift.io/v1"]), ("no-enforcement", &[])];
const SYSTEM: &str = "rlmesh-system";
const RUNS: &str = "rlmesh-runs";

struct Chart {
    helm: PathBuf,
    folder: PathBuf,
    /// Helm's own.
    home: tempfile::TempDir,
}

/// None, and a line that says why, where Helm is not built.
fn chart() -> anyhow::Result<Option<Chart>> {
    let named = std::env::var("RLMESH_BED_TOOLS").unwrap_or_default();
    let Some(folder) = named.lines().find_map(|line| line.strip_prefix("helm ")) else {
        skip("RLMESH_BED_TOOLS names no helm: `make test` sets it to what scripts/bed-tools.sh prints");
        return Ok(None);
    };
    let root = source_tree().map_err(anyhow::Error::msg)?;
    let helm = PathBuf::from(folder).join("helm");
    Ok(Some(Chart { helm, folder: root.join("charts/rlmesh-runtime"), home: tempfile::tempdir()? }))
}

impl Chart {
    fn helm(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        let mut command = clean_command(&self.helm);
        for (variable, folder) in [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")] {
            command.env(variable, self.home.path().join(folder));
        }
        command.args(arguments).current_dir(&self.folder).output().with_context(|| format!("{} can't be started", self.helm.display()))
    }

    fn template(&self, more: &[&str]) -> anyhow::Result<Output> {
        self.helm(&[&["template", "rlmesh", ".", "--namespace", SYSTEM, "--kube-version", "1.34.0"], more].concat())
    }

    fn text(&self, more: &[&str]) -> anyhow::Result<String> {
        let output = self.template(more)?;
        ensure!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn set(&self, (name, apis): (&str, &[&str])) -> anyhow::Result<String> {
        self.text(&[&["--values", &format!("tests/values/{name}.yaml")], apis].concat())
    }

    fn yaml(&self, file: &str) -> anyhow::Result<Value> {
        serde_yaml_ng::from_str(&std::fs::read_to_string(self.folder.join(file))?).with_context(|| file.to_owned())
    }
}

fn objects(text: &str) -> anyhow::Result<Vec<Value>> {
    let documents = text.split("---\n# Source: ").skip(1);
    let all: Vec<Value> =
        documents.map(|one| serde_yaml_ng::from_str(one.split_once('\n').unwrap_or_default().1)).collect::<Result<_, _>>()?;
    ensure!(!all.is_empty() && all.iter().all(Value::is_object), "a document of the chart is empty");
    Ok(all)
}

/// `kind/name`.
fn title(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

fn find<'a>(all: &'a [Value], wanted: &str) -> anyhow::Result<&'a Value> {
    all.iter().find(|object| title(object) == wanted).with_context(|| format!("there is no {wanted}"))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn templates(all: &[Value]) -> impl Iterator<Item = (String, &Value)> {
    all.iter().filter_map(|object| Some((title(object), object.pointer("/spec/template")?)))
}

/// The keys with a value of their own, each as a path with dots.
fn leaves(path: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    match value.as_object().filter(|fields| !fields.is_empty()) {
        Some(fields) => {
            fields.iter().for_each(|(key, value)| leaves(&format!("{path}{}{key}", if path.is_empty() { "" } else { "." }), value, into))
        }
        None => drop(into.insert(path.to_owned(), value.clone())),
    }
}

#[test]
fn the_texts_are_those_that_were_looked_at() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    for set in SETS {
        let text = chart.set(set)?;
        let file = chart.folder.join(format!("tests/golden/{}.yaml", set.0));
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&file, &text)?;
            continue;
        }
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        let other = text.lines().zip(known.lines()).position(|(now, known)| now != known);
        let line = other.unwrap_or_else(|| text.lines().count().min(known.lines().count()));
        ensure!(
            text == known,
            "{} has another text from line {} on:\n  known: {}\n  now:   {}\nLook at it, and write it anew by `make generate`.",
            file.display(),
            line + 1,
            known.lines().nth(line).unwrap_or("(nothing)"),
            text.lines().nth(line).unwrap_or("(nothing)"),
        );
    }
    Ok(())
}

#[test]
fn helm_finds_nothing_to_criticize() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    for (name, _) in SETS {
        let output =
            chart.helm(&["lint", "--strict", ".", "--kube-version", "1.34.0", "--values", &format!("tests/values/{name}.yaml")])?;
        ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(())
}

/// What holds for every object, whatever the values are.
#[test]
fn every_object_keeps_the_rules() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    for set in SETS {
        let all = objects(&chart.set(set)?)?;
        let registry = if set.0 == "everything" { "mirror.example.com/rlmesh-mirror/" } else { "registry.rlmesh.dev/" };
        for object in &all {
            object_rules(object).with_context(|| format!("{}: {}", set.0, title(object)))?;
        }
        let mut pods = 0;
        for (name, template) in templates(&all) {
            pod_rules(&name, template, registry, set.0 == "openshift").with_context(|| format!("{}: {name}", set.0))?;
            pods += 1;
        }
        // GPU discovery is off where each value is other than its default.
        ensure!(pods == if set.0 == "everything" { 3 } else { 4 }, "{pods} pod templates");
        references(&all).with_context(|| set.0)?;
    }
    Ok(())
}

fn object_rules(object: &Value) -> anyhow::Result<()> {
    let kind = object["kind"].as_str().context("no kind")?;
    let allowed = [
        "Namespace",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "PersistentVolumeClaim",
        "Service",
        "Deployment",
        "DaemonSet",
        "NetworkPolicy",
    ];
    ensure!(allowed.contains(&kind), "no object of this kind is expected: no Secret, no Ingress, no webhook");
    labels(&object["metadata"]["labels"])?;
    let namespace = object["metadata"]["namespace"].as_str();
    let of_cluster = ["Namespace", "ClusterRole", "ClusterRoleBinding"].contains(&kind);
    ensure!(if of_cluster { namespace.is_none() } else { namespace == Some(SYSTEM) || namespace == Some(RUNS) }, "in {namespace:?}");
    for rule in list(&object["rules"]) {
        for field in ["apiGroups", "resources", "verbs"] {
            ensure!(list(&rule[field]).next().is_some(), "a rule without {field}");
            ensure!(!list(&rule[field]).any(|word| word.as_str().is_none_or(|word| word.contains('*'))), "a wildcard in {field}: {rule}");
        }
        let secret = |word: &Value| ["secrets", "pods/exec", "pods/attach", "nodes/proxy"].iter().any(|&bad| word == bad);
        ensure!(!list(&rule["resources"]).any(secret), "too much: {rule}");
        ensure!(!list(&rule["verbs"]).any(|verb| ["escalate", "bind", "impersonate"].iter().any(|&bad| verb == bad)), "too much: {rule}");
    }
    if kind == "Service" {
        ensure!(object["spec"]["type"].is_null() || object["spec"]["type"] == "ClusterIP", "it listens beyond the cluster");
    }
    if kind == "ServiceAccount" {
        ensure!(object["automountServiceAccountToken"] == false, "its token is mounted unasked");
    }
    Ok(())
}

fn labels(labels: &Value) -> anyhow::Result<()> {
    for (label, value) in
        [("instance", Some("rlmesh")), ("part-of", Some("rlmesh-runtime")), ("managed-by", Some("Helm")), ("name", None), ("version", None)]
    {
        let found = labels[format!("app.kubernetes.io/{label}")].as_str().with_context(|| format!("no label {label}"))?;
        ensure!(value.is_none_or(|value| value == found), "label {label} is {found}");
    }
    Ok(())
}

/// Pod Security *restricted*, and what our own pods keep besides.
fn pod_rules(name: &str, template: &Value, registry: &str, picks_users: bool) -> anyhow::Result<()> {
    labels(&template["metadata"]["labels"])?;
    let spec = &template["spec"];
    for field in ["hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"] {
        ensure!(spec[field].is_null(), "{field}");
    }
    let security = &spec["securityContext"];
    ensure!(security["runAsNonRoot"] == true && security["seccompProfile"] == json!({"type": "RuntimeDefault"}), "{security}");
    for field in ["runAsUser", "runAsGroup", "fsGroup"] {
        let given = security[field].as_u64();
        ensure!(if picks_users { security[field].is_null() } else { given.is_some_and(|id| id > 0) }, "{field}: {}", security[field]);
    }
    let nodes = &spec["nodeSelector"];
    ensure!(nodes["kubernetes.io/os"] == "linux" && nodes["kubernetes.io/arch"] == "amd64", "goes to any node: {nodes}");
    let speaks_to_kubernetes = name == "Deployment/rlmesh-cluster-agent" || name == "Deployment/rlmesh-cluster-controller";
    ensure!(spec["automountServiceAccountToken"] == speaks_to_kubernetes, "token: {}", spec["automountServiceAccountToken"]);
    ensure!(list(&spec["imagePullSecrets"]).next().is_some_and(|secret| secret["name"].is_string()), "nothing to pull with");
    let sources = ["configMap", "emptyDir", "persistentVolumeClaim", "secret"];
    for volume in list(&spec["volumes"]) {
        // A token for somebody else than the Kubernetes API.
        let mut tokens = list(&volume["projected"]["sources"]).map(|source| source["serviceAccountToken"]["audience"].is_string());
        let token = tokens.next() == Some(true) && tokens.all(|token| token);
        ensure!(token || sources.iter().any(|&source| !volume[source].is_null()), "a volume of another kind: {volume}");
    }
    ensure!(list(&spec["containers"]).count() == 1, "not one container");
    for container in list(&spec["containers"]) {
        let restricted = json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}});
        ensure!(container["securityContext"] == restricted, "{}", container["securityContext"]);
        let resources = &container["resources"];
        for pointer in ["/requests/cpu", "/requests/memory", "/limits/memory"] {
            ensure!(resources.pointer(pointer).is_some_and(Value::is_string), "no {pointer}: {resources}");
        }
        let image = container["image"].as_str().context("no image")?;
        ensure!(image.starts_with(registry) && !image.ends_with(":latest"), "image {image}");
        ensure!(list(&container["ports"]).all(|port| port["hostPort"].is_null()), "a port of the node");
    }
    Ok(())
}

/// Whatever an object names is there.
fn references(all: &[Value]) -> anyhow::Result<()> {
    let names: BTreeSet<String> = all.iter().map(|object| format!("{} in {}", title(object), object["metadata"]["namespace"])).collect();
    let there = |kind: &str, name: &Value, namespace: &Value| {
        let wanted = format!("{kind}/{} in {namespace}", name.as_str().unwrap_or_default());
        ensure!(names.contains(&wanted), "{wanted} is not there");
        Ok(())
    };
    for object in all {
        let namespace = &object["metadata"]["namespace"];
        if !object["roleRef"].is_null() {
            let kind = object["roleRef"]["kind"].as_str().unwrap_or_default();
            there(kind, &object["roleRef"]["name"], namespace)?;
            for subject in list(&object["subjects"]) {
                there("ServiceAccount", &subject["name"], &subject["namespace"])?;
            }
        }
        let Some(template) = object.pointer("/spec/template") else { continue };
        there("ServiceAccount", &template["spec"]["serviceAccountName"], namespace)?;
        for volume in list(&template["spec"]["volumes"]) {
            if volume["configMap"].is_object() {
                there("ConfigMap", &volume["configMap"]["name"], namespace)?;
            }
            if volume["persistentVolumeClaim"].is_object() {
                there("PersistentVolumeClaim", &volume["persistentVolumeClaim"]["claimName"], namespace)?;
            }
        }
        for (label, value) in object["spec"]["selector"]["matchLabels"].as_object().context("no selector")? {
            ensure!(&template["metadata"]["labels"][label] == value, "{} does not select its own pods", title(object));
        }
    }
    let service = find(all, "Service/rlmesh-cluster-agent")?;
    let agent = &find(all, "Deployment/rlmesh-cluster-agent")?["spec"]["template"]["metadata"]["labels"];
    ensure!(
        service["spec"]["selector"].as_object().is_some_and(|wanted| wanted.iter().all(|(label, value)| &agent[label] == value)),
        "{service}"
    );
    Ok(())
}

/// The programs understand what the chart gives them.
#[test]
fn the_programs_take_what_is_rendered() -> anyhow::Result<()> {
    #[derive(clap::Parser)]
    struct Agent {
        #[command(flatten)]
        options: agent::options::Options,
    }
    #[derive(clap::Parser)]
    struct Controller {
        #[command(flatten)]
        _options: controller::Options,
    }
    let Some(chart) = chart()? else { return Ok(()) };
    for set in SETS {
        let all = objects(&chart.set(set)?)?;
        let arguments = |deployment: &str| -> anyhow::Result<Vec<String>> {
            let container = &find(&all, deployment)?["spec"]["template"]["spec"]["containers"][0];
            let text = list(&container["args"]).map(|word| word.as_str().map(ToOwned::to_owned).context("an argument that is no text"));
            text.collect()
        };
        let given = arguments("Deployment/rlmesh-cluster-agent")?.join("\n").replace("$(RLMESH_CLUSTER_AGENT_SERVICE_HOST)", "10.96.0.9");
        let Agent { options } = Agent::try_parse_from(std::iter::once("agent").chain(given.lines()))?;
        let everything = set.0 == "everything";
        ensure!(options.server == if everything { "https://api.example.com:8443" } else { "https://api.rlmesh.dev" }, "{}", options.server);
        ensure!((options.max_runs, options.max_pods, options.max_gpus) == if everything { (3, 1_000_000, 4) } else { (0, 0, 0) });
        ensure!(options.spool_bytes == if everything { 19_327_352_832 } else { 9_663_676_416 }, "{}", options.spool_bytes);
        ensure!(options.credential_file.is_some() == (set.0 != "default") && options.ca_bundle.is_some() == everything);
        ensure!(options.require_enforcement == ["default", "openshift"].contains(&set.0));

        let mut given = arguments("Deployment/rlmesh-cluster-controller")?;
        // The subcommand; the rest comes from the pod's environment.
        ensure!(given.remove(0) == "run");
        given.extend(["--identity", "pod", "--lease-namespace", SYSTEM].map(ToOwned::to_owned));
        Controller::try_parse_from(std::iter::once("controller".to_owned()).chain(given))?;

        let text = find(&all, "ConfigMap/rlmesh-cluster-controller")?["data"]["settings.yaml"].as_str().context("no settings")?;
        let settings: Settings = serde_yaml_ng::from_str(text)?;
        ensure!(settings.namespace == RUNS && settings.service_account == "rlmesh-run");
        ensure!(settings.pod_security.is_none() == (set.0 == "openshift"), "{:?}", settings.pod_security);
        let user = settings.pod_security.map(|ids| (ids.run_as_user, ids.fs_group));
        ensure!(!everything || user == Some((2_147_483_647, 20_001)), "{user:?}");
        let nodes = &settings.runs.node_selector;
        ensure!(nodes["kubernetes.io/os"] == "linux" && nodes["kubernetes.io/arch"] == "amd64", "{nodes:?}");
        if everything {
            ensure!(settings.runs.image_pull_secrets == ["our-pull", "team-registry"] && nodes["pool"] == "evaluations");
            ensure!(settings.runs.tolerations.len() == 2 && settings.runs.affinity.is_some());
            ensure!(
                settings.allows_image("registry.example.com/team/x:1")
                    && !settings.allows_image("x")
                    && settings.allows_secret("hub", "any")
            );
        }
    }
    Ok(())
}

/// The agent may reach its control plane, wherever that is.
#[test]
fn the_walls_follow_the_values() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    for (set, ports, dns) in [(SETS[0], &[443, 6443][..], &[53][..]), (SETS[1], &[8443], &[53, 5353]), (SETS[2], &[443, 6443], &[53, 5353])]
    {
        let all = objects(&chart.set(set)?)?;
        let policy = find(&all, "NetworkPolicy/rlmesh-cluster-agent")?;
        let open = |anywhere: bool| -> BTreeSet<u64> {
            let rules = list(&policy["spec"]["egress"]).filter(|rule| rule["to"].is_null() == anywhere);
            rules
                .flat_map(|rule| list(&rule["ports"]))
                .filter_map(|port| port["port"].as_u64())
                .filter(|port| ![7080, 7081].contains(port))
                .collect()
        };
        ensure!(open(true) == ports.iter().copied().collect(), "{}: anywhere on {:?}", set.0, open(true));
        ensure!(open(false) == dns.iter().copied().collect(), "{}: DNS on {:?}", set.0, open(false));
        for (name, directions) in [("rlmesh-default-deny", RUNS), ("rlmesh-runtime-default-deny", SYSTEM)] {
            let wall = find(&all, &format!("NetworkPolicy/{name}"))?;
            ensure!(wall["metadata"]["namespace"] == directions && wall["spec"]["policyTypes"] == json!(["Ingress", "Egress"]), "{wall}");
            ensure!(wall["spec"]["ingress"].is_null() && wall["spec"]["egress"].is_null(), "{name} allows something");
        }
        // No rule is for everybody: one without peers has ports.
        for wall in all.iter().filter(|object| object["kind"] == "NetworkPolicy") {
            for (direction, peers) in [("egress", "to"), ("ingress", "from")] {
                for rule in list(&wall["spec"][direction]) {
                    ensure!(list(&rule["ports"]).next().is_some(), "{}: every port in {rule}", title(wall));
                    ensure!(direction == "egress" || list(&rule[peers]).next().is_some(), "{}: from everywhere in {rule}", title(wall));
                }
            }
        }
    }
    let text = chart.text(&["--set", "platform.apiHost=api.example.com:8443"])?;
    let all = objects(&text)?;
    let agent = find(&all, "NetworkPolicy/rlmesh-cluster-agent")?.to_string();
    ensure!(agent.contains("8443"), "the control plane can't be reached: {agent}");
    Ok(())
}

/// Values, and where the message says that they are wrong.
const REFUSED: [(&str, &str, &str); 67] = [
    ("platfrom", r#"{"apiHost": "x"}"#, ""),
    ("joinTokens", r#""x""#, ""),
    ("runs.maxPod", "3", "/runs"),
    ("images.agent.sha", r#""x""#, "/images/agent"),
    ("agent.spool.sise", r#""1Gi""#, "/agent/spool"),
    ("agent.resources.request", "{}", "/agent/resources"),
    ("network.dnsPeers", r#"[{"ipBlok": {}}]"#, "/network/dnsPeers/0"),
    ("platform", r#""api.example.com""#, "/platform"),
    ("platform", "null", ""),
    ("images.agent", "null", "/images"),
    ("runs.maxRuns", "null", "/runs"),
    ("runs.maxRuns", r#""three""#, "/runs/maxRuns"),
    ("runs.maxRuns", "-1", "/runs/maxRuns"),
    ("runs.maxPods", "-1", "/runs/maxPods"),
    ("runs.maxGpus", "1.5", "/runs/maxGpus"),
    ("runs.allowedImages", r#""x""#, "/runs/allowedImages"),
    ("runs.allowedImages", r#"["a*b"]"#, "/runs/allowedImages/0"),
    ("runs.allowedImages", r#"[""]"#, "/runs/allowedImages/0"),
    ("runs.allowedSecrets", r#"["Hub"]"#, "/runs/allowedSecrets/0"),
    ("runs.allowedSecrets", r#"["hub/a/b"]"#, "/runs/allowedSecrets/0"),
    ("runs.allowedVolumes", r#"["/data"]"#, "/runs/allowedVolumes/0"),
    ("runs.imagePullSecrets", r#"[{"name": "x"}]"#, "/runs/imagePullSecrets/0"),
    ("runs.imagePullSecrets", r#"["A B"]"#, "/runs/imagePullSecrets/0"),
    ("runs.tolerations", r#"[{"efect": "NoSchedule"}]"#, "/runs/tolerations/0"),
    ("runs.tolerations", r#"[{"effect": "Never"}]"#, "/runs/tolerations/0/effect"),
    ("runs.affinity", r#"{"node": {}}"#, "/runs/affinity"),
    ("runs.nodeSelector", r#"{"kubernetes.io/arch": "arm64"}"#, "/runs/nodeSelector/kubernetes.io~1arch"),
    ("runs.nodeSelector", r#"{"gpu": true}"#, "/runs/nodeSelector/gpu"),
    ("runs.labels", r#"{"a b": "x"}"#, "/runs/labels"),
    ("runs.labels", r#"{"team": "a b"}"#, "/runs/labels/team"),
    ("runs.labels", r#"{"rlmesh.dev/run": "x"}"#, "/runs/labels/rlmesh.dev~1run"),
    ("runs.runtimeClassName", r#""g visor""#, "/runs/runtimeClassName"),
    ("images.agent.digest", r#""sha256:12""#, "/images/agent/digest"),
    ("images.runner.digest", r#""0000""#, "/images/runner/digest"),
    ("images.controller.tag", r#""a b""#, "/images/controller/tag"),
    ("images.controller.tag", "1.2", "/images/controller/tag"),
    ("images.agent.repository", r#""""#, "/images/agent/repository"),
    ("images.agent.repository", r#""agent:1""#, "/images/agent/repository"),
    ("images.registry", r#""https://registry.example.com""#, "/images/registry"),
    ("images.pullPolicy", r#""Sometimes""#, "/images/pullPolicy"),
    ("agent.spool.size", r#""ten""#, "/agent/spool/size"),
    ("agent.spool.size", r#""10ki""#, "/agent/spool/size"),
    ("agent.spool.size", r#""0Gi""#, "/agent/spool/size"),
    ("agent.spool.size", r#""-1Gi""#, "/agent/spool/size"),
    ("agent.spool.maxBytes", r#""9Gi""#, "/agent/spool/maxBytes"),
    ("agent.spool.maxBytes", "0", "/agent/spool/maxBytes"),
    ("agent.resources.requests.cpu", r#""much""#, "/agent/resources/requests/cpu"),
    ("agent.resources.limits.memory", r#""-1Mi""#, "/agent/resources/limits/memory"),
    ("agent.resources.requests", "null", "/agent/resources"),
    ("controller.resources.limits.memory", "null", "/controller/resources/limits"),
    ("controller.replicas", "0", "/controller/replicas"),
    ("podSecurity.runAsUser", "0", "/podSecurity/runAsUser"),
    // More than Kubernetes allows.
    ("podSecurity.runAsUser", "2147483648", "/podSecurity/runAsUser"),
    ("podSecurity.fsGroup", r#""x""#, "/podSecurity/fsGroup"),
    ("credentials.pullSecret", r#""""#, "/credentials/pullSecret"),
    ("credentials.controlSecret", r#""My Secret""#, "/credentials/controlSecret"),
    ("platform.apiHost", r#""""#, "/platform/apiHost"),
    ("platform.apiHost", r#""https://api.example.com""#, "/platform/apiHost"),
    ("platform.apiHost", r#""api.example.com/v1""#, "/platform/apiHost"),
    ("platform.apiHost", r#""api..example.com""#, "/platform/apiHost"),
    ("platform.apiHost", r#""api.example.com:99999""#, "/platform/apiHost"),
    ("platform.registryHost", r#""""#, "/platform/registryHost"),
    ("platform.caBundle", r#""/etc/ca.pem""#, "/platform/caBundle"),
    ("network.dnsPeers", "[{}]", "/network/dnsPeers/0"),
    ("network.dnsPeers", r#"[{"ipBlock": {"cidr": "169.254.20.10"}}]"#, "/network/dnsPeers/0/ipBlock/cidr"),
    ("network.dnsPorts", "[0]", "/network/dnsPorts/0"),
    ("networkPolicy.requireEnforcement", r#""no""#, "/networkPolicy/requireEnforcement"),
];

/// Those that can be told apart in one answer: Helm names all places at once.
fn rounds() -> Vec<Vec<(&'static str, &'static str, &'static str)>> {
    let within = |one: &str, other: &str| one == other || one.starts_with(&format!("{other}."));
    let mut rounds: Vec<Vec<(&str, &str, &str)>> = Vec::new();
    for case in REFUSED {
        let apart = |other: &(&str, &str, &str)| !within(case.0, other.0) && !within(other.0, case.0) && case.2 != other.2;
        match rounds.iter_mut().find(|round| round.iter().all(apart)) {
            Some(round) => round.push(case),
            None => rounds.push(vec![case]),
        }
    }
    rounds
}

#[test]
fn wrong_values_are_refused_with_their_place() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    let mut wrong = Vec::new();
    for round in rounds() {
        let sets: Vec<String> = round.iter().map(|(key, value, _)| format!("{key}={value}")).collect();
        let output = chart.template(&sets.iter().flat_map(|set| ["--set-json", set]).collect::<Vec<_>>())?;
        let said = String::from_utf8_lossy(&output.stderr);
        let missed = round.iter().filter(|(.., place)| output.status.success() || !said.contains(&format!("- at '{place}'")));
        wrong.extend(missed.map(|(key, value, place)| format!("{key}={value} should be refused at '{place}': {}", said.trim())));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn right_values_are_taken() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    for value in [
        r#"global={"anything": 1}"#,
        r#"agent.spool={"size": 21474836480, "maxBytes": 19327352832}"#,
        r#"agent.spool.maxBytes="19327352832""#,
        r#"agent.resources={"requests": {"cpu": 1, "memory": "0.5Gi", "ephemeral-storage": "1Gi"}, "limits": {"cpu": "2"}}"#,
        r#"platform={"apiHost": "127.0.0.1:6443", "registryHost": "localhost"}"#,
        r#"runs.nodeSelector={"kubernetes.io/arch": "amd64", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "empty": ""}"#,
        r#"runs.tolerations=[{"operator": "Exists"}]"#,
        r#"runs.allowedImages=["*", "python@sha256:00"]"#,
        r#"network.dnsPeers=[{"ipBlock": {"cidr": "fd00::/8", "except": ["fd00:1::/32"]}}, {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}]"#,
    ] {
        objects(&chart.text(&["--set-json", value])?).with_context(|| value)?;
    }
    // As a number that `--set` understands and YAML would write with an exponent.
    let text = chart.text(&["--set", "agent.spool.maxBytes=19327352832"])?;
    ensure!(text.contains("--spool-bytes=19327352832\n"), "the number is written otherwise");
    Ok(())
}

/// The set called everything leaves nothing out, and the chart's page lists each value with its default.
#[test]
fn every_value_is_tried_and_documented() -> anyhow::Result<()> {
    let Some(chart) = chart()? else { return Ok(()) };
    let (mut defaults, mut set) = (BTreeMap::new(), BTreeMap::new());
    leaves("", &chart.yaml("values.yaml")?, &mut defaults);
    let everything = chart.yaml("tests/values/everything.yaml")?;
    leaves("", &everything, &mut set);
    for (key, default) in &defaults {
        let given = everything.pointer(&format!("/{}", key.replace('.', "/"))).with_context(|| format!("everything.yaml lacks {key}"))?;
        ensure!(given != default, "everything.yaml has the default of {key}");
    }
    let page = std::fs::read_to_string(chart.folder.join("README.md"))?;
    let values = page.split("## ").find(|part| part.starts_with("Values")).context("the page has no Values")?;
    let mut documented = BTreeMap::new();
    for row in values.lines().filter(|line| line.starts_with("| `")) {
        let [_, key, default, _, _] = row.split('|').collect::<Vec<_>>()[..] else { bail!("not three columns: {row}") };
        let bare = |cell: &str| cell.trim().trim_matches('`').to_owned();
        let default = serde_json::from_str::<Value>(&bare(default)).with_context(|| format!("the default is no JSON: {row}"))?;
        ensure!(documented.insert(bare(key), default).is_none(), "twice: {row}");
    }
    for (key, default) in &defaults {
        let written = documented.remove(key).with_context(|| format!("README.md does not list the value {key}"))?;
        ensure!(&written == default, "README.md says {written} of {key}, values.yaml {default}");
    }
    ensure!(documented.is_empty(), "README.md lists values that do not exist: {:?}", documented.keys());
    Ok(())
}

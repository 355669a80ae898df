//! A namespace for one test: Pod Security *restricted*, a Secret to pull with, and pods to look from.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use k8s_openapi::api::core::v1::{Namespace, Pod, Secret};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::names::{REGISTRY_HOST, REGISTRY_PASSWORD, REGISTRY_USER};
use super::{Bed, Node, groups};
use crate::wait_for;

/// Of a pod until it runs: a first pull takes a while.
const PATIENCE: Duration = Duration::from_secs(90);
/// Name of the Secret with the registry's credentials.
pub const PULL_SECRET: &str = "pull";

pub struct Space<'a> {
    pub bed: &'a Bed,
    pub client: Client,
    pub name: String,
}

/// Runs `test` in a new namespace and removes it. A test that fails prints what the namespace held.
pub async fn with_space(bed: &Bed, name: &str, test: impl AsyncFnOnce(Space<'_>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("{name}-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let client = bed.client().await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let restricted = json!({"pod-security.kubernetes.io/enforce": "restricted"});
    namespaces.create(&PostParams::default(), &serde_json::from_value(json!({"metadata": {"name": name, "labels": restricted}}))?).await?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &name);
    secrets.create(&PostParams::default(), &pull_secret()?).await?;
    let ended = test(Space { bed, client, name: name.clone() }).await;
    if ended.is_err() {
        for what in ["pods,pvc,services", "events"] {
            eprintln!(
                "{}",
                bed.kubectl(&["get", what, "--namespace", &name, "--output=wide"]).await.unwrap_or_else(|error| format!("{error:#}"))
            );
        }
    }
    namespaces.delete(&name, &DeleteParams::default()).await?;
    ended
}

fn pull_secret() -> anyhow::Result<Secret> {
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("{REGISTRY_USER}:{REGISTRY_PASSWORD}"));
    let config = json!({"auths": {REGISTRY_HOST: {"auth": auth}}}).to_string();
    Ok(serde_json::from_value(json!({
        "metadata": {"name": PULL_SECRET},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": config},
    }))?)
}

/// A pod that Pod Security *restricted* lets in; `spec` is merged over it, whole fields at a time.
#[must_use]
pub fn pod(name: &str, image: &str, command: &[&str], spec: Value) -> Value {
    let mut container = json!({
        "name": "main",
        "image": image,
        "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
    });
    if !command.is_empty() {
        container["command"] = json!(command);
    }
    let mut all = json!({
        "containers": [container],
        "imagePullSecrets": [{"name": PULL_SECRET}],
        "automountServiceAccountToken": false,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": true, "runAsUser": 10001, "runAsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
    });
    if let (Some(all), Value::Object(spec)) = (all.as_object_mut(), spec) {
        all.extend(spec);
    }
    json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": all})
}

/// The field of a pod that binds it to a node, for [`pod`].
#[must_use]
pub fn on(node: Node) -> Value {
    json!({"nodeSelector": {"kubernetes.io/hostname": node.name()}})
}

/// What connecting from inside a pod's network comes to, for each address, whatever its image holds: `open`, `refused`,
/// `no route`, `silence`. A program of this machine enters the network of one of the pod's processes.
pub async fn connect_from(pod: &Pod, targets: &[(&str, u16)]) -> anyhow::Result<Vec<String>> {
    let uid = pod.metadata.uid.as_deref().context("a pod without a uid")?;
    let process = groups::process_of_pod(uid).with_context(|| format!("nothing runs of pod {:?}", pod.metadata.name))?;
    let program = format!(
        "import concurrent.futures as c
{CONNECT}
targets = {}
with c.ThreadPoolExecutor(len(targets)) as pool: print('\\n'.join(pool.map(lambda target: connect(*target), targets)))",
        serde_json::to_string(targets)?
    );
    let mut command = tokio::process::Command::new("nsenter");
    command.args(["--target", &process.to_string(), "--net", "--", "python3", "-c", &program]);
    let found: Vec<String> = super::run(&mut command, PATIENCE).await?.lines().map(str::to_owned).collect();
    ensure!(found.len() == targets.len(), "{} answers for {} addresses", found.len(), targets.len());
    Ok(found)
}

const CONNECT: &str = "import socket, errno
def connect(host, port):
    try:
        socket.create_connection((host, port), 2).close()
        return 'open'
    except socket.gaierror: return 'no name'
    except TimeoutError: return 'silence'
    except OSError as e: return {errno.ECONNREFUSED: 'refused'}.get(e.errno, 'no route')";

impl Space<'_> {
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    pub async fn create(&self, pod: Value) -> anyhow::Result<()> {
        self.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        Ok(())
    }

    /// Creates it and waits until it runs; its address.
    pub async fn run(&self, pod: Value) -> anyhow::Result<String> {
        let name = pod["metadata"]["name"].as_str().context("a pod without a name")?.to_owned();
        self.create(pod).await?;
        wait_for(&format!("pod {name} to run"), PATIENCE, async || {
            let status = self.pods().get(&name).await?.status.unwrap_or_default();
            match status.phase.as_deref() {
                Some("Running") => Ok(status.pod_ip),
                Some("Failed") => bail!("pod {name} failed: {status:?}"),
                _ => Ok(None),
            }
        })
        .await
    }

    /// Waits until the first container waits for `reason`; what the kubelet says about it.
    pub async fn waits(&self, name: &str, reason: &str) -> anyhow::Result<String> {
        wait_for(&format!("pod {name} to wait for {reason}"), PATIENCE, async || {
            let status = self.pods().get(name).await?.status.unwrap_or_default();
            let waiting = status.container_statuses.into_iter().flatten().find_map(|one| one.state?.waiting);
            Ok(waiting.filter(|one| one.reason.as_deref() == Some(reason)).map(|one| one.message.unwrap_or_default()))
        })
        .await
    }

    /// Runs a command in a pod; what it printed.
    pub async fn exec(&self, pod: &str, command: &[&str]) -> anyhow::Result<String> {
        let mut arguments = vec!["exec", "--namespace", &self.name, pod, "--"];
        arguments.extend(command);
        self.bed.kubectl(&arguments).await
    }

    /// Runs Python in a pod; what it printed.
    pub async fn python(&self, pod: &str, program: &str) -> anyhow::Result<String> {
        Ok(self.exec(pod, &["python3", "-c", program]).await?.trim().to_owned())
    }

    /// What connecting from a pod comes to: `open`, `refused`, `no route`, `silence` or `no name`.
    pub async fn connect(&self, pod: &str, host: &str, port: u16) -> anyhow::Result<String> {
        self.python(pod, &format!("{CONNECT}\nprint(connect('{host}', {port}))")).await
    }
}

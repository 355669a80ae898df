//! A real Kubernetes API without nodes: etcd and kube-apiserver on free loopback ports, in a throw-away folder. Pods stay
//! pending and a test writes their status as a kubelet would.
//!
//! For questions that need the API alone; what needs pods that run is asked of the bed.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::process::{Child, Command};

use crate::wait_for;

/// Bearer tokens are the users' names: nothing but the test reaches the port.
pub const ADMIN: &str = "admin";

pub struct ApiServer {
    folder: tempfile::TempDir,
    port: u16,
    // Killed when dropped, the API server first.
    _apiserver: Child,
    _etcd: Child,
}

/// The programs. None, and a line that says why, where they are not built.
///
/// # Panics
/// Where `CI=true`: nothing is skipped there.
#[must_use]
#[expect(clippy::panic, reason = "a test that can't run on CI has failed")]
pub fn programs() -> Option<(PathBuf, PathBuf)> {
    let found = built("etcd", "etcd").zip(built("kubernetes", "kube-apiserver"));
    if found.is_none() {
        let why = "etcd and kube-apiserver are not built; `make bed` does it";
        if std::env::var("CI").is_ok_and(|value| value == "true") {
            panic!("nothing is skipped on CI: {why}");
        }
        eprintln!("skipped, because {why}");
    }
    found
}

/// A program of the newest build of a tool.
fn built(tool: &str, program: &str) -> Option<PathBuf> {
    let cache =
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    let folders = std::fs::read_dir(cache.join("rlmesh/tools")).ok()?;
    let candidates = folders.filter_map(Result::ok).filter(|folder| {
        let name = folder.file_name().to_string_lossy().into_owned();
        name.strip_prefix(tool).is_some_and(|rest| rest.starts_with('-') && !rest.contains('.'))
    });
    let newest = candidates.map(|folder| folder.path().join(program)).filter(|path| path.is_file());
    newest.max_by_key(|path| std::fs::metadata(path).and_then(|data| data.modified()).ok())
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

impl ApiServer {
    /// Starts both; returns once the API is ready. `users`: names that may sign in, apart from the admin.
    pub async fn start((etcd, apiserver): (PathBuf, PathBuf), users: &[&str]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rlmesh-api-").tempdir()?;
        let path = folder.path();
        let lines = users.iter().map(|user| format!("{user},{user},{user}\n"));
        let admin = format!("{ADMIN},{ADMIN},{ADMIN},\"system:masters\"\n");
        std::fs::write(path.join("tokens.csv"), lines.chain([admin]).collect::<String>())?;
        let audited = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- {level: Metadata, verbs: [create, update, patch, delete]}\n- {level: None}\n";
        std::fs::write(path.join("audit.yaml"), audited)?;
        let key = path.join("key.pem");
        let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048").stderr(Stdio::null()).status().await;
        ensure!(made.context("openssl can't be run")?.success(), "openssl made no key");
        let (client, peer, port) = (free_port()?, free_port()?, free_port()?);
        let store = format!("http://127.0.0.1:{client}");
        let mut start_etcd = Command::new(etcd);
        start_etcd.arg("--data-dir").arg(path.join("etcd")).arg("--unsafe-no-fsync");
        start_etcd.args([
            format!("--listen-client-urls={store}"),
            format!("--advertise-client-urls={store}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
        ]);
        let etcd = spawn(start_etcd, &path.join("etcd.log"))?;
        let mut start = Command::new(apiserver);
        start.args([
            format!("--etcd-servers={store}"),
            format!("--secure-port={port}"),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            "--authorization-mode=RBAC".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", key.display()),
            format!("--service-account-signing-key-file={}", key.display()),
            format!("--token-auth-file={}", path.join("tokens.csv").display()),
            format!("--cert-dir={}", path.join("certs").display()),
            format!("--audit-policy-file={}", path.join("audit.yaml").display()),
            format!("--audit-log-path={}", path.join("audit.log").display()),
        ]);
        let apiserver = spawn(start, &path.join("apiserver.log"))?;
        let server = Self { folder, port, _apiserver: apiserver, _etcd: etcd };
        let admin = server.client(ADMIN).await?;
        let ready = wait_for("the API server to be ready", Duration::from_secs(120), || async {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            Ok(admin.request_text(request).await.ok().filter(|text| text == "ok"))
        });
        if let Err(error) = ready.await {
            let log = std::fs::read_to_string(server.folder.path().join("apiserver.log")).unwrap_or_default();
            let end: Vec<&str> = log.lines().rev().take(20).collect();
            bail!("{error:#}; the end of its log:\n{}", end.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
        Ok(server)
    }

    /// A kubeconfig file of this user.
    pub fn kubeconfig(&self, user: &str) -> anyhow::Result<PathBuf> {
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("https://127.0.0.1:{}", self.port), "insecure-skip-tls-verify": true}}],
            "users": [{"name": "u", "user": {"token": user}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        let path = self.folder.path().join(format!("{}.kubeconfig", user.replace([':', '/'], "-")));
        std::fs::write(&path, text.to_string())?;
        Ok(path)
    }

    pub async fn client(&self, user: &str) -> anyhow::Result<Client> {
        let config = Kubeconfig::read_from(self.kubeconfig(user)?)?;
        let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Every accepted write so far: (user, verb, resource, name).
    pub fn writes(&self) -> anyhow::Result<Vec<(String, String, String, String)>> {
        let log = std::fs::read_to_string(self.folder.path().join("audit.log"))?;
        let mut writes = Vec::new();
        for line in log.lines() {
            let Ok(event) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            let text = |pointer: &str| event.pointer(pointer).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
            if event.pointer("/responseStatus/code").and_then(serde_json::Value::as_u64).is_some_and(|code| code < 300) {
                writes.push((text("/user/username"), text("/verb"), text("/objectRef/resource"), text("/objectRef/name")));
            }
        }
        Ok(writes)
    }
}

fn spawn(mut command: Command, log: &Path) -> anyhow::Result<Child> {
    let log = std::fs::File::create(log)?;
    let program = command.as_std().get_program().to_owned();
    let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true).spawn();
    child.with_context(|| format!("{} can't be started", program.to_string_lossy()))
}

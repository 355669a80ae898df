//! A whole installation for one test: state in a throw-away folder, server on a free port, agent behind a relay, a key.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use reqwest::{Method, StatusCode};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::cli::{Ran, Shell};
use crate::processes::{self, Component, Process, clean_command, descendants, tail};
use crate::proxy::{Proxy, Wire};
use crate::tools::Tools;
use crate::wait_for;

/// How the installation differs from the usual.
#[derive(Debug, Clone)]
pub struct Options {
    pub max_runs: u32,
    /// Lines of the server's `[timings]`.
    pub timings: String,
    pub agent: bool,
}

impl Default for Options {
    /// Timings scaled down: an hour of theirs is seconds.
    fn default() -> Self {
        Self { max_runs: 2, timings: "heartbeat = 0.5\ndisconnected-after = 2.0\ndrain = 2.0\n".to_owned(), agent: true }
    }
}

/// A running installation. [`Stack::end`] it: one that is dropped before prints what it saw last.
pub struct Stack {
    pub tools: Tools,
    options: Options,
    folder: tempfile::TempDir,
    listen: SocketAddr,
    key: String,
    http: reqwest::Client,
    proxy: Proxy,
    server: Option<Process>,
    agent: Option<Process>,
    cluster: Option<String>,
    last: Mutex<Value>,
    ended: bool,
    _alone: tokio::sync::OwnedMutexGuard<()>,
}

/// Installations of one test program run one after the other: they would only slow each other down.
async fn alone() -> tokio::sync::OwnedMutexGuard<()> {
    static ALONE: OnceLock<Arc<tokio::sync::Mutex<()>>> = OnceLock::new();
    Arc::clone(ALONE.get_or_init(Arc::default)).lock_owned().await
}

/// A port that is free at this moment.
pub fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

impl Stack {
    pub async fn start(tools: &Tools, options: Options) -> anyhow::Result<Self> {
        let alone = alone().await;
        let folder = tempfile::Builder::new().prefix("rlm-e2e-").tempdir().context("no folder for the test")?;
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let proxy = Proxy::start(listen).await?;
        // No connection is kept: a server that was killed must not be remembered.
        let http = reqwest::Client::builder().timeout(Duration::from_secs(30)).pool_max_idle_per_host(0).build()?;
        let mut stack = Self {
            tools: tools.clone(),
            options,
            folder,
            listen,
            key: String::new(),
            http,
            proxy,
            server: None,
            agent: None,
            cluster: None,
            last: Mutex::new(Value::Null),
            ended: false,
            _alone: alone,
        };
        let setup =
            clean_command(&tools.program("rlmesh-server")).arg("local-setup").arg("--state-dir").arg(stack.server_state()).output()?;
        ensure!(setup.status.success(), "local-setup failed: {}", String::from_utf8_lossy(&setup.stderr));
        let setup: Value = serde_json::from_slice(&setup.stdout).context("local-setup did not answer with JSON")?;
        stack.key = setup["apiKey"].as_str().context("local-setup gave no key")?.to_owned();
        stack.start_server().await?;
        if stack.options.agent {
            stack.join_agent().await?;
        }
        Ok(stack)
    }

    /// The throw-away folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn server_state(&self) -> PathBuf {
        self.folder().join("server")
    }

    #[must_use]
    pub fn agent_state(&self) -> PathBuf {
        self.folder().join("agent")
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.listen)
    }

    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    #[must_use]
    pub fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    // ---- processes

    pub async fn start_server(&mut self) -> anyhow::Result<()> {
        let config = self.folder().join("server.toml");
        std::fs::write(&config, format!("[timings]\n{}", self.options.timings))?;
        let mut command = clean_command(&self.tools.program("rlmesh-server"));
        command.arg("serve").arg("--die-with-parent").arg("--config").arg(config);
        command.arg("--state-dir").arg(self.server_state()).args(["--listen", &self.listen.to_string()]);
        // Agents are told the relay's address, should they ask for one.
        command.args(["--public-url", &self.proxy.url()]);
        self.server = Some(Process::start("rlmesh-server", &mut command, &self.folder().join("server.log"))?);
        let started = std::time::Instant::now();
        loop {
            if let Ok(answer) = self.http.get(format!("{}/v1/info", self.url())).send().await
                && answer.status().is_success()
            {
                return Ok(());
            }
            let ended = self.server.as_mut().and_then(Process::ended);
            ensure!(ended.is_none(), "rlmesh-server ended at start: {ended:?}\n{}", tail(&self.folder().join("server.log"), 20));
            ensure!(started.elapsed() < Duration::from_secs(30), "rlmesh-server does not answer at {}", self.url());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn agent_command(&self) -> std::process::Command {
        let mut command = clean_command(&self.tools.program("rlmesh-cluster-agent"));
        command.args([
            "--executor",
            "process",
            "--die-with-parent",
            "--max-backoff",
            "0.5",
            "--heartbeat",
            "0.5",
            "--poll",
            "0.2",
            "--server",
            &self.proxy.url(),
        ]);
        command.arg("--state").arg(self.agent_state()).args(["--max-runs", &self.options.max_runs.to_string()]);
        command.arg("--python").arg(&self.tools.python);
        command
    }

    async fn join_agent(&mut self) -> anyhow::Result<()> {
        let cluster = self.ok(Method::POST, "/v1/clusters", Some(&json!({"name": "cell"}))).await?;
        let id = cluster["id"].as_str().context("the cluster has no id")?.to_owned();
        let token = self.ok(Method::POST, &format!("/v1/clusters/{id}/join-tokens"), Some(&json!({}))).await?;
        let mut command = self.agent_command();
        command.args(["--join-token-file", "/dev/stdin"]).stdin(Stdio::piped());
        let mut agent = Process::start("rlmesh-cluster-agent", &mut command, &self.folder().join("agent.log"))?;
        agent.feed(token["token"].as_str().context("no join token")?)?;
        self.agent = Some(agent);
        self.cluster = Some(id);
        self.wait_for_cluster("connected", Duration::from_secs(20)).await
    }

    /// Process id of the server or the agent, while it runs.
    #[must_use]
    pub fn process_id(&self, component: Component) -> Option<u32> {
        match component {
            Component::Server => self.server.as_ref().map(Process::id),
            Component::Agent => self.agent.as_ref().map(Process::id),
            Component::Runner | Component::Environment | Component::Model => None,
        }
    }

    /// Starts the agent again, with the state it has.
    pub fn start_agent(&mut self) -> anyhow::Result<()> {
        self.agent = Some(Process::start("rlmesh-cluster-agent", &mut self.agent_command(), &self.folder().join("agent.log"))?);
        Ok(())
    }

    pub async fn wait_for_cluster(&mut self, status: &str, limit: Duration) -> anyhow::Result<()> {
        let id = self.cluster.clone().context("there is no cluster")?;
        let started = std::time::Instant::now();
        loop {
            let seen = self.request(Method::GET, &format!("/v1/clusters/{id}"), None).await.ok();
            if seen.as_ref().is_some_and(|(_, cluster)| cluster["status"] == status) {
                return Ok(());
            }
            let ended = self.agent.as_mut().and_then(Process::ended);
            ensure!(ended.is_none(), "the agent ended: {ended:?}\n{}", tail(&self.folder().join("agent.log"), 30));
            ensure!(started.elapsed() < limit, "the cluster did not become {status} within {} s: {seen:?}", limit.as_secs());
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    /// What runs below the agent.
    #[must_use]
    pub fn running(&self) -> Vec<processes::Seen> {
        self.agent.as_ref().map(|agent| descendants(agent.id())).unwrap_or_default()
    }

    /// Kills (-9) a component; of several of its kind the one that `choice` falls on. False: none of it runs now. A server or
    /// an agent stays away until it is started again.
    pub async fn kill(&mut self, component: Component, choice: usize) -> anyhow::Result<bool> {
        let process = match component {
            Component::Server => &mut self.server,
            Component::Agent => &mut self.agent,
            Component::Runner | Component::Environment | Component::Model => {
                let found: Vec<processes::Seen> = self.running().into_iter().filter(|one| one.component() == Some(component)).collect();
                return match found.len() {
                    0 => Ok(false),
                    count => found.get(choice % count).map_or(Ok(false), |one| processes::signal(one, Signal::KILL)),
                };
            }
        };
        match process.take() {
            Some(mut process) => process.kill().await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Asks server or agent to end and waits.
    pub async fn stop(&mut self, component: Component) -> anyhow::Result<()> {
        let process = match component {
            Component::Server => self.server.take(),
            Component::Agent => self.agent.take(),
            Component::Runner | Component::Environment | Component::Model => bail!("{component:?} is the agent's to stop"),
        };
        if let Some(mut process) = process {
            process.signal(Signal::TERM)?;
            process.end(Duration::from_secs(20)).await?;
        }
        Ok(())
    }

    pub fn wire(&self, wire: Wire) {
        self.proxy.set(wire);
    }

    // ---- the server's database

    /// A copy of the server's database as it is now; the server is stopped for it and started again.
    pub async fn backup(&mut self, name: &str) -> anyhow::Result<PathBuf> {
        let target = self.folder().join(name);
        self.stop(Component::Server).await?;
        std::fs::create_dir_all(&target)?;
        for file in self.database_files()? {
            std::fs::copy(&file, target.join(file.file_name().context("a file without a name")?))?;
        }
        self.start_server().await?;
        Ok(target)
    }

    /// Puts a copy back in place of what is there.
    pub async fn restore(&mut self, backup: &Path) -> anyhow::Result<()> {
        self.stop(Component::Server).await?;
        for file in self.database_files()? {
            std::fs::remove_file(file)?;
        }
        for entry in std::fs::read_dir(backup)? {
            let entry = entry?;
            std::fs::copy(entry.path(), self.server_state().join(entry.file_name()))?;
        }
        self.start_server().await
    }

    fn database_files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(self.server_state())? {
            let path = entry?.path();
            if path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("rlmesh.db")) {
                files.push(path);
            }
        }
        ensure!(!files.is_empty(), "the server has no database in {}", self.server_state().display());
        Ok(files)
    }

    // ---- REST

    /// Sends a request with the key; the status and the JSON of the answer.
    pub async fn request(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<(StatusCode, Value)> {
        let mut request = self.http.request(method, format!("{}{path}", self.url())).bearer_auth(&self.key);
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = request.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// The same, where only success will do.
    pub async fn ok(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let (status, answer) = self.request(method.clone(), path, body).await?;
        ensure!(status.is_success(), "{method} {path} was answered {status}: {answer}");
        Ok(answer)
    }

    /// A client without credentials, for requests of one's own making.
    #[must_use]
    pub const fn http(&self) -> &reqwest::Client {
        &self.http
    }

    pub async fn submit(&self, request: &Value) -> anyhow::Result<String> {
        let created = self.ok(Method::POST, "/v1/evaluations", Some(request)).await?;
        Ok(created["id"].as_str().context("the evaluation has no id")?.to_owned())
    }

    /// The evaluation as it is now; None while the server is away.
    pub async fn evaluation(&self, id: &str) -> anyhow::Result<Option<Value>> {
        match self.request(Method::GET, &format!("/v1/evaluations/{id}"), None).await {
            Ok((status, evaluation)) if status.is_success() => {
                self.last.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&evaluation);
                Ok(Some(evaluation))
            }
            Ok((StatusCode::SERVICE_UNAVAILABLE, _)) | Err(_) => Ok(None),
            Ok((status, answer)) => bail!("{id} was answered {status}: {answer}"),
        }
    }

    /// Waits until it is over, whatever becomes of the server meanwhile.
    pub async fn wait(&self, id: &str, limit: Duration) -> anyhow::Result<Value> {
        wait_for(&format!("the end of {id}"), limit, || async { Ok(self.evaluation(id).await?.filter(is_over)) }).await
    }

    /// Waits until this many rows (per mille) are finished. False: it was over before.
    pub async fn reaches(&self, id: &str, per_mille: u64, limit: Duration) -> anyhow::Result<bool> {
        wait_for(&format!("{per_mille} per mille of {id}"), limit, || async {
            let Some(evaluation) = self.evaluation(id).await? else { return Ok(None) };
            if is_over(&evaluation) {
                return Ok(Some(false));
            }
            let progress = &evaluation["progress"];
            let (done, total) =
                (progress["completedEpisodes"].as_u64().unwrap_or(0), progress["totalEpisodes"].as_u64().unwrap_or(u64::MAX));
            Ok((done > 0 && done * 1000 >= total * per_mille).then_some(true))
        })
        .await
    }

    /// Every row with its failure, attempts and times, a page at a time.
    pub async fn rows(&self, id: &str) -> anyhow::Result<Vec<Value>> {
        let mut rows = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.ok(Method::GET, &format!("/v1/evaluations/{id}/rows?limit=1000{cursor}"), None).await?;
            rows.extend(page["items"].as_array().into_iter().flatten().cloned());
            match page["nextCursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return Ok(rows),
            }
        }
    }

    /// The export's lines: what two runs of the same evaluation must agree in, byte by byte. Fails when a row is missing or
    /// there twice.
    pub async fn results(&self, id: &str) -> anyhow::Result<Vec<String>> {
        let answer = self.http.get(format!("{}/v1/evaluations/{id}/export?format=jsonl", self.url())).bearer_auth(&self.key).send().await?;
        ensure!(answer.status().is_success(), "the export of {id} was answered {}", answer.status());
        let lines: Vec<String> = answer.text().await?.lines().map(str::to_owned).collect();
        for (expected, line) in (0_u64..).zip(&lines) {
            let row: Value = serde_json::from_str(line).with_context(|| format!("a line of the export is not JSON: {line}"))?;
            ensure!(row["row"].as_u64() == Some(expected), "row {expected} is {line}: lost, twice or out of order");
        }
        Ok(lines)
    }

    // ---- commands

    /// A shell with address and key of this installation.
    pub fn shell(&self) -> anyhow::Result<(tempfile::TempDir, String)> {
        let home = tempfile::Builder::new().prefix("home-").tempdir_in(self.folder())?;
        Ok((home, self.url()))
    }

    /// Runs our `rlmesh` against this installation.
    pub async fn rlmesh(&self, arguments: &[&str]) -> anyhow::Result<Ran> {
        let (home, url) = self.shell()?;
        Shell { home: home.path(), url: Some(&url), key: Some(&self.key) }.run(&self.tools.program("rlmesh"), arguments).await
    }

    /// Writes a file into the test's folder.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> anyhow::Result<String> {
        let path = self.folder().join(name);
        std::fs::write(&path, content)?;
        Ok(path.display().to_string())
    }

    // ---- the end

    /// Fails unless nothing of a run is left below the agent.
    pub async fn quiet(&self) -> anyhow::Result<()> {
        wait_for("the end of the runs' processes", Duration::from_secs(20), || async { Ok(self.running().is_empty().then_some(())) }).await
    }

    /// Stops everything; the test has passed.
    pub async fn end(mut self) -> anyhow::Result<()> {
        self.stop(Component::Agent).await?;
        self.stop(Component::Server).await?;
        self.ended = true;
        Ok(())
    }

    /// What was seen last.
    #[must_use]
    pub fn report(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut evaluation = last.clone();
        if let Some(fields) = evaluation.as_object_mut() {
            for long in ["request", "effective"] {
                fields.remove(long);
            }
        }
        drop(last);
        let mut text = format!("---- the evaluation, as seen last\n{evaluation:#}\n");
        for (name, file) in [("server", "server.log"), ("agent", "agent.log")] {
            text.push_str(&format!("---- end of the {name}'s log\n{}\n", tail(&self.folder().join(file), 40)));
        }
        for (name, path) in self.component_logs().into_iter().rev().take(8) {
            text.push_str(&format!("---- end of {name}\n{}\n", tail(&path, 15)));
        }
        text.push_str("---- what runs below the agent\n");
        for one in self.running() {
            text.push_str(&format!("{} {}\n", one.pid, one.command.join(" ")));
        }
        text
    }

    /// Logs of the runs' processes, oldest first.
    #[must_use]
    pub fn component_logs(&self) -> Vec<(String, PathBuf)> {
        let mut found = Vec::new();
        for run in std::fs::read_dir(self.agent_state().join("logs")).into_iter().flatten().flatten() {
            for file in std::fs::read_dir(run.path()).into_iter().flatten().flatten() {
                let modified = file.metadata().and_then(|meta| meta.modified()).ok();
                found.push((
                    modified,
                    format!("{}/{}", run.file_name().to_string_lossy(), file.file_name().to_string_lossy()),
                    file.path(),
                ));
            }
        }
        found.sort();
        found.into_iter().map(|(_, name, path)| (name, path)).collect()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        eprintln!("{}", self.report());
        if let Some(agent) = &mut self.agent {
            // Asked first, so that it takes its processes with it.
            let _ = agent.signal(Signal::TERM);
            let started = std::time::Instant::now();
            while agent.ended().is_none() && started.elapsed() < Duration::from_secs(8) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Whether an evaluation is over.
#[must_use]
pub fn is_over(evaluation: &Value) -> bool {
    matches!(evaluation["status"].as_str(), Some("completed" | "failed" | "cancelled"))
}

/// Fails at the first difference, naming it.
pub fn same(expected: &[String], found: &[String]) -> anyhow::Result<()> {
    for (before, after) in expected.iter().zip(found) {
        ensure!(before == after, "a row differs:\n  expected {before}\n  found    {after}");
    }
    ensure!(expected.len() == found.len(), "{} rows instead of {}", found.len(), expected.len());
    Ok(())
}

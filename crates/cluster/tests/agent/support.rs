//! A cell for one test: folders, the agent's process, runs to assign.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rlm_api::cluster::v1;
use rlm_core::ids::{EvaluationId, RunId};
use rlm_core::tokens::Secret;
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;

pub struct Cell {
    folder: tempfile::TempDir,
    port: u16,
}

pub struct Run {
    spec: Value,
    pub assign: v1::Assign,
}

impl Run {
    pub fn id(&self) -> String {
        self.spec["runId"].as_str().unwrap().to_owned()
    }

    pub fn reference(&self) -> v1::RunRef {
        v1::RunRef { run_id: self.id(), generation: self.spec["generation"].as_u64().unwrap() }
    }
}

pub fn run_ref() -> v1::RunRef {
    v1::RunRef { run_id: RunId::generate().to_string(), generation: 1 }
}

fn script(path: &Path, text: &str) {
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.set_permissions(std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn python() -> String {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Command lines of processes that hold `mark`.
pub fn processes_with(mark: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(mark) {
            found.push(line);
        }
    }
    found
}

impl Cell {
    pub fn new(port: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let own = std::env::current_exe().unwrap();
        let runner = format!(
            "#!/bin/sh\nexport FAKE_RUNNER_ARGS=\"$*\"\nexec '{}' fake_runner::fake_runner --exact --ignored --nocapture --test-threads 1\n",
            own.display()
        );
        script(&folder.path().join("runner"), &runner);
        std::fs::write(folder.path().join("stand_in.py"), include_str!("stand_in.py")).unwrap();
        script(
            &folder.path().join("python"),
            &format!("#!/bin/sh\nexec '{}' '{}/stand_in.py' \"$@\"\n", python(), folder.path().display()),
        );
        Self { folder, port }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn mark(&self) -> String {
        // Not the folder's name itself, which stands in the agent's own command line.
        self.folder.path().file_name().unwrap().to_string_lossy().chars().rev().collect()
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    pub fn write_token(&self, token: &Secret) {
        std::fs::write(self.folder.path().join("token"), format!("{}\n", token.expose())).unwrap();
    }

    pub fn change_control(&self, secret: &Secret) {
        let path = self.state().join("credentials.json");
        let mut document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        document["credentials"][0]["secret"] = json!(secret.expose());
        let next = path.with_extension("next");
        std::fs::write(&next, document.to_string()).unwrap();
        std::fs::rename(next, path).unwrap();
    }

    pub fn start(&self, plane: &ControlPlane, more: &[&str]) -> Agent {
        self.write_token(&plane.with(|state| state.token.clone()));
        let path = self.folder.path();
        let log = path.join(format!("agent-{}.log", std::fs::read_dir(path).unwrap().count()));
        let child = Command::new(env!("CARGO_BIN_EXE_rlmesh-cluster-agent"))
            .args(["--server", &format!("http://127.0.0.1:{}", self.port)])
            .args(["--cuda-devices", "0", "--max-backoff", "0.3", "--heartbeat", "0.2", "--poll", "0.05"])
            .arg("--state")
            .arg(self.state())
            .arg("--join-token-file")
            .arg(path.join("token"))
            .arg("--runner")
            .arg(path.join("runner"))
            .arg("--python")
            .arg(path.join("python"))
            .args(more)
            .env("RLMESH_FRAMEWORK", "torch")
            .env_remove("OMP_NUM_THREADS")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Agent { child, log }
    }

    /// Processes of this cell that are still there.
    pub fn leftovers(&self) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(3);
        let path = format!("{}/stand_in.py", self.folder.path().display());
        loop {
            let left = processes_with(&path);
            if left.is_empty() || Instant::now() > deadline {
                return left;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn model(&self, entrypoint: &str) -> Value {
        let timeout = if entrypoint.starts_with("slow") { 1500 } else { 60_000 };
        json!({
            "id": "model", "image": null, "entrypoint": entrypoint, "pythonPath": null, "python": null, "address": null, "params": {},
            "checkpoints": [], "executionHorizon": 1, "prefetchLead": 0, "workflowEdition": null,
            "resources": {"cpu": null, "memory": null, "gpu": 0, "gpuProduct": null, "shm": null},
            "env": {}, "secretEnv": {}, "startupTimeoutMs": timeout, "replicas": 1
        })
    }

    /// `rows` rows with seeds from 1000 on.
    pub fn run(&self, model: Value, environment: Value, rows: u32) -> Run {
        self.run_with(
            |spec| {
                spec["model"]["params"] = model.clone();
                spec["bindings"][0]["params"] = environment.clone();
                if environment["behave"] == "slow" {
                    spec["environment"]["startupTimeoutMs"] = json!(1500);
                }
            },
            rows,
        )
    }

    pub fn run_again(&self, run: &Run, generation: u64, rows: u32) -> Run {
        let (id, model) = (run.spec["runId"].clone(), run.spec["model"].clone());
        self.run_with(
            |spec| {
                spec["runId"] = id.clone();
                spec["model"] = model.clone();
                spec["generation"] = json!(generation);
            },
            rows,
        )
    }

    pub fn run_with(&self, change: impl Fn(&mut Value), rows: u32) -> Run {
        let mut spec = json!({
            "runId": RunId::generate(), "evaluationId": EvaluationId::generate(), "generation": 1,
            "model": self.model("policies:Model"),
            "environment": {
                "id": "env", "image": null, "entrypoint": "envs:Env", "pythonPath": null, "python": null, "address": null, "params": {},
                "resources": {"cpu": null, "memory": null, "gpu": 0, "gpuProduct": null, "shm": null},
                "shareModelGpu": false, "lanesPerPod": null, "env": {}, "secretEnv": {}, "startupTimeoutMs": 60_000
            },
            "bindings": [{"index": 0, "params": {}}],
            "tasks": [{"taskIndex": 0, "taskId": "env", "binding": 0, "maxEpisodeSteps": null, "maxEpisodeSeconds": null, "instruction": null, "success": null}],
            "lanes": 2, "limits": rlm_core::evaluation::Limits::default(), "recording": rlm_core::evaluation::Recording::default()
        });
        change(&mut spec);
        let block = v1::RowBlock { first_row: 0, count: rows, task: 0, seed: 1000, seeds: Vec::new(), trial_index: 0 };
        let assign = v1::Assign { run_json: spec.to_string(), rows: vec![block] };
        Run { spec, assign }
    }
}

pub struct Agent {
    child: Child,
    log: PathBuf,
}

impl Agent {
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub async fn wait_for_log(&mut self, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.log().contains(text) {
            assert!(Instant::now() < deadline, "'{text}' is not in the log:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM, and a clean end.
    pub fn stop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}\n{}", self.log());
                return;
            }
            assert!(Instant::now() < deadline, "it does not stop:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("---- the agent's log\n{}", self.log());
        }
    }
}

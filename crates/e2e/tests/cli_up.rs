//! `rlmesh up`: one command runs everything; Ctrl-C, kill -9 and restart leave no process and lose no evaluation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use rlm_e2e::cli::{Ran, Shell, ran};
use rlm_e2e::processes::{Process, clean_command, descendants, runs, tail};
use rlm_e2e::{Signal, Tools, counter, requests, tools, wait_for};
use serde_json::Value;

struct Local {
    tools: Tools,
    folder: tempfile::TempDir,
    port: u16,
    up: Option<Process>,
}

impl Local {
    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("up.log")
    }

    /// Starts `rlmesh up` and waits until commands reach it.
    async fn start(&mut self) -> anyhow::Result<()> {
        // What an earlier one wrote says nothing about this one.
        let before = std::fs::metadata(self.log()).map_or(0, |file| file.len());
        let mut command = clean_command(&self.tools.program("rlmesh"));
        command
            .arg("up")
            .arg("--state")
            .arg(self.state())
            .arg("--listen")
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("--python")
            .arg(&self.tools.python);
        command.env("RLMESH_CONFIG_DIR", self.folder.path().join("config")).env("RLMESH_DATA_DIR", self.folder.path().join("data"));
        self.up = Some(Process::start("rlmesh up", &mut command, &self.log())?);
        let (log, up) = (self.log(), &mut self.up);
        for _ in 0..1200 {
            let said = std::fs::read(&log).unwrap_or_default().split_off(usize::try_from(before)?);
            if String::from_utf8_lossy(&said).contains("RLMesh runs on this machine") {
                return Ok(());
            }
            anyhow::ensure!(up.as_mut().and_then(Process::ended).is_none(), "rlmesh up ended:\n{}", tail(&log, 30));
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        anyhow::bail!("rlmesh up is not ready:\n{}", tail(&log, 30))
    }

    fn shell(&self) -> Shell<'_> {
        Shell { home: self.folder.path(), url: None, key: None }
    }

    async fn rlmesh(&self, arguments: &[&str]) -> anyhow::Result<Ran> {
        let state = self.state().display().to_string();
        self.shell().run(&self.tools.program("rlmesh"), &[&["--state", &state], arguments].concat()).await
    }

    /// Waits until this many rows are finished.
    async fn reaches(&self, id: &str, rows: u64) -> anyhow::Result<()> {
        wait_for(&format!("{rows} rows of {id}"), Duration::from_secs(60), || async {
            let shown = self.rlmesh(&["eval", "get", id, "-o", "json"]).await?.expect(0)?.json()?;
            anyhow::ensure!(shown["status"] != "completed", "over too early");
            Ok((shown["progress"]["completedEpisodes"].as_u64() >= Some(rows)).then_some(()))
        })
        .await
    }

    /// Signals `rlmesh up` and waits until it and everything below it is gone.
    async fn signal(&mut self, signal: Signal) -> anyhow::Result<std::process::ExitStatus> {
        let mut up = self.up.take().context("it does not run")?;
        let below = descendants(up.id());
        anyhow::ensure!(below.len() >= 2, "server and agent are not below it: {below:?}");
        up.signal(signal)?;
        let status = up.end(Duration::from_secs(25)).await?;
        wait_for("the end of everything below rlmesh up", Duration::from_secs(15), || async {
            Ok(below.iter().all(|one| !runs(one.pid)).then_some(()))
        })
        .await
        .with_context(|| format!("{below:#?}"))?;
        Ok(status)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn up_survives_interrupts_kills_and_restarts_with_an_unfinished_evaluation() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let mut local = Local {
        tools: tools.clone(),
        folder: tempfile::Builder::new().prefix("rlm-up-").tempdir()?,
        port: rlm_e2e::stack::free_port()?,
        up: None,
    };
    let outcome = scenario(&mut local).await;
    outcome.with_context(|| format!("the log of rlmesh up ends:\n{}", tail(&local.log(), 60)))
}

async fn scenario(local: &mut Local) -> anyhow::Result<()> {
    local.start().await?;
    let clusters = local.rlmesh(&["clusters", "list", "-o", "json"]).await?.expect(0)?.json()?;
    assert_eq!(clusters[0]["status"], "connected", "it says that it runs before its cell can take anything: {clusters}");
    let log = std::fs::read_to_string(local.log())?;
    for part in ["address", "sign in", &format!("127.0.0.1:{}", local.port)] {
        assert!(log.contains(part), "rlmesh up does not say '{part}':\n{log}");
    }
    second_is_refused(local).await?;
    let key = key(&local.state())?;
    assert!(!log.contains(&key), "the key is in the output");
    assert!(
        !descendants(local.up.as_ref().context("up")?.id()).iter().any(|one| one.command.iter().any(|part| part.contains("rlm_"))),
        "a secret is in an argument"
    );

    let request = local.folder.path().join("request.json");
    std::fs::write(&request, requests::counter(&local.tools, &["Follower"], 4_000, 4).to_string())?;
    let submitted = local.rlmesh(&["eval", "submit", &request.display().to_string(), "-o", "name"]).await?.expect(0)?;
    let id = submitted.stdout.trim().to_owned();
    // It waits through everything that follows.
    let state = local.state().display().to_string();
    let waiting = local.shell().command(&local.tools.program("rlmesh"), &["--state", &state, "eval", "wait", &id]).spawn()?;

    local.reaches(&id, 100).await?;
    let status = local.signal(Signal::INT).await?;
    assert_eq!(status.code(), Some(0), "Ctrl-C is a way to stop it");
    local.start().await?;
    local.reaches(&id, 700).await?;
    local.signal(Signal::KILL).await?;
    local.start().await?;
    // What dies below it is started again.
    local.reaches(&id, 1_200).await?;
    for name in ["rlmesh-server", "rlmesh-cluster-agent"] {
        let below = descendants(local.up.as_ref().context("up")?.id());
        let one = below
            .iter()
            .find(|one| one.command.first().is_some_and(|program| program.ends_with(name)))
            .with_context(|| format!("{name} does not run"))?;
        assert!(rlm_e2e::processes::signal(one, Signal::KILL)?, "{name} ended by itself");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }

    let output = tokio::time::timeout(Duration::from_secs(120), waiting.wait_with_output()).await??;
    ran(&output).expect(0)?;
    let export = local.rlmesh(&["eval", "export", &id]).await?.expect(0)?;
    let rows: Vec<Value> = export.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    assert_eq!(rows.len(), 4_000);
    for row in &rows {
        counter::check_follower(row)?;
    }
    assert_eq!(local.signal(Signal::TERM).await?.code(), Some(0));
    Ok(())
}

async fn second_is_refused(local: &Local) -> anyhow::Result<()> {
    let second = local.rlmesh(&["up", "--listen", "127.0.0.1:0"]).await?.expect(2)?;
    assert!(second.stderr.contains("another `rlmesh up`") && second.stdout.is_empty(), "{second:?}");
    Ok(())
}

fn key(state: &Path) -> anyhow::Result<String> {
    let endpoint: Value = serde_json::from_slice(&std::fs::read(state.join("endpoint.json"))?)?;
    Ok(endpoint["apiKey"].as_str().context("no key")?.to_owned())
}

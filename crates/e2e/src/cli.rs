//! Running commands as a user does: our `rlmesh`, the SDK's, Python scripts. Each sees a home of its own.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

/// What a command ended with.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Exit status; -1: by a signal.
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Fails unless it ended with this status.
    pub fn expect(self, status: i32) -> anyhow::Result<Self> {
        anyhow::ensure!(
            self.status == status,
            "exit status {} instead of {status}\nstdout: {}\nstderr: {}",
            self.status,
            self.stdout,
            self.stderr
        );
        Ok(self)
    }

    /// Standard output as JSON, which has to be all there is.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| format!("standard output is not JSON: {}\nstderr: {}", self.stdout, self.stderr))
    }
}

/// Where a command is and what it is told of the platform.
#[derive(Debug, Clone)]
pub struct Shell<'a> {
    pub home: &'a Path,
    pub url: Option<&'a str>,
    pub key: Option<&'a str>,
}

impl Shell<'_> {
    /// The command with its environment set, not started yet.
    pub fn command(&self, program: &Path, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::from(crate::processes::clean_command(program));
        command.args(arguments).current_dir(self.home).kill_on_drop(true);
        command.env("HOME", self.home).env("NO_COLOR", "1");
        command
            .env("RLMESH_CONFIG_DIR", self.home.join("config"))
            .env("RLMESH_DATA_DIR", self.home.join("data"))
            .env("RLMESH_KEYCHAIN", "0");
        if let Some(url) = self.url {
            command.env("RLMESH_PLATFORM_URL", url);
        }
        if let Some(key) = self.key {
            command.env("RLMESH_API_KEY", key);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs it to its end, at most two minutes.
    pub async fn run(&self, program: &Path, arguments: &[&str]) -> anyhow::Result<Ran> {
        finish(self.command(program, arguments), &format!("{} {}", program.display(), arguments.join(" "))).await
    }
}

/// Runs a prepared command to its end.
pub async fn finish(mut command: tokio::process::Command, what: &str) -> anyhow::Result<Ran> {
    let output = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .with_context(|| format!("{what} did not end within 120 s"))?
        .with_context(|| format!("{what} could not be started"))?;
    Ok(ran(&output))
}

#[must_use]
pub fn ran(output: &std::process::Output) -> Ran {
    Ran {
        status: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

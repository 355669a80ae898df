//! Processes of a test: those it starts, and those that its agent starts. Only these are ever signalled: a process that is
//! not a child of this one is looked up as a descendant of the agent at that moment.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal};

/// What can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    Server,
    Agent,
    Runner,
    Environment,
    Model,
}

impl Component {
    pub const ALL: [Self; 5] = [Self::Server, Self::Agent, Self::Runner, Self::Environment, Self::Model];
}

/// A process that the test started.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts it with its output appended to `log`.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let file = File::options().create(true).append(true).open(log).with_context(|| format!("{}", log.display()))?;
        let child = command.stdout(file.try_clone()?).stderr(file).spawn().with_context(|| format!("{name} could not be started"))?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Hands over what it reads from standard input, which is closed then.
    pub fn feed(&mut self, text: &str) -> anyhow::Result<()> {
        use std::io::Write as _;
        let mut stdin = self.child.stdin.take().with_context(|| format!("{} has no standard input", self.name))?;
        stdin.write_all(text.as_bytes()).with_context(|| format!("{} did not read its standard input", self.name))
    }

    /// None while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        rustix::process::kill_process(pid(self.child.id())?, signal).with_context(|| format!("{} can't be signalled", self.name))
    }

    /// Waits for its end.
    pub async fn end(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                return Ok(status);
            }
            anyhow::ensure!(started.elapsed() < limit, "{} did not end within {} s", self.name, limit.as_secs_f64());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Kills it (-9) and waits.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        if self.ended().is_none() {
            self.signal(Signal::KILL)?;
        }
        self.end(Duration::from_secs(10)).await.map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process as `/proc` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub pid: u32,
    parent: u32,
    pub command: Vec<String>,
}

impl Seen {
    /// Which part of a run it is; None: none (yet).
    #[must_use]
    pub fn component(&self) -> Option<Component> {
        let has = |text: &str| self.command.iter().any(|part| part == text);
        if has("exec-child") {
            return None;
        }
        if self.command.first().is_some_and(|program| program.ends_with("/rlmesh-runner")) {
            return Some(Component::Runner);
        }
        match (has("rlmesh.serve"), has("--env")) {
            (true, true) => Some(Component::Environment),
            (true, false) => Some(Component::Model),
            (false, _) => None,
        }
    }
}

/// Every process below this one.
#[must_use]
pub fn descendants(of: u32) -> Vec<Seen> {
    let all: Vec<Seen> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| seen(entry.file_name().to_str()?.parse().ok()?))
        .collect();
    let mut found: Vec<Seen> = Vec::new();
    let mut parents = vec![of];
    while let Some(parent) = parents.pop() {
        for one in all.iter().filter(|one| one.parent == parent) {
            parents.push(one.pid);
            found.push(one.clone());
        }
    }
    found.sort_by_key(|one| one.pid);
    found
}

fn seen(pid: u32) -> Option<Seen> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // A zombie is gone already.
    if *fields.first()? == "Z" {
        return None;
    }
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let command =
        command.split(|byte| *byte == 0).filter(|part| !part.is_empty()).map(|part| String::from_utf8_lossy(part).into_owned()).collect();
    Some(Seen { pid, parent: fields.get(1)?.parse().ok()?, command })
}

/// Whether a process with this number still runs.
#[must_use]
pub fn runs(pid: u32) -> bool {
    seen(pid).is_some()
}

/// Signals a process that was just seen below one of ours. False: it has ended meanwhile.
pub fn signal(seen_before: &Seen, signal: Signal) -> anyhow::Result<bool> {
    if seen(seen_before.pid).is_none_or(|now| now.command != seen_before.command) {
        return Ok(false);
    }
    Ok(rustix::process::kill_process(pid(seen_before.pid)?, signal).is_ok())
}

fn pid(number: u32) -> anyhow::Result<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw).with_context(|| format!("{number} is no process id"))
}

/// A command that sees nothing of the user's own RLMesh settings.
#[must_use]
pub fn clean_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RLMESH_") {
            command.env_remove(&name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// The last `lines` lines of a file.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_else(|error| format!("({error})"));
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

//! One child process: its own process group, its output in a log, its end seen, and ended with its group.
//!
//! Each is started through this binary's `exec-child`, so that the kernel ends it with the agent; what a killed agent leaves
//! all the same (grandchildren) is found by the next one through the records that are kept here. Processes are started on
//! the runtime's worker threads alone: a parent-death signal follows the thread that started them.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;

use super::classify::Ended;
use super::launch::Launch;
use super::logs::LogSink;

/// How long output is still read once the process has ended: grandchildren may hold the pipe.
const OUTPUT_GRACE: Duration = Duration::from_millis(300);
/// Between asking a child to end and killing it.
const GRACE: Duration = Duration::from_secs(5);
/// The same when a run was cancelled: all of it ends within a second.
const HURRY: Duration = Duration::from_millis(400);

/// Starts children.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// This binary, whose `exec-child` starts them.
    pub exec_child: PathBuf,
    /// Where what runs is noted.
    pub records: PathBuf,
}

/// A running child.
pub struct Child {
    process: tokio::process::Child,
    pid: Pid,
    record: PathBuf,
    log: LogSink,
    output: Option<tokio::task::JoinHandle<()>>,
    oom_kills: u64,
}

/// What a child is started with besides its [`Launch`].
pub struct Start<'a> {
    pub launch: &'a Launch,
    /// Folder to run in when the launch names none.
    pub folder: &'a Path,
    pub log: LogSink,
    /// Written to standard input, which is closed then.
    pub stdin: Option<Vec<u8>>,
}

impl Launcher {
    pub async fn start(&self, start: Start<'_>) -> std::io::Result<Child> {
        let (reader, writer) = std::io::pipe()?;
        let mut command = std::process::Command::new(&self.exec_child);
        command
            .arg("exec-child")
            .arg("--parent")
            .arg(std::process::id().to_string())
            .arg("--")
            .arg(&start.launch.program)
            .args(&start.launch.args)
            .current_dir(start.launch.folder.as_deref().unwrap_or(start.folder))
            .stdin(if start.stdin.is_some() { Stdio::piped() } else { Stdio::null() })
            .stderr(writer.try_clone()?)
            .stdout(writer);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("RLMESH_") {
                command.env_remove(&name);
            }
        }
        command.envs(&start.launch.env);
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let oom_kills = oom_kills();
        let mut process = tokio::process::Command::from(command).spawn()?;
        let pid = process
            .id()
            .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
            .ok_or_else(|| std::io::Error::other("the process ended at once"))?;
        let record = super::leftovers::note(&self.records, pid);
        let reader = pipe::Receiver::from_owned_fd(reader.into())?;
        let output = Some(tokio::spawn(copy(reader, start.log.clone())));
        if let (Some(bytes), Some(mut stdin)) = (start.stdin, process.stdin.take()) {
            // A child that ended before it read its input is seen by its end.
            let _ = tokio::time::timeout(Duration::from_secs(5), stdin.write_all(&bytes)).await;
        }
        Ok(Child { process, pid, record, log: start.log, output, oom_kills })
    }
}

async fn copy(mut reader: pipe::Receiver, log: LogSink) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read @ 1..) = reader.read(&mut buffer).await {
        log.write(&buffer[..read]);
    }
}

impl Child {
    /// Waits for its end. May be dropped and called again.
    pub async fn ended(&mut self) -> Ended {
        match self.process.wait().await {
            Ok(status) => Ended::from_status(status),
            Err(error) => {
                tracing::error!(%error, pid = self.pid.as_raw_nonzero().get(), "a child can't be waited for");
                Ended::Code(-1)
            }
        }
    }

    /// Asks it to end, and kills its group after [`GRACE`], or [`HURRY`] after `hurry` was cancelled.
    pub async fn stop(&mut self, hurry: &CancellationToken) -> Ended {
        self.signal(Signal::TERM);
        let asked = async {
            tokio::select! {
                () = tokio::time::sleep(GRACE) => {}
                () = async { hurry.cancelled().await; tokio::time::sleep(HURRY).await } => {}
            }
        };
        tokio::select! {
            _ = self.process.wait() => {}
            () = asked => self.signal(Signal::KILL),
        }
        self.ended().await
    }

    fn signal(&self, signal: Signal) {
        // It may have ended already.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// Ends what is left of its group and reads the rest of its output. To be called once it has ended.
    pub async fn finish(&mut self) {
        self.signal(Signal::KILL);
        if let Some(mut output) = self.output.take()
            && tokio::time::timeout(OUTPUT_GRACE, &mut output).await.is_err()
        {
            output.abort();
        }
        super::leftovers::forget(&self.record);
    }

    /// The out-of-memory killer was active in the agent's cgroup since this child started.
    #[must_use]
    pub fn out_of_memory(&self) -> bool {
        oom_kills() > self.oom_kills
    }

    #[must_use]
    pub fn last_lines(&self) -> Vec<String> {
        self.log.last_lines()
    }
}

impl Drop for Child {
    /// A child that nobody ended goes with its handle. One that was waited for has no process id any more.
    fn drop(&mut self) {
        if self.process.id().is_some() {
            self.signal(Signal::KILL);
        }
    }
}

/// Kills by the out-of-memory killer in the agent's own cgroup so far; 0 where that can't be known.
fn oom_kills() -> u64 {
    let read = |path: &str| -> Option<String> {
        let mut text = String::new();
        std::fs::File::open(path).ok()?.read_to_string(&mut text).ok()?;
        Some(text)
    };
    let group = read("/proc/self/cgroup").and_then(|text| text.lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned)));
    let Some(group) = group else { return 0 };
    let events = read(&format!("/sys/fs/cgroup{}/memory.events", group.trim_end_matches('/')));
    events.as_deref().and_then(oom_count).unwrap_or(0)
}

fn oom_count(events: &str) -> Option<u64> {
    events.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// Replaces this process by `program`, after asking the kernel to end it with its parent. Returns the reason when it can't.
pub fn exec_child(parent: i32, program: &Path, args: &[std::ffi::OsString]) -> anyhow::Error {
    use std::os::unix::process::CommandExt as _;
    if let Err(error) = rlm_process::die_with_parent(rlm_process::ParentDeath::Kill, Some(parent)) {
        return error;
    }
    let error = std::process::Command::new(program).args(args).exec();
    anyhow::anyhow!("{}: {error}", program.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_read_from_the_cgroup() {
        assert_eq!(oom_count("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"), Some(2));
        assert_eq!(oom_count("low 0\n"), None);
    }
}

//! The bed's control groups (cgroup v1). Whatever runs in them was started by the bed, directly or as a container: this is
//! how it is found and ended even when nobody is left who remembers it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal};

use super::names::{GROUP, Node};

const ROOT: &str = "/sys/fs/cgroup";

/// Why there can be no bed here. None: there can.
pub fn missing() -> Option<String> {
    (!Path::new(ROOT).join("pids/cgroup.procs").exists())
        .then(|| format!("{ROOT}/pids is not there: the bed needs control groups of version 1"))
}

fn hierarchies() -> Vec<PathBuf> {
    std::fs::read_dir(ROOT)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        // `unified` is version 2; two names of one hierarchy are one link.
        .filter(|path| path.join("cgroup.procs").is_file() && !path.join("cgroup.controllers").exists() && !path.is_symlink())
        .collect()
}

/// Makes them, and returns the file that takes the numbers of the bed's own processes.
pub fn make() -> anyhow::Result<PathBuf> {
    for hierarchy in hierarchies() {
        let top = hierarchy.join(GROUP);
        for group in [top.clone(), top.join("daemons"), top.join(Node::One.name()), top.join(Node::Two.name())] {
            std::fs::create_dir_all(&group).with_context(|| format!("{} can't be made", group.display()))?;
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let (Some(above), true) = (group.parent(), group.join(file).exists()) {
                    std::fs::write(group.join(file), std::fs::read(above.join(file))?)?;
                }
            }
        }
    }
    Ok(procs())
}

#[must_use]
pub fn procs() -> PathBuf {
    Path::new(ROOT).join("pids").join(GROUP).join("daemons/cgroup.procs")
}

/// A process of the pod with this uid.
#[must_use]
pub fn process_of_pod(uid: &str) -> Option<u32> {
    let pod = format!("pod{uid}");
    let groups = below(&Path::new(ROOT).join("pids").join(GROUP));
    let ours = groups.iter().filter(|group| group.components().any(|part| part.as_os_str() == pod.as_str()));
    ours.filter_map(|group| std::fs::read_to_string(group.join("cgroup.procs")).ok()).find_map(|procs| procs.lines().next()?.parse().ok())
}

/// Below it, deepest first.
fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(below(&entry.path()));
        }
    }
    found.push(folder.to_owned());
    found
}

/// Every process of the bed.
#[must_use]
pub fn processes() -> Vec<u32> {
    below(&Path::new(ROOT).join("pids").join(GROUP))
        .iter()
        .filter_map(|group| std::fs::read_to_string(group.join("cgroup.procs")).ok())
        .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<u32>>())
        .collect()
}

#[must_use]
pub fn exist() -> bool {
    hierarchies().iter().any(|hierarchy| hierarchy.join(GROUP).exists())
}

/// Kills everything in them until nothing is left, and removes them.
pub async fn end() -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let left = processes();
        for pid in left.iter().filter_map(|&pid| i32::try_from(pid).ok().and_then(Pid::from_raw)) {
            // Gone this moment, or a child of this process that waits for us: both are as wanted.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        }
        if left.is_empty() && hierarchies().iter().all(|hierarchy| remove(&hierarchy.join(GROUP))) {
            return Ok(());
        }
        ensure!(started.elapsed() < Duration::from_secs(30), "after 30 s of kill -9 the processes {left:?} of the bed are still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A group whose last process has just ended may be busy for a moment.
fn remove(top: &Path) -> bool {
    !top.exists() || below(top).iter().map(|group| std::fs::remove_dir(group).is_ok()).filter(|&removed| !removed).count() == 0
}

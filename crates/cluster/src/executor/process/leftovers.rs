//! What an agent that was killed left running, found by process id and start time and ended. Touches no other process.

use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal};

/// Notes a child's process group; the note holds what tells it from a later process with the same number.
pub fn note(folder: &Path, pid: Pid) -> PathBuf {
    let number = pid.as_raw_nonzero().get();
    let path = folder.join(number.to_string());
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, format!("{} {}\n", boot_id(), start_time(number).unwrap_or(0))));
    if let Err(error) = written {
        tracing::warn!(%error, pid = number, "a child can't be noted; it may outlive a killed agent");
    }
    path
}

pub fn forget(record: &Path) {
    // Not there: nothing to forget.
    let _ = std::fs::remove_file(record);
}

/// Ends every noted process group that still is what was noted. Returns how many.
pub fn end_all(folder: &Path) -> usize {
    let mut ended = 0;
    for entry in std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let note = std::fs::read_to_string(entry.path()).unwrap_or_default();
        if let Some(pid) = number.and_then(Pid::from_raw)
            && is_the_same(pid.as_raw_nonzero().get(), &note)
            && rustix::process::kill_process_group(pid, Signal::KILL).is_ok()
        {
            ended += 1;
        }
        forget(&entry.path());
    }
    ended
}

/// Whether the group with this number is the one noted. While a group lives, its number is not given to another process;
/// so a leader with another start time means that the group is gone, and none at all that its children may be left.
fn is_the_same(number: i32, note: &str) -> bool {
    let mut parts = note.split_whitespace();
    let (Some(boot), Some(Ok(start))) = (parts.next(), parts.next().map(str::parse::<u64>)) else { return false };
    if boot != boot_id() || start == 0 {
        return false;
    }
    match start_time(number) {
        Some(now) => now == start,
        None => members(number).any(|member| member >= start),
    }
}

/// Start times of the processes in a group.
fn members(group: i32) -> impl Iterator<Item = u64> {
    std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok).filter_map(move |entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let (pgrp, start) = stat(pid)?;
        (pgrp == group).then_some(start)
    })
}

fn start_time(pid: i32) -> Option<u64> {
    stat(pid).map(|(_, start)| start)
}

/// Process group and start time.
fn stat(pid: i32) -> Option<(i32, u64)> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The command's name stands in parentheses and may hold anything, also parentheses.
fn parse_stat(text: &str) -> Option<(i32, u64)> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some((fields.get(2)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|text| text.trim().to_owned()).unwrap_or_else(|_| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    #[test]
    fn names_with_parentheses_are_read() {
        let line = "12 (a) b (c)) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 8724 1000 1";
        assert_eq!(parse_stat(line), Some((12, 8724)));
    }

    #[test]
    fn the_noted_group_is_ended_with_its_children_and_a_stranger_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut ours = Command::new("sh").args(["-c", "sleep 100 & sleep 100"]).process_group(0).spawn().unwrap();
        let mut stranger = Command::new("sleep").arg("100").process_group(0).spawn().unwrap();
        note(folder.path(), Pid::from_raw(ours.id() as i32).unwrap());
        let strangers_note = note(folder.path(), Pid::from_raw(stranger.id() as i32).unwrap());
        std::fs::write(&strangers_note, format!("{} 1\n", boot_id())).unwrap();
        assert_eq!(end_all(folder.path()), 1);
        assert!(!ours.wait().unwrap().success());
        assert!(stranger.try_wait().unwrap().is_none());
        stranger.kill().unwrap();
        stranger.wait().unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

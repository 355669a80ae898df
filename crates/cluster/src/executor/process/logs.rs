//! Component output on disk: the first 256 KiB, and at least the last 256 KiB. Bytes are kept as they came; text is made
//! when someone reads. Never a reason to fail a run.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Bytes of the start that are kept.
pub const HEAD: u64 = 256 << 10;
/// Bytes of each of the two tail files that take turns.
const TAIL: u64 = 256 << 10;
/// What a failure carries.
const LAST_LINES: usize = 200;
const LAST_BYTES: usize = 16 << 10;

/// Attempts of a component whose logs are kept.
pub const ATTEMPTS: u32 = 20;

/// Takes a component's output. Clones share it.
#[derive(Clone)]
pub struct LogSink {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    path: PathBuf,
    file: Option<File>,
    written: u64,
    /// Bytes in the current tail file; None: still in the head.
    tail: Option<(u64, bool)>,
    last: VecDeque<u8>,
}

/// Exists once output between head and tail was left out.
fn gap_path(head: &Path) -> PathBuf {
    head.with_extension("log.gap")
}

fn tail_path(head: &Path, second: bool) -> PathBuf {
    head.with_extension(if second { "log.b" } else { "log.a" })
}

/// Where the log of a component's attempt is.
#[must_use]
pub fn path(folder: &Path, component: &str, attempt: u32) -> PathBuf {
    folder.join(format!("{component}.{attempt}.log"))
}

impl LogSink {
    /// A new log; one that can't be made keeps the last lines alone.
    #[must_use]
    pub fn create(path: PathBuf) -> Self {
        if let Some(folder) = path.parent()
            && let Err(error) = std::fs::create_dir_all(folder)
        {
            tracing::warn!(%error, folder = %folder.display(), "a log folder can't be made");
        }
        let file = File::create(&path);
        if let Err(error) = &file {
            tracing::warn!(%error, path = %path.display(), "a log can't be written; its last lines are kept in memory");
        }
        Self { inner: Arc::new(Mutex::new(Inner { path, file: file.ok(), written: 0, tail: None, last: VecDeque::new() })) }
    }

    pub fn write(&self, mut bytes: &[u8]) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.last.extend(bytes);
        let excess = inner.last.len().saturating_sub(LAST_BYTES);
        inner.last.drain(..excess);
        while !bytes.is_empty() {
            let room = match inner.tail {
                None => HEAD - inner.written.min(HEAD),
                Some((used, _)) => TAIL - used.min(TAIL),
            };
            if room == 0 {
                let second = inner.tail.is_some_and(|(_, second)| !second);
                let next = tail_path(&inner.path, second);
                if next.exists() {
                    // Only a marker: without it the reader takes head and tail for one piece.
                    let _ = File::create(gap_path(&inner.path));
                }
                inner.file = File::create(next).ok();
                inner.tail = Some((0, second));
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
            // A full disk costs lines of this log and nothing else.
            let _ = inner.file.as_mut().map(|file| file.write_all(now));
            inner.written += now.len() as u64;
            if let Some((used, _)) = &mut inner.tail {
                *used += now.len() as u64;
            }
            bytes = later;
        }
    }

    /// The last lines, at most 200 and 16 KiB.
    #[must_use]
    pub fn last_lines(&self) -> Vec<String> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = inner.last.iter().copied().collect();
        let cut = inner.written > bytes.len() as u64;
        drop(inner);
        last_lines(&bytes, cut)
    }
}

/// `cut`: the first line is only the end of one.
fn last_lines(bytes: &[u8], cut: bool) -> Vec<String> {
    let mut lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    if lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    if cut && lines.len() > 1 {
        lines.remove(0);
    }
    let skip = lines.len().saturating_sub(LAST_LINES);
    lines.into_iter().skip(skip).map(|line| plain(String::from_utf8_lossy(line).trim_end_matches('\r'))).collect()
}

/// Without terminal colours: `ESC [ ... letter`.
fn plain(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == '\u{1b}' && letters.peek() == Some(&'[') {
            letters.next();
            // Up to the letter that ends the sequence.
            for parameter in letters.by_ref() {
                if ('\u{40}'..='\u{7e}').contains(&parameter) {
                    break;
                }
            }
        } else {
            text.push(letter);
        }
    }
    text
}

/// The end of a log: at most `max_bytes`, at most `max_lines` (0: no limit). True: something was left out.
pub fn read_tail(head: &Path, max_bytes: usize, max_lines: usize) -> std::io::Result<(String, bool)> {
    let modified = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let (first, second) = (tail_path(head, false), tail_path(head, true));
    let mut tails: Vec<(SystemTime, PathBuf)> =
        [first, second].into_iter().filter_map(|path| modified(&path).map(|time| (time, path))).collect();
    tails.sort();
    let mut bytes = end_of(head, u64::MAX)?;
    let mut left_out = false;
    if gap_path(head).exists() {
        bytes.extend_from_slice(b"\n[... output left out ...]\n");
        left_out = true;
    }
    for (_, path) in &tails {
        bytes.extend(end_of(path, u64::MAX)?);
    }
    if bytes.len() > max_bytes {
        bytes.drain(..bytes.len() - max_bytes);
        left_out = true;
    }
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    if max_lines > 0 {
        let ends_with_line = text.ends_with('\n');
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > max_lines {
            left_out = true;
            let mut kept = lines[lines.len() - max_lines..].join("\n");
            if ends_with_line {
                kept.push('\n');
            }
            text = kept;
        }
    }
    Ok((text, left_out))
}

fn end_of(path: &Path, max: u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(max)))?;
    let mut bytes = Vec::new();
    file.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Logs in a run's folder: (component, attempt, path), in order.
#[must_use]
pub fn list(folder: &Path) -> Vec<(String, u32, PathBuf)> {
    let mut found: Vec<(String, u32, PathBuf)> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (component, attempt) = name.strip_suffix(".log")?.rsplit_once('.')?;
            Some((component.to_owned(), attempt.parse().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    found
}

/// Highest attempt of each component that left a log: the next ones count on from there.
#[must_use]
pub fn attempts(folder: &Path) -> std::collections::HashMap<String, u32> {
    let mut highest = std::collections::HashMap::new();
    for (component, attempt, _) in list(folder) {
        let entry = highest.entry(component).or_insert(0);
        *entry = attempt.max(*entry);
    }
    highest
}

/// Deletes the log of an attempt that is too long ago.
pub fn forget_old_attempt(folder: &Path, component: &str, attempt: u32) {
    let Some(old) = attempt.checked_sub(ATTEMPTS) else { return };
    let head = path(folder, component, old);
    for path in [tail_path(&head, false), tail_path(&head, true), gap_path(&head), head] {
        // Not there: nothing to forget.
        let _ = std::fs::remove_file(path);
    }
}

/// Deletes the folders of runs that are not `kept`: those older than `max_age`, then the oldest until `max_bytes` remain.
pub fn prune(root: &Path, max_age: Duration, max_bytes: u64, kept: impl Fn(&str) -> bool) {
    let mut folders: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(root).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_name().to_str().is_some_and(&kept) {
            continue;
        }
        let files = std::fs::read_dir(entry.path()).into_iter().flatten().filter_map(Result::ok);
        let (mut bytes, mut newest) = (0, SystemTime::UNIX_EPOCH);
        for file in files.filter_map(|file| file.metadata().ok()) {
            bytes += file.len();
            newest = newest.max(file.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        }
        folders.push((newest, bytes, entry.path()));
    }
    folders.sort();
    let mut total: u64 = folders.iter().map(|(_, bytes, _)| bytes).sum();
    for (newest, bytes, path) in folders {
        let old = newest.elapsed().is_ok_and(|age| age > max_age);
        if !old && total <= max_bytes {
            break;
        }
        if let Err(error) = std::fs::remove_dir_all(&path) {
            tracing::warn!(%error, path = %path.display(), "an old log can't be deleted");
        }
        total = total.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_and_end_are_kept_and_the_size_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path(), "env-0-0", 1);
        let sink = LogSink::create(path.clone());
        for line in 0..200_000 {
            sink.write(format!("line {line}\n").as_bytes());
        }
        sink.write(b"\xff\xfe not text\nthe end\n");
        let size: u64 = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
        assert!(size <= HEAD + 2 * TAIL, "{size}");
        let (all, left_out) = read_tail(&path, usize::MAX, 0).unwrap();
        assert!(left_out && all.starts_with("line 0\nline 1\n"));
        assert!(all.contains("line 199999\n\u{fffd}\u{fffd} not text\nthe end\n"));
        let (end, left_out) = read_tail(&path, 1000, 2).unwrap();
        assert_eq!((end.as_str(), left_out), ("\u{fffd}\u{fffd} not text\nthe end\n", true));
        let last = sink.last_lines();
        assert_eq!(last.len(), 200);
        assert_eq!(last.last().unwrap(), "the end");
        assert_eq!(attempts(folder.path()).get("env-0-0"), Some(&1));
    }

    #[test]
    fn colours_are_left_out_of_last_lines() {
        assert_eq!(last_lines(b"\x1b[31mERROR\x1b[0m closing\r\nnext\n", false), ["ERROR closing", "next"]);
        assert_eq!(plain("\u{1b}[31"), "");
    }

    #[test]
    fn one_endless_line_is_cut_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let sink = LogSink::create(path(folder.path(), "m", 1));
        sink.write(&vec![b'x'; 1 << 20]);
        assert_eq!(sink.last_lines(), ["x".repeat(LAST_BYTES)]);
    }

    #[test]
    fn old_and_surplus_folders_go_and_kept_ones_stay() {
        let root = tempfile::tempdir().unwrap();
        for run in ["run_a", "run_b", "run_c"] {
            LogSink::create(path(&root.path().join(run), "m", 1)).write(&[b'x'; 1000]);
        }
        prune(root.path(), Duration::from_secs(3600), 1500, |run| run == "run_a");
        let mut left: Vec<String> =
            std::fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(left.contains(&"run_a".to_owned()));
        prune(root.path(), Duration::ZERO, u64::MAX, |_| false);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }
}

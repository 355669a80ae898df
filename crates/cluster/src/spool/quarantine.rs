//! Setting aside a database that can't be read, and saving what can be read of it. Deletes nothing.

use std::path::{Path, PathBuf};

use prost::Message as _;
use rlm_api::cluster::v1;
use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use super::{NewRecord, RunKey};

/// What the damaged database still says.
#[derive(Default)]
pub(super) struct Salvage {
    /// Readable records that the control plane had not acknowledged.
    pub records: Vec<NewRecord>,
    /// Runs that were going on.
    pub runs: Vec<(RunKey, v1::Assign)>,
    /// Unacknowledged records that could not be read; None: not even their number is known.
    pub lost: Option<u64>,
}

/// Most records that are carried over; the rest stays in the file that was set aside, and counts as lost.
const MAX_SALVAGE: usize = 200_000;

/// Where an earlier [`set_aside`] that was interrupted put the journal: the database alone is not what was stored.
pub(super) fn interrupted(path: &Path) -> Option<PathBuf> {
    let prefix = suffixed(path.file_name()?.as_ref(), ".corrupt-").into_os_string().into_string().ok()?;
    let entries = std::fs::read_dir(path.parent()?).ok()?;
    entries.filter_map(Result::ok).find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let target = path.with_file_name(name.strip_suffix("-wal").filter(|name| name.starts_with(&prefix))?);
        (!target.exists()).then_some(target)
    })
}

/// Renames the database and its journal to `spool.db.corrupt-<time>`; returns the new name.
pub(super) fn set_aside(path: &Path, now_ms: i64) -> std::io::Result<PathBuf> {
    let fresh = || (now_ms..).map(|time| suffixed(path, &format!(".corrupt-{time}"))).find(|target| !target.exists());
    let target = interrupted(path).or_else(fresh).unwrap_or_default();
    for suffix in ["-wal", "-shm"] {
        let from = suffixed(path, suffix);
        if from.exists() {
            std::fs::rename(&from, suffixed(&target, suffix))?;
        }
    }
    if path.exists() {
        std::fs::rename(path, &target)?;
    }
    if let Some(folder) = path.parent() {
        std::fs::File::open(folder)?.sync_all()?;
    }
    Ok(target)
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Reads what can be read. Each record is read for itself, so that a bad page costs only what is on it.
pub(super) fn salvage(path: &Path) -> Salvage {
    let Ok(connection) = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX) else {
        return Salvage::default();
    };
    let mut salvage = Salvage { runs: runs(&connection), ..Salvage::default() };
    let meta = |key: &str| -> Option<u64> {
        let text: Option<String> =
            connection.query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0)).optional().ok()?;
        Some(text.and_then(|text| text.parse().ok()).unwrap_or(0))
    };
    let last = connection.query_row("SELECT max(sequence) FROM records", [], |row| row.get::<_, Option<i64>>(0));
    let (Some(acknowledged), Ok(last)) = (meta("acknowledged"), last) else { return salvage };
    let last = last.unwrap_or(0) as u64;
    let mut lost = 0;
    for sequence in acknowledged + 1..=last {
        if salvage.records.len() >= MAX_SALVAGE {
            lost += last - sequence + 1;
            break;
        }
        match read_one(&connection, sequence) {
            Some(record) => salvage.records.push(record),
            None => lost += 1,
        }
    }
    salvage.lost = Some(lost);
    salvage
}

fn read_one(connection: &Connection, sequence: u64) -> Option<NewRecord> {
    let (sum, payload): (i64, Vec<u8>) = connection
        .prepare_cached("SELECT crc, payload FROM records WHERE sequence = ?1")
        .ok()?
        .query_row([sequence as i64], |row| Ok((row.get(0)?, row.get(1)?)))
        .ok()?;
    if i64::from(crc32fast::hash(&payload)) != sum {
        return None;
    }
    let record = v1::Record::decode(payload.as_slice()).ok()?;
    let key = record.run_id.parse().ok().map(|run_id| RunKey { run_id, generation: record.generation });
    match (key, record.payload?) {
        (Some(key), v1::record::Payload::Episode(episode)) => Some(NewRecord::episode(key, episode)),
        (Some(key), v1::record::Payload::RunStatus(status)) => Some(NewRecord::status(key, status)),
        (Some(key), v1::record::Payload::RunMetrics(metrics)) => Some(NewRecord::metrics(key, metrics)),
        (_, v1::record::Payload::SpoolLoss(loss)) => Some(NewRecord::loss(loss.reason, loss.records)),
        (None, _) => None,
    }
}

fn runs(connection: &Connection) -> Vec<(RunKey, v1::Assign)> {
    let mut found = Vec::new();
    let Ok(mut statement) = connection.prepare("SELECT run_id, generation, assign FROM runs WHERE state = 0 AND length(assign) > 0") else {
        return found;
    };
    let Ok(mut rows) = statement.query([]) else { return found };
    while let Ok(Some(row)) = rows.next() {
        let values = (row.get::<_, String>(0), row.get::<_, i64>(1), row.get::<_, Vec<u8>>(2));
        let (Ok(run_id), Ok(generation), Ok(assign)) = values else { continue };
        if let (Ok(run_id), Ok(assign)) = (run_id.parse(), v1::Assign::decode(assign.as_slice())) {
            found.push((RunKey { run_id, generation: generation as u64 }, assign));
        }
    }
    found
}

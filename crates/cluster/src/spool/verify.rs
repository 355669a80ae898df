//! The offline check of a spool. Changes nothing: it works on the database read-only.

use std::path::Path;

use anyhow::Context as _;
use prost::Message as _;
use rlm_api::cluster::v1;
use rusqlite::{Connection, OpenFlags};
use serde::Serialize;

/// What the check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub instance_id: String,
    pub epoch: String,
    pub records: u64,
    pub first: u64,
    pub last: u64,
    pub acknowledged: u64,
    pub runs: u64,
    /// What is wrong; empty: nothing.
    pub problems: Vec<String>,
}

const MAX_PROBLEMS: usize = 100;

/// Checks pages, checksums, that each record can be decoded, and that no position is missing.
pub fn verify(folder: &Path) -> anyhow::Result<Report> {
    let path = folder.join(super::FILE);
    anyhow::ensure!(path.exists(), "there is no spool at {}", path.display());
    let connection = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)
        .with_context(|| format!("the spool {} can't be opened", path.display()))?;
    let mut report = Report {
        instance_id: String::new(),
        epoch: String::new(),
        records: 0,
        first: 0,
        last: 0,
        acknowledged: 0,
        runs: 0,
        problems: Vec::new(),
    };
    if let Err(error) = check(&connection, &mut report) {
        report.problems.push(format!("reading stopped: {error}"));
    }
    Ok(report)
}

fn check(connection: &Connection, report: &mut Report) -> Result<(), rusqlite::Error> {
    let mut statement = connection.prepare("PRAGMA integrity_check(20)")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let line: String = row.get(0)?;
        if line != "ok" {
            report.problems.push(line);
        }
    }
    let mut statement = connection.prepare("SELECT key, value FROM meta")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (key, value): (String, String) = (row.get(0)?, row.get(1)?);
        match key.as_str() {
            "instance_id" => report.instance_id = value,
            "epoch" => report.epoch = value,
            "acknowledged" => match value.parse() {
                Ok(number) => report.acknowledged = number,
                Err(_) => report.problems.push(format!("the acknowledged position '{value}' is not a number")),
            },
            _ => {}
        }
    }
    report.runs = connection.query_row("SELECT count(*) FROM runs", [], |row| row.get::<_, i64>(0))? as u64;
    let mut statement = connection.prepare("SELECT sequence, crc, payload FROM records ORDER BY sequence")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (sequence, sum): (i64, i64) = (row.get(0)?, row.get(1)?);
        let sequence = sequence as u64;
        let payload = super::db::bytes_of(row.get_ref(2)?);
        let mut problem = |text: String| {
            if report.problems.len() < MAX_PROBLEMS {
                report.problems.push(text);
            }
        };
        if report.records == 0 {
            report.first = sequence;
        } else if sequence != report.last + 1 {
            problem(format!("records {} to {} are missing", report.last + 1, sequence - 1));
        }
        if i64::from(crc32fast::hash(payload)) != sum {
            problem(format!("record {sequence}: its checksum is wrong"));
        } else if let Err(error) = v1::Record::decode(payload) {
            problem(format!("record {sequence}: {error}"));
        }
        report.records += 1;
        report.last = sequence;
    }
    Ok(())
}

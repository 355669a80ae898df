//! The spool's SQL. Decides nothing but what a statement says; every function is one step of the worker's transaction.

use std::collections::HashMap;
use std::path::Path;

use prost::Message as _;
use rlm_api::cluster::v1;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension as _, params};

use super::{HeldRun, Kind, NewRecord, Outcomes, Position, RunEnd, RunKey};

const SCHEMA_VERSION: i64 = 1;
/// Above this size, opening checks no more than what it reads anyway.
const QUICK_CHECK_BYTES: u64 = 64 << 20;
const SCHEMA: &str = "
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
  id INTEGER PRIMARY KEY, run_id TEXT NOT NULL, generation INTEGER NOT NULL, assign BLOB NOT NULL,
  state INTEGER NOT NULL, assigned_ms INTEGER NOT NULL, last_sequence INTEGER NOT NULL, UNIQUE (run_id, generation));
CREATE TABLE records (
  sequence INTEGER PRIMARY KEY, kind INTEGER NOT NULL, created_ms INTEGER NOT NULL, crc INTEGER NOT NULL,
  payload BLOB NOT NULL);
CREATE INDEX telemetry ON records (sequence) WHERE kind = 3;
CREATE TABLE outcomes (
  run INTEGER NOT NULL, row INTEGER NOT NULL, attempt INTEGER NOT NULL,
  PRIMARY KEY (run, row, attempt)) WITHOUT ROWID;
PRAGMA user_version = 1;
";

pub(super) type Result<T> = std::result::Result<T, rusqlite::Error>;

/// The open database and what of it is kept in memory.
pub(super) struct Db {
    connection: Connection,
    pub position: Position,
    /// Lowest sequence that is still stored; `last + 1` when none is.
    pub first: u64,
    runs: HashMap<RunKey, i64>,
}

/// What a failed statement means for the spool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// No room on the disk or in the quota: wait.
    Full,
    /// The file is not what was written: set it aside.
    Corrupt,
    /// The disk failed; pages in memory can't be trusted: open it anew.
    Io,
    /// This statement is wrong.
    Other,
}

pub(super) fn trouble(error: &rusqlite::Error) -> Trouble {
    use rusqlite::ErrorCode;
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Trouble::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Trouble::Corrupt,
        Some(
            ErrorCode::SystemIoFailure | ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked,
        ) => Trouble::Io,
        Some(_) | None => Trouble::Other,
    }
}

fn crc(payload: &[u8]) -> i64 {
    i64::from(crc32fast::hash(payload))
}

/// Opens a connection with the spool's settings.
pub(super) fn connect(path: &Path) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    connection.pragma_update(None, "page_size", 8192)?;
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cache_size", -4096)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    connection.pragma_update(None, "journal_size_limit", 16 << 20)?;
    connection.set_prepared_statement_cache_capacity(32);
    Ok(connection)
}

impl Db {
    /// Opens the database, creating it when there is none, and reads where it stands.
    pub fn open(path: &Path, quota_bytes: u64) -> Result<Self> {
        let connection = connect(path)?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let tables: i64 = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        if version == 0 && tables == 0 {
            connection.execute_batch(&format!("BEGIN IMMEDIATE; {SCHEMA} COMMIT;"))?;
        } else if version != SCHEMA_VERSION {
            return Err(corrupt(&format!("schema version {version}, this agent knows {SCHEMA_VERSION}")));
        }
        let size = std::fs::metadata(path).map(|file| file.len()).unwrap_or(0);
        if size <= QUICK_CHECK_BYTES {
            let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
            if verdict != "ok" {
                return Err(corrupt(&verdict));
            }
        }
        let page_size: u64 = connection.query_row("PRAGMA page_size", [], |row| row.get::<_, i64>(0))? as u64;
        // A wall beyond the quota: losses, acknowledgements and deletions still fit.
        let pages = quota_bytes / page_size + (8 << 20) / page_size;
        connection.pragma_update_and_check(None, "max_page_count", pages as i64, |_| Ok(()))?;
        let mut db = Self { connection, position: Position::default(), first: 1, runs: HashMap::new() };
        db.load()?;
        Ok(db)
    }

    /// Reads position and counters from the database.
    pub fn load(&mut self) -> Result<()> {
        self.runs.clear();
        self.position.instance_id = match self.meta("instance_id")? {
            Some(id) => id,
            None => {
                let id = uuid::Uuid::new_v4().simple().to_string();
                self.set_meta("instance_id", &id)?;
                id
            }
        };
        self.position.epoch = self.meta("epoch")?.unwrap_or_default();
        self.position.acknowledged = self.meta_number("acknowledged")?;
        let pruned = self.meta_number("pruned")?;
        let (first, last): (Option<i64>, Option<i64>) =
            self.connection.query_row("SELECT min(sequence), max(sequence) FROM records", [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        self.position.last = last.map_or(pruned, |last| last as u64).max(pruned);
        self.first = first.map_or(self.position.last + 1, |first| first as u64);
        Ok(())
    }

    fn meta(&self, key: &str) -> Result<Option<String>> {
        self.connection.prepare_cached("SELECT value FROM meta WHERE key = ?1")?.query_row([key], |row| row.get(0)).optional()
    }

    fn meta_number(&self, key: &str) -> Result<u64> {
        match self.meta(key)? {
            None => Ok(0),
            Some(text) => text.parse().map_err(|_| corrupt(&format!("meta {key} is not a number"))),
        }
    }

    pub fn set_meta(&self, key: &str, value: &str) -> Result<()> {
        self.connection
            .prepare_cached("INSERT INTO meta (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = excluded.value")?
            .execute(params![key, value])?;
        Ok(())
    }

    pub fn begin(&self) -> Result<()> {
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    pub fn commit(&self) -> Result<()> {
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    /// Undoes the open transaction, if there is one, and reads the state again.
    pub fn rollback(&mut self) -> Result<()> {
        if !self.connection.is_autocommit() {
            self.connection.execute_batch("ROLLBACK")?;
        }
        self.load()
    }

    /// Moves the journal into the database and empties it.
    pub fn checkpoint(&self) -> Result<()> {
        self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
    }

    fn run_number(&mut self, key: RunKey, now: i64) -> Result<i64> {
        if let Some(number) = self.runs.get(&key) {
            return Ok(*number);
        }
        let run_id = key.run_id.to_string();
        let found = self
            .connection
            .prepare_cached("SELECT id FROM runs WHERE run_id = ?1 AND generation = ?2")?
            .query_row(params![run_id, key.generation as i64], |row| row.get(0))
            .optional()?;
        let number = match found {
            Some(number) => number,
            None => {
                // A run whose assignment was lost with an earlier database.
                self.insert_run(key, &[], RunEnd::Stopped.to_sql(), now)?;
                self.connection.last_insert_rowid()
            }
        };
        self.runs.insert(key, number);
        Ok(number)
    }

    fn insert_run(&self, key: RunKey, assign: &[u8], state: i64, now: i64) -> Result<usize> {
        self.connection
            .prepare_cached(
                "INSERT INTO runs (run_id, generation, assign, state, assigned_ms, last_sequence) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT DO NOTHING",
            )?
            .execute(params![key.run_id.to_string(), key.generation as i64, assign, state, now, self.position.last as i64])
    }

    /// Appends one record in the open transaction. False: this attempt is stored already.
    pub fn insert(&mut self, record: &NewRecord, now: i64) -> Result<bool> {
        if let (Some(key), Some((row, attempt))) = (record.key, record.attempt) {
            let run = self.run_number(key, now)?;
            let added = self
                .connection
                .prepare_cached("INSERT INTO outcomes (run, row, attempt) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING")?
                .execute(params![run, row as i64, i64::from(attempt)])?;
            if added == 0 {
                return Ok(false);
            }
        }
        let sequence = self.position.last + 1;
        self.connection
            .prepare_cached("INSERT INTO records (sequence, kind, created_ms, crc, payload) VALUES (?1, ?2, ?3, ?4, ?5)")?
            .execute(params![sequence as i64, record.kind.to_sql(), now, crc(&record.payload), record.payload])?;
        self.position.last = sequence;
        Ok(true)
    }

    /// Notes that a run has ended; its row goes when its last record does.
    pub fn end_run(&mut self, key: RunKey, end: RunEnd) -> Result<()> {
        self.connection
            .prepare_cached("UPDATE runs SET state = ?3, last_sequence = ?4 WHERE run_id = ?1 AND generation = ?2")?
            .execute(params![key.run_id.to_string(), key.generation as i64, end.to_sql(), self.position.last as i64])?;
        Ok(())
    }

    pub fn hold(&mut self, key: RunKey, assign: &v1::Assign, now: i64) -> Result<bool> {
        Ok(self.insert_run(key, &assign.encode_to_vec(), 0, now)? > 0)
    }

    pub fn held(&self) -> Result<Vec<HeldRun>> {
        let mut statement = self
            .connection
            .prepare_cached("SELECT run_id, generation, assign, state, last_sequence FROM runs WHERE length(assign) > 0 ORDER BY id")?;
        let mut rows = statement.query([])?;
        let mut held = Vec::new();
        while let Some(row) = rows.next()? {
            let (run_id, generation, assign): (String, i64, Vec<u8>) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let (state, last): (i64, i64) = (row.get(3)?, row.get(4)?);
            // What can't be read is not held: the control plane hears that and assigns it anew.
            let (Ok(run_id), Ok(assign)) = (run_id.parse(), v1::Assign::decode(assign.as_slice())) else { continue };
            held.push(HeldRun {
                key: RunKey { run_id, generation: generation as u64 },
                assign,
                ended: state != 0,
                settled: state != 0 && last as u64 <= self.position.acknowledged,
            });
        }
        Ok(held)
    }

    pub fn outcomes(&mut self, key: RunKey) -> Result<Outcomes> {
        let mut statement = self.connection.prepare_cached(
            "SELECT row, max(attempt) FROM outcomes
             WHERE run = (SELECT id FROM runs WHERE run_id = ?1 AND generation = ?2) GROUP BY row ORDER BY row",
        )?;
        let mut rows = statement.query(params![key.run_id.to_string(), key.generation as i64])?;
        let mut outcomes = Outcomes::default();
        while let Some(row) = rows.next()? {
            let (number, attempt): (i64, u32) = (row.get(0)?, row.get(1)?);
            outcomes.max_attempt = outcomes.max_attempt.max(Some(attempt));
            outcomes.done.push(number as u64);
        }
        Ok(outcomes)
    }

    pub fn read(&self, from: u64, max_bytes: usize) -> Result<Vec<v1::Record>> {
        let mut records = Vec::new();
        let mut bytes = 0;
        // Positions whose records went after they had been acknowledged: the control plane was put back further than they
        // were kept. It takes no gap, so each is a loss.
        for sequence in from..self.first {
            if bytes >= max_bytes {
                return Ok(records);
            }
            bytes += 96;
            records.push(lost(sequence, "acknowledged long ago and no longer kept"));
        }
        let mut statement =
            self.connection.prepare_cached("SELECT sequence, crc, payload FROM records WHERE sequence >= ?1 ORDER BY sequence")?;
        let mut rows = statement.query([from as i64])?;
        while let Some(row) = rows.next()? {
            let (sequence, sum): (i64, i64) = (row.get(0)?, row.get(1)?);
            let payload = bytes_of(row.get_ref(2)?);
            bytes += payload.len() + 16;
            if bytes > max_bytes && !records.is_empty() {
                break;
            }
            records.push(decode(sequence as u64, sum, payload));
        }
        Ok(records)
    }

    /// Lowers or raises the acknowledged position.
    pub fn set_acknowledged(&mut self, durable: u64) -> Result<()> {
        self.set_meta("acknowledged", &durable.to_string())?;
        self.position.acknowledged = durable;
        Ok(())
    }

    /// Deletes up to `limit` of the oldest acknowledged records, those before `created_before` alone when it is given;
    /// returns how many went.
    pub fn prune(&mut self, limit: u64, created_before: Option<i64>) -> Result<u64> {
        let end = self.position.acknowledged.min(self.first + limit - 1);
        let end = match created_before {
            None => end,
            Some(time) => {
                let kept: Option<i64> = self
                    .connection
                    .prepare_cached("SELECT min(sequence) FROM records WHERE sequence <= ?1 AND created_ms >= ?2")?
                    .query_row(params![end as i64, time], |row| row.get(0))?;
                kept.map_or(end, |kept| kept as u64 - 1)
            }
        };
        if end < self.first {
            return Ok(0);
        }
        let deleted = self.connection.prepare_cached("DELETE FROM records WHERE sequence <= ?1")?.execute([end as i64])?;
        self.set_meta("pruned", &end.to_string())?;
        // Runs whose last record went: nothing of them can be asked for again.
        self.connection
            .prepare_cached("DELETE FROM outcomes WHERE run IN (SELECT id FROM runs WHERE state != 0 AND last_sequence <= ?1)")?
            .execute([end as i64])?;
        self.connection.prepare_cached("DELETE FROM runs WHERE state != 0 AND last_sequence <= ?1")?.execute([end as i64])?;
        self.first = end + 1;
        self.runs.clear();
        Ok(deleted as u64)
    }

    /// Replaces up to `limit` of the oldest unacknowledged telemetry records by notes of their loss; returns how many.
    pub fn drop_telemetry(&self, limit: u32) -> Result<u64> {
        let note = NewRecord::loss("telemetry dropped: the spool was full", 1);
        let dropped = self
            .connection
            .prepare_cached(
                "UPDATE records SET kind = ?1, crc = ?2, payload = ?3 WHERE sequence IN
                 (SELECT sequence FROM records WHERE kind = 3 AND sequence > ?4 ORDER BY sequence LIMIT ?5)",
            )?
            .execute(params![Kind::Loss.to_sql(), crc(&note.payload), note.payload, self.position.acknowledged as i64, limit])?;
        Ok(dropped as u64)
    }

    pub fn has_telemetry(&self) -> Result<bool> {
        self.connection
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM records WHERE kind = 3 AND sequence > ?1)")?
            .query_row([self.position.acknowledged as i64], |row| row.get(0))
    }

    /// Bytes of the pages in use.
    pub fn used_bytes(&self) -> Result<u64> {
        let number = |pragma: &str| -> Result<u64> {
            self.connection.prepare_cached(pragma)?.query_row([], |row| row.get::<_, i64>(0)).map(|number| number as u64)
        };
        let pages = number("PRAGMA page_count")?.saturating_sub(number("PRAGMA freelist_count")?);
        Ok(pages * number("PRAGMA page_size")?)
    }

    pub fn oldest_unacknowledged_ms(&self) -> Result<i64> {
        let oldest: Option<i64> = self
            .connection
            .prepare_cached("SELECT created_ms FROM records WHERE sequence > ?1 ORDER BY sequence LIMIT 1")?
            .query_row([self.position.acknowledged as i64], |row| row.get(0))
            .optional()?;
        Ok(oldest.unwrap_or(0))
    }
}

/// What stands in a payload's place. Anything but bytes is damage, which the checksum then shows.
pub(super) fn bytes_of(value: ValueRef<'_>) -> &[u8] {
    match value {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => bytes,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => &[],
    }
}

/// The record at its position; one whose bytes are not those that were written stands as a loss.
pub(super) fn decode(sequence: u64, sum: i64, payload: &[u8]) -> v1::Record {
    let readable = (crc(payload) == sum).then(|| v1::Record::decode(payload)).and_then(std::result::Result::ok);
    match readable {
        Some(mut record) => {
            record.sequence = sequence;
            record
        }
        None => lost(sequence, "a record's bytes on disk are damaged (checksum)"),
    }
}

fn lost(sequence: u64, reason: &str) -> v1::Record {
    let loss = v1::SpoolLoss { reason: reason.to_owned(), records: 1 };
    v1::Record { sequence, run_id: String::new(), generation: 0, payload: Some(v1::record::Payload::SpoolLoss(loss)) }
}

/// An error that means: this file is not a spool of ours.
fn corrupt(problem: &str) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT), Some(problem.to_owned()))
}

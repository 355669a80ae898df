//! The spool's thread: group commit, room, and what to do when the disk fails. The only writer of the database.
//!
//! Appends are answered after the commit that holds them and never before. A commit that failed is never tried again on the
//! same connection: its pages can't be trusted.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::{mpsc, watch};

use super::db::{Db, Trouble, trouble};
use super::quota::{Step, Usage, next_step};
use super::{Kind, NewRecord, Options, Position, Reply, Request, RunEnd, RunKey, SpoolError, Stats, quarantine};

/// Most records and bytes of one commit.
const BATCH_RECORDS: usize = 4096;
const BATCH_BYTES: usize = 8 << 20;
/// How often room is looked for while appends wait.
const RETRY: Duration = Duration::from_millis(100);
/// How often old acknowledged records are looked for.
const RETENTION: Duration = Duration::from_secs(30);
/// Rows that one deletion takes.
const PRUNE: u64 = 4000;

struct Append {
    records: Vec<NewRecord>,
    end: Option<(RunKey, RunEnd)>,
    reply: Reply<()>,
}

impl Append {
    fn bytes(&self) -> usize {
        self.records.iter().map(|record| record.payload.len()).sum()
    }

    fn is_telemetry(&self) -> bool {
        self.end.is_none() && self.records.iter().all(|record| record.kind == Kind::Telemetry)
    }
}

pub(super) struct Worker {
    path: PathBuf,
    options: Options,
    db: Db,
    announce: watch::Sender<Position>,
    waiting: VecDeque<Append>,
    /// Set while there is no room.
    blocked: bool,
    /// The disk took no more since the last commit.
    disk_full: bool,
    telemetry_dropped: u64,
    /// Of those, the ones that no loss record counts yet.
    telemetry_unreported: u64,
    /// An acknowledgement that the full disk could not take.
    unsaved_acknowledgement: Option<u64>,
    reserve: Reserve,
    last_retention: Instant,
}

impl Worker {
    /// Opens the database; sets a damaged one aside.
    pub fn start(path: PathBuf, options: Options, announce: watch::Sender<Position>) -> anyhow::Result<Self> {
        let reserve = Reserve::new(&path, (options.quota_bytes / 20).min(8 << 20));
        let opened = match quarantine::interrupted(&path) {
            Some(_) => Err(rusqlite::Error::SqliteFailure(
                rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT),
                Some("it was being set aside when the agent ended".to_owned()),
            )),
            None => Db::open(&path, options.quota_bytes),
        };
        let (db, damage) = match opened {
            Ok(db) => (db, None),
            Err(error) => match trouble(&error) {
                Trouble::Corrupt => (replace(&path, &options, &error)?, Some(error)),
                Trouble::Full => {
                    reserve.release();
                    (Db::open(&path, options.quota_bytes).with_context(|| cannot_open(&path))?, None)
                }
                Trouble::Io | Trouble::Other => return Err(error).with_context(|| cannot_open(&path)),
            },
        };
        if damage.is_none() {
            reserve.hold();
        }
        let mut worker = Self {
            path,
            options,
            db,
            announce,
            waiting: VecDeque::new(),
            blocked: false,
            disk_full: false,
            telemetry_dropped: 0,
            telemetry_unreported: 0,
            unsaved_acknowledgement: None,
            reserve,
            last_retention: Instant::now(),
        };
        worker.announce();
        Ok(worker)
    }

    /// Serves requests until every handle is gone.
    pub fn run(mut self, mut inbox: mpsc::Receiver<Request>) {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
            tracing::error!("the spool's timer could not be started");
            return;
        };
        loop {
            let wait = if self.blocked || self.unsaved_acknowledgement.is_some() { RETRY } else { RETENTION };
            let first = match inbox.try_recv() {
                Ok(request) => Some(request),
                Err(mpsc::error::TryRecvError::Disconnected) => break,
                Err(mpsc::error::TryRecvError::Empty) => match runtime.block_on(async { tokio::time::timeout(wait, inbox.recv()).await }) {
                    Ok(Some(request)) => Some(request),
                    Ok(None) => break,
                    Err(_) => None,
                },
            };
            let mut next = first;
            let (mut records, mut bytes) = (0, 0);
            while let Some(request) = next.take() {
                match request {
                    Request::Append { records: new, end, reply } => {
                        let append = Append { records: new, end, reply };
                        records += append.records.len();
                        bytes += append.bytes();
                        self.waiting.push_back(append);
                    }
                    other => {
                        self.commit_waiting();
                        self.answer(other);
                        records += 1;
                    }
                }
                if records < BATCH_RECORDS && bytes < BATCH_BYTES {
                    next = inbox.try_recv().ok();
                }
            }
            self.commit_waiting();
            self.housekeeping();
        }
        self.commit_waiting();
    }

    fn commit_waiting(&mut self) {
        let mut one_by_one = false;
        while !self.waiting.is_empty() {
            if !self.make_room() {
                self.blocked = true;
                self.drop_waiting_telemetry();
                return;
            }
            let count = if one_by_one { 1 } else { self.batch_length() };
            match self.commit(count) {
                Ok(()) => {
                    self.blocked = false;
                    self.disk_full = false;
                    // First, so that whoever hears of the commit finds it in the position.
                    self.announce();
                    for append in self.waiting.drain(..count) {
                        // Whoever asked may have gone; the records are kept all the same.
                        let _ = append.reply.send(Ok(()));
                    }
                }
                Err(error) => match self.recover(&error) {
                    Trouble::Full => {
                        self.blocked = true;
                        self.drop_waiting_telemetry();
                        return;
                    }
                    Trouble::Corrupt | Trouble::Io => {}
                    Trouble::Other if count > 1 => one_by_one = true,
                    Trouble::Other => {
                        if let Some(append) = self.waiting.pop_front() {
                            let _ = append.reply.send(Err(self.failed(&error)));
                        }
                    }
                },
            }
        }
    }

    fn batch_length(&self) -> usize {
        let (mut records, mut bytes, mut count) = (0, 0, 0);
        for append in &self.waiting {
            records += append.records.len();
            bytes += append.bytes();
            if count > 0 && (records > BATCH_RECORDS || bytes > BATCH_BYTES) {
                break;
            }
            count += 1;
        }
        count
    }

    fn commit(&mut self, count: usize) -> Result<(), rusqlite::Error> {
        let now = (self.options.clock)();
        self.db.begin()?;
        if self.telemetry_unreported > 0 {
            let note = NewRecord::loss("telemetry dropped: the spool was full", self.telemetry_unreported);
            self.db.insert(&note, now)?;
        }
        for append in self.waiting.iter().take(count) {
            for record in &append.records {
                self.db.insert(record, now)?;
            }
            if let Some((key, end)) = append.end {
                self.db.end_run(key, end)?;
            }
        }
        self.db.commit()?;
        self.telemetry_unreported = 0;
        Ok(())
    }

    /// Brings the database back to a state that can be used.
    fn recover(&mut self, error: &rusqlite::Error) -> Trouble {
        let kind = trouble(error);
        match kind {
            Trouble::Full => {
                if !self.blocked {
                    tracing::warn!(%error, path = %self.path.display(), "no room for the spool; results wait until there is");
                }
                self.disk_full = true;
                self.squeeze();
            }
            Trouble::Corrupt => self.quarantine(error),
            Trouble::Io => {
                tracing::error!(%error, path = %self.path.display(), "the spool's disk failed; opening it anew");
                self.reopen();
            }
            Trouble::Other => {
                tracing::error!(%error, "a spool statement failed");
                if self.db.rollback().is_err() {
                    self.reopen();
                }
            }
        }
        kind
    }

    /// Brings what is in the journal into the database, so that the journal's space is free again. The reserve gives what
    /// that needs, and is taken again at once: appends must not use it up.
    fn squeeze(&mut self) {
        if self.db.rollback().is_err() {
            self.reopen();
        }
        self.reserve.release();
        if let Err(error) = self.db.checkpoint() {
            tracing::debug!(%error, "the spool's journal could not be emptied");
        }
        self.reserve.hold();
    }

    /// Opens the database anew, for as long as that takes: nothing may be answered before.
    fn reopen(&mut self) {
        let mut pause = Duration::from_millis(50);
        loop {
            match Db::open(&self.path, self.options.quota_bytes) {
                Ok(db) => {
                    self.db = db;
                    self.announce();
                    return;
                }
                Err(error) if trouble(&error) == Trouble::Corrupt => {
                    self.quarantine(&error);
                    return;
                }
                Err(error) => tracing::error!(%error, path = %self.path.display(), "the spool can't be opened; trying again"),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }

    fn quarantine(&mut self, cause: &rusqlite::Error) {
        let mut pause = Duration::from_millis(50);
        loop {
            match replace(&self.path, &self.options, cause) {
                Ok(db) => {
                    self.db = db;
                    self.announce();
                    return;
                }
                Err(error) => tracing::error!(%error, path = %self.path.display(), "no new spool can be started; trying again"),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }

    /// Drops what may be dropped until there is room. False: senders wait.
    fn make_room(&mut self) -> bool {
        loop {
            let step = match self.usage() {
                Ok(usage) => next_step(usage),
                Err(error) => {
                    self.recover(&error);
                    return false;
                }
            };
            let result = match step {
                Step::Enough => return true,
                Step::Wait => return false,
                Step::DropRetained if self.disk_full => {
                    // A piece per full disk: what can stay stays.
                    self.disk_full = false;
                    self.reserve.release();
                    let pruned = self.prune(PRUNE, None).map(|_| ());
                    self.reserve.hold();
                    pruned
                }
                Step::DropRetained => self.prune(PRUNE, None).map(|_| ()),
                Step::DropTelemetry => self.drop_telemetry(),
            };
            if let Err(error) = result {
                self.recover(&error);
                return false;
            }
        }
    }

    fn usage(&self) -> Result<Usage, rusqlite::Error> {
        let used = self.db.used_bytes()?;
        let quota = self.options.quota_bytes;
        let retained = (self.db.position.acknowledged + 1).saturating_sub(self.db.first);
        let telemetry = used > quota && self.db.has_telemetry()?;
        Ok(Usage { used, quota, retained, telemetry, disk_full: self.disk_full })
    }

    fn prune(&mut self, limit: u64, created_before: Option<i64>) -> Result<u64, rusqlite::Error> {
        self.db.begin()?;
        let gone = self.db.prune(limit, created_before)?;
        self.db.commit()?;
        Ok(gone)
    }

    fn drop_telemetry(&mut self) -> Result<(), rusqlite::Error> {
        self.db.begin()?;
        let dropped = self.db.drop_telemetry(500)?;
        self.db.commit()?;
        self.telemetry_dropped += dropped;
        Ok(())
    }

    /// Telemetry does not wait for room.
    fn drop_waiting_telemetry(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        for append in waiting {
            if append.is_telemetry() {
                let count = append.records.len() as u64;
                self.telemetry_dropped += count;
                self.telemetry_unreported += count;
                let _ = append.reply.send(Ok(()));
            } else {
                self.waiting.push_back(append);
            }
        }
    }

    fn housekeeping(&mut self) {
        if let Some(durable) = self.unsaved_acknowledgement.take() {
            self.acknowledge(durable);
        }
        if self.last_retention.elapsed() >= RETENTION || self.options.retain.is_zero() {
            self.last_retention = Instant::now();
            let retain = i64::try_from(self.options.retain.as_millis()).unwrap_or(i64::MAX);
            let before = (self.options.clock)().saturating_sub(retain);
            for _ in 0..20 {
                match self.prune(PRUNE, Some(before)) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => {
                        self.recover(&error);
                        break;
                    }
                }
            }
            if !self.blocked {
                self.reserve.hold();
            }
        }
    }

    fn answer(&mut self, request: Request) {
        let now = (self.options.clock)();
        match request {
            Request::Append { records, end, reply } => self.waiting.push_back(Append { records, end, reply }),
            Request::Hold { key, assign, reply } => {
                let result = self.try_write(|db| db.hold(key, &assign, now));
                let _ = reply.send(result);
            }
            Request::End { key, end, reply } => {
                let result = self.try_write(|db| db.end_run(key, end));
                let _ = reply.send(result);
            }
            Request::Held { reply } => {
                let result = self.try_read(|db| db.held());
                let _ = reply.send(result);
            }
            Request::Outcomes { key, reply } => {
                let result = self.try_read(|db| db.outcomes(key));
                let _ = reply.send(result);
            }
            Request::Read { from, max_bytes, reply } => {
                let result = self.try_read(|db| db.read(from, max_bytes));
                let _ = reply.send(result);
            }
            Request::Acknowledge { durable, reply } => {
                self.acknowledge(durable);
                let _ = reply.send(Ok(()));
            }
            Request::Welcome { epoch, durable, reply } => {
                let result = self.welcome(&epoch, durable);
                let _ = reply.send(result);
            }
            Request::Stats { reply } => {
                let (waiting, dropped) = (self.waiting.len() as u64, self.telemetry_dropped);
                let result = self.try_read(|db| {
                    Ok(Stats {
                        bytes: db.used_bytes()?,
                        unacknowledged: db.position.last.saturating_sub(db.position.acknowledged),
                        oldest_unacknowledged_ms: db.oldest_unacknowledged_ms()?,
                        waiting,
                        telemetry_dropped: dropped,
                    })
                });
                let _ = reply.send(result);
            }
        }
    }

    /// Raises the acknowledged position. What the disk can't take now is written later.
    fn acknowledge(&mut self, durable: u64) {
        let durable = durable.min(self.db.position.last);
        if durable <= self.db.position.acknowledged {
            return;
        }
        let act = |db: &mut Db| db.set_acknowledged(durable);
        let result = self.write(&act).or_else(|error| {
            if self.recover(&error) != Trouble::Full {
                return Err(error);
            }
            // What the reserve is for: without acknowledgements nothing could ever be deleted.
            self.reserve.release();
            let again = self.write(&act);
            self.reserve.hold();
            again
        });
        match result {
            Ok(()) => self.announce(),
            Err(error) => {
                if self.recover(&error) == Trouble::Full {
                    self.unsaved_acknowledgement = Some(durable);
                }
            }
        }
    }

    fn welcome(&mut self, epoch: &str, durable: u64) -> Result<Position, SpoolError> {
        // The control plane has records that this spool does not: it was put back from a copy. Its sequences would be
        // taken for those, so it goes on under a new name.
        let renew = durable > self.db.position.last;
        self.try_write(|db| {
            db.set_meta("epoch", epoch)?;
            epoch.clone_into(&mut db.position.epoch);
            if renew {
                let id = uuid::Uuid::new_v4().simple().to_string();
                db.set_meta("instance_id", &id)?;
                db.position.instance_id = id;
                db.set_acknowledged(0)
            } else {
                db.set_acknowledged(durable)
            }
        })?;
        self.announce();
        Ok(self.db.position.clone())
    }

    fn write<T>(&mut self, act: &dyn Fn(&mut Db) -> Result<T, rusqlite::Error>) -> Result<T, rusqlite::Error> {
        self.db.begin()?;
        let value = act(&mut self.db)?;
        self.db.commit()?;
        Ok(value)
    }

    /// A small write that is answered at once; tried twice, since recovery may have made it possible.
    fn try_write<T>(&mut self, act: impl Fn(&mut Db) -> Result<T, rusqlite::Error>) -> Result<T, SpoolError> {
        match self.write(&act) {
            Ok(value) => Ok(value),
            Err(error) => {
                self.recover(&error);
                self.write(&act).map_err(|error| {
                    self.recover(&error);
                    self.failed(&error)
                })
            }
        }
    }

    fn try_read<T>(&mut self, act: impl Fn(&mut Db) -> Result<T, rusqlite::Error>) -> Result<T, SpoolError> {
        match act(&mut self.db) {
            Ok(value) => Ok(value),
            Err(error) => {
                self.recover(&error);
                act(&mut self.db).map_err(|error| self.failed(&error))
            }
        }
    }

    fn failed(&self, error: &rusqlite::Error) -> SpoolError {
        SpoolError::Failed { path: self.path.clone(), problem: error.to_string() }
    }

    fn announce(&mut self) {
        let position = self.db.position.clone();
        self.announce.send_if_modified(|old| {
            let changed = *old != position;
            *old = position;
            changed
        });
    }
}

fn cannot_open(path: &Path) -> String {
    format!("the spool {} can't be opened; check its folder's rights and the disk", path.display())
}

/// Sets the damaged database aside and starts a new one with what could be read.
fn replace(path: &Path, options: &Options, cause: &rusqlite::Error) -> anyhow::Result<Db> {
    let now = (options.clock)();
    let aside = quarantine::set_aside(path, now).with_context(|| format!("{} can't be renamed", path.display()))?;
    let salvage = quarantine::salvage(&aside);
    let mut db = Db::open(path, options.quota_bytes).with_context(|| cannot_open(path))?;
    let lost = salvage.lost.map_or_else(|| "an unknown number of records".to_owned(), |lost| format!("{lost} records"));
    tracing::error!(%cause, aside = %aside.display(), saved = salvage.records.len(), %lost, "the spool was damaged; it was set aside and a new one started");
    let name = aside.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let reason = format!("the spool was damaged ({cause}) and set aside as {name}; lost: {lost}");
    db.begin()?;
    for (key, assign) in &salvage.runs {
        db.hold(*key, assign, now)?;
    }
    for record in &salvage.records {
        db.insert(record, now)?;
    }
    db.insert(&NewRecord::loss(reason, salvage.lost.unwrap_or(0)), now)?;
    db.commit()?;
    Ok(db)
}

/// Disk space set aside, so that acknowledgements and deletions still fit when everything else is full.
struct Reserve {
    path: PathBuf,
    bytes: u64,
}

impl Reserve {
    fn new(database: &Path, bytes: u64) -> Self {
        Self { path: database.with_extension("reserve"), bytes }
    }

    /// Takes the space, or as much of it as there is. A disk without room for it is no error here.
    fn hold(&self) {
        if std::fs::metadata(&self.path).is_ok_and(|file| file.len() >= self.bytes) {
            return;
        }
        for share in [1, 2, 4, 8] {
            let taken = std::fs::File::create(&self.path).and_then(|file| {
                rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, self.bytes / share).map_err(std::io::Error::from)
            });
            if taken.is_ok() {
                return;
            }
            self.release();
        }
    }

    fn release(&self) {
        match std::fs::remove_file(&self.path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, path = %self.path.display(), "the spool's reserve can't be released"),
        }
    }
}

//! The spool against what disks and kills do to it. Each test has a folder of its own; children are this test binary again.
#![expect(clippy::unwrap_used, reason = "tests")]
use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::record::Payload;
use rlm_cluster::spool::{NewRecord, Options, RunEnd, RunKey, Spool, verify};
use rlm_core::ids::RunId;

fn key() -> RunKey {
    RunKey { run_id: RunId::generate(), generation: 1 }
}

fn episode(row: u64, attempt: u32) -> v1::Episode {
    let scored = v1::Scored {
        reward: row as f64,
        steps: 7,
        terminated: true,
        first_observation_sha256: vec![7; 32].into(),
        ..v1::Scored::default()
    };
    v1::Episode { row, attempt, seed: row, outcome: Some(v1::episode::Outcome::Scored(scored)), started_unix_ms: 1, ended_unix_ms: 2 }
}

fn metrics(size: usize) -> v1::RunMetrics {
    v1::RunMetrics { metrics_json: "m".repeat(size), at_unix_ms: 1 }
}

fn assign(key: RunKey) -> v1::Assign {
    v1::Assign { run_json: format!("{{\"run\":\"{key}\"}}"), rows: vec![v1::RowBlock { count: 5, ..v1::RowBlock::default() }] }
}

async fn all(spool: &Spool, from: u64) -> Vec<v1::Record> {
    let mut records = Vec::new();
    let mut next = from;
    loop {
        let batch = spool.read(next, 64 << 10).await.unwrap();
        let Some(last) = batch.last() else { return records };
        next = last.sequence + 1;
        records.extend(batch);
    }
}

fn rows(records: &[v1::Record]) -> Vec<u64> {
    let row = |record: &v1::Record| match &record.payload {
        Some(Payload::Episode(episode)) => Some(episode.row),
        _ => None,
    };
    records.iter().filter_map(row).collect()
}

fn losses(records: &[v1::Record]) -> Vec<v1::SpoolLoss> {
    let loss = |record: &v1::Record| match &record.payload {
        Some(Payload::SpoolLoss(loss)) => Some(loss.clone()),
        _ => None,
    };
    records.iter().filter_map(loss).collect()
}

/// Waits for the spool's thread, which ends some time after its last handle.
async fn reopen(folder: &Path, options: Options) -> Spool {
    tokio::time::sleep(Duration::from_millis(100)).await;
    Spool::open(folder, options).unwrap()
}

#[tokio::test]
async fn records_are_numbered_without_gaps_and_attempts_stored_once() {
    let folder = tempfile::tempdir().unwrap();
    let (first, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    first.append((0..100).map(|row| NewRecord::episode(key, episode(row, 0))).collect()).await.unwrap();
    first.append(vec![NewRecord::episode(key, episode(5, 0)), NewRecord::episode(key, episode(5, 1))]).await.unwrap();
    let instance = first.position().borrow().instance_id.clone();
    drop(first);
    let spool = reopen(folder.path(), Options::default()).await;
    assert_eq!(spool.position().borrow().instance_id, instance);
    spool.append(vec![NewRecord::status(key, v1::RunStatus::default())]).await.unwrap();
    let records = all(&spool, 1).await;
    assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), (1..=102).collect::<Vec<_>>());
    assert_eq!(rows(&records), (0..100).chain([5]).collect::<Vec<_>>());
    let outcomes = spool.outcomes(key).await.unwrap();
    assert_eq!((outcomes.done, outcomes.max_attempt), ((0..100).collect(), Some(1)));
}

#[tokio::test]
async fn runs_are_held_until_their_end_was_acknowledged_and_forgotten_with_their_records() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(1_000));
    let time = Arc::clone(&clock);
    let options = Options { retain: Duration::ZERO, clock: Arc::new(move || time.load(Ordering::Relaxed)), ..Options::default() };
    let (spool, key) = (Spool::open(folder.path(), options).unwrap(), key());
    assert!(spool.hold(key, assign(key)).await.unwrap());
    assert!(!spool.hold(key, assign(key)).await.unwrap());
    spool
        .append_end(vec![NewRecord::episode(key, episode(0, 0)), NewRecord::status(key, v1::RunStatus::default())], key, RunEnd::Finished)
        .await
        .unwrap();
    let held = spool.held().await.unwrap();
    assert_eq!((held.len(), held[0].ended, held[0].settled, &held[0].assign), (1, true, false, &assign(key)));
    spool.acknowledge(1).await.unwrap();
    assert!(!spool.held().await.unwrap()[0].settled);
    spool.acknowledge(2).await.unwrap();
    clock.store(10_000, Ordering::Relaxed);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !spool.held().await.unwrap().is_empty() {
        assert!(Instant::now() < deadline, "an acknowledged run is never forgotten");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(spool.outcomes(key).await.unwrap().done.is_empty());
    spool.append(vec![NewRecord::episode(key, episode(9, 0))]).await.unwrap();
    assert_eq!(all(&spool, 3).await[0].sequence, 3);
}

#[tokio::test]
async fn a_control_plane_put_back_gets_the_records_again_and_no_gap() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(0));
    let time = Arc::clone(&clock);
    let options =
        Options { retain: Duration::from_secs(72 * 3600), clock: Arc::new(move || time.load(Ordering::Relaxed)), ..Options::default() };
    let (spool, key) = (Spool::open(folder.path(), options.clone()).unwrap(), key());
    for row in 0..10 {
        spool.append(vec![NewRecord::episode(key, episode(row, 0))]).await.unwrap();
        clock.fetch_add(10 * 3_600_000, Ordering::Relaxed);
    }
    spool.welcome("one".to_owned(), 0).await.unwrap();
    spool.acknowledge(10).await.unwrap();
    assert_eq!(spool.stats().await.unwrap().unacknowledged, 0);
    let position = spool.welcome("two".to_owned(), 4).await.unwrap();
    assert_eq!((position.acknowledged, position.epoch.as_str()), (4, "two"));
    assert_eq!(rows(&all(&spool, 5).await), (4..10).collect::<Vec<_>>());
    spool.acknowledge(10).await.unwrap();
    drop(spool);
    // 100 h later: what is older than 72 h has gone, and stands as losses.
    let spool = reopen(folder.path(), Options { retain: Duration::ZERO, ..options }).await;
    spool.stats().await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    spool.append(vec![NewRecord::episode(key, episode(10, 0))]).await.unwrap();
    let position = spool.welcome("three".to_owned(), 2).await.unwrap();
    assert_eq!(position.acknowledged, 2);
    let records = all(&spool, 3).await;
    assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), (3..=11).collect::<Vec<_>>());
    assert!(!losses(&records).is_empty() && rows(&records).ends_with(&[10]));
}

#[tokio::test]
async fn a_spool_that_is_older_than_the_control_plane_goes_on_under_a_new_name() {
    let folder = tempfile::tempdir().unwrap();
    let (spool, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    spool.append(vec![NewRecord::episode(key, episode(0, 0))]).await.unwrap();
    let before = spool.position().borrow().instance_id.clone();
    let position = spool.welcome("one".to_owned(), 1000).await.unwrap();
    assert_ne!(position.instance_id, before);
    assert_eq!((position.acknowledged, position.last), (0, 1));
}

#[tokio::test]
async fn a_damaged_record_is_a_loss_at_its_place_and_blocks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let (spool, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    spool.append((0..10).map(|row| NewRecord::episode(key, episode(row, 0))).collect()).await.unwrap();
    drop(spool);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let database = rusqlite::Connection::open(folder.path().join("spool.db")).unwrap();
    database.execute("UPDATE records SET payload = CAST(x'0102' || substr(payload, 3) AS BLOB) WHERE sequence = 4", []).unwrap();
    database.execute("UPDATE records SET payload = 7 WHERE sequence = 6", []).unwrap();
    drop(database);
    let report = verify(folder.path()).unwrap();
    assert_eq!(report.problems, ["record 4: its checksum is wrong", "record 6: its checksum is wrong"]);
    let spool = reopen(folder.path(), Options::default()).await;
    let records = all(&spool, 1).await;
    assert_eq!(rows(&records), [0, 1, 2, 4, 6, 7, 8, 9]);
    assert_eq!((records[3].sequence, records[5].sequence, losses(&records).len()), (4, 6, 2));
}

#[tokio::test]
async fn a_torn_tail_costs_nothing_that_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let key = key();
    for round in 0..20_u64 {
        let spool = reopen(folder.path(), Options::default()).await;
        spool.append((0..10).map(|row| NewRecord::episode(key, episode(round * 10 + row, 0))).collect()).await.unwrap();
        // The copy is what a power cut would leave: the journal as it is now, and a torn frame behind it.
        let copy = tempfile::tempdir().unwrap();
        for name in ["spool.db", "spool.db-wal"] {
            if folder.path().join(name).exists() {
                std::fs::copy(folder.path().join(name), copy.path().join(name)).unwrap();
            }
        }
        let mut journal = std::fs::OpenOptions::new().append(true).create(true).open(copy.path().join("spool.db-wal")).unwrap();
        journal.write_all(&vec![round as u8 ^ 0xa5; 37 * (round as usize + 1)]).unwrap();
        drop(journal);
        let torn = Spool::open(copy.path(), Options::default()).unwrap();
        assert_eq!(rows(&all(&torn, 1).await), (0..(round + 1) * 10).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn a_file_of_garbage_is_set_aside_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (spool, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    spool.append(vec![NewRecord::episode(key, episode(0, 0))]).await.unwrap();
    let before = spool.position().borrow().instance_id.clone();
    drop(spool);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let path = folder.path().join("spool.db");
    let _ = std::fs::remove_file(folder.path().join("spool.db-wal"));
    std::fs::write(&path, vec![0x5a; 40_000]).unwrap();
    let spool = Spool::open(folder.path(), Options::default()).unwrap();
    assert_ne!(spool.position().borrow().instance_id, before);
    spool.append(vec![NewRecord::episode(key, episode(1, 0))]).await.unwrap();
    let records = all(&spool, 1).await;
    assert_eq!(rows(&records), [1]);
    assert!(losses(&records)[0].reason.contains("set aside as spool.db.corrupt-"), "{:?}", losses(&records));
    let aside = std::fs::read_dir(folder.path())
        .unwrap()
        .filter_map(Result::ok)
        .any(|entry| entry.file_name().to_string_lossy().starts_with("spool.db.corrupt-"));
    assert!(aside);
}

#[tokio::test]
async fn of_a_partly_damaged_file_the_rest_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (spool, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    spool.hold(key, assign(key)).await.unwrap();
    for chunk in 0..20 {
        spool.append((0..100).map(|row| NewRecord::episode(key, episode(chunk * 100 + row, 0))).collect()).await.unwrap();
    }
    spool.acknowledge(100).await.unwrap();
    drop(spool);
    tokio::time::sleep(Duration::from_millis(100)).await;
    // Everything into the main file, then a hole in the middle of it.
    let database = rusqlite::Connection::open(folder.path().join("spool.db")).unwrap();
    database.pragma_update_and_check(None, "wal_checkpoint", "TRUNCATE", |_| Ok(())).unwrap();
    let damaged: i64 = database
        .query_row("SELECT pageno FROM dbstat WHERE name = 'records' AND pagetype = 'leaf' ORDER BY pageno LIMIT 1 OFFSET 10", [], |row| {
            row.get(0)
        })
        .unwrap_or(20);
    drop(database);
    let mut file = std::fs::OpenOptions::new().write(true).open(folder.path().join("spool.db")).unwrap();
    file.seek(SeekFrom::Start((damaged as u64 - 1) * 8192)).unwrap();
    file.write_all(&[0xff; 4096]).unwrap();
    drop(file);
    let spool = Spool::open(folder.path(), Options::default()).unwrap();
    let records = all(&spool, 1).await;
    let saved: BTreeSet<u64> = rows(&records).into_iter().collect();
    let losses = losses(&records);
    assert_eq!(losses.len(), 1, "{losses:?}");
    assert!(saved.iter().all(|row| *row >= 100), "acknowledged records need no saving");
    // What is not saved is counted; a damaged page of another table costs no record.
    assert_eq!(saved.len() as u64 + losses[0].records, 1900, "{losses:?}");
    assert!(saved.len() > 1500, "{}", saved.len());
}

#[tokio::test]
async fn a_full_spool_makes_results_wait_and_drops_telemetry_oldest_first() {
    let folder = tempfile::tempdir().unwrap();
    let quota = 2 << 20;
    let options = Options { quota_bytes: quota, ..Options::default() };
    let (spool, key) = (Spool::open(folder.path(), options).unwrap(), key());
    for _ in 0..40 {
        spool.append(vec![NewRecord::metrics(key, metrics(10_000))]).await.unwrap();
    }
    let mut next = 0_u64;
    let mut stored = || {
        let batch: Vec<NewRecord> = (0..200)
            .map(|_| {
                next += 1;
                NewRecord::episode(key, episode(next, 0))
            })
            .collect();
        batch
    };
    let mut appended = 0_u64;
    let waiting = loop {
        let batch = stored();
        let spool = spool.clone();
        let mut append = tokio::spawn(async move { spool.append(batch).await });
        match tokio::time::timeout(Duration::from_secs(2), &mut append).await {
            Ok(done) => done.unwrap().unwrap(),
            Err(_) => break append,
        }
        appended += 200;
        assert!(appended < 100_000, "a spool of 2 MiB took them all");
    };
    let stats = spool.stats().await.unwrap();
    assert_eq!((stats.waiting, stats.telemetry_dropped), (1, 40));
    assert!(stats.bytes <= quota + (1 << 20), "{stats:?}");
    // Telemetry does not wait, and is counted.
    tokio::time::timeout(Duration::from_secs(2), spool.append(vec![NewRecord::metrics(key, metrics(10))])).await.unwrap().unwrap();
    assert_eq!(spool.stats().await.unwrap().telemetry_dropped, 41);
    // The control plane takes what is there: now the waiting ones are stored.
    let last = spool.position().borrow().last;
    let records = all(&spool, 1).await;
    assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), (1..=last).collect::<Vec<_>>());
    assert_eq!(rows(&records), (1..=appended).collect::<Vec<_>>());
    assert_eq!(losses(&records).iter().map(|loss| loss.records).sum::<u64>(), 40);
    spool.acknowledge(last).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap().unwrap();
    let rest = all(&spool, last + 1).await;
    assert_eq!(rows(&rest), (appended + 1..=appended + 200).collect::<Vec<_>>());
    assert_eq!(losses(&rest).iter().map(|loss| loss.records).sum::<u64>(), 1);
}

#[tokio::test]
async fn acknowledged_records_fill_half_the_quota_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let quota = 2 << 20;
    let (spool, key) = (Spool::open(folder.path(), Options { quota_bytes: quota, ..Options::default() }).unwrap(), key());
    for chunk in 0..200_u64 {
        spool.append((0..100).map(|row| NewRecord::episode(key, episode(chunk * 100 + row, 0))).collect()).await.unwrap();
        let last = spool.position().borrow().last;
        spool.acknowledge(last).await.unwrap();
    }
    let stats = spool.stats().await.unwrap();
    assert!(stats.bytes <= quota && stats.unacknowledged == 0, "{stats:?}");
}

// ---- children

fn child(test: &str, folder: &Path, wrap: Option<&str>) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut command = match wrap {
        None => Command::new(&own),
        Some(script) => {
            let mut command = Command::new("unshare");
            command.args(["-rm", "sh", "-c", script, "sh"]).arg(&own);
            command
        }
    };
    command
        .args([test, "--exact", "--ignored", "--nocapture", "--test-threads", "1"])
        .env("SPOOL_TEST_FOLDER", folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

fn child_folder() -> std::path::PathBuf {
    std::env::var_os("SPOOL_TEST_FOLDER").unwrap().into()
}

/// Rows that the child said are acknowledged, until its output ends.
fn acknowledged(child: &mut Child, mut each: impl FnMut(u64, &mut Child)) -> BTreeSet<u64> {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut rows = BTreeSet::new();
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        // A line that was cut off by the kill says nothing.
        if let Some(row) = line.strip_suffix('\n').and_then(|line| line.strip_prefix("stored ")).and_then(|row| row.parse().ok()) {
            rows.insert(row);
            each(rows.len() as u64, child);
        }
        line.clear();
    }
    rows
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).unwrap();
    out.flush().unwrap();
}

#[test]
#[ignore = "a child of every_acknowledged_record_survives_a_kill"]
fn child_that_appends() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let spool = Spool::open(&child_folder(), Options::default()).unwrap();
        let key = RunKey { run_id: "run_00000000000000000000000001".parse().unwrap(), generation: 1 };
        let next = Arc::new(AtomicI64::new(spool.outcomes(key).await.unwrap().done.last().map_or(0, |row| *row as i64 + 1)));
        let writers: Vec<_> = (0..8)
            .map(|_| {
                let (spool, next) = (spool.clone(), Arc::clone(&next));
                tokio::spawn(async move {
                    loop {
                        let row = next.fetch_add(1, Ordering::Relaxed) as u64;
                        spool.append(vec![NewRecord::episode(key, episode(row, 0))]).await.unwrap();
                        say(&format!("stored {row}\n"));
                        if row.is_multiple_of(97) {
                            spool.acknowledge(row / 2).await.unwrap();
                        }
                    }
                })
            })
            .collect();
        futures::future::join_all(writers).await;
    });
}

#[tokio::test]
async fn every_acknowledged_record_survives_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let mut promised = BTreeSet::new();
    for round in 0..8_u64 {
        let mut appender = child("child_that_appends", folder.path(), None).spawn().unwrap();
        // At a moment that differs each time, in the middle of its work.
        let limit = 50 + 137 * round;
        promised.extend(acknowledged(&mut appender, |count, appender| {
            if count == limit {
                appender.kill().unwrap();
            }
        }));
        appender.wait().unwrap();
    }
    assert!(verify(folder.path()).unwrap().problems.is_empty());
    let spool = Spool::open(folder.path(), Options::default()).unwrap();
    let records = all(&spool, 1).await;
    let stored: BTreeSet<u64> = rows(&records).into_iter().collect();
    let lost: Vec<&u64> = promised.difference(&stored).collect();
    assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
    assert!(promised.len() > 3000, "{}", promised.len());
    assert!(records.windows(2).all(|pair| pair[0].sequence + 1 == pair[1].sequence));
}

#[test]
#[ignore = "a child of a_full_disk_loses_nothing_and_recovers"]
fn child_on_a_small_disk() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let folder = child_folder();
        let spool = Spool::open(&folder, Options { quota_bytes: 64 << 20, ..Options::default() }).unwrap();
        let key = RunKey { run_id: "run_00000000000000000000000001".parse().unwrap(), generation: 1 };
        // Somebody else fills the disk: all but 1 MiB of it.
        let filler = folder.join("filler");
        let mut file = std::fs::File::create(&filler).unwrap();
        while file.write_all(&[0; 64 << 10]).is_ok() {}
        file.set_len(file.metadata().unwrap().len().saturating_sub(1 << 20)).unwrap();
        drop(file);
        let mut row = 0;
        let blocked = loop {
            let batch: Vec<NewRecord> = (row..row + 100).map(|row| NewRecord::episode(key, episode(row, 0))).collect();
            let appender = spool.clone();
            let mut append = tokio::spawn(async move { appender.append(batch).await });
            match tokio::time::timeout(Duration::from_secs(2), &mut append).await {
                Ok(done) => done.unwrap().unwrap(),
                Err(_) => break append,
            }
            row += 100;
        };
        say(&format!("full after {row}\n"));
        assert_eq!(rows(&all(&spool, 1).await), (0..row).collect::<Vec<_>>());
        // An acknowledgement must still be possible, or nothing could ever go. What it covers may go for what waits.
        let durable = row / 2;
        spool.acknowledge(durable).await.unwrap();
        assert_eq!(spool.position().borrow().acknowledged, durable);
        assert!(rows(&all(&spool, durable + 1).await).starts_with(&(durable..row).collect::<Vec<_>>()));
        std::fs::remove_file(&filler).unwrap();
        tokio::time::timeout(Duration::from_secs(20), blocked).await.unwrap().unwrap().unwrap();
        let kept: Vec<u64> = (durable..row + 100).collect();
        assert_eq!(rows(&all(&spool, durable + 1).await), kept);
        drop(spool);
        let again = reopen(&folder, Options { quota_bytes: 64 << 20, ..Options::default() }).await;
        assert_eq!(rows(&all(&again, durable + 1).await), kept);
        assert!(verify(&folder).unwrap().problems.is_empty());
        say(&format!("recovered {row}\n"));
    });
}

#[test]
fn a_full_disk_loses_nothing_and_recovers() {
    let can = Command::new("unshare").args(["-rm", "true"]).status().is_ok_and(|status| status.success());
    if !can {
        eprintln!("skipped, because this machine lets nobody mount a file system of his own (unshare -rm)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=12m none \"$SPOOL_TEST_FOLDER\" && exec \"$@\"";
    let output = child("child_on_a_small_disk", folder.path(), Some(script)).stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("full after") && text.contains("recovered"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!text.contains("full after 0\n"), "{text}");
}

#[test]
#[ignore = "a child of a_large_backlog_is_read_in_little_memory"]
fn child_that_reads_a_backlog() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let spool = Spool::open(&child_folder(), Options::default()).unwrap();
        let mut next = 1;
        let mut count = 0;
        loop {
            let batch = spool.read(next, 512 << 10).await.unwrap();
            let Some(last) = batch.last() else { break };
            next = last.sequence + 1;
            count += batch.len();
            drop(batch);
        }
        let mut status = String::new();
        std::fs::File::open("/proc/self/status").unwrap().read_to_string(&mut status).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim().to_owned();
        say(&format!("read {count} peak {peak}\n"));
    });
}

#[tokio::test]
async fn a_large_backlog_is_read_in_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (spool, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    for chunk in 0..100_u64 {
        spool.append((0..1000).map(|row| NewRecord::episode(key, episode(chunk * 1000 + row, 0))).collect()).await.unwrap();
    }
    for _ in 0..200 {
        spool.append(vec![NewRecord::metrics(key, metrics(200 << 10))]).await.unwrap();
    }
    drop(spool);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let output = child("child_that_reads_a_backlog", folder.path(), None).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains("read 100200 peak")).unwrap_or_else(|| panic!("{text}"));
    let peak: u64 = line.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    assert!(peak < 40 << 10, "a backlog of 50 MiB took {peak} KiB");
}

/// Killed between the two renames: what was in the journal alone must not be forgotten.
#[tokio::test]
async fn setting_aside_that_was_interrupted_is_finished() {
    let (folder, half) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (spool, key) = (Spool::open(folder.path(), Options::default()).unwrap(), key());
    spool.append((0..50).map(|row| NewRecord::episode(key, episode(row, 0))).collect()).await.unwrap();
    std::fs::copy(folder.path().join("spool.db"), half.path().join("spool.db")).unwrap();
    std::fs::copy(folder.path().join("spool.db-wal"), half.path().join("spool.db.corrupt-5-wal")).unwrap();
    let again = Spool::open(half.path(), Options::default()).unwrap();
    let records = all(&again, 1).await;
    assert_eq!(rows(&records), (0..50).collect::<Vec<_>>());
    assert!(losses(&records)[0].reason.contains("set aside as spool.db.corrupt-5"), "{:?}", losses(&records));
    assert!(half.path().join("spool.db.corrupt-5").exists());
}

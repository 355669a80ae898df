//! Durable records per second that the spool acknowledges, with as many writers as a busy cell has, one record per append.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rlm_api::cluster::v1;
use rlm_bench::{Goal, figure};
use rlm_cluster::spool::{NewRecord, Options, RunKey, Spool};
use rlm_core::ids::RunId;

const WRITERS: u64 = 256;
const MEASURED: Duration = Duration::from_secs(5);

fn episode(row: u64) -> v1::Episode {
    let scored =
        v1::Scored { reward: 200.0, steps: 200, truncated: true, first_observation_sha256: vec![7; 32].into(), ..v1::Scored::default() };
    v1::Episode {
        row,
        attempt: 0,
        seed: row,
        outcome: Some(v1::episode::Outcome::Scored(scored)),
        started_unix_ms: 1_700_000_000_000,
        ended_unix_ms: 1_700_000_001_000,
    }
}

async fn measure(folder: &std::path::Path) -> Result<f64, Box<dyn std::error::Error>> {
    let spool = Spool::open(folder, Options::default())?;
    let key = RunKey { run_id: RunId::generate(), generation: 1 };
    let started = Instant::now();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let spool = spool.clone();
            tokio::spawn(async move {
                let mut stored = 0_u64;
                while started.elapsed() < MEASURED {
                    spool.append(vec![NewRecord::episode(key, episode(stored * WRITERS + writer))]).await?;
                    stored += 1;
                }
                Ok::<u64, rlm_cluster::spool::SpoolError>(stored)
            })
        })
        .collect();
    let mut total = 0;
    for writer in writers {
        total += writer.await??;
    }
    Ok(total as f64 / started.elapsed().as_secs_f64())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if rlm_bench::only_tested() {
        return Ok(());
    }
    let folder = std::env::temp_dir().join(format!("rlm-spool-bench-{}", std::process::id()));
    let folder: PathBuf = std::env::var_os("RLMESH_BENCH_FOLDER").map_or(folder, PathBuf::from);
    std::fs::create_dir_all(&folder)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(measure(&folder));
    std::fs::remove_dir_all(&folder)?;
    figure("spool_records_per_second", result?, Goal::AtLeast(20_000.0));
    Ok(())
}

//! Hands queued runs to clusters, and takes back what clusters can't go on with. One loop, woken by changes and by time; it
//! never asks a cluster anything and waits for none.
//!
//! The database is the truth: each look starts from it, and a decision that is late changes nothing.

pub mod leases;
pub mod plan;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use rlm_api::cluster::v1::Assign;
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::{ClusterId, EvaluationId, RunId};
use rlm_core::run::Waiting;
use tokio_util::sync::CancellationToken;

use self::plan::{Candidate, Executor, Gpus, Lease, Needs, Reclaim, Share, Verdict, Waiter};
use crate::app::cells::{Cells, OUTBOUND, Place};
use crate::state::AppState;
use crate::store::StoreError;
use crate::store::clusters::ClusterRow;
use crate::store::leases::OpenRun;

/// Most queued runs looked at in one go, the most urgent first.
const MOST_QUEUED: u32 = 10_000;
/// Of them, most of one organization for one cluster (or for any).
const MOST_QUEUED_EACH: u32 = 1_000;

/// After a start, agents may take this long to come back before a queue timeout counts.
const BACK_MS: i64 = 30_000;

/// What the scheduler remembers between looks; it can be lost.
#[derive(Default)]
struct Memory {
    needs: HashMap<RunId, Arc<Needs>>,
    /// Since when a run waits again whose lease ended.
    queued_again: HashMap<(RunId, u64), i64>,
}

/// Looks whenever something changed, and once a second, until `stop`.
pub async fn run(state: AppState, stop: CancellationToken) {
    let mut memory = Memory::default();
    let every = (state.config.timings.disconnected_after / 20).clamp(Duration::from_millis(20), Duration::from_secs(1));
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = state.cells.woken() => {}
            _ = ticks.tick() => {}
        }
        // Before, an agent could be blamed for the control plane's own downtime.
        if !state.cells.is_listening() {
            continue;
        }
        if let Err(error) = look(&state, &mut memory).await {
            tracing::error!(%error, "could not hand out runs; trying again");
            tokio::time::sleep(every).await;
        }
    }
}

async fn look(state: &AppState, memory: &mut Memory) -> Result<(), StoreError> {
    let placed = state.store.placed_runs().await?;
    let queued = state.store.queued_runs(MOST_QUEUED, MOST_QUEUED_EACH).await?;
    if placed.is_empty() && queued.is_empty() {
        *memory = Memory::default();
        return Ok(());
    }
    let clusters = state.store.schedulable_clusters().await?;
    memory.learn(state, &placed, &queued).await?;
    reclaim(state, memory, &placed, &clusters).await?;
    hand_out(state, memory, &placed, &queued, &clusters).await
}

impl Memory {
    /// Reads the specifications of runs that are new, and forgets those that are over.
    async fn learn(&mut self, state: &AppState, placed: &[OpenRun], queued: &[OpenRun]) -> Result<(), StoreError> {
        let open: HashSet<RunId> = placed.iter().chain(queued).map(|run| run.id).collect();
        self.needs.retain(|id, _| open.contains(id));
        let waiting: HashSet<(RunId, u64)> = queued.iter().map(|run| (run.id, run.generation)).collect();
        self.queued_again.retain(|key, _| waiting.contains(key));
        let new: Vec<RunId> = open.into_iter().filter(|id| !self.needs.contains_key(id)).collect();
        for spec in state.store.run_specs(&new).await? {
            self.needs.insert(spec.run_id, Arc::new(Needs::of(&spec)));
        }
        Ok(())
    }

    /// None: the run came after the specifications were read; the next look has it.
    fn waiter(&mut self, cells: &Cells, run: &OpenRun, now_ms: i64) -> Option<Waiter> {
        let needs = self.needs.get(&run.id).cloned()?;
        let queued_at = if run.generation == needs.first_generation {
            // The control plane's own downtime is not the queue's, and agents need a moment to come back after it.
            let downtime_ms = if run.created_at < cells.listening_since() { cells.downtime_ms() } else { 0 };
            (run.created_at + downtime_ms).max(cells.listening_since() + BACK_MS - needs.queue_timeout_ms)
        } else {
            *self.queued_again.entry((run.id, run.generation)).or_insert(now_ms)
        };
        Some(Waiter {
            id: run.id,
            organization: run.organization,
            pinned: run.pinned,
            priority: run.priority,
            submitter: run.submitter.clone(),
            created_at: run.created_at,
            queued_at,
            needs,
        })
    }
}

/// Cancellations, and leases of clusters that are gone.
async fn reclaim(state: &AppState, memory: &Memory, placed: &[OpenRun], clusters: &[ClusterRow]) -> Result<(), StoreError> {
    let now_ms = state.clock.now_ms();
    let clusters: HashMap<ClusterId, &ClusterRow> = clusters.iter().map(|cluster| (cluster.id, cluster)).collect();
    for run in placed {
        let Some(cluster) = run.cluster.and_then(|id| clusters.get(&id)) else { continue };
        let Some(needs) = memory.needs.get(&run.id) else { continue };
        let lease = Lease {
            pinned: run.pinned.is_some(),
            cancel_requested: run.cancel_requested,
            archived: cluster.archived_at.is_some(),
            disconnected_at: cluster.disconnected_at,
            reassign_after_ms: needs.reassign_after_ms,
        };
        match plan::reclaim(lease, now_ms) {
            Reclaim::Keep => {}
            Reclaim::TellCancel => state.cells.cancel(cluster.id, run.id, run.generation),
            Reclaim::Cancel => leases::cancel(state, run.id, run.generation).await?,
            Reclaim::GiveUp => leases::give_up(state, run.id, run.generation).await?,
            Reclaim::Fail => {
                let message = format!(
                    "cluster {} that held {} was archived before it was done; clone the evaluation to another cluster",
                    cluster.name, run.id
                );
                leases::fail(state, run.id, run.evaluation, Failure::new(FailureCode::NotRunnableHere, message)).await?;
            }
        }
    }
    Ok(())
}

async fn hand_out(
    state: &AppState,
    memory: &mut Memory,
    placed: &[OpenRun],
    queued: &[OpenRun],
    clusters: &[ClusterRow],
) -> Result<(), StoreError> {
    let now_ms = state.clock.now_ms();
    let mut places: HashMap<ClusterId, Vec<Place>> = HashMap::new();
    if !queued.is_empty() {
        for cluster in clusters {
            let free: Vec<Place> = std::iter::from_fn(|| state.cells.place(cluster.id)).take(OUTBOUND).collect();
            places.insert(cluster.id, free);
        }
    }
    let mut held: HashMap<Share, u64> = HashMap::new();
    let mut load: HashMap<ClusterId, u64> = HashMap::new();
    for run in placed {
        *held.entry((run.organization, run.submitter.clone())).or_default() += 1;
        if let Some(cluster) = run.cluster {
            *load.entry(cluster).or_default() += 1;
        }
    }
    let candidates: Vec<Candidate> = clusters
        .iter()
        .map(|cluster| candidate(state, cluster, load.get(&cluster.id).copied().unwrap_or(0), places.get(&cluster.id).map_or(0, Vec::len)))
        .collect();
    let mut by_id: HashMap<RunId, &OpenRun> = HashMap::new();
    let mut waiters = Vec::with_capacity(queued.len());
    for run in queued {
        if run.cancel_requested {
            leases::cancel(state, run.id, run.generation).await?;
            continue;
        }
        by_id.insert(run.id, run);
        waiters.extend(memory.waiter(&state.cells, run, now_ms));
    }
    let mut notes = Vec::new();
    for (id, verdict) in plan::plan(&waiters, candidates, held, now_ms) {
        let Some(run) = by_id.get(&id) else { continue };
        match verdict {
            Verdict::Place(cluster) => {
                if let Some(place) = places.get_mut(&cluster).and_then(Vec::pop) {
                    assign(state, run, cluster, place).await?;
                }
            }
            Verdict::Wait { cause, message } => notes.extend(news(run, cause, message, now_ms)),
            Verdict::Fail(failure) => leases::fail(state, id, run.evaluation, failure).await?,
        }
    }
    drop(places);
    note_waiting(state, notes).await
}

fn candidate(state: &AppState, cluster: &ClusterRow, placed: u64, room: usize) -> Candidate {
    Candidate {
        id: cluster.id,
        organization: cluster.organization,
        name: cluster.name.clone(),
        archived: cluster.archived_at.is_some(),
        connected: state.cells.is_connected(cluster.id),
        draining: cluster.draining,
        executor: cluster.executor.as_deref().and_then(Executor::parse),
        placed,
        room: room as u64,
        gpus: cluster
            .nodes
            .iter()
            .filter(|node| node.gpu_count > 0)
            .map(|node| Gpus { product: node.gpu_product.clone(), count: node.gpu_count })
            .collect(),
    }
}

/// Leases the run, then tells the agent. When the session ends in between, the next one finds that the agent does not name the
/// run, and it is given out anew; a lease that can't be told ends the session, so that it is.
async fn assign(state: &AppState, run: &OpenRun, cluster: ClusterId, place: Place) -> Result<(), StoreError> {
    match leased(state, run.id, cluster, place.session_generation()).await {
        Ok(Some((generation, assignment))) => {
            tracing::info!(run = %run.id, evaluation = %run.evaluation, %cluster, generation, "a run was handed to a cluster");
            place.send(assignment);
            Ok(())
        }
        Ok(None) => Ok(()),
        // Also a commit whose answer got lost may have made a lease.
        Err(error) => {
            place.give_up();
            Err(error)
        }
    }
}

async fn leased(state: &AppState, run: RunId, cluster: ClusterId, session_generation: u64) -> Result<Option<(u64, Assign)>, StoreError> {
    let Some(generation) = leases::lease(state, run, cluster, session_generation).await? else { return Ok(None) };
    Ok(leases::assignment(state, run, generation).await?.map(|assignment| (generation, assignment)))
}

/// A reason that changed, since now; one that stays keeps its beginning.
fn news(run: &OpenRun, cause: &str, message: String, now_ms: i64) -> Option<(RunId, EvaluationId, u64, Waiting)> {
    let since = match &run.waiting {
        Some(waiting) if waiting.cause == cause && waiting.message == message => return None,
        Some(waiting) if waiting.cause == cause => waiting.since,
        Some(_) | None => chrono::DateTime::from_timestamp_millis(now_ms)?,
    };
    Some((run.id, run.evaluation, run.generation, Waiting { cause: cause.to_owned(), since, message }))
}

async fn note_waiting(state: &AppState, notes: Vec<(RunId, EvaluationId, u64, Waiting)>) -> Result<(), StoreError> {
    for part in notes.chunks(500) {
        let mut write = state.store.write().await?;
        write.lock_evaluations_of(&part.iter().map(|(run, ..)| *run).collect::<Vec<_>>()).await?;
        let mut changed: HashSet<EvaluationId> = HashSet::new();
        for (run, evaluation, generation, waiting) in part {
            if write.note_waiting(*run, *generation, waiting).await? {
                changed.insert(*evaluation);
            }
        }
        write.commit().await?;
        for evaluation in changed {
            state.events.publish(evaluation);
        }
    }
    Ok(())
}

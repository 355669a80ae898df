//! What time does to agents' links: silence becomes *disconnected*, a replaced credential ends its session. By the server's
//! clock; the control plane's own downtime never counts against an agent.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rlm_core::ids::ClusterId;
use tokio_util::sync::CancellationToken;

use super::link::{Last, is_connected};
use super::{Ending, Live};
use crate::config::millis;
use crate::state::AppState;
use crate::store::StoreError;

/// When the control plane last said that it is alive.
const ALIVE: &str = "alive_at";
/// How often it says so.
const ALIVE_EVERY_MS: i64 = 10_000;

/// Looks once a second until `stop`; then ends every session.
pub async fn run(state: AppState, stop: CancellationToken) {
    let every = (state.config.timings.disconnected_after / 20).clamp(Duration::from_millis(20), Duration::from_secs(1));
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut alive_at = state.clock.now_ms();
    let mut begun = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => {}
        }
        if !begun {
            match begin(&state).await {
                Ok(()) => begun = true,
                Err(error) => {
                    tracing::error!(%error, "could not begin to look after agents' connections; trying again");
                    continue;
                }
            }
        }
        if let Err(error) = look(&state).await {
            tracing::error!(%error, "could not look after agents' connections; trying again");
        }
        let now_ms = state.clock.now_ms();
        if now_ms - alive_at >= ALIVE_EVERY_MS {
            match note_alive(&state, now_ms).await {
                Ok(()) => alive_at = now_ms,
                Err(error) => tracing::error!(%error, "could not note that the control plane is alive; trying again"),
            }
        }
    }
    state.cells.shutdown();
}

/// At start: agents that were lost before are not blamed for the time that the control plane was down, and those that were
/// connected have time to come back.
async fn begin(state: &AppState) -> Result<(), StoreError> {
    let now_ms = state.clock.now_ms();
    let alive_at: Option<i64> = state.store.meta(ALIVE).await?.and_then(|text| text.parse().ok());
    let downtime_ms = alive_at.map_or(0, |at| (now_ms - at).max(0));
    let mut write = state.store.write().await?;
    if downtime_ms > 0 {
        write.excuse_downtime(downtime_ms).await?;
    }
    write.set_meta(ALIVE, &now_ms.to_string()).await?;
    write.commit().await?;
    state.cells.listen_from(now_ms, downtime_ms);
    Ok(())
}

async fn note_alive(state: &AppState, now_ms: i64) -> Result<(), StoreError> {
    let mut write = state.store.write().await?;
    write.set_meta(ALIVE, &now_ms.to_string()).await?;
    write.commit().await
}

/// One look.
async fn look(state: &AppState) -> Result<(), StoreError> {
    let now_ms = state.clock.now_ms();
    for cluster in state.cells.connected() {
        if let Some(live) = state.cells.get(cluster)
            && live.credential_ends.load(Ordering::Relaxed) <= now_ms
        {
            live.end(Ending::CredentialRetired);
        }
    }
    let after = millis(state.config.timings.disconnected_after);
    let since = state.cells.listening_since();
    let mut lost: Vec<(ClusterId, i64, Option<Arc<Live>>)> = Vec::new();
    for (cluster, stored) in state.store.connected_clusters().await? {
        let live = state.cells.get(cluster);
        let seen = live.as_ref().map_or(stored, |live| live.last_seen().max(stored));
        let last = Last { instance_id: None, last_seen_at: Some(seen), disconnected_at: None };
        if !is_connected(last, since, now_ms, after) {
            lost.push((cluster, seen, live));
        }
    }
    if lost.is_empty() {
        return Ok(());
    }
    let mut write = state.store.write().await?;
    for (cluster, seen, _) in &lost {
        if write.note_disconnected(*cluster, *seen, now_ms).await? {
            tracing::warn!(%cluster, silent_ms = now_ms - seen, "an agent is disconnected: nothing was heard from it");
        }
    }
    write.commit().await?;
    // A session that began meanwhile is not meant.
    for live in lost.into_iter().filter_map(|(_, _, live)| live) {
        live.end(Ending::Silent);
    }
    state.cells.wake();
    Ok(())
}

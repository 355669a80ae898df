//! Clusters: registering, join tokens, drain, archive. What an agent does is in `cells`.

pub mod command;
pub mod credentials;
pub mod join;

use rlm_api::rest;
use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::{ClusterId, JoinTokenId, OrganizationId};
use rlm_core::tokens::{Secret, SecretKind};
use serde_json::json;

use crate::app::access::Caller;
use crate::app::audit;
use crate::app::cells::Ending;
use crate::app::cells::link::{self, Last};
use crate::config::millis;
use crate::state::AppState;
use crate::store::clusters::{ClusterRow, ClusterRuns};
use crate::store::join_tokens::JoinToken;
use crate::store::{StoreError, Write};

/// Longest name of a cluster.
const LONGEST_NAME: usize = 100;

pub(crate) fn time(unix_ms: i64) -> String {
    moment(unix_ms).to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

pub(crate) fn moment(unix_ms: i64) -> chrono::DateTime<chrono::Utc> {
    chrono::DateTime::from_timestamp_millis(unix_ms).unwrap_or_default()
}

fn unknown(id: &str) -> Error {
    let id: String = id.chars().take(64).collect();
    Error::new(
        Code::NotFound,
        format!("there is no cluster '{id}' in this organization; `rlmesh clusters list` shows those that there are"),
    )
}

fn refuse_archived(cluster: &ClusterRow) -> Result<(), Error> {
    if cluster.archived_at.is_none() {
        return Ok(());
    }
    Err(Error::new(Code::Conflict, format!("cluster {} is archived; register a new one", cluster.name)))
}

/// A cluster of the caller's organization.
async fn find(state: &AppState, caller: &Caller, id: &str) -> Result<ClusterRow, Error> {
    let parsed: ClusterId = id.parse().map_err(|_| unknown(id))?;
    state.store.cluster(parsed).await?.filter(|cluster| cluster.organization == caller.organization_id).ok_or_else(|| unknown(id))
}

/// The same, under a lock.
async fn lock(write: &mut Write, caller: &Caller, id: &str) -> Result<ClusterRow, Error> {
    let parsed: ClusterId = id.parse().map_err(|_| unknown(id))?;
    write.lock_cluster(parsed).await?.filter(|cluster| cluster.organization == caller.organization_id).ok_or_else(|| unknown(id))
}

fn check_name(name: &str) -> Result<String, Error> {
    let name = name.trim();
    let problem = if name.is_empty() {
        "must not be empty"
    } else if name.chars().count() > LONGEST_NAME {
        "must have at most 100 characters"
    } else if name.chars().any(char::is_control) {
        "must not contain control characters"
    } else {
        return Ok(name.to_owned());
    };
    Err(Error::invalid(vec![Problem::new("name", problem)]))
}

fn new_row(organization: OrganizationId, name: &str, created_by: &str, now_ms: i64) -> ClusterRow {
    ClusterRow {
        id: ClusterId::generate(),
        organization,
        name: name.to_owned(),
        created_at: now_ms,
        created_by: created_by.to_owned(),
        archived_at: None,
        draining: false,
        last_seen_at: None,
        disconnected_at: None,
        session_generation: 0,
        instance_id: None,
        executor: None,
        kube_system_uid: None,
        agent_version: None,
        chart_version: None,
        kubernetes_version: None,
        nodes: Vec::new(),
        conditions: Vec::new(),
        unacknowledged_records: 0,
    }
}

fn taken(error: StoreError, name: &str) -> Error {
    if error.is_unique_violation() {
        Error::new(Code::AlreadyExists, format!("a cluster named '{name}' exists; choose another name, or use that one"))
    } else {
        error.into()
    }
}

/// When the agent was heard last.
fn last<'a>(state: &AppState, cluster: &'a ClusterRow) -> Last<'a> {
    Last {
        instance_id: cluster.instance_id.as_deref(),
        last_seen_at: cluster.last_seen_at.max(state.cells.last_seen(cluster.id)),
        disconnected_at: cluster.disconnected_at,
    }
}

fn is_connected(state: &AppState, cluster: &ClusterRow) -> bool {
    let after = millis(state.config.timings.disconnected_after);
    link::is_connected(last(state, cluster), state.cells.listening_since(), state.clock.now_ms(), after)
}

/// A cluster as it is shown. Pure but for `connected` and `last_seen_at`, which its caller found out.
fn shown(cluster: &ClusterRow, runs: ClusterRuns, connected: bool, last_seen_at: Option<i64>) -> rest::Cluster {
    let status = match (cluster.archived_at, last_seen_at) {
        (Some(_), _) => "archived",
        (None, None) => "pending",
        (None, Some(_)) if connected => "connected",
        (None, Some(_)) => "disconnected",
    };
    rest::Cluster {
        id: cluster.id.to_string(),
        name: cluster.name.clone(),
        status: status.to_owned(),
        draining: cluster.draining,
        // An agent that is away may hold results that nobody has heard of.
        drained: cluster.draining && connected && runs.placed() == 0 && cluster.unacknowledged_records == 0,
        executor: cluster.executor.clone(),
        created_at: moment(cluster.created_at),
        last_seen_at: last_seen_at.map(moment),
        agent_version: cluster.agent_version.clone(),
        kubernetes_version: cluster.kubernetes_version.clone(),
        running_runs: runs.running,
        queued_runs: runs.leased + runs.waiting,
        unacknowledged_records: cluster.unacknowledged_records,
        nodes: json!(cluster.nodes),
        conditions: json!(cluster.conditions),
    }
}

async fn show(state: &AppState, clusters: &[ClusterRow]) -> Result<Vec<rest::Cluster>, Error> {
    let ids: Vec<ClusterId> = clusters.iter().map(|cluster| cluster.id).collect();
    let runs = state.store.cluster_runs(&ids).await?;
    Ok(clusters
        .iter()
        .zip(runs)
        .map(|(cluster, runs)| shown(cluster, runs, is_connected(state, cluster), last(state, cluster).last_seen_at))
        .collect())
}

async fn show_one(state: &AppState, caller: &Caller, id: &str) -> Result<rest::Cluster, Error> {
    let cluster = find(state, caller, id).await?;
    show(state, &[cluster]).await?.pop().ok_or_else(|| unknown(id))
}

/// Clusters of the caller's organization, oldest first.
pub async fn list(
    state: &AppState,
    caller: &Caller,
    archived: bool,
    after: Option<ClusterId>,
    limit: u32,
) -> Result<rest::Page<rest::Cluster>, Error> {
    let mut rows = state.store.clusters(caller.organization_id, archived, after, limit + 1).await?;
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next_cursor = rows.last().filter(|_| more).map(|row| row.id.to_string());
    Ok(rest::Page { items: show(state, &rows).await?, next_cursor })
}

pub async fn get(state: &AppState, caller: &Caller, id: &str) -> Result<rest::Cluster, Error> {
    show_one(state, caller, id).await
}

/// Registers a cluster; it is connected by a join token.
pub async fn create(state: &AppState, caller: &Caller, name: &str) -> Result<rest::Cluster, Error> {
    let name = check_name(name)?;
    let now_ms = state.clock.now_ms();
    let row = new_row(caller.organization_id, &name, &caller.actor, now_ms);
    let mut write = state.store.write().await?;
    write.insert_cluster(&row).await.map_err(|error| taken(error, &name))?;
    audit::record(&mut write, now_ms, &caller.actor(), "cluster.create", &row.id.to_string(), json!({"name": name})).await?;
    write.commit().await?;
    show_one(state, caller, &row.id.to_string()).await
}

pub async fn rename(state: &AppState, caller: &Caller, id: &str, name: &str) -> Result<rest::Cluster, Error> {
    let name = check_name(name)?;
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let cluster = lock(&mut write, caller, id).await?;
    refuse_archived(&cluster)?;
    write.rename_cluster(cluster.id, &name).await.map_err(|error| taken(error, &name))?;
    let details = json!({"from": cluster.name, "to": name});
    audit::record(&mut write, now_ms, &caller.actor(), "cluster.rename", &cluster.id.to_string(), details).await?;
    write.commit().await?;
    show_one(state, caller, id).await
}

/// Stops (`true`) or resumes placement; runs that are there finish.
pub async fn drain(state: &AppState, caller: &Caller, id: &str, draining: bool) -> Result<rest::Cluster, Error> {
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let cluster = lock(&mut write, caller, id).await?;
    refuse_archived(&cluster)?;
    if cluster.draining != draining {
        write.set_draining(cluster.id, draining).await?;
        let action = if draining { "cluster.drain" } else { "cluster.resume" };
        audit::record(&mut write, now_ms, &caller.actor(), action, &cluster.id.to_string(), json!({"name": cluster.name})).await?;
        write.commit().await?;
    } else {
        drop(write);
    }
    let drain = rlm_api::cluster::v1::Drain { draining };
    // An agent that misses it learns it when it reconnects.
    state.cells.tell(cluster.id, rlm_api::cluster::v1::server_message::Message::Drain(drain));
    state.cells.wake();
    show_one(state, caller, id).await
}

/// Revokes every credential and token of the cluster at once. Results that arrived stay; its name becomes free.
pub async fn archive(state: &AppState, caller: &Caller, id: &str) -> Result<rest::Cluster, Error> {
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let cluster = lock(&mut write, caller, id).await?;
    if cluster.archived_at.is_none() {
        write.revoke_everything(cluster.id, now_ms).await?;
        let name = format!("{} (archived {})", cluster.name, cluster.id);
        write.archive_cluster(cluster.id, &name, now_ms).await?;
        audit::record(&mut write, now_ms, &caller.actor(), "cluster.archive", &cluster.id.to_string(), json!({"name": cluster.name}))
            .await?;
        write.commit().await?;
    } else {
        drop(write);
    }
    state.cells.end(cluster.id, Ending::Archived);
    state.cells.wake();
    show_one(state, caller, id).await
}

/// A new join token; those that nobody used are superseded by it.
pub async fn issue_join_token(state: &AppState, caller: &Caller, id: &str) -> Result<rest::JoinTokenCreated, Error> {
    let now_ms = state.clock.now_ms();
    let secret = Secret::generate(SecretKind::JoinToken);
    let mut write = state.store.write().await?;
    let cluster = lock(&mut write, caller, id).await?;
    refuse_archived(&cluster)?;
    write.supersede_join_tokens(cluster.id, now_ms).await?;
    let token = JoinToken {
        id: JoinTokenId::generate(),
        cluster: cluster.id,
        created_at: now_ms,
        created_by: caller.actor.clone(),
        expires_at: now_ms.saturating_add(millis(state.config.timings.join_token)),
        used_at: None,
        used_nonce: None,
        exchange: None,
        revoked_at: None,
        superseded_at: None,
    };
    write.insert_join_token(&token, &secret.hash()).await?;
    let details = json!({"token": token.id.to_string(), "expiresAt": time(token.expires_at)});
    audit::record(&mut write, now_ms, &caller.actor(), "joinToken.create", &cluster.id.to_string(), details).await?;
    write.commit().await?;
    Ok(rest::JoinTokenCreated {
        id: token.id.to_string(),
        cluster_id: cluster.id.to_string(),
        token: secret.expose().to_owned(),
        expires_at: moment(token.expires_at),
        command: command::install(&state.config, secret.expose(), cluster.last_seen_at.is_some()),
    })
}

/// The tokens of a cluster, newest first; never their values.
pub async fn join_tokens(state: &AppState, caller: &Caller, id: &str) -> Result<Vec<JoinToken>, Error> {
    let cluster = find(state, caller, id).await?;
    Ok(state.store.join_tokens(cluster.id).await?)
}

/// Revoking a token twice is fine; what it was exchanged for stays valid.
pub async fn revoke_join_token(state: &AppState, caller: &Caller, id: &str, token: &str) -> Result<(), Error> {
    let now_ms = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let cluster = lock(&mut write, caller, id).await?;
    let shown: String = token.chars().take(64).collect();
    let no_token = || Error::new(Code::NotFound, format!("cluster {} has no join token '{shown}'", cluster.name));
    let parsed: JoinTokenId = token.parse().map_err(|_| no_token())?;
    if write.revoke_join_token(cluster.id, parsed, now_ms).await? {
        let details = json!({"token": parsed.to_string()});
        audit::record(&mut write, now_ms, &caller.actor(), "joinToken.revoke", &cluster.id.to_string(), details).await?;
        write.commit().await?;
        return Ok(());
    }
    drop(write);
    if state.store.join_tokens(cluster.id).await?.iter().any(|one| one.id == parsed) { Ok(()) } else { Err(no_token()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drained_means_that_nothing_is_left() {
        let mut row = new_row(OrganizationId::generate(), "lab", "user", 0);
        let drained = |row: &ClusterRow, runs| shown(row, runs, true, Some(1)).drained;
        let idle = ClusterRuns::default();
        assert!(!drained(&row, idle));
        row.draining = true;
        assert!(drained(&row, idle));
        assert!(!drained(&row, ClusterRuns { leased: 1, ..idle }));
        assert!(!drained(&row, ClusterRuns { running: 1, ..idle }));
        assert!(drained(&row, ClusterRuns { waiting: 1, ..idle }), "runs that wait elsewhere do not hold it up");
        assert!(!shown(&row, idle, false, Some(1)).drained, "an agent that is away may hold results");
        row.unacknowledged_records = 1;
        assert!(!drained(&row, idle));
    }

    #[test]
    fn each_status_has_its_reason() {
        let mut row = new_row(OrganizationId::generate(), "lab", "user", 0);
        let status = |row: &ClusterRow, connected, seen| shown(row, ClusterRuns::default(), connected, seen).status;
        assert_eq!(status(&row, false, None), "pending");
        assert_eq!(status(&row, true, Some(1)), "connected");
        assert_eq!(status(&row, false, Some(1)), "disconnected");
        row.archived_at = Some(1);
        assert_eq!(status(&row, true, Some(1)), "archived");
    }

    #[test]
    fn names_are_checked() {
        assert!(check_name(" lab ").is_ok_and(|name| name == "lab"));
        for name in ["", "  ", "a\nb", &"x".repeat(101)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }
}

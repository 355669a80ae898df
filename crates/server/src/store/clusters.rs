//! Clusters and what their agents last said. Join tokens and credentials are in `join_tokens`, leases in `leases`.

use chrono::{DateTime, Utc};
use rlm_core::ids::{ClusterId, OrganizationId};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use sqlx::any::AnyRow;

use super::codec::{column, flag, from_json, parsed, placeholders, signed, to_json, unsigned};
use super::{Attempt as _, Store, StoreError, Write};

/// One machine of a cluster, as its agent reported it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Node {
    pub name: String,
    pub arch: String,
    pub cpu_millis: u64,
    pub memory_bytes: u64,
    pub gpu_vendor: String,
    pub gpu_product: String,
    pub gpu_count: u32,
    pub gpu_memory_bytes: u64,
    pub gpu_driver: String,
}

/// One condition of a cluster, as its agent reported it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False`, `Unknown`.
    pub status: String,
    pub reason: String,
    pub message: String,
    /// Since when it has had this status, as far as its session has seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<DateTime<Utc>>,
}

/// A registered cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterRow {
    pub id: ClusterId,
    pub organization: OrganizationId,
    pub name: String,
    pub created_at: i64,
    pub created_by: String,
    pub archived_at: Option<i64>,
    pub draining: bool,
    pub last_seen_at: Option<i64>,
    /// When the loss of the agent was noticed; None while it is connected, and before the first connection.
    pub disconnected_at: Option<i64>,
    pub session_generation: u64,
    pub instance_id: Option<String>,
    pub executor: Option<String>,
    pub kube_system_uid: Option<String>,
    pub agent_version: Option<String>,
    pub chart_version: Option<String>,
    pub kubernetes_version: Option<String>,
    pub nodes: Vec<Node>,
    pub conditions: Vec<Condition>,
    pub unacknowledged_records: u64,
}

/// What an agent's versions are; empty texts are unknown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Versions {
    pub agent: String,
    pub chart: String,
    pub kubernetes: String,
}

/// What begins a session.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionStart {
    pub instance_id: String,
    pub executor: String,
    pub versions: Versions,
    pub nodes: Vec<Node>,
    pub now_ms: i64,
}

/// Runs of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClusterRuns {
    pub leased: u64,
    pub running: u64,
    /// Queued, and only this cluster may take them.
    pub waiting: u64,
}

impl ClusterRuns {
    /// Runs that the cluster holds.
    #[must_use]
    pub const fn placed(&self) -> u64 {
        self.leased + self.running
    }
}

const COLUMNS: &str = "id, organization_id, name, created_at, created_by, archived_at, draining, last_seen_at, disconnected_at, session_generation,
    instance_id, executor, kube_system_uid, agent_version, chart_version, kubernetes_version, inventory, conditions, unacknowledged_records";

fn read(row: &AnyRow) -> Result<ClusterRow, StoreError> {
    let id: String = column(row, 0)?;
    let organization: String = column(row, 1)?;
    let (inventory, conditions): (String, String) = (column(row, 16)?, column(row, 17)?);
    Ok(ClusterRow {
        organization: parsed("clusters", "organization_id", &id, &organization, |text| text.parse().ok())?,
        name: column(row, 2)?,
        created_at: column(row, 3)?,
        created_by: column(row, 4)?,
        archived_at: column(row, 5)?,
        draining: flag(row, 6)?,
        last_seen_at: column(row, 7)?,
        disconnected_at: column(row, 8)?,
        session_generation: unsigned(row, 9)?,
        instance_id: column(row, 10)?,
        executor: column(row, 11)?,
        kube_system_uid: column(row, 12)?,
        agent_version: column(row, 13)?,
        chart_version: column(row, 14)?,
        kubernetes_version: column(row, 15)?,
        nodes: from_json("clusters", "inventory", &id, &inventory)?,
        conditions: from_json("clusters", "conditions", &id, &conditions)?,
        unacknowledged_records: unsigned(row, 18)?,
        id: parsed("clusters", "id", &id, &id, |text| text.parse().ok())?,
    })
}

impl Store {
    /// One cluster, of any organization.
    pub async fn cluster(&self, id: ClusterId) -> Result<Option<ClusterRow>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(format!("SELECT {COLUMNS} FROM clusters WHERE id = $1")))
            .bind(id.to_string())
            .fetch_optional(self.read())
            .await
            .attempt("read a cluster")?;
        row.as_ref().map(read).transpose()
    }

    /// Clusters of an organization after `after`, oldest first; archived ones only when asked for.
    pub async fn clusters(
        &self,
        organization: OrganizationId,
        archived: bool,
        after: Option<ClusterId>,
        limit: u32,
    ) -> Result<Vec<ClusterRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM clusters WHERE organization_id = $1 AND (archived_at IS NULL OR $2 = 1) AND id > $3 ORDER BY id LIMIT $4"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(organization.to_string())
            .bind(i64::from(archived))
            .bind(after.map_or_else(String::new, |id| id.to_string()))
            .bind(i64::from(limit))
            .fetch_all(self.read())
            .await
            .attempt("list clusters")?;
        rows.iter().map(read).collect()
    }

    /// Every cluster that is not archived, and archived ones that still hold runs: what the scheduler looks at.
    pub async fn schedulable_clusters(&self) -> Result<Vec<ClusterRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM clusters c WHERE archived_at IS NULL
             OR EXISTS (SELECT 1 FROM runs r WHERE r.cluster_id = c.id AND r.state IN ('leased', 'running')) ORDER BY id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(self.read()).await.attempt("read all clusters")?;
        rows.iter().map(read).collect()
    }

    /// Clusters whose agent counts as connected: (id, last seen).
    pub async fn connected_clusters(&self) -> Result<Vec<(ClusterId, i64)>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, last_seen_at FROM clusters WHERE archived_at IS NULL AND last_seen_at IS NOT NULL AND disconnected_at IS NULL",
        )
        .fetch_all(self.read())
        .await
        .attempt("read connected clusters")?;
        rows.iter()
            .map(|row| {
                let id: String = column(row, 0)?;
                Ok((parsed("clusters", "id", &id, &id, |text| text.parse().ok())?, column(row, 1)?))
            })
            .collect()
    }

    /// Runs of each of these clusters, in the same order.
    pub async fn cluster_runs(&self, clusters: &[ClusterId]) -> Result<Vec<ClusterRuns>, StoreError> {
        let mut found = vec![ClusterRuns::default(); clusters.len()];
        if clusters.is_empty() {
            return Ok(found);
        }
        let list = placeholders(clusters.len(), 1);
        let placed = format!(
            "SELECT cluster_id, state, COUNT(*) FROM runs WHERE cluster_id IN ({list}) AND state IN ('leased', 'running') GROUP BY cluster_id, state"
        );
        let waiting = format!(
            "SELECT e.cluster_id, r.state, COUNT(*) FROM runs r JOIN evaluations e ON e.id = r.evaluation_id
             WHERE e.cluster_id IN ({list}) AND r.state = 'queued' GROUP BY e.cluster_id, r.state"
        );
        for sql in [placed, waiting] {
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
            for cluster in clusters {
                query = query.bind(cluster.to_string());
            }
            for row in &query.fetch_all(self.read()).await.attempt("count the runs of clusters")? {
                let (id, state): (String, String) = (column(row, 0)?, column(row, 1)?);
                let count = unsigned(row, 2)?;
                let place = clusters.iter().position(|cluster| cluster.to_string() == id);
                let Some(runs) = place.and_then(|place| found.get_mut(place)) else { continue };
                match state.as_str() {
                    "leased" => runs.leased = count,
                    "running" => runs.running = count,
                    _ => runs.waiting = count,
                }
            }
        }
        Ok(found)
    }

    /// How far this agent instance's records are durable.
    pub async fn durable_position(&self, cluster: ClusterId, instance_id: &str) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT durable FROM agent_positions WHERE cluster_id = $1 AND instance_id = $2")
            .bind(cluster.to_string())
            .bind(instance_id.to_owned())
            .fetch_optional(self.read())
            .await
            .attempt("read an agent's position")?;
        row.as_ref().map_or(Ok(0), |row| unsigned(row, 0))
    }
}

impl Write {
    pub async fn insert_cluster(&mut self, cluster: &ClusterRow) -> Result<(), StoreError> {
        let id = cluster.id.to_string();
        sqlx::query(
            "INSERT INTO clusters (id, organization_id, name, created_at, created_by, draining, session_generation, inventory, conditions,
             unacknowledged_records) VALUES ($1, $2, $3, $4, $5, 0, 0, $6, $7, 0)",
        )
        .bind(id.clone())
        .bind(cluster.organization.to_string())
        .bind(cluster.name.clone())
        .bind(cluster.created_at)
        .bind(cluster.created_by.clone())
        .bind(to_json("clusters", "inventory", &id, &cluster.nodes)?)
        .bind(to_json("clusters", "conditions", &id, &cluster.conditions)?)
        .execute(&mut *self.tx)
        .await
        .attempt("store a cluster")?;
        Ok(())
    }

    /// The cluster, under a lock that lasts until the transaction ends.
    pub async fn lock_cluster(&mut self, id: ClusterId) -> Result<Option<ClusterRow>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(format!("UPDATE clusters SET name = name WHERE id = $1 RETURNING {COLUMNS}")))
            .bind(id.to_string())
            .fetch_optional(&mut *self.tx)
            .await
            .attempt("lock a cluster")?;
        row.as_ref().map(read).transpose()
    }

    /// The cluster of this organization that runs in the Kubernetes cluster with this UID, and is not archived.
    pub async fn cluster_by_kubernetes(
        &mut self,
        organization: OrganizationId,
        kube_system_uid: &str,
    ) -> Result<Option<(ClusterId, String)>, StoreError> {
        let row = sqlx::query(
            "SELECT id, name FROM clusters WHERE organization_id = $1 AND kube_system_uid = $2 AND archived_at IS NULL ORDER BY id DESC LIMIT 1",
        )
        .bind(organization.to_string())
        .bind(kube_system_uid.to_owned())
        .fetch_optional(&mut *self.tx)
        .await
        .attempt("look a Kubernetes cluster up")?;
        let Some(row) = row else { return Ok(None) };
        let id: String = column(&row, 0)?;
        Ok(Some((parsed("clusters", "id", &id, &id, |text| text.parse().ok())?, column(&row, 1)?)))
    }

    pub async fn rename_cluster(&mut self, id: ClusterId, name: &str) -> Result<(), StoreError> {
        sqlx::query("UPDATE clusters SET name = $2 WHERE id = $1")
            .bind(id.to_string())
            .bind(name.to_owned())
            .execute(&mut *self.tx)
            .await
            .attempt("rename a cluster")?;
        Ok(())
    }

    pub async fn set_draining(&mut self, id: ClusterId, draining: bool) -> Result<(), StoreError> {
        sqlx::query("UPDATE clusters SET draining = $2 WHERE id = $1")
            .bind(id.to_string())
            .bind(i64::from(draining))
            .execute(&mut *self.tx)
            .await
            .attempt("store a cluster's drain state")?;
        Ok(())
    }

    /// Archives the cluster and gives its name free, so that a new one may have it.
    pub async fn archive_cluster(&mut self, id: ClusterId, archived_name: &str, now_ms: i64) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE clusters SET archived_at = $2, name = $3, disconnected_at = COALESCE(disconnected_at, $2) WHERE id = $1 AND archived_at IS NULL",
        )
        .bind(id.to_string())
        .bind(now_ms)
        .bind(archived_name.to_owned())
        .execute(&mut *self.tx)
        .await
        .attempt("archive a cluster")?;
        Ok(())
    }

    /// Notes where the agent of a join runs, and its versions.
    pub async fn note_join(&mut self, id: ClusterId, kube_system_uid: Option<&str>, versions: &Versions) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE clusters SET kube_system_uid = COALESCE($2, kube_system_uid), agent_version = COALESCE($3, agent_version),
             chart_version = COALESCE($4, chart_version), kubernetes_version = COALESCE($5, kubernetes_version) WHERE id = $1",
        )
        .bind(id.to_string())
        .bind(kube_system_uid.map(str::to_owned))
        .bind(known(&versions.agent))
        .bind(known(&versions.chart))
        .bind(known(&versions.kubernetes))
        .execute(&mut *self.tx)
        .await
        .attempt("store what joined")?;
        Ok(())
    }

    /// Begins a session: the next session generation.
    pub async fn begin_session(&mut self, id: ClusterId, start: &SessionStart) -> Result<u64, StoreError> {
        let text = id.to_string();
        let row = sqlx::query(
            "UPDATE clusters SET session_generation = session_generation + 1, instance_id = $2, executor = $3, inventory = $4, last_seen_at = $5,
             disconnected_at = NULL, agent_version = COALESCE($6, agent_version), chart_version = COALESCE($7, chart_version),
             kubernetes_version = COALESCE($8, kubernetes_version) WHERE id = $1 RETURNING session_generation",
        )
        .bind(text.clone())
        .bind(start.instance_id.clone())
        .bind(start.executor.clone())
        .bind(to_json("clusters", "inventory", &text, &start.nodes)?)
        .bind(start.now_ms)
        .bind(known(&start.versions.agent))
        .bind(known(&start.versions.chart))
        .bind(known(&start.versions.kubernetes))
        .fetch_one(&mut *self.tx)
        .await
        .attempt("begin an agent's session")?;
        unsigned(&row, 0)
    }

    /// A message arrived in this session; nothing when a newer session began.
    pub async fn note_seen(&mut self, id: ClusterId, session_generation: u64, now_ms: i64) -> Result<(), StoreError> {
        sqlx::query("UPDATE clusters SET last_seen_at = $3, disconnected_at = NULL WHERE id = $1 AND session_generation = $2 AND archived_at IS NULL")
            .bind(id.to_string())
            .bind(signed(session_generation))
            .bind(now_ms)
            .execute(&mut *self.tx)
            .await
            .attempt("note that an agent was heard")?;
        Ok(())
    }

    /// Stores a heartbeat of this session.
    pub async fn note_heartbeat(
        &mut self,
        id: ClusterId,
        session_generation: u64,
        nodes: Option<&[Node]>,
        conditions: &[Condition],
        unacknowledged_records: u64,
    ) -> Result<(), StoreError> {
        let text = id.to_string();
        sqlx::query(
            "UPDATE clusters SET inventory = COALESCE($3, inventory), conditions = $4, unacknowledged_records = $5
             WHERE id = $1 AND session_generation = $2",
        )
        .bind(text.clone())
        .bind(signed(session_generation))
        .bind(nodes.map(|nodes| to_json("clusters", "inventory", &text, &nodes)).transpose()?)
        .bind(to_json("clusters", "conditions", &text, &conditions)?)
        .bind(signed(unacknowledged_records))
        .execute(&mut *self.tx)
        .await
        .attempt("store a heartbeat")?;
        Ok(())
    }

    /// Notes the loss of the agent, unless it was heard after `last_seen_ms`. True when this noted it.
    pub async fn note_disconnected(&mut self, id: ClusterId, last_seen_ms: i64, now_ms: i64) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE clusters SET disconnected_at = $3, last_seen_at = CASE WHEN last_seen_at < $2 THEN $2 ELSE last_seen_at END
             WHERE id = $1 AND disconnected_at IS NULL AND last_seen_at <= $2",
        )
        .bind(id.to_string())
        .bind(last_seen_ms)
        .bind(now_ms)
        .execute(&mut *self.tx)
        .await
        .attempt("note the loss of an agent")?;
        Ok(done.rows_affected() > 0)
    }

    /// Moves every loss later by the control plane's own downtime, which must not count against agents.
    pub async fn excuse_downtime(&mut self, downtime_ms: i64) -> Result<(), StoreError> {
        sqlx::query("UPDATE clusters SET disconnected_at = disconnected_at + $1 WHERE disconnected_at IS NOT NULL AND archived_at IS NULL")
            .bind(downtime_ms)
            .execute(&mut *self.tx)
            .await
            .attempt("correct for its own downtime")?;
        Ok(())
    }

    pub async fn set_meta(&mut self, key: &str, value: &str) -> Result<(), StoreError> {
        sqlx::query("INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value")
            .bind(key.to_owned())
            .bind(value.to_owned())
            .execute(&mut *self.tx)
            .await
            .attempt("store its metadata")?;
        Ok(())
    }
}

fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.chars().take(100).collect())
}

//! `RLMeshCache`: what the artifact cache holds. The agent writes its status; there is one object, `artifacts`.
#![expect(clippy::duplicated_attributes, reason = "several columns have the same type")]

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Condition, Time};

/// RLMeshCache shows the state of the cluster's artifact cache. Nothing is configured here: the chart's values do that.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "rlmesh.dev",
    version = "v1beta1",
    kind = "RLMeshCache",
    plural = "rlmeshcaches",
    singular = "rlmeshcache",
    shortname = "rlcache",
    category = "rlmesh",
    status = "CacheStatus",
    derive = "PartialEq",
    doc = "RLMeshCache shows the state of the cluster's artifact cache. Nothing is configured here: the chart's values do that.",
    printcolumn(name = "Healthy", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Used", type_ = "string", json_path = ".status.used"),
    printcolumn(name = "Capacity", type_ = "string", json_path = ".status.capacity"),
    printcolumn(name = "Activity", type_ = "string", json_path = ".status.activity"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct RLMeshCacheSpec {}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CacheStatus {
    pub observed_generation: i64,
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// used and capacity are for people (`41.2Gi`); the numbers beside them are for programs.
    #[schemars(length(max = 32))]
    pub used: String,
    #[schemars(length(max = 32))]
    pub capacity: String,
    pub used_bytes: u64,
    pub capacity_bytes: u64,
    pub pinned_bytes: u64,
    pub reclaimable_bytes: u64,
    /// activity is what it does now: `idle`, `fetching 2 (63%)`.
    #[schemars(length(max = 256))]
    pub activity: String,
    /// accessMode of the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub access_mode: Option<String>,
    /// node that the volume is bound to, when that is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    /// entryCount is of all entries; `entries` are the twenty that matter.
    pub entry_count: u64,
    #[schemars(length(max = 20), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["key"]))]
    pub entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// key is the hash that names the entry's folder.
    #[schemars(length(min = 1, max = 128))]
    pub key: String,
    /// uri it was fetched from, without credentials.
    #[schemars(length(max = 2048))]
    pub uri: String,
    pub state: EntryState,
    pub size_bytes: u64,
    pub downloaded_bytes: u64,
    #[serde(default)]
    pub attempts: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub last_error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_used: Option<Time>,
    /// pinnedBy is the number of runs that use it now.
    #[serde(default)]
    pub pinned_by: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EntryState {
    Waiting,
    Fetching,
    Verifying,
    Ready,
    Failed,
}

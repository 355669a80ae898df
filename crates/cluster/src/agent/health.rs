//! How the agent is: readiness, the conditions it tells the control plane, its metrics. Shows state, changes nothing.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use rlm_api::cluster::v1;
use rlm_process::Admin;

use crate::spool::Stats;
use crate::walls::Walls;

/// Conditions, by type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionType {
    Connected,
    CredentialValid,
    Draining,
    NetworkPolicyEnforced,
    SpoolHasRoom,
}

impl ConditionType {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Connected => "Connected",
            Self::CredentialValid => "CredentialValid",
            Self::Draining => "Draining",
            Self::NetworkPolicyEnforced => "NetworkPolicyEnforced",
            Self::SpoolHasRoom => "SpoolHasRoom",
        }
    }
}

#[derive(Clone)]
struct Held {
    /// None: not known.
    status: Option<bool>,
    reason: &'static str,
    message: String,
}

/// Shared by the parts of the agent. Cheap to clone.
#[derive(Clone)]
pub struct Health {
    admin: Admin,
    conditions: Arc<Mutex<BTreeMap<ConditionType, Held>>>,
    connected: Gauge<u64, AtomicU64>,
    runs: Gauge<u64, AtomicU64>,
    unacknowledged: Gauge<u64, AtomicU64>,
    bytes: Gauge<u64, AtomicU64>,
    waiting: Gauge<u64, AtomicU64>,
    telemetry_dropped: Gauge<u64, AtomicU64>,
    sessions: Counter,
}

impl Health {
    #[must_use]
    pub fn new(admin: Admin) -> Self {
        let health = Self {
            admin,
            conditions: Arc::default(),
            connected: Gauge::default(),
            runs: Gauge::default(),
            unacknowledged: Gauge::default(),
            bytes: Gauge::default(),
            waiting: Gauge::default(),
            telemetry_dropped: Gauge::default(),
            sessions: Counter::default(),
        };
        health.admin.set_not_ready("not joined yet");
        health.admin.register(|registry| {
            registry.register("rlmesh_agent_connected", "1 while a session with the control plane lives", health.connected.clone());
            registry.register("rlmesh_agent_runs", "Runs that are going on", health.runs.clone());
            registry.register(
                "rlmesh_agent_spool_unacknowledged_records",
                "Records that the control plane does not have yet",
                health.unacknowledged.clone(),
            );
            registry.register("rlmesh_agent_spool_bytes", "Bytes that the spool uses", health.bytes.clone());
            registry.register("rlmesh_agent_spool_waiting_appends", "Appends that wait for room", health.waiting.clone());
            registry.register(
                "rlmesh_agent_spool_telemetry_dropped_records",
                "Telemetry records dropped for lack of room",
                health.telemetry_dropped.clone(),
            );
            registry.register("rlmesh_agent_sessions", "Sessions that were opened", health.sessions.clone());
        });
        health
    }

    fn set(&self, kind: ConditionType, status: bool, reason: &'static str, message: &str) {
        self.hold(kind, Some(status), reason, message);
    }

    fn hold(&self, kind: ConditionType, status: Option<bool>, reason: &'static str, message: &str) {
        let held = Held { status, reason, message: message.to_owned() };
        self.conditions.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, held);
    }

    pub fn connected(&self) {
        self.connected.set(1);
        self.sessions.inc();
        self.admin.set_ready();
        self.set(ConditionType::Connected, true, "SessionOpen", "");
        self.set(ConditionType::CredentialValid, true, "Accepted", "");
    }

    pub fn disconnected(&self, why: &str) {
        self.connected.set(0);
        self.admin.set_not_ready(format!("not connected: {why}"));
        self.set(ConditionType::Connected, false, "Disconnected", why);
    }

    /// The control plane will not have this agent as it is.
    pub fn refused(&self, why: &str) {
        self.connected.set(0);
        self.admin.set_not_ready(why.to_owned());
        self.set(ConditionType::Connected, false, "Refused", why);
        self.set(ConditionType::CredentialValid, false, "Refused", why);
    }

    /// The session goes on with the old credential.
    pub fn new_credential_refused(&self, why: &str) {
        self.set(ConditionType::CredentialValid, false, "NewCredentialRefused", why);
    }

    /// Joining was refused. A session that lives goes on.
    pub fn join_refused(&self, why: &str) {
        if self.connected.get() == 0 {
            self.admin.set_not_ready(format!("the join token was refused: {why}"));
        }
        self.set(ConditionType::CredentialValid, false, "JoinTokenRefused", why);
    }

    pub fn draining(&self, draining: bool, drained: bool) {
        let reason = if drained { "Drained" } else { "RunsLeft" };
        self.set(ConditionType::Draining, draining, if draining { reason } else { "NotDraining" }, "");
    }

    pub fn measured(&self, stats: Stats, runs: u32) {
        self.runs.set(u64::from(runs));
        self.unacknowledged.set(stats.unacknowledged);
        self.bytes.set(stats.bytes);
        self.waiting.set(stats.waiting);
        self.telemetry_dropped.set(stats.telemetry_dropped);
        if stats.waiting == 0 {
            self.set(ConditionType::SpoolHasRoom, true, "HasRoom", "");
        } else {
            let message = "the spool or its disk is full; results wait until the control plane has taken some or there is room";
            self.set(ConditionType::SpoolHasRoom, false, "Full", message);
        }
    }

    /// Whether the cluster's network keeps evaluations apart.
    pub fn walls(&self, walls: &Walls) {
        let (status, reason, message) = match walls {
            Walls::Enforced => (Some(true), "Enforced", ""),
            Walls::NotEnforced(why) => (Some(false), "NotEnforced", why.as_str()),
            Walls::Unknown(why) => (None, "Unknown", why.as_str()),
        };
        self.hold(ConditionType::NetworkPolicyEnforced, status, reason, message);
    }

    /// As heartbeats carry them.
    #[must_use]
    pub fn conditions(&self) -> Vec<v1::Condition> {
        let conditions = self.conditions.lock().unwrap_or_else(PoisonError::into_inner);
        conditions
            .iter()
            .map(|(kind, held)| v1::Condition {
                r#type: kind.as_str().to_owned(),
                status: match held.status {
                    Some(true) => "True",
                    Some(false) => "False",
                    None => "Unknown",
                }
                .to_owned(),
                reason: held.reason.to_owned(),
                message: held.message.clone(),
            })
            .collect()
    }
}

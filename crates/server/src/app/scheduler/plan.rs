//! Which queued run goes to which cluster, and why the others wait. Pure.
//!
//! Order: priority, then a fair share between submitters (who holds fewest runs comes first), then age. A run that fits
//! nowhere now never holds up the next one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use rlm_core::evaluation::{EnvironmentDefinition, ModelDefinition, RunSpec};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::gpu;
use rlm_core::ids::{ClusterId, OrganizationId, RunId};

/// Runs that one cluster may hold, running or waiting there: enough for it to go on while it is cut off, few enough that
/// another cluster gets some.
pub const MOST_PER_CLUSTER: u64 = 64;

/// How a cluster starts things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Executor {
    /// Child processes, and servers that run already.
    Process,
    /// Images.
    Kubernetes,
}

impl Executor {
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "process" => Some(Self::Process),
            "kubernetes" => Some(Self::Kubernetes),
            _ => None,
        }
    }
}

/// What one definition needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Part {
    /// `model 'push-left'`
    pub name: String,
    pub image: bool,
    /// An entrypoint or an address.
    pub process: bool,
    pub gpus: u32,
    pub gpu_product: Option<String>,
}

/// What a run needs, and how long it waits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Needs {
    pub parts: Vec<Part>,
    /// The generation it was made with: one above that was leased before.
    pub first_generation: u64,
    pub queue_timeout_ms: i64,
    pub reassign_after_ms: i64,
}

fn limit(milliseconds: u64) -> i64 {
    i64::try_from(milliseconds).unwrap_or(i64::MAX)
}

impl Needs {
    #[must_use]
    pub fn of(spec: &RunSpec) -> Self {
        let ModelDefinition { id, image, entrypoint, address, resources, .. } = &spec.model;
        let model = Part {
            name: format!("model '{id}'"),
            image: image.is_some(),
            process: entrypoint.is_some() || address.is_some(),
            gpus: resources.gpu,
            gpu_product: resources.gpu_product.clone(),
        };
        let EnvironmentDefinition { id, image, entrypoint, address, resources, share_model_gpu, .. } = &spec.environment;
        let environment = Part {
            name: format!("environment '{id}'"),
            image: image.is_some(),
            process: entrypoint.is_some() || address.is_some(),
            gpus: if *share_model_gpu { 0 } else { resources.gpu },
            gpu_product: resources.gpu_product.clone(),
        };
        Self {
            parts: vec![model, environment],
            first_generation: spec.generation,
            queue_timeout_ms: limit(spec.limits.queue_timeout_ms),
            reassign_after_ms: limit(spec.limits.reassign_after_ms),
        }
    }
}

/// A queued run.
#[derive(Debug, Clone)]
pub struct Waiter {
    pub id: RunId,
    pub organization: OrganizationId,
    pub pinned: Option<ClusterId>,
    pub priority: i64,
    pub submitter: String,
    pub created_at: i64,
    /// Since when it waits for a cluster.
    pub queued_at: i64,
    pub needs: Arc<Needs>,
}

/// GPUs of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpus {
    pub product: String,
    pub count: u32,
}

/// A cluster.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub id: ClusterId,
    pub organization: OrganizationId,
    pub name: String,
    pub archived: bool,
    pub connected: bool,
    pub draining: bool,
    /// None before its first connection.
    pub executor: Option<Executor>,
    /// Runs that it holds.
    pub placed: u64,
    /// Assignments that can be sent to it now.
    pub room: u64,
    pub gpus: Vec<Gpus>,
}

/// What to do with a queued run.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Place(ClusterId),
    /// A stable cause of `rlm_core::run::Waiting`, and the sentence for users.
    Wait {
        cause: &'static str,
        message: String,
    },
    Fail(Failure),
}

/// Why a cluster does not take a run now, the nearest to taking it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Obstacle {
    /// It never connected.
    Pending,
    Kind,
    Disconnected,
    Draining,
    Gpu,
    Capacity,
}

fn obstacle(needs: &Needs, cluster: &Candidate) -> Option<Obstacle> {
    let Some(executor) = cluster.executor else { return Some(Obstacle::Pending) };
    if needs.parts.iter().any(|part| !startable(part, executor)) {
        Some(Obstacle::Kind)
    } else if !cluster.connected {
        Some(Obstacle::Disconnected)
    } else if cluster.draining {
        Some(Obstacle::Draining)
    } else if needs.parts.iter().any(|part| !has_gpus(part, &cluster.gpus)) {
        Some(Obstacle::Gpu)
    } else if cluster.placed >= MOST_PER_CLUSTER || cluster.room == 0 {
        Some(Obstacle::Capacity)
    } else {
        None
    }
}

fn startable(part: &Part, executor: Executor) -> bool {
    match executor {
        Executor::Process => part.process,
        Executor::Kubernetes => part.image,
    }
}

/// One machine must have what one part needs; that they are free is the cluster's own queue's business.
fn has_gpus(part: &Part, gpus: &[Gpus]) -> bool {
    let product = |product: &str| part.gpu_product.as_ref().is_none_or(|wanted| gpu::matches(wanted, product));
    part.gpus == 0 || gpus.iter().any(|node| node.count >= part.gpus && product(&node.product))
}

fn wait(obstacle: Obstacle, needs: &Needs, cluster: &Candidate) -> Verdict {
    let name = &cluster.name;
    let (cause, message) = match obstacle {
        Obstacle::Pending => ("noCluster", format!("cluster {name} has not connected yet")),
        Obstacle::Kind => ("noCluster", format!("cluster {name} can't run it; waiting for another one to connect")),
        Obstacle::Disconnected => ("clusterDisconnected", format!("cluster {name} is disconnected")),
        Obstacle::Draining => ("clusterDraining", format!("cluster {name} is draining and takes no new runs; resume it, or use another")),
        Obstacle::Gpu => ("gpu", gpu_message(needs, cluster)),
        Obstacle::Capacity => ("capacity", format!("cluster {name} holds as many runs as it may ({MOST_PER_CLUSTER})")),
    };
    Verdict::Wait { cause, message }
}

fn gpu_message(needs: &Needs, cluster: &Candidate) -> String {
    let wanted: Vec<String> = needs
        .parts
        .iter()
        .filter(|part| part.gpus > 0)
        .map(|part| {
            format!(
                "{} needs {} GPU{}{}",
                part.name,
                part.gpus,
                if part.gpus == 1 { "" } else { "s" },
                part.gpu_product.as_ref().map_or_else(String::new, |product| format!(" ({product})"))
            )
        })
        .collect();
    let there_are = gpu::there_are(cluster.gpus.iter().map(|machine| (machine.product.as_str(), machine.count)));
    format!("no machine of cluster {} has the GPUs: {}; {there_are}", cluster.name, wanted.join(", "))
}

/// What this kind of cluster would need, in words.
fn kind_message(needs: &Needs, cluster: &Candidate) -> String {
    let (executor, kind) = match cluster.executor {
        Some(Executor::Kubernetes) => (Executor::Kubernetes, "runs images, so it needs `image` for"),
        Some(Executor::Process) | None => (Executor::Process, "is a local cell, so it needs `entrypoint` or `address` for"),
    };
    let missing: Vec<&str> = needs.parts.iter().filter(|part| !startable(part, executor)).map(|part| part.name.as_str()).collect();
    format!("cluster {} {kind} {}", cluster.name, missing.join(" and "))
}

/// The verdict on one run: the least busy cluster that fits, else the reason nearest to fitting.
fn judge(waiter: &Waiter, clusters: &[Candidate], now_ms: i64) -> Verdict {
    let eligible = || {
        clusters.iter().filter(|cluster| {
            !cluster.archived && cluster.organization == waiter.organization && waiter.pinned.is_none_or(|pinned| cluster.id == pinned)
        })
    };
    let mut best: Option<&Candidate> = None;
    let mut nearest: Option<(Obstacle, &Candidate)> = None;
    let mut only_kinds = true;
    for cluster in eligible() {
        match obstacle(&waiter.needs, cluster) {
            None => {
                only_kinds = false;
                if best.is_none_or(|other| (cluster.placed, cluster.id) < (other.placed, other.id)) {
                    best = Some(cluster);
                }
            }
            Some(reason) => {
                only_kinds &= reason == Obstacle::Kind;
                if nearest.is_none_or(|(other, _)| reason > other) {
                    nearest = Some((reason, cluster));
                }
            }
        }
    }
    if let Some(cluster) = best {
        return Verdict::Place(cluster.id);
    }
    let waiting = match nearest {
        Some((Obstacle::Kind, cluster)) if only_kinds => {
            return Verdict::Fail(Failure::new(FailureCode::NotRunnableHere, kind_message(&waiter.needs, cluster)));
        }
        Some((reason, cluster)) => wait(reason, &waiter.needs, cluster),
        None if waiter.pinned.is_some() => {
            return Verdict::Fail(Failure::new(
                FailureCode::NotRunnableHere,
                "the cluster that this evaluation is bound to was archived; clone the evaluation to another cluster",
            ));
        }
        None => Verdict::Wait { cause: "noCluster", message: "no cluster is registered; connect one".to_owned() },
    };
    if now_ms - waiter.queued_at < waiter.needs.queue_timeout_ms {
        return waiting;
    }
    let reason = match &waiting {
        Verdict::Wait { message, .. } => message.as_str(),
        Verdict::Place(_) | Verdict::Fail(_) => "",
    };
    Verdict::Fail(Failure::new(
        FailureCode::QueueTimeout,
        format!(
            "no cluster took it within {} s (limits.queueTimeout): {reason}; then retry the errored rows",
            waiter.needs.queue_timeout_ms / 1000
        ),
    ))
}

/// Who a run counts for.
pub type Share = (OrganizationId, String);

/// Decides on every queued run; `held` is how many runs each submitter has at clusters.
#[must_use]
pub fn plan(waiters: &[Waiter], mut clusters: Vec<Candidate>, mut held: HashMap<Share, u64>, now_ms: i64) -> Vec<(RunId, Verdict)> {
    let mut by_priority: BTreeMap<std::cmp::Reverse<i64>, BTreeMap<Share, VecDeque<&Waiter>>> = BTreeMap::new();
    for waiter in waiters {
        let share = (waiter.organization, waiter.submitter.clone());
        by_priority.entry(std::cmp::Reverse(waiter.priority)).or_default().entry(share).or_default().push_back(waiter);
    }
    let mut verdicts = Vec::with_capacity(waiters.len());
    for (_, mut shares) in by_priority {
        for queue in shares.values_mut() {
            queue.make_contiguous().sort_by_key(|waiter| (waiter.created_at, waiter.id));
        }
        loop {
            let next = shares
                .iter()
                .filter_map(|(share, queue)| {
                    queue.front().map(|first| (held.get(share).copied().unwrap_or(0), first.created_at, first.id, share))
                })
                .min_by_key(|(held, created_at, id, _)| (*held, *created_at, *id))
                .map(|(_, _, _, share)| share.clone());
            let Some(share) = next else { break };
            let Some(waiter) = shares.get_mut(&share).and_then(VecDeque::pop_front) else { break };
            let verdict = judge(waiter, &clusters, now_ms);
            if let Verdict::Place(cluster) = verdict {
                *held.entry(share).or_default() += 1;
                if let Some(cluster) = clusters.iter_mut().find(|candidate| candidate.id == cluster) {
                    cluster.placed += 1;
                    cluster.room -= 1;
                }
            }
            verdicts.push((waiter.id, verdict));
        }
    }
    verdicts
}

/// Where a run stands that a cluster holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    pub pinned: bool,
    pub cancel_requested: bool,
    pub archived: bool,
    pub disconnected_at: Option<i64>,
    pub reassign_after_ms: i64,
}

/// What to do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaim {
    Keep,
    /// Tell the cluster to stop it.
    TellCancel,
    Cancel,
    GiveUp,
    /// Its cluster is gone for good, and no other may take it.
    Fail,
}

/// Decides on a run that a cluster holds.
#[must_use]
pub fn reclaim(lease: Lease, now_ms: i64) -> Reclaim {
    let away_too_long = lease.disconnected_at.is_some_and(|at| now_ms - at >= lease.reassign_after_ms);
    match (lease.cancel_requested, lease.archived || away_too_long) {
        (true, true) => Reclaim::Cancel,
        (true, false) => Reclaim::TellCancel,
        (false, true) if !lease.pinned => Reclaim::GiveUp,
        (false, true) if lease.archived => Reclaim::Fail,
        (false, true | false) => Reclaim::Keep,
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

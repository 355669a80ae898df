//! Runs as pods: the cluster's executor. Asks for them through `RLMeshRun`s and watches what becomes of them; the controller
//! alone makes pods.

mod caps;
mod explain;
mod gpus;
mod logs;
mod node;
mod place;
mod resource;
mod reviewer;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt};
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::ids::RunId;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::caps::{No, Use};
use self::gpus::{Chosen, Offer};
use super::run::report::status;
use super::run::{Assignment, Prepared, Shared};
use super::runs::{Admission, Cell, Runs, Wait};
use super::{Executor, no_component, no_logs, now_ms};
use crate::controller::run::pod::{LABEL_COMPONENT, LABEL_RUN};
use crate::crd::run::{AgentEndpoint, Component, ComponentPhase, RLMeshRun, Reason};
use crate::discovery::intake::Reports;
use crate::runners::Runners;
use crate::spool::{NewRecord, RunKey, Spool, SpoolError};
use crate::walls::{self, Walls};

pub use self::caps::Caps;
pub use self::reviewer::TokenReviewer;

const DEADLINE: Duration = Duration::from_secs(10);
/// How often nodes are looked at, and objects that nobody holds.
const LOOK: Duration = Duration::from_secs(30);
const WALLS_STAND: Duration = Duration::from_secs(60);
const WALLS_MISSING: Duration = Duration::from_secs(5);
/// Most of a log reply.
const LOG_REPLY: usize = 256 << 10;

/// How the executor is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Namespace of runs.
    pub namespace: String,
    /// Where runners report to.
    pub endpoint: AgentEndpoint,
    pub caps: Caps,
    /// Whether runs wait until the network is known to enforce policies.
    pub require_enforcement: bool,
    pub version: &'static str,
}

/// What the API server said, or why it could not be asked, in one sentence.
fn said(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        other => other.to_string(),
    }
}

/// The nodes, as they were looked at last.
#[derive(Default)]
struct Known {
    inventory: v1::Inventory,
    offers: Vec<Offer>,
}

/// What a run holds while it goes on.
#[derive(Clone)]
pub(crate) struct Grant {
    used: Use,
    chosen: Chosen,
}

/// What the runs of a cluster share.
pub(crate) struct Cluster {
    shared: Shared,
    runs: Api<RLMeshRun>,
    pods: Api<Pod>,
    nodes: Api<Node>,
    endpoint: AgentEndpoint,
    /// Components of each run that somebody watches, by the object's name.
    observed: Mutex<HashMap<String, watch::Sender<Vec<Component>>>>,
    known: Mutex<Known>,
    reports: Reports,
    /// What was chosen for runs that an earlier agent began.
    begun: Mutex<HashMap<String, Chosen>>,
    caps: Caps,
    used: Mutex<Use>,
    require_enforcement: bool,
    walls: watch::Sender<Walls>,
    version: &'static str,
    /// The agent ends; the pods go on.
    closing: CancellationToken,
}

impl Cluster {
    /// The run's object, if there is one; asked for until the API server answers.
    async fn found(&self, key: RunKey, name: &str) -> Option<RLMeshRun> {
        let mut told = false;
        loop {
            let problem = match tokio::time::timeout(DEADLINE, self.runs.get_opt(name)).await {
                Ok(Ok(found)) => return found,
                Ok(Err(error)) => said(&error),
                Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
            };
            tracing::warn!(run = name, problem, "whether the run has an object is not known; asking again");
            if !std::mem::replace(&mut told, true) {
                let message = format!("the Kubernetes API server can't be asked for pods: {problem}; it is tried again");
                let status = status(Phase::Waiting, "apiUnavailable", &message, now_ms(), None, None);
                if let Err(error) = self.shared.spool.append(vec![NewRecord::status(key, status)]).await {
                    tracing::warn!(run = name, %error, "what the run waits for could not be stored");
                }
            }
            tokio::select! {
                () = self.closing.cancelled() => return None,
                () = tokio::time::sleep(Duration::from_secs(2)) => {}
            }
        }
    }

    fn with_used<T>(&self, act: impl FnOnce(&mut Use) -> T) -> T {
        act(&mut self.used.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Why no run may start yet.
    fn wall_missing(&self) -> Option<String> {
        if !self.require_enforcement {
            return None;
        }
        let why = match &*self.walls.borrow() {
            Walls::Enforced => return None,
            Walls::NotEnforced(why) => format!("this cluster's network does not enforce NetworkPolicies: {why}"),
            Walls::Unknown(why) => format!("whether this cluster's network enforces NetworkPolicies is not known: {why}"),
        };
        Some(format!("{why} (networkPolicy.requireEnforcement: false runs evaluations all the same)"))
    }

    /// Asks the probe whether the walls stand.
    async fn look_at_walls(&self) -> Walls {
        let probes = ListParams::default().labels(&format!("{LABEL_COMPONENT}={}", walls::COMPONENT));
        let address = match tokio::time::timeout(DEADLINE, self.pods.list(&probes)).await {
            Ok(Ok(pods)) => pods.items.iter().filter(|pod| runs(pod)).find_map(|pod| pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()),
            Ok(Err(error)) => return Walls::Unknown(format!("the wall probe's pod can't be looked for: {error}")),
            Err(_) => return Walls::Unknown("the wall probe's pod can't be looked for in time".to_owned()),
        };
        match address {
            Some(address) => walls::check(address).await,
            None => Walls::Unknown("the wall probe's pod (rlmesh-wall-probe) does not run".to_owned()),
        }
    }

    fn with_observed<T>(&self, act: impl FnOnce(&mut HashMap<String, watch::Sender<Vec<Component>>>) -> T) -> T {
        act(&mut self.observed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn observe(&self, name: &str) -> watch::Receiver<Vec<Component>> {
        self.with_observed(|observed| observed.entry(name.to_owned()).or_insert_with(|| watch::Sender::new(Vec::new())).subscribe())
    }

    fn forget(&self, name: &str) {
        self.with_observed(|observed| observed.remove(name));
    }

    /// The watch shows the run.
    fn saw(&self, run: &RLMeshRun) {
        self.show(run, |_| true);
    }

    /// The run was found after [`Cluster::observe`]: the watch may have shown it before, and nothing since.
    fn found_again(&self, run: &RLMeshRun) {
        self.show(run, <[Component]>::is_empty);
    }

    /// The object is gone, and we did not delete it: its pods go too. Their next attempts make it anew.
    fn lost(&self, name: &str) {
        let gone = |one: &Component| Component {
            address: None,
            phase: ComponentPhase::Failed,
            reason: Some(Reason::PodDeleted),
            message: Some(format!("the RLMeshRun {name} was deleted, and its pods with it")),
            ..one.clone()
        };
        self.with_observed(|observed| {
            if let Some(sender) = observed.get(name) {
                tracing::warn!(run = name, "the run's object was deleted by somebody else; its pods start over");
                sender.send_modify(|known| *known = known.iter().filter(|one| !one.phase.over()).map(gone).collect());
            }
        });
    }

    /// These are all objects that there are.
    fn lost_all_but(&self, listed: &BTreeSet<String>) {
        let known = |(name, sender): (&String, &watch::Sender<Vec<Component>>)| (!sender.borrow().is_empty()).then(|| name.clone());
        let missing: Vec<String> = self.with_observed(|observed| observed.iter().filter_map(known).collect());
        missing.iter().filter(|name| !listed.contains(*name)).for_each(|name| self.lost(name));
    }

    fn show(&self, run: &RLMeshRun, wanted: impl Fn(&[Component]) -> bool) {
        let components = run.status.as_ref().map(|status| status.components.clone()).unwrap_or_default();
        self.with_observed(|observed| {
            if let Some(sender) = observed.get(&run.name_any()) {
                sender.send_if_modified(|known| {
                    let changed = wanted(known) && *known != components;
                    if changed {
                        *known = components;
                    }
                    changed
                });
            }
        });
    }

    /// Follows the objects until the agent ends.
    async fn watch(self: Arc<Self>) {
        let mut events = std::pin::pin!(watcher(self.runs.clone(), watcher::Config::default()).default_backoff());
        let mut listed = BTreeSet::new();
        loop {
            tokio::select! {
                () = self.closing.cancelled() => return,
                event = events.next() => match event {
                    Some(Ok(Event::Init)) => listed.clear(),
                    Some(Ok(Event::InitApply(run))) => {
                        self.saw(&run);
                        listed.insert(run.name_any());
                    }
                    Some(Ok(Event::InitDone)) => self.lost_all_but(&listed),
                    Some(Ok(Event::Apply(run))) => self.saw(&run),
                    Some(Ok(Event::Delete(run))) => self.lost(&run.name_any()),
                    Some(Err(error)) => tracing::warn!(%error, "the watch of runs was interrupted and starts again"),
                    None => return,
                },
            }
        }
    }

    fn with_known<T>(&self, act: impl FnOnce(&mut Known) -> T) -> T {
        act(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn with_begun<T>(&self, act: impl FnOnce(&mut HashMap<String, Chosen>) -> T) -> T {
        act(&mut self.begun.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Which GPUs the run gets: those that it has, if its pods are there already.
    fn choose(&self, spec: &RunSpec) -> Result<Chosen, Wait> {
        if let Some(chosen) = self.with_begun(|begun| begun.get(&resource::name(spec.run_id)).cloned()) {
            return Ok(chosen);
        }
        // Others have GPUs to ask for, or need none.
        let wait = |message| Wait { cause: "gpu", message, holds_others: false };
        self.with_known(|known| gpus::choose(&spec.model, &spec.environment, &known.offers)).map_err(wait)
    }

    /// Learns what was chosen for runs that go on.
    async fn look_at_runs(&self) {
        match tokio::time::timeout(DEADLINE, self.runs.list(&ListParams::default())).await {
            Ok(Ok(runs)) => self.with_begun(|begun| begun.extend(runs.iter().map(|run| (run.name_any(), Chosen::of(&run.spec))))),
            Ok(Err(error)) => tracing::warn!(%error, "the runs that go on can't be listed"),
            Err(_) => tracing::warn!("the runs that go on can't be listed in time"),
        }
    }

    async fn look_at_nodes(&self) {
        match tokio::time::timeout(DEADLINE, self.nodes.list(&ListParams::default())).await {
            Ok(Ok(nodes)) => {
                let reports = self.reports.of(&nodes.iter().map(ResourceExt::name_any).collect());
                let mut known = Known::default();
                for node in &nodes {
                    let offers = gpus::offers(node, reports.get(&node.name_any()).map_or(&[], Vec::as_slice));
                    known.inventory.nodes.push(node::told(node, &offers));
                    known.offers.extend(offers);
                }
                self.with_known(|old| *old = known);
            }
            Ok(Err(error)) => tracing::warn!(%error, "the cluster's nodes can't be listed"),
            Err(_) => tracing::warn!("the cluster's nodes can't be listed in time"),
        }
    }
}

impl Cell for Cluster {
    type Place = place::PodRun;
    type Grant = Grant;

    fn admit(&self, spec: &RunSpec, active: usize) -> Admission<Grant> {
        if let Some(message) = self.wall_missing() {
            return Admission::Wait(Wait { cause: "networkPolicy", message, holds_others: true });
        }
        let (used, chosen) = (Use::most(spec), self.choose(spec));
        self.with_used(|all| match (self.caps.admit(used, *all, active), chosen) {
            (Err(No::Never(failure)), _) => Admission::Never(failure),
            // First, since it holds nobody up.
            (_, Err(wait)) | (Err(No::Now(wait)), Ok(_)) => Admission::Wait(wait),
            (Ok(()), Ok(chosen)) => {
                all.add(used);
                Admission::Start(Grant { used, chosen })
            }
        })
    }

    fn release(&self, held: Grant) {
        self.with_used(|used| used.subtract(held.used));
    }

    fn prepare(self: Arc<Self>, assignment: Assignment, held: Grant) -> BoxFuture<'static, Result<Prepared<place::PodRun>, Failure>> {
        // Looked at again should the run come back.
        self.with_begun(|begun| begun.remove(&resource::name(assignment.key.run_id)));
        place::prepare(self, assignment, held.chosen).boxed()
    }
}

/// The cluster's executor. Cheap to clone.
#[derive(Clone)]
pub struct KubernetesExecutor {
    cluster: Arc<Cluster>,
    runs: Runs<Cluster>,
}

impl KubernetesExecutor {
    pub fn new(client: &Client, options: Options, spool: Spool, runners: Runners, reports: Reports) -> Self {
        let cluster = Arc::new(Cluster {
            shared: Shared { spool, runners, tasks: TaskTracker::new() },
            runs: Api::namespaced(client.clone(), &options.namespace),
            pods: Api::namespaced(client.clone(), &options.namespace),
            nodes: Api::all(client.clone()),
            endpoint: options.endpoint,
            observed: Mutex::default(),
            known: Mutex::default(),
            reports,
            begun: Mutex::default(),
            caps: options.caps,
            used: Mutex::default(),
            require_enforcement: options.require_enforcement,
            walls: watch::Sender::new(Walls::Unknown("it was not looked at yet".to_owned())),
            version: options.version,
            closing: CancellationToken::new(),
        });
        let runs = Runs::new(Arc::clone(&cluster), cluster.shared.clone(), options.version);
        Self { cluster, runs }
    }

    /// Begins to watch, and goes on with the runs that the spool holds.
    pub async fn resume(&self) -> anyhow::Result<()> {
        self.cluster.look_at_nodes().await;
        self.cluster.look_at_runs().await;
        self.cluster.shared.tasks.spawn(Arc::clone(&self.cluster).watch());
        self.runs.resume().await?;
        let executor = self.clone();
        self.cluster.shared.tasks.spawn(async move { executor.sweep().await });
        let executor = self.clone();
        self.cluster.shared.tasks.spawn(async move { executor.keep_looking_at_walls().await });
        Ok(())
    }

    /// Whether the network's walls stand, as it is known.
    #[must_use]
    pub fn walls(&self) -> watch::Receiver<Walls> {
        self.cluster.walls.subscribe()
    }

    /// Often until they are known to stand, seldom afterwards.
    async fn keep_looking_at_walls(&self) {
        loop {
            let seen = self.cluster.look_at_walls().await;
            let pause = if seen == Walls::Enforced { WALLS_STAND } else { WALLS_MISSING };
            if self.cluster.walls.send_if_modified(|known| std::mem::replace(known, seen.clone()) != seen) {
                match &seen {
                    Walls::Enforced => tracing::info!("the network enforces NetworkPolicies"),
                    Walls::NotEnforced(why) => tracing::error!("the network does not enforce NetworkPolicies: {why}"),
                    Walls::Unknown(why) => tracing::warn!("whether the network enforces NetworkPolicies is not known: {why}"),
                }
                self.runs.schedule();
            }
            tokio::select! {
                () = self.cluster.closing.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Looks at the nodes, and deletes the objects of runs that this agent does not hold, until it ends.
    async fn sweep(&self) {
        loop {
            tokio::select! {
                () = self.cluster.closing.cancelled() => return,
                () = tokio::time::sleep(LOOK) => {}
            }
            self.cluster.look_at_nodes().await;
            // What waits for GPUs may have them now.
            self.runs.schedule();
            let listed = match tokio::time::timeout(DEADLINE, self.cluster.runs.list(&ListParams::default())).await {
                Ok(Ok(listed)) => listed,
                Ok(Err(_)) | Err(_) => continue,
            };
            let held: BTreeSet<String> = self.runs.keys().iter().map(|key| resource::name(key.run_id)).collect();
            for name in listed.iter().map(ResourceExt::name_any).filter(|name| !held.contains(name)) {
                tracing::info!(run = %name, "the object of a run that is over is deleted");
                if let Ok(Err(error)) = tokio::time::timeout(DEADLINE, self.cluster.runs.delete(&name, &DeleteParams::default())).await {
                    tracing::debug!(run = %name, %error, "it could not be deleted");
                }
            }
        }
    }
}

/// Whether it lives, as far as the cluster knows.
fn runs(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True");
    ready && pod.metadata.deletion_timestamp.is_none()
}

#[async_trait]
impl Executor for KubernetesExecutor {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    async fn assign(&self, assign: v1::Assign) -> Result<(), SpoolError> {
        self.runs.assign(assign).await
    }

    async fn cancel(&self, key: RunKey) {
        self.runs.cancel(key).await;
    }

    async fn stop(&self, key: RunKey) {
        self.runs.stop(key).await;
    }

    async fn logs(&self, request: v1::LogRequest) -> v1::LogReply {
        let id = request.request_id.clone();
        let Ok(run) = request.run_id.parse::<RunId>() else {
            return no_logs(id, "not_found", format!("'{}' is not a run's id", request.run_id));
        };
        let selector = ListParams::default().labels(&format!("{LABEL_RUN}={run}"));
        let pods = match tokio::time::timeout(DEADLINE, self.cluster.pods.list(&selector)).await {
            Ok(Ok(pods)) => pods.items,
            Ok(Err(error)) => return no_logs(id, "unavailable", format!("the run's pods can't be listed: {error}")),
            Err(_) => return no_logs(id, "unavailable", "the run's pods can't be listed in time".to_owned()),
        };
        let name = resource::name(run);
        let share = LOG_REPLY / pods.len().max(1);
        let mut files = Vec::new();
        let mut components = BTreeSet::new();
        for pod in pods.iter().map(ResourceExt::name_any) {
            let Some(attempt) = crate::controller::run::component::Attempt::of_pod(&name, &pod) else { continue };
            let component = attempt.role.to_string();
            components.insert(component.clone());
            if !request.component.is_empty() && request.component != component {
                continue;
            }
            if let Some(text) = logs::tail(&self.cluster, &pod, i64::from(request.tail_lines), share).await {
                let truncated = text.len() >= share;
                files.push(v1::LogFile { component, attempt: attempt.number, text, truncated });
            }
        }
        if !components.is_empty() && !request.component.is_empty() && !components.contains(&request.component) {
            return no_logs(id, "not_found", no_component(run, &request.component, components));
        }
        if files.is_empty() {
            return no_logs(id, "not_found", format!("run {run} has no pods whose output could be read; they go with the run's end"));
        }
        v1::LogReply { request_id: id, files, error_code: String::new(), error_message: String::new() }
    }

    async fn describe(&self, request: v1::Describe) -> v1::DescribeReply {
        let message = "this cluster describes no images yet; register the definition with its describe document".to_owned();
        let failure = Failure::new(FailureCode::NotRunnableHere, message);
        v1::DescribeReply { request_id: request.request_id, document_json: String::new(), failure: Some(v1::Failure::from(&failure)) }
    }

    fn inventory(&self) -> v1::Inventory {
        self.cluster.with_known(|known| known.inventory.clone())
    }

    fn running(&self) -> u32 {
        self.runs.running()
    }

    async fn shutdown(&self) {
        self.cluster.closing.cancel();
        self.runs.shutdown().await;
    }
}

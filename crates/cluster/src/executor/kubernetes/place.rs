//! The pods of one run, asked for and watched through its `RLMeshRun`. Makes no pod itself.
//!
//! A restarted agent goes on with the attempts that run: it asks for the numbers that are there already.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use kube::api::{DeleteParams, Patch, PatchParams};
use rlm_core::evaluation::{Provenance, RunSpec};
use rlm_core::failure::{Failure, FailureCode};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Cluster, logs, resource};
use crate::controller::run::classify::failure_code;
use crate::controller::run::component::Role as PodRole;
use crate::crd::run::{AGENT_MANAGER, ActiveBinding, Component, ComponentPhase, RLMeshRun, RLMeshRunSpec, Reason};
use crate::executor::process::classify::{Ended, Exit, classify};
use crate::executor::run::components::{ComponentKind, Happened, News, Role, Stop};
use crate::executor::run::{Assignment, Place, Prepared, RunnerExit};
use crate::runners::FromRunner;
use crate::spool::RunKey;

/// Of one request to the API server.
const DEADLINE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(1);
const RUNNER: &str = "runner";

/// What is wanted now; the writer brings the object up to it.
struct Wanted {
    spec: RLMeshRunSpec,
    /// Lanes of each environment pod that is wanted.
    environments: BTreeMap<(u32, u32), u32>,
}

impl Wanted {
    fn active(&self) -> Vec<ActiveBinding> {
        let mut active: BTreeMap<u32, ActiveBinding> = BTreeMap::new();
        for (&(binding, pod), &lanes) in &self.environments {
            let entry = active.entry(binding).or_insert(ActiveBinding { index: binding, pods: 0, lanes_per_pod: lanes });
            entry.pods = entry.pods.max(pod + 1);
            entry.lanes_per_pod = lanes;
        }
        active.into_values().collect()
    }
}

pub struct PodRun {
    cluster: Arc<Cluster>,
    key: RunKey,
    spec: Arc<RunSpec>,
    name: String,
    wanted: Arc<Mutex<Wanted>>,
    changed: watch::Sender<u64>,
    observed: watch::Receiver<Vec<Component>>,
    writer: CancellationToken,
    runner_attempts: Mutex<u32>,
}

/// Makes the run's object, or goes on with the one that is there.
pub async fn prepare(cluster: Arc<Cluster>, assignment: Assignment) -> Result<Prepared<PodRun>, Failure> {
    let spec = assignment.spec;
    let object = resource::spec(&spec, &cluster.endpoint)?;
    let name = resource::name(spec.run_id);
    let found = cluster.found(&name).await;
    let (mut attempts, mut restarts) = (HashMap::new(), BTreeMap::new());
    if let Some(found) = &found {
        restarts.clone_from(&found.spec.restarts);
        for component in found.status.iter().flat_map(|status| &status.components) {
            let number = restarts.get(&component.name).copied().unwrap_or(1);
            if component.attempt == number {
                // One less where it goes on: the next start asks for it again.
                attempts.insert(component.name.clone(), if component.phase.over() { number } else { number - 1 });
            }
        }
        for (name, number) in &restarts {
            attempts.entry(name.clone()).or_insert(number - 1);
        }
    }
    let environments = found.iter().flat_map(|found| &found.spec.active_bindings);
    let environments = environments.flat_map(|active| (0..active.pods).map(|pod| ((active.index, pod), active.lanes_per_pod))).collect();
    let wanted = Wanted { spec: RLMeshRunSpec { restarts, ..object }, environments };
    let provenance = Provenance {
        execution_horizon: Some(spec.model.execution_horizon),
        prefetch_lead: Some(spec.model.prefetch_lead),
        lanes: Some(spec.lanes),
        agent_version: Some(cluster.version.to_owned()),
        ..Provenance::default()
    };
    let place = PodRun {
        observed: cluster.observe(&name),
        runner_attempts: Mutex::new(attempts.remove(RUNNER).unwrap_or(0)),
        cluster,
        key: assignment.key,
        spec,
        name,
        wanted: Arc::new(Mutex::new(wanted)),
        changed: watch::Sender::new(0),
        writer: CancellationToken::new(),
    };
    place.start_writer();
    Ok(Prepared { place: Arc::new(place), provenance, attempts })
}

impl PodRun {
    fn want(&self, change: impl FnOnce(&mut Wanted)) {
        change(&mut self.wanted.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.send_modify(|number| *number += 1);
    }

    /// Keeps the object as wanted, for as long as that takes.
    fn start_writer(&self) {
        let (cluster, name, wanted, stop) = (Arc::clone(&self.cluster), self.name.clone(), Arc::clone(&self.wanted), self.writer.clone());
        let mut changed = self.changed.subscribe();
        changed.mark_changed();
        self.cluster.shared.tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    alive = changed.changed() => if alive.is_err() { return },
                }
                let spec = {
                    let wanted = wanted.lock().unwrap_or_else(PoisonError::into_inner);
                    RLMeshRunSpec { active_bindings: wanted.active(), ..wanted.spec.clone() }
                };
                let object = RLMeshRun::new(&name, spec);
                let apply = PatchParams::apply(AGENT_MANAGER).force();
                let patch = Patch::Apply(&object);
                let written = tokio::time::timeout(DEADLINE, cluster.runs.patch(&name, &apply, &patch)).await;
                let problem = match written {
                    Ok(Ok(_)) => continue,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "no answer in time".to_owned(),
                };
                tracing::warn!(run = %name, problem, "what the run needs could not be written; trying again");
                changed.mark_changed();
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(RETRY) => {}
                }
            }
        });
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.spec.limits.queue_timeout_ms)
    }
}

/// The attempt as it is seen now.
fn current(observed: &[Component], name: &str, number: u32) -> Option<Component> {
    observed.iter().find(|one| one.name == name && one.attempt == number).cloned()
}

/// Why an attempt is over, or waits in vain. `log_lines` are the last of its output.
fn failure(role: Role, component: &Component, served: bool, log_lines: Vec<String>) -> Failure {
    let pod_role = match role {
        Role::Model => PodRole::Model { replica: 0 },
        Role::Environment { binding, pod } => PodRole::Environment { binding, pod },
    };
    let name = &component.name;
    let exited = matches!(component.reason, None | Some(Reason::Exited));
    if let Some(code) = component.exit_code.filter(|_| exited) {
        let kind = role.kind();
        return classify(Exit {
            component: name,
            kind,
            ended: Ended::Code(code),
            ready: served,
            out_of_memory: false,
            log_lines: &log_lines,
        });
    }
    let code = component.reason.and_then(|reason| failure_code(pod_role, reason, served));
    let code = code.unwrap_or(match role.kind() {
        ComponentKind::Model => FailureCode::ModelStartFailed,
        ComponentKind::Environment => FailureCode::EnvironmentStartFailed,
    });
    let why = component.message.as_deref().unwrap_or("its pod did not come to run");
    Failure { exit_code: component.exit_code, log_lines, ..Failure::new(code, format!("{name}: {why}")).of(name) }
}

/// What a component waits for, as the control plane shows it.
fn waits(component: &Component) -> Option<(&'static str, String)> {
    let cause = match component.reason? {
        Reason::ImagePullFailed => "imagePull",
        Reason::Unschedulable => "unschedulable",
        Reason::QuotaExceeded => "quota",
        Reason::SecretMissing => "secretMissing",
        Reason::ApiUnavailable => "apiUnavailable",
        Reason::ArtifactsNotReady => "artifacts",
        _ => return None,
    };
    Some((cause, format!("{}: {}", component.name, component.message.as_deref().unwrap_or("no message"))))
}

impl Place for PodRun {
    fn start(&self, role: Role, lanes: u32, number: u32, stop: Stop, news: mpsc::Sender<News>) -> Result<BoxFuture<'static, ()>, Failure> {
        let name = role.name();
        self.want(|wanted| {
            wanted.spec.restarts.insert(name.clone(), number);
            if let Role::Environment { binding, pod } = role {
                wanted.environments.insert((binding, pod), lanes);
            }
        });
        let (mut observed, cluster, patience) = (self.observed.clone(), Arc::clone(&self.cluster), self.patience());
        let (wanted, changed, run) = (Arc::clone(&self.wanted), self.changed.clone(), self.name.clone());
        Ok(async move {
            let say = |happened| {
                let message = News { name: name.clone(), attempt: number, happened };
                let news = &news;
                // The run's actor may have gone; then nobody needs the news.
                async move { drop(news.send(message).await) }
            };
            let (mut served, mut told) = (false, None);
            let mut waiting_since: Option<Instant> = Some(Instant::now());
            loop {
                let seen = current(&observed.borrow_and_update(), &name, number);
                if let Some(component) = &seen {
                    match component.phase {
                        ComponentPhase::Ready if !served => {
                            served = true;
                            waiting_since = None;
                            let address = component.address.clone().unwrap_or_default();
                            say(Happened::Ready { address, node: component.node.clone().unwrap_or_default() }).await;
                        }
                        ComponentPhase::Succeeded | ComponentPhase::Failed => {
                            let served = served || component.ready_at.is_some();
                            let lines = logs::last_lines(&cluster, component.pod.as_deref()).await;
                            let failure = failure(role, component, served, lines);
                            // What its logs say is kept; the pod may go.
                            wanted.lock().unwrap_or_else(PoisonError::into_inner).spec.released_attempts.insert(name.clone(), number);
                            changed.send_modify(|number| *number += 1);
                            return say(Happened::Ended { failure: Some(failure) }).await;
                        }
                        ComponentPhase::Pending => {
                            if let Some((cause, message)) = waits(component).filter(|(cause, _)| told != Some(*cause)) {
                                told = Some(cause);
                                say(Happened::Waits { cause, message }).await;
                            }
                        }
                        ComponentPhase::Starting => waiting_since = None,
                        ComponentPhase::Ready => {}
                    }
                }
                tokio::select! {
                    () = stop.stop.cancelled() => {
                        if cluster.closing.is_cancelled() {
                            // The pods go on for the next agent.
                            return say(Happened::Ended { failure: None }).await;
                        }
                        let lines = logs::last_lines(&cluster, seen.as_ref().and_then(|seen| seen.pod.as_deref())).await;
                        if let Role::Environment { binding, pod } = role {
                            wanted.lock().unwrap_or_else(PoisonError::into_inner).environments.remove(&(binding, pod));
                            changed.send_modify(|number| *number += 1);
                        }
                        let asked = Failure::new(FailureCode::ProcessKilled, format!("{name} was ended as asked")).of(&name);
                        return say(Happened::Ended { failure: Some(Failure { log_lines: lines, ..asked }) }).await;
                    }
                    alive = observed.changed() => if alive.is_err() {
                        return say(Happened::Ended { failure: None }).await;
                    },
                    () = async { match waiting_since { Some(since) => tokio::time::sleep_until(since + patience).await, None => std::future::pending().await } } => {
                        let Some(component) = &seen else { waiting_since = Some(Instant::now()); continue };
                        tracing::warn!(%run, component = %name, "the component waited longer than limits.queueTimeout");
                        let failure = failure(role, component, false, Vec::new());
                        return say(Happened::Ended { failure: Some(failure) }).await;
                    }
                }
            }
        }
        .boxed())
    }

    fn runner(&self, stop: Stop, messages: mpsc::Sender<FromRunner>) -> BoxFuture<'static, RunnerExit> {
        let number = {
            let mut attempts = self.runner_attempts.lock().unwrap_or_else(PoisonError::into_inner);
            *attempts += 1;
            *attempts
        };
        self.cluster.shared.runners.register_pod(self.key.run_id, format!("{}-{RUNNER}-{number}", self.name), messages);
        self.want(|wanted| {
            wanted.spec.restarts.insert(RUNNER.to_owned(), number);
        });
        let (mut observed, cluster) = (self.observed.clone(), Arc::clone(&self.cluster));
        async move {
            loop {
                let seen = current(&observed.borrow_and_update(), RUNNER, number);
                if let Some(component) = seen.filter(|component| component.phase.over()) {
                    let log_lines = logs::last_lines(&cluster, component.pod.as_deref()).await;
                    let how = component.message.unwrap_or_else(|| "ended".to_owned());
                    return RunnerExit { how, log_lines };
                }
                tokio::select! {
                    () = stop.stop.cancelled() => return RunnerExit { how: "was ended as asked".to_owned(), log_lines: Vec::new() },
                    alive = observed.changed() => if alive.is_err() {
                        return RunnerExit { how: "is not watched any more".to_owned(), log_lines: Vec::new() };
                    },
                }
            }
        }
        .boxed()
    }

    fn clean_up(&self, over: bool) -> BoxFuture<'static, ()> {
        self.writer.cancel();
        let (cluster, name) = (Arc::clone(&self.cluster), self.name.clone());
        async move {
            cluster.forget(&name);
            if !over {
                return;
            }
            // Its pods go with it. What can't be deleted now is looked for again by the sweeper.
            match tokio::time::timeout(DEADLINE, cluster.runs.delete(&name, &DeleteParams::default())).await {
                Ok(Ok(_)) => {}
                Ok(Err(kube::Error::Api(status))) if status.code == 404 => {}
                Ok(Err(error)) => tracing::warn!(run = %name, %error, "the run's object could not be deleted"),
                Err(_) => tracing::warn!(run = %name, "the run's object could not be deleted in time"),
            }
        }
        .boxed()
    }
}

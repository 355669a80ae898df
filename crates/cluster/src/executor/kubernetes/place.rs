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
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::gpus::Chosen;
use super::{Cluster, explain, logs, resource, said};
use crate::controller::run::component::Role as PodRole;
use crate::crd::run::{AGENT_MANAGER, ActiveBinding, Component, ComponentPhase, RLMeshRun, RLMeshRunSpec};
use crate::executor::run::components::{Happened, News, Role, Stop, Waits};
use crate::executor::run::{Assignment, Place, Prepared, RUNNER, RunnerExit};
use crate::runners::FromRunner;
use crate::spool::RunKey;

/// Of one request to the API server.
const DEADLINE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(1);

/// What is wanted now; the writer brings the object up to it.
struct Wanted {
    spec: RLMeshRunSpec,
    /// Lanes of each environment pod that is wanted.
    environments: BTreeMap<(u32, u32), u32>,
}

impl Wanted {
    /// Pods of a binding have the same number of lanes: what was wanted before with another one is on its way out.
    fn start(&mut self, role: Role, lanes: u32) {
        if let Role::Environment { binding, pod } = role {
            for (_, known) in self.environments.range_mut((binding, 0)..=(binding, u32::MAX)) {
                *known = lanes;
            }
            self.environments.insert((binding, pod), lanes);
        }
    }

    /// It is over, or not wanted any more.
    fn end(&mut self, role: Role) {
        if let Role::Environment { binding, pod } = role {
            self.environments.remove(&(binding, pod));
        }
    }

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
    /// Why what is wanted can't be written now.
    problem: Arc<watch::Sender<Option<String>>>,
    writer: CancellationToken,
    runner_attempts: Mutex<u32>,
}

/// Makes the run's object, or goes on with the one that is there. `chosen` holds for a new one.
pub async fn prepare(cluster: Arc<Cluster>, assignment: Assignment, chosen: Chosen) -> Result<Prepared<PodRun>, Failure> {
    let spec = assignment.spec;
    let name = resource::name(spec.run_id);
    let observed = cluster.observe(&name);
    let found = cluster.found(assignment.key, &name).await;
    let chosen = found.as_ref().map_or(chosen, |found| Chosen::of(&found.spec));
    let object = resource::spec(&spec, &cluster.endpoint, chosen).inspect_err(|_| cluster.forget(&name))?;
    let (mut attempts, mut restarts, mut released_attempts) = (HashMap::new(), BTreeMap::new(), BTreeMap::new());
    if let Some(found) = &found {
        cluster.found_again(found);
        // Both only grow: what an earlier agent has written stays written.
        restarts.clone_from(&found.spec.restarts);
        released_attempts.clone_from(&found.spec.released_attempts);
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
    let wanted = Wanted { spec: RLMeshRunSpec { restarts, released_attempts, ..object }, environments };
    let provenance = Provenance {
        execution_horizon: Some(spec.model.execution_horizon),
        prefetch_lead: Some(spec.model.prefetch_lead),
        lanes: Some(spec.lanes),
        agent_version: Some(cluster.version.to_owned()),
        ..Provenance::default()
    };
    let place = PodRun {
        observed,
        runner_attempts: Mutex::new(attempts.remove(RUNNER).unwrap_or(0)),
        cluster,
        key: assignment.key,
        spec,
        name,
        wanted: Arc::new(Mutex::new(wanted)),
        changed: watch::Sender::new(0),
        problem: Arc::new(watch::Sender::new(None)),
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
        let (mut changed, trouble) = (self.changed.subscribe(), Arc::clone(&self.problem));
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
                    Ok(Ok(_)) => {
                        trouble.send_if_modified(|known| known.take().is_some());
                        continue;
                    }
                    Ok(Err(error)) => said(&error),
                    Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
                };
                tracing::warn!(run = %name, problem, "what the run needs could not be written; trying again");
                trouble.send_replace(Some(problem));
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

/// Tells what an attempt waits for, once for each answer.
struct Teller {
    name: String,
    number: u32,
    news: mpsc::Sender<News>,
    asked: Instant,
    problem: watch::Receiver<Option<String>>,
    told: Option<Waits>,
}

impl Teller {
    fn new(name: &str, number: u32, news: mpsc::Sender<News>, problem: watch::Receiver<Option<String>>) -> Self {
        Self { name: name.to_owned(), number, news, asked: Instant::now(), problem, told: None }
    }

    async fn say(&self, happened: Happened) {
        let news = News { name: self.name.clone(), attempt: self.number, happened };
        // The run's actor may have gone; then nobody needs the news.
        drop(self.news.send(news).await);
    }

    async fn tell(&mut self, seen: Option<&Component>) {
        let problem = self.problem.borrow_and_update().clone();
        let silent = self.asked.elapsed() >= explain::SILENCE;
        let waits = explain::waits(&self.name, seen, silent, problem.as_deref());
        if waits != self.told {
            self.told.clone_from(&waits);
            self.say(Happened::Waits(waits)).await;
        }
    }

    /// Returns when something else may have to be told although nothing was seen.
    async fn due(&mut self, seen: bool) {
        let silent_at = self.asked + explain::SILENCE;
        tokio::select! {
            // The sender lives as long as the run does.
            alive = self.problem.changed() => if alive.is_err() { std::future::pending().await },
            () = sleep_until(silent_at), if !seen && Instant::now() < silent_at => {}
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Place for PodRun {
    fn start(&self, role: Role, lanes: u32, number: u32, stop: Stop, news: mpsc::Sender<News>) -> Result<BoxFuture<'static, ()>, Failure> {
        let name = role.name();
        self.want(|wanted| {
            wanted.spec.restarts.insert(name.clone(), number);
            wanted.start(role, lanes);
        });
        let (mut observed, cluster, patience) = (self.observed.clone(), Arc::clone(&self.cluster), self.patience());
        let (wanted, changed, spec) = (Arc::clone(&self.wanted), self.changed.clone(), Arc::clone(&self.spec));
        let mut teller = Teller::new(&name, number, news, self.problem.subscribe());
        Ok(async move {
            let mut served = false;
            let mut patient_until = Some(Instant::now() + patience);
            loop {
                let seen = current(&observed.borrow_and_update(), &name, number);
                match &seen {
                    Some(component) if component.phase.over() => {
                        let served = served || component.ready_at.is_some();
                        let lines = logs::last_lines(&cluster, component.pod.as_deref()).await;
                        let failure = explain::failure(&spec, role, component, served, lines);
                        // What its logs say is kept; the pod may go.
                        {
                            let mut wanted = wanted.lock().unwrap_or_else(PoisonError::into_inner);
                            wanted.spec.released_attempts.insert(name.clone(), number);
                            wanted.end(role);
                        }
                        changed.send_modify(|number| *number += 1);
                        return teller.say(Happened::Ended { failure: Some(failure) }).await;
                    }
                    Some(component) if component.phase == ComponentPhase::Ready && !served => {
                        served = true;
                        let address = component.address.clone().unwrap_or_default();
                        teller.say(Happened::Ready { address, node: component.node.clone().unwrap_or_default() }).await;
                    }
                    Some(_) | None if served => {}
                    Some(_) | None => teller.tell(seen.as_ref()).await,
                }
                if served || seen.as_ref().is_some_and(|component| component.phase == ComponentPhase::Starting) {
                    patient_until = None;
                }
                tokio::select! {
                    () = stop.stop.cancelled() => {
                        if cluster.closing.is_cancelled() {
                            // The pods go on for the next agent.
                            return teller.say(Happened::Ended { failure: None }).await;
                        }
                        let lines = logs::last_lines(&cluster, seen.as_ref().and_then(|seen| seen.pod.as_deref())).await;
                        wanted.lock().unwrap_or_else(PoisonError::into_inner).end(role);
                        changed.send_modify(|number| *number += 1);
                        let asked = Failure::new(FailureCode::ProcessKilled, format!("{name} was ended as asked")).of(&name);
                        return teller.say(Happened::Ended { failure: Some(Failure { log_lines: lines, ..asked }) }).await;
                    }
                    alive = observed.changed() => if alive.is_err() {
                        return teller.say(Happened::Ended { failure: None }).await;
                    },
                    () = teller.due(seen.is_some()), if !served => {}
                    () = until(patient_until) => {
                        let failure = explain::out_of_patience(explain::pod_role(role), seen.as_ref(), teller.told.as_ref(), patience);
                        wanted.lock().unwrap_or_else(PoisonError::into_inner).end(role);
                        changed.send_modify(|number| *number += 1);
                        return teller.say(Happened::Ended { failure: Some(failure) }).await;
                    }
                }
            }
        }
        .boxed())
    }

    fn runner(&self, stop: Stop, messages: mpsc::Sender<FromRunner>, news: mpsc::Sender<News>) -> BoxFuture<'static, RunnerExit> {
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
        let patience = self.patience();
        let mut teller = Teller::new(RUNNER, number, news, self.problem.subscribe());
        async move {
            let mut patient_until = Some(Instant::now() + patience);
            loop {
                let seen = current(&observed.borrow_and_update(), RUNNER, number);
                if let Some(component) = seen.as_ref().filter(|component| component.phase.over()) {
                    let log_lines = logs::last_lines(&cluster, component.pod.as_deref()).await;
                    let how = component.message.as_ref().map_or_else(|| "ended".to_owned(), |why| format!("ended ({why})"));
                    return RunnerExit { log_lines, ..RunnerExit::new(how) };
                }
                teller.tell(seen.as_ref()).await;
                if seen.as_ref().is_some_and(|component| component.phase != ComponentPhase::Pending) {
                    patient_until = None;
                }
                tokio::select! {
                    () = stop.stop.cancelled() => return RunnerExit::new("was ended as asked"),
                    alive = observed.changed() => if alive.is_err() {
                        return RunnerExit::new("is not watched any more");
                    },
                    () = until(patient_until) => {
                        let failure = explain::out_of_patience(PodRole::Runner, seen.as_ref(), teller.told.as_ref(), patience);
                        return RunnerExit { for_good: Some(failure), ..RunnerExit::new("did not come to run") };
                    }
                    () = teller.due(seen.is_some()) => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Wanted {
        let spec = serde_json::from_value(serde_json::json!({"evaluationID": "e", "generation": 1, "mode": "evaluate"}));
        Wanted { spec: spec.unwrap(), environments: BTreeMap::new() }
    }

    fn environment(binding: u32, pod: u32) -> Role {
        Role::Environment { binding, pod }
    }

    #[test]
    fn pods_of_a_binding_have_the_lanes_that_were_asked_for_last() {
        let mut wanted = wanted();
        for pod in 0..2 {
            wanted.start(environment(0, pod), 4);
            wanted.start(environment(1, pod), 4);
        }
        // Released and acquired again with one lane each, before the old ones are gone.
        wanted.start(environment(0, 0), 1);
        let lanes: Vec<_> = wanted.active().iter().map(|active| (active.index, active.pods, active.lanes_per_pod)).collect();
        assert_eq!(lanes, [(0, 2, 1), (1, 2, 4)]);
    }

    #[test]
    fn what_is_over_is_not_wanted() {
        let mut wanted = wanted();
        wanted.start(environment(0, 0), 1);
        wanted.start(environment(3, 0), 1);
        wanted.end(environment(0, 0));
        wanted.end(Role::Model);
        assert_eq!(wanted.active().iter().map(|active| active.index).collect::<Vec<_>>(), [3]);
    }
}

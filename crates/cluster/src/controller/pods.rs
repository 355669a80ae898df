//! The pods of runs as the watch last showed them, by run. Holds of each pod what decisions need, and nothing else: a cluster
//! may have thousands.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::runtime::watcher::Event;
use tokio::sync::watch;

use super::run::pod::LABEL_RUN;

type Runs = HashMap<String, BTreeMap<String, Arc<Pod>>>;

/// Shared; clones see the same pods.
#[derive(Clone)]
pub struct PodIndex {
    runs: Arc<RwLock<Runs>>,
    ready: Arc<watch::Sender<bool>>,
}

impl Default for PodIndex {
    fn default() -> Self {
        Self { runs: Arc::default(), ready: Arc::new(watch::Sender::new(false)) }
    }
}

/// Folds watch events into an index. One per watch.
pub struct PodWriter {
    index: PodIndex,
    /// What a list has shown so far; it replaces everything once it is complete.
    listing: Runs,
}

/// Name of the run's object, from the pod's label.
fn run_of(pod: &Pod) -> Option<String> {
    pod.metadata.labels.as_ref()?.get(LABEL_RUN).map(|id| id.replace('_', "-"))
}

fn insert(runs: &mut Runs, run: &str, mut pod: Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.annotations = None;
    pod.metadata.labels = None;
    pod.spec = pod.spec.map(|spec| PodSpec { node_name: spec.node_name, ..PodSpec::default() });
    let name = pod.metadata.name.clone().unwrap_or_default();
    runs.entry(run.to_owned()).or_default().insert(name, Arc::new(pod));
}

impl PodIndex {
    #[must_use]
    pub fn writer(&self) -> PodWriter {
        PodWriter { index: self.clone(), listing: Runs::new() }
    }

    /// The pods labelled with the run of this name.
    #[must_use]
    pub fn of_run(&self, run: &str) -> Vec<Arc<Pod>> {
        let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
        runs.get(run).map(|pods| pods.values().cloned().collect()).unwrap_or_default()
    }

    /// Returns once the first list is complete.
    pub async fn ready(&self) {
        // The sender lives as long as this.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    fn with<T>(&self, act: impl FnOnce(&mut Runs) -> T) -> T {
        act(&mut self.runs.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl PodWriter {
    /// Takes an event in; returns the runs that it concerns.
    pub fn take(&mut self, event: Event<Pod>) -> Vec<String> {
        match event {
            Event::Init => {
                self.listing.clear();
                Vec::new()
            }
            Event::InitApply(pod) => {
                if let Some(run) = run_of(&pod) {
                    insert(&mut self.listing, &run, pod);
                }
                Vec::new()
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listing);
                let mut concerned: Vec<String> = listed.keys().cloned().collect();
                let before = self.index.with(|runs| std::mem::replace(runs, listed));
                concerned.extend(before.into_keys());
                self.index.ready.send_replace(true);
                concerned
            }
            Event::Apply(pod) => {
                let run = run_of(&pod);
                if let Some(run) = &run {
                    self.index.with(|runs| insert(runs, run, pod));
                }
                run.into_iter().collect()
            }
            Event::Delete(pod) => {
                let (run, name) = (run_of(&pod), pod.metadata.name.unwrap_or_default());
                if let Some(run) = &run {
                    self.index.with(|runs| {
                        if let Some(pods) = runs.get_mut(run) {
                            pods.remove(&name);
                            if pods.is_empty() {
                                runs.remove(run);
                            }
                        }
                    });
                }
                run.into_iter().collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, run: &str) -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": name, "labels": {LABEL_RUN: run}}, "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
        }))
        .unwrap()
    }

    #[test]
    fn a_list_replaces_what_was_there_and_names_what_went() {
        let index = PodIndex::default();
        let mut writer = index.writer();
        assert_eq!(writer.take(Event::Apply(pod("a", "run_1"))), ["run-1"]);
        assert_eq!(index.of_run("run-1")[0].spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
        assert!(index.of_run("run-1")[0].spec.as_ref().unwrap().containers.is_empty());
        for event in [Event::Init, Event::InitApply(pod("b", "run_2"))] {
            assert!(writer.take(event).is_empty());
        }
        assert_eq!(index.of_run("run-1").len(), 1, "an unfinished list hides nothing");
        let mut concerned = writer.take(Event::InitDone);
        concerned.sort();
        assert_eq!(concerned, ["run-1", "run-2"]);
        assert!(index.of_run("run-1").is_empty());
        assert_eq!(writer.take(Event::Delete(pod("b", "run_2"))), ["run-2"]);
        assert!(index.of_run("run-2").is_empty());
    }
}

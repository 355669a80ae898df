//! What is said about a run: its status records and its provenance. Decides nothing.

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_core::evaluation::{Provenance, RunMetrics};
use rlm_core::failure::Failure;

use crate::executor::now_ms;
use crate::spool::{NewRecord, RunEnd, RunKey, Spool};

/// A terminal status of a run without an actor.
pub async fn record_end(spool: &Spool, key: RunKey, record: NewRecord, end: RunEnd) {
    if let Err(error) = spool.append_end(vec![record], key, end).await {
        tracing::error!(run = %key, %error, "the end of a run could not be stored");
    }
}

/// What a run's runners measured: each counts from its own start, and the run's metrics are those of all.
#[derive(Debug, Default)]
pub struct Measured {
    before: RunMetrics,
    current: RunMetrics,
}

impl Measured {
    /// The runner's latest metrics, with those of the runners before it. What can't be read goes on as it came.
    pub fn with(&mut self, latest: v1::RunMetrics) -> v1::RunMetrics {
        let Ok(current) = serde_json::from_str::<RunMetrics>(&latest.metrics_json) else { return latest };
        let mut all = current.clone();
        all.add(&self.before);
        self.current = current;
        v1::RunMetrics { metrics_json: serde_json::to_string(&all).unwrap_or(latest.metrics_json), at_unix_ms: latest.at_unix_ms }
    }

    pub fn runner_ended(&mut self) {
        self.before.add(&std::mem::take(&mut self.current));
    }
}

pub fn status(
    phase: Phase,
    cause: &str,
    message: &str,
    since_ms: i64,
    failure: Option<&Failure>,
    provenance: Option<&Provenance>,
) -> v1::RunStatus {
    v1::RunStatus {
        phase: phase.into(),
        waiting_cause: cause.to_owned(),
        waiting_message: message.to_owned(),
        since_unix_ms: since_ms,
        failure: failure.map(v1::Failure::from),
        provenance_json: provenance.and_then(|provenance| serde_json::to_string(provenance).ok()).unwrap_or_default(),
        at_unix_ms: now_ms(),
    }
}

/// What the runner found out, with what only the agent knows.
pub fn merge(ours: Provenance, runner: Provenance) -> Provenance {
    Provenance {
        checkpoint_digests: ours.checkpoint_digests,
        node: ours.node,
        gpu_product: ours.gpu_product.or(runner.gpu_product),
        gpu_driver: ours.gpu_driver.or(runner.gpu_driver),
        agent_version: ours.agent_version,
        lanes: runner.lanes.or(ours.lanes),
        lanes_per_pod: runner.lanes_per_pod.or(ours.lanes_per_pod),
        execution_horizon: runner.execution_horizon.or(ours.execution_horizon),
        prefetch_lead: runner.prefetch_lead.or(ours.prefetch_lead),
        ..runner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_of_a_runs_runners_add_up() {
        let latest = |episodes| v1::RunMetrics {
            metrics_json: serde_json::to_string(&RunMetrics { episodes, ..RunMetrics::default() }).unwrap(),
            at_unix_ms: 1,
        };
        let mut measured = Measured::default();
        let mut episodes = |metrics| serde_json::from_str::<RunMetrics>(&measured.with(latest(metrics)).metrics_json).unwrap().episodes;
        assert_eq!((episodes(2), episodes(5)), (2, 5));
        measured.runner_ended();
        measured.runner_ended();
        let mut episodes = |metrics| serde_json::from_str::<RunMetrics>(&measured.with(latest(metrics)).metrics_json).unwrap().episodes;
        assert_eq!((episodes(0), episodes(3)), (5, 8));
        let broken = v1::RunMetrics { metrics_json: "{".into(), at_unix_ms: 1 };
        assert_eq!(measured.with(broken.clone()), broken);
    }
}

//! What is said about a run: its status records and its provenance. Decides nothing.

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_core::evaluation::Provenance;
use rlm_core::failure::Failure;

use super::{Context, now_ms};
use crate::spool::{NewRecord, RunEnd, RunKey};

/// A terminal status of a run without an actor.
pub(super) async fn record_end(context: &Context, key: RunKey, record: NewRecord, end: RunEnd) {
    if let Err(error) = context.spool.append_end(vec![record], key, end).await {
        tracing::error!(run = %key, %error, "the end of a run could not be stored");
    }
}

pub(super) fn status(
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
pub(super) fn merge(ours: Provenance, runner: Provenance) -> Provenance {
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

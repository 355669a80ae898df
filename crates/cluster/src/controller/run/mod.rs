//! One run: gather, plan, apply, status. `plan` and `status` decide and are pure; `gather` reads; `apply` writes.

use k8s_openapi::jiff::Timestamp;

use super::settings::Settings;
use apply::{WriteError, Writes};
use plan::Observed;

pub mod apply;
pub mod classify;
pub mod component;
pub mod gather;
pub mod placement;
pub mod plan;
pub mod pod;
mod policy;
pub mod status;

/// Brings the cluster one step nearer to what the run says. Returns when to look again although nothing happens.
pub async fn reconcile(
    observed: &Observed,
    settings: &Settings,
    writes: &dyn Writes,
    now: Timestamp,
) -> Result<Option<Timestamp>, WriteError> {
    let run = &observed.run;
    if run.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let applied = apply::apply(plan::plan(observed, settings, now), writes, now).await?;
    let status = status::status(run, &applied, now);
    if !status::current(run, &status) {
        writes.apply_status(run.metadata.name.as_deref().unwrap_or_default(), &status).await?;
    }
    // What was seen is told first: the agent decides by it.
    applied.deleted?;
    Ok(applied.look_again)
}

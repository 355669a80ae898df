//! Where runs happen. The session knows this boundary and nothing behind it: child processes on a local cell, pods on a
//! cluster.

pub mod kubernetes;
pub mod process;
mod run;
mod runs;

use std::collections::BTreeSet;

use async_trait::async_trait;
use rlm_api::cluster::v1;
use rlm_core::ids::RunId;

use crate::spool::{RunKey, SpoolError};

fn now_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

/// Why there are no logs to show.
fn no_logs(request_id: String, code: &str, message: String) -> v1::LogReply {
    v1::LogReply { request_id, files: Vec::new(), error_code: code.to_owned(), error_message: message }
}

/// There is no such component in the run; these are.
fn no_component(run: RunId, wanted: &str, components: BTreeSet<String>) -> String {
    const SHOWN: usize = 20;
    let more = if components.len() > SHOWN { ", ..." } else { "" };
    let shown: Vec<String> = components.into_iter().take(SHOWN).collect();
    format!("run {run} has no logs of a component '{wanted}'; it has those of {}{more}", shown.join(", "))
}

/// What the agent's session asks of the place where runs happen. Results and status go to the spool, not through here.
#[async_trait]
pub trait Executor: Send + Sync + 'static {
    /// `process` or `kubernetes`, as the control plane is told.
    fn name(&self) -> &'static str;

    /// Starts a run, or queues it. Repeated assignment of the same (run, generation) is a no-op. An error: it could not be
    /// stored, so the run is not held here; the control plane learns that from the next session's hello.
    async fn assign(&self, assign: v1::Assign) -> Result<(), SpoolError>;

    /// Ends a run whose evaluation was cancelled; reports it as cancelled, also when it is not known here.
    async fn cancel(&self, key: RunKey);

    /// Ends a run that is no longer this cluster's. Its results stay.
    async fn stop(&self, key: RunKey);

    /// The end of a run's component logs.
    async fn logs(&self, request: v1::LogRequest) -> v1::LogReply;

    /// The describe document of a definition.
    async fn describe(&self, request: v1::Describe) -> v1::DescribeReply;

    /// What there is to run on.
    fn inventory(&self) -> v1::Inventory;

    /// Runs that are going on (not queued).
    fn running(&self) -> u32;

    /// Ends everything that runs, without a word to the control plane: the runs go on after a restart.
    async fn shutdown(&self);
}

//! Logs of runs, asked of the cluster that holds them. Nothing of them is kept here.

use std::time::Duration;

use rlm_api::cluster::v1::LogFile;
use rlm_core::error::{Code, Error};
use rlm_core::ids::{ClusterId, RunId};

use super::find;
use crate::app::access::Caller;
use crate::state::AppState;
use crate::store::runs::RunHead;

const MOST_LINES: u32 = 10_000;
const DEADLINE: Duration = Duration::from_secs(15);

/// The end of the logs of a run; without `run`, of the one with failures that a cluster took last, else of the last one.
pub async fn logs(
    state: &AppState,
    caller: &Caller,
    id: &str,
    run: Option<RunId>,
    component: &str,
    tail_lines: u32,
) -> Result<(RunId, ClusterId, Vec<LogFile>), Error> {
    let head = find(state, caller, id).await?;
    if !(1..=MOST_LINES).contains(&tail_lines) {
        return Err(Error::new(Code::BadRequest, format!("the parameter 'tailLines' must be from 1 to {MOST_LINES}")));
    }
    let runs = state.store.run_heads(head.id, u32::MAX).await?;
    let found = match run {
        Some(wanted) => {
            let found = runs.into_iter().find(|run| run.id == wanted);
            found.ok_or_else(|| Error::new(Code::NotFound, format!("{} has no run {wanted}", head.id)))?
        }
        None => {
            let errored = if head.rows_errored == 0 { Vec::new() } else { state.store.runs_with_errored(head.id).await? };
            let failed = |run: &RunHead| run.failure.is_some() || errored.contains(&run.id);
            let found = runs.into_iter().filter(|run| run.cluster.is_some()).max_by_key(|run| (failed(run), run.leased_at));
            found
                .ok_or_else(|| Error::new(Code::Conflict, format!("no cluster has taken a run of {} yet, so there are no logs", head.id)))?
        }
    };
    let cluster =
        found.cluster.ok_or_else(|| Error::new(Code::Conflict, format!("no cluster holds {}, so there are no logs of it", found.id)))?;
    let files = state.cells.logs(cluster, found.id, component, tail_lines, DEADLINE).await?;
    Ok((found.id, cluster, files))
}

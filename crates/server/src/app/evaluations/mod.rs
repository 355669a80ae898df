//! Evaluations: submitting, reading, changing them. Rows are fixed when an evaluation is made; nothing here changes which
//! rows exist or which seed one has, except that an extension appends rows.

mod change;
mod export;
mod import;
mod logs;
mod read;
mod reproduce;
mod rows;
mod submit;

use rlm_core::error::{Code, Error};
use rlm_core::evaluation::{EvaluationSpec, RunSpec, SuccessRule};
use rlm_core::ids::{EvaluationId, RunId};
use rlm_core::request::{lanes, plan_bindings};
use rlm_core::rows::{RunRows, Segment};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use change::{CloneChanges, cancel, change, clone, delete, extend, purge_deleted, retry, sweep};
pub use export::{Exporter, Format, export};
pub use import::import;
pub use logs::logs;
pub use read::{AttemptDetail, Metrics, RowDetail, RowQuery, RunTimings, detail, list, metrics, row_detail, rows_page, summary, wait};
pub use reproduce::{Reproduction, reproduction};
pub use rows::{RowFilter, RowReader};
pub use submit::{Created, create, preview};

use crate::app::access::Caller;
use crate::state::AppState;
use crate::store::evaluations::EvaluationHead;
use crate::store::runs::NewRun;

/// What a row page, an export and scores need of a checked request: which model and task a position names.
#[derive(Debug, Clone, Deserialize)]
pub struct Labels {
    pub models: Vec<ModelLabel>,
    pub tasks: Vec<TaskLabel>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelLabel {
    pub id: String,
    pub execution_horizon: u32,
    pub prefetch_lead: u32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskLabel {
    pub env: String,
    pub task_id: String,
    pub success: Option<SuccessRule>,
    pub metadata: Map<String, Value>,
}

impl Labels {
    #[must_use]
    pub fn model(&self, position: u32) -> &str {
        self.models.get(position as usize).map_or("", |model| &model.id)
    }

    #[must_use]
    pub fn task(&self, position: u32) -> (&str, &str) {
        self.tasks.get(position as usize).map_or(("", ""), |task| (&task.env, &task.task_id))
    }
}

/// The caller's evaluation of this id; one of another organization is not there.
pub(crate) async fn find(state: &AppState, caller: &Caller, id: &str) -> Result<EvaluationHead, Error> {
    let missing = || {
        let shown: String = id.chars().take(64).collect();
        Error::new(Code::NotFound, format!("there is no evaluation {shown} in this organization; `rlmesh eval list` shows those there are"))
    };
    let parsed: EvaluationId = id.parse().map_err(|_| missing())?;
    state.store.evaluation(caller.organization_id, parsed).await?.ok_or_else(missing)
}

pub(crate) async fn labels(state: &AppState, id: EvaluationId) -> Result<Labels, Error> {
    let labels = state.store.spec_as(id).await?;
    labels.ok_or_else(|| Error::new(Code::NotFound, format!("the evaluation {id} was deleted")))
}

/// Runs for these segments of an evaluation.
pub(crate) fn new_runs(
    spec: &EvaluationSpec,
    segments: &[Segment],
    id: EvaluationId,
    caller: &Caller,
    generation: u64,
    now_ms: i64,
) -> Vec<NewRun> {
    rlm_core::rows::runs(spec, segments)
        .into_iter()
        .filter_map(|RunRows { model, env, segments }| {
            let model = spec.models.get(model as usize)?.clone();
            let environment = spec.environments.iter().find(|environment| environment.id == env)?.clone();
            let (bindings, tasks) = plan_bindings(spec, &env);
            let rows = segments.iter().map(|segment| segment.count).sum();
            Some(NewRun {
                organization: caller.organization_id,
                spec: RunSpec {
                    run_id: RunId::generate(),
                    evaluation_id: id,
                    generation,
                    model,
                    environment,
                    bindings,
                    tasks,
                    lanes: lanes(spec, &env, rows),
                    limits: spec.limits.clone(),
                    recording: spec.recording.clone(),
                },
                segments,
                priority: i64::from(spec.priority),
                submitter: caller.user_id.to_string(),
                created_at: now_ms,
            })
        })
        .collect()
}

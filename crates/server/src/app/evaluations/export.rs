//! Exports, streamed a block of rows at a time.
//!
//! `jsonl` and `csv` hold what is a function of the evaluation alone: no times, no attempts, no messages, sorted by row. The
//! same rows give the same bytes, however often runs were disturbed. `result` is the SDK's `rlmesh.result.v1`.

use bytes::Bytes;
use chrono::DateTime;
use rlm_core::error::{Code, Error};
use rlm_core::evaluation::EvaluationSpec;
use rlm_core::failure::{FailureClass, FailureCode};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::rows::{RowFilter, RowReader, RowWithOutcome};
use super::{Labels, find, labels};
use crate::app::access::Caller;
use crate::state::AppState;
use crate::store::evaluations::EvaluationHead;
use crate::store::outcomes::{CellSums, RowOutcome};

/// Rows in memory at once.
const BLOCK: u32 = 2_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Jsonl,
    Csv,
    Result,
}

impl Format {
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Jsonl => "application/x-ndjson",
            Self::Csv => "text/csv; charset=utf-8",
            Self::Result => "application/json",
        }
    }

    #[must_use]
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Jsonl => "jsonl",
            Self::Csv => "csv",
            Self::Result => "json",
        }
    }
}

/// One line of `jsonl`, one record of `csv`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    row: u64,
    model: &'a str,
    env: &'a str,
    task_id: &'a str,
    trial: u64,
    seed: u64,
    trial_index: u64,
    outcome: &'static str,
    reward: Option<f64>,
    steps: Option<u64>,
    terminated: Option<bool>,
    truncated: Option<bool>,
    success: Option<bool>,
    first_observation_sha256: Option<&'a str>,
    conformance_warnings: u64,
    failure_class: Option<FailureClass>,
    failure_code: Option<FailureCode>,
}

const CSV_HEADER: &str = "row,model,env,taskId,trial,seed,trialIndex,outcome,reward,steps,terminated,truncated,success,firstObservationSha256,\
conformanceWarnings,failureClass,failureCode\n";

impl<'a> Line<'a> {
    fn new(labels: &'a Labels, item: &'a RowWithOutcome) -> Self {
        let row = item.row;
        let (env, task_id) = labels.task(row.task);
        let mut line = Self {
            row: row.row,
            model: labels.model(row.model),
            env,
            task_id,
            trial: row.trial,
            seed: row.seed,
            trial_index: row.trial_index,
            outcome: "pending",
            reward: None,
            steps: None,
            terminated: None,
            truncated: None,
            success: None,
            first_observation_sha256: None,
            conformance_warnings: 0,
            failure_class: None,
            failure_code: None,
        };
        match item.outcome.as_ref().map(|outcome| &outcome.result) {
            None => {}
            Some(RowOutcome::Scored { reward, steps, terminated, truncated, success, first_observation_sha256, conformance_warnings }) => {
                line.outcome = "scored";
                line.reward = Some(*reward);
                line.steps = Some(*steps);
                line.terminated = Some(*terminated);
                line.truncated = Some(*truncated);
                line.success = *success;
                line.first_observation_sha256 = first_observation_sha256.as_deref();
                line.conformance_warnings = *conformance_warnings;
            }
            Some(RowOutcome::Errored(failure)) => {
                line.outcome = "errored";
                line.failure_class = Some(failure.class);
                line.failure_code = Some(failure.code);
            }
        }
        line
    }

    fn json(&self, out: &mut Vec<u8>) -> Result<(), Error> {
        serde_json::to_writer(&mut *out, self).map_err(unwritable)?;
        out.push(b'\n');
        Ok(())
    }

    fn csv(&self, out: &mut Vec<u8>) -> Result<(), Error> {
        let Value::Object(fields) = serde_json::to_value(self).map_err(unwritable)? else { return Ok(()) };
        for (place, name) in CSV_HEADER.trim_end().split(',').enumerate() {
            if place > 0 {
                out.push(b',');
            }
            match fields.get(name) {
                None | Some(Value::Null) => {}
                Some(Value::String(text)) => csv_text(text, out),
                Some(other) => out.extend_from_slice(other.to_string().as_bytes()),
            }
        }
        out.push(b'\n');
        Ok(())
    }
}

fn csv_text(text: &str, out: &mut Vec<u8>) {
    if text.contains(['"', ',', '\n', '\r']) {
        out.push(b'"');
        out.extend_from_slice(text.replace('"', "\"\"").as_bytes());
        out.push(b'"');
    } else {
        out.extend_from_slice(text.as_bytes());
    }
}

fn unwritable(error: serde_json::Error) -> Error {
    tracing::error!(%error, "an export could not be written");
    Error::new(Code::Internal, "the export could not be written; the server's log says why")
}

/// An export in progress.
pub struct Exporter {
    state: AppState,
    head: EvaluationHead,
    labels: Labels,
    format: Format,
    step: Step,
}

enum Step {
    Start,
    Rows(RowReader),
    Cell { spec: Box<EvaluationSpec>, cells: Vec<(u32, u32, u64)>, sums: Vec<CellSums>, at: usize, reader: Option<RowReader>, first: bool },
    Done,
}

/// Begins an export. Read it with [`Exporter::next`].
pub async fn export(state: &AppState, caller: &Caller, id: &str, format: Format) -> Result<Exporter, Error> {
    let head = find(state, caller, id).await?;
    let labels = labels(state, head.id).await?;
    Ok(Exporter { state: state.clone(), head, labels, format, step: Step::Start })
}

impl Exporter {
    /// The next part; None at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            let mut out = Vec::new();
            match &mut self.step {
                Step::Done => return Ok(None),
                Step::Start => self.start(&mut out).await?,
                Step::Rows(reader) => {
                    let items = reader.next(BLOCK).await?;
                    for item in &items {
                        let line = Line::new(&self.labels, item);
                        if self.format == Format::Csv { line.csv(&mut out)? } else { line.json(&mut out)? }
                    }
                    if items.is_empty() {
                        self.step = Step::Done;
                    }
                }
                Step::Cell { .. } => self.workloads(&mut out).await?,
            }
            if !out.is_empty() {
                return Ok(Some(out.into()));
            }
        }
    }

    async fn start(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        let id = self.head.id;
        if self.format == Format::Result {
            let missing = || Error::new(Code::NotFound, format!("the evaluation {id} was deleted"));
            let spec = Box::new(self.state.store.spec_as(id).await?.ok_or_else(missing)?);
            let cells = self.state.store.cells(id).await?;
            let sums = self.state.store.cell_sums(id).await?;
            self.step = Step::Cell { spec, cells, sums, at: 0, reader: None, first: true };
            let recorded = DateTime::from_timestamp_millis(self.head.finished_at.unwrap_or(self.head.created_at)).unwrap_or_default();
            let set: String = hex::encode(Sha256::digest(id.to_string())).chars().take(32).collect();
            let opening = json!({"schema": "rlmesh.result.v1", "resultSetId": set, "recordedAt": recorded}).to_string();
            out.extend_from_slice(opening.trim_end_matches('}').as_bytes());
            out.extend_from_slice(b",\"workloads\":[");
            return Ok(());
        }
        if self.format == Format::Csv {
            out.extend_from_slice(CSV_HEADER.as_bytes());
        }
        self.step = Step::Rows(RowReader::new(self.state.store.clone(), id, self.head.rows_total, 0, RowFilter::default()));
        Ok(())
    }

    /// The next block of a workload: its head, some episodes, or its end.
    async fn workloads(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        let Step::Cell { spec, cells, sums, at, reader, first } = &mut self.step else { return Ok(()) };
        let Some(&(model, task, rows)) = cells.get(*at) else {
            out.extend_from_slice(b"]}\n");
            self.step = Step::Done;
            return Ok(());
        };
        let Some(open) = reader else {
            let sum = sums.iter().find(|sum| (sum.model, sum.task) == (model, task)).copied().unwrap_or_default();
            out.extend_from_slice(if *at == 0 { b"" } else { b"," });
            let opening = workload(self.head.id.to_string(), spec, model, task, rows, &sum).to_string();
            out.extend_from_slice(opening.strip_suffix('}').unwrap_or(&opening).as_bytes());
            out.extend_from_slice(b",\"episodes\":[");
            // By the cell's own rows: looking for scored ones alone would pass over everybody else's again for each cell.
            let filter = RowFilter { outcome: None, model: Some(model), task: Some(task) };
            *reader = Some(RowReader::new(self.state.store.clone(), self.head.id, self.head.rows_total, 0, filter));
            *first = true;
            return Ok(());
        };
        let items = open.next(BLOCK).await?;
        for item in &items {
            let Some(episode) = episode(item) else { continue };
            out.extend_from_slice(if *first { b"" } else { b"," });
            *first = false;
            serde_json::to_writer(&mut *out, &episode).map_err(unwritable)?;
        }
        if items.is_empty() {
            out.extend_from_slice(b"]}");
            *reader = None;
            *at += 1;
        }
        Ok(())
    }
}

fn workload(id: String, spec: &EvaluationSpec, model: u32, task: u32, rows: u64, sum: &CellSums) -> Value {
    let (model, task) = (spec.models.get(model as usize), spec.tasks.get(task as usize));
    let mean = if sum.scored == 0 { 0.0 } else { sum.reward_sum / sum.scored as f64 };
    let rate = (sum.scored > 0 && sum.unknown_success == 0).then(|| sum.successes as f64 / sum.scored as f64);
    json!({
        "model": model.map(|model| &model.id),
        "env": task.map(|task| &task.env),
        "task": task.map(|task| &task.task_id),
        "config": {
            "evaluation": id,
            "params": task.map(|task| &task.params),
            "seed": task.map(|task| task.seed),
            "trialIndexBase": task.map(|task| task.trial_index_base),
            "maxEpisodeSteps": task.and_then(|task| task.max_episode_steps),
            "successRule": task.and_then(|task| task.success),
            "executionHorizon": model.map(|model| model.execution_horizon),
            "prefetchLead": model.map(|model| model.prefetch_lead),
            "modelImage": model.and_then(|model| model.image.as_ref()),
            "erroredEpisodes": sum.errored,
            "pendingEpisodes": rows.saturating_sub(sum.scored + sum.errored),
        },
        "numEpisodes": sum.scored,
        "metrics": {"meanReward": mean, "successRate": rate, "totalSteps": sum.steps_sum},
    })
}

fn episode(item: &RowWithOutcome) -> Option<Value> {
    let outcome = item.outcome.as_ref()?;
    let RowOutcome::Scored { reward, steps, terminated, truncated, success, .. } = &outcome.result else { return None };
    Some(json!({
        "index": item.row.trial,
        "seed": item.row.seed,
        "steps": steps,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "success": success,
        "durationS": outcome.ended_at.saturating_sub(outcome.started_at).max(0) as f64 / 1_000.0,
        "includedInMetrics": true,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_quotes_what_would_break_a_record() {
        let mut out = Vec::new();
        csv_text("a,\"b\"\nc", &mut out);
        assert_eq!(out, b"\"a,\"\"b\"\"\nc\"");
    }

    #[test]
    fn csv_has_every_field_of_a_line() {
        let labels = Labels { models: vec![], tasks: vec![] };
        let row = rlm_core::rows::Row { row: 0, model: 0, task: 0, trial: 0, seed: 0, trial_index: 0 };
        let item = RowWithOutcome { row, outcome: None };
        let line = serde_json::to_value(Line::new(&labels, &item)).unwrap_or_default();
        let names: std::collections::BTreeSet<&str> = CSV_HEADER.trim_end().split(',').collect();
        let fields: std::collections::BTreeSet<&str> =
            line.as_object().map(|fields| fields.keys().map(String::as_str).collect()).unwrap_or_default();
        assert_eq!(names, fields);
    }
}

//! Reading evaluations: lists, one in full, what it waits for, its rows, its timings.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use rlm_api::rest::{EvaluationDetail, EvaluationSummary, FailureCount, Page, Progress, RowOutcome as Kind, RowResult, RunSummary};
use rlm_core::error::{Code, Error};
use rlm_core::evaluation::{MetricSeries, RunMetrics};
use rlm_core::ids::ClusterId;
use rlm_core::run::{RunState, Waiting};
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use super::rows::{RowFilter, RowReader, result};
use super::{Labels, find, labels};
use crate::app::access::Caller;
use crate::app::ingest::document;
use crate::state::AppState;
use crate::store::StoreError;
use crate::store::evaluations::{ClusterCondition, EvaluationFilter, EvaluationHead};
use crate::store::outcomes::RUN_FAILURE;
use crate::store::runs::{MetricsByGeneration, RunHead};

/// Runs shown of one evaluation.
const SHOWN_RUNS: u32 = 1_000;
const SHOWN_FAILURES: u32 = 20;

/// Newest first; the cursor is the last one's id.
pub async fn list(state: &AppState, caller: &Caller, filter: &EvaluationFilter) -> Result<Page<EvaluationSummary>, Error> {
    let mut heads =
        state.store.evaluations(caller.organization_id, &EvaluationFilter { limit: filter.limit + 1, ..filter.clone() }).await?;
    let more = heads.len() > filter.limit as usize;
    heads.truncate(filter.limit as usize);
    let next_cursor = heads.last().filter(|_| more).map(|last| last.id.to_string());
    Ok(Page { items: summaries(state, &heads).await?, next_cursor })
}

pub async fn summary(state: &AppState, head: &EvaluationHead) -> Result<EvaluationSummary, Error> {
    let mut summaries = summaries(state, std::slice::from_ref(head)).await?;
    summaries.pop().ok_or_else(|| Error::new(Code::NotFound, format!("the evaluation {} was deleted", head.id)))
}

async fn summaries(state: &AppState, heads: &[EvaluationHead]) -> Result<Vec<EvaluationSummary>, StoreError> {
    let open: Vec<_> = heads.iter().filter(|head| !head.status.is_terminal()).map(|head| head.id).collect();
    let mut waiting: HashMap<_, Waiting> = HashMap::new();
    if let Some(first) = heads.first().filter(|_| !open.is_empty()) {
        let clusters = state.store.cluster_conditions(first.organization).await?;
        let pins: HashMap<_, _> = heads.iter().map(|head| (head.id, head.cluster)).collect();
        for run in state.store.leading_runs(&open).await? {
            let pinned = pins.get(&run.evaluation).copied().flatten();
            waiting.extend(waits_for(&run, pinned, &clusters).map(|waiting| (run.evaluation, waiting)));
        }
    }
    Ok(heads
        .iter()
        .map(|head| EvaluationSummary {
            id: head.id.to_string(),
            name: head.name.clone(),
            evaluation_label: if head.name.is_empty() { head.id.to_string() } else { head.name.clone() },
            status: head.status,
            progress: Progress {
                completed_episodes: head.rows_scored + head.rows_errored,
                total_episodes: head.rows_total,
                scored_episodes: head.rows_scored,
                errored_episodes: head.rows_errored,
            },
            tags: head.tags.clone(),
            cluster: head.cluster.map(|cluster| cluster.to_string()),
            waiting: waiting.remove(&head.id),
            created_at: time(head.created_at),
            started_at: head.started_at.map(time),
            finished_at: head.finished_at.map(time),
            created_by: head.created_by.clone(),
        })
        .collect())
}

fn time(unix_ms: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(unix_ms).unwrap_or_default()
}

/// Why this run does not run, in the order in which a user can do something about it. Pure.
fn waits_for(run: &RunHead, pinned: Option<ClusterId>, clusters: &[ClusterCondition]) -> Option<Waiting> {
    let holder = run.cluster.filter(|_| run.state.is_placed()).and_then(|held| clusters.iter().find(|cluster| cluster.id == held));
    if let Some(waiting) = holder.and_then(|cluster| hindered(run, cluster)) {
        return Some(waiting);
    }
    match run.state {
        RunState::Finished | RunState::Failed | RunState::Cancelled => return None,
        RunState::Running => return run.waiting.clone(),
        RunState::Leased => {
            return Some(run.waiting.clone().unwrap_or_else(|| Waiting {
                cause: "modelStarting".to_owned(),
                since: time(run.leased_at.unwrap_or(run.created_at)),
                message: "the cluster has the run and is about to start it".to_owned(),
            }));
        }
        RunState::Queued => {}
    }
    let because = |cause: &str, message: String| Some(Waiting { cause: cause.to_owned(), since: time(run.created_at), message });
    let eligible: Vec<_> = clusters.iter().filter(|cluster| pinned.is_none_or(|pinned| pinned == cluster.id)).collect();
    let connected: Vec<_> = eligible.iter().filter(|cluster| cluster.connected).collect();
    match (pinned, eligible.is_empty(), connected.is_empty()) {
        (Some(cluster), true, _) => {
            because("noCluster", format!("the cluster {cluster} was archived; cancel this evaluation, or clone it to another cluster"))
        }
        (Some(cluster), false, true) => {
            because("clusterDisconnected", format!("no agent of the cluster {cluster} is connected; see `rlmesh clusters get {cluster}`"))
        }
        (None, true, _) => {
            because("noCluster", "no cluster is connected; run `rlmesh up`, or connect one with `rlmesh clusters join-command`".to_owned())
        }
        (None, false, true) => {
            because("noCluster", "none of the organization's clusters is connected; see `rlmesh clusters list`".to_owned())
        }
        (_, false, false) if connected.iter().all(|cluster| cluster.draining) => {
            because("clusterDraining", "every cluster that could take it is draining and takes no new runs; resume one of them".to_owned())
        }
        (_, false, false) => run.waiting.clone().or_else(|| because("capacity", "waits for room on a cluster".to_owned())),
    }
}

/// Why the results of a run do not come although its cluster holds it.
fn hindered(run: &RunHead, cluster: &ClusterCondition) -> Option<Waiting> {
    let began = run.leased_at.unwrap_or(run.created_at);
    let because = |cause: &str, since: Option<i64>, message| {
        let since = time(since.unwrap_or(began).max(began));
        Some(Waiting { cause: cause.to_owned(), since, message })
    };
    if !cluster.connected {
        let message = format!(
            "the agent of cluster {} is disconnected; the run goes on there, and its results come when it is back: see `rlmesh clusters get {}`",
            cluster.name, cluster.id
        );
        return because("clusterDisconnected", cluster.disconnected_at, message);
    }
    let (since, why) = cluster.full.as_ref()?;
    because("spoolFull", *since, format!("the agent of cluster {}: {why}", cluster.name))
}

pub async fn detail(state: &AppState, caller: &Caller, id: &str) -> Result<EvaluationDetail, Error> {
    let head = find(state, caller, id).await?;
    let missing = || Error::new(Code::NotFound, format!("the evaluation {} was deleted", head.id));
    let documents = state.store.evaluation_documents(head.id).await?.ok_or_else(missing)?;
    let clusters = state.store.cluster_conditions(head.organization).await?;
    let runs = state.store.run_heads(head.id, SHOWN_RUNS).await?;
    let failures = if head.rows_errored == 0 { Vec::new() } else { state.store.failure_counts(head.id, SHOWN_FAILURES).await? };
    let now_ms = state.clock.now_ms();
    let (queued_seconds, active_seconds) = clocks(&head, now_ms);
    Ok(EvaluationDetail {
        summary: summary(state, &head).await?,
        request: documents.request,
        effective: documents.spec,
        warnings: documents.warnings,
        runs: runs
            .into_iter()
            .map(|run| RunSummary {
                id: run.id.to_string(),
                waiting: waits_for(&run, head.cluster, &clusters),
                model: run.model,
                env: run.env,
                state: run.state,
                generation: run.generation,
                cluster: run.cluster.map(|cluster| cluster.to_string()),
                rows: run.rows_total,
                failure: run.failure,
                provenance: run.provenance,
                metrics: (!run.metrics.is_empty()).then(|| over_generations(&run.metrics)),
            })
            .collect(),
        failures: failures
            .into_iter()
            .map(|one| FailureCount {
                count: one.count,
                example: one.failure,
                example_row: one.row,
                example_run: Some(one.run.to_string()),
            })
            .collect(),
        queued_seconds,
        active_seconds,
    })
}

/// Seconds from submission to the first episode, and from there to the end or now.
fn clocks(head: &EvaluationHead, now_ms: i64) -> (f64, f64) {
    let seconds = |from: i64, to: i64| (to - from).max(0) as f64 / 1_000.0;
    let end = head.finished_at.unwrap_or(now_ms);
    match head.started_at {
        Some(started) => (seconds(head.created_at, started), seconds(started, end)),
        None => (seconds(head.created_at, end), 0.0),
    }
}

/// Answers once the evaluation has ended or its status is another than when the call came, or after `time`.
pub async fn wait(state: &AppState, caller: &Caller, id: &str, time: Duration) -> Result<EvaluationDetail, Error> {
    let deadline = Instant::now() + time;
    let mut listener = state.events.subscribe();
    let first = find(state, caller, id).await?;
    let mut now = first.clone();
    while !now.status.is_terminal() && now.status == first.status && listener.changed(first.id, deadline).await {
        now = find(state, caller, id).await?;
    }
    detail(state, caller, id).await
}

/// Throughput and timings over all runs of an evaluation.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Metrics {
    pub id: String,
    pub queued_seconds: f64,
    pub active_seconds: f64,
    pub episodes: u64,
    pub env_steps: u64,
    /// Over the active time of the evaluation.
    pub episodes_per_second: f64,
    pub env_steps_per_second: f64,
    /// GPUs of each run times the seconds it held them.
    pub gpu_seconds: f64,
    /// Series of all runs together: counts add up, averages are weighted by count, percentiles are the highest of any run.
    #[schema(value_type = Vec<Object>)]
    pub series: Vec<MetricSeries>,
    pub runs: Vec<RunTimings>,
}

#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunTimings {
    pub id: String,
    pub model: String,
    pub env: String,
    pub queued_seconds: f64,
    pub active_seconds: f64,
    pub gpu_seconds: f64,
    #[schema(value_type = Object)]
    pub metrics: RunMetrics,
}

/// GPUs that runs of a (model, environment) hold.
#[derive(serde::Deserialize)]
struct Gpus {
    models: Vec<GpuModel>,
    environments: Vec<GpuEnvironment>,
}
#[derive(serde::Deserialize)]
struct GpuModel {
    id: String,
    resources: rlm_core::evaluation::Resources,
}
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct GpuEnvironment {
    id: String,
    resources: rlm_core::evaluation::Resources,
    share_model_gpu: bool,
}

impl Gpus {
    fn of(&self, run: &RunHead) -> u32 {
        let model = self.models.iter().find(|model| model.id == run.model).map_or(0, |model| model.resources.gpu);
        let environment = self.environments.iter().find(|environment| environment.id == run.env && !environment.share_model_gpu);
        model + environment.map_or(0, |environment| environment.resources.gpu)
    }
}

pub async fn metrics(state: &AppState, caller: &Caller, id: &str) -> Result<Metrics, Error> {
    let head = find(state, caller, id).await?;
    let gpus: Gpus =
        state.store.spec_as(head.id).await?.ok_or_else(|| Error::new(Code::NotFound, format!("the evaluation {} was deleted", head.id)))?;
    let now_ms = state.clock.now_ms();
    let (queued_seconds, active_seconds) = clocks(&head, now_ms);
    let mut all = RunMetrics::default();
    let mut runs = Vec::new();
    for run in state.store.run_heads(head.id, u32::MAX).await? {
        let seconds = |from: i64, to: i64| (to - from).max(0) as f64 / 1_000.0;
        let end = run.finished_at.unwrap_or(now_ms);
        let held = run.leased_at.map_or(0.0, |leased| seconds(leased, end));
        // Of earlier leases it is known how long their runners were at work.
        let before: u64 = run.metrics.range(..run.generation).map(|(_, metrics)| metrics.active_ms).sum();
        let held = held + before as f64 / 1_000.0;
        let merged = over_generations(&run.metrics);
        all.add(&merged);
        runs.push(RunTimings {
            queued_seconds: seconds(run.created_at, run.leased_at.unwrap_or(end)),
            active_seconds: run.started_at.map_or(0.0, |started| seconds(started, end)),
            gpu_seconds: held * f64::from(gpus.of(&run)),
            id: run.id.to_string(),
            model: run.model,
            env: run.env,
            metrics: merged,
        });
    }
    let rate = |count: u64| if active_seconds > 0.0 { count as f64 / active_seconds } else { 0.0 };
    Ok(Metrics {
        id: head.id.to_string(),
        queued_seconds,
        active_seconds,
        episodes: all.episodes,
        env_steps: all.env_steps,
        episodes_per_second: rate(all.episodes),
        env_steps_per_second: rate(all.env_steps),
        gpu_seconds: runs.iter().map(|run| run.gpu_seconds).sum(),
        series: all.series,
        runs: runs.into_iter().take(SHOWN_RUNS as usize).collect(),
    })
}

/// The generations of a run together.
fn over_generations(metrics: &MetricsByGeneration) -> RunMetrics {
    let mut all = RunMetrics::default();
    for one in metrics.values() {
        all.add(one);
    }
    let seconds = all.active_ms as f64 / 1_000.0;
    if metrics.len() == 1 || seconds <= 0.0 {
        let last = metrics.values().next_back();
        all.env_steps_per_second = last.map_or(0.0, |last| last.env_steps_per_second);
        all.episodes_per_second = last.map_or(0.0, |last| last.episodes_per_second);
    } else {
        all.env_steps_per_second = all.env_steps as f64 / seconds;
        all.episodes_per_second = all.episodes as f64 / seconds;
    }
    all
}

/// How a page of rows is asked for: model by id, task by its `taskId` or by `env:taskId`.
#[derive(Debug, Clone, Default)]
pub struct RowQuery {
    pub outcome: Option<Kind>,
    pub model: Option<String>,
    pub task: Option<String>,
    pub from: u64,
    pub limit: u32,
}

/// One page of rows, in order of row number; the cursor is the number to go on from.
pub async fn rows_page(state: &AppState, caller: &Caller, id: &str, query: &RowQuery) -> Result<Page<RowResult>, Error> {
    let head = find(state, caller, id).await?;
    let labels = labels(state, head.id).await?;
    let filter = RowFilter {
        outcome: query.outcome,
        model: model_position(&labels, query.model.as_deref())?,
        task: task_position(&labels, query.task.as_deref())?,
    };
    let mut reader = RowReader::new(state.store.clone(), head.id, head.rows_total, query.from, filter);
    let items = reader.next(query.limit).await?;
    let kept: HashMap<u64, u64> = match (items.first(), items.last()) {
        (Some(first), Some(last)) => state.store.attempt_counts(head.id, first.row.row, last.row.row + 1).await?.into_iter().collect(),
        _ => HashMap::new(),
    };
    Ok(Page {
        items: items
            .into_iter()
            .map(|item| {
                let kept = kept.get(&item.row.row).copied().unwrap_or(0);
                result(&labels, item, kept)
            })
            .collect(),
        next_cursor: reader.position().map(|row| row.to_string()),
    })
}

fn model_position(labels: &Labels, model: Option<&str>) -> Result<Option<u32>, Error> {
    let Some(model) = model else { return Ok(None) };
    let position = (0..).zip(&labels.models).find(|(_, label)| label.id == model).map(|(at, _)| at);
    let known = || labels.models.iter().take(20).map(|label| label.id.as_str()).collect::<Vec<_>>().join(", ");
    position
        .map(Some)
        .ok_or_else(|| Error::new(Code::BadRequest, format!("the parameter 'model' names none of the evaluation's models: {}", known())))
}

fn task_position(labels: &Labels, task: Option<&str>) -> Result<Option<u32>, Error> {
    let Some(task) = task else { return Ok(None) };
    let matches: Vec<u32> = (0..)
        .zip(&labels.tasks)
        .filter(|(_, label)| {
            label.task_id == task || task.strip_prefix(label.env.as_str()).and_then(|rest| rest.strip_prefix(':')) == Some(&label.task_id)
        })
        .map(|(at, _)| at)
        .collect();
    match matches.as_slice() {
        [only] => Ok(Some(*only)),
        [] => Err(Error::new(Code::BadRequest, "the parameter 'task' names none of the evaluation's tasks; it is a taskId, or env:taskId")),
        _ => Err(Error::new(Code::BadRequest, "the parameter 'task' names tasks of more than one environment; say env:taskId")),
    }
}

/// A row with all its attempts, oldest first; `counts` marks the one behind the row's outcome.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RowDetail {
    #[serde(flatten)]
    pub row: RowResult,
    pub history: Vec<AttemptDetail>,
}

#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptDetail {
    pub run: String,
    pub generation: u64,
    /// Null: the run as a whole failed before this row had an attempt that ended.
    pub attempt: Option<u64>,
    pub counts: bool,
    #[schema(value_type = Object)]
    pub episode: Value,
}

pub async fn row_detail(state: &AppState, caller: &Caller, id: &str, row: u64) -> Result<RowDetail, Error> {
    let head = find(state, caller, id).await?;
    let labels = labels(state, head.id).await?;
    let item = one_row(state, &head, row).await?;
    let attempts = state.store.attempts(head.id, row).await?;
    let kept = attempts.iter().filter(|attempt| attempt.attempt != RUN_FAILURE).count() as u64;
    let counting = item.outcome.as_ref().map(|outcome| (outcome.generation, outcome.attempt));
    let mut history: Vec<AttemptDetail> = attempts
        .into_iter()
        .map(|attempt| AttemptDetail {
            run: attempt.run.to_string(),
            generation: attempt.generation,
            attempt: u64::try_from(attempt.attempt).ok(),
            counts: counting == Some((attempt.generation, attempt.attempt)),
            episode: attempt.episode,
        })
        .collect();
    if let Some(outcome) = item.outcome.as_ref().filter(|outcome| outcome.is_scored()) {
        history.push(AttemptDetail {
            run: outcome.run.to_string(),
            generation: outcome.generation,
            attempt: u64::try_from(outcome.attempt).ok(),
            counts: true,
            episode: document(outcome),
        });
        history.sort_by_key(|attempt| (attempt.generation, attempt.attempt));
    }
    Ok(RowDetail { row: result(&labels, item, kept), history })
}

pub(super) async fn one_row(state: &AppState, head: &EvaluationHead, row: u64) -> Result<super::rows::RowWithOutcome, Error> {
    let mut reader = RowReader::new(state.store.clone(), head.id, head.rows_total, row, RowFilter::default());
    let mut items = if row < head.rows_total { reader.next(1).await? } else { Vec::new() };
    items.pop().filter(|item| item.row.row == row).ok_or_else(|| {
        Error::new(Code::NotFound, format!("{} has no row {row}; its rows are 0 to {}", head.id, head.rows_total.saturating_sub(1)))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use rlm_core::ids::{EvaluationId, OrganizationId, RunId};

    fn queued() -> RunHead {
        RunHead {
            id: RunId::generate(),
            evaluation: EvaluationId::generate(),
            organization: OrganizationId::generate(),
            state: RunState::Queued,
            generation: 0,
            cluster: None,
            model: "m".into(),
            env: "e".into(),
            rows_total: 1,
            created_at: 5,
            leased_at: None,
            started_at: None,
            finished_at: None,
            waiting: None,
            failure: None,
            provenance: None,
            metrics: BTreeMap::new(),
        }
    }

    #[test]
    fn each_reason_to_wait_has_its_cause() {
        let (one, two) = (ClusterId::generate(), ClusterId::generate());
        let cause = |pinned, clusters: &[(ClusterId, bool, bool)]| {
            let clusters: Vec<ClusterCondition> =
                clusters.iter().map(|&(id, connected, draining)| ClusterCondition { draining, ..condition(id, connected) }).collect();
            waits_for(&queued(), pinned, &clusters).unwrap().cause
        };
        assert_eq!(cause(None, &[]), "noCluster");
        assert_eq!(cause(None, &[(one, false, false)]), "noCluster");
        assert_eq!(cause(Some(one), &[(one, false, false), (two, true, false)]), "clusterDisconnected");
        assert_eq!(cause(Some(one), &[(two, true, false)]), "noCluster");
        assert_eq!(cause(None, &[(one, true, true), (two, false, false)]), "clusterDraining");
        assert_eq!(cause(None, &[(one, true, false)]), "capacity");
    }

    fn condition(id: ClusterId, connected: bool) -> ClusterCondition {
        ClusterCondition { id, name: "c".into(), connected, disconnected_at: None, full: None, draining: false, runs_processes: true }
    }

    #[test]
    fn a_running_run_waits_for_what_its_agent_says_and_for_its_agent() {
        let cluster = ClusterId::generate();
        let mut run = RunHead { state: RunState::Running, cluster: Some(cluster), ..queued() };
        assert_eq!(waits_for(&run, None, &[condition(cluster, true)]), None);
        let away = ClusterCondition { disconnected_at: Some(7_000), ..condition(cluster, false) };
        let waiting = waits_for(&run, None, &[away]).unwrap();
        assert_eq!((waiting.cause.as_str(), waiting.since), ("clusterDisconnected", time(7_000)));
        let full = ClusterCondition { full: Some((Some(9_000), "the disk is full".into())), ..condition(cluster, true) };
        let waiting = waits_for(&run, None, std::slice::from_ref(&full)).unwrap();
        assert_eq!((waiting.cause.as_str(), waiting.since), ("spoolFull", time(9_000)));
        assert!(waiting.message.contains("the disk is full"));
        run.state = RunState::Finished;
        assert_eq!(waits_for(&run, None, &[full]), None);
    }

    #[test]
    fn metrics_of_generations_add_up() {
        let series = |count, avg, p95| MetricSeries {
            op: "env.step".into(),
            component: "env".into(),
            metric: "rpc.total".into(),
            unit: "ms".into(),
            count,
            avg,
            p50: 1.0,
            p95,
            p99: p95,
        };
        let one = RunMetrics { active_ms: 1_000, episodes: 2, env_steps: 100, series: vec![series(10, 1.0, 3.0)], ..RunMetrics::default() };
        let two = RunMetrics { active_ms: 3_000, episodes: 4, env_steps: 300, series: vec![series(30, 5.0, 2.0)], ..RunMetrics::default() };
        let all = over_generations(&BTreeMap::from([(1, one), (2, two)]));
        assert_eq!((all.active_ms, all.episodes, all.env_steps), (4_000, 6, 400));
        assert_eq!((all.series[0].count, all.series[0].avg, all.series[0].p95), (40, 4.0, 3.0));
        assert!((all.env_steps_per_second - 100.0).abs() < 1e-9);
    }
}

//! Import of an SDK result file (`rlmesh.result.v1`) as a completed evaluation, to set a laptop's numbers beside a cluster's.
//!
//! A second import of the same result set is the same evaluation. What the file does not say stays unknown: an episode
//! without a success flag has none here.

use std::collections::BTreeMap;

use rlm_core::error::{Code, Error, Problem};
use rlm_core::evaluation::{EnvironmentDefinition, EvaluationSpec, Limits, ModelDefinition, Recording, Resources, Task};
use rlm_core::ids::{EvaluationId, RunId};
use rlm_core::rows::{MAX_ROWS, Segment};
use rlm_core::run::EvaluationStatus;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::submit::{Created, answer, repeated, request_hash};
use crate::app::access::Caller;
use crate::app::audit;
use crate::state::AppState;
use crate::store::evaluations::NewEvaluation;
use crate::store::outcomes::{OutcomeRow, RowOutcome};

const SCHEMA: &str = "rlmesh.result.v1";
/// Key in the metadata of an imported evaluation.
const MARK: &str = "importedResultSet";

/// Whether an evaluation was imported; read from its request as it came, where no submitted one has this field.
#[derive(Deserialize)]
pub(super) struct ImportMark {
    import: Option<serde::de::IgnoredAny>,
}

impl ImportMark {
    pub const fn is_imported(&self) -> bool {
        self.import.is_some()
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ResultFile {
    schema: String,
    result_set_id: String,
    recorded_at: Option<String>,
    workloads: Vec<Workload>,
}

#[derive(Debug, Deserialize)]
struct Workload {
    model: String,
    env: String,
    task: Option<String>,
    #[serde(default)]
    config: Value,
    episodes: Vec<Episode>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Episode {
    index: u64,
    seed: Option<i64>,
    steps: u32,
    reward: f64,
    terminated: bool,
    truncated: bool,
    success: Option<bool>,
    #[serde(default)]
    duration_s: f64,
    #[serde(default = "counted")]
    included_in_metrics: bool,
}

const fn counted() -> bool {
    true
}

/// A file as it will be stored.
struct Plan {
    spec: EvaluationSpec,
    segments: Vec<Segment>,
    outcomes: Vec<OutcomeRow>,
    warnings: Vec<String>,
    last_end: i64,
}

pub async fn import(state: &AppState, caller: &Caller, name: Option<String>, file: Value) -> Result<Created, Error> {
    let parsed: ResultFile = serde_json::from_value(file.clone())
        .map_err(|error| Error::invalid(vec![Problem::new("", format!("this is not a {SCHEMA} result file: {error}"))]))?;
    if parsed.schema != SCHEMA {
        return Err(Error::invalid(vec![Problem::new(
            "schema",
            format!("is '{}'; only {SCHEMA} can be imported", parsed.schema.chars().take(60).collect::<String>()),
        )]));
    }
    let problems = check(&parsed);
    if !problems.is_empty() {
        return Err(Error::invalid(problems));
    }
    let token = format!("import:{}", parsed.result_set_id);
    let hash = request_hash(&file);
    if let Some(created) = repeated(state, caller, Some(&token), &hash).await? {
        return Ok(created);
    }
    let now_ms = state.clock.now_ms();
    let recorded = parsed
        .recorded_at
        .as_deref()
        .and_then(|text| chrono::DateTime::parse_from_rfc3339(text).ok())
        .map_or(now_ms, |time| time.timestamp_millis());
    let id = EvaluationId::generate();
    let plan = plan(parsed, name, recorded)?;
    let mut write = state.store.write().await?;
    let request = json!({"import": {"schema": SCHEMA, "resultSetId": plan.spec.metadata.get(MARK)}, "name": plan.spec.name});
    let total = plan.outcomes.len() as u64;
    let new = NewEvaluation {
        id,
        organization: caller.organization_id,
        created_at: now_ms,
        created_by: caller.user_id.to_string(),
        client_token: Some(token.clone()),
        request_hash: hash.clone(),
        request: &request,
        spec: &plan.spec,
        warnings: &plan.warnings,
        rows_total: total,
    };
    match write.insert_evaluation(&new).await {
        Ok(()) => {}
        Err(error) if error.is_unique_violation() => {
            drop(write);
            let found = repeated(state, caller, Some(&token), &hash).await?;
            return found.ok_or_else(|| Error::new(Code::Conflict, "the same file is being imported at this moment; send it again"));
        }
        Err(error) => return Err(error.into()),
    }
    write.insert_segments(id, &plan.segments).await?;
    write.put_outcomes(id, &plan.outcomes).await?;
    if let Some(mut evaluation) = write.lock_evaluation(id).await? {
        evaluation.rows_scored = total;
        evaluation.status = EvaluationStatus::Completed;
        evaluation.started_at = Some(recorded);
        evaluation.finished_at = Some(plan.last_end);
        write.save_evaluation(&evaluation).await?;
    }
    audit::record(
        &mut write,
        now_ms,
        &caller.actor(),
        "evaluation.import",
        &id.to_string(),
        json!({"name": plan.spec.name, "rows": total}),
    )
    .await?;
    write.commit().await?;
    state.events.publish(id);
    Ok(Created { answer: answer(state, id, EvaluationStatus::Completed, plan.warnings), fresh: true })
}

fn check(file: &ResultFile) -> Vec<Problem> {
    let mut problems = Vec::new();
    if file.result_set_id.is_empty() || file.result_set_id.len() > 100 {
        problems.push(Problem::new("resultSetId", "must have 1 to 100 characters"));
    }
    let total: usize =
        file.workloads.iter().map(|workload| workload.episodes.iter().filter(|episode| episode.included_in_metrics).count()).sum();
    if total == 0 {
        problems.push(Problem::new("workloads", "hold no episode that counts"));
    }
    if total as u64 > MAX_ROWS {
        problems.push(Problem::new("workloads", format!("{total} episodes in all; an evaluation has at most {MAX_ROWS}")));
    }
    for (at, workload) in file.workloads.iter().enumerate() {
        let path = format!("workloads[{at}]");
        for (name, text) in [("model", Some(&workload.model)), ("env", Some(&workload.env)), ("task", workload.task.as_ref())] {
            if text.is_some_and(|text| text.is_empty() || text.len() > 200 || text.chars().any(char::is_control)) {
                problems.push(Problem::new(format!("{path}.{name}"), "must have 1 to 200 bytes, none of them a control character"));
            }
        }
        let mut seen = std::collections::HashSet::new();
        for (place, episode) in workload.episodes.iter().enumerate() {
            let path = format!("{path}.episodes[{place}]");
            if !episode.reward.is_finite() {
                problems.push(Problem::new(format!("{path}.reward"), "must be a finite number"));
            }
            if episode.seed.is_some_and(|seed| seed < 0) {
                problems.push(Problem::new(format!("{path}.seed"), "must not be negative"));
            }
            if episode.index > u64::from(u32::MAX) {
                problems.push(Problem::new(format!("{path}.index"), format!("must be at most {}", u32::MAX)));
            }
            if !seen.insert(episode.index) {
                problems.push(Problem::new(
                    format!("{path}.index"),
                    format!("{} is the index of another episode of this workload too", episode.index),
                ));
            }
        }
        if problems.len() > 100 {
            break;
        }
    }
    problems
}

fn plan(file: ResultFile, name: Option<String>, recorded: i64) -> Result<Plan, Error> {
    let mut models: Vec<ModelDefinition> = Vec::new();
    let mut environments: Vec<EnvironmentDefinition> = Vec::new();
    let mut tasks: Vec<Task> = Vec::new();
    let mut cells = std::collections::BTreeSet::new();
    let (mut segments, mut outcomes, mut workloads) = (Vec::new(), Vec::new(), Vec::new());
    let (mut left_out, mut without_seed) = (0_u64, 0_u64);
    let mut last_end = recorded;
    let run = RunId::generate();
    for workload in file.workloads {
        let task_id = workload.task.unwrap_or_else(|| workload.env.clone());
        if !environments.iter().any(|known| known.id == workload.env) {
            environments.push(environment(&workload.env));
        }
        let described = new_task(&workload.env, &task_id, &workload.config);
        let task = tasks.iter().position(|task| Task { episodes: 0, ..task.clone() } == described).unwrap_or_else(|| {
            tasks.push(described);
            tasks.len() - 1
        });
        // The same model, environment and task again is another configuration: a model of its own.
        let mut model_id = workload.model.clone();
        let mut copy = 1;
        while !cells.insert((model_id.clone(), task)) {
            copy += 1;
            model_id = format!("{}#{copy}", workload.model);
        }
        let horizon = |name: &str| workload.config.get(name).and_then(Value::as_u64).and_then(|value| u32::try_from(value).ok());
        let model = models.iter().position(|known| known.id == model_id).unwrap_or_else(|| {
            models.push(model(&model_id, horizon("executionHorizon").unwrap_or(1), horizon("prefetchLead").unwrap_or(0)));
            models.len() - 1
        });
        workloads.push(json!({"model": model_id, "env": workload.env, "task": task_id, "config": workload.config}));
        let mut episodes = workload.episodes;
        let before = episodes.len();
        episodes.retain(|episode| episode.included_in_metrics);
        left_out += (before - episodes.len()) as u64;
        episodes.sort_by_key(|episode| episode.index);
        if episodes.is_empty() {
            continue;
        }
        let (model, position) = (position(model)?, position(task)?);
        let base = tasks.get_mut(task).map_or(0, |task| {
            task.episodes = task.episodes.max(episodes.len() as u64);
            task.trial_index_base.min(u64::from(u32::MAX))
        });
        for episodes in episodes.chunk_by(|one, next| one.index + 1 == next.index) {
            let first_row = outcomes.len() as u64;
            let mut seeds = Vec::with_capacity(episodes.len());
            for (row, episode) in (first_row..).zip(episodes) {
                without_seed += u64::from(episode.seed.is_none());
                let seed = episode.seed.and_then(|seed| u64::try_from(seed).ok()).unwrap_or(0);
                seeds.push(seed);
                let ended_at = recorded.saturating_add((episode.duration_s.clamp(0.0, 1e9) * 1_000.0) as i64);
                last_end = last_end.max(ended_at);
                outcomes.push(OutcomeRow {
                    row,
                    model,
                    task: position,
                    run,
                    generation: 0,
                    attempt: 0,
                    seed,
                    result: RowOutcome::Scored {
                        reward: episode.reward,
                        steps: u64::from(episode.steps),
                        terminated: episode.terminated,
                        truncated: episode.truncated,
                        success: episode.success,
                        first_observation_sha256: None,
                        conformance_warnings: 0,
                    },
                    started_at: recorded,
                    ended_at,
                });
            }
            let seed = seeds.first().copied().unwrap_or(0);
            let consecutive = seeds.iter().zip(seed..).all(|(seed, expected)| *seed == expected);
            segments.push(Segment {
                first_row,
                count: episodes.len() as u64,
                model,
                task: position,
                // Models pair by what the file calls an episode's index, also where one of them lacks some.
                first_trial: episodes.first().map_or(0, |episode| episode.index),
                seed,
                seeds: (!consecutive).then_some(seeds),
                trial_index: base + episodes.first().map_or(0, |episode| episode.index),
            });
        }
    }
    let mut warnings = Vec::new();
    if left_out > 0 {
        warnings.push(format!("{left_out} episodes that the file leaves out of its metrics were not imported"));
    }
    if without_seed > 0 {
        warnings.push(format!("{without_seed} episodes have no seed in the file; their rows show seed 0 and pair by index alone"));
    }
    let metadata = Map::from_iter([
        (MARK.to_owned(), json!(file.result_set_id)),
        ("recordedAt".to_owned(), json!(file.recorded_at)),
        ("workloads".to_owned(), Value::Array(workloads)),
    ]);
    let name = name.unwrap_or_else(|| format!("import {}", file.result_set_id.chars().take(8).collect::<String>()));
    let spec = EvaluationSpec {
        name,
        tags: BTreeMap::new(),
        cluster: None,
        models,
        environments,
        tasks,
        limits: Limits::default(),
        pairs: None,
        recording: Recording::default(),
        priority: 0,
        metadata,
    };
    Ok(Plan { spec, segments, outcomes, warnings, last_end })
}

fn position(index: usize) -> Result<u32, Error> {
    u32::try_from(index).map_err(|_| Error::new(Code::InvalidRequest, "the file has too many workloads"))
}

/// A task with what the file's `config` says of it, as far as that can be read.
fn new_task(env: &str, task_id: &str, config: &Value) -> Task {
    fn said<T: serde::de::DeserializeOwned>(config: &Value, name: &str) -> Option<T> {
        config.get(name).and_then(|value| serde_json::from_value(value.clone()).ok())
    }
    Task {
        env: env.to_owned(),
        task_id: task_id.to_owned(),
        params: said(config, "params").unwrap_or_default(),
        episodes: 0,
        seed: said(config, "seed").unwrap_or(0),
        seeds: None,
        trial_index_base: said(config, "trialIndexBase").unwrap_or(0),
        workers: None,
        max_episode_steps: said(config, "maxEpisodeSteps"),
        instruction: None,
        success: said(config, "successRule"),
        metadata: Map::new(),
    }
}

fn model(id: &str, execution_horizon: u32, prefetch_lead: u32) -> ModelDefinition {
    ModelDefinition {
        id: id.to_owned(),
        image: None,
        entrypoint: None,
        python_path: None,
        python: None,
        address: None,
        params: Map::new(),
        checkpoints: Vec::new(),
        execution_horizon,
        prefetch_lead,
        workflow_edition: None,
        resources: Resources::default(),
        env: BTreeMap::new(),
        secret_env: BTreeMap::new(),
        startup_timeout_ms: 0,
        replicas: 1,
    }
}

fn environment(id: &str) -> EnvironmentDefinition {
    EnvironmentDefinition {
        id: id.to_owned(),
        image: None,
        entrypoint: None,
        python_path: None,
        python: None,
        address: None,
        params: Map::new(),
        resources: Resources::default(),
        share_model_gpu: false,
        lanes_per_pod: None,
        env: BTreeMap::new(),
        secret_env: BTreeMap::new(),
        startup_timeout_ms: 0,
    }
}

//! Evaluations.

use std::process::ExitCode;

use futures::StreamExt;
use reqwest::Method;
use rlm_api::rest::EvaluationDetail;
use rlm_core::run::EvaluationStatus;
use serde_json::{Value, json};

use crate::args::Eval;
use crate::client::Client;
use crate::commands::{encode, items};
use crate::config::Target;
use crate::error::CliError;
use crate::output::{Column, Format, Output, ago, note, print, print_bytes, text};
use crate::{progress, request_file, results};

const FIELDS: [Column; 11] = [
    ("id", |item| text(&item["id"])),
    ("name", |item| text(&item["name"])),
    ("status", |item| text(&item["status"])),
    ("episodes", episodes),
    ("errored", |item| {
        item["progress"]["erroredEpisodes"].as_u64().filter(|count| *count > 0).map(|count| count.to_string()).unwrap_or_default()
    }),
    ("waiting", |item| {
        let waiting = &item["waiting"];
        if waiting.is_null() {
            String::new()
        } else {
            format!("{} ({}, since {})", text(&waiting["message"]), text(&waiting["cause"]), ago(&waiting["since"]))
        }
    }),
    ("cluster", |item| text(&item["cluster"])),
    ("created", |item| ago(&item["createdAt"])),
    ("runs", |item| {
        runs(item)
            .map(|run| format!("{} x {} {}", text(&run["model"]), text(&run["env"]), text(&run["state"])))
            .collect::<Vec<_>>()
            .join("; ")
    }),
    ("warnings", |item| text(&item["warnings"])),
    ("failures", failures),
];

fn episodes(item: &Value) -> String {
    if item["progress"].is_null() {
        return String::new();
    }
    format!("{}/{}", text(&item["progress"]["completedEpisodes"]), text(&item["progress"]["totalEpisodes"]))
}

fn estimates(item: &Value) -> String {
    let of = |name: &str| text(&item["estimates"][name]);
    let steps = match of("maxEnvSteps") {
        steps if steps.is_empty() => "environment steps without a limit".to_owned(),
        steps => format!("at most {steps} environment steps"),
    };
    let (models, environments, tasks, runs) = (of("models"), of("environments"), of("tasks"), of("runs"));
    format!("models {models}, environments {environments}, tasks {tasks}, runs {runs}, {steps}, GPUs of models {}", of("modelGpus"))
}

fn runs(item: &Value) -> impl Iterator<Item = &Value> {
    item["runs"].as_array().into_iter().flatten()
}

fn failures(item: &Value) -> String {
    let failures = item["failures"].as_array().map_or(&[][..], Vec::as_slice);
    failures
        .iter()
        .map(|one| {
            let example = &one["example"];
            let lines = || example["logLines"].as_array().into_iter().flatten().rev().filter_map(Value::as_str);
            let log = lines().find(|line| !line.trim().is_empty());
            // Where in the code, as a Python traceback says it.
            let place = lines().map(str::trim).find(|line| line.starts_with("File \""));
            format!(
                "\n  {} x {}/{} (row {}): {}{}{}{}",
                text(&one["count"]),
                text(&example["class"]),
                text(&example["code"]),
                text(&one["exampleRow"]),
                text(&example["message"]),
                place.map(|line| format!("\n    where: {line}")).unwrap_or_default(),
                log.map(|line| format!("\n    last output: {line}")).unwrap_or_default(),
                // A run that no cluster has taken has no logs.
                runs(item)
                    .find(|run| run["id"] == one["exampleRun"] && !run["cluster"].is_null())
                    .map(|run| format!("\n    logs: rlmesh eval logs {} --run {}", text(&item["id"]), text(&run["id"])))
                    .unwrap_or_default()
            )
        })
        .collect()
}

fn path(id: &str, rest: &str) -> String {
    format!("/v1/evaluations/{}{rest}", encode(id))
}

pub async fn run(target: &Target, command: Eval, output: &Output) -> Result<ExitCode, CliError> {
    match command {
        Eval::Submit { file, preview, wait, timeout } => {
            let request = request_file::read(&file, request_file::REQUEST_LIMIT)?;
            let client = Client::new(target)?;
            if preview {
                let preview = client.post("/v1/evaluation-previews", &request).await?;
                output.item(
                    &preview,
                    &[
                        ("cells", |item| item["workloads"].as_array().map_or(0, Vec::len).to_string()),
                        ("rows", |item| text(&item["rows"])),
                        ("estimates", estimates),
                        ("warnings", |item| text(&item["warnings"])),
                    ],
                    "rows",
                )?;
                return Ok(ExitCode::SUCCESS);
            }
            let created = client.post("/v1/evaluations", &request).await?;
            for warning in created["warnings"].as_array().into_iter().flatten() {
                note(&format!("warning: {}", text(warning)));
            }
            let id = text(&created["id"]);
            if !wait {
                output.item(
                    &created,
                    &[("id", |item| text(&item["id"])), ("status", |item| text(&item["status"])), ("url", |item| text(&item["url"]))],
                    "id",
                )?;
                return Ok(ExitCode::SUCCESS);
            }
            note(&format!("Submitted {id}."));
            finish(&client, &id, timeout.timeout, output).await
        }
        Eval::Wait { id, timeout } => finish(&Client::new(target)?, &id, timeout.timeout, output).await,
        Eval::List { status, query, tags, limit } => {
            let client = Client::new(target)?;
            let mut filters: Vec<(&str, String)> = vec![("limit", limit.clamp(1, 200).to_string())];
            filters.extend(status.map(|status| ("status", status)));
            filters.extend(query.map(|query| ("q", query)));
            filters.extend(tags.into_iter().map(|tag| ("tag", tag)));
            let list = items(&client, "/v1/evaluations", &filters, limit as usize).await?;
            output.list(
                &list,
                &[
                    ("ID", |item| text(&item["id"])),
                    ("NAME", |item| text(&item["name"])),
                    ("STATUS", |item| text(&item["status"])),
                    ("EPISODES", |item| match item["progress"]["erroredEpisodes"].as_u64() {
                        Some(errored) if errored > 0 => format!("{}, {errored} errored", episodes(item)),
                        _ => episodes(item),
                    }),
                    ("CREATED", |item| ago(&item["createdAt"])),
                ],
                "id",
            )?;
            Ok(ExitCode::SUCCESS)
        }
        Eval::Get { id } => show(output, &Client::new(target)?.get(&path(&id, "")).await?),
        Eval::Cancel { id } => show(output, &Client::new(target)?.post(&path(&id, "/cancellations"), &json!({})).await?),
        Eval::Results { id, group_by } => {
            results::show(&Client::new(target)?, &id, &group_by, output).await?;
            Ok(ExitCode::SUCCESS)
        }
        Eval::Rows { id, outcome, limit } => {
            let client = Client::new(target)?;
            let limit = limit as usize;
            // One more than is shown: whether there are more.
            let mut filters: Vec<(&str, String)> = vec![("limit", (limit + 1).min(1000).to_string())];
            filters.extend(outcome.iter().map(|outcome| ("outcome", outcome.clone())));
            let mut rows = items(&client, &path(&id, "/rows"), &filters, limit + 1).await?;
            if rows.len() > limit {
                rows.truncate(limit);
                let progress = client.read::<EvaluationDetail>(&path(&id, "")).await?.summary.progress;
                let all = match outcome.as_deref() {
                    Some("pending") => progress.total_episodes.saturating_sub(progress.completed_episodes),
                    Some("scored") => progress.scored_episodes,
                    Some("errored") => progress.errored_episodes,
                    _ => progress.total_episodes,
                };
                note(&format!("{limit} of {all} rows; --limit N shows more"));
            }
            output.list(
                &rows,
                &[
                    ("ROW", |row| text(&row["row"])),
                    ("MODEL", |row| text(&row["model"])),
                    ("TASK", |row| text(&row["taskId"])),
                    ("SEED", |row| text(&row["seed"])),
                    ("OUTCOME", |row| text(&row["outcome"])),
                    ("REWARD", |row| text(&row["reward"])),
                    ("STEPS", |row| text(&row["steps"])),
                    ("SUCCESS", |row| text(&row["success"])),
                    ("FAILURE", |row| {
                        if row["failure"].is_null() {
                            String::new()
                        } else {
                            format!("{}: {}", text(&row["failure"]["code"]), text(&row["failure"]["message"]))
                        }
                    }),
                ],
                "row",
            )?;
            Ok(ExitCode::SUCCESS)
        }
        Eval::Logs { id, component, run, tail } => {
            let client = Client::new(target)?;
            let mut query = format!("/logs?tailLines={tail}");
            query.extend(component.iter().map(|component| format!("&component={}", encode(component))));
            query.extend(run.iter().map(|run| format!("&run={}", encode(run))));
            let logs = client.get(&path(&id, &query)).await?;
            if output.format != Format::Table {
                output.item(&logs, &[], "run")?;
                return Ok(ExitCode::SUCCESS);
            }
            for file in logs["files"].as_array().into_iter().flatten() {
                print(&format!(
                    "==> {} {} attempt {} <==\n{}\n",
                    text(&logs["run"]),
                    text(&file["component"]),
                    text(&file["attempt"]),
                    text(&file["text"])
                ))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Eval::Retry { id } => show(output, &Client::new(target)?.post(&path(&id, "/retries"), &json!({})).await?),
        Eval::Extend { id, episodes } => {
            show(output, &Client::new(target)?.post(&path(&id, "/extensions"), &json!({"episodes": episodes})).await?)
        }
        Eval::Clone { id, name } => show(output, &Client::new(target)?.post(&path(&id, "/clones"), &json!({"name": name})).await?),
        Eval::Rename { id, name } => show(output, &Client::new(target)?.patch(&path(&id, ""), &json!({"name": name})).await?),
        Eval::Rm { id } => {
            Client::new(target)?.delete(&path(&id, "")).await?;
            note(&format!("Deleted {id}."));
            Ok(ExitCode::SUCCESS)
        }
        Eval::Reproduce { id, row } => {
            let answer = Client::new(target)?.get(&path(&id, &format!("/rows/{row}/reproduction"))).await?;
            if output.format == Format::Table {
                for about in answer["notes"].as_array().into_iter().flatten() {
                    print(&format!("# {}\n", text(about)))?;
                }
                print(&format!("{}\n", text(&answer["command"])))?;
            } else {
                output.item(&answer, &[], "command")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Eval::Export { id, format } => {
            export(&Client::new(target)?, &id, &format).await?;
            Ok(ExitCode::SUCCESS)
        }
        Eval::Import { file } => {
            let document = request_file::read(&file, request_file::IMPORT_LIMIT)?;
            show(output, &Client::new(target)?.post("/v1/evaluations/imports", &document).await?)
        }
    }
}

fn show(output: &Output, item: &Value) -> Result<ExitCode, CliError> {
    output.item(item, &FIELDS, "id")?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for the end, shows the results, and turns the status into an exit status.
async fn finish(client: &Client, id: &str, timeout: Option<u64>, output: &Output) -> Result<ExitCode, CliError> {
    let evaluation = progress::wait(client, id, timeout).await?;
    results::show(client, id, "task", output).await?;
    verdict(&evaluation)
}

fn verdict(evaluation: &EvaluationDetail) -> Result<ExitCode, CliError> {
    let id = &evaluation.summary.id;
    let unsuccessful = |message: String| Err(CliError { code: "unsuccessful".to_owned(), exit: 5, ..CliError::other(message) });
    match evaluation.summary.status {
        EvaluationStatus::Completed => Ok(ExitCode::SUCCESS),
        EvaluationStatus::Cancelled | EvaluationStatus::Cancelling => unsuccessful(format!("{id} was cancelled")),
        EvaluationStatus::Failed | EvaluationStatus::Queued | EvaluationStatus::Running => {
            let example = evaluation
                .failures
                .first()
                .map(|failure| {
                    let message = failure.example.message.trim_end();
                    let stop = if message.ends_with(['.', '!', '?']) { "" } else { "." };
                    format!(" Most often {}: {message}{stop}", failure.example.code.as_str())
                })
                .unwrap_or_default();
            unsuccessful(format!(
                "{id} failed: {} of {} rows are errored.{example} `rlmesh eval rows {id} --outcome errored` lists them, `rlmesh eval retry {id}` runs them again",
                evaluation.summary.progress.errored_episodes, evaluation.summary.progress.total_episodes
            ))
        }
    }
}

async fn export(client: &Client, id: &str, format: &str) -> Result<(), CliError> {
    let response = client.send(Method::GET, &path(id, &format!("/export?format={format}")), None).await?;
    let mut stream = response.bytes_stream();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| CliError::unreachable(&client.url, &error))?;
        print_bytes(&chunk)?;
    }
    Ok(())
}

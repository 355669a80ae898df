//! The results table: cells with their intervals, then the paired differences of the models.

use rlm_api::rest::{Comparison, ScoreGroup, Scores};
use serde_json::Value;

use crate::client::Client;
use crate::commands::encode;
use crate::error::CliError;
use crate::output::{Format, Output, print, table};

/// Fetches and prints the scores.
pub async fn show(client: &Client, id: &str, group_by: &str, output: &Output) -> Result<(), CliError> {
    let path = format!("/v1/evaluations/{}/scores?groupBy={group_by}", encode(id));
    if output.format == Format::Name {
        return print(&format!("{id}\n"));
    }
    if output.format != Format::Table {
        let scores = client.get(&path).await?;
        return output.item(&scores, &[], "groupBy");
    }
    let scores: Scores = client.read(&path).await?;
    print(&render(&scores))
}

/// The table as text.
pub fn render(scores: &Scores) -> String {
    // Grouped by model, a line is of all the model's tasks.
    let group = if scores.group_by == "model" { "task" } else { &scores.group_by };
    let headings = ["MODEL", &group.to_uppercase(), "EPISODES", "SUCCESS RATE (95 %)", "MEAN REWARD (95 %)", "ERRORED"];
    let mut text =
        table(headings.iter().map(|&heading| heading.to_owned()), scores.groups.iter().map(|group| cells(group, &scores.group_by)));
    if !scores.comparisons.is_empty() {
        text.push('\n');
        let headings = ["PAIRED DIFFERENCE", "TASK", "PAIRS", "SUCCESS (95 %)", "REWARD (95 %)", "P", "VERDICT"];
        let shown = scores.comparisons.iter().filter(|comparison| comparison.task_id.is_some() || tasks(scores, comparison) != 1);
        text.push_str(&table(headings.iter().map(|&heading| heading.to_owned()), shown.map(difference)));
    }
    text
}

/// Tasks that this pair of models is compared on; with one, the line over all tasks would repeat it.
fn tasks(scores: &Scores, pair: &Comparison) -> usize {
    let same = |other: &&Comparison| other.baseline == pair.baseline && other.candidate == pair.candidate && other.task_id.is_some();
    scores.comparisons.iter().filter(same).count()
}

fn cells(group: &ScoreGroup, group_by: &str) -> Vec<String> {
    let name = match group_by {
        "model" => group.task_id.clone().unwrap_or_else(|| "all".to_owned()),
        // Plainer than the key, which names the environment too where two have the same task.
        "task" => group.task_id.clone().unwrap_or_else(|| group.key.clone()),
        _ => group.key.clone(),
    };
    let rate = match (group.success_rate, group.success_interval) {
        (Some(rate), Some([low, high])) => format!("{:.1} % ({:.1} - {:.1})", rate * 100.0, low * 100.0, high * 100.0),
        _ if group.unknown_success > 0 => format!("not said by {} rows", group.unknown_success),
        _ => "none scored".to_owned(),
    };
    vec![
        group.model.clone(),
        name,
        if group.pending > 0 { format!("{}/{}", group.scored + group.errored, group.episodes) } else { group.episodes.to_string() },
        rate,
        interval(group.mean_reward, group.reward_interval),
        if group.errored > 0 { group.errored.to_string() } else { "0".to_owned() },
    ]
}

fn interval(value: Option<f64>, interval: Option<[f64; 2]>) -> String {
    match (value, interval) {
        (Some(value), Some([low, high])) => format!("{value:.2} ({low:.2} - {high:.2})"),
        (Some(value), None) => format!("{value:.2}"),
        (None, _) => String::new(),
    }
}

fn difference(comparison: &Comparison) -> Vec<String> {
    let result = &comparison.result;
    let percent = |value: &Value| value.as_f64().map(|value| format!("{:+.1}", value * 100.0));
    let success = match (
        percent(&result["success"]["difference"]),
        percent(&result["success"]["interval"]["lower"]),
        percent(&result["success"]["interval"]["upper"]),
    ) {
        (Some(difference), Some(low), Some(high)) => format!("{difference} points ({low} - {high})"),
        _ => String::new(),
    };
    let number = |value: &Value| value.as_f64().map(|value| format!("{value:+.2}"));
    let reward = match (
        number(&result["reward"]["mean"]),
        number(&result["reward"]["interval"]["lower"]),
        number(&result["reward"]["interval"]["upper"]),
    ) {
        (Some(difference), Some(low), Some(high)) => format!("{difference} ({low} - {high})"),
        _ => String::new(),
    };
    let p = comparison.adjusted_p.or_else(|| result["success"]["p"].as_f64()).or_else(|| result["reward"]["p"].as_f64());
    vec![
        format!("{} minus {}", comparison.candidate, comparison.baseline),
        comparison.task_id.clone().unwrap_or_else(|| "all tasks".to_owned()),
        result["pairs"].to_string(),
        success,
        reward,
        p.map(|p| if p < 0.001 { "< 0.001".to_owned() } else { format!("{p:.3}") }).unwrap_or_default(),
        result["verdict"].as_str().unwrap_or_default().to_owned(),
    ]
}

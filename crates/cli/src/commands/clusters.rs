//! Clusters.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use crate::args::Clusters;
use crate::client::Client;
use crate::commands::{encode, items};
use crate::config::Target;
use crate::error::CliError;
use crate::output::{Column, Output, ago, note, print, text};

const FIELDS: [Column; 9] = [
    ("id", |item| text(&item["id"])),
    ("name", |item| text(&item["name"])),
    ("status", status),
    ("last seen", |item| ago(&item["lastSeenAt"])),
    ("executor", |item| text(&item["executor"])),
    ("agent", |item| text(&item["agentVersion"])),
    ("runs", |item| format!("{} running, {} queued", text(&item["runningRuns"]), text(&item["queuedRuns"]))),
    ("unsent results", |item| text(&item["unacknowledgedRecords"])),
    ("conditions", |item| {
        let conditions = item["conditions"].as_array().map_or(&[][..], Vec::as_slice);
        conditions
            .iter()
            .map(|one| format!("{}={} {}", text(&one["type"]), text(&one["status"]), text(&one["message"])))
            .collect::<Vec<_>>()
            .join("; ")
    }),
];

fn status(item: &Value) -> String {
    let drain = match (item["drained"] == true, item["draining"] == true) {
        (true, _) => ", drained",
        (false, true) => ", draining",
        (false, false) => "",
    };
    format!("{}{drain}", text(&item["status"]))
}

pub async fn run(target: &Target, command: Clusters, output: &Output) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    match command {
        Clusters::List => {
            let all = items(&client, "/v1/clusters", &[], 1000).await?;
            output.list(
                &all,
                &[
                    ("ID", |item| text(&item["id"])),
                    ("NAME", |item| text(&item["name"])),
                    ("STATUS", status),
                    ("LAST SEEN", |item| ago(&item["lastSeenAt"])),
                    ("RUNS", |item| text(&item["runningRuns"])),
                ],
                "id",
            )?;
        }
        Clusters::Get { id } => output.item(&client.get(&format!("/v1/clusters/{}", encode(&id))).await?, &FIELDS, "id")?,
        Clusters::Add { name } => {
            let cluster = client.post("/v1/clusters", &json!({"name": name})).await?;
            note(&format!("Registered. `rlmesh clusters join-command {}` prints the command that connects it.", text(&cluster["id"])));
            output.item(&cluster, &FIELDS, "id")?;
        }
        Clusters::JoinCommand { id } => {
            let token = client.post(&format!("/v1/clusters/{}/join-tokens", encode(&id)), &json!({})).await?;
            note(&format!("The token in it works once, until {}.", text(&token["expiresAt"])));
            print(&format!("{}\n", text(&token["command"])))?;
        }
        Clusters::Drain { id, wait } => {
            let mut cluster = client.post(&format!("/v1/clusters/{}/drain", encode(&id)), &json!({})).await?;
            while wait && cluster["drained"] != true {
                note(&format!(
                    "{} running, {} results not sent yet",
                    text(&cluster["runningRuns"]),
                    text(&cluster["unacknowledgedRecords"])
                ));
                tokio::time::sleep(Duration::from_secs(2)).await;
                cluster = client.get(&format!("/v1/clusters/{}", encode(&id))).await?;
            }
            output.item(&cluster, &FIELDS, "id")?;
        }
        Clusters::Resume { id } => {
            output.item(&client.post(&format!("/v1/clusters/{}/resume", encode(&id)), &json!({})).await?, &FIELDS, "id")?
        }
    }
    Ok(ExitCode::SUCCESS)
}

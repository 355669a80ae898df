//! Registered models and environments: the same commands for both.

use std::process::ExitCode;

use serde_json::json;

use crate::args::Definitions;
use crate::client::Client;
use crate::commands::{encode, items};
use crate::config::Target;
use crate::error::CliError;
use crate::output::{Output, ago, note, text};
use crate::request_file;

pub async fn run(target: &Target, noun: &str, command: Definitions, output: &Output) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    match command {
        Definitions::Add { name, file } => {
            let mut definition = request_file::read(&file, request_file::REQUEST_LIMIT)?;
            let folder =
                std::path::absolute(&file).ok().and_then(|path| path.parent().map(std::path::Path::to_path_buf)).unwrap_or_default();
            request_file::definition_paths(&mut definition, &folder);
            let stored = client.post(&format!("/v1/{noun}"), &json!({"name": name, "definition": definition})).await?;
            note(&format!("Registered {}:{}.", text(&stored["name"]), text(&stored["version"])));
            output.item(&stored, &[("name", |item| text(&item["name"])), ("version", |item| text(&item["version"]))], "name")?;
        }
        Definitions::List => {
            let all = items(&client, &format!("/v1/{noun}"), &[], 10_000).await?;
            output.list(
                &all,
                &[
                    ("NAME", |item| text(&item["name"])),
                    ("VERSION", |item| text(&item["version"])),
                    ("RUNS", |item| {
                        let definition = &item["definition"];
                        [&definition["image"], &definition["entrypoint"], &definition["address"]]
                            .iter()
                            .find(|value| value.is_string())
                            .map(|value| text(value))
                            .unwrap_or_default()
                    }),
                    ("DESCRIBED", |item| if item["describe"].is_object() || item["described"] == true { "yes" } else { "no" }.to_owned()),
                    ("CREATED", |item| ago(&item["createdAt"])),
                ],
                "name",
            )?;
        }
        Definitions::Get { name } => {
            let path = match name.rsplit_once(':') {
                Some((name, version)) => format!("/v1/{noun}/{}?version={}", encode(name), encode(version)),
                None => format!("/v1/{noun}/{}", encode(&name)),
            };
            let item = client.get(&path).await?;
            output.item(
                &item,
                &[
                    ("name", |item| text(&item["name"])),
                    ("version", |item| text(&item["version"])),
                    ("created", |item| ago(&item["createdAt"])),
                    ("definition", |item| format!("{:#}", item["definition"])),
                    ("describe", |item| {
                        if item["describe"].is_null() { "not described yet".to_owned() } else { format!("{:#}", item["describe"]) }
                    }),
                ],
                "name",
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

//! The container registry: information, and docker's credential helper.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::args::Registry;
use crate::client::Client;
use crate::config::{self, Target};
use crate::error::CliError;
use crate::output::{Output, note, text};

pub async fn run(target: &Target, command: Registry, output: &Output) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    let info = client.get("/v1/registry/info").await?;
    match command {
        Registry::Info => {
            output.item(&info, &[("host", |info| text(&info["host"])), ("namespaces", |info| text(&info["namespaces"]))], "host")?
        }
        Registry::Login => {
            let host = info["host"]
                .as_str()
                .filter(|host| !host.is_empty())
                .ok_or_else(|| CliError::other(format!("{} has no registry", client.url)))?;
            let path = docker_config()?;
            let mut docker: Value = match std::fs::read(&path) {
                Ok(bytes) => {
                    serde_json::from_slice(&bytes).map_err(|error| CliError::other(format!("{} can't be read: {error}", path.display())))?
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => json!({}),
                Err(error) => return Err(CliError::other(format!("{} can't be read: {error}", path.display()))),
            };
            if !docker.is_object() {
                return Err(CliError::other(format!("{} is not a JSON object; docker could not read it either", path.display())));
            }
            docker["credHelpers"][host] = json!("rlmesh");
            config::write_private(&path, format!("{docker:#}\n").as_bytes())?;
            if let Some(profile) = client.profile() {
                config::update(|config| config.profiles.entry(profile.to_owned()).or_default().registry_host = Some(host.to_owned()))?;
            }
            note(&format!(
                "Docker signs in to {host} with the helper docker-credential-rlmesh, which the SDK installs; it must be on PATH."
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn docker_config() -> Result<PathBuf, CliError> {
    if let Some(dir) = std::env::var_os("DOCKER_CONFIG").filter(|dir| !dir.is_empty()) {
        return Ok(PathBuf::from(dir).join("config.json"));
    }
    std::env::home_dir()
        .map(|home| home.join(".docker/config.json"))
        .ok_or_else(|| CliError::other("there is no home folder; set DOCKER_CONFIG"))
}

//! Organizations of the signed-in account.

use std::process::ExitCode;

use crate::args::Org;
use crate::client::Client;
use crate::commands::auth::remember_identity;
use crate::config::{self, Target};
use crate::error::CliError;
use crate::output::{Output, note, text};

pub async fn run(target: &Target, command: Org, output: &Output) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    match command {
        Org::List => {
            let answer = client.get("/v1/me/organizations").await?;
            output.list(
                answer["organizations"].as_array().map_or(&[], Vec::as_slice),
                &[
                    ("", |item| if item["active"] == true { "*".to_owned() } else { String::new() }),
                    ("ID", |item| text(&item["id"])),
                    ("NAME", |item| text(&item["name"])),
                    ("ROLE", |item| text(&item["role"])),
                ],
                "id",
            )?;
        }
        Org::Switch { organization } => {
            let profile = client
                .profile()
                .ok_or_else(|| CliError::usage("an API key belongs to one organization; sign in with `rlmesh login` to switch"))?
                .to_owned();
            let stale = config::session(&profile)?.map(|session| session.access_token).unwrap_or_default();
            client.refresh(&profile, &stale, &[("organization_id", &organization)]).await?;
            let identity = remember_identity(&client, &profile).await?;
            if identity.organization_id.as_deref() != Some(&organization) {
                return Err(CliError {
                    exit: 3,
                    ..CliError::other(format!("{organization} is not an organization of yours; `rlmesh org list` shows them"))
                });
            }
            note(&format!("Active organization is now {}.", identity.organization_name.unwrap_or(organization)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

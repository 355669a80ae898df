//! API keys.

use std::process::ExitCode;

use serde_json::json;

use crate::args::Keys;
use crate::client::Client;
use crate::commands::{encode, items};
use crate::config::Target;
use crate::error::CliError;
use crate::output::{Format, Output, ago, note, print, text};

pub async fn run(target: &Target, command: Keys, output: &Output) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    match command {
        Keys::List => {
            let keys = items(&client, "/v1/keys", &[], 1000).await?;
            output.list(
                &keys,
                &[
                    ("ID", |item| text(&item["id"])),
                    ("NAME", |item| text(&item["name"])),
                    ("SCOPES", |item| text(&item["scopes"])),
                    ("LAST USED", |item| ago(&item["lastUsedAt"])),
                    ("EXPIRES", |item| text(&item["expiresAt"])),
                ],
                "id",
            )?;
        }
        Keys::Add { name, scopes, expires_in } => {
            let expires_at = match expires_in {
                None => None,
                Some(days) => {
                    let at = chrono::Utc::now().checked_add_signed(chrono::Duration::days(i64::from(days)));
                    let at = at.ok_or_else(|| CliError::usage(format!("--expires-in {days}: that many days reach beyond the calendar")))?;
                    Some(at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true))
                }
            };
            let key = client.post("/v1/keys", &json!({"name": name, "scopes": scopes, "expiresAt": expires_at})).await?;
            if output.format == Format::Table {
                note(
                    "Shown this once. The SDK sends RLMESH_API_KEY to api.rlmesh.dev unless RLMESH_PLATFORM_URL says otherwise, so set both:",
                );
                print(&format!("export RLMESH_PLATFORM_URL={}\nexport RLMESH_API_KEY={}\n", client.url, text(&key["secret"])))?;
            } else {
                output.item(&key, &[], "id")?;
            }
        }
        Keys::Revoke { id } => {
            client.delete(&format!("/v1/keys/{}", encode(&id))).await?;
            note(&format!("Revoked {id}."));
        }
    }
    Ok(ExitCode::SUCCESS)
}

//! Profiles of the configuration file.

use std::process::ExitCode;

use serde_json::{Value, json};

use crate::args::Profile;
use crate::config::{self, DEFAULT_PLATFORM, Target};
use crate::error::CliError;
use crate::output::{Output, note, text};

pub fn run(target: &Target, command: Profile, output: &Output) -> Result<ExitCode, CliError> {
    let config = config::load()?;
    let default = config::profile_name(&Target { profile: None, ..target.clone() }, &config);
    let known = |name: &str| {
        if config.profiles.contains_key(name) {
            Ok(())
        } else {
            Err(CliError { exit: 3, ..CliError::other(format!("there is no profile {name}; `rlmesh profile list` shows them")) })
        }
    };
    match command {
        Profile::List => {
            let items = config
                .profiles
                .iter()
                .map(|(name, profile)| {
                    Ok(json!({
                        "name": name, "default": *name == default,
                        "platform": profile.platform_url.as_deref().unwrap_or(DEFAULT_PLATFORM),
                        "account": profile.identity.as_ref().and_then(|identity| identity.email.clone()),
                        "signedIn": config::session(name)?.is_some(),
                    }))
                })
                .collect::<Result<Vec<Value>, CliError>>()?;
            output.list(
                &items,
                &[
                    ("", |item| if item["default"] == true { "*".to_owned() } else { String::new() }),
                    ("NAME", |item| text(&item["name"])),
                    ("PLATFORM", |item| text(&item["platform"])),
                    ("ACCOUNT", |item| text(&item["account"])),
                    ("SIGNED IN", |item| if item["signedIn"] == true { "yes" } else { "no" }.to_owned()),
                ],
                "name",
            )?;
        }
        Profile::Use { name } => {
            known(&name)?;
            config::update(|config| config.default_profile = Some(name.clone()))?;
            note(&format!("Default profile is now {name}."));
        }
        Profile::Remove { name } => {
            known(&name)?;
            config::store_session(&name, None)?;
            config::update(|config| {
                config.profiles.remove(&name);
                if config.default_profile.as_deref() == Some(&name) {
                    config.default_profile = None;
                }
            })?;
            note(&format!("Removed profile {name}."));
        }
    }
    Ok(ExitCode::SUCCESS)
}

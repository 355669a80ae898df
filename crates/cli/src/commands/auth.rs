//! Signing in, out, and showing who is.

use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Client, session_of};
use crate::config::{self, Identity, Target};
use crate::error::CliError;
use crate::output::{Output, note, print, text};

const DEVICE_GRANT: &str = "urn:ietf:params:oauth:grant-type:device_code";

/// A local server's folder holds a key for it: there is nobody to sign in, and signing in elsewhere is not what was asked.
fn not_local(target: &Target) -> Result<(), CliError> {
    match &target.state {
        Some(state) => Err(CliError::usage(format!(
            "commands with --state {} use the key of the local server there; leave --state out to sign in to a platform",
            state.display()
        ))),
        None => Ok(()),
    }
}

pub async fn login(target: &Target, no_browser: bool) -> Result<ExitCode, CliError> {
    not_local(target)?;
    let config = config::load()?;
    let profile = config::profile_name(target, &config);
    let url = config::platform(target, &config);
    let client = Client::anonymous(&url)?;
    let info = client.info().await?;
    let client_id = info.auth.cli.client_id.as_str();
    let (status, grant) = client.form(&info.auth.device_authorization_endpoint, &[("client_id", client_id)]).await?;
    if !status.is_success() {
        return Err(CliError::other(format!("{url} refused to start a sign-in: {}", text(&grant["error_description"]))));
    }
    let page = grant["verification_uri_complete"].as_str().or_else(|| grant["verification_uri"].as_str()).unwrap_or(&url);
    note(&format!("Open this address in a browser:\n  {page}\nand confirm the code\n  {}", text(&grant["user_code"])));
    if !no_browser {
        // No browser is fine: the address is printed.
        let _ = Command::new("xdg-open").arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    }
    let body = poll(&client, &info.auth.token_endpoint, client_id, &grant).await?;
    let session = session_of(&body)?;
    {
        let _lock = config::Lock::acquire(&profile).await?;
        config::store_session(&profile, Some(session))?;
    }
    config::update(|config| {
        let entry = config.profiles.entry(profile.clone()).or_default();
        entry.platform_url = Some(url.clone());
        entry.token_endpoint = Some(info.auth.token_endpoint.clone());
        config.default_profile.get_or_insert_with(|| profile.clone());
    })?;
    let signed_in = Client::new(&Target { profile: Some(profile.clone()), platform: Some(url), state: None })?;
    let identity = remember_identity(&signed_in, &profile).await?;
    note(&format!("Signed in as {} in profile {profile}.", identity.email.unwrap_or(identity.user_id)));
    Ok(ExitCode::SUCCESS)
}

async fn poll(client: &Client, endpoint: &str, client_id: &str, grant: &Value) -> Result<Value, CliError> {
    let code = grant["device_code"]
        .as_str()
        .ok_or_else(|| CliError::other("the sign-in answer has no device_code; is this an RLMesh platform?"))?;
    let mut interval = Duration::from_secs(grant["interval"].as_u64().unwrap_or(5).clamp(1, 60));
    let deadline = Instant::now() + Duration::from_secs(grant["expires_in"].as_u64().unwrap_or(600));
    while Instant::now() < deadline {
        tokio::time::sleep(interval).await;
        let (status, body) =
            match client.form(endpoint, &[("grant_type", DEVICE_GRANT), ("device_code", code), ("client_id", client_id)]).await {
                Ok(answer) => answer,
                Err(error) if error.is_transient() => continue,
                Err(error) => return Err(error),
            };
        if status.is_success() {
            return Ok(body);
        }
        match body["error"].as_str() {
            Some("authorization_pending") | None => {}
            Some("slow_down") => interval += Duration::from_secs(5),
            Some("access_denied") => return Err(CliError::sign_in("the sign-in was denied in the browser")),
            Some("expired_token") => break,
            Some(other) => return Err(CliError::sign_in(format!("the sign-in failed: {other} {}", text(&body["error_description"])))),
        }
    }
    Err(CliError::sign_in("the code expired before it was confirmed; run `rlmesh login` again"))
}

/// Asks the server who is signed in and writes it beside the profile.
pub async fn remember_identity(client: &Client, profile: &str) -> Result<Identity, CliError> {
    let me = client.get("/v1/me").await?;
    let field = |value: &Value| value.as_str().map(str::to_owned);
    let identity = Identity {
        user_id: text(&me["subject"]["id"]),
        email: field(&me["subject"]["email"]),
        display_name: field(&me["subject"]["displayName"]),
        organization_id: field(&me["organization"]["providerId"]),
        organization_name: field(&me["organization"]["name"]),
    };
    let stored = identity.clone();
    config::update(|config| config.profiles.entry(profile.to_owned()).or_default().identity = Some(stored))?;
    Ok(identity)
}

pub async fn logout(target: &Target) -> Result<ExitCode, CliError> {
    not_local(target)?;
    let config = config::load()?;
    let profile = config::profile_name(target, &config);
    let _lock = config::Lock::acquire(&profile).await?;
    let Some(session) = config::session(&profile)? else {
        note(&format!("Profile {profile} was not signed in."));
        return Ok(ExitCode::SUCCESS);
    };
    let client = Client::anonymous(&config::platform(target, &config))?;
    if let Err(error) = end_session(&client, &session.refresh_token).await {
        note(&format!("The server could not be told ({error}); the session is forgotten here and ends there by itself."));
    }
    config::store_session(&profile, None)?;
    config::update(|config| {
        if let Some(entry) = config.profiles.get_mut(&profile) {
            entry.identity = None;
        }
    })?;
    note(&format!("Signed out of profile {profile}."));
    Ok(ExitCode::SUCCESS)
}

async fn end_session(client: &Client, refresh_token: &str) -> Result<(), CliError> {
    let (status, _) = client.form(&format!("{}/v1/oauth/revoke", client.url), &[("token", refresh_token)]).await?;
    if status.is_success() { Ok(()) } else { Err(CliError::other(format!("it answered {status}"))) }
}

pub async fn whoami(target: &Target, output: &Output) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    let mut me = client.get("/v1/me").await?;
    me["platform"] = json!(client.url);
    output.item(
        &me,
        &[
            ("platform", |me| text(&me["platform"])),
            ("user", |me| text(&me["subject"]["id"])),
            ("email", |me| text(&me["subject"]["email"])),
            ("name", |me| text(&me["subject"]["displayName"])),
            ("organization", |me| format!("{} ({})", text(&me["organization"]["name"]), text(&me["organization"]["id"]))),
        ],
        "platform",
    )?;
    Ok(ExitCode::SUCCESS)
}

pub async fn token(target: &Target, json: bool) -> Result<ExitCode, CliError> {
    let client = Client::new(target)?;
    let token = client.token().await?;
    if json {
        print(&format!("{}\n", json!({"platform": client.url, "token": token})))?;
    } else {
        print(&format!("{token}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

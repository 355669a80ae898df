//! API keys: made by a member for one organization, shown once, limited to scopes, revocable.

use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::KeyId;
use rlm_core::tokens::{Secret, SecretKind};
use serde_json::json;

use super::accounts::name_problem;
use crate::app::access::{Caller, Role, Scope, Scopes};
use crate::app::audit;
use crate::state::AppState;
use crate::store::keys::{self, ApiKey};

/// A key to be made.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub name: String,
    /// Names of scopes; `None` is all that the caller may do.
    pub scopes: Option<Vec<String>>,
    pub expires_at: Option<i64>,
}

/// Makes a key. Nobody can give a key more than they may do themselves.
pub async fn create(state: &AppState, caller: &Caller, new: NewKey) -> Result<(ApiKey, Secret), Error> {
    caller.require(Scope::KeysWrite)?;
    let now = state.clock.now_ms();
    let mut problems = Vec::new();
    problems.extend(name_problem(&new.name).map(|problem| Problem::new("name", problem)));
    if new.expires_at.is_some_and(|at| at <= now) {
        problems.push(Problem::new("expiresAt", "must be in the future"));
    }
    let scopes = match &new.scopes {
        None => caller.scopes,
        Some(names) => read_scopes(names, caller, &mut problems),
    };
    if !problems.is_empty() {
        return Err(Error::invalid(problems));
    }
    let secret = Secret::generate(SecretKind::ApiKey);
    let key = ApiKey {
        id: KeyId::generate(),
        name: new.name,
        user_id: caller.user_id,
        organization_id: caller.organization_id,
        scopes,
        created_at: now,
        expires_at: new.expires_at,
        last_used_at: None,
        revoked_at: None,
    };
    let mut write = state.store.write().await?;
    keys::insert(&mut write, &key, &secret.hash()).await?;
    let details = json!({"name": key.name, "scopes": key.scopes.to_text()});
    audit::record(&mut write, now, &caller.actor(), "key.create", &key.id.to_string(), details).await?;
    write.commit().await?;
    Ok((key, secret))
}

fn read_scopes(names: &[String], caller: &Caller, problems: &mut Vec<Problem>) -> Scopes {
    let mut scopes = Vec::new();
    if names.is_empty() {
        problems.push(Problem::new("scopes", "must name at least one scope; leave it out for all that you may do"));
    }
    for (place, name) in names.iter().enumerate() {
        let path = format!("scopes[{place}]");
        match Scope::parse(name) {
            None => {
                let known = Scope::ALL.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(", ");
                problems.push(Problem::new(path, format!("is no scope; known: {known}")));
            }
            Some(scope) if !caller.scopes.contains(scope) => {
                problems.push(Problem::new(path, format!("{scope} is more than you may do yourself")));
            }
            Some(scope) => scopes.push(scope),
        }
    }
    Scopes::of(&scopes)
}

/// Whether the caller may see and revoke keys of others.
fn sees_all(caller: &Caller) -> bool {
    match caller.role {
        Role::Admin | Role::Owner => caller.scopes.contains(Scope::OrganizationWrite),
        Role::Viewer | Role::Member => false,
    }
}

/// Newest first: one's own keys, or the organization's for its admins.
pub async fn list(state: &AppState, caller: &Caller, before: Option<KeyId>, limit: u32) -> Result<Vec<ApiKey>, Error> {
    let user = if sees_all(caller) { None } else { Some(caller.user_id) };
    Ok(keys::list(&state.store, caller.organization_id, user, before, limit).await?)
}

pub async fn get(state: &AppState, caller: &Caller, id: KeyId) -> Result<ApiKey, Error> {
    keys::by_id(&state.store, caller.organization_id, id)
        .await?
        .filter(|key| key.user_id == caller.user_id || sees_all(caller))
        .ok_or_else(|| Error::new(Code::NotFound, format!("there is no API key {id} that you may see")))
}

/// Revokes a key, for good. Repeating it changes nothing.
pub async fn revoke(state: &AppState, caller: &Caller, id: KeyId) -> Result<(), Error> {
    caller.require(Scope::KeysWrite)?;
    let key = get(state, caller, id).await?;
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    if keys::revoke(&mut write, key.id, now).await? {
        audit::record(&mut write, now, &caller.actor(), "key.revoke", &key.id.to_string(), json!({"name": key.name})).await?;
    }
    write.commit().await?;
    Ok(())
}

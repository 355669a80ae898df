//! From a presented credential to a [`Caller`]. Every use looks up that the account, its membership and the sign-in or key
//! still stand, so that a revocation counts at once.

use rlm_core::error::{Code, Error};
use rlm_core::tokens::{Secret, SecretKind};
use sha2::{Digest as _, Sha256};

use super::tokens::InvalidToken;
use crate::app::access::{Caller, Credential};
use crate::state::AppState;
use crate::store::{keys, organizations, sessions};

/// Least time between two notes of a key's use.
const TOUCH_MS: i64 = 60_000;

fn refused(message: impl Into<String>) -> Error {
    Error::new(Code::Unauthenticated, message)
}

/// No credential was sent.
#[must_use]
pub fn missing() -> Error {
    refused("not signed in: send `Authorization: Bearer <access token or API key>`; `rlmesh login` signs in")
}

/// The caller behind a bearer token: an API key or an access token.
pub async fn bearer(state: &AppState, token: &str, remote_address: &str) -> Result<Caller, Error> {
    if token.starts_with("rlm_") { api_key(state, token, remote_address).await } else { access_token(state, token, remote_address).await }
}

async fn access_token(state: &AppState, token: &str, remote_address: &str) -> Result<Caller, Error> {
    let claims = state.identity.access_tokens.check(token, state.clock.now_ms()).map_err(|error| match error {
        InvalidToken::Malformed => refused("the access token is not valid here; sign in with `rlmesh login`"),
        InvalidToken::Expired => refused("the access token has expired; refresh it or sign in with `rlmesh login`"),
    })?;
    if !sessions::family_is_live(&state.store, &claims.sid).await? {
        return Err(refused("this sign-in was ended; sign in again with `rlmesh login`"));
    }
    let role = organizations::active_role(&state.store, claims.org, claims.sub)
        .await?
        .ok_or_else(|| refused("this account is no longer a member of the organization; sign in again with `rlmesh login`"))?;
    Ok(Caller {
        user_id: claims.sub,
        organization_id: claims.org,
        role,
        scopes: role.scopes(),
        actor: format!("user:{}", claims.sub),
        remote_address: remote_address.to_owned(),
        credential: Credential::AccessToken { family: claims.sid },
    })
}

async fn api_key(state: &AppState, text: &str, remote_address: &str) -> Result<Caller, Error> {
    let secret = Secret::parse(text).map_err(|error| refused(format!("the API key is malformed: {error}")))?;
    if secret.kind() != SecretKind::ApiKey {
        return Err(refused("this secret is no API key; API keys start with rlm_key_"));
    }
    let now = state.clock.now_ms();
    let key = keys::by_hash(&state.store, &secret.hash())
        .await?
        .ok_or_else(|| refused("this API key is not known here; make one with `rlmesh keys add`, or check the platform's address"))?;
    if key.revoked_at.is_some() {
        return Err(refused(format!("the API key {} was revoked", key.id)));
    }
    if key.expires_at.is_some_and(|at| at <= now) {
        return Err(refused(format!("the API key {} has expired", key.id)));
    }
    let role = organizations::active_role(&state.store, key.organization_id, key.user_id)
        .await?
        .ok_or_else(|| refused(format!("the owner of the API key {} is no longer a member of the organization", key.id)))?;
    if key.last_used_at.is_none_or(|at| at + TOUCH_MS <= now) {
        let mut write = state.store.write().await?;
        keys::touch(&mut write, key.id, now).await?;
        write.commit().await?;
    }
    Ok(Caller {
        user_id: key.user_id,
        organization_id: key.organization_id,
        role,
        scopes: key.scopes.intersection(role.scopes()),
        actor: format!("key:{}", key.id),
        remote_address: remote_address.to_owned(),
        credential: Credential::ApiKey { id: key.id.to_string() },
    })
}

/// The caller behind a browser's session cookie.
pub async fn browser(state: &AppState, cookie: &str, remote_address: &str) -> Result<Caller, Error> {
    let ended = || refused("the browser session has ended; sign in again");
    let hash = cookie_hash(cookie);
    let session = sessions::browser(&state.store, &hash, state.clock.now_ms()).await?.ok_or_else(ended)?;
    let role = organizations::active_role(&state.store, session.organization_id, session.user_id).await?.ok_or_else(ended)?;
    Ok(Caller {
        user_id: session.user_id,
        organization_id: session.organization_id,
        role,
        scopes: role.scopes(),
        actor: format!("user:{}", session.user_id),
        remote_address: remote_address.to_owned(),
        credential: Credential::Browser { hash },
    })
}

/// Whether the credential still stands that a caller came with some time ago; for answers that go on for long. An access
/// token's own end does not matter here, its sign-in's does.
pub async fn still_stands(state: &AppState, caller: &Caller) -> Result<bool, Error> {
    let now = state.clock.now_ms();
    let stands = match &caller.credential {
        Credential::AccessToken { family } => sessions::family_is_live(&state.store, family).await?,
        Credential::Browser { hash } => {
            sessions::browser(&state.store, hash, now).await?.is_some_and(|session| session.organization_id == caller.organization_id)
        }
        Credential::ApiKey { id } => match id.parse() {
            Ok(id) => keys::by_id(&state.store, caller.organization_id, id)
                .await?
                .is_some_and(|key| key.revoked_at.is_none() && key.expires_at.is_none_or(|at| at > now)),
            Err(_) => false,
        },
    };
    Ok(stands && organizations::active_role(&state.store, caller.organization_id, caller.user_id).await?.is_some())
}

/// What the database holds of a session cookie or a device code.
pub(crate) fn cookie_hash(cookie: &str) -> String {
    hex::encode(Sha256::digest(cookie.as_bytes()))
}

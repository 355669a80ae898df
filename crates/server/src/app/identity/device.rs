//! The OAuth device flow (RFC 8628) and refresh tokens.
//!
//! A refresh token works once. Its successor is derived from it, so a client whose reply was lost may ask again for a short
//! while and gets the same one; a later or second use means that two parties hold the token, and ends the sign-in.

use rlm_core::error::{Code, Error};
use rlm_core::ids::{OrganizationId, UserId};
use rlm_core::tokens::{Secret, SecretKind, derive_credential};
use serde_json::json;

use super::authenticate::cookie_hash;
use super::limits::{DEVICE, TOKEN, USER_CODE};
use crate::app::access::{Actor, Caller};
use crate::app::audit;
use crate::config::millis;
use crate::state::AppState;
use crate::store::sessions::{self, DeviceGrant, GrantState, RefreshToken};
use crate::store::users::{self, User};
use crate::store::{Write, organizations};

/// The one public client: the command line.
pub const CLIENT_ID: &str = "rlmesh-cli";
/// Most grants that may wait for a decision at once.
const MOST_PENDING: i64 = 1_000;
/// A poll may come this much early: networks jitter.
const POLL_SLACK_MS: i64 = 500;
/// RFC 8628: each `slow_down` lengthens the interval by 5 s.
const SLOW_DOWN_MS: i64 = 5_000;

/// An error of the token endpoint, as OAuth names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OAuthError {
    InvalidRequest(String),
    InvalidClient,
    InvalidGrant(String),
    UnsupportedGrantType,
    AuthorizationPending,
    SlowDown,
    AccessDenied,
    ExpiredToken,
    /// Anything that is not OAuth's own: rate limits, the database.
    Other(Error),
}

impl OAuthError {
    /// `error` and `error_description`.
    #[must_use]
    pub fn parts(&self) -> (&'static str, String) {
        match self {
            Self::InvalidRequest(text) => ("invalid_request", text.clone()),
            Self::InvalidClient => ("invalid_client", format!("the client is unknown; use client_id={CLIENT_ID}")),
            Self::InvalidGrant(text) => ("invalid_grant", text.clone()),
            Self::UnsupportedGrantType => {
                ("unsupported_grant_type", "supported are urn:ietf:params:oauth:grant-type:device_code and refresh_token".to_owned())
            }
            Self::AuthorizationPending => ("authorization_pending", "the sign-in was not approved yet".to_owned()),
            Self::SlowDown => ("slow_down", "polls come too fast; wait 5 s longer between them".to_owned()),
            Self::AccessDenied => ("access_denied", "the sign-in was denied".to_owned()),
            Self::ExpiredToken => ("expired_token", "the code has expired; begin the sign-in again".to_owned()),
            Self::Other(error) => ("temporarily_unavailable", error.message.clone()),
        }
    }
}

impl From<Error> for OAuthError {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl From<crate::store::StoreError> for OAuthError {
    fn from(error: crate::store::StoreError) -> Self {
        Self::Other(error.into())
    }
}

/// Answer to a device authorization request. The device code is a secret of the client's.
pub struct DeviceAuthorization {
    pub device_code: String,
    pub user_code: String,
    pub expires_in: i64,
    pub interval: i64,
}

/// A signed-in client's tokens.
pub struct Tokens {
    pub access_token: String,
    pub refresh_token: Secret,
    pub expires_in: i64,
    pub organization_id: OrganizationId,
    pub user: User,
}

/// Letters of user codes: consonants, so that no words come out, and none that look alike.
const CODE_LETTERS: &[u8; 20] = b"BCDFGHJKLMNPQRSTVWXZ";

fn new_user_code() -> String {
    let mut code = String::with_capacity(9);
    for (place, random) in rand::random::<[u32; 8]>().into_iter().enumerate() {
        if place == 4 {
            code.push('-');
        }
        code.push(char::from(CODE_LETTERS[random as usize % CODE_LETTERS.len()]));
    }
    code
}

/// A user code as it was typed: case, spaces and dashes do not matter.
#[must_use]
pub fn normal_user_code(typed: &str) -> String {
    let letters: String = typed.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_uppercase()).take(16).collect();
    match letters.get(..4).zip(letters.get(4..)) {
        Some((head, tail)) => format!("{head}-{tail}"),
        None => letters,
    }
}

fn check_client(client_id: &str) -> Result<(), OAuthError> {
    if client_id == CLIENT_ID { Ok(()) } else { Err(OAuthError::InvalidClient) }
}

/// Begins a device flow.
pub async fn authorize(state: &AppState, client_id: &str, remote_address: &str) -> Result<DeviceAuthorization, OAuthError> {
    check_client(client_id)?;
    let now = state.clock.now_ms();
    state.identity.limits.check("sign-in codes from one address", remote_address, DEVICE, now)?;
    if sessions::count_pending_grants(&state.store, now).await? >= MOST_PENDING {
        return Err(Error::new(Code::Unavailable, "too many sign-ins wait for approval; try again in some minutes").into());
    }
    let device_code = hex::encode(rand::random::<[u8; 32]>());
    let timings = &state.config.timings;
    let grant = DeviceGrant {
        device_code_hash: cookie_hash(&device_code),
        user_code: new_user_code(),
        client_id: client_id.to_owned(),
        created_at: now,
        expires_at: now + millis(timings.device_code),
        interval_ms: millis(timings.device_interval),
        last_poll_at: None,
        state: GrantState::Pending,
    };
    let mut write = state.store.write().await?;
    sessions::insert_grant(&mut write, &grant).await?;
    write.commit().await?;
    Ok(DeviceAuthorization {
        device_code,
        user_code: grant.user_code,
        expires_in: millis(timings.device_code) / 1000,
        // Clients take whole seconds, at least one.
        interval: (grant.interval_ms / 1000).max(1),
    })
}

/// The grant that waits under a user code.
pub async fn pending(state: &AppState, caller: &Caller, user_code: &str) -> Result<Option<DeviceGrant>, Error> {
    let now = state.clock.now_ms();
    state.identity.limits.check("sign-in codes tried", &caller.user_id.to_string(), USER_CODE, now)?;
    let found = sessions::grant_by_user_code(&state.store, &normal_user_code(user_code)).await?;
    Ok(found.filter(|grant| grant.state == GrantState::Pending && grant.expires_at > now))
}

/// Approves (into `organization`) or denies (`None`) the grant under a user code.
pub async fn decide(state: &AppState, caller: &Caller, user_code: &str, organization: Option<OrganizationId>) -> Result<(), Error> {
    let now = state.clock.now_ms();
    state.identity.limits.check("sign-in codes tried", &caller.user_id.to_string(), USER_CODE, now)?;
    let mut actor = caller.actor();
    let (decision, action) = match organization {
        Some(organization_id) => {
            if organizations::active_role(&state.store, organization_id, caller.user_id).await?.is_none() {
                return Err(Error::new(Code::NotFound, format!("you are in no organization {organization_id}")));
            }
            actor.organization_id = organization_id;
            (GrantState::Approved { user_id: caller.user_id, organization_id }, "session.approve")
        }
        None => (GrantState::Denied, "session.deny"),
    };
    let mut write = state.store.write().await?;
    if !sessions::decide_grant(&mut write, &normal_user_code(user_code), decision, now).await? {
        return Err(Error::new(Code::NotFound, "this code is unknown, has expired or was decided already; begin the sign-in again"));
    }
    audit::record(&mut write, now, &actor, action, &caller.user_id.to_string(), json!({"client": CLIENT_ID})).await?;
    write.commit().await?;
    Ok(())
}

/// Whether a poll comes sooner than the interval allows.
fn too_fast(grant: &DeviceGrant, now_ms: i64) -> bool {
    grant.last_poll_at.is_some_and(|last| now_ms - last + POLL_SLACK_MS.min(grant.interval_ms / 4) < grant.interval_ms)
}

/// A poll of the device flow.
pub async fn exchange_device_code(
    state: &AppState,
    client_id: &str,
    device_code: &str,
    remote_address: &str,
) -> Result<Tokens, OAuthError> {
    check_client(client_id)?;
    let now = state.clock.now_ms();
    state.identity.limits.check("token requests from one address", remote_address, TOKEN, now)?;
    let hash = cookie_hash(device_code);
    let mut write = state.store.write().await?;
    let grant = sessions::poll_grant(&mut write, &hash, now)
        .await?
        .ok_or_else(|| OAuthError::InvalidGrant("the device code is not known here".to_owned()))?;
    if grant.expires_at <= now {
        return Err(OAuthError::ExpiredToken);
    }
    match grant.state {
        GrantState::Denied => Err(OAuthError::AccessDenied),
        GrantState::Used => Err(OAuthError::InvalidGrant("the device code was exchanged already".to_owned())),
        GrantState::Pending if too_fast(&grant, now) => {
            sessions::slow_grant(&mut write, &hash, grant.interval_ms + SLOW_DOWN_MS).await?;
            write.commit().await?;
            Err(OAuthError::SlowDown)
        }
        GrantState::Pending => {
            write.commit().await?;
            Err(OAuthError::AuthorizationPending)
        }
        GrantState::Approved { user_id, organization_id } => {
            sessions::use_grant(&mut write, &hash).await?;
            let token = RefreshToken {
                hash: String::new(),
                family_id: uuid::Uuid::new_v4().simple().to_string(),
                user_id,
                organization_id,
                client_id: client_id.to_owned(),
                issued_at: now,
                expires_at: now + millis(state.config.timings.refresh_token),
                used_at: None,
                revoked_at: None,
            };
            let secret = Secret::generate(SecretKind::RefreshToken);
            let tokens = issue(state, &mut write, token, secret, true).await?;
            write.commit().await?;
            Ok(tokens)
        }
    }
}

/// Stores the refresh token (unless it is stored already) and signs an access token beside it.
async fn issue(state: &AppState, write: &mut Write, mut token: RefreshToken, secret: Secret, is_new: bool) -> Result<Tokens, OAuthError> {
    let gone = || OAuthError::InvalidGrant("the account is no longer a member of the organization; sign in again".to_owned());
    if organizations::role_for_update(write, token.organization_id, token.user_id).await?.is_none() {
        return Err(gone());
    }
    let user = users::by_id(&state.store, token.user_id).await?.filter(|user| user.disabled_at.is_none()).ok_or_else(gone)?;
    token.hash = secret.hash();
    if is_new {
        sessions::insert_refresh(write, &token).await?;
    }
    let lifetime = millis(state.config.timings.access_token);
    let access_token =
        state.identity.access_tokens.sign(user.id, token.organization_id, &token.family_id, state.clock.now_ms(), lifetime).map_err(
            |error| {
                tracing::error!(%error, "an access token could not be signed");
                Error::new(Code::Internal, "the access token could not be signed")
            },
        )?;
    Ok(Tokens { access_token, refresh_token: secret, expires_in: lifetime / 1000, organization_id: token.organization_id, user })
}

/// What to do with a refresh token that is presented.
#[derive(Debug, PartialEq, Eq)]
enum Refresh {
    /// First use: make the successor.
    Fresh,
    /// The reply to the first use may be lost: give the same successor again.
    Replay,
    Expired,
    Revoked,
    /// Two parties hold it: end the sign-in.
    Reused,
}

/// Pure: `successor` is the token that the first use made, when there is one.
fn judge(token: &RefreshToken, successor: Option<&RefreshToken>, replay_ms: i64, now_ms: i64) -> Refresh {
    if token.revoked_at.is_some() {
        return Refresh::Revoked;
    }
    match (token.used_at, successor) {
        (None, _) if token.expires_at <= now_ms => Refresh::Expired,
        (None, _) => Refresh::Fresh,
        (Some(used_at), Some(successor)) if now_ms - used_at <= replay_ms && successor.used_at.is_none() => Refresh::Replay,
        (Some(_), _) => Refresh::Reused,
    }
}

async fn require_member(write: &mut Write, organization_id: OrganizationId, user_id: UserId) -> Result<(), OAuthError> {
    match organizations::role_for_update(write, organization_id, user_id).await? {
        Some(_) => Ok(()),
        None => Err(OAuthError::InvalidGrant(format!("you are in no organization {organization_id}"))),
    }
}

/// Exchanges a refresh token; `organization` lets the sign-in go on in another organization of the user.
pub async fn refresh(
    state: &AppState,
    client_id: &str,
    presented: &str,
    organization: Option<OrganizationId>,
    remote_address: &str,
) -> Result<Tokens, OAuthError> {
    check_client(client_id)?;
    let now = state.clock.now_ms();
    state.identity.limits.check("token requests from one address", remote_address, TOKEN, now)?;
    let unknown = || OAuthError::InvalidGrant("the refresh token is not known here; sign in again".to_owned());
    let secret = Secret::parse(presented).ok().filter(|secret| secret.kind() == SecretKind::RefreshToken).ok_or_else(unknown)?;
    let next = derive_credential(state.identity.server_key(), SecretKind::RefreshToken, &secret.hash());
    let mut write = state.store.write().await?;
    let token = sessions::refresh_for_update(&mut write, &secret.hash()).await?.ok_or_else(unknown)?;
    let successor = sessions::refresh_for_update(&mut write, &next.hash()).await?;
    // As access tokens are judged: they are refused once any token of the family is revoked.
    let verdict = if sessions::family_is_revoked(&mut write, &token.family_id).await? {
        Refresh::Revoked
    } else {
        judge(&token, successor.as_ref(), millis(state.config.timings.refresh_replay), now)
    };
    match (verdict, successor) {
        (Refresh::Fresh, _) => {
            let organization_id = organization.unwrap_or(token.organization_id);
            require_member(&mut write, organization_id, token.user_id).await?;
            sessions::use_refresh(&mut write, &token.hash, now).await?;
            let fresh =
                RefreshToken { organization_id, issued_at: now, expires_at: now + millis(state.config.timings.refresh_token), ..token };
            let tokens = issue(state, &mut write, fresh, next, true).await?;
            write.commit().await?;
            Ok(tokens)
        }
        (Refresh::Replay, Some(mut successor)) => {
            // The first request may have named another organization than this one, or none.
            if let Some(organization_id) = organization.filter(|wanted| *wanted != successor.organization_id) {
                require_member(&mut write, organization_id, token.user_id).await?;
                sessions::move_refresh(&mut write, &successor.hash, organization_id).await?;
                successor.organization_id = organization_id;
            }
            let tokens = issue(state, &mut write, successor, next, false).await?;
            write.commit().await?;
            Ok(tokens)
        }
        (Refresh::Expired, _) => Err(OAuthError::InvalidGrant("the refresh token has expired; sign in again".to_owned())),
        (Refresh::Revoked, _) => Err(OAuthError::InvalidGrant("this sign-in was ended; sign in again".to_owned())),
        (Refresh::Reused | Refresh::Replay, _) => {
            sessions::revoke_family(&mut write, &token.family_id, now).await?;
            let actor = Actor {
                organization_id: token.organization_id,
                name: format!("user:{}", token.user_id),
                remote_address: remote_address.to_owned(),
            };
            audit::record(&mut write, now, &actor, "session.reuse", &token.user_id.to_string(), json!({})).await?;
            write.commit().await?;
            Err(OAuthError::InvalidGrant("the refresh token was used before, so this sign-in was ended; sign in again".to_owned()))
        }
    }
}

/// Ends the sign-in that a refresh token belongs to; an unknown token is no error (RFC 7009).
pub async fn revoke(state: &AppState, presented: &str, remote_address: &str) -> Result<(), Error> {
    let now = state.clock.now_ms();
    state.identity.limits.check("token requests from one address", remote_address, TOKEN, now)?;
    let mut write = state.store.write().await?;
    let sign_in = match Secret::parse(presented) {
        Ok(secret) => sessions::refresh_for_update(&mut write, &secret.hash())
            .await?
            .map(|token| (token.family_id, token.user_id, token.organization_id)),
        Err(_) => state.identity.access_tokens.check(presented, now).ok().map(|claims| (claims.sid, claims.sub, claims.org)),
    };
    if let Some((family, user_id, organization_id)) = sign_in
        && !sessions::family_is_revoked(&mut write, &family).await?
    {
        sessions::revoke_family(&mut write, &family, now).await?;
        let actor = Actor { organization_id, name: format!("user:{user_id}"), remote_address: remote_address.to_owned() };
        audit::record(&mut write, now, &actor, "session.end", &user_id.to_string(), json!({"by": "revocation"})).await?;
    }
    write.commit().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(used_at: Option<i64>) -> RefreshToken {
        RefreshToken {
            hash: "h".to_owned(),
            family_id: "f".to_owned(),
            user_id: UserId::generate(),
            organization_id: OrganizationId::generate(),
            client_id: CLIENT_ID.to_owned(),
            issued_at: 0,
            expires_at: 1_000,
            used_at,
            revoked_at: None,
        }
    }

    #[test]
    fn a_refresh_token_works_once_and_its_lost_reply_is_repeated() {
        assert_eq!(judge(&token(None), None, 60, 999), Refresh::Fresh);
        assert_eq!(judge(&token(None), None, 60, 1_000), Refresh::Expired);
        let used = token(Some(100));
        assert_eq!(judge(&used, Some(&token(None)), 60, 160), Refresh::Replay);
        assert_eq!(judge(&used, Some(&token(None)), 60, 161), Refresh::Reused, "too late");
        assert_eq!(judge(&used, Some(&token(Some(120))), 60, 130), Refresh::Reused, "the successor was used: the reply arrived");
        assert_eq!(judge(&used, None, 60, 110), Refresh::Reused);
        let revoked = RefreshToken { revoked_at: Some(1), ..token(None) };
        assert_eq!(judge(&revoked, None, 60, 10), Refresh::Revoked);
    }

    #[test]
    fn user_codes_are_read_as_people_type_them() {
        let code = new_user_code();
        assert_eq!(code.len(), 9);
        assert_eq!(normal_user_code(&code.to_lowercase().replace('-', " ")), code);
        assert_eq!(normal_user_code(&code.replace('-', "")), code);
        assert_eq!(normal_user_code("b"), "B");
        assert_eq!(normal_user_code("ääää"), "");
    }

    #[test]
    fn polls_faster_than_the_interval_are_slowed() {
        let mut grant = DeviceGrant {
            device_code_hash: String::new(),
            user_code: String::new(),
            client_id: CLIENT_ID.to_owned(),
            created_at: 0,
            expires_at: 1,
            interval_ms: 5_000,
            last_poll_at: None,
            state: GrantState::Pending,
        };
        assert!(!too_fast(&grant, 0));
        grant.last_poll_at = Some(0);
        assert!(too_fast(&grant, 4_000));
        assert!(!too_fast(&grant, 4_500));
    }
}

//! Browser sessions: a cookie whose hash is stored, and tokens that tie a form to the session that it was shown to.

use hmac::{Hmac, KeyInit as _, Mac as _};
use rlm_core::error::{Code, Error};
use rlm_core::ids::OrganizationId;
use serde_json::json;
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

use super::authenticate::cookie_hash;
use crate::app::access::{Actor, Caller, Credential};
use crate::app::audit;
use crate::config::millis;
use crate::state::AppState;
use crate::store::organizations;
use crate::store::sessions::{self, BrowserSession};
use crate::store::users::User;

/// A new session's cookie value: show it to the browser, once.
pub struct NewCookie(String);

impl NewCookie {
    /// The value, for the one place that sends it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// Begins a session for `user` in the organization joined first.
pub async fn begin(state: &AppState, user: &User, remote_address: &str) -> Result<NewCookie, Error> {
    let (organization, _) = organizations::of_user(&state.store, user.id)
        .await?
        .into_iter()
        .next()
        .ok_or_else(|| Error::new(Code::Forbidden, "this account belongs to no organization; ask an admin to add it to one"))?;
    let cookie = hex::encode(rand::random::<[u8; 32]>());
    let now = state.clock.now_ms();
    let session = BrowserSession {
        hash: cookie_hash(&cookie),
        user_id: user.id,
        organization_id: organization.id,
        created_at: now,
        expires_at: now + millis(state.config.timings.browser_session),
    };
    let actor = Actor { organization_id: organization.id, name: format!("user:{}", user.id), remote_address: remote_address.to_owned() };
    let mut write = state.store.write().await?;
    sessions::insert_browser(&mut write, &session).await?;
    audit::record(&mut write, now, &actor, "session.begin", &user.id.to_string(), json!({"by": "browser"})).await?;
    write.commit().await?;
    Ok(NewCookie(cookie))
}

/// Ends the caller's sign-in: the browser session, or the sign-in that the access token belongs to.
pub async fn end(state: &AppState, caller: &Caller) -> Result<(), Error> {
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    match &caller.credential {
        Credential::Browser { hash } => sessions::delete_browser(&mut write, hash).await?,
        Credential::AccessToken { family } => sessions::revoke_family(&mut write, family, now).await?,
        Credential::ApiKey { .. } => {
            return Err(Error::new(Code::Conflict, "an API key is no sign-in; revoke it with DELETE /v1/keys/{id}"));
        }
    }
    audit::record(&mut write, now, &caller.actor(), "session.end", &caller.user_id.to_string(), json!({})).await?;
    write.commit().await?;
    Ok(())
}

/// Lets a browser session act in another organization of the user.
pub async fn switch(state: &AppState, caller: &Caller, organization: OrganizationId) -> Result<(), Error> {
    let Credential::Browser { hash } = &caller.credential else {
        return Err(Error::new(
            Code::Conflict,
            "only a browser session switches its organization here; other clients name `organization_id` when they refresh their token",
        ));
    };
    if organizations::active_role(&state.store, organization, caller.user_id).await?.is_none() {
        return Err(Error::new(Code::NotFound, format!("you are in no organization {organization}")));
    }
    let now = state.clock.now_ms();
    let actor = Actor { organization_id: organization, ..caller.actor() };
    let mut write = state.store.write().await?;
    sessions::switch_browser(&mut write, hash, organization).await?;
    audit::record(&mut write, now, &actor, "session.switch", &caller.user_id.to_string(), json!({"by": "browser"})).await?;
    write.commit().await?;
    Ok(())
}

/// What a form must send back: only a page of ours, shown to this cookie's holder, knows it.
#[must_use]
pub fn form_token(server_key: &[u8; 32], session_hash: &str) -> String {
    let mut block = [0; 64];
    block[..32].copy_from_slice(server_key);
    let mut mac = <Hmac<Sha256>>::new(&block.into());
    mac.update(b"form:");
    mac.update(session_hash.as_bytes());
    hex::encode(mac.finalize().into_bytes())
}

/// Whether `presented` is the form token of the session.
#[must_use]
pub fn form_token_matches(server_key: &[u8; 32], session_hash: &str, presented: &str) -> bool {
    form_token(server_key, session_hash).as_bytes().ct_eq(presented.as_bytes()).into()
}

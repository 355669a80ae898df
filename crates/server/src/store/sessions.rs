//! SQL of sign-ins: device grants, refresh tokens, browser sessions. Codes and tokens are stored as hashes; the user code is
//! not secret by itself (it is worth nothing without a signed-in approval).

use rlm_core::ids::{OrganizationId, UserId};
use sqlx::Row;
use sqlx::any::AnyRow;

use super::{Attempt, Store, StoreError, Write, parse_column};

/// Where a device grant stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrantState {
    Pending,
    Approved { user_id: UserId, organization_id: OrganizationId },
    Denied,
    Used,
}

impl GrantState {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Approved { .. } => "approved",
            Self::Denied => "denied",
            Self::Used => "used",
        }
    }
}

/// One run of the device flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceGrant {
    pub device_code_hash: String,
    pub user_code: String,
    pub client_id: String,
    pub created_at: i64,
    pub expires_at: i64,
    pub interval_ms: i64,
    pub last_poll_at: Option<i64>,
    pub state: GrantState,
}

fn grant(row: &AnyRow) -> Result<DeviceGrant, StoreError> {
    const WHAT: &str = "read a device grant";
    let user_code: String = row.try_get("user_code").attempt(WHAT)?;
    let state: String = row.try_get("state").attempt(WHAT)?;
    let user: Option<String> = row.try_get("user_id").attempt(WHAT)?;
    let organization: Option<String> = row.try_get("organization_id").attempt(WHAT)?;
    let state = match (state.as_str(), user, organization) {
        ("pending", ..) => GrantState::Pending,
        ("denied", ..) => GrantState::Denied,
        ("used", ..) => GrantState::Used,
        ("approved", Some(user), Some(organization)) => GrantState::Approved {
            user_id: parse_column(&user, "device_grants", "user_id", &user_code)?,
            organization_id: parse_column(&organization, "device_grants", "organization_id", &user_code)?,
        },
        (other, ..) => {
            return Err(StoreError::Inconsistent {
                table: "device_grants",
                column: "state",
                row: user_code,
                problem: format!("'{other}' is no state, or its user is missing"),
            });
        }
    };
    Ok(DeviceGrant {
        device_code_hash: row.try_get("device_code_hash").attempt(WHAT)?,
        user_code,
        client_id: row.try_get("client_id").attempt(WHAT)?,
        created_at: row.try_get("created_at").attempt(WHAT)?,
        expires_at: row.try_get("expires_at").attempt(WHAT)?,
        interval_ms: row.try_get("interval_ms").attempt(WHAT)?,
        last_poll_at: row.try_get("last_poll_at").attempt(WHAT)?,
        state,
    })
}

pub async fn insert_grant(write: &mut Write, grant: &DeviceGrant) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO device_grants (device_code_hash, user_code, client_id, created_at, expires_at, interval_ms, state)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(&grant.device_code_hash)
    .bind(&grant.user_code)
    .bind(&grant.client_id)
    .bind(grant.created_at)
    .bind(grant.expires_at)
    .bind(grant.interval_ms)
    .bind(grant.state.as_str())
    .execute(&mut *write.tx)
    .await
    .attempt("store a device grant")?;
    Ok(())
}

pub async fn grant_by_user_code(store: &Store, user_code: &str) -> Result<Option<DeviceGrant>, StoreError> {
    let row = sqlx::query("SELECT * FROM device_grants WHERE user_code = $1")
        .bind(user_code)
        .fetch_optional(store.read())
        .await
        .attempt("read a device grant")?;
    row.as_ref().map(grant).transpose()
}

/// Takes a poll into account (`polled_at`) and returns the grant as it was before.
pub async fn poll_grant(write: &mut Write, device_code_hash: &str, polled_at: i64) -> Result<Option<DeviceGrant>, StoreError> {
    let row = sqlx::query("UPDATE device_grants SET state = state WHERE device_code_hash = $1 RETURNING *")
        .bind(device_code_hash)
        .fetch_optional(&mut *write.tx)
        .await
        .attempt("read a device grant")?;
    let found = row.as_ref().map(grant).transpose()?;
    if found.is_some() {
        sqlx::query("UPDATE device_grants SET last_poll_at = $2 WHERE device_code_hash = $1")
            .bind(device_code_hash)
            .bind(polled_at)
            .execute(&mut *write.tx)
            .await
            .attempt("store a poll")?;
    }
    Ok(found)
}

/// Lengthens the time between polls.
pub async fn slow_grant(write: &mut Write, device_code_hash: &str, interval_ms: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE device_grants SET interval_ms = $2 WHERE device_code_hash = $1")
        .bind(device_code_hash)
        .bind(interval_ms)
        .execute(&mut *write.tx)
        .await
        .attempt("slow a device grant down")?;
    Ok(())
}

/// Approves or denies a grant that is pending and has not expired; false when it is neither.
pub async fn decide_grant(write: &mut Write, user_code: &str, state: GrantState, now_ms: i64) -> Result<bool, StoreError> {
    let (user, organization) = match state {
        GrantState::Approved { user_id, organization_id } => (Some(user_id.to_string()), Some(organization_id.to_string())),
        GrantState::Pending | GrantState::Denied | GrantState::Used => (None, None),
    };
    let result = sqlx::query(
        "UPDATE device_grants SET state = $2, user_id = $3, organization_id = $4
         WHERE user_code = $1 AND state = 'pending' AND expires_at > $5",
    )
    .bind(user_code)
    .bind(state.as_str())
    .bind(user)
    .bind(organization)
    .bind(now_ms)
    .execute(&mut *write.tx)
    .await
    .attempt("decide a device grant")?;
    Ok(result.rows_affected() == 1)
}

/// Marks an approved grant as exchanged.
pub async fn use_grant(write: &mut Write, device_code_hash: &str) -> Result<(), StoreError> {
    sqlx::query("UPDATE device_grants SET state = 'used' WHERE device_code_hash = $1")
        .bind(device_code_hash)
        .execute(&mut *write.tx)
        .await
        .attempt("use a device grant")?;
    Ok(())
}

/// How many grants wait for a decision.
pub async fn count_pending_grants(store: &Store, now_ms: i64) -> Result<i64, StoreError> {
    let row = sqlx::query("SELECT COUNT(*) AS pending FROM device_grants WHERE state = 'pending' AND expires_at > $1")
        .bind(now_ms)
        .fetch_one(store.read())
        .await
        .attempt("count device grants")?;
    row.try_get("pending").attempt("count device grants")
}

/// One refresh token of a family (a sign-in).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefreshToken {
    pub hash: String,
    pub family_id: String,
    pub user_id: UserId,
    pub organization_id: OrganizationId,
    pub client_id: String,
    pub issued_at: i64,
    pub expires_at: i64,
    pub used_at: Option<i64>,
    pub revoked_at: Option<i64>,
}

fn refresh(row: &AnyRow) -> Result<RefreshToken, StoreError> {
    const WHAT: &str = "read a refresh token";
    let family_id: String = row.try_get("family_id").attempt(WHAT)?;
    let user: String = row.try_get("user_id").attempt(WHAT)?;
    let organization: String = row.try_get("organization_id").attempt(WHAT)?;
    Ok(RefreshToken {
        hash: row.try_get("hash").attempt(WHAT)?,
        user_id: parse_column(&user, "refresh_tokens", "user_id", &family_id)?,
        organization_id: parse_column(&organization, "refresh_tokens", "organization_id", &family_id)?,
        client_id: row.try_get("client_id").attempt(WHAT)?,
        issued_at: row.try_get("issued_at").attempt(WHAT)?,
        expires_at: row.try_get("expires_at").attempt(WHAT)?,
        used_at: row.try_get("used_at").attempt(WHAT)?,
        revoked_at: row.try_get("revoked_at").attempt(WHAT)?,
        family_id,
    })
}

pub async fn insert_refresh(write: &mut Write, token: &RefreshToken) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO refresh_tokens (hash, family_id, user_id, organization_id, client_id, issued_at, expires_at, used_at, revoked_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    )
    .bind(&token.hash)
    .bind(&token.family_id)
    .bind(token.user_id.to_string())
    .bind(token.organization_id.to_string())
    .bind(&token.client_id)
    .bind(token.issued_at)
    .bind(token.expires_at)
    .bind(token.used_at)
    .bind(token.revoked_at)
    .execute(&mut *write.tx)
    .await
    .attempt("store a refresh token")?;
    Ok(())
}

/// The token with this hash, its row locked until the transaction ends.
pub async fn refresh_for_update(write: &mut Write, hash: &str) -> Result<Option<RefreshToken>, StoreError> {
    let row = sqlx::query("UPDATE refresh_tokens SET hash = hash WHERE hash = $1 RETURNING *")
        .bind(hash)
        .fetch_optional(&mut *write.tx)
        .await
        .attempt("read a refresh token")?;
    row.as_ref().map(refresh).transpose()
}

pub async fn use_refresh(write: &mut Write, hash: &str, now_ms: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE refresh_tokens SET used_at = $2 WHERE hash = $1")
        .bind(hash)
        .bind(now_ms)
        .execute(&mut *write.tx)
        .await
        .attempt("use a refresh token")?;
    Ok(())
}

/// Ends a sign-in: no token of it works any more.
pub async fn revoke_family(write: &mut Write, family_id: &str, now_ms: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE refresh_tokens SET revoked_at = $2 WHERE family_id = $1 AND revoked_at IS NULL")
        .bind(family_id)
        .bind(now_ms)
        .execute(&mut *write.tx)
        .await
        .attempt("revoke a sign-in")?;
    Ok(())
}

/// Ends a user's sign-ins that act in one organization now; one that was switched elsewhere goes on there.
pub async fn revoke_of_member(write: &mut Write, organization: OrganizationId, user: UserId, now_ms: i64) -> Result<(), StoreError> {
    for (sql, what) in [
        (
            "UPDATE refresh_tokens SET revoked_at = $3 WHERE user_id = $2 AND revoked_at IS NULL AND family_id IN
             (SELECT family_id FROM refresh_tokens WHERE organization_id = $1 AND user_id = $2 AND used_at IS NULL)",
            "revoke a member's sign-ins",
        ),
        (
            "DELETE FROM browser_sessions WHERE organization_id = $1 AND user_id = $2 AND created_at <= $3",
            "end a member's browser sessions",
        ),
    ] {
        sqlx::query(sql).bind(organization.to_string()).bind(user.to_string()).bind(now_ms).execute(&mut *write.tx).await.attempt(what)?;
    }
    Ok(())
}

/// Ends all sign-ins of a user.
pub async fn revoke_of_user(write: &mut Write, user: UserId, now_ms: i64) -> Result<(), StoreError> {
    for (sql, what) in [
        ("UPDATE refresh_tokens SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL", "revoke a user's sign-ins"),
        ("DELETE FROM browser_sessions WHERE user_id = $1 AND created_at <= $2", "end a user's browser sessions"),
    ] {
        sqlx::query(sql).bind(user.to_string()).bind(now_ms).execute(&mut *write.tx).await.attempt(what)?;
    }
    Ok(())
}

/// Whether a token of the sign-in was revoked, and so all of it.
pub async fn family_is_revoked(write: &mut Write, family_id: &str) -> Result<bool, StoreError> {
    const WHAT: &str = "read a sign-in";
    let row = sqlx::query("SELECT COUNT(revoked_at) AS revoked FROM refresh_tokens WHERE family_id = $1")
        .bind(family_id)
        .fetch_one(&mut *write.tx)
        .await
        .attempt(WHAT)?;
    let revoked: i64 = row.try_get("revoked").attempt(WHAT)?;
    Ok(revoked > 0)
}

/// Lets an unused token act in another organization.
pub async fn move_refresh(write: &mut Write, hash: &str, organization: OrganizationId) -> Result<(), StoreError> {
    sqlx::query("UPDATE refresh_tokens SET organization_id = $2 WHERE hash = $1 AND used_at IS NULL")
        .bind(hash)
        .bind(organization.to_string())
        .execute(&mut *write.tx)
        .await
        .attempt("move a refresh token")?;
    Ok(())
}

/// Whether a sign-in still stands: it has tokens, and none is revoked.
pub async fn family_is_live(store: &Store, family_id: &str) -> Result<bool, StoreError> {
    let row = sqlx::query("SELECT COUNT(*) AS tokens, COUNT(revoked_at) AS revoked FROM refresh_tokens WHERE family_id = $1")
        .bind(family_id)
        .fetch_one(store.read())
        .await
        .attempt("read a sign-in")?;
    let tokens: i64 = row.try_get("tokens").attempt("read a sign-in")?;
    let revoked: i64 = row.try_get("revoked").attempt("read a sign-in")?;
    Ok(tokens > 0 && revoked == 0)
}

/// A browser's session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrowserSession {
    pub hash: String,
    pub user_id: UserId,
    pub organization_id: OrganizationId,
    pub created_at: i64,
    pub expires_at: i64,
}

pub async fn insert_browser(write: &mut Write, session: &BrowserSession) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO browser_sessions (hash, user_id, organization_id, created_at, expires_at) VALUES ($1, $2, $3, $4, $5)")
        .bind(&session.hash)
        .bind(session.user_id.to_string())
        .bind(session.organization_id.to_string())
        .bind(session.created_at)
        .bind(session.expires_at)
        .execute(&mut *write.tx)
        .await
        .attempt("store a browser session")?;
    Ok(())
}

pub async fn browser(store: &Store, hash: &str, now_ms: i64) -> Result<Option<BrowserSession>, StoreError> {
    const WHAT: &str = "read a browser session";
    let row = sqlx::query("SELECT * FROM browser_sessions WHERE hash = $1 AND expires_at > $2")
        .bind(hash)
        .bind(now_ms)
        .fetch_optional(store.read())
        .await
        .attempt(WHAT)?;
    let Some(row) = row else { return Ok(None) };
    let user: String = row.try_get("user_id").attempt(WHAT)?;
    let organization: String = row.try_get("organization_id").attempt(WHAT)?;
    Ok(Some(BrowserSession {
        hash: row.try_get("hash").attempt(WHAT)?,
        user_id: parse_column(&user, "browser_sessions", "user_id", "")?,
        organization_id: parse_column(&organization, "browser_sessions", "organization_id", "")?,
        created_at: row.try_get("created_at").attempt(WHAT)?,
        expires_at: row.try_get("expires_at").attempt(WHAT)?,
    }))
}

pub async fn switch_browser(write: &mut Write, hash: &str, organization: OrganizationId) -> Result<(), StoreError> {
    sqlx::query("UPDATE browser_sessions SET organization_id = $2 WHERE hash = $1")
        .bind(hash)
        .bind(organization.to_string())
        .execute(&mut *write.tx)
        .await
        .attempt("switch a browser session")?;
    Ok(())
}

pub async fn delete_browser(write: &mut Write, hash: &str) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM browser_sessions WHERE hash = $1")
        .bind(hash)
        .execute(&mut *write.tx)
        .await
        .attempt("end a browser session")?;
    Ok(())
}

/// Removes what expired before `before_ms`.
pub async fn sweep(write: &mut Write, before_ms: i64) -> Result<(), StoreError> {
    for sql in [
        "DELETE FROM device_grants WHERE expires_at < $1",
        "DELETE FROM refresh_tokens WHERE expires_at < $1",
        "DELETE FROM browser_sessions WHERE expires_at < $1",
    ] {
        sqlx::query(sql).bind(before_ms).execute(&mut *write.tx).await.attempt("remove expired sign-ins")?;
    }
    Ok(())
}

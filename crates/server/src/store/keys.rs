//! SQL of API keys. Only the hash of a key is stored.

use rlm_core::ids::{KeyId, OrganizationId, UserId};
use sqlx::Row;
use sqlx::any::AnyRow;

use super::{Attempt, Store, StoreError, Write, parse_column};
use crate::app::access::Scopes;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    pub id: KeyId,
    pub name: String,
    pub user_id: UserId,
    pub organization_id: OrganizationId,
    pub scopes: Scopes,
    pub created_at: i64,
    pub expires_at: Option<i64>,
    pub last_used_at: Option<i64>,
    pub revoked_at: Option<i64>,
}

fn from_row(row: &AnyRow) -> Result<ApiKey, StoreError> {
    const WHAT: &str = "read an API key";
    let id: String = row.try_get("id").attempt(WHAT)?;
    let user: String = row.try_get("user_id").attempt(WHAT)?;
    let organization: String = row.try_get("organization_id").attempt(WHAT)?;
    let scopes: String = row.try_get("scopes").attempt(WHAT)?;
    Ok(ApiKey {
        name: row.try_get("name").attempt(WHAT)?,
        user_id: parse_column(&user, "api_keys", "user_id", &id)?,
        organization_id: parse_column(&organization, "api_keys", "organization_id", &id)?,
        scopes: Scopes::from_text(&scopes),
        created_at: row.try_get("created_at").attempt(WHAT)?,
        expires_at: row.try_get("expires_at").attempt(WHAT)?,
        last_used_at: row.try_get("last_used_at").attempt(WHAT)?,
        revoked_at: row.try_get("revoked_at").attempt(WHAT)?,
        id: parse_column(&id, "api_keys", "id", &id)?,
    })
}

pub async fn insert(write: &mut Write, key: &ApiKey, hash: &str) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO api_keys (id, hash, name, user_id, organization_id, scopes, created_at, expires_at, last_used_at, revoked_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    )
    .bind(key.id.to_string())
    .bind(hash)
    .bind(&key.name)
    .bind(key.user_id.to_string())
    .bind(key.organization_id.to_string())
    .bind(key.scopes.to_text())
    .bind(key.created_at)
    .bind(key.expires_at)
    .bind(key.last_used_at)
    .bind(key.revoked_at)
    .execute(&mut *write.tx)
    .await
    .attempt("store an API key")?;
    Ok(())
}

pub async fn by_hash(store: &Store, hash: &str) -> Result<Option<ApiKey>, StoreError> {
    let row = sqlx::query(
        "SELECT id, name, user_id, organization_id, scopes, created_at, expires_at, last_used_at, revoked_at
         FROM api_keys WHERE hash = $1",
    )
    .bind(hash)
    .fetch_optional(store.read())
    .await
    .attempt("read an API key")?;
    row.as_ref().map(from_row).transpose()
}

pub async fn by_id(store: &Store, organization: OrganizationId, id: KeyId) -> Result<Option<ApiKey>, StoreError> {
    let row = sqlx::query(
        "SELECT id, name, user_id, organization_id, scopes, created_at, expires_at, last_used_at, revoked_at
         FROM api_keys WHERE organization_id = $1 AND id = $2",
    )
    .bind(organization.to_string())
    .bind(id.to_string())
    .fetch_optional(store.read())
    .await
    .attempt("read an API key")?;
    row.as_ref().map(from_row).transpose()
}

/// Keys of an organization, newest first, those before `before` in that order; of one user when `user` is given.
pub async fn list(
    store: &Store,
    organization: OrganizationId,
    user: Option<UserId>,
    before: Option<KeyId>,
    limit: u32,
) -> Result<Vec<ApiKey>, StoreError> {
    let rows = sqlx::query(
        "SELECT id, name, user_id, organization_id, scopes, created_at, expires_at, last_used_at, revoked_at FROM api_keys
         WHERE organization_id = $1 AND ($2 = '' OR user_id = $2) AND ($3 = '' OR id < $3) ORDER BY id DESC LIMIT $4",
    )
    .bind(organization.to_string())
    .bind(user.map(|id| id.to_string()).unwrap_or_default())
    .bind(before.map(|id| id.to_string()).unwrap_or_default())
    .bind(i64::from(limit))
    .fetch_all(store.read())
    .await
    .attempt("read API keys")?;
    rows.iter().map(from_row).collect()
}

/// Revokes a key; false when it was revoked before.
pub async fn revoke(write: &mut Write, id: KeyId, now_ms: i64) -> Result<bool, StoreError> {
    let result = sqlx::query("UPDATE api_keys SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL")
        .bind(id.to_string())
        .bind(now_ms)
        .execute(&mut *write.tx)
        .await
        .attempt("revoke an API key")?;
    Ok(result.rows_affected() == 1)
}

/// Revokes every key that a user has in an organization.
pub async fn revoke_of_member(write: &mut Write, organization: OrganizationId, user: UserId, now_ms: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE api_keys SET revoked_at = $3 WHERE organization_id = $1 AND user_id = $2 AND revoked_at IS NULL")
        .bind(organization.to_string())
        .bind(user.to_string())
        .bind(now_ms)
        .execute(&mut *write.tx)
        .await
        .attempt("revoke a member's API keys")?;
    Ok(())
}

pub async fn touch(write: &mut Write, id: KeyId, now_ms: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE api_keys SET last_used_at = $2 WHERE id = $1")
        .bind(id.to_string())
        .bind(now_ms)
        .execute(&mut *write.tx)
        .await
        .attempt("store when an API key was used")?;
    Ok(())
}

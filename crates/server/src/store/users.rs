//! SQL of accounts.

use rlm_core::ids::UserId;
use sqlx::Row;
use sqlx::any::AnyRow;

use super::{Attempt, Store, StoreError, Write, parse_column};

/// An account, without its password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub id: UserId,
    /// Lower case.
    pub email: String,
    pub first_name: String,
    pub last_name: String,
    pub created_at: i64,
    pub disabled_at: Option<i64>,
}

pub(super) fn from_row(row: &AnyRow) -> Result<User, StoreError> {
    const WHAT: &str = "read a user";
    let id: String = row.try_get("id").attempt(WHAT)?;
    Ok(User {
        id: parse_column(&id, "users", "id", &id)?,
        email: row.try_get("email").attempt(WHAT)?,
        first_name: row.try_get("first_name").attempt(WHAT)?,
        last_name: row.try_get("last_name").attempt(WHAT)?,
        created_at: row.try_get("created_at").attempt(WHAT)?,
        disabled_at: row.try_get("disabled_at").attempt(WHAT)?,
    })
}

pub async fn insert(write: &mut Write, user: &User, password_hash: &str) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO users (id, email, first_name, last_name, password_hash, created_at, disabled_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(user.id.to_string())
    .bind(&user.email)
    .bind(&user.first_name)
    .bind(&user.last_name)
    .bind(password_hash)
    .bind(user.created_at)
    .bind(user.disabled_at)
    .execute(&mut *write.tx)
    .await
    .attempt("store a user")?;
    Ok(())
}

pub async fn by_id(store: &Store, id: UserId) -> Result<Option<User>, StoreError> {
    let row = sqlx::query("SELECT id, email, first_name, last_name, created_at, disabled_at FROM users WHERE id = $1")
        .bind(id.to_string())
        .fetch_optional(store.read())
        .await
        .attempt("read a user")?;
    row.as_ref().map(from_row).transpose()
}

/// The account with this (lower-case) email address, and its password's hash.
pub async fn by_email(store: &Store, email: &str) -> Result<Option<(User, String)>, StoreError> {
    let row = sqlx::query("SELECT id, email, first_name, last_name, created_at, disabled_at, password_hash FROM users WHERE email = $1")
        .bind(email)
        .fetch_optional(store.read())
        .await
        .attempt("read a user")?;
    let Some(row) = row else { return Ok(None) };
    let hash: String = row.try_get("password_hash").attempt("read a user")?;
    Ok(Some((from_row(&row)?, hash)))
}

pub async fn set_password(write: &mut Write, id: UserId, password_hash: &str) -> Result<(), StoreError> {
    sqlx::query("UPDATE users SET password_hash = $2 WHERE id = $1")
        .bind(id.to_string())
        .bind(password_hash)
        .execute(&mut *write.tx)
        .await
        .attempt("store a password")?;
    Ok(())
}

pub async fn set_disabled(write: &mut Write, id: UserId, disabled_at: Option<i64>) -> Result<(), StoreError> {
    sqlx::query("UPDATE users SET disabled_at = $2 WHERE id = $1")
        .bind(id.to_string())
        .bind(disabled_at)
        .execute(&mut *write.tx)
        .await
        .attempt("disable a user")?;
    Ok(())
}

/// Whether there is any account.
pub async fn any(store: &Store) -> Result<bool, StoreError> {
    let row = sqlx::query("SELECT id FROM users LIMIT 1").fetch_optional(store.read()).await.attempt("read users")?;
    Ok(row.is_some())
}

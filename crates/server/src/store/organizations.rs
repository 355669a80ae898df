//! SQL of organizations and their members.

use rlm_core::ids::{OrganizationId, UserId};
use sqlx::Row;
use sqlx::any::AnyRow;

use super::users::{self, User};
use super::{Attempt, Store, StoreError, Write, parse_column};
use crate::app::access::Role;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Organization {
    pub id: OrganizationId,
    pub name: String,
    pub created_at: i64,
}

/// A user in an organization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub user: User,
    pub role: Role,
    pub joined_at: i64,
}

fn from_row(row: &AnyRow) -> Result<Organization, StoreError> {
    const WHAT: &str = "read an organization";
    let id: String = row.try_get("id").attempt(WHAT)?;
    Ok(Organization {
        id: parse_column(&id, "organizations", "id", &id)?,
        name: row.try_get("name").attempt(WHAT)?,
        created_at: row.try_get("created_at").attempt(WHAT)?,
    })
}

fn role(row: &AnyRow) -> Result<Role, StoreError> {
    let text: String = row.try_get("role").attempt("read a member")?;
    Role::parse(&text).ok_or_else(|| StoreError::Inconsistent {
        table: "members",
        column: "role",
        row: String::new(),
        problem: format!("'{text}' is no role"),
    })
}

pub async fn insert(write: &mut Write, organization: &Organization) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO organizations (id, name, created_at) VALUES ($1, $2, $3)")
        .bind(organization.id.to_string())
        .bind(&organization.name)
        .bind(organization.created_at)
        .execute(&mut *write.tx)
        .await
        .attempt("store an organization")?;
    Ok(())
}

pub async fn rename(write: &mut Write, id: OrganizationId, name: &str) -> Result<(), StoreError> {
    sqlx::query("UPDATE organizations SET name = $2 WHERE id = $1")
        .bind(id.to_string())
        .bind(name)
        .execute(&mut *write.tx)
        .await
        .attempt("rename an organization")?;
    Ok(())
}

pub async fn by_id(store: &Store, id: OrganizationId) -> Result<Option<Organization>, StoreError> {
    let row = sqlx::query("SELECT id, name, created_at FROM organizations WHERE id = $1")
        .bind(id.to_string())
        .fetch_optional(store.read())
        .await
        .attempt("read an organization")?;
    row.as_ref().map(from_row).transpose()
}

/// The organizations of a user, oldest membership first.
pub async fn of_user(store: &Store, user_id: UserId) -> Result<Vec<(Organization, Role)>, StoreError> {
    let rows = sqlx::query(
        "SELECT o.id AS id, o.name AS name, o.created_at AS created_at, m.role AS role
         FROM members m JOIN organizations o ON o.id = m.organization_id
         WHERE m.user_id = $1 ORDER BY m.created_at, o.id",
    )
    .bind(user_id.to_string())
    .fetch_all(store.read())
    .await
    .attempt("read a user's organizations")?;
    rows.iter().map(|row| Ok((from_row(row)?, role(row)?))).collect()
}

/// The user's role there; none when the user is no member or the account is disabled.
pub async fn active_role(store: &Store, organization: OrganizationId, user: UserId) -> Result<Option<Role>, StoreError> {
    let row = sqlx::query(
        "SELECT m.role AS role FROM members m JOIN users u ON u.id = m.user_id
         WHERE m.organization_id = $1 AND m.user_id = $2 AND u.disabled_at IS NULL",
    )
    .bind(organization.to_string())
    .bind(user.to_string())
    .fetch_optional(store.read())
    .await
    .attempt("read a member")?;
    row.as_ref().map(role).transpose()
}

pub async fn members(store: &Store, organization: OrganizationId) -> Result<Vec<Member>, StoreError> {
    let rows = sqlx::query(
        "SELECT u.id AS id, u.email AS email, u.first_name AS first_name, u.last_name AS last_name,
                u.created_at AS created_at, u.disabled_at AS disabled_at, m.role AS role, m.created_at AS joined_at
         FROM members m JOIN users u ON u.id = m.user_id WHERE m.organization_id = $1 ORDER BY m.created_at, u.id",
    )
    .bind(organization.to_string())
    .fetch_all(store.read())
    .await
    .attempt("read members")?;
    rows.iter()
        .map(|row| {
            Ok(Member { user: users::from_row(row)?, role: role(row)?, joined_at: row.try_get("joined_at").attempt("read members")? })
        })
        .collect()
}

/// Adds a member; false when the user is one already.
pub async fn add_member(
    write: &mut Write,
    organization: OrganizationId,
    user: UserId,
    role: Role,
    now_ms: i64,
) -> Result<bool, StoreError> {
    let result = sqlx::query(
        "INSERT INTO members (organization_id, user_id, role, created_at) VALUES ($1, $2, $3, $4)
         ON CONFLICT (organization_id, user_id) DO NOTHING",
    )
    .bind(organization.to_string())
    .bind(user.to_string())
    .bind(role.as_str())
    .bind(now_ms)
    .execute(&mut *write.tx)
    .await
    .attempt("add a member")?;
    Ok(result.rows_affected() == 1)
}

pub async fn set_role(write: &mut Write, organization: OrganizationId, user: UserId, role: Role) -> Result<(), StoreError> {
    sqlx::query("UPDATE members SET role = $3 WHERE organization_id = $1 AND user_id = $2")
        .bind(organization.to_string())
        .bind(user.to_string())
        .bind(role.as_str())
        .execute(&mut *write.tx)
        .await
        .attempt("change a member's role")?;
    Ok(())
}

pub async fn remove_member(write: &mut Write, organization: OrganizationId, user: UserId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM members WHERE organization_id = $1 AND user_id = $2")
        .bind(organization.to_string())
        .bind(user.to_string())
        .execute(&mut *write.tx)
        .await
        .attempt("remove a member")?;
    Ok(())
}

/// The role of a member as the transaction sees it, its row locked against other changes.
pub async fn role_for_update(write: &mut Write, organization: OrganizationId, user: UserId) -> Result<Option<Role>, StoreError> {
    // An update locks the row on PostgreSQL; on SQLite the transaction is the only writer.
    let row = sqlx::query("UPDATE members SET role = role WHERE organization_id = $1 AND user_id = $2 RETURNING role")
        .bind(organization.to_string())
        .bind(user.to_string())
        .fetch_optional(&mut *write.tx)
        .await
        .attempt("read a member")?;
    row.as_ref().map(role).transpose()
}

/// Owners whose accounts are not disabled, the rows locked until the transaction ends.
pub async fn count_owners(write: &mut Write, organization: OrganizationId) -> Result<usize, StoreError> {
    let rows = sqlx::query("UPDATE members SET role = role WHERE organization_id = $1 AND role = 'owner' RETURNING user_id")
        .bind(organization.to_string())
        .fetch_all(&mut *write.tx)
        .await
        .attempt("count owners")?;
    Ok(rows.len())
}

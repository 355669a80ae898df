//! Registered models and environments: numbered versions of definitions, each with its describe document once known.

use rlm_core::ids::OrganizationId;
use serde_json::Value;
use sqlx::any::AnyRow;

use super::codec::{column, from_json, placeholders, signed, to_json, unsigned};
use super::{Attempt as _, Store, StoreError, Write};

/// Which noun a definition is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DefinitionKind {
    Model,
    Environment,
}

impl DefinitionKind {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Environment => "environment",
        }
    }
}

/// One version of a registered definition.
#[derive(Debug, Clone, PartialEq)]
pub struct DefinitionRow {
    pub name: String,
    pub version: u64,
    /// As it would stand in a request.
    pub definition: Value,
    pub describe: Option<Value>,
    pub created_at: i64,
    pub created_by: String,
}

const COLUMNS: &str = "name, version, definition, describe, created_at, created_by";

fn read(row: &AnyRow) -> Result<DefinitionRow, StoreError> {
    let name: String = column(row, 0)?;
    let definition: String = column(row, 2)?;
    let describe: Option<String> = column(row, 3)?;
    Ok(DefinitionRow {
        version: unsigned(row, 1)?,
        definition: from_json("definitions", "definition", &name, &definition)?,
        describe: describe.map(|text| from_json("definitions", "describe", &name, &text)).transpose()?,
        created_at: column(row, 4)?,
        created_by: column(row, 5)?,
        name,
    })
}

impl Store {
    /// The newest version of each name, in order of name, after the name `after`; `q` is part of the name.
    pub async fn definitions(
        &self,
        organization: OrganizationId,
        kind: DefinitionKind,
        q: &str,
        after: &str,
        limit: u32,
    ) -> Result<Vec<DefinitionRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM definitions d WHERE organization_id = $1 AND kind = $2 AND name > $3 AND LOWER(name) LIKE $4 ESCAPE '\\'
             AND version = (SELECT MAX(version) FROM definitions o WHERE o.organization_id = d.organization_id AND o.kind = d.kind AND o.name = d.name)
             ORDER BY name LIMIT $5"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(organization.to_string())
            .bind(kind.as_str())
            .bind(after.to_owned())
            .bind(super::evaluations::like_pattern(q))
            .bind(i64::from(limit))
            .fetch_all(self.read())
            .await
            .attempt("list definitions")?;
        rows.iter().map(read).collect()
    }

    /// One version; None: the newest.
    pub async fn definition(
        &self,
        organization: OrganizationId,
        kind: DefinitionKind,
        name: &str,
        version: Option<u64>,
    ) -> Result<Option<DefinitionRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM definitions WHERE organization_id = $1 AND kind = $2 AND name = $3 AND (version = $4 OR $4 = -1)
             ORDER BY version DESC LIMIT 1"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(organization.to_string())
            .bind(kind.as_str())
            .bind(name.to_owned())
            .bind(version.map_or(-1, signed))
            .fetch_optional(self.read())
            .await
            .attempt("read a definition")?;
        row.as_ref().map(read).transpose()
    }

    /// The versions of a name, newest first, at most 200.
    pub async fn definition_versions(
        &self,
        organization: OrganizationId,
        kind: DefinitionKind,
        name: &str,
    ) -> Result<Vec<DefinitionRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM definitions WHERE organization_id = $1 AND kind = $2 AND name = $3 ORDER BY version DESC LIMIT 200"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(organization.to_string())
            .bind(kind.as_str())
            .bind(name.to_owned())
            .fetch_all(self.read())
            .await
            .attempt("read a definition's versions")?;
        rows.iter().map(read).collect()
    }

    /// Every version of these names, for checking a request that mentions them.
    pub async fn definitions_named(
        &self,
        organization: OrganizationId,
        kind: DefinitionKind,
        names: &[String],
    ) -> Result<Vec<DefinitionRow>, StoreError> {
        let mut found = Vec::new();
        for names in names.chunks(500) {
            let sql = format!(
                "SELECT {COLUMNS} FROM definitions WHERE organization_id = $1 AND kind = $2 AND name IN ({}) ORDER BY name, version",
                placeholders(names.len(), 3)
            );
            let mut query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(organization.to_string()).bind(kind.as_str());
            for name in names {
                query = query.bind(name.clone());
            }
            let rows = query.fetch_all(self.read()).await.attempt("read the definitions a request names")?;
            for row in &rows {
                found.push(read(row)?);
            }
        }
        Ok(found)
    }
}

impl Write {
    /// The next version of `name`.
    pub async fn insert_definition(
        &mut self,
        organization: OrganizationId,
        kind: DefinitionKind,
        row: &DefinitionRow,
    ) -> Result<u64, StoreError> {
        let stored = sqlx::query(
            "INSERT INTO definitions (organization_id, kind, name, version, definition, describe, created_at, created_by)
             SELECT $1, $2, $3, COALESCE(MAX(version), 0) + 1, $4, $5, $6, $7
             FROM definitions WHERE organization_id = $1 AND kind = $2 AND name = $3
             RETURNING version",
        )
        .bind(organization.to_string())
        .bind(kind.as_str())
        .bind(row.name.clone())
        .bind(to_json("definitions", "definition", &row.name, &row.definition)?)
        .bind(row.describe.as_ref().map(|value| to_json("definitions", "describe", &row.name, value)).transpose()?)
        .bind(row.created_at)
        .bind(row.created_by.clone())
        .fetch_one(&mut *self.tx)
        .await
        .attempt("store a definition")?;
        unsigned(&stored, 0)
    }

    /// False when there is no such version.
    pub async fn set_describe(
        &mut self,
        organization: OrganizationId,
        kind: DefinitionKind,
        name: &str,
        version: u64,
        describe: &Value,
    ) -> Result<bool, StoreError> {
        let done =
            sqlx::query("UPDATE definitions SET describe = $5 WHERE organization_id = $1 AND kind = $2 AND name = $3 AND version = $4")
                .bind(organization.to_string())
                .bind(kind.as_str())
                .bind(name.to_owned())
                .bind(signed(version))
                .bind(to_json("definitions", "describe", name, describe)?)
                .execute(&mut *self.tx)
                .await
                .attempt("store a describe document")?;
        Ok(done.rows_affected() > 0)
    }
}

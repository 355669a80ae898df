//! Join tokens, and the cluster credentials that are made from them. Only hashes of secrets are stored.

use std::collections::BTreeMap;

use rlm_core::ids::{ClusterId, CredentialId, JoinTokenId, OrganizationId};
use rlm_core::tokens::SecretKind;
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use sqlx::any::AnyRow;

use super::codec::{column, from_json, parsed, to_json};
use super::{Attempt as _, Store, StoreError, Write};

/// What a cluster credential opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// The agent's session.
    Control,
    /// Images at the registry.
    Pull,
    /// Metrics from the cluster's Prometheus.
    Relay,
}

impl Purpose {
    pub const ALL: [Self; 3] = [Self::Control, Self::Pull, Self::Relay];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Pull => "pull",
            Self::Relay => "relay",
        }
    }

    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|purpose| purpose.as_str() == text)
    }

    #[must_use]
    pub const fn secret_kind(self) -> SecretKind {
        match self {
            Self::Control => SecretKind::ControlCredential,
            Self::Pull => SecretKind::PullCredential,
            Self::Relay => SecretKind::RelayCredential,
        }
    }
}

/// The credentials that an exchange made.
pub type Exchange = BTreeMap<Purpose, CredentialId>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    pub id: JoinTokenId,
    pub cluster: ClusterId,
    pub created_at: i64,
    pub created_by: String,
    pub expires_at: i64,
    pub used_at: Option<i64>,
    pub used_nonce: Option<String>,
    pub exchange: Option<Exchange>,
    pub revoked_at: Option<i64>,
    pub superseded_at: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialRow {
    pub id: CredentialId,
    pub cluster: ClusterId,
    pub purpose: Purpose,
    pub created_at: i64,
    /// End of the overlap; None while it is the one in use.
    pub retires_at: Option<i64>,
    pub revoked_at: Option<i64>,
    pub last_used_at: Option<i64>,
}

/// A presented credential with what decides whether it opens anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentedCredential {
    pub credential: CredentialRow,
    pub organization: OrganizationId,
    pub cluster_name: String,
    pub cluster_archived: bool,
}

const TOKEN: &str = "id, cluster_id, created_at, created_by, expires_at, used_at, used_nonce, exchange, revoked_at, superseded_at";
const CREDENTIAL: &str = "c.id, c.cluster_id, c.purpose, c.created_at, c.retires_at, c.revoked_at, c.last_used_at";

fn token(row: &AnyRow) -> Result<JoinToken, StoreError> {
    let id: String = column(row, 0)?;
    let cluster: String = column(row, 1)?;
    let exchange: Option<String> = column(row, 7)?;
    Ok(JoinToken {
        cluster: parsed("join_tokens", "cluster_id", &id, &cluster, |text| text.parse().ok())?,
        created_at: column(row, 2)?,
        created_by: column(row, 3)?,
        expires_at: column(row, 4)?,
        used_at: column(row, 5)?,
        used_nonce: column(row, 6)?,
        exchange: exchange.map(|text| from_json("join_tokens", "exchange", &id, &text)).transpose()?,
        revoked_at: column(row, 8)?,
        superseded_at: column(row, 9)?,
        id: parsed("join_tokens", "id", &id, &id, |text| text.parse().ok())?,
    })
}

fn credential(row: &AnyRow) -> Result<CredentialRow, StoreError> {
    let id: String = column(row, 0)?;
    let (cluster, purpose): (String, String) = (column(row, 1)?, column(row, 2)?);
    Ok(CredentialRow {
        cluster: parsed("cluster_credentials", "cluster_id", &id, &cluster, |text| text.parse().ok())?,
        purpose: parsed("cluster_credentials", "purpose", &id, &purpose, Purpose::parse)?,
        created_at: column(row, 3)?,
        retires_at: column(row, 4)?,
        revoked_at: column(row, 5)?,
        last_used_at: column(row, 6)?,
        id: parsed("cluster_credentials", "id", &id, &id, |text| text.parse().ok())?,
    })
}

impl Store {
    /// The cluster of a token.
    pub async fn join_token_cluster(&self, hash: &str) -> Result<Option<ClusterId>, StoreError> {
        let row = sqlx::query("SELECT cluster_id FROM join_tokens WHERE hash = $1")
            .bind(hash.to_owned())
            .fetch_optional(self.read())
            .await
            .attempt("look a join token up")?;
        let Some(row) = row else { return Ok(None) };
        let id: String = column(&row, 0)?;
        Ok(Some(parsed("join_tokens", "cluster_id", &id, &id, |text| text.parse().ok())?))
    }

    /// Newest first, at most 100.
    pub async fn join_tokens(&self, cluster: ClusterId) -> Result<Vec<JoinToken>, StoreError> {
        let rows = sqlx::query(AssertSqlSafe(format!("SELECT {TOKEN} FROM join_tokens WHERE cluster_id = $1 ORDER BY id DESC LIMIT 100")))
            .bind(cluster.to_string())
            .fetch_all(self.read())
            .await
            .attempt("list join tokens")?;
        rows.iter().map(token).collect()
    }

    /// Those that are not revoked, however old, and of the revoked ones the newest 100. Newest first.
    pub async fn cluster_credentials(&self, cluster: ClusterId) -> Result<Vec<CredentialRow>, StoreError> {
        let sql = format!(
            "SELECT {CREDENTIAL} FROM cluster_credentials c WHERE c.cluster_id = $1 AND (c.revoked_at IS NULL OR c.id IN
             (SELECT id FROM cluster_credentials WHERE cluster_id = $1 AND revoked_at IS NOT NULL ORDER BY id DESC LIMIT 100))
             ORDER BY c.id DESC"
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).bind(cluster.to_string()).fetch_all(self.read()).await.attempt("list credentials")?;
        rows.iter().map(credential).collect()
    }

    /// The credential with this hash, and its cluster.
    pub async fn presented_credential(&self, hash: &str) -> Result<Option<PresentedCredential>, StoreError> {
        let sql = format!(
            "SELECT {CREDENTIAL}, k.organization_id, k.name, k.archived_at FROM cluster_credentials c JOIN clusters k ON k.id = c.cluster_id
             WHERE c.hash = $1"
        );
        let row =
            sqlx::query(AssertSqlSafe(sql)).bind(hash.to_owned()).fetch_optional(self.read()).await.attempt("look a credential up")?;
        let Some(row) = row else { return Ok(None) };
        let credential = credential(&row)?;
        let organization: String = column(&row, 7)?;
        Ok(Some(PresentedCredential {
            organization: parsed("clusters", "organization_id", &credential.cluster.to_string(), &organization, |text| text.parse().ok())?,
            cluster_name: column(&row, 8)?,
            cluster_archived: column::<Option<i64>>(&row, 9)?.is_some(),
            credential,
        }))
    }
}

impl Write {
    pub async fn insert_join_token(&mut self, token: &JoinToken, hash: &str) -> Result<(), StoreError> {
        sqlx::query("INSERT INTO join_tokens (id, hash, cluster_id, created_at, created_by, expires_at) VALUES ($1, $2, $3, $4, $5, $6)")
            .bind(token.id.to_string())
            .bind(hash.to_owned())
            .bind(token.cluster.to_string())
            .bind(token.created_at)
            .bind(token.created_by.clone())
            .bind(token.expires_at)
            .execute(&mut *self.tx)
            .await
            .attempt("store a join token")?;
        Ok(())
    }

    /// Ends the cluster's tokens that nobody used yet.
    pub async fn supersede_join_tokens(&mut self, cluster: ClusterId, now_ms: i64) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE join_tokens SET superseded_at = $2 WHERE cluster_id = $1 AND used_at IS NULL AND revoked_at IS NULL AND superseded_at IS NULL",
        )
        .bind(cluster.to_string())
        .bind(now_ms)
        .execute(&mut *self.tx)
        .await
        .attempt("supersede join tokens")?;
        Ok(())
    }

    /// The token with this hash, under a lock that lasts until the transaction ends.
    pub async fn lock_join_token(&mut self, hash: &str) -> Result<Option<JoinToken>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(format!("UPDATE join_tokens SET hash = hash WHERE hash = $1 RETURNING {TOKEN}")))
            .bind(hash.to_owned())
            .fetch_optional(&mut *self.tx)
            .await
            .attempt("lock a join token")?;
        row.as_ref().map(token).transpose()
    }

    pub async fn use_join_token(&mut self, id: JoinTokenId, nonce: &str, exchange: &Exchange, now_ms: i64) -> Result<(), StoreError> {
        let text = id.to_string();
        sqlx::query("UPDATE join_tokens SET used_at = $2, used_nonce = $3, exchange = $4 WHERE id = $1")
            .bind(text.clone())
            .bind(now_ms)
            .bind(nonce.to_owned())
            .bind(to_json("join_tokens", "exchange", &text, exchange)?)
            .execute(&mut *self.tx)
            .await
            .attempt("store a join")?;
        Ok(())
    }

    /// False when the cluster has no such token, or it was revoked before.
    pub async fn revoke_join_token(&mut self, cluster: ClusterId, id: JoinTokenId, now_ms: i64) -> Result<bool, StoreError> {
        let done = sqlx::query("UPDATE join_tokens SET revoked_at = $3 WHERE id = $1 AND cluster_id = $2 AND revoked_at IS NULL")
            .bind(id.to_string())
            .bind(cluster.to_string())
            .bind(now_ms)
            .execute(&mut *self.tx)
            .await
            .attempt("revoke a join token")?;
        Ok(done.rows_affected() > 0)
    }

    /// Revokes every token and credential of a cluster.
    pub async fn revoke_everything(&mut self, cluster: ClusterId, now_ms: i64) -> Result<(), StoreError> {
        for sql in [
            "UPDATE join_tokens SET revoked_at = $2 WHERE cluster_id = $1 AND revoked_at IS NULL",
            "UPDATE cluster_credentials SET revoked_at = $2 WHERE cluster_id = $1 AND revoked_at IS NULL",
        ] {
            sqlx::query(sql)
                .bind(cluster.to_string())
                .bind(now_ms)
                .execute(&mut *self.tx)
                .await
                .attempt("revoke a cluster's credentials")?;
        }
        Ok(())
    }

    pub async fn insert_credential(
        &mut self,
        cluster: ClusterId,
        purpose: Purpose,
        id: CredentialId,
        hash: &str,
        now_ms: i64,
    ) -> Result<(), StoreError> {
        sqlx::query("INSERT INTO cluster_credentials (id, cluster_id, purpose, hash, created_at) VALUES ($1, $2, $3, $4, $5)")
            .bind(id.to_string())
            .bind(cluster.to_string())
            .bind(purpose.as_str())
            .bind(hash.to_owned())
            .bind(now_ms)
            .execute(&mut *self.tx)
            .await
            .attempt("store a credential")?;
        Ok(())
    }

    /// Begins the overlap of the credentials of this purpose that are in use.
    pub async fn retire_credentials(&mut self, cluster: ClusterId, purpose: Purpose, retires_at: i64) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "UPDATE cluster_credentials SET retires_at = $3 WHERE cluster_id = $1 AND purpose = $2 AND retires_at IS NULL AND revoked_at IS NULL",
        )
        .bind(cluster.to_string())
        .bind(purpose.as_str())
        .bind(retires_at)
        .execute(&mut *self.tx)
        .await
        .attempt("retire a credential")?;
        Ok(done.rows_affected())
    }

    /// When the overlap of a purpose ends that is running now.
    pub async fn running_overlap(&mut self, cluster: ClusterId, purpose: Purpose, now_ms: i64) -> Result<Option<i64>, StoreError> {
        let row = sqlx::query(
            "SELECT MAX(retires_at) FROM cluster_credentials WHERE cluster_id = $1 AND purpose = $2 AND revoked_at IS NULL AND retires_at > $3",
        )
        .bind(cluster.to_string())
        .bind(purpose.as_str())
        .bind(now_ms)
        .fetch_one(&mut *self.tx)
        .await
        .attempt("look for a running rotation")?;
        column(&row, 0)
    }

    pub async fn touch_credential(&mut self, id: CredentialId, now_ms: i64) -> Result<(), StoreError> {
        sqlx::query("UPDATE cluster_credentials SET last_used_at = $2 WHERE id = $1")
            .bind(id.to_string())
            .bind(now_ms)
            .execute(&mut *self.tx)
            .await
            .attempt("note a credential's use")?;
        Ok(())
    }
}

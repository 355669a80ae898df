//! Up to which record each agent instance's results are stored here.

use rlm_core::ids::{ClusterId, OrganizationId};

use super::codec::{column, parsed, signed, unsigned};
use super::{Attempt as _, StoreError, Write};

impl Write {
    /// The highest durable position of this agent instance, under a lock.
    pub async fn lock_position(&mut self, cluster: ClusterId, instance_id: &str) -> Result<u64, StoreError> {
        sqlx::query("INSERT INTO agent_positions (cluster_id, instance_id, durable) VALUES ($1, $2, 0) ON CONFLICT (cluster_id, instance_id) DO NOTHING")
            .bind(cluster.to_string())
            .bind(instance_id.to_owned())
            .execute(&mut *self.tx)
            .await
            .attempt("note an agent's position")?;
        let row = sqlx::query("UPDATE agent_positions SET durable = durable WHERE cluster_id = $1 AND instance_id = $2 RETURNING durable")
            .bind(cluster.to_string())
            .bind(instance_id.to_owned())
            .fetch_one(&mut *self.tx)
            .await
            .attempt("read an agent's position")?;
        unsigned(&row, 0)
    }

    pub async fn save_position(&mut self, cluster: ClusterId, instance_id: &str, durable: u64) -> Result<(), StoreError> {
        sqlx::query("UPDATE agent_positions SET durable = $3 WHERE cluster_id = $1 AND instance_id = $2")
            .bind(cluster.to_string())
            .bind(instance_id.to_owned())
            .bind(signed(durable))
            .execute(&mut *self.tx)
            .await
            .attempt("store an agent's position")?;
        Ok(())
    }

    /// The organization that a cluster belongs to.
    pub async fn cluster_organization(&mut self, cluster: ClusterId) -> Result<Option<OrganizationId>, StoreError> {
        let row = sqlx::query("SELECT organization_id FROM clusters WHERE id = $1")
            .bind(cluster.to_string())
            .fetch_optional(&mut *self.tx)
            .await
            .attempt("read a cluster's organization")?;
        let Some(row) = row else { return Ok(None) };
        let text: String = column(&row, 0)?;
        Ok(Some(parsed("clusters", "organization_id", &cluster.to_string(), &text, |text| text.parse().ok())?))
    }
}

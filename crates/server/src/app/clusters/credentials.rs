//! Credentials of clusters: which one opens what, how one is replaced by the next. Values are derived from ids and the
//! server's key; the database holds their hashes.

use rlm_api::cluster::v1;
use rlm_core::error::{Code, Error};
use rlm_core::ids::{ClusterId, CredentialId};
use rlm_core::tokens::{Secret, SecretKind, derive_credential};
use serde_json::json;

use super::find;
use crate::app::access::Caller;
use crate::app::audit;
use crate::app::cells::session::Agent;
use crate::config::millis;
use crate::state::AppState;
use crate::store::join_tokens::{CredentialRow, Purpose};
use crate::store::{StoreError, Write};

/// The value of a credential.
#[must_use]
pub fn secret(state: &AppState, purpose: Purpose, id: CredentialId) -> Secret {
    derive_credential(state.identity.server_key(), purpose.secret_kind(), &id.to_string())
}

/// As the cell protocol carries it.
#[must_use]
pub fn message(state: &AppState, purpose: Purpose, id: CredentialId) -> v1::Credential {
    v1::Credential { purpose: purpose.as_str().to_owned(), id: id.to_string(), secret: secret(state, purpose, id).expose().to_owned() }
}

/// Makes a new credential in the caller's transaction.
pub(super) async fn make(
    state: &AppState,
    write: &mut Write,
    cluster: ClusterId,
    purpose: Purpose,
    now_ms: i64,
) -> Result<CredentialId, StoreError> {
    let id = CredentialId::generate();
    write.insert_credential(cluster, purpose, id, &secret(state, purpose, id).hash(), now_ms).await?;
    Ok(id)
}

/// The agent of a cluster whose registration was archived.
#[must_use]
pub fn archived(name: &str) -> Error {
    Error::new(
        Code::ClusterArchived,
        format!("the registration of cluster {name} was archived and its credentials are revoked; connect it again as a new cluster"),
    )
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(Code::Unauthenticated, message)
}

/// Why a credential opens nothing, if so. Pure.
fn judge(credential: &CredentialRow, cluster_name: &str, archived_cluster: bool, now_ms: i64) -> Result<(), Error> {
    if archived_cluster {
        return Err(archived(cluster_name));
    }
    if credential.revoked_at.is_some() {
        return Err(refused(format!("this credential of cluster {cluster_name} was revoked; issue a new install command for the cluster")));
    }
    if credential.retires_at.is_some_and(|at| at <= now_ms) {
        return Err(refused(format!(
            "this credential of cluster {cluster_name} was replaced and its overlap has ended; use the new value, or issue a new install command"
        )));
    }
    Ok(())
}

/// The agent behind a control credential.
pub async fn authenticate(state: &AppState, bearer: Option<&str>) -> Result<Agent, Error> {
    let text = bearer.ok_or_else(|| refused("no credential: send the metadata `authorization: Bearer rlm_cc_...`"))?;
    let secret = Secret::parse(text).map_err(|error| refused(format!("the control credential is malformed: {error}")))?;
    if secret.kind() != SecretKind::ControlCredential {
        return Err(refused(format!("a session needs a control credential (rlm_cc_...), not {secret:?}")));
    }
    let presented = state.store.presented_credential(&secret.hash()).await?.ok_or_else(|| {
        refused("this control credential is not known here; check the platform's address, or issue a new install command")
    })?;
    judge(&presented.credential, &presented.cluster_name, presented.cluster_archived, state.clock.now_ms())?;
    Ok(Agent {
        cluster: presented.credential.cluster,
        organization: presented.organization,
        cluster_name: presented.cluster_name,
        credential: presented.credential.id,
        retires_at: presented.credential.retires_at,
    })
}

/// The values that the agent with the control credential `current` may not have yet: of each purpose that was rotated.
pub async fn replacements(state: &AppState, cluster: ClusterId, current: CredentialId) -> Result<Vec<v1::Credential>, StoreError> {
    let all = state.store.cluster_credentials(cluster).await?;
    let mut found = Vec::new();
    for purpose in Purpose::ALL {
        let mut of_purpose = all.iter().filter(|one| one.purpose == purpose && one.revoked_at.is_none());
        let newest = of_purpose.clone().find(|one| one.retires_at.is_none());
        let replaced_one = of_purpose.any(|one| one.retires_at.is_some());
        if let Some(newest) = newest.filter(|newest| replaced_one && newest.id != current) {
            found.push(message(state, purpose, newest.id));
        }
    }
    Ok(found)
}

/// A rotation's answer.
pub struct Rotated {
    pub credential: CredentialRow,
    pub secret: Secret,
    /// Until when the old value works.
    pub overlap_ends: i64,
    /// Whether the connected agent was told.
    pub delivered: bool,
}

/// Replaces the credential of one purpose; both values work until the overlap ends.
pub async fn rotate(state: &AppState, caller: &Caller, id: &str, purpose: Purpose) -> Result<Rotated, Error> {
    let cluster = find(state, caller, id).await?;
    let now_ms = state.clock.now_ms();
    let overlap_ends = now_ms.saturating_add(millis(state.config.timings.credential_overlap));
    let mut write = state.store.write().await?;
    let locked = write.lock_cluster(cluster.id).await?.ok_or_else(|| super::unknown(id))?;
    super::refuse_archived(&locked)?;
    if let Some(until) = write.running_overlap(cluster.id, purpose, now_ms).await? {
        return Err(Error::new(
            Code::Conflict,
            format!(
                "the {} credential of cluster {} was replaced less than a day ago: the old value works until {}; rotate again after that, or issue \
                 a new install command",
                purpose.as_str(),
                cluster.name,
                super::time(until)
            ),
        ));
    }
    if write.retire_credentials(cluster.id, purpose, overlap_ends).await? == 0 {
        return Err(Error::new(
            Code::Conflict,
            format!(
                "cluster {} has no {} credential to rotate: it gets its first when it joins; issue an install command",
                cluster.name,
                purpose.as_str()
            ),
        ));
    }
    let credential = make(state, &mut write, cluster.id, purpose, now_ms).await?;
    let details = json!({"purpose": purpose.as_str(), "credential": credential.to_string()});
    audit::record(&mut write, now_ms, &caller.actor(), "credential.rotate", &cluster.id.to_string(), details).await?;
    write.commit().await?;
    if purpose == Purpose::Control {
        state.cells.control_replaced(cluster.id, credential, overlap_ends);
    }
    let rotate = v1::Rotate { credential: Some(message(state, purpose, credential)) };
    let delivered = state.cells.tell(cluster.id, v1::server_message::Message::Rotate(rotate));
    Ok(Rotated {
        credential: CredentialRow {
            id: credential,
            cluster: cluster.id,
            purpose,
            created_at: now_ms,
            retires_at: None,
            revoked_at: None,
            last_used_at: None,
        },
        secret: secret(state, purpose, credential),
        overlap_ends,
        delivered,
    })
}

/// The credentials of a cluster, newest first.
pub async fn list(state: &AppState, caller: &Caller, id: &str) -> Result<Vec<CredentialRow>, Error> {
    let cluster = find(state, caller, id).await?;
    Ok(state.store.cluster_credentials(cluster.id).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(retires_at: Option<i64>, revoked_at: Option<i64>) -> CredentialRow {
        CredentialRow {
            id: CredentialId::generate(),
            cluster: ClusterId::generate(),
            purpose: Purpose::Control,
            created_at: 0,
            retires_at,
            revoked_at,
            last_used_at: None,
        }
    }

    #[test]
    fn the_old_value_works_until_the_overlap_ends() {
        let code = |credential: &CredentialRow, archived, now| judge(credential, "lab", archived, now).err().map(|error| error.code);
        assert_eq!(code(&credential(None, None), false, 100), None);
        assert_eq!(code(&credential(Some(100), None), false, 99), None);
        assert_eq!(code(&credential(Some(100), None), false, 100), Some(Code::Unauthenticated));
        assert_eq!(code(&credential(None, Some(1)), false, 100), Some(Code::Unauthenticated));
        assert_eq!(code(&credential(None, Some(1)), true, 100), Some(Code::ClusterArchived));
    }
}

//! Set-up of a server that one person runs on their own machine: one organization, its owner, and a key for the CLI.
//!
//! Repeatable: an existing account stays as it is, and the key of the last set-up is replaced. Never for a server that others
//! reach.

use std::path::PathBuf;

use rlm_core::tokens::Secret;

use crate::app::access::{Caller, Credential, Role, Scopes};
use crate::app::identity::accounts;
use crate::app::identity::api_keys::{self, NewKey};
use crate::state::AppState;
use crate::store::{organizations, users};

const KEY: &str = "rlmesh up";

/// What the set-up leaves.
pub struct LocalSetup {
    pub email: &'static str,
    /// Holds the first password, readable by its owner alone.
    pub password_file: PathBuf,
    /// May do all that the owner may.
    pub api_key: Secret,
}

/// Makes what is missing and a new key.
pub async fn setup(state: &AppState) -> anyhow::Result<LocalSetup> {
    accounts::make_first_admin(state).await?;
    let email = accounts::FIRST_ADMIN;
    let (user, _) = users::by_email(&state.store, email).await?.ok_or_else(|| {
        anyhow::anyhow!("the account {email} is not there: this database was set up otherwise; serve it with `rlmesh-server serve`")
    })?;
    let (organization, role) = organizations::of_user(&state.store, user.id)
        .await?
        .into_iter()
        .find(|(_, role)| *role == Role::Owner)
        .ok_or_else(|| anyhow::anyhow!("{email} owns no organization any more; serve this database with `rlmesh-server serve`"))?;
    let caller = Caller {
        user_id: user.id,
        organization_id: organization.id,
        role,
        scopes: Scopes::all(),
        actor: "system".to_owned(),
        remote_address: String::new(),
        credential: Credential::Browser { hash: String::new() },
    };
    for key in api_keys::list(state, &caller, None, 1000).await? {
        if key.name == KEY && key.revoked_at.is_none() {
            api_keys::revoke(state, &caller, key.id).await?;
        }
    }
    let (_, api_key) = api_keys::create(state, &caller, NewKey { name: KEY.to_owned(), scopes: None, expires_at: None }).await?;
    Ok(LocalSetup { email, password_file: state.config.state_dir.join("admin-password"), api_key })
}

//! Accounts: making them, the first admin, signing in with a password.

use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::{OrganizationId, UserId};
use serde_json::json;

use super::limits::SIGN_IN;
use super::passwords;
use crate::app::access::{Actor, Role};
use crate::app::audit;
use crate::state::AppState;
use crate::store::organizations::{self, Organization};
use crate::store::sessions;
use crate::store::users::{self, User};
use crate::store::{StoreError, Write};

/// Longest name of anything a user names.
pub const LONGEST_NAME: usize = 100;

/// An account to be made.
#[derive(Debug, Clone)]
pub struct NewAccount {
    pub email: String,
    pub first_name: String,
    pub last_name: String,
}

/// The stored form of an email address: trimmed, lower case.
#[must_use]
pub fn normal_email(email: &str) -> String {
    email.trim().to_lowercase()
}

/// What is wrong with an address, if anything.
pub fn email_problem(email: &str) -> Option<String> {
    let plain = email.len() <= 254 && !email.contains(|c: char| c.is_whitespace() || c.is_control());
    match email.split_once('@') {
        Some((name, domain)) if plain && !name.is_empty() && !domain.is_empty() && !domain.contains('@') => None,
        _ => Some("must be an email address, such as name@example.com".to_owned()),
    }
}

/// What is wrong with a name, if anything.
pub fn name_problem(name: &str) -> Option<String> {
    if name.trim().is_empty() {
        Some("must not be empty".to_owned())
    } else if name.trim() != name {
        Some("must not begin or end with white space".to_owned())
    } else if name.chars().count() > LONGEST_NAME {
        Some(format!("must have at most {LONGEST_NAME} characters"))
    } else if name.chars().any(char::is_control) {
        Some("must not contain control characters".to_owned())
    } else {
        None
    }
}

pub(super) async fn insert_user(write: &mut Write, now_ms: i64, account: &NewAccount, password_hash: &str) -> Result<User, Error> {
    let user = User {
        id: UserId::generate(),
        email: normal_email(&account.email),
        first_name: account.first_name.clone(),
        last_name: account.last_name.clone(),
        created_at: now_ms,
        disabled_at: None,
    };
    users::insert(write, &user, password_hash).await.map_err(|error| taken(error, "an account with this email address exists"))?;
    Ok(user)
}

pub(super) fn taken(error: StoreError, message: &str) -> Error {
    if error.is_unique_violation() { Error::new(Code::AlreadyExists, message) } else { error.into() }
}

/// Makes an account with an organization of its own, which it owns.
pub async fn create_owner(
    state: &AppState,
    account: &NewAccount,
    password: &str,
    organization: &str,
) -> Result<(User, Organization), Error> {
    let mut problems = Vec::new();
    problems.extend(email_problem(&account.email).map(|problem| Problem::new("email", problem)));
    problems.extend(passwords::check_strength(password).err().map(|problem| Problem::new("password", problem)));
    problems.extend(name_problem(organization).map(|problem| Problem::new("organization", problem)));
    if !problems.is_empty() {
        return Err(Error::invalid(problems));
    }
    let hash = passwords::hash(password).await?;
    let now = state.clock.now_ms();
    let organization = Organization { id: OrganizationId::generate(), name: organization.to_owned(), created_at: now };
    let mut write = state.store.write().await?;
    let user = insert_user(&mut write, now, account, &hash).await?;
    organizations::insert(&mut write, &organization)
        .await
        .map_err(|error| taken(error, &format!("an organization named '{}' exists", organization.name)))?;
    organizations::add_member(&mut write, organization.id, user.id, Role::Owner, now).await?;
    let actor = Actor::system(organization.id);
    audit::record(&mut write, now, &actor, "organization.create", &organization.id.to_string(), json!({"name": organization.name})).await?;
    audit::record(&mut write, now, &actor, "member.add", &user.id.to_string(), json!({"role": Role::Owner.as_str()})).await?;
    write.commit().await?;
    Ok((user, organization))
}

pub async fn get(state: &AppState, id: UserId) -> Result<User, Error> {
    users::by_id(&state.store, id).await?.ok_or_else(|| Error::new(Code::NotFound, format!("there is no account {id}")))
}

/// Makes the account and its organization, or sets the password of an account that exists. Says what it did.
pub async fn ensure_owner(state: &AppState, account: &NewAccount, password: &str, organization: &str) -> Result<&'static str, Error> {
    if users::by_email(&state.store, &normal_email(&account.email)).await?.is_some() {
        reset_password(state, &account.email, password).await?;
        return Ok("set the password of");
    }
    create_owner(state, account, password, organization).await?;
    Ok("made the account")
}

/// Email address of the account that the first start makes.
pub const FIRST_ADMIN: &str = "admin@localhost";

/// At the very first start: an account with a random password, which is left in a file of the state folder.
pub async fn make_first_admin(state: &AppState) -> anyhow::Result<()> {
    if users::any(&state.store).await? {
        return Ok(());
    }
    let path = state.config.state_dir.join("admin-password");
    let password = hex::encode(rand::random::<[u8; 16]>());
    // A file without an account is left of a start that failed in between: its password was never anyone's.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    super::write_private(&path, format!("{password}\n").as_bytes())?;
    let account = NewAccount { email: FIRST_ADMIN.to_owned(), first_name: String::new(), last_name: String::new() };
    create_owner(state, &account, &password, "local").await?;
    tracing::info!(email = FIRST_ADMIN, password_file = %path.display(), "made the first account");
    Ok(())
}

/// Sets an existing account's password and ends its sign-ins; used from the server's own command line.
pub async fn reset_password(state: &AppState, email: &str, password: &str) -> Result<User, Error> {
    passwords::check_strength(password).map_err(|problem| Error::invalid(vec![Problem::new("password", problem)]))?;
    let (user, _) = users::by_email(&state.store, &normal_email(email))
        .await?
        .ok_or_else(|| Error::new(Code::NotFound, format!("there is no account with the email address {email}")))?;
    let hash = passwords::hash(password).await?;
    let member_of = organizations::of_user(&state.store, user.id).await?;
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    users::set_password(&mut write, user.id, &hash).await?;
    // Whoever knew the old password may be signed in.
    sessions::revoke_of_user(&mut write, user.id, now).await?;
    for (organization, _) in member_of {
        let actor = Actor::system(organization.id);
        audit::record(&mut write, now, &actor, "account.password", &user.id.to_string(), json!({})).await?;
    }
    write.commit().await?;
    Ok(user)
}

/// Checks email address and password. The answer does not say which of them is wrong.
pub async fn sign_in(state: &AppState, email: &str, password: &str, remote_address: &str) -> Result<User, Error> {
    let now = state.clock.now_ms();
    let email = normal_email(email);
    state.identity.limits.check("sign-in from one address", remote_address, SIGN_IN, now)?;
    state.identity.limits.check("sign-in to one account", &email, SIGN_IN, now)?;
    let found = users::by_email(&state.store, &email).await?;
    let matches = passwords::verify(password, found.as_ref().map(|(_, hash)| hash.as_str())).await?;
    match found {
        Some((user, _)) if matches && user.disabled_at.is_none() => Ok(user),
        _ => Err(Error::new(Code::Unauthenticated, "email address or password is wrong")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names() {
        for good in ["a@b", "first.last+tag@example.com", "ä@exämple.de"] {
            assert_eq!(email_problem(good), None, "{good}");
        }
        for bad in ["", "a", "@b", "a@", "a@b@c", "a b@c", "a@b\n", &format!("{}@b", "a".repeat(254))] {
            assert!(email_problem(bad).is_some(), "{bad}");
        }
        assert_eq!(name_problem("Robotics lab"), None);
        for bad in ["", "  ", " a", "a ", "a\u{7}b", &"n".repeat(101)] {
            assert!(name_problem(bad).is_some(), "{bad:?}");
        }
        assert_eq!(normal_email(" Name@Example.COM "), "name@example.com");
    }
}

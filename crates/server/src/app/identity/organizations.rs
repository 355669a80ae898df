//! Organizations and their members. An organization always keeps an owner.

use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::{OrganizationId, UserId};
use serde_json::json;

use super::accounts::{NewAccount, email_problem, insert_user, name_problem, normal_email, taken};
use super::passwords;
use crate::app::access::{Caller, Role, Scope};
use crate::app::audit;
use crate::state::AppState;
use crate::store::organizations::{self, Member, Organization};
use crate::store::{keys, sessions, users};

fn no_such(id: OrganizationId) -> Error {
    Error::new(Code::NotFound, format!("there is no organization {id} that you act in; `rlmesh org switch` changes that"))
}

/// A caller acts in one organization, and sees that one only.
fn own(caller: &Caller, id: OrganizationId) -> Result<(), Error> {
    if caller.organization_id == id { Ok(()) } else { Err(no_such(id)) }
}

/// The organizations of the caller's user, with their roles.
pub async fn mine(state: &AppState, caller: &Caller) -> Result<Vec<(Organization, Role)>, Error> {
    Ok(organizations::of_user(&state.store, caller.user_id).await?)
}

/// The organization that the caller acts in.
pub async fn acting_in(state: &AppState, caller: &Caller) -> Result<Organization, Error> {
    let id = caller.organization_id;
    organizations::by_id(&state.store, id).await?.ok_or_else(|| no_such(id))
}

pub async fn get(state: &AppState, caller: &Caller, id: OrganizationId) -> Result<Organization, Error> {
    caller.require(Scope::OrganizationRead)?;
    own(caller, id)?;
    organizations::by_id(&state.store, id).await?.ok_or_else(|| no_such(id))
}

/// Makes an organization that the caller's user owns.
pub async fn create(state: &AppState, caller: &Caller, name: &str) -> Result<Organization, Error> {
    caller.require(Scope::OrganizationWrite)?;
    check_name(name)?;
    let now = state.clock.now_ms();
    let organization = Organization { id: OrganizationId::generate(), name: name.to_owned(), created_at: now };
    let mut write = state.store.write().await?;
    organizations::insert(&mut write, &organization).await.map_err(|error| name_taken(error, name))?;
    organizations::add_member(&mut write, organization.id, caller.user_id, Role::Owner, now).await?;
    let mut actor = caller.actor();
    actor.organization_id = organization.id;
    audit::record(&mut write, now, &actor, "organization.create", &organization.id.to_string(), json!({"name": name})).await?;
    write.commit().await?;
    Ok(organization)
}

pub async fn rename(state: &AppState, caller: &Caller, id: OrganizationId, name: &str) -> Result<Organization, Error> {
    own(caller, id)?;
    caller.require(Scope::OrganizationWrite)?;
    check_name(name)?;
    let before = acting_in(state, caller).await?;
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    organizations::rename(&mut write, id, name).await.map_err(|error| name_taken(error, name))?;
    let details = json!({"from": before.name, "to": name});
    audit::record(&mut write, now, &caller.actor(), "organization.rename", &id.to_string(), details).await?;
    write.commit().await?;
    Ok(Organization { name: name.to_owned(), ..before })
}

fn check_name(name: &str) -> Result<(), Error> {
    name_problem(name).map_or(Ok(()), |problem| Err(Error::invalid(vec![Problem::new("name", problem)])))
}

fn name_taken(error: crate::store::StoreError, name: &str) -> Error {
    taken(error, &format!("an organization named '{name}' exists; choose another name"))
}

pub async fn members(state: &AppState, caller: &Caller, id: OrganizationId) -> Result<Vec<Member>, Error> {
    caller.require(Scope::OrganizationRead)?;
    own(caller, id)?;
    Ok(organizations::members(&state.store, id).await?)
}

/// Someone to be added to an organization. A password makes an account where there is none.
#[derive(Debug, Clone)]
pub struct NewMember {
    pub account: NewAccount,
    pub password: Option<String>,
    pub role: Role,
}

pub async fn add_member(state: &AppState, caller: &Caller, id: OrganizationId, new: NewMember) -> Result<Member, Error> {
    own(caller, id)?;
    caller.require(Scope::OrganizationWrite)?;
    require_rank(caller, new.role)?;
    let email = normal_email(&new.account.email);
    if let Some(problem) = email_problem(&email) {
        return Err(Error::invalid(vec![Problem::new("email", problem)]));
    }
    let existing = users::by_email(&state.store, &email).await?.map(|(user, _)| user);
    let hash = match (&existing, &new.password) {
        (None, None) => {
            let problem = "there is no account with this email address; give a password to make one";
            return Err(Error::invalid(vec![Problem::new("password", problem)]));
        }
        (None, Some(password)) => {
            passwords::check_strength(password).map_err(|problem| Error::invalid(vec![Problem::new("password", problem)]))?;
            Some(passwords::hash(password).await?)
        }
        (Some(_), Some(_)) => {
            let message = "an account with this email address exists; leave the password out to add it to the organization";
            return Err(Error::new(Code::AlreadyExists, message));
        }
        (Some(_), None) => None,
    };
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    let user = match (existing, hash) {
        (Some(user), _) => user,
        (None, Some(hash)) => insert_user(&mut write, now, &new.account, &hash).await?,
        (None, None) => return Err(Error::new(Code::Internal, "the account has no password")),
    };
    if !organizations::add_member(&mut write, id, user.id, new.role, now).await? {
        return Err(Error::new(Code::AlreadyExists, format!("{email} is a member already")));
    }
    let details = json!({"role": new.role.as_str()});
    audit::record(&mut write, now, &caller.actor(), "member.add", &user.id.to_string(), details).await?;
    write.commit().await?;
    Ok(Member { user, role: new.role, joined_at: now })
}

/// Only an owner makes owners or changes one.
fn require_rank(caller: &Caller, role: Role) -> Result<(), Error> {
    match (caller.role, role) {
        (Role::Owner, _) | (_, Role::Viewer | Role::Member | Role::Admin) => Ok(()),
        (Role::Viewer | Role::Member | Role::Admin, Role::Owner) => {
            Err(Error::new(Code::Forbidden, "not allowed: only an owner of the organization adds, changes or removes owners"))
        }
    }
}

fn no_member(user: UserId) -> Error {
    Error::new(Code::NotFound, format!("there is no member {user} in this organization"))
}

pub async fn set_role(state: &AppState, caller: &Caller, id: OrganizationId, user: UserId, role: Role) -> Result<Member, Error> {
    own(caller, id)?;
    caller.require(Scope::OrganizationWrite)?;
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    // Owners first, always in this order, so that two changes at once cannot wait for each other.
    let owners = organizations::count_owners(&mut write, id).await?;
    let before = organizations::role_for_update(&mut write, id, user).await?.ok_or_else(|| no_member(user))?;
    require_rank(caller, before)?;
    require_rank(caller, role)?;
    keep_an_owner(owners, before, Some(role))?;
    organizations::set_role(&mut write, id, user, role).await?;
    let details = json!({"from": before.as_str(), "to": role.as_str()});
    audit::record(&mut write, now, &caller.actor(), "member.role", &user.to_string(), details).await?;
    write.commit().await?;
    organizations::members(&state.store, id).await?.into_iter().find(|member| member.user.id == user).ok_or_else(|| no_member(user))
}

/// Removes a member, with their sign-ins and keys here.
pub async fn remove_member(state: &AppState, caller: &Caller, id: OrganizationId, user: UserId) -> Result<(), Error> {
    own(caller, id)?;
    caller.require(Scope::OrganizationWrite)?;
    let now = state.clock.now_ms();
    let mut write = state.store.write().await?;
    // Tokens first: a refresh locks its token, then the member.
    sessions::revoke_of_member(&mut write, id, user, now).await?;
    let owners = organizations::count_owners(&mut write, id).await?;
    let before = organizations::role_for_update(&mut write, id, user).await?.ok_or_else(|| no_member(user))?;
    require_rank(caller, before)?;
    keep_an_owner(owners, before, None)?;
    keys::revoke_of_member(&mut write, id, user, now).await?;
    organizations::remove_member(&mut write, id, user).await?;
    audit::record(&mut write, now, &caller.actor(), "member.remove", &user.to_string(), json!({"role": before.as_str()})).await?;
    write.commit().await?;
    Ok(())
}

fn keep_an_owner(owners: usize, before: Role, after: Option<Role>) -> Result<(), Error> {
    if before == Role::Owner && after != Some(Role::Owner) && owners <= 1 {
        Err(Error::new(Code::Conflict, "an organization keeps at least one owner; make another member owner first"))
    } else {
        Ok(())
    }
}

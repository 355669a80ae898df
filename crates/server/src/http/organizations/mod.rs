//! Organizations and their members.

use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use rlm_api::rest::Page;
use rlm_core::ids::{OrganizationId, UserId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Role};
use crate::app::identity::accounts::NewAccount;
use crate::app::identity::organizations::{self as app, NewMember};
use crate::http::error::ApiResult;
use crate::http::extract::{Json, Path};
use crate::http::time::rfc3339;
use crate::state::AppState;
use crate::store::organizations as stored;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create_organization))
        .routes(routes!(get_organization, rename_organization))
        .routes(routes!(list_members, add_member))
        .routes(routes!(change_member, remove_member))
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Organization {
    pub id: String,
    pub name: String,
    pub created_at: DateTime<Utc>,
}

impl From<stored::Organization> for Organization {
    fn from(organization: stored::Organization) -> Self {
        Self { id: organization.id.to_string(), name: organization.name, created_at: rfc3339(organization.created_at) }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Member {
    pub user_id: String,
    pub email: String,
    pub first_name: String,
    pub last_name: String,
    #[schema(value_type = String)]
    pub role: Role,
    pub joined_at: DateTime<Utc>,
    pub disabled: bool,
}

impl From<stored::Member> for Member {
    fn from(member: stored::Member) -> Self {
        Self {
            user_id: member.user.id.to_string(),
            email: member.user.email,
            first_name: member.user.first_name,
            last_name: member.user.last_name,
            role: member.role,
            joined_at: rfc3339(member.joined_at),
            disabled: member.user.disabled_at.is_some(),
        }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NameOrganization {
    pub name: String,
}

/// Make an organization; the caller becomes its owner.
#[utoipa::path(
    post, path = "/v1/organizations", tag = "organization", security(("bearer" = []), ("session" = [])),
    request_body = NameOrganization, responses((status = 201, body = Organization), (status = 409, description = "the name is taken"))
)]
async fn create_organization(
    State(state): State<AppState>,
    caller: Caller,
    Json(request): Json<NameOrganization>,
) -> ApiResult<(StatusCode, Json<Organization>)> {
    let organization = app::create(&state, &caller, &request.name).await?;
    Ok((StatusCode::CREATED, Json(organization.into())))
}

/// The organization that the caller acts in.
#[utoipa::path(
    get, path = "/v1/organizations/{id}", tag = "organization", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Organization))
)]
async fn get_organization(State(state): State<AppState>, caller: Caller, Path(id): Path<OrganizationId>) -> ApiResult<Json<Organization>> {
    Ok(Json(app::get(&state, &caller, id).await?.into()))
}

/// Rename an organization.
#[utoipa::path(
    patch, path = "/v1/organizations/{id}", tag = "organization", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), request_body = NameOrganization,
    responses((status = 200, body = Organization), (status = 409, description = "the name is taken"))
)]
async fn rename_organization(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<OrganizationId>,
    Json(request): Json<NameOrganization>,
) -> ApiResult<Json<Organization>> {
    Ok(Json(app::rename(&state, &caller, id, &request.name).await?.into()))
}

/// The members of an organization, in the order they joined. One page holds them all.
#[utoipa::path(
    get, path = "/v1/organizations/{id}/members", tag = "organization", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), responses((status = 200, body = Page<Member>))
)]
async fn list_members(State(state): State<AppState>, caller: Caller, Path(id): Path<OrganizationId>) -> ApiResult<Json<Page<Member>>> {
    let members = app::members(&state, &caller, id).await?;
    Ok(Json(Page { items: members.into_iter().map(Member::from).collect(), next_cursor: None }))
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AddMember {
    pub email: String,
    #[schema(value_type = String)]
    pub role: Role,
    #[serde(default)]
    pub first_name: String,
    #[serde(default)]
    pub last_name: String,
    /// Makes an account when there is none with this email address.
    pub password: Option<String>,
}

/// Add a member; with a password, an account is made.
#[utoipa::path(
    post, path = "/v1/organizations/{id}/members", tag = "organization", params(("id" = String, Path)),
    security(("bearer" = []), ("session" = [])), request_body = AddMember,
    responses((status = 201, body = Member), (status = 409, description = "a member or an account exists"))
)]
async fn add_member(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<OrganizationId>,
    Json(request): Json<AddMember>,
) -> ApiResult<(StatusCode, Json<Member>)> {
    let account = NewAccount { email: request.email, first_name: request.first_name, last_name: request.last_name };
    let new = NewMember { account, password: request.password, role: request.role };
    let member = app::add_member(&state, &caller, id, new).await?;
    Ok((StatusCode::CREATED, Json(member.into())))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChangeMember {
    #[schema(value_type = String)]
    pub role: Role,
}

/// Change a member's role.
#[utoipa::path(
    patch, path = "/v1/organizations/{id}/members/{user}", tag = "organization",
    params(("id" = String, Path), ("user" = String, Path)), security(("bearer" = []), ("session" = [])),
    request_body = ChangeMember, responses((status = 200, body = Member), (status = 409, description = "it is the last owner"))
)]
async fn change_member(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, user)): Path<(OrganizationId, UserId)>,
    Json(request): Json<ChangeMember>,
) -> ApiResult<Json<Member>> {
    Ok(Json(app::set_role(&state, &caller, id, user, request.role).await?.into()))
}

/// Remove a member; their sign-ins and keys in this organization end.
#[utoipa::path(
    delete, path = "/v1/organizations/{id}/members/{user}", tag = "organization",
    params(("id" = String, Path), ("user" = String, Path)), security(("bearer" = []), ("session" = [])),
    responses((status = 204), (status = 409, description = "it is the last owner"))
)]
async fn remove_member(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, user)): Path<(OrganizationId, UserId)>,
) -> ApiResult<StatusCode> {
    app::remove_member(&state, &caller, id, user).await?;
    Ok(StatusCode::NO_CONTENT)
}

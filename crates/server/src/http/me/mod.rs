//! The signed-in user, their organizations, and their sign-in.

use axum::extract::State;
use axum::http::StatusCode;
use rlm_core::ids::OrganizationId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::access::{Caller, Credential, Role, Scope};
use crate::app::identity::{accounts, browser, organizations};
use crate::http::error::{ApiError, ApiResult};
use crate::http::extract::Json;
use crate::state::AppState;
use crate::store::organizations::Organization;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_me)).routes(routes!(list_organizations)).routes(routes!(
        get_session,
        switch_session,
        end_session
    ))
}

/// Who the caller is.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Me {
    pub subject: Subject,
    pub organization: MyOrganization,
    #[schema(value_type = String)]
    pub role: Role,
    #[schema(value_type = Vec<String>)]
    pub scopes: Vec<Scope>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Subject {
    pub id: String,
    pub email: String,
    pub display_name: String,
    pub first_name: String,
    pub last_name: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MyOrganization {
    pub id: String,
    pub name: String,
    /// The same as `id`; SDK clients read it.
    pub provider_id: String,
    /// The part of the registry that the organization's members push to.
    pub registry_namespace: String,
}

impl From<&Organization> for MyOrganization {
    fn from(organization: &Organization) -> Self {
        Self {
            id: organization.id.to_string(),
            name: organization.name.clone(),
            provider_id: organization.id.to_string(),
            registry_namespace: crate::http::registry::namespace(organization.id),
        }
    }
}

/// The signed-in user and the organization they act in.
#[utoipa::path(get, path = "/v1/me", tag = "me", security(("bearer" = []), ("session" = [])), responses((status = 200, body = Me)))]
async fn get_me(State(state): State<AppState>, caller: Caller) -> ApiResult<Json<Me>> {
    let user = accounts::get(&state, caller.user_id).await?;
    let organization = organizations::acting_in(&state, &caller).await?;
    let full_name = format!("{} {}", user.first_name, user.last_name);
    let display_name = match full_name.trim() {
        "" => user.email.clone(),
        name => name.to_owned(),
    };
    Ok(Json(Me {
        subject: Subject {
            id: user.id.to_string(),
            email: user.email,
            display_name,
            first_name: user.first_name,
            last_name: user.last_name,
        },
        organization: MyOrganization::from(&organization),
        role: caller.role,
        scopes: caller.scopes.to_vec(),
    }))
}

/// The user's organizations.
#[derive(Debug, Serialize, ToSchema)]
pub struct MyOrganizations {
    pub organizations: Vec<Membership>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    #[serde(flatten)]
    pub organization: MyOrganization,
    #[schema(value_type = String)]
    pub role: Role,
    /// Whether the caller acts in it now.
    pub active: bool,
}

/// The organizations that the signed-in user is a member of.
#[utoipa::path(
    get, path = "/v1/me/organizations", tag = "me", security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = MyOrganizations))
)]
async fn list_organizations(State(state): State<AppState>, caller: Caller) -> ApiResult<Json<MyOrganizations>> {
    let mut memberships = organizations::mine(&state, &caller).await?;
    if matches!(caller.credential, Credential::ApiKey { .. }) {
        // A key is made for one organization, and shows no other.
        memberships.retain(|(organization, _)| organization.id == caller.organization_id);
    }
    let organizations = memberships
        .iter()
        .map(|(organization, role)| Membership {
            organization: MyOrganization::from(organization),
            role: *role,
            active: organization.id == caller.organization_id,
        })
        .collect();
    Ok(Json(MyOrganizations { organizations }))
}

/// The caller's sign-in.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Session {
    /// `accessToken`, `apiKey`, `browser`.
    pub credential: String,
    pub user_id: String,
    pub organization_id: String,
}

fn session(caller: &Caller, organization: OrganizationId) -> Session {
    let credential = match caller.credential {
        Credential::AccessToken { .. } => "accessToken",
        Credential::ApiKey { .. } => "apiKey",
        Credential::Browser { .. } => "browser",
    };
    Session { credential: credential.to_owned(), user_id: caller.user_id.to_string(), organization_id: organization.to_string() }
}

/// The sign-in that this request uses.
#[utoipa::path(
    get, path = "/v1/me/session", tag = "me", security(("bearer" = []), ("session" = [])),
    responses((status = 200, body = Session))
)]
async fn get_session(caller: Caller) -> Json<Session> {
    Json(session(&caller, caller.organization_id))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SwitchSession {
    pub organization_id: String,
}

/// Let a browser session act in another of the user's organizations. Other clients name `organization_id` when they refresh.
#[utoipa::path(
    put, path = "/v1/me/session", tag = "me", security(("bearer" = []), ("session" = [])),
    request_body = SwitchSession, responses((status = 200, body = Session), (status = 404), (status = 409))
)]
async fn switch_session(State(state): State<AppState>, caller: Caller, Json(request): Json<SwitchSession>) -> ApiResult<Json<Session>> {
    let organization = request.organization_id.parse().map_err(|error: rlm_core::ids::InvalidId| ApiError::not_found(error.to_string()))?;
    browser::switch(&state, &caller, organization).await?;
    Ok(Json(session(&caller, organization)))
}

/// Sign out: no token of this sign-in works any more.
#[utoipa::path(
    delete, path = "/v1/me/session", tag = "me", security(("bearer" = []), ("session" = [])),
    responses((status = 204), (status = 409, description = "the caller is an API key"))
)]
async fn end_session(State(state): State<AppState>, caller: Caller) -> ApiResult<StatusCode> {
    browser::end(&state, &caller).await?;
    Ok(StatusCode::NO_CONTENT)
}

//! Server-rendered pages: sign-in, approval of a device's sign-in, and a home page. They work without scripts.

pub mod html;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum_extra::extract::CookieJar;
use rlm_core::error::{Code, Error};
use rlm_core::ids::EvaluationId;
use serde::Deserialize;

use crate::app::access::{Caller, Credential};
use crate::app::identity::{accounts, browser, device, organizations};
use crate::http::auth::{RemoteAddress, SESSION_COOKIE};
use crate::http::error::ApiError;
use crate::http::extract::{Form, Path, Query};
use crate::http::origin::OwnPage;
use crate::state::AppState;
use html::{escape, page};

/// The pages are not part of the REST API and its document.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/", get(home))
        .route("/evaluations/{id}", get(evaluation))
        .route("/login", get(show_login).post(login))
        .route("/logout", post(logout))
        .route("/device", get(show_device).post(decide_device))
}

fn error_page(error: &Error) -> Response {
    let status = StatusCode::from_u16(error.code.http()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    page(status, "That did not work", &format!("<p class=\"bad\">{}</p><p><a href=\"/\">Start page</a></p>", escape(&error.message)))
}

fn redirect(to: &str) -> Response {
    let location = HeaderValue::try_from(to).unwrap_or_else(|_| HeaderValue::from_static("/"));
    (StatusCode::SEE_OTHER, [(header::LOCATION, location), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))]).into_response()
}

/// A path of this server, or the start page: never another site's address.
fn local_path(next: Option<&str>) -> String {
    match next {
        Some(path)
            if path.starts_with('/')
                && !path.starts_with("//")
                && !path.contains('\\')
                && path.bytes().all(|byte| byte.is_ascii_graphic()) =>
        {
            path.to_owned()
        }
        _ => "/".to_owned(),
    }
}

fn to_login(uri: &Uri) -> Response {
    let wanted = uri.path_and_query().map_or("/", |path| path.as_str());
    let next: String = form_urlencoded::byte_serialize(wanted.as_bytes()).collect();
    redirect(&format!("/login?next={next}"))
}

/// The signed-in user of a page: by the browser's cookie only, so that a token or key can't approve sign-ins.
fn by_browser(caller: Result<Caller, ApiError>) -> Result<Option<(Caller, String)>, Error> {
    match caller {
        Ok(caller) => match &caller.credential {
            Credential::Browser { hash } => {
                let hash = hash.clone();
                Ok(Some((caller, hash)))
            }
            Credential::AccessToken { .. } | Credential::ApiKey { .. } => {
                Err(Error::new(Code::Forbidden, "pages are for browsers; sign in with a password"))
            }
        },
        Err(error) if error.error().code == Code::Unauthenticated => Ok(None),
        Err(error) => Err(error.error().clone()),
    }
}

async fn home(State(state): State<AppState>, caller: Result<Caller, ApiError>, uri: Uri) -> Response {
    let (caller, hash) = match by_browser(caller) {
        Ok(Some(signed_in)) => signed_in,
        Ok(None) => return to_login(&uri),
        Err(error) => return error_page(&error),
    };
    let shown = async {
        let user = accounts::get(&state, caller.user_id).await?;
        let organization = organizations::acting_in(&state, &caller).await?;
        Ok::<_, Error>(format!(
            "<p>Signed in as <strong>{}</strong> in <strong>{}</strong>.</p>\
             <p><a href=\"/device\">Approve a sign-in</a></p>\
             <p><a href=\"/v1/evaluations\">Evaluations</a>, <a href=\"/v1/clusters\">clusters</a> and \
             <a href=\"/v1/openapi.json\">the API's description</a>, as JSON</p>\
             <form method=\"post\" action=\"/logout\"><input type=\"hidden\" name=\"form_token\" value=\"{}\">\
             <button>Sign out</button></form>",
            escape(&user.email),
            escape(&organization.name),
            browser::form_token(state.identity.server_key(), &hash),
        ))
    };
    match shown.await {
        Ok(body) => page(StatusCode::OK, "RLMesh", &body),
        Err(error) => error_page(&error),
    }
}

/// What the links lead to that clients print. The answer is the API's, which a signed-in browser may read.
async fn evaluation(caller: Result<Caller, ApiError>, Path(id): Path<EvaluationId>, uri: Uri) -> Response {
    match by_browser(caller) {
        Ok(Some(_)) => redirect(&format!("/v1/evaluations/{id}")),
        Ok(None) => to_login(&uri),
        Err(error) => error_page(&error),
    }
}

#[derive(Debug, Default, Deserialize)]
struct LoginQuery {
    next: Option<String>,
}

async fn show_login(Query(query): Query<LoginQuery>) -> Response {
    login_page(StatusCode::OK, &local_path(query.next.as_deref()), None)
}

fn login_page(status: StatusCode, next: &str, problem: Option<&str>) -> Response {
    let problem = problem.map(|text| format!("<p class=\"bad\" role=\"alert\">{}</p>", escape(text))).unwrap_or_default();
    let body = format!(
        "{problem}<form method=\"post\" action=\"/login\"><input type=\"hidden\" name=\"next\" value=\"{}\">\
         <label for=\"email\">Email address</label>\
         <input id=\"email\" name=\"email\" type=\"email\" autocomplete=\"username\" required autofocus>\
         <label for=\"password\">Password</label>\
         <input id=\"password\" name=\"password\" type=\"password\" autocomplete=\"current-password\" required>\
         <button class=\"first\">Sign in</button></form>",
        escape(next)
    );
    page(status, "Sign in to RLMesh", &body)
}

#[derive(Deserialize)]
struct LoginForm {
    email: String,
    password: String,
    next: Option<String>,
}

async fn login(
    State(state): State<AppState>,
    RemoteAddress(remote): RemoteAddress,
    own_page: Result<OwnPage, ApiError>,
    form: Result<Form<LoginForm>, ApiError>,
) -> Response {
    if let Err(error) = own_page {
        return error_page(error.error());
    }
    let form = match form {
        Ok(Form(form)) => form,
        Err(error) => return error_page(error.error()),
    };
    let next = local_path(form.next.as_deref());
    let begun = async {
        let user = accounts::sign_in(&state, &form.email, &form.password, &remote).await?;
        browser::begin(&state, &user, &remote).await
    };
    match begun.await {
        Ok(cookie) => {
            let mut response = redirect(&next);
            set_cookie(&mut response, &state, cookie.expose(), state.config.timings.browser_session.as_secs());
            response
        }
        Err(error) => {
            let status = StatusCode::from_u16(error.code.http()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            login_page(status, &next, Some(&error.message))
        }
    }
}

/// `Lax`: links from elsewhere arrive signed in, forms from elsewhere do not.
fn set_cookie(response: &mut Response, state: &AppState, value: &str, seconds: u64) {
    let secure = if state.config.is_https() { "; Secure" } else { "" };
    let cookie = format!("{SESSION_COOKIE}={value}; Path=/; HttpOnly; SameSite=Lax; Max-Age={seconds}{secure}");
    if let Ok(mut value) = HeaderValue::try_from(cookie) {
        value.set_sensitive(true);
        response.headers_mut().append(header::SET_COOKIE, value);
    }
}

#[derive(Deserialize)]
struct LogoutForm {
    form_token: String,
}

async fn logout(
    State(state): State<AppState>,
    caller: Result<Caller, ApiError>,
    headers: HeaderMap,
    form: Result<Form<LogoutForm>, ApiError>,
) -> Response {
    let signed_in = match (by_browser(caller), form) {
        (Ok(signed_in), Ok(Form(form))) => signed_in.map(|(caller, hash)| (caller, hash, form.form_token)),
        (Err(error), _) => return error_page(&error),
        (_, Err(error)) => return error_page(error.error()),
    };
    if let Some((caller, hash, token)) = signed_in {
        if !browser::form_token_matches(state.identity.server_key(), &hash, &token) {
            return error_page(&stale_form());
        }
        if let Err(error) = browser::end(&state, &caller).await {
            return error_page(&error);
        }
    }
    let mut response = redirect("/login");
    if CookieJar::from_headers(&headers).get(SESSION_COOKIE).is_some() {
        set_cookie(&mut response, &state, "", 0);
    }
    response
}

fn stale_form() -> Error {
    Error::new(Code::ForeignOrigin, "the form was not one that this server showed you; go back, load the page anew and try again")
}

#[derive(Debug, Default, Deserialize)]
struct DeviceQuery {
    user_code: Option<String>,
}

async fn show_device(
    State(state): State<AppState>,
    caller: Result<Caller, ApiError>,
    Query(query): Query<DeviceQuery>,
    uri: Uri,
) -> Response {
    let (caller, hash) = match by_browser(caller) {
        Ok(Some(signed_in)) => signed_in,
        Ok(None) => return to_login(&uri),
        Err(error) => return error_page(&error),
    };
    let Some(code) = query.user_code.filter(|code| !code.trim().is_empty()) else {
        return code_page(StatusCode::OK, None);
    };
    let shown = async {
        let Some(grant) = device::pending(&state, &caller, &code).await? else { return Ok(None) };
        let user = accounts::get(&state, caller.user_id).await?;
        let memberships = organizations::mine(&state, &caller).await?;
        let mut options = String::new();
        for (organization, role) in &memberships {
            let selected = if organization.id == caller.organization_id { " selected" } else { "" };
            options.push_str(&format!(
                "<option value=\"{}\"{selected}>{} ({})</option>",
                organization.id,
                escape(&organization.name),
                role.as_str()
            ));
        }
        let minutes = ((grant.expires_at - state.clock.now_ms()) / 60_000).max(1);
        Ok::<_, Error>(Some(format!(
            "<p>The RLMesh command line asks to act for <strong>{}</strong>. Approve only if your terminal shows this code \
             and you began the sign-in yourself.</p><p class=\"code\">{}</p>\
             <form method=\"post\" action=\"/device\"><input type=\"hidden\" name=\"form_token\" value=\"{}\">\
             <input type=\"hidden\" name=\"user_code\" value=\"{}\">\
             <label for=\"organization\">Organization</label><select id=\"organization\" name=\"organization\">{options}</select>\
             <button class=\"first\" name=\"decision\" value=\"approve\">Approve</button>\
             <button name=\"decision\" value=\"deny\">Deny</button></form><p>The code expires in {minutes} min.</p>",
            escape(&user.email),
            escape(&grant.user_code),
            browser::form_token(state.identity.server_key(), &hash),
            escape(&grant.user_code),
        )))
    };
    match shown.await {
        Ok(Some(body)) => page(StatusCode::OK, "Approve a sign-in", &body),
        Ok(None) => code_page(StatusCode::NOT_FOUND, Some("This code is unknown, has expired or was decided already.")),
        Err(error) => error_page(&error),
    }
}

fn code_page(status: StatusCode, problem: Option<&str>) -> Response {
    let problem = problem.map(|text| format!("<p class=\"bad\" role=\"alert\">{}</p>", escape(text))).unwrap_or_default();
    let body = format!(
        "{problem}<p>Enter the code that your terminal shows.</p><form method=\"get\" action=\"/device\">\
         <label for=\"user_code\">Code</label>\
         <input id=\"user_code\" name=\"user_code\" autocomplete=\"off\" autocapitalize=\"characters\" required autofocus>\
         <button class=\"first\">Continue</button></form>"
    );
    page(status, "Approve a sign-in", &body)
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Decision {
    Approve,
    Deny,
}

#[derive(Deserialize)]
struct DeviceForm {
    form_token: String,
    user_code: String,
    organization: Option<String>,
    decision: Decision,
}

async fn decide_device(
    State(state): State<AppState>,
    caller: Result<Caller, ApiError>,
    form: Result<Form<DeviceForm>, ApiError>,
) -> Response {
    let (caller, hash) = match by_browser(caller) {
        Ok(Some(signed_in)) => signed_in,
        Ok(None) => return redirect("/login?next=%2Fdevice"),
        Err(error) => return error_page(&error),
    };
    let form = match form {
        Ok(Form(form)) => form,
        Err(error) => return error_page(error.error()),
    };
    if !browser::form_token_matches(state.identity.server_key(), &hash, &form.form_token) {
        return error_page(&stale_form());
    }
    let organization = match form.decision {
        Decision::Approve => match form.organization.map(|id| id.parse()).transpose() {
            Ok(organization) => Some(organization.unwrap_or(caller.organization_id)),
            Err(error) => return error_page(&Error::new(Code::NotFound, error.to_string())),
        },
        Decision::Deny => None,
    };
    match device::decide(&state, &caller, &form.user_code, organization).await {
        Ok(()) if organization.is_some() => {
            page(StatusCode::OK, "Signed in", "<p>You can close this page and go back to your terminal.</p>")
        }
        Ok(()) => page(StatusCode::OK, "Denied", "<p>The sign-in was denied. You can close this page.</p>"),
        Err(error) => error_page(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_sign_in_one_stays_here() {
        assert_eq!(local_path(Some("/device?user_code=AB")), "/device?user_code=AB");
        for foreign in ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "", "/a b", "/a\r\nset-cookie: x"] {
            assert_eq!(local_path(Some(foreign)), "/", "{foreign}");
        }
        assert_eq!(local_path(None), "/");
    }
}

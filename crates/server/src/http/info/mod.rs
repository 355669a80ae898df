//! What a client must know before it signs in.

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use rlm_api::rest::{Info, InfoAuth, InfoCli, InfoGrpc, InfoUrls};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::identity::device::CLIENT_ID;
use crate::http::extract::Json;
use crate::state::AppState;

pub fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_info))
}

/// Sign-in endpoints, the address of the pages, and where agents connect.
#[utoipa::path(get, path = "/v1/info", tag = "platform", responses((status = 200, body = Info)))]
async fn get_info(State(state): State<AppState>) -> Response {
    let url = &state.config.public_url;
    let (host, port) = state.config.grpc_endpoint();
    let info = Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        auth: InfoAuth {
            cli: InfoCli { client_id: CLIENT_ID.to_owned() },
            device_authorization_endpoint: format!("{url}/v1/oauth/device/authorize"),
            token_endpoint: format!("{url}/v1/oauth/token"),
        },
        urls: InfoUrls { api: url.clone(), dashboard: url.clone() },
        grpc: InfoGrpc { host, port, tls: state.config.is_https() },
    };
    let mut response = Json::<_>(info).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=60"));
    response
}

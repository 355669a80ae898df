//! The admin port: `/livez`, `/readyz`, `/metrics`. It shows state and changes none.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::BuildInfo;

/// Readiness and metrics of a daemon. Cheap to clone; clones share their state.
#[derive(Clone)]
pub struct Admin {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    registry: Registry,
    /// Why it is not ready; None: ready.
    not_ready: Option<String>,
}

impl Admin {
    /// Not ready, with the build's metric alone.
    #[must_use]
    pub fn new(build: BuildInfo) -> Self {
        let mut registry = Registry::default();
        registry.register(
            "rlmesh_build",
            "The running program",
            Info::new(vec![("name", build.name), ("version", build.version), ("commit", build.commit)]),
        );
        Self { inner: Arc::new(Mutex::new(Inner { registry, not_ready: Some("starting".to_owned()) })) }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Registers metrics. Names start with `rlmesh_`; labels must be bounded.
    pub fn register(&self, register: impl FnOnce(&mut Registry)) {
        self.with(|inner| register(&mut inner.registry));
    }

    pub fn set_ready(&self) {
        self.with(|inner| inner.not_ready = None);
    }

    pub fn set_not_ready(&self, why: impl Into<String>) {
        self.with(|inner| inner.not_ready = Some(why.into()));
    }

    /// Why it is not ready; None: ready.
    #[must_use]
    pub fn not_ready(&self) -> Option<String> {
        self.with(|inner| inner.not_ready.clone())
    }

    /// The metrics in OpenMetrics text.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let mut text = String::new();
        self.with(|inner| match prometheus_client::encoding::text::encode(&mut text, &inner.registry) {
            Ok(()) => {}
            // Writing to a String can't fail; an encoder that does anyway leaves what it wrote.
            Err(error) => tracing::error!(%error, "metrics could not be encoded"),
        });
        text
    }

    /// The routes, for a daemon that serves them on a port of its own making.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/livez", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self.clone())
    }

    /// Serves the routes on `address` until `stop` is cancelled; returns the bound address.
    pub async fn listen(&self, address: SocketAddr, stop: CancellationToken) -> anyhow::Result<SocketAddr> {
        let listener = tokio::net::TcpListener::bind(address).await.with_context(|| format!("the admin port {address} can't be opened"))?;
        let bound = listener.local_addr().context("the admin port has no address")?;
        let router = self.router();
        tokio::spawn(async move {
            let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
            if let Err(error) = served {
                tracing::error!(%error, "the admin port ended");
            }
        });
        Ok(bound)
    }
}

async fn readyz(State(admin): State<Admin>) -> Response {
    match admin.not_ready() {
        None => "ok\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")).into_response(),
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], admin.metrics_text()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    async fn ask(address: SocketAddr, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn says_alive_ready_and_metrics() {
        let stop = CancellationToken::new();
        let admin = Admin::new(crate::build_info!("rlmesh-test"));
        let address = admin.listen("127.0.0.1:0".parse().unwrap(), stop.clone()).await.unwrap();
        assert!(ask(address, "/livez").await.starts_with("HTTP/1.1 200"));
        let starting = ask(address, "/readyz").await;
        assert!(starting.starts_with("HTTP/1.1 503") && starting.contains("not ready: starting"), "{starting}");
        admin.set_ready();
        assert!(ask(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        let metrics = ask(address, "/metrics").await;
        assert!(metrics.contains("rlmesh_build_info{name=\"rlmesh-test\""), "{metrics}");
        stop.cancel();
    }
}

//! The one port: HTTP/1.1 and HTTP/2 (prior knowledge) on one listener, bounded connections, and a drain at the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::http::header;
use axum::middleware::map_response;
use axum::response::Response;
use futures::StreamExt as _;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// Most connections at once; beyond it new ones wait in the listener's backlog.
const MOST_CONNECTIONS: usize = 4_096;
/// A client sends its request's head within this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves until `stop`, then lets open requests end for up to `drain`.
pub async fn serve(listener: TcpListener, app: Router, stop: CancellationToken, drain: Duration) {
    let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let ending = stop.clone();
    let app = app.layer(map_response(move |response: Response| std::future::ready(ends_with(response, ending.clone()))));
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => break,
            permit = Arc::clone(&connections).acquire_owned() => permit,
        };
        let Ok(permit) = permit else { break };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                // Out of descriptors, mostly: give connections time to end.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY could not be set");
        }
        let service = app.clone().map_request(move |request: Request<Incoming>| with_peer(request, peer));
        let mut builder = Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(Duration::from_secs(20)))
            .keep_alive_timeout(Duration::from_secs(20))
            .max_concurrent_streams(256);
        let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).into_owned();
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended with an error");
            }
            drop(permit);
        });
    }
    drop(listener);
    if tokio::time::timeout(drain, graceful.shutdown()).await.is_err() {
        tracing::info!("connections were still open after the drain; they are cut");
    }
}

/// An event stream would go on for ever: it ends when the server stops, and its client comes back with the last event's id.
fn ends_with(response: Response, stop: CancellationToken) -> Response {
    let kind = response.headers().get(header::CONTENT_TYPE);
    if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
        return response;
    }
    response.map(|body| Body::from_stream(body.into_data_stream().take_until(stop.cancelled_owned())))
}

fn with_peer(mut request: Request<Incoming>, peer: SocketAddr) -> Request<Body> {
    request.extensions_mut().insert(ConnectInfo(peer));
    request.map(Body::new)
}

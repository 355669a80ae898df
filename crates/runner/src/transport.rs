//! How the runner reaches models, environments and the agent: HTTP/2 over TCP or a unix socket.
//!
//! The SDK's servers leave Nagle's algorithm on, so their small window updates wait for our delayed acknowledgement (40 ms
//! for each camera observation). Re-arming `TCP_QUICKACK` after each read on our side removes that wait; Linux clears the
//! flag by itself, hence after *each* read. No call made here is without a deadline.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::pinned::CertificatePin;

/// Largest message either way, as the SDK has it.
pub const MAX_MESSAGE: usize = 256 * 1024 * 1024;
/// Receive window of a stream: several camera observations.
const STREAM_WINDOW: u32 = 8 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 32 * 1024 * 1024;
/// Largest HTTP/2 frame that we accept.
const FRAME: u32 = 1024 * 1024;
const KEEPALIVE_EVERY: Duration = Duration::from_secs(30);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(20);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not an address: {problem}; write tcp://host:port or unix:///absolute/path")]
pub struct InvalidAddress {
    text: String,
    problem: &'static str,
}

impl Address {
    /// Reads `tcp://host:port` or `unix:///absolute/path`.
    pub fn parse(text: &str) -> Result<Self, InvalidAddress> {
        let invalid = |problem| InvalidAddress { text: text.to_owned(), problem };
        if let Some(path) = text.strip_prefix("unix://") {
            return if path.starts_with('/') && path.len() > 1 {
                Ok(Self::Unix(PathBuf::from(path)))
            } else {
                Err(invalid("the path of the socket is not absolute"))
            };
        }
        let rest = text.strip_prefix("tcp://").ok_or_else(|| invalid("it names no known scheme"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| invalid("it has no port"))?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(|| invalid("its port is not a number from 1 to 65535"))?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(invalid("it has no host"));
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }

    /// What goes into the `:authority` header; a unix socket needs one too, or gRPC servers reset the stream.
    fn origin(&self) -> String {
        match self {
            Self::Tcp { host, port } if host.contains(':') => format!("http://[{host}]:{port}"),
            Self::Tcp { host, port } => format!("http://{host}:{port}"),
            Self::Unix(_) => "http://localhost".to_owned(),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(formatter, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(formatter, "tcp://{host}:{port}"),
            Self::Unix(path) => write!(formatter, "unix://{}", path.display()),
        }
    }
}

/// Connects once. The channel carries no deadline of its own: streams live long.
pub async fn dial(address: &Address, deadline: Duration) -> Result<Channel, String> {
    dial_pinned(address, None, deadline).await
}

/// As [`dial`], over TLS to the holder of the pinned certificate where there is a pin.
pub async fn dial_pinned(address: &Address, pin: Option<CertificatePin>, deadline: Duration) -> Result<Channel, String> {
    let target = address.clone();
    let endpoint = Endpoint::from_shared(address.origin())
        .map_err(|error| format!("{address} can't be used: {error}"))?
        .connect_timeout(deadline)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .http2_keep_alive_interval(KEEPALIVE_EVERY)
        .keep_alive_timeout(KEEPALIVE_ANSWER)
        .keep_alive_while_idle(true);
    let connect = endpoint.connect_with_connector(service_fn(move |_| {
        let target = target.clone();
        async move { open(&target, pin).await.map(TokioIo::new) }
    }));
    match tokio::time::timeout(deadline, connect).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(format!("{address} can't be reached: {}", chain(&error))),
        Err(_) => Err(format!("{address} can't be reached: no answer within {} s", deadline.as_secs_f64())),
    }
}

/// An error with its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

async fn open(address: &Address, pin: Option<CertificatePin>) -> io::Result<Stream> {
    match address {
        Address::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            rearm(&stream);
            let Some(pin) = pin else { return Ok(Stream::Tcp(stream)) };
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let connector = TlsConnector::from(pin.client().map_err(io::Error::other)?);
            Ok(Stream::Tls(Box::new(connector.connect(name, stream).await?)))
        }
        Address::Unix(path) => Ok(Stream::Unix(UnixStream::connect(path).await?)),
    }
}

/// Asks the kernel to acknowledge at once. Best effort: without it the connection is slower, not wrong.
fn rearm(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::net::sockopt::set_tcp_quickack(stream, true) {
        tracing::debug!(%error, "TCP_QUICKACK can't be set");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}

enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => {
                let before = buffer.filled().len();
                let polled = Pin::new(&mut *stream).poll_read(context, buffer);
                if matches!(polled, Poll::Ready(Ok(()))) && buffer.filled().len() > before {
                    rearm(stream);
                }
                polled
            }
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Self::Unix(stream) => Pin::new(stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back() {
        for text in ["tcp://127.0.0.1:5", "tcp://[::1]:65535", "unix:///run/x.sock", "tcp://env-0.ns.svc:50051"] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        for text in
            ["", "127.0.0.1:5", "tcp://:5", "tcp://host", "tcp://host:0", "tcp://host:70000", "unix://relative", "unix://", "unix:///"]
        {
            if text == "unix:///" {
                assert!(Address::parse(text).is_err(), "{text}");
                continue;
            }
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_refused_connection_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("none.sock"));
        let error = dial(&address, Duration::from_secs(5)).await.unwrap_err();
        assert!(error.contains("none.sock"), "{error}");
    }
}

//! The wire between agent and server: a TCP relay that can be cut, silenced or slowed while connections are open.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the wire does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    Pass,
    /// Ends every connection and takes no new one.
    Cut,
    /// Keeps connections and lets nothing through, as a firewall that drops packets.
    Silent,
    /// Holds each piece back for this long.
    Slow(Duration),
}

/// A running relay; it ends when dropped.
pub struct Proxy {
    address: SocketAddr,
    wire: watch::Sender<Wire>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Relays a free port of loopback to `target`.
    pub async fn start(target: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no port for the relay")?;
        let address = listener.local_addr()?;
        let (wire, state) = watch::channel(Wire::Pass);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let state = state.clone();
                if *state.borrow() != Wire::Cut {
                    tokio::spawn(relay(client, target, state));
                }
            }
        });
        Ok(Self { address, wire, task })
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set(&self, wire: Wire) {
        self.wire.send_replace(wire);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn relay(client: TcpStream, target: SocketAddr, state: watch::Receiver<Wire>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    for stream in [&client, &server] {
        // Speed alone.
        let _ = stream.set_nodelay(true);
    }
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    // Whichever side ends first ends both.
    tokio::select! {
        () = pump(client_reads, server_writes, state.clone()) => {}
        () = pump(server_reads, client_writes, state) => {}
    }
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut state: watch::Receiver<Wire>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let now = *state.borrow_and_update();
        let slow = match now {
            Wire::Cut => return,
            Wire::Silent => {
                if state.changed().await.is_err() {
                    return;
                }
                continue;
            }
            Wire::Slow(pause) => Some(pause),
            Wire::Pass => None,
        };
        tokio::select! {
            changed = state.changed() => if changed.is_err() { return },
            read = from.read(&mut buffer) => {
                let Ok(length @ 1..) = read else { return };
                if let Some(pause) = slow {
                    tokio::time::sleep(pause).await;
                }
                if to.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_wire_passes_falls_silent_and_is_cut() -> anyhow::Result<()> {
        let echo = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let target = echo.local_addr()?;
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = echo.accept().await {
                let mut buffer = [0; 16];
                while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                    if stream.write_all(&buffer[..length]).await.is_err() {
                        break;
                    }
                }
            }
        });
        let proxy = Proxy::start(target).await?;
        let mut client = TcpStream::connect(proxy.address).await?;
        let mut buffer = [0; 16];
        client.write_all(b"one").await?;
        assert_eq!(client.read(&mut buffer).await?, 3);
        proxy.set(Wire::Silent);
        client.write_all(b"three").await?;
        assert!(tokio::time::timeout(Duration::from_millis(200), client.read(&mut buffer)).await.is_err());
        proxy.set(Wire::Pass);
        assert_eq!(client.read(&mut buffer).await?, 5);
        proxy.set(Wire::Cut);
        assert!(matches!(client.read(&mut buffer).await, Ok(0) | Err(_)));
        Ok(())
    }
}

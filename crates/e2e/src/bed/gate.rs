//! The one way from this machine into the bed: an HTTP proxy (CONNECT) that listens on this machine's loopback and connects
//! in the bed's network namespace. Nothing goes the other way.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::thread::LinkNameSpaceType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::names::HOSTS;

const CONNECTIONS: usize = 512;
const HEAD: usize = 8 * 1024;
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves for ever. To be called before the process has a second thread: a socket stays in the namespace it was made in, so
/// the listener is this machine's and every later connection the bed's.
pub fn serve(listen: SocketAddr, namespace: &Path) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen).with_context(|| format!("the gate can't listen on {listen}"))?;
    listener.set_nonblocking(true)?;
    let file = std::fs::File::open(namespace).with_context(|| format!("{} is no namespace", namespace.display()))?;
    rustix::thread::move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).context("the gate can't enter the bed")?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let slots = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let slot = Arc::clone(&slots).acquire_owned().await?;
            let (client, _) = listener.accept().await?;
            tokio::spawn(async move {
                // Whoever is connected sees its connection end; there is nobody else to tell.
                let _ = tunnel(client).await;
                drop(slot);
            });
        }
    })
}

async fn tunnel(mut client: TcpStream) -> anyhow::Result<()> {
    let target = tokio::time::timeout(PATIENCE, target(&mut client)).await??;
    match tokio::time::timeout(PATIENCE, TcpStream::connect(target)).await {
        Ok(Ok(mut server)) => {
            client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
            tokio::io::copy_bidirectional(&mut client, &mut server).await?;
        }
        Ok(Err(_)) | Err(_) => client.write_all(b"HTTP/1.1 502 Bad Gateway\r\n\r\n").await?,
    }
    Ok(())
}

async fn target(client: &mut TcpStream) -> anyhow::Result<SocketAddr> {
    let mut head = Vec::new();
    // Byte by byte: what follows the head belongs to the tunnel.
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= HEAD {
            bail!("a request head of more than {HEAD} bytes");
        }
        head.push(client.read_u8().await?);
    }
    parse(&String::from_utf8_lossy(&head)).context("no CONNECT to an address or a known host of the bed")
}

/// The bed's names are known here: this process sees the machine's own `/etc/hosts`.
fn parse(head: &str) -> Option<SocketAddr> {
    let (host, port) = head.strip_prefix("CONNECT ")?.split(' ').next()?.rsplit_once(':')?;
    let host = HOSTS.iter().find(|(name, _)| *name == host).map_or(host, |(_, address)| *address);
    Some(SocketAddr::new(host.parse::<IpAddr>().ok()?, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_the_names_of_the_bed_are_targets() {
        assert_eq!(parse("CONNECT 10.244.1.7:50051 HTTP/1.1\r\n\r\n"), Some(([10, 244, 1, 7], 50051).into()));
        assert_eq!(parse("CONNECT registry.rlmesh.dev:443 HTTP/1.1\r\n\r\n"), Some(([10, 77, 0, 2], 443).into()));
        assert_eq!(parse("CONNECT example.com:443 HTTP/1.1\r\n\r\n"), None);
        assert_eq!(parse("GET http://10.77.0.1/ HTTP/1.1\r\n\r\n"), None);
    }
}

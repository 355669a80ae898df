//! What stands before a control plane in production: ends TLS at the real host name's address, passes on what is inside.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

const CONNECTIONS: usize = 512;
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves for ever. `certificate` and `key` are PEM files.
pub async fn serve(listen: SocketAddr, to: SocketAddr, certificate: &Path, key: &Path) -> anyhow::Result<()> {
    let chain = CertificateDer::pem_file_iter(certificate)?.collect::<Result<Vec<_>, _>>()?;
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, PrivateKeyDer::from_pem_file(key)?)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(listen).await.with_context(|| format!("{listen} can't be listened on"))?;
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let slot = Arc::clone(&slots).acquire_owned().await?;
        let (client, _) = listener.accept().await?;
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            // Whoever is connected sees its connection end; there is nobody else to tell.
            let _ = pass(&acceptor, client, to).await;
            drop(slot);
        });
    }
}

async fn pass(acceptor: &TlsAcceptor, client: TcpStream, to: SocketAddr) -> anyhow::Result<()> {
    client.set_nodelay(true)?;
    let mut client = tokio::time::timeout(PATIENCE, acceptor.accept(client)).await??;
    let mut server = tokio::time::timeout(PATIENCE, TcpStream::connect(to)).await??;
    server.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

//! TLS to an agent whose certificate is known beforehand: it is that one or nobody. No name, issuer or date is asked for.

use std::sync::Arc;

use rlm_core::error::{Code, Error};
use sha2::{Digest as _, Sha256};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, SignatureScheme};

/// SHA-256 of a certificate (DER).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificatePin([u8; 32]);

impl CertificatePin {
    /// Reads 64 hexadecimal digits.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bytes = hex::decode(text).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| Error::new(Code::InvalidRequest, "the SHA-256 of the agent's certificate has 64 hexadecimal digits"))
    }

    /// A client that speaks to the holder of this certificate alone, over TLS 1.3 and HTTP/2.
    pub fn client(self) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = Verifier { pin: self, algorithms: provider.signature_verification_algorithms };
        let mut config = builder(provider)?.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

fn builder(
    provider: Arc<CryptoProvider>,
) -> Result<tokio_rustls::rustls::ConfigBuilder<ClientConfig, tokio_rustls::rustls::WantsVerifier>, TlsError> {
    ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&tokio_rustls::rustls::version::TLS13])
}

#[derive(Debug)]
struct Verifier {
    pin: CertificatePin,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        if Sha256::digest(end_entity)[..] == self.pin.0 {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(TlsError::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        Err(TlsError::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        tokio_rustls::rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_rustls::rustls::ServerConfig;
    use tokio_rustls::rustls::pki_types::PrivateKeyDer;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    #[test]
    fn pins_are_whole_digests() {
        assert!(CertificatePin::parse(&"0f".repeat(32)).is_ok());
        for bad in ["", "0f", &"0f".repeat(33), &"xy".repeat(32)] {
            assert!(CertificatePin::parse(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn only_the_holder_of_the_certificate_is_spoken_to() {
        let made = rcgen::generate_simple_self_signed(["agent".to_owned()]).unwrap();
        let certificate = made.cert.der().clone();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let right: [u8; 32] = Sha256::digest(&certificate).into();
        let mut wrong = right;
        wrong[0] ^= 1;
        for (pin, admitted) in [(right, true), (wrong, false)] {
            let (client, server) = tokio::io::duplex(1 << 16);
            let acceptor = acceptor.clone();
            let serving = tokio::spawn(async move {
                let mut stream = acceptor.accept(server).await?;
                stream.write_all(b"hello").await
            });
            let connector = TlsConnector::from(CertificatePin(pin).client().unwrap());
            let name = ServerName::try_from("10.96.0.20").unwrap();
            let met = tokio::time::timeout(Duration::from_secs(20), connector.connect(name, client)).await.unwrap();
            assert_eq!(met.is_ok(), admitted);
            if let Ok(mut stream) = met {
                let mut said = [0; 5];
                stream.read_exact(&mut said).await.unwrap();
                assert_eq!(&said, b"hello");
            }
            assert_eq!(serving.await.unwrap().is_ok(), admitted);
        }
    }
}

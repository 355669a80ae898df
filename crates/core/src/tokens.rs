//! Secrets on the wire: a prefix, 32 bytes in base62 and a CRC-32, so that scanners find them and clients refuse typos
//! before they send one.
//!
//! A [`Secret`] never prints: it has no `Display`, its `Debug` is a constant, and it is compared in constant time. The
//! database holds [`Secret::hash`] only. Cluster credentials are derived ([`derive_credential`]), so that a join or a
//! rotation can be answered again with the same value.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
/// Base62 digits of 32 bytes: 62^43 > 2^256.
const BODY: usize = 43;
/// Base62 digits of a CRC-32: 62^6 > 2^32.
const CHECK: usize = 6;

/// What a secret is for; the prefix says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SecretKind {
    JoinToken,
    ControlCredential,
    PullCredential,
    RelayCredential,
    ApiKey,
    /// A refresh token of a signed-in client.
    RefreshToken,
}

impl SecretKind {
    pub const ALL: [Self; 6] =
        [Self::JoinToken, Self::ControlCredential, Self::PullCredential, Self::RelayCredential, Self::ApiKey, Self::RefreshToken];

    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::JoinToken => "rlm_jt_",
            Self::ControlCredential => "rlm_cc_",
            Self::PullCredential => "rlm_pc_",
            Self::RelayCredential => "rlm_rc_",
            Self::ApiKey => "rlm_key_",
            Self::RefreshToken => "rlm_rt_",
        }
    }
}

/// Why a text is not a secret of ours. Never repeats the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSecret {
    #[error("it does not start with a known prefix (rlm_jt_, rlm_cc_, rlm_pc_, rlm_rc_, rlm_key_, rlm_rt_)")]
    Prefix,
    #[error("it has the wrong length: a part of it is missing or something was added")]
    Length,
    #[error("its checksum is wrong: a character was changed on the way; copy it again")]
    Checksum,
}

/// A secret value. It can't be printed, logged or serialized.
#[derive(Clone)]
pub struct Secret {
    kind: SecretKind,
    text: String,
}

impl Secret {
    /// A new secret from the operating system's random source.
    #[must_use]
    pub fn generate(kind: SecretKind) -> Self {
        Self::from_bytes(kind, &rand::random::<[u8; 32]>())
    }

    /// The secret with these 32 bytes as its body.
    #[must_use]
    pub fn from_bytes(kind: SecretKind, bytes: &[u8; 32]) -> Self {
        let mut text = String::from(kind.prefix());
        text.push_str(&base62(bytes, BODY));
        let check = crc32fast::hash(text.as_bytes());
        text.push_str(&base62(&check.to_be_bytes(), CHECK));
        Self { kind, text }
    }

    /// Reads a secret; surrounding white space is dropped.
    pub fn parse(text: &str) -> Result<Self, InvalidSecret> {
        let text = text.trim();
        let kind = SecretKind::ALL.into_iter().find(|kind| text.starts_with(kind.prefix())).ok_or(InvalidSecret::Prefix)?;
        if text.len() != kind.prefix().len() + BODY + CHECK || !text.is_ascii() {
            return Err(InvalidSecret::Length);
        }
        let (head, check) = text.split_at(text.len() - CHECK);
        if base62(&crc32fast::hash(head.as_bytes()).to_be_bytes(), CHECK) != check {
            return Err(InvalidSecret::Checksum);
        }
        Ok(Self { kind, text: text.to_owned() })
    }

    #[must_use]
    pub const fn kind(&self) -> SecretKind {
        self.kind
    }

    /// The value, for the one place that sends or stores it. Never format it into a message.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// SHA-256 of the text in lower-case hex: what the database holds.
    #[must_use]
    pub fn hash(&self) -> String {
        hex::encode(Sha256::digest(self.text.as_bytes()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}...", self.kind.prefix())
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.text.as_bytes().ct_eq(other.text.as_bytes()).into()
    }
}

impl Eq for Secret {}

/// The credential with this id: HMAC-SHA256(server key, prefix and id) as its body.
#[must_use]
pub fn derive_credential(server_key: &[u8; 32], kind: SecretKind, credential_id: &str) -> Secret {
    // The block size of SHA-256 is 64 bytes; HMAC pads a shorter key with zeros.
    let mut block = [0; 64];
    block[..32].copy_from_slice(server_key);
    let mut mac = <Hmac<Sha256> as KeyInit>::new(&block.into());
    mac.update(kind.prefix().as_bytes());
    mac.update(credential_id.as_bytes());
    Secret::from_bytes(kind, &mac.finalize().into_bytes().into())
}

/// Big-endian `bytes` as exactly `digits` base62 digits (leading zeros kept).
fn base62(bytes: &[u8], digits: usize) -> String {
    let mut number = bytes.to_vec();
    let mut text = vec![b'0'; digits];
    for slot in text.iter_mut().rev() {
        let mut remainder = 0_u32;
        for byte in &mut number {
            let value = (remainder << 8) | u32::from(*byte);
            *byte = (value / 62) as u8;
            remainder = value % 62;
        }
        *slot = BASE62[remainder as usize];
    }
    text.into_iter().map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_secret_reads_back(bytes: [u8; 32]) {
            for kind in SecretKind::ALL {
                let secret = Secret::from_bytes(kind, &bytes);
                let again = Secret::parse(&format!(" {}\n", secret.expose())).unwrap();
                prop_assert!(again == secret);
                prop_assert_eq!(again.kind(), kind);
            }
        }

        #[test]
        fn one_changed_character_is_noticed(bytes: [u8; 32], place in 7_usize..56, letter in "[0-9A-Za-z]") {
            let secret = Secret::from_bytes(SecretKind::JoinToken, &bytes);
            let mut text = secret.expose().to_owned();
            prop_assume!(text[place..=place] != letter);
            text.replace_range(place..=place, &letter);
            prop_assert_eq!(Secret::parse(&text).unwrap_err(), InvalidSecret::Checksum);
        }
    }

    #[test]
    fn debug_shows_the_kind_alone() {
        let secret = Secret::generate(SecretKind::ApiKey);
        assert_eq!(format!("{secret:?}"), "rlm_key_...");
    }

    #[test]
    fn derived_credentials_repeat_and_differ_by_id_and_kind() {
        let key = [7; 32];
        let one = derive_credential(&key, SecretKind::ControlCredential, "cred_1");
        assert!(one == derive_credential(&key, SecretKind::ControlCredential, "cred_1"));
        assert!(one != derive_credential(&key, SecretKind::ControlCredential, "cred_2"));
        assert!(one != derive_credential(&[8; 32], SecretKind::ControlCredential, "cred_1"));
        assert!(one.hash() != derive_credential(&key, SecretKind::PullCredential, "cred_1").hash());
    }
}

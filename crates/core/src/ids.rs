//! Public identifiers: a prefix and a UUIDv7 in lower-case Crockford base32.
//!
//! Each is valid as a Kubernetes label value, a path segment and a metric label, sorts by creation time, and has a type of
//! its own, so that one noun's id can't be passed for another's.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Characters of an encoded UUID: 26 x 5 bits hold its 128 bits with two to spare.
const ENCODED: usize = 26;

/// Text that is not an id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not {noun} id: expected {prefix} and 26 characters of 0-9a-z without i, l, o, u")]
pub struct InvalidId {
    text: String,
    noun: &'static str,
    prefix: &'static str,
}

fn encode(id: Uuid) -> String {
    let value = id.as_u128();
    (0..ENCODED).rev().map(|place| char::from(ALPHABET[((value >> (5 * place)) & 31) as usize])).collect()
}

fn decode(text: &str) -> Option<Uuid> {
    if text.len() != ENCODED {
        return None;
    }
    let mut value: u128 = 0;
    for (place, byte) in text.bytes().enumerate() {
        let digit = ALPHABET.iter().position(|&letter| letter == byte)? as u128;
        if place == 0 && digit > 7 {
            return None;
        }
        value = (value << 5) | digit;
    }
    Some(Uuid::from_u128(value))
}

macro_rules! id_type {
    ($name:ident, $prefix:literal, $noun:literal) => {
        #[doc = concat!("The id of ", $noun, ": `", $prefix, "` and 26 characters.")]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Uuid);

        impl $name {
            /// What each id of this kind starts with.
            pub const PREFIX: &'static str = $prefix;

            /// A new id: the current time and 74 random bits.
            #[must_use]
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str($prefix)?;
                formatter.write_str(&encode(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, formatter)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                text.strip_prefix($prefix).and_then(decode).map(Self).ok_or_else(|| InvalidId {
                    text: text.chars().take(64).collect(),
                    noun: $noun,
                    prefix: $prefix,
                })
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

id_type!(ClusterId, "cl_", "a cluster");
id_type!(EvaluationId, "eval_", "an evaluation");
id_type!(RunId, "run_", "a run");
id_type!(OrganizationId, "org_", "an organization");
id_type!(UserId, "user_", "a user");
id_type!(KeyId, "key_", "an API key");
id_type!(JoinTokenId, "jt_", "a join token");
id_type!(CredentialId, "cred_", "a cluster credential");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_id_reads_back(value: u128) {
            let id = EvaluationId(Uuid::from_u128(value));
            prop_assert_eq!(id.to_string().parse::<EvaluationId>().unwrap(), id);
        }

        #[test]
        fn order_of_text_is_order_of_ids(a: u128, b: u128) {
            let (left, right) = (RunId(Uuid::from_u128(a)), RunId(Uuid::from_u128(b)));
            prop_assert_eq!(left.cmp(&right), left.to_string().cmp(&right.to_string()));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<ClusterId>();
        }
    }

    #[test]
    fn other_prefix_overflow_and_foreign_letters_are_refused() {
        let good = ClusterId::generate().to_string();
        assert!(good.parse::<ClusterId>().is_ok());
        assert!(good.parse::<RunId>().is_err());
        assert!("cl_80000000000000000000000000".parse::<ClusterId>().is_err());
        assert!("cl_0000000000000000000000000u".parse::<ClusterId>().is_err());
    }
}

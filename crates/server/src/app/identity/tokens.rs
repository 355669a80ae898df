//! Access tokens: short-lived signed tokens (JWT, HS256). They say who, in which organization, of which sign-in; what the
//! caller may do is looked up at each use, so that a changed role counts at once.

use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use rlm_core::ids::{OrganizationId, UserId};
use serde::{Deserialize, Serialize};

const ISSUER: &str = "rlmesh";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub iss: String,
    pub aud: String,
    pub sub: UserId,
    pub org: OrganizationId,
    /// The sign-in (family of refresh tokens) that this belongs to.
    pub sid: String,
    pub jti: String,
    /// Unix seconds.
    pub iat: i64,
    pub exp: i64,
}

/// Why an access token is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidToken {
    #[error("the access token is not one of this server's")]
    Malformed,
    #[error("the access token has expired")]
    Expired,
}

/// Signs and checks access tokens.
pub struct AccessTokens {
    encoding: EncodingKey,
    decoding: DecodingKey,
    validation: Validation,
}

impl AccessTokens {
    pub fn new(key: &[u8; 32]) -> Result<Self, jsonwebtoken::errors::Error> {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_issuer(&[ISSUER]);
        validation.set_audience(&[ISSUER]);
        // The injected clock decides, below.
        validation.validate_exp = false;
        Ok(Self { encoding: EncodingKey::from_secret(key)?, decoding: DecodingKey::from_secret(key)?, validation })
    }

    /// A token that is valid for `lifetime_ms` from `now_ms`.
    pub fn sign(
        &self,
        user_id: UserId,
        organization_id: OrganizationId,
        family: &str,
        now_ms: i64,
        lifetime_ms: i64,
    ) -> Result<String, jsonwebtoken::errors::Error> {
        let claims = Claims {
            iss: ISSUER.to_owned(),
            aud: ISSUER.to_owned(),
            sub: user_id,
            org: organization_id,
            sid: family.to_owned(),
            jti: uuid::Uuid::now_v7().simple().to_string(),
            iat: now_ms.div_euclid(1000),
            exp: (now_ms + lifetime_ms).div_euclid(1000),
        };
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &self.encoding)
    }

    pub fn check(&self, token: &str, now_ms: i64) -> Result<Claims, InvalidToken> {
        let claims = jsonwebtoken::decode::<Claims>(token, &self.decoding, &self.validation).map_err(|_| InvalidToken::Malformed)?.claims;
        if claims.exp.saturating_mul(1000) <= now_ms { Err(InvalidToken::Expired) } else { Ok(claims) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_says_who_until_it_expires() {
        let tokens = AccessTokens::new(&[1; 32]).unwrap();
        let (user, org) = (UserId::generate(), OrganizationId::generate());
        let token = tokens.sign(user, org, "family", 1_000_000, 60_000).unwrap();
        let claims = tokens.check(&token, 1_059_999).unwrap();
        assert_eq!((claims.sub, claims.org, claims.sid.as_str()), (user, org, "family"));
        assert_eq!(tokens.check(&token, 1_060_000), Err(InvalidToken::Expired));
    }

    #[test]
    fn other_keys_other_algorithms_and_changed_tokens_are_refused() {
        let tokens = AccessTokens::new(&[1; 32]).unwrap();
        let (user, org) = (UserId::generate(), OrganizationId::generate());
        let foreign = AccessTokens::new(&[2; 32]).unwrap().sign(user, org, "family", 0, 60_000).unwrap();
        assert_eq!(tokens.check(&foreign, 0), Err(InvalidToken::Malformed));
        let own = tokens.sign(user, org, "family", 0, 60_000).unwrap();
        let (_, rest) = own.split_once('.').unwrap();
        // {"alg":"none","typ":"JWT"}
        let unsigned = format!("eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.{}", rest.rsplit_once('.').unwrap().0);
        for text in ["", "a.b.c", &format!("{unsigned}."), &format!("eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.{rest}"), &own[1..]] {
            assert_eq!(tokens.check(text, 0), Err(InvalidToken::Malformed), "{text}");
        }
    }
}

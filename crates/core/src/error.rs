//! The one list of error codes, and what each means over REST, over gRPC and as an exit status of the CLI.
//!
//! A message says what happened, to which thing, why, and what to do next. Problems of a request carry the path of the
//! field, and all of them are reported at once.

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $http:literal, $grpc:literal, $exit:literal;)*) => {
        /// A stable error code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl Code {
            /// Every code, in the order of the docs.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// HTTP status.
            #[must_use]
            pub const fn http(self) -> u16 {
                match self { $(Self::$name => $http,)* }
            }

            /// gRPC status number.
            #[must_use]
            pub const fn grpc(self) -> i32 {
                match self { $(Self::$name => $grpc,)* }
            }

            /// Exit status of the CLI: 1 error, 2 usage, 3 not found, 4 sign-in needed, 5 unsuccessful, 8 pending.
            #[must_use]
            pub const fn exit(self) -> u8 {
                match self { $(Self::$name => $exit,)* }
            }
        }
    };
}

codes! {
    /// The request can't be read: not JSON, not UTF-8, a wrong content type or query parameter.
    BadRequest = "bad_request", 400, 3, 2;
    /// The request was read, and fields of it are wrong; `details` names each.
    InvalidRequest = "invalid_request", 422, 3, 2;
    /// The body is over the limit.
    TooLarge = "too_large", 413, 3, 2;
    /// No credentials, or they are malformed, unknown, expired or revoked.
    Unauthenticated = "unauthenticated", 401, 16, 4;
    /// Signed in, without the scope or the role for this.
    Forbidden = "forbidden", 403, 7, 1;
    /// The request comes from a page of another origin.
    ForeignOrigin = "foreign_origin", 403, 7, 1;
    /// There is no such thing, or none that this caller may see.
    NotFound = "not_found", 404, 5, 3;
    MethodNotAllowed = "method_not_allowed", 405, 12, 1;
    /// The thing is in a state that does not allow this.
    Conflict = "conflict", 409, 9, 1;
    /// A thing of this name exists.
    AlreadyExists = "already_exists", 409, 6, 1;
    /// The same client token or idempotency key was used with another request.
    IdempotencyMismatch = "idempotency_mismatch", 422, 9, 2;
    RateLimited = "rate_limited", 429, 8, 1;
    /// The join token was exchanged already, by another agent.
    TokenUsed = "token_used", 409, 9, 1;
    TokenExpired = "token_expired", 401, 16, 1;
    TokenRevoked = "token_revoked", 401, 16, 1;
    /// A newer install command was issued for the cluster.
    TokenSuperseded = "token_superseded", 409, 9, 1;
    TokenUnknown = "token_unknown", 401, 16, 1;
    TokenOtherCluster = "token_other_cluster", 409, 9, 1;
    /// Another agent of this cluster is connected.
    ClusterHasLiveAgent = "cluster_has_live_agent", 409, 6, 1;
    /// The cluster's registration was archived; its credentials are revoked.
    ClusterArchived = "cluster_archived", 403, 7, 1;
    /// No agent of the cluster is connected, so nothing can be asked of it now.
    ClusterDisconnected = "cluster_disconnected", 503, 14, 1;
    /// The server can't do it now; try again after the time it names.
    Unavailable = "unavailable", 503, 14, 1;
    DeadlineExceeded = "deadline_exceeded", 504, 4, 1;
    Internal = "internal", 500, 13, 1;
}

impl std::fmt::Display for Code {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// One thing wrong with a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// Path of the field in the request: `tasks[0].episodes`; empty for the request as a whole.
    pub path: String,
    pub message: String,
}

impl Problem {
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }
}

/// An error for a user: code, sentence, and the problems of the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub code: Code,
    pub message: String,
    pub details: Vec<Problem>,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Vec::new() }
    }

    /// All the problems of a request. SDK clients print the first 300 characters of the message, so it leads with the count
    /// and the short paths.
    #[must_use]
    pub fn invalid(problems: Vec<Problem>) -> Self {
        let message = match problems.as_slice() {
            [only] if only.path.is_empty() => only.message.clone(),
            [only] => format!("{}: {}", only.path, only.message),
            many => {
                let mut paths: Vec<&str> = many.iter().map(|problem| problem.path.as_str()).collect();
                paths.dedup();
                let shown = paths.iter().take(6).copied().collect::<Vec<_>>().join(", ");
                let more = if paths.len() > 6 { ", ..." } else { "" };
                let first = many.first().map_or(String::new(), |problem| format!("{}: {}", problem.path, problem.message));
                format!("{} problems in the request ({shown}{more}). First: {first}", many.len())
            }
        };
        Self { code: Code::InvalidRequest, message, details: problems }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_snake_case() {
        let mut seen = std::collections::BTreeSet::new();
        for code in Code::ALL {
            assert!(seen.insert(code.as_str()), "{code} twice");
            assert!(code.as_str().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
            assert!(code.http() >= 400 && code.grpc() > 0 && code.exit() > 0);
        }
    }

    #[test]
    fn many_problems_lead_with_count_and_paths() {
        let error = Error::invalid(vec![Problem::new("tasks[0].episodes", "must be at least 1"), Problem::new("models", "is empty")]);
        assert!(error.message.starts_with("2 problems in the request (tasks[0].episodes, models)"));
        assert_eq!(error.details.len(), 2);
    }
}

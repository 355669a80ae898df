//! The CLI's error: a code, a sentence, and the exit status that follows.

use rlm_api::rest::ErrorBody;
use rlm_core::error::{Code, Error, Problem};

/// What a command ended with.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct CliError {
    pub code: String,
    pub message: String,
    pub details: Vec<Problem>,
    pub request_id: Option<String>,
    pub exit: u8,
}

impl CliError {
    /// Something went wrong on this machine.
    pub fn other(message: impl Into<String>) -> Self {
        Self { code: "error".to_owned(), message: message.into(), details: Vec::new(), request_id: None, exit: 1 }
    }

    /// The command line or a file it names is wrong.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: "usage".to_owned(), exit: 2, ..Self::other(message) }
    }

    pub fn sign_in(message: impl Into<String>) -> Self {
        Self { code: Code::Unauthenticated.to_string(), exit: Code::Unauthenticated.exit(), ..Self::other(message) }
    }

    /// The server can't be reached.
    pub fn unreachable(url: &str, error: &reqwest::Error) -> Self {
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Self {
            code: Code::Unavailable.to_string(),
            ..Self::other(format!("{url} does not answer: {cause}. Is the server running (`rlmesh up`) and the address right?"))
        }
    }

    /// An error answer of the server.
    pub fn answer(status: u16, body: &[u8]) -> Self {
        match serde_json::from_slice::<ErrorBody>(body) {
            Ok(ErrorBody { error }) => Self {
                code: error.code.to_string(),
                exit: error.code.exit(),
                message: error.message,
                details: error.details,
                request_id: Some(error.request_id),
            },
            Err(_) => {
                let text: String = String::from_utf8_lossy(body).chars().take(300).collect();
                let exit = match status {
                    401 => 4,
                    404 => 3,
                    400 | 422 => 2,
                    _ => 1,
                };
                Self { code: format!("http_{status}"), exit, ..Self::other(format!("the server answered {status}: {text}")) }
            }
        }
    }

    /// Whether waiting and asking again may help.
    pub fn is_transient(&self) -> bool {
        self.code == Code::Unavailable.as_str() || self.code == Code::RateLimited.as_str() || self.code.starts_with("http_50")
    }
}

impl From<Error> for CliError {
    fn from(error: Error) -> Self {
        Self { code: error.code.to_string(), exit: error.code.exit(), details: error.details, ..Self::other(error.message) }
    }
}

//! From what a server answered to who is to blame and what to do: the table of the SDK's error codes against ours.
//!
//! Transport loss without a word is not decided here: how the process ended is the agent's to say.

use rlm_core::failure::{Failure, FailureCode};
use rlmesh_proto::env::v1::{EnvError, EnvErrorCode};
use rlmesh_proto::model::v1::{ModelError, ModelErrorCode};

/// What an error of an environment means for its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvRemedy {
    /// The session goes on; the lane is reset for its next row.
    Reset,
    /// The session is over; a new one may be opened to the same process.
    Reconnect,
    /// The process is replaced.
    Restart,
}

/// Which call an environment's error answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvCall {
    Configure,
    Reset,
    Step,
}

impl EnvCall {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Configure => "configure",
            Self::Reset => "reset",
            Self::Step => "step",
        }
    }
}

/// The failure and the remedy for this error.
#[must_use]
pub fn env_error(component: &str, call: EnvCall, error: &EnvError) -> (Failure, EnvRemedy) {
    let text = one_paragraph(&error.message);
    let place = call.as_str();
    let (code, message, remedy) = match EnvErrorCode::try_from(error.code).unwrap_or(EnvErrorCode::Unspecified) {
        EnvErrorCode::Timeout => {
            (FailureCode::EnvironmentHung, format!("the environment's {place} took longer than it may: {text}"), EnvRemedy::Reset)
        }
        EnvErrorCode::InvalidAction if call == EnvCall::Step => {
            (FailureCode::ModelInvalidAction, format!("the environment refused the model's action: {text}"), EnvRemedy::Reset)
        }
        EnvErrorCode::InvalidAction => (FailureCode::Internal, format!("the environment refused our {place}: {text}"), EnvRemedy::Reset),
        EnvErrorCode::NotReady => {
            (FailureCode::ConnectionLost, format!("the environment was not ready for our {place}: {text}"), EnvRemedy::Reconnect)
        }
        EnvErrorCode::Busy => {
            (FailureCode::ConnectionLost, format!("the environment was busy at our {place}: {text}"), EnvRemedy::Reconnect)
        }
        EnvErrorCode::Unsupported => {
            (FailureCode::Unsupported, format!("the environment does not support this {place}: {text}"), EnvRemedy::Reset)
        }
        EnvErrorCode::Internal | EnvErrorCode::Unspecified if breaks_contract(&error.message) => (
            FailureCode::EnvironmentContract,
            format!("what the environment's {place} returned breaks its own contract: {text}"),
            EnvRemedy::Reset,
        ),
        EnvErrorCode::Internal | EnvErrorCode::Unspecified => {
            (FailureCode::EnvironmentError, format!("the environment raised in {place}: {text}"), EnvRemedy::Reset)
        }
        EnvErrorCode::Crashed => {
            (FailureCode::EnvironmentCrashed, format!("the environment crashed in {place}: {text}"), EnvRemedy::Restart)
        }
        EnvErrorCode::Cancelled | EnvErrorCode::Closed => {
            (FailureCode::ConnectionLost, format!("the environment's session was closed during {place}: {text}"), EnvRemedy::Reconnect)
        }
    };
    (Failure::new(code, message).of(component), remedy)
}

/// What an error of a model means for its adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelRemedy {
    /// Nothing but the rows it interrupted.
    None,
    /// The adapters have to be bound again.
    Bind,
    /// The stream is over; a new one may be opened.
    Reconnect,
}

/// The failure and the remedy for this error of a predict.
#[must_use]
pub fn model_error(component: &str, error: &ModelError) -> (Failure, ModelRemedy) {
    let text = one_paragraph(&error.message);
    let (code, message, remedy) = match ModelErrorCode::try_from(error.code).unwrap_or(ModelErrorCode::Unspecified) {
        ModelErrorCode::NotConfigured => {
            (FailureCode::ConnectionLost, format!("the model has forgotten its adapter: {text}"), ModelRemedy::Bind)
        }
        ModelErrorCode::Internal | ModelErrorCode::Unspecified | ModelErrorCode::InvalidRequest if forgot_adapter(&error.message) => {
            (FailureCode::ConnectionLost, format!("the model has forgotten its adapter: {text}"), ModelRemedy::Bind)
        }
        ModelErrorCode::Internal | ModelErrorCode::Unspecified if breaks_action_space(&error.message) => {
            (FailureCode::ModelInvalidAction, format!("the model's action does not fit the environment: {text}"), ModelRemedy::None)
        }
        ModelErrorCode::Internal | ModelErrorCode::Unspecified => {
            (FailureCode::ModelError, format!("the model raised in predict: {text}"), ModelRemedy::None)
        }
        ModelErrorCode::InvalidRequest => (FailureCode::Internal, format!("the model refused our predict: {text}"), ModelRemedy::None),
        ModelErrorCode::Busy => (FailureCode::ConnectionLost, format!("the model was busy: {text}"), ModelRemedy::Reconnect),
        ModelErrorCode::Unsupported => {
            (FailureCode::Unsupported, format!("the model does not support this predict: {text}"), ModelRemedy::None)
        }
        ModelErrorCode::Cancelled | ModelErrorCode::Closed => {
            (FailureCode::ConnectionLost, format!("the model's stream was closed: {text}"), ModelRemedy::Reconnect)
        }
    };
    (Failure::new(code, message).of(component), remedy)
}

/// The failure for a refused adapter: the two specifications do not fit.
#[must_use]
pub fn bind_error(component: &str, error: &ModelError) -> Failure {
    let text = one_paragraph(&error.message);
    let code = match ModelErrorCode::try_from(error.code) {
        Ok(ModelErrorCode::Unsupported) => FailureCode::Unsupported,
        Ok(ModelErrorCode::Cancelled | ModelErrorCode::Closed | ModelErrorCode::Busy) => FailureCode::ConnectionLost,
        Ok(ModelErrorCode::Unspecified | ModelErrorCode::InvalidRequest | ModelErrorCode::NotConfigured | ModelErrorCode::Internal)
        | Err(_) => {
            if text.contains("execution_horizon") || text.contains("native_chunk") {
                FailureCode::Unsupported
            } else {
                FailureCode::IncompatibleSpecs
            }
        }
    };
    Failure::new(code, format!("the model can't be adapted to this environment: {text}")).of(component)
}

/// Whether the SDK's environment server refused what the environment itself returned: its value check names the place, or
/// says `step failed: ValueError: $.camera: Box value at element 0 is NaN`, `... invalid box value: data is 28 bytes but ...`.
fn breaks_contract(message: &str) -> bool {
    let message = message.trim_start();
    if let Some((_, said)) = message.split_once(" failed: ValueError: ") {
        return ["$: ", "$.", "$[", "invalid box value: "].iter().any(|start| said.starts_with(start));
    }
    ["observation", "reward", "rewards", "info"]
        .iter()
        .any(|place| message.strip_prefix(place).is_some_and(|rest| rest.starts_with([':', '[', '.', ' '])))
        || message.contains("does not conform")
        || message.contains("does not match the observation space")
}

fn breaks_action_space(message: &str) -> bool {
    message.contains("does not match the action space") || message.contains("-dim model action, got shape (")
}

fn forgot_adapter(message: &str) -> bool {
    message.contains("was not resolved") || message.contains("adapter not resolved")
}

/// Text for a message: lines joined, at most 2,000 characters.
fn one_paragraph(text: &str) -> String {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if joined.is_empty() {
        return "it gave no reason".to_owned();
    }
    match joined.char_indices().nth(2000) {
        Some((end, _)) => format!("{}...", &joined[..end]),
        None => joined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlm_core::failure::Retry;

    fn env(code: EnvErrorCode, call: EnvCall, message: &str) -> (FailureCode, EnvRemedy) {
        let error = EnvError { code: code.into(), message: message.to_owned(), ..EnvError::default() };
        let (failure, remedy) = env_error("env-0-0", call, &error);
        assert_eq!(failure.component.as_deref(), Some("env-0-0"));
        assert!(message.is_empty() || failure.message.contains(message));
        (failure.code, remedy)
    }

    #[test]
    fn every_environment_code_has_its_class() {
        use EnvErrorCode as C;
        for (code, expected) in [
            (C::Unspecified, FailureCode::EnvironmentError),
            (C::Timeout, FailureCode::EnvironmentHung),
            (C::InvalidAction, FailureCode::ModelInvalidAction),
            (C::NotReady, FailureCode::ConnectionLost),
            (C::Busy, FailureCode::ConnectionLost),
            (C::Unsupported, FailureCode::Unsupported),
            (C::Internal, FailureCode::EnvironmentError),
            (C::Crashed, FailureCode::EnvironmentCrashed),
            (C::Cancelled, FailureCode::ConnectionLost),
            (C::Closed, FailureCode::ConnectionLost),
        ] {
            assert_eq!(env(code, EnvCall::Step, "boom").0, expected, "{code:?}");
        }
        assert_eq!(env(C::Crashed, EnvCall::Step, "").1, EnvRemedy::Restart);
        assert_eq!(env(C::InvalidAction, EnvCall::Reset, "lane").0, FailureCode::Internal);
        assert_eq!(env(C::Internal, EnvCall::Step, "observation: shape [7] is not [4]").0, FailureCode::EnvironmentContract);
        assert_eq!(env(C::Internal, EnvCall::Step, "observationally wrong").0, FailureCode::EnvironmentError);
        for said in ["$: Box value at element 0 is NaN", "invalid box value: data is 28 bytes but shape and dtype require exactly 16"] {
            assert_eq!(env(C::Internal, EnvCall::Step, &format!("step failed: ValueError: {said}")).0, FailureCode::EnvironmentContract);
            assert_eq!(env(C::Internal, EnvCall::Reset, &format!("reset failed: ValueError: {said}")).0, FailureCode::EnvironmentContract);
        }
        assert_eq!(env(C::Internal, EnvCall::Step, "step failed: ValueError: no such door").0, FailureCode::EnvironmentError);
    }

    #[test]
    fn every_model_code_has_its_class() {
        use ModelErrorCode as C;
        for (code, message, expected, remedy) in [
            (C::Unspecified, "x", FailureCode::ModelError, ModelRemedy::None),
            (C::InvalidRequest, "x", FailureCode::Internal, ModelRemedy::None),
            (C::NotConfigured, "x", FailureCode::ConnectionLost, ModelRemedy::Bind),
            (C::Busy, "x", FailureCode::ConnectionLost, ModelRemedy::Reconnect),
            (C::Unsupported, "x", FailureCode::Unsupported, ModelRemedy::None),
            (C::Internal, "x", FailureCode::ModelError, ModelRemedy::None),
            (C::Internal, "model env adapter was not resolved", FailureCode::ConnectionLost, ModelRemedy::Bind),
            (C::Internal, "model action for lane 0 does not match the action space: x", FailureCode::ModelInvalidAction, ModelRemedy::None),
            (C::Internal, "model error: expected 1-dim model action, got shape (5,)", FailureCode::ModelInvalidAction, ModelRemedy::None),
            (C::Cancelled, "x", FailureCode::ConnectionLost, ModelRemedy::Reconnect),
            (C::Closed, "x", FailureCode::ConnectionLost, ModelRemedy::Reconnect),
        ] {
            let error = ModelError { code: code.into(), message: message.to_owned(), ..ModelError::default() };
            let (failure, got) = model_error("model-0", &error);
            assert_eq!((failure.code, got), (expected, remedy), "{code:?} {message}");
        }
    }

    #[test]
    fn a_refused_adapter_is_never_tried_again() {
        for message in ["the action space must be a flat Box", "execution_horizon 9 is over native_chunk 8"] {
            let error = ModelError { code: ModelErrorCode::InvalidRequest.into(), message: message.to_owned(), ..ModelError::default() };
            assert_eq!(bind_error("model-0", &error).code.retry(), Retry::Never);
        }
    }
}

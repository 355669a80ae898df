//! The one failure taxonomy, from pod state and RPC code to the row a user sees: who is to blame, what exactly, and
//! whether to try again.
//!
//! A score is never a reason to try again, and a retry never changes the seed.

use serde::{Deserialize, Serialize};

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FailureClass {
    Environment,
    Model,
    /// Machines, networks, images, storage: not the user's code.
    Infrastructure,
    /// RLMesh itself.
    Platform,
    /// The request: parameters, entrypoints, versions.
    User,
}

impl FailureClass {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Environment => "environment",
            Self::Model => "model",
            Self::Infrastructure => "infrastructure",
            Self::Platform => "platform",
            Self::User => "user",
        }
    }
}

/// What to do with the rows that a failure interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Retry {
    /// Again with the same seed, not counted against the row.
    Always,
    /// Again with the same seed, at most `limits.environmentCrashRetries` times, then the row is errored.
    Counted,
    /// Never: it would fail the same way.
    Never,
}

macro_rules! failure_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $class:ident, $retry:ident;)*) => {
        /// A stable failure code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
        pub enum FailureCode {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl FailureCode {
            /// Every code, in the order of the docs.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            #[must_use]
            pub const fn class(self) -> FailureClass {
                match self { $(Self::$name => FailureClass::$class,)* }
            }

            #[must_use]
            pub const fn retry(self) -> Retry {
                match self { $(Self::$name => Retry::$retry,)* }
            }

            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|code| code.as_str() == text)
            }
        }
    };
}

failure_codes! {
    /// The environment process ended by itself in an episode.
    EnvironmentCrashed = "environment_crashed", Environment, Counted;
    /// The environment raised in reset or step.
    EnvironmentError = "environment_error", Environment, Counted;
    /// The environment made no progress for `limits.progressTimeout`; its process was replaced.
    EnvironmentHung = "environment_hung", Environment, Counted;
    /// An observation or reward that breaks the environment's own contract (shape, NaN).
    EnvironmentContract = "environment_contract", Environment, Never;
    /// The environment could not be constructed.
    EnvironmentStartFailed = "environment_start_failed", Environment, Never;
    /// The environment did not serve within `startupTimeout`.
    EnvironmentStartTimeout = "environment_start_timeout", Environment, Never;
    /// The model process ended by itself in a predict.
    ModelCrashed = "model_crashed", Model, Counted;
    /// The model raised in predict.
    ModelError = "model_error", Model, Counted;
    /// The model made no progress for `limits.progressTimeout`; its process was replaced.
    ModelHung = "model_hung", Model, Counted;
    /// An action that the environment's action space does not allow (shape, NaN).
    ModelInvalidAction = "model_invalid_action", Model, Never;
    /// The model could not be loaded.
    ModelStartFailed = "model_start_failed", Model, Never;
    /// The model did not serve within `startupTimeout`.
    ModelStartTimeout = "model_start_timeout", Model, Never;
    /// Killed from outside (signal 9 without a reason of its own).
    ProcessKilled = "process_killed", Infrastructure, Always;
    /// Over its memory limit.
    OutOfMemory = "out_of_memory", Infrastructure, Counted;
    /// The pod was evicted or deleted, or its node went away.
    PodLost = "pod_lost", Infrastructure, Always;
    /// The connection to the endpoint broke while its process lives.
    ConnectionLost = "connection_lost", Infrastructure, Always;
    ImagePullFailed = "image_pull_failed", Infrastructure, Never;
    Unschedulable = "unschedulable", Infrastructure, Never;
    /// Waited longer than `limits.queueTimeout`.
    QueueTimeout = "queue_timeout", Infrastructure, Never;
    /// An artifact could not be fetched.
    ArtifactUnavailable = "artifact_unavailable", Infrastructure, Never;
    /// The runner ended without finishing; its rows go on in the next one.
    RunnerLost = "runner_lost", Platform, Always;
    /// The agent could not do its part (spool, sockets, files).
    AgentError = "agent_error", Platform, Always;
    Internal = "platform_internal", Platform, Never;
    /// Parameters that the definition refuses.
    InvalidParams = "invalid_params", User, Never;
    /// A `file://` checkpoint that can't be read, or is not the file that its `sha256` names.
    InvalidCheckpoint = "invalid_checkpoint", User, Never;
    /// The entrypoint can't be imported or is not an environment or model.
    InvalidEntrypoint = "invalid_entrypoint", User, Never;
    /// No wire generation or workflow edition in common.
    IncompatibleVersions = "incompatible_versions", User, Never;
    /// The environment's and the model's specifications do not fit each other.
    IncompatibleSpecs = "incompatible_specs", User, Never;
    /// Something the endpoint does not support (horizon, lanes, seeds).
    Unsupported = "unsupported", User, Never;
    /// The definition can't run on this kind of cluster (an image on a local cell, an entrypoint on Kubernetes).
    NotRunnableHere = "not_runnable_here", User, Never;
    /// The evaluation was cancelled before the row had an outcome.
    Cancelled = "cancelled", User, Never;
}

/// One failure, as a row, a run and an API answer show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    pub class: FailureClass,
    pub code: FailureCode,
    /// What happened, to which thing, why, what to do next.
    pub message: String,
    /// `model-0`, `env-0-1`, `runner`; none when nothing that runs is to blame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<String>,
    /// Last lines of the component's output: at most 200, at most 16 KiB.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_lines: Vec<String>,
}

impl Failure {
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self {
            class: code.class(),
            code,
            message: message.into(),
            component: None,
            exit_code: None,
            events: Vec::new(),
            log_lines: Vec::new(),
        }
    }

    #[must_use]
    pub fn of(mut self, component: impl Into<String>) -> Self {
        self.component = Some(component.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_read_back_and_are_unique() {
        let mut seen = std::collections::BTreeSet::new();
        for code in FailureCode::ALL.iter().copied() {
            assert!(seen.insert(code.as_str()));
            assert_eq!(FailureCode::parse(code.as_str()), Some(code));
        }
        assert_eq!(FailureCode::parse("nonsense"), None);
    }

    #[test]
    fn faults_of_the_request_are_never_retried() {
        for code in FailureCode::ALL.iter().filter(|code| code.class() == FailureClass::User) {
            assert_eq!(code.retry(), Retry::Never, "{}", code.as_str());
        }
    }
}

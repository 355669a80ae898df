//! Conversions between the cell protocol's messages and the domain.

use rlm_core::failure::{Failure, FailureCode};
use rlm_core::rows::Segment;

use crate::cluster::v1;

/// A message that a peer of this version would not send.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidMessage {
    pub field: &'static str,
    pub problem: String,
}

impl From<&Failure> for v1::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            class: failure.class.as_str().to_owned(),
            code: failure.code.as_str().to_owned(),
            message: failure.message.clone(),
            component: failure.component.clone().unwrap_or_default(),
            exit_code: failure.exit_code,
            events: failure.events.clone(),
            log_lines: failure.log_lines.clone(),
        }
    }
}

impl From<&v1::Failure> for Failure {
    /// A code that this version does not know (a newer peer's) becomes `platform_internal` with the code in its message.
    fn from(message: &v1::Failure) -> Self {
        let (code, text) = match FailureCode::parse(&message.code) {
            Some(code) => (code, message.message.clone()),
            None => (FailureCode::Internal, format!("{} ({})", message.message, message.code)),
        };
        Self {
            class: code.class(),
            code,
            message: text,
            component: (!message.component.is_empty()).then(|| message.component.clone()),
            exit_code: message.exit_code,
            events: message.events.clone(),
            log_lines: message.log_lines.clone(),
        }
    }
}

impl v1::RowBlock {
    /// The block as a segment of `model`; `first_trial` is not known to a runner and stays 0.
    #[must_use]
    pub fn to_segment(&self, model: u32) -> Segment {
        Segment {
            first_row: self.first_row,
            count: u64::from(self.count),
            model,
            task: self.task,
            first_trial: 0,
            seed: self.seed,
            seeds: (!self.seeds.is_empty()).then(|| self.seeds.clone()),
            trial_index: self.trial_index,
        }
    }

    /// The block of `segment`, whose task is at `task` in the run's task list.
    pub fn from_segment(segment: &Segment, task: u32) -> Result<Self, InvalidMessage> {
        Ok(Self {
            first_row: segment.first_row,
            count: u32::try_from(segment.count).map_err(|_| InvalidMessage {
                field: "rows.count",
                problem: format!("{} rows in one block; a run has at most {}", segment.count, rlm_core::rows::MAX_RUN_ROWS),
            })?,
            task,
            seed: segment.seed,
            seeds: segment.seeds.clone().unwrap_or_default(),
            trial_index: segment.trial_index,
        })
    }
}

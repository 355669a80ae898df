//! The domain of RLMesh: ids, tokens, evaluations, their rows and states, failures, kinds of GPUs and statistics.
//!
//! Everything here is a value or a pure function: no I/O, no async, no transport or database types. What another crate
//! decides about an evaluation, it decides by calling into this one.

pub mod error;
pub mod evaluation;
pub mod failure;
pub mod gpu;
pub mod ids;
pub mod request;
pub mod rows;
pub mod run;
pub mod stats;
pub mod tokens;

//! Evaluation requests: their rules, what describe documents add, plans, and the generated reference.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "request_suite/check.rs"]
mod check;
#[path = "request_suite/common.rs"]
mod common;
#[path = "request_suite/described.rs"]
mod described;
#[path = "request_suite/plan.rs"]
mod plan;
#[path = "request_suite/reference.rs"]
mod reference;

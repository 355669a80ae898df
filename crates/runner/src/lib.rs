//! The evaluation runner: takes one run from its agent, drives its rows through model and environment servers, reports
//! what came of each.
//!
//! The only crate that uses the SDK's crates: wire types, editions and reset options are theirs. The session driver of
//! `rlmesh-runtime` is not used: it can neither name the row of an episode, nor go on after a fault, nor hold rows to
//! different step limits. What must never happen here: a row scored under another seed, a failure charged to a row that
//! did not cause it, an outcome reported twice as different things, a wait without an end.

mod agent;
mod batch;
mod board;
mod chunk;
mod classify;
mod components;
mod episode;
mod facts;
mod hub;
mod metrics;
mod outbox;
mod pinned;
mod pod;
mod provenance;
mod rows;
mod run;
mod session;
mod space;
mod transport;
mod tuning;
mod wire;

pub use agent::{Identity, LinkError, Token};
pub use pinned::CertificatePin;
pub use run::{Start, run};
pub use transport::{Address, InvalidAddress, dial};
pub use tuning::Tuning;

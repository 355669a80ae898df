//! Tests of the control plane through its public faces: REST, pages, the store on both databases.
#![expect(clippy::panic, reason = "a test that meets the wrong answer says what it met")]
#![expect(clippy::unwrap_used, reason = "tests")]

mod accounts;
mod binary;
mod cells;
mod clusters;
mod common;
mod evaluations;
mod every_route;
mod input;
mod keys;
mod organizations;
mod secrecy;
mod sign_in;
mod store;

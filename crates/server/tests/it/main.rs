//! Tests of the control plane through its public faces: REST, pages, the store on both databases.
#![expect(clippy::unwrap_used, reason = "tests")]

mod accounts;
mod cells;
mod clusters;
mod common;
mod evaluations;
mod every_route;
mod input;
mod keys;
mod organizations;
mod sign_in;
mod store;

//! The cluster's side of RLMesh: the agent that joins a cluster to a control plane, carries out its runs and keeps their
//! results until the control plane has them.
//!
//! It dials out and listens nowhere but on unix sockets of its own (and an admin port, if asked). No secret is ever in its
//! arguments, environment or logs.

pub mod agent;
pub mod controller;
pub mod crd;
pub mod discovery;
pub mod executor;
pub mod inventory;
pub mod runners;
pub mod spool;
pub mod walls;

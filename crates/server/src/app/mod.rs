//! Use cases. Each is called by REST or by the cell protocol and knows neither: no axum or tonic types here, no SQL.

pub mod access;
pub mod audit;
pub mod cells;
pub mod clusters;
pub mod definitions;
pub mod evaluations;
pub mod events;
pub mod identity;
pub mod ingest;
pub mod local;
pub mod scheduler;
pub mod scores;

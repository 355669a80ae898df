//! The control plane: use cases (`app`) called by REST (`http`) and the cell protocol (`grpc`), over one store (`store`).
//!
//! `http` and `grpc` decide nothing; `app` knows neither axum nor tonic; only `store` holds SQL.

pub mod app;
pub mod config;
pub mod grpc;
pub mod http;
pub mod state;
pub mod store;

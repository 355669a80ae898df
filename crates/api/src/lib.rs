//! Everything said between processes: the cell protocol (gRPC), the runner's protocol, and the REST types.
//!
//! Conversions between wire and domain types live here and nowhere else. No decisions, no I/O.

/// The cell protocol and the runner's protocol, generated from `proto/`.
pub mod cluster {
    #[expect(clippy::all, clippy::pedantic, clippy::allow_attributes, reason = "generated")]
    pub mod v1 {
        tonic::include_proto!("rlmesh.cluster.v1");
    }
}

mod convert;
pub mod rest;

pub use convert::InvalidMessage;

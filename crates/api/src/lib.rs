//! Everything said between processes: the cell protocol (gRPC), the protocols of runners and GPU discovery, and the REST types.
//!
//! Conversions between wire and domain types live here and nowhere else. No decisions, no I/O.

/// The cell protocol, the runner's and that of GPU discovery, generated from `proto/`.
pub mod cluster {
    #[expect(clippy::all, clippy::pedantic, clippy::allow_attributes, reason = "generated")]
    pub mod v1 {
        tonic::include_proto!("rlmesh.cluster.v1");
    }
}

mod convert;
pub mod rest;

pub use convert::InvalidMessage;

//! The cell protocol over a real connection: join, session, leases, and what goes wrong with them.

mod join;
mod leases;
mod link;
pub mod plane;
mod recovery;

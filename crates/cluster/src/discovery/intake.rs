//! What discovery reports, as the agent takes it in: checked, and kept for the node that the token was made on until that node
//! says something else. Decides nothing about runs, and keeps nothing across a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use rlm_api::cluster::v1::discovery_service_server::DiscoveryService;
use rlm_api::cluster::v1::{GpuKind, GpuReport, GpuReportAck};
use tonic::{Request, Response, Status};

use super::words;
use crate::executor::kubernetes::TokenReviewer;

/// Kinds of GPUs of one node.
const KINDS: usize = 16;
/// GPUs of one kind.
const GPUS: u32 = 1024;
/// Characters of a product's name, and of a driver's version.
const LONGEST: usize = 128;

type ByNode = BTreeMap<String, Vec<GpuKind>>;

/// Cheap to clone.
#[derive(Clone)]
pub struct Reports {
    reviewer: Arc<TokenReviewer>,
    /// Bounded by the cluster's nodes: see [`Reports::of`].
    nodes: Arc<Mutex<ByNode>>,
}

impl Reports {
    #[must_use]
    pub fn new(reviewer: TokenReviewer) -> Self {
        Self { reviewer: Arc::new(reviewer), nodes: Arc::default() }
    }

    fn with<T>(&self, act: impl FnOnce(&mut ByNode) -> T) -> T {
        act(&mut self.nodes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What is known of these nodes, which are all that there are: others are forgotten.
    #[must_use]
    pub fn of(&self, names: &BTreeSet<String>) -> BTreeMap<String, Vec<GpuKind>> {
        self.with(|nodes| {
            nodes.retain(|name, _| names.contains(name));
            nodes.clone()
        })
    }

    fn take(&self, node: String, gpus: Vec<GpuKind>) {
        let before = self.with(|nodes| nodes.insert(node.clone(), gpus.clone()));
        if before.as_ref() != Some(&gpus) {
            tracing::info!(%node, gpus = %words(&gpus), "a node's GPUs were reported");
        }
    }
}

/// What discovery of ours would say: it is shown to users.
fn check(report: GpuReport) -> Result<Vec<GpuKind>, Status> {
    let refused = |why: &str| Status::invalid_argument(format!("no report of GPU discovery: {why}"));
    if report.gpus.len() > KINDS {
        return Err(refused("too many kinds of GPUs"));
    }
    for gpu in &report.gpus {
        if !["nvidia", "amd"].contains(&gpu.vendor.as_str()) {
            return Err(refused("a vendor that is not known"));
        }
        if gpu.count == 0 || gpu.count > GPUS {
            return Err(refused("a number of GPUs that no machine has"));
        }
        let plain = |text: &str| text.len() <= LONGEST && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if !plain(&gpu.product) || !plain(&gpu.driver) {
            return Err(refused("a name that is too long or not plain text"));
        }
    }
    Ok(report.gpus)
}

#[tonic::async_trait]
impl DiscoveryService for Reports {
    async fn report(&self, request: Request<GpuReport>) -> Result<Response<GpuReportAck>, Status> {
        let token = request.metadata().get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let token = token.ok_or_else(|| Status::unauthenticated("there is no token"))?;
        let holder = self.reviewer.holder(token).await.inspect_err(|status| {
            tracing::warn!(why = status.message(), "a report of GPUs was refused");
        })?;
        let node =
            holder.node.ok_or_else(|| Status::failed_precondition("the API server does not say which node the token's pod is on"))?;
        self.take(node, check(request.into_inner())?);
        Ok(Response::new(GpuReportAck {}))
    }
}

#[cfg(test)]
#[path = "intake_tests.rs"]
mod tests;

//! What the run really runs with, gathered from handshakes and told to the agent whenever it changes.

use std::sync::{Mutex, PoisonError};

use rlm_core::evaluation::{Provenance, RunSpec};

use crate::agent::Agent;
use crate::facts::PeerFacts;
use crate::rows::Spread;

/// Most warnings that are kept.
const WARNINGS: usize = 50;

pub struct Book {
    agent: Agent,
    provenance: Mutex<Provenance>,
}

impl Book {
    #[must_use]
    pub fn new(agent: Agent, spec: &RunSpec) -> Self {
        let provenance = Provenance {
            execution_horizon: Some(spec.model.execution_horizon.max(1)),
            prefetch_lead: Some(spec.model.prefetch_lead),
            ..Provenance::default()
        };
        Self { agent, provenance: Mutex::new(provenance) }
    }

    fn change(&self, change: impl FnOnce(&mut Provenance)) {
        let document = {
            let mut provenance = self.provenance.lock().unwrap_or_else(PoisonError::into_inner);
            let before = provenance.clone();
            change(&mut provenance);
            if *provenance == before {
                return;
            }
            serde_json::to_string(&*provenance)
        };
        match document {
            Ok(document) => self.agent.provenance(document),
            Err(error) => tracing::warn!(%error, "the provenance can't be written"),
        }
    }

    pub fn model(&self, facts: &PeerFacts, horizon: u32) {
        self.change(|provenance| {
            provenance.model_describe_sha256.clone_from(&facts.describe_sha256);
            provenance.model_sdk_version = some(&facts.version);
            provenance.model_startup_ms.clone_from(&facts.startup_ms);
            if horizon > 1 && facts.corners().is_none() {
                warn(provenance, format!("executionHorizon is {horizon}, but the model's server does not say whether it answers chunks; without them it predicts every step"));
            }
        });
    }

    pub fn environment(&self, facts: &PeerFacts, edition: &str, node: &str) {
        self.change(|provenance| {
            provenance.environment_describe_sha256.clone_from(&facts.describe_sha256);
            provenance.environment_sdk_version = some(&facts.version);
            if provenance.environment_startup_ms.is_empty() {
                provenance.environment_startup_ms.clone_from(&facts.startup_ms);
            }
            provenance.workflow_edition = some(edition);
            provenance.node = some(node).or_else(|| provenance.node.clone());
        });
    }

    pub fn spread(&self, spread: Spread) {
        self.change(|provenance| {
            provenance.lanes = provenance.lanes.max(Some(spread.lanes));
            provenance.lanes_per_pod = Some(spread.lanes_per_pod);
        });
    }

    pub fn warn(&self, warning: String) {
        self.change(|provenance| warn(provenance, warning));
    }
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn warn(provenance: &mut Provenance, warning: String) {
    if provenance.warnings.len() < WARNINGS && !provenance.warnings.contains(&warning) {
        provenance.warnings.push(warning);
    }
}

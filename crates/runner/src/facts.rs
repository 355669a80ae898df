//! What a server says of itself at the handshake, and what follows: the edition of the session, whether its predicts fuse,
//! whether the requested horizon can be had. Pure: no connection is opened here.

use std::collections::{BTreeMap, HashMap};

use rlm_core::failure::{Failure, FailureCode};
use rlmesh_proto::core::v1::{AutoresetMode, EnvContract, HandshakeResponse, PeerInfo};
use rlmesh_proto::{Edition, SessionOffer, capabilities, has_capability};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// Key of the describe document on the handshake.
const DESCRIBE: &str = "rlmesh.describe.v1";
const STARTUP: &str = "rlmesh.startup.";
/// Release candidates of 0.1.0 offer cohorts of the edition that they became; this runner drives them alike.
const COHORT: &str = "2026.06-0.1.0-rc";

/// What both kinds of server say.
#[derive(Debug, Clone, Default)]
pub struct PeerFacts {
    pub offer_editions: Vec<String>,
    pub offer_preferred: Option<String>,
    pub capabilities: HashMap<String, String>,
    pub version: String,
    pub describe_sha256: Option<String>,
    pub describe: Option<Value>,
    pub startup_ms: BTreeMap<String, u64>,
}

impl PeerFacts {
    #[must_use]
    pub fn read(response: &HandshakeResponse) -> Self {
        let peer = response.peer_info.clone().unwrap_or_default();
        let preferred = response.preferred_workflow_edition.trim();
        let describe = peer.extra.get(DESCRIBE);
        Self {
            offer_editions: response.supported_workflow_editions.clone(),
            offer_preferred: (!preferred.is_empty()).then(|| preferred.to_owned()),
            capabilities: response.capabilities.clone(),
            version: peer.package_version.clone(),
            describe_sha256: describe.map(|text| hex::encode(Sha256::digest(text.as_bytes()))),
            describe: describe.and_then(|text| serde_json::from_str(text).ok()),
            startup_ms: startup(&peer),
        }
    }

    fn offer(&self) -> SessionOffer {
        SessionOffer { editions: self.offer_editions.clone(), preferred: self.offer_preferred.clone() }
    }

    #[must_use]
    pub fn has(&self, capability: &str) -> bool {
        has_capability(&self.capabilities, capability)
    }

    /// Whether observation history may be offered.
    #[must_use]
    pub fn ingests_history(&self) -> bool {
        self.has(capabilities::MODEL_OBSERVATION_HISTORY_V1)
    }

    /// The model's corners, when its describe document lists them.
    #[must_use]
    pub fn corners(&self) -> Option<Vec<String>> {
        let corners = self.describe.as_ref()?;
        let corners = corners.get("corners").or_else(|| corners.get("model")?.get("corners"))?.as_array()?;
        Some(corners.iter().filter_map(|corner| corner.as_str().map(str::to_owned)).collect())
    }
}

fn startup(peer: &PeerInfo) -> BTreeMap<String, u64> {
    peer.extra
        .iter()
        .filter_map(|(key, value)| {
            let mark = key.strip_prefix(STARTUP)?;
            let mark = mark.strip_suffix("_ms").unwrap_or(mark);
            let value: f64 = value.parse().ok().filter(|value| (0.0..1e12).contains(value))?;
            Some((mark.to_owned(), value.round() as u64))
        })
        .collect()
}

/// The edition that a session of these three runs at. `pinned` is the request's `workflowEdition`.
pub fn edition(env: &PeerFacts, model: &PeerFacts, pinned: Option<&str>) -> Result<String, Failure> {
    let refused = |message: String| Failure::new(FailureCode::IncompatibleVersions, message);
    if let Some(pinned) = pinned
        && let Err(unknown) = Edition::parse(pinned)
    {
        return Err(refused(format!("workflowEdition: {unknown}; this runner drives {:?}", rlmesh_proto::SUPPORTED_WORKFLOW_EDITIONS)));
    }
    let mut ours = SessionOffer::this_build(pinned);
    for theirs in env.offer_editions.iter().chain(&model.offer_editions) {
        let theirs = theirs.trim();
        if theirs.starts_with(COHORT) && !ours.editions.iter().any(|edition| edition == theirs) {
            ours.editions.push(theirs.to_owned());
        }
    }
    if pinned.is_none() {
        // What we can drive is no wish: without a pin the others decide.
        ours.preferred = None;
    }
    match rlmesh_proto::negotiate_session_floor(&env.offer(), &model.offer(), &ours) {
        Ok(floor) => Ok(floor.selected_workflow_edition),
        Err(refusal) => Err(refused(format!(
            "the environment (rlmesh {}) and the model (rlmesh {}) have no workflow edition in common that this runner drives: {refusal}; build both with the same rlmesh release",
            shown(&env.version),
            shown(&model.version)
        ))),
    }
}

fn shown(version: &str) -> &str {
    if version.is_empty() { "of unknown version" } else { version }
}

/// Whether several waiting predicts become one forward: only when the batched corner is what a single predict would use.
#[must_use]
pub fn fuses(corners: Option<&[String]>, horizon: u32) -> bool {
    // A server that lists no corners is given groups: served one after the other they still save round trips.
    let Some(corners) = corners else { return true };
    let has = |corner: &str| corners.iter().any(|known| known == corner);
    if horizon > 1 {
        if has("predict_chunk_batch") {
            return true;
        }
        if has("predict_chunk") {
            return false;
        }
    }
    has("predict_batch")
}

/// Refuses a horizon that the model would silently ignore or can't serve.
pub fn check_horizon(corners: Option<&[String]>, native_chunk: Option<u32>, horizon: u32) -> Result<(), Failure> {
    if horizon <= 1 {
        return Ok(());
    }
    if let Some(corners) = corners
        && !corners.iter().any(|corner| corner == "predict_chunk" || corner == "predict_chunk_batch")
    {
        return Err(Failure::new(
            FailureCode::Unsupported,
            format!(
                "executionHorizon is {horizon}, but the model defines neither predict_chunk nor predict_chunk_batch, so it would predict every step; set executionHorizon to 1"
            ),
        ));
    }
    match native_chunk {
        Some(native) if horizon > native => Err(Failure::new(
            FailureCode::Unsupported,
            format!(
                "executionHorizon is {horizon}, but one predict of the model answers {native} actions; set executionHorizon to {native} or less"
            ),
        )),
        Some(_) | None => Ok(()),
    }
}

/// How an environment server's lanes are driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drive {
    /// One environment, requests name no lane.
    Whole,
    /// Lanes are reset and stepped on their own.
    Lanes(u32),
    /// A vector in lockstep: it has to be served anew with one environment per process.
    Lockstep,
}

/// How to drive a server with this contract, or why its rows can't be run with their seeds.
pub fn drive(contract: &EnvContract, peer: &PeerFacts) -> Result<Drive, Failure> {
    let unsupported = |message: &str| Failure::new(FailureCode::Unsupported, message);
    let lanes = contract.num_envs.max(1);
    if lanes > 1 && !peer.has(capabilities::ENV_SUBSET_STEP) {
        return Ok(Drive::Lockstep);
    }
    match AutoresetMode::try_from(contract.autoreset_mode) {
        Ok(AutoresetMode::Disabled | AutoresetMode::Unspecified) => {}
        Ok(AutoresetMode::NextStep) => {
            return Err(unsupported(
                "the environment resets itself after an episode (NEXT_STEP), so the seed of a row can't reach it; serve a plain environment, not a vector one",
            ));
        }
        Ok(AutoresetMode::SameStep) => {
            return Err(unsupported(
                "the environment resets itself within the last step (SAME_STEP), which hides the last observation; serve a plain environment, not a vector one",
            ));
        }
        Err(_) => return Err(unsupported("the environment has an autoreset mode that this runner does not know")),
    }
    Ok(if lanes > 1 { Drive::Lanes(lanes) } else { Drive::Whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(editions: &[&str], preferred: Option<&str>) -> PeerFacts {
        PeerFacts {
            offer_editions: editions.iter().map(|edition| (*edition).to_owned()).collect(),
            offer_preferred: preferred.map(str::to_owned),
            ..PeerFacts::default()
        }
    }

    #[test]
    fn the_highest_common_edition_is_chosen() {
        let sealed = peer(&["2026.06"], Some("2026.06"));
        let candidate = peer(&["2026.06-0.1.0-rc.5"], None);
        assert_eq!(edition(&sealed, &sealed, None).unwrap(), "2026.06");
        assert_eq!(edition(&candidate, &candidate, None).unwrap(), "2026.06-0.1.0-rc.5");
        assert_eq!(edition(&sealed, &sealed, Some("2026.06")).unwrap(), "2026.06");
        let refused = edition(&sealed, &candidate, None).unwrap_err();
        assert_eq!(refused.code, FailureCode::IncompatibleVersions);
        assert_eq!(edition(&sealed, &sealed, Some("1999.01")).unwrap_err().code, FailureCode::IncompatibleVersions);
        let development = peer(&["2026.06-dev.abc"], None);
        assert!(edition(&development, &development, None).is_err());
    }

    #[test]
    fn predicts_fuse_only_where_the_batched_corner_is_the_direct_one() {
        let corners = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for (names, at_one, at_four) in [
            (&["predict"][..], false, false),
            (&["predict_batch"], true, true),
            (&["predict_chunk"], false, false),
            (&["predict_chunk_batch"], false, true),
            (&["predict_chunk", "predict_batch"], true, false),
        ] {
            assert_eq!(fuses(Some(&corners(names)), 1), at_one, "{names:?}");
            assert_eq!(fuses(Some(&corners(names)), 4), at_four, "{names:?}");
        }
        assert!(fuses(None, 1));
    }

    #[test]
    fn horizons_beyond_the_model_are_refused() {
        let plain = vec!["predict".to_owned()];
        let chunked = vec!["predict_chunk".to_owned()];
        assert!(check_horizon(Some(&plain), None, 1).is_ok());
        assert!(check_horizon(Some(&plain), None, 2).is_err());
        assert!(check_horizon(Some(&chunked), Some(8), 8).is_ok());
        assert!(check_horizon(Some(&chunked), Some(8), 9).is_err());
        assert!(check_horizon(None, None, 9).is_ok());
    }

    #[test]
    fn seeded_vectors_are_refused() {
        let mut contract = EnvContract { num_envs: 1, autoreset_mode: AutoresetMode::Disabled.into(), ..EnvContract::default() };
        let mut lanes = PeerFacts::default();
        assert_eq!(drive(&contract, &lanes).unwrap(), Drive::Whole);
        contract.num_envs = 4;
        assert_eq!(drive(&contract, &lanes).unwrap(), Drive::Lockstep);
        lanes.capabilities.insert(capabilities::ENV_SUBSET_STEP.to_owned(), "true".to_owned());
        assert_eq!(drive(&contract, &lanes).unwrap(), Drive::Lanes(4));
        contract.autoreset_mode = AutoresetMode::NextStep.into();
        assert_eq!(drive(&contract, &lanes).unwrap_err().code, FailureCode::Unsupported);
    }

    #[test]
    fn the_handshake_is_read() {
        let mut extra = HashMap::new();
        extra.insert(DESCRIBE.to_owned(), r#"{"corners":["predict_batch"]}"#.to_owned());
        extra.insert("rlmesh.startup.imports_ms".to_owned(), "612.4".to_owned());
        let response = HandshakeResponse {
            peer_info: Some(PeerInfo { extra, package_version: "0.1.0".to_owned(), ..PeerInfo::default() }),
            ..HandshakeResponse::default()
        };
        let facts = PeerFacts::read(&response);
        assert_eq!(facts.corners().unwrap(), ["predict_batch"]);
        assert_eq!(facts.startup_ms["imports"], 612);
        assert_eq!(facts.describe_sha256.unwrap().len(), 64);
    }
}

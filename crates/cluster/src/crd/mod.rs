//! The custom resources of `rlmesh.dev/v1beta1`: what agent and controller say to each other through the Kubernetes API.
//!
//! Types and their schemas alone. Rows, results and secret values never stand in a custom resource.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde::{Deserialize, Serialize};

pub mod cache;
pub mod run;

/// API group of every custom resource and prefix of every label.
pub const GROUP: &str = "rlmesh.dev";

/// What the API server has for a moment: RFC 3339, UTC, whole seconds.
pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// One aspect of an object's state, as `kubectl wait --for=condition=...` reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// type of the condition, in CamelCase.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub type_: String,
    pub status: ConditionStatus,
    /// reason is one CamelCase word from a closed set.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub reason: String,
    /// message says what happened, to what, and what to do next.
    #[schemars(length(max = 4096))]
    pub message: String,
    /// lastTransitionTime is when `status` changed last.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub last_transition_time: Time,
    /// observedGeneration is the `metadata.generation` that this was decided from.
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// Text for a `message`: the API server refuses longer ones, and etcd is no place for logs.
#[must_use]
pub fn message(text: &str) -> String {
    const LONGEST: usize = 1024;
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// The definitions to install, with the names of their files in the chart.
#[must_use]
pub fn definitions() -> [(&'static str, CustomResourceDefinition); 2] {
    [("rlmeshruns.yaml", run::RLMeshRun::crd()), ("rlmeshcaches.yaml", cache::RLMeshCache::crd())]
}

/// A definition as the chart holds it.
pub fn yaml(definition: &CustomResourceDefinition) -> anyhow::Result<String> {
    let mut value = serde_json::to_value(definition)?;
    without_rust_formats(&mut value);
    Ok(serde_yaml_ng::to_string(&value)?)
}

/// Schemas say `uint32` and the like, which the API server knows nothing of and warns about.
fn without_rust_formats(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(map) => {
            map.retain(|key, value| key != "format" || !value.as_str().is_some_and(|format| format.starts_with("uint")));
            map.values_mut().for_each(without_rust_formats);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(without_rust_formats),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `UPDATE=1` writes them (`make generate`).
    #[test]
    fn the_charts_definitions_are_those_of_the_types() {
        let folder = std::path::PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../charts/rlmesh-runtime/crds");
        for (file, definition) in definitions() {
            let (path, generated) = (folder.join(file), yaml(&definition).unwrap());
            if std::env::var_os("UPDATE").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &generated).unwrap();
            }
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(found == generated, "{} is not what the types say; run make generate", path.display());
        }
    }

    #[test]
    fn messages_are_cut_between_characters() {
        assert_eq!(message("short"), "short");
        let cut = message(&"é".repeat(2000));
        assert!(cut.ends_with("...") && cut.chars().count() == 1027);
    }
}

//! The controller's configuration file: what the cluster's owner decides about pods. Read once, at start; unknown keys are
//! refused.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Toleration};
use serde::Deserialize;

/// The whole file (YAML or JSON).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Settings {
    /// Namespace of runs and their pods.
    pub namespace: String,
    /// `host:port` of the egress proxy, as a cluster IP: run pods have no DNS. None: pods are told of no proxy.
    #[serde(default)]
    pub egress_proxy: Option<String>,
    pub runner_image: String,
    /// Without any rights; the runner's token is its.
    #[serde(default = "default_service_account")]
    pub service_account: String,
    /// None: left to the cluster (OpenShift picks its own).
    #[serde(default)]
    pub pod_security: Option<PodSecurity>,
    /// Claim of the artifact cache.
    #[serde(default)]
    pub cache_claim: Option<String>,
    #[serde(default)]
    pub runs: Runs,
    /// Images that runs may use: whole names, or beginnings that end with `*`. Empty: all.
    #[serde(default)]
    pub allowed_images: Vec<String>,
    /// Secrets that runs may read: `name` or `name/key`. Empty: none.
    #[serde(default)]
    pub allowed_secrets: Vec<String>,
    /// Claims that runs may mount: `name` or `name/folder`. Empty: none.
    #[serde(default)]
    pub allowed_volumes: Vec<String>,
}

fn default_service_account() -> String {
    "default".to_owned()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodSecurity {
    pub run_as_user: i64,
    pub fs_group: i64,
}

/// Chart values `runs.*`.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Runs {
    pub node_selector: BTreeMap<String, String>,
    pub tolerations: Vec<Toleration>,
    pub affinity: Option<Affinity>,
    pub runtime_class_name: Option<String>,
    pub priority_class_name: Option<String>,
    pub image_pull_secrets: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

impl Settings {
    pub fn read(path: &std::path::Path) -> anyhow::Result<Self> {
        use anyhow::Context as _;
        let text = std::fs::read_to_string(path).with_context(|| format!("the configuration {} can't be read", path.display()))?;
        serde_yaml_ng::from_str(&text).with_context(|| format!("the configuration {} is not valid", path.display()))
    }

    #[must_use]
    pub fn allows_image(&self, image: &str) -> bool {
        self.allowed_images.is_empty()
            || self.allowed_images.iter().any(|allowed| match allowed.strip_suffix('*') {
                Some(start) => image.starts_with(start),
                None => image == allowed,
            })
    }

    #[must_use]
    pub fn allows_secret(&self, secret: &str, key: &str) -> bool {
        self.allowed_secrets.iter().any(|allowed| match allowed.split_once('/') {
            Some((name, only)) => name == secret && only == key,
            None => allowed == secret,
        })
    }

    #[must_use]
    pub fn allows_volume(&self, claim: &str, sub_path: &str) -> bool {
        self.allowed_volumes.iter().any(|allowed| match allowed.split_once('/') {
            Some((name, folder)) => {
                let folder = folder.trim_end_matches('/');
                name == claim && sub_path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
            None => allowed == claim,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(more: &str) -> Result<Settings, serde_yaml_ng::Error> {
        let start = "namespace: n\nrunnerImage: r/runner\n";
        serde_yaml_ng::from_str(&format!("{start}{more}"))
    }

    #[test]
    fn nothing_listed_allows_images_and_nothing_else() {
        let settings = settings("").unwrap();
        assert!(settings.allows_image("any") && !settings.allows_secret("s", "k") && !settings.allows_volume("c", ""));
    }

    #[test]
    fn lists_mean_what_they_say() {
        let settings =
            settings("allowedImages: [reg/a/*, 'b:1']\nallowedSecrets: [hf, db/user]\nallowedVolumes: [all, data/sets]").unwrap();
        for (image, allowed) in [("reg/a/x:1", true), ("reg/ax", false), ("b:1", true), ("b:12", false)] {
            assert_eq!(settings.allows_image(image), allowed, "{image}");
        }
        for (secret, key, allowed) in [("hf", "any", true), ("db", "user", true), ("db", "password", false), ("h", "f", false)] {
            assert_eq!(settings.allows_secret(secret, key), allowed, "{secret}/{key}");
        }
        for (claim, path, allowed) in [("all", "x", true), ("data", "sets/a", true), ("data", "setsx", false), ("data", "", false)] {
            assert_eq!(settings.allows_volume(claim, path), allowed, "{claim}/{path}");
        }
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(settings("allowedImage: [x]").unwrap_err().to_string().contains("allowedImage"));
    }
}

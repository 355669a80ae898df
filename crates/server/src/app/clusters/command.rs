//! The command that connects a cluster. Its shape is the specification's, word for word. Pure.

use crate::config::Config;

/// Where production is: what the chart's defaults say.
const API_HOST: &str = "api.rlmesh.dev";
const REGISTRY_HOST: &str = "registry.rlmesh.dev";

/// The command with this token in it. A cluster that was connected before keeps its values.
#[must_use]
pub fn install(config: &Config, token: &str, connected_before: bool) -> String {
    if !config.is_https() {
        return local(&config.public_url, token);
    }
    let version = env!("CARGO_PKG_VERSION");
    let chart = format!("oci://{}/rlmesh/charts/rlmesh-runtime", config.registry_host);
    let hosts = hosts(config);
    if connected_before {
        format!(
            "helm upgrade --install rlmesh {chart} \\\n  --version {version} -n rlmesh-system --create-namespace --reuse-values{hosts} --set joinToken={token}"
        )
    } else {
        format!("helm install rlmesh {chart} \\\n  --version {version} -n rlmesh-system --create-namespace{hosts} --set joinToken={token}")
    }
}

/// What differs from the chart's defaults.
fn hosts(config: &Config) -> String {
    let mut text = String::new();
    if config.public_authority() != API_HOST {
        text.push_str(&format!(" --set platform.apiHost={}", config.public_authority()));
    }
    if config.registry_host != REGISTRY_HOST {
        text.push_str(&format!(" --set platform.registryHost={}", config.registry_host));
    }
    text
}

/// A control plane without TLS answers on its own machine only, so what connects is an agent there. The token goes in by
/// standard input: arguments can be read by every user of the machine.
fn local(url: &str, token: &str) -> String {
    format!(
        "# This control plane answers on this machine only ({url}): a Kubernetes cluster can't reach it.\n\
         # `rlmesh up` connects its local cell by itself. Another local cell:\n\
         rlmesh-cluster-agent --executor process --server {url} --state rlmesh-agent --join-token-file /dev/stdin <<'TOKEN'\n{token}\nTOKEN"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str, registry: &str) -> Config {
        Config { public_url: url.to_owned(), registry_host: registry.to_owned(), ..Config::for_tests() }
    }

    #[test]
    fn the_command_is_the_specifications() {
        let expected = format!(
            "helm install rlmesh oci://registry.rlmesh.dev/rlmesh/charts/rlmesh-runtime \\\n  --version {} -n rlmesh-system --create-namespace --set joinToken=rlm_jt_x",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(install(&config("https://api.rlmesh.dev", "registry.rlmesh.dev"), "rlm_jt_x", false), expected);
    }

    #[test]
    fn a_known_cluster_keeps_its_values_and_other_hosts_are_named() {
        let command = install(&config("https://api.example:8443", "registry.example"), "rlm_jt_x", true);
        for part in [
            "helm upgrade --install rlmesh ",
            "--reuse-values",
            "--set platform.apiHost=api.example:8443",
            "--set platform.registryHost=registry.example",
        ] {
            assert!(command.contains(part), "{command}");
        }
    }

    #[test]
    fn locally_the_token_is_no_argument() {
        let command = install(&config("http://127.0.0.1:7474", "registry.example"), "rlm_jt_x", false);
        assert!(command.ends_with("<<'TOKEN'\nrlm_jt_x\nTOKEN"), "{command}");
        assert!(!command.contains("helm"));
    }
}

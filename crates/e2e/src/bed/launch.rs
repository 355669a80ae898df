//! The command line of each component. Pure: nothing is started here.

use super::Layout;
use super::component::Component;
use super::names::{API_PORT, DNS_SERVICE, ETCD, GATEWAY, GROUP, Node, POD_CIDR, SERVICE_CIDR};

/// Whose namespaces a process is started in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// This machine's.
    Machine,
    Gateway,
    Node(Node),
}

pub fn place(component: Component) -> Place {
    match component {
        Component::Gateway | Component::Gate => Place::Machine,
        // A node's network is its own, its mounts begin as a copy of the gateway's.
        Component::Etcd
        | Component::ApiServer
        | Component::ControllerManager
        | Component::Scheduler
        | Component::Registry
        | Component::Provisioner
        | Component::Holder(_) => Place::Gateway,
        Component::Containerd(node) | Component::Kubelet(node) | Component::KubeProxy(node) | Component::KubeRouter(node) => {
            Place::Node(node)
        }
    }
}

pub fn arguments(component: Component, bed: &Layout) -> Vec<String> {
    match component {
        // `unshare` becomes the shell, and that `sleep`: one process. Private first: nothing mounted in the bed reaches the machine.
        Component::Gateway => words("unshare --net --mount --propagation private -- /bin/sh -c", &[hold(bed, component)]),
        // Slave: a volume that the provisioner mounts at the gateway appears on the nodes, and nothing goes back.
        Component::Holder(_) => words("unshare --net --mount --propagation slave -- /bin/sh -c", &[hold(bed, component)]),
        Component::Gate => vec![
            bed.program.display().to_string(),
            "gate".to_owned(),
            bed.gate.to_string(),
            format!("/proc/{}/ns/net", bed.processes.find(Component::Gateway).map_or(0, |known| known.pid)),
        ],
        Component::Provisioner => {
            vec![bed.program.display().to_string(), "provision".to_owned(), bed.kubeconfig("inside"), bed.path("volumes")]
        }
        Component::Etcd => words(
            &bed.tool("etcd", "etcd"),
            &[
                format!("--data-dir={}", bed.path("etcd")),
                format!("--listen-client-urls={ETCD}"),
                format!("--advertise-client-urls={ETCD}"),
                "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
                "--unsafe-no-fsync".to_owned(),
                "--log-level=warn".to_owned(),
            ],
        ),
        Component::ApiServer => words(&bed.tool("kubernetes", "kube-apiserver"), &api_server(bed)),
        Component::ControllerManager => words(
            &bed.tool("kubernetes", "kube-controller-manager"),
            &[
                format!("--kubeconfig={}", bed.kubeconfig("controller-manager")),
                format!("--root-ca-file={}", bed.pki("cluster-ca.crt")),
                format!("--service-account-private-key-file={}", bed.pki("service-accounts.key")),
                "--use-service-account-credentials=true".to_owned(),
                "--leader-elect=false".to_owned(),
                // A lost node is noticed within seconds.
                "--node-monitor-period=1s".to_owned(),
                "--node-monitor-grace-period=8s".to_owned(),
            ],
        ),
        Component::Scheduler => words(
            &bed.tool("kubernetes", "kube-scheduler"),
            &[format!("--kubeconfig={}", bed.kubeconfig("scheduler")), "--leader-elect=false".to_owned()],
        ),
        Component::Registry => vec![bed.tool("registry", "registry"), "serve".to_owned(), bed.path("registry.yaml")],
        // Trusted too where containerd asks the registry past its `hosts.toml`: after a 404 it does, and says what that came to.
        Component::Containerd(node) => words(
            &format!("env SSL_CERT_FILE={} containerd --config", bed.pki("private-ca.crt")),
            &[bed.node_path(node, "containerd.toml")],
        ),
        Component::Kubelet(node) => words(
            &bed.tool("kubernetes", "kubelet"),
            &[
                format!("--config={}", bed.node_path(node, "kubelet.yaml")),
                format!("--kubeconfig={}", bed.kubeconfig(node.name())),
                format!("--hostname-override={}", node.name()),
                format!("--node-ip={}", node.address()),
                format!("--cert-dir={}", bed.node_path(node, "certificates")),
            ],
        ),
        Component::KubeProxy(node) => words(
            &bed.tool("kubernetes", "kube-proxy"),
            &[
                format!("--kubeconfig={}", bed.kubeconfig("proxy")),
                format!("--hostname-override={}", node.name()),
                "--proxy-mode=iptables".to_owned(),
                format!("--cluster-cidr={POD_CIDR}"),
                "--conntrack-max-per-core=0".to_owned(),
            ],
        ),
        Component::KubeRouter(node) => words(
            &bed.tool("kube-router", "kube-router"),
            &[
                format!("--kubeconfig={}", bed.kubeconfig("inside")),
                format!("--hostname-override={}", node.name()),
                "--run-firewall=true".to_owned(),
                "--run-router=false".to_owned(),
                "--run-service-proxy=false".to_owned(),
                format!("--service-cluster-ip-range={SERVICE_CIDR}"),
            ],
        ),
    }
}

fn api_server(bed: &Layout) -> Vec<String> {
    let mut flags = vec![
        format!("--advertise-address={GATEWAY}"),
        format!("--secure-port={API_PORT}"),
        format!("--etcd-servers={ETCD}"),
        format!("--service-cluster-ip-range={SERVICE_CIDR}"),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
        // No kube-proxy at the gateway: webhooks and aggregated APIs are reached at their pods.
        "--enable-aggregator-routing=true".to_owned(),
        // A pod leaves a lost node within seconds.
        "--default-not-ready-toleration-seconds=10".to_owned(),
        "--default-unreachable-toleration-seconds=10".to_owned(),
    ];
    let files = [
        ("client-ca-file", "cluster-ca.crt"),
        ("tls-cert-file", "apiserver.crt"),
        ("tls-private-key-file", "apiserver.key"),
        ("kubelet-certificate-authority", "cluster-ca.crt"),
        ("kubelet-client-certificate", "apiserver-kubelet.crt"),
        ("kubelet-client-key", "apiserver-kubelet.key"),
        ("service-account-key-file", "service-accounts.pub"),
        ("service-account-signing-key-file", "service-accounts.key"),
    ];
    flags.extend(files.iter().map(|(flag, file)| format!("--{flag}={}", bed.pki(file))));
    flags
}

/// Keeps namespaces; the marker says that they are there.
fn hold(bed: &Layout, component: Component) -> String {
    format!("mount --make-rshared / && touch '{}' && exec sleep infinity", bed.marker(component))
}

fn words(first: &str, rest: &[String]) -> Vec<String> {
    first.split(' ').map(ToOwned::to_owned).chain(rest.iter().cloned()).collect()
}

/// What kubelet is configured with.
pub fn kubelet(node: Node, bed: &Layout) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
cgroupDriver: cgroupfs
# Of its own: with a common one each kubelet would clear away the other's pods as orphans.
cgroupRoot: /{GROUP}/{name}
failSwapOn: false
failCgroupV1: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
tlsCertFile: {certificate}
tlsPrivateKeyFile: {key}
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: {ca}}}}}
authorization: {{mode: Webhook}}
clusterDNS: [{DNS_SERVICE}]
clusterDomain: cluster.local
resolvConf: {resolv}
nodeStatusUpdateFrequency: 2s
serializeImagePulls: false
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {{memory.available: 50Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%}}
",
        address = node.address(),
        name = node.name(),
        certificate = bed.pki(&format!("{}.crt", node.name())),
        key = bed.pki(&format!("{}.key", node.name())),
        ca = bed.pki("cluster-ca.crt"),
        resolv = bed.path("resolv.conf"),
    )
}

/// What containerd is configured with. Its places are the usual ones: each node has a `/run` and a `/var/lib` of its own.
pub fn containerd(node: Node, bed: &Layout) -> String {
    format!(
        r#"version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Without CAP_SYS_RESOURCE no sandbox could lower its score, and none would start.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{registries}"
"#,
        pause = super::names::PAUSE_IMAGE,
        cni = bed.node_path(node, "cni"),
        registries = bed.path("registries"),
    )
}

/// Addresses of pods, bridge and port mappings of a node.
pub fn cni(node: Node) -> serde_json::Value {
    serde_json::json!({
        "cniVersion": "1.0.0",
        "name": "bed",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipMasq": false,
                "ipam": {
                    "type": "host-local", "ranges": [[{"subnet": node.pod_cidr()}]], "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": "/var/lib/cni/networks",
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

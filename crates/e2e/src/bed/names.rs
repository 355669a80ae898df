//! What is called how, and which address is whose, inside the bed. Everything is fixed: the bed has a network of its own.

/// The gateway: kube-apiserver and, where a test starts one, the control plane.
pub const GATEWAY: &str = "10.77.0.1";
/// The registry has an address of its own, since both hosts serve port 443.
pub const REGISTRY: &str = "10.77.0.2";
/// Leads nowhere. Kubernetes wants a default route, and nothing answers there.
pub const NOWHERE: &str = "10.77.0.254";
pub const API_HOST: &str = "api.rlmesh.dev";
pub const REGISTRY_HOST: &str = "registry.rlmesh.dev";
pub const HOSTS: [(&str, &str); 2] = [(API_HOST, GATEWAY), (REGISTRY_HOST, REGISTRY)];

pub const POD_CIDR: &str = "10.244.0.0/16";
pub const SERVICE_CIDR: &str = "10.96.0.0/16";
pub const DNS_SERVICE: &str = "10.96.0.10";
pub const API_PORT: u16 = 6443;
pub const ETCD: &str = "http://127.0.0.1:2379";

/// The one user who may pull from and push to the registry.
pub const REGISTRY_USER: &str = "bed";
pub const REGISTRY_PASSWORD: &str = "bed-pulls";

/// Every process of the bed, containers included, is in this control group; nothing else is.
pub const GROUP: &str = "rlmesh-bed";

pub const PROVISIONER: &str = "bed.rlmesh.dev/volumes";
pub const RWO_CLASS: &str = "bed-rwo";
pub const RWX_CLASS: &str = "bed-rwx";

pub const PAUSE_IMAGE: &str = "registry.rlmesh.dev/bed/pause:1";
pub const COREDNS_IMAGE: &str = "registry.rlmesh.dev/bed/coredns:1";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Node {
    One,
    Two,
}

impl Node {
    pub const ALL: [Self; 2] = [Self::One, Self::Two];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::One => "node-1",
            Self::Two => "node-2",
        }
    }

    #[must_use]
    pub const fn address(self) -> &'static str {
        match self {
            Self::One => "10.77.0.11",
            Self::Two => "10.77.0.12",
        }
    }

    #[must_use]
    pub const fn pod_cidr(self) -> &'static str {
        match self {
            Self::One => "10.244.1.0/24",
            Self::Two => "10.244.2.0/24",
        }
    }

    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::One => Self::Two,
            Self::Two => Self::One,
        }
    }
}

//! What can go wrong, as functions. Each returns when it has happened, not when the cluster has noticed.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::{EvictParams, ListParams};
use rustix::process::Signal;

use super::names::{Node, REGISTRY_USER};
use super::{Bed, Component, Place, net};
use crate::wait_for;

/// How a link is made worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    Whole,
    /// Nothing passes.
    Cut,
    /// So many kilobits a second, in both directions.
    Slow {
        kilobits: u32,
    },
}

impl Bed {
    /// Kills a component (-9) and leaves it dead.
    pub async fn kill(&self, component: Component) -> anyhow::Result<()> {
        self.layout.processes.end(component, Signal::KILL).await
    }

    /// Kills it if it runs, and starts it.
    pub async fn restart(&self, component: Component) -> anyhow::Result<()> {
        self.kill(component).await?;
        self.start(component).map(drop)
    }

    /// Kills and starts the apiserver, and waits until it is ready.
    pub async fn restart_api_server(&self) -> anyhow::Result<()> {
        self.restart(Component::ApiServer).await?;
        self.api_ready().await
    }

    /// The node's kubelet is gone: its pods run on, the cluster hears nothing of them.
    pub async fn stop_node(&self, node: Node) -> anyhow::Result<()> {
        self.kill(Component::Kubelet(node)).await?;
        self.node_ready(node, false).await
    }

    /// Its kubelet is back, and the cluster knows.
    pub async fn start_node(&self, node: Node) -> anyhow::Result<()> {
        self.restart(Component::Kubelet(node)).await?;
        self.node_ready(node, true).await
    }

    /// The link between a node and everything else.
    pub async fn link(&self, node: Node, link: Link) -> anyhow::Result<()> {
        let port = net::port(node);
        let own = "tc qdisc del dev eth0 root 2>/dev/null || true";
        let (gateway, inside) = match link {
            Link::Whole => (format!("ip link set {port} up\ntc qdisc del dev {port} root 2>/dev/null || true"), own.to_owned()),
            Link::Cut => (format!("ip link set {port} down"), own.to_owned()),
            Link::Slow { kilobits } => {
                let slow = |port: &str| format!("tc qdisc replace dev {port} root tbf rate {kilobits}kbit burst 5kb latency 10s");
                (slow(port), slow("eth0"))
            }
        };
        self.shell(Place::Gateway, &gateway).await?;
        self.shell(Place::Node(node), &inside).await.map(drop)
    }

    /// Off: connections to it are refused.
    pub async fn registry_off(&self) -> anyhow::Result<()> {
        self.kill(Component::Registry).await
    }

    /// On again; nothing that was pushed is lost.
    pub async fn registry_on(&self) -> anyhow::Result<()> {
        self.restart(Component::Registry).await?;
        let registry = self.registry()?;
        wait_for("the registry", Duration::from_secs(20), async || {
            let asked = registry.http.get(format!("{}/v2/", registry.url)).timeout(Duration::from_secs(2)).send().await;
            Ok(asked.is_ok().then_some(()))
        })
        .await
    }

    /// Whether the registry answers 401 to credentials that were good.
    pub fn registry_refuses(&self, refuses: bool) -> anyhow::Result<()> {
        self.layout.htpasswd(if refuses { "nobody" } else { REGISTRY_USER })
    }

    /// No name resolves in a pod.
    pub async fn dns_off(&self) -> anyhow::Result<()> {
        self.scale_dns(0).await
    }

    /// Names resolve again.
    pub async fn dns_on(&self) -> anyhow::Result<()> {
        self.scale_dns(1).await
    }

    async fn scale_dns(&self, replicas: u32) -> anyhow::Result<()> {
        self.kubectl(&["scale", "--namespace=kube-system", "deployment/coredns", &format!("--replicas={replicas}")]).await?;
        self.kubectl(&["rollout", "status", "--namespace=kube-system", "deployment/coredns", "--timeout=50s"]).await?;
        let pods: Api<Pod> = Api::namespaced(self.client().await?, "kube-system");
        wait_for("the pods of CoreDNS", Duration::from_secs(50), async || {
            let found = pods.list(&ListParams::default().labels("k8s-app=kube-dns")).await?.items.len();
            Ok((found == replicas as usize).then_some(()))
        })
        .await
    }

    /// Writes the volume of a bound claim full, to the last byte.
    pub async fn fill(&self, namespace: &str, claim: &str) -> anyhow::Result<()> {
        let folder = self.volume(namespace, claim).await?;
        // `dd` ends with an error, which is what is wanted; the check is that nothing more can be written.
        let fill =
            format!("dd if=/dev/zero of='{folder}/.full' bs=64K 2>/dev/null && exit 1; ! (echo more > '{folder}/.more') 2>/dev/null");
        self.shell(Place::Gateway, &fill).await.map(drop)
    }

    /// Takes away what [`Bed::fill`] wrote.
    pub async fn free(&self, namespace: &str, claim: &str) -> anyhow::Result<()> {
        let folder = self.volume(namespace, claim).await?;
        self.shell(Place::Gateway, &format!("rm -f '{folder}/.full' '{folder}/.more'")).await.map(drop)
    }

    /// Folder of a bound claim's volume, as the gateway sees it.
    pub async fn volume(&self, namespace: &str, claim: &str) -> anyhow::Result<String> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client().await?, namespace);
        let found = claims.get(claim).await.with_context(|| format!("claim {claim}"))?;
        let volume = found.spec.and_then(|spec| spec.volume_name).with_context(|| format!("claim {claim} is not bound"))?;
        Ok(self.layout.path(&format!("volumes/{volume}")))
    }

    /// Evicts a pod by the API that drains use.
    pub async fn evict(&self, namespace: &str, pod: &str) -> anyhow::Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client().await?, namespace);
        pods.evict(pod, &EvictParams::default()).await.with_context(|| format!("pod {pod} can't be evicted"))?;
        Ok(())
    }

    /// The network enforces no policy any more, as one whose plugin never did.
    pub async fn policies_off(&self) -> anyhow::Result<()> {
        for node in Node::ALL {
            self.kill(Component::KubeRouter(node)).await?;
            // What lies below these is reached from nowhere else.
            self.shell(Place::Node(node), "for at in INPUT FORWARD OUTPUT; do iptables --wait --flush KUBE-ROUTER-$at; done").await?;
        }
        Ok(())
    }

    /// It does again, soon.
    pub async fn policies_on(&self) -> anyhow::Result<()> {
        for node in Node::ALL {
            self.restart(Component::KubeRouter(node)).await?;
        }
        Ok(())
    }
}

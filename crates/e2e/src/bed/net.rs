//! The bed's network and mounts, as shell scripts that are run inside the namespaces they set up.

use super::Layout;
use super::names::{GATEWAY, NOWHERE, Node, REGISTRY};

/// Gateway: a bridge, and a way out that leads nowhere.
pub fn gateway(bed: &Layout) -> String {
    format!(
        "ip link set lo up
ip link add bed0 type bridge
ip addr add {GATEWAY}/24 dev bed0
ip addr add {REGISTRY}/24 dev bed0
ip link set bed0 up
ip route add default via {NOWHERE} dev bed0
echo 1 > /proc/sys/net/ipv4/ip_forward
mount --bind '{hosts}' /etc/hosts
mount --bind '{resolv}' /etc/resolv.conf
",
        hosts = bed.path("hosts"),
        resolv = bed.path("resolv.conf"),
    )
}

/// The link of the gateway to a node's namespace, which is that of process `holder`.
pub fn link(node: Node, holder: u32) -> String {
    let port = port(node);
    format!(
        "ip link add {port} type veth peer name eth0 netns {holder}
ip link set {port} master bed0 up
ip route add {} via {} dev bed0
",
        node.pod_cidr(),
        node.address(),
    )
}

/// The gateway's end of a node's link.
#[must_use]
pub const fn port(node: Node) -> &'static str {
    match node {
        Node::One => "to-node-1",
        Node::Two => "to-node-2",
    }
}

/// A node: its address, the way to the other's pods, and folders of its own in the usual places.
pub fn node(node: Node, bed: &Layout) -> String {
    format!(
        "ip link set lo up
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {GATEWAY} dev eth0
ip route add {other_pods} via {other} dev eth0
echo 1 > /proc/sys/net/ipv4/ip_forward
if [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ]; then echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables; fi
mount --bind '{lib}' /var/lib
mount --bind '{log}' /var/log
mount -t tmpfs bed-run /run
mkdir -p /run/lock
",
        address = node.address(),
        other_pods = node.other().pod_cidr(),
        other = node.other().address(),
        lib = bed.node_path(node, "lib"),
        log = bed.node_path(node, "log"),
    )
}

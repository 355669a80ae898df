//! Volumes for claims of the bed's two storage classes. A volume is a file system of exactly the size that was asked for, in
//! memory, owned by root and seen by both nodes: what runs as another user needs fsGroup, and a full one is full.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use super::names::{Node, PROVISIONER, RWO_CLASS, RWX_CLASS};
use super::run;

const PAUSE: Duration = Duration::from_millis(300);
const MOUNT: Duration = Duration::from_secs(10);

/// Serves for ever, inside the gateway's namespaces.
pub async fn serve(kubeconfig: &Path, volumes: &Path) -> anyhow::Result<()> {
    let client = super::client(kubeconfig).await?;
    loop {
        // The next look sees all that this one left undone.
        if let Err(error) = look(&client, volumes).await {
            eprintln!("{error:#}");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn look(client: &Client, volumes: &Path) -> anyhow::Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let made: Api<PersistentVolume> = Api::all(client.clone());
    for claim in claims.list(&ListParams::default()).await? {
        let Some(wanted) = wanted(&claim) else { continue };
        if made.get_opt(&wanted.name).await?.is_none() {
            let place = volumes.join(&wanted.name);
            std::fs::create_dir_all(&place)?;
            mount(&place, wanted.bytes).await?;
            made.create(&PostParams::default(), &volume(&wanted, &place)?).await.with_context(|| format!("volume {}", wanted.name))?;
        }
    }
    for volume in made.list(&ListParams::default()).await? {
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        if let (Some("Released"), Some(name)) = (phase, volume.metadata.name.as_deref().filter(|name| name.starts_with("bed-"))) {
            let place = volumes.join(name);
            if is_mounted(&place)? {
                run(tokio::process::Command::new("umount").arg("--lazy").arg(&place), MOUNT).await?;
            }
            made.delete(name, &DeleteParams::default()).await?;
            std::fs::remove_dir(&place)?;
        }
    }
    Ok(())
}

struct Wanted {
    name: String,
    claim: serde_json::Value,
    class: &'static str,
    modes: Vec<String>,
    size: String,
    bytes: u64,
}

/// What a claim asks of this provisioner now. None: nothing, or not before a pod uses it.
fn wanted(claim: &PersistentVolumeClaim) -> Option<Wanted> {
    let (meta, spec) = (&claim.metadata, claim.spec.as_ref()?);
    let class = [RWO_CLASS, RWX_CLASS].into_iter().find(|class| spec.storage_class_name.as_deref() == Some(class))?;
    let pending = claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Pending");
    let scheduled = meta.annotations.as_ref().is_some_and(|all| all.contains_key("volume.kubernetes.io/selected-node"));
    if !pending || !scheduled || meta.deletion_timestamp.is_some() {
        return None;
    }
    let size = spec.resources.as_ref()?.requests.as_ref()?.get("storage")?.0.clone();
    Some(Wanted {
        name: format!("bed-{}", meta.uid.as_ref()?),
        claim: json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "namespace": meta.namespace, "name": meta.name, "uid": meta.uid,
        }),
        class,
        modes: spec.access_modes.clone()?,
        bytes: bytes(&size)?,
        size,
    })
}

/// Of a quantity, with the suffixes that claims have.
fn bytes(quantity: &str) -> Option<u64> {
    let digits = quantity.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit: u64 = match &quantity[digits.len()..] {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn volume(wanted: &Wanted, place: &Path) -> anyhow::Result<PersistentVolume> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": wanted.name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "capacity": {"storage": wanted.size},
            "accessModes": wanted.modes,
            "storageClassName": wanted.class,
            "persistentVolumeReclaimPolicy": "Delete",
            "claimRef": wanted.claim,
            // Not hostPath: of that kind kubelet ignores fsGroup.
            "local": {"path": place},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{
                "key": "kubernetes.io/hostname", "operator": "In", "values": Node::ALL.map(Node::name),
            }]}]}},
        },
    }))?)
}

/// Once: a volume whose object could not be written is there already at the next look.
async fn mount(place: &Path, bytes: u64) -> anyhow::Result<()> {
    if is_mounted(place)? {
        return Ok(());
    }
    let options = format!("size={bytes},mode=0755,uid=0,gid=0");
    run(tokio::process::Command::new("mount").args(["-t", "tmpfs", "-o", &options, "bed-volume"]).arg(place), MOUNT).await.map(drop)
}

fn is_mounted(place: &Path) -> anyhow::Result<bool> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let place = place.display().to_string();
    Ok(mounts.lines().any(|line| line.split(' ').nth(4) == Some(place.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_claims_are_bytes() {
        let all =
            [("1Gi", Some(1 << 30)), ("64Mi", Some(64 << 20)), ("5", Some(5)), ("2G", Some(2_000_000_000)), ("1Pi", None), ("x", None)];
        for (text, expected) in all {
            assert_eq!(bytes(text), expected, "{text}");
        }
    }
}

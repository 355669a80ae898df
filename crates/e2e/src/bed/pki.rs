//! The bed's certificates: one authority for the cluster, one for the hosts outside it. Made anew for each bed.

use std::path::Path;

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd,
};

use super::names::{API_HOST, GATEWAY, Node, REGISTRY, REGISTRY_HOST};

type Authority = CertifiedIssuer<'static, KeyPair>;

/// Writes every key and certificate into `folder`: `<name>.crt`, `<name>.key`.
pub fn make(folder: &Path) -> anyhow::Result<()> {
    let cluster = authority(folder, "cluster-ca")?;
    let outside = authority(folder, "private-ca")?;
    let client = |file: &str, name: &str, group: Option<&str>| issue(folder, &cluster, file, name, group, &[]);

    let api = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "10.96.0.1", GATEWAY];
    issue(folder, &cluster, "apiserver", "kube-apiserver", None, &api)?;
    client("apiserver-kubelet", "kube-apiserver-kubelet-client", Some("system:masters"))?;
    client("admin", "bed-admin", Some("system:masters"))?;
    client("controller-manager", "system:kube-controller-manager", None)?;
    client("scheduler", "system:kube-scheduler", None)?;
    client("proxy", "system:kube-proxy", None)?;
    for node in Node::ALL {
        let name = format!("system:node:{}", node.name());
        issue(folder, &cluster, node.name(), &name, Some("system:nodes"), &[node.name(), node.address()])?;
    }
    issue(folder, &outside, "registry", REGISTRY_HOST, None, &[REGISTRY_HOST, REGISTRY])?;
    issue(folder, &outside, "api", API_HOST, None, &[API_HOST, GATEWAY])?;

    let accounts = KeyPair::generate()?;
    write(folder, "service-accounts.key", &accounts.serialize_pem())?;
    write(folder, "service-accounts.pub", &accounts.public_key_pem())
}

fn authority(folder: &Path, name: &str) -> anyhow::Result<Authority> {
    let mut parameters = parameters(name, None, &[])?;
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    let made = CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)?;
    write(folder, &format!("{name}.crt"), &made.pem())?;
    write(folder, &format!("{name}.key"), &made.key().serialize_pem())?;
    Ok(made)
}

fn issue(folder: &Path, by: &Authority, file: &str, name: &str, group: Option<&str>, hosts: &[&str]) -> anyhow::Result<()> {
    let mut parameters = parameters(name, group, hosts)?;
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if !hosts.is_empty() {
        parameters.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    let key = KeyPair::generate()?;
    let certificate = parameters.signed_by(&key, by)?;
    write(folder, &format!("{file}.crt"), &certificate.pem())?;
    write(folder, &format!("{file}.key"), &key.serialize_pem())
}

fn parameters(name: &str, group: Option<&str>, hosts: &[&str]) -> anyhow::Result<CertificateParams> {
    let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
    let mut parameters = CertificateParams::new(hosts)?;
    parameters.distinguished_name.remove(DnType::CommonName);
    parameters.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        parameters.distinguished_name.push(DnType::OrganizationName, group);
    }
    // A bed lives for hours; its clocks may be put forward or back by a test.
    parameters.not_before = date_time_ymd(2020, 1, 1);
    parameters.not_after = date_time_ymd(2099, 1, 1);
    Ok(parameters)
}

fn write(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| format!("{} can't be written", path.display()))
}

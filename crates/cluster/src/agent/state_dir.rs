//! The agent's state folder: who it is to the control plane. Files of mode 0600 in a folder of mode 0700, replaced whole.
//!
//! One agent per folder, by a lock that goes with the process. No other module writes here except the spool and the logs.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rlm_core::tokens::Secret;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const CREDENTIALS: &str = "credentials.json";
const JOIN: &str = "join.json";
const RUNNER_CERTIFICATE: &str = "runner-certificate.json";

/// The folder, locked.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    _lock: File,
}

/// A join that is under way: kept from before the first try until its answer is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Join {
    pub nonce: String,
    pub token_sha256: String,
}

/// What the control plane gave this cluster.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Credentials {
    pub cluster_id: String,
    pub credentials: Vec<StoredCredential>,
    #[serde(default)]
    pub docker_config_json: String,
    /// SHA-256 of the join token that these came for.
    #[serde(default)]
    pub token_sha256: String,
}

/// One credential as it is stored. The file is its only readable form: there is no `Debug`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredCredential {
    pub purpose: String,
    pub id: String,
    pub secret: String,
}

impl Credentials {
    /// The credential of the session.
    pub fn control(&self) -> anyhow::Result<Secret> {
        let stored =
            self.credentials.iter().find(|credential| credential.purpose == "control").context("there is no control credential")?;
        Secret::parse(&stored.secret).context("the control credential is not one")
    }
}

impl StateDir {
    /// Opens the folder, making it when it does not exist.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("the state folder {} can't be made", path.display()))?;
        let path = path.canonicalize().with_context(|| format!("the state folder {} can't be read", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("the state folder {} can't be closed to others", path.display()))?;
        let lock_path = path.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .with_context(|| format!("{} can't be opened", lock_path.display()))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another agent uses the state folder {}; stop it, or use another folder", path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the credentials are, for whoever watches the file.
    #[must_use]
    pub fn credentials_path(&self) -> PathBuf {
        self.path.join(CREDENTIALS)
    }

    pub fn credentials(&self) -> anyhow::Result<Option<Credentials>> {
        read_json(&self.credentials_path())
    }

    pub fn store_credentials(&self, credentials: &Credentials) -> anyhow::Result<()> {
        self.write(CREDENTIALS, &serde_json::to_vec_pretty(credentials)?)
    }

    /// The nonce for this token: the one that is kept, or a new one, kept before it is returned.
    pub fn join_for(&self, token: &Secret) -> anyhow::Result<Join> {
        let token_sha256 = token.hash();
        // One that can't be read belongs to no token.
        let kept: Option<Join> = read_json(&self.path.join(JOIN)).unwrap_or_default();
        if let Some(kept) = kept.filter(|kept| kept.token_sha256 == token_sha256) {
            return Ok(kept);
        }
        let join = Join { nonce: hex::encode(rand::random::<[u8; 32]>()), token_sha256 };
        self.write(JOIN, &serde_json::to_vec(&join)?)?;
        Ok(join)
    }

    /// Replaces a file as a whole: temporary file, fsync, rename, fsync of the folder.
    fn write(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let target = self.path.join(name);
        let temporary = self.path.join(format!(".{name}.new"));
        let replace = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
            file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
            file.write_all(bytes)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &target)?;
            File::open(&self.path)?.sync_all()
        };
        replace().with_context(|| format!("{} can't be written", target.display()))
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).with_context(|| format!("{} is damaged", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("{} can't be read", path.display())),
    }
}

/// The certificate that runners' pods know the agent by. Made once: pods that run have its digest in their specification.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunnerCertificate {
    /// PEM.
    pub certificate: String,
    /// PEM.
    pub key: String,
    /// Of the certificate as DER.
    pub sha256: String,
}

impl StateDir {
    /// The one that is kept, or a new one, kept before it is returned.
    pub fn runner_certificate(&self) -> anyhow::Result<RunnerCertificate> {
        if let Some(kept) = read_json(&self.path.join(RUNNER_CERTIFICATE))? {
            return Ok(kept);
        }
        let made = rcgen::generate_simple_self_signed([crate::discovery::AGENT.to_owned()])
            .context("a certificate for the runners' port can't be made")?;
        let made = RunnerCertificate {
            certificate: made.cert.pem(),
            key: made.signing_key.serialize_pem(),
            sha256: hex::encode(Sha256::digest(made.cert.der())),
        };
        self.write(RUNNER_CERTIFICATE, &serde_json::to_vec(&made)?)?;
        Ok(made)
    }
}

/// Reads the credentials file for whoever watches it; its digest tells one content from another. A file with a control
/// credential alone, as a cluster's Secret has it, is one too.
pub fn read_credentials(path: &Path) -> anyhow::Result<Option<([u8; 32], Credentials)>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("{} can't be read", path.display())),
    };
    if let Some(secret) = std::str::from_utf8(&bytes).ok().map(str::trim).filter(|text| text.starts_with("rlm_cc_")) {
        let control = StoredCredential { purpose: "control".to_owned(), id: String::new(), secret: secret.to_owned() };
        let credentials = Credentials {
            cluster_id: String::new(),
            credentials: vec![control],
            docker_config_json: String::new(),
            token_sha256: String::new(),
        };
        return Ok(Some((Sha256::digest(&bytes).into(), credentials)));
    }
    let credentials = serde_json::from_slice(&bytes).with_context(|| format!("{} is damaged", path.display()))?;
    Ok(Some((Sha256::digest(&bytes).into(), credentials)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlm_core::tokens::SecretKind;

    #[test]
    fn the_nonce_is_kept_per_token_and_files_are_private() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state");
        let (first, second) = (Secret::generate(SecretKind::JoinToken), Secret::generate(SecretKind::JoinToken));
        let join = {
            let state = StateDir::open(&path).unwrap();
            assert!(StateDir::open(&path).unwrap_err().to_string().contains("another agent"));
            state.join_for(&first).unwrap()
        };
        let state = StateDir::open(&path).unwrap();
        assert_eq!(state.join_for(&first).unwrap(), join);
        assert_ne!(state.join_for(&second).unwrap().nonce, join.nonce);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join(JOIN))), (0o700, 0o600));
        assert!(!std::fs::read_to_string(path.join(JOIN)).unwrap().contains(first.expose()));
    }

    #[test]
    fn credentials_read_back() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDir::open(root.path()).unwrap();
        assert!(state.credentials().unwrap().is_none());
        let secret = Secret::generate(SecretKind::ControlCredential);
        let stored = StoredCredential { purpose: "control".to_owned(), id: "cred_x".to_owned(), secret: secret.expose().to_owned() };
        let credentials = Credentials {
            cluster_id: "cl_x".to_owned(),
            credentials: vec![stored],
            docker_config_json: String::new(),
            token_sha256: "t".to_owned(),
        };
        state.store_credentials(&credentials).unwrap();
        assert!(state.credentials().unwrap().unwrap().control().unwrap() == secret);
        std::fs::write(state.credentials_path(), "{").unwrap();
        assert!(state.credentials().err().unwrap().to_string().contains("is damaged"));
    }
}

//! Identity: accounts, sign-in, tokens, keys, organizations. Holds the server's keys; nothing here ever logs a secret.

pub mod accounts;
pub mod api_keys;
pub mod authenticate;
pub mod browser;
pub mod device;

pub mod limits;
pub mod organizations;

pub mod passwords;
pub mod tokens;

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::state::AppState;
use crate::store::sessions;
use limits::Limits;
use tokens::AccessTokens;

/// The server's keys and what they make. The keys lie in files outside the database.
pub struct Identity {
    server_key: [u8; 32],
    pub(crate) access_tokens: AccessTokens,
    pub(crate) limits: Limits,
}

impl Identity {
    /// Reads the keys in `state_dir`, and makes those that are missing.
    pub fn open(state_dir: &Path) -> anyhow::Result<Self> {
        let server_key = read_or_make_key(&state_dir.join("server.key"))?;
        let signing_key = read_or_make_key(&state_dir.join("tokens.key"))?;
        Ok(Self { server_key, access_tokens: AccessTokens::new(&signing_key)?, limits: Limits::default() })
    }

    /// What cluster credentials and refresh tokens are derived from.
    #[must_use]
    pub const fn server_key(&self) -> &[u8; 32] {
        &self.server_key
    }
}

/// Removes expired sign-ins, every ten minutes until `stop`.
pub async fn sweep(state: AppState, stop: CancellationToken) {
    const KEPT_MS: i64 = 24 * 3_600_000;
    loop {
        let before = state.clock.now_ms() - KEPT_MS;
        let swept = async {
            let mut write = state.store.write().await?;
            sessions::sweep(&mut write, before).await?;
            write.commit().await
        };
        if let Err(error) = swept.await {
            tracing::warn!(%error, "expired sign-ins could not be removed; trying again later");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(Duration::from_secs(600)) => {}
        }
    }
}

/// 32 bytes in hex, in a file that only its owner may read.
fn read_or_make_key(path: &Path) -> anyhow::Result<[u8; 32]> {
    if !path.exists() {
        let text = format!("{}\n", hex::encode(rand::random::<[u8; 32]>()));
        write_private(path, text.as_bytes()).with_context(|| format!("could not make the key file {}", path.display()))?;
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("could not read the key file {}", path.display()))?;
    check_private(path)?;
    let mut key = [0; 32];
    hex::decode_to_slice(text.trim(), &mut key)
        .ok()
        .with_context(|| format!("the key file {} does not hold 32 bytes in hex; restore it from a backup", path.display()))?;
    Ok(key)
}

/// Refuses a key that others can read.
fn check_private(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = std::fs::metadata(path)?.permissions().mode() & 0o777;
    anyhow::ensure!(mode & 0o077 == 0, "{} can be read by others (mode {mode:o}); run: chmod 600 {}", path.display(), path.display());
    Ok(())
}

/// Writes a new file of mode 0600, complete and on disk before it has its name. Fails when the file exists.
pub fn write_private(path: &Path, content: &[u8]) -> std::io::Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let unfinished = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    file.write_all(content)?;
    file.sync_all()?;
    // A link, unlike a rename, leaves an existing file alone.
    let linked = std::fs::hard_link(&unfinished, path);
    std::fs::remove_file(&unfinished)?;
    match linked {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if let Some(parent) = path.parent() {
        std::fs::File::open(parent)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_once_private_and_kept() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let first = Identity::open(dir.path()).unwrap();
        let second = Identity::open(dir.path()).unwrap();
        assert_eq!(first.server_key(), second.server_key());
        let path = dir.path().join("server.key");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left over");

        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Identity::open(dir.path()).err().unwrap().to_string().contains("chmod 600"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "abc").unwrap();
        assert!(Identity::open(dir.path()).err().unwrap().to_string().contains("32 bytes"));
    }
}

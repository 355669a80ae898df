//! Profiles and credentials, in the files that the SDK's own `rlmesh` reads and writes: who has both signs in once.
//!
//! `config.toml` and `credentials.json` are written by temporary file and rename, mode 0600; a refresh happens under the
//! SDK's lock file `<profile>.lock`. A session that the SDK put into an operating-system keychain is not read: sign in with
//! `RLMESH_KEYCHAIN=0` to share one.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::error::CliError;

/// The platform of an installation that names none.
pub const DEFAULT_PLATFORM: &str = "https://api.rlmesh.dev";
/// A lock older than this was left by a process that died.
const STALE_LOCK: Duration = Duration::from_secs(60);

/// What the user said about which platform to talk to.
#[derive(Debug, Clone, Default)]
pub struct Target {
    pub profile: Option<String>,
    pub platform: Option<String>,
    /// State folder of a local `rlmesh up`.
    pub state: Option<PathBuf>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ConfigFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_profile: Option<String>,
    #[serde(default)]
    pub profiles: BTreeMap<String, ProfileEntry>,
    #[serde(flatten)]
    pub rest: toml::Table,
}

#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct ProfileEntry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform_url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry_host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    #[serde(flatten)]
    pub rest: toml::Table,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub user_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub email: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub organization_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub organization_name: Option<String>,
}

/// A signed-in session. Not printable.
#[derive(Clone, Serialize, Deserialize)]
pub struct Session {
    pub access_token: String,
    pub refresh_token: String,
}

/// What `rlmesh up` leaves in its state folder for commands with `--state`.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalEndpoint {
    pub url: String,
    pub api_key: String,
}

fn home(variable: &str, fallback: &str) -> Result<PathBuf, CliError> {
    if let Some(dir) = std::env::var_os(variable).filter(|dir| !dir.is_empty()) {
        return Ok(PathBuf::from(dir));
    }
    std::env::home_dir()
        .map(|home| home.join(fallback))
        .ok_or_else(|| CliError::other(format!("there is no home folder; set {variable} to a folder for rlmesh's files")))
}

fn config_dir() -> Result<PathBuf, CliError> {
    home("RLMESH_CONFIG_DIR", ".config/rlmesh")
}

fn data_dir() -> Result<PathBuf, CliError> {
    home("RLMESH_DATA_DIR", ".local/share/rlmesh")
}

/// The default state folder of `rlmesh up`.
pub fn default_state() -> Result<PathBuf, CliError> {
    Ok(data_dir()?.join("local"))
}

/// Reads `config.toml`; missing is empty.
pub fn load() -> Result<ConfigFile, CliError> {
    let path = config_dir()?.join("config.toml");
    match fs::read_to_string(&path) {
        Ok(text) => toml::from_str(&text).map_err(|error| CliError::other(format!("{} can't be read: {error}", path.display()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(ConfigFile::default()),
        Err(error) => Err(CliError::other(format!("{} can't be read: {error}", path.display()))),
    }
}

/// Changes `config.toml`.
pub fn update(change: impl FnOnce(&mut ConfigFile)) -> Result<(), CliError> {
    let mut config = load()?;
    change(&mut config);
    let text = toml::to_string(&config).map_err(|error| CliError::other(format!("the configuration can't be written: {error}")))?;
    write_private(&config_dir()?.join("config.toml"), text.as_bytes())
}

/// The profile that commands use.
pub fn profile_name(target: &Target, config: &ConfigFile) -> String {
    target.profile.clone().or_else(|| config.default_profile.clone()).unwrap_or_else(|| "default".to_owned())
}

/// The platform's address for this target. A named profile does not inherit the default's address.
pub fn platform(target: &Target, config: &ConfigFile) -> String {
    let named = config.profiles.get(&profile_name(target, config)).and_then(|profile| profile.platform_url.clone());
    let url = target.platform.clone().or(named).unwrap_or_else(|| DEFAULT_PLATFORM.to_owned());
    url.trim_end_matches('/').to_owned()
}

/// Where a local server of `--state` answers, with its key.
pub fn local_endpoint(state: &Path) -> Result<LocalEndpoint, CliError> {
    let path = state.join("endpoint.json");
    let bytes = fs::read(&path).map_err(|error| {
        let state = state.display();
        CliError::other(if error.kind() == std::io::ErrorKind::NotFound {
            format!("there is no `rlmesh up` with state folder {state}; start it with `rlmesh up --state {state}`, or name the folder of one that runs")
        } else {
            format!("{} can't be read: {error}", path.display())
        })
    })?;
    serde_json::from_slice(&bytes).map_err(|error| CliError::other(format!("{} can't be read: {error}", path.display())))
}

fn credentials_path() -> Result<PathBuf, CliError> {
    Ok(data_dir()?.join("credentials.json"))
}

fn sessions() -> Result<BTreeMap<String, Session>, CliError> {
    let path = credentials_path()?;
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|_| CliError::other(format!("{} is damaged; remove it and sign in again", path.display()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(CliError::other(format!("{} can't be read: {error}", path.display()))),
    }
}

/// The stored session of a profile.
pub fn session(profile: &str) -> Result<Option<Session>, CliError> {
    Ok(sessions()?.remove(profile))
}

/// Stores or (with None) forgets the session of a profile. Hold the profile's [`Lock`].
pub fn store_session(profile: &str, session: Option<Session>) -> Result<(), CliError> {
    let mut all = sessions()?;
    match session {
        Some(session) => all.insert(profile.to_owned(), session),
        None => all.remove(profile),
    };
    let bytes = serde_json::to_vec_pretty(&all).map_err(|error| CliError::other(format!("the credentials can't be written: {error}")))?;
    write_private(&credentials_path()?, &bytes)
}

/// The SDK's lock around a profile's credentials: a file that exists while it is held.
pub struct Lock {
    path: PathBuf,
}

impl Lock {
    /// Waits up to ten seconds for the lock.
    pub async fn acquire(profile: &str) -> Result<Self, CliError> {
        let dir = data_dir()?;
        private_dir(&dir)?;
        let path = dir.join(format!("{profile}.lock"));
        for _ in 0..100 {
            match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(_) => return Ok(Self { path }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                    let age =
                        fs::metadata(&path).and_then(|meta| meta.modified()).ok().and_then(|at| SystemTime::now().duration_since(at).ok());
                    if age.is_some_and(|age| age > STALE_LOCK) {
                        let _ = fs::remove_file(&path);
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return Err(CliError::other(format!("{}: {error}", path.display()))),
            }
        }
        Err(CliError::other(format!("another rlmesh process is refreshing this session; try again (lock file: {})", path.display())))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Makes a folder that only its owner may enter.
pub fn private_dir(dir: &Path) -> Result<(), CliError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| CliError::other(format!("the folder {} can't be made: {error}", dir.display())))
}

/// Replaces a file whole, readable by its owner alone.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let dir = path.parent().ok_or_else(|| CliError::other(format!("{} has no folder", path.display())))?;
    private_dir(dir)?;
    let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| CliError::other(format!("{} can't be written: {error}", path.display())))
}

//! Configuration: command line, environment, and an optional TOML file, in this order of precedence. Checked before any port
//! opens. Holds no secrets: keys lie in files of the state folder.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde::Deserialize;

/// The port unless told otherwise.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:7474";

/// What the server runs with.
#[derive(Debug, Clone)]
pub struct Config {
    pub listen: SocketAddr,
    /// Address that users reach the server at: `https://api.example`, without a slash at the end.
    pub public_url: String,
    /// Keys, and the database unless `database_url` says otherwise.
    pub state_dir: PathBuf,
    pub database_url: String,
    pub registry_host: String,
    /// More host names to answer to while listening on loopback.
    pub allowed_hosts: Vec<String>,
    pub timings: Timings,
}

/// Every duration of the control plane. Tests shorten them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Timings {
    #[serde(with = "seconds")]
    pub access_token: Duration,
    #[serde(with = "seconds")]
    pub refresh_token: Duration,
    /// How long a used refresh token still gives its successor again, for a reply that was lost.
    #[serde(with = "seconds")]
    pub refresh_replay: Duration,
    #[serde(with = "seconds")]
    pub device_code: Duration,
    #[serde(with = "seconds")]
    pub device_interval: Duration,
    #[serde(with = "seconds")]
    pub browser_session: Duration,
    #[serde(with = "seconds")]
    pub join_token: Duration,
    /// Both credentials of a rotation work for this long.
    #[serde(with = "seconds")]
    pub credential_overlap: Duration,
    /// Agents send a heartbeat this often.
    #[serde(with = "seconds")]
    pub heartbeat: Duration,
    /// Without a message for this long an agent is shown as disconnected.
    #[serde(with = "seconds")]
    pub disconnected_after: Duration,
    /// Ending: how long open requests and streams may take.
    #[serde(with = "seconds")]
    pub drain: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        const HOUR: u64 = 3600;
        Self {
            access_token: Duration::from_secs(15 * 60),
            refresh_token: Duration::from_secs(30 * 24 * HOUR),
            refresh_replay: Duration::from_secs(60),
            device_code: Duration::from_secs(15 * 60),
            device_interval: Duration::from_secs(5),
            browser_session: Duration::from_secs(7 * 24 * HOUR),
            join_token: Duration::from_secs(HOUR),
            credential_overlap: Duration::from_secs(24 * HOUR),
            heartbeat: Duration::from_secs(10),
            disconnected_after: Duration::from_secs(25),
            drain: Duration::from_secs(10),
        }
    }
}

/// Milliseconds of a duration, for arithmetic with the clock.
#[must_use]
pub fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Durations in the file are seconds, fractions allowed.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, de};

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let value = f64::deserialize(deserializer)?;
        Duration::try_from_secs_f64(value)
            .ok()
            .filter(|duration| !duration.is_zero())
            .ok_or_else(|| de::Error::custom(format!("{value} is no duration: a number of seconds above 0 is expected")))
    }
}

/// What the command line says; each is also an environment variable and a key of the file.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfigArgs {
    /// TOML file with the same names as the options
    #[arg(long, env = "RLMESH_SERVER_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address and port to listen on [default: 127.0.0.1:7474]
    #[arg(long, env = "RLMESH_SERVER_LISTEN", value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Address that users reach the server at [default: http://<listen>]
    #[arg(long, env = "RLMESH_SERVER_PUBLIC_URL", value_name = "URL")]
    pub public_url: Option<String>,
    /// Folder for keys and the database; made when missing
    #[arg(long, env = "RLMESH_SERVER_STATE_DIR", value_name = "FOLDER")]
    pub state_dir: Option<PathBuf>,
    /// File that holds the database's address, when it is not the SQLite file in the state folder
    #[arg(long, env = "RLMESH_SERVER_DATABASE_URL_FILE", value_name = "FILE")]
    pub database_url_file: Option<PathBuf>,
    /// Host of the container registry [default: registry.rlmesh.dev]
    #[arg(long, env = "RLMESH_SERVER_REGISTRY_HOST", value_name = "HOST")]
    pub registry_host: Option<String>,
    /// Another host name to answer to while listening on loopback; may be repeated
    #[arg(long = "allowed-host", env = "RLMESH_SERVER_ALLOWED_HOSTS", value_name = "NAME", value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,
}

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct ConfigFile {
    listen: Option<SocketAddr>,
    public_url: Option<String>,
    state_dir: Option<PathBuf>,
    database_url_file: Option<PathBuf>,
    registry_host: Option<String>,
    allowed_hosts: Vec<String>,
    timings: Timings,
}

impl ConfigArgs {
    /// Reads the file, if one is named, and settles every value.
    pub fn load(self) -> anyhow::Result<Config> {
        let file = match &self.config {
            Some(path) => {
                let text =
                    std::fs::read_to_string(path).with_context(|| format!("could not read the configuration file {}", path.display()))?;
                toml::from_str(&text).with_context(|| format!("the configuration file {} is wrong", path.display()))?
            }
            None => ConfigFile::default(),
        };
        let database_url = match self.database_url_file.as_ref().or(file.database_url_file.as_ref()) {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("could not read the database's address from {}", path.display()))?;
                Some(text.trim().to_owned())
            }
            None => None,
        };
        settle(self, file, database_url)
    }
}

/// Decides every value. Pure.
fn settle(args: ConfigArgs, file: ConfigFile, database_url: Option<String>) -> anyhow::Result<Config> {
    let default_listen: SocketAddr = DEFAULT_LISTEN.parse()?;
    let listen = args.listen.or(file.listen).unwrap_or(default_listen);
    let public_url = match args.public_url.or(file.public_url) {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => {
            ensure!(
                listen.ip().is_loopback(),
                "--public-url is needed when the server listens on {listen}: clients are told to use that address"
            );
            format!("http://{listen}")
        }
    };
    check_public_url(&public_url)?;
    let state_dir = args.state_dir.or(file.state_dir).unwrap_or_else(default_state_dir);
    let database_url = database_url.unwrap_or_else(|| sqlite_url(&state_dir));
    ensure!(
        ["sqlite:", "postgres:", "postgresql:"].iter().any(|scheme| database_url.starts_with(scheme)),
        "the database's address must start with sqlite: or postgres:"
    );
    Ok(Config {
        listen,
        public_url,
        state_dir,
        database_url,
        registry_host: args.registry_host.or(file.registry_host).unwrap_or_else(|| "registry.rlmesh.dev".to_owned()),
        allowed_hosts: if args.allowed_hosts.is_empty() { file.allowed_hosts } else { args.allowed_hosts },
        timings: file.timings,
    })
}

/// SDK clients accept https, and http on loopback.
fn check_public_url(url: &str) -> anyhow::Result<()> {
    let (scheme, authority) = url.split_once("://").with_context(|| format!("the public URL '{url}' has no scheme"))?;
    ensure!(!authority.is_empty() && !authority.contains(['/', '?', '#', '@']), "the public URL '{url}' must be scheme and host only");
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let loopback = host == "localhost" || host == "[::1]" || host.starts_with("127.");
    match scheme {
        "https" => Ok(()),
        "http" => {
            ensure!(loopback, "the public URL '{url}' must be https: clients send credentials over plain http to loopback only");
            Ok(())
        }
        _ => anyhow::bail!("the public URL '{url}' must be https, or http on loopback"),
    }
}

fn sqlite_url(state_dir: &Path) -> String {
    format!("sqlite://{}", state_dir.join("rlmesh.db").display())
}

fn default_state_dir() -> PathBuf {
    let base = std::env::var_os("XDG_STATE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    base.map_or_else(|| PathBuf::from("rlmesh-state"), |base| base.join("rlmesh/server"))
}

impl Config {
    /// Makes the state folder, readable by its owner alone.
    pub fn make_state_dir(&self) -> anyhow::Result<()> {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.state_dir)
            .with_context(|| format!("could not make the state folder {}", self.state_dir.display()))
    }

    /// The configuration once the port is known: `bound` replaces a port of 0, in the public URL too.
    #[must_use]
    pub fn with_bound(mut self, bound: SocketAddr) -> Self {
        if self.listen.port() == 0 {
            if let Some(base) = self.public_url.strip_suffix(":0") {
                self.public_url = format!("{base}:{}", bound.port());
            }
            self.listen = bound;
        }
        self
    }

    /// Host and port of the public URL.
    #[must_use]
    pub fn public_authority(&self) -> &str {
        self.public_url.split_once("://").map_or(self.public_url.as_str(), |(_, authority)| authority)
    }

    /// Whether clients use TLS.
    #[must_use]
    pub fn is_https(&self) -> bool {
        self.public_url.starts_with("https://")
    }

    /// Host and port of the cell protocol: the same as everything else's.
    #[must_use]
    pub fn grpc_endpoint(&self) -> (String, u16) {
        let authority = self.public_authority();
        let default_port = if self.is_https() { 443 } else { 80 };
        match authority.rsplit_once(':') {
            Some((host, port)) => match port.parse() {
                Ok(port) => (host.to_owned(), port),
                Err(_) => (authority.to_owned(), default_port),
            },
            None => (authority.to_owned(), default_port),
        }
    }

    /// A configuration for tests: loopback, a free port, a state folder that does not exist.
    #[must_use]
    pub fn for_tests() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            public_url: "http://127.0.0.1:0".to_owned(),
            state_dir: PathBuf::from("/nonexistent"),
            database_url: "sqlite::memory:".to_owned(),
            registry_host: "registry.example".to_owned(),
            allowed_hosts: Vec::new(),
            timings: Timings::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(file: &str, args: ConfigArgs) -> Result<Config, String> {
        settle(args, toml::from_str(file).map_err(|error| error.to_string())?, None).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_loopback_and_sqlite() {
        let config = load("", ConfigArgs { state_dir: Some("/s".into()), ..ConfigArgs::default() }).unwrap();
        assert_eq!(config.listen.to_string(), DEFAULT_LISTEN);
        assert_eq!(config.public_url, "http://127.0.0.1:7474");
        assert_eq!(config.database_url, "sqlite:///s/rlmesh.db");
        assert_eq!(config.grpc_endpoint(), ("127.0.0.1".to_owned(), 7474));
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file = "listen = '0.0.0.0:1'\npublic-url = 'https://a.example/'\n[timings]\naccess-token = 0.5";
        let config = load(file, ConfigArgs { listen: Some("0.0.0.0:2".parse().unwrap()), ..ConfigArgs::default() }).unwrap();
        assert_eq!((config.listen.port(), config.public_url.as_str()), (2, "https://a.example"));
        assert_eq!(config.grpc_endpoint(), ("a.example".to_owned(), 443));
        assert_eq!(config.timings, Timings { access_token: Duration::from_millis(500), ..Timings::default() });
    }

    #[test]
    fn wrong_values_are_refused_with_a_reason() {
        for (file, reason) in [
            ("listn = '0.0.0.0:1'", "unknown field"),
            ("listen = '0.0.0.0:1'", "--public-url"),
            ("public-url = 'http://a.example'", "https"),
            ("public-url = 'https://a.example/path'", "scheme and host only"),
            ("public-url = 'ftp://a.example'", "https"),
            ("[timings]\naccess-token = 0", "above 0"),
            ("[timings]\naccess-token = -1", "above 0"),
        ] {
            let error = load(file, ConfigArgs::default()).unwrap_err();
            assert!(error.contains(reason), "{file}: {error}");
        }
    }
}

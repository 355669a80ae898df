//! Real servers of the Python SDK, as a user would start them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The root of the repository.
pub fn root() -> PathBuf {
    // Asked at run time: a target folder may be shared by several checkouts.
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    package.ancestors().find(|folder| folder.join("Cargo.lock").is_file()).unwrap().to_owned()
}

/// An interpreter with the locked requirements; None (with the reason printed) where it can't be had. CI must have it.
pub fn interpreter(requirements: &str) -> Option<PathBuf> {
    let script = root().join("scripts/venv.sh");
    let output = Command::new(&script).arg(root().join("scripts/python").join(requirements)).stderr(Stdio::piped()).output();
    let reason = match output {
        Ok(output) if output.status.success() => {
            return Some(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()).join("bin/python"));
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    assert!(std::env::var("CI").as_deref() != Ok("true"), "CI has to have Python with {requirements}: {reason}");
    eprintln!("skipped, because there is no Python with {requirements}: {reason}");
    None
}

pub struct Server {
    child: Child,
    pub address: String,
}

impl Server {
    /// An environment when `lanes` are given, else a model.
    pub fn start(python: &Path, example: &str, entrypoint: &str, lanes: Option<u32>, kwargs: &str, address: &str) -> Self {
        Self::start_in(python, &root().join("examples").join(example), entrypoint, lanes, kwargs, address)
    }

    pub fn start_in(python: &Path, folder: &Path, entrypoint: &str, lanes: Option<u32>, kwargs: &str, address: &str) -> Self {
        let mut command = Command::new(python);
        command.args(["-m", "rlmesh.serve"]).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if lanes.is_some() {
            command.arg("--env");
        }
        command
            .arg(entrypoint)
            .env("PYTHONPATH", folder)
            .env("RLMESH_ADDRESS", address)
            .env("RLMESH_MAKE_KWARGS", kwargs)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        if let Some(lanes) = lanes {
            command.env("RLMESH_NUM_ENVS", lanes.to_string());
        }
        let mut server = Self { child: command.spawn().unwrap(), address: address.to_owned() };
        let until = Instant::now() + Duration::from_secs(60);
        while !server.answers() {
            if let Some(status) = server.child.try_wait().unwrap() {
                panic!("{entrypoint} ended with {status} before it served");
            }
            assert!(Instant::now() < until, "{entrypoint} does not serve after a minute");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn answers(&self) -> bool {
        match (self.address.strip_prefix("unix://"), self.address.strip_prefix("tcp://")) {
            (Some(path), _) => std::os::unix::net::UnixStream::connect(path).is_ok(),
            (_, Some(address)) => std::net::TcpStream::connect(address).is_ok(),
            (None, None) => panic!("{}", self.address),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! What the tests need of the machine: the built programs, and a Python with the SDK.
//!
//! `RLMESH_TEST_BIN` is the folder of the programs (else the one beside the tests'), `RLMESH_TEST_PYTHON` the interpreter
//! (else `scripts/venv.sh` makes or finds it).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Programs, interpreter and source tree.
#[derive(Debug, Clone)]
pub struct Tools {
    pub bin: PathBuf,
    pub python: PathBuf,
    /// Top folder of the source tree.
    pub root: PathBuf,
}

const PROGRAMS: [&str; 4] = ["rlmesh-server", "rlmesh-cluster-agent", "rlmesh-runner", "rlmesh"];

impl Tools {
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// The SDK's own command, of the same Python environment.
    #[must_use]
    pub fn sdk_command(&self) -> PathBuf {
        self.python.with_file_name("rlmesh")
    }

    /// A folder of `examples/`.
    #[must_use]
    pub fn example(&self, name: &str) -> PathBuf {
        self.root.join("examples").join(name)
    }

    /// The folder of the Python files that only these tests use.
    #[must_use]
    pub fn test_python(&self) -> PathBuf {
        self.root.join("crates/e2e/python")
    }
}

/// Says why a test does not run.
///
/// # Panics
/// Where `CI=true`: nothing is skipped there.
#[expect(clippy::panic, reason = "a test that can't run on CI has failed")]
pub fn skip(why: &str) {
    if std::env::var("CI").is_ok_and(|value| value == "true") {
        panic!("nothing is skipped on CI: {why}");
    }
    eprintln!("skipped, because {why}");
}

/// Top folder of the source tree. Asked at run time: a target folder may be shared by several checkouts.
pub fn source_tree() -> Result<PathBuf, String> {
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").ok_or("these tests are started by cargo")?);
    let root = package.ancestors().find(|folder| folder.join("Cargo.lock").is_file());
    root.map(Path::to_owned).ok_or_else(|| "the source tree is not there".to_owned())
}

/// What the tests run with. None, and a line that says why ([`skip`]), on a machine that lacks something.
#[must_use]
pub fn tools() -> Option<Tools> {
    static FOUND: OnceLock<Result<Tools, String>> = OnceLock::new();
    match FOUND.get_or_init(find) {
        Ok(tools) => Some(tools.clone()),
        Err(why) => {
            skip(why);
            None
        }
    }
}

fn find() -> Result<Tools, String> {
    let root = source_tree()?;
    let bin = match std::env::var_os("RLMESH_TEST_BIN") {
        Some(bin) => PathBuf::from(bin),
        None => beside_the_tests()?,
    };
    for program in PROGRAMS {
        if !bin.join(program).is_file() {
            return Err(format!(
                "{} is not built; `make build` does it, RLMESH_TEST_BIN names another folder",
                bin.join(program).display()
            ));
        }
    }
    Ok(Tools { bin, python: python(&root)?, root })
}

fn beside_the_tests() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| format!("the folder of the tests is unknown: {error}"))?;
    own.parent().and_then(Path::parent).map(Path::to_path_buf).ok_or_else(|| "the tests lie in no target folder".to_owned())
}

fn python(root: &Path) -> Result<PathBuf, String> {
    if let Some(python) = std::env::var_os("RLMESH_TEST_PYTHON") {
        let python = PathBuf::from(python);
        return if python.is_file() { Ok(python) } else { Err(format!("RLMESH_TEST_PYTHON is {}, which is no file", python.display())) };
    }
    let output = Command::new(root.join("scripts/venv.sh"))
        .arg(root.join("scripts/python/requirements.txt"))
        .output()
        .map_err(|error| format!("scripts/venv.sh can't be run: {error}"))?;
    if !output.status.success() {
        return Err(format!("there is no Python environment: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("bin/python"))
}

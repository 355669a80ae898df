//! The program itself: its configuration's errors, its start and its end.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlmesh-server"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RLMESH_")) {
        command.env_remove(name);
    }
    command
}

/// A started server and its address; killed when the test fails.
struct Running {
    child: Child,
    url: String,
}

impl Running {
    fn start(state: &Path) -> Self {
        let mut command = program();
        command.args(["serve", "--listen", "127.0.0.1:0"]).arg("--state-dir").arg(state);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("ready ").unwrap().to_owned();
        Self { child, url }
    }

    /// Asks it to end, and returns its exit status.
    fn end(&mut self) -> Option<i32> {
        assert!(Command::new("kill").arg(self.child.id().to_string()).status().unwrap().success());
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(20) {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the server did not end within 20 s of SIGTERM");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_wrong_configuration_ends_with_64_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("server.toml");
    std::fs::write(&file, "listn = '127.0.0.1:0'\n").unwrap();
    let state = dir.path().join("state");
    for arguments in [
        vec!["--config", file.to_str().unwrap()],
        vec!["--config", "/nonexistent.toml"],
        vec!["--listen", "0.0.0.0:0"],
        vec!["--public-url", "http://mesh.example"],
    ] {
        let output = program().arg("serve").args(&arguments).arg("--state-dir").arg(&state).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {text}");
        assert!(text.starts_with("rlmesh-server: "), "{text}");
    }
    assert!(!state.exists());
}

#[test]
fn it_starts_ends_and_starts_again_with_the_same_state() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let mut first = Running::start(&state);
    assert!(first.url.starts_with("http://127.0.0.1:") && !first.url.ends_with(":0"), "{}", first.url);
    assert_eq!(first.end(), Some(0));
    let read = |name: &str| std::fs::read_to_string(state.join(name)).unwrap();
    let before = [read("server.key"), read("tokens.key"), read("admin-password")];
    let mut second = Running::start(&state);
    assert_eq!(second.end(), Some(0));
    assert_eq!([read("server.key"), read("tokens.key"), read("admin-password")], before);
}

#[test]
fn an_admin_is_made_on_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let create = |password: &str| {
        let mut command = program();
        command.args(["create-admin", "--email", "ada@example.com", "--password-stdin", "--state-dir"]).arg(dir.path());
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(password.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, text) = create("short\n");
    assert!(status == Some(1) && text.contains("at least 10 characters"), "{text}");
    let (status, text) = create("a long password\n");
    assert!(status == Some(0) && text.contains("made the account") && !text.contains("a long password"), "{text}");
    let (status, text) = create("another password\n");
    assert!(status == Some(0) && text.contains("set the password"), "{text}");
    assert!(!dir.path().join("admin-password").exists());
}

#[test]
fn the_openapi_document_is_printed() {
    let output = program().arg("openapi").output().unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["paths"]["/v1/evaluations"]["post"].is_object());
}

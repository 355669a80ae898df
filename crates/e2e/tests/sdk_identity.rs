//! The SDK's own command, unchanged, against our server: signing in by the device flow, organizations, tokens, and what
//! happens when a reply is lost or a token is stolen.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use reqwest::{Method, StatusCode};
use rlm_e2e::cli::{Ran, Shell, finish};
use rlm_e2e::processes::{Process, clean_command, tail};
use rlm_e2e::stack::free_port;
use rlm_e2e::{Tools, tools, wait_for};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

const EMAIL: &str = "ada@example.com";
const PASSWORD: &str = "correct horse battery";

/// A server with one account, behind a relay that can lose one reply of the token endpoint.
struct Platform {
    tools: Tools,
    folder: tempfile::TempDir,
    url: String,
    http: reqwest::Client,
    lose: Arc<AtomicBool>,
    _server: Process,
}

impl Platform {
    async fn start(tools: &Tools, timings: &str) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rlm-e2e-").tempdir()?;
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let lose = Arc::new(AtomicBool::new(false));
        let url = format!("http://{}", relay(listen, Arc::clone(&lose)).await?);
        let state = folder.path().join("server");
        std::fs::write(folder.path().join("server.toml"), format!("[timings]\n{timings}"))?;
        std::fs::write(folder.path().join("password"), PASSWORD)?;
        let mut setup = clean_command(&tools.program("rlmesh-server"));
        setup.arg("create-admin").arg("--state-dir").arg(&state).args(["--email", EMAIL, "--password-stdin", "--organization", "lab"]);
        let setup = setup.stdin(std::fs::File::open(folder.path().join("password"))?).output()?;
        ensure!(setup.status.success(), "create-admin: {}", String::from_utf8_lossy(&setup.stderr));
        let mut command = clean_command(&tools.program("rlmesh-server"));
        command.args(["serve", "--die-with-parent", "--listen", &listen.to_string(), "--public-url", &url]);
        command.arg("--state-dir").arg(&state).arg("--config").arg(folder.path().join("server.toml"));
        let log = folder.path().join("server.log");
        let server = Process::start("rlmesh-server", &mut command, &log)?;
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(Duration::from_secs(30))
            .pool_max_idle_per_host(0)
            .build()?;
        let started = wait_for("the server to answer", Duration::from_secs(30), || async {
            Ok(http.get(format!("{url}/v1/info")).send().await.ok().filter(|answer| answer.status().is_success()))
        });
        started.await.with_context(|| tail(&log, 20))?;
        Ok(Self { tools: tools.clone(), folder, url, http, lose, _server: server })
    }

    /// A user's home, by name.
    fn home(&self, name: &str) -> anyhow::Result<PathBuf> {
        let home = self.folder.path().join(name);
        std::fs::create_dir_all(&home)?;
        Ok(home)
    }

    async fn sdk(&self, home: &Path, arguments: &[&str]) -> anyhow::Result<Ran> {
        Shell { home, url: Some(&self.url), key: None }.run(&self.tools.sdk_command(), arguments).await
    }

    /// `rlmesh login`, with the code decided on the page as a person would.
    async fn login(&self, home: &Path, decision: &str) -> anyhow::Result<Ran> {
        let shell = Shell { home, url: Some(&self.url), key: None };
        let mut command = shell.command(&self.tools.sdk_command(), &["login"]);
        let mut child = command.stdin(Stdio::null()).spawn()?;
        let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut stderr = child.stderr.take().context("no standard error")?;
        let mut seen = String::new();
        let address = tokio::time::timeout(Duration::from_secs(30), async {
            loop {
                let mut line = String::new();
                ensure!(stdout.read_line(&mut line).await? > 0, "login ended without an address: {seen}");
                seen.push_str(&line);
                if let Some(at) = line.find(&format!("{}/device?user_code=", self.url)) {
                    return Ok(line[at..].trim().to_owned());
                }
            }
        })
        .await??;
        self.decide(&address, decision).await?;
        let end = async {
            let mut errors = String::new();
            tokio::try_join!(stdout.read_to_string(&mut seen), stderr.read_to_string(&mut errors))?;
            anyhow::Ok((child.wait().await?, errors))
        };
        let (status, errors) = tokio::time::timeout(Duration::from_secs(60), end).await.context("login did not end")??;
        Ok(Ran { status: status.code().unwrap_or(-1), stdout: seen, stderr: errors })
    }

    /// Signs in on the page and presses a button there.
    async fn decide(&self, address: &str, decision: &str) -> anyhow::Result<()> {
        let path = address.strip_prefix(&self.url).context("the address is another server's")?;
        let unknown = self.http.get(address).send().await?;
        ensure!(unknown.status() == StatusCode::SEE_OTHER, "who is not signed in is sent to sign in");
        let form = [("email", EMAIL), ("password", PASSWORD), ("next", path)];
        let signed_in = self.http.post(format!("{}/login", self.url)).header("origin", &self.url).form(&form).send().await?;
        ensure!(signed_in.headers().get("location").is_some_and(|to| to == path), "signing in goes on to {path}: {signed_in:?}");
        let cookie = signed_in.headers().get("set-cookie").context("no cookie")?.to_str()?;
        let cookie = cookie.split(';').next().unwrap_or_default().to_owned();
        let page = self.http.get(address).header("cookie", &cookie).send().await?.text().await?;
        let hidden = |name: &str| {
            let (_, rest) = page.split_once(&format!("name=\"{name}\" value=\"")).with_context(|| format!("no {name} in {page}"))?;
            anyhow::Ok(rest.split('"').next().unwrap_or_default().to_owned())
        };
        let (token, code) = (hidden("form_token")?, hidden("user_code")?);
        let form = [("form_token", token.as_str()), ("user_code", &code), ("decision", decision)];
        let request = self.http.post(format!("{}/device", self.url)).header("origin", &self.url).header("cookie", &cookie);
        let decided = request.form(&form).send().await?;
        ensure!(decided.status().is_success(), "{}", decided.text().await?);
        Ok(())
    }

    async fn token(&self, home: &Path) -> anyhow::Result<String> {
        let token = self.sdk(home, &["token", "--json"]).await?.expect(0)?.json()?;
        ensure!(token["platform"] == self.url, "{token}");
        Ok(token["token"].as_str().context("no token")?.to_owned())
    }

    async fn api(&self, token: &str, method: Method, path: &str, body: &Value) -> anyhow::Result<(StatusCode, Value)> {
        let answer = self.http.request(method, format!("{}{path}", self.url)).bearer_auth(token).json(body).send().await?;
        let status = answer.status();
        Ok((status, serde_json::from_slice(&answer.bytes().await?).unwrap_or_default()))
    }
}

/// Relays whole HTTP/1.1 exchanges, one per connection; with `lose` set, the next answer of the token endpoint is thrown
/// away after the server gave it.
async fn relay(target: SocketAddr, lose: Arc<AtomicBool>) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let lose = Arc::clone(&lose);
            // A client that goes away is nothing to the others.
            tokio::spawn(async move { exchange(client, target, &lose).await.ok() });
        }
    });
    Ok(address)
}

async fn exchange(mut client: TcpStream, target: SocketAddr, lose: &AtomicBool) -> anyhow::Result<()> {
    let mut request = Vec::new();
    let head = loop {
        ensure!(client.read_buf(&mut request).await? > 0, "the client ended");
        if let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            break String::from_utf8_lossy(&request[..end]).into_owned();
        }
    };
    let length: usize = head
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(Ok(0), |(_, value)| value.trim().parse())?;
    while request.len() < head.len() + 4 + length {
        ensure!(client.read_buf(&mut request).await? > 0, "the client ended");
    }
    let (first, _) = head.split_once("\r\n").context("no header")?;
    request.splice(first.len()..first.len(), *b"\r\nconnection: close");
    let mut server = TcpStream::connect(target).await?;
    server.write_all(&request).await?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await?;
    if first.starts_with("POST /v1/oauth/token ") && lose.swap(false, Ordering::SeqCst) {
        return Ok(());
    }
    client.write_all(&answer).await?;
    client.shutdown().await?;
    Ok(())
}

fn credentials(home: &Path) -> PathBuf {
    home.join("data/credentials.json")
}

fn refresh_token(home: &Path) -> anyhow::Result<String> {
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(credentials(home))?)?;
    Ok(stored["default"]["refresh_token"].as_str().context("no refresh token is stored")?.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn login_whoami_organizations_registry_and_logout() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let platform = Platform::start(&tools, "device-interval = 1.0\n").await?;
    let home = platform.home("ada")?;
    let before = platform.sdk(&home, &["whoami"]).await?;
    assert_ne!(before.status, 0, "nobody is signed in yet");

    let login = platform.login(&home, "approve").await?.expect(0)?;
    assert!(login.stdout.contains("Signed in"), "{}", login.stdout);
    let who = platform.sdk(&home, &["whoami"]).await?.expect(0)?;
    for part in [EMAIL, "lab", "verified", &platform.url] {
        assert!(who.stdout.contains(part), "'{part}' is not in: {}", who.stdout);
    }

    let first = platform.token(&home).await?;
    assert_eq!(platform.token(&home).await?, first, "a token that is still good is not refreshed");
    let (status, second) = platform.api(&first, Method::POST, "/v1/organizations", &json!({"name": "second"})).await?;
    assert_eq!(status, StatusCode::CREATED, "{second}");
    let second = second["id"].as_str().context("no id")?;
    let list = platform.sdk(&home, &["org", "list"]).await?.expect(0)?;
    let line = |text: &str, name: &str| text.lines().find(|line| line.contains(name)).map(str::to_owned);
    let (lab, other) = (line(&list.stdout, " lab "), line(&list.stdout, " second "));
    assert!(lab.is_some_and(|line| line.contains('●')) && other.is_some_and(|line| line.contains(second) && !line.contains('●')));

    let wrong = platform.sdk(&home, &["org", "switch", "org_00000000000000000000000000"]).await?;
    assert_ne!(wrong.status, 0);
    platform.sdk(&home, &["whoami"]).await?.expect(0)?;
    platform.sdk(&home, &["org", "switch", second]).await?.expect(0)?;
    let who = platform.sdk(&home, &["whoami"]).await?.expect(0)?;
    assert!(who.stdout.contains(second) && who.stdout.contains("second"), "{}", who.stdout);
    let (_, me) = platform.api(&platform.token(&home).await?, Method::GET, "/v1/me", &Value::Null).await?;
    assert_eq!(me["organization"]["id"], second);

    let docker = platform.home("docker")?;
    let shell = Shell { home: &home, url: Some(&platform.url), key: None };
    let mut command = shell.command(&tools.sdk_command(), &["registry", "login"]);
    command.env("DOCKER_CONFIG", &docker);
    let registry = finish(command, "rlmesh registry login").await?.expect(0)?;
    assert!(registry.stdout.contains(&second.replace('_', "-")), "the namespace of the organization: {}", registry.stdout);
    let config: Value = serde_json::from_str(&std::fs::read_to_string(docker.join("config.json"))?)?;
    assert_eq!(config["credHelpers"]["registry.rlmesh.dev"], "rlmesh");
    let secret = docker_credential(&tools, &shell, "registry.rlmesh.dev").await?.expect(0)?.json()?;
    let who_pulls = platform.api(secret["Secret"].as_str().context("no secret")?, Method::GET, "/v1/me", &Value::Null).await?;
    assert_eq!((who_pulls.0, &who_pulls.1["subject"]["id"]), (StatusCode::OK, &secret["Username"]));

    let last = platform.token(&home).await?;
    let refresh = refresh_token(&home)?;
    let out = platform.sdk(&home, &["logout"]).await?.expect(0)?;
    assert!(format!("{}{}", out.stdout, out.stderr).contains("revoked"), "{out:?}");
    assert_eq!(platform.api(&last, Method::GET, "/v1/me", &Value::Null).await?.0, StatusCode::UNAUTHORIZED);
    let form = [("grant_type", "refresh_token"), ("client_id", "rlmesh-cli"), ("refresh_token", &refresh)];
    let again = platform.http.post(format!("{}/v1/oauth/token", platform.url)).form(&form).send().await?;
    assert_eq!(again.status(), StatusCode::BAD_REQUEST);
    assert_ne!(platform.sdk(&home, &["whoami"]).await?.status, 0);
    Ok(())
}

async fn docker_credential(tools: &Tools, shell: &Shell<'_>, host: &str) -> anyhow::Result<Ran> {
    let mut command = shell.command(&tools.python.with_file_name("docker-credential-rlmesh"), &["get"]);
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    child.stdin.take().context("no standard input")?.write_all(host.as_bytes()).await?;
    let output = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output()).await??;
    Ok(rlm_e2e::cli::ran(&output))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_login_says_so() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let platform = Platform::start(&tools, "device-interval = 1.0\n").await?;
    let home = platform.home("ada")?;
    let login = platform.login(&home, "deny").await?;
    assert_ne!(login.status, 0);
    assert!(login.stderr.contains("declined"), "{login:?}");
    assert_ne!(platform.sdk(&home, &["whoami"]).await?.status, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_tokens_are_refreshed_and_a_lost_reply_is_no_harm() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let platform = Platform::start(&tools, "device-interval = 1.0\naccess-token = 2.0\n").await?;
    let home = platform.home("ada")?;
    platform.login(&home, "approve").await?.expect(0)?;

    let (token, refresh) = (platform.token(&home).await?, refresh_token(&home)?);
    wait_for("the token to expire", Duration::from_secs(10), || async {
        let (status, _) = platform.api(&token, Method::GET, "/v1/me", &Value::Null).await?;
        Ok((status == StatusCode::UNAUTHORIZED).then_some(()))
    })
    .await?;
    platform.sdk(&home, &["whoami"]).await?.expect(0)?;
    assert_ne!(refresh_token(&home)?, refresh, "the refresh token works once");
    assert_ne!(platform.token(&home).await?, token);

    // The server exchanged the token, and the client never learns it.
    let before = refresh_token(&home)?;
    tokio::time::sleep(Duration::from_millis(2100)).await;
    platform.lose.store(true, Ordering::SeqCst);
    let failed = platform.sdk(&home, &["token"]).await?;
    assert!(!platform.lose.load(Ordering::SeqCst), "a reply was lost");
    assert_eq!(refresh_token(&home)? == before, failed.status != 0, "{failed:?}");
    let again = platform.token(&home).await?;
    assert_eq!(platform.api(&again, Method::GET, "/v1/me", &Value::Null).await?.0, StatusCode::OK);
    platform.sdk(&home, &["whoami"]).await?.expect(0)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stolen_refresh_token_ends_the_sign_in() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let platform = Platform::start(&tools, "device-interval = 1.0\naccess-token = 1.0\nrefresh-replay = 0.001\n").await?;
    let (home, thief) = (platform.home("ada")?, platform.home("thief")?);
    platform.login(&home, "approve").await?.expect(0)?;
    for part in ["config", "data"] {
        std::fs::create_dir_all(thief.join(part))?;
        for entry in std::fs::read_dir(home.join(part))? {
            let entry = entry?;
            std::fs::copy(entry.path(), thief.join(part).join(entry.file_name()))?;
        }
    }
    let stolen = refresh_token(&thief)?;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    platform.token(&home).await?;
    assert_ne!(refresh_token(&home)?, stolen);
    let refused = platform.sdk(&thief, &["token"]).await?;
    assert_ne!(refused.status, 0);
    assert!(refused.stderr.contains("invalid_grant") && refused.stderr.contains("rlmesh login"), "{refused:?}");

    tokio::time::sleep(Duration::from_millis(1100)).await;
    let owner = platform.sdk(&home, &["token"]).await?;
    assert_ne!(owner.status, 0, "whoever of the two it was, both are out");
    platform.login(&home, "approve").await?.expect(0)?;
    platform.sdk(&home, &["whoami"]).await?.expect(0)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_key_in_the_environment_needs_no_sign_in() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let platform = Platform::start(&tools, "device-interval = 1.0\n").await?;
    let home = platform.home("ada")?;
    platform.login(&home, "approve").await?.expect(0)?;
    let token = platform.token(&home).await?;
    let (_, key) = platform.api(&token, Method::POST, "/v1/keys", &json!({"name": "ci", "scopes": ["evaluations:read"]})).await?;
    let (secret, id) = (key["secret"].as_str().context("no secret")?, key["id"].as_str().context("no id")?);

    let elsewhere = platform.home("ci")?;
    let shell = Shell { home: &elsewhere, url: Some(&platform.url), key: Some(secret) };
    let who = shell.run(&tools.sdk_command(), &["whoami"]).await?.expect(0)?;
    assert!(who.stdout.contains("api key") && who.stdout.contains("verified"), "{}", who.stdout);
    let printed = shell.run(&tools.sdk_command(), &["token", "--json"]).await?.expect(0)?.json()?;
    assert_eq!((printed["token"].as_str(), printed["platform"].as_str()), (Some(secret), Some(platform.url.as_str())));
    shell.run(&tools.sdk_command(), &["eval", "list"]).await?.expect(0)?;

    let (status, _) = platform.api(&token, Method::DELETE, &format!("/v1/keys/{id}"), &Value::Null).await?;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let revoked = shell.run(&tools.sdk_command(), &["eval", "list"]).await?;
    assert_ne!(revoked.status, 0);
    assert!(revoked.stderr.contains("was revoked"), "{revoked:?}");
    Ok(())
}

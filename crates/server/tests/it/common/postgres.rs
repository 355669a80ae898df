//! PostgreSQL for the tests: the server that `RLMESH_TEST_POSTGRES` names (an address with `{database}` in it), or a private
//! cluster on a unix socket, shared by the process and removed when the process ends, however it ends.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use sqlx::any::install_default_drivers;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

/// Starts a cluster as the current user, says where, and removes it once standard input ends.
const SCRIPT: &str = r#"
set -eu
dir=$(mktemp -d "${TMPDIR:-/tmp}/rlmesh-pg.XXXXXX")
trap 'rm -rf "$dir"' EXIT
"$1/initdb" -D "$dir/data" -U tester --auth=trust -E UTF8 --locale=C --no-sync >"$dir/log" 2>&1 || { cat "$dir/log" >&2; exit 1; }
"$1/postgres" -D "$dir/data" -k "$dir" -c listen_addresses= -c fsync=off -c synchronous_commit=off -c full_page_writes=off \
    -c max_connections=300 >>"$dir/log" 2>&1 </dev/null &
server=$!
for _ in $(seq 300); do
    if "$1/pg_isready" -q -h "$dir" -U tester; then
        echo "$dir"
        cat >/dev/null
        kill -INT "$server"
        wait "$server" || :
        exit 0
    fi
    kill -0 "$server" || break
    sleep 0.1
done
cat "$dir/log" >&2
exit 1
"#;

struct Server {
    /// With `{database}` in it.
    template: String,
    /// Its standard input is the private cluster's life.
    _cluster: Option<Child>,
}

static SERVER: OnceLock<Option<Server>> = OnceLock::new();

fn binaries() -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .ok()?
        .filter_map(|entry| entry.ok().map(|entry| entry.path().join("bin")))
        .filter(|path| path.join("initdb").exists() && path.join("postgres").exists())
        .collect();
    found.sort();
    let supported = found.iter().position(|path| path.starts_with("/usr/lib/postgresql/15"));
    supported.map(|at| found.swap_remove(at)).or_else(|| found.pop())
}

fn start() -> Option<Server> {
    if let Ok(template) = std::env::var("RLMESH_TEST_POSTGRES") {
        assert!(template.contains("{database}"), "RLMESH_TEST_POSTGRES must contain {{database}} where the database's name goes");
        return Some(Server { template, _cluster: None });
    }
    let Some(bin) = binaries() else {
        assert!(!std::env::var("CI").is_ok_and(|ci| ci == "true"), "nothing is skipped on CI: no PostgreSQL");
        eprintln!("skipped on PostgreSQL, because neither RLMESH_TEST_POSTGRES is set nor is PostgreSQL in /usr/lib/postgresql");
        return None;
    };
    // PostgreSQL refuses to run as root.
    let mut command = if is_root() {
        let user = if user_exists("postgres") { "postgres" } else { "nobody" };
        let mut command = Command::new("runuser");
        command.args(["-u", user, "--", "sh"]);
        command
    } else {
        Command::new("sh")
    };
    let mut cluster = command
        .args(["-c", SCRIPT, "sh"])
        .arg(&bin)
        .current_dir("/")
        .env_remove("TMPDIR")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(cluster.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let dir = line.trim();
    assert!(Path::new(dir).is_dir(), "the private PostgreSQL did not start; see above");
    Some(Server { template: format!("postgres://tester@localhost/{{database}}?host={dir}"), _cluster: Some(cluster) })
}

fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|text| {
        text.lines().find_map(|line| line.strip_prefix("Uid:")).is_some_and(|ids| ids.split_whitespace().next() == Some("0"))
    })
}

fn user_exists(name: &str) -> bool {
    std::fs::read_to_string("/etc/passwd").is_ok_and(|text| text.lines().any(|line| line.starts_with(&format!("{name}:"))))
}

pub struct Database {
    pub url: String,
    name: String,
}

/// A new, empty database; none when this machine has no PostgreSQL.
pub async fn fresh_database() -> Option<Database> {
    let server = tokio::task::spawn_blocking(|| SERVER.get_or_init(start).as_ref()).await.unwrap()?;
    let name = format!("rlmesh_test_{}", super::uuid_text());
    run(&server.template, format!("CREATE DATABASE {name}")).await;
    Some(Database { url: server.template.replace("{database}", &name), name })
}

impl Database {
    pub async fn drop(self) {
        if let Some(Some(server)) = SERVER.get() {
            run(&server.template, format!("DROP DATABASE {} WITH (FORCE)", self.name)).await;
        }
    }
}

async fn run(template: &str, sql: String) {
    install_default_drivers();
    let mut connection = sqlx::AnyConnection::connect(&template.replace("{database}", "postgres")).await.unwrap();
    connection.execute(AssertSqlSafe(sql)).await.unwrap();
    connection.close().await.unwrap();
}

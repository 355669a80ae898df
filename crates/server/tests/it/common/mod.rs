//! A server in this process, on a free port, with a database of its own and a clock that tests move. Every answer it gives
//! through [`TestServer::send`] is checked against the OpenAPI document.

mod postgres;
mod schema;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use reqwest::{Method, RequestBuilder, StatusCode};
use rlm_core::ids::{KeyId, OrganizationId, UserId};
use rlm_core::tokens::{Secret, SecretKind};
use rlm_server::app::access::{Role, Scope, Scopes};
use rlm_server::config::{Config, Timings};
use rlm_server::http;
use rlm_server::state::{AppState, Clock};
use rlm_server::store::keys::ApiKey;
use rlm_server::store::organizations::{self, Organization};
use rlm_server::store::sessions::{self, RefreshToken};
use rlm_server::store::users::{self, User};
use rlm_server::store::{Store, keys};
use serde_json::Value;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// Runs a test of the store on SQLite, and on PostgreSQL where there is one.
pub async fn for_each_store<F, Fut>(test: F)
where
    F: Fn(Store) -> Fut,
    Fut: Future<Output = ()>,
{
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("sqlite://{}", dir.path().join("test.db").display())).await.unwrap();
    eprintln!("on SQLite");
    test(store.clone()).await;
    store.close().await;
    let Some(database) = postgres::fresh_database().await else { return };
    let store = Store::open(&database.url).await.unwrap();
    eprintln!("on PostgreSQL");
    test(store.clone()).await;
    store.close().await;
    database.drop().await;
}

/// Runs a test of the whole server on SQLite, and on PostgreSQL where there is one.
pub async fn for_each_server<F, Fut>(test: F)
where
    F: Fn(Arc<TestServer>) -> Fut,
    Fut: Future<Output = ()>,
{
    eprintln!("on SQLite");
    test(Arc::new(TestServer::start().await)).await;
    let Some(database) = postgres::fresh_database().await else { return };
    eprintln!("on PostgreSQL");
    let url = database.url.clone();
    let server = Arc::new(TestServer::with(|config| config.database_url = url).await);
    test(Arc::clone(&server)).await;
    server.state.store.close().await;
    drop(server);
    database.drop().await;
}

/// The address of a new, empty PostgreSQL database; none when this machine has no PostgreSQL.
pub async fn postgres_url() -> Option<String> {
    postgres::fresh_database().await.map(|database| database.url)
}

/// A user in an organization.
#[derive(Debug, Clone)]
pub struct TestUser {
    pub id: UserId,
    pub organization: OrganizationId,
}

pub struct TestServer {
    pub url: String,
    pub state: AppState,
    pub http: reqwest::Client,
    offset_ms: Arc<AtomicI64>,
    stop: CancellationToken,
    dir: TempDir,
}

impl TestServer {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    /// A server whose configuration `adjust` changed. On SQLite, or where RLMESH_TEST_STORE is `postgres` on PostgreSQL.
    pub async fn with(adjust: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let database_url = if std::env::var("RLMESH_TEST_STORE").is_ok_and(|store| store == "postgres") {
            postgres_url().await.expect("RLMESH_TEST_STORE=postgres, but there is no PostgreSQL")
        } else {
            format!("sqlite://{}", dir.path().join("test.db").display())
        };
        let mut config = Config {
            state_dir: dir.path().to_owned(),
            database_url,
            timings: Timings { drain: Duration::from_secs(1), ..Timings::default() },
            ..Config::for_tests()
        };
        adjust(&mut config);
        let config = config.with_bound(listener.local_addr().unwrap());
        let offset_ms = Arc::new(AtomicI64::new(0));
        let moved = Arc::clone(&offset_ms);
        let system = Clock::system();
        let clock = Clock::from_fn(move || system.now_ms() + moved.load(Ordering::SeqCst));
        let state = AppState::open(config, clock).await.unwrap();
        let stop = CancellationToken::new();
        let app = http::app(state.clone());
        tokio::spawn(http::serve::serve(listener, app, stop.clone(), Duration::from_secs(1)));
        let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).timeout(Duration::from_secs(30)).build().unwrap();
        Self { url: state.config.public_url.clone(), state, http, offset_ms, stop, dir }
    }

    pub fn address(&self) -> SocketAddr {
        self.state.config.listen
    }

    pub fn state_dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Begins the server's end.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Moves the server's clock forward.
    pub fn advance(&self, by: Duration) {
        self.offset_ms.fetch_add(i64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }

    /// An organization with an owner. The account has no password; sign in by key or token.
    pub async fn organization(&self, name: &str) -> TestUser {
        let id = OrganizationId::generate();
        let now = self.state.clock.now_ms();
        let mut write = self.state.store.write().await.unwrap();
        organizations::insert(&mut write, &Organization { id, name: name.to_owned(), created_at: now }).await.unwrap();
        write.commit().await.unwrap();
        self.user(id, Role::Owner).await
    }

    /// A new user in an organization.
    pub async fn user(&self, organization: OrganizationId, role: Role) -> TestUser {
        let id = UserId::generate();
        let now = self.state.clock.now_ms();
        let user = User {
            id,
            email: format!("{id}@example.com"),
            first_name: "First".to_owned(),
            last_name: "Last".to_owned(),
            created_at: now,
            disabled_at: None,
        };
        let mut write = self.state.store.write().await.unwrap();
        users::insert(&mut write, &user, "no password").await.unwrap();
        organizations::add_member(&mut write, organization, id, role, now).await.unwrap();
        write.commit().await.unwrap();
        TestUser { id, organization }
    }

    /// An API key of the user with all scopes.
    pub async fn key(&self, user: &TestUser) -> String {
        self.key_with(user, Scope::ALL).await
    }

    pub async fn key_with(&self, user: &TestUser, scopes: &[Scope]) -> String {
        let secret = Secret::generate(SecretKind::ApiKey);
        let key = ApiKey {
            id: KeyId::generate(),
            name: "test".to_owned(),
            user_id: user.id,
            organization_id: user.organization,
            scopes: Scopes::of(scopes),
            created_at: self.state.clock.now_ms(),
            expires_at: None,
            last_used_at: None,
            revoked_at: None,
        };
        let mut write = self.state.store.write().await.unwrap();
        keys::insert(&mut write, &key, &secret.hash()).await.unwrap();
        write.commit().await.unwrap();
        secret.expose().to_owned()
    }

    /// A refresh token, as the device flow would give.
    pub async fn refresh_token(&self, user: &TestUser) -> String {
        let secret = Secret::generate(SecretKind::RefreshToken);
        let now = self.state.clock.now_ms();
        let token = RefreshToken {
            hash: secret.hash(),
            family_id: uuid_text(),
            user_id: user.id,
            organization_id: user.organization,
            client_id: "rlmesh-cli".to_owned(),
            issued_at: now,
            expires_at: now + 3_600_000,
            used_at: None,
            revoked_at: None,
        };
        let mut write = self.state.store.write().await.unwrap();
        sessions::insert_refresh(&mut write, &token).await.unwrap();
        write.commit().await.unwrap();
        secret.expose().to_owned()
    }

    /// An access token, made by exchanging a refresh token.
    pub async fn access_token(&self, user: &TestUser) -> String {
        let refresh = self.refresh_token(user).await;
        let answer = self.refresh(&refresh, &[]).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        answer.body["access_token"].as_str().unwrap().to_owned()
    }

    /// Exchanges a refresh token.
    pub async fn refresh(&self, token: &str, more: &[(&str, &str)]) -> Answer {
        let mut form = vec![("grant_type", "refresh_token"), ("client_id", "rlmesh-cli"), ("refresh_token", token)];
        form.extend_from_slice(more);
        self.send(self.request(Method::POST, "/v1/oauth/token").form(&form)).await
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url))
    }

    /// Sends a request and checks the answer against the OpenAPI document.
    pub async fn send(&self, request: RequestBuilder) -> Answer {
        let request = request.build().unwrap();
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let response = self.http.execute(request).await.unwrap();
        let status = response.status();
        let headers = response.headers().clone();
        let text = response.text().await.unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        let answer = Answer { status, headers, text, body };
        schema::check(method.as_str(), &path, &answer);
        answer
    }

    pub async fn get(&self, token: &str, path: &str) -> Answer {
        self.send(self.request(Method::GET, path).bearer_auth(token)).await
    }

    pub async fn post(&self, token: &str, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).bearer_auth(token).json(body)).await
    }

    pub async fn patch(&self, token: &str, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::PATCH, path).bearer_auth(token).json(body)).await
    }

    pub async fn delete(&self, token: &str, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path).bearer_auth(token)).await
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// An answer, read whole.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
    /// Null when the answer is no JSON.
    pub body: Value,
}

impl Answer {
    /// The code of an error answer; `""` when it is none.
    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    pub fn message(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_default()
    }

    #[track_caller]
    pub fn ok(self) -> Value {
        assert!(self.status.is_success(), "{} {}", self.status, self.text);
        self.body
    }

    #[track_caller]
    pub fn refused(self, code: &str) -> Self {
        assert_eq!(self.code(), code, "{} {}", self.status, self.text);
        self
    }
}

pub fn uuid_text() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

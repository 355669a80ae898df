//! All SQL. One text per query, in the subset that SQLite and PostgreSQL share: `$n` placeholders, BIGINT (also for booleans
//! as 0/1 and times as Unix milliseconds), DOUBLE PRECISION, TEXT (also for JSON and hex), `ON CONFLICT`, `RETURNING`.
//!
//! Nothing above this module sees an sqlx type. SQLite has one writer: writes go through a pool of one connection, so they
//! queue there instead of failing as busy.

pub mod audit;
pub mod clusters;
pub(crate) mod codec;
pub mod definitions;
pub mod evaluations;
pub mod join_tokens;
pub mod keys;
pub mod leases;
mod migrations;
pub mod organizations;
pub mod outcomes;
mod positions;
pub mod runs;
pub mod sessions;
pub mod users;

use std::time::Duration;

use rlm_core::error::{Code, Error};
use sqlx::Row as _;
use sqlx::any::{AnyPoolOptions, install_default_drivers};
use sqlx::{Any, AnyPool, Transaction};

/// A failure of the database.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the database could not {attempt}: {source}")]
    Driver { attempt: &'static str, source: sqlx::Error },
    #[error("the database's migrations could not be applied: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    /// A stored value that this version can't read.
    #[error("inconsistent data in {table}.{column} of {row}: {problem}")]
    Inconsistent { table: &'static str, column: &'static str, row: String, problem: String },
}

impl StoreError {
    /// Whether the statement broke a uniqueness rule.
    #[must_use]
    pub fn is_unique_violation(&self) -> bool {
        matches!(self, Self::Driver { source: sqlx::Error::Database(error), .. } if error.is_unique_violation())
    }
}

/// Logs the failure, once, and says nothing of it to the user.
impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            // 55P03 and 57014: the lock or the statement took longer than PostgreSQL was told to wait. 40P01: a deadlock.
            StoreError::Driver { source: sqlx::Error::Database(ref source), .. }
                if matches!(source.code().as_deref(), Some("40P01" | "55P03" | "57014")) =>
            {
                tracing::warn!(%error, "the database is busy");
                Self::new(Code::Unavailable, "the server's database is busy; try again")
            }
            StoreError::Driver { source: sqlx::Error::PoolTimedOut, .. } => {
                tracing::warn!(%error, "the database is busy");
                Self::new(Code::Unavailable, "the server's database is busy; try again")
            }
            StoreError::Driver { .. } | StoreError::Migrate(_) | StoreError::Inconsistent { .. } => {
                tracing::error!(%error, "the database failed");
                Self::new(Code::Internal, "the server could not use its database; its log says why under this request's id")
            }
        }
    }
}

/// Reads an id or another value with a text form out of a column.
pub(crate) fn parse_column<T: std::str::FromStr>(text: &str, table: &'static str, column: &'static str, row: &str) -> Result<T, StoreError>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|problem: T::Err| StoreError::Inconsistent { table, column, row: row.to_owned(), problem: problem.to_string() })
}

/// Names what was attempted: `.attempt("store the evaluation")?`.
pub(crate) trait Attempt<T> {
    fn attempt(self, attempt: &'static str) -> Result<T, StoreError>;
}

impl<T> Attempt<T> for Result<T, sqlx::Error> {
    fn attempt(self, attempt: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::Driver { attempt, source })
    }
}

/// What each SQLite connection begins with.
const SQLITE: &[&str] = &[
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA busy_timeout = 20000",
    "PRAGMA cache_size = -8000",
];
/// What each PostgreSQL connection begins with: nothing waits for ever, and no lock outlives a server that has gone.
const POSTGRES: &[&str] =
    &["SET statement_timeout = '120s'", "SET lock_timeout = '15s'", "SET idle_in_transaction_session_timeout = '60s'"];

/// The database. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    readers: AnyPool,
    writer: AnyPool,
    sqlite: bool,
}

/// A write in progress; dropped without [`Write::commit`] it changes nothing.
pub struct Write {
    pub(crate) tx: Transaction<'static, Any>,
}

impl Write {
    pub async fn commit(self) -> Result<(), StoreError> {
        self.tx.commit().await.attempt("commit a transaction")
    }
}

impl Store {
    /// Opens (and for SQLite creates) the database at `url` (`sqlite:///path/file.db`, `postgres://...`) and applies
    /// outstanding migrations.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        install_default_drivers();
        let sqlite = url.starts_with("sqlite:");
        let options = |connections: u32| {
            AnyPoolOptions::new().max_connections(connections).acquire_timeout(Duration::from_secs(20)).after_connect(
                move |connection, _| {
                    Box::pin(async move {
                        for setting in if sqlite { SQLITE } else { POSTGRES } {
                            sqlx::query(*setting).execute(&mut *connection).await?;
                        }
                        Ok(())
                    })
                },
            )
        };
        let (writer, readers) = if sqlite {
            let url = if url.contains('?') { url.to_owned() } else { format!("{url}?mode=rwc") };
            let writer = options(1).connect(&url).await.attempt("be opened")?;
            (writer, options(4).connect(&url).await.attempt("be opened")?)
        } else {
            // Apart, so that a transaction which reads beside itself never waits for one that waits for it.
            let writer = options(12).connect(url).await.attempt("be opened")?;
            (writer, options(12).connect(url).await.attempt("be opened")?)
        };
        migrations::migrator().run(&writer).await?;
        Ok(Self { readers, writer, sqlite })
    }

    /// The pool for reads outside a transaction.
    pub(crate) fn read(&self) -> &AnyPool {
        &self.readers
    }

    /// Begins a write transaction.
    pub async fn write(&self) -> Result<Write, StoreError> {
        // At once the writer: a transaction that reads first could not become it once another process wrote.
        let begun = if self.sqlite { self.writer.begin_with("BEGIN IMMEDIATE").await } else { self.writer.begin().await };
        let tx = begun.attempt("begin a transaction")?;
        Ok(Write { tx })
    }

    /// A value of the `meta` table.
    pub async fn meta(&self, key: &str) -> Result<Option<String>, StoreError> {
        let row = sqlx::query("SELECT value FROM meta WHERE key = $1")
            .bind(key)
            .fetch_optional(self.read())
            .await
            .attempt("read its metadata")?;
        row.map(|row| row.try_get("value").attempt("read its metadata")).transpose()
    }

    /// The value of `key` in the `meta` table; `fresh` is stored when there is none.
    pub async fn meta_or_insert(&self, key: &str, fresh: &str) -> Result<String, StoreError> {
        let mut write = self.write().await?;
        sqlx::query("INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING")
            .bind(key)
            .bind(fresh)
            .execute(&mut *write.tx)
            .await
            .attempt("store its metadata")?;
        write.commit().await?;
        Ok(self.meta(key).await?.unwrap_or_else(|| fresh.to_owned()))
    }

    pub async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

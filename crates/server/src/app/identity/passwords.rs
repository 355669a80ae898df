//! Passwords: argon2id, off the async threads, few at a time (each hash takes 19 MiB and some ten milliseconds).

use std::sync::{Arc, LazyLock};

use argon2::Argon2;
use argon2::password_hash::phc::PasswordHash;
use argon2::password_hash::{PasswordHasher as _, PasswordVerifier as _};
use rlm_core::error::{Code, Error};
use tokio::sync::Semaphore;

/// Shortest password that an account may have.
pub const SHORTEST: usize = 10;
/// Longest: hashing must not become a way to keep the server busy.
const LONGEST: usize = 1024;

static AT_ONCE: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(2)));

/// What an unknown account's password is compared with, so that its answer takes as long as a known one's.
const DECOY: &str = "$argon2id$v=19$m=19456,t=2,p=1$bm90LWFuLWFjY291bnQ$5zmyQ8nqWbCgGJnBEbcnYO8zFQ2TTTmfzHZ2y0bbvHw";

/// Refuses passwords that are too short or too long.
pub fn check_strength(password: &str) -> Result<(), String> {
    if password.chars().count() < SHORTEST {
        Err(format!("must have at least {SHORTEST} characters"))
    } else if password.len() > LONGEST {
        Err(format!("must have at most {LONGEST} bytes"))
    } else {
        Ok(())
    }
}

/// The PHC string of a password.
pub async fn hash(password: &str) -> Result<String, Error> {
    let password = password.to_owned();
    run(move || Argon2::default().hash_password(password.as_bytes()).map(|hash| hash.to_string()).ok())
        .await?
        .ok_or_else(|| Error::new(Code::Internal, "the password could not be hashed"))
}

/// Whether a password matches a stored hash; `None` is an account that does not exist.
pub async fn verify(password: &str, stored: Option<&str>) -> Result<bool, Error> {
    if password.len() > LONGEST {
        return Ok(false);
    }
    let known = stored.is_some();
    let stored = stored.unwrap_or(DECOY).to_owned();
    let password = password.to_owned();
    let matches =
        run(move || PasswordHash::new(&stored).is_ok_and(|parsed| Argon2::default().verify_password(password.as_bytes(), &parsed).is_ok()))
            .await?;
    Ok(matches && known)
}

async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    let busy = |_| Error::new(Code::Unavailable, "the server is busy checking passwords; try again");
    let permit = tokio::time::timeout(std::time::Duration::from_secs(10), Arc::clone(&AT_ONCE).acquire_owned())
        .await
        .map_err(|_| Error::new(Code::Unavailable, "the server is busy checking passwords; try again"))?
        .map_err(busy)?;
    // The work goes on when whoever waits for it goes away, so it is the work that holds the permit.
    let work = move || {
        let done = work();
        drop(permit);
        done
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::new(Code::Internal, "checking the password failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_nobody_waits_for_keeps_its_permit() {
        let (finish, wait) = std::sync::mpsc::channel::<()>();
        let (began, begun) = tokio::sync::oneshot::channel();
        let waiting = tokio::spawn(run(move || {
            began.send(()).unwrap();
            wait.recv().ok()
        }));
        begun.await.unwrap();
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        assert!(AT_ONCE.available_permits() < 2);
        drop(finish);
    }

    #[tokio::test]
    async fn only_the_same_password_matches() {
        let stored = hash("correct horse").await.unwrap();
        assert!(stored.starts_with("$argon2id$v=19$"));
        assert!(verify("correct horse", Some(&stored)).await.unwrap());
        assert!(!verify("correct horsf", Some(&stored)).await.unwrap());
        assert!(!verify("correct horse", Some("not a hash")).await.unwrap());
        assert!(!verify("not an account", None).await.unwrap());
        assert_ne!(stored, hash("correct horse").await.unwrap(), "salted");
        assert!(PasswordHash::new(DECOY).is_ok(), "the decoy takes as long as a real hash");
    }
}

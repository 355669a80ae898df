//! One attempt at a component: started, watched until it serves, watched until it ends. Decides nothing about the next one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rlm_core::failure::{Failure, FailureCode};
use tokio::sync::mpsc;

use super::child::{Child, Launcher, Start};
use super::classify::{self, Exit};
use super::launch::Source;
use super::logs::LogSink;
use crate::executor::run::components::{ComponentKind, Happened, News, Stop};

/// What is to be started.
pub struct Attempt {
    pub name: String,
    pub number: u32,
    /// The machine's name.
    pub node: String,
    pub kind: ComponentKind,
    pub source: Source,
    pub socket: PathBuf,
    /// Where it runs when its definition names no folder.
    pub folder: PathBuf,
    pub log: PathBuf,
    pub startup_timeout: Duration,
}

/// Runs the attempt to its end; says once when it serves and once when it has ended.
pub async fn run(attempt: Attempt, launcher: Launcher, stop: Stop, news: mpsc::Sender<News>) {
    let news = &news;
    let say = |happened| {
        let message = News { name: attempt.name.clone(), attempt: attempt.number, happened };
        // The run's actor may have gone; then nobody needs the news.
        async move { drop(news.send(message).await) }
    };
    let failure = match &attempt.source {
        Source::Address(address) => running_server(&attempt, address, &stop, &say).await,
        Source::Start(launch) => {
            let log = LogSink::create(attempt.log.clone());
            let start = Start { launch, folder: &attempt.folder, log, stdin: None };
            match launcher.start(start).await {
                Ok(mut child) => {
                    let failure = process(&attempt, &mut child, &stop, &say).await;
                    child.finish().await;
                    failure.map(|failure| with_last_lines(failure, &child))
                }
                Err(error) => Some(cannot_start(&attempt, launch.folder.as_deref(), &error)),
            }
        }
    };
    // The socket may never have been made.
    let _ = std::fs::remove_file(&attempt.socket);
    say(Happened::Ended { failure }).await;
}

/// For whoever asked: who is to blame is theirs to know, and the last output (of what hung, say) comes with it.
fn asked(attempt: &Attempt) -> Failure {
    Failure::new(FailureCode::ProcessKilled, format!("{} was ended as asked", attempt.name)).of(&attempt.name)
}

/// Output that came after the end was seen belongs to the failure too.
fn with_last_lines(failure: Failure, child: &Child) -> Failure {
    Failure { log_lines: child.last_lines(), ..failure }
}

fn cannot_start(attempt: &Attempt, folder: Option<&Path>, error: &std::io::Error) -> Failure {
    let missing = folder.filter(|folder| !folder.is_dir());
    let (code, why) = match missing {
        Some(folder) => (FailureCode::InvalidEntrypoint, format!("its pythonPath {} is not a folder of this machine", folder.display())),
        None => (FailureCode::AgentError, format!("no process could be started: {error}")),
    };
    Failure::new(code, format!("{}: {why}", attempt.name)).of(&attempt.name)
}

async fn process<F: Future<Output = ()>>(
    attempt: &Attempt,
    child: &mut Child,
    stop: &Stop,
    say: &impl Fn(Happened) -> F,
) -> Option<Failure> {
    let address = format!("unix://{}", attempt.socket.display());
    let ended = tokio::select! {
        biased;
        () = stop.stop.cancelled() => {
            child.stop(&stop.hurry).await;
            return Some(asked(attempt));
        }
        ended = child.ended() => Some(ended),
        () = serving(&address) => None,
        () = tokio::time::sleep(attempt.startup_timeout) => {
            let lines = child.last_lines();
            child.stop(&stop.hurry).await;
            return Some(classify::start_timeout(&attempt.name, attempt.kind, attempt.startup_timeout, lines));
        }
    };
    let (ended, ready) = match ended {
        Some(ended) => (ended, false),
        None => {
            say(Happened::Ready { address, node: attempt.node.clone() }).await;
            tokio::select! {
                biased;
                () = stop.stop.cancelled() => {
                    child.stop(&stop.hurry).await;
                    return Some(asked(attempt));
                }
                ended = child.ended() => (ended, true),
            }
        }
    };
    let out_of_memory = child.out_of_memory();
    child.finish().await;
    let log_lines = child.last_lines();
    Some(classify::classify(Exit { component: &attempt.name, kind: attempt.kind, ended, ready, out_of_memory, log_lines: &log_lines }))
}

async fn running_server<F: Future<Output = ()>>(
    attempt: &Attempt,
    address: &str,
    stop: &Stop,
    say: &impl Fn(Happened) -> F,
) -> Option<Failure> {
    tokio::select! {
        () = stop.stop.cancelled() => return None,
        () = serving(address) => {}
        () = tokio::time::sleep(attempt.startup_timeout) => {
            let message = format!("{}: nothing serves at {address}; start the {} there first, or correct its address", attempt.name, attempt.kind.noun());
            return Some(Failure::new(attempt.kind.start_timeout(), message).of(&attempt.name));
        }
    }
    say(Happened::Ready { address: address.to_owned(), node: attempt.node.clone() }).await;
    stop.stop.cancelled().await;
    None
}

/// Returns once something accepts connections at the address.
async fn serving(address: &str) {
    let mut pause = Duration::from_millis(10);
    loop {
        let connected = match address.strip_prefix("unix://") {
            Some(path) => tokio::net::UnixStream::connect(path).await.map(drop),
            None => {
                let host = address.strip_prefix("tcp://").unwrap_or(address);
                match tokio::time::timeout(Duration::from_secs(5), tokio::net::TcpStream::connect(host)).await {
                    Ok(result) => result.map(drop),
                    Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
                }
            }
        };
        if connected.is_ok() {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

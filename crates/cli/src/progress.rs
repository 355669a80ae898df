//! Waiting for an evaluation: a live bar on a terminal, plain lines elsewhere. Survives restarts of the server.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rlm_api::rest::EvaluationDetail;
use tokio::signal::unix::{SignalKind, signal};

use crate::client::Client;
use crate::error::CliError;
use crate::output::note;

const POLL: Duration = Duration::from_millis(250);
const PLAIN_EVERY: Duration = Duration::from_secs(2);
/// How long the server may be away before waiting gives up.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// Polls until the evaluation is over; exit status 8 when `timeout` (seconds; one look at least) passes first, and 130 on
/// Ctrl-C, also while the server does not answer.
pub async fn wait(client: &Client, id: &str, timeout: Option<u64>) -> Result<EvaluationDetail, CliError> {
    let late = async {
        match timeout {
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds.max(1))).await,
            None => std::future::pending().await,
        }
    };
    // From here on it is caught, whatever is under way.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| CliError::other(format!("signals can't be received: {error}")))?;
    tokio::select! {
        over = watch(client, id) => over,
        () = late => {
            let message = format!("{id} is not over after {} s; it goes on. Wait again with `rlmesh eval wait {id}`", timeout.unwrap_or(0));
            Err(CliError { code: "pending".to_owned(), exit: 8, ..CliError::other(message) })
        }
        _ = interrupt.recv() => {
            let message = format!("stopped waiting; {id} goes on. `rlmesh eval cancel {id}` stops it");
            Err(CliError { code: "interrupted".to_owned(), exit: 130, ..CliError::other(message) })
        }
    }
}

/// Takes the bar away, however waiting ends.
struct Cleared(ProgressBar);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

async fn watch(client: &Client, id: &str) -> Result<EvaluationDetail, CliError> {
    let terminal = std::io::stderr().is_terminal();
    let bar = ProgressBar::with_draw_target(Some(1), if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() });
    if let Ok(style) = ProgressStyle::with_template("{bar:30.cyan/dim} {pos}/{len} episodes  {msg}") {
        bar.set_style(style);
    }
    let bar = Cleared(bar);
    let bar = &bar.0;
    let mut rate = Rate::default();
    let mut said = Instant::now().checked_sub(PLAIN_EVERY);
    let mut away: Option<Instant> = None;
    loop {
        match client.read::<EvaluationDetail>(&format!("/v1/evaluations/{id}")).await {
            Ok(evaluation) => {
                away = None;
                let progress = &evaluation.summary.progress;
                let per_second = rate.update(Instant::now(), progress.completed_episodes);
                let message = describe(&evaluation, per_second);
                bar.set_length(progress.total_episodes);
                bar.set_position(progress.completed_episodes);
                bar.set_message(message.clone());
                let over = evaluation.summary.status.is_terminal();
                if !terminal && (over || said.is_none_or(|at| at.elapsed() >= PLAIN_EVERY)) {
                    note(&format!(
                        "{}  {}/{} episodes  {message}",
                        evaluation.summary.status.as_str(),
                        progress.completed_episodes,
                        progress.total_episodes
                    ));
                    said = Some(Instant::now());
                }
                if over {
                    return Ok(evaluation);
                }
            }
            Err(error) if error.is_transient() => {
                let since = *away.get_or_insert_with(Instant::now);
                if since.elapsed() > PATIENCE {
                    return Err(error);
                }
                bar.set_message("the server is away; waiting for it");
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(POLL).await;
    }
}

fn describe(evaluation: &EvaluationDetail, per_second: Option<f64>) -> String {
    let progress = &evaluation.summary.progress;
    let left = progress.total_episodes.saturating_sub(progress.completed_episodes);
    let mut parts = Vec::new();
    match per_second {
        Some(rate) if rate > 0.0 && left > 0 => parts.push(format!("{rate:.1} episodes/s, {} left", duration(left as f64 / rate))),
        _ => {
            if let Some(waiting) = &evaluation.summary.waiting {
                parts.push(waiting.message.clone());
            }
        }
    }
    if progress.errored_episodes > 0 {
        parts.push(format!("{} errored", progress.errored_episodes));
    }
    parts.join(", ")
}

/// Seconds as a person says them.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.round().max(0.0) as u64;
    match seconds {
        0..=59 => format!("{seconds} s"),
        60..=3599 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Episodes per second over the last minute.
#[derive(Default)]
struct Rate {
    samples: std::collections::VecDeque<(Instant, u64)>,
    last_finished: Option<Instant>,
}

impl Rate {
    const WINDOW: Duration = Duration::from_secs(60);
    /// Without an episode for this long, and for that of several at the rate so far, nobody knows how long the rest will take.
    const QUIET: Duration = Duration::from_secs(10);
    const SEVERAL: f64 = 5.0;

    fn update(&mut self, now: Instant, episodes: u64) -> Option<f64> {
        if self.samples.back().is_none_or(|(_, before)| *before != episodes) {
            self.last_finished = Some(now);
        }
        self.samples.push_back((now, episodes));
        while self.samples.len() > 2 && self.samples.front().is_some_and(|(at, _)| now - *at > Self::WINDOW) {
            self.samples.pop_front();
        }
        let (since, before) = self.samples.front()?;
        let seconds = (now - *since).as_secs_f64();
        let rate = episodes.saturating_sub(*before) as f64 / seconds;
        let quiet = now - self.last_finished?;
        let stalled = quiet > Self::QUIET && quiet.as_secs_f64() * rate > Self::SEVERAL;
        (seconds >= 0.5 && !stalled).then_some(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_over_a_minute_and_ends_when_nothing_finishes() {
        let start = Instant::now();
        let (mut rate, mut said) = (Rate::default(), None);
        let mut at = |seconds: u64, episodes: u64| {
            said = rate.update(start + Duration::from_secs(seconds), episodes);
            said
        };
        assert_eq!(at(0, 0), None, "nothing is known yet");
        for second in 1..=100 {
            at(second, 2 * second);
        }
        assert_eq!(at(101, 202), Some(2.0));
        assert!(at(108, 202).is_some(), "a pause is no end");
        assert_eq!(at(115, 202), None);
        assert!(at(116, 204).is_some());
        // Slow episodes: one every 20 s.
        let mut slow = Rate::default();
        let said: Vec<bool> = (0..200).map(|second| slow.update(start + Duration::from_secs(second), second / 20).is_some()).collect();
        assert!(said[61..].iter().all(|said| *said));
    }
}

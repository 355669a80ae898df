//! How a run's actor ends: processes are ended, results that are still on their way kept, and the end said if nobody did yet.

use std::time::Duration;

use rlm_api::cluster::v1::run_status::Phase;
use rlm_api::cluster::v1::runner_message::Message;
use tokio::sync::mpsc;

use super::components::News;
use super::report::{record_end, status};
use super::{Ask, Run};
use super::{Place, RunnerExit};
use crate::executor::now_ms;
use crate::runners::FromRunner;
use crate::spool::{NewRecord, RunEnd};

/// How long a runner that said `Done` may take to end.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long a runner that was told to stop may send results.
const LAST_RESULTS: Duration = Duration::from_millis(350);
const HURRY_LIMIT: Duration = Duration::from_secs(5);
const STOP_LIMIT: Duration = Duration::from_secs(15);

impl<P: Place> Run<P> {
    /// Ends what runs, keeps the results that are still on their way, and says how the run ended if nobody did yet.
    pub(super) async fn wind_up(
        &mut self,
        asked: Option<Ask>,
        inbox: &mut mpsc::Receiver<News>,
        messages: &mut mpsc::Receiver<FromRunner>,
        exits: &mut mpsc::Receiver<RunnerExit>,
    ) {
        let hurry = asked.is_some();
        let runner = self.runner.take();
        let mut results = Vec::new();
        if let Some(runner) = &runner {
            if hurry {
                // Asked first, so that it hears of no component's end and sends what it has.
                runner.end(false);
                results = self.last_results(messages, exits).await;
            } else {
                // It ends by itself once it has heard that the run is over.
                let _ = tokio::time::timeout(FAREWELL, exits.recv()).await;
            }
            runner.end(hurry);
        }
        let limit = if hurry { HURRY_LIMIT } else { STOP_LIMIT };
        self.components.end_all(hurry, limit, inbox).await;
        if let Some(runner) = &runner
            && tokio::time::timeout(limit, runner.ended.cancelled()).await.is_err()
        {
            tracing::error!(run = %self.key(), "the runner does not end");
        }
        self.stream = None;
        self.shared.runners.forget(self.key().run_id, &self.to_actor);
        if let Some(ask) = asked {
            self.keep_results(results).await;
            let key = self.key();
            match ask {
                Ask::Shutdown => {}
                Ask::Cancel => {
                    let status = status(Phase::Cancelled, "", "", now_ms(), None, Some(&self.provenance));
                    record_end(&self.shared.spool, key, NewRecord::status(key, status), RunEnd::Cancelled).await;
                }
                Ask::Stop => {
                    if let Err(error) = self.shared.spool.end(key, RunEnd::Stopped).await {
                        tracing::error!(run = %key, %error, "the end of a stopped run could not be stored");
                    }
                }
            }
        }
        self.place.clean_up(asked != Some(Ask::Shutdown)).await;
    }

    /// What a runner that was told to stop still sends, until it has ended or its time is up.
    async fn last_results(&mut self, messages: &mut mpsc::Receiver<FromRunner>, exits: &mut mpsc::Receiver<RunnerExit>) -> Vec<NewRecord> {
        let mut records = Vec::new();
        let deadline = tokio::time::sleep(LAST_RESULTS);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                biased;
                message = messages.recv() => match message {
                    Some(FromRunner::Message { message: Message::Episodes(episodes), .. }) => records.extend(self.episode_records(episodes.episodes)),
                    Some(FromRunner::Message { stream, message: Message::Done(done) }) => self.acknowledge(stream, done.sequence),
                    Some(FromRunner::Message { .. } | FromRunner::Attached { .. } | FromRunner::Detached { .. }) => {}
                    None => return records,
                },
                _ = exits.recv() => return records,
                () = &mut deadline => return records,
            }
        }
    }

    /// Stores the results that the runner sent before it was ended.
    async fn keep_results(&mut self, results: Vec<NewRecord>) {
        let mut records: Vec<NewRecord> =
            self.outbox.drain(..).filter(|batch| batch.end.is_none()).flat_map(|batch| batch.records).collect();
        records.extend(results);
        if records.is_empty() {
            return;
        }
        let stored = tokio::time::timeout(Duration::from_secs(10), self.shared.spool.append(records)).await;
        if !matches!(stored, Ok(Ok(()))) {
            tracing::warn!(run = %self.key(), "results that were not acknowledged yet could not be stored; their rows are open");
        }
    }
}

//! One run: its actor, wherever its components are. Everything that happens to the run passes through here in order; what must
//! not be lost goes to the spool first, and the runner hears of it after the commit.
//!
//! While an append waits for the spool, the runner's messages wait too (that is the back-pressure), and a cancel does not.

pub mod components;
mod place;
pub mod policy;
pub mod report;
mod standing;
mod wind_up;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use rlm_api::cluster::v1;
use rlm_api::cluster::v1::run_status::Phase;
use rlm_api::cluster::v1::runner_message::Message;
use rlm_core::evaluation::{Provenance, RunSpec};
use rlm_core::failure::{Failure, FailureCode};
use rlm_core::rows;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

pub use self::place::{Place, Prepared, RUNNER, RunnerExit, Shared};

use self::components::{Components, News, Role, Waits};
use self::place::RunnerHandle;
use self::policy::{After, RUNNER_STARTS, after_runner_exit};
use self::report::{Measured, merge, record_end, status};
use self::standing::Said;
use super::now_ms;
use crate::runners::FromRunner;
use crate::spool::{NewRecord, Outcomes, RunEnd, RunKey, SpoolError};

/// What is asked of a run from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// The evaluation was cancelled.
    Cancel,
    /// The run is someone else's now.
    Stop,
    /// The agent ends; the run goes on in the next one.
    Shutdown,
}

/// A run to be carried out.
#[derive(Debug, Clone)]
pub struct Assignment {
    pub key: RunKey,
    pub spec: Arc<RunSpec>,
    pub rows: Vec<v1::RowBlock>,
}

/// Processes of a binding and lanes of a process that a runner may ask for.
const MAX_PODS: u32 = 256;
const MAX_LANES: u32 = 4096;
/// How long a runner has to say `Done` once its model was given up.
const GIVEN_UP: Duration = Duration::from_secs(30);

/// What follows a commit.
enum Then {
    Nothing,
    Ack {
        stream: u64,
        sequence: u64,
    },
    /// The run is over.
    Over {
        stream: u64,
        sequence: u64,
    },
}

struct Batch {
    records: Vec<NewRecord>,
    end: Option<RunEnd>,
    then: Then,
}

type Pending = (BoxFuture<'static, Result<(), SpoolError>>, Then);

struct Stream {
    number: u64,
    commands: mpsc::Sender<v1::AgentCommand>,
    /// Ends the stream when it is dropped.
    _guard: DropGuard,
}

struct Run<P> {
    shared: Shared,
    place: Arc<P>,
    assignment: Assignment,
    components: Components<P>,
    provenance: Provenance,
    stream: Option<Stream>,
    runner: Option<RunnerHandle>,
    runner_starts: u32,
    measured: Measured,
    /// Environment steps that the runner has reported.
    steps_seen: u64,
    runner_restart: Option<Instant>,
    runner_exits: mpsc::Sender<RunnerExit>,
    /// What the runner waits for before it runs.
    runner_waits: Option<Waits>,
    news: mpsc::Sender<News>,
    to_actor: mpsc::Sender<FromRunner>,
    /// Set when the model was given up.
    give_up: Option<Instant>,
    outbox: VecDeque<Batch>,
    said: Said,
    /// A terminal status is on its way to the spool.
    over: bool,
}

/// Carries the run out. Returns when nothing of it is left running; what it came to is in the spool.
pub async fn carry_out<P: Place>(
    shared: Shared,
    assignment: Assignment,
    preparing: impl Future<Output = Result<Prepared<P>, Failure>>,
    mut asks: mpsc::Receiver<Ask>,
) {
    let key = assignment.key;
    let (news, mut inbox) = mpsc::channel(32);
    let (to_actor, mut messages) = mpsc::channel(16);
    let (runner_exits, mut exits) = mpsc::channel(4);
    let Prepared { place, provenance, attempts } = match preparing.await {
        Ok(prepared) => prepared,
        Err(failure) => {
            let status = status(Phase::Failed, "", "", now_ms(), Some(&failure), None);
            record_end(&shared.spool, key, NewRecord::status(key, status), RunEnd::Failed).await;
            return;
        }
    };
    let mut run = Run {
        shared,
        components: Components::new(Arc::clone(&place), attempts, news.clone()),
        place,
        assignment,
        provenance,
        stream: None,
        runner: None,
        runner_starts: 0,
        measured: Measured::default(),
        steps_seen: 0,
        runner_restart: None,
        runner_exits,
        runner_waits: None,
        news,
        to_actor,
        give_up: None,
        outbox: VecDeque::new(),
        said: Said::default(),
        over: false,
    };
    let asked = run.work(&mut asks, &mut inbox, &mut messages, &mut exits).await;
    run.wind_up(asked, &mut inbox, &mut messages, &mut exits).await;
}

impl<P: Place> Run<P> {
    fn key(&self) -> RunKey {
        self.assignment.key
    }

    /// Returns when the run is over (None) or what was asked.
    async fn work(
        &mut self,
        asks: &mut mpsc::Receiver<Ask>,
        inbox: &mut mpsc::Receiver<News>,
        messages: &mut mpsc::Receiver<FromRunner>,
        exits: &mut mpsc::Receiver<RunnerExit>,
    ) -> Option<Ask> {
        let outcomes = self.outcomes().await;
        if self.rows_left(&outcomes).is_empty() {
            self.finish(RunEnd::Finished, None, 0, 0);
        } else {
            self.say_standing();
            self.components.ensure(Role::Model, 1);
            self.start_runner();
        }
        let mut pending: Option<Pending> = None;
        loop {
            if pending.is_none()
                && let Some(batch) = self.outbox.pop_front()
            {
                pending = Some(self.append(batch));
            }
            let timer = [self.components.next_timer(), self.runner_restart, self.give_up].into_iter().flatten().min();
            tokio::select! {
                biased;
                ask = asks.recv() => return self.settle(pending, ask.unwrap_or(Ask::Shutdown)).await,
                news = inbox.recv() => if let Some(news) = news { self.on_news(news) },
                result = async { match &mut pending { Some((append, _)) => append.await, None => std::future::pending().await } } => {
                    if let Some((_, then)) = pending.take()
                        && self.committed(result, then)
                    {
                        return None;
                    }
                }
                exit = exits.recv() => if let Some(exit) = exit { self.on_runner_exit(exit) },
                message = messages.recv(), if pending.is_none() => if let Some(message) = message { self.on_runner(message).await },
                () = async { match timer { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {
                    self.on_timer();
                }
            }
        }
    }

    /// An append that is under way is waited for before anything else is stored.
    async fn settle(&mut self, pending: Option<Pending>, ask: Ask) -> Option<Ask> {
        if ask == Ask::Cancel {
            self.command(v1::agent_command::Command::Cancel(v1::CancelRun { reason: "the evaluation was cancelled".to_owned() }));
        }
        if let Some((append, then)) = pending {
            // On shutdown a spool that is full must not hold the agent up; what was not stored was not acknowledged either.
            let limit = if ask == Ask::Shutdown { Duration::from_secs(2) } else { Duration::from_millis(200) };
            if let Ok(result) = tokio::time::timeout(limit, append).await
                && self.committed(result, then)
            {
                return None;
            }
        }
        Some(ask)
    }

    fn append(&self, batch: Batch) -> Pending {
        let (spool, key) = (self.shared.spool.clone(), self.key());
        let append = async move {
            match batch.end {
                None => spool.append(batch.records).await,
                Some(end) => spool.append_end(batch.records, key, end).await,
            }
        };
        (append.boxed(), batch.then)
    }

    /// True: the run is over.
    fn committed(&mut self, result: Result<(), SpoolError>, then: Then) -> bool {
        if let Err(error) = result {
            tracing::error!(run = %self.key(), %error, "a record could not be stored; the runner sends it again");
            // Not acknowledged: a runner that attaches anew sends it again.
            self.stream = None;
            return matches!(then, Then::Over { .. });
        }
        match then {
            Then::Nothing => false,
            Then::Ack { stream, sequence } => {
                self.acknowledge(stream, sequence);
                false
            }
            Then::Over { stream, sequence } => {
                self.acknowledge(stream, sequence);
                true
            }
        }
    }

    fn acknowledge(&mut self, stream: u64, sequence: u64) {
        if self.stream.as_ref().is_some_and(|current| current.number == stream) {
            self.command(v1::agent_command::Command::Ack(v1::EpisodesAck { sequence }));
        }
    }

    fn command(&mut self, command: v1::agent_command::Command) {
        let Some(stream) = &self.stream else { return };
        if stream.commands.try_send(v1::AgentCommand { command: Some(command) }).is_err() {
            tracing::warn!(run = %self.key(), "the runner does not take its commands; its stream is closed");
            self.stream = None;
        }
    }

    fn tell(&mut self, changes: Vec<v1::Component>) {
        for change in changes {
            self.command(v1::agent_command::Command::Component(change));
        }
    }

    fn store(&mut self, records: Vec<NewRecord>, then: Then) {
        self.outbox.push_back(Batch { records, end: None, then });
    }

    async fn outcomes(&self) -> Outcomes {
        match self.shared.spool.outcomes(self.key()).await {
            Ok(outcomes) => outcomes,
            Err(error) => {
                // Rows that are run twice keep their first outcome; rows that are not run would be lost.
                tracing::error!(run = %self.key(), %error, "outcomes can't be read; all rows are run");
                Outcomes::default()
            }
        }
    }

    fn rows_left(&self, outcomes: &Outcomes) -> Vec<v1::RowBlock> {
        let segments: Vec<rows::Segment> = self.assignment.rows.iter().map(|block| block.to_segment(0)).collect();
        rows::without(&segments, &outcomes.done)
            .iter()
            .filter_map(|segment| v1::RowBlock::from_segment(segment, segment.task).ok())
            .collect()
    }

    fn row_count(&self) -> u64 {
        self.assignment.rows.iter().map(|block| u64::from(block.count)).sum()
    }

    async fn on_runner(&mut self, message: FromRunner) {
        match message {
            FromRunner::Attached { stream, commands, guard } => {
                // The older stream ends with its guard.
                self.stream = Some(Stream { number: stream, commands, _guard: guard });
                let outcomes = self.outcomes().await;
                let plan = v1::Plan {
                    run_json: serde_json::to_string(&*self.assignment.spec).unwrap_or_default(),
                    rows: self.rows_left(&outcomes),
                    attempt_base: outcomes.max_attempt.map_or(0, |attempt| attempt + 1),
                };
                self.command(v1::agent_command::Command::Plan(plan));
                let components = self.components.snapshot();
                self.tell(components);
            }
            FromRunner::Detached { stream } => {
                if self.stream.as_ref().is_some_and(|current| current.number == stream) {
                    self.stream = None;
                }
            }
            FromRunner::Message { stream, message } => {
                if self.stream.as_ref().is_some_and(|current| current.number == stream) {
                    self.on_message(stream, message).await;
                } else if let Message::Episodes(episodes) = message {
                    // Results of a stream that was replaced or lost count all the same.
                    let records = self.episode_records(episodes.episodes);
                    self.store(records, Then::Nothing);
                }
            }
        }
    }

    fn episode_records(&self, episodes: Vec<v1::Episode>) -> Vec<NewRecord> {
        let key = self.key();
        // A row that was interrupted because its runner was told to stop has no outcome: it is run again, or nobody wants it.
        let decided =
            |episode: &v1::Episode| !matches!(&episode.outcome, Some(v1::episode::Outcome::Errored(failure)) if is_cancelled(failure));
        episodes.into_iter().filter(decided).map(|episode| NewRecord::episode(key, episode)).collect()
    }

    async fn on_message(&mut self, stream: u64, message: Message) {
        match message {
            Message::Attach(_) => tracing::warn!(run = %self.key(), "a runner attached twice on one stream"),
            Message::Acquire(acquire) => self.acquire(&acquire),
            Message::Release(release) => {
                self.components.release(|role| matches!(role, Role::Environment { binding, .. } if binding == release.binding));
            }
            Message::Restart(restart) => {
                tracing::info!(run = %self.key(), component = %restart.component, attempt = restart.attempt, reason = %restart.reason, "the runner asks for a restart");
                let changes = self.components.restart(&restart.component, restart.attempt);
                self.tell(changes);
            }
            Message::Episodes(episodes) => {
                self.say_it_runs();
                if !episodes.episodes.is_empty() {
                    self.components.progress();
                    self.runner_starts = self.runner_starts.min(1);
                }
                let records = self.episode_records(episodes.episodes);
                self.store(records, Then::Ack { stream, sequence: episodes.sequence });
            }
            Message::Progress(progress) => {
                if progress.env_steps > 0 {
                    self.say_it_runs();
                }
                // Steps without an episode are progress too: several lanes may crash in company again and again, and each
                // row has a count of its own.
                if progress.env_steps > self.steps_seen {
                    self.components.progress();
                }
                self.steps_seen = progress.env_steps;
            }
            Message::Metrics(metrics) => {
                let record = NewRecord::metrics(self.key(), self.measured.with(metrics));
                self.store(vec![record], Then::Nothing);
            }
            Message::Provenance(report) => self.on_provenance(&report),
            Message::Done(done) => self.on_done(stream, done).await,
        }
    }

    fn acquire(&mut self, acquire: &v1::AcquireBinding) {
        let known = self.assignment.spec.bindings.iter().any(|binding| binding.index == acquire.binding);
        if !known || acquire.pods == 0 || acquire.pods > MAX_PODS || acquire.lanes_per_pod == 0 || acquire.lanes_per_pod > MAX_LANES {
            tracing::error!(run = %self.key(), ?acquire, "the runner asks for what this run does not have");
            let message =
                format!("binding {} with {} processes of {} lanes can't be had", acquire.binding, acquire.pods, acquire.lanes_per_pod);
            self.finish(RunEnd::Failed, Some(&Failure::new(FailureCode::Internal, message)), 0, 0);
            return;
        }
        let (binding, pods) = (acquire.binding, acquire.pods);
        self.components.release(|role| matches!(role, Role::Environment { binding: other, pod } if other == binding && pod >= pods));
        for pod in 0..pods {
            let changes = self.components.ensure(Role::Environment { binding, pod }, acquire.lanes_per_pod);
            self.tell(changes);
        }
        self.provenance.lanes_per_pod = Some(acquire.lanes_per_pod);
        self.say_standing();
    }

    fn on_provenance(&mut self, report: &v1::ProvenanceReport) {
        let parsed: Provenance = match serde_json::from_str(&report.provenance_json) {
            Ok(parsed) => parsed,
            Err(error) => {
                tracing::warn!(run = %self.key(), %error, "the runner's provenance can't be read");
                return;
            }
        };
        let ours = std::mem::take(&mut self.provenance);
        self.provenance = merge(ours, parsed);
        self.say_provenance();
    }

    async fn on_done(&mut self, stream: u64, done: v1::Done) {
        if let Some(failure) = done.failure {
            if is_cancelled(&failure) {
                tracing::warn!(run = %self.key(), "the runner was told to stop by someone else; it is started again");
                self.let_go_of_runner();
                return;
            }
            self.finish(RunEnd::Failed, Some(&Failure::from(&failure)), stream, done.sequence);
            return;
        }
        let seen = self.outcomes().await.done.len() as u64;
        if seen < self.row_count() {
            tracing::error!(run = %self.key(), seen, rows = self.row_count(), "the runner says it is done, and rows have no outcome; it is started again");
            self.let_go_of_runner();
            return;
        }
        self.finish(RunEnd::Finished, None, stream, done.sequence);
    }

    /// What it said is not acknowledged, and its stream is closed: its end is that of a lost runner.
    fn let_go_of_runner(&mut self) {
        self.stream = None;
        if let Some(runner) = &self.runner {
            runner.end(true);
        }
    }

    /// Sends the terminal status to the spool; the run is over once it is there.
    fn finish(&mut self, end: RunEnd, failure: Option<&Failure>, stream: u64, sequence: u64) {
        if self.over {
            return;
        }
        self.over = true;
        let phase = match end {
            RunEnd::Finished => Phase::Finished,
            RunEnd::Failed => Phase::Failed,
            RunEnd::Cancelled | RunEnd::Stopped => Phase::Cancelled,
        };
        let status = status(phase, "", "", now_ms(), failure, Some(&self.provenance));
        let records = vec![NewRecord::status(self.key(), status)];
        self.outbox.push_back(Batch { records, end: Some(end), then: Then::Over { stream, sequence } });
    }

    fn watch_model(&mut self) {
        if self.give_up.is_none() && self.components.model_failure().is_some() {
            self.give_up = Some(Instant::now() + GIVEN_UP);
        }
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        let changes = self.components.on_timer(now);
        self.tell(changes);
        if self.runner_restart.is_some_and(|at| at <= now) {
            self.runner_restart = None;
            self.start_runner();
        }
        if self.give_up.is_some_and(|at| at <= now) {
            self.give_up = None;
            let failure = self.components.model_failure().cloned();
            if let Some(failure) = failure {
                self.finish(RunEnd::Failed, Some(&failure), 0, 0);
            }
        }
    }

    fn start_runner(&mut self) {
        self.runner_starts += 1;
        self.runner = Some(RunnerHandle::start(&self.shared, &*self.place, &self.to_actor, self.news.clone(), self.runner_exits.clone()));
    }

    fn on_runner_exit(&mut self, exit: RunnerExit) {
        self.runner = None;
        self.runner_waits = None;
        self.measured.runner_ended();
        if self.over {
            return;
        }
        tracing::warn!(run = %self.key(), how = %exit.how, last = exit.log_lines.last().map_or("", String::as_str), "the runner ended before the run did");
        if let Some(failure) = exit.for_good {
            return self.finish(RunEnd::Failed, Some(&failure), 0, 0);
        }
        // The next runner gets environments that no other has touched.
        self.components.release(|_| true);
        match after_runner_exit(self.runner_starts) {
            // A `Done` or results that it sent before are still in the channel and come first.
            After::Restart(pause) => self.runner_restart = Some(Instant::now() + pause.max(Duration::from_millis(50))),
            After::GiveUp => {
                let message = format!("the runner {} {RUNNER_STARTS} times in a row without finishing an episode", exit.how);
                let mut failure = Failure::new(FailureCode::RunnerLost, message).of(RUNNER);
                failure.log_lines = exit.log_lines;
                self.finish(RunEnd::Failed, Some(&failure), 0, 0);
            }
        }
    }
}

fn is_cancelled(failure: &v1::Failure) -> bool {
    failure.code == FailureCode::Cancelled.as_str()
}

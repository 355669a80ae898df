//! The loop over one stream of the model: calls in, groups out, answers back to their lanes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rlm_core::failure::{Failure, FailureCode};
use rlmesh_proto::model::v1 as wire;
use rlmesh_proto::model::v1::{grouped_predict_result::Outcome, join_request::Kind as Ask, join_response::Kind as Answer};
use tokio::sync::{mpsc, oneshot};

use super::{BindError, Bound, Call, Ended, Heard, HubSettings, Predict, Predicted, Ticket};
use crate::batch::{self, Batching, Send, Usual};
use crate::classify::{self, ModelRemedy};
use crate::components::MODEL;
use crate::facts;
use crate::metrics::{Metrics, Series};
use crate::rows::Blame;
use crate::wire::ModelStream;

/// Most housekeeping requests on their way; further ones wait.
const HOUSEKEEPING: usize = 64;
/// Most bytes of observations in one group.
const GROUP_BYTES: usize = 64 * 1024 * 1024;

/// A predict on its way to the model.
struct Flight {
    jobs: Vec<(Ticket, wire::AdapterContext)>,
    grouped: bool,
    alone: bool,
    sent: Instant,
}

struct Binding {
    routes_left: usize,
    bound: Bound,
    native_chunk: Option<u32>,
    reply: Option<oneshot::Sender<Result<Bound, BindError>>>,
}

pub(super) struct Serving {
    metrics: Arc<Metrics>,
    run_id: String,
    horizon: u32,
    progress_timeout: Duration,
    group: usize,
    singles: usize,
    sessions: HashMap<u64, mpsc::Sender<Heard>>,
    waiting: VecDeque<Predict>,
    alone: VecDeque<Predict>,
    flights: HashMap<u64, Flight>,
    binds: HashMap<u64, u64>,
    bindings: HashMap<u64, Binding>,
    chores: VecDeque<Ask>,
    chores_out: usize,
    next_id: u64,
    flown: u64,
    epoch: u64,
    last_sign: Instant,
    free_since: Instant,
    last_alone: bool,
    fuses: bool,
    /// The server does not know grouped predicts.
    no_groups: bool,
    history: bool,
    corners: Option<Vec<String>>,
    forward: Usual,
}

impl Serving {
    pub(super) fn new(settings: &HubSettings) -> Self {
        let now = Instant::now();
        Self {
            metrics: Arc::clone(&settings.metrics),
            run_id: settings.run_id.clone(),
            horizon: settings.horizon.max(1),
            progress_timeout: settings.progress_timeout,
            group: settings.tuning.group.max(1),
            singles: settings.tuning.singles.max(1),
            sessions: HashMap::new(),
            waiting: VecDeque::new(),
            alone: VecDeque::new(),
            flights: HashMap::new(),
            binds: HashMap::new(),
            bindings: HashMap::new(),
            chores: VecDeque::new(),
            chores_out: 0,
            next_id: 0,
            flown: 0,
            epoch: 0,
            last_sign: now,
            free_since: now,
            last_alone: false,
            fuses: true,
            no_groups: false,
            history: false,
            corners: None,
            forward: Usual::default(),
        }
    }

    /// Predicts sent so far. The rows they belong to count what becomes of them.
    pub(super) const fn flown(&self) -> u64 {
        self.flown
    }

    fn tell(&mut self, session: u64, heard: Heard) {
        // A session has room for an answer per lane; when it has none it is gone.
        if let Some(sender) = self.sessions.get(&session)
            && sender.try_send(heard).is_err()
        {
            self.sessions.remove(&session);
        }
    }

    /// The model is gone: nothing asked of it will be answered.
    pub(super) fn down(&mut self, failure: &Failure) {
        let mut blamed: HashMap<u64, Vec<(usize, u64, Blame)>> = HashMap::new();
        let jobs: usize = self.flights.values().map(|flight| flight.jobs.len()).sum();
        let blame = if jobs == 1 { Blame::Sole } else { Blame::Shared };
        for flight in self.flights.values() {
            for (ticket, _) in &flight.jobs {
                blamed.entry(ticket.session).or_default().push((ticket.lane, ticket.generation, blame));
            }
        }
        self.clear();
        for session in self.sessions.keys().copied().collect::<Vec<_>>() {
            let blamed = blamed.remove(&session).unwrap_or_default();
            self.tell(session, Heard::Down { failure: failure.clone(), blamed });
        }
    }

    /// The model will not come back.
    pub(super) fn fail(&mut self, failure: &Failure) {
        self.down(failure);
    }

    fn clear(&mut self) {
        self.flights.clear();
        self.waiting.clear();
        self.alone.clear();
        self.chores.clear();
        self.chores_out = 0;
        self.binds.clear();
        for (_, mut binding) in self.bindings.drain() {
            if let Some(reply) = binding.reply.take() {
                let _ = reply.send(Err(BindError::Later));
            }
        }
    }

    /// Answers calls while no model serves. Returns when there will be none any more.
    pub(super) async fn refuse_calls(&mut self, inbox: &mut mpsc::Receiver<Call>) {
        while let Some(call) = inbox.recv().await {
            match call {
                Call::Open { session, heard } => {
                    self.sessions.insert(session, heard);
                }
                Call::Close { session, .. } => {
                    self.sessions.remove(&session);
                }
                Call::Bind { reply, .. } => {
                    let _ = reply.send(Err(BindError::Later));
                }
                // Whoever asked is told that the model is down, or has been already.
                Call::Predict { .. } | Call::EndEpisode { .. } => {}
            }
        }
    }

    /// Serves until the stream ends.
    pub(super) async fn serve<F: Future<Output = ()>>(
        &mut self,
        mut stream: ModelStream,
        epoch: u64,
        inbox: &mut mpsc::Receiver<Call>,
        gone: impl Fn() -> F,
    ) -> Ended {
        self.clear();
        self.epoch = epoch;
        self.corners = stream.facts.corners();
        self.fuses = !self.no_groups && facts::fuses(self.corners.as_deref(), self.horizon);
        self.history = stream.facts.ingests_history();
        self.last_sign = Instant::now();
        self.free_since = self.last_sign;
        let mut gone = std::pin::pin!(gone());
        loop {
            let wake = match self.dispatch(&stream) {
                Ok(wake) => wake,
                Err(ended) => return ended,
            };
            let busy = !self.flights.is_empty() || !self.binds.is_empty();
            let hung_at = self.last_sign + self.progress_timeout;
            tokio::select! {
                answer = stream.responses.message() => {
                    let answer = match answer {
                        Ok(Some(answer)) => answer,
                        Ok(None) => return Ended::Lost("the model ended the stream".to_owned()),
                        Err(status) => return Ended::Lost(format!("{:?}: {}", status.code(), status.message())),
                    };
                    self.last_sign = Instant::now();
                    if let Err(ended) = self.answered(answer) {
                        return ended;
                    }
                }
                call = inbox.recv() => match call {
                    Some(call) => {
                        self.called(call);
                        while let Ok(more) = inbox.try_recv() {
                            self.called(more);
                        }
                    }
                    None => return Ended::Unused,
                },
                () = sleep(wake) => {}
                () = tokio::time::sleep_until(hung_at.into()), if busy => return Ended::Hung,
                () = &mut gone => return Ended::Lost("the agent replaced the model".to_owned()),
            }
        }
    }

    fn called(&mut self, call: Call) {
        match call {
            Call::Open { session, heard } => {
                self.sessions.insert(session, heard);
            }
            Call::Close { session, routes } => {
                self.sessions.remove(&session);
                self.waiting.retain(|job| job.ticket.session != session);
                self.alone.retain(|job| job.ticket.session != session);
                for route in routes {
                    let context = Some(self.context(&route));
                    self.chores.push_back(Ask::ReleaseAdapter(wire::ReleaseAdapterRequest {
                        context,
                        reason: "the environment's session is over".to_owned(),
                    }));
                }
            }
            Call::Bind { epoch, routes, spec, edition, reply } => {
                if epoch != self.epoch {
                    let _ = reply.send(Err(BindError::Later));
                    return;
                }
                self.next_id += 1;
                let group = self.next_id;
                let bound = Bound { history: false };
                self.bindings.insert(group, Binding { routes_left: routes.len(), bound, native_chunk: None, reply: Some(reply) });
                for route in routes {
                    let context = Some(self.context(&route));
                    self.binds.insert(self.next_id, group);
                    self.chores.push_back(Ask::ResolveAdapter(wire::ResolveAdapterRequest {
                        context,
                        env_spec: Some((*spec).clone()),
                        selected_workflow_edition: edition.clone(),
                        execution_horizon: self.horizon,
                        delivers_history: self.history,
                    }));
                }
                self.last_sign = Instant::now();
            }
            Call::Predict { epoch, jobs } => {
                for job in jobs.into_iter().filter(|_| epoch == self.epoch) {
                    if self.waiting.is_empty() && self.flights.is_empty() {
                        self.free_since = self.free_since.max(Instant::now());
                    }
                    if job.alone { self.alone.push_back(job) } else { self.waiting.push_back(job) }
                }
            }
            Call::EndEpisode { route, episode_id } => {
                let other = |job: &Predict| job.route != route || job.episode_id != episode_id;
                self.waiting.retain(other);
                self.alone.retain(other);
                let context = Some(self.context(&route));
                self.chores.push_back(Ask::ResetAdapter(wire::ResetAdapterRequest { context, episode_ids: vec![episode_id] }));
            }
        }
    }

    fn context(&mut self, route: &str) -> wire::AdapterContext {
        self.next_id += 1;
        wire::AdapterContext { session_id: self.run_id.clone(), env_id: route.to_owned(), request_id: self.next_id.to_string() }
    }

    /// Sends what may be sent; says when to look again.
    fn dispatch(&mut self, stream: &ModelStream) -> Result<Option<Duration>, Ended> {
        while self.chores_out < HOUSEKEEPING {
            let Some(chore) = self.chores.pop_front() else { break };
            let request_id = match &chore {
                Ask::ResolveAdapter(request) => request.context.as_ref(),
                Ask::ReleaseAdapter(request) => request.context.as_ref(),
                Ask::ResetAdapter(request) => request.context.as_ref(),
                Ask::Predict(_) | Ask::GroupedPredict(_) | Ask::Close(_) => None,
            };
            let request_id = request_id.map(|context| context.request_id.clone()).unwrap_or_default();
            self.send(stream, wire::JoinRequest { kind: Some(chore), request_id })?;
            self.chores_out += 1;
        }
        loop {
            let now = Batching {
                waiting: self.waiting.len(),
                alone: self.alone.len(),
                in_flight: self.flights.len(),
                in_flight_alone: self.flights.values().any(|flight| flight.alone),
                stepping: self.metrics.stepping(),
                fuses: self.fuses,
                free_for: self.free_since.elapsed(),
                forward: self.forward.get(),
                step: self.metrics.step(),
                last_alone: self.last_alone,
                singles: self.singles,
            };
            match batch::decide(&now) {
                Send::Nothing => return Ok(None),
                Send::Hold(time) => return Ok(Some(time)),
                Send::Alone => {
                    let Some(job) = self.alone.pop_front() else { return Ok(None) };
                    self.fly(stream, vec![job], true)?;
                }
                Send::Singles(count) => {
                    for _ in 0..count {
                        let Some(job) = self.waiting.pop_front() else { break };
                        self.fly(stream, vec![job], false)?;
                    }
                }
                Send::Group => {
                    let mut bytes = 0;
                    let mut jobs = Vec::with_capacity(self.waiting.len().min(self.group));
                    while jobs.len() < self.group && bytes < GROUP_BYTES {
                        let Some(job) = self.waiting.pop_front() else { break };
                        bytes += job.ask.observation.leaves.iter().map(bytes::Bytes::len).sum::<usize>();
                        jobs.push(job);
                    }
                    self.fly(stream, jobs, false)?;
                }
            }
        }
    }

    fn send(&self, stream: &ModelStream, request: wire::JoinRequest) -> Result<(), Ended> {
        // The channel has room for more than may be in flight, so a full one means that the stream is stuck.
        stream.requests.try_send(request).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Ended::Hung,
            mpsc::error::TrySendError::Closed(_) => Ended::Lost("the stream to the model is closed".to_owned()),
        })
    }

    fn fly(&mut self, stream: &ModelStream, jobs: Vec<Predict>, alone: bool) -> Result<(), Ended> {
        if self.flights.is_empty() {
            self.last_sign = Instant::now();
        }
        let mut tickets = Vec::with_capacity(jobs.len());
        let mut groups = Vec::with_capacity(jobs.len());
        for job in jobs {
            let context = self.context(&job.route);
            let seed = i64::try_from(job.seed).ok();
            let episode = wire::EpisodeInfo { episode_id: job.episode_id, seed };
            let history = job
                .ask
                .history
                .into_iter()
                .map(|seen| wire::ObservationHistoryFrame {
                    observation: Some(seen.observation),
                    episode_info: vec![episode.clone()],
                    step: seen.step,
                })
                .collect();
            tickets.push((job.ticket, context.clone()));
            groups.push(wire::PredictRequest {
                context: Some(context),
                observation: Some(job.ask.observation),
                episode_info: vec![episode],
                history,
                step: job.ask.step,
            });
        }
        let grouped = groups.len() > 1;
        let (id, kind) = match (grouped, groups.pop()) {
            (_, None) => return Ok(()),
            (false, Some(only)) => (self.next_id, Ask::Predict(only)),
            (true, Some(last)) => {
                groups.push(last);
                self.next_id += 1;
                (self.next_id, Ask::GroupedPredict(wire::GroupedPredictRequest { groups }))
            }
        };
        self.metrics.add(Series::GroupSize, tickets.len() as f64);
        self.flights.insert(id, Flight { jobs: tickets, grouped, alone, sent: Instant::now() });
        self.last_alone = alone;
        self.flown += 1;
        self.send(stream, wire::JoinRequest { kind: Some(kind), request_id: id.to_string() })
    }

    fn answered(&mut self, answer: wire::JoinResponse) -> Result<(), Ended> {
        let id = answer.request_id.parse::<u64>().unwrap_or_default();
        if let Some(flight) = self.flights.remove(&id) {
            let took = flight.sent.elapsed();
            self.metrics.time(Series::Predict, took);
            if let Some(nanos) = answer.endpoint_total_ns {
                self.metrics.time(Series::PredictEndpoint, Duration::from_nanos(nanos));
            }
            if self.fuses && !flight.alone {
                self.forward.add(took);
                self.metrics.usual_forward(self.forward.get());
            }
            self.free_since = Instant::now();
            return self.landed(flight, answer.kind);
        }
        self.chores_out = self.chores_out.saturating_sub(1);
        if let Some(group) = self.binds.remove(&id) {
            self.bound(group, answer.kind);
        } else if let Some(Answer::Error(error)) = answer.kind {
            tracing::debug!(code = error.code, message = %error.message, "the model refused housekeeping");
        }
        Ok(())
    }

    fn bound(&mut self, group: u64, answer: Option<Answer>) {
        let Some(binding) = self.bindings.get_mut(&group) else { return };
        let result = match answer {
            Some(Answer::ResolveAdapter(answer)) => {
                binding.routes_left -= 1;
                binding.bound.history |= answer.history.is_some();
                binding.native_chunk = answer.native_chunk.or(binding.native_chunk);
                if binding.routes_left > 0 {
                    return;
                }
                facts::check_horizon(self.corners.as_deref(), binding.native_chunk, self.horizon)
                    .map(|()| binding.bound)
                    .map_err(|failure| BindError::Refused(failure.of(MODEL)))
            }
            Some(Answer::Error(error)) => Err(BindError::Refused(classify::bind_error(MODEL, &error))),
            Some(_) | None => Err(BindError::Refused(
                Failure::new(FailureCode::IncompatibleVersions, "the model answered the binding of an adapter with something else")
                    .of(MODEL),
            )),
        };
        if let Some(mut binding) = self.bindings.remove(&group)
            && let Some(reply) = binding.reply.take()
        {
            let _ = reply.send(result);
        }
    }

    fn landed(&mut self, flight: Flight, answer: Option<Answer>) -> Result<(), Ended> {
        let count = flight.jobs.len();
        let sole = if count == 1 { Blame::Sole } else { Blame::Shared };
        let mut results: Vec<Result<wire::PredictResponse, wire::ModelError>> = match answer {
            Some(Answer::Predict(response)) if !flight.grouped => vec![Ok(response)],
            Some(Answer::GroupedPredict(response)) if flight.grouped && response.results.len() == count => response
                .results
                .into_iter()
                .map(|result| match result.outcome {
                    Some(Outcome::Response(response)) => Ok(response),
                    Some(Outcome::Error(error)) => Err(error),
                    None => Err(wire::ModelError { message: "an empty result".to_owned(), ..wire::ModelError::default() }),
                })
                .collect(),
            Some(Answer::Error(error)) if flight.grouped && error.code() == wire::ModelErrorCode::Unsupported => {
                tracing::warn!("the model's server knows no grouped predicts; asking one by one");
                self.no_groups = true;
                self.fuses = false;
                let failure = Failure::new(FailureCode::ConnectionLost, "the model's server knows no grouped predicts").of(MODEL);
                self.spread(flight.jobs.into_iter().map(|(ticket, _)| (ticket, Err((failure.clone(), Blame::Bystander)))));
                return Ok(());
            }
            Some(Answer::Error(error)) => vec![Err(error); count],
            Some(_) | None => {
                let failure = Failure::new(FailureCode::IncompatibleVersions, "the model answered a predict with something else").of(MODEL);
                self.spread(flight.jobs.into_iter().map(|(ticket, _)| (ticket, Err((failure.clone(), sole)))));
                return Ok(());
            }
        };
        // One failed forward of a fused group is reported to all of it: then it is nobody's in particular.
        let all_failed = results.iter().all(Result::is_err);
        let blame = if all_failed { sole } else { Blame::Sole };
        let mut remedy = ModelRemedy::None;
        let mut reason = None;
        let mut told = Vec::with_capacity(count);
        for ((ticket, context), result) in flight.jobs.into_iter().zip(results.drain(..)) {
            let result = match result {
                Ok(response) if response.context.as_ref() == Some(&context) => Ok(response.actions),
                Ok(_) => {
                    let message = "the model answered for another episode than it was asked for";
                    reason.get_or_insert_with(|| Failure::new(FailureCode::ConnectionLost, message).of(MODEL));
                    remedy = ModelRemedy::Reconnect;
                    Err((Failure::new(FailureCode::ConnectionLost, message).of(MODEL), Blame::Shared))
                }
                Err(error) => {
                    let (failure, wanted) = classify::model_error(MODEL, &error);
                    if wanted != ModelRemedy::None {
                        remedy = wanted;
                        reason.get_or_insert_with(|| failure.clone());
                    }
                    Err((failure, blame))
                }
            };
            told.push((ticket, result));
        }
        self.spread(told.into_iter());
        match (remedy, reason) {
            (ModelRemedy::None, _) | (_, None) => Ok(()),
            // A new stream makes a new epoch, in which every adapter is bound anew.
            (ModelRemedy::Bind | ModelRemedy::Reconnect, Some(failure)) => Err(Ended::Reconnect(failure)),
        }
    }

    /// Tells each session all its answers at once.
    fn spread(&mut self, results: impl Iterator<Item = (Ticket, Result<Vec<rlmesh_proto::spaces::v1::SpaceValue>, (Failure, Blame)>)>) {
        let mut by_session: Vec<(u64, Vec<Predicted>)> = Vec::new();
        for (ticket, result) in results {
            let predicted = Predicted { lane: ticket.lane, generation: ticket.generation, result };
            match by_session.iter_mut().find(|(session, _)| *session == ticket.session) {
                Some((_, all)) => all.push(predicted),
                None => by_session.push((ticket.session, vec![predicted])),
            }
        }
        for (session, all) in by_session {
            self.tell(session, Heard::Predicted(all));
        }
    }
}

async fn sleep(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

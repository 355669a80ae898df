//! One session with one environment process: resets, predicts and steps of its lanes, each lane an episode of its own.
//!
//! Everything happens in one loop over what arrives; nothing in it waits for one lane while others could go on.

mod events;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};
use rlmesh_proto::core::v1::EnvContract;
use rlmesh_proto::env::v1 as wire;
use rlmesh_proto::env::v1::join_request::Kind as Request;
use rlmesh_proto::spaces::v1::SpaceValue;
use rlmesh_proto::{Edition, defaults};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::agent::{Agent, Permit};
use crate::batch::Usual;
use crate::board::{Board, Span, unix_ms};
use crate::chunk::{Ask, Play, Player};
use crate::classify::EnvCall;
use crate::episode::{Account, StepLimits};
use crate::facts::Drive;
use crate::hub::{BindError, Bound, Call, Heard, Hub, ModelState, Predict, Ticket};
use crate::metrics::Metrics;
use crate::rows::{Blame, Work};
use crate::space::Layout;
use crate::tuning::Tuning;
use crate::wire::EnvStream;

/// Steps of several lanes go in one request while that takes no longer than this (or half a forward).
const QUICK_STEP: Duration = Duration::from_millis(4);
/// While they go apart, every so many rounds the joint request is tried again.
const TRY_AGAIN: u32 = 64;

/// Id of the request that ends a session.
const CLOSE: &str = "close";

/// What a session needs to know of its run.
pub(crate) struct Setting {
    pub agent: Agent,
    pub hub: Hub,
    pub board: Arc<Board>,
    pub metrics: Arc<Metrics>,
    pub spec: Arc<RunSpec>,
    pub tuning: Arc<Tuning>,
    /// Cancelled when the run ends early.
    pub stop: CancellationToken,
}

/// How a session ended.
pub(crate) enum Ended {
    /// No row is left.
    Finished,
    Stopped,
    /// The stream broke without a word.
    Lost(String),
    /// An operation took too long; the lanes at fault.
    Hung(Vec<usize>),
    /// The server closed or asked for a new session.
    Reconnect(Failure),
    /// The process has to be replaced.
    Restart(Failure),
    /// No row of this binding can be run.
    Refused(Failure),
}

/// An episode on a lane.
struct Running {
    work: Work,
    permit: Permit,
    episode_id: String,
    player: Player,
    account: Account,
    limits: StepLimits,
    started: Instant,
    started_unix_ms: i64,
    first_observation: [u8; 32],
}

struct Lane {
    /// Its adapter at the model.
    route: String,
    running: Option<Box<Running>>,
    /// Rises with each begin and end: answers to older ones are dropped.
    generation: u64,
    /// A request for it is on its way; it may be of an episode that is over already.
    busy: bool,
}

/// A request on its way to the environment.
struct Operation {
    call: EnvCall,
    lanes: Vec<(usize, u64)>,
    sent: Instant,
}

pub(crate) struct Session<'a> {
    setting: &'a Setting,
    component: String,
    number: u64,
    stream: EnvStream,
    contract: EnvContract,
    edition: String,
    drive: Drive,
    observations: Layout,
    actions: Layout,
    lanes: Vec<Lane>,
    operations: HashMap<u64, Operation>,
    next_id: u64,
    heard: mpsc::Receiver<Heard>,
    heard_sender: mpsc::Sender<Heard>,
    model: watch::Receiver<ModelState>,
    /// The epoch in which the adapters are bound, and their terms.
    bound: Option<(u64, Bound)>,
    asks: Vec<Predict>,
    ends: Vec<Call>,
    /// Room for the next episode, when there was none at first.
    spare: Option<Permit>,
    joint: Usual,
    apart: u32,
    usual: Usual,
    /// An error after which the server may close the session.
    last_fatal: Option<(Instant, Failure)>,
    /// Rows that were begun.
    pub begun: u64,
    /// Operations that were answered.
    pub answers: u64,
}

impl<'a> Session<'a> {
    pub fn new(
        setting: &'a Setting,
        component: String,
        number: u64,
        stream: EnvStream,
        contract: EnvContract,
        edition: String,
        (drive, lanes): (Drive, usize),
    ) -> Result<Self, Failure> {
        let space = |space: Option<&rlmesh_proto::spaces::v1::SpaceSpec>, which: &str| {
            let unusable = |problem: String| {
                Failure::new(FailureCode::EnvironmentContract, format!("the environment's {which} space can't be used: {problem}"))
                    .of(&component)
            };
            Layout::of(space.ok_or_else(|| unusable("it has none".to_owned()))?).map_err(|error| unusable(error.to_string()))
        };
        let spec = contract.spec.as_ref();
        let observations = space(spec.and_then(|spec| spec.observation_space.as_ref()), "observation")?;
        let actions = space(spec.and_then(|spec| spec.action_space.as_ref()), "action")?;
        let lanes: Vec<Lane> =
            (0..lanes).map(|_| Lane { route: Uuid::now_v7().to_string(), running: None, generation: 0, busy: false }).collect();
        let (heard_sender, heard) = mpsc::channel(lanes.len() * 2 + 64);
        let model = setting.hub.state();
        Ok(Self {
            setting,
            component,
            number,
            stream,
            contract,
            edition,
            drive,
            observations,
            actions,
            lanes,
            operations: HashMap::new(),
            next_id: 0,
            heard,
            heard_sender,
            model,
            bound: None,
            asks: Vec::new(),
            ends: Vec::new(),
            spare: None,
            joint: Usual::default(),
            apart: 0,
            usual: Usual::default(),
            last_fatal: None,
            begun: 0,
            answers: 0,
        })
    }

    /// Makes the session known to the hub.
    pub async fn enter(&mut self) {
        self.setting.hub.call(Call::Open { session: self.number, heard: self.heard_sender.clone() }).await;
    }

    /// Runs rows until none is left or the session ends. May be dropped at any time; then the session has ended too.
    pub async fn run(&mut self) -> Ended {
        let mut board = self.setting.board.watch();
        loop {
            if let Some(ended) = self.turn(&mut board).await {
                return ended;
            }
        }
    }

    /// Takes leave of the hub: adapters are released.
    pub async fn leave(&mut self) {
        self.ends.clear();
        let routes = self.lanes.iter().map(|lane| lane.route.clone()).collect();
        self.setting.hub.call(Call::Close { session: self.number, routes }).await;
    }

    async fn turn(&mut self, board: &mut watch::Receiver<u64>) -> Option<Ended> {
        board.borrow_and_update();
        if self.setting.board.open() == 0 {
            return Some(Ended::Finished);
        }
        if let Some(ended) = self.bind().await {
            return Some(ended);
        }
        let starved = self.begin_rows();
        if let Some(failure) = self.begin_steps() {
            return Some(failure);
        }
        self.tell_hub().await;
        let timeout = Duration::from_millis(self.setting.spec.limits.progress_timeout_ms.max(1));
        let overdue = self.operations.values().map(|operation| operation.sent).min().map(|sent| sent + timeout);
        tokio::select! {
            biased;
            () = self.setting.stop.cancelled() => Some(Ended::Stopped),
            Some(heard) = self.heard.recv() => self.heard(heard),
            answer = self.stream.responses.message() => match answer {
                Ok(Some(answer)) => self.answered(answer),
                Ok(None) => Some(Ended::Lost("the environment ended the session".to_owned())),
                Err(status) => Some(Ended::Lost(format!("{:?}: {}", status.code(), status.message()))),
            },
            changed = self.model.changed() => changed.err().map(|_| Ended::Stopped),
            _ = board.changed() => None,
            permit = self.setting.agent.room(), if starved => {
                self.spare = permit;
                None
            }
            () = sleep_until(overdue) => Some(self.overdue(timeout)),
        }
    }

    /// Binds the lanes' adapters when the model serves in a new epoch.
    async fn bind(&mut self) -> Option<Ended> {
        let epoch = match &*self.model.borrow_and_update() {
            ModelState::Up { epoch, .. } => *epoch,
            ModelState::Starting => return None,
            ModelState::Failed(_) => return Some(Ended::Stopped),
        };
        // Lanes of the old epoch end when the hub says what became of it.
        if self.bound.is_some() {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        let call = Call::Bind {
            epoch,
            routes: self.lanes.iter().map(|lane| lane.route.clone()).collect(),
            spec: Box::new(self.contract.spec.clone().unwrap_or_default()),
            edition: self.edition.clone(),
            reply,
        };
        self.setting.hub.call(call).await;
        let answer = tokio::select! {
            () = self.setting.stop.cancelled() => return Some(Ended::Stopped),
            answer = tokio::time::timeout(self.setting.tuning.configure, answer) => answer,
        };
        match answer {
            Ok(Ok(Ok(bound))) => {
                self.bound = Some((epoch, bound));
                None
            }
            Ok(Ok(Err(BindError::Refused(failure)))) => Some(Ended::Refused(failure)),
            Ok(Ok(Err(BindError::Later)) | Err(_)) | Err(_) => {
                // The state changes when the model is back; until then a short pause keeps this from spinning.
                tokio::time::sleep(Duration::from_millis(10)).await;
                None
            }
        }
    }

    /// Gives rows to idle lanes. True when only room for their outcomes is missing.
    fn begin_rows(&mut self) -> bool {
        let Some((_, bound)) = self.bound else { return false };
        if !matches!(&*self.model.borrow(), ModelState::Up { .. }) {
            return false;
        }
        let mut running = self.lanes.iter().filter(|lane| lane.running.is_some()).count();
        let mut occupied = self.lanes.iter().filter_map(|lane| lane.running.as_ref()).any(|running| running.work.alone);
        for number in 0..self.lanes.len() {
            let idle = self.lanes.get(number).is_some_and(|lane| lane.running.is_none() && !lane.busy);
            if !idle {
                continue;
            }
            let Some(permit) = self.spare.take().or_else(|| self.setting.agent.try_room()) else { return true };
            let Some(work) = self.setting.board.take(running, occupied) else {
                self.spare = None;
                return false;
            };
            occupied |= work.alone;
            running += 1;
            self.begin(number, work, permit, bound);
        }
        false
    }

    fn begin(&mut self, number: usize, work: Work, permit: Permit, bound: Bound) {
        let spec = &self.setting.spec;
        let limits =
            spec.tasks.get(work.task as usize).map_or(StepLimits { steps: 1, duration: None }, |task| StepLimits::of(task, &spec.limits));
        let play = Play { horizon: spec.model.execution_horizon.max(1), lead: spec.model.prefetch_lead, history: bound.history };
        let episode_id = Uuid::now_v7().to_string();
        let key = defaults(Edition::E2026_06).trial_index_option_key;
        let request = wire::ResetRequest {
            seeds: i64::try_from(work.seed).into_iter().collect(),
            options: rlmesh_runtime::reset_options_for(&self.contract, key, &[work.trial_index]),
            timeout_ms: 0,
            env_indices: self.indices(&[number]),
            episode_ids: vec![episode_id.clone()],
        };
        let Some(lane) = self.lanes.get_mut(number) else { return };
        lane.generation += 1;
        self.begun += 1;
        self.setting.metrics.begin();
        self.setting.metrics.lane_began();
        let now = Instant::now();
        lane.running = Some(Box::new(Running {
            work,
            permit,
            episode_id,
            player: Player::new(play),
            account: Account::default(),
            limits,
            started: now,
            started_unix_ms: unix_ms(),
            first_observation: [0; 32],
        }));
        self.send(EnvCall::Reset, Request::Reset(request), &[number]);
    }

    /// The lanes' numbers for a request; none when the server has a single environment.
    fn indices(&self, lanes: &[usize]) -> Vec<u32> {
        match self.drive {
            Drive::Lanes(_) => lanes.iter().filter_map(|lane| u32::try_from(*lane).ok()).collect(),
            Drive::Whole | Drive::Lockstep => Vec::new(),
        }
    }

    /// Steps every lane that has an action.
    fn begin_steps(&mut self) -> Option<Ended> {
        let mut steps: Vec<(usize, SpaceValue)> = Vec::new();
        let mut alone = false;
        for number in 0..self.lanes.len() {
            let Some(lane) = self.lanes.get_mut(number).filter(|lane| !lane.busy) else { continue };
            let Some(running) = &mut lane.running else { continue };
            let Some((action, ask)) = running.player.act() else { continue };
            alone |= running.work.alone;
            steps.push((number, action));
            if let Some(ask) = ask {
                self.ask(number, ask);
            }
        }
        if steps.is_empty() {
            return None;
        }
        if steps.len() > 1 && !alone && self.together() {
            for part in steps.chunks(self.setting.tuning.group.max(1)) {
                self.step(part);
            }
        } else {
            for step in &steps {
                self.step(std::slice::from_ref(step));
            }
        }
        None
    }

    /// Whether several lanes are stepped by one request: cheaper, but the answer waits for the slowest of them.
    fn together(&mut self) -> bool {
        let limit = QUICK_STEP.max(self.setting.metrics.forward() / 2);
        if self.joint.get() <= limit {
            return true;
        }
        self.apart += 1;
        if self.apart < TRY_AGAIN {
            return false;
        }
        self.apart = 0;
        true
    }

    fn step(&mut self, steps: &[(usize, SpaceValue)]) {
        let lanes: Vec<usize> = steps.iter().map(|(lane, _)| *lane).collect();
        let action = match self.actions.join(&steps.iter().map(|(_, action)| action).collect::<Vec<_>>()) {
            Ok(action) => action,
            Err(error) => {
                // Whose action it is shows when each goes by itself.
                let blame = if lanes.len() == 1 { Blame::Sole } else { Blame::Shared };
                let failure = Failure::new(
                    FailureCode::ModelInvalidAction,
                    format!("the model's action does not have the form of the environment's action space: {error}"),
                );
                for lane in lanes {
                    self.interrupt(lane, &failure, blame);
                }
                return;
            }
        };
        let episode_ids = lanes.iter().filter_map(|lane| Some(self.lanes.get(*lane)?.running.as_ref()?.episode_id.clone())).collect();
        let request = wire::StepRequest { action: Some(action), timeout_ms: 0, env_indices: self.indices(&lanes), episode_ids };
        self.setting.metrics.steps_began(lanes.len());
        self.send(EnvCall::Step, Request::Step(request), &lanes);
    }

    fn send(&mut self, call: EnvCall, kind: Request, lanes: &[usize]) {
        self.next_id += 1;
        let mut named = Vec::with_capacity(lanes.len());
        for number in lanes {
            if let Some(lane) = self.lanes.get_mut(*number) {
                lane.busy = true;
                named.push((*number, lane.generation));
            }
        }
        let request = wire::JoinRequest { kind: Some(kind), request_id: self.next_id.to_string() };
        self.operations.insert(self.next_id, Operation { call, lanes: named, sent: Instant::now() });
        // There is room for one request per lane. Should the stream be closed, its end is the next thing heard.
        if let Err(error) = self.stream.requests.try_send(request) {
            tracing::debug!(component = %self.component, %error, "a request could not be sent");
        }
    }

    fn ask(&mut self, number: usize, ask: Ask) {
        let Some(lane) = self.lanes.get(number) else { return };
        let Some(running) = &lane.running else { return };
        self.asks.push(Predict {
            ticket: Ticket { session: self.number, lane: number, generation: lane.generation },
            alone: running.work.alone,
            route: lane.route.clone(),
            episode_id: running.episode_id.clone(),
            seed: running.work.seed,
            ask,
        });
    }

    async fn tell_hub(&mut self) {
        for call in self.ends.drain(..) {
            self.setting.hub.call(call).await;
        }
        if let Some((epoch, _)) = self.bound
            && !self.asks.is_empty()
        {
            self.setting.hub.call(Call::Predict { epoch, jobs: std::mem::take(&mut self.asks) }).await;
        }
        self.asks.clear();
    }

    /// Ends the episode of a lane without an outcome of its own.
    fn interrupt(&mut self, number: usize, failure: &Failure, blame: Blame) {
        let Some(running) = self.end_episode(number) else { return };
        let span = Span { started_unix_ms: running.started_unix_ms, ended_unix_ms: unix_ms() };
        let mut failure = failure.clone();
        failure.component.get_or_insert_with(|| self.component.clone());
        if self.setting.board.interrupted(running.work, &failure, blame, span, running.permit) {
            self.setting.metrics.count_episode();
        }
    }

    fn end_episode(&mut self, number: usize) -> Option<Box<Running>> {
        let lane = self.lanes.get_mut(number)?;
        let running = lane.running.take()?;
        lane.generation += 1;
        self.setting.metrics.lane_ended();
        self.asks.retain(|job| job.ticket.lane != number);
        self.ends.push(Call::EndEpisode { route: lane.route.clone(), episode_id: running.episode_id.clone() });
        Some(running)
    }

    /// After the end of the session: what becomes of the rows that ran, `faulty` being the lanes at fault when they are known.
    pub fn interrupt_all(&mut self, failure: &Failure, faulty: Option<&[usize]>) {
        let running: Vec<usize> =
            (0..self.lanes.len()).filter(|number| self.lanes.get(*number).is_some_and(|lane| lane.running.is_some())).collect();
        let in_operation: Vec<usize> =
            running.iter().copied().filter(|number| self.lanes.get(*number).is_some_and(|lane| lane.busy)).collect();
        let suspects = match faulty {
            Some(faulty) => faulty.to_vec(),
            None if in_operation.is_empty() => running.clone(),
            None => in_operation,
        };
        for number in &running {
            let blame = match (running.len(), suspects.contains(number)) {
                (1, true) => Blame::Sole,
                (_, true) => Blame::Shared,
                (_, false) => Blame::Bystander,
            };
            self.interrupt(*number, failure, blame);
        }
        for operation in self.operations.drain().map(|(_, operation)| operation) {
            if operation.call == EnvCall::Step {
                self.setting.metrics.steps_ended(operation.lanes.len());
            }
        }
        self.asks.clear();
    }

    /// Says goodbye to the server; best effort.
    pub async fn close(&mut self) {
        let request = wire::JoinRequest {
            kind: Some(Request::Close(wire::CloseEnvsRequest { reason: "the run is done with this environment".to_owned() })),
            request_id: CLOSE.to_owned(),
        };
        if self.stream.requests.try_send(request).is_ok() {
            let answer = async {
                while let Ok(Some(answer)) = self.stream.responses.message().await {
                    if answer.request_id == CLOSE {
                        return;
                    }
                }
            };
            let _ = tokio::time::timeout(self.setting.tuning.goodbye, answer).await;
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

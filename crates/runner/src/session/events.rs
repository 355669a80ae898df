//! What a session does with what it hears: answers of the environment, answers of the model, silence.

use std::time::{Duration, Instant};

use rlm_core::failure::{Failure, FailureCode};
use rlmesh_proto::env::v1 as wire;
use rlmesh_proto::env::v1::join_response::Kind as Answer;
use rlmesh_proto::spaces::v1::MetaMap;

use super::{Ended, Operation, Session};
use crate::board::{Span, unix_ms};
use crate::classify::{self, EnvCall, EnvRemedy};
use crate::episode::{self, After, StepResult};
use crate::facts::Drive;
use crate::hub::Heard;
use crate::metrics::Series;
use crate::rows::Blame;
use crate::space;

impl Session<'_> {
    /// Takes what the hub says.
    pub(super) fn heard(&mut self, heard: Heard) -> Option<Ended> {
        match heard {
            Heard::Predicted(answers) => {
                for answer in answers {
                    let number = answer.lane;
                    if self.lanes.get(number).is_none_or(|lane| lane.generation != answer.generation) {
                        continue;
                    }
                    let taken = match answer.result {
                        Ok(actions) => {
                            let Some(running) = self.lanes.get_mut(number).and_then(|lane| lane.running.as_mut()) else { continue };
                            running.player.answer(actions).map_err(|error| {
                                (Failure::new(FailureCode::ModelError, error.to_string()).of(crate::components::MODEL), Blame::Sole)
                            })
                        }
                        Err((failure, blame)) => Err((failure, blame)),
                    };
                    if let Err((failure, blame)) = taken {
                        self.interrupt(number, &failure, blame);
                    }
                }
            }
            Heard::Down { failure, blamed } => {
                self.bound = None;
                for number in 0..self.lanes.len() {
                    let generation = self.lanes.get(number).map(|lane| lane.generation);
                    let blame = blamed
                        .iter()
                        .find(|(lane, asked, _)| *lane == number && Some(*asked) == generation)
                        .map_or(Blame::Bystander, |(_, _, blame)| *blame);
                    self.interrupt(number, &failure, blame);
                }
            }
        }
        None
    }

    /// Takes an answer of the environment.
    pub(super) fn answered(&mut self, answer: wire::JoinResponse) -> Option<Ended> {
        let operation = answer.request_id.parse::<u64>().ok().and_then(|id| self.operations.remove(&id))?;
        let took = operation.sent.elapsed();
        let endpoint = answer.endpoint_total_ns.map(Duration::from_nanos);
        for (number, _) in &operation.lanes {
            if let Some(lane) = self.lanes.get_mut(*number) {
                lane.busy = false;
            }
        }
        let metrics = &self.setting.metrics;
        match operation.call {
            EnvCall::Step => {
                metrics.steps_ended(operation.lanes.len());
                metrics.time(Series::Step, took);
                if let Some(endpoint) = endpoint {
                    metrics.time(Series::StepEndpoint, endpoint);
                }
                if operation.lanes.len() > 1 {
                    self.joint.add(endpoint.unwrap_or(took));
                }
                self.usual.add(took);
                metrics.usual_step(self.usual.get());
            }
            EnvCall::Reset => metrics.time(Series::Reset, took),
            EnvCall::Configure => {}
        }
        match (operation.call, answer.kind) {
            (EnvCall::Reset, Some(Answer::Reset(reset))) => {
                self.answers += 1;
                self.was_reset(&operation, &reset);
                None
            }
            (EnvCall::Step, Some(Answer::Step(step))) => {
                self.answers += 1;
                self.stepped(&operation, &step);
                None
            }
            (call, Some(Answer::Error(error))) => self.refused(&operation, call, &error),
            (call, other) => {
                let what = other.as_ref().map_or("nothing", crate::wire::env_kind);
                let failure =
                    Failure::new(FailureCode::IncompatibleVersions, format!("the environment answered a {} with {what}", call.as_str()))
                        .of(&self.component);
                Some(Ended::Refused(failure))
            }
        }
    }

    fn refused(&mut self, operation: &Operation, call: EnvCall, error: &wire::EnvError) -> Option<Ended> {
        let (failure, remedy) = classify::env_error(&self.component, call, error);
        let blame = if operation.lanes.len() == 1 { Blame::Sole } else { Blame::Shared };
        for (number, generation) in &operation.lanes {
            if self.is_current(*number, *generation) {
                self.interrupt(*number, &failure, blame);
            }
        }
        // A server of a single environment closes the session after an error that it can't recover from.
        let closes = !error.is_recoverable && !matches!(self.drive, Drive::Lanes(_));
        match remedy {
            EnvRemedy::Restart => Some(Ended::Restart(failure)),
            EnvRemedy::Reconnect => Some(Ended::Reconnect(failure)),
            EnvRemedy::Reset if closes => Some(Ended::Reconnect(failure)),
            EnvRemedy::Reset => {
                if !error.is_recoverable {
                    self.last_fatal = Some((Instant::now(), failure));
                }
                None
            }
        }
    }

    fn is_current(&self, number: usize, generation: u64) -> bool {
        self.lanes.get(number).is_some_and(|lane| lane.running.is_some() && lane.generation == generation)
    }

    fn broken(&mut self, operation: &Operation, message: &str) {
        let failure = Failure::new(FailureCode::EnvironmentContract, message).of(&self.component);
        let blame = if operation.lanes.len() == 1 { Blame::Sole } else { Blame::Shared };
        for (number, generation) in &operation.lanes {
            if self.is_current(*number, *generation) {
                self.interrupt(*number, &failure, blame);
            }
        }
    }

    fn was_reset(&mut self, operation: &Operation, reset: &wire::ResetResponse) {
        let width = operation.lanes.len();
        let rows = match self.observations.split(&reset.observation.clone().unwrap_or_default(), width) {
            Ok(rows) => rows,
            Err(error) => {
                return self.broken(
                    operation,
                    &format!("the observation of a reset does not have the form of the environment's observation space: {error}"),
                );
            }
        };
        for (position, ((number, generation), row)) in operation.lanes.iter().zip(rows).enumerate() {
            if !self.is_current(*number, *generation) {
                continue;
            }
            let info = episode::lane_info(reset.infos.as_ref(), position, width);
            let Some(running) = self.lanes.get_mut(*number).and_then(|lane| lane.running.as_mut()) else { continue };
            running.first_observation = space::digest(&row);
            running.started = Instant::now();
            running.account.note(info.as_ref());
            self.observe(*number, row);
        }
    }

    fn observe(&mut self, number: usize, observation: rlmesh_proto::spaces::v1::SpaceValue) {
        let Some(running) = self.lanes.get_mut(number).and_then(|lane| lane.running.as_mut()) else { return };
        match running.player.observe(observation) {
            Ok(Some(ask)) => self.ask(number, ask),
            Ok(None) => {}
            Err(error) => {
                self.interrupt(number, &Failure::new(FailureCode::ModelError, error.to_string()).of(crate::components::MODEL), Blame::Sole)
            }
        }
    }

    fn stepped(&mut self, operation: &Operation, step: &wire::StepResponse) {
        let width = operation.lanes.len();
        self.setting.metrics.count_steps(width as u64);
        let masks = [&step.terminated_mask, &step.truncated_mask];
        if step.rewards.len() != width || masks.iter().any(|mask| !mask.is_empty() && mask.len() != width) {
            let message = format!(
                "the environment answered {} rewards and {} and {} end marks for {width} lanes",
                step.rewards.len(),
                masks[0].len(),
                masks[1].len()
            );
            return self.broken(operation, &message);
        }
        let rows = match self.observations.split(&step.observation.clone().unwrap_or_default(), width) {
            Ok(rows) => rows,
            Err(error) => {
                return self.broken(
                    operation,
                    &format!("the observation of a step does not have the form of the environment's observation space: {error}"),
                );
            }
        };
        for (position, ((number, generation), row)) in operation.lanes.iter().zip(rows).enumerate() {
            if !self.is_current(*number, *generation) {
                continue;
            }
            let set = |mask: &[u8]| mask.get(position).is_some_and(|mark| *mark != 0);
            let result = StepResult {
                reward: step.rewards.get(position).copied().unwrap_or(f64::NAN),
                terminated: set(&step.terminated_mask),
                truncated: set(&step.truncated_mask),
            };
            self.lane_stepped(*number, result, episode::lane_info(step.infos.as_ref(), position, width), row);
        }
    }

    fn lane_stepped(
        &mut self,
        number: usize,
        result: StepResult,
        info: Option<MetaMap>,
        observation: rlmesh_proto::spaces::v1::SpaceValue,
    ) {
        let Some(running) = self.lanes.get_mut(number).and_then(|lane| lane.running.as_mut()) else { return };
        let rule = self.setting.spec.tasks.get(running.work.task as usize).and_then(|task| task.success.as_ref());
        match running.account.step(result, info.as_ref(), running.started.elapsed(), running.limits, rule) {
            After::GoesOn => self.observe(number, observation),
            After::Broken(message) => self.interrupt(number, &Failure::new(FailureCode::EnvironmentContract, message), Blame::Sole),
            After::Over(score) => {
                let Some(running) = self.end_episode(number) else { return };
                let span = Span { started_unix_ms: running.started_unix_ms, ended_unix_ms: unix_ms() };
                self.setting.metrics.count_episode();
                self.setting.board.scored(&running.work, &score, running.first_observation, span, running.permit);
            }
        }
    }

    /// Something took longer than the progress time-out. The lanes whose requests are that old are at fault.
    pub(super) fn overdue(&mut self, timeout: Duration) -> Ended {
        let mut faulty: Vec<usize> = self
            .operations
            .values()
            .filter(|operation| operation.sent.elapsed() >= timeout)
            .flat_map(|operation| operation.lanes.iter().map(|(lane, _)| *lane))
            .collect();
        faulty.sort_unstable();
        Ended::Hung(faulty)
    }

    /// Whether the end of the session follows from an error that has been dealt with already.
    pub fn explained(&self) -> Option<Failure> {
        self.last_fatal.as_ref().filter(|(at, _)| at.elapsed() < Duration::from_secs(5)).map(|(_, failure)| failure.clone())
    }
}

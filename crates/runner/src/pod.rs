//! One environment process through its attempts: waits for it, opens sessions with it, finds out how it ended, and says
//! what that means for the rows it held.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rlm_core::failure::{Failure, FailureCode};
use tokio_util::sync::CancellationToken;

use crate::components::{Ready, env_name};
use crate::facts::{self, Drive};
use crate::provenance::Book;
use crate::session::{Ended, Session, Setting};
use crate::transport::Address;
use crate::tuning::Backoff;
use crate::wire::{EnvPeer, OpenError};

/// Why a process is no longer used.
pub(crate) enum PodEnd {
    Finished,
    Stopped,
    /// It can't be used; the rows go to the others.
    Retired(Failure),
    /// It is a vector in lockstep and has to be served with one environment.
    Lockstep,
}

pub(crate) struct Pod {
    pub setting: Arc<Setting>,
    pub book: Arc<Book>,
    pub binding: u32,
    pub number: u32,
    /// Lanes that may be used of it.
    pub lanes: u32,
    /// Numbers the sessions of the run.
    pub sessions: Arc<AtomicU64>,
    pub stop: CancellationToken,
}

/// How one attempt of the process went.
enum Attempt {
    End(PodEnd),
    /// It has ended or will be replaced.
    Over(Failure),
}

impl Pod {
    pub async fn run(self) -> PodEnd {
        let name = env_name(self.binding, self.number);
        let mut after = None;
        let mut fruitless = 0;
        loop {
            let mut board = self.setting.board.watch();
            let ready = tokio::select! {
                ready = self.setting.agent.components.ready(&name, after) => ready,
                () = self.stop.cancelled() => return PodEnd::Stopped,
                _ = board.wait_for(|_| self.setting.board.open() == 0) => return PodEnd::Finished,
            };
            let ready = match ready {
                Ok(ready) => ready,
                Err(failure) => return PodEnd::Retired(failure),
            };
            match self.attempt(&name, &ready, &mut fruitless).await {
                Attempt::End(end) => return end,
                Attempt::Over(failure) if fruitless > self.setting.tuning.fruitless_restarts => return PodEnd::Retired(failure),
                Attempt::Over(failure) => {
                    tracing::warn!(component = %name, attempt = ready.attempt, code = failure.code.as_str(), reason = %failure.message, "environment process ended")
                }
            }
            after = Some(ready.attempt);
        }
    }

    /// Sessions with one attempt, until it is over.
    async fn attempt(&self, name: &str, ready: &Ready, fruitless: &mut u32) -> Attempt {
        let address = match Address::parse(&ready.address) {
            Ok(address) => address,
            Err(error) => {
                return Attempt::End(PodEnd::Retired(
                    Failure::new(FailureCode::AgentError, format!("the agent's address of {name}: {error}")).of(name),
                ));
            }
        };
        let mut backoff = Backoff::new(self.setting.tuning.backoff);
        let mut refusals = 0;
        loop {
            let opened = tokio::select! {
                opened = self.open(name, &address, ready) => opened,
                () = self.setting.agent.components.gone(name, ready.attempt) => {
                    *fruitless += 1;
                    let unsaid = || Failure::new(FailureCode::ConnectionLost, "it was replaced; the agent did not say why").of(name);
                    return Attempt::Over(self.verdict(name, ready, Duration::ZERO).await.unwrap_or_else(unsaid));
                }
                () = self.stop.cancelled() => return Attempt::End(PodEnd::Stopped),
            };
            let mut session = match opened {
                Ok(Opened::Session(session)) => session,
                Ok(Opened::Lockstep) => return Attempt::End(PodEnd::Lockstep),
                Err(OpenError::Never(failure)) => return Attempt::End(PodEnd::Retired(failure)),
                Err(OpenError::Later(message)) => {
                    refusals += 1;
                    if let Some(failure) = self.verdict(name, ready, Duration::ZERO).await {
                        *fruitless += 1;
                        return Attempt::Over(failure);
                    }
                    if refusals > 8 {
                        *fruitless += 1;
                        return Attempt::Over(
                            self.replace(name, ready, FailureCode::ConnectionLost, format!("no session can be opened: {message}")).await,
                        );
                    }
                    tracing::debug!(component = name, reason = %message, "no session yet; trying again");
                    self.pause(&mut backoff).await;
                    continue;
                }
            };
            session.enter().await;
            let ended = tokio::select! {
                ended = session.run() => ended,
                () = self.setting.agent.components.gone(name, ready.attempt) => Ended::Lost("the agent replaced it".to_owned()),
            };
            session.leave().await;
            if session.answers > 0 {
                *fruitless = 0;
                refusals = 0;
                backoff.reset();
            } else if session.begun == 0 {
                // Rows that were begun have counts of their own.
                *fruitless += 1;
            }
            match ended {
                Ended::Finished => {
                    session.close().await;
                    return Attempt::End(PodEnd::Finished);
                }
                Ended::Stopped => {
                    let cancelled = Failure::new(FailureCode::Cancelled, "the run was stopped");
                    session.interrupt_all(&cancelled, Some(&[]));
                    return Attempt::End(PodEnd::Stopped);
                }
                Ended::Refused(failure) => {
                    session.interrupt_all(&failure, Some(&[]));
                    return Attempt::End(PodEnd::Retired(failure));
                }
                Ended::Reconnect(failure) => session.interrupt_all(&failure, Some(&[])),
                Ended::Restart(failure) => {
                    session.interrupt_all(&failure, Some(&[]));
                    let message = failure.message.clone();
                    return Attempt::Over(self.replace(name, ready, failure.code, message).await);
                }
                Ended::Hung(lanes) => {
                    let message = format!(
                        "the environment made no progress for {} s; its process is replaced",
                        self.setting.spec.limits.progress_timeout_ms as f64 / 1e3
                    );
                    let failure = self.replace(name, ready, FailureCode::EnvironmentHung, message).await;
                    session.interrupt_all(&failure, Some(&lanes));
                    return Attempt::Over(failure);
                }
                Ended::Lost(message) => {
                    if let Some(failure) = session.explained() {
                        session.interrupt_all(&failure, Some(&[]));
                        continue;
                    }
                    match self.verdict(name, ready, self.setting.tuning.verdict).await {
                        Some(failure) => {
                            session.interrupt_all(&failure, None);
                            return Attempt::Over(failure);
                        }
                        None => {
                            let failure = Failure::new(
                                FailureCode::ConnectionLost,
                                format!("the connection to {name} broke ({message}); its process was not seen to end"),
                            )
                            .of(name);
                            session.interrupt_all(&failure, None);
                        }
                    }
                }
            }
            if *fruitless > self.setting.tuning.fruitless_restarts {
                return Attempt::End(PodEnd::Retired(
                    Failure::new(
                        FailureCode::ConnectionLost,
                        format!("{fruitless} sessions with {name} in turn ended before anything was done"),
                    )
                    .of(name),
                ));
            }
            self.pause(&mut backoff).await;
        }
    }

    async fn pause(&self, backoff: &mut Backoff) {
        let _ = tokio::time::timeout(backoff.pause(), self.stop.cancelled()).await;
    }

    /// The agent's word on how the attempt ended; none is waited for once the run stops.
    async fn verdict(&self, name: &str, ready: &Ready, wait: Duration) -> Option<Failure> {
        tokio::select! {
            verdict = self.setting.agent.components.verdict(name, ready.attempt, wait) => verdict,
            () = self.stop.cancelled() => None,
        }
    }

    async fn open(&self, name: &str, address: &Address, ready: &Ready) -> Result<Opened<'_>, OpenError> {
        let setting = &*self.setting;
        let (_, model) = setting.hub.up().await.map_err(OpenError::Never)?;
        let peer = EnvPeer::connect(name, address, &setting.tuning).await?;
        let lanes = match facts::drive(&peer.contract, &peer.facts).map_err(|failure| OpenError::Never(failure.of(name)))? {
            Drive::Lockstep => return Ok(Opened::Lockstep),
            Drive::Whole => 1,
            Drive::Lanes(lanes) => lanes.min(self.lanes.max(1)),
        };
        if lanes < self.lanes {
            self.book.warn(format!("{name} serves {lanes} environments where {} were asked for", self.lanes));
        }
        let drive = if peer.contract.num_envs.max(1) > 1 { Drive::Lanes(lanes) } else { Drive::Whole };
        let edition = facts::edition(&peer.facts, &model, setting.spec.model.workflow_edition.as_deref())
            .map_err(|failure| OpenError::Never(failure.of(name)))?;
        let stream = peer.join(name, &edition, lanes as usize, &setting.tuning).await?;
        self.book.environment(&peer.facts, &edition, &ready.node);
        let number = self.sessions.fetch_add(1, Ordering::Relaxed);
        let component = name.to_owned();
        Session::new(setting, component, number, stream, peer.contract, edition, (drive, lanes as usize))
            .map(|session| Opened::Session(Box::new(session)))
            .map_err(OpenError::Never)
    }

    /// Asks for a new process; the failure carries the last output of the old one.
    async fn replace(&self, name: &str, ready: &Ready, code: FailureCode, message: String) -> Failure {
        self.setting.agent.restart(name, ready.attempt, &message);
        let mut failure = Failure::new(code, message).of(name);
        if let Some(verdict) = self.verdict(name, ready, self.setting.tuning.verdict).await {
            failure.log_lines = verdict.log_lines;
            failure.events = verdict.events;
        }
        failure
    }
}

enum Opened<'a> {
    Session(Box<Session<'a>>),
    Lockstep,
}

//! What is said of a run while it goes on: that it runs, or what it waits for and since when. Said once for each change.
//!
//! A run that has begun an episode stays *running*; what a part of it waits for (a pod that is to replace a lost one, say) is
//! said beside that, and taken back by saying that it runs.

use std::sync::Arc;

use rlm_api::cluster::v1::run_status::Phase;

use super::components::{Happened, News, Waits};
use super::place::RUNNER;
use super::report::status;
use super::{Place, Run, Then};
use crate::executor::now_ms;
use crate::spool::NewRecord;

/// What was said last.
#[derive(Debug, Default)]
pub struct Said {
    standing: Option<(Phase, &'static str, String)>,
    pub since_ms: i64,
    /// It has run; from then on a mere start is not said.
    ran: bool,
}

impl<P: Place> Run<P> {
    pub(super) fn on_news(&mut self, news: News) {
        match news.happened {
            Happened::Waits(waits) if news.name == RUNNER => self.runner_waits = waits,
            happened => {
                let changes = self.components.on_news(News { happened, ..news });
                self.tell(changes);
            }
        }
        self.say_standing();
        self.watch_model();
    }

    /// An episode was begun.
    pub(super) fn say_it_runs(&mut self) {
        if !self.said.ran {
            self.say(Phase::Running, "", "", None);
        }
        self.say_standing();
    }

    /// Says where the run stands, if that is news.
    pub(super) fn say_standing(&mut self) {
        if let Some(Waits { cause, message, since_ms }) = self.components.waits().or(self.runner_waits.as_ref()).cloned() {
            return self.say(Phase::Waiting, cause, &message, since_ms);
        }
        let spec = Arc::clone(&self.assignment.spec);
        match self.components.ready() {
            (true, true) => self.say(Phase::Running, "", "", None),
            _ if self.said.ran => self.say(Phase::Running, "", "", None),
            (true, false) => {
                self.say(Phase::Waiting, "environmentStarting", &format!("environment '{}' starts", spec.environment.id), None);
            }
            (false, _) => self.say(Phase::Waiting, "modelStarting", &format!("model '{}' starts", spec.model.id), None),
        }
    }

    /// The runner's provenance came, which is said with the phase.
    pub(super) fn say_provenance(&mut self) {
        self.said.standing = None;
        self.say(Phase::Running, "", "", None);
        self.say_standing();
    }

    fn say(&mut self, phase: Phase, cause: &'static str, message: &str, since_ms: Option<i64>) {
        let same = |(known_phase, known_cause, _): &(Phase, &str, String)| (*known_phase, *known_cause) == (phase, cause);
        let unchanged = self.said.standing.as_ref().filter(|known| same(known));
        if self.over || unchanged.is_some_and(|(.., known)| known == message) {
            return;
        }
        match (since_ms, unchanged.is_some()) {
            (Some(since_ms), _) => self.said.since_ms = since_ms,
            (None, true) => {}
            (None, false) => self.said.since_ms = now_ms(),
        }
        self.said.standing = Some((phase, cause, message.to_owned()));
        self.said.ran |= phase == Phase::Running;
        let provenance = (phase == Phase::Running).then(|| self.provenance.clone());
        let status = status(phase, cause, message, self.said.since_ms, None, provenance.as_ref());
        self.store(vec![NewRecord::status(self.key(), status)], Then::Nothing);
    }
}

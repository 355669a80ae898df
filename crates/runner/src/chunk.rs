//! Which action an episode plays next, and which observation the model is asked about: action chunks, prefetch and
//! observation history, one episode at a time. Pure, and a function of the order of steps alone: when an answer arrives
//! never changes which actions are played.

use std::collections::VecDeque;

use rlmesh_proto::spaces::v1::SpaceValue;

/// Most observations kept for the next predict: one per action of the longest chunk.
const MAX_HISTORY: usize = 1023;

/// An observation to predict from.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    pub observation: SpaceValue,
    /// Observations since the last predict that were acted on from a chunk.
    pub history: Vec<Seen>,
    /// Number of the observation within its episode; set on routes with history.
    pub step: Option<i64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    pub observation: SpaceValue,
    pub step: i64,
}

/// How actions are to be played.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Play {
    /// Actions executed of each chunk, at least 1.
    pub horizon: u32,
    /// Actions left when the next chunk is asked for; 0: none are.
    pub lead: u32,
    /// The model keeps a window of observations and has to see each of them.
    pub history: bool,
}

/// Why an episode can't go on with this model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlayError {
    #[error("the model answered a predict without an action")]
    NoAction,
    #[error("the model answered more actions than any horizon allows")]
    Endless,
}

#[derive(Debug)]
pub struct Player {
    play: Play,
    actions: VecDeque<SpaceValue>,
    /// A predict is on its way.
    asked: bool,
    /// A chunk that arrived while the last one is still played.
    next: Option<VecDeque<SpaceValue>>,
    latest: Option<(SpaceValue, i64)>,
    unseen: Vec<Seen>,
    steps: i64,
}

impl Player {
    #[must_use]
    pub fn new(play: Play) -> Self {
        Self { play, actions: VecDeque::new(), asked: false, next: None, latest: None, unseen: Vec::new(), steps: 0 }
    }

    /// Takes the observation of the reset (first call) or of a step. Says what to ask when no action covers the next step.
    pub fn observe(&mut self, observation: SpaceValue) -> Result<Option<Ask>, PlayError> {
        let step = self.steps;
        self.steps += 1;
        self.latest = Some((observation.clone(), step));
        let ask = self.actions.is_empty() && !self.asked && self.next.is_none();
        if ask {
            self.asked = true;
            let history = std::mem::take(&mut self.unseen);
            return Ok(Some(Ask { observation, history, step: self.play.history.then_some(step) }));
        }
        if self.play.history {
            if self.unseen.len() >= MAX_HISTORY {
                return Err(PlayError::Endless);
            }
            self.unseen.push(Seen { observation, step });
        }
        Ok(None)
    }

    /// Takes the model's answer.
    pub fn answer(&mut self, actions: Vec<SpaceValue>) -> Result<(), PlayError> {
        self.asked = false;
        let mut actions = VecDeque::from(actions);
        actions.truncate(self.play.horizon.max(1) as usize);
        if actions.is_empty() {
            return Err(PlayError::NoAction);
        }
        if self.actions.is_empty() {
            self.actions = actions;
        } else {
            self.next = Some(actions);
        }
        Ok(())
    }

    /// The next action, if there is one, and what to ask ahead.
    pub fn act(&mut self) -> Option<(SpaceValue, Option<Ask>)> {
        if self.actions.is_empty() {
            self.actions = self.next.take()?;
        }
        let action = self.actions.pop_front()?;
        let ahead = self.play.lead > 0 && self.actions.len() <= self.play.lead as usize && !self.asked && self.next.is_none();
        let ask = if ahead { self.ask_latest() } else { None };
        Some((action, ask))
    }

    /// Asks from the latest observation. With history that observation was put aside when it came; had it gone out
    /// already it must not go twice, and the next observation is waited for.
    fn ask_latest(&mut self) -> Option<Ask> {
        let (observation, step) = self.latest.clone()?;
        if !self.play.history {
            self.asked = true;
            return Some(Ask { observation, history: Vec::new(), step: None });
        }
        if self.unseen.last().map(|seen| seen.step) != Some(step) {
            return None;
        }
        self.unseen.pop();
        self.asked = true;
        Some(Ask { observation, history: std::mem::take(&mut self.unseen), step: Some(step) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    fn value(number: u64) -> SpaceValue {
        SpaceValue { leaves: vec![Bytes::copy_from_slice(&number.to_le_bytes())] }
    }

    fn number(value: &SpaceValue) -> u64 {
        u64::from_le_bytes(value.leaves[0][..].try_into().unwrap())
    }

    /// Plays `steps` steps; the model answers `chunk` actions, numbered by the observation they were asked from.
    /// `late(i)` says whether the i-th answer is kept back until it is needed.
    fn play(play: Play, chunk: u64, steps: u64, late: impl Fn(usize) -> bool) -> (Vec<(u64, u64)>, Vec<Ask>) {
        let mut player = Player::new(play);
        let mut asks = Vec::new();
        let mut pending: Option<Ask> = None;
        let mut played = Vec::new();
        let mut answers = 0;
        pending = player.observe(value(0)).unwrap().or(pending);
        for step in 1..=steps {
            let (action, ahead) = loop {
                if let Some(ask) = pending.take() {
                    let from = number(&ask.observation);
                    asks.push(ask);
                    answers += 1;
                    player.answer((0..chunk).map(|part| value(from * 1000 + part)).collect()).unwrap();
                }
                if let Some(done) = player.act() {
                    break done;
                }
            };
            played.push((step, number(&action)));
            if let Some(ask) = ahead {
                if late(answers) {
                    pending = Some(ask);
                } else {
                    let from = number(&ask.observation);
                    asks.push(ask);
                    answers += 1;
                    player.answer((0..chunk).map(|part| value(from * 1000 + part)).collect()).unwrap();
                }
            }
            if let Some(ask) = player.observe(value(step)).unwrap() {
                assert!(pending.is_none());
                pending = Some(ask);
            }
        }
        (played, asks)
    }

    #[test]
    fn without_chunks_every_observation_is_asked() {
        let (played, asks) = play(Play { horizon: 1, lead: 0, history: false }, 3, 5, |_| true);
        assert_eq!(played.iter().map(|(_, action)| *action).collect::<Vec<_>>(), [0, 1000, 2000, 3000, 4000]);
        assert_eq!(asks.len(), 5);
    }

    #[test]
    fn a_chunk_is_replayed_up_to_the_horizon() {
        let (played, asks) = play(Play { horizon: 3, lead: 0, history: false }, 8, 7, |_| true);
        assert_eq!(played.iter().map(|(_, action)| *action).collect::<Vec<_>>(), [0, 1, 2, 3000, 3001, 3002, 6000]);
        assert_eq!(asks.iter().map(|ask| number(&ask.observation)).collect::<Vec<_>>(), [0, 3, 6]);
    }

    #[test]
    fn a_lead_asks_before_the_chunk_is_played() {
        let (played, asks) = play(Play { horizon: 4, lead: 1, history: false }, 4, 9, |_| true);
        // With one action left the next chunk is asked from the observation before it.
        assert_eq!(asks.iter().map(|ask| number(&ask.observation)).collect::<Vec<_>>()[..3], [0, 2, 6]);
        assert_eq!(played.iter().map(|(_, action)| *action).collect::<Vec<_>>(), [0, 1, 2, 3, 2000, 2001, 2002, 2003, 6000]);
    }

    #[test]
    fn an_answer_without_actions_is_an_error() {
        let mut player = Player::new(Play { horizon: 1, lead: 0, history: false });
        assert_eq!(player.answer(Vec::new()), Err(PlayError::NoAction));
    }

    proptest! {
        #[test]
        fn the_time_of_an_answer_changes_nothing(horizon in 1_u32..7, lead in 0_u32..8, chunk in 1_u64..8, history: bool, lates in proptest::collection::vec(any::<bool>(), 64)) {
            let way = Play { horizon, lead, history };
            let early = play(way, chunk, 30, |_| false);
            let mixed = play(way, chunk, 30, |answer| lates[answer % lates.len()]);
            prop_assert_eq!(early.0, mixed.0);
        }

        #[test]
        fn with_history_every_observation_goes_once_and_in_order(horizon in 1_u32..7, lead in 0_u32..8, chunk in 1_u64..8, lates in proptest::collection::vec(any::<bool>(), 64)) {
            let (_, asks) = play(Play { horizon, lead, history: true }, chunk, 40, |answer| lates[answer % lates.len()]);
            let mut next = 0;
            for ask in asks {
                for seen in &ask.history {
                    prop_assert_eq!(seen.step, next);
                    next += 1;
                }
                prop_assert_eq!(ask.step, Some(next));
                next += 1;
            }
        }
    }
}

//! When waiting predicts go to the model, and how many together. Pure.
//!
//! A model that fuses predicts gets one group at a time; those that become ready meanwhile form the next. When the model
//! falls free while lanes are about to answer from a quick step, it waits a moment for them: a forward costs about the
//! same for eight rows as for eighty. A model that does not fuse gets each predict at once.

use std::time::Duration;

/// What the decision rests on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batching {
    /// Waiting predicts of rows that may run beside others.
    pub waiting: usize,
    /// Waiting predicts of rows that run alone.
    pub alone: usize,
    /// Requests on their way to the model.
    pub in_flight: usize,
    pub in_flight_alone: bool,
    /// Lanes whose environment is in a step.
    pub stepping: usize,
    pub fuses: bool,
    /// How long it is that a group could have been sent.
    pub free_for: Duration,
    /// Usual time of a forward and of a step; zero: not known.
    pub forward: Duration,
    pub step: Duration,
    /// Whether the last request was one of a row alone.
    pub last_alone: bool,
    /// Most requests in flight when predicts do not fuse.
    pub singles: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Send {
    Nothing,
    /// Ask again after this time.
    Hold(Duration),
    /// All that wait, together.
    Group,
    /// So many of those that wait, each by itself.
    Singles(usize),
    /// One row that runs alone.
    Alone,
}

/// Share of a forward that may be waited for others.
const HOLD: u32 = 4;

#[must_use]
pub fn decide(now: &Batching) -> Send {
    if now.in_flight_alone {
        return Send::Nothing;
    }
    if now.alone > 0 && now.in_flight == 0 && (now.waiting == 0 || !now.last_alone) {
        return Send::Alone;
    }
    // A row alone waits until nothing is in flight: nothing further is sent until then, unless it had its turn.
    if now.waiting == 0 || (now.alone > 0 && now.in_flight > 0 && !now.last_alone) {
        return Send::Nothing;
    }
    if !now.fuses {
        let room = now.singles.saturating_sub(now.in_flight);
        return if room == 0 { Send::Nothing } else { Send::Singles(now.waiting.min(room)) };
    }
    if now.in_flight > 0 {
        return Send::Nothing;
    }
    let patience = now.forward / HOLD;
    if now.stepping > 0 && now.step < patience && now.free_for < patience {
        return Send::Hold(patience - now.free_for);
    }
    Send::Group
}

/// A running mean that follows changes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usual(f64);

impl Usual {
    pub fn add(&mut self, value: Duration) {
        let value = value.as_secs_f64();
        self.0 = if self.0 == 0.0 { value } else { 0.8 * self.0 + 0.2 * value };
    }

    #[must_use]
    pub fn get(self) -> Duration {
        Duration::try_from_secs_f64(self.0).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Batching = Batching {
        waiting: 0,
        alone: 0,
        in_flight: 0,
        in_flight_alone: false,
        stepping: 0,
        fuses: true,
        free_for: Duration::ZERO,
        forward: Duration::from_millis(8),
        step: Duration::from_micros(500),
        last_alone: false,
        singles: 4,
    };

    #[test]
    fn one_group_at_a_time() {
        assert_eq!(decide(&IDLE), Send::Nothing);
        assert_eq!(decide(&Batching { waiting: 3, ..IDLE }), Send::Group);
        assert_eq!(decide(&Batching { waiting: 3, in_flight: 1, ..IDLE }), Send::Nothing);
    }

    #[test]
    fn quick_steps_are_waited_for_and_slow_ones_are_not() {
        let some = Batching { waiting: 1, stepping: 63, ..IDLE };
        assert_eq!(decide(&some), Send::Hold(Duration::from_millis(2)));
        assert_eq!(decide(&Batching { free_for: Duration::from_millis(2), ..some }), Send::Group);
        assert_eq!(decide(&Batching { step: Duration::from_millis(3), ..some }), Send::Group);
        assert_eq!(decide(&Batching { forward: Duration::ZERO, ..some }), Send::Group);
    }

    #[test]
    fn singles_fill_the_room() {
        let single = Batching { waiting: 9, fuses: false, ..IDLE };
        assert_eq!(decide(&single), Send::Singles(4));
        assert_eq!(decide(&Batching { in_flight: 3, ..single }), Send::Singles(1));
        assert_eq!(decide(&Batching { in_flight: 4, ..single }), Send::Nothing);
    }

    #[test]
    fn a_row_alone_has_the_model_to_itself_and_starves_nobody() {
        let both = Batching { waiting: 2, alone: 1, ..IDLE };
        assert_eq!(decide(&both), Send::Alone);
        assert_eq!(decide(&Batching { last_alone: true, ..both }), Send::Group);
        assert_eq!(decide(&Batching { in_flight: 1, fuses: false, ..both }), Send::Nothing);
        assert_eq!(decide(&Batching { in_flight_alone: true, in_flight: 1, ..both }), Send::Nothing);
        assert_eq!(decide(&Batching { alone: 2, ..IDLE }), Send::Alone);
    }
}

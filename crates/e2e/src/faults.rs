//! Seeded schedules of blows: which components are killed (-9) when an evaluation has come how far.

use std::time::Duration;

use crate::counter::mix;
use crate::processes::Component;

/// Numbers of a seed (splitmix64 over a counter); the same on every machine.
#[derive(Debug, Clone)]
pub struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    pub const fn next(&mut self) -> u64 {
        self.drawn += 1;
        mix(self.seed, self.drawn)
    }

    /// Below `bound`, which is at least 1.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).unwrap_or(0)
    }

    pub fn millis(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.next() % (most + 1))
    }
}

/// One blow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blow {
    /// Per mille of the rows that are finished then.
    pub at: u64,
    /// A moment later than that.
    pub later: Duration,
    pub components: Vec<Component>,
    /// How long a killed server or agent stays away.
    pub away: Duration,
    /// Chooses among several processes.
    pub choice: usize,
}

/// The schedule of a seed: every component once, in an order of its own, and one blow at two at once.
#[must_use]
pub fn schedule(seed: u64) -> Vec<Blow> {
    let mut random = Random::new(seed);
    let mut targets: Vec<Vec<Component>> = Component::ALL.iter().map(|one| vec![*one]).collect();
    let first = random.below(5);
    let second = (first + 1 + random.below(4)) % 5;
    targets.push(vec![Component::ALL[first], Component::ALL[second]]);
    for at in (1..targets.len()).rev() {
        targets.swap(at, random.below(at + 1));
    }
    let count = targets.len() as u64;
    let span = 850 / count;
    (0..count)
        .zip(targets)
        .map(|(index, components)| Blow {
            at: 10 + index * span + random.next() % span,
            later: random.millis(60),
            components,
            away: random.millis(400),
            choice: random.below(1 << 16),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_schedule_and_every_component_is_hit() {
        for seed in 0..50 {
            let blows = schedule(seed);
            assert_eq!(blows, schedule(seed));
            assert!(blows.windows(2).all(|pair| pair[0].at <= pair[1].at) && blows.iter().all(|blow| blow.at < 900));
            for component in Component::ALL {
                assert!(blows.iter().any(|blow| blow.components.contains(&component)), "{seed} {component:?}");
            }
        }
        assert_ne!(schedule(1), schedule(2));
    }
}

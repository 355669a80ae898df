//! What the runs of a cluster may use at most, by its owner's word (`runs.maxRuns`, `maxPods`, `maxGpus`). Pure.
//!
//! A run counts with the most pods it can come to have at once, so that what was admitted never waits for the rest of itself.

use rlm_core::evaluation::RunSpec;
use rlm_core::failure::{Failure, FailureCode};

use crate::executor::runs::Wait;

/// 0: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Caps {
    pub runs: u32,
    pub pods: u32,
    pub gpus: u32,
}

/// Of one run, or of all that go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Use {
    pub pods: u32,
    pub gpus: u32,
}

impl Use {
    /// The most that a run uses at once.
    #[must_use]
    pub fn most(spec: &RunSpec) -> Self {
        let environments = spec.lanes.div_ceil(spec.environment.lanes_per_pod.unwrap_or(1).max(1)).max(1);
        let shared = spec.environment.share_model_gpu;
        let gpus_each = if shared { 0 } else { spec.environment.resources.gpu };
        Self {
            // The model and the runner.
            pods: environments.saturating_add(2),
            gpus: spec.model.resources.gpu.saturating_add(environments.saturating_mul(gpus_each)),
        }
    }

    pub fn add(&mut self, other: Self) {
        *self = Self { pods: self.pods.saturating_add(other.pods), gpus: self.gpus.saturating_add(other.gpus) };
    }

    pub fn subtract(&mut self, other: Self) {
        *self = Self { pods: self.pods.saturating_sub(other.pods), gpus: self.gpus.saturating_sub(other.gpus) };
    }
}

/// Why a run does not start now.
#[derive(Debug, Clone, PartialEq)]
pub enum No {
    Now(Wait),
    Never(Failure),
}

impl Caps {
    /// Whether a run that needs `need` may start beside `active` runs that use `used`.
    pub fn admit(self, need: Use, used: Use, active: usize) -> Result<(), No> {
        for (most, needs, name, what) in [(self.pods, need.pods, "runs.maxPods", "pods"), (self.gpus, need.gpus, "runs.maxGpus", "GPUs")] {
            if most > 0 && needs > most {
                let message = format!(
                    "the run can come to need {needs} {what} at once and this cluster's {name} is {most}: ask for fewer workers, or its owner for more"
                );
                return Err(No::Never(Failure::new(FailureCode::Unschedulable, message)));
            }
        }
        let wait = |cause, message| Err(No::Now(Wait { cause, message, holds_others: true }));
        if self.runs > 0 && active >= self.runs as usize {
            return wait("capacity", format!("{active} runs are going on, as many as this cluster's runs.maxRuns allows"));
        }
        if self.pods > 0 && used.pods.saturating_add(need.pods) > self.pods {
            let message = format!(
                "runs use up to {} of the {} pods of this cluster's runs.maxPods, and this one needs {}",
                used.pods, self.pods, need.pods
            );
            return wait("capacity", message);
        }
        if self.gpus > 0 && need.gpus > 0 && used.gpus.saturating_add(need.gpus) > self.gpus {
            let message = format!(
                "runs use up to {} of the {} GPUs of this cluster's runs.maxGpus, and this one needs {}",
                used.gpus, self.gpus, need.gpus
            );
            return wait("gpu", message);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: Use = Use { pods: 4, gpus: 2 };

    fn cause(caps: Caps, used: Use, active: usize) -> &'static str {
        match caps.admit(NEED, used, active) {
            Ok(()) => "starts",
            Err(No::Now(wait)) => wait.cause,
            Err(No::Never(failure)) if failure.code == FailureCode::Unschedulable => "never",
            Err(No::Never(_)) => "another failure",
        }
    }

    #[test]
    fn caps_hold_and_zero_means_none() {
        let none = Caps::default();
        assert_eq!(cause(none, Use { pods: u32::MAX, gpus: u32::MAX }, 1_000), "starts");
        assert_eq!(cause(Caps { runs: 2, ..none }, Use::default(), 1), "starts");
        assert_eq!(cause(Caps { runs: 2, ..none }, Use::default(), 2), "capacity");
        assert_eq!(cause(Caps { pods: 8, ..none }, Use { pods: 4, gpus: 0 }, 1), "starts");
        assert_eq!(cause(Caps { pods: 7, ..none }, Use { pods: 4, gpus: 0 }, 1), "capacity");
        assert_eq!(cause(Caps { pods: 3, ..none }, Use::default(), 0), "never");
        assert_eq!(cause(Caps { gpus: 2, ..none }, Use::default(), 0), "starts");
        assert_eq!(cause(Caps { gpus: 2, ..none }, Use { pods: 0, gpus: 1 }, 1), "gpu");
        assert_eq!(cause(Caps { gpus: 1, ..none }, Use::default(), 0), "never");
        let idle = Use { pods: 3, gpus: 0 };
        assert!(Caps { gpus: 1, ..none }.admit(idle, Use { pods: 9, gpus: 1 }, 3).is_ok(), "who needs no GPU waits for none");
    }

    #[test]
    fn what_ends_gives_back_what_it_took() {
        let mut used = Use::default();
        used.add(NEED);
        used.add(Use { pods: 3, gpus: 0 });
        used.subtract(NEED);
        assert_eq!(used, Use { pods: 3, gpus: 0 });
    }
}

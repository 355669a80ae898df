//! Which runs start now, and which CUDA devices they get. Pure.
//!
//! Devices are handed out by count and belong to one run while it lives. The model has its own; the environment processes
//! of a run share the set of one environment (`resources.gpu`), or the model's (`shareModelGpu`).

use std::collections::BTreeSet;

use rlm_core::evaluation::RunSpec;

/// Devices of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Grant {
    pub model: Vec<u32>,
    pub environment: Vec<u32>,
}

/// Devices that a run needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Need {
    pub model: u32,
    pub environment: u32,
    pub share: bool,
}

impl Need {
    #[must_use]
    pub fn of(spec: &RunSpec) -> Self {
        // A server that runs already has its devices.
        let model = if spec.model.address.is_some() { 0 } else { spec.model.resources.gpu };
        let environment = if spec.environment.address.is_some() { 0 } else { spec.environment.resources.gpu };
        Self { model, environment, share: spec.environment.share_model_gpu }
    }

    #[must_use]
    pub const fn total(self) -> u32 {
        if self.share { self.model } else { self.model + self.environment }
    }
}

/// Takes the run's devices, lowest numbers first; None: not enough are free.
#[must_use]
pub fn grant(free: &mut BTreeSet<u32>, need: Need) -> Option<Grant> {
    if (free.len() as u64) < u64::from(need.total()) {
        return None;
    }
    let mut take = |count: u32| -> Vec<u32> { (0..count).map_while(|_| free.pop_first()).collect() };
    let model = take(need.model);
    let environment = if need.share { model.clone() } else { take(need.environment) };
    Some(Grant { model, environment })
}

/// Why a queued run does not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// As many runs as the cell allows are going on.
    Capacity,
    /// Too few free devices.
    Gpu,
    /// Another run uses the environment's server.
    Server,
}

/// Whether the next run of the queue may start. Order is kept: nobody overtakes a run that waits for devices.
pub const fn may_start(running: usize, max_runs: usize, free_devices: usize, need: Need) -> Result<(), Wait> {
    if running >= max_runs {
        Err(Wait::Capacity)
    } else if free_devices < need.total() as usize {
        Err(Wait::Gpu)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shared_devices_are_the_models() {
        let mut free: BTreeSet<u32> = (0..4).collect();
        let shared = grant(&mut free, Need { model: 1, environment: 1, share: true });
        assert_eq!(shared, Some(Grant { model: vec![0], environment: vec![0] }));
        let own = grant(&mut free, Need { model: 1, environment: 2, share: false });
        assert_eq!(own, Some(Grant { model: vec![1], environment: vec![2, 3] }));
        assert_eq!(grant(&mut free, Need { model: 1, ..Need::default() }), None);
        assert_eq!(grant(&mut free, Need::default()), Some(Grant::default()));
    }

    proptest! {
        #[test]
        fn no_device_is_given_twice(count in 0_u32..8, needs in proptest::collection::vec((0_u32..3, 0_u32..3, any::<bool>()), 0..8)) {
            let mut free: BTreeSet<u32> = (0..count).collect();
            let mut given = Vec::new();
            for (model, environment, share) in needs {
                if let Some(grant) = grant(&mut free, Need { model, environment, share }) {
                    given.extend(grant.model);
                    if !share { given.extend(grant.environment); }
                }
            }
            given.extend(free);
            given.sort_unstable();
            prop_assert_eq!(given, (0..count).collect::<Vec<_>>());
        }

        #[test]
        fn nothing_starts_beyond_the_limits(running in 0_usize..4, max in 1_usize..4, free in 0_usize..3, model in 0_u32..3) {
            let verdict = may_start(running, max, free, Need { model, ..Need::default() });
            prop_assert_eq!(verdict.is_ok(), running < max && model as usize <= free);
        }
    }
}

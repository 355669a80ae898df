//! The parts of a run and their names. Pure.

use std::fmt;

use crate::crd::run::{Mode, RLMeshRun};

/// Which part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Model { replica: u32 },
    Environment { binding: u32, pod: u32 },
    Runner,
    Describe,
}

impl Role {
    /// Value of the label `rlmesh.dev/component`: what network policies and scrapes select by.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Model { .. } => "model",
            Self::Environment { .. } => "environment",
            Self::Runner => "runner",
            Self::Describe => "describe",
        }
    }

    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let role = match name.split('-').collect::<Vec<_>>().as_slice() {
            ["model", replica] => Self::Model { replica: replica.parse().ok()? },
            ["env", binding, pod] => Self::Environment { binding: binding.parse().ok()?, pod: pod.parse().ok()? },
            ["runner"] => Self::Runner,
            ["describe"] => Self::Describe,
            _ => return None,
        };
        // `+1` and `01` parse as numbers and are no names.
        (role.to_string() == name).then_some(role)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model { replica } => write!(formatter, "model-{replica}"),
            Self::Environment { binding, pod } => write!(formatter, "env-{binding}-{pod}"),
            Self::Runner => formatter.write_str("runner"),
            Self::Describe => formatter.write_str("describe"),
        }
    }
}

/// One attempt at a part; each has one pod at most, ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt {
    pub role: Role,
    pub number: u32,
}

impl Attempt {
    /// Name of its pod.
    #[must_use]
    pub fn pod_name(self, run: &str) -> String {
        format!("{run}-{}-{}", self.role, self.number)
    }

    /// The attempt whose pod this is.
    #[must_use]
    pub fn of_pod(run: &str, pod: &str) -> Option<Self> {
        let (role, number) = pod.strip_prefix(run)?.strip_prefix('-')?.rsplit_once('-')?;
        Some(Self { role: Role::parse(role)?, number: number.parse().ok()? })
    }
}

/// The attempts that should exist, in the order in which they are made.
#[must_use]
pub fn wanted(run: &RLMeshRun) -> Vec<Attempt> {
    let spec = &run.spec;
    if spec.cancel {
        return Vec::new();
    }
    let roles: Vec<Role> = match spec.mode {
        Mode::Describe => vec![Role::Describe],
        Mode::Evaluate => {
            let models = (0..spec.model.as_ref().map_or(0, |model| model.replicas)).map(|replica| Role::Model { replica });
            let environments = spec
                .active_bindings
                .iter()
                .flat_map(|active| (0..active.pods).map(move |pod| Role::Environment { binding: active.index, pod }));
            models.chain(environments).chain([Role::Runner]).collect()
        }
    };
    roles.into_iter().map(|role| Attempt { role, number: spec.restarts.get(&role.to_string()).copied().unwrap_or(1) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for role in [Role::Model { replica: 3 }, Role::Environment { binding: 0, pod: 12 }, Role::Runner, Role::Describe] {
            assert_eq!(Role::parse(&role.to_string()), Some(role));
            let attempt = Attempt { role, number: 7 };
            assert_eq!(Attempt::of_pod("run-x", &attempt.pod_name("run-x")), Some(attempt));
        }
        for bad in ["model", "model-", "model-x", "model-01", "env-1", "env-1-2-3", "runner-1", ""] {
            assert_eq!(Role::parse(bad), None, "{bad}");
        }
        assert_eq!(Attempt::of_pod("run-x", "run-y-runner-1"), None);
    }
}

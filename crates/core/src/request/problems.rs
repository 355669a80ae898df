//! Collects what is wrong with a request, each with its path, without ever growing beyond what a person can read.

use std::collections::BTreeSet;
use std::fmt;

use super::text::{is_identifier, quote};
use crate::error::Problem;

/// Most problems that are reported one by one.
pub const MOST: usize = 200;

/// Where a value is in the request.
#[derive(Debug, Clone, Copy)]
pub enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl<'a> Path<'a> {
    #[must_use]
    pub const fn key(&'a self, name: &'a str) -> Self {
        Self::Key(self, name)
    }

    #[must_use]
    pub const fn index(&'a self, index: usize) -> Self {
        Self::Index(self, index)
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Index(parent, index) => write!(formatter, "{parent}[{index}]"),
            Self::Key(parent, name) => {
                let plain = is_identifier(name) && name.len() <= 128;
                match (parent, plain) {
                    (Self::Root, true) => formatter.write_str(name),
                    (_, true) => write!(formatter, "{parent}.{name}"),
                    (_, false) => write!(formatter, "{parent}[{}]", quote(name)),
                }
            }
        }
    }
}

#[derive(Debug, Default)]
pub struct Problems {
    found: Vec<Problem>,
    paths: BTreeSet<String>,
    more: usize,
}

impl Problems {
    pub fn add(&mut self, path: &Path<'_>, message: impl Into<String>) {
        self.add_at(path.to_string(), message);
    }

    pub fn add_at(&mut self, path: String, message: impl Into<String>) {
        if self.found.len() >= MOST {
            self.more += 1;
            return;
        }
        let problem = Problem::new(path, message);
        if self.paths.contains(&problem.path) && self.found.contains(&problem) {
            return;
        }
        self.paths.insert(problem.path.clone());
        self.found.push(problem);
    }

    /// Whether something is wrong with this very field, so that what follows from it need not be said too.
    #[must_use]
    pub fn has(&self, path: &Path<'_>) -> bool {
        !self.paths.is_empty() && self.paths.contains(&path.to_string())
    }

    /// Whether something is wrong with this field or within it.
    #[must_use]
    pub fn below(&self, path: &str) -> bool {
        self.paths
            .range(path.to_owned()..)
            .take_while(|found| found.starts_with(path))
            .any(|found| found.get(path.len()..).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '['])))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    #[must_use]
    pub fn finish(mut self) -> Vec<Problem> {
        if self.more > 0 {
            self.found.push(Problem::new("", format!("and {} more problems", self.more)));
        }
        self.found
    }
}

//! The vocabulary in which the fields of a request are written down once: the reader, the JSON Schema and the reference page
//! all follow the same tables, so that none of them can say something else than the others.

use super::text::Text;

/// An object of the request.
#[derive(Debug)]
pub struct Table {
    /// Name in the schema and heading in the reference.
    pub name: &'static str,
    pub about: &'static str,
    pub fields: &'static [Field],
}

/// One field of an object. `null` means the same as leaving it out.
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub presence: Presence,
    pub about: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Required,
    /// Absent means none.
    Optional,
    /// Absent means this, written as JSON.
    Default(&'static str),
}

/// What a value may be.
#[derive(Debug)]
pub enum Kind {
    Text(Text),
    Choice(&'static [&'static str]),
    Integer {
        min: i64,
        max: i64,
    },
    /// A finite number.
    Number {
        min: f64,
        max: f64,
    },
    Boolean,
    /// Text such as `1h30m`, or a number of seconds; read as milliseconds.
    Duration {
        min_ms: u64,
        max_ms: u64,
    },
    /// A Kubernetes quantity above zero, as text or as a number.
    Quantity,
    Object(&'static Table),
    /// A model or environment: an object, or the name of a registered one.
    Definition(Side, &'static Table),
    List {
        of: &'static Kind,
        min: usize,
        max: usize,
    },
    Map {
        key: Text,
        of: &'static Kind,
        max: usize,
    },
    /// An object with any fields, at most this many bytes of JSON.
    Open {
        max_bytes: usize,
    },
    /// Construction arguments: an object with any fields but those that the platform sets itself.
    Arguments,
}

/// Which of the two a definition is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Model,
    Environment,
}

impl Side {
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Environment => "environment",
        }
    }

    /// The list of the request that holds them.
    #[must_use]
    pub const fn list(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Environment => "environments",
        }
    }
}

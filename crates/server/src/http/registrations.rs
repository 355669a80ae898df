//! What requests about registered models and environments have in common.

use rlm_core::error::Error;
use serde::Deserialize;
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::http::page::PageQuery;

/// A definition to register.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Register {
    pub name: String,
    /// As one item of `models` or `environments` in an evaluation request; its `id` may be left out.
    #[schema(value_type = Object)]
    pub definition: Value,
    /// Its describe document, as `rlmesh describe` prints it. Left out: asked of a connected local cell, where there is one.
    #[schema(value_type = Option<Object>)]
    pub describe: Option<Value>,
}

impl Register {
    /// Largest body: a definition and a describe document of 4 MiB.
    pub const LIMIT: usize = 8 * 1024 * 1024;
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Part of the name.
    pub q: Option<String>,
    /// Most items on the page, 1 to 200 (50 unless given).
    pub limit: Option<u32>,
    /// `nextCursor` of the page before.
    pub cursor: Option<String>,
}

impl ListQuery {
    pub fn limit(&self) -> Result<u32, Error> {
        PageQuery { limit: self.limit, cursor: None }.limit()
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct VersionQuery {
    /// Left out: the newest.
    pub version: Option<u64>,
}

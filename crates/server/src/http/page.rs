//! Pages of lists: `limit` and `cursor`. A cursor is the id of the last item of the page before; clients treat it as opaque.

use std::str::FromStr;

use rlm_api::rest::Page;
use rlm_core::error::{Code, Error};
use serde::Deserialize;
use utoipa::IntoParams;

const DEFAULT: u32 = 50;
const MOST: u32 = 200;

#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// Most items on the page, 1 to 200 (50 unless given).
    pub limit: Option<u32>,
    /// `nextCursor` of the page before.
    pub cursor: Option<String>,
}

impl PageQuery {
    pub fn limit(&self) -> Result<u32, Error> {
        match self.limit.unwrap_or(DEFAULT) {
            limit @ 1..=MOST => Ok(limit),
            _ => Err(Error::new(Code::BadRequest, format!("the parameter 'limit' must be from 1 to {MOST}"))),
        }
    }

    /// The cursor as the id that it is.
    pub fn cursor<T: FromStr>(&self) -> Result<Option<T>, Error> {
        self.cursor
            .as_deref()
            .map(|text| text.parse().map_err(|_| Error::new(Code::BadRequest, "the parameter 'cursor' is not one that this list gave")))
            .transpose()
    }
}

/// A page out of up to `limit + 1` items; the one more shows that there is a next page.
pub fn page<S, T>(mut items: Vec<S>, limit: u32, cursor: impl Fn(&S) -> String, shape: impl FnMut(S) -> T) -> Page<T> {
    let limit = limit as usize;
    let next_cursor = if items.len() > limit { items.get(limit - 1).map(cursor) } else { None };
    items.truncate(limit);
    Page { items: items.into_iter().map(shape).collect(), next_cursor }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_page_has_no_cursor() {
        let shape = |items: Vec<u8>| {
            let page = page(items, 2, u8::to_string, |item| item);
            (page.items, page.next_cursor)
        };
        assert_eq!(shape(vec![1, 2, 3]), (vec![1, 2], Some("2".to_owned())));
        assert_eq!(shape(vec![1, 2]), (vec![1, 2], None));
        assert_eq!(shape(vec![]), (vec![], None));
    }
}

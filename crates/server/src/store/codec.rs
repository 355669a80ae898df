//! What the store's modules share in turning rows into values: numbers, JSON columns, placeholder lists. Must hold no query.

use std::fmt::Write as _;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::any::AnyRow;
use sqlx::{Decode, Row, Type};

use super::{Attempt as _, StoreError};

/// A column by position.
pub(crate) fn column<'r, T>(row: &'r AnyRow, index: usize) -> Result<T, StoreError>
where
    T: Decode<'r, sqlx::Any> + Type<sqlx::Any>,
{
    row.try_get(index).attempt("read a column")
}

/// A count or position; stored numbers of this kind are never negative.
pub(crate) fn unsigned(row: &AnyRow, index: usize) -> Result<u64, StoreError> {
    Ok(u64::try_from(column::<i64>(row, index)?).unwrap_or(0))
}

/// A 0/1 column.
pub(crate) fn flag(row: &AnyRow, index: usize) -> Result<bool, StoreError> {
    Ok(column::<i64>(row, index)? != 0)
}

/// A 0/1 column that may be NULL.
pub(crate) fn optional_flag(row: &AnyRow, index: usize) -> Result<Option<bool>, StoreError> {
    Ok(column::<Option<i64>>(row, index)?.map(|value| value != 0))
}

/// As SQL keeps it: counts here are far below 2^63.
pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(crate) fn from_json<T: DeserializeOwned>(table: &'static str, column: &'static str, row: &str, text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| StoreError::Inconsistent { table, column, row: row.to_owned(), problem: error.to_string() })
}

pub(crate) fn to_json<T: Serialize>(table: &'static str, column: &'static str, row: &str, value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Inconsistent {
        table,
        column,
        row: row.to_owned(),
        problem: error.to_string(),
    })
}

/// A stored value that has a text form of its own (ids, states).
pub(crate) fn parsed<T>(
    table: &'static str,
    column: &'static str,
    row: &str,
    text: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, StoreError> {
    parse(text).ok_or_else(|| StoreError::Inconsistent {
        table,
        column,
        row: row.to_owned(),
        problem: format!("'{text}' is not one of the known values"),
    })
}

/// `($1, $2), ($3, $4)` for `rows` rows of `columns` columns, numbered from `first`.
pub(crate) fn value_lists(rows: usize, columns: usize, first: usize) -> String {
    let mut text = String::with_capacity(rows * columns * 7);
    for row in 0..rows {
        text.push_str(if row == 0 { "(" } else { ", (" });
        for place in 0..columns {
            let separator = if place == 0 { "" } else { ", " };
            let _ = write!(text, "{separator}${}", first + row * columns + place);
        }
        text.push(')');
    }
    text
}

/// `$3, $4, $5`
pub(crate) fn placeholders(count: usize, first: usize) -> String {
    let mut text = String::with_capacity(count * 6);
    for place in 0..count {
        let separator = if place == 0 { "" } else { ", " };
        let _ = write!(text, "{separator}${}", first + place);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_count_on() {
        assert_eq!(value_lists(2, 2, 3), "($3, $4), ($5, $6)");
        assert_eq!(placeholders(3, 2), "$2, $3, $4");
    }
}

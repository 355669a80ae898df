//! Query strings and forms into types: scalars, optional scalars, and repeated parameters as lists. An error names the
//! parameter, never its value: forms hold secrets.

use std::collections::BTreeMap;

use rlm_core::error::{Code, Error};
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};

/// Reads `text` (`a=1&b=2&b=3`) as `T`.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (key, value) in form_urlencoded::parse(text.as_bytes()) {
        groups.entry(key.into_owned()).or_default().push(value.into_owned());
    }
    let entries = groups.into_iter().map(|(key, values)| {
        let parameter = Parameter { name: key.clone(), values };
        (key, parameter)
    });
    T::deserialize(MapDeserializer::new(entries)).map_err(|error: Failed| Error::new(Code::BadRequest, error.0))
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(String);

impl de::Error for Failed {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Self(format!("the parameter '{field}' is missing"))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let field: String = field.chars().take(60).collect();
        Self(format!("there is no parameter '{field}' here; known: {}", expected.join(", ")))
    }
}

/// The values of one parameter.
struct Parameter {
    name: String,
    values: Vec<String>,
}

impl IntoDeserializer<'_, Failed> for Parameter {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl Parameter {
    fn wrong(&self, what: &str) -> Failed {
        Failed(format!("the parameter '{}' {what}", self.name.chars().take(60).collect::<String>()))
    }

    fn single(&self) -> Result<&str, Failed> {
        match self.values.as_slice() {
            [only] => Ok(only),
            _ => Err(self.wrong("is given more than once")),
        }
    }

    fn number<T: std::str::FromStr>(&self) -> Result<T, Failed> {
        self.single()?.parse().map_err(|_| self.wrong("must be a number, and in range"))
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failed> {
            visitor.$visit(self.number::<$type>()?)
        })*
    };
}

impl<'de> Deserializer<'de> for Parameter {
    type Error = Failed;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failed> {
        let text = self.single()?.to_owned();
        visitor.visit_string(text).map_err(|error: Failed| self.wrong(&format!("is refused: {error}")))
    }

    numbers! {
        deserialize_u8 visit_u8 u8;
        deserialize_u16 visit_u16 u16;
        deserialize_u32 visit_u32 u32;
        deserialize_u64 visit_u64 u64;
        deserialize_i8 visit_i8 i8;
        deserialize_i16 visit_i16 i16;
        deserialize_i32 visit_i32 i32;
        deserialize_i64 visit_i64 i64;
        deserialize_f32 visit_f32 f32;
        deserialize_f64 visit_f64 f64;
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failed> {
        match self.single()? {
            "true" => visitor.visit_bool(true),
            "false" => visitor.visit_bool(false),
            _ => Err(self.wrong("must be true or false")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failed> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Result<V::Value, Failed> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failed> {
        let name = self.name;
        let items = self.values.into_iter().map(|value| Self { name: name.clone(), values: vec![value] });
        visitor.visit_seq(SeqDeserializer::new(items))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failed> {
        let text = self.single()?.to_owned();
        if !variants.contains(&text.as_str()) {
            return Err(self.wrong(&format!("must be one of {}", variants.join(", "))));
        }
        visitor.visit_enum(text.into_deserializer())
    }

    serde::forward_to_deserialize_any! {
        i128 u128 char str string bytes byte_buf unit unit_struct tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize, PartialEq)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Filter {
        limit: Option<u32>,
        #[serde(default)]
        tag: Vec<String>,
        group_by: Option<Group>,
        q: Option<String>,
    }

    #[derive(Debug, serde::Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Group {
        Task,
        Model,
    }

    #[test]
    fn scalars_lists_and_enums_are_read() {
        let filter: Filter = parse("limit=25&tag=a%3Ab&tag=c%3Ad&groupBy=model&q=x+y").unwrap();
        let expected = Filter {
            limit: Some(25),
            tag: vec!["a:b".to_owned(), "c:d".to_owned()],
            group_by: Some(Group::Model),
            q: Some("x y".to_owned()),
        };
        assert_eq!(filter, expected);
        assert_eq!(parse::<Filter>("").unwrap(), Filter { limit: None, tag: vec![], group_by: None, q: None });
    }

    #[test]
    fn problems_name_the_parameter_and_not_its_value() {
        for (text, named) in [
            ("limit=secret", "'limit'"),
            ("limit=-1", "'limit'"),
            ("limit=1&limit=2", "'limit'"),
            ("groupBy=secret", "'groupBy'"),
            ("colour=secret", "'colour'"),
        ] {
            let error = parse::<Filter>(text).unwrap_err();
            assert_eq!(error.code, Code::BadRequest);
            assert!(error.message.contains(named) && !error.message.contains("secret"), "{}", error.message);
        }
    }
}

//! The kinds of text in a request: what each may look like, as a check, a pattern for the schema, and words for people.

use crate::ids::ClusterId;

/// A kind of text; numbers are the most characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    /// Any text without NUL.
    Free(usize),
    /// Any text without control characters.
    Line(usize),
    Id,
    /// An id, or `name:version` of something registered.
    Reference,
    /// The id of a model, maybe `id@set`, maybe with a version.
    ModelName,
    SetName,
    TagKey,
    ClusterId,
    Image,
    Entrypoint,
    AbsolutePath,
    Program,
    Address,
    Identifier,
    VariableName,
    SecretRef,
    CheckpointUri,
    Sha256,
    Edition,
    Video,
}

const CHECKPOINT_SCHEMES: [&str; 6] = ["https", "s3", "gs", "hf", "pvc", "file"];

impl Text {
    /// Most characters.
    #[must_use]
    pub const fn max(self) -> usize {
        match self {
            Self::Free(max) | Self::Line(max) => max,
            Self::Id | Self::VariableName | Self::Identifier => 128,
            Self::Reference | Self::ModelName => 193,
            Self::SetName | Self::TagKey | Self::Edition | Self::Sha256 => 64,
            Self::ClusterId => 29,
            Self::Image => 512,
            Self::Entrypoint => 256,
            Self::AbsolutePath | Self::Program | Self::Address => 1024,
            Self::SecretRef => 320,
            Self::CheckpointUri => 2048,
            Self::Video => 12,
        }
    }

    /// Regular expression for the schema; None where the kind is not one of form. Text that matches it is read.
    #[must_use]
    pub const fn pattern(self) -> Option<&'static str> {
        match self {
            Self::Free(_) | Self::Line(_) => None,
            Self::Id => Some("^[A-Za-z0-9][A-Za-z0-9._@/-]*$"),
            Self::Reference | Self::ModelName => Some("^[A-Za-z0-9][A-Za-z0-9._@/-]*(:[A-Za-z0-9][A-Za-z0-9._-]*)?$"),
            Self::SetName => Some("^[A-Za-z0-9][A-Za-z0-9._-]*$"),
            Self::TagKey => Some("^[A-Za-z0-9][A-Za-z0-9._/-]*$"),
            Self::ClusterId => Some("^cl_[0-7][0-9abcdefghjkmnpqrstvwxyz]{25}$"),
            Self::Image => Some("^[A-Za-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?$"),
            Self::Entrypoint => {
                Some("^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$")
            }
            Self::AbsolutePath => Some("^/[^:\\x00-\\x1f\\x7f]*$"),
            Self::Program => Some("^(/[^\\x00-\\x1f\\x7f]+|[A-Za-z0-9][A-Za-z0-9._-]*)$"),
            Self::Address => Some("^(tcp://[A-Za-z0-9._:\\[\\]-]+:[0-9]{1,5}|unix:///[^\\x00-\\x20\\x7f]+)$"),
            Self::Identifier | Self::VariableName => Some("^[A-Za-z_][A-Za-z0-9_]*$"),
            Self::SecretRef => Some("^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+$"),
            Self::CheckpointUri => {
                Some("^((https|s3|gs|hf|pvc)://[^/@\\x00-\\x20\\x7f]+(/[^\\x00-\\x20\\x7f]*)?|file:///[^\\x00-\\x1f\\x7f]+)$")
            }
            Self::Sha256 => Some("^[0-9a-fA-F]{64}$"),
            Self::Edition => Some("^[0-9]{4}[.][0-9]{2}[A-Za-z0-9._-]*$"),
            Self::Video => Some("^(none|failures|all|sample:[1-9][0-9]{0,4})$"),
        }
    }

    /// What it must be, to follow "must be".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Free(_) => "text",
            Self::Line(_) => "one line of text",
            Self::Id => "letters, digits and . _ - @ /, beginning with a letter or digit",
            Self::Reference | Self::ModelName => "an id, or name:version",
            Self::SetName => "letters, digits and . _ -, beginning with a letter or digit",
            Self::TagKey => "letters, digits and . _ - /, beginning with a letter or digit",
            Self::ClusterId => "a cluster's id: cl_ and 26 characters",
            Self::Image => "an image's name, for example registry.example.com/team/policy:1.2 or ...@sha256:<64 hex digits>",
            Self::Entrypoint => "module.path:Name, for example policies:PushLeft",
            Self::AbsolutePath => "an absolute path without ':'; in a file given to `rlmesh eval submit` it may be relative to that file",
            Self::Program => "an absolute path or a program's name, for example /opt/venv/bin/python",
            Self::Address => "tcp://host:port or unix:///absolute/path",
            Self::Identifier => "the name of a Python argument",
            Self::VariableName => "the name of an environment variable: letters, digits and _, not beginning with a digit",
            Self::SecretRef => "secret/key: the name of a secret of the cluster and of a key in it",
            Self::CheckpointUri => "https://, s3://, gs://, hf://, pvc:// or file:///absolute/path",
            Self::Sha256 => "64 hex digits",
            Self::Edition => "a workflow edition, for example 2026.06",
            Self::Video => "none, failures, all or sample:K",
        }
    }

    /// What is wrong with this text.
    #[must_use]
    pub fn problem(self, text: &str) -> Option<String> {
        if text.len() > self.max() && text.chars().count() > self.max() {
            return Some(format!("is too long: {} characters, at most {}", text.chars().count(), self.max()));
        }
        let wrong = |reason: Option<String>| {
            let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
            // What was put in a secret's place may be a secret.
            let found = if self == Self::SecretRef || (self == Self::CheckpointUri && text.contains('@')) {
                String::new()
            } else {
                format!(", not {}", quote(text))
            };
            Some(format!("must be {}{found}{reason}", self.words()))
        };
        let good = match self {
            Self::Free(_) => return text.contains('\0').then(|| "must not contain a NUL character".to_owned()),
            Self::Line(_) if text.trim().is_empty() => return Some("is empty".to_owned()),
            Self::Line(_) => {
                return text.chars().any(char::is_control).then(|| "must be one line, without control characters".to_owned());
            }
            Self::Id => is_word(text, b"._-@/"),
            Self::Reference | Self::ModelName => match text.split_once(':') {
                Some((name, version)) => is_word(name, b"._-@/") && is_word(version, b"._-"),
                None => is_word(text, b"._-@/"),
            },
            Self::SetName => is_word(text, b"._-"),
            Self::TagKey => is_word(text, b"._-/"),
            Self::ClusterId => text.parse::<ClusterId>().is_ok(),
            Self::Image => match text.split_once('@') {
                Some((name, digest)) => {
                    is_word(name, b"._:/-")
                        && digest
                            .strip_prefix("sha256:")
                            .is_some_and(|hex| is_hex(hex) && !hex.bytes().any(|byte| byte.is_ascii_uppercase()))
                }
                None => is_word(text, b"._:/-"),
            },
            Self::Entrypoint => text.split_once(':').is_some_and(|(module, name)| is_dotted(module) && is_dotted(name)),
            Self::AbsolutePath => text.starts_with('/') && !text.contains(':') && !text.chars().any(|c| c.is_ascii_control()),
            Self::Program => {
                (text.starts_with('/') && text.len() > 1 && !text.chars().any(|c| c.is_ascii_control())) || is_word(text, b"._-")
            }
            Self::Address => is_address(text),
            Self::Identifier | Self::VariableName => is_identifier(text),
            Self::SecretRef => text.split_once('/').is_some_and(|(secret, key)| {
                let lower = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
                secret.bytes().all(|byte| lower(byte) || b".-".contains(&byte))
                    && secret.bytes().next().is_some_and(lower)
                    && secret.bytes().last().is_some_and(lower)
                    && !key.is_empty()
                    && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
            }),
            Self::CheckpointUri => match checkpoint_uri(text) {
                Ok(()) => true,
                Err(reason) => return wrong(Some(reason)),
            },
            Self::Sha256 => is_hex(text),
            Self::Edition => {
                let bytes = text.as_bytes();
                bytes.len() >= 7
                    && bytes.iter().enumerate().all(|(place, byte)| match place {
                        0..=3 | 5 | 6 => byte.is_ascii_digit(),
                        4 => *byte == b'.',
                        _ => byte.is_ascii_alphanumeric() || b"._-".contains(byte),
                    })
            }
            Self::Video => {
                matches!(text, "none" | "failures" | "all")
                    || text.strip_prefix("sample:").is_some_and(|count| {
                        (1..=5).contains(&count.len()) && !count.starts_with('0') && count.bytes().all(|byte| byte.is_ascii_digit())
                    })
            }
        };
        if good { None } else { wrong(None) }
    }
}

fn is_word(text: &str, more: &[u8]) -> bool {
    text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || more.contains(&byte))
}

fn is_hex(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

pub fn is_identifier(text: &str) -> bool {
    text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn is_dotted(text: &str) -> bool {
    text.split('.').all(is_identifier)
}

fn is_address(text: &str) -> bool {
    if let Some(path) = text.strip_prefix("unix://") {
        return path.len() > 1 && path.starts_with('/') && !path.bytes().any(|byte| byte <= b' ' || byte == 0x7f);
    }
    text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).is_some_and(|(host, port)| {
        !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._:[]-".contains(&byte))
            && (1..=5).contains(&port.len())
            && port.bytes().all(|byte| byte.is_ascii_digit())
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

fn checkpoint_uri(text: &str) -> Result<(), String> {
    let Some((scheme, rest)) = text.split_once(':') else {
        return Err("it has no scheme".to_owned());
    };
    if !CHECKPOINT_SCHEMES.contains(&scheme) {
        return Err(if scheme == "http" {
            "http is neither private nor verified; use https".to_owned()
        } else {
            format!("{} is not one of the schemes", quote(scheme))
        });
    }
    let Some(rest) = rest.strip_prefix("//") else {
        return Err(if scheme == "file" {
            "a relative file can't be found from a server; `rlmesh eval submit` makes it absolute".to_owned()
        } else {
            format!("{scheme}:// is missing its slashes")
        });
    };
    if rest.chars().any(|c| c.is_ascii_control()) {
        return Err("it has control characters".to_owned());
    }
    if scheme == "file" {
        return if rest.starts_with('/') && rest.len() > 1 { Ok(()) } else { Err("its path must be absolute: file:///path".to_owned()) };
    }
    if rest.contains(' ') {
        return Err("it has a space; write %20".to_owned());
    }
    let host = rest.split('/').next().unwrap_or_default();
    if host.is_empty() {
        return Err("it has nothing after the scheme".to_owned());
    }
    if host.contains('@') {
        return Err("it holds credentials, which requests never do; use secretEnv".to_owned());
    }
    Ok(())
}

/// The text in quotes, shortened, with control characters escaped; safe to put into a message.
#[must_use]
pub fn quote(text: &str) -> String {
    const MOST: usize = 60;
    let mut shown: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push_str("...");
    }
    format!("'{shown}'")
}

/// Milliseconds of text such as `1h30m`, `20s`, `250ms`: whole numbers with units d, h, m, s, ms in falling order.
pub fn parse_duration(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
    let mut rest = text;
    let mut total: u64 = 0;
    let mut last: Option<usize> = None;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at_checked(digits)?;
        let number: u64 = number.parse().ok()?;
        let letters = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, after) = after.split_at_checked(letters)?;
        let place = UNITS.iter().position(|(name, _)| *name == unit)?;
        if last.is_some_and(|last| place <= last) {
            return None;
        }
        last = Some(place);
        total = total.checked_add(number.checked_mul(UNITS.get(place)?.1)?)?;
        rest = after;
    }
    last.map(|_| total)
}

/// Milliseconds in the same form that [`parse_duration`] reads.
#[must_use]
pub fn duration_text(ms: u64) -> String {
    if ms == 0 {
        return "0s".to_owned();
    }
    let mut rest = ms;
    let mut text = String::new();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        if rest >= size {
            text.push_str(&format!("{}{unit}", rest / size));
            rest %= size;
        }
    }
    text
}

pub const QUANTITY_PATTERN: &str = "^[0-9]{1,15}([.][0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$";

/// Whether the text is a Kubernetes quantity above zero.
#[must_use]
pub fn is_quantity(text: &str) -> bool {
    let end = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let Some((number, suffix)) = text.split_at_checked(end) else { return false };
    let (whole, fraction) = number.split_once('.').map_or((number, None), |(whole, fraction)| (whole, Some(fraction)));
    (1..=15).contains(&whole.len())
        && !whole.contains('.')
        && fraction.is_none_or(|fraction| (1..=9).contains(&fraction.len()) && !fraction.contains('.'))
        && ["", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].contains(&suffix)
        && number.bytes().any(|byte| (b'1'..=b'9').contains(&byte))
}

/// The candidate that was probably meant.
pub fn nearest<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| -> Vec<char> {
        text.chars().filter(|c| !matches!(c, '_' | '-' | '.' | '/' | ' ')).flat_map(char::to_lowercase).take(64).collect()
    };
    let wanted = plain(text);
    if wanted.is_empty() {
        return None;
    }
    candidates
        .into_iter()
        .map(|candidate| (distance(&wanted, &plain(candidate)), candidate))
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, candidate)| *distance <= (wanted.len().min(candidate.chars().count()) / 3).max(1))
        .map(|(_, candidate)| candidate)
}

/// Edits (insert, delete, replace, swap of neighbours) between two texts.
fn distance(a: &[char], b: &[char]) -> usize {
    let at = |row: &[usize], place: usize| row.get(place).copied().unwrap_or_default();
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    let mut left = None;
    for (i, &letter) in (1..).zip(a) {
        let mut row = vec![i];
        let mut previous = None;
        for (j, &other) in (1..).zip(b) {
            let mut best = (at(&above, j - 1) + usize::from(letter != other)).min(at(&above, j) + 1).min(at(&row, j - 1) + 1);
            if left == Some(other) && previous == Some(letter) {
                best = best.min(at(&before, j - 2) + 1);
            }
            row.push(best);
            previous = Some(other);
        }
        before = std::mem::replace(&mut above, row);
        left = Some(letter);
    }
    above.last().copied().unwrap_or_default()
}

/// "; did you mean 'x'?" or nothing.
pub fn hint<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(text, candidates).map_or_else(String::new, |found| format!("; did you mean {}?", quote(found)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PATTERNED: [Text; 18] = [
        Text::Id,
        Text::Reference,
        Text::ModelName,
        Text::SetName,
        Text::TagKey,
        Text::ClusterId,
        Text::Image,
        Text::Entrypoint,
        Text::AbsolutePath,
        Text::Program,
        Text::Identifier,
        Text::VariableName,
        Text::SecretRef,
        Text::CheckpointUri,
        Text::Sha256,
        Text::Edition,
        Text::Video,
        Text::Address,
    ];

    proptest! {
        #[test]
        fn what_matches_the_schema_is_read(seed in any::<[u8; 32]>()) {
            use proptest::strategy::{Strategy, ValueTree};
            let rng = proptest::test_runner::TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &seed);
            let mut runner = proptest::test_runner::TestRunner::new_with_rng(proptest::test_runner::Config::default(), rng);
            for kind in PATTERNED {
                let pattern = kind.pattern().unwrap();
                let pattern = pattern.trim_start_matches('^').trim_end_matches('$');
                let text = proptest::string::string_regex(pattern).unwrap().new_tree(&mut runner).unwrap().current();
                // A port number and a maximal length are beyond what the pattern says.
                if text.chars().count() > kind.max() || (kind == Text::Address && text.starts_with("tcp")) {
                    continue;
                }
                prop_assert_eq!(kind.problem(&text), None, "{:?}", kind);
            }
            let text = proptest::string::string_regex(QUANTITY_PATTERN.trim_start_matches('^').trim_end_matches('$')).unwrap().new_tree(&mut runner).unwrap().current();
            prop_assert!(is_quantity(&text) || !text.bytes().any(|b| (b'1'..=b'9').contains(&b)), "{text}");
        }

        #[test]
        fn durations_read_back(ms in 0_u64..10_000_000_000) {
            prop_assert_eq!(parse_duration(&duration_text(ms)), Some(ms));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            for kind in PATTERNED {
                let _ = kind.problem(&text);
            }
            let _ = (parse_duration(&text), is_quantity(&text), nearest(&text, ["episodes", "ä"]), quote(&text));
        }

        #[test]
        fn distance_is_symmetric_and_zero_only_for_equals(a in "[ab]{0,6}", b in "[ab]{0,6}") {
            let (left, right): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
            prop_assert_eq!(distance(&left, &right), distance(&right, &left));
            prop_assert_eq!(distance(&left, &right) == 0, a == b);
        }
    }

    #[test]
    fn distances_and_durations_are_right() {
        let count = |a: &str, b: &str| distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        assert_eq!((count("kitten", "sitting"), count("", "abc"), count("nmae", "name")), (3, 3, 1));
        for (text, ms) in [("10m", 600_000), ("1h30m", 5_400_000), ("20s", 20_000), ("250ms", 250), ("1d2h3m4s5ms", 93_784_005)] {
            assert_eq!(parse_duration(text), Some(ms), "{text}");
        }
        for text in ["", "10", "m", "1.5h", "-1s", "30m1h", "1s1s", "1 h", "5 minutes", "99999999999999999999s", "18446744073709551615d"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
        assert_eq!(nearest("max_episode_step", ["seed", "maxEpisodeSteps"]), Some("maxEpisodeSteps"));
        assert_eq!(nearest("colour", ["seed", "episodes"]), None);
    }
}

//! Rows of a space value: how the slab of several lanes is cut into single rows and put together again.
//!
//! The runner never looks into observations and actions. It knows from the space how many bytes one row of each leaf has
//! (text leaves carry their own lengths), which is all that routing rows between processes needs.

use bytes::{BufMut as _, Bytes, BytesMut};
use rlmesh_proto::spaces::v1::{DataType, SpaceSpec, SpaceValue, space_spec::Spec};
use sha2::{Digest as _, Sha256};

/// The leaves of a space in wire order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    leaves: Vec<Leaf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaf {
    /// Bytes per row.
    Fixed(usize),
    Text,
}

/// A value that does not have the form its space demands, or a space that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Mismatch(String);

impl Layout {
    /// The layout of this space.
    pub fn of(space: &SpaceSpec) -> Result<Self, Mismatch> {
        let mut leaves = Vec::new();
        collect(space, &mut leaves)?;
        Ok(Self { leaves })
    }

    /// The single rows of a slab of `rows` rows.
    pub fn split(&self, value: &SpaceValue, rows: usize) -> Result<Vec<SpaceValue>, Mismatch> {
        if value.leaves.len() != self.leaves.len() {
            return Err(Mismatch(format!("{} leaves, the space has {}", value.leaves.len(), self.leaves.len())));
        }
        let mut split: Vec<Vec<Bytes>> = (0..rows).map(|_| Vec::with_capacity(self.leaves.len())).collect();
        for (number, (leaf, slab)) in self.leaves.iter().zip(&value.leaves).enumerate() {
            match leaf {
                Leaf::Fixed(stride) => {
                    let expected = stride.checked_mul(rows).ok_or_else(|| Mismatch("a slab of more bytes than can be".to_owned()))?;
                    if slab.len() != expected {
                        return Err(Mismatch(format!(
                            "leaf {number} has {} bytes, {rows} rows of {stride} bytes were expected",
                            slab.len()
                        )));
                    }
                    for (row, leaves) in split.iter_mut().enumerate() {
                        leaves.push(slab.slice(row * stride..(row + 1) * stride));
                    }
                }
                Leaf::Text if rows == 1 => {
                    texts(slab, 1)?;
                    if let Some(leaves) = split.first_mut() {
                        leaves.push(slab.clone());
                    }
                }
                Leaf::Text => {
                    for (leaves, text) in split.iter_mut().zip(texts(slab, rows)?) {
                        leaves.push(text_slab(&[text]));
                    }
                }
            }
        }
        Ok(split.into_iter().map(|leaves| SpaceValue { leaves }).collect())
    }

    /// One slab of these single rows.
    pub fn join(&self, rows: &[&SpaceValue]) -> Result<SpaceValue, Mismatch> {
        if let [only] = rows {
            self.split(only, 1)?;
            return Ok((*only).clone());
        }
        let mut leaves = Vec::with_capacity(self.leaves.len());
        for (number, leaf) in self.leaves.iter().enumerate() {
            let parts = rows
                .iter()
                .map(|row| row.leaves.get(number).ok_or_else(|| Mismatch(format!("leaf {number} is missing"))))
                .collect::<Result<Vec<_>, _>>()?;
            leaves.push(match leaf {
                Leaf::Fixed(stride) => {
                    let mut slab = BytesMut::with_capacity(stride * rows.len());
                    for part in parts {
                        if part.len() != *stride {
                            return Err(Mismatch(format!("leaf {number} has {} bytes, one row has {stride}", part.len())));
                        }
                        slab.put_slice(part);
                    }
                    slab.freeze()
                }
                Leaf::Text => {
                    let bodies = parts
                        .into_iter()
                        .map(|part| texts(part, 1)?.into_iter().next().ok_or_else(|| Mismatch("a text is missing".to_owned())))
                        .collect::<Result<Vec<_>, _>>()?;
                    text_slab(&bodies)
                }
            });
        }
        Ok(SpaceValue { leaves })
    }
}

/// SHA-256 of the bytes of a single row, its leaves in order.
#[must_use]
pub fn digest(row: &SpaceValue) -> [u8; 32] {
    let mut hash = Sha256::new();
    for leaf in &row.leaves {
        hash.update(leaf);
    }
    hash.finalize().into()
}

fn collect(space: &SpaceSpec, leaves: &mut Vec<Leaf>) -> Result<(), Mismatch> {
    match &space.spec {
        Some(Spec::Box(_)) => leaves.push(Leaf::Fixed(stride(elements(&space.shape)?, width(space)?)?)),
        Some(Spec::Discrete(_)) => leaves.push(Leaf::Fixed(width(space)?)),
        Some(Spec::MultiBinary(_)) => leaves.push(Leaf::Fixed(elements(&space.shape)?)),
        Some(Spec::MultiDiscrete(multi)) => leaves.push(Leaf::Fixed(stride(multi.nvec.len(), width(space)?)?)),
        Some(Spec::Text(_)) => leaves.push(Leaf::Text),
        Some(Spec::Dict(dict)) => {
            for inner in &dict.spaces {
                collect(inner, leaves)?;
            }
        }
        Some(Spec::Tuple(tuple)) => {
            for inner in &tuple.spaces {
                collect(inner, leaves)?;
            }
        }
        None => return Err(Mismatch("a space of a kind that this version does not know".to_owned())),
    }
    Ok(())
}

fn elements(shape: &[i64]) -> Result<usize, Mismatch> {
    shape
        .iter()
        .try_fold(1_usize, |all, side| usize::try_from(*side).ok().and_then(|side| all.checked_mul(side)))
        .ok_or_else(|| Mismatch(format!("a shape that can't be: {shape:?}")))
}

fn stride(elements: usize, width: usize) -> Result<usize, Mismatch> {
    elements.checked_mul(width).ok_or_else(|| Mismatch("a leaf of more bytes than can be".to_owned()))
}

/// Bytes per element.
fn width(space: &SpaceSpec) -> Result<usize, Mismatch> {
    Ok(match DataType::try_from(space.dtype) {
        Ok(DataType::Bool | DataType::Uint8 | DataType::Int8) => 1,
        Ok(DataType::Uint16 | DataType::Int16 | DataType::Float16) => 2,
        Ok(DataType::Uint32 | DataType::Int32 | DataType::Float32) => 4,
        Ok(DataType::Uint64 | DataType::Int64 | DataType::Float64) => 8,
        Ok(DataType::Unspecified) | Err(_) => {
            return Err(Mismatch(format!("an element type that this version does not know ({})", space.dtype)));
        }
    })
}

/// The texts of a slab: u64 count, a u64 byte length each, then the bodies.
fn texts(slab: &Bytes, rows: usize) -> Result<Vec<Bytes>, Mismatch> {
    let damaged = || Mismatch("a damaged slab of texts".to_owned());
    let number = |at: usize| -> Result<usize, Mismatch> {
        let bytes = slab.get(at..at + 8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).ok_or_else(damaged)?;
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| damaged())
    };
    if number(0)? != rows {
        return Err(Mismatch(format!("a slab of {} texts, {rows} were expected", number(0)?)));
    }
    let mut at = 8 + 8 * rows;
    let mut bodies = Vec::with_capacity(rows);
    for row in 0..rows {
        let end = at.checked_add(number(8 + 8 * row)?).filter(|end| *end <= slab.len()).ok_or_else(damaged)?;
        bodies.push(slab.slice(at..end));
        at = end;
    }
    if at == slab.len() { Ok(bodies) } else { Err(damaged()) }
}

fn text_slab(bodies: &[Bytes]) -> Bytes {
    let mut slab = BytesMut::new();
    slab.put_u64_le(bodies.len() as u64);
    for body in bodies {
        slab.put_u64_le(body.len() as u64);
    }
    for body in bodies {
        slab.put_slice(body);
    }
    slab.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rlmesh_proto::spaces::v1::{BoxSpec, DictSpec, DiscreteSpec, MultiBinarySpec, MultiDiscreteSpec, TextSpec, TupleSpec};

    fn space(shape: &[i64], dtype: DataType, spec: Spec) -> SpaceSpec {
        SpaceSpec { shape: shape.to_vec(), dtype: dtype.into(), spec: Some(spec) }
    }

    fn mixed() -> SpaceSpec {
        let tuple = TupleSpec {
            spaces: vec![
                space(&[], DataType::Unspecified, Spec::Text(TextSpec::default())),
                space(&[3], DataType::Bool, Spec::MultiBinary(MultiBinarySpec {})),
                space(&[], DataType::Int64, Spec::Discrete(DiscreteSpec { n: 4, start: 0 })),
            ],
        };
        let dict = DictSpec {
            keys: vec!["a".into(), "b".into(), "c".into()],
            spaces: vec![
                space(&[2, 2], DataType::Float32, Spec::Box(BoxSpec::default())),
                space(&[], DataType::Unspecified, Spec::Tuple(tuple)),
                space(&[2], DataType::Int32, Spec::MultiDiscrete(MultiDiscreteSpec { nvec: vec![3, 5] })),
            ],
        };
        space(&[], DataType::Unspecified, Spec::Dict(dict))
    }

    fn row(fill: u8, text: &str) -> SpaceValue {
        SpaceValue {
            leaves: vec![
                Bytes::from(vec![fill; 16]),
                text_slab(&[Bytes::copy_from_slice(text.as_bytes())]),
                Bytes::from(vec![fill; 3]),
                Bytes::from(vec![fill; 8]),
                Bytes::from(vec![fill; 8]),
            ],
        }
    }

    proptest! {
        #[test]
        fn rows_survive_the_slab(rows in proptest::collection::vec((any::<u8>(), ".{0,12}"), 1..9)) {
            let layout = Layout::of(&mixed()).unwrap();
            let rows: Vec<SpaceValue> = rows.iter().map(|(fill, text)| row(*fill, text)).collect();
            let slab = layout.join(&rows.iter().collect::<Vec<_>>()).unwrap();
            prop_assert_eq!(layout.split(&slab, rows.len()).unwrap(), rows);
        }
    }

    #[test]
    fn a_value_of_the_wrong_size_is_refused() {
        let layout = Layout::of(&space(&[4], DataType::Float32, Spec::Box(BoxSpec::default()))).unwrap();
        let value = |bytes: usize| SpaceValue { leaves: vec![Bytes::from(vec![0; bytes])] };
        assert!(layout.split(&value(32), 2).is_ok());
        assert!(layout.split(&value(28), 2).unwrap_err().to_string().contains("28 bytes"));
        assert!(layout.split(&SpaceValue::default(), 1).is_err());
        assert!(layout.join(&[&value(16), &value(12)]).is_err());
        assert!(layout.join(&[&value(12)]).is_err());
        assert!(Layout::of(&SpaceSpec::default()).is_err());
    }
}

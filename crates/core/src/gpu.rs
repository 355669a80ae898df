//! Kinds of GPUs: whether a machine's product is the one that was asked for, and what there is, in words. Knows no list of
//! products.

use std::collections::BTreeMap;

/// Kinds that a sentence names; more would hide what it says.
const NAMED: usize = 8;

/// Whether a product is what `wanted` asks for: its words are some words of the product's name that follow each other, whatever
/// their case and whatever is between them. `H100`, `h100-80gb` and `NVIDIA H100` are `NVIDIA-H100-80GB-HBM3`; `L4` is no `L40S`.
#[must_use]
pub fn matches(wanted: &str, product: &str) -> bool {
    let joined: String = words(wanted).collect();
    let words: Vec<String> = words(product).collect();
    let begins_with = |words: &[String]| {
        let mut rest = joined.as_str();
        for word in words {
            match rest.strip_prefix(word.as_str()) {
                Some("") => return true,
                Some(left) => rest = left,
                None => return false,
            }
        }
        false
    };
    (0..words.len()).any(|first| begins_with(&words[first..]))
}

fn words(name: &str) -> impl Iterator<Item = String> {
    name.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

/// `there are at most, on one machine: 8 NVIDIA-H100-80GB-HBM3, 4 NVIDIA-L4`, from each machine's product and number.
#[must_use]
pub fn there_are<'a>(machines: impl IntoIterator<Item = (&'a str, u32)>) -> String {
    let mut most = BTreeMap::<&str, u32>::new();
    for (product, count) in machines.into_iter().filter(|(_, count)| *count > 0) {
        let known = most.entry(product).or_default();
        *known = (*known).max(count);
    }
    if most.is_empty() {
        return "there are none".to_owned();
    }
    let name = |product: &str| if product.is_empty() { "of a kind that is not known".to_owned() } else { product.to_owned() };
    let mut kinds: Vec<String> = most.iter().take(NAMED).map(|(product, count)| format!("{count} {}", name(product))).collect();
    if most.len() > NAMED {
        kinds.push(format!("{} other kinds", most.len() - NAMED));
    }
    format!("there are at most, on one machine: {}", kinds.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_found_by_words_of_their_names() {
        for (wanted, product) in [
            ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-80GB-HBM3"),
            ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"),
            ("H100", "NVIDIA-H100-80GB-HBM3"),
            ("h100-80gb", "NVIDIA-H100-80GB-HBM3"),
            ("nvidia h100", "NVIDIA-H100-80GB-HBM3-SHARED"),
            ("RTX4090", "NVIDIA-GeForce-RTX-4090"),
            ("rtx 4090", "NVIDIA-GeForce-RTX-4090"),
            ("MI300X", "AMD_Instinct_MI300X_OAM"),
        ] {
            assert!(matches(wanted, product), "{wanted} is {product}");
        }
        for (wanted, product) in [
            ("L4", "NVIDIA-L40S"),
            ("H10", "NVIDIA-H100-80GB-HBM3"),
            ("100", "NVIDIA-H100-80GB-HBM3"),
            ("H100-HBM3", "NVIDIA-H100-80GB-HBM3"),
            ("NVIDIA-H100-80GB-HBM3-SHARED", "NVIDIA-H100-80GB-HBM3"),
            ("H100", ""),
            ("", "NVIDIA-L4"),
            ("--", "NVIDIA-L4"),
        ] {
            assert!(!matches(wanted, product), "{wanted} is not {product}");
        }
    }

    #[test]
    fn what_there_is_is_said_once_for_each_kind() {
        assert_eq!(there_are([]), "there are none");
        assert_eq!(there_are([("NVIDIA-L4", 0)]), "there are none");
        let machines = [("NVIDIA-L4", 2), ("", 1), ("NVIDIA-L4", 4), ("AMD_Instinct_MI300X_OAM", 8)];
        assert_eq!(
            there_are(machines),
            "there are at most, on one machine: 1 of a kind that is not known, 8 AMD_Instinct_MI300X_OAM, 4 NVIDIA-L4"
        );
        let many: Vec<String> = (10..20).map(|number| format!("K{number}")).collect();
        assert!(there_are(many.iter().map(|name| (name.as_str(), 1))).ends_with("1 K17, 2 other kinds"));
    }
}

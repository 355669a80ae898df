//! What the benchmarks share: how a figure is printed. Each program measures us beside the peer, where there is one.

/// What a figure is held to.
#[derive(Debug, Clone, Copy)]
pub enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

/// Prints `figure <name> <value> goal <op><value> ok|short`.
pub fn figure(name: &str, value: f64, goal: Goal) {
    let (reached, text) = match goal {
        Goal::AtLeast(goal) => (value >= goal, format!(">={goal}")),
        Goal::AtMost(goal) => (value <= goal, format!("<={goal}")),
    };
    println!("figure {name} {value:.3} goal {text} {}", if reached { "ok" } else { "short" });
}

/// Prints a figure that has no goal.
pub fn note(name: &str, value: f64) {
    println!("figure {name} {value:.3}");
}

/// The value that the share `q` of `values` does not exceed (nearest rank); NaN for none.
#[must_use]
pub fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil().max(1.0) as usize;
    values.get(rank - 1).copied().unwrap_or(f64::NAN)
}

#[must_use]
pub fn median(values: Vec<f64>) -> f64 {
    quantile(values, 0.5)
}

/// Whether cargo only asks if the program builds and starts (`cargo test --benches`).
#[must_use]
pub fn only_tested() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

/// A field of /proc/<pid>/status such as `VmRSS` or `VmHWM`, in MiB.
#[must_use]
pub fn memory_mib(pid: u32, field: &str) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!((quantile(values.clone(), 0.95), median(values), quantile(vec![7.0], 0.95)), (19.0, 10.0, 7.0));
        assert!(quantile(Vec::new(), 0.5).is_nan());
    }

    #[test]
    fn memory_is_read_of_a_process_that_is() {
        assert!(memory_mib(std::process::id(), "VmRSS").is_some_and(|mib| mib > 0.5));
        assert_eq!(memory_mib(u32::MAX, "VmRSS"), None);
    }
}

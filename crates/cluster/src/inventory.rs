//! What this machine has, read from /proc. Asks no driver and loads no library.

use std::path::Path;

use rlm_api::cluster::v1;

/// NVIDIA devices of this machine: `/dev/nvidia0`, `/dev/nvidia1`, ...
#[must_use]
pub fn cuda_devices() -> u32 {
    let devices = std::fs::read_dir("/dev").into_iter().flatten().filter_map(Result::ok).filter(|entry| {
        let name = entry.file_name();
        name.to_str()
            .and_then(|name| name.strip_prefix("nvidia"))
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    });
    u32::try_from(devices.count()).unwrap_or(u32::MAX)
}

/// The machine as one node.
#[must_use]
pub fn of_this_machine(node: &str, gpus: u32) -> v1::Inventory {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    let gpu = (gpus > 0).then(nvidia).unwrap_or_default();
    v1::Inventory {
        nodes: vec![v1::Node {
            name: node.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            cpu_millis: cpus * 1000,
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
            gpu_vendor: if gpus > 0 { "nvidia".to_owned() } else { String::new() },
            gpu_product: gpu.0,
            gpu_count: gpus,
            gpu_memory_bytes: 0,
            gpu_driver: gpu.1,
        }],
    }
}

/// The machine's name.
#[must_use]
pub fn node_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// Product and driver version.
fn nvidia() -> (String, String) {
    let product = std::fs::read_dir(Path::new("/proc/driver/nvidia/gpus"))
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .find_map(|gpu| product(&std::fs::read_to_string(gpu.path().join("information")).ok()?));
    let driver = driver(&std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default());
    (product.unwrap_or_default(), driver.unwrap_or_default())
}

/// Of `/proc/driver/nvidia/gpus/*/information`.
pub(crate) fn product(information: &str) -> Option<String> {
    information.lines().find_map(|line| line.strip_prefix("Model:")).map(|model| model.trim().to_owned())
}

/// Of `/proc/driver/nvidia/version`.
pub(crate) fn driver(version: &str) -> Option<String> {
    let line = version.lines().find(|line| line.starts_with("NVRM version:"))?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
        .map(str::to_owned)
}

fn memory_bytes(meminfo: &str) -> u64 {
    let kilobytes = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        assert_eq!(memory_bytes("MemTotal:       24605448 kB\nMemFree: 1 kB\n"), 24_605_448 * 1024);
        assert_eq!(memory_bytes(""), 0);
        assert_eq!(product("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ: 1\n").as_deref(), Some("NVIDIA A100-SXM4-80GB"));
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n";
        assert_eq!(driver(version).as_deref(), Some("550.54.15"));
    }

    #[test]
    fn this_machine_has_processors_and_memory() {
        let inventory = of_this_machine("here", 0);
        assert!(inventory.nodes[0].cpu_millis >= 1000 && inventory.nodes[0].memory_bytes > 0);
    }
}

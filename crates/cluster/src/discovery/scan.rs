//! The GPUs of a node, read from /sys and /proc below a root folder. Loads no library, runs no program and writes nothing.
//!
//! Both are the same in every container of a node, so nothing of the host is mounted.

use std::collections::BTreeMap;
use std::path::Path;

use rlm_api::cluster::v1::GpuKind;

use crate::inventory;

/// The devices of the node's PCI buses that are GPUs of a vendor we know, alike ones together.
#[must_use]
pub fn scan(root: &Path) -> Vec<GpuKind> {
    let mut kinds = BTreeMap::<(&str, String, u64), u32>::new();
    for device in std::fs::read_dir(root.join("sys/bus/pci/devices")).into_iter().flatten().flatten() {
        if let Some(kind) = device.file_name().to_str().and_then(|address| gpu(root, address, &device.path())) {
            *kinds.entry(kind).or_default() += 1;
        }
    }
    let kind = |((vendor, product, memory_bytes), count): ((&str, String, u64), u32)| GpuKind {
        vendor: vendor.to_owned(),
        product,
        count,
        memory_bytes,
        driver: driver(root, vendor),
    };
    kinds.into_iter().map(kind).collect()
}

/// Vendor, product and memory, if the device is a GPU.
fn gpu(root: &Path, address: &str, device: &Path) -> Option<(&'static str, String, u64)> {
    let class = hexadecimal(&line(&device.join("class")))? >> 16;
    match (hexadecimal(&line(&device.join("vendor")))?, class) {
        // Display controllers; the driver says no memory.
        (0x10de, 0x03) => {
            let information = text(&root.join("proc/driver/nvidia/gpus").join(address).join("information"));
            Some(("nvidia", inventory::product(&information).unwrap_or_default(), 0))
        }
        // Newer ones without a display say that they are processing accelerators.
        (0x1002, 0x03 | 0x12) => {
            Some(("amd", line(&device.join("product_name")), line(&device.join("mem_info_vram_total")).parse().unwrap_or(0)))
        }
        _ => None,
    }
}

fn driver(root: &Path, vendor: &str) -> String {
    match vendor {
        "nvidia" => inventory::driver(&text(&root.join("proc/driver/nvidia/version"))).unwrap_or_default(),
        // The kernel's own has no version.
        _ => line(&root.join("sys/module/amdgpu/version")),
    }
}

fn text(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn line(path: &Path) -> String {
    text(path).trim().to_owned()
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self, path: &str, content: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }

        /// As in /sys: a link to where the device is.
        fn device(&self, address: &str, vendor: &str, class: &str, more: &[(&str, &str)]) {
            let folder = format!("sys/devices/pci0000:00/{address}");
            for (name, content) in [("vendor", vendor), ("class", class)].iter().chain(more) {
                self.file(&format!("{folder}/{name}"), &format!("{content}\n"));
            }
            let links = self.0.path().join("sys/bus/pci/devices");
            std::fs::create_dir_all(&links).unwrap();
            std::os::unix::fs::symlink(format!("../../../devices/pci0000:00/{address}"), links.join(address)).unwrap();
        }

        fn scan(&self) -> Vec<GpuKind> {
            scan(self.0.path())
        }
    }

    fn kind(vendor: &str, product: &str, count: u32, memory_bytes: u64, driver: &str) -> GpuKind {
        GpuKind { vendor: vendor.to_owned(), product: product.to_owned(), count, memory_bytes, driver: driver.to_owned() }
    }

    #[test]
    fn a_node_without_gpus_has_none() {
        let tree = Tree::new();
        assert_eq!(tree.scan(), []);
        tree.device("0000:00:01.0", "0x8086", "0x030000", &[]);
        tree.device("0000:00:02.0", "0x1234", "0x030000", &[]);
        // Audio of an NVIDIA card, a bridge of AMD, and what can't be read.
        tree.device("0000:00:03.1", "0x10de", "0x040300", &[]);
        tree.device("0000:00:04.0", "0x1002", "0x060400", &[]);
        tree.device("0000:00:05.0", "nonsense", "", &[]);
        assert_eq!(tree.scan(), []);
    }

    #[test]
    fn nvidia_gpus_have_model_and_driver_from_the_driver() {
        let tree = Tree::new();
        for address in ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"] {
            tree.device(address, "0x10de", "0x030200", &[]);
        }
        assert_eq!(tree.scan(), [kind("nvidia", "", 3, 0, "")], "without a driver");
        for address in ["0000:17:00.0", "0000:65:00.0"] {
            tree.file(
                &format!("proc/driver/nvidia/gpus/{address}/information"),
                "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 63\nGPU UUID: \t GPU-1\n",
            );
        }
        tree.file("proc/driver/nvidia/gpus/0000:ca:00.0/information", "Model: \t\t NVIDIA L4\n");
        let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: 12.2.0\n";
        tree.file("proc/driver/nvidia/version", version);
        assert_eq!(
            tree.scan(),
            [kind("nvidia", "NVIDIA H100 80GB HBM3", 2, 0, "550.54.15"), kind("nvidia", "NVIDIA L4", 1, 0, "550.54.15")]
        );
    }

    #[test]
    fn amd_gpus_have_product_and_memory_from_the_device() {
        let tree = Tree::new();
        let instinct = [("product_name", "AMD Instinct MI300X OAM"), ("mem_info_vram_total", "206141652992")];
        tree.device("0000:05:00.0", "0x1002", "0x120000", &instinct);
        tree.device("0000:26:00.0", "0x1002", "0x120000", &instinct);
        tree.device("0000:30:00.0", "0x1002", "0x030000", &[]);
        tree.file("sys/module/amdgpu/version", "6.8.5\n");
        assert_eq!(tree.scan(), [kind("amd", "", 1, 0, "6.8.5"), kind("amd", "AMD Instinct MI300X OAM", 2, 206_141_652_992, "6.8.5")]);
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let _ = scan(Path::new("/"));
    }
}

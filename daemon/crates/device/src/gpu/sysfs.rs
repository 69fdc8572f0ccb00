//! What the kernel says of an AMD card's memory, apart from the runtime: some runtimes count only
//! what the own process holds as taken, and for a card that shares the machine's memory they tell a
//! carve-out, a limit of the kernel's, or more than there is.

use std::fs;
use std::path::{Path, PathBuf};

use crate::machine;

use super::driver::{DeviceAttributes, MemoryInfo};

/// A folder in place of `/` in tests.
const ROOT: &str = "/";

/// Where the kernel tells of one card.
#[derive(Debug, Clone)]
pub(super) struct CardMemory {
    dir: PathBuf,
    root: PathBuf,
    integrated: bool,
}

impl CardMemory {
    /// Of a card, if the kernel tells of it.
    pub(super) fn of(attributes: &DeviceAttributes) -> Option<CardMemory> {
        Self::below(
            Path::new(ROOT),
            &attributes.pci_bus_id,
            attributes.integrated,
        )
    }

    fn below(root: &Path, pci: &str, integrated: bool) -> Option<CardMemory> {
        // The name comes from the driver; it names a folder of that list and nothing else.
        let sound = pci
            .bytes()
            .all(|b| b.is_ascii_hexdigit() || b":.".contains(&b));
        let dir = root.join("sys/bus/pci/devices").join(pci);
        // Of a card in the machine's memory /proc/meminfo tells enough.
        let told = integrated || dir.join("mem_info_vram_total").exists();
        (sound && !pci.is_empty() && told).then(|| CardMemory {
            dir,
            root: root.to_owned(),
            integrated,
        })
    }

    /// A number of bytes of the card's folder.
    fn number(&self, name: &str) -> Option<u64> {
        fs::read_to_string(self.dir.join(name))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// Bytes of the machine's memory that the kernel lets graphics have: `ttm.pages_limit`.
    fn limit(&self) -> Option<u64> {
        let path = self.root.join("sys/module/ttm/parameters/pages_limit");
        let pages: u64 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
        pages.checked_mul(4096)
    }

    /// A line of /proc/meminfo, in bytes.
    fn machine(&self, name: &str) -> Option<u64> {
        machine::line(
            &fs::read_to_string(self.root.join("proc/meminfo")).ok()?,
            name,
        )
    }

    /// The most that the card can hold, where the runtime tells `told` bytes.
    pub(super) fn total(&self, told: u64) -> u64 {
        let most = if self.integrated {
            self.machine("MemTotal:")
        } else {
            self.number("mem_info_vram_total")
                .filter(|&bytes| bytes > 0)
        };
        most.map_or(told, |most| told.min(most))
    }

    /// What is free: the least of what the runtime and the kernel tell.
    pub(super) fn info(&self, told: MemoryInfo) -> MemoryInfo {
        let total = self.total(told.total);
        let free = if self.integrated {
            self.machine("MemAvailable:")
        } else {
            let vram = self
                .number("mem_info_vram_total")
                .filter(|&bytes| bytes > 0);
            vram.zip(self.number("mem_info_vram_used"))
                .map(|(total, used)| total.saturating_sub(used))
        };
        MemoryInfo {
            free: free
                .map_or(told.free, |free| told.free.min(free))
                .min(total),
            total,
        }
    }

    /// For people: what there is, and what to do for more.
    pub(super) fn describe(&self, told: u64) -> String {
        let mib = |bytes: Option<u64>| match bytes {
            Some(bytes) => format!("{} MiB", bytes >> 20),
            None => "unknown".to_owned(),
        };
        let vram = mib(self.number("mem_info_vram_total"));
        let gtt = mib(self.number("mem_info_gtt_total"));
        if !self.integrated {
            let used = mib(self.number("mem_info_vram_used"));
            return format!(
                "memory: {vram} on the card, {used} in use; {gtt} of the machine's may be mapped"
            );
        }
        format!(
            "memory: shared with the machine; {} for the card by its runtime, {vram} set apart by the firmware, {gtt} and {} \
             at most by the kernel (ttm.pages_limit, in pages of 4 KiB, is the setting for more)",
            mib(Some(self.total(told))),
            mib(self.limit()),
        )
    }
}

/// What to know of the bound on locked memory, if there is one below `needed` bytes.
pub(super) fn locked_memory(needed: u64) -> Option<String> {
    locked_below(&fs::read_to_string("/proc/self/limits").ok()?, needed)
}

fn locked_below(limits: &str, needed: u64) -> Option<String> {
    let line = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max locked memory"))?;
    // "unlimited" is no number.
    let soft: u64 = line.split_whitespace().next()?.parse().ok()?;
    (soft < needed).then(|| {
        format!(
            "locked memory is limited to {} KiB and {} KiB are used; where the driver refuses, set LimitMEMLOCK=infinity \
             in the service or ulimit -l unlimited",
            soft >> 10,
            needed >> 10
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PCI: &str = "0000:c4:00.0";
    const GIB: u64 = 1 << 30;

    struct Kernel(tempfile::TempDir);

    impl Kernel {
        fn new(files: &[(&str, String)]) -> Kernel {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let path = match name.strip_prefix('/') {
                    Some(path) => dir.path().join(path),
                    None => dir.path().join("sys/bus/pci/devices").join(PCI).join(name),
                };
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Kernel(dir)
        }

        fn card(&self, integrated: bool) -> Option<CardMemory> {
            CardMemory::below(self.0.path(), PCI, integrated)
        }
    }

    /// Some runtimes tell as free what other processes hold.
    #[test]
    fn what_other_processes_hold_is_not_free() {
        let kernel = Kernel::new(&[
            ("mem_info_vram_total", format!("{}\n", 24 * GIB)),
            ("mem_info_vram_used", format!("{}\n", 10 * GIB)),
            ("mem_info_gtt_total", format!("{}\n", 31 * GIB)),
        ]);
        let card = kernel.card(false).unwrap();
        let info = |free, total| card.info(MemoryInfo { free, total });
        assert_eq!(info(23 * GIB, 24 * GIB).free, 14 * GIB);
        assert_eq!(
            info(9 * GIB, 24 * GIB).free,
            9 * GIB,
            "the runtime may know of more"
        );
        assert_eq!(
            info(50 * GIB, 55 * GIB),
            MemoryInfo {
                free: 14 * GIB,
                total: 24 * GIB
            }
        );
        assert_eq!(card.total(6 * GIB), 6 * GIB, "a partition of a card");
        let text = card.describe(24 * GIB);
        assert!(
            text.contains("24576 MiB on the card, 10240 MiB in use"),
            "{text}"
        );
    }

    /// For an APU the runtime may tell more than the machine has, as its kernel's limit was set.
    #[test]
    fn a_card_in_the_machines_memory_has_no_more_than_the_machine() {
        let kernel = Kernel::new(&[
            ("mem_info_vram_total", format!("{}\n", GIB / 2)),
            ("mem_info_vram_used", format!("{}\n", GIB / 4)),
            ("mem_info_gtt_total", format!("{}\n", 120 * GIB)),
            (
                "/sys/module/ttm/parameters/pages_limit",
                format!("{}\n", 120 * GIB / 4096),
            ),
            (
                "/proc/meminfo",
                format!(
                    "MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable: {} kB\n",
                    96 << 20,
                    80 << 20
                ),
            ),
        ]);
        let card = kernel.card(true).unwrap();
        assert_eq!(card.total(120 * GIB), 96 * GIB);
        assert_eq!(
            card.total(GIB / 2),
            GIB / 2,
            "an older kernel gives the carve-out alone"
        );
        let info = card.info(MemoryInfo {
            free: 119 * GIB,
            total: 120 * GIB,
        });
        assert_eq!(
            info,
            MemoryInfo {
                free: 80 * GIB,
                total: 96 * GIB
            }
        );
        let text = card.describe(120 * GIB);
        assert!(
            text.contains("512 MiB set apart") && text.contains("ttm.pages_limit"),
            "{text}"
        );
        assert!(text.contains("122880 MiB at most"), "{text}");
    }

    /// Seen with ROCm 7.2 in a root without the card's folder: 51.5 GiB, 63.6 GiB of them free.
    #[test]
    fn the_machines_memory_bounds_an_apu_without_the_cards_folder() {
        let meminfo = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", 24 << 20, 22 << 20);
        let kernel = Kernel::new(&[("/proc/meminfo", meminfo)]);
        assert!(kernel.card(false).is_none());
        let told = MemoryInfo {
            free: 63 * GIB,
            total: 51 * GIB,
        };
        let info = kernel.card(true).unwrap().info(told);
        assert_eq!((info.free, info.total), (22 * GIB, 24 * GIB));
    }

    #[test]
    fn without_the_kernels_files_the_runtime_is_believed() {
        assert!(Kernel::new(&[]).card(false).is_none());
        let kernel = Kernel::new(&[("mem_info_vram_total", "no number".to_owned())]);
        let told = MemoryInfo { free: 3, total: 5 };
        assert_eq!(kernel.card(false).unwrap().info(told), told);
        assert!(CardMemory::below(kernel.0.path(), "../../etc", false).is_none());
    }

    #[test]
    fn a_bound_on_locked_memory_is_told_with_what_to_do() {
        let limits = |soft| {
            format!("Max processes 1 1 p\nMax locked memory         {soft}  {soft}  bytes\n")
        };
        let told = locked_below(&limits("8388608"), 64 << 20).unwrap();
        assert!(
            told.contains("8192 KiB") && told.contains("LimitMEMLOCK"),
            "{told}"
        );
        assert_eq!(locked_below(&limits("unlimited"), u64::MAX), None);
        assert_eq!(locked_below(&limits("8388608"), 1 << 20), None);
        assert_eq!(locked_below("", 1), None);
    }
}

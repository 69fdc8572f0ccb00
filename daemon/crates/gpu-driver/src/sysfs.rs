//! What the kernel says of an AMD card's memory, apart from the runtime: some runtimes count only
//! what the own process holds as taken, and of a card in the processor (an APU) they tell what the
//! firmware set apart for it, or what the kernel lets it have of the machine's.
//!
//! Which of the two an APU computes in is the kernel's decision: `amdgpu` takes the part that was
//! set apart where that is at least as large as its limit for graphics (GTT), else the machine's;
//! older kernels take always the one or always the other. Either is told by the runtime as the
//! total, so the one that the total is nearer to is the one in use. What is set apart is no part of
//! MemTotal.

use std::fs;
use std::path::{Path, PathBuf};

use super::driver::{DeviceAttributes, MemoryInfo};

/// A folder in place of `/` in tests.
const ROOT: &str = "/";

/// Directory in which KFD lists processors and GPUs.
const NODES: &str = "sys/class/kfd/kfd/topology/nodes";

/// Architectures that are made as a part of a processor alone, as KFD writes them: major, minor and
/// stepping, two digits each. `rocmforgectl doctor` has the same list.
const APU_TARGETS: [u32; 13] = [
    90002, 90009, 90012, 100103, 100303, 100305, 100306, 110003, 110500, 110501, 110502, 110503,
    110504,
];

/// Where the kernel reports about one card.
#[derive(Debug, Clone)]
pub(super) struct CardMemory {
    dir: PathBuf,
    root: PathBuf,
    integrated: bool,
}

/// Where a card's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pool {
    /// On the card, or set apart for it.
    Card,
    /// The machine's memory, which other programs use, too.
    Machine,
}

/// Whether the kernel reports the GPU at a PCI address as integrated (APU), which not every runtime
/// does. A KFD node with CPU cores is an APU; newer kernels make two nodes, and then the
/// architecture decides.
pub(super) fn is_apu(pci: &str) -> bool {
    is_apu_below(Path::new(ROOT), pci)
}

fn is_apu_below(root: &Path, pci: &str) -> bool {
    let Ok(nodes) = fs::read_dir(root.join(NODES)) else {
        return false;
    };
    let texts = nodes
        .flatten()
        .filter_map(|node| fs::read_to_string(node.path().join("properties")).ok());
    texts.into_iter().any(|text| {
        let of = |name: &str| -> Option<u32> {
            let mut words = text.lines().filter_map(|line| line.split_once(' '));
            words.find(|(n, _)| *n == name)?.1.trim().parse().ok()
        };
        let (Some(place), Some(target)) = (of("location_id"), of("gfx_target_version")) else {
            return false;
        };
        let at = format!(
            "{:04x}:{:02x}:{:02x}.{:x}",
            of("domain").unwrap_or(0),
            place >> 8 & 0xff,
            place >> 3 & 0x1f,
            place & 7
        );
        let with_cores = of("cpu_cores_count") > Some(0) && of("simd_count") > Some(0);
        at == pci && (with_cores || APU_TARGETS.contains(&target))
    })
}

impl CardMemory {
    /// The memory of a GPU by the kernel's counts; `None` if the kernel does not report them.
    pub(super) fn of(attributes: &DeviceAttributes) -> Option<CardMemory> {
        Self::below(Path::new(ROOT), attributes)
    }

    /// Reads the kernel's counts of a GPU's memory, with the kernel's files below `root`.
    pub(super) fn below(root: &Path, attributes: &DeviceAttributes) -> Option<CardMemory> {
        Self::at(root, &attributes.pci_bus_id, attributes.integrated)
    }

    fn at(root: &Path, pci: &str, integrated: bool) -> Option<CardMemory> {
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

    /// Bytes on the card, or set apart for it.
    fn vram(&self) -> Option<u64> {
        self.number("mem_info_vram_total").filter(|&b| b > 0)
    }

    /// Bytes of the machine's memory that may be mapped for the card.
    fn gtt(&self) -> Option<u64> {
        self.number("mem_info_gtt_total").filter(|&b| b > 0)
    }

    /// Bytes of the machine's memory that the kernel lets graphics have: `ttm.pages_limit`.
    fn limit(&self) -> Option<u64> {
        let path = self.root.join("sys/module/ttm/parameters/pages_limit");
        let pages: u64 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
        pages.checked_mul(4096)
    }

    /// A line of /proc/meminfo, in bytes.
    fn machine(&self, name: &str) -> Option<u64> {
        let info = fs::read_to_string(self.root.join("proc/meminfo")).ok()?;
        let line = info.lines().find_map(|l| l.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    }

    /// Which memory pool the `told` bytes are that the runtime reports.
    fn pool(&self, told: u64) -> Pool {
        let far = |bytes: Option<u64>| bytes.map_or(u64::MAX, |bytes| told.abs_diff(bytes));
        let machines = [self.gtt(), self.limit(), self.machine("MemTotal:")];
        let nearest = machines.into_iter().map(far).min();
        match self.integrated && nearest < Some(far(self.vram())) {
            true => Pool::Machine,
            false => Pool::Card,
        }
    }

    /// Whether the card's memory is the machine's, where the runtime reports `told` bytes.
    pub(super) fn is_of_machine(&self, told: u64) -> bool {
        self.pool(told) == Pool::Machine
    }

    /// The most that the card can hold, where the runtime reports `told` bytes.
    pub(super) fn total(&self, told: u64) -> u64 {
        let bounds = match self.pool(told) {
            Pool::Card => [self.vram(), None],
            Pool::Machine => [self.gtt(), self.machine("MemTotal:")],
        };
        bounds.into_iter().flatten().fold(told, u64::min)
    }

    /// Free memory: the least of what the runtime and the kernel report.
    pub(super) fn info(&self, told: MemoryInfo) -> MemoryInfo {
        let total = self.total(told.total);
        let left = |total: Option<u64>, used: &str| {
            let (total, used) = total.zip(self.number(used))?;
            Some(total.saturating_sub(used))
        };
        let bounds = match self.pool(told.total) {
            Pool::Card => [left(self.vram(), "mem_info_vram_used"), None],
            Pool::Machine => [
                left(self.gtt(), "mem_info_gtt_used"),
                self.machine("MemAvailable:"),
            ],
        };
        let free = bounds.into_iter().flatten().fold(told.free, u64::min);
        MemoryInfo {
            free: free.min(total),
            total,
        }
    }

    /// For people: what there is, and what to do for more.
    pub(super) fn describe(&self, told: u64) -> String {
        let mib = |bytes: Option<u64>| match bytes {
            Some(bytes) => format!("{} MiB", bytes >> 20),
            None => "unknown".to_owned(),
        };
        let (vram, gtt) = (mib(self.number("mem_info_vram_total")), mib(self.gtt()));
        let used = mib(self.number("mem_info_vram_used"));
        let total = self.total(told);
        match self.pool(told) {
            Pool::Card if self.integrated => format!(
                "memory: {vram} reserved for the GPU by the firmware, {used} in use; {} are left to the machine",
                mib(self.machine("MemTotal:"))
            ),
            Pool::Card => format!(
                "memory: {vram} on the GPU, {used} in use; {gtt} of the machine's may be mapped"
            ),
            Pool::Machine => {
                let mut text = format!(
                    "memory: shared with the machine; {} for the GPU by its runtime, {vram} reserved by the firmware, \
                     {gtt} and {} at most by the kernel (ttm.pages_limit, in pages of 4 KiB, is the setting for more)",
                    mib(Some(total)),
                    mib(self.limit()),
                );
                if self.vram() > Some(total) {
                    text.push_str(
                        "; this kernel computes in none of what the firmware reserved: reserve less there, or take a \
                         newer kernel",
                    );
                }
                text
            }
        }
    }
}

/// What to know of the bound on locked memory, if there is one below `needed` bytes.
pub fn locked_memory(needed: u64) -> Option<String> {
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
            CardMemory::at(self.0.path(), PCI, integrated)
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
            text.contains("24576 MiB on the GPU, 10240 MiB in use"),
            "{text}"
        );
    }

    /// The kernel's files of an APU: GiB set apart, for graphics, of the machine, and available.
    fn apu(vram: f64, gtt: u64, machine: u64, available: u64) -> Kernel {
        let vram = (vram * GIB as f64) as u64;
        Kernel::new(&[
            ("mem_info_vram_total", format!("{vram}\n")),
            ("mem_info_vram_used", format!("{}\n", GIB / 4)),
            ("mem_info_gtt_total", format!("{}\n", gtt * GIB)),
            ("mem_info_gtt_used", format!("{GIB}\n")),
            (
                "/sys/module/ttm/parameters/pages_limit",
                format!("{}\n", gtt * GIB / 4096),
            ),
            (
                "/proc/meminfo",
                format!(
                    "MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable: {} kB\n",
                    machine << 20,
                    available << 20
                ),
            ),
        ])
    }

    /// For an APU the runtime may tell more than the machine has, as its kernel's limit was set.
    #[test]
    fn a_card_in_the_machines_memory_has_no_more_than_the_machine() {
        let kernel = apu(0.5, 120, 96, 80);
        let card = kernel.card(true).unwrap();
        assert_eq!(card.total(120 * GIB), 96 * GIB);
        assert!(card.is_of_machine(120 * GIB));
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
            text.contains("512 MiB reserved") && text.contains("ttm.pages_limit"),
            "{text}"
        );
        assert!(text.contains("122880 MiB at most"), "{text}");
        assert!(!text.contains("reserve less there"), "{text}");
    }

    /// Once a machine of 128 GiB with 96 of them set apart was used as a card of 31 GiB: what is
    /// set apart is no part of the machine's memory.
    #[test]
    fn what_was_set_apart_counts_where_the_runtime_tells_it() {
        let told = |free, total| MemoryInfo {
            free: free * GIB,
            total: total * GIB,
        };
        // 96 GiB set apart, 31 left, half of which the kernel lets graphics have.
        let kernel = apu(96.0, 16, 31, 20);
        let card = kernel.card(true).unwrap();
        let info = card.info(told(96, 96));
        assert_eq!(info.total, 96 * GIB);
        assert_eq!(info.free, 96 * GIB - GIB / 4);
        assert!(!card.is_of_machine(96 * GIB));
        let text = card.describe(96 * GIB);
        assert!(text.contains("98304 MiB reserved"), "{text}");
        // A kernel that takes the machine's memory for every APU.
        let info = card.info(told(15, 16));
        assert_eq!(info, told(15, 16));
        assert!(card.is_of_machine(16 * GIB));
        let text = card.describe(16 * GIB);
        assert!(text.contains("reserve less there"), "{text}");
        // Half a GiB set apart, 128 left.
        let kernel = apu(0.5, 64, 128, 100);
        let card = kernel.card(true).unwrap();
        assert_eq!(card.info(told(64, 64)), told(63, 64), "one GiB is mapped");
        let small = MemoryInfo {
            free: GIB / 2,
            total: GIB / 2,
        };
        let info = card.info(small);
        assert_eq!((info.free, info.total), (GIB / 4, GIB / 2));
        assert!(!card.is_of_machine(GIB / 2), "an older kernel");
        // 16 GiB set apart, 112 left.
        let kernel = apu(16.0, 56, 112, 40);
        let card = kernel.card(true).unwrap();
        assert_eq!(card.info(told(56, 56)), told(40, 56));
        assert_eq!(card.info(told(16, 16)).total, 16 * GIB);
        // The kernel's limit was raised beyond what is left.
        let kernel = apu(96.0, 100, 31, 20);
        let card = kernel.card(true).unwrap();
        assert_eq!(card.info(told(100, 100)), told(20, 31));
    }

    #[test]
    fn the_kernel_tells_what_is_a_part_of_a_processor() {
        let node = |cores: u32, target: u32, place: u32| {
            format!(
                "cpu_cores_count {cores}\nsimd_count 80\nlocation_id {place}\ndomain 0\n\
                 gfx_target_version {target}\n"
            )
        };
        let path = |n: u32| format!("/{NODES}/{n}/properties");
        let names: Vec<_> = (0..5).map(path).collect();
        let texts = [
            "cpu_cores_count 16\nsimd_count 0\nlocation_id 0\ngfx_target_version 0\n".to_owned(),
            node(0, 110501, 0xc4 << 8),
            node(0, 110000, 3 << 8),
            node(4, 90006, 4 << 8 | 1 << 3 | 2),
            node(0, 110001, 5 << 8),
        ];
        let files = names.iter().map(String::as_str).zip(texts);
        let kernel = Kernel::new(&files.collect::<Vec<_>>());
        let is_apu = |pci| is_apu_below(kernel.0.path(), pci);
        assert!(is_apu(PCI));
        assert!(is_apu("0000:04:01.2"), "a node of both");
        assert!(!is_apu("0000:03:00.0") && !is_apu("0000:05:00.0"));
        assert!(!is_apu("0000:00:00.0") && !is_apu("") && !is_apu("0001:c4:00.0"));
        assert!(!is_apu_below(Path::new("/nonexistent"), PCI));
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
        assert!(CardMemory::at(kernel.0.path(), "../../etc", false).is_none());
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

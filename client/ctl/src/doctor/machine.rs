//! Cards, their drivers in the kernel, and the device nodes that a daemon opens.

use std::path::Path;

use super::Finding;
use super::system::{Identity, System};

/// Architectures that are made as a part of a processor alone, as the kernel writes them: major,
/// minor and stepping, two digits each. The daemon's `gpu-driver/src/sysfs.rs` has the same list.
const APU_TARGETS: [u64; 13] = [
    90002, 90009, 90012, 100103, 100303, 100305, 100306, 110003, 110500, 110501, 110502, 110503,
    110504,
];

/// Vendor of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vendor {
    Amd,
    Nvidia,
}

/// A card on the bus.
#[derive(Debug, Clone)]
pub(super) struct Card {
    pub(super) vendor: Vendor,
    pub(super) pci: String,
}

/// The GPUs of the PCI bus, and the user that runs the checks.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) cards: Vec<Card>,
    who: Identity,
}

impl Machine {
    pub(super) fn of(system: &System) -> Machine {
        const DEVICES: &str = "/sys/bus/pci/devices";
        let card = |pci: String| {
            let field = |name: &str| system.read(&format!("{DEVICES}/{pci}/{name}"));
            // Display controllers and accelerators.
            let class = field("class")?;
            if !class.starts_with("0x03") && !class.starts_with("0x12") {
                return None;
            }
            let vendor = match field("vendor")?.as_str() {
                "0x1002" => Vendor::Amd,
                "0x10de" => Vendor::Nvidia,
                _ => return None,
            };
            Some(Card { vendor, pci })
        };
        Machine {
            cards: system.list(DEVICES).into_iter().filter_map(card).collect(),
            who: system.identity(),
        }
    }

    pub(super) fn has(&self, vendor: Vendor) -> bool {
        self.cards.iter().any(|card| card.vendor == vendor)
    }

    pub(super) fn findings(&self, system: &System) -> Vec<Finding> {
        let mut findings = vec![kernel(system)];
        if self.cards.is_empty() {
            findings.push(Finding::warn(
                "GPUs",
                "no AMD or NVIDIA GPU on the PCI bus",
                "nothing to do if models run on the CPU",
            ));
        }
        if self.has(Vendor::Amd) {
            findings.push(driver(system, "amdgpu", "AMD"));
            findings.push(self.node(system, "/dev/kfd"));
            findings.extend(self.render_nodes(system));
            findings.extend(self.memory(system));
        }
        if self.has(Vendor::Nvidia) {
            findings.push(driver(system, "nvidia", "NVIDIA"));
            for node in ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"] {
                findings.push(self.node(system, node));
            }
        }
        findings
    }

    fn render_nodes(&self, system: &System) -> Vec<Finding> {
        let names = system.list("/dev/dri").into_iter();
        let nodes: Vec<_> = names.filter(|name| name.starts_with("renderD")).collect();
        if nodes.is_empty() {
            return vec![Finding::fail(
                "device node",
                "there is no /dev/dri/renderD*",
                "load the kernel's driver (modprobe amdgpu); in a container pass --device /dev/dri",
            )];
        }
        let nodes = nodes.iter();
        nodes
            .map(|name| self.node(system, &format!("/dev/dri/{name}")))
            .collect()
    }

    fn node(&self, system: &System, path: &str) -> Finding {
        const SUBJECT: &str = "device node";
        let Some(access) = system.access(Path::new(path)) else {
            return Finding::fail(
                SUBJECT,
                format!("there is no {path}"),
                format!(
                    "load the kernel's driver, or in a container pass --device {path}; NVIDIA's nodes are made by \
                     nvidia-persistenced or nvidia-modprobe"
                ),
            );
        };
        let group = system.group(access.gid);
        let shown = format!("{path} (group {group}, mode {})", access.octal());
        if access.is_open_to(&self.who) {
            return Finding::ok(SUBJECT, shown);
        }
        let user = system.user(self.who.uid);
        let todo = match access.mode & 0o060 == 0o060 {
            true => system.joining(access.gid, &user, "; the daemon's own user needs it, too"),
            false => {
                format!(
                    "its group may not use it: a udev rule has to give it mode 0660 (user {user})"
                )
            }
        };
        Finding::fail(SUBJECT, format!("{shown} is closed to {user}"), todo)
    }

    fn memory(&self, system: &System) -> Vec<Finding> {
        let cards = self.cards.iter().filter(|card| card.vendor == Vendor::Amd);
        cards
            .filter_map(|card| card_memory(system, &card.pci))
            .collect()
    }
}

fn kernel(system: &System) -> Finding {
    match system.read("/proc/sys/kernel/osrelease") {
        Some(release) => Finding::ok("kernel", release),
        None => Finding::warn(
            "kernel",
            "/proc/sys/kernel/osrelease cannot be read",
            "mount /proc",
        ),
    }
}

fn driver(system: &System, module: &str, vendor: &str) -> Finding {
    const SUBJECT: &str = "driver";
    let dir = format!("/sys/module/{module}");
    if !system.exists(&dir) {
        return Finding::fail(
            SUBJECT,
            format!("a GPU of {vendor} is on the PCI bus, and the module {module} is not loaded"),
            format!("modprobe {module}; if that fails, `dmesg | grep {module}` says why"),
        );
    }
    match system.read(&format!("{dir}/version")) {
        Some(version) => Finding::ok(SUBJECT, format!("{module} {version}")),
        None => Finding::ok(SUBJECT, format!("{module}, the kernel's own")),
    }
}

/// Whether the kernel reports a GPU as integrated (APU). Memory sizes cannot decide it: firmware
/// reserves up to 96 GiB for an APU, and there are discrete GPUs with 2 GiB.
fn is_apu(system: &System, pci: &str) -> bool {
    const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";
    system.list(NODES).iter().any(|node| {
        let path = format!("{NODES}/{node}/properties");
        let of = |name: &str| system.line(&path, name)?.parse::<u64>().ok();
        let (Some(place), Some(target)) = (of("location_id "), of("gfx_target_version ")) else {
            return false;
        };
        let at = format!(
            "{:04x}:{:02x}:{:02x}.{:x}",
            of("domain ").unwrap_or(0),
            place >> 8 & 0xff,
            place >> 3 & 0x1f,
            place & 7
        );
        // A node with cores is one of both, as older kernels make them.
        let with_cores = of("cpu_cores_count ") > Some(0) && of("simd_count ") > Some(0);
        at == pci && (with_cores || APU_TARGETS.contains(&target))
    })
}

/// What an AMD card may hold, by the kernel.
fn card_memory(system: &System, pci: &str) -> Option<Finding> {
    const SUBJECT: &str = "GPU memory";
    let number = |name: &str| system.number(&format!("/sys/bus/pci/devices/{pci}/{name}"));
    let (vram, gtt) = (
        number("mem_info_vram_total")?,
        number("mem_info_gtt_total")?,
    );
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    if !is_apu(system, pci) {
        return Some(Finding::ok(
            SUBJECT,
            format!(
                "{pci}: {} on the GPU, {} of the machine's may be mapped",
                mib(vram),
                mib(gtt)
            ),
        ));
    }
    // Newer kernels compute in what was set apart where that is as large as what they may map.
    if vram >= gtt {
        return Some(Finding::ok(
            SUBJECT,
            format!(
                "{pci}: {} reserved for it by the firmware (APU), {} of the machine's may be mapped",
                mib(vram),
                mib(gtt)
            ),
        ));
    }
    let shown = format!(
        "{pci}: shared with the machine (APU): {} reserved by the firmware, {} for graphics by the kernel",
        mib(vram),
        mib(gtt)
    );
    let total = system.line("/proc/meminfo", "MemTotal:");
    let total = total.and_then(|line| line.split(' ').next()?.parse::<u64>().ok());
    let Some(total) = total.and_then(|kib| kib.checked_mul(1024)) else {
        return Some(Finding::ok(SUBJECT, shown));
    };
    // The kernel's default is half of the memory.
    if gtt <= total / 2 + total / 16 {
        let pages = total / 4 * 3 / 4096;
        return Some(Finding::warn(
            SUBJECT,
            format!("{shown}, of {}", mib(total)),
            format!(
                "for larger models put ttm.pages_limit={pages} (three quarters, in pages of 4 KiB) on the kernel's command line"
            ),
        ));
    }
    Some(Finding::ok(SUBJECT, format!("{shown}, of {}", mib(total))))
}

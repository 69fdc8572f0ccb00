//! GPUs on the PCI bus, as the kernel lists them. That one is there tells nothing of whether its
//! driver can be used: at boot the kernel's module and its device nodes come seconds later.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::Vendor;

/// Maximum number of devices of the bus that are examined.
const DEVICES_MAX: usize = 4096;

/// A GPU on the bus that its vendor's driver has, or that no driver has yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusGpu {
    /// Vendor of the GPU.
    pub vendor: Vendor,
    /// The GPU's PCI address.
    pub address: String,
    /// Whether the kernel's driver has taken it.
    pub is_bound: bool,
}

impl fmt::Display for BusGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let maker = match self.vendor {
            Vendor::Hip => "AMD",
            Vendor::Cuda => "NVIDIA",
        };
        write!(f, "{maker} GPU at {}", self.address)
    }
}

/// The GPUs of this machine. Those that another driver has (`vfio-pci` for a virtual machine,
/// `nouveau`) are nobody's to compute on, and left out.
#[must_use]
pub fn gpus() -> Vec<BusGpu> {
    below(Path::new("/"))
}

fn below(root: &Path) -> Vec<BusGpu> {
    let Ok(devices) = fs::read_dir(root.join("sys/bus/pci/devices")) else {
        return Vec::new();
    };
    let devices = devices.flatten().take(DEVICES_MAX);
    let mut found: Vec<BusGpu> = devices.filter_map(|device| gpu(&device.path())).collect();
    found.sort_by(|a, b| a.address.cmp(&b.address));
    found
}

fn gpu(device: &Path) -> Option<BusGpu> {
    let field = |name: &str| fs::read_to_string(device.join(name)).ok();
    let class = field("class")?;
    // Display controllers and processing accelerators.
    if !class.starts_with("0x03") && !class.starts_with("0x12") {
        return None;
    }
    let (vendor, module) = match field("vendor")?.trim() {
        "0x1002" => (Vendor::Hip, "amdgpu"),
        "0x10de" => (Vendor::Cuda, "nvidia"),
        _ => return None,
    };
    let driver = fs::read_link(device.join("driver")).ok();
    if driver
        .as_ref()
        .is_some_and(|driver| !driver.ends_with(module))
    {
        return None;
    }
    Some(BusGpu {
        vendor,
        address: device.file_name()?.to_str()?.to_owned(),
        is_bound: driver.is_some(),
    })
}

/// The power state of the device at an address by the kernel: `D0`, which is on, to `D3cold`. How
/// fast a card that is on runs is its driver's to say.
pub fn power_state(root: &Path, address: &str) -> Option<String> {
    let text = fs::read_to_string(folder(root, address)?.join("power_state")).ok()?;
    let state = text.trim();
    let is_state = state.starts_with('D') && state.len() <= "D3cold".len();
    is_state.then(|| state.to_owned())
}

/// What the kernel has of the device at an address, `None` of what is no address.
pub(super) fn folder(root: &Path, address: &str) -> Option<PathBuf> {
    let name = address.to_lowercase();
    let is_address = name
        .chars()
        .all(|c| c.is_ascii_hexdigit() || ":.".contains(c));
    is_address.then(|| root.join("sys/bus/pci/devices").join(name))
}

/// Whether the kernel has what a vendor's runtime opens: device nodes, and for AMD a node of a GPU
/// in the topology that comes after `/dev/kfd`.
#[must_use]
pub fn is_ready(vendor: Vendor) -> bool {
    is_ready_below(Path::new("/"), vendor)
}

fn is_ready_below(root: &Path, vendor: Vendor) -> bool {
    let is_there = |path: &str| root.join(path).exists();
    match vendor {
        Vendor::Cuda => is_there("dev/nvidiactl") && is_there("dev/nvidia-uvm"),
        Vendor::Hip => {
            let nodes = fs::read_dir(root.join("sys/class/kfd/kfd/topology/nodes"));
            let mut nodes = nodes.into_iter().flatten().flatten().take(DEVICES_MAX);
            is_there("dev/kfd") && nodes.any(|node| computes(&node.path()))
        }
    }
}

/// Whether a node of AMD's topology has units of a GPU.
fn computes(node: &Path) -> bool {
    let properties = fs::read_to_string(node.join("properties")).unwrap_or_default();
    let mut lines = properties.lines();
    let units = lines.find_map(|line| line.strip_prefix("simd_count "));
    units.is_some_and(|units| units.trim().parse::<u64>().is_ok_and(|n| n > 0))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn device(root: &Path, address: &str, vendor: &str, class: &str, driver: Option<&str>) {
        let dir = root.join("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("vendor"), format!("{vendor}\n")).unwrap();
        fs::write(dir.join("class"), format!("{class}\n")).unwrap();
        if let Some(driver) = driver {
            symlink(
                format!("../../../bus/pci/drivers/{driver}"),
                dir.join("driver"),
            )
            .unwrap();
        }
    }

    #[test]
    fn the_kernel_tells_the_power_state_of_a_card() {
        let root = tempfile::tempdir().unwrap();
        let of = |address| power_state(root.path(), address);
        device(root.path(), "0000:0a:00.0", "0x1002", "0x030000", None);
        let file = root
            .path()
            .join("sys/bus/pci/devices/0000:0a:00.0/power_state");
        assert_eq!(of("0000:0A:00.0"), None);
        fs::write(&file, "D3hot\n").unwrap();
        assert_eq!(of("0000:0A:00.0").as_deref(), Some("D3hot"));
        assert_eq!(of("../devices/0000:0a:00.0"), None);
        fs::write(&file, "unknown\n").unwrap();
        assert_eq!(of("0000:0a:00.0"), None);
    }

    #[test]
    fn gpus_are_those_that_their_own_driver_has_or_none_yet() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(below(root), []);
        device(root, "0000:03:00.0", "0x1002", "0x030000", None);
        device(root, "0000:03:00.1", "0x1002", "0x040300", None);
        device(root, "0000:41:00.0", "0x10de", "0x030200", Some("nvidia"));
        device(root, "0000:42:00.0", "0x10de", "0x030000", Some("nouveau"));
        device(root, "0000:43:00.0", "0x1002", "0x120000", Some("amdgpu"));
        device(root, "0000:44:00.0", "0x1002", "0x030000", Some("vfio-pci"));
        device(root, "0000:00:02.0", "0x8086", "0x030000", Some("i915"));
        fs::create_dir(root.join("sys/bus/pci/devices/0000:50:00.0")).unwrap();
        let found: Vec<_> = below(root)
            .iter()
            .map(|g| (g.to_string(), g.is_bound))
            .collect();
        let of = |maker: &str, address: &str| format!("{maker} GPU at {address}");
        assert_eq!(
            found,
            [
                (of("AMD", "0000:03:00.0"), false),
                (of("NVIDIA", "0000:41:00.0"), true),
                (of("AMD", "0000:43:00.0"), true),
            ]
        );
    }

    #[test]
    fn the_kernel_is_ready_with_its_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("dev/nvidiactl", "");
        assert!(!is_ready_below(root, Vendor::Cuda));
        put("dev/nvidia-uvm", "");
        assert!(is_ready_below(root, Vendor::Cuda));
        put("dev/kfd", "");
        let nodes = "sys/class/kfd/kfd/topology/nodes";
        put(
            &format!("{nodes}/0/properties"),
            "cpu_cores_count 16\nsimd_count 0\n",
        );
        assert!(!is_ready_below(root, Vendor::Hip), "of the processor alone");
        put(
            &format!("{nodes}/1/properties"),
            "cpu_cores_count 0\nsimd_count 80\n",
        );
        assert!(is_ready_below(root, Vendor::Hip));
    }
}

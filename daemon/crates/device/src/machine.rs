//! What the machine leaves to this process.

use std::path::{Path, PathBuf};

/// Where control groups (version 2) are.
pub(crate) const GROUPS: &str = "/sys/fs/cgroup";

/// Bytes of the machine's memory, or of what the control group that this process is in, or one
/// above it, may have if that is less; 0 if the system does not say.
#[must_use]
pub fn memory_bytes() -> u64 {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let machine = line(&read("/proc/meminfo"), "MemTotal:").unwrap_or(0);
    let group = group_bytes(Path::new(GROUPS), &read("/proc/self/cgroup"));
    group.map_or(machine, |group| group.min(machine))
}

/// Bytes of memory that can be had without anything's being swapped, what the page cache
/// would give back among them, or of what the control group may have if that is less; 0
/// if the system does not say.
#[must_use]
pub fn available_bytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    line(&info, "MemAvailable:").map_or(0, |bytes| bytes.min(memory_bytes()))
}

/// A line of /proc/meminfo, by its name with the colon, in bytes.
pub(crate) fn line(info: &str, name: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// The least bound on memory of the group that /proc/self/cgroup names and of those above it;
/// `None` where there is none. In a container the group's own folder is the root.
fn group_bytes(root: &Path, groups: &str) -> Option<u64> {
    let path = group_path(groups)?;
    let bound = |dir: &Path| -> Option<u64> {
        let text = std::fs::read_to_string(root.join(dir).join("memory.max")).ok()?;
        text.trim().parse().ok()
    };
    path.ancestors().filter_map(bound).min()
}

/// Below the root, the group that /proc/self/cgroup names.
fn group_path(groups: &str) -> Option<&Path> {
    let path = groups.lines().find_map(|l| l.strip_prefix("0::/"))?;
    Some(Path::new(path))
}

/// The folder of that group, if there is one of version 2.
pub(crate) fn group_dir(root: &Path, groups: &str) -> Option<PathBuf> {
    Some(root.join(group_path(groups)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once the bound of a service's own group was not found: it is not at the root.
    #[test]
    fn the_least_bound_of_the_groups_above_counts() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir_all(root.join("system.slice/rocmforged.service")).unwrap();
        let groups = "1:name=systemd:/x\n0::/system.slice/rocmforged.service\n";
        assert_eq!(group_bytes(root, groups), None);
        let own = root.join("system.slice/rocmforged.service/memory.max");
        std::fs::write(&own, "8000\n").unwrap();
        assert_eq!(group_bytes(root, groups), Some(8000));
        std::fs::write(root.join("system.slice/memory.max"), "5000\n").unwrap();
        assert_eq!(group_bytes(root, groups), Some(5000));
        std::fs::write(&own, "max\n").unwrap();
        assert_eq!(group_bytes(root, groups), Some(5000));
        std::fs::write(root.join("memory.max"), "3000\n").unwrap();
        assert_eq!(group_bytes(root, "0::/\n"), Some(3000), "in a container");
        assert_eq!(group_bytes(root, "4:memory:/x\n"), None, "version 1");
        assert_eq!(group_dir(root, groups), own.parent().map(Path::to_owned));
        assert_eq!(group_dir(root, "4:memory:/x\n"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        assert_eq!(
            line("MemTotal:       16000 kB\nMemFree: 1 kB\n", "MemTotal:"),
            Some(16_000 << 10)
        );
        assert!(memory_bytes() > 0);
        assert!((1..=memory_bytes()).contains(&available_bytes()));
    }
}

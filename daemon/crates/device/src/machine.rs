//! What the machine leaves to this process.
//!
//! A control group bounds memory in one of two ways: version 2 by `memory.max`, version 1 by
//! `memory.limit_in_bytes` in a hierarchy of its own. Where which is mounted says
//! /proc/self/mountinfo: in a hybrid layout both are, and a container may see a part of one.

use std::path::{Component, Path, PathBuf};

/// Bytes of the machine's memory, or of what the control group that this process is in, or one
/// above it, may have if that is less; 0 if the system does not say.
#[must_use]
pub fn memory_bytes() -> u64 {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let machine = line(&read("/proc/meminfo"), "MemTotal:").unwrap_or(0);
    let group = group_bytes(&own_groups());
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
fn line(info: &str, name: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// How a control group's bound on memory is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The control group of this process in a hierarchy that may bound memory.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    version: Version,
    /// Where the hierarchy is mounted.
    mount: PathBuf,
    /// The group's folder below that.
    below: PathBuf,
}

impl Group {
    /// The bound of the group in `dir`, a folder below the mount. Version 1 has a number of nearly
    /// 2^63 where there is none.
    fn bound(&self, dir: &Path) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        let text = std::fs::read_to_string(self.mount.join(dir).join(file)).ok()?;
        text.trim().parse().ok()
    }
}

/// The groups of this process.
fn own_groups() -> Vec<Group> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    groups(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"))
}

/// The groups that /proc/self/cgroup names in the hierarchies that /proc/self/mountinfo names.
fn groups(mounts: &str, own: &str) -> Vec<Group> {
    let mut found: Vec<Group> = mounts.lines().filter_map(|l| group(l, own)).collect();
    // A hierarchy may be mounted twice; the first mount is as good as the next.
    found.dedup();
    found
}

/// The group in the hierarchy of a line of mountinfo: `ID PARENT DEVICE ROOT MOUNT OPTIONS ... -
/// TYPE SOURCE OPTIONS`.
fn group(mount: &str, own: &str) -> Option<Group> {
    let (place, kind) = mount.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let version = match (kind.next()?, kind.nth(1)) {
        ("cgroup2", _) => Version::Two,
        ("cgroup", Some(options)) if options.split(',').any(|o| o == "memory") => Version::One,
        _ => return None,
    };
    let mut place = place.split(' ').skip(3);
    let (root, mount) = (Path::new(place.next()?), Path::new(place.next()?));
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_of = match version {
            Version::Two => id == "0" && controllers.is_empty(),
            Version::One => controllers.split(',').any(|c| c == "memory"),
        };
        is_of.then(|| Path::new(path))
    })?;
    // A container's mount is its own group, or a group above it, of which the path tells nothing.
    let below = path.strip_prefix(root).unwrap_or(Path::new(""));
    let leaves = below.components().any(|part| part == Component::ParentDir);
    Some(Group {
        version,
        mount: mount.to_owned(),
        below: if leaves {
            PathBuf::new()
        } else {
            below.to_owned()
        },
    })
}

/// The least bound on memory of these groups and of those above them; `None` where there is none.
fn group_bytes(groups: &[Group]) -> Option<u64> {
    let bounds = |group: &Group| group.below.ancestors().filter_map(|d| group.bound(d)).min();
    groups.iter().filter_map(bounds).min()
}

/// The folder of this process's group of version 2, if there is one.
pub(crate) fn group_dir() -> Option<PathBuf> {
    group_dir_of(&own_groups())
}

fn group_dir_of(groups: &[Group]) -> Option<PathBuf> {
    let group = groups.iter().find(|group| group.version == Version::Two)?;
    Some(group.mount.join(&group.below))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hierarchies below a root as a machine mounts them.
    fn mounts(root: &Path, lines: &[&str]) -> String {
        let root = root.display().to_string();
        lines
            .iter()
            .map(|l| l.replace("ROOT", &root) + "\n")
            .collect()
    }

    fn put(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    const UNIFIED: &str = "23 31 0:24 / ROOT rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";

    /// Once the bound of a service's own group was not found: it is not at the root.
    #[test]
    fn the_least_bound_of_the_groups_above_counts() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let mounted = mounts(root, &["21 31 0:5 / /proc rw - proc proc rw", UNIFIED]);
        let own = "1:name=systemd:/x\n0::/system.slice/rocmforged.service\n";
        let found = groups(&mounted, own);
        assert_eq!(group_bytes(&found), None);
        put(root, "system.slice/rocmforged.service/memory.max", "8000\n");
        assert_eq!(group_bytes(&found), Some(8000));
        put(root, "system.slice/memory.max", "5000\n");
        assert_eq!(group_bytes(&found), Some(5000));
        put(root, "system.slice/rocmforged.service/memory.max", "max\n");
        assert_eq!(group_bytes(&found), Some(5000));
        put(root, "memory.max", "3000\n");
        assert_eq!(group_bytes(&groups(&mounted, "0::/\n")), Some(3000));
        assert_eq!(group_bytes(&groups(&mounted, "4:memory:/x\n")), None);
        let service = root.join("system.slice/rocmforged.service");
        assert_eq!(group_dir_of(&found), Some(service));
        // Outside of what a container sees.
        assert_eq!(group_bytes(&groups(&mounted, "0::/../../y\n")), Some(3000));
    }

    /// Once a budget of 12.6 GB was made in a group of 512 MiB.
    #[test]
    fn the_bound_of_version_1_is_read_as_that_of_version_2() {
        const MEMORY: &str = "35 31 0:32 / ROOT/memory rw - cgroup cgroup rw,memory";
        const OTHER: &str = "32 31 0:29 / ROOT/cpu rw - cgroup cgroup rw,cpu,cpuacct";
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let own = "9:name=systemd:/s\n4:cpu,cpuacct:/c\n3:hugetlb,memory:/a/b\n0::/u\n";
        let found = groups(&mounts(root, &[OTHER, MEMORY]), own);
        put(
            root,
            "memory/a/b/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        put(root, "cpu/c/memory.limit_in_bytes", "1\n");
        assert_eq!(group_bytes(&found), Some(9_223_372_036_854_771_712));
        put(root, "memory/a/memory.limit_in_bytes", "6000\n");
        assert_eq!(group_bytes(&found), Some(6000), "of the group above");
        put(root, "memory/a/b/memory.limit_in_bytes", "5000\n");
        assert_eq!(group_bytes(&found), Some(5000));
        assert_eq!(group_dir_of(&found), None);

        // Both, of which the unified one has no bound or another.
        const HYBRID: &str = "41 31 0:38 / ROOT/unified rw - cgroup2 cgroup2 rw";
        let both = groups(&mounts(root, &[MEMORY, HYBRID]), own);
        assert_eq!(group_bytes(&both), Some(5000));
        assert_eq!(group_dir_of(&both), Some(root.join("unified/u")));
        put(root, "unified/memory.max", "4000\n");
        assert_eq!(group_bytes(&both), Some(4000));

        // A container without a namespace of groups: its group is what is mounted.
        let mounted = mounts(root, &[&MEMORY.replace(" / ", " /docker/1f ")]);
        put(root, "memory/memory.limit_in_bytes", "7000\n");
        for own in ["4:memory:/docker/1f\n", "4:memory:/elsewhere\n"] {
            assert_eq!(group_bytes(&groups(&mounted, own)), Some(7000), "{own}");
        }
        put(root, "memory/inner/memory.limit_in_bytes", "2000\n");
        let inner = groups(&mounted, "4:memory:/docker/1f/inner\n");
        assert_eq!(group_bytes(&inner), Some(2000));
    }

    #[test]
    fn lines_that_are_no_mounts_are_passed_over() {
        for mounted in [
            "",
            " - ",
            "a - cgroup2",
            "1 2 3 / - cgroup2 x y",
            "1 2 - cgroup x rw,memory",
        ] {
            assert_eq!(groups(mounted, "0::/\n4:memory:/\n"), [], "{mounted}");
        }
        assert_eq!(groups("23 31 0:24 / /x rw - cgroup2 c rw", "0:\n::\n"), []);
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

//! The kernel's files below a root.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of bytes that are read of a file.
const FILE_MAX_BYTES: u64 = 1 << 16;
/// Maximum number of entries of a directory that are examined.
const ENTRIES_MAX: usize = 4096;
/// `O_NONBLOCK` of Linux: a FIFO among the files would be waited for.
const NONBLOCK: i32 = 0o4000;

/// The group that files have whose group is not mapped, unless the kernel says another.
const OVERFLOW_GID: u64 = 65534;

/// Files of one machine.
#[derive(Debug)]
pub(super) struct System {
    root: PathBuf,
}

/// The user and groups of the process that runs `doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) uid: u32,
    pub(super) gids: Vec<u32>,
}

/// A file's owner and what it allows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
}

impl Access {
    /// Whether `who` may read and write.
    pub(super) fn is_open_to(self, who: &Identity) -> bool {
        let bits = if who.uid == 0 {
            return true;
        } else if self.uid == who.uid {
            self.mode >> 6
        } else if who.gids.contains(&self.gid) {
            self.mode >> 3
        } else {
            self.mode
        };
        bits & 0o6 == 0o6
    }

    /// The mode in octal digits, for files that matter to the daemon.
    pub(super) fn octal(self) -> String {
        format!("{:04o}", self.mode & 0o7777)
    }
}

impl System {
    pub(super) fn below(root: &Path) -> System {
        System {
            root: root.to_owned(),
        }
    }

    /// A path of the machine, here.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The beginning of a file as text; `None` where it is not there or not to be read.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        let file = File::options()
            .read(true)
            .custom_flags(NONBLOCK)
            .open(self.path(path))
            .ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_MAX_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// What a directory has, by name.
    pub(super) fn list(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let names = entries.flatten().take(ENTRIES_MAX);
        let mut names: Vec<_> = names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    pub(super) fn access(&self, path: &Path) -> Option<Access> {
        // A relative one is where a client finds it, whatever the root.
        let path = match path.strip_prefix("/") {
            Ok(below) => self.root.join(below),
            Err(_) => path.to_owned(),
        };
        let found = fs::metadata(path).ok()?;
        Some(Access {
            uid: found.uid(),
            gid: found.gid(),
            mode: found.mode(),
        })
    }

    /// The value of a line `NAME: VALUE` or `NAME VALUE`.
    pub(super) fn line(&self, path: &str, name: &str) -> Option<String> {
        let text = self.read(path)?;
        let mut lines = text.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    }

    /// User and groups of this process, as far as they count for opening files.
    pub(super) fn identity(&self) -> Identity {
        let numbers = |name: &str| -> Vec<u32> {
            let line = self.line("/proc/self/status", name).unwrap_or_default();
            line.split_whitespace()
                .filter_map(|word| word.parse().ok())
                .collect()
        };
        // Real, effective, saved, and that of the file system.
        let effective = |ids: Vec<u32>| ids.get(1).copied();
        let mut gids = numbers("Groups:");
        gids.extend(effective(numbers("Gid:")));
        Identity {
            uid: effective(numbers("Uid:")).unwrap_or(u32::MAX),
            gids,
        }
    }

    /// A group's name, where the machine's own list has it, else its number.
    pub(super) fn group(&self, gid: u32) -> String {
        self.group_name(gid).unwrap_or_else(|| gid.to_string())
    }

    fn group_name(&self, gid: u32) -> Option<String> {
        named(self.read("/etc/group"), gid)
    }

    /// The command that adds `user` to the group that owns a file, with the hint `more`.
    pub(super) fn joining(&self, gid: u32, user: &str, more: &str) -> String {
        // What a namespace of users shows of owners that it does not know.
        let overflow = self.number("/proc/sys/kernel/overflowgid");
        if u64::from(gid) == overflow.unwrap_or(OVERFLOW_GID) {
            return "its group is one that this container does not map: start the container with --group-add keep-groups \
                    (podman), or as root with --group-add and the group's number on the host (docker)"
                .to_owned();
        }
        let name = self.group_name(gid);
        if name.as_deref().map_or(gid == 0, |name| name == "root") {
            return format!(
                "it belongs to the group root, which is not for {user}: a udev rule has to give it another group \
                 (GROUP=\"render\", MODE=\"0660\")"
            );
        }
        let join = |name: &str| format!("usermod -aG {name} {user}, then log in again{more}");
        if let Some(name) = name {
            return join(&name);
        }
        let container = format!("start the container with --group-add {gid}");
        if self.is_container() {
            return format!("group {gid} has no name in this container: {container}");
        }
        // A name that is not taken: a group `render` may be there, with another number.
        let name = format!("gpu-{gid}");
        format!(
            "no group has the number {gid} here: groupadd --system --gid {gid} {name}, then {}; in a container instead, {container}",
            join(&name)
        )
    }

    /// Whether this is a container, by the marks that their managers leave.
    fn is_container(&self) -> bool {
        const MARKS: [&str; 3] = [
            "/.dockerenv",
            "/run/.containerenv",
            "/run/systemd/container",
        ];
        let told = self.read("/proc/1/environ").unwrap_or_default();
        MARKS.iter().any(|mark| self.exists(mark))
            || told
                .split('\0')
                .any(|variable| variable.starts_with("container="))
    }

    /// A user's name, where the machine's own list has it.
    pub(super) fn user(&self, uid: u32) -> String {
        named(self.read("/etc/passwd"), uid).unwrap_or_else(|| uid.to_string())
    }
}

/// The first field of the line whose third one is `number`.
fn named(list: Option<String>, number: u32) -> Option<String> {
    let list = list.unwrap_or_default();
    list.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let own: u32 = fields.nth(1)?.parse().ok()?;
        (own == number).then(|| name.to_owned())
    })
}

//! What the kernel says of an AMD card's users. The driver counts the card's memory and its busy
//! time as a whole (sysfs), and by open file for whoever may trace the process (fdinfo: the same
//! user without a changed identity, or CAP_SYS_PTRACE).
//!
//! Work that goes through KFD, as HIP's does, is in the memory and in the busy share of the whole
//! card, but in no file's engine times. So the card's busy share counts while this process has no
//! work, and files' times at any time.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Observer, OthersUse, OwnUse, Places};

/// Files of the card are looked for this often; those that were found are read at each look.
const SEARCH_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of processes, and files of one, that are examined.
const PROCESSES_MAX: usize = 16_384;
const FILES_MAX: usize = 1024;
/// Maximum number of files of the card that are followed.
const FOLLOWED_MAX: usize = 1024;

/// A process's open file of the card, as `fdinfo` has it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Client {
    id: u64,
    memory_bytes: u64,
    /// Time that its work took of the engines for drawing and computing.
    busy_ns: u64,
}

/// Reads a file of `fdinfo`; `None` if it is of no card or of another one.
fn client(text: &str, address: &str) -> Option<Client> {
    let mut found = Client::default();
    let (mut is_of_card, mut has_id) = (false, false);
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        let value = value.trim();
        let number = || -> u64 {
            let digits = value.split_ascii_whitespace().next();
            digits.and_then(|d| d.parse().ok()).unwrap_or(0)
        };
        match key {
            "drm-pdev" => is_of_card = value.eq_ignore_ascii_case(address),
            "drm-client-id" => (found.id, has_id) = (number(), true),
            "drm-memory-vram" => {
                let unit = match value.rsplit(' ').next() {
                    Some("KiB") => 1 << 10,
                    Some("MiB") => 1 << 20,
                    _ => 1,
                };
                found.memory_bytes = number().saturating_mul(unit);
            }
            "drm-engine-gfx" | "drm-engine-compute" => {
                found.busy_ns = found.busy_ns.saturating_add(number());
            }
            _ => {}
        }
    }
    (is_of_card && has_id).then_some(found)
}

/// Looks at an AMD card.
pub(super) struct DrmObserver {
    address: String,
    card: PathBuf,
    proc: PathBuf,
    searched: Option<Instant>,
    /// Files of the card that other processes have open, and that this one has.
    followed: Vec<PathBuf>,
    own: Vec<PathBuf>,
    /// Busy times of others at the last look.
    times: HashMap<u64, u64>,
    looked: Option<Instant>,
    /// Whether the kernel counted all that this process held when that was something last.
    knows_us: bool,
}

impl DrmObserver {
    pub(super) fn open(address: &str, places: &Places) -> Result<Self, String> {
        let address = address.to_lowercase();
        let sound = address
            .bytes()
            .all(|b| b.is_ascii_hexdigit() || b":.".contains(&b));
        let card = places.root.join("sys/bus/pci/devices").join(&address);
        let observer = Self {
            card,
            address,
            proc: places.root.join("proc"),
            searched: None,
            followed: Vec::new(),
            own: Vec::new(),
            times: HashMap::new(),
            looked: None,
            knows_us: false,
        };
        match sound {
            true => observer.number("mem_info_vram_used").map(|_| observer),
            false => Err(format!("'{}' is no PCI address", observer.address)),
        }
    }

    /// A number that the kernel reports about the card.
    fn number(&self, name: &str) -> Result<u64, String> {
        let file = self.card.join(name);
        let text = fs::read_to_string(&file).map_err(|e| e.to_string());
        let number = text.and_then(|text| text.trim().parse().map_err(|_| "no number".to_owned()));
        number.map_err(|error| {
            let file = file.display();
            format!("{file}: {error} (amdgpu of Linux 5.1 or newer writes it; a container needs the host's /sys)")
        })
    }

    /// The card's files among those that a process has open.
    fn files_of(&self, process: &Path) -> Vec<PathBuf> {
        let files = fs::read_dir(process.join("fdinfo"));
        let files = files.into_iter().flatten().flatten().take(FILES_MAX);
        // Most open files are of no card: a link is read in a fraction of the time that the
        // kernel takes to write what it knows of a file.
        let is_other = |name: &OsStr| {
            let file = fs::read_link(process.join("fd").join(name));
            file.is_ok_and(|file| !file.components().any(|part| part.as_os_str() == "dri"))
        };
        files
            .filter(|file| !is_other(&file.file_name()))
            .map(|file| file.path())
            .filter(|file| self.read(file).is_some())
            .collect()
    }

    fn read(&self, file: &Path) -> Option<Client> {
        client(&fs::read_to_string(file).ok()?, &self.address)
    }

    /// Looks for the card's files that processes have open.
    fn search(&mut self, now: Instant) {
        let is_due = |at: Instant| now.saturating_duration_since(at) >= SEARCH_EVERY;
        if !self.searched.is_none_or(is_due) {
            return;
        }
        self.searched = Some(now);
        let own = std::process::id();
        let processes = fs::read_dir(&self.proc).into_iter().flatten().flatten();
        let processes = processes.filter(|entry| {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.parse::<u32>().ok());
            pid.is_some_and(|pid| pid != own)
        });
        let processes = processes.take(PROCESSES_MAX);
        let files = processes.flat_map(|entry| self.files_of(&entry.path()));
        self.followed = files.take(FOLLOWED_MAX).collect();
        self.own = self.files_of(&self.proc.join("self"));
    }

    /// Bytes that this process's files of the card hold.
    fn own_bytes(&self) -> u64 {
        let mut seen = HashSet::new();
        let clients = self.own.iter().filter_map(|file| self.read(file));
        let mine = clients.filter(|client| seen.insert(client.id));
        mine.map(|client| client.memory_bytes).sum()
    }

    /// The share of the time that other processes' files were busy since the last look; `None`
    /// where none can be read.
    fn busy_of_files(&mut self, now: Instant) -> Option<u32> {
        let clients = self.followed.iter().filter_map(|file| self.read(file));
        let times: HashMap<u64, u64> = clients.map(|c| (c.id, c.busy_ns)).collect();
        let before = std::mem::replace(&mut self.times, times);
        let looked = self.looked.replace(now);
        if self.times.is_empty() {
            return None;
        }
        let since = |id, busy: u64| before.get(id).map_or(0, |b| busy.saturating_sub(*b));
        let busy: u64 = self.times.iter().map(|(id, busy)| since(id, *busy)).sum();
        let passed = looked.map_or(0, |at| now.saturating_duration_since(at).as_nanos());
        let percent = u128::from(busy) * 100 / passed.max(1);
        Some(percent.min(100) as u32)
    }
}

impl Observer for DrmObserver {
    fn look(&mut self, own: OwnUse, now: Instant) -> Result<OthersUse, String> {
        self.search(now);
        let used = self.number("mem_info_vram_used")?;
        let mine = self.own_bytes();
        if mine > 0 || own.bytes > 0 {
            self.knows_us = mine >= own.bytes;
        }
        let of_files = self.busy_of_files(now);
        let of_card = match own.is_working {
            true => None,
            false => self.number("gpu_busy_percent").ok(),
        };
        let of_card = of_card.map(|percent| percent.min(100) as u32);
        Ok(OthersUse {
            bytes: used.saturating_sub(mine.max(own.bytes)),
            is_exact: self.knows_us,
            busy_percent: of_files.max(of_card),
        })
    }
}

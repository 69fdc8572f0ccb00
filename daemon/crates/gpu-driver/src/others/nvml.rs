//! NVIDIA's management library, opened where it is needed: who else uses a card, and what power it
//! takes.
//!
//! A crate for it (`nvml-wrapper`) brings the whole interface and nine crates of its own; nine
//! functions are used here, which have not changed since driver 510.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{Observer, OthersUse, OwnUse, Places};
use crate::library::{Library, table};

const NAME: &str = "libnvidia-ml.so.1";
const HINT: &str = "install the driver's management library (Debian: libnvidia-ml1), or name it in ROCMFORGE_NVML_LIBRARY";

const SUCCESS: c_int = 0;
const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;

/// Maximum number of processes and samples that are read at a time.
const ENTRIES_MAX: usize = 4096;
/// Initial capacity of the list of processes.
const ENTRIES: usize = 128;
/// How often samples are read: in a shorter time not every process that is busy has one.
const SAMPLES_EVERY: Duration = Duration::from_millis(500);
/// What the library counts as busy stays true so long without a newer sample: it takes one in a
/// sixth of a second to a second.
const SAMPLE_LASTS: Duration = Duration::from_millis(1500);

pub(crate) type Device = *mut c_void;

/// A process with a context on the card. The library's `nvmlProcessInfo_t` of version 2.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProcessInfo {
    pid: c_uint,
    used_bytes: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    pid: c_uint,
    time_us: c_ulonglong,
    sm_percent: c_uint,
    memory_percent: c_uint,
    encoder_percent: c_uint,
    decoder_percent: c_uint,
}

impl Sample {
    /// Whether all of it are shares: the library also returns entries that it never filled.
    fn is_sound(&self) -> bool {
        let shares = [
            self.sm_percent,
            self.memory_percent,
            self.encoder_percent,
            self.decoder_percent,
        ];
        shares.iter().all(|share| *share <= 100)
    }
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MemoryInfo {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

table! {
    /// The functions that are used of the library.
    struct Functions {
        required {
            nvmlInit_v2() -> c_int;
            nvmlShutdown() -> c_int;
            nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut Device) -> c_int;
            nvmlDeviceGetMemoryInfo(Device, *mut MemoryInfo) -> c_int;
            nvmlDeviceGetComputeRunningProcesses_v3(Device, *mut c_uint, *mut ProcessInfo) -> c_int;
            nvmlDeviceGetGraphicsRunningProcesses_v3(Device, *mut c_uint, *mut ProcessInfo) -> c_int;
        }
        optional {
            nvmlDeviceGetProcessUtilization(Device, *mut Sample, *mut c_uint, c_ulonglong) -> c_int;
            nvmlDeviceGetPowerUsage(Device, *mut c_uint) -> c_int;
            nvmlDeviceGetPerformanceState(Device, *mut c_uint) -> c_int;
        }
    }
}

/// The library at work for one card. It is shut down when this goes.
pub(super) struct Nvml {
    functions: Functions,
    device: Device,
}

// SAFETY: the library may be called from any thread, with handles that another one was given.
unsafe impl Send for Nvml {}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: it was initialized; each shutdown belongs to one initialization.
        unsafe { (self.functions.nvmlShutdown)() };
    }
}

fn failed(what: &str, code: c_int) -> String {
    format!("NVML: {what}: error {code} (`nvidia-smi` shows whether the driver works)")
}

impl Nvml {
    pub(super) fn open(address: &str, places: &Places) -> Result<Self, String> {
        let name = places.nvml.as_ref().map(|path| path.to_string_lossy());
        let name = name.map_or_else(|| NAME.to_owned(), |name| name.into_owned());
        let library = Library::open("NVIDIA", &[name], HINT).map_err(|e| e.to_string())?;
        let functions = Functions::load(&library).map_err(|e| e.to_string())?;
        let address = CString::new(address).map_err(|e| e.to_string())?;
        // SAFETY: it takes nothing, and may be called again.
        let code = unsafe { (functions.nvmlInit_v2)() };
        if code != SUCCESS {
            return Err(failed("it cannot be initialized", code));
        }
        let mut nvml = Self {
            functions,
            device: std::ptr::null_mut(),
        };
        let find = nvml.functions.nvmlDeviceGetHandleByPciBusId_v2;
        // SAFETY: a string that ends in zero, and a place for the handle.
        let code = unsafe { find(address.as_ptr(), &mut nvml.device) };
        match code {
            SUCCESS => Ok(nvml),
            _ => Err(failed(&format!("no GPU at {address:?}"), code)),
        }
    }

    /// What a function with a place for one number gives.
    fn number(
        &self,
        ask: Option<unsafe extern "C" fn(Device, *mut c_uint) -> c_int>,
    ) -> Option<u32> {
        let mut number = 0;
        // SAFETY: the handle is of this library, and the place is there.
        let code = unsafe { ask?(self.device, &mut number) };
        (code == SUCCESS).then_some(number)
    }

    /// Milliwatts that the card takes.
    pub(super) fn milliwatts(&self) -> Option<u32> {
        self.number(self.functions.nvmlDeviceGetPowerUsage)
    }

    /// The performance state: 0 is the highest, 15 the lowest.
    pub(super) fn performance_state(&self) -> Option<u32> {
        let state = self.number(self.functions.nvmlDeviceGetPerformanceState);
        state.filter(|state| *state <= 15)
    }

    fn used_bytes(&self) -> Result<u64, String> {
        let mut memory = MemoryInfo::default();
        // SAFETY: as above.
        let code = unsafe { (self.functions.nvmlDeviceGetMemoryInfo)(self.device, &mut memory) };
        match code {
            SUCCESS => Ok(memory.used),
            _ => Err(failed("the GPU's memory cannot be counted", code)),
        }
    }

    /// A list that the library writes into a place for as many entries as the number says, which
    /// becomes that of the entries.
    fn list<T: Copy + Default>(
        &self,
        what: &str,
        ask: impl Fn(Device, *mut c_uint, *mut T) -> c_int,
    ) -> Result<Option<Vec<T>>, String> {
        let mut room = ENTRIES;
        loop {
            let mut entries = vec![T::default(); room];
            let mut count = room as c_uint;
            match ask(self.device, &mut count, entries.as_mut_ptr()) {
                SUCCESS => {
                    entries.truncate(count as usize);
                    return Ok(Some(entries));
                }
                NOT_FOUND => return Ok(Some(Vec::new())),
                NOT_SUPPORTED => return Ok(None),
                // More may have come since the number was told.
                INSUFFICIENT_SIZE if room < ENTRIES_MAX => {
                    room = (count as usize + ENTRIES).clamp(room * 2, ENTRIES_MAX);
                }
                code => return Err(failed(what, code)),
            }
        }
    }

    /// Processes with a context on the card, each once.
    fn processes(&self) -> Result<HashMap<u32, u64>, String> {
        let functions = &self.functions;
        let mut all = HashMap::new();
        for ask in [
            functions.nvmlDeviceGetComputeRunningProcesses_v3,
            functions.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ] {
            // SAFETY: `list` has room for as many entries as it says.
            let ask = |device, count, entries| unsafe { ask(device, count, entries) };
            let found = self.list("processes cannot be listed", ask)?;
            for process in found.into_iter().flatten() {
                // One that computes and draws is in both lists.
                let bytes: &mut u64 = all.entry(process.pid).or_default();
                *bytes = (*bytes).max(process.used_bytes);
            }
        }
        Ok(all)
    }

    /// How busy processes were since a time of the library's clock; `None` where it does not count.
    fn samples(&self, since_us: u64) -> Result<Option<Vec<Sample>>, String> {
        let Some(ask) = self.functions.nvmlDeviceGetProcessUtilization else {
            return Ok(None);
        };
        // SAFETY: as for processes.
        let ask = |device, count, entries| unsafe { ask(device, entries, count, since_us) };
        self.list("busy processes cannot be listed", ask)
    }
}

/// How busy others are, by the library's samples.
#[derive(Debug, Default)]
struct Busy {
    /// When samples were read last.
    read: Option<Instant>,
    /// Whether the library takes any.
    is_counted: bool,
    /// Busy share by the last samples, in percent.
    last: u32,
    at: Option<Instant>,
    /// The lower of the last two, so that a moment's work is not taken for work that lasts.
    lower: u32,
}

impl Busy {
    /// Whether samples are to be read at `now`.
    fn is_due(&mut self, now: Instant) -> bool {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= SAMPLES_EVERY;
        let is_due = self.read.is_none_or(is_old);
        if is_due {
            self.read = Some(now);
        }
        is_due
    }

    fn is_new(&self, now: Instant) -> bool {
        let is_new = |at: Instant| now.saturating_duration_since(at) < SAMPLE_LASTS;
        self.at.is_some_and(is_new)
    }

    /// What counts at `now`.
    fn percent(&self, now: Instant) -> Option<u32> {
        let percent = if self.is_new(now) { self.lower } else { 0 };
        self.is_counted.then_some(percent)
    }

    fn note(&mut self, percent: u32, now: Instant) {
        let before = if self.is_new(now) { self.last } else { 0 };
        self.lower = percent.min(before);
        (self.last, self.at) = (percent, Some(now));
    }
}

/// Looks at an NVIDIA card.
pub(super) struct NvmlObserver {
    nvml: Nvml,
    proc: PathBuf,
    /// Time of the last sample that was read, by the library's clock.
    sampled_us: u64,
    busy: Busy,
    /// Whether the library listed this process when it held memory last. In a container it lists
    /// numbers of another namespace, or nobody.
    knows_us: bool,
}

impl NvmlObserver {
    pub(super) fn open(address: &str, places: &Places) -> Result<Self, String> {
        Ok(Self {
            nvml: Nvml::open(address, places)?,
            proc: places.root.join("proc"),
            sampled_us: 0,
            busy: Busy::default(),
            knows_us: false,
        })
    }

    /// Whether a process is this one or was started by it, as trials of a vendor's library are.
    fn is_own(&self, pid: u32) -> bool {
        let own = std::process::id();
        let status = || fs::read_to_string(self.proc.join(pid.to_string()).join("status")).ok();
        let parent = |status: String| -> Option<u32> {
            let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
            line.trim().parse().ok()
        };
        pid == own || status().and_then(parent) == Some(own)
    }

    /// The share of the time that those of the `listed` processes compute which are others.
    fn busy_percent(
        &mut self,
        listed: &HashMap<u32, u64>,
        now: Instant,
    ) -> Result<Option<u32>, String> {
        if !self.busy.is_due(now) {
            return Ok(self.busy.percent(now));
        }
        let samples = self.nvml.samples(self.sampled_us)?;
        self.busy.is_counted = samples.is_some();
        let mut samples = samples.unwrap_or_default();
        samples.retain(|s| s.is_sound() && listed.contains_key(&s.pid));
        let mut of_processes: HashMap<u32, (u64, u64)> = HashMap::new();
        for sample in samples.iter().filter(|s| s.time_us > self.sampled_us) {
            let (sum, n) = of_processes.entry(sample.pid).or_default();
            *sum += u64::from(sample.sm_percent);
            *n += 1;
        }
        self.sampled_us = samples
            .iter()
            .map(|s| s.time_us)
            .fold(self.sampled_us, u64::max);
        if !of_processes.is_empty() {
            let others = of_processes.iter().filter(|(pid, _)| !self.is_own(**pid));
            let sum: u64 = others.map(|(_, (sum, n))| sum / n).sum();
            self.busy.note(sum.min(100) as u32, now);
        }
        Ok(self.busy.percent(now))
    }
}

impl Observer for NvmlObserver {
    fn look(&mut self, own: OwnUse, now: Instant) -> Result<OthersUse, String> {
        let processes = self.nvml.processes()?;
        if own.bytes > 0 {
            self.knows_us = processes.contains_key(&std::process::id());
        }
        let knows_us = self.knows_us;
        let others = processes.iter().filter(|(pid, _)| !self.is_own(**pid));
        let others: Vec<u64> = others.map(|(_, bytes)| *bytes).collect();
        let is_exact = knows_us && others.iter().all(|bytes| *bytes != u64::MAX);
        if is_exact {
            return Ok(OthersUse {
                bytes: others.iter().sum(),
                is_exact,
                busy_percent: self.busy_percent(&processes, now)?,
            });
        }
        let busy_percent = match knows_us {
            true => self.busy_percent(&processes, now)?,
            false => None,
        };
        Ok(OthersUse {
            bytes: self.nvml.used_bytes()?.saturating_sub(own.bytes),
            is_exact,
            busy_percent,
        })
    }
}

//! The test's end: a copy of the shared library, opened, and its control functions.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};

use rocmforge_kernels_gpu::units;

use crate::ARCH;
use crate::control::{Number, Process};
use crate::exports::MARKER;
use crate::kernels;
use crate::misbehaviour::Misbehaviour;

/// Where cargo puts the shared library: beside the tests of the crates that depend on this one.
///
/// # Errors
/// The places that were tried.
pub fn library_path() -> Result<PathBuf, String> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let dirs = [exe.parent(), exe.parent().and_then(Path::parent)];
    let tried: Vec<PathBuf> = dirs
        .into_iter()
        .flatten()
        .flat_map(|dir| [dir.to_path_buf(), dir.join("deps")])
        .map(|dir| dir.join("librocmforge_fake_hip.so"))
        .collect();
    match tried.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => Err(format!("no fake runtime at any of {tried:?}")),
    }
}

/// An image that `hipModuleLoadData` of the fake takes: a module with these
/// kernels; `*` stands for all.
pub fn marker_image(kernels: &[&str]) -> Vec<u8> {
    let mut image = MARKER.to_vec();
    image.extend(kernels.join("\n").bytes());
    image.push(0);
    image
}

/// The image of a unit of the kernels crate's list: a module with that unit's kernels.
/// `None` for an unknown unit.
pub fn unit_image(unit: &str) -> Option<Vec<u8>> {
    let names = kernels::of_unit(unit);
    (!names.is_empty()).then(|| marker_image(&names))
}

/// Writes the image of every unit to `<dir>/<arch>/<unit>.hsaco`: a folder for ROCMFORGE_KERNELS.
///
/// # Errors
/// What writing gives.
pub fn write_images(dir: &Path, arch: &str) -> std::io::Result<()> {
    let dir = dir.join(arch);
    std::fs::create_dir_all(&dir)?;
    for unit in units::units() {
        if let Some(image) = unit_image(unit.name) {
            std::fs::write(dir.join(format!("{}.hsaco", unit.name)), image)?;
        }
    }
    Ok(())
}

/// What is alive in a fake runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Live {
    /// Device allocations, those without an address of their own included.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Ranges of addresses that are reserved.
    pub reservations: u64,
    /// Pinned host allocations.
    pub pinned: u64,
    /// Registered host ranges.
    pub registrations: u64,
    /// Streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules.
    pub modules: u64,
    /// Graphs, instantiated ones included.
    pub graphs: u64,
}

/// A fake runtime of one test's own.
pub struct Fake {
    library: libloading::Library,
    path: PathBuf,
    dir: tempfile::TempDir,
}

impl Fake {
    /// Copies the shared library, so that it has a state of its own, and opens the copy.
    ///
    /// # Panics
    /// When there is no library to copy or it cannot be opened: a test cannot go on without.
    pub fn new() -> Fake {
        let from = library_path().unwrap_or_else(|message| panic!("{message}"));
        let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = dir.path().join("libamdhip64.so.6");
        std::fs::copy(from, &path).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: our own library; its initializers do nothing.
        let library =
            unsafe { libloading::Library::new(&path) }.unwrap_or_else(|error| panic!("{error}"));
        Fake { library, path, dir }
    }

    /// The library's file, for ROCMFORGE_HIP_LIBRARY and its like.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A folder with the image of every unit, for ROCMFORGE_KERNELS and its
    /// like; it goes with the fake.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn images(&self) -> PathBuf {
        self.images_for(ARCH)
    }

    fn images_for(&self, arch: &str) -> PathBuf {
        let dir = self.dir.path().join("kernels");
        write_images(&dir, arch).unwrap_or_else(|error| panic!("{error}"));
        dir
    }

    /// Lets the vendor's library for products be found beside the runtime:
    /// `rocblas_gemm_ex` and what belongs to it, and a hipBLASLt without functions, so that
    /// one that is installed is not opened.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn add_products(&self) {
        for name in crate::rocblas::NAMES {
            // A link, not a copy: to the loader it is the same library, with the same state.
            let made = std::os::unix::fs::symlink(&self.path, self.dir.path().join(name));
            made.unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    fn control<F: Copy>(&self, name: &str) -> F {
        // SAFETY: every caller names a function of `control` with its own type.
        match unsafe { self.library.get::<F>(name) } {
            Ok(function) => *function,
            Err(error) => panic!("{name}: {error}"),
        }
    }

    /// Lets the `nth` call (from 1) of `call` from now on fail with `code`; see
    /// [`crate::when_run`] for queued work.
    ///
    /// # Panics
    /// When `call` has a zero byte.
    pub fn fail(&self, call: &str, nth: u64, code: u32) {
        let call = CString::new(call).unwrap_or_else(|error| panic!("{error}"));
        let fail: unsafe extern "C" fn(*const c_char, u64, u32) = self.control("fake_hip_fail");
        // SAFETY: a string that ends.
        unsafe { fail(call.as_ptr(), nth, code) };
    }

    /// Drops all orders to fail, and the loss of the device.
    pub fn recover(&self) {
        let recover: extern "C" fn() = self.control("fake_hip_recover");
        recover();
    }

    /// Forgets all that is alive and queued, orders to fail and the loss of the device: as if the
    /// process that held it had ended. Whoever still has a handle must not use it.
    pub fn reset(&self) {
        let reset: extern "C" fn() = self.control("fake_hip_reset");
        reset();
    }

    /// Sets the card's memory, and what other processes hold of it, in bytes.
    pub fn set_memory(&self, total: u64, others: u64) {
        let set: extern "C" fn(u64, u64) = self.control("fake_hip_set_memory");
        set(total, others);
    }

    /// Sets the bytes of the card that are in use, and the processes that the management library
    /// lists.
    pub fn set_processes(&self, used: u64, processes: &[Process]) {
        let set: unsafe extern "C" fn(u64, *const Process, usize) = self.control("fake_nvml_set");
        // SAFETY: a slice has as many as it says.
        unsafe { set(used, processes.as_ptr(), processes.len()) };
    }

    /// How often the management library is open.
    pub fn management_opened(&self) -> u64 {
        let opened: extern "C" fn() -> u64 = self.control("fake_nvml_opened");
        opened()
    }

    /// Fills all device memory but the first `kept` bytes of each allocation with something
    /// else, as a loss of power does.
    pub fn forget_memory(&self, kept: u64) {
        let forget: extern "C" fn(u64) = self.control("fake_hip_forget_memory");
        forget(kept);
    }

    /// Has the card announce another architecture than [`ARCH`], before it is opened, and returns a
    /// folder with the image of every unit for that.
    ///
    /// # Panics
    /// When `arch` has a zero byte, or the images cannot be written.
    pub fn become_arch(&self, arch: &str) -> PathBuf {
        self.announce_arch(arch);
        self.images_for(arch)
    }

    /// Has the card announce another architecture, with features or without
    /// (`gfx90a:sramecc+:xnack-`), before it is opened.
    ///
    /// # Panics
    /// When `arch` has a zero byte.
    pub fn announce_arch(&self, arch: &str) {
        let name = CString::new(arch).unwrap_or_else(|error| panic!("{error}"));
        let set: unsafe extern "C" fn(*const c_char) = self.control("fake_hip_set_arch");
        // SAFETY: a string that ends.
        unsafe { set(name.as_ptr()) };
    }

    /// Has the card say that it is a part of the processor, or that it is not, before it is opened.
    pub fn set_integrated(&self, integrated: bool) {
        let set: extern "C" fn(bool) = self.control("fake_hip_set_integrated");
        set(integrated);
    }

    /// Allows registration of host memory, or refuses it as not supported.
    pub fn set_register(&self, allowed: bool) {
        let set: extern "C" fn(bool) = self.control("fake_hip_set_register");
        set(allowed);
    }

    /// Allows reserving addresses apart from memory, or says that the device cannot.
    pub fn set_virtual_memory(&self, allowed: bool) {
        let set: extern "C" fn(bool) = self.control("fake_hip_set_virtual_memory");
        set(allowed);
    }

    /// Switches a misbehaviour on with a number, or off with 0.
    pub fn misbehave(&self, which: Misbehaviour, number: u64) {
        let set: extern "C" fn(u32, u64) = self.control("fake_hip_misbehave");
        set(which as u32, number);
    }

    /// The most bytes of device memory that were held at a time since the last call of this.
    pub fn peak_bytes(&self) -> u64 {
        self.number(Number::PeakBytes)
    }

    /// Calls of a function so far.
    ///
    /// # Panics
    /// When `call` has a zero byte.
    pub fn calls(&self, call: &str) -> u64 {
        let call = CString::new(call).unwrap_or_else(|error| panic!("{error}"));
        let calls: unsafe extern "C" fn(*const c_char) -> u64 = self.control("fake_hip_calls");
        // SAFETY: a string that ends.
        unsafe { calls(call.as_ptr()) }
    }

    fn number(&self, which: Number) -> u64 {
        let number: extern "C" fn(u32) -> u64 = self.control("fake_hip_number");
        number(which as u32)
    }

    /// What is alive.
    pub fn live(&self) -> Live {
        Live {
            allocations: self.number(Number::DeviceAllocations),
            bytes: self.number(Number::DeviceBytes),
            reservations: self.number(Number::Reservations),
            pinned: self.number(Number::PinnedAllocations),
            registrations: self.number(Number::Registrations),
            streams: self.number(Number::Streams),
            events: self.number(Number::Events),
            modules: self.number(Number::Modules),
            graphs: self.number(Number::Graphs),
        }
    }

    /// Whether the process has the card open.
    pub fn is_open(&self) -> bool {
        self.number(Number::Contexts) > 0
    }

    /// Works that are queued and not done.
    pub fn queued(&self) -> u64 {
        self.number(Number::Queued)
    }

    /// Takes what was noted: misuse, faults, reads of memory that nobody wrote.
    pub fn violations(&self) -> Vec<String> {
        let take: unsafe extern "C" fn(*mut u8, usize) -> usize =
            self.control("fake_hip_take_violations");
        let mut bytes = vec![0; 1 << 20];
        // SAFETY: the buffer has the bytes that are told.
        let n = unsafe { take(bytes.as_mut_ptr(), bytes.len()) };
        let text = String::from_utf8_lossy(&bytes[..n]).into_owned();
        text.lines().map(str::to_owned).collect()
    }
}

impl Default for Fake {
    fn default() -> Fake {
        Fake::new()
    }
}

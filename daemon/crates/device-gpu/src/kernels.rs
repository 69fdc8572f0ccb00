//! Compiled kernels: a unit's image is loaded when its first kernel is asked for,
//! or ahead of need, and kept.
//!
//! ```text
//!   absent --(a thread takes it up)--> loading --> loaded
//!      ^                                  |
//!      +-------------(failed)-------------+
//! ```
//!
//! Threads: the engine thread, the staging threads and those that warm up ask, each for its own
//! unit at the same time; who needs a unit that another thread is loading waits for that one only.
//! No lock is held while a module is loaded.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Instant;

use rocmforge_device::Error;
use rocmforge_gpu_driver::{Context, Kernel, LaunchConfig, Module, Stream, Vendor};
use rocmforge_kernels_gpu::compile::{Compiler, Config, Language, Request};
use rocmforge_kernels_gpu::{Launch, amd_targets, aot, units};

use super::failed;

/// Where images come from: compiled ahead of time, out of a cache, or compiled now.
pub trait Images: Send + Sync {
    /// The code object of a unit for an architecture (`gfx1100`, `sm_90`).
    ///
    /// # Errors
    /// What keeps it from being had, with what to do about it.
    fn image(&self, arch: &str, unit: &str) -> Result<Vec<u8>, Error>;

    /// Another code object for a unit whose first one the driver does not load; `None` where there
    /// is none.
    ///
    /// # Errors
    /// As [`Images::image`].
    fn other_image(&self, _arch: &str, _unit: &str) -> Option<Result<Vec<u8>, Error>> {
        None
    }

    /// Where those for an architecture come from, for people.
    fn source(&self, _arch: &str) -> String {
        "of the program that opened the device".to_owned()
    }

    /// Why there are no kernels for an architecture, where that is known from the start.
    fn refuses(&self, _arch: &str) -> Option<String> {
        None
    }
}

/// Images in a folder: `<dir>/<arch>/<unit>`, with any of the vendors' endings.
#[derive(Debug, Clone)]
pub struct ImageFolder(pub std::path::PathBuf);

impl Images for ImageFolder {
    fn source(&self, arch: &str) -> String {
        format!("in {}", self.0.join(arch).display())
    }

    fn image(&self, arch: &str, unit: &str) -> Result<Vec<u8>, Error> {
        let dir = self.0.join(arch);
        let found = ["cubin", "hsaco", "ptx", "co"]
            .iter()
            .find_map(|ending| std::fs::read(dir.join(format!("{unit}.{ending}"))).ok());
        found.ok_or_else(|| {
            Error::Config(format!(
                "no compiled kernels '{unit}' for {arch} in {}: compile them there, or take another device",
                dir.display()
            ))
        })
    }

    fn refuses(&self, arch: &str) -> Option<String> {
        let dir = self.0.join(arch);
        (!dir.is_dir()).then(|| {
            format!(
                "there is no folder {}: compile kernels there, or take another device",
                dir.display()
            )
        })
    }
}

/// AMD's run-time compiler, newest first.
const HIPRTC: [&str; 3] = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"];

/// Images by the vendor's run-time compiler in a child process, kept on disk.
#[derive(Debug)]
struct CompiledImages {
    vendor: Vendor,
    compiler: Compiler,
    /// That what is embedded is damaged is told once, not for every unit.
    tell_damaged: Once,
}

impl CompiledImages {
    /// The compiler of a vendor, set up as usual.
    fn new(vendor: Vendor) -> Self {
        let language = match vendor {
            Vendor::Hip => Language::Hip,
            Vendor::Cuda => Language::Cuda,
        };
        let mut config = Config::new(language);
        if vendor == Vendor::Hip && config.library.is_none() {
            config.library = rocmforge_gpu_driver::only_in_rocm(&HIPRTC);
        }
        Self {
            vendor,
            compiler: Compiler::new(config),
            tell_damaged: Once::new(),
        }
    }
}

impl CompiledImages {
    /// An object: one of those that are `embedded`, else out of the cache or by the compiler.
    fn object(
        &self,
        arch: &str,
        unit: &str,
        embedded: impl Fn(&str, &str) -> Option<&'static [u8]>,
    ) -> Result<Vec<u8>, Error> {
        let wrong = |message: String| Error::Config(message);
        let text = units::unit(unit)
            .ok_or_else(|| wrong(format!("there is no kernel unit '{unit}'")))?
            .text();
        let request = Request {
            name: unit,
            source: &text,
            headers: &[],
            target: arch,
            options: &["-std=c++17"],
        };
        let object = self.compiler.object(&request, embedded).map_err(|error| {
            let source = std::error::Error::source(&error).map(|s| format!(": {s}"));
            wrong(format!("{error}{}", source.unwrap_or_default()))
        })?;
        tracing::debug!(unit, origin = ?object.origin, "kernels");
        if let Some(error) = object.cache_error {
            tracing::warn!(%error, "compiled kernels cannot be kept");
        }
        Ok(object.bytes)
    }
}

impl Images for CompiledImages {
    fn image(&self, arch: &str, unit: &str) -> Result<Vec<u8>, Error> {
        self.object(arch, unit, |unit, target| match aot::object(target, unit) {
            Ok(object) => object,
            Err(damaged) => {
                self.tell_damaged
                    .call_once(|| tracing::warn!("{damaged}; kernels are compiled instead"));
                None
            }
        })
    }

    fn source(&self, arch: &str) -> String {
        let unit = units::units().next().map_or("", |unit| unit.name);
        match (self.vendor, aot::object(arch, unit)) {
            (Vendor::Hip, Ok(Some(_))) => format!("inside this program for {arch}"),
            (Vendor::Hip, _) => {
                "compiled at their first use by hiprtc, and kept on disk".to_owned()
            }
            (Vendor::Cuda, _) => {
                "compiled at their first use by nvrtc, and kept on disk".to_owned()
            }
        }
    }

    /// An embedded object is refused by runtimes that are older than its form.
    fn other_image(&self, arch: &str, unit: &str) -> Option<Result<Vec<u8>, Error>> {
        let embedded = matches!(aot::object(arch, unit), Ok(Some(_)));
        embedded.then(|| self.object(arch, unit, |_, _| None))
    }

    fn refuses(&self, arch: &str) -> Option<String> {
        let unknown = self.vendor == Vendor::Hip && !amd_targets::is_known_amd(arch);
        unknown.then(|| {
            let generic = amd_targets::AMD_GENERIC_TARGETS.map(|(_, chips)| chips.join(", "));
            format!(
                "there are no kernels for {arch}; there are for {}, gfx908, gfx90a, gfx1250. Take another card \
                 (--device hip:N; --list-devices lists them) or the CPU (--device host); where {arch} runs the code of \
                 one of these, HSA_OVERRIDE_GFX_VERSION (10.3.0 for gfx1030) in the daemon's environment says so",
                generic.join(", ")
            )
        })
    }
}

/// Where images come from unless configured otherwise: the folder that ROCMFORGE_KERNELS names,
/// else the vendor's compiler.
pub fn usual_images(vendor: Vendor) -> Box<dyn Images> {
    match std::env::var_os("ROCMFORGE_KERNELS").filter(|v| !v.is_empty()) {
        Some(dir) => Box::new(ImageFolder(dir.into())),
        None => Box::new(CompiledImages::new(vendor)),
    }
}

/// A unit's module.
enum Unit {
    /// A thread loads the unit.
    Loading,
    Loaded(Module),
}

/// The kernels of one device.
pub(super) struct Kernels {
    context: Context,
    arch: String,
    images: Arc<dyn Images>,
    ready: Mutex<HashMap<&'static str, Kernel>>,
    units: Mutex<HashMap<&'static str, Unit>>,
    changed: Condvar,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels").field("arch", &self.arch).finish()
    }
}

impl Kernels {
    pub(super) fn new(context: &Context, images: Arc<dyn Images>) -> Self {
        Self {
            context: context.clone(),
            arch: context.attributes().arch.clone(),
            images,
            ready: Mutex::default(),
            units: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Source of the kernel images.
    pub(super) fn images(&self) -> &Arc<dyn Images> {
        &self.images
    }

    /// Makes a launch's kernel ready, so that [`Kernels::launch`] finds it.
    ///
    /// # Errors
    /// What keeps the image from being had or loaded.
    pub(super) fn prepare(&self, launch: &Launch) -> Result<(), Error> {
        self.kernel(launch).map(|_| ())
    }

    fn kernel(&self, launch: &Launch) -> Result<Kernel, Error> {
        if let Some(kernel) = lock(&self.ready).get(launch.kernel) {
            return Ok(kernel.clone());
        }
        let kernel = self
            .module(launch.unit())?
            .kernel(launch.entry())
            .map_err(|e| failed("looking a kernel up", e))?;
        if launch.shared_bytes > self.context.attributes().shared_per_block {
            kernel
                .reserve_shared(launch.shared_bytes)
                .map_err(|e| failed("reserving shared memory", e))?;
        }
        // Two threads may have looked it up; either's will do.
        lock(&self.ready).insert(launch.kernel, kernel.clone());
        Ok(kernel)
    }

    fn module(&self, unit: &'static str) -> Result<Module, Error> {
        let mut units = lock(&self.units);
        loop {
            match units.get(unit) {
                Some(Unit::Loaded(module)) => return Ok(module.clone()),
                Some(Unit::Loading) => {
                    units = self
                        .changed
                        .wait(units)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                None => break,
            }
        }
        units.insert(unit, Unit::Loading);
        drop(units);
        let loaded = self.load(unit);
        let mut units = lock(&self.units);
        match &loaded {
            Ok(module) => units.insert(unit, Unit::Loaded(module.clone())),
            // Whoever waited tries himself, and meets the error himself.
            Err(_) => units.remove(unit),
        };
        self.changed.notify_all();
        loaded
    }

    fn load(&self, unit: &str) -> Result<Module, Error> {
        let begin = Instant::now();
        let image = self.images.image(&self.arch, unit)?;
        let image_us = begin.elapsed().as_micros() as u64;
        let module = Module::load(&self.context, &image).or_else(|refused| {
            // Another image would be refused, too.
            let for_any_image = refused.is_lost() || refused.is_out_of_memory();
            let refused = failed("loading kernels", refused);
            match self.images.other_image(&self.arch, unit) {
                Some(other) if !for_any_image => {
                    tracing::info!(unit, %refused, "embedded kernels; they are compiled for this runtime");
                    Module::load(&self.context, &other?).map_err(|e| failed("loading kernels", e))
                }
                _ => Err(refused),
            }
        })?;
        let load_us = begin.elapsed().as_micros() as u64 - image_us;
        tracing::debug!(unit, image_us, load_us, "kernels loaded");
        Ok(module)
    }

    /// Queues a launch, behind what the stream has.
    ///
    /// # Safety
    /// The addresses in its arguments meet the kernel's contract until the stream has passed it.
    pub(super) unsafe fn launch(&self, launch: &Launch, stream: &Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_after(launch, false, stream) }
    }

    /// Queues a launch; with `overlaps` it may begin while the launch before it runs.
    ///
    /// # Safety
    /// As [`Kernels::launch`]; `overlaps` only as [`Launch::overlaps`] allows.
    pub(super) unsafe fn launch_after(
        &self,
        launch: &Launch,
        overlaps: bool,
        stream: &Stream,
    ) -> Result<(), Error> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let kernel = self.kernel(launch)?;
        let config = LaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            overlaps,
        };
        let words = launch.args.words();
        // SAFETY: the words hold at least `len` initialized bytes, and any byte is a u8.
        let args = unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), launch.args.len()) };
        // SAFETY: the builders make the argument struct that the kernel of this name
        // declares (their tests compare); kernels are kept as long as this; the addresses
        // are the caller's promise.
        unsafe { kernel.launch(config, args, stream) }.map_err(|e| failed(launch.kernel, e))
    }
}

/// Nothing is done under these locks that could leave a half-made state behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use rocmforge_fake_hip::{Fake, unit_image};
    use rocmforge_gpu_driver::{Libraries, open};

    use super::*;

    #[test]
    fn an_architecture_without_kernels_is_refused_by_name_with_what_to_do() {
        let images = CompiledImages::new(Vendor::Hip);
        for arch in ["gfx803", "gfx1310", "gfx9000"] {
            let reason = images.refuses(arch).unwrap();
            assert!(reason.contains(arch), "{reason}");
            assert!(reason.contains("--device host"), "{reason}");
        }
        for arch in ["gfx1100", "gfx1036", "gfx90c", "gfx942"] {
            assert_eq!(images.refuses(arch), None);
        }
        assert_eq!(CompiledImages::new(Vendor::Cuda).refuses("sm_90"), None);
    }

    /// A runtime tells a chip with its features (`gfx90a:sramecc+:xnack-`); objects are kept under
    /// the chip alone, and run with any.
    #[test]
    fn a_chip_with_features_is_given_the_object_of_the_chip() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        for (told, chip, target) in [
            ("gfx90a:sramecc+:xnack-", "gfx90a", "gfx90a"),
            ("gfx942:sramecc+:xnack-", "gfx942", "gfx942"),
            ("gfx906:sramecc-:xnack+", "gfx906", "gfx906"),
            ("gfx90c:xnack-", "gfx90c", "gfx9-generic"),
            ("gfx1100", "gfx1100", "gfx1100"),
        ] {
            fake.announce_arch(told);
            let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
            let arch = context.attributes().arch.clone();
            assert_eq!(arch, chip);
            let images = CompiledImages::new(Vendor::Hip);
            assert_eq!(images.refuses(&arch), None);
            assert_eq!(amd_targets::target_of(&arch), Some(target));
            // As where an object of this chip is embedded, and no other.
            let embedded =
                |unit: &str, of: &str| (unit == "sample" && of == chip).then_some(&b"its own"[..]);
            let object = images.object(&arch, "sample", embedded).unwrap();
            assert_eq!(object, b"its own", "{told}");
            // And of what is embedded here.
            if let Some(object) = aot::object(chip, "sample").unwrap() {
                assert_eq!(images.image(&arch, "sample").unwrap(), object, "{told}");
            }
        }
    }

    #[test]
    fn an_embedded_object_is_taken_before_any_compiler() {
        if aot::targets().next().is_none() {
            println!("skipped: built without ROCMFORGE_AOT_TARGETS, nothing is embedded");
        }
        let images = CompiledImages::new(Vendor::Hip);
        for target in aot::targets() {
            let embedded = aot::object(target, "sample").unwrap().unwrap();
            assert_eq!(images.image(target, "sample").unwrap(), embedded);
        }
        assert!(images.other_image("gfx1250", "sample").is_none());
    }

    /// Gives what the runtime refuses first, as an embedded object to one that is older.
    struct Embedded;

    impl Images for Embedded {
        fn image(&self, _arch: &str, _unit: &str) -> Result<Vec<u8>, Error> {
            Ok(b"an object of another form".to_vec())
        }

        fn other_image(&self, _arch: &str, unit: &str) -> Option<Result<Vec<u8>, Error>> {
            unit_image(unit).map(Ok)
        }
    }

    #[test]
    fn an_embedded_object_that_the_runtime_refuses_is_compiled_anew() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
        let kernels = Kernels::new(&context, Arc::new(Embedded));
        kernels.module("sample").unwrap();
        assert_eq!(fake.live().modules, 1);
        assert_eq!(fake.calls("hipModuleLoadData"), 2);
        drop(kernels);
        assert_eq!(fake.live().modules, 0);
    }
}

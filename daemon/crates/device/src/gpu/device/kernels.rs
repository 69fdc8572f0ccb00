//! Compiled kernels: a unit's image is loaded when its first kernel is asked for, and kept.
//!
//! Threads: the engine thread and the staging threads ask; one lock, held while a module is loaded.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use rocmforge_kernels::gpu::compile::{Compiler, Config, Language, Request};
use rocmforge_kernels::gpu::{Launch, aot, units};

use crate::error::Error;
use crate::gpu::{Context, Kernel, LaunchConfig, Module, Stream, Vendor};

use super::failed;

/// Where images come from: compiled ahead of time, out of a cache, or compiled now.
pub trait Images: Send + Sync {
    /// The code object of a unit for an architecture (`gfx1100`, `sm_90`).
    ///
    /// # Errors
    /// What keeps it from being had, with what to do about it.
    fn image(&self, arch: &str, unit: &str) -> Result<Vec<u8>, Error>;
}

/// Images in a folder: `<dir>/<arch>/<unit>`, with any of the vendors' endings.
#[derive(Debug, Clone)]
pub struct ImageFolder(pub std::path::PathBuf);

impl Images for ImageFolder {
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
}

/// Images by the vendor's run-time compiler in a child process, kept on disk.
#[derive(Debug)]
pub struct CompiledImages(Compiler);

impl CompiledImages {
    /// The compiler of a vendor, set up as usual.
    pub fn new(vendor: Vendor) -> Self {
        let language = match vendor {
            Vendor::Hip => Language::Hip,
            Vendor::Cuda => Language::Cuda,
        };
        Self(Compiler::new(Config::new(language)))
    }
}

impl Images for CompiledImages {
    fn image(&self, arch: &str, unit: &str) -> Result<Vec<u8>, Error> {
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
        let begin = std::time::Instant::now();
        let object = self
            .0
            .object(&request, |unit, target| aot::object(target, unit))
            .map_err(|error| {
                let source = std::error::Error::source(&error).map(|s| format!(": {s}"));
                wrong(format!("{error}{}", source.unwrap_or_default()))
            })?;
        tracing::debug!(unit, origin = ?object.origin, ms = begin.elapsed().as_millis(), "kernels");
        if let Some(error) = object.cache_error {
            tracing::warn!(%error, "compiled kernels cannot be kept");
        }
        Ok(object.bytes)
    }
}

/// Where images come from unless told otherwise: the folder that ROCMFORGE_KERNELS names, else the vendor's compiler.
pub fn usual_images(vendor: Vendor) -> Box<dyn Images> {
    match std::env::var_os("ROCMFORGE_KERNELS").filter(|v| !v.is_empty()) {
        Some(dir) => Box::new(ImageFolder(dir.into())),
        None => Box::new(CompiledImages::new(vendor)),
    }
}

/// The kernels of one device.
pub(super) struct Kernels {
    context: Context,
    arch: String,
    images: Box<dyn Images>,
    loaded: Mutex<HashMap<&'static str, Kernel>>,
    modules: Mutex<HashMap<&'static str, Module>>,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels").field("arch", &self.arch).finish()
    }
}

impl Kernels {
    pub(super) fn new(context: &Context, images: Box<dyn Images>) -> Self {
        Self {
            context: context.clone(),
            arch: context.attributes().arch.clone(),
            images,
            loaded: Mutex::default(),
            modules: Mutex::default(),
        }
    }

    fn kernel(&self, launch: &Launch) -> Result<Kernel, Error> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.get(launch.kernel) {
            return Ok(kernel.clone());
        }
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let unit = launch.unit();
        if !modules.contains_key(unit) {
            let image = self.images.image(&self.arch, unit)?;
            let module =
                Module::load(&self.context, &image).map_err(|e| failed("loading kernels", e))?;
            modules.insert(unit, module);
        }
        let kernel = modules[unit]
            .kernel(launch.entry())
            .map_err(|e| failed("looking a kernel up", e))?;
        if launch.shared_bytes > self.context.attributes().shared_per_block {
            kernel
                .reserve_shared(launch.shared_bytes)
                .map_err(|e| failed("reserving shared memory", e))?;
        }
        loaded.insert(launch.kernel, kernel.clone());
        Ok(kernel)
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
        // SAFETY: the builders make the argument struct that the kernel of this name declares (their tests compare);
        // kernels are kept as long as this; the addresses are the caller's promise.
        unsafe { kernel.launch(config, args, stream) }.map_err(|e| failed(launch.kernel, e))
    }
}

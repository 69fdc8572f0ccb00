//! From a kernel's source to a code object: embedded, cached, or compiled here and now.
//!
//! ```text
//! Request -> embedded for (name, target)?  -> Origin::Embedded
//!         -> in the disk cache (cache.rs)? -> Origin::Cached
//!         -> hiprtc or nvrtc in a child process (child.rs, rtc.rs) -> into the cache
//!         -> Origin::Compiled
//! ```
//!
//! The vendors' run-time compilers abort the process on some inputs, so they are only ever loaded
//! into a child: this binary run again with [`CHILD_ARGUMENT`], which `main` hands to
//! [`rtc_child_main`] before anything else.
//!
//! *Invariant:* no vendor library is loaded into the calling process ([`rtc_child_main`] alone
//! calls `rtc`). *Threads:* a [`Compiler`] is shared freely; each compilation is a process of its
//! own, so several run side by side.

mod cache;
mod child;
mod rtc;
mod wire;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

pub use cache::{Cache, default_cache_dir};
pub use child::rtc_child_main;

/// The hidden argument that makes this binary a compiler's child.
pub const CHILD_ARGUMENT: &str = "--rtc-child";

/// Bytes that a code object, or a request, may have.
pub const OBJECT_BYTES_MAX: usize = 64 << 20;

/// Which run-time compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Language {
    /// hiprtc: AMD code objects.
    Hip,
    /// nvrtc: NVIDIA cubins.
    Cuda,
}

impl Language {
    /// The compiler's name.
    pub fn compiler(self) -> &'static str {
        match self {
            Language::Hip => "hiprtc",
            Language::Cuda => "nvrtc",
        }
    }

    /// Names of its library, in the order in which they are tried. Up to 6.x hiprtc's
    /// functions are in the runtime too.
    pub fn libraries(self) -> &'static [&'static str] {
        match self {
            Language::Hip => &[
                "libhiprtc.so.7",
                "libhiprtc.so.6",
                "libamdhip64.so.6",
                "libamdhip64.so.5",
                "libhiprtc.so",
                "libamdhip64.so",
            ],
            Language::Cuda => &[
                "libnvrtc.so.13",
                "libnvrtc.so.12",
                "libnvrtc.so",
                "/usr/local/cuda/lib64/libnvrtc.so",
            ],
        }
    }
}

/// What is to be compiled, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// The unit's name, for messages and for the embedded table.
    pub name: &'a str,
    /// Source text of the unit.
    pub source: &'a str,
    /// Headers that it includes by name, with their text.
    pub headers: &'a [(&'a str, &'a str)],
    /// `gfx1100`, `gfx90a:sramecc+:xnack-`, `sm_90`.
    pub target: &'a str,
    /// Options beside the target.
    pub options: &'a [&'a str],
}

/// Where an object came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Compiled ahead of time, part of this binary.
    Embedded,
    /// From the disk.
    Cached,
    /// By the run-time compiler, just now.
    Compiled,
}

/// A code object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// What a driver loads.
    pub bytes: Vec<u8>,
    /// Origin of the object.
    pub origin: Origin,
    /// Why it could not be kept on disk, if it could not: worth a warning, not a failure.
    pub cache_error: Option<String>,
}

/// Why there is no code object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The child could not be run.
    #[error("{compiler}: running {} {CHILD_ARGUMENT}", exe.display())]
    Spawn {
        /// hiprtc or nvrtc.
        compiler: &'static str,
        /// This binary.
        exe: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The source does not compile, or the compiler's library is missing; the child says which.
    #[error("{compiler} on '{name}' for {target}: {message}")]
    Refused {
        /// hiprtc or nvrtc.
        compiler: &'static str,
        /// The unit.
        name: String,
        /// The target.
        target: String,
        /// The compiler's log or the loader's words.
        message: String,
    },
    /// The compiler took its process down.
    #[error("{compiler} crashed on '{name}' for {target} ({status}): {stderr}")]
    Crashed {
        /// hiprtc or nvrtc.
        compiler: &'static str,
        /// The unit.
        name: String,
        /// The target.
        target: String,
        /// The exit status of the child.
        status: String,
        /// The end of what it wrote.
        stderr: String,
    },
    /// The compiler did not end.
    #[error("{compiler} on '{name}' for {target} was stopped after {} s", limit.as_secs())]
    TimedOut {
        /// hiprtc or nvrtc.
        compiler: &'static str,
        /// The unit.
        name: String,
        /// The target.
        target: String,
        /// The time limit that was exceeded.
        limit: Duration,
    },
}

/// How a [`Compiler`] is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which compiler.
    pub language: Language,
    /// Run-time compiler's library in place of the usual names (environment ROCMFORGE_RTC_LIBRARY).
    pub library: Option<PathBuf>,
    /// The binary that understands [`CHILD_ARGUMENT`] (environment ROCMFORGE_RTC_EXE: a test's
    /// binary, which does not, may be carried to a machine with a card); `None` is the running one.
    pub exe: Option<PathBuf>,
    /// Time limit of one compilation.
    pub limit: Duration,
    /// Where objects are kept; `None` keeps none.
    pub cache: Option<Cache>,
}

impl Config {
    /// The usual: the running binary, five minutes (a large unit takes some seconds of a processor
    /// that many others may want), the default cache, and the library from the environment if one
    /// is set.
    pub fn new(language: Language) -> Config {
        Config {
            language,
            library: std::env::var_os("ROCMFORGE_RTC_LIBRARY")
                .filter(|value| !value.is_empty())
                .map(PathBuf::from),
            exe: std::env::var_os("ROCMFORGE_RTC_EXE")
                .filter(|value| !value.is_empty())
                .map(PathBuf::from),
            limit: Duration::from_secs(300),
            cache: Some(Cache::new(default_cache_dir())),
        }
    }
}

/// Gives out code objects.
#[derive(Debug)]
pub struct Compiler {
    config: Config,
    /// The compiler's version, asked once.
    version: Mutex<Option<String>>,
}

impl Compiler {
    /// A compiler; nothing is run or read yet.
    pub fn new(config: Config) -> Compiler {
        Compiler {
            config,
            version: Mutex::new(None),
        }
    }

    /// The code object for a request. `embedded` looks in the binary's own
    /// table by unit name and target.
    ///
    /// # Errors
    /// [`Error`]. A cache that cannot be read or written is no error.
    pub fn object(
        &self,
        request: &Request<'_>,
        embedded: impl Fn(&str, &str) -> Option<&'static [u8]>,
    ) -> Result<Object, Error> {
        if let Some(bytes) = embedded(request.name, request.target) {
            return Ok(Object {
                bytes: bytes.to_vec(),
                origin: Origin::Embedded,
                cache_error: None,
            });
        }
        let Some(cache) = &self.config.cache else {
            return Ok(Object {
                bytes: child::compile(&self.config, request)?,
                origin: Origin::Compiled,
                cache_error: None,
            });
        };
        let key = cache::key(self.config.language, &self.version(request)?, request);
        if let Some(bytes) = cache.get(&key) {
            return Ok(Object {
                bytes,
                origin: Origin::Cached,
                cache_error: None,
            });
        }
        let bytes = child::compile(&self.config, request)?;
        let cache_error = cache.put(&key, &bytes).err().map(|error| {
            format!(
                "keeping '{}' in {}: {error}",
                request.name,
                cache.dir().display()
            )
        });
        Ok(Object {
            bytes,
            origin: Origin::Compiled,
            cache_error,
        })
    }

    /// The compiler's version with its library's name, part of every key.
    fn version(&self, request: &Request<'_>) -> Result<String, Error> {
        let mut version = self.version.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(version) = &*version {
            return Ok(version.clone());
        }
        let text = child::version(&self.config, request)?;
        *version = Some(text.clone());
        Ok(text)
    }
}

//! Opening a vendor's library and resolving its functions.
//!
//! A library once opened stays: GPU runtimes start threads and register exit handlers, and do
//! not survive being closed.

use std::fs;
use std::io::{BufRead, BufReader};
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::driver::{Attempt, Error, Result};

/// A vendor's library, opened for the rest of the process.
pub(super) struct Library {
    library: ManuallyDrop<libloading::Library>,
    name: String,
}

impl Library {
    /// Opens the first of `names` that the loader finds.
    pub(super) fn open(vendor: &'static str, names: &[String], hint: &'static str) -> Result<Self> {
        let mut tried = Vec::with_capacity(names.len());
        for name in names {
            // SAFETY: runs the library's initializers. The names are the vendors' own or one that
            // the operator set, and a GPU runtime's initializers are made to be run from any thread
            // of a program that does not link it.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => {
                    return Ok(Library {
                        library: ManuallyDrop::new(library),
                        name: name.clone(),
                    });
                }
                Err(error) => tried.push(Attempt {
                    library: name.clone(),
                    message: without_name(&loader_message(&error), name),
                }),
            }
        }
        Err(Error::Library {
            vendor,
            tried,
            hint,
        })
    }

    /// The name that the loader found.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// A function of the library; `None` if it has no such symbol.
    ///
    /// # Safety
    /// `F` is a function pointer of the type that the vendor documents for `symbol`.
    pub(super) unsafe fn function<F: Copy>(&self, symbol: &str) -> Option<F> {
        // SAFETY: the type is the caller's promise; the library is never closed, so the
        // copied pointer stays good.
        unsafe { self.library.get::<F>(symbol) }.ok().map(|f| *f)
    }
}

/// The loader's message without the library's name, with which it usually begins and which is shown
/// beside it.
fn without_name(message: &str, name: &str) -> String {
    let rest = message.strip_prefix(name);
    let rest = rest.and_then(|rest| rest.strip_prefix(": "));
    rest.unwrap_or(message).to_owned()
}

/// The file that the loader took for a name.
pub fn file_of(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return fs::canonicalize(name).ok();
    }
    let stem = &name[..name.find(".so")? + 3];
    let maps = BufReader::new(fs::File::open("/proc/self/maps").ok()?);
    maps.lines().map_while(Result::ok).find_map(|line| {
        let path = Path::new(&line[line.find('/')?..]);
        let file = path.file_name()?.to_str()?;
        file.starts_with(stem).then(|| path.to_owned())
    })
}

/// What changes when a file is replaced.
pub(super) fn identity(file: &Path) -> Option<String> {
    let found = fs::metadata(file).ok()?;
    let (file, bytes, changed) = (file.display(), found.len(), found.mtime());
    Some(format!("{file} {bytes} {changed}"))
}

/// The loader's own message, which libloading keeps in the source of its error.
fn loader_message(error: &libloading::Error) -> String {
    let message = match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    message.trim().to_owned()
}

/// Declares a vendor's functions as a struct of function pointers, for the module above. A required
/// one that is missing fails the load, with the names of all that are missing; an optional one is
/// an `Option` whose user names it.
macro_rules! table {
    (
        $(#[$meta:meta])*
        struct $table:ident {
            required { $($r:ident($($r_arg:ty),* $(,)?) -> $r_ret:ty;)* }
            optional { $($o:ident($($o_arg:ty),* $(,)?) -> $o_ret:ty;)* }
        }
    ) => {
        $(#[$meta])*
        #[expect(non_snake_case, reason = "the vendor's names")]
        pub(super) struct $table {
            $(pub(super) $r: unsafe extern "C" fn($($r_arg),*) -> $r_ret,)*
            $(pub(super) $o: Option<unsafe extern "C" fn($($o_arg),*) -> $o_ret>,)*
        }

        impl $table {
            #[expect(non_snake_case, reason = "the vendor's names")]
            pub(super) fn load(library: &$crate::library::Library) -> $crate::driver::Result<Self> {
                let mut missing: Vec<&'static str> = Vec::new();
                $(
                    // SAFETY: the type in the table is the one that the vendor's
                    // header declares for this name.
                    let $r = unsafe { library.function(stringify!($r)) };
                    if $r.is_none() {
                        missing.push(stringify!($r));
                    }
                )*
                $(
                    // SAFETY: as above.
                    let $o = unsafe { library.function(stringify!($o)) };
                )*
                if let ($(Some($r),)*) = ($($r,)*) {
                    return Ok($table { $($r,)* $($o,)* });
                }
                Err($crate::driver::Error::Symbols {
                    library: library.name().to_owned(),
                    symbols: missing,
                })
            }
        }
    };
}
pub(super) use table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_behind_a_name_is_found() {
        let file = file_of("libc.so.6").expect("this process has the C library");
        assert!(file.starts_with("/"), "{file:?}");
        assert_eq!(file_of(&file.to_string_lossy()), file.canonicalize().ok());
        assert_eq!(file_of("libnobody-has-this.so.1"), None);
    }
}

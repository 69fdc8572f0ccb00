//! Compiles units by clang, without anything of ROCm, as many at a time as there are jobs.
//!
//! A clang is tried before it is taken: it has to make an object for a generic target, which needs
//! lld and a compiler that is new enough.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::amd_targets::{CLANG_OPTIONS, object_version};

/// Taken in this order, after the one that `ROCMFORGE_CLANG` names and before ROCm's.
const NAMES: [&str; 3] = ["clang-24", "clang-23", "clang-22"];
/// What a clang that is taken compiles, and for which target.
const TRIAL: (&str, &str) = (
    "extern \"C\" __attribute__((global)) void trial() {}\n",
    "gfx12-generic",
);

/// A source file that is compiled in one run, with its name.
pub(crate) struct Unit {
    pub(crate) name: &'static str,
    /// The complete source: no include and no external definition.
    pub(crate) text: String,
}

/// A clang that can compile for AMD targets.
pub(crate) struct Clang {
    program: String,
    version: String,
}

impl Clang {
    /// The first that compiles the trial. `scratch` is a folder to do so in.
    ///
    /// # Errors
    /// None does; says what became of each, and what to install.
    pub(crate) fn find(scratch: &Path) -> Result<Self, String> {
        let rocm = env::var("ROCM_PATH").unwrap_or_else(|_| "/opt/rocm".to_owned());
        let candidates = match env::var("ROCMFORGE_CLANG") {
            Ok(named) if !named.is_empty() => vec![named],
            _ => NAMES
                .map(str::to_owned)
                .into_iter()
                .chain([format!("{rocm}/llvm/bin/clang")])
                .collect(),
        };
        let mut tried = Vec::new();
        for program in candidates {
            let said = Command::new(&program).arg("--version").output();
            let version = match said {
                Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
                Err(error) => {
                    tried.push(format!("{program}: {error}"));
                    continue;
                }
            };
            let clang = Self { program, version };
            match clang.compile(TRIAL.0, TRIAL.1, &scratch.join("trial")) {
                Ok(()) => return Ok(clang),
                Err(error) => tried.push(format!(
                    "{}: {}",
                    clang.program,
                    error.trim().replace('\n', "; ")
                )),
            }
        }
        Err(format!(
            "no clang that can (clang 22 or newer with lld: install clang-22 and lld-22; or ROCm's, by ROCM_PATH; \
             ROCMFORGE_CLANG names another). Tried {}",
            tried.join(", ")
        ))
    }

    /// Compiles every unit for every target, those that `kept` does not have yet, on `threads`
    /// threads. Returns where the objects are, by unit and target.
    ///
    /// # Errors
    /// The first unit that does not compile, with its target and clang's words. No other is begun
    /// then.
    pub(crate) fn compile_all<'a>(
        &self,
        units: &'a [Unit],
        targets: &[&'a str],
        kept: &Path,
        threads: usize,
    ) -> Result<HashMap<(&'a str, &'a str), PathBuf>, String> {
        let jobs: Vec<(&Unit, &str, PathBuf)> = units
            .iter()
            .flat_map(|unit| targets.iter().map(move |&target| (unit, target)))
            .map(|(unit, target)| (unit, target, kept.join(self.file_name(unit, target))))
            .collect();
        let (next, failure) = (AtomicUsize::new(0), OnceLock::new());
        let work = || {
            while failure.get().is_none()
                && let Some((unit, target, object)) = jobs.get(next.fetch_add(1, Ordering::Relaxed))
            {
                if object.exists() {
                    continue;
                }
                if let Err(error) = self.compile(&unit.text, target, object) {
                    // Another thread's may have come first.
                    let _ = failure.set(format!("{} for {target}:\n{error}", unit.name));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads.max(1) {
                scope.spawn(work);
            }
        });
        match failure.into_inner() {
            Some(message) => Err(message),
            None => Ok(jobs
                .into_iter()
                .map(|(unit, target, object)| ((unit.name, target), object))
                .collect()),
        }
    }

    fn file_name(&self, unit: &Unit, target: &str) -> String {
        let mut hash = DefaultHasher::new();
        (
            &self.version,
            &unit.text,
            CLANG_OPTIONS,
            object_version(target),
        )
            .hash(&mut hash);
        format!("{}-{target}-{:016x}.hsaco", unit.name, hash.finish())
    }

    /// Compiles under another name first, so that an interrupted build leaves no half of an object.
    fn compile(&self, text: &str, target: &str, object: &Path) -> Result<(), String> {
        let part = object.with_extension(format!("{}.part", std::process::id()));
        let done = self.compile_to(text, target, &part).and_then(|()| {
            fs::rename(&part, object).map_err(|e| format!("{}: {e}", object.display()))
        });
        if done.is_err() {
            // It may never have been made.
            let _ = fs::remove_file(&part);
        }
        done
    }

    /// The text goes in by a pipe: the name of a file would become a part of the object.
    fn compile_to(&self, text: &str, target: &str, object: &Path) -> Result<(), String> {
        let failed = |e: std::io::Error| format!("{}: {e}", self.program);
        let mut child = Command::new(&self.program)
            .args(CLANG_OPTIONS)
            .arg(format!("--offload-arch={target}"))
            .arg(object_version(target))
            .arg("-o")
            .arg(object)
            .arg("-")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        // One that reads nothing says why by its end.
        let written = child
            .stdin
            .take()
            .map(|mut pipe| pipe.write_all(text.as_bytes()));
        let output = child.wait_with_output().map_err(failed)?;
        match (output.status.success(), written) {
            (true, Some(Err(error))) => Err(failed(error)),
            (true, _) => Ok(()),
            _ => Err(format!(
                "{}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            )),
        }
    }
}

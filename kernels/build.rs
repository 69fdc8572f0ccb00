//! Compiles the GPU units ahead of time for AMD targets when `ROCMFORGE_AOT=1`, and otherwise does nothing.
//!
//! Package builds set it; the everyday build stays quick, and the daemon compiles a unit when it first needs it. Needs clang 22 or
//! newer with lld, or ROCm's (`ROCM_PATH`); `ROCMFORGE_CLANG` names another. Without any, the build goes on without objects and
//! says so once. `ROCMFORGE_AOT_TARGETS` (comma-separated) compiles for fewer targets. Objects are kept in `OUT_DIR` by a hash of
//! sources, definitions, options and compiler version, so a rebuild compiles what changed.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// As `gpu::units::AMD_TARGETS` and `AMD_GENERIC_TARGETS`.
const TARGETS: &str = "gfx906,gfx908,gfx90a,gfx942,gfx950,gfx1030,gfx1100,gfx1101,gfx1151,gfx1200,gfx1201,gfx9-generic,gfx9-4-generic,gfx10-1-generic,gfx10-3-generic,gfx11-generic,gfx12-generic";

/// As `gpu::units::CLANG_OPTIONS`.
const OPTIONS: [&str; 8] = [
    "-x",
    "hip",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-nogpuinc",
    "-nogpulib",
    "-std=c++17",
    "-O3",
];

struct Job {
    unit: String,
    target: String,
    args: Vec<String>,
    object: PathBuf,
}

fn main() {
    for variable in [
        "ROCMFORGE_AOT",
        "ROCMFORGE_AOT_TARGETS",
        "ROCMFORGE_CLANG",
        "ROCM_PATH",
    ] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=hip");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut objects = Vec::new();
    if env::var("ROCMFORGE_AOT").is_ok_and(|v| v == "1") {
        match find_clang() {
            Some((clang, version)) => objects = compile_all(&clang, &version, &out),
            None => println!(
                "cargo::warning=no clang 22 or newer: GPU kernels are not compiled ahead of time (install clang-22 and lld-22, or set ROCM_PATH)"
            ),
        }
    }
    let mut list = String::from("&[\n");
    for job in &objects {
        let _ = writeln!(
            list,
            "    ({:?}, {:?}, include_bytes!({:?})),",
            job.target, job.unit, job.object
        );
    }
    list.push(']');
    fs::write(out.join("aot.rs"), list).expect("OUT_DIR can be written");
}

/// A clang that is new enough, with its version line.
fn find_clang() -> Option<(String, String)> {
    let mut candidates: Vec<String> = env::var("ROCMFORGE_CLANG").into_iter().collect();
    candidates.extend(["clang-24", "clang-23", "clang-22"].map(str::to_owned));
    let rocm = env::var("ROCM_PATH").unwrap_or_else(|_| "/opt/rocm".to_owned());
    candidates.push(format!("{rocm}/llvm/bin/clang"));
    candidates.into_iter().find_map(|clang| {
        let output = Command::new(&clang).arg("--version").output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()?
            .to_owned();
        output.status.success().then_some((clang, version))
    })
}

fn compile_all(clang: &str, version: &str, out: &Path) -> Vec<Job> {
    let hip = Path::new("hip");
    let mut sources: Vec<PathBuf> = fs::read_dir(hip)
        .expect("kernels/hip is part of the crate")
        .flatten()
        .map(|entry| entry.path())
        .collect();
    sources.sort();
    let mut all = DefaultHasher::new();
    version.hash(&mut all);
    for path in &sources {
        fs::read(path).expect("a readable source").hash(&mut all);
    }
    let sources_hash = all.finish();

    let targets = env::var("ROCMFORGE_AOT_TARGETS").unwrap_or_else(|_| TARGETS.to_owned());
    let units = fs::read_to_string(hip.join("units.txt")).expect("units.txt");
    let mut jobs = Vec::new();
    for line in units
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
    {
        let mut words = line.split_whitespace();
        let (Some(unit), Some(source)) = (words.next(), words.next()) else {
            panic!("units.txt: {line}");
        };
        let definitions: Vec<String> = words.map(|d| format!("-D{d}")).collect();
        for target in targets.split(',').map(str::trim).filter(|t| !t.is_empty()) {
            let mut args: Vec<String> = OPTIONS.iter().map(|&o| o.to_owned()).collect();
            args.push(format!("--offload-arch={target}"));
            // As `gpu::units::object_version`.
            let version = if target.ends_with("-generic") { 6 } else { 5 };
            args.push(format!("-mcode-object-version={version}"));
            args.extend(definitions.iter().cloned());
            args.push(hip.join(source).display().to_string());
            let mut hash = DefaultHasher::new();
            (sources_hash, &args).hash(&mut hash);
            jobs.push(Job {
                unit: unit.to_owned(),
                target: target.to_owned(),
                args,
                object: out.join(format!("{unit}-{target}-{:016x}.hsaco", hash.finish())),
            });
        }
    }
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok());
    std::thread::scope(|scope| {
        for _ in 0..threads.unwrap_or(1usize).max(1) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(message) = compile(clang, job) {
                        failures
                            .lock()
                            .expect("no thread panics here")
                            .push(message);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics here");
    assert!(
        failures.is_empty(),
        "GPU kernels do not compile:\n{}",
        failures.join("\n")
    );
    jobs
}

/// Compiles into a temporary name first, so that an interrupted build leaves no half of an object.
fn compile(clang: &str, job: &Job) -> Result<(), String> {
    if job.object.exists() {
        return Ok(());
    }
    let part = job.object.with_extension("part");
    let output = Command::new(clang)
        .args(&job.args)
        .arg("-o")
        .arg(&part)
        .output()
        .map_err(|e| format!("{clang}: {e}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{} for {}:\n{errors}", job.unit, job.target));
    }
    fs::rename(&part, &job.object).map_err(|e| format!("{}: {e}", job.object.display()))
}

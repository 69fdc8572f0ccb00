//! Compiles the GPU units ahead of time for AMD targets where `ROCMFORGE_AOT_TARGETS` names some,
//! and otherwise does nothing.
//!
//! Targets are separated by commas; `package` stands for what a package has inside, `all` for every
//! one. Packages set it; the everyday build stays quick, and the daemon compiles a unit when it
//! first needs it. Needs xz and a clang that can do it (`clang.rs`). Whoever asked for kernels and
//! cannot have them gets an error, not a daemon without. Objects are kept in `OUT_DIR`, or in the
//! folder that `ROCMFORGE_AOT_CACHE` names, by a hash of text, options and compiler, so a rebuild
//! compiles what changed.

#[path = "src/gpu/amd_targets.rs"]
#[expect(dead_code, unreachable_pub, reason = "a module of the crate, too")]
mod amd_targets;
#[path = "build/archive.rs"]
mod archive;
#[path = "build/clang.rs"]
mod clang;
#[path = "src/gpu/units.rs"]
#[expect(dead_code, unreachable_pub, reason = "a module of the crate, too")]
mod units;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use amd_targets::{AMD_GENERIC_TARGETS, AMD_PACKAGE_TARGETS, AMD_TARGETS};
use clang::{Clang, Unit};

const TARGETS: &str = "ROCMFORGE_AOT_TARGETS";
const CACHE: &str = "ROCMFORGE_AOT_CACHE";

fn main() -> ExitCode {
    for variable in [TARGETS, CACHE, "ROCMFORGE_CLANG", "ROCM_PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    for path in ["build.rs", "build", "hip"] {
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-changed=src/gpu/amd_targets.rs");
    println!("cargo::rerun-if-changed=src/gpu/units.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let asked = env::var(TARGETS).unwrap_or_default();
    let table = targets(&asked).and_then(|targets| table(&targets, &out));
    match table {
        Ok(table) => {
            fs::write(out.join("aot.rs"), table).expect("OUT_DIR can be written");
            ExitCode::SUCCESS
        }
        Err(message) => {
            println!(
                "cargo::error=GPU kernels are not compiled ahead of time ({TARGETS}={asked}): {message}"
            );
            ExitCode::FAILURE
        }
    }
}

/// The targets that are asked for, by the target of their archive.
fn targets(asked: &str) -> Result<BTreeMap<String, Vec<String>>, String> {
    let generic = AMD_GENERIC_TARGETS.map(|(target, _)| target);
    let all: Vec<&str> = AMD_TARGETS.into_iter().chain(generic).collect();
    let mut families: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for word in asked.split(',').map(str::trim).filter(|w| !w.is_empty()) {
        let targets = match word {
            "all" => all.clone(),
            "package" => AMD_PACKAGE_TARGETS.to_vec(),
            target if all.contains(&target) => vec![target],
            other => {
                return Err(format!(
                    "there is no target '{other}'; there are package, all, {}",
                    all.join(", ")
                ));
            }
        };
        for target in targets {
            let family = families
                .entry(amd_targets::family(target).to_owned())
                .or_default();
            if !family.iter().any(|t| t == target) {
                family.push(target.to_owned());
            }
        }
    }
    Ok(families)
}

/// The text of `aot.rs`'s table: an entry an archive.
fn table(families: &BTreeMap<String, Vec<String>>, out: &Path) -> Result<String, String> {
    let mut table = String::from("&[\n");
    if !families.is_empty() {
        let clang = Clang::find(out)?;
        let kept = env::var_os(CACHE).map_or_else(|| out.to_owned(), PathBuf::from);
        fs::create_dir_all(&kept).map_err(|e| format!("{}: {e}", kept.display()))?;
        let units: Vec<Unit> = units::units()
            .map(|u| Unit {
                name: u.name,
                text: u.text(),
            })
            .collect();
        let targets: Vec<&str> = families.values().flatten().map(String::as_str).collect();
        let threads = env::var("NUM_JOBS")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(1);
        let objects = clang.compile_all(&units, &targets, &kept, threads)?;
        for (family, targets) in families {
            // An archive goes unit by unit, so that what is alike is close together.
            let of_family = units.iter().flat_map(|unit| {
                targets
                    .iter()
                    .map(|target| objects[&(unit.name, target.as_str())].as_path())
            });
            let archive = archive::pack(of_family, &out.join(format!("{family}.objects")))?;
            let _ = writeln!(
                table,
                "    Archive {{ targets: &{targets:?}, lengths: &{:?}, packed: include_bytes!({:?}) }},",
                archive.lengths, archive.path
            );
        }
    }
    table.push(']');
    Ok(table)
}

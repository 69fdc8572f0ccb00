//! Compiles the GPU units ahead of time for AMD targets: those that `ROCMFORGE_AOT_TARGETS` names,
//! or, where it is not set, in a release build those of the cards of this machine.
//!
//! Targets are separated by commas; `package` stands for what a package has inside, `all` for every
//! one, nothing for none. Needs xz and a clang that can do it (`clang.rs`). Whoever asked for
//! kernels and cannot have them gets an error, not a daemon without. A build that only found a card
//! warns: its daemon compiles a unit when it first needs it, as one without a card does. Objects
//! are kept in `OUT_DIR`, or in the folder that `ROCMFORGE_AOT_CACHE` names, by a hash of text,
//! options and compiler, so a rebuild compiles what changed.

#[path = "src/amd_targets.rs"]
#[expect(dead_code, unreachable_pub, reason = "a module of the crate, too")]
mod amd_targets;
#[path = "build/archive.rs"]
mod archive;
#[path = "build/clang.rs"]
mod clang;
#[path = "src/units.rs"]
#[expect(dead_code, unreachable_pub, reason = "a module of the crate, too")]
mod units;

use std::collections::{BTreeMap, BTreeSet};
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
    println!("cargo::rerun-if-changed=src/amd_targets.rs");
    println!("cargo::rerun-if-changed=src/units.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let named = env::var(TARGETS).ok();
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let asked = match &named {
        Some(named) => named.clone(),
        None if is_release => targets_of_cards().join(","),
        None => String::new(),
    };
    let told = match targets(&asked).and_then(|targets| table(&targets, &out)) {
        Ok(table) => {
            fs::write(out.join("aot.rs"), table).expect("OUT_DIR can be written");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            format!("GPU kernels for {asked} are not compiled ahead of time: {message}")
        }
    };
    if named.is_some() {
        println!("cargo::error={told} ({TARGETS} names them)");
        return ExitCode::FAILURE;
    }
    println!(
        "cargo::warning={told}; this machine has such a card: the daemon compiles them when it needs them ({TARGETS}= \
         asks for none)"
    );
    fs::write(out.join("aot.rs"), "&[]").expect("OUT_DIR can be written");
    ExitCode::SUCCESS
}

/// The targets of the cards that the compute driver of this machine lists.
fn targets_of_cards() -> Vec<&'static str> {
    let nodes = fs::read_dir("/sys/class/kfd/kfd/topology/nodes");
    let nodes = nodes.into_iter().flatten().filter_map(Result::ok);
    let text = |node: fs::DirEntry| fs::read_to_string(node.path().join("properties")).ok();
    let chips = nodes.filter_map(text);
    let chips = chips.filter_map(|text| amd_targets::chip_of_node(&text));
    let targets: BTreeSet<_> = chips.filter_map(|c| amd_targets::target_of(&c)).collect();
    targets.into_iter().collect()
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

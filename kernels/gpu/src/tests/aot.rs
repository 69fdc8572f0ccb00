//! Embedded kernels: what the build script's own parts make of units is what is unpacked, and what
//! this build has inside is whole.

#[path = "../../build/archive.rs"]
mod archive;
#[path = "../../build/clang.rs"]
mod clang;

use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
// clang.rs takes it from the module above, which is build.rs's root there.
use crate::amd_targets;
use crate::units::Unit;

/// The number of a target in an ELF's flags, EF_AMDGPU_MACH of LLVM's AMDGPUUsage.
fn machine(target: &str) -> u32 {
    match target {
        "gfx906" => 0x2f,
        "gfx908" => 0x30,
        "gfx1030" => 0x36,
        "gfx90a" => 0x3f,
        "gfx1100" => 0x41,
        "gfx1101" => 0x46,
        "gfx1200" => 0x48,
        "gfx1151" => 0x4a,
        "gfx942" => 0x4c,
        "gfx1201" => 0x4e,
        "gfx950" => 0x4f,
        "gfx9-generic" => 0x51,
        "gfx10-1-generic" => 0x52,
        "gfx10-3-generic" => 0x53,
        "gfx11-generic" => 0x54,
        "gfx12-generic" => 0x59,
        "gfx9-4-generic" => 0x5f,
        other => panic!("{other} has no number here"),
    }
}

/// Sees that an object is an ELF for a target, with kernels of its unit. Not every one: some are
/// for other vendors' matrix instructions.
#[track_caller]
fn check(object: &[u8], unit: Unit, target: &str) {
    let what = format!("{} for {target}", unit.name);
    assert!(object.starts_with(b"\x7fELF\x02\x01"), "{what}");
    assert_eq!(object[18..20], 224u16.to_le_bytes(), "EM_AMDGPU: {what}");
    assert_eq!(u32::from(object[48]), machine(target), "{what}");
    let has_kernel = |entry: &String| {
        let symbol = format!("\0{entry}.kd\0");
        object.windows(symbol.len()).any(|w| w == symbol.as_bytes())
    };
    let entries = crate::tests::entries(&unit.text());
    assert!(entries.iter().any(has_kernel), "{what}");
}

#[test]
fn every_embedded_unit_is_an_object_of_its_target() {
    if ARCHIVES.is_empty() {
        println!("skipped: built without ROCMFORGE_AOT_TARGETS, nothing is embedded");
    }
    for target in targets() {
        for unit in units::units() {
            let object = object(target, unit.name).expect("it is whole");
            check(object.expect("every unit is embedded"), unit, target);
        }
    }
    assert_eq!(object("gfx000", "repack"), Ok(None));
    assert_eq!(object("gfx1100", "no_such_unit"), Ok(None));
}

/// Whether a program starts; says so if not.
fn is_there(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        println!("skipped: there is no {program}");
    }
    found
}

fn written(dir: &Path, objects: &[Vec<u8>]) -> Vec<PathBuf> {
    let write = |(n, object): (usize, &Vec<u8>)| {
        let path = dir.join(n.to_string());
        std::fs::write(&path, object).unwrap();
        path
    };
    objects.iter().enumerate().map(write).collect()
}

#[test]
fn what_is_packed_is_unpacked_and_a_damaged_archive_is_refused() {
    if !is_there("xz") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Three units for two targets.
    let objects: Vec<Vec<u8>> = (0..6u8)
        .map(|n| {
            (0..2000 + 100 * usize::from(n))
                .map(|at| ((at * at) >> 3) as u8 ^ n)
                .collect()
        })
        .collect();
    let files = written(dir.path(), &objects);
    let pack = |name: &str| {
        let files = files.iter().map(PathBuf::as_path);
        archive::pack(files, &dir.path().join(name)).unwrap()
    };
    let packed = pack("a.objects");
    let lengths = packed.lengths;
    let stream = std::fs::read(packed.path).unwrap();
    assert_eq!(std::fs::read(pack("b.objects").path).unwrap(), stream);
    for at in 0..2 {
        let expected: Vec<_> = objects.iter().skip(at).step_by(2).cloned().collect();
        assert_eq!(unpack(&stream, &lengths, 2, at).unwrap(), expected);
    }
    for at in 0..stream.len() {
        let mut damaged = stream.clone();
        damaged[at] ^= 0x10;
        assert!(unpack(&damaged, &lengths, 2, 0).is_err(), "byte {at}");
        assert!(unpack(&stream[..at], &lengths, 2, 0).is_err(), "{at} bytes");
    }
    assert!(unpack(&stream, &lengths[..5], 2, 0).is_err());
    assert!(unpack(&stream, &[lengths.as_slice(), &[1]].concat(), 2, 0).is_err());
    assert!(unpack(&stream, &[u32::MAX; 2], 2, 0).is_err());
}

#[test]
fn units_are_compiled_packed_and_unpacked_for_each_target() {
    let dir = tempfile::tempdir().unwrap();
    let compiler = match clang::Clang::find(dir.path()) {
        Ok(compiler) if is_there("xz") => compiler,
        Ok(_) => return,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    let units = ["add_bias", "gather"].map(|name| units::unit(name).unwrap());
    let targets = ["gfx1100", "gfx11-generic"];
    let texts = |end: &str| {
        units.map(|unit| clang::Unit {
            name: unit.name,
            text: unit.text() + end,
        })
    };
    let whole = texts("");
    let objects = compiler.compile_all(&whole, &targets, dir.path(), 2);
    let objects = objects.unwrap();
    let pairs = units.iter().flat_map(|u| targets.map(|t| (u.name, t)));
    let files = pairs.map(|pair| objects[&pair].as_path());
    let packed = archive::pack(files, &dir.path().join("gfx11-generic.objects")).unwrap();
    let stream = std::fs::read(packed.path).unwrap();
    for (at, target) in targets.into_iter().enumerate() {
        let objects = unpack(&stream, &packed.lengths, targets.len(), at).unwrap();
        assert_eq!(objects.len(), units.len());
        for (object, unit) in objects.iter().zip(units) {
            check(object, unit, target);
        }
    }
    let broken = texts("nonsense");
    let error = compiler.compile_all(&broken, &targets, dir.path(), 1);
    let error = error.unwrap_err();
    assert!(error.contains("add_bias for gfx11"), "{error}");
    assert!(error.contains("nonsense"), "{error}");
}

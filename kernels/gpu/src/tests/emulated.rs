//! Kernels compiled for the host and run there against sums of f64 (`tests/emulate`). A GPU's
//! matrix instructions are followed lane by lane, so what only such GPUs run is checked without
//! one.

use std::path::Path;
use std::process::Command;

use super::*;

/// Compilers of C++ that know `_Float16`.
const COMPILERS: [&str; 5] = ["clang++", "clang++-24", "clang++-23", "clang++-22", "g++"];

/// What stands in for these is declared in `emulator.h`.
const REPLACED: [&str; 2] = ["compat.h", "mma_f16.h"];

const CASES: &str = "16";

/// The first compiler that makes a program of a line with `_Float16`.
fn compiler(dir: &Path) -> Option<&'static str> {
    let trial = dir.join("trial.cpp");
    std::fs::write(&trial, "int main() { return (int)(_Float16)0.0f; }\n").unwrap();
    COMPILERS.into_iter().find(|name| {
        let made = Command::new(name)
            .args(["-std=c++20", "-o"])
            .arg(dir.join("trial"))
            .arg(&trial)
            .output();
        made.is_ok_and(|made| made.status.success())
    })
}

/// Compiles a unit with its program of tests, and runs that with a seed.
fn check(unit: &str, program: &str, flags: &[&str], seed: &str) {
    let dir = tempfile::tempdir().unwrap();
    let Some(compiler) = compiler(dir.path()) else {
        println!("skipped: no compiler of C++ with _Float16 (install clang or g++)");
        return;
    };
    let kernels = dir.path().join("kernels.inc");
    let text = units::unit(unit).unwrap().text_without(&REPLACED);
    std::fs::write(&kernels, text).unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulate");
    let to = dir.path().join("program");
    let made = Command::new(compiler)
        .args(["-std=c++20", "-O1", "-w", "-DEMULATED"])
        .args(flags)
        .arg(format!("-DKERNELS=\"{}\"", kernels.display()))
        .arg("-I")
        .arg(&sources)
        .arg(sources.join(program))
        .arg("-o")
        .arg(&to)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{compiler}: {text}");
    let ran = Command::new(&to).args([seed, CASES]).output().unwrap();
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{unit} {flags:?}: {text}");
    println!("{unit} {flags:?}: {text}");
}

const HOPPER: [&str; 2] = ["-DRF_CUDA", "-D__CUDA_ARCH__=900"];

/// Products of float rows are as exact as f32 makes them, whatever of a block is not there.
#[test]
fn products_of_few_rows_with_f16_weights_are_exact_on_hopper() {
    check("matvec_f16", "floats.cpp", &HOPPER, "7");
}

#[test]
fn adapters_of_f16_add_what_they_should_on_hopper() {
    check("adapters_f16", "adapters.cpp", &HOPPER, "1");
}

#[test]
fn adapters_of_f32_add_what_they_should_on_hopper() {
    check("adapters_f32", "adapters.cpp", &HOPPER, "2");
}

#[test]
fn adapters_add_what_they_should_in_waves_of_64() {
    check("adapters_f16", "adapters.cpp", &["-DWAVE=64"], "3");
}

/// Rows that attend both ways, with scores that fall with distance and without.
#[test]
fn attention_of_many_rows_is_right_without_matrix_instructions() {
    for unit in ["attention_prefill_64", "attention_prefill_64_alibi"] {
        check(unit, "attention.cpp", &["-DWAVE=32"], "4");
        check(unit, "attention.cpp", &["-DWAVE=64"], "5");
    }
}

#[test]
fn attention_of_single_rows_is_right_for_heads_of_any_size() {
    for unit in [
        "attention_decode_any_alibi",
        "attention_decode_any_f32_alibi",
    ] {
        let flags = ["-DRF_CUDA", "-D__CUDA_ARCH__=700"];
        check(unit, "attention.cpp", &flags, "6");
    }
}

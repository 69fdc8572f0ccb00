//! The run-time compilers for real, where one is installed: this binary is parent
//! and child, as the daemon is.

use std::time::Duration;

use rocmforge_kernels_gpu::compile::{
    CHILD_ARGUMENT, Cache, Compiler, Config, Error, Language, Object, Origin, Request,
    rtc_child_main,
};

const SOURCE: &str = r#"
#include "scale.h"
extern "C" __global__ void scale(float* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= SCALE;
}
"#;

fn compile(compiler: &Compiler, source: &str, target: &str) -> Result<Object, Error> {
    let request = Request {
        name: "scale",
        source,
        headers: &[("scale.h", "#define SCALE SCALE_IS\n")],
        target,
        options: &["-DSCALE_IS=2.0f"],
    };
    compiler.object(&request, |_, _| None)
}

/// Compiles, caches, and survives what a compiler does to its process.
/// False if there is no compiler to check.
fn check(language: Language, target: &str) -> Result<bool, String> {
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    let config = Config {
        cache: Some(Cache::new(dir.path())),
        limit: Duration::from_secs(120),
        ..Config::new(language)
    };
    let compiler = Compiler::new(config.clone());
    let object = match compile(&compiler, SOURCE, target) {
        Err(Error::Refused { message, .. }) if message.contains("library could be used") => {
            println!("skipped: {message}");
            return Ok(false);
        }
        result => result.map_err(|error| error.to_string())?,
    };
    assert_eq!(object.origin, Origin::Compiled);
    assert_eq!(object.cache_error, None);
    assert_eq!(&object.bytes[..4], b"\x7fELF");
    println!("{target}: {} bytes", object.bytes.len());
    // Another process's compiler finds it.
    let again = compile(&Compiler::new(config), SOURCE, target).map_err(|e| e.to_string())?;
    assert_eq!((again.origin, again.bytes), (Origin::Cached, object.bytes));
    match compile(&compiler, "__global__ void f() { nonsense; }", target) {
        Err(Error::Refused { message, .. }) => assert!(message.contains("nonsense"), "{message}"),
        other => panic!("{other:?}"),
    }
    // A target that a compiler does not know, or on which it aborts: an error here, and no more.
    for target in ["gfx1100", "gfx9999"] {
        match compile(&compiler, SOURCE, target) {
            Ok(object) => println!("{target}: {} bytes", object.bytes.len()),
            Err(error) => println!(
                "{target}: {}",
                error.to_string().lines().next().unwrap_or("")
            ),
        }
    }
    Ok(true)
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some(CHILD_ARGUMENT) {
        std::process::exit(rtc_child_main());
    }
    let checks = [(Language::Hip, "gfx1030"), (Language::Cuda, "sm_90")];
    let mut passed = 0;
    for (language, target) in checks {
        println!("test rtc::{} ...", language.compiler());
        match check(language, target) {
            Ok(checked) => passed += u32::from(checked),
            Err(error) => {
                println!("test result: FAILED. {passed} passed; 1 failed; 0 ignored\n{error}");
                std::process::exit(1);
            }
        }
    }
    println!("test result: ok. {passed} passed; 0 failed; 0 ignored");
}

//! What the workspace depends on is used, and links nothing native. From where crates come, and
//! under which licences, is in `deny.toml`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_tests::fixtures;
use serde_json::Value;

/// Packages that name a native library: a vendor's is found at run time, and no other is linked.
const NATIVE: [(&str, &str); 3] = [
    ("hip-runtime-sys", "types and constants alone are used"),
    (
        "ring",
        "its own code in C and assembly, compiled from its package",
    ),
    (
        "prettyplease",
        "the name is only a lock on its version; nothing is linked",
    ),
];

/// Dependencies whose names no source of their package has.
const UNNAMED: [(&str, &str, &str); 2] = [
    ("rocmforge-proto", "prost", "the generated code's"),
    ("rocmforge-proto", "tonic-prost", "the generated code's"),
];

/// What `cargo metadata` says of the packages of this platform.
fn packages() -> Vec<Value> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let cargo = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", &platform])
        .current_dir(fixtures::workspace())
        .output()
        .expect("cargo runs");
    let text = String::from_utf8_lossy(&cargo.stderr);
    assert!(cargo.status.success(), "{text}");
    let metadata: Value = serde_json::from_slice(&cargo.stdout).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

#[test]
fn nothing_native_is_linked() {
    let mut wrong = Vec::new();
    let packages = packages();
    for package in packages.iter().filter(|p| !p["source"].is_null()) {
        let name = format!("{} {}", text(package, "name"), text(package, "version"));
        let native = text(package, "links");
        if !native.is_empty() && !NATIVE.iter().any(|(n, _)| *n == text(package, "name")) {
            wrong.push(format!(
                "{name} links {native}; nothing native is linked, or a line in NATIVE says why"
            ));
        }
    }
    assert!(packages.len() > 100, "{} packages", packages.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The Rust files of a package that its dependencies of a kind are for, and what other packages'
/// folders below it have not.
fn sources(root: &Path, kind: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).expect("a folder of ours").flatten() {
            let path = entry.path();
            if path.is_dir() {
                let other = path.join("Cargo.toml").exists() || path.ends_with("target");
                if !other {
                    dirs.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                let fits = match kind {
                    "build" => path == root.join("build.rs"),
                    "dev" => true,
                    _ => path.starts_with(root.join("src")),
                };
                if fits {
                    found.push(path);
                }
            }
        }
    }
    found
}

/// The paths of modules that a test takes from another package.
fn borrowed(files: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).expect("a source");
        for line in text.lines() {
            let path = line.trim().strip_prefix("#[path = \"");
            if let Some(path) = path.and_then(|p| p.strip_suffix("\"]")) {
                found.push(file.parent().expect("a folder").join(path));
            }
        }
    }
    found
}

#[test]
fn every_dependency_is_used() {
    let mut unused = Vec::new();
    for package in packages().iter().filter(|p| p["source"].is_null()) {
        let manifest = Path::new(text(package, "manifest_path"));
        let root = manifest.parent().expect("a folder");
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let kind = text(dependency, "kind");
            let mut files = sources(root, kind);
            if kind == "dev" {
                files.extend(borrowed(&files));
            }
            let word = match text(dependency, "rename") {
                "" => text(dependency, "name").replace('-', "_"),
                renamed => renamed.replace('-', "_"),
            };
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let named = files.iter().any(|file| {
                let text = std::fs::read_to_string(file).expect("a source");
                text.split(|c| !is_part(c)).any(|part| part == word)
            });
            let (name, dependency) = (text(package, "name"), text(dependency, "name"));
            let excused = UNNAMED
                .iter()
                .any(|(of, what, _)| (*of, *what) == (name, dependency));
            if !named && !excused {
                unused.push(format!("{name}: {dependency} ({kind})"));
            }
        }
    }
    let unused: BTreeSet<String> = unused.into_iter().collect();
    assert!(
        unused.is_empty(),
        "named in Cargo.toml and in no source; take them out:\n{}",
        unused.into_iter().collect::<Vec<_>>().join("\n")
    );
}

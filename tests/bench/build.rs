//! Tells the binary which commit it was built from, for its tables; `unknown`
//! outside of a git checkout.

use std::process::Command;

fn main() {
    // With no path named, Cargo would run this for every changed file of the package only.
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(file) = git(&["rev-parse", "--git-path", path]) {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    let commit = git(&[
        "describe",
        "--always",
        "--dirty",
        "--abbrev=10",
        "--exclude=*",
    ]);
    println!(
        "cargo::rustc-env=ROCMFORGE_COMMIT={}",
        commit.as_deref().unwrap_or("unknown")
    );
}

/// The first line that git prints; `None` without git or a checkout.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.lines().next()?.trim();
    (output.status.success() && !line.is_empty()).then(|| line.to_owned())
}

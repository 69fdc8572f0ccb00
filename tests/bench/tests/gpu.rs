//! `rocmforge-bench gpu` from end to end with mini models: on the host, and on a HIP
//! runtime over host memory.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Memory of the fake card: all of it is real.
const FAKE_MEMORY: u64 = 1536 << 20;

fn gpu(args: &[&str], fake: Option<(&Path, &str)>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforge-bench"));
    command.arg("gpu").arg("--quick").args(args);
    // A card of this machine is not what these tests are about.
    command
        .env_remove("ROCMFORGE_HIP_LIBRARY")
        .env_remove("ROCMFORGE_KERNELS")
        .env_remove("FAKE_HIP_FAIL");
    if let Some((images, fail)) = fake {
        let library = rocmforge_fake_hip::library_path().expect("cargo built the fake runtime");
        rocmforge_fake_hip::write_images(images, rocmforge_fake_hip::ARCH).expect("images");
        command
            .env("ROCMFORGE_HIP_LIBRARY", library)
            .env("ROCMFORGE_KERNELS", images)
            .env("FAKE_HIP_MEMORY", FAKE_MEMORY.to_string());
        if !fail.is_empty() {
            command.env("FAKE_HIP_FAIL", fail);
        }
    }
    let output = command.output().expect("the binary starts");
    println!("{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Asserts that every check was made and passed; returns their names.
fn all_passed(output: &Output) -> Vec<String> {
    let report = report(output);
    let checks = report["checks"].as_array().expect("checks");
    for check in checks {
        assert_eq!(check["n_failures"], 0, "{check:#}");
        assert!(check["skipped"].is_null(), "{check:#}");
    }
    assert!(output.status.success());
    let name = |check: &Value| check["name"].as_str().expect("a name").to_owned();
    checks.iter().map(name).collect()
}

#[test]
fn all_of_it_runs_on_the_host() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("table.md");
    let models = dir.path().join("models");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let output = gpu(
        &[
            "--device=host",
            "--json",
            "--soak-minutes=0.06",
            "--rounds=3",
            "--models",
            models.to_str().expect("text"),
            "--fixtures",
            fixtures.to_str().expect("text"),
            "--out",
            out.to_str().expect("text"),
        ],
        None,
    );
    let names = all_passed(&output);
    assert_eq!(names.len(), 9, "{names:?}");
    let report = report(&output);
    assert_eq!(report["device"], "host");
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(80));
    let text = std::fs::read_to_string(&out).expect("the table's file");
    for part in [
        "| mini q4_k_m | not resident to first token, a process's first request |",
        "**Parity, the host against itself with one thread**: passed",
        "**Architectures**: passed",
        "120 of 120 answers right; 0 of",
        "mixed load of",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let kept = models.read_dir().expect("a folder").count();
    assert_eq!(kept, 9, "files of a named folder are kept");
}

#[test]
fn a_card_is_measured_compared_and_watched() {
    let dir = tempfile::tempdir().expect("a folder");
    let images = dir.path().join("images");
    let output = gpu(
        &[
            "--device=hip",
            "--parts=table,parity,soak,rounds",
            "--json",
            "--soak-minutes=0.08",
            "--rounds=2",
        ],
        Some((&images, "")),
    );
    let names = all_passed(&output);
    assert_eq!(names[0], "Parity, hip against the host");
    let report = report(&output);
    assert_eq!(report["device"], "hip");
    let driver = report["driver"].as_str().expect("a driver");
    assert!(driver.contains("fake_hip"), "{driver}");
    let ceilings = report["ceilings"].as_array().expect("ceilings");
    assert!(ceilings.len() >= 4, "{ceilings:?}");
    let soak = &report["checks"][1]["notes"];
    assert!(
        soak.to_string().contains("the driver counted, beside"),
        "{soak}"
    );
}

/// Once uploads by pinned memory alone could not be measured where mappings are registered.
#[test]
fn uploads_go_as_they_were_asked_for() {
    let dir = tempfile::tempdir().expect("a folder");
    let images = dir.path().join("images");
    for (way, ring_only) in [("--uploads=ring", true), ("--uploads=auto", false)] {
        let output = gpu(
            &[
                "--device=hip",
                "--parts=rounds",
                "--rounds=2",
                "--json",
                way,
            ],
            Some((&images, "")),
        );
        all_passed(&output);
        let findings = report(&output)["findings"].to_string();
        let told = findings.contains("no mapping is to be registered");
        assert_eq!(told, ring_only, "{findings}");
    }
}

#[test]
fn a_lost_card_fails_the_run_and_the_table_says_so() {
    let dir = tempfile::tempdir().expect("a folder");
    let images = dir.path().join("images");
    let output = gpu(
        &["--device=hip", "--parts=soak", "--soak-minutes=0.05"],
        Some((&images, "run:kernel:400:719")),
    );
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("**FAILED**"), "{text}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("rocmforge-bench: failed: "), "{said}");
}

#[test]
fn absent_fixtures_are_a_printed_skip_and_wrong_options_an_error() {
    let dir = tempfile::tempdir().expect("a folder");
    let nowhere = dir.path().to_str().expect("text");
    let output = gpu(
        &["--device=host", "--parts=text", "--fixtures", nowhere],
        None,
    );
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    let line = "**Text of the trained models**: skipped: no exam.json";
    assert!(text.contains(line) && text.contains("--fixtures"), "{text}");
    let wrong = gpu(&["--soak-minutes=-1"], None);
    assert_eq!(wrong.status.code(), Some(2));
}

//! Devices that are there, that are not, and what the daemon and rocmforgectl say of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_fake_hip::Fake;
use rocmforge_tests::daemon::{Daemon, Ended, Options};
use rocmforge_tests::session::{assert_works, connect};
use rocmforge_tests::{binaries, skip};
use serde_json::Value;

/// Names a real HIP runtime; given by name, it is required.
const RUNTIME_ENV: &str = "ROCMFORGE_TEST_HIP_RUNTIME";
/// Where Debian's libamdhip64-5 puts it.
const USUAL_RUNTIME: &str = "/usr/lib/x86_64-linux-gnu/libamdhip64.so.5";
/// A library that nobody has.
const NO_LIBRARY: &str = "/nonexistent/libgpu.so";

/// A real HIP runtime on a machine without an AMD card.
fn runtime_without_card(test: &str) -> Option<PathBuf> {
    let given = std::env::var_os(RUNTIME_ENV).filter(|path| !path.is_empty());
    let path = given.clone().map_or(USUAL_RUNTIME.into(), PathBuf::from);
    if !path.exists() {
        assert!(
            given.is_none(),
            "{RUNTIME_ENV}={}: no such file",
            path.display()
        );
        let reason = format!(
            "{} is not there (install libamdhip64-5, or set {RUNTIME_ENV})",
            path.display()
        );
        skip(test, &reason);
        return None;
    }
    if Path::new("/dev/kfd").exists() {
        skip(test, "this machine has an AMD card");
        return None;
    }
    Some(path)
}

/// Options under which neither vendor's own runtime is looked for.
fn on(device: &str, hip: &Path) -> Options {
    Options::on_device(device)
        .env("ROCMFORGE_HIP_LIBRARY", hip)
        .env("ROCMFORGE_CUDA_LIBRARY", NO_LIBRARY)
}

#[track_caller]
fn assert_refused(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.status.code(), Some(3), "{}", ended.log);
    assert!(!ended.log.contains("panicked at"), "{}", ended.log);
    for word in words {
        assert!(ended.log.contains(word), "'{word}' in: {}", ended.log);
    }
}

/// What rocmforgectl prints.
fn ctl(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = Command::new(binaries::rocmforgectl())
        .arg("--socket")
        .arg(daemon.socket())
        .args(arguments)
        .output()
        .expect("rocmforgectl starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn json(daemon: &Daemon, command: &str) -> Value {
    serde_json::from_str(&ctl(daemon, &["--json", command])).expect("one JSON object")
}

#[test]
fn a_runtime_without_a_card_ends_the_daemon_with_3_and_says_what_to_do() {
    let Some(runtime) = runtime_without_card("a_runtime_without_a_card") else {
        return;
    };
    let name = runtime.display().to_string();
    let ended = Daemon::refused(&on("hip", &runtime));
    assert_refused(
        &ended,
        &[
            &name,
            "hipInit",
            "/dev/kfd",
            "groups render",
            "--device host",
        ],
    );
    let listed = Command::new(binaries::rocmforged())
        .arg("--list-devices")
        .env("ROCMFORGE_HIP_LIBRARY", &runtime)
        .env("ROCMFORGE_CUDA_LIBRARY", NO_LIBRARY)
        .output()
        .expect("rocmforged starts");
    let text = String::from_utf8_lossy(&listed.stdout);
    assert!(listed.status.success(), "{text}");
    assert!(text.contains(&format!("hip: {name}: hipInit")), "{text}");
    assert!(text.contains(&format!("cuda: {NO_LIBRARY}")), "{text}");
    assert!(text.contains("\nkernels: "), "{text}");
}

#[test]
fn no_runtime_at_all_ends_the_daemon_with_3_and_names_what_was_tried() {
    for (device, hint) in [
        ("hip", "ROCMFORGE_HIP_LIBRARY"),
        ("cuda", "ROCMFORGE_CUDA_LIBRARY"),
    ] {
        let ended = Daemon::refused(&on(device, Path::new(NO_LIBRARY)));
        assert_refused(&ended, &[NO_LIBRARY, "install", hint]);
    }
}

#[test]
fn a_card_that_is_not_there_ends_the_daemon_with_3() {
    let fake = Fake::new();
    let ended = Daemon::refused(&on("hip:3", fake.path()));
    assert_refused(&ended, &["hip:3", "has 1", "--list-devices"]);
    let ended = Daemon::refused(&on("hip", fake.path()).env("FAKE_HIP_DEVICES", "0"));
    assert_refused(&ended, &["hipErrorNoDevice", "/dev/kfd"]);
    // Memory that another process holds; the first call only tries how files reach the card.
    let ended = Daemon::refused(&on("hip", fake.path()).env("FAKE_HIP_FAIL", "hipHostMalloc:2:2"));
    assert_refused(&ended, &["hipHostMalloc"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_serves_on_the_host_and_says_why() {
    let without_card = runtime_without_card("auto_serves_on_the_host: with a runtime");
    let runtimes = [without_card, Some(NO_LIBRARY.into())];
    for runtime in runtimes.into_iter().flatten() {
        let daemon = Daemon::start(&on("auto", &runtime));
        assert_works(&connect(&daemon).await).await;
        let name = runtime.display().to_string();
        for command in ["devices", "status"] {
            let found = json(&daemon, command);
            let (hip, cuda) = (&found["drivers"][0], &found["drivers"][1]);
            assert_eq!(
                (&hip["kind"], &cuda["kind"]),
                (&"hip".into(), &"cuda".into())
            );
            let said = format!("{} {} {}", hip["library"], hip["tried"], hip["errors"]);
            assert!(said.contains(&name), "{found}");
            assert_eq!(cuda["tried"][0]["library"], NO_LIBRARY, "{found}");
            let passed_over = found["passed_over"].as_array().expect("a list");
            assert_eq!(passed_over.len(), 2, "{found}");
            assert!(passed_over[0].as_str().is_some_and(|s| s.contains(&name)));
        }
        let text = ctl(&daemon, &["devices"]);
        assert!(text.contains("host ") && text.contains(&name), "{text}");
        daemon.stop();
    }
}

/// Once `auto` tried the first card alone, and served on the CPU where that had no kernels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_takes_the_best_of_several_cards_and_says_why_not_the_others() {
    let fake = Fake::new();
    let options = on("auto", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_DEVICES", "4")
        .env("FAKE_HIP_ARCH", "gfx803,gfx1030")
        .env("FAKE_HIP_INTEGRATED", "0,1,0,0")
        .env(
            "FAKE_HIP_MEMORY",
            "4294967296,3221225472,1073741824,2147483648",
        )
        .vram_budget(32 << 20);
    let daemon = Daemon::start(&options);
    assert_works(&connect(&daemon).await).await;
    let found = json(&daemon, "devices");
    let cards = found["drivers"][0]["devices"].as_array().expect("a list");
    let in_use: Vec<_> = cards.iter().map(|card| card["in_use"] == true).collect();
    assert_eq!(in_use, [false, false, false, true], "{found}");
    let passed_over = found["passed_over"].as_array().expect("a list");
    let passed_over: Vec<_> = passed_over.iter().filter_map(Value::as_str).collect();
    assert_eq!(passed_over.len(), 3, "{passed_over:?}");
    for (said, words) in passed_over.iter().zip([
        ["hip:2 Fake GPU (discrete, 1024 MiB)", "hip:3"],
        ["hip:1 Fake GPU (integrated, 3072 MiB)", "hip:3"],
        ["hip:0 (Fake GPU)", "gfx803"],
    ]) {
        for word in words {
            assert!(said.contains(word), "'{word}' in: {said}");
        }
    }
    let ended = daemon.stop();
    assert!(ended.log.contains("a GPU is not used"), "{}", ended.log);
}

/// A card that is there and cannot be used is worth a warning; that there is none is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_warns_where_no_card_can_be_used() {
    let fake = Fake::new();
    let options = on("auto", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_DEVICES", "2")
        .env("FAKE_HIP_ARCH", "gfx803");
    let daemon = Daemon::start(&options);
    assert_works(&connect(&daemon).await).await;
    assert_eq!(json(&daemon, "status")["device"]["kind"], "host");
    let ended = daemon.stop();
    let warned = |ordinal: u32| {
        let mut lines = ended.log.lines().filter(|line| line.contains("WARN"));
        lines.any(|line| line.contains(&format!("hip:{ordinal} ")) && line.contains("gfx803"))
    };
    assert!(warned(0) && warned(1), "{}", ended.log);
}

/// On an APU all that runs lives in the card's memory, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_of_an_apus_memory_is_of_what_is_free() {
    let fake = Fake::new();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let others = dir.path().join("others");
    std::fs::write(&others, (64 << 20).to_string()).expect("written");
    let options = |keep_free: &str| {
        on("hip", fake.path())
            .env("ROCMFORGE_KERNELS", fake.images())
            .env("FAKE_HIP_INTEGRATED", "1")
            .env("FAKE_HIP_MEMORY", (128 << 20).to_string())
            .env("FAKE_HIP_OTHERS_FILE", &others)
            .arg("--vram-budget")
            .arg("50%")
            .arg("--keep-free")
            .arg(keep_free)
    };
    // Half of the 64 MiB that are free, less a 16th of 128; what else half of it would have been
    // comes with others' leaving, if any is kept free.
    for (keep_free, budget, later) in [("0", 28 << 20, None), ("16MiB", 24 << 20, Some(64 << 20))] {
        std::fs::write(&others, (64 << 20).to_string()).expect("written");
        let daemon = Daemon::start(&options(keep_free));
        let status = json(&daemon, "status");
        assert_eq!(status["budget_bytes"], budget, "{status}");
        let findings = status["device"]["findings"].to_string();
        assert!(findings.contains("shared with the machine"), "{findings}");
        let client = connect(&daemon).await;
        if let Some(later) = later {
            std::fs::write(&others, "0").expect("written");
            let give_up = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while client.status().await.expect("it serves").budget_bytes != later {
                assert!(std::time::Instant::now() < give_up, "{}", daemon.log());
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
        assert_works(&client).await;
        let ended = daemon.stop();
        assert!(
            ended.log.contains("shared with the machine"),
            "{}",
            ended.log
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_card_in_use_is_listed_with_its_memory() {
    let fake = Fake::new();
    let options = on("hip:1", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_DEVICES", "2")
        .vram_budget(32 << 20);
    let daemon = Daemon::start(&options);
    let found = json(&daemon, "devices");
    let cards = found["drivers"][0]["devices"].as_array().expect("a list");
    let in_use: Vec<_> = cards.iter().map(|card| card["in_use"] == true).collect();
    assert_eq!(in_use, [false, true], "{found}");
    assert_eq!(cards[1]["name"], "Fake GPU");
    assert_eq!(cards[1]["arch"], "gfx1030");
    assert_eq!(cards[1]["memory_bytes"], 1 << 30);
    assert_eq!(cards[1]["free_bytes"], (1 << 30) - (32 << 20));
    let status = json(&daemon, "status");
    let device = &status["device"];
    assert_eq!(
        (&device["kind"], &device["ordinal"]),
        (&"hip".into(), &1.into())
    );
    assert_eq!(device["memory"]["allocated_bytes"], 32 << 20);
    assert_eq!(device["memory"]["capacity_bytes"], 32 << 20);
    let text = ctl(&daemon, &["devices"]);
    assert!(text.contains("hip:1   Fake GPU  gfx1030"), "{text}");
    // What the self-test of the card found is in all three, in the same words.
    let findings = device["findings"].as_array().expect("a list");
    let how = findings.iter().filter_map(Value::as_str);
    let how: Vec<_> = how.filter(|f| f.contains("GB/s")).collect();
    assert_eq!(how.len(), 1, "how files reach the card: {findings:?}");
    for command in [&["devices"][..], &["status"]] {
        let text = ctl(&daemon, command);
        assert!(text.contains(how[0]), "{command:?}: {text}");
    }
    // A test anew, beside what the daemon holds of the card.
    let check = ctl(&daemon, &["--json", "devices", "--check"]);
    let check: Value = serde_json::from_str(&check).expect("one JSON object");
    assert_eq!(check["device"]["findings"], device["findings"]);
    assert_eq!(check["version"], status["version"]);
    let checks = check["checks"].as_array().expect("a list");
    let outcome = |name: &str| {
        let found = checks.iter().find(|c| c["name"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {checks:?}"))["outcome"].clone()
    };
    for name in [
        "open",
        "memory",
        "copies",
        "copy within",
        "file to device",
        "attention",
    ] {
        assert_eq!(outcome(name), "passed", "{name}: {checks:?}");
    }
    let found = checks.iter().filter(|c| c["name"] == "found").count();
    assert!(found > 0, "what was found while it was opened: {checks:?}");
    let failed: Vec<_> = checks.iter().filter(|c| c["outcome"] == "failed").collect();
    assert!(failed.is_empty(), "{failed:?}");
    daemon.stop();
}

#[test]
fn a_card_that_fails_its_test_is_told_with_the_step() {
    let fake = Fake::new();
    // The daemon itself runs none, so that the first kernel is the test's.
    let options = on("hip", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_FAIL", "run:kernel:9:719")
        .vram_budget(32 << 20);
    let daemon = Daemon::start(&options);
    let output = Command::new(binaries::rocmforgectl())
        .arg("--socket")
        .arg(daemon.socket())
        .args(["devices", "--check"])
        .output()
        .expect("rocmforgectl starts");
    let (text, said) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(1), "{text}{said}");
    assert!(text.contains("failed") && text.contains("719"), "{text}");
    assert!(said.contains("of the self-test"), "{said}");
    // The daemon has lost nothing.
    assert_eq!(json(&daemon, "status")["state"], "serving");
    daemon.stop();
}

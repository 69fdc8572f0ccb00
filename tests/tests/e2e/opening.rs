//! What a driver or a library beside it does to a daemon that opens a card.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rocmforge_fake_hip::{Fake, HANG};
use rocmforge_tests::binaries;
use rocmforge_tests::daemon::{Daemon, Options, PATIENCE};
use rocmforge_tests::fixtures::TINY_LLAMA;
use rocmforge_tests::session::{connect, continuation, generate, greedy, load};

/// A daemon on a fake card; `cache` is where it notes trials.
fn options(fake: &Fake, cache: &Path) -> Options {
    Options::on_device("hip")
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("CACHE_DIRECTORY", cache)
        .vram_budget(64 << 20)
}

/// A prompt of more rows than the portable kernels have at a time.
fn long() -> String {
    "Once upon a time there was a little cat. ".repeat(12)
}

/// The text after a long prompt, what the daemon has found, and its log.
async fn long_text(options: &Options) -> (String, Vec<String>, String) {
    let daemon = Daemon::start(options);
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let request = continuation(TINY_LLAMA, &long(), greedy(8));
    let answer = generate(&client, request).await.expect("a text");
    let status = client.status().await.expect("a status");
    let device = status.device.expect("a device");
    drop(client);
    (answer.text, device.findings, daemon.stop().log)
}

/// rocBLAS aborts at its first product where it has no kernels for a chip.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_library_for_products_that_aborts_costs_no_daemon() {
    let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a folder"));
    let usual = options(&fake, cache.path());
    let (expected, findings, _) = long_text(&usual).await;
    let why = |found: &[String]| found.iter().find(|f| f.contains("large products")).cloned();
    assert!(
        why(&findings).is_some(),
        "no library is there: {findings:?}"
    );
    fake.add_products();
    let (_, findings, log) = long_text(&usual).await;
    assert_eq!(why(&findings), None, "{log}");
    assert!(log.contains("librocblas.so.4"), "{log}");

    // Another library: what passed was the one before.
    let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a folder"));
    fake.add_products();
    let aborts = options(&fake, cache.path()).env("FAKE_HIP_MISBEHAVE", "aborts-products:1");
    for _ in 0..2 {
        let (text, findings, log) = long_text(&aborts).await;
        assert_eq!(text, expected, "{log}");
        let why = why(&findings).unwrap_or_else(|| panic!("{findings:?}"));
        for word in ["portable kernels", "SIGABRT", "rocBLAS error: Cannot read"] {
            assert!(why.contains(word), "{word}: {why}");
        }
    }
}

/// Where the folder of rocBLAS's kernels has none for the chip, it is not even tried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_library_without_kernels_for_the_chip_is_told_by_its_folder() {
    let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a folder"));
    fake.add_products();
    let folder = cache.path().join("library");
    std::fs::create_dir(&folder).expect("our own folder");
    std::fs::write(folder.join("TensileLibrary_lazy_gfx942.dat"), "").expect("our own file");
    let options = options(&fake, cache.path()).env("ROCBLAS_TENSILE_LIBPATH", &folder);
    let (_, findings, log) = long_text(&options).await;
    let said = format!("{} has no kernels for gfx1030", folder.display());
    assert!(
        findings.iter().any(|f| f.contains(&said)),
        "{findings:?} {log}"
    );
}

/// Once such a daemon, started by hand, said nothing and hung for good.
#[test]
fn a_driver_that_hangs_at_the_start_ends_the_daemon_with_4() {
    let steps = [
        ("hipInit", "asking the driver of hip for its GPUs"),
        ("hipMemMap", "looking how memory is mapped"),
    ];
    let started = steps.map(|(call, step)| {
        std::thread::spawn(move || {
            let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a folder"));
            let hangs = format!("{call}:1:{HANG}");
            let options = options(&fake, cache.path()).env("FAKE_HIP_FAIL", hangs);
            let ended = Daemon::refused(&options.arg("--watchdog").arg("1"));
            assert_eq!(ended.status.code(), Some(4), "{}", ended.log);
            for words in [step, "has not ended after", "dmesg"] {
                assert!(ended.log.contains(words), "{words}: {}", ended.log);
            }
        })
    });
    for started in started {
        started.join().expect("the daemon ends well");
    }
}

/// A card's trials are made once, unless what is noted of them is damaged; a test of the card makes
/// them always.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_passed_at_one_start_is_remembered_at_the_next() {
    let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a folder"));
    fake.add_products();
    let usual = options(&fake, cache.path());
    let (expected, findings, log) = long_text(&usual).await;
    assert!(!log.contains("remembered from"), "{findings:?} {log}");
    let (text, findings, log) = long_text(&usual).await;
    assert_eq!(text, expected);
    for words in ["memory is mapped as it was", "a first product by"] {
        let is_told = |f: &String| f.contains(words) && f.contains("remembered from");
        assert!(findings.iter().any(is_told), "{words}: {findings:?}");
        assert!(log.contains(words), "{words}: {log}");
    }
    let checked = Command::new(binaries::rocmforged())
        .args(["--check-device", "hip:0"])
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("CACHE_DIRECTORY", cache.path())
        .output()
        .expect("rocmforged starts");
    let told = String::from_utf8_lossy(&checked.stdout);
    assert!(told.contains(", 0 failed"), "{told}");
    assert!(!told.contains("remembered from"), "{told}");

    let mut notes = 0;
    for note in files_of_trials(cache.path()) {
        std::fs::write(&note, "damaged").expect("our own file");
        notes += 1;
    }
    assert_eq!(notes, 2);
    let (text, findings, log) = long_text(&usual).await;
    assert_eq!(text, expected);
    assert!(!log.contains("remembered from"), "{findings:?} {log}");
}

/// What is noted of trials.
fn files_of_trials(cache: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cache.join("kernels/trials"));
    let entries = entries.into_iter().flatten();
    entries.map(|entry| entry.expect("a file").path()).collect()
}

/// Once SIGTERM had no answer until the card was open, or was given up.
#[test]
fn a_stop_while_a_card_is_opened_ends_the_daemon_at_once_with_0() {
    let steps = [("hipInit", ""), ("hipMemMap", "how files reach the card")];
    for (call, words) in steps {
        let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a folder"));
        let hangs = format!("{call}:1:{HANG}");
        let options = options(&fake, cache.path()).env("FAKE_HIP_FAIL", hangs);
        let mut daemon = Daemon::begin(&options);
        let begun = Instant::now();
        while !daemon.socket().exists() || !daemon.log().contains(words) {
            assert!(begun.elapsed() < PATIENCE, "{call}: {}", daemon.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        // It is in the call, or just before it.
        std::thread::sleep(Duration::from_millis(200));
        assert!(daemon.is_running(), "{call}: {}", daemon.log());
        daemon.terminate();
        let stopped = Instant::now();
        while daemon.is_running() {
            assert!(stopped.elapsed() < PATIENCE, "{call}: {}", daemon.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        let took = stopped.elapsed();
        assert!(took < Duration::from_secs(5), "{call}: {took:?}");
        assert!(!daemon.socket().exists(), "{call}: the socket stays");
        let ended = daemon.wait();
        assert_eq!(ended.status.code(), Some(0), "{call}: {}", ended.log);
        assert!(ended.log.contains("was being opened"), "{}", ended.log);
        assert!(!ended.log.contains("panicked at"), "{}", ended.log);
        // The trial in which it was stopped is none that no process survives.
        let begun: Vec<_> = files_of_trials(cache.path());
        assert!(begun.is_empty(), "{call}: {begun:?}");
    }
}

#[test]
fn a_driver_that_hangs_is_given_up_by_the_list_of_devices() {
    let fake = Fake::new();
    let begun = Instant::now();
    let listed = Command::new(binaries::rocmforged())
        .arg("--list-devices")
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("FAKE_HIP_FAIL", format!("hipInit:1:{HANG}"))
        .output()
        .expect("rocmforged starts");
    let text = String::from_utf8_lossy(&listed.stdout);
    assert!(text.contains("did not answer within 30 s"), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(120));
}

/// The self-test of a card, without a daemon.
#[test]
fn a_card_is_tested_without_a_daemon() {
    let fake = Fake::new();
    let check = |device: &str, order: &str| {
        let output = Command::new(binaries::rocmforged())
            .args(["--check-device", device])
            .env("ROCMFORGE_HIP_LIBRARY", fake.path())
            .env("ROCMFORGE_KERNELS", fake.images())
            .env("ROCR_VISIBLE_DEVICES", "0")
            .env("FAKE_HIP_FAIL", order)
            .output()
            .expect("rocmforged starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{text}");
        (output.status.code(), text)
    };
    let (code, text) = check("hip:0", "");
    assert_eq!(code, Some(0), "{text}");
    let file = fake.path().canonicalize().expect("it is there");
    for words in [
        &format!("{}, runtime 6.4.0, driver ", file.display()),
        "has memory of its own",
        "ROCR_VISIBLE_DEVICES=0",
        "attention",
        ", 0 failed",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (code, text) = check("hip", "run:kernel:9:719");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("failed") && text.contains("719"), "{text}");
    // Where a start would fail it tells why.
    let (code, text) = check("hip:3", "");
    assert_eq!(code, Some(1), "{text}");
    for words in ["there is no device hip:3", "ROCR_VISIBLE_DEVICES=0"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(check("host", "").0, Some(2));
}

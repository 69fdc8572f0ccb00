//! Settings: what wins, what is refused, and that a refusal names the place.

#![expect(
    clippy::unwrap_used,
    reason = "a test may panic, and so may its helpers"
)]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use rocmforge_engine::api::{Budget, Policy};
use rocmforge_engine::{DeviceChoice, PrefixCache};
use rocmforged::config::{Config, ConfigError, Flags, parse_budget};

fn flags(arguments: &[&str]) -> Flags {
    Flags::try_parse_from([&["rocmforged"], arguments].concat()).expect("the flags parse")
}

fn config(arguments: &[&str]) -> Result<Config, ConfigError> {
    Config::new(flags(arguments), PathBuf::from("/run/default.sock"))
}

/// The settings of a file with these lines, under these flags.
fn file(text: &str, arguments: &[&str]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rocmforged.toml");
    std::fs::write(&path, text).unwrap();
    let named = ["--config", path.to_str().unwrap()];
    config(&[&named, arguments].concat())
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

#[test]
fn nothing_given_is_the_defaults() {
    let config = config(&[]).unwrap();
    assert_eq!(config.socket, Path::new("/run/default.sock"));
    assert_eq!(config.device, DeviceChoice::Auto);
    assert_eq!(config.vram_budget, Budget::Percent(50.0));
    assert_eq!(config.model_dirs, Vec::<PathBuf>::new());
    assert_eq!((config.threads, config.log.as_str()), (None, "info"));
    assert_eq!(
        (
            config.n_ctx_max,
            config.max_sequences.get(),
            config.queue_capacity
        ),
        (131_072, 64, 256)
    );
    assert_eq!(
        (config.drain_grace, config.policy),
        (Duration::from_secs(20), Policy::Belady)
    );
    assert_eq!(config.prefix_cache, PrefixCache::PerClient);
}

#[test]
fn the_file_sets_everything_and_flags_win_over_it() {
    let text = r#"
        socket = "/run/file.sock"
        device = "host"
        vram_budget = "2GiB"
        model_dir = ["/a", "/b"]
        threads = 3
        log = "warn,rocmforge_engine=debug"
        n_ctx_max = 4096
        max_sequences = 2
        queue_capacity = 7
        drain_grace = 0.5
        policy = "lru"
        prefix_cache = "shared"
    "#;
    let config = file(text, &[]).unwrap();
    assert_eq!(config.socket, Path::new("/run/file.sock"));
    assert_eq!(config.device, DeviceChoice::Host);
    assert_eq!(config.vram_budget, Budget::Bytes(2 << 30));
    assert_eq!(
        config.model_dirs,
        [PathBuf::from("/a"), PathBuf::from("/b")]
    );
    assert_eq!(config.threads.map(|n| n.get()), Some(3));
    assert_eq!(
        (
            config.n_ctx_max,
            config.max_sequences.get(),
            config.queue_capacity
        ),
        (4096, 2, 7)
    );
    assert_eq!(
        (config.drain_grace, config.policy),
        (Duration::from_millis(500), Policy::Lru)
    );
    assert_eq!(config.prefix_cache, PrefixCache::Shared);

    let over = [
        "--socket",
        "relative.sock",
        "--vram-budget",
        "80%",
        "--model-dir",
        "c",
        "--model-dir",
        "d",
        "--threads",
        "9",
    ];
    let config = file(text, &over).unwrap();
    assert_eq!(config.socket, Path::new("relative.sock"));
    assert_eq!(config.vram_budget, Budget::Percent(80.0));
    assert_eq!(config.model_dirs, [PathBuf::from("c"), PathBuf::from("d")]);
    assert_eq!(config.threads.map(|n| n.get()), Some(9));
    assert_eq!(
        config.max_sequences.get(),
        2,
        "what no flag names stays the file's"
    );
}

#[test]
fn a_number_in_the_file_may_be_a_string() {
    assert_eq!(
        file("vram_budget = 1048576", &[]).unwrap().vram_budget,
        Budget::Bytes(1 << 20)
    );
    assert_eq!(
        file("threads = \"4\"", &[])
            .unwrap()
            .threads
            .map(|n| n.get()),
        Some(4)
    );
}

#[test]
fn the_packaged_configuration_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd/rocmforged.toml");
    let config = config(&["--config", path.to_str().unwrap()]).unwrap();
    assert_eq!(
        config.model_dirs,
        [PathBuf::from("/var/lib/rocmforged/models")]
    );
}

#[test]
fn every_refusal_of_a_flag_names_it() {
    let long = format!("/{}", "s".repeat(107));
    let rows = [
        ("--device", "gpu", "auto, host, hip"),
        ("--vram-budget", "0", "80%"),
        ("--vram-budget", "-1", "80%"),
        ("--vram-budget", "2 bananas", "2GiB"),
        ("--threads", "0", "from 1 to"),
        ("--threads", "-2", "from 1 to"),
        ("--threads", "many", "from 1 to"),
        ("--threads", "1025", "from 1 to 1024"),
        ("--log", "info,=,", "rocmforge_engine=debug"),
        ("--n-ctx-max", "0", "from 1 to"),
        ("--max-sequences", "0", "from 1 to"),
        ("--queue-capacity", "5000", "from 1 to 4096"),
        ("--drain-grace", "-1", "from 0 to 3600"),
        ("--drain-grace", "NaN", "from 0 to 3600"),
        ("--drain-grace", "1e9", "from 0 to 3600"),
        ("--policy", "random", "pass-aware or lru"),
        ("--prefix-cache", "mine", "per-user"),
        ("--socket", &long, "at most 107"),
    ];
    for (flag, value, range) in rows {
        let error = config(&[&format!("{flag}={value}")])
            .expect_err(flag)
            .to_string();
        assert!(error.starts_with(&format!("{flag}: ")), "{error}");
        assert!(error.contains(range), "'{error}' lacks '{range}'");
    }
    let dirs: Vec<String> = (0..65).map(|i| format!("--model-dir=/{i}")).collect();
    let dirs: Vec<&str> = dirs.iter().map(String::as_str).collect();
    assert!(
        config(&dirs)
            .unwrap_err()
            .to_string()
            .contains("at most 64")
    );
}

#[test]
fn every_refusal_of_a_key_names_key_file_and_flag() {
    let rows = [
        ("device = \"tpu\"", "device", "--device"),
        ("vram_budget = 0", "vram_budget", "--vram-budget"),
        ("vram_budget = -5", "vram_budget", "--vram-budget"),
        ("vram_budget = \"101%\"", "vram_budget", "--vram-budget"),
        ("threads = 1.5", "threads", "--threads"),
        ("n_ctx_max = -1", "n_ctx_max", "--n-ctx-max"),
        ("drain_grace = inf", "drain_grace", "--drain-grace"),
        ("socket = \"\"", "socket", "empty"),
        ("model_dir = [\"\"]", "model_dir", "empty"),
        ("socket = \"relative.sock\"", "socket", "absolute"),
        ("model_dir = [\"relative\"]", "model_dir", "absolute"),
        ("log = \"info,=,\"", "log", "--log"),
        ("policy = \"\"", "policy", "--policy"),
    ];
    for (line, key, word) in rows {
        let error = file(line, &[]).expect_err(line).to_string();
        for word in [key, "rocmforged.toml", word] {
            assert!(error.contains(word), "'{error}' lacks '{word}'");
        }
    }
}

#[test]
fn a_file_that_is_not_the_settings_is_refused_with_line_and_cause() {
    let rows = [
        ("vram_buget = 1", "unknown field `vram_buget`"),
        ("threads = [1]", "expected a string or a number"),
        ("model_dir = 7", "list of paths"),
        ("socket = 5", "expected"),
        ("= nonsense", "line 1"),
    ];
    for (text, cause) in rows {
        let error = with_causes(&file(text, &[]).expect_err(text));
        assert!(
            error.contains("--config") && error.contains(cause),
            "'{error}' lacks '{cause}'"
        );
    }
    let error = with_causes(&config(&["--config", "/nonexistent/x.toml"]).unwrap_err());
    assert!(
        error.contains("/nonexistent/x.toml") && error.contains("No such file"),
        "{error}"
    );
    let large = format!("# {}", "x".repeat(2 << 20));
    assert!(
        file(&large, &[])
            .unwrap_err()
            .to_string()
            .contains("more than 1048576 bytes")
    );
}

#[test]
fn a_configuration_that_is_no_regular_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for path in [fifo.to_str().unwrap(), "/dev/zero", "/"] {
        let error = config(&["--config", path]).unwrap_err().to_string();
        assert!(
            error.contains(path) && error.contains("not a regular file"),
            "{error}"
        );
    }
}

#[test]
fn one_model_directory_needs_no_list() {
    let config = file("model_dir = \"/a\"", &[]).unwrap();
    assert_eq!(config.model_dirs, [Path::new("/a")]);
}

#[test]
fn budgets_are_read_in_bytes_sizes_and_shares() {
    let rows = [
        ("1", Budget::Bytes(1)),
        ("2147483648", Budget::Bytes(2 << 30)),
        ("2GiB", Budget::Bytes(2 << 30)),
        ("2g", Budget::Bytes(2 << 30)),
        ("1.5G", Budget::Bytes(3 << 29)),
        ("512 MiB", Budget::Bytes(512 << 20)),
        ("3k", Budget::Bytes(3 << 10)),
        ("1T", Budget::Bytes(1 << 40)),
        ("2GB", Budget::Bytes(2_000_000_000)),
        ("1.5MB", Budget::Bytes(1_500_000)),
        ("80%", Budget::Percent(80.0)),
        ("0.5 %", Budget::Percent(0.5)),
        ("100%", Budget::Percent(100.0)),
    ];
    for (text, expected) in rows {
        assert_eq!(parse_budget(text), Ok(expected), "{text}");
    }
    let refused = [
        "",
        "0",
        "0%",
        "100.1%",
        "-1",
        "-5%",
        "NaN%",
        "inf%",
        "%",
        "G",
        "1.5",
        "1..5G",
        "1e9",
        "2XB",
        "0.0G",
        "18446744073709551615",
        "18446744073709551616",
        "9999999999G",
        "99999999999999999999G",
        "1G G",
    ];
    for text in refused {
        assert!(
            parse_budget(text).is_err(),
            "'{text}' was taken as {:?}",
            parse_budget(text)
        );
    }
}

#[test]
fn http_is_served_where_it_was_asked_for_and_nowhere_else() {
    let none = config(&[]).unwrap().http;
    assert_eq!((none.socket, none.listen, none.token), (None, None, None));

    let text = r#"
        http_socket = "/run/http.sock"
        http_listen = "127.0.0.1:8080"
    "#;
    let both = file(text, &["--http-listen", "[::1]:9"]).unwrap().http;
    assert_eq!(both.socket.as_deref(), Some(Path::new("/run/http.sock")));
    assert_eq!(both.listen, Some("[::1]:9".parse().unwrap()));

    let refused = |arguments: &[&str], mentions: &[&str]| {
        let message = config(arguments).unwrap_err().to_string();
        for word in mentions {
            assert!(message.contains(word), "'{message}' lacks '{word}'");
        }
    };
    refused(
        &["--http-listen", "localhost"],
        &["--http-listen", "127.0.0.1:8080"],
    );
    refused(
        &["--http-listen", "0.0.0.0:80"],
        &["--http-listen", "--http-token-file", "127.0.0.1"],
    );
    refused(
        &["--socket", "/x", "--http-socket", "/x"],
        &["--http-socket", "gRPC"],
    );
    refused(
        &["--http-token-file", "/no/such/file"],
        &["--http-token-file", "/no/such/file"],
    );

    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    let path = token.to_str().unwrap();
    std::fs::write(&token, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).unwrap();
    let open = ["--http-listen", "0.0.0.0:80", "--http-token-file", path];
    assert!(config(&open).unwrap().http.token.is_some());
    std::fs::write(&token, "short").unwrap();
    refused(&["--http-token-file", path], &["--http-token-file", "16"]);
}

//! Settings: what wins, what is refused, and that a refusal names the place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::settings::{config, file};
use rocmforge_engine::api::{Budget, Policy, When};
use rocmforge_engine::{DeviceChoice, KvType, PrefixCache};
use rocmforged::config::{Config, ConfigError, parse_budget};

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
    assert_eq!(config.values.socket, Path::new("/run/default.sock"));
    assert_eq!(config.values.device, DeviceChoice::Auto);
    assert_eq!(config.values.vram_budget, Budget::Percent(50.0));
    assert_eq!(config.values.model_dir, Vec::<PathBuf>::new());
    assert_eq!(
        (config.values.threads, config.values.log.as_str()),
        (None, "info")
    );
    assert_eq!(
        (
            config.values.n_ctx_max,
            config.values.max_sequences.get(),
            config.values.queue_capacity
        ),
        (131_072, 64, 320)
    );
    assert_eq!(
        (config.values.drain_grace, config.values.policy),
        (Duration::from_secs(20), Policy::PassAware)
    );
    assert_eq!(config.values.prefix_cache, PrefixCache::PerClient);
    assert_eq!(config.values.kv_type, None);
    assert_eq!(config.values.host_kv, When::Auto);
    assert_eq!(config.engine().kv_disk, None);
    assert_eq!(config.values.direct_io, When::Auto);
    assert_eq!(config.values.host_pressure, Some(10.0));
    assert_eq!(config.values.speculate, None);
}

#[test]
fn the_file_sets_everything_and_flags_win_over_it() {
    let text = r#"
        socket = "/run/file.sock"
        device = "cpu"
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
        kv_type = "q8_0"
        host_kv = "never"
        kv_disk = "/var/kv"
        kv_disk_budget = "5%"
        direct_io = "always"
        host_pressure = 2.5
        speculate = "on"
    "#;
    let config = file(text, &[]).unwrap();
    assert_eq!(config.values.socket, Path::new("/run/file.sock"));
    assert_eq!(config.values.device, DeviceChoice::Host);
    assert_eq!(config.values.vram_budget, Budget::Bytes(2 << 30));
    assert_eq!(
        config.values.model_dir,
        [PathBuf::from("/a"), PathBuf::from("/b")]
    );
    assert_eq!(config.values.threads.map(|n| n.get()), Some(3));
    assert_eq!(
        (
            config.values.n_ctx_max,
            config.values.max_sequences.get(),
            config.values.queue_capacity
        ),
        (4096, 2, 7)
    );
    assert_eq!(
        (config.values.drain_grace, config.values.policy),
        (Duration::from_millis(500), Policy::Lru)
    );
    assert_eq!(config.values.prefix_cache, PrefixCache::Shared);
    assert_eq!(config.values.kv_type, Some(KvType::Q8_0));
    assert_eq!(config.values.host_kv, When::Never);
    let kv_disk = config.engine().kv_disk.unwrap();
    let found = (&*kv_disk.directory, kv_disk.budget, kv_disk.always);
    assert_eq!(found, (Path::new("/var/kv"), Budget::Percent(5.0), false));
    assert_eq!(config.values.direct_io, When::Always);
    assert_eq!(config.values.host_pressure, Some(2.5));
    assert_eq!(config.values.speculate, Some(true));

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
    assert_eq!(config.values.socket, Path::new("relative.sock"));
    assert_eq!(config.values.vram_budget, Budget::Percent(80.0));
    assert_eq!(
        config.values.model_dir,
        [PathBuf::from("c"), PathBuf::from("d")]
    );
    assert_eq!(config.values.threads.map(|n| n.get()), Some(9));
    assert_eq!(
        config.values.max_sequences.get(),
        2,
        "what no flag names stays the file's"
    );
}

#[test]
fn a_number_in_the_file_may_be_a_string() {
    assert_eq!(
        file("vram_budget = 1048576", &[])
            .unwrap()
            .values
            .vram_budget,
        Budget::Bytes(1 << 20)
    );
    assert_eq!(
        file("threads = \"4\"", &[])
            .unwrap()
            .values
            .threads
            .map(|n| n.get()),
        Some(4)
    );
}

#[test]
fn the_share_of_waits_for_memory_is_percent_or_off() {
    for (text, percent) in [
        ("host_pressure = 20", Some(20.0)),
        ("host_pressure = 0.5", Some(0.5)),
        ("host_pressure = \"20%\"", Some(20.0)),
        ("host_pressure = \"off\"", None),
    ] {
        assert_eq!(
            file(text, &[]).unwrap().values.host_pressure,
            percent,
            "{text}"
        );
    }
    let over = file("host_pressure = 20", &["--host-pressure", "off"]).unwrap();
    assert_eq!(over.values.host_pressure, None);
    let shown = over.settings();
    let shown = shown
        .iter()
        .find(|s| s.entry.key == "host_pressure")
        .unwrap();
    assert_eq!(shown.value.as_deref(), Some("\"off\""));
}

#[test]
fn the_packaged_configuration_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd/rocmforged.toml");
    let config = config(&["--config", path.to_str().unwrap()]).unwrap();
    assert_eq!(
        config.values.model_dir,
        [PathBuf::from("/var/lib/rocmforged/models")]
    );
}

#[test]
fn every_refusal_of_a_flag_names_it() {
    let long = format!("/{}", "s".repeat(107));
    let rows = [
        ("--device", "gpu", "auto, cpu, hip"),
        ("--vram-budget", "0", "80%"),
        ("--vram-budget", "-1", "80%"),
        ("--vram-budget", "2 bananas", "2GiB"),
        ("--threads", "0", "from 1 to"),
        ("--threads", "-2", "from 1 to"),
        ("--threads", "many", "from 1 to"),
        ("--threads", "1025", "from 1 to 1024"),
        ("--log", "info,=,", "rocmforge_engine=debug"),
        ("--log", "verbose", "'verbose' is no level"),
        (
            "--log",
            "warning,rocmforge_engine=debug",
            "'warning' is no level",
        ),
        ("--n-ctx-max", "0", "from 1 to"),
        ("--max-sequences", "0", "from 1 to"),
        ("--queue-capacity", "5000", "from 1 to 4096"),
        ("--drain-grace", "-1", "from 0 to 3600"),
        ("--drain-grace", "NaN", "from 0 to 3600"),
        ("--drain-grace", "1e9", "from 0 to 3600"),
        ("--policy", "random", "neither pass-aware nor lru"),
        ("--prefix-cache", "mine", "per-user"),
        ("--kv-type", "q4_0", "auto, f32, f16 and q8_0"),
        ("--speculate", "maybe", "auto"),
        ("--host-pressure", "0", "up to 100"),
        ("--host-pressure", "-5", "neither off nor a percentage"),
        ("--host-pressure", "101%", "up to 100"),
        ("--host-pressure", "NaN", "up to 100"),
        ("--host-pressure", "never", "neither off nor"),
        ("--otlp-endpoint", "http://collector", "http://HOST:PORT"),
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
        ("host_pressure = 0", "host_pressure", "--host-pressure"),
        ("host_pressure = \"ten\"", "host_pressure", "off"),
        ("otlp_endpoint = \"x\"", "otlp_endpoint", "--otlp-endpoint"),
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
        (
            "threads = 2\nvram_buget = 1",
            "line 2, column 1\n  |\n2 | vram_buget = 1\n  | ^^^^^^^^^^\nunknown field `vram_buget`; did you mean `vram_budget`?",
        ),
        ("zzz = 1", "unknown field `zzz`; `rocmforged --help` lists"),
        (
            "offload = \"auto\"",
            "unknown field `offload`: the setting is called `cpu_compute`",
        ),
        (
            "host_tier = \"auto\"",
            "unknown field `host_tier`: the setting is called `host_kv`",
        ),
        ("log = true", "expected a string or a number"),
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
    assert_eq!(config.values.model_dir, [Path::new("/a")]);
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

/// Settings of a directory with a file and others in `conf.d`.
pub(crate) fn files(
    main: &str,
    drop_ins: &[(&str, &str)],
) -> (tempfile::TempDir, Result<Config, ConfigError>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(&path, main).unwrap();
    std::fs::create_dir(dir.path().join("conf.d")).unwrap();
    for (name, text) in drop_ins {
        std::fs::write(dir.path().join("conf.d").join(name), text).unwrap();
    }
    let read = config(&["--config", path.to_str().unwrap(), "--policy", "lru"]);
    (dir, read)
}

#[test]
fn files_beside_the_file_are_read_by_name_and_the_last_one_wins() {
    let (dir, read) = files(
        "threads = 2\nn_ctx_max = 100\nmodel_dir = \"/a\"\n",
        &[
            ("20-b.toml", "threads = 4\n"),
            (
                "10-a.toml",
                "threads = 3\nmodel_dir = [\"/b\", \"/c\"]\npolicy = \"pass-aware\"\n",
            ),
            ("30-c.toml.dpkg-old", "threads = 9\n"),
            (".40-hidden.toml", "threads = 9\n"),
        ],
    );
    let config = read.unwrap();
    assert_eq!(config.values.threads.map(|n| n.get()), Some(4));
    assert_eq!(config.values.n_ctx_max, 100);
    assert_eq!(
        config.values.model_dir,
        [PathBuf::from("/b"), PathBuf::from("/c")]
    );
    assert_eq!(
        config.values.policy,
        Policy::Lru,
        "a flag wins over all files"
    );

    let told = config.describe();
    let at = |name: &str| dir.path().join(name).display().to_string();
    for line in [
        format!("threads = 4  # {}", at("conf.d/20-b.toml")),
        format!("n_ctx_max = 100  # {}", at("config.toml")),
        format!("model_dir = [\"/b\", \"/c\"]  # {}", at("conf.d/10-a.toml")),
        "policy = \"lru\"  # command line".to_owned(),
        "queue_capacity = 320  # default".to_owned(),
        "# http_listen is not set".to_owned(),
    ] {
        assert!(told.lines().any(|l| l == line), "no '{line}' in\n{told}");
    }
    // What is printed is a file that says the same.
    let again = file(&told, &[]).unwrap();
    let values = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|l| !l.starts_with('#'));
        let value = |line: &str| line.split("  #").next().unwrap().to_owned();
        lines.map(value).collect()
    };
    assert_eq!(values(&again.describe()), values(&told));
}

#[test]
fn a_refusal_names_the_file_beside_the_file() {
    let rows = [
        (
            "threads = 0\n",
            &["threads in ", "10-a.toml", "from 1 to"][..],
        ),
        ("thread = 1\n", &["10-a.toml", "unknown field `thread`"]),
        (
            "http_listen = \"0.0.0.0:1\"\n",
            &["http_listen in ", "10-a.toml", "http_token_file"],
        ),
    ];
    for (text, words) in rows {
        let (_dir, read) = files("", &[("10-a.toml", text)]);
        let error = with_causes(&read.unwrap_err());
        for word in words {
            assert!(error.contains(word), "'{error}' lacks '{word}'");
        }
    }
    let many: Vec<_> = (0..65).map(|i| (format!("{i}.toml"), "")).collect();
    let many: Vec<_> = many
        .iter()
        .map(|(name, text)| (name.as_str(), *text))
        .collect();
    let (_dir, read) = files("", &many);
    assert!(read.unwrap_err().to_string().contains("more than 64 files"));
}

fn model(name: &str, path: &str, rest: &str) -> String {
    format!("[[model]]\nname = \"{name}\"\npath = \"{path}\"\n{rest}\n")
}

#[test]
fn models_are_declared_with_aliases_and_a_later_file_says_it_anew() {
    let first = model("a", "/m/a.gguf", "aliases = [\"x\"]")
        + &model(
            "b",
            "/m/b.gguf",
            "pin = true\ndraft = \"z\"\nmmproj = \"/m/mmproj.gguf\"",
        );
    let second = model(
        "a",
        "/m/a2.gguf",
        "aliases = [\"y\", \"z\"]\npreload = true",
    );
    let (_dir, read) = files(&first, &[("10-a.toml", &second)]);
    let models = read.unwrap().models;
    let names: Vec<_> = models.iter().map(|m| m.model.name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
    let (b, a) = (&models[0].model, &models[1].model);
    assert!(b.pin && !b.preload && b.aliases.is_empty());
    assert_eq!((b.draft.as_deref(), a.draft.as_deref()), (Some("z"), None));
    let projectors = [b, a].map(|model| model.mmproj.as_deref());
    assert_eq!(projectors, [Some(Path::new("/m/mmproj.gguf")), None]);
    assert!(a.preload && a.path == Path::new("/m/a2.gguf") && a.aliases == ["y", "z"]);
    assert!(models[1].file.ends_with("conf.d/10-a.toml"));
}

#[test]
fn a_refusal_of_a_declared_model_names_file_model_and_key() {
    let good = model("a", "/m/a.gguf", "aliases = [\"x\"]");
    let rows = [
        (
            model("b c", "/m", ""),
            "name of [[model]] 1 ('b c')",
            "letters, digits",
        ),
        (
            model("b", "m.gguf", ""),
            "path of [[model]] 1 ('b')",
            "absolute",
        ),
        (
            model("b", "/m", "aliases = [\"\"]"),
            "aliases of [[model]] 1 ('b')",
            "no model name",
        ),
        (
            model("b", "/m", "aliases = [\"x\"]"),
            "aliases of [[model]] 1 ('b')",
            "'x' is a name of the model 'a'",
        ),
        (
            model("b", "/m", "aliases = [\"a\"]"),
            "aliases of [[model]] 1 ('b')",
            "'a' is a name of the model 'a'",
        ),
        (
            model("x", "/m", ""),
            "name of [[model]] 1 ('x')",
            "'x' is a name of the model 'a'",
        ),
        (
            model("b", "/m", "top_p = 1.5"),
            "top_p of [[model]] 1 ('b')",
            "at most 1",
        ),
        (
            model("b", "/m", "template = \"/no/such/file\""),
            "template of [[model]] 1 ('b')",
            "cannot be read",
        ),
        (
            model("b", "/m", "mmproj = \"mmproj.gguf\""),
            "mmproj of [[model]] 1 ('b')",
            "give an absolute path",
        ),
        (
            model("b", "/m", "draft = \"a b\""),
            "draft of [[model]] 1 ('b')",
            "no model name",
        ),
        (
            model("b", "/m", "aliases = [\"y\"]\ndraft = \"y\""),
            "draft of [[model]] 1 ('b')",
            "'y' leads back to 'b'",
        ),
        (
            model("b", "/m", "draft = \"a\"") + &model("a", "/m/a", "draft = \"b\""),
            "draft of [[model]] 1 ('b')",
            "'a' leads back to 'b', which cannot draft for itself",
        ),
        (
            // As Ollama's clients write names.
            model("b", "/m", "draft = \"b:latest\""),
            "draft of [[model]] 1 ('b')",
            "'b:latest' leads back to 'b'",
        ),
        (
            model("b", "/m/b", "") + &model("b", "/m/c", ""),
            "name of [[model]] 2 ('b')",
            "declares it twice",
        ),
        (
            model("b", "/m", "pinned = true"),
            "10-a.toml",
            "unknown field `pinned`",
        ),
        (
            "[[model]]\nname = \"b\"\n".to_owned(),
            "10-a.toml",
            "missing field `path`",
        ),
    ];
    for (text, place, cause) in rows {
        let (_dir, read) = files(&good, &[("10-a.toml", &text)]);
        let error = with_causes(&read.expect_err(&text));
        for word in [place, cause, "10-a.toml"] {
            assert!(error.contains(word), "'{error}' lacks '{word}'");
        }
    }
}

//! A daemon that is idle gives memory back, as is configured when it reads its settings.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::declared::complete;
use crate::program::{PATIENCE, host, start_logging_to};
use crate::reload::{logged, reload};

/// What the daemon measures of itself.
fn metrics(http: &Path) -> String {
    let mut stream = UnixStream::connect(http).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn an_idle_daemon_gives_memory_back_once_its_settings_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let (config, log) = (dir.path().join("config.toml"), dir.path().join("log"));
    let http = dir.path().join("http");
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    fs::write(&config, "").unwrap();
    let mut command = host(dir.path(), &dir.path().join("s"));
    command.arg("--model-dir").arg(fixtures);
    command.arg("--http-socket").arg(&http);
    command.arg("--config").arg(&config);
    let file = fs::File::create(&log).unwrap();
    let (daemon, notify) = start_logging_to(dir.path(), &mut command, file);
    let metric = |name: &str| {
        let text = metrics(&http);
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
            .trim()
            .to_owned()
    };
    let model = "tiny-llama-Q4_K_M";
    assert_eq!(complete(&http, model), "HTTP/1.1 200 OK");
    assert_eq!(metric("rocmforge_memory_released "), "0");

    fs::write(
        &config,
        "idle_release = 1\nidle_release_host = \"on\"\nqueue_capacity = 17\n",
    )
    .unwrap();
    reload(&daemon, &notify);
    logged(&log, &["reloaded", "setting=\"idle_release\"", "now=\"1\""]);
    logged(&log, &["reloaded", "setting=\"idle_release_host\""]);
    logged(&log, &["not reloaded", "setting=\"queue_capacity\""]);
    let give_up = Instant::now() + PATIENCE;
    while metric("rocmforge_memory_released ") == "0" {
        assert!(Instant::now() < give_up, "nothing was released");
        std::thread::sleep(Duration::from_millis(20));
    }
    logged(&log, &["memory is released", "kept_bytes=0"]);
    assert_eq!(metric("rocmforge_memory_releases_total "), "1");
    // The CPU has nothing to close.
    assert_eq!(metric("rocmforge_device_closed "), "0");
    assert_eq!(complete(&http, model), "HTTP/1.1 200 OK");
    logged(&log, &["released memory is taken again"]);

    // Nothing has changed, then it is off again.
    reload(&daemon, &notify);
    fs::write(&config, "").unwrap();
    reload(&daemon, &notify);
    logged(
        &log,
        &["reloaded", "setting=\"idle_release\"", "before=\"1\""],
    );
}

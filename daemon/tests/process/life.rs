//! Exit codes, readiness, the socket, one daemon after another.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::program::{PROGRAM, host, refused, said, start, start_logging_to};
use crate::reload::logged;

#[test]
fn settings_that_cannot_be_used_end_with_2_and_name_the_flag() {
    let rows: [&[&str]; 6] = [
        &["--threads", "0"],
        &["--config", "/nonexistent.toml"],
        &["--model-dir", "/etc/passwd"],
        &["--vram-budget", "lots"],
        &["--otlp-endpoint", "https://127.0.0.1:4318"],
        &["--no-such-flag"],
    ];
    for arguments in rows {
        let output = refused(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(
            text.contains(arguments[0]),
            "'{text}' lacks {}",
            arguments[0]
        );
        assert!(output.stdout.is_empty(), "messages belong on stderr");
    }
}

#[test]
fn a_socket_that_cannot_be_had_ends_with_1_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let output = refused(&["--device", "host", "--socket", file.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("not a socket") && text.contains("--socket"),
        "{text}"
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn it_says_ready_when_it_serves_and_drains_on_each_signal() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let (daemon, notify) = start(dir.path(), &mut host(dir.path(), &socket));
        assert!(UnixStream::connect(&socket).is_ok());
        daemon.signal(signal);
        assert!(said(&notify).contains("STOPPING=1"));
        let (code, log) = daemon.ended();
        assert_eq!(code, Some(0), "{signal}: {log}");
        assert!(!socket.exists(), "the socket is removed");
    }
}

#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    let output = host(dir.path(), &socket).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains(&format!("process {}", daemon.0.id())),
        "{text}"
    );
    assert!(UnixStream::connect(&socket).is_ok());
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
}

#[test]
fn a_daemon_that_was_killed_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    drop(daemon);
    assert!(socket.exists());
    std::fs::remove_file(dir.path().join("notify")).unwrap();
    let (daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    assert!(UnixStream::connect(&socket).is_ok());
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
}

#[test]
fn a_socket_passed_by_systemd_is_served_and_left_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let passed = dir.path().join("passed");
    let listener = UnixListener::bind(&passed).unwrap();
    // The first passed descriptor is 3; a shell moves it there and names its own
    // process, which exec keeps.
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg("exec 3<&0 0</dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\"");
    command.arg(PROGRAM).args([
        "--device",
        "host",
        "--threads",
        "1",
        "--vram-budget",
        "64MiB",
    ]);
    command
        .arg("--socket")
        .arg(dir.path().join("unused"))
        .stdin(Stdio::from(OwnedFd::from(listener)));
    let (daemon, _notify) = start(dir.path(), &mut command);
    assert!(UnixStream::connect(&passed).is_ok());
    assert!(!dir.path().join("unused").exists());
    daemon.signal(Signal::SIGTERM);
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(passed.exists(), "systemd owns its file");
}

#[test]
fn too_few_file_descriptors_are_named() {
    let output = Command::new("sh")
        .args([
            "-c",
            "ulimit -n 8; exec \"$0\" --device host --socket \"$1\"",
        ])
        .arg(PROGRAM)
        .arg(tempfile::tempdir().unwrap().path().join("s"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("RLIMIT_NOFILE") && text.contains("ulimit -n"),
        "{text}"
    );
}

#[test]
fn a_budget_that_the_device_cannot_have_ends_with_2_and_names_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let output = host(dir.path(), &socket)
        .args(["--config", "/dev/null"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("/dev/null"), "{text}");

    let config = dir.path().join("rocmforged.toml");
    std::fs::write(&config, "device = 'host'\nvram_budget = '900TiB'\n").unwrap();
    let socket = socket.to_str().unwrap();
    let output = refused(&["--config", config.to_str().unwrap(), "--socket", socket]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in ["vram_budget in", "rocmforged.toml", "--vram-budget"] {
        assert!(text.contains(word), "'{text}' lacks {word}");
    }
    let output = refused(&[
        "--device",
        "host",
        "--vram-budget",
        "1KiB",
        "--socket",
        socket,
    ]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--vram-budget: "), "{text}");
}

#[test]
fn a_bounded_address_space_is_named_where_the_host_device_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("sh")
        .args([
            "-c",
            "ulimit -v 1000000; exec \"$0\" --device host --socket \"$1\"",
        ])
        .arg(PROGRAM)
        .arg(dir.path().join("s"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains("RLIMIT_AS") && text.contains("ulimit -v"),
        "{text}"
    );
}

#[test]
fn settings_are_checked_without_a_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let good = host(dir.path(), &socket)
        .arg("--check-config")
        .output()
        .unwrap();
    assert_eq!(good.status.code(), Some(0));
    assert!(good.stderr.is_empty() && !socket.exists());
    let told = String::from_utf8(good.stdout).unwrap();
    assert!(told.contains("threads = 1  # command line"), "{told}");
    assert!(told.contains("log = \"info\"  # default"), "{told}");
    let bad = refused(&["--check-config", "--model-dir", "/nonexistent"]);
    assert_eq!(bad.status.code(), Some(2));
    let file = dir.path().join("config.toml");
    let declared = "[[model]]\nname = \"absent\"\npath = \"/nonexistent/m.gguf\"\n";
    std::fs::write(&file, declared).unwrap();
    let bad = host(dir.path(), &socket)
        .arg("--check-config")
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8(bad.stderr).unwrap();
    assert_eq!(bad.status.code(), Some(2), "{said}");
    for word in [
        "'absent'",
        "config.toml",
        "/nonexistent/m.gguf",
        "model directory",
    ] {
        assert!(said.contains(word), "'{said}' lacks '{word}'");
    }
}

#[test]
fn an_admin_role_that_is_open_to_everyone_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let checked = |settings: &[&str]| {
        let mut daemon = host(dir.path(), &dir.path().join("s"));
        let output = daemon.arg("--check-config").args(settings).output();
        let output = output.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    // It is a setting all the same.
    let (code, said) = checked(&["--use-by", "0", "--admin-by", "*"]);
    assert_eq!(code, Some(0), "{said}");
    for word in ["admin_by", "everyone", "budget", "@groups"] {
        assert!(said.contains(word), "'{said}' lacks '{word}'");
    }
    assert_eq!(checked(&[]), (Some(0), String::new()), "the default");
    for admins in ["0", "@0"] {
        assert_eq!(
            checked(&["--admin-by", admins]),
            (Some(0), String::new()),
            "{admins}"
        );
    }
}

#[test]
fn a_draft_that_is_neither_declared_nor_a_file_fails_the_check() {
    let dir = tempfile::tempdir().unwrap();
    let (file, model) = (dir.path().join("config.toml"), dir.path().join("m.gguf"));
    std::fs::write(&model, "x").unwrap();
    std::fs::write(dir.path().join("small.gguf"), "x").unwrap();
    let checked = |draft: &str| {
        let declared =
            format!("[[model]]\nname = \"large\"\npath = {model:?}\ndraft = {draft:?}\n");
        std::fs::write(&file, declared).unwrap();
        let mut daemon = host(dir.path(), &dir.path().join("s"));
        let output = daemon.arg("--check-config").arg("--config").arg(&file);
        let output = output.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    assert_eq!(checked("small"), (Some(0), String::new()));
    assert_eq!(checked("small:latest"), (Some(0), String::new()));
    // The file of a declared model has the declared name alone.
    for draft in ["absent", "m"] {
        let (code, said) = checked(draft);
        assert_eq!(code, Some(2), "{said}");
        for word in [
            &format!("'{draft}'"),
            "'large'",
            "config.toml",
            "declare it",
        ] {
            assert!(said.contains(word), "'{said}' lacks '{word}'");
        }
    }
}

#[test]
fn variables_that_are_no_settings_and_values_that_are_none_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let with = |name: &str, value: &str| {
        let mut daemon = host(dir.path(), &socket);
        daemon.arg("--check-config").env(name, value);
        let output = daemon.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    for name in ["ROCMFORGED_VRAM_BUDGETS", "ROCMFORGED_SOCKET"] {
        let (code, said) = with(name, "2GiB");
        assert_eq!(code, Some(0), "{said}");
        assert!(
            said.contains(name) && said.contains("is not read"),
            "{said}"
        );
    }
    // Kubernetes has these of a service with the daemon's name.
    for name in [
        "ROCMFORGED_SERVICE_HOST",
        "ROCMFORGED_SERVICE_PORT_HTTP",
        "ROCMFORGED_PORT",
        "ROCMFORGED_PORT_8080_TCP_ADDR",
        "ROCMFORGED_N_CTX_MAX",
    ] {
        assert_eq!(with(name, "8080"), (Some(0), String::new()), "{name}");
    }
    let mut daemon = host(dir.path(), &socket);
    daemon.arg("--check-config");
    daemon.env("ROCMFORGED_N_CTX_MAX", OsStr::from_bytes(b"80\xff"));
    let output = daemon.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("ROCMFORGED_N_CTX_MAX"), "{said}");
    let (code, said) = with("ROCMFORGED_HTTP_LISTEN", "0.0.0.0:8080");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("ROCMFORGED_HTTP_LISTEN"), "{said}");
}

/// A disk that is not mounted yet kept the daemon from starting, with an exit code after which
/// systemd does not try again; a model that is linked into a directory was silently not there.
#[test]
fn a_missing_model_directory_and_a_link_out_of_one_are_told_and_the_rest_is_served() {
    let ground = tempfile::tempdir().unwrap();
    let root = ground.path().canonicalize().unwrap();
    let (models, away, nvme) = (root.join("models"), root.join("away"), root.join("nvme"));
    std::fs::create_dir(&models).unwrap();
    std::fs::create_dir(&nvme).unwrap();
    let run = root.join("run");
    std::fs::create_dir(&run).unwrap();
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/tiny-llama-Q4_K_M.gguf");
    std::fs::copy(&fixture, nvme.join("linked.gguf")).unwrap();
    std::os::unix::fs::symlink(nvme.join("linked.gguf"), models.join("linked.gguf")).unwrap();
    let late = away.join("late.gguf");
    let config = root.join("config.toml");
    let declared = format!(
        "[[model]]\nname = \"late\"\npath = \"{}\"\n",
        late.display()
    );
    std::fs::write(&config, declared).unwrap();
    let command = || {
        let mut command = host(&run, &run.join("s"));
        command.arg("--config").arg(&config);
        command.arg("--model-dir").arg(&models);
        command.arg("--model-dir").arg(&away);
        command
    };
    let is_not_there = format!("the model directory {} is not there", away.display());
    let allow = format!("--model-dir {}", nvme.display());
    let output = command().arg("--check-config").output().unwrap();
    let checked = String::from_utf8(output.stderr).unwrap();
    assert!(
        checked.contains(&is_not_there) && checked.contains(&allow),
        "{checked}"
    );
    let log = root.join("log");
    let (mut daemon, _notify) =
        start_logging_to(&root, &mut command(), std::fs::File::create(&log).unwrap());
    logged(&log, &[&is_not_there, "mount or create it"]);
    logged(&log, &["linked.gguf", "not offered as a model", &allow]);
    // It is looked for again, and what is declared there is registered.
    std::fs::create_dir(root.join("mounted")).unwrap();
    std::fs::copy(&fixture, root.join("mounted/late.gguf")).unwrap();
    std::fs::rename(root.join("mounted"), &away).unwrap();
    logged(&log, &["a model directory answers now"]);
    logged(&log, &["as declared", "late.gguf", "code=Ok"]);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

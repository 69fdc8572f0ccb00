//! The Debian package: built by its one command, installed below a scratch root, run, upgraded,
//! removed and purged.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocmforge_tests::{binaries, fixtures, skip};

const CONFIG: &str = "etc/rocmforged/config.toml";

/// Each file that has to be there, and its mode.
const FILES: [(&str, u32); 22] = [
    ("usr/bin/rocmforged", 0o755),
    ("usr/bin/rocmforgectl", 0o755),
    ("usr/lib/systemd/system/rocmforged.service", 0o644),
    ("usr/lib/systemd/system/rocmforged.socket", 0o644),
    ("usr/lib/sysusers.d/rocmforged.conf", 0o644),
    ("usr/lib/tmpfiles.d/rocmforged.conf", 0o644),
    (CONFIG, 0o644),
    ("usr/share/man/man8/rocmforged.8.gz", 0o644),
    ("usr/share/man/man1/rocmforgectl.1.gz", 0o644),
    ("usr/share/man/man1/rocmforgectl-doctor.1.gz", 0o644),
    ("usr/share/bash-completion/completions/rocmforgectl", 0o644),
    ("usr/share/zsh/vendor-completions/_rocmforgectl", 0o644),
    ("usr/share/fish/vendor_completions.d/rocmforged.fish", 0o644),
    ("usr/share/doc/rocmforged/copyright", 0o644),
    ("usr/share/doc/rocmforged/changelog.gz", 0o644),
    ("usr/share/doc/rocmforged/README.md", 0o644),
    ("usr/lib/systemd/user/rocmforged.service", 0o644),
    ("usr/share/doc/rocmforged/examples/network.conf", 0o644),
    ("usr/share/doc/rocmforged/docs/operations.md", 0o644),
    (
        "usr/share/doc/rocmforged/packaging/monitoring/alerts.yaml",
        0o644,
    ),
    (
        "usr/share/doc/rocmforged/packaging/monitoring/dashboard.json",
        0o644,
    ),
    ("usr/share/lintian/overrides/rocmforged", 0o644),
];

/// What a command printed; it has to succeed.
fn output(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn build(out: &Path) -> PathBuf {
    let programs = binaries::rocmforged();
    assert_eq!(programs.parent(), binaries::rocmforgectl().parent());
    let path = output(
        Command::new(fixtures::workspace().join("packaging/deb.sh"))
            .arg("--binaries")
            .arg(programs.parent().expect("a directory"))
            .arg("--out")
            .arg(out)
            // A fast test needs no small file.
            .env("COMPRESSION", "gzip")
            .env("SOURCE_DATE_EPOCH", "1700000000"),
    );
    PathBuf::from(path.trim())
}

/// A root with an empty list of packages, on which maintainer scripts run without changing into it.
struct Root {
    dir: tempfile::TempDir,
}

impl Root {
    fn new() -> Root {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for part in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "run"] {
            fs::create_dir_all(dir.path().join(part)).expect("it is made");
        }
        fs::write(dir.path().join("var/lib/dpkg/status"), "").expect("it is written");
        Root { dir }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn dpkg(&self, arguments: &[&str], package: &Path) {
        let done = output(
            Command::new("dpkg")
                .arg(format!("--root={}", self.dir.path().display()))
                // No other package is there, and whoever tests need not be root.
                .args([
                    "--force-not-root",
                    "--force-script-chrootless",
                    "--force-depends",
                ])
                .args(["--force-confold", "--force-bad-path"])
                .args(arguments)
                .arg(package)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        );
        assert!(!done.contains("error"), "{done}");
    }

    fn is_there(&self, path: &str) -> bool {
        self.path(path).symlink_metadata().is_ok()
    }
}

/// Starts the installed daemon, has the installed client load a model and speak, and stops it.
fn serves(root: &Root) {
    let socket = root.path("run/test.sock");
    let daemon = Command::new(root.path("usr/bin/rocmforged"))
        .args([
            "--device",
            "host",
            "--threads",
            "1",
            "--vram-budget",
            "64MiB",
        ])
        .arg("--model-dir")
        .arg(fixtures::workspace().join("tests/fixtures"))
        .arg("--socket")
        .arg(&socket)
        .env_remove("NOTIFY_SOCKET")
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut daemon = Running(daemon);
    let give_up = Instant::now() + Duration::from_secs(60);
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        assert!(
            Instant::now() < give_up,
            "the installed daemon does not listen"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let ctl = |arguments: &[&str]| {
        let mut command = Command::new(root.path("usr/bin/rocmforgectl"));
        output(command.arg("--socket").arg(&socket).args(arguments))
    };
    ctl(&["load", "tiny-llama-Q4_K_M.gguf", "--name", "small"]);
    let text = ctl(&[
        "generate",
        "small",
        "Once",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
    ]);
    assert!(!text.trim().is_empty());
    let pid = i32::try_from(daemon.0.id()).expect("a process id");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGTERM)
        .expect("it runs");
    assert_eq!(daemon.0.wait().expect("it ends").code(), Some(0));
}

/// Once the programs were not stripped, the maintainer's host was localhost, and pages of the
/// README were not inside.
fn is_clean(root: &Root, package: &Path) {
    let doc = root.path("usr/share/doc/rocmforged");
    let page = fs::read_to_string(doc.join("README.md")).expect("it was installed");
    assert!(page.contains("](docs/"), "the README leads nowhere");
    let mut pages = vec![doc.clone()];
    while let Some(path) = pages.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("it is read").flatten();
            pages.extend(entries.map(|entry| entry.path()));
        } else if path.extension().is_some_and(|name| name == "md") {
            let dead = dead_links(&path);
            assert!(dead.is_empty(), "{}: {dead:?}", path.display());
        }
    }
    if Command::new("readelf").arg("--version").output().is_ok() {
        for program in ["usr/bin/rocmforged", "usr/bin/rocmforgectl"] {
            let sections = output(
                Command::new("readelf")
                    .args(["-SW"])
                    .arg(root.path(program)),
            );
            assert!(!sections.contains(".symtab"), "{program} is not stripped");
        }
    }
    let own = root.path("usr/bin/rocmforgectl");
    assert!(output(Command::new(own).arg("--version")).contains("rocmforgectl"));
    if Command::new("lintian").arg("--version").output().is_err() {
        skip("is_clean", "no lintian on this machine");
        return;
    }
    let mut lintian = Command::new("lintian");
    let said = lintian
        .arg("--allow-root")
        .arg(package)
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.is_empty(), "lintian: {said}");
}

/// Targets of a page's relative links that are not there.
fn dead_links(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).expect("UTF-8");
    let dir = page.parent().expect("a directory");
    let targets = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'));
    let paths = targets.map(|(target, _)| target.split('#').next().unwrap_or_default());
    let dead = paths.filter(|path| {
        let is_relative = !path.is_empty() && !path.contains([':', ' ', '\n']);
        is_relative && !dir.join(path).exists()
    });
    dead.map(str::to_owned).collect()
}

/// KiB of what a package holds, by its list: each file and directory rounded up.
///
/// Once they were the blocks of a file system, which has one more of a large file if it wrote it in
/// many pieces, so that two packages of the same files differed now and then.
fn kib_of(listed: &str) -> u64 {
    let size = |line: &str| {
        let size = line.split_whitespace().nth(2).and_then(|n| n.parse().ok());
        let size: u64 = size.expect("a size stands third");
        if line.starts_with('-') {
            size.div_ceil(1024)
        } else {
            1
        }
    };
    listed.lines().map(size).sum()
}

/// Kills what still runs when a test fails.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Whoever has ended needs neither.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_package_is_built_installed_run_upgraded_and_removed() {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        skip(
            "the_package_is_built_installed_run_upgraded_and_removed",
            "no dpkg-deb on this machine",
        );
        return;
    }
    let out = tempfile::tempdir().expect("a temporary directory");
    let package = build(out.path());

    let field = |name: &str| {
        let mut command = Command::new("dpkg-deb");
        output(command.arg("--field").arg(&package).arg(name))
    };
    assert_eq!(field("Package").trim(), "rocmforged");
    assert_eq!(field("Version").trim(), env!("CARGO_PKG_VERSION"));
    assert!(
        field("Depends").contains("libc6 (>= 2."),
        "{}",
        field("Depends")
    );
    let listed = output(Command::new("dpkg-deb").arg("--contents").arg(&package));
    let owners: Vec<_> = listed
        .lines()
        .filter(|line| !line.contains(" root/root "))
        .collect();
    assert!(owners.is_empty(), "{owners:?}");
    let size = field("Installed-Size").trim().parse();
    assert_eq!(size, Ok(kib_of(&listed)), "it is counted in blocks");
    let again = tempfile::tempdir().expect("a temporary directory");
    let second = build(again.path());
    let bytes = |path: &Path| fs::read(path).expect("it was built");
    assert!(bytes(&package) == bytes(&second), "two builds differ");

    let root = Root::new();
    root.dpkg(&["--install"], &package);
    for (path, mode) in FILES {
        let found = root.path(path).metadata();
        let found = found.unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(found.permissions().mode() & 0o7777, mode, "{path}");
        assert!(found.len() > 0, "{path} is empty");
    }
    assert!(root.path("etc/rocmforged/conf.d").is_dir());
    is_clean(&root, &package);
    if Command::new("systemd-sysusers")
        .arg("--version")
        .output()
        .is_ok()
    {
        let users = fs::read_to_string(root.path("etc/passwd")).expect("a user was made");
        assert!(users.contains("rocmforge:"), "{users}");
        assert!(root.path("var/lib/rocmforged/models").is_dir());
    }
    // Nothing is enabled.
    assert!(!root.is_there("etc/systemd/system"), "a unit is enabled");
    let sums = root.path("var/lib/dpkg/info/rocmforged.md5sums");
    output(
        Command::new("md5sum")
            .args(["--check", "--quiet"])
            .arg(sums)
            .current_dir(root.dir.path()),
    );
    let page = output(Command::new("gzip").arg("-dc").arg(root.path(FILES[7].0)));
    assert!(page.contains("check\\-config"), "{page}");

    let models = root.path("models");
    fs::create_dir(&models).expect("it is made");
    let told = output(
        Command::new(root.path("usr/bin/rocmforged"))
            .arg("--check-config")
            .arg("--config")
            .arg(root.path(CONFIG))
            .arg("--model-dir")
            .arg(&models),
    );
    assert!(told.contains("vram_budget = \"80%\""), "{told}");
    serves(&root);

    // What an administrator wrote stays through an upgrade, and a removal.
    let changed = "vram_budget = \"1GiB\"\n";
    fs::write(root.path(CONFIG), changed).expect("it is written");
    root.dpkg(&["--install"], &package);
    let kept = || fs::read_to_string(root.path(CONFIG)).expect("it stays");
    assert_eq!(kept(), changed);
    root.dpkg(&["--remove"], Path::new("rocmforged"));
    assert_eq!(kept(), changed);
    let left: Vec<_> = FILES
        .iter()
        .filter(|(path, _)| *path != CONFIG && root.is_there(path))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    root.dpkg(&["--purge"], Path::new("rocmforged"));
    assert!(!root.is_there("etc/rocmforged"));
}

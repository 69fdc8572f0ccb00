//! The units as systemd itself reads them.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_tests::{fixtures, skip};

#[test]
fn units_verify() {
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        skip("units_verify", "no systemd-analyze on this machine");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let copy = |from: &str, to: &Path| {
        let text = std::fs::read_to_string(fixtures::workspace().join("systemd").join(from))
            .expect("the unit is committed");
        // The programs need not be installed where the units are checked.
        let text = text.replace("/usr/bin/rocmforgectl", "/bin/true");
        let text = text.replace("/usr/bin/rocmforged", "/bin/true");
        std::fs::create_dir_all(to.parent().expect("a directory")).expect("it is made");
        std::fs::write(to, text).expect("a copy of the unit");
    };
    let (system, user) = (dir.path().join("system"), dir.path().join("user"));
    copy("rocmforged.service", &system.join("rocmforged.service"));
    copy("rocmforged.socket", &system.join("rocmforged.socket"));
    copy("user/rocmforged.service", &user.join("rocmforged.service"));
    let units = [
        system.join("rocmforged.service"),
        system.join("rocmforged.socket"),
    ];
    verify(&["verify"], &units);
    // With the drop-in that opens it to networks.
    copy(
        "network.conf",
        &system.join("rocmforged.service.d/network.conf"),
    );
    verify(&["verify"], &units);
    verify(&["--user", "verify"], &[user.join("rocmforged.service")]);
}

/// Has systemd read the units, which are all right if it says nothing of them.
fn verify(arguments: &[&str], units: &[PathBuf]) {
    let output = Command::new("systemd-analyze")
        .args(arguments)
        .args(units)
        // A manager of a user's units has one.
        .env("XDG_RUNTIME_DIR", std::env::temp_dir())
        .output()
        .expect("systemd-analyze started before");
    let said = String::from_utf8_lossy(&output.stderr);
    // Complaints about other units of the machine are not ours.
    let ours: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("rocmforged"))
        .collect();
    assert!(ours.is_empty(), "{}", ours.join("\n"));
}

/// Once five failures in a row left service and socket failed, and a killed child stopped the
/// service.
#[test]
fn the_units_give_nothing_up() {
    let dir = fixtures::workspace().join("systemd");
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).expect("it is committed");
    for (unit, lines) in [
        (
            "rocmforged.service",
            &[
                "StartLimitIntervalSec=0",
                "Restart=on-failure",
                "RestartPreventExitStatus=2",
                "OOMPolicy=continue",
                "FileDescriptorStoreMax=64",
                "ExecReload=/usr/bin/env rocmforgectl reload",
                "Wants=rocmforged.socket",
            ][..],
        ),
        ("rocmforged.socket", &["TriggerLimitIntervalSec=0"]),
        (
            "user/rocmforged.service",
            &["StartLimitIntervalSec=0", "Restart=on-failure"],
        ),
    ] {
        let text = read(unit);
        for line in lines {
            assert!(text.lines().any(|own| own == *line), "{unit} lacks {line}");
        }
    }
}

//! The units as systemd itself reads them.

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
    for unit in ["rocmforged.service", "rocmforged.socket"] {
        let text = std::fs::read_to_string(fixtures::workspace().join("systemd").join(unit))
            .expect("the unit is committed");
        // The daemon need not be installed where the units are checked.
        let text = text.replace("/usr/bin/rocmforged", "/bin/true");
        std::fs::write(dir.path().join(unit), text).expect("a copy of the unit");
    }
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(dir.path().join("rocmforged.service"))
        .arg(dir.path().join("rocmforged.socket"))
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

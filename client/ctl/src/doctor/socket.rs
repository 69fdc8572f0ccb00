//! Where the daemon listens, and who may connect.

use std::path::{Path, PathBuf};

use super::Finding;
use super::daemon::Told;
use super::system::System;

const SUBJECT: &str = "socket";

/// Findings about the socket paths that a client tries, in order.
pub(super) fn findings(system: &System, paths: &[PathBuf], told: &Told) -> Vec<Finding> {
    let there: Vec<_> = paths
        .iter()
        .filter_map(|path| Some((path, system.access(path)?)))
        .collect();
    if there.is_empty() {
        let tried: Vec<_> = paths.iter().map(|p| p.display().to_string()).collect();
        return vec![Finding::fail(
            SUBJECT,
            format!("there is none at {}", tried.join(", ")),
            "systemctl enable --now rocmforged.service, or start rocmforged",
        )];
    }
    let who = system.identity();
    let mut findings = Vec::new();
    for (path, access) in there {
        let (owner, group) = (system.user(access.uid), system.group(access.gid));
        let connects = match access.mode & 0o006 {
            0o006 => "everyone may connect".to_owned(),
            _ if access.mode & 0o060 == 0o060 => {
                format!("{owner} and members of {group} may connect")
            }
            _ => format!("only {owner} may connect"),
        };
        let shown = format!("{} (mode {}): {connects}", path.display(), access.octal());
        if !access.is_open_to(&who) {
            let user = system.user(who.uid);
            findings.push(Finding::fail(
                SUBJECT,
                format!("{shown}, and {user} may not"),
                system.joining(access.gid, &user, ""),
            ));
        } else if let Some(error) = told.refused(path) {
            findings.push(Finding::fail(
                SUBJECT,
                format!("{shown}; {error}"),
                dead(path),
            ));
        } else {
            findings.push(Finding::ok(SUBJECT, shown));
        }
    }
    findings
}

fn dead(path: &Path) -> String {
    format!(
        "no daemon answers there: look at `systemctl status rocmforged` and `journalctl -u rocmforged`; a socket \
         that a killed daemon left is taken over by the next one ({})",
        path.display()
    )
}

//! The model directories and the files below them, as the daemon sees them; where none runs, what
//! its program says of the configuration.

use std::path::Path;

use rocmforge_client::proto::v1::ListFilesResponse;

use super::Finding;
use super::daemon::{Told, run};
use crate::context::Context;
use crate::human::plural;

const SUBJECT: &str = "models";
/// Findings about files that are shown.
const SHOWN_MAX: usize = 16;

/// Findings about model directories. A machine that is checked by `--root` has no daemon of ours.
pub(super) async fn findings(context: &Context, told: &Told, is_own: bool) -> Vec<Finding> {
    if told.pid().is_some() {
        let listed = async { context.connect().await?.list_files().await };
        return match listed.await {
            Ok(found) => of_list(&found),
            Err(error) => vec![Finding::warn(
                SUBJECT,
                format!("the daemon does not list its files: {error}"),
                "see its log",
            )],
        };
    }
    let Some(program) = told.program().filter(|_| is_own).map(Path::to_owned) else {
        return Vec::new();
    };
    let checked = tokio::task::spawn_blocking(move || run(&program, "--check-config")).await;
    match checked {
        Ok(Ok(output)) => of_check(&String::from_utf8_lossy(&output.stderr)),
        _ => Vec::new(),
    }
}

/// What is wrong and what to do about it, of a sentence of the daemon.
fn warning(text: &str) -> Finding {
    match text.split_once("; ") {
        Some((found, todo)) => Finding::warn(SUBJECT, found, todo),
        None => Finding::warn(SUBJECT, text, "see `rocmforgectl files`"),
    }
}

fn of_list(found: &ListFilesResponse) -> Vec<Finding> {
    let models = plural(found.files.len() as u64, "model file");
    let dirs = match found.directories.len() {
        1 => "1 model directory".to_owned(),
        n => format!("{n} model directories"),
    };
    let mut findings = vec![Finding::ok(SUBJECT, format!("{models} in {dirs}"))];
    let dirs = found.directories.iter().filter(|d| !d.trouble.is_empty());
    findings.extend(dirs.map(|d| warning(&format!("model directory {} {}", d.path, d.trouble))));
    let (troubles, others): (Vec<_>, Vec<_>) = found.unserved.iter().partition(|f| f.is_trouble);
    let told = troubles.iter().take(SHOWN_MAX);
    findings.extend(told.map(|file| warning(&format!("{}: {}", file.path, file.reason))));
    if troubles.len() > SHOWN_MAX {
        let more = format!("{} more files are not offered", troubles.len() - SHOWN_MAX);
        findings.push(Finding::warn(SUBJECT, more, "see `rocmforgectl files`"));
    }
    if !others.is_empty() {
        let others = plural(others.len() as u64, "file");
        let told = format!("{others} of other kinds (`rocmforgectl files` says which)");
        findings.push(Finding::ok(SUBJECT, told));
    }
    findings
}

/// The remarks of `--check-config`, a line each.
fn of_check(text: &str) -> Vec<Finding> {
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("rocmforged: "));
    lines.take(SHOWN_MAX).map(warning).collect()
}

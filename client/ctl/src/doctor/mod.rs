//! doctor: what this machine has and lacks for a daemon, and what to do about it.
//!
//! Looks at the kernel's files (`machine`: cards, drivers, device nodes; `limits`: memory;
//! `socket`) and asks the daemon, if one runs, or its program (`daemon`: runtimes, versions). With
//! a root other than `/` it reads the files below that, for tests and for machines that are looked
//! at from outside.
//!
//! *Invariant:* what is read has a bound (`FILE_MAX_BYTES` and `ENTRIES_MAX` of `System`). Nothing
//! is changed; a file that is not there is a finding or none, and never ends the command.

mod daemon;
mod environment;
mod files;
mod limits;
mod machine;
mod socket;
mod system;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::bail;
use serde_json::{Value, json};

use crate::context::Context;
use crate::human::{clean, plural};

use self::machine::Machine;
use self::system::System;

/// Severity of a finding: fine, a warning or a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Ok,
    Warn,
    Fail,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        }
    }
}

/// One line of the doctor's report.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    level: Level,
    /// What the finding is about.
    subject: &'static str,
    /// What `doctor` found.
    found: String,
    /// What to do, where something is to be done.
    todo: Option<String>,
}

impl Finding {
    fn ok(subject: &'static str, found: impl Into<String>) -> Finding {
        Finding {
            level: Level::Ok,
            subject,
            found: found.into(),
            todo: None,
        }
    }

    fn warn(subject: &'static str, found: impl Into<String>, todo: impl Into<String>) -> Finding {
        Finding {
            level: Level::Warn,
            subject,
            found: found.into(),
            todo: Some(todo.into()),
        }
    }

    fn fail(subject: &'static str, found: impl Into<String>, todo: impl Into<String>) -> Finding {
        Finding {
            level: Level::Fail,
            ..Finding::warn(subject, found, todo)
        }
    }

    fn json(&self) -> Value {
        json!({
            "level": self.level.word(),
            "subject": self.subject,
            "found": self.found,
            "todo": self.todo,
        })
    }
}

/// Looks, and prints a line a finding.
///
/// # Errors
/// When something fails, or the output takes nothing.
pub(crate) async fn doctor(context: &mut Context, root: Option<&Path>) -> anyhow::Result<()> {
    let system = System::below(root.unwrap_or(Path::new("/")));
    let machine = Machine::of(&system);
    // Another root is another machine: a daemon of this one tells nothing of it, unless its socket
    // is named.
    let asks = root.is_none() || context.socket_is_given();
    let told = daemon::ask(context, asks, root.is_some()).await;
    let mut findings = machine.findings(&system);
    findings.extend(daemon::runtimes(&told, &machine));
    findings.extend(environment::findings(&system, &machine, told.pid()));
    findings.extend(limits::findings(&system, &machine, told.pid()));
    findings.extend(socket::findings(&system, &socket_paths(context), &told));
    findings.extend(daemon::versions(&told));
    findings.extend(files::findings(context, &told, root.is_none()).await);
    let failed = findings.iter().filter(|f| f.level == Level::Fail).count();
    context.output.answer(
        || json!({"findings": findings.iter().map(Finding::json).collect::<Vec<_>>()}),
        || text(&findings),
    )?;
    if failed > 0 {
        bail!("{} to fix", plural(failed as u64, "failure"));
    }
    Ok(())
}

fn socket_paths(context: &Context) -> Vec<PathBuf> {
    match context.socket() {
        Some(path) => vec![path.to_owned()],
        None => rocmforge_client::proto::socket_candidates(),
    }
}

fn text(findings: &[Finding]) -> String {
    let wide = findings.iter().map(|f| f.subject.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let (level, subject) = (finding.level.word(), finding.subject);
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "{level:<4}  {subject:<wide$}  {}",
            clean(&finding.found)
        );
        if let Some(todo) = &finding.todo {
            let _ = writeln!(text, "{:4}  {:wide$}  -> {}", "", "", clean(todo));
        }
    }
    text
}

//! A Python with the packages of tests/python/requirements.txt, or the reason why there is none.
//!
//! `ROCMFORGE_PYTHON` names the interpreter, and then it has to work. Without it `python3` is
//! tried, and a test that needs what it lacks is skipped with a printed reason.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::{fixtures, skip};

/// Environment variable that names the interpreter.
pub const PYTHON_ENV: &str = "ROCMFORGE_PYTHON";

/// An interpreter that can import what was asked for.
#[derive(Debug, Clone)]
pub struct Python {
    interpreter: PathBuf,
}

impl Python {
    /// The interpreter if it imports `modules`; otherwise prints that `test` is skipped, and why.
    ///
    /// # Panics
    /// When `ROCMFORGE_PYTHON` names an interpreter that lacks a module.
    pub fn find(test: &str, modules: &[&str]) -> Option<Python> {
        let given = std::env::var_os(PYTHON_ENV).filter(|path| !path.is_empty());
        let interpreter = given
            .clone()
            .map_or_else(|| PathBuf::from("python3"), PathBuf::from);
        let tried = Command::new(&interpreter)
            .args(["-c", &format!("import {}", modules.join(", "))])
            .output();
        let reason = match tried {
            Ok(output) if output.status.success() => return Some(Python { interpreter }),
            Ok(output) => last_line(&output.stderr),
            Err(error) => error.to_string(),
        };
        let shown = interpreter.display();
        assert!(
            given.is_none(),
            "{PYTHON_ENV}={shown} cannot import {}: {reason}",
            modules.join(", ")
        );
        skip(
            test,
            &format!(
                "{shown}: {reason} (pip install -r tests/python/requirements.txt, or set {PYTHON_ENV})"
            ),
        );
        None
    }

    /// The interpreter that the environment variable `name` names; otherwise prints that `test` is
    /// skipped. For packages that are too large to be installed with the others.
    pub fn named(test: &str, name: &str, packages: &str) -> Option<Python> {
        let given = std::env::var_os(name).filter(|path| !path.is_empty());
        if given.is_none() {
            skip(
                test,
                &format!("{name} names no interpreter with {packages}"),
            );
        }
        given.map(|path| Python {
            interpreter: path.into(),
        })
    }

    /// Runs a script of tests/python and gives its standard output.
    ///
    /// # Panics
    /// When it fails; its standard error is in the message.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, script: &str, arguments: &[S]) -> String {
        let output = self.output(script, arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{script} failed with {}:\n{stderr}",
            output.status
        );
        String::from_utf8(output.stdout).expect("the scripts print UTF-8")
    }

    /// Runs a script of tests/python.
    ///
    /// # Panics
    /// When the interpreter does not start.
    pub fn output<S: AsRef<std::ffi::OsStr>>(&self, script: &str, arguments: &[S]) -> Output {
        Command::new(&self.interpreter)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(script_path(script))
            .args(arguments)
            .output()
            .expect("the interpreter started before")
    }
}

fn script_path(script: &str) -> PathBuf {
    fixtures::workspace()
        .join(Path::new("tests/python"))
        .join(script)
}

fn last_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    text.lines().last().unwrap_or("it says nothing").to_owned()
}

//! Node with the packages of tests/node/package-lock.json, or the reason why there is none.
//!
//! `ROCMFORGE_NODE` names the program and `ROCMFORGE_NODE_MODULES` the directory with the packages;
//! given, they have to work. Without them `node` and tests/node/node_modules are tried, and a test
//! that needs what is missing is skipped with a printed reason.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{fixtures, skip};

/// Environment variable that names the program.
pub const NODE_ENV: &str = "ROCMFORGE_NODE";

/// Environment variable that names the directory `node_modules`.
pub const MODULES_ENV: &str = "ROCMFORGE_NODE_MODULES";

/// Environment variable that names the directory `node_modules` of tests/node/programs.
const PROGRAMS_ENV: &str = "ROCMFORGE_NODE_PROGRAMS";

/// The AI SDK asks for it.
const MAJOR_MIN: u32 = 22;

/// Node, and packages for its scripts.
#[derive(Debug, Clone)]
pub struct Node {
    program: PathBuf,
    modules: PathBuf,
}

impl Node {
    /// Node, if it is new enough and the packages are there; otherwise prints that
    /// `test` is skipped, and why.
    ///
    /// # Panics
    /// When the environment names one that cannot be used.
    pub fn find(test: &str) -> Option<Node> {
        let named = |name| std::env::var_os(name).filter(|path| !path.is_empty());
        let given = named(NODE_ENV).is_some() || named(MODULES_ENV).is_some();
        let node = Node {
            program: named(NODE_ENV).map_or_else(|| "node".into(), PathBuf::from),
            modules: named(MODULES_ENV)
                .map_or_else(|| scripts().join("node_modules"), PathBuf::from),
        };
        let reason = match node.fault() {
            None => return Some(node),
            Some(reason) => reason,
        };
        assert!(!given, "{NODE_ENV}, {MODULES_ENV}: {reason}");
        skip(
            test,
            &format!("{reason} (npm ci in tests/node, or set {NODE_ENV} and {MODULES_ENV})"),
        );
        None
    }

    /// Node with the programs of tests/node/programs, hundreds of megabytes that are used where the
    /// environment names them alone; otherwise prints that `test` is skipped, and why.
    ///
    /// # Panics
    /// When they are named and there is no Node.
    pub fn with_programs(test: &str) -> Option<Node> {
        let Some(modules) = std::env::var_os(PROGRAMS_ENV).filter(|path| !path.is_empty()) else {
            let how = format!(
                "npm install in tests/node/programs, and set {PROGRAMS_ENV} to its node_modules"
            );
            skip(test, &format!("no programs ({how})"));
            return None;
        };
        let node = Node::find(test).map(|node| Node {
            modules: PathBuf::from(modules),
            ..node
        });
        Some(node.expect("a Node for the programs that are named"))
    }

    fn fault(&self) -> Option<String> {
        let shown = self.program.display();
        let version = match Command::new(&self.program).arg("--version").output() {
            Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            Err(error) => return Some(format!("{shown}: {error}")),
        };
        let major = version
            .trim_start_matches('v')
            .split('.')
            .next()
            .and_then(|n| n.parse::<u32>().ok());
        if major.is_none_or(|major| major < MAJOR_MIN) {
            return Some(format!("{shown} is {version}, not {MAJOR_MIN} or newer"));
        }
        let missing = !self.modules.join("ai/package.json").is_file();
        missing.then(|| format!("no packages in {}", self.modules.display()))
    }

    /// Whether a package is there: it may be newer than what was installed.
    pub fn has(&self, package: &str) -> bool {
        self.modules.join(package).join("package.json").is_file()
    }

    /// Runs a script of tests/node and gives its standard output.
    ///
    /// # Panics
    /// When it fails; its standard error is in the message.
    pub fn run(&self, script: &str, arguments: &[&str]) -> String {
        // Node looks for packages beside the script.
        let dir = tempfile::tempdir().expect("a temporary directory");
        for entry in scripts().read_dir().expect("tests/node is there").flatten() {
            if entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "mjs")
            {
                std::fs::copy(entry.path(), dir.path().join(entry.file_name()))
                    .expect("it is copied");
            }
        }
        let modules = self
            .modules
            .canonicalize()
            .expect("the packages were there before");
        std::os::unix::fs::symlink(modules, dir.path().join("node_modules")).expect("a link");
        // Programs of the packages look for Node by its name.
        let node = self.program.parent().map(Path::to_path_buf);
        let others = std::env::var_os("PATH").unwrap_or_default();
        let places = node.into_iter().chain(std::env::split_paths(&others));
        let output = Command::new(&self.program)
            .arg(dir.path().join(script))
            .env(
                "PATH",
                std::env::join_paths(places).expect("names without a colon"),
            )
            .args(arguments)
            .output()
            .expect("node started before");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{script} failed with {} after\n{said}{stderr}",
            output.status
        );
        said
    }
}

fn scripts() -> PathBuf {
    fixtures::workspace().join(Path::new("tests/node"))
}

//! The workspace's texts, and the places in them that break a rule.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rocmforge_tests::fixtures;

/// Directories that are not the workspace's own text.
const SKIPPED_DIRS: [&str; 4] = ["target", "fixtures", "__pycache__", "node_modules"];

/// Directories that begin with a dot and are the workspace's own text; others are
/// tools' and a developer's.
const DOT_DIRS: [&str; 2] = [".cargo", ".ci"];

/// A text of the workspace.
pub(crate) struct Text {
    /// Relative to the workspace's root, with forward slashes.
    pub(crate) path: String,
    pub(crate) content: String,
}

impl Text {
    /// Line numbers from 1, with the lines.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.content
            .lines()
            .enumerate()
            .map(|(n, line)| (n + 1, line))
    }

    pub(crate) fn is_below(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path.starts_with(place))
    }
}

/// Every text by its extension, sorted by path. These tests are left out: they spell what they look
/// for.
pub(crate) fn texts(extensions: &[&str]) -> Vec<Text> {
    let root = fixtures::workspace();
    let mut paths = Vec::new();
    collect(&root, &mut paths);
    paths.sort();
    let own = root.join(file!());
    let own = own.parent().expect("a file has a directory");
    let wanted = |path: &PathBuf| {
        let extension = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default();
        extensions.contains(&extension) && !path.starts_with(own)
    };
    let texts: Vec<Text> = paths
        .into_iter()
        .filter(wanted)
        .map(|path| Text {
            content: std::fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("{} is no text: {error}", path.display())),
            path: path
                .strip_prefix(&root)
                .expect("below the root")
                .display()
                .to_string(),
        })
        .collect();
    assert!(
        !texts.is_empty(),
        "no {extensions:?} below {}",
        root.display()
    );
    texts
}

pub(crate) fn collect(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in dir.read_dir().expect("a readable directory").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let kind = entry.file_type().expect("an entry has a type");
        let name = name.to_string_lossy();
        let foreign = name.starts_with('.') && !DOT_DIRS.contains(&&*name);
        if kind.is_dir() && !foreign && !SKIPPED_DIRS.contains(&&*name) {
            collect(&path, into);
        } else if kind.is_file() {
            into.push(path);
        }
    }
}

/// Places that break a rule.
#[derive(Default)]
pub(crate) struct Broken(String);

impl Broken {
    pub(crate) fn at(&mut self, text: &Text, line: usize, what: &str) {
        let _ = writeln!(self.0, "  {}:{line}: {}", text.path, what.trim());
    }

    #[track_caller]
    pub(crate) fn check(self, rule: &str) {
        assert!(self.0.is_empty(), "{rule}:\n{}", self.0);
    }
}

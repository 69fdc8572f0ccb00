//! Follows a link that does not lead to a model file: out of the model directories, or nowhere.
//!
//! *Invariant:* nothing outside of the model directories is accessed: whether a link leads out
//! follows from the links inside, so the result is the same whether its target exists or not (test
//! `a_link_that_leads_out_is_told_by_its_text_alone`).

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use super::ModelDirs;

/// Maximum number of links that are followed in a row, the system's own limit.
const LINKS_MAX: usize = 40;

/// Target of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Leads {
    /// The link leads to this path outside of the model directories.
    Out(PathBuf),
    /// The link leads to this path inside where nothing exists, or in a circle.
    Nowhere(PathBuf),
    /// The link leads to something inside of the model directories.
    Inside,
}

/// The steps of a path, including `..`.
fn steps(path: &Path) -> impl DoubleEndedIterator<Item = OsString> {
    let step = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(step)
}

impl ModelDirs {
    /// Follows a link inside of a model directory; only the last step of its path may be a link.
    pub(super) fn leads(&self, link: &Path) -> Leads {
        let mut at = PathBuf::from("/");
        let mut rest: VecDeque<_> = steps(link).collect();
        let mut links = 0;
        while let Some(step) = rest.pop_front() {
            if step == ".." {
                at.pop();
                continue;
            }
            at.push(&step);
            if !self.holds(&at) {
                if self.real().any(|dir| dir.starts_with(&at)) {
                    continue;
                }
                // The name that a directory was given by may be another one than its real path.
                let told = lexical(&at, &rest);
                let inside = self.known().find_map(|(given, real)| {
                    let below = told.strip_prefix(given).ok()?;
                    Some((real.to_owned(), below.to_owned()))
                });
                let Some((real, below)) = inside else {
                    return Leads::Out(told);
                };
                (at, rest) = (real, steps(&below).collect());
                continue;
            }
            let Ok(found) = at.symlink_metadata() else {
                return Leads::Nowhere(lexical(&at, &rest));
            };
            if !found.is_symlink() {
                continue;
            }
            links += 1;
            let target = std::fs::read_link(&at).ok().filter(|_| links <= LINKS_MAX);
            let Some(target) = target else {
                return Leads::Nowhere(lexical(&at, &rest));
            };
            at.pop();
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            for step in steps(&target).rev() {
                rest.push_front(step);
            }
        }
        match self.holds(&at) {
            true => Leads::Inside,
            false => Leads::Out(at),
        }
    }
}

/// The path formed by `at` and the remaining steps, without file system access.
fn lexical(at: &Path, rest: &VecDeque<OsString>) -> PathBuf {
    let mut path = at.to_owned();
    for step in rest {
        if step == ".." {
            path.pop();
        } else {
            path.push(step);
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_that_leads_out_is_told_by_its_text_alone() {
        let ground = tempfile::tempdir().unwrap();
        let root = ground.path().canonicalize().unwrap();
        let (inside, out) = (root.join("in"), root.join("out"));
        fs::create_dir_all(inside.join("below")).unwrap();
        fs::create_dir_all(out.join("dir")).unwrap();
        fs::write(out.join("there.gguf"), "x").unwrap();
        fs::write(inside.join("below/m.gguf"), "x").unwrap();
        symlink(&inside, root.join("given")).unwrap();
        let dirs = ModelDirs::new(&[root.join("given")]).unwrap();
        let mut n = 0;
        let mut leads = |target: &Path| {
            n += 1;
            let link = inside.join(format!("l{n}"));
            symlink(target, &link).unwrap();
            dirs.leads(&link)
        };
        for name in ["there.gguf", "absent.gguf", "dir", "dir/absent/x"] {
            let told = Leads::Out(out.join(name));
            assert_eq!(leads(&out.join(name)), told, "{name}");
            assert_eq!(leads(&Path::new("../out").join(name)), told, "{name}");
            assert_eq!(
                leads(&inside.join("below/../../out").join(name)),
                told,
                "{name}"
            );
        }
        assert_eq!(
            leads(Path::new("/etc/passwd")),
            Leads::Out("/etc/passwd".into())
        );
        assert_eq!(leads(Path::new("below/m.gguf")), Leads::Inside);
        assert_eq!(leads(&root.join("given/below/m.gguf")), Leads::Inside);
        let gone = inside.join("below/gone.gguf");
        assert_eq!(
            leads(Path::new("below/gone.gguf")),
            Leads::Nowhere(gone.clone())
        );
        assert_eq!(
            leads(&root.join("given/below/gone.gguf")),
            Leads::Nowhere(gone)
        );
        assert_eq!(leads(&out), Leads::Out(out.clone()));
        // Over a link inside that leads out, and around.
        symlink(&out, inside.join("away")).unwrap();
        assert_eq!(
            leads(Path::new("away/there.gguf")),
            Leads::Out(out.join("there.gguf"))
        );
        symlink("round", inside.join("round")).unwrap();
        assert!(matches!(leads(Path::new("round")), Leads::Nowhere(_)));
    }
}

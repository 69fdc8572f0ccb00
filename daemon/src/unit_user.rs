//! What the user may not read as whom the unit runs the daemon: root, who checks the configuration,
//! reads everything.

use std::ffi::CString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Uid, User, geteuid, getgrouplist};

/// The user of the unit (`User=`).
const UNIT_USER: &str = "rocmforge";
const READ: u32 = 4;
const ENTER: u32 = 1;

/// A user with its groups.
struct Reader {
    name: String,
    uid: Uid,
    groups: Vec<Gid>,
}

/// A sentence for each directory that the unit's user may not read by the modes of it and of those
/// above it; none where somebody else than root asks, or there is no such user. Blocks on the file
/// system.
pub fn troubles(dirs: &[PathBuf]) -> Vec<String> {
    if !geteuid().is_root() {
        return Vec::new();
    }
    let Ok(Some(user)) = User::from_name(UNIT_USER) else {
        return Vec::new();
    };
    let name = CString::new(user.name.clone()).unwrap_or_default();
    let reader = Reader {
        groups: getgrouplist(&name, user.gid).unwrap_or_else(|_| vec![user.gid]),
        name: user.name,
        uid: user.uid,
    };
    dirs.iter().filter_map(|dir| reader.refused(dir)).collect()
}

impl Reader {
    /// Why a directory cannot be read.
    fn refused(&self, dir: &Path) -> Option<String> {
        // One that is not there is told of already.
        let real = dir.canonicalize().ok()?;
        let above: Vec<_> = real.ancestors().collect();
        let closed = above.into_iter().rev().find(|at| {
            let wanted = if *at == real { READ | ENTER } else { ENTER };
            let found = std::fs::metadata(at);
            found.is_ok_and(|found| !self.may(wanted, found.mode(), found.uid(), found.gid()))
        })?;
        Some(format!(
            "the model directory {} cannot be read by the user {}, as whom the unit runs the daemon: {} is closed to \
             it; change its mode or owner (chmod o+rx, setfacl -m u:{}:rx), if no access list allows it",
            dir.display(),
            self.name,
            closed.display(),
            self.name
        ))
    }

    fn may(&self, wanted: u32, mode: u32, uid: u32, gid: u32) -> bool {
        let shift = match () {
            () if uid == self.uid.as_raw() => 6,
            () if self.groups.contains(&Gid::from_raw(gid)) => 3,
            () => 0,
        };
        (mode >> shift) & wanted == wanted
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_below_a_closed_home_is_told_with_the_one_that_is_closed() {
        let ground = tempfile::tempdir().expect("a temporary directory");
        let root = ground.path().canonicalize().expect("it is there");
        let (home, models) = (root.join("home"), root.join("home/models"));
        std::fs::create_dir_all(&models).expect("it is made");
        let mode = |dir: &Path, mode| {
            std::fs::set_permissions(dir, PermissionsExt::from_mode(mode)).expect("it is ours");
        };
        mode(&root, 0o755);
        let reader = |uid, gid| Reader {
            name: "reader".to_owned(),
            uid: Uid::from_raw(uid),
            groups: vec![Gid::from_raw(gid)],
        };
        let (own, stranger) = (
            std::fs::metadata(&home).expect("it is there"),
            reader(4_000_001, 4_000_001),
        );
        mode(&home, 0o755);
        assert_eq!(stranger.refused(&models), None);
        for (closed, at) in [(&home, 0o700), (&home, 0o754), (&models, 0o751)] {
            mode(closed, at);
            let why = stranger.refused(&models).expect("it is closed");
            assert!(
                why.contains(&format!("{} is closed", closed.display())),
                "{why}"
            );
            assert_eq!(reader(own.uid(), 4_000_001).refused(&models), None);
            mode(closed, 0o755);
        }
        mode(&home, 0o750);
        assert_eq!(reader(4_000_001, own.gid()).refused(&models), None);
        assert!(stranger.refused(&models).is_some());
    }
}

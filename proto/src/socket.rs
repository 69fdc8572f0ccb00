//! Where the daemon listens and clients look, decided in one place.
//!
//! 1. `$ROCMFORGE_SOCKET`, and nothing else, where it is set;
//! 2. otherwise `$XDG_RUNTIME_DIR/rocmforged.sock`, a user's own daemon;
//! 3. otherwise `/run/rocmforged/rocmforged.sock`, the system's daemon.
//!
//! A daemon listens on the first of these that applies. A client tries them in
//! order, so that a user without a daemon of their own reaches the system's.

use std::ffi::OsString;
use std::path::PathBuf;

/// Environment variable that names the socket, for daemon and clients alike.
pub const SOCKET_ENV: &str = "ROCMFORGE_SOCKET";

/// File name of the socket below `$XDG_RUNTIME_DIR`.
pub const SOCKET_FILE_NAME: &str = "rocmforged.sock";

/// Socket of the daemon that the system runs.
pub const SYSTEM_SOCKET_PATH: &str = "/run/rocmforged/rocmforged.sock";

/// The paths that a client tries, in order; never empty.
pub fn socket_candidates() -> Vec<PathBuf> {
    candidates(|name| std::env::var_os(name))
}

/// The path that a daemon listens on if it is told no other: the first of
/// [`socket_candidates`].
pub fn default_socket_path() -> PathBuf {
    socket_candidates().swap_remove(0)
}

fn candidates(env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    if let Some(path) = set(SOCKET_ENV) {
        return vec![PathBuf::from(path)];
    }
    let mut paths = Vec::with_capacity(2);
    if let Some(dir) = set("XDG_RUNTIME_DIR") {
        paths.push(PathBuf::from(dir).join(SOCKET_FILE_NAME));
    }
    paths.push(PathBuf::from(SYSTEM_SOCKET_PATH));
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)]) -> Vec<PathBuf> {
        candidates(|name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_variable_overrides_everything() {
        let paths = with(&[(SOCKET_ENV, "/a.sock"), ("XDG_RUNTIME_DIR", "/run/user/7")]);
        assert_eq!(paths, [PathBuf::from("/a.sock")]);
    }

    #[test]
    fn the_users_daemon_comes_before_the_systems() {
        let paths = with(&[("XDG_RUNTIME_DIR", "/run/user/7")]);
        assert_eq!(
            paths,
            [
                PathBuf::from("/run/user/7/rocmforged.sock"),
                PathBuf::from(SYSTEM_SOCKET_PATH)
            ]
        );
    }

    #[test]
    fn empty_variables_count_as_unset() {
        let paths = with(&[(SOCKET_ENV, ""), ("XDG_RUNTIME_DIR", "")]);
        assert_eq!(paths, [PathBuf::from(SYSTEM_SOCKET_PATH)]);
    }
}

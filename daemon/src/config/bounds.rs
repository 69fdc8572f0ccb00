//! Bounds of settings and of the files that have them.

use std::time::Duration;

/// Most directories that `--model-dir` may name.
pub(super) const MODEL_DIRS_MAX: usize = 64;
/// Most addresses and names that `--http-listen` may name.
pub(super) const HTTP_LISTEN_MAX: usize = 16;
/// Least `--image-memory`: a photo can be decoded.
pub(super) const IMAGE_MEMORY_MIN: u64 = 256 << 20;
/// Most hosts that `image_url_hosts` may name.
pub(super) const IMAGE_HOSTS_MAX: usize = 64;
/// Largest `--threads`.
pub(super) const THREADS_MAX: u32 = 1024;
/// Largest `--n-ctx-max`, in tokens.
pub(super) const N_CTX_MAX_LIMIT: u32 = 16 << 20;
/// Largest `--max-sequences`.
pub(super) const MAX_SEQUENCES_LIMIT: u32 = 1024;
/// Largest `--queue-capacity`.
pub(super) const QUEUE_CAPACITY_LIMIT: u32 = 4096;
/// Largest `--drain-grace`.
pub(super) const DRAIN_GRACE_MAX: Duration = Duration::from_secs(3600);
/// Bounds of the time until the memory of an idle device is given back.
pub(super) const IDLE_RELEASE_MIN: Duration = Duration::from_secs(1);
pub(super) const IDLE_RELEASE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Smallest `--watchdog`: a large model's pass over a long prompt takes about this long.
pub(super) const WATCHDOG_MIN: Duration = Duration::from_millis(500);
/// Largest `--watchdog`.
pub(super) const WATCHDOG_MAX: Duration = Duration::from_secs(3600);
/// Longest path of a Unix socket in bytes: `sun_path` with its closing zero.
pub(super) const SOCKET_PATH_MAX: usize = 107;
/// Largest configuration file in bytes.
pub(super) const CONFIG_FILE_MAX_BYTES: u64 = 1 << 20;
/// Most files of `conf.d`.
pub(super) const DROP_INS_MAX: usize = 64;

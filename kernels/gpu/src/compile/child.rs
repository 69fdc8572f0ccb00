//! Both ends of the compiler's child process: the parent that feeds and bounds
//! it, and the child itself.
//!
//! The job goes in over standard input, the object comes out over standard output, words over
//! standard error. A child that says no ends with [`REFUSED`]; any other end but 0 is a crash.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{self, Job};
use super::{CHILD_ARGUMENT, Config, Error, OBJECT_BYTES_MAX, Request, rtc};

/// Exit status of a child whose compiler or loader rejected the source.
const REFUSED: i32 = 3;
/// Bytes of words that are kept of a child.
const WORDS_BYTES_MAX: usize = 64 << 10;
/// How often the parent looks whether the child has ended.
const POLL: Duration = Duration::from_millis(2);

/// Compiles in a child.
pub(super) fn compile(config: &Config, request: &Request<'_>) -> Result<Vec<u8>, Error> {
    run(config, request, true)
}

/// Asks a child for the compiler's version.
pub(super) fn version(config: &Config, request: &Request<'_>) -> Result<String, Error> {
    let bytes = run(config, request, false)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn run(config: &Config, request: &Request<'_>, with_unit: bool) -> Result<Vec<u8>, Error> {
    let compiler = config.language.compiler();
    let library = config
        .library
        .as_ref()
        .map_or_else(String::new, |path| path.to_string_lossy().into_owned());
    let job = wire::encode(config.language, &library, with_unit.then_some(request));
    let exe = match &config.exe {
        Some(exe) => exe.clone(),
        // The running binary, also when its file was replaced since.
        None => PathBuf::from("/proc/self/exe"),
    };
    let spawn_error = |source| Error::Spawn {
        compiler,
        exe: exe.clone(),
        source,
    };
    let mut child = Command::new(&exe)
        .arg(CHILD_ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(spawn_error)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    // A child that ends early breaks the pipe; how it ended says more than that.
    let feed = thread::spawn(move || stdin.map(|mut pipe| pipe.write_all(&job)));
    let words = thread::spawn(move || stderr.map(last_words).unwrap_or_default());
    let object = thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map(|pipe| {
            pipe.take(OBJECT_BYTES_MAX as u64 + 1)
                .read_to_end(&mut bytes)
        });
        (bytes, matches!(read, Some(Ok(n)) if n <= OBJECT_BYTES_MAX))
    });
    let status = wait(&mut child, config.limit).map_err(spawn_error)?;
    // The pipes are closed now, unless a grandchild holds them: compilers start none.
    let _ = feed.join();
    let (object, whole) = object.join().unwrap_or_default();
    let words = words.join().unwrap_or_default();
    let (name, target) = (request.name.to_owned(), request.target.to_owned());
    match status {
        None => Err(Error::TimedOut {
            compiler,
            name,
            target,
            limit: config.limit,
        }),
        Some(status) if status.success() && whole && !object.is_empty() => Ok(object),
        Some(status) if status.code() == Some(REFUSED) => Err(Error::Refused {
            compiler,
            name,
            target,
            message: words,
        }),
        Some(status) => Err(Error::Crashed {
            compiler,
            name,
            target,
            status: status.to_string(),
            stderr: words,
        }),
    }
}

/// Waits for the child; one that takes too long is killed and gives `None`.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            // It may have ended in between; wait tells.
            let _ = child.kill();
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// The last [`WORDS_BYTES_MAX`] bytes that a pipe carries.
fn last_words(mut pipe: impl Read) -> String {
    let mut kept = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(n) = pipe.read(&mut piece) {
        if n == 0 {
            break;
        }
        kept.extend_from_slice(&piece[..n]);
        if kept.len() > 2 * WORDS_BYTES_MAX {
            kept.drain(..kept.len() - WORDS_BYTES_MAX);
        }
    }
    kept.drain(..kept.len().saturating_sub(WORDS_BYTES_MAX));
    String::from_utf8_lossy(&kept).trim().to_owned()
}

/// The child: does the job that comes over standard input and gives the exit status. `main`
/// calls it when its first argument is [`CHILD_ARGUMENT`], before it starts anything, and
/// ends with what it returns.
pub fn rtc_child_main() -> i32 {
    match child_main() {
        Ok(()) => 0,
        Err(message) => {
            eprintln!("{message}");
            REFUSED
        }
    }
}

fn child_main() -> Result<(), String> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .take(2 * OBJECT_BYTES_MAX as u64)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("reading the job: {error}"))?;
    let Job {
        language,
        library,
        unit,
    } = wire::decode(&bytes).map_err(|error| format!("reading the job: {error}"))?;
    let mut out = own_stdout().map_err(|error| format!("setting up the output: {error}"))?;
    let compiler = rtc::Compiler::open(language, &library)?;
    let answer = match unit {
        None => compiler.version()?.into_bytes(),
        Some(unit) => compiler.compile(&unit)?,
    };
    out.write_all(&answer)
        .and_then(|()| out.flush())
        .map_err(|error| format!("writing the object: {error}"))?;
    drop(out);
    // The vendors' exit handlers have been seen to crash; the answer is out.
    // SAFETY: ends the process without running handlers; nothing is left to flush.
    unsafe { libc::_exit(0) }
}

/// The standard output for us alone: what a library prints there goes to standard error.
fn own_stdout() -> std::io::Result<std::fs::File> {
    let stdout = std::io::stdout();
    let own = stdout.as_fd().try_clone_to_owned()?;
    let stderr = std::io::stderr();
    // SAFETY: both descriptors are open for the whole process.
    if unsafe { libc::dup2(stderr.as_raw_fd(), stdout.as_raw_fd()) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(own.into())
}

#[cfg(test)]
mod tests {
    use super::super::{Cache, Compiler, Language, Origin};
    use super::*;

    const REQUEST: Request<'static> = Request {
        name: "unit",
        source: "source",
        headers: &[],
        target: "gfx1100",
        options: &[],
    };

    /// A compiler whose child is a shell script.
    fn scripted(dir: &std::path::Path, script: &str, limit: Duration) -> Compiler {
        let exe = dir.join("child");
        rocmforge_test_scripts::write(&exe, script);
        Compiler::new(Config {
            language: Language::Hip,
            library: None,
            exe: Some(exe),
            limit,
            cache: Some(Cache::new(dir.join("cache"))),
        })
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_object_is_compiled_once_and_rebuilt_when_its_file_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let script = format!(
            "cat >/dev/null; echo x >>{}/runs; printf OBJECT",
            dir.path().display()
        );
        let compiler = scripted(dir.path(), &script, LONG);
        let none = |_: &str, _: &str| None;
        let first = compiler.object(&REQUEST, none).unwrap();
        assert_eq!(
            (first.origin, &first.bytes[..]),
            (Origin::Compiled, &b"OBJECT"[..])
        );
        assert_eq!(first.cache_error, None);
        assert_eq!(
            compiler.object(&REQUEST, none).unwrap().origin,
            Origin::Cached
        );
        for entry in std::fs::read_dir(dir.path().join("cache")).unwrap() {
            std::fs::write(entry.unwrap().path(), b"damaged").unwrap();
        }
        assert_eq!(
            compiler.object(&REQUEST, none).unwrap().origin,
            Origin::Compiled
        );
        assert_eq!(
            compiler.object(&REQUEST, none).unwrap().origin,
            Origin::Cached
        );
        // The version once, the object twice.
        let runs = std::fs::read_to_string(dir.path().join("runs")).unwrap();
        assert_eq!(runs.lines().count(), 3);
    }

    #[test]
    fn an_embedded_object_needs_no_compiler() {
        let compiler = Compiler::new(Config {
            exe: Some("/nonexistent".into()),
            ..Config::new(Language::Hip)
        });
        let embedded = |name: &str, target: &str| -> Option<&'static [u8]> {
            (name == "unit" && target == "gfx1100").then_some(&b"ahead"[..])
        };
        let object = compiler.object(&REQUEST, embedded).unwrap();
        assert_eq!(
            (object.origin, &object.bytes[..]),
            (Origin::Embedded, &b"ahead"[..])
        );
        let other = Request {
            target: "gfx1101",
            ..REQUEST
        };
        assert!(matches!(
            compiler.object(&other, embedded),
            Err(Error::Spawn { .. })
        ));
    }

    #[test]
    fn a_child_that_crashes_refuses_or_hangs_is_an_error_that_says_which() {
        let dir = tempfile::tempdir().unwrap();
        let none = |_: &str, _: &str| None;
        let crash = scripted(dir.path(), "echo assertion >&2; kill -ABRT $$", LONG);
        match crash.object(&REQUEST, none).unwrap_err() {
            Error::Crashed { status, stderr, .. } => {
                assert!(status.contains("signal: 6"), "{status}");
                assert_eq!(stderr, "assertion");
            }
            other => panic!("{other}"),
        }
        let refuse = scripted(dir.path(), "cat >/dev/null; echo line 3 >&2; exit 3", LONG);
        match refuse.object(&REQUEST, none).unwrap_err() {
            Error::Refused { message, name, .. } => {
                assert_eq!((message.as_str(), name.as_str()), ("line 3", "unit"));
            }
            other => panic!("{other}"),
        }
        let empty = scripted(dir.path(), "cat >/dev/null", LONG);
        assert!(matches!(
            empty.object(&REQUEST, none),
            Err(Error::Crashed { .. })
        ));
        let hang = scripted(dir.path(), "exec sleep 600", Duration::from_millis(50));
        assert!(matches!(
            hang.object(&REQUEST, none),
            Err(Error::TimedOut { .. })
        ));
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        let compiler = scripted(dir.path(), "cat >/dev/null; printf OBJECT", LONG);
        std::fs::write(
            dir.path().join("cache"),
            "a file where the directory would be",
        )
        .unwrap();
        let object = compiler.object(&REQUEST, |_, _| None).unwrap();
        assert_eq!(object.origin, Origin::Compiled);
        assert!(object.cache_error.is_some());
    }
}

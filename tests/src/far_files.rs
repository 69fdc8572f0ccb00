//! A file system whose files stop answering when they are told to, as those of a server that is
//! gone: FUSE's protocol, spoken without a library.
//!
//! It is mounted in a name space of the calling thread's own, which processes that the thread
//! starts have too. So nothing of it is left when they have ended.
//!
//! Source of the layouts: `include/uapi/linux/fuse.h` of the kernel, version 7.31.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

/// Bytes of a request: at least the kernel's least, and a write of one page, which never comes.
const REQUEST_BYTES: usize = 64 << 10;
/// Threads that answer, so that one that waits holds up no other.
const THREADS: usize = 8;
const ROOT: u64 = 1;
const FILE: u64 = 2;
const DIRECTORY_MODE: u32 = 0o040_755;
const FILE_MODE: u32 = 0o100_644;
const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;
/// How long the kernel may believe what it was told, in seconds.
const FOR_EVER: u64 = 1 << 30;

/// One file in a directory of its own.
#[derive(Debug)]
pub struct FarFiles {
    dir: TempDir,
    served: Arc<Served>,
    device: File,
}

#[derive(Debug)]
struct Served {
    name: String,
    content: Vec<u8>,
    answers: Mutex<Answers>,
    changed: Condvar,
}

/// What is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Answers {
    Nothing,
    /// All but reads.
    AllButContent,
    All,
}

impl FarFiles {
    /// Serves a copy of `original` from now on.
    ///
    /// # Errors
    /// Why such files cannot be had here.
    ///
    /// # Panics
    /// Where `original` cannot be read.
    pub fn serve(original: &Path) -> Result<FarFiles, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
        unshare(CloneFlags::CLONE_NEWNS).map_err(|e| failed("unshare", &e))?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .map_err(|e| failed("a private name space", &e))?;
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|e| failed("/dev/fuse", &e))?;
        let dir = TempDir::new().map_err(|e| failed("a directory", &e))?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(
            Some("far"),
            dir.path(),
            Some("fuse"),
            flags,
            Some(&*options),
        )
        .map_err(|e| failed("mount", &e))?;
        let name = original.file_name().expect("a file has a name");
        let served = Arc::new(Served {
            name: name.to_string_lossy().into_owned(),
            content: std::fs::read(original).expect("a fixture"),
            answers: Mutex::new(Answers::All),
            changed: Condvar::new(),
        });
        for _ in 0..THREADS {
            let mut device = device.try_clone().map_err(|e| failed("/dev/fuse", &e))?;
            let served = Arc::clone(&served);
            std::thread::spawn(move || while served.answer_one(&mut device) {});
        }
        Ok(FarFiles {
            dir,
            served,
            device,
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.dir().join(&self.served.name)
    }

    /// Whether reads are answered from now on. Those that wait are, once they are again.
    pub fn set_answering(&self, answering: bool) {
        self.answer_with(match answering {
            true => Answers::All,
            false => Answers::AllButContent,
        });
    }

    /// Nothing is answered from now on, not even whether the file is there.
    ///
    /// # Panics
    /// Where the kernel does not forget what it knows of it.
    pub fn fall_silent(&self) {
        self.answer_with(Answers::Nothing);
        self.forget_file();
    }

    fn answer_with(&self, answers: Answers) {
        *self.served.answers.lock().expect("whole") = answers;
        self.served.changed.notify_all();
    }

    /// Has the kernel forget the file's content, so that it asks for it again.
    ///
    /// # Panics
    /// Where it does not.
    pub fn forget_content(&self) {
        // FUSE_NOTIFY_INVAL_INODE, and which bytes: all.
        let words = [FILE, 0, 0].map(u64::to_le_bytes);
        self.notify(2, &words.concat()).expect("the file is known");
    }

    /// Has the kernel forget that the file is there, and what it is like.
    fn forget_file(&self) {
        // FUSE_NOTIFY_INVAL_ENTRY: the directory, the length of the name, nothing, the name.
        let name = self.served.name.as_bytes();
        let mut entry = ROOT.to_le_bytes().to_vec();
        entry.extend((name.len() as u64).to_le_bytes());
        entry.extend(name);
        entry.push(0);
        self.notify(3, &entry).expect("the file is known");
        // Bytes from below 0 on are none: its attributes alone.
        let words = [FILE, u64::MAX, 0].map(u64::to_le_bytes);
        match self.notify(2, &words.concat()) {
            // Nobody has it open, so that it went with its name.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            told => told.expect("the file is known"),
        }
    }

    /// Tells the kernel something: a fuse_out_header with a code in its second field.
    fn notify(&self, code: u32, what: &[u8]) -> std::io::Result<()> {
        let mut notice = (16 + what.len() as u32).to_le_bytes().to_vec();
        notice.extend(code.to_le_bytes());
        notice.extend([0; 8]);
        notice.extend(what);
        let mut device = &self.device;
        device.write_all(&notice)
    }
}

impl Drop for FarFiles {
    /// Processes that wait for the file must be able to end.
    fn drop(&mut self) {
        self.set_answering(true);
        let _ = nix::mount::umount2(self.dir.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Served {
    /// Takes a request from the kernel and answers it; false once the files are gone.
    fn answer_one(&self, device: &mut File) -> bool {
        let mut request = vec![0; REQUEST_BYTES];
        let length = match device.read(&mut request) {
            Ok(length) => length,
            // A request that was taken back, or a signal.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Interrupted) => {
                return true;
            }
            Err(_) => return false,
        };
        // fuse_in_header: length, opcode, unique, node, uid, gid, pid, padding.
        let (head, body) = request[..length].split_at(40);
        let (opcode, unique, node) = (u32_at(head, 4), u64_at(head, 8), u64_at(head, 16));
        let Some(answer) = self.answer(opcode, node, body) else {
            return true;
        };
        let (error, data) = match answer {
            Ok(data) => (0, data),
            Err(error) => (-error, Vec::new()),
        };
        let mut out = Vec::with_capacity(16 + data.len());
        out.extend((16 + data.len() as u32).to_le_bytes());
        out.extend(error.to_le_bytes());
        out.extend(unique.to_le_bytes());
        out.extend(data);
        // One that was interrupted is not waited for any more.
        let _ = device.write_all(&out);
        true
    }

    /// `None` for what has no answer.
    fn answer(&self, opcode: u32, node: u64, body: &[u8]) -> Option<Result<Vec<u8>, i32>> {
        let enough = match opcode {
            1 | 3 => Answers::AllButContent,
            15 => Answers::All,
            _ => Answers::Nothing,
        };
        let answers = self.answers.lock().expect("whole");
        let waited = self
            .changed
            .wait_while(answers, |answers| *answers < enough);
        drop(waited.expect("whole"));
        Some(match opcode {
            // FORGET, INTERRUPT, BATCH_FORGET.
            2 | 36 | 42 => return None,
            // LOOKUP
            1 => match body.strip_suffix(&[0]) {
                Some(name) if name == self.name.as_bytes() => {
                    let mut entry = Vec::new();
                    for word in [FILE, 0, FOR_EVER, FOR_EVER, 0] {
                        entry.extend(word.to_le_bytes());
                    }
                    entry.extend(self.attributes(FILE));
                    Ok(entry)
                }
                _ => Err(ENOENT),
            },
            // GETATTR
            3 => {
                let mut found = FOR_EVER.to_le_bytes().to_vec();
                found.extend([0; 8]);
                found.extend(self.attributes(node));
                Ok(found)
            }
            // OPEN, OPENDIR
            14 | 27 => Ok(vec![0; 16]),
            // READ
            15 => {
                let (from, bytes) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
                let end = self.content.len().min(from + bytes);
                Ok(self.content.get(from..end).unwrap_or_default().to_vec())
            }
            // RELEASE, FLUSH, READDIR, RELEASEDIR
            18 | 25 | 28 | 29 => Ok(Vec::new()),
            // INIT: the version, read-ahead, flags, and what may come at once.
            26 => {
                let mut init = Vec::new();
                for word in [7u32, 31, 128 << 10, 1, 0, 4096, 1] {
                    init.extend(word.to_le_bytes());
                }
                init.resize(64, 0);
                Ok(init)
            }
            _ => Err(ENOSYS),
        })
    }

    /// `fuse_attr`.
    fn attributes(&self, node: u64) -> Vec<u8> {
        let (bytes, mode) = match node {
            ROOT => (0, DIRECTORY_MODE),
            _ => (self.content.len() as u64, FILE_MODE),
        };
        let mut found = Vec::new();
        // inode, size, blocks, three times.
        for word in [node, bytes, bytes.div_ceil(512), 1, 1, 1] {
            found.extend(word.to_le_bytes());
        }
        // Their nanoseconds, mode, links, uid, gid, device, block, flags.
        for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
            found.extend(word.to_le_bytes());
        }
        found
    }
}

//! One file: its ranges over several connections, into an unfinished file beside its place.
//!
//! ```text
//! NAME.gguf.part, NAME.gguf.part.json  --all there, checksum right-->  NAME.gguf
//!        |  the file changed, or its checksum is wrong                (rename)
//!        v
//!      deleted
//! ```
//!
//! A thread of its own computes the checksum behind the bytes as they grow together. What breaks is
//! tried again from where it stopped; what is there when a download ends early is kept for the
//! next.
//!
//! *Invariant:* a file has its own name only once it is whole (test
//! `after_each_fault_a_file_is_whole_or_absent_and_a_second_pull_completes_it`).

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header;
use hyper::{StatusCode, Uri};
use tokio::task::JoinSet;

use crate::checksum::{hash_behind, hex, is_sha256};
use crate::error::Error;
use crate::source::without_query;
use crate::spans::{Journal, content_range};
use crate::web::{Answer, Ask, Fault, Tries, Web, chain, text_of};

/// Bytes that are gathered before they are written.
const WRITE_BYTES: usize = 1 << 20;
/// Bytes after which a connection that breaks counts as one that worked.
const GAIN: u64 = 1 << 20;
/// Shortest time between two journals.
const JOURNAL_EVERY: Duration = Duration::from_secs(1);
/// How long the lock of a download that was cancelled a moment ago is waited for.
const LOCK_WAIT: Duration = Duration::from_millis(1500);

/// A file to download.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub(crate) url: Uri,
    /// The path in its repository, for errors.
    pub(crate) name: String,
    /// Path where the file belongs.
    pub(crate) dest: PathBuf,
    pub(crate) bytes: u64,
    /// Expected SHA-256 of the file, in hexadecimal.
    pub(crate) sha256: Option<String>,
}

impl Item {
    /// The unfinished file.
    pub(crate) fn part(&self) -> PathBuf {
        with_end(&self.dest, ".part")
    }

    /// Path of the item's journal.
    fn journal(&self) -> PathBuf {
        with_end(&self.dest, ".part.json")
    }

    fn fresh_journal(&self) -> Journal {
        Journal::new(without_query(&self.url), self.bytes, self.sha256.clone())
    }

    /// Bytes that an earlier download has left.
    pub(crate) fn have(&self) -> u64 {
        let is_there = self.part().exists();
        let journal = Journal::read(&self.journal(), &self.fresh_journal());
        journal
            .filter(|_| is_there)
            .map_or(0, |journal| journal.spans.bytes())
    }
}

/// A path with more behind its name.
pub(crate) fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Receiver of a download's events.
pub(crate) trait Told: Send + Sync {
    /// Reports that `done` bytes of the file are there.
    fn grown(&self, done: u64);
    /// The download is tried again after this time.
    fn waiting(&self, why: &Error, wait: Duration);
    /// Reports that all bytes are there and the checksum is being computed.
    fn checking(&self);
}

/// What a file that was downloaded is.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// SHA-256 of the file, in hexadecimal; computed even if the hub gives none.
    pub(crate) sha256: String,
    pub(crate) etag: Option<String>,
}

/// The division of a file into ranges for parallel downloads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    pub(crate) connections: usize,
    pub(crate) piece_bytes: u64,
}

/// Downloads what is missing of a file, checks it, and gives it its name.
pub(crate) async fn fetch(
    web: &Web,
    item: Item,
    division: Division,
    told: Arc<dyn Told>,
) -> Result<Arrived, Error> {
    let asked = item.clone();
    let (file, journal) = blocking(move || open(&asked)).await?;
    let file = Arc::new(file);
    let (grown, prefixes) = mpsc::channel();
    let hashing = hash_behind(Arc::clone(&file), item.bytes, prefixes);
    let hashing = hashing.map_err(|error| Error::io(&item.part(), error))?;
    let todo = journal.spans.missing(item.bytes, division.piece_bytes);
    told.grown(journal.spans.bytes());
    // Nobody receives it once the checksum has failed, which is told of at the end.
    let _ = grown.send(journal.spans.prefix());
    let transfer = Arc::new(Transfer {
        web: web.clone(),
        item,
        file,
        told,
        state: Mutex::new(State {
            journal,
            todo: todo.into(),
            is_whole_only: false,
            saved: Instant::now(),
            grown: Some(grown),
        }),
    });
    let fetched = transfer.run(division.connections).await;
    // The hash's thread ends by it.
    let grown = transfer.state().grown.take();
    drop(grown);
    if fetched.is_ok() {
        transfer.told.checking();
    }
    let digest = blocking(move || hashing.join().unwrap_or(Ok(None))).await;
    let finishing = Arc::clone(&transfer);
    blocking(move || finishing.finish(fetched, digest)).await
}

/// Runs what blocks on the file system on a thread that may.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Opens the unfinished file under a lock, with what its journal says of it.
fn open(item: &Item) -> Result<(File, Journal), Error> {
    let path = item.part();
    let io = |error| Error::io(&path, error);
    let until = Instant::now() + LOCK_WAIT;
    let file = loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {
                let ours = file.metadata().map_err(io)?;
                // Whoever had the lock may have given the file its name meanwhile.
                let named = std::fs::symlink_metadata(&path);
                if named.is_ok_and(|named| named.ino() == ours.ino() && named.dev() == ours.dev()) {
                    break file;
                }
            }
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(50)),
            Err(_) => {
                return Err(Error::Busy {
                    path: item.dest.clone(),
                });
            }
        }
    };
    let fresh = item.fresh_journal();
    let has_all = file.metadata().map_err(io)?.len() == item.bytes;
    let journal = Journal::read(&item.journal(), &fresh).filter(|_| has_all);
    let journal = match journal {
        Some(journal) => journal,
        None => {
            file.set_len(0).map_err(io)?;
            file.set_len(item.bytes).map_err(io)?;
            fresh
        }
    };
    Ok((file, journal))
}

#[derive(Debug)]
struct State {
    journal: Journal,
    /// Ranges that nobody has taken yet.
    todo: VecDeque<(u64, u64)>,
    /// The server knows no ranges: one connection gets it all.
    is_whole_only: bool,
    /// Time at which the journal was last written.
    saved: Instant,
    /// Channel that reports to the hash how many bytes from the file's beginning are there.
    grown: Option<mpsc::Sender<u64>>,
}

/// A download under way.
struct Transfer {
    web: Web,
    item: Item,
    file: Arc<File>,
    told: Arc<dyn Told>,
    /// Held for a few operations on small values, and to write the journal.
    state: Mutex<State>,
}

/// What a server gives to a request for a range.
enum Given {
    /// The range.
    Range(Incoming),
    /// The file from its beginning.
    Whole(Incoming),
}

impl Transfer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(self: &Arc<Self>, connections: usize) -> Result<(), Error> {
        let n = connections.clamp(1, self.state().todo.len().max(1));
        let mut workers = JoinSet::new();
        for _ in 0..n {
            let transfer = Arc::clone(self);
            workers.spawn(async move { transfer.work().await });
        }
        let mut outcome = Ok(());
        while let Some(ended) = workers.join_next().await {
            let ended = match ended {
                Ok(ended) => ended,
                Err(error) if error.is_cancelled() => continue,
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            };
            if outcome.is_ok() && ended.is_err() {
                workers.abort_all();
                outcome = ended;
            }
        }
        outcome
    }

    async fn work(self: &Arc<Self>) -> Result<(), Error> {
        loop {
            let taken = self.state().todo.pop_front();
            let Some((first, end)) = taken else {
                return Ok(());
            };
            self.range(first, end).await?;
        }
    }

    /// Gets a range, however often the connection breaks as long as something comes.
    async fn range(self: &Arc<Self>, first: u64, end: u64) -> Result<(), Error> {
        let mut tries = Tries::new(self.web.patience);
        let mut at = first;
        while at < end {
            let before = at;
            let given = self.ask(at, end).await;
            let pumped = match given {
                Ok(Given::Range(body)) => self.pump(body, &mut at, end).await,
                Ok(Given::Whole(body)) => {
                    let is_second = {
                        let mut state = self.state();
                        state.todo.clear();
                        std::mem::replace(&mut state.is_whole_only, true)
                    };
                    // Another connection gets all of it, this range, too.
                    return match is_second {
                        true => Ok(()),
                        false => self.whole(body).await,
                    };
                }
                Err(fault) => Err(fault),
            };
            if at - before >= GAIN.min(end - before) {
                tries.gained();
            }
            if let Err(fault) = pumped {
                self.pause(&mut tries, fault).await?;
            }
        }
        Ok(())
    }

    /// Gets all of the file from a server that knows no ranges: each try begins again.
    async fn whole(self: &Arc<Self>, mut body: Incoming) -> Result<(), Error> {
        let mut tries = Tries::new(self.web.patience);
        loop {
            let mut at = 0;
            let Err(fault) = self.pump(body, &mut at, self.item.bytes).await else {
                return Ok(());
            };
            self.pause(&mut tries, fault).await?;
            body = loop {
                match self.ask(0, self.item.bytes).await {
                    Ok(Given::Range(body) | Given::Whole(body)) => break body,
                    Err(fault) => self.pause(&mut tries, fault).await?,
                }
            };
        }
    }

    async fn pause(&self, tries: &mut Tries, fault: Fault) -> Result<(), Error> {
        tries
            .again(fault, |why, wait| self.told.waiting(why, wait))
            .await
    }

    /// Asks for a range, and looks whether the answer is one to it.
    async fn ask(&self, first: u64, end: u64) -> Result<Given, Fault> {
        let etag = self.state().journal.etag.clone();
        let strong = etag.as_deref().filter(|etag| etag.starts_with('"'));
        let ask = Ask {
            url: &self.item.url,
            accept: "*/*",
            range: Some((first, end)),
            if_range: strong,
            what: &self.item.name,
        };
        let answer = self.web.ask(&ask).await?;
        self.judge(&answer, first, strong.is_some())
            .map_err(Fault::Lasting)?;
        let is_range = answer.response.status() == StatusCode::PARTIAL_CONTENT;
        let body = answer.response.into_body();
        Ok(match is_range {
            true => Given::Range(body),
            false => Given::Whole(body),
        })
    }

    fn judge(&self, answer: &Answer, first: u64, was_conditional: bool) -> Result<(), Error> {
        let (name, headers) = (&self.item.name, answer.response.headers());
        let changed = || Error::Changed { name: name.clone() };
        let odd = |what: &str| Error::BadAnswer {
            host: answer.host.clone(),
            what: what.to_owned(),
        };
        let length = |given| Error::Length {
            name: name.clone(),
            listed: self.item.bytes,
            given,
        };
        if let (Some(linked), Some(sha256)) = (&answer.linked_etag, &self.item.sha256)
            && is_sha256(linked)
            && linked != sha256
        {
            return Err(changed());
        }
        let coding = text_of(headers, &header::CONTENT_ENCODING);
        if coding.is_some_and(|coding| !coding.eq_ignore_ascii_case("identity")) {
            return Err(odd("with a compressed file"));
        }
        let etag = text_of(headers, &header::ETAG);
        let is_changed = {
            let mut state = self.state();
            let known = &mut state.journal.etag;
            let differs = etag.is_some() && known.is_some() && *known != etag;
            if known.is_none() {
                *known = etag.clone();
            }
            differs
        };
        match answer.response.status() {
            StatusCode::RANGE_NOT_SATISFIABLE => Err(changed()),
            _ if is_changed => Err(changed()),
            StatusCode::PARTIAL_CONTENT => {
                let said = text_of(headers, &header::CONTENT_RANGE);
                let (given_first, total) = said
                    .as_deref()
                    .and_then(content_range)
                    .ok_or_else(|| odd("with a range that it does not name"))?;
                match total {
                    Some(total) if total != self.item.bytes => Err(length(total)),
                    _ if given_first != first => Err(odd("with another range than was asked for")),
                    _ => Ok(()),
                }
            }
            // Without an ETag in the answer the condition has failed.
            _ if was_conditional && etag.is_none() => Err(changed()),
            _ => {
                let said = text_of(headers, &header::CONTENT_LENGTH);
                match said.and_then(|n| n.parse::<u64>().ok()) {
                    Some(given) if given != self.item.bytes => Err(length(given)),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Writes what comes, from `at` on, until `end`; `at` is where it got to.
    async fn pump(
        self: &Arc<Self>,
        mut body: Incoming,
        at: &mut u64,
        end: u64,
    ) -> Result<(), Fault> {
        let patience = self.web.patience;
        let host = crate::web::host_of(&self.item.url);
        let broken = |why: String| {
            Fault::Passing(
                Error::Broken {
                    host: host.clone(),
                    why,
                },
                None,
            )
        };
        let mut buffer = Vec::with_capacity(WRITE_BYTES);
        let (mut since, mut came) = (tokio::time::Instant::now(), 0_u64);
        let outcome = loop {
            let left = end - *at - buffer.len() as u64;
            if left == 0 {
                break Ok(());
            }
            let frame = tokio::time::timeout_at(since + patience.stall, body.frame()).await;
            let data = match frame {
                Err(_) => break Err(broken("it is too slow".to_owned())),
                Ok(None) => break Err(broken("an answer ends early".to_owned())),
                Ok(Some(Err(error))) => break Err(broken(chain(&error))),
                Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            };
            let taken = usize::try_from(left).map_or(data.len(), |left| left.min(data.len()));
            buffer.extend_from_slice(&data[..taken]);
            came += taken as u64;
            if came >= patience.least_bytes {
                (since, came) = (tokio::time::Instant::now(), 0);
            }
            if buffer.len() >= WRITE_BYTES {
                let full = std::mem::replace(&mut buffer, Vec::with_capacity(WRITE_BYTES));
                self.write(at, full).await.map_err(Fault::Lasting)?;
            }
        };
        self.write(at, buffer).await.map_err(Fault::Lasting)?;
        outcome
    }

    async fn write(self: &Arc<Self>, at: &mut u64, bytes: Vec<u8>) -> Result<(), Error> {
        let (first, end) = (*at, *at + bytes.len() as u64);
        let transfer = Arc::clone(self);
        let written = blocking(move || {
            transfer.file.write_all_at(&bytes, first)?;
            transfer.note(first, end)
        });
        written
            .await
            .map_err(|error| Error::io(&self.item.part(), error))?;
        *at = end;
        Ok(())
    }

    /// Notes that a span is there. Blocks on the file system.
    fn note(&self, first: u64, end: u64) -> io::Result<()> {
        let mut state = self.state();
        state.journal.spans.add(first, end);
        let (done, prefix) = (state.journal.spans.bytes(), state.journal.spans.prefix());
        if let Some(grown) = &state.grown {
            // The thread ends early where it cannot read; that is told of at the end.
            let _ = grown.send(prefix);
        }
        let save = state.saved.elapsed() >= JOURNAL_EVERY;
        if save {
            self.save(&mut state)?;
        }
        drop(state);
        self.told.grown(done);
        Ok(())
    }

    fn save(&self, state: &mut State) -> io::Result<()> {
        if self.item.sha256.is_none() {
            // Nothing else would show that the disk has not what the journal says.
            self.file.sync_data()?;
        }
        state.saved = Instant::now();
        state.journal.write(&self.item.journal())
    }

    /// Gives the file its name, keeps what there is of it, or deletes what is of no use. Blocks on
    /// the file system.
    fn finish(
        &self,
        fetched: Result<(), Error>,
        digest: io::Result<Option<[u8; 32]>>,
    ) -> Result<Arrived, Error> {
        let part = self.item.part();
        let io = |error| Error::io(&part, error);
        let arrived = fetched.and_then(|()| {
            let missing = || io::Error::other("the file did not grow to its end");
            let digest = digest.map_err(io)?.ok_or_else(missing).map_err(io)?;
            let found = hex(&digest);
            match &self.item.sha256 {
                Some(expected) if *expected != found => Err(Error::BadChecksum {
                    name: self.item.name.clone(),
                    expected: expected.clone(),
                    found,
                }),
                _ => Ok(found),
            }
        });
        let sha256 = match arrived {
            Ok(sha256) => sha256,
            Err(
                error @ (Error::BadChecksum { .. } | Error::Changed { .. } | Error::Length { .. }),
            ) => {
                // The error counts; what cannot be deleted is begun anew by its journal.
                let _ = std::fs::remove_file(self.item.journal());
                let _ = std::fs::remove_file(&part);
                return Err(error);
            }
            Err(error) => {
                // Without it the next download has more to do.
                let _ = self.save(&mut self.state());
                return Err(error);
            }
        };
        self.file.sync_all().map_err(io)?;
        std::fs::rename(&part, &self.item.dest)
            .map_err(|error| Error::io(&self.item.dest, error))?;
        if let Some(Ok(dir)) = self.item.dest.parent().map(File::open) {
            // Not all file systems can; the file is there all the same.
            let _ = dir.sync_all();
        }
        // One that stays is of no file.
        let _ = std::fs::remove_file(self.item.journal());
        let etag = self.state().journal.etag.clone();
        Ok(Arrived { sha256, etag })
    }
}

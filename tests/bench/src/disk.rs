//! `disk`: how fast a cold file comes from its disk, or with `--warm` one from the page cache, by
//! the way of an upload and by others. No model, no device.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rocmforge_gguf::MappedFile;
use rocmforge_gguf::limits::DIRECT_ALIGNMENT;

use crate::report::Spread;

/// Bytes of a read of `dd iflag=direct bs=16M`.
const DD_BYTES: usize = 16 << 20;
/// Bytes of a piece of the ring of uploads, and its pieces.
const PIECE_BYTES: usize = 8 << 20;
const PIECES: usize = 8;

/// Options of `disk`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The file to read; without --warm its pages leave the page cache.
    file: PathBuf,
    /// Write it first, of so many MiB of random bytes, replacing what is there.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    make: Option<u64>,
    /// Threads that read pieces, as uploads have them.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    threads: u8,
    /// Runs of each way, in turn.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=100))]
    runs: u8,
    /// Read from the page cache into a ring of 64 MiB: how fast threads fill it.
    #[arg(long)]
    warm: bool,
}

/// A way to read a file.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// As `dd iflag=direct bs=16M`.
    Dd,
    /// As uploads do with `--direct-io always`.
    Direct,
    /// As uploads do with `--direct-io never` and no registered windows.
    Mapping,
    /// The same by usual copies, through the processor's cache.
    Plain,
}

impl Way {
    const COLD: [Way; 3] = [Way::Dd, Way::Direct, Way::Mapping];
    /// The first is what others are compared with.
    const WARM: [Way; 2] = [Way::Plain, Way::Mapping];

    fn name(self) -> &'static str {
        match self {
            Way::Dd => "as dd iflag=direct bs=16M",
            Way::Direct => "pieces of 8 MiB, direct",
            Way::Mapping => "pieces of 8 MiB, mapping",
            Way::Plain => "pieces of 8 MiB, mapping, plain copies",
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let path = &options.file;
    if let Some(mib) = options.make {
        make(path, mib).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let ways: &[Way] = match options.warm {
        true => &Way::WARM,
        false => &Way::COLD,
    };
    let mut rates = vec![Vec::new(); ways.len()];
    let mut cached = rates.clone();
    if options.warm {
        let file = MappedFile::open(path)?;
        file.bring(0..file.len())?;
    }
    let mut ring = Vec::new();
    let ring = aligned(&mut ring, PIECES * PIECE_BYTES);
    for _ in 0..options.runs {
        for (i, &way) in ways.iter().enumerate() {
            if !options.warm {
                drop_pages(path)?;
            }
            let begin = Instant::now();
            let file = MappedFile::open(path)?;
            match way {
                Way::Dd => read_as_dd(path)?,
                Way::Direct => {
                    ensure!(
                        file.prefer_direct(),
                        "the file system of {} has no direct reads",
                        path.display()
                    );
                    read_pieces(&file, options.threads, ring, MappedFile::read_around)?;
                }
                Way::Mapping => read_pieces(&file, options.threads, ring, MappedFile::read_around)?,
                Way::Plain => read_pieces(&file, options.threads, ring, read_plainly)?,
            }
            rates[i].push(file.len() as f64 / begin.elapsed().as_secs_f64() / 1e9);
            cached[i].push(file.cached_bytes(0..file.len())? as f64 / f64::from(1 << 20));
        }
    }
    let first = Spread::of(&rates[0]).median;
    println!(
        "| {} threads | GB/s | min | max | of the first | cached after, MiB |",
        options.threads
    );
    println!("|---|---:|---:|---:|---:|---:|");
    for (i, way) in ways.iter().enumerate() {
        let Spread {
            median, min, max, ..
        } = Spread::of(&rates[i]);
        println!(
            "| {} | {median:.2} | {min:.2} | {max:.2} | {:.0} % | {:.0} |",
            way.name(),
            100.0 * median / first,
            Spread::of(&cached[i]).median
        );
    }
    Ok(())
}

fn make(path: &Path, mib: u64) -> Result<()> {
    let mut file = File::create(path)?;
    let mut random = SmallRng::seed_from_u64(mib);
    let mut bytes = vec![0; 1 << 20];
    for _ in 0..mib {
        random.fill_bytes(&mut bytes);
        file.write_all(&bytes)?;
    }
    Ok(file.sync_all()?)
}

/// Makes the file cold, but for pages that somebody has mapped.
pub(crate) fn drop_pages(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    file.sync_all()?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    Ok(())
}

/// Room for so many bytes from a border of blocks on.
fn aligned(memory: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    memory.resize(bytes + DIRECT_ALIGNMENT, 0);
    let skip = memory.as_ptr().align_offset(DIRECT_ALIGNMENT);
    &mut memory[skip..][..bytes]
}

fn read_as_dd(path: &Path) -> Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_DIRECT.bits())
        .open(path)?;
    let mut memory = Vec::new();
    let buffer = aligned(&mut memory, DD_BYTES);
    let mut at = 0;
    loop {
        match file.read_at(buffer, at)? {
            0 => return Ok(()),
            n => at += n as u64,
        }
    }
}

fn read_plainly(
    file: &MappedFile,
    range: Range<u64>,
    buffer: &mut [u8],
) -> Result<usize, rocmforge_gguf::Error> {
    let len = (range.end - range.start) as usize;
    file.read_into(range.start, &mut buffer[..len])?;
    Ok(0)
}

/// Reads the file in pieces that do not begin at blocks, as tensors' rows do not, each thread
/// into its pieces of the ring in turn.
fn read_pieces(
    file: &MappedFile,
    threads: u8,
    ring: &mut [u8],
    read: impl Fn(&MappedFile, Range<u64>, &mut [u8]) -> Result<usize, rocmforge_gguf::Error> + Sync,
) -> Result<()> {
    let step = (PIECE_BYTES - 2 * DIRECT_ALIGNMENT) as u64;
    let next = AtomicU64::new(0);
    let threads = usize::from(threads).min(PIECES);
    // The pieces are dealt out beforehand: each thread has its own.
    let mut dealt: Vec<Vec<&mut [u8]>> = (0..threads).map(|_| Vec::new()).collect();
    for (i, piece) in ring.chunks_exact_mut(PIECE_BYTES).enumerate() {
        dealt[i % threads].push(piece);
    }
    let serve = |mut pieces: Vec<&mut [u8]>| -> Result<()> {
        for turn in 0.. {
            let start = next.fetch_add(step, Ordering::Relaxed);
            let range: Range<u64> = start..file.len().min(start + step);
            if range.is_empty() {
                break;
            }
            let turn = turn % pieces.len();
            read(file, range, pieces[turn])?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let serve = &serve;
        let all: Vec<_> = dealt
            .into_iter()
            .map(|pieces| scope.spawn(move || serve(pieces)))
            .collect();
        all.into_iter()
            .try_for_each(|thread| thread.join().expect("a reader does not panic"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_and_read_by_each_way() {
        // Below the target directory: a file system in memory has no direct reads.
        let dir = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let options = Options {
            file: dir.path().join("file"),
            make: Some(9),
            threads: 2,
            runs: 1,
            warm: false,
        };
        make(&options.file, 9).unwrap();
        assert_eq!(std::fs::metadata(&options.file).unwrap().len(), 9 << 20);
        let file = MappedFile::open(&options.file).unwrap();
        let mut ring = vec![0; PIECES * PIECE_BYTES];
        read_pieces(&file, 2, &mut ring, read_plainly).unwrap();
        assert_eq!(file.bytes_read(), 9 << 20);
        let warm = Options {
            file: options.file.clone(),
            make: None,
            warm: true,
            ..options
        };
        run(&warm).unwrap();
        let options = Options {
            make: Some(9),
            warm: false,
            ..warm
        };
        match run(&options) {
            Ok(()) => {}
            Err(error) if error.to_string().contains("has no direct reads") => {
                println!("skipped: {error}");
            }
            Err(error) => panic!("{error:#}"),
        }
    }
}

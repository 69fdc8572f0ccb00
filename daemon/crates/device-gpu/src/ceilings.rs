//! What a card's memory, its link to the host and the vendor's library reach when nothing else is
//! asked of them: what measurements of the engine are held against.
//!
//! Each rate is the best of a few rounds, since a ceiling is what was reached once, timed on the
//! host around work that is long beside a launch.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::blas::{Blas, Gemm};
use rocmforge_gpu_driver::driver::Result;
use rocmforge_gpu_driver::{Buffer, Context, PinnedBuffer, Priority, Registration, Stream};

/// Rounds of each measurement.
const ROUNDS: usize = 5;

/// Bytes of the halves between which the device copies, at most.
const COPY_BYTES_MAX: u64 = 4 << 30;

/// Bytes that cross the link at a time, at most.
const LINK_BYTES_MAX: u64 = 512 << 20;

/// Rows and columns of the product's matrices.
const PRODUCT_SIZE: u64 = 8192;

/// Bytes that the library may use meanwhile.
const ROOM_BYTES: u64 = 64 << 20;

/// The rates of one card.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Bytes a second of a copy inside the device, those read and those written.
    pub memory_bytes_per_s: f64,
    /// Bytes a second from pinned host memory to the device.
    pub pinned_bytes_per_s: f64,
    /// Bytes a second from a file's mapping that is registered with the driver;
    /// `None` where it cannot be.
    pub registered_bytes_per_s: Option<f64>,
    /// Bytes a second of registering such a mapping.
    pub registering_bytes_per_s: Option<f64>,
    /// Operations a second, two for each product and sum, of the vendor's product of large f16
    /// matrices; `None` where its library is not to be had.
    pub product_flops_per_s: Option<f64>,
}

/// Measures a card that does nothing else; `file`'s first pages are in the page cache and not
/// registered. A quarter of the card's free memory at most is taken for
/// each.
///
/// # Errors
/// What the driver says.
pub fn measure(context: &Context, file: &Arc<MappedFile>) -> Result<Ceilings> {
    let stream = Stream::new(context, Priority::Normal)?;
    let share = context.memory()?.free / 8;
    let memory_bytes_per_s = memory(context, &stream, share.min(COPY_BYTES_MAX))?;
    let link = share.clamp(1, LINK_BYTES_MAX);
    let target = Buffer::new(context, link)?;
    let source = PinnedBuffer::new(context, link as usize)?;
    // SAFETY: the buffer is allocated for `link` bytes, nothing writes it, and `best` waits for the
    // copies, also after an error, before it is dropped.
    let copy = || unsafe { target.copy_from_host(0, source.as_ptr(), link, &stream) };
    let pinned_bytes_per_s = link as f64 / best(&stream, copy)?;
    let mapped = registered(context, &stream, &target, file)?;
    drop(source);
    drop(target);
    Ok(Ceilings {
        memory_bytes_per_s,
        pinned_bytes_per_s,
        registered_bytes_per_s: mapped.map(|(rate, _)| rate),
        registering_bytes_per_s: mapped.map(|(_, rate)| rate),
        product_flops_per_s: product(context, &stream, share)?,
    })
}

/// The least seconds of some rounds of what `queue` queues.
fn best(stream: &Stream, queue: impl Fn() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    // The first round, which pays for clocks and tables, does not count.
    for round in 0..=ROUNDS {
        stream.synchronize()?;
        let begin = Instant::now();
        let queued = queue();
        let waited = stream.synchronize();
        queued.and(waited)?;
        if round > 0 {
            least = least.min(begin.elapsed().as_secs_f64());
        }
    }
    Ok(least)
}

fn memory(context: &Context, stream: &Stream, bytes: u64) -> Result<f64> {
    let both = Buffer::new(context, 2 * bytes)?;
    // SAFETY: no other work touches the buffer, and the copies have ended before it is dropped.
    unsafe { both.fill(0, 1, 2 * bytes, stream)? };
    // SAFETY: as above; the halves are disjoint.
    let seconds = best(stream, || unsafe {
        both.copy_within(0, bytes, bytes, stream)
    })?;
    Ok(2.0 * bytes as f64 / seconds)
}

/// Rates of copying from a registered mapping and of registering it; `None` where the file or the
/// driver does not allow it.
fn registered(
    context: &Context,
    stream: &Stream,
    target: &Buffer,
    file: &Arc<MappedFile>,
) -> Result<Option<(f64, f64)>> {
    let bytes = file.len().min(target.bytes());
    let Ok(Some(pages)) = file.mapped_range(0..bytes) else {
        return Ok(None);
    };
    let kept = Arc::new(pages.clone());
    let begin = Instant::now();
    // SAFETY: whole pages of a mapping that `kept` keeps, which nobody has registered
    // (the caller's promise; a driver refuses a second time). It is dropped after the
    // copies, which `best` waits for.
    let made = unsafe { Registration::new(context, pages.as_ptr(), pages.len(), kept) };
    let registration = match made {
        Ok(registration) => registration,
        Err(error) if error.is_lost() => return Err(error),
        Err(error) => {
            tracing::info!(%error, "the driver does not register file mappings");
            return Ok(None);
        }
    };
    let took = begin.elapsed().as_secs_f64();
    let from = registration.as_ptr();
    // SAFETY: registered and mapped for `bytes` until after the copies, which read only.
    let seconds = best(stream, || unsafe {
        target.copy_from_host(0, from, bytes, stream)
    })?;
    Ok(Some((bytes as f64 / seconds, bytes as f64 / took)))
}

/// Operations a second of a product of random f16 matrices; `None` without a library or with
/// less than `bytes` of room.
fn product(context: &Context, stream: &Stream, bytes: u64) -> Result<Option<f64>> {
    let n = PRODUCT_SIZE;
    let matrix = 2 * n * n;
    let all = 2 * matrix + 4 * n * n + ROOM_BYTES;
    let Ok(blas) = Blas::open(context, stream, None) else {
        return Ok(None);
    };
    if all > bytes {
        return Ok(None);
    }
    let mut memory = Buffer::new(context, all)?;
    let row = random_halves(2 * n as usize * 64);
    for at in (0..2 * matrix).step_by(row.len()) {
        memory.write(at, &row, stream)?;
    }
    let at = |offset: u64| memory.ptr().offset(offset).0;
    let gemm = Gemm {
        weights: at(0),
        x: at(matrix),
        out: at(2 * matrix),
        rows: n,
        cols: n,
        tokens: n,
        stride: n,
        batch: 1,
        out_step: 0,
        factor: 1.0,
        add: false,
        bias: None,
    };
    let room = (at(all - ROOM_BYTES), ROOM_BYTES);
    let refused = Cell::new(false);
    let seconds = best(stream, || {
        if let Err(error) = blas.gemm(&gemm, room) {
            refused.set(true);
            tracing::warn!(%error, "the vendor's library does not multiply");
        }
        Ok(())
    })?;
    let rate = 2.0 * (n * n * n) as f64 / seconds;
    Ok((!refused.get()).then_some(rate))
}

/// Random f16 values of magnitude 1/64 to 2: what a product of equal values needs less power for.
fn random_halves(n: usize) -> Vec<u8> {
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let half = |bits: u64| {
        let exponent = 9 + (bits >> 16) % 7;
        (bits as u16 & 0x83FF) | (exponent as u16) << 10
    };
    (0..n / 2)
        .flat_map(|_| half(next()).to_le_bytes())
        .collect()
}

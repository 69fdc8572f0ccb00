//! Addresses apart from memory: a range is reserved once, and memory is mapped into it
//! and taken away again, so that what lies there keeps its address while the memory
//! behind it grows and shrinks.
//!
//! ```text
//!   Chunk: created (memory, no address) --map--> mapped (usable)
//!          --unmap--> created --drop--> given back
//! ```
//!
//! *Invariant:* whatever the order in which owners go, a range is given back when nothing is mapped
//! there. A [`Chunk`] holds an `Arc` of its [`Reservation`], and its `Drop` unmaps before it gives
//! its memory back (`Setup::end` in `device-gpu/src/arena/tests.rs` finds nothing left and no
//! violation). Neither waits for work on the device: who lets a chunk go does, before.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::context::{Context, report};
use super::driver::{DevicePtr, Driver, Error, Result};

/// Memory of a device without an address, as a driver gives it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryHandle(pub u64);

/// What a driver may be asked that keeps addresses and memory apart. Addresses and bytes are
/// multiples of the granularity.
///
/// # Safety of the unsafe methods
/// As of [`Driver`]; and no work under way uses the range.
pub trait VirtualMemory: Send + Sync {
    /// What addresses and bytes on device `ordinal` are multiples of; `None` if the device cannot.
    ///
    /// # Errors
    /// What the driver says.
    fn granularity(&self, ordinal: u32) -> Result<Option<u64>>;

    /// Reserves addresses, which takes no memory. `align`, a power of two, is a wish: runtimes were
    /// seen to ignore it.
    ///
    /// # Errors
    /// What the driver says.
    fn reserve(&self, bytes: u64, align: u64) -> Result<DevicePtr>;

    /// Gives reserved addresses back.
    ///
    /// # Safety
    /// The whole of one reservation, with nothing mapped in it; see the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn unreserve(&self, at: DevicePtr, bytes: u64) -> Result<()>;

    /// Takes memory on device `ordinal`.
    ///
    /// # Errors
    /// [`super::driver::Class::OutOfMemory`].
    fn create(&self, ordinal: u32, bytes: u64) -> Result<MemoryHandle>;

    /// Gives memory back.
    ///
    /// # Safety
    /// It is not mapped and is not used afterwards; see the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn release(&self, memory: MemoryHandle) -> Result<()>;

    /// Maps the whole of some memory, for device `ordinal` to read and write. After
    /// an error nothing is mapped.
    ///
    /// # Safety
    /// The memory has `bytes` bytes and is mapped nowhere; the range is reserved and nothing is
    /// mapped there; see the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn map(
        &self,
        ordinal: u32,
        at: DevicePtr,
        bytes: u64,
        memory: MemoryHandle,
    ) -> Result<()>;

    /// Undoes [`VirtualMemory::map`].
    ///
    /// # Safety
    /// The range is exactly what was mapped; see the trait.
    ///
    /// # Errors
    /// What the driver says; the memory is then still mapped.
    unsafe fn unmap(&self, at: DevicePtr, bytes: u64) -> Result<()>;
}

/// The driver's surface for it, which was there when the reservation was made.
fn surface(driver: &dyn Driver) -> Result<&dyn VirtualMemory> {
    driver.virtual_memory().ok_or_else(|| Error::Answer {
        call: "virtual memory",
        message: "the library has no functions for it".to_owned(),
    })
}

/// A range of addresses, given back on drop.
#[derive(Debug)]
pub struct Reservation {
    context: Context,
    ptr: DevicePtr,
    bytes: u64,
    granularity: u64,
}

impl Reservation {
    /// Reserves at least `bytes` bytes of addresses; `None` where the library or the device cannot.
    /// What is mapped is a multiple of `granularity_min` at least, a power of two: drivers were
    /// seen to say 4 KB and to fault below 2 MB.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(
        context: &Context,
        bytes: u64,
        granularity_min: u64,
    ) -> Result<Option<Arc<Reservation>>> {
        let driver = context.driver()?;
        let Some(memory) = driver.virtual_memory() else {
            return Ok(None);
        };
        let Some(granularity) = memory.granularity(context.attributes().ordinal)? else {
            return Ok(None);
        };
        let granularity = granularity.max(1).next_multiple_of(granularity_min.max(1));
        let bytes = bytes.max(1).next_multiple_of(granularity);
        let reservation = Reservation {
            context: context.clone(),
            ptr: memory.reserve(bytes, granularity)?,
            bytes,
            granularity,
        };
        if reservation.ptr.0.is_multiple_of(granularity) {
            return Ok(Some(Arc::new(reservation)));
        }
        Err(Error::Answer {
            call: "reserving addresses",
            message: format!("{:#x} is no multiple of {granularity}", reservation.ptr.0),
        })
    }

    /// The reservation's first address.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The reservation's bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What offsets and bytes of chunks are multiples of.
    pub fn granularity(&self) -> u64 {
        self.granularity
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved in `new`, given back once; a chunk that is mapped
        // here would hold this value.
        self.context.release("reserved addresses", |driver| unsafe {
            surface(driver)?.unreserve(self.ptr, self.bytes)
        });
    }
}

/// Memory that may be mapped into a reservation; unmapped and given back on drop.
#[derive(Debug)]
pub struct Chunk {
    reservation: Arc<Reservation>,
    memory: MemoryHandle,
    bytes: u64,
    /// Offset in the reservation where it is mapped.
    at: Option<u64>,
}

impl Chunk {
    /// Takes `bytes` bytes of memory, a multiple of the granularity, to be mapped into
    /// `reservation`. Its contents are undefined until written.
    ///
    /// # Errors
    /// [`super::driver::Class::OutOfMemory`].
    pub fn new(reservation: &Arc<Reservation>, bytes: u64) -> Result<Chunk> {
        let context = &reservation.context;
        let ordinal = context.attributes().ordinal;
        let memory = surface(&*context.driver()?)?.create(ordinal, bytes)?;
        let counts = context.counts();
        counts.allocations.fetch_add(1, Ordering::Relaxed);
        counts.device_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Chunk {
            reservation: Arc::clone(reservation),
            memory,
            bytes,
            at: None,
        })
    }

    /// The chunk's bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps it at an offset of its reservation, where nothing else is.
    ///
    /// # Errors
    /// [`Error::Range`] outside of the reservation or for one that is mapped; what the driver says.
    /// It is then not mapped, or where it was.
    pub fn map(&mut self, offset: u64) -> Result<()> {
        let r = &self.reservation;
        let end = offset.checked_add(self.bytes);
        if self.at.is_some() || end.is_none_or(|end| end > r.bytes) {
            return Err(Error::Range {
                operation: "mapping memory",
                offset,
                bytes: self.bytes,
                size: r.bytes,
            });
        }
        let driver = r.context.driver()?;
        let ordinal = r.context.attributes().ordinal;
        // SAFETY: this chunk's memory, of so many bytes, and mapped nowhere, as checked;
        // the range is inside of the reservation, and a place where something is mapped
        // is refused by the driver.
        unsafe { surface(&*driver)?.map(ordinal, r.ptr.offset(offset), self.bytes, self.memory)? };
        drop(driver);
        self.at = Some(offset);
        Ok(())
    }

    /// Takes its address away; what it holds stays. Of no effect where it has none.
    ///
    /// # Safety
    /// No work under way uses its addresses.
    ///
    /// # Errors
    /// What the driver says; it is then still mapped, unless the device is lost.
    pub unsafe fn unmap(&mut self) -> Result<()> {
        let Some(at) = self.at else {
            return Ok(());
        };
        let driver = self.reservation.context.driver()?;
        // SAFETY: exactly what `map` mapped; that nothing uses it is the caller's promise.
        let unmapped =
            unsafe { surface(&*driver)?.unmap(self.reservation.ptr.offset(at), self.bytes) };
        drop(driver);
        // A lost device has no mappings that anybody could use or undo.
        if unmapped.as_ref().err().is_none_or(Error::is_lost) {
            self.at = None;
        }
        unmapped
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let context = self.reservation.context.clone();
        // SAFETY: whoever queued work on it promised not to drop it before the stream has passed.
        let mut unmapped = unsafe { self.unmap() };
        if unmapped.as_ref().is_err_and(|error| !error.is_lost()) {
            // Once more, since its memory would stay taken and its place too.
            // SAFETY: as above.
            unmapped = unsafe { self.unmap() };
        }
        report("mapping", unmapped);
        if self.at.is_none() {
            let counts = context.counts();
            counts.device_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        } else {
            // What the driver keeps mapped stays taken, and its addresses with it:
            // the reservation never goes.
            std::mem::forget(Arc::clone(&self.reservation));
        }
        // SAFETY: created in `new`, given back once, after its mapping; while it has one,
        // the driver keeps the memory.
        context.release("chunk of memory", |driver| unsafe {
            surface(driver)?.release(self.memory)
        });
    }
}

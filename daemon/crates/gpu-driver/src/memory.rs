//! Owners of memory: on the device, page-locked on the host, and host mappings that a driver may
//! read.
//!
//! Copies are queued on a stream and go on after the call returns, so they are unsafe: nobody
//! but the caller knows when the stream has passed them. [`Buffer::write`] and
//! [`Buffer::read`] wait, and are safe.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::context::Context;
use super::driver::{DevicePtr, Error, Result};
use super::exec::Stream;

/// Device memory, freed on drop. Its contents are undefined until written.
#[derive(Debug)]
pub struct Buffer {
    context: Context,
    ptr: DevicePtr,
    bytes: u64,
}

impl Buffer {
    /// Allocates `bytes` bytes; at least one.
    ///
    /// # Errors
    /// [`super::driver::Class::OutOfMemory`].
    pub fn new(context: &Context, bytes: u64) -> Result<Buffer> {
        let bytes = bytes.max(1);
        let ptr = context.driver()?.mem_alloc(bytes)?;
        let counts = context.counts();
        counts.allocations.fetch_add(1, Ordering::Relaxed);
        counts.device_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Buffer {
            context: context.clone(),
            ptr,
            bytes,
        })
    }

    /// The buffer's first address.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The buffer's bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of a range that lies inside.
    fn range(&self, operation: &'static str, offset: u64, bytes: u64) -> Result<DevicePtr> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.ptr.offset(offset)),
            _ => Err(Error::Range {
                operation,
                offset,
                bytes,
                size: self.bytes,
            }),
        }
    }

    /// Queues a copy from the host to bytes `offset..offset + bytes`.
    ///
    /// # Safety
    /// `src` is readable for `bytes` and unchanged until the stream has passed the copy. No other
    /// work that is not ordered with it touches the range.
    ///
    /// # Errors
    /// [`Error::Range`], and what the driver says.
    pub unsafe fn copy_from_host(
        &self,
        offset: u64,
        src: *const u8,
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        let dst = self.range("copy from host", offset, bytes)?;
        let driver = self.context.driver()?;
        // SAFETY: the destination lies in this live buffer; the stream is alive; the
        // source is the caller's promise.
        unsafe { driver.copy_h2d_async(dst, src, bytes, stream.handle()) }
    }

    /// Queues a copy of bytes `offset..offset + bytes` to the host.
    ///
    /// # Safety
    /// `dst` is writable for `bytes` and left alone until the stream has passed the copy. No other
    /// work that is not ordered with it writes the range.
    ///
    /// # Errors
    /// [`Error::Range`], and what the driver says.
    pub unsafe fn copy_to_host(
        &self,
        offset: u64,
        dst: *mut u8,
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        let src = self.range("copy to host", offset, bytes)?;
        let driver = self.context.driver()?;
        // SAFETY: the source lies in this live buffer; the stream is alive; the
        // destination is the caller's promise.
        unsafe { driver.copy_d2h_async(dst, src, bytes, stream.handle()) }
    }

    /// Queues a copy inside the buffer; the ranges must not overlap.
    ///
    /// # Safety
    /// No other work that is not ordered with it writes the ranges.
    ///
    /// # Errors
    /// [`Error::Range`], also for overlapping ranges, and what the driver says.
    pub unsafe fn copy_within(
        &self,
        from: u64,
        to: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        let src = self.range("copy within", from, bytes)?;
        let dst = self.range("copy within", to, bytes)?;
        if from.abs_diff(to) < bytes {
            return Err(Error::Range {
                operation: "copy within, which overlaps",
                offset: from.min(to),
                bytes,
                size: self.bytes,
            });
        }
        let driver = self.context.driver()?;
        // SAFETY: both ranges lie in this live buffer and are disjoint; the stream is alive.
        unsafe { driver.copy_d2d_async(dst, src, bytes, stream.handle()) }
    }

    /// Queues filling bytes `offset..offset + bytes` with one value.
    ///
    /// # Safety
    /// No other work that is not ordered with it touches the range.
    ///
    /// # Errors
    /// [`Error::Range`], and what the driver says.
    pub unsafe fn fill(&self, offset: u64, value: u8, bytes: u64, stream: &Stream) -> Result<()> {
        let dst = self.range("fill", offset, bytes)?;
        let driver = self.context.driver()?;
        // SAFETY: the range lies in this live buffer; the stream is alive.
        unsafe { driver.memset_async(dst, value, bytes, stream.handle()) }
    }

    /// Copies from the host after all work on the stream, and waits for it.
    ///
    /// # Errors
    /// [`Error::Range`], failures of earlier work on the stream, and what the driver says.
    pub fn write(&mut self, offset: u64, src: &[u8], stream: &Stream) -> Result<()> {
        // SAFETY: `src` is borrowed until the wait below has ended; `&mut self` and the wait
        // keep other safe uses away.
        let queued = unsafe { self.copy_from_host(offset, src.as_ptr(), src.len() as u64, stream) };
        let waited = stream.synchronize();
        queued.and(waited)
    }

    /// Copies to the host after all work on the stream, and waits for it.
    ///
    /// # Errors
    /// [`Error::Range`], failures of earlier work on the stream, and what the driver says.
    pub fn read(&self, offset: u64, dst: &mut [u8], stream: &Stream) -> Result<()> {
        // SAFETY: `dst` is borrowed until the wait below has ended.
        let queued =
            unsafe { self.copy_to_host(offset, dst.as_mut_ptr(), dst.len() as u64, stream) };
        let waited = stream.synchronize();
        queued.and(waited)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let counts = self.context.counts();
        counts.device_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        // SAFETY: the address came from mem_alloc of this context and is freed once; whoever
        // queued work on it promised not to drop it before the stream has passed, and both vendors
        // wait in their free besides.
        self.context
            .release("buffer", |driver| unsafe { driver.mem_free(self.ptr) });
    }
}

/// Page-locked host memory, zeroed, freed on drop.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Context,
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: it owns plain memory; the pointer is not tied to a thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: through a shared reference only the address and unsafe accessors are to be had.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes; at least one.
    ///
    /// # Errors
    /// [`super::driver::Class::OutOfMemory`].
    pub fn new(context: &Context, bytes: usize) -> Result<PinnedBuffer> {
        let bytes = bytes.max(1);
        let ptr = context.driver()?.host_alloc(bytes)?;
        // SAFETY: the driver has just given out `bytes` writable bytes here.
        unsafe { ptr.write_bytes(0, bytes) };
        let counts = context.counts();
        counts.allocations.fetch_add(1, Ordering::Relaxed);
        counts
            .pinned_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(PinnedBuffer {
            context: context.clone(),
            ptr,
            bytes,
        })
    }

    /// The buffer's first address.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The buffer's bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The buffer's contents.
    ///
    /// # Safety
    /// No copy into it is under way, and none starts while the slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and zeroed for `bytes`; that nothing writes is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }

    /// The buffer's contents, for writing.
    ///
    /// # Safety
    /// No copy into or out of it is under way, and none starts while the slice lives.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: allocated and zeroed for `bytes`; that nothing else reads or
        // writes is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let counts = self.context.counts();
        counts
            .pinned_bytes
            .fetch_sub(self.bytes as u64, Ordering::Relaxed);
        // SAFETY: the address came from host_alloc and is freed once; whoever queued a copy
        // promised not to drop it before the stream has passed.
        self.context.release("pinned buffer", |driver| unsafe {
            driver.host_free(self.ptr)
        });
    }
}

/// A range of a host mapping that the device may read at link speed, until drop.
pub struct Registration {
    context: Context,
    ptr: *const u8,
    bytes: usize,
    /// Where kernels read it, on a card that shares the machine's memory and if the driver says.
    device: Option<DevicePtr>,
    /// What keeps the range mapped.
    _mapping: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it owns a note in the driver about memory that `_mapping`, itself Send, keeps.
unsafe impl Send for Registration {}
// SAFETY: a shared reference gives out the address and the length only.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `bytes` bytes from `ptr`; both multiples of the page size,
    /// except at a mapping's end.
    ///
    /// # Safety
    /// The range stays mapped as long as `mapping` lives; no page of it is registered already. The
    /// value is dropped only when the copies that read from it have passed.
    ///
    /// # Errors
    /// [`super::driver::Class::NotSupported`] or [`super::driver::Class::Other`] where
    /// driver or kernel refuses.
    pub unsafe fn new(
        context: &Context,
        ptr: *const u8,
        bytes: usize,
        mapping: Arc<dyn Any + Send + Sync>,
    ) -> Result<Registration> {
        let driver = context.driver()?;
        // SAFETY: mapped until `mapping` goes, which this value holds until after the
        // unregistering.
        unsafe { driver.host_register_read_only(ptr, bytes)? };
        context
            .counts()
            .registered_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        let device = match context.attributes().integrated {
            true => driver.host_device_address(ptr).ok(),
            false => None,
        };
        Ok(Registration {
            context: context.clone(),
            ptr,
            bytes,
            device,
            _mapping: mapping,
        })
    }

    /// The registered range's first address.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Where kernels read it: known on cards that share the machine's memory.
    pub fn device_address(&self) -> Option<DevicePtr> {
        self.device
    }

    /// The registered range's bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let counts = self.context.counts();
        counts
            .registered_bytes
            .fetch_sub(self.bytes as u64, Ordering::Relaxed);
        // SAFETY: registered in `new`, once; the copies from it have passed, as promised there.
        self.context.release("registration", |driver| unsafe {
            driver.host_unregister(self.ptr)
        });
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration")
            .field("ptr", &self.ptr)
            .field("bytes", &self.bytes)
            .finish()
    }
}

//! The card that is open: a driver, its primary context, and the count of what was asked of it.
//!
//! Everything that lives on a card holds a [`Context`], so the context dies last whatever the order
//! in which owners go. Every use of the driver goes through a [`Call`], which notes when it began
//! (`calls.rs`): a driver whose card hangs may block its caller for good, and then only another
//! thread can tell.
//!
//! A context is bound to a thread on the first call there and whenever the thread
//! used another one in between.

use std::cell::Cell;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::calls::{Calls, Note};
use super::driver::{ContextHandle, DeviceAttributes, Driver, MemoryInfo, Result, Vendor};
use super::others::Card;
use super::sysfs::CardMemory;

/// Numbers of contexts, never given twice, so that a stale note of a thread matches nothing.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The context that this thread bound last.
    static BOUND: Cell<u64> = const { Cell::new(0) };
}

/// An open card. Clones share it.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    driver: Arc<dyn Driver>,
    handle: ContextHandle,
    id: u64,
    attributes: DeviceAttributes,
    /// The kernel's counts of the GPU's memory.
    kernel: Option<CardMemory>,
    counts: Counts,
    calls: Arc<Calls>,
}

/// The driver in use: noted from its making to its drop.
pub struct Call<'a> {
    driver: &'a Arc<dyn Driver>,
    _note: Note<'a>,
}

impl Deref for Call<'_> {
    type Target = dyn Driver;

    fn deref(&self) -> &Self::Target {
        &**self.driver
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").finish_non_exhaustive()
    }
}

/// Memory that a context holds, counted as it is allocated and freed.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) allocations: AtomicU64,
    pub(super) device_bytes: AtomicU64,
    pub(super) pinned_bytes: AtomicU64,
    pub(super) registered_bytes: AtomicU64,
}

/// Memory that this process holds through a context, by its own count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Allocations of device or pinned memory since the context was opened, freed ones included.
    pub allocations: u64,
    /// Bytes of device memory held now.
    pub device_bytes: u64,
    /// Bytes of pinned host memory held now.
    pub pinned_bytes: u64,
    /// Bytes of host mappings registered now.
    pub registered_bytes: u64,
}

impl Context {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open(driver: Arc<dyn Driver>, ordinal: u32) -> Result<Context> {
        Self::open_noting(driver, ordinal, Arc::default())
    }

    /// Opens device `ordinal` once more, for those who watch the calls of an earlier context.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open_noting(
        driver: Arc<dyn Driver>,
        ordinal: u32,
        calls: Arc<Calls>,
    ) -> Result<Context> {
        Self::with_files(driver, ordinal, calls, CardMemory::of)
    }

    /// Opens a context, with the kernel's files (`/sys`, `/proc`) below another root.
    pub fn open_below(
        driver: Arc<dyn Driver>,
        ordinal: u32,
        root: &std::path::Path,
    ) -> Result<Context> {
        Self::with_files(driver, ordinal, Arc::default(), |card| {
            CardMemory::below(root, card)
        })
    }

    fn with_files(
        driver: Arc<dyn Driver>,
        ordinal: u32,
        calls: Arc<Calls>,
        files: impl Fn(&DeviceAttributes) -> Option<CardMemory>,
    ) -> Result<Context> {
        let note = calls.note();
        let attributes = driver.device_attributes(ordinal)?;
        let kernel = match driver.vendor() {
            Vendor::Hip => files(&attributes),
            Vendor::Cuda => None,
        };
        let handle = driver.context_open(ordinal)?;
        drop(note);
        calls.opened();
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        BOUND.set(id);
        Ok(Context(Arc::new(Inner {
            driver,
            handle,
            id,
            attributes,
            kernel,
            counts: Counts::default(),
            calls,
        })))
    }

    /// What the card is.
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.0.attributes
    }

    /// Where the card is.
    pub fn card(&self) -> Card {
        Card {
            vendor: self.0.driver.vendor(),
            address: self.0.attributes.pci_bus_id.clone(),
        }
    }

    /// The driver, with this context bound to the calling thread: for calls that no owner covers.
    ///
    /// # Errors
    /// What the driver says.
    pub fn driver(&self) -> Result<Call<'_>> {
        let call = Call {
            driver: &self.0.driver,
            _note: self.0.calls.note(),
        };
        self.0.bound()?;
        Ok(call)
    }

    /// The uses of the driver that are under way, by whichever thread.
    pub fn calls(&self) -> &Arc<Calls> {
        &self.0.calls
    }

    /// The driver as it was opened, for opening another card with it.
    pub fn shared_driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.0.driver)
    }

    /// Free and total bytes by the driver's count, and by the kernel's where that says less.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let mut told = self.driver()?.mem_info()?;
        // A runtime was seen to tell more as free than there is.
        told.free = told.free.min(told.total);
        Ok(self
            .0
            .kernel
            .as_ref()
            .map_or(told, |kernel| kernel.info(told)))
    }

    /// Bytes free by a count that changes with what this process takes: the same, but where the
    /// card's memory is the machine's. What the kernel reports about that changes with all that
    /// others do, by more than what is to be seen, so there it is the driver's count alone.
    ///
    /// # Errors
    /// What the driver says.
    pub fn followed_free_bytes(&self) -> Result<u64> {
        match self.0.attributes.machine_memory {
            true => Ok(self.driver()?.mem_info()?.free),
            false => Ok(self.memory()?.free),
        }
    }

    /// What the kernel says of the card's memory, for people.
    pub fn describe_memory(&self) -> Option<String> {
        let kernel = self.0.kernel.as_ref()?;
        let told = self.driver().ok()?.mem_info().ok()?;
        Some(kernel.describe(told.total))
    }

    /// Memory that this process holds through the context, by its own count.
    pub fn usage(&self) -> Usage {
        let counts = &self.0.counts;
        Usage {
            allocations: counts.allocations.load(Ordering::Relaxed),
            device_bytes: counts.device_bytes.load(Ordering::Relaxed),
            pinned_bytes: counts.pinned_bytes.load(Ordering::Relaxed),
            registered_bytes: counts.registered_bytes.load(Ordering::Relaxed),
        }
    }

    /// Counts allocations on from those of an earlier context.
    pub fn count_allocations_from(&self, allocations: u64) {
        let counted = &self.0.counts.allocations;
        counted.store(allocations, Ordering::Relaxed);
    }

    /// Waits for all work on the card.
    ///
    /// # Errors
    /// Failures of that work.
    pub fn synchronize(&self) -> Result<()> {
        self.driver()?.synchronize()
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.0.counts
    }

    /// Runs a destructor's call and logs what goes wrong; a lost device is logged once
    /// elsewhere, so only quietly here.
    pub(super) fn release(&self, what: &'static str, call: impl FnOnce(&dyn Driver) -> Result<()>) {
        report(what, self.driver().and_then(|driver| call(&*driver)));
    }
}

impl Inner {
    fn bound(&self) -> Result<&dyn Driver> {
        if BOUND.get() != self.id {
            self.driver.context_bind(self.handle)?;
            BOUND.set(self.id);
        }
        Ok(&*self.driver)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _note = self.calls.note();
        let result = self.bound().map(|_| ()).and_then(|()| {
            BOUND.set(0);
            // SAFETY: every owner of something in this context holds a clone of
            // the Arc that is ending here.
            unsafe { self.driver.context_close(self.handle) }
        });
        report("context", result);
        self.calls.closed();
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("vendor", &self.0.driver.vendor())
            .field("ordinal", &self.0.attributes.ordinal)
            .field("name", &self.0.attributes.name)
            .field("usage", &self.usage())
            .finish()
    }
}

/// Logs what went wrong in a destructor.
pub(super) fn report(what: &'static str, result: Result<()>) {
    match result {
        Ok(()) => {}
        Err(error) if error.is_lost() => tracing::debug!(%error, "giving back a {what}"),
        Err(error) => tracing::warn!(%error, "giving back a {what}"),
    }
}

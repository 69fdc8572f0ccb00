//! Changes of an arena that is one allocation.
//!
//! Another allocation is taken, what lies below the smaller of the two ends goes there on the
//! device, and the old one goes. Where there is no room for both, which is the rule on a card whose
//! memory is mostly the arena's, the contents wait in the host's memory meanwhile: the old
//! allocation goes first. Not where they are more than a part of the machine's memory, and not to
//! grow into what is not free: then the arena stays as it is, and the reason is told.

use rocmforge_device::{Error, host_memory_bytes};
use rocmforge_gpu_driver::{Buffer, Stream};

use super::{Arena, Memory, failed, not_had};

/// The part of the machine's memory that an arena's contents may take for a moment.
pub(super) const HOST_PART: u64 = 4;

impl Arena {
    /// Makes `bytes` usable. Nothing else may be under way.
    pub(super) fn set_whole(&mut self, bytes: u64, stream: &Stream) -> Result<(), Error> {
        let Memory::Whole(buffer) = &mut self.memory else {
            return Ok(());
        };
        let held = buffer.as_ref().map_or(0, Buffer::bytes);
        if bytes == held {
            self.capacity = bytes;
            return Ok(());
        }
        let fresh = match Buffer::new(&self.context, bytes) {
            Ok(fresh) => fresh,
            Err(error) if held > 0 && error.is_out_of_memory() => {
                return self.move_through_host(bytes, held, &error, stream);
            }
            Err(error) => return self.stays(bytes, held, &error),
        };
        if let Some(old) = buffer {
            let kept = self.capacity.min(bytes);
            if kept > 0 {
                let driver = self.context.driver();
                driver
                    .and_then(|driver| {
                        // SAFETY: both buffers are alive until the wait below and at least this
                        // long; nothing else is under way (the caller's promise).
                        unsafe {
                            driver.copy_d2d_async(fresh.ptr(), old.ptr(), kept, stream.handle())
                        }
                    })
                    .and_then(|()| stream.synchronize())
                    .map_err(|e| failed("moving the arena", e))?;
            }
        }
        *buffer = Some(fresh);
        self.capacity = bytes;
        self.generation += 1;
        Ok(())
    }

    /// An allocation of `bytes` bytes was refused beside the one of `held` bytes: what it holds
    /// goes to the host, so that it can go first.
    fn move_through_host(
        &mut self,
        bytes: u64,
        held: u64,
        refused: &rocmforge_gpu_driver::Error,
        stream: &Stream,
    ) -> Result<(), Error> {
        let kept = self.capacity.min(bytes);
        if bytes > held {
            // Others could take what was given back for nothing.
            let free = self.context.memory().map_or(0, |memory| memory.free);
            if free.saturating_add(held) < bytes {
                return self.stays(bytes, held, refused);
            }
        }
        let contents = match self.to_host(kept, stream) {
            Ok(contents) => contents,
            Err(error) if error.is_lost() => return Err(failed("moving the arena", error)),
            Err(error) => return self.stays(bytes, held, &error),
        };
        self.memory = Memory::Whole(None);
        self.generation += 1;
        let mut outcome = Ok(());
        let mut fresh = self.with_contents(bytes, &contents, stream);
        let mut capacity = bytes;
        if bytes > held
            && let Err(error) = &fresh
            && !error.is_lost()
        {
            outcome = self.stays(bytes, held, &error.clone());
            capacity = self.capacity;
            fresh = self.with_contents(held, &contents, stream);
        }
        // The old one has gone: without an allocation nothing is left.
        let fresh = fresh.map_err(|error| {
            self.capacity = 0;
            not_had("the arena cannot be allocated again", &error)
        })?;
        self.memory = Memory::Whole(Some(fresh));
        self.capacity = capacity;
        outcome
    }

    /// The allocation stays: what is not to be used of it is not, and more is an error.
    fn stays(
        &mut self,
        bytes: u64,
        held: u64,
        error: &rocmforge_gpu_driver::Error,
    ) -> Result<(), Error> {
        if bytes > held {
            let refused = self.refused(bytes, error);
            self.is_kept(format!("the arena stays at {held} bytes: {error}"));
            return Err(refused);
        }
        self.is_kept(format!(
            "the arena holds {held} bytes of which {bytes} are used; it cannot be moved to less: {error}"
        ));
        self.capacity = bytes;
        Ok(())
    }

    /// The first `kept` bytes of the allocation, in the host's memory.
    fn to_host(&self, kept: u64, stream: &Stream) -> Result<Vec<u8>, rocmforge_gpu_driver::Error> {
        let no_room = || rocmforge_gpu_driver::Error::Answer {
            call: "malloc",
            message: format!("no {kept} bytes of the host's memory for a moment"),
        };
        if kept > host_memory_bytes() / HOST_PART {
            return Err(no_room());
        }
        let mut contents = Vec::new();
        let reserved = contents.try_reserve_exact(kept as usize);
        reserved.map_err(|_| no_room())?;
        contents.resize(kept as usize, 0);
        if let Memory::Whole(Some(buffer)) = &self.memory
            && kept > 0
        {
            buffer.read(0, &mut contents, stream)?;
        }
        Ok(contents)
    }

    /// A fresh allocation with these first bytes.
    pub(super) fn with_contents(
        &self,
        bytes: u64,
        contents: &[u8],
        stream: &Stream,
    ) -> Result<Buffer, rocmforge_gpu_driver::Error> {
        let mut fresh = Buffer::new(&self.context, bytes)?;
        if !contents.is_empty() {
            fresh.write(0, contents, stream)?;
        }
        Ok(fresh)
    }
}

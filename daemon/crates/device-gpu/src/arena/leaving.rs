//! From chunks to one allocation, while the arena holds something: for a driver that keeps the
//! memory of a smaller arena until the addresses go that it was mapped to.

use rocmforge_device::{Error, host_memory_bytes};
use rocmforge_gpu_driver::{Buffer, DevicePtr, PinnedBuffer, Stream};

use super::whole::HOST_PART;
use super::{Arena, Memory, failed, not_had};

impl Arena {
    /// Gives the reserved addresses back, with all memory, and takes one allocation of the
    /// capacity. What it holds goes through the host, so that at no moment more is held than
    /// before; where the host has little memory, from the one to the other on the device. Nothing
    /// may be under way.
    pub(super) fn leave_chunks(
        &mut self,
        why: &rocmforge_gpu_driver::Error,
        stream: &Stream,
        pinned: &mut PinnedBuffer,
    ) -> Result<(), Error> {
        let Memory::Chunks(chunks) = &self.memory else {
            return Ok(());
        };
        let kept = self.capacity.min(chunks.mapped());
        let contents = if kept > host_memory_bytes() / HOST_PART {
            None
        } else {
            match chunks.fetch(0, kept, stream, pinned) {
                Ok(contents) => Some(contents),
                Err(error) if error.is_lost() => return Err(failed("moving the arena", error)),
                Err(_) => None,
            }
        };
        let fresh = match contents {
            Some(contents) => {
                self.memory = Memory::Whole(None);
                // The chunks have gone: without an allocation nothing is left.
                let gone = |e| not_had("the arena cannot be allocated again", &e);
                Some(
                    self.with_contents(self.capacity, &contents, stream)
                        .map_err(gone)?,
                )
            }
            None => self.on_device(kept, stream),
        };
        self.generation += 1;
        match fresh {
            Some(fresh) => {
                self.memory = Memory::Whole(Some(fresh));
                self.is_whole(why.to_string());
            }
            None => {
                self.is_kept(format!(
                    "there is no room to move the arena, and the driver holds more than the budget: {why}"
                ));
            }
        }
        Ok(())
    }

    /// A fresh allocation with the same first bytes, if the device has room for both.
    fn on_device(&self, kept: u64, stream: &Stream) -> Option<Buffer> {
        let fresh = Buffer::new(&self.context, self.capacity).ok()?;
        let driver = self.context.driver().ok()?;
        // SAFETY: `kept` bytes are mapped there and as many allocated, both alive until the wait;
        // nothing else is under way.
        unsafe {
            driver.copy_d2d_async(fresh.ptr(), DevicePtr(self.base()), kept, stream.handle())
        }
        .and_then(|()| stream.synchronize())
        .ok()?;
        Some(fresh)
    }
}

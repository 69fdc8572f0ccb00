//! A ring of pinned buffers: what the host fills for a copy engine to take.
//!
//! *Invariant:* a piece is written only between [`Ring::take`] and [`Ring::give`], by who took it;
//! between two uses lies the event of the copy that read it. ([`Piece`] is moved; `take` waits for
//! the event.)

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use rocmforge_device::Error;
use rocmforge_gpu_driver::{Context, Event, PinnedBuffer, Stream};

use super::{failed, wait};

/// Pinned memory cut into equal pieces.
#[derive(Debug)]
pub(super) struct Ring {
    memory: PinnedBuffer,
    piece_bytes: usize,
    events: Vec<Event>,
    free: Mutex<Vec<usize>>,
    changed: Condvar,
    patience: Duration,
}

/// A piece that was taken. There is one of it, so none is written after it was given back.
#[derive(Debug)]
pub(super) struct Piece {
    index: usize,
    /// The piece's first byte.
    pub(super) ptr: *mut u8,
    /// The piece's bytes.
    pub(super) bytes: usize,
}

impl Ring {
    pub(super) fn new(
        context: &Context,
        pieces: usize,
        piece_bytes: usize,
        patience: Duration,
    ) -> Result<Self, Error> {
        let memory = PinnedBuffer::new(context, pieces * piece_bytes)
            .map_err(|e| failed("allocating pinned memory", e))?;
        let events = (0..pieces).map(|_| Event::new(context, false));
        let events = events
            .collect::<Result<_, _>>()
            .map_err(|e| failed("making an event", e))?;
        Ok(Self {
            memory,
            piece_bytes,
            events,
            free: Mutex::new((0..pieces).rev().collect()),
            changed: Condvar::new(),
            patience,
        })
    }

    /// Bytes of a piece.
    pub(super) fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// Takes a piece that no copy reads any more.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub(super) fn take(&self) -> Result<Piece, Error> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let index = loop {
            // The oldest first: its copy has most likely ended.
            if !free.is_empty() {
                break free.remove(0);
            }
            free = self
                .changed
                .wait(free)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(free);
        let piece = Piece {
            index,
            ptr: self.memory.as_ptr().wrapping_add(index * self.piece_bytes),
            bytes: self.piece_bytes,
        };
        match wait::until_passed(&self.events[index], self.patience) {
            Ok(()) => Ok(piece),
            Err(error) => {
                self.put_back(index);
                Err(error)
            }
        }
    }

    /// Gives a piece back; the copies that read it have been queued on `stream`.
    pub(super) fn give(&self, piece: Piece, stream: &Stream) -> Result<(), Error> {
        let recorded = self.events[piece.index].record(stream);
        if recorded.is_err() {
            // Without its event the piece must not be reused before the copies have ended.
            let _ = stream.synchronize();
        }
        self.put_back(piece.index);
        recorded.map_err(|e| failed("recording an event", e))
    }

    /// Gives a piece back that nothing was copied from.
    pub(super) fn give_unused(&self, piece: Piece) {
        self.put_back(piece.index);
    }

    fn put_back(&self, index: usize) {
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(index);
        self.changed.notify_one();
    }
}

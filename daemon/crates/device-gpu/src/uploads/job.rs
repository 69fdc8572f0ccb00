//! One upload: cut into pieces, and how far its pieces are.
//!
//! ```text
//!   queued --(all pieces ended)--> enqueued: its event is recorded, or it has failed
//! ```

use std::ops::Range;
use std::sync::Mutex;

use rocmforge_device::progress::Progress;
use rocmforge_device::{Error, Role, Upload, UploadTicket};

use crate::reserve::FLAGS;
use crate::windows::{Part, WindowKey, Windows};

use super::events::{Before, PooledEvent};
use super::lane::in_slot;
use super::lock;

/// What one staging thread does at a time.
#[derive(Debug)]
pub(super) enum Piece {
    /// Rows of a matrix.
    Rows { tensor: usize, rows: Range<u64> },
    /// All vectors of the segment: small, and kept as f32.
    Vectors,
    /// All matrices of a segment without vectors, which fit a slot together.
    Matrices,
}

/// An upload that is not settled.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: UploadTicket,
    pub(super) upload: Upload,
    /// Address of the slab.
    pub(super) slab: u64,
    /// Whether windows that it reads are registered for it.
    registers: bool,
    pieces: Vec<Piece>,
    pub(super) progress: Progress,
    /// What the operations before the upload had queued.
    pub(super) before: Before,
    /// The end of the upload on the device.
    pub(super) done: PooledEvent,
    /// Number of the flag that the repacking raises for a scale that is not finite.
    pub(super) flag: u64,
    windows: Mutex<Vec<WindowKey>>,
}

impl Job {
    /// Cuts an upload into pieces that fit a slot; it comes behind `before`. `is_again` tells
    /// whether its segment was uploaded before.
    pub(super) fn new(
        ticket: UploadTicket,
        upload: Upload,
        slab: u64,
        is_again: bool,
        slot_bytes: u64,
        before: Before,
        done: PooledEvent,
    ) -> Result<Self, Error> {
        let pieces = pieces(&upload, slot_bytes)?;
        Ok(Self {
            ticket,
            slab,
            registers: is_again || matches!(pieces[..], [Piece::Matrices]),
            progress: Progress::new(pieces.len()),
            pieces,
            before,
            done,
            flag: ticket.0 % FLAGS,
            windows: Mutex::default(),
            upload,
        })
    }

    pub(super) fn piece(&self, index: usize) -> &Piece {
        &self.pieces[index]
    }

    /// Whether all pieces are queued on the device, or it has failed.
    pub(super) fn is_enqueued(&self) -> bool {
        self.progress.has_ended()
    }

    /// Whether nothing of it is under way any more, as far as the driver says.
    pub(super) fn has_ended(&self) -> bool {
        self.is_enqueued() && (self.has_failed() || self.done.is_passed().unwrap_or(true))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.progress.has_failed()
    }

    /// What the registered window with a byte of the file has from there on, as
    /// [`Windows::address`] has it; the window stays registered until [`Job::release_windows`].
    pub(super) fn window(&self, windows: &Windows, at: u64) -> Result<Option<Part>, Error> {
        let mut used = lock(&self.windows).clone();
        let known = used.len();
        let found = windows.address(&self.upload.file, at, self.registers, &mut used)?;
        if used.len() > known {
            self.note_window(windows, used[known]);
        }
        Ok(found)
    }

    /// Notes that the upload uses a window; a second note of the same by
    /// another thread is taken back.
    fn note_window(&self, windows: &Windows, key: WindowKey) {
        let mut noted = lock(&self.windows);
        if noted.contains(&key) {
            drop(noted);
            windows.release(&[key]);
        } else {
            noted.push(key);
        }
    }

    /// No copy from the upload's windows is under way any more.
    pub(super) fn release_windows(&self, windows: &Windows) {
        windows.release(&lock(&self.windows));
    }

    /// The first tensor's name, for messages.
    pub(super) fn first_name(&self) -> String {
        let first = self.upload.layout.tensors.first();
        first.map(|t| t.desc.name.clone()).unwrap_or_default()
    }
}

/// Vectors first, then rows of matrices that fit a slot.
fn pieces(upload: &Upload, slot_bytes: u64) -> Result<Vec<Piece>, Error> {
    let tensors = &upload.layout.tensors;
    let together = tensors.iter().map(|t| in_slot(t.desc.bytes)).sum::<u64>();
    if together <= slot_bytes && tensors.iter().all(|t| t.desc.role == Role::Matrix) {
        return Ok(vec![Piece::Matrices]);
    }
    let mut pieces = Vec::new();
    let mut vectors = false;
    for (tensor, placed) in upload.layout.tensors.iter().enumerate() {
        let desc = &placed.desc;
        if desc.role == Role::Vector {
            vectors = true;
            continue;
        }
        let row_bytes = desc.bytes / desc.rows.max(1);
        if row_bytes > slot_bytes {
            return Err(rocmforge_device::wrong_shape(
                desc,
                format!("a row has {row_bytes} bytes and staging {slot_bytes}; raise the budget"),
            ));
        }
        let step = (slot_bytes / row_bytes.max(1)).max(1);
        let mut row = 0;
        while row < desc.rows {
            let end = desc.rows.min(row + step);
            pieces.push(Piece::Rows {
                tensor,
                rows: row..end,
            });
            row = end;
        }
    }
    if vectors {
        pieces.insert(0, Piece::Vectors);
    }
    Ok(pieces)
}

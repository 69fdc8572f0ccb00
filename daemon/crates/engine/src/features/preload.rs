//! Preloads: segments that are uploaded before a request needs them, one at a time.

use std::collections::VecDeque;

use rocmforge_tensor_cache::{ModelId, SegmentId};
use tokio::sync::mpsc::Sender;

use crate::api::error::Error;
use crate::api::{PreloadEvent, PreloadRoom, RequestCacheUse};
use crate::memory::Memory;
use crate::store::fetch::FileFetch;

/// Maximum number of preloads at the same time.
pub(crate) const PRELOADS_MAX: usize = 64;

/// Number of slices of passes between two segments of a preload while there are requests, so that
/// the preload goes on and costs them little.
const TURNS: u32 = 8;

/// A preload under way: its model, the segments left, and its client.
pub(crate) struct Preload {
    pub(crate) model: ModelId,
    segments: VecDeque<u32>,
    /// Memory that the preload may take; segments that do not fit into it are left out.
    pub(crate) room: PreloadRoom,
    done_bytes: u64,
    total_bytes: u64,
    uploaded_bytes: u64,
    /// The read of the next segment from the file, while it runs in the background.
    fetch: Option<FileFetch>,
    events: Sender<PreloadEvent>,
}

impl Preload {
    /// A preload of `segments` of a model, which have `total_bytes` in all.
    pub(crate) fn new(
        (model, segments): (ModelId, Vec<u32>),
        total_bytes: u64,
        room: PreloadRoom,
        events: Sender<PreloadEvent>,
    ) -> Self {
        Self {
            model,
            segments: segments.into(),
            room,
            done_bytes: 0,
            total_bytes,
            uploaded_bytes: 0,
            fetch: None,
            events,
        }
    }

    /// Sends the preload's last event. A client that is gone does not get it.
    pub(crate) fn end(self, event: PreloadEvent) {
        let _ = self.events.try_send(event);
    }

    /// Whether the next segment can be uploaded: what it needs of the file has been read, or need
    /// not be read in the background.
    fn is_fetched(
        &mut self,
        memory: &Memory,
        segment: SegmentId,
        others: bool,
    ) -> Result<bool, Error> {
        let fetch = match self.fetch.take() {
            Some(fetch) => fetch,
            None => match memory.store.fetch(segment, others, self.room)? {
                Some(fetch) => fetch,
                None => return Ok(true),
            },
        };
        let is_there = memory.store.is_fetched(segment.model, &fetch)?;
        if !is_there {
            self.fetch = Some(fetch);
        }
        Ok(is_there)
    }

    /// Counts a segment of `bytes` bytes as resident, and sends the progress.
    fn note(&mut self, bytes: u64, counts: &RequestCacheUse) {
        self.done_bytes += bytes;
        self.uploaded_bytes += counts.uploaded_bytes;
        if self.events.capacity() >= 2 {
            // A slow reader misses steps of the progress and nothing else.
            let _ = self.events.try_send(PreloadEvent::Progress {
                done_bytes: self.done_bytes,
                total_bytes: self.total_bytes,
            });
        }
    }
}

/// The result of a turn of the preloads.
pub(crate) enum Turn {
    /// No preload was due, or the preload waits for a file.
    Idle,
    /// A segment was uploaded, or an abandoned preload was removed.
    Done,
    /// A preload has ended, with its last event.
    Ended(Preload, PreloadEvent),
    /// A segment could not be uploaded. If memory for it is found after all, the caller puts the
    /// preload back ([`Preloads::again`]).
    Failed(Preload, Error),
}

/// All preloads, and when they have their turn.
#[derive(Default)]
pub(crate) struct Preloads {
    queue: VecDeque<Preload>,
    /// Number of slices of passes left before the next segment; `None` while no turn is counted.
    turns_left: Option<u32>,
}

impl Preloads {
    /// Whether the maximum number of preloads is reached.
    pub(crate) fn are_full(&self) -> bool {
        self.queue.len() >= PRELOADS_MAX
    }

    /// Adds a preload to those under way.
    pub(crate) fn add(&mut self, preload: Preload) {
        self.queue.push_back(preload);
    }

    /// Puts back a preload that continues with the segment whose upload failed.
    pub(crate) fn again(&mut self, preload: Preload) {
        self.queue.push_front(preload);
    }

    /// Whether there are no preloads.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether this model is being preloaded.
    pub(crate) fn any_of(&self, model: ModelId) -> bool {
        self.queue.iter().any(|preload| preload.model == model)
    }

    /// Whether any preload waits for its file.
    pub(crate) fn wait_for_files(&self) -> bool {
        self.queue.iter().any(|preload| preload.fetch.is_some())
    }

    /// Ends the preloads of the models that `of` selects, with an error.
    pub(crate) fn end(&mut self, of: impl Fn(ModelId) -> bool, error: impl Fn() -> Error) {
        for preload in std::mem::take(&mut self.queue) {
            match of(preload.model) {
                true => preload.end(PreloadEvent::Failed(error())),
                false => self.queue.push_back(preload),
            }
        }
    }

    /// Whether preloads have their turn now. `stepped` says whether a slice of a pass ran just
    /// before.
    fn is_their_turn(&mut self, stepped: bool) -> bool {
        if self.queue.is_empty() {
            self.turns_left = None;
            return false;
        }
        let left = self.turns_left.unwrap_or(TURNS);
        if stepped && left > 0 {
            self.turns_left = Some(left - 1);
            return false;
        }
        self.turns_left = None;
        true
    }

    /// Uploads the next segment of the first preload, if it is a preload's turn. `others` says that
    /// requests would wait if its file were read now.
    pub(crate) fn after_pass(&mut self, memory: &mut Memory, stepped: bool, others: bool) -> Turn {
        if !self.is_their_turn(stepped) {
            return Turn::Idle;
        }
        let Some(mut preload) = self.queue.pop_front() else {
            return Turn::Idle;
        };
        if preload.events.is_closed() {
            return Turn::Done;
        }
        let Some(&index) = preload.segments.front() else {
            let event = PreloadEvent::Done {
                uploaded_bytes: preload.uploaded_bytes,
            };
            return Turn::Ended(preload, event);
        };
        let segment = SegmentId {
            model: preload.model,
            index,
        };
        match preload.is_fetched(memory, segment, others) {
            Ok(true) => {}
            Ok(false) => {
                self.queue.push_back(preload);
                return Turn::Idle;
            }
            Err(error) => return Turn::Ended(preload, PreloadEvent::Failed(error)),
        }
        memory.collect();
        let mut counts = RequestCacheUse::default();
        match memory.bring(segment, preload.room, &mut counts) {
            // It has no room, and is left out; a smaller one may have some.
            Ok(None) => {}
            Ok(Some(slab)) => {
                memory.store.release(segment);
                preload.note(slab.bytes, &counts);
            }
            Err(error) => return Turn::Failed(preload, error),
        }
        preload.segments.pop_front();
        // Others' preloads go on in turn.
        self.queue.push_back(preload);
        Turn::Done
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{Receiver, channel};

    use super::*;

    fn preload(model: u32) -> (Preload, Receiver<PreloadEvent>) {
        let (events, received) = channel(4);
        let preload = Preload::new((ModelId(model), vec![0, 1]), 200, PreloadRoom::Idle, events);
        (preload, received)
    }

    #[test]
    fn passes_have_their_turns_before_each_segment() {
        let mut preloads = Preloads::default();
        assert!(!preloads.is_their_turn(false), "there is none");
        let (one, _received) = preload(1);
        preloads.add(one);
        for _ in 0..2 {
            for _ in 0..TURNS {
                assert!(!preloads.is_their_turn(true));
            }
            assert!(preloads.is_their_turn(true));
        }
        assert!(preloads.is_their_turn(false), "nothing else is to be done");
    }

    #[test]
    fn preloads_of_a_model_end_with_its_reason_and_the_others_go_on() {
        let mut preloads = Preloads::default();
        let (one, mut of_one) = preload(1);
        let (two, mut of_two) = preload(2);
        preloads.add(one);
        preloads.add(two);
        preloads.end(|model| model == ModelId(1), || Error::Cancelled);
        let event = of_one.try_recv().unwrap();
        assert!(matches!(event, PreloadEvent::Failed(Error::Cancelled)));
        assert!(of_two.try_recv().is_err());
        assert!(!preloads.any_of(ModelId(1)) && preloads.any_of(ModelId(2)));
    }

    #[test]
    fn progress_is_left_out_where_the_reader_is_slow_but_never_the_end() {
        let (mut one, mut received) = preload(1);
        let counts = RequestCacheUse {
            uploaded_bytes: 50,
            ..RequestCacheUse::default()
        };
        for _ in 0..9 {
            one.note(100, &counts);
        }
        one.end(PreloadEvent::Done {
            uploaded_bytes: 450,
        });
        let mut events = Vec::new();
        while let Ok(event) = received.try_recv() {
            events.push(event);
        }
        assert_eq!(events.len(), 4);
        let last = events.pop().unwrap();
        assert!(matches!(
            last,
            PreloadEvent::Done {
                uploaded_bytes: 450
            }
        ));
    }
}

//! Preloads: segments that are brought in before anybody asks for them, one at a time.

use rocmforge_tensor_cache::SegmentId;

use crate::actor::{Engine, Preloading};
use crate::api::{PreloadEvent, RequestCacheUse};
use crate::error::Error;

/// Slices of passes for each segment of a preload, while there are requests: it goes on, and
/// costs them little.
pub(crate) const PRELOAD_TURNS: u32 = 8;

impl Engine {
    /// A segment of a preload, when nothing else is to be done, or work has had its
    /// turns. Whether there was one.
    pub(crate) fn preload_turn(&mut self, stepped: bool) -> bool {
        if self.preloads.is_empty() {
            self.turns_before_preload = PRELOAD_TURNS;
            return false;
        }
        if stepped && self.turns_before_preload > 0 {
            self.turns_before_preload -= 1;
            return false;
        }
        self.turns_before_preload = PRELOAD_TURNS;
        self.preload_step()
    }

    /// Uploads the next segment of the first preload. Whether there was one, and its file did not
    /// keep it waiting.
    pub(crate) fn preload_step(&mut self) -> bool {
        let Some(mut preload) = self.preloads.pop_front() else {
            return false;
        };
        if preload.events.is_closed() {
            return true;
        }
        let Some(index) = preload.segments.pop_front() else {
            self.publish(true);
            let _ = preload.events.try_send(PreloadEvent::Done {
                uploaded_bytes: preload.uploaded_bytes,
            });
            return true;
        };
        let mut counts = RequestCacheUse::default();
        let id = SegmentId {
            model: preload.model,
            index,
        };
        match self.comes(&mut preload, id) {
            Ok(true) => {}
            Ok(false) => {
                preload.segments.push_front(index);
                self.preloads.push_back(preload);
                return false;
            }
            Err(error) => {
                self.publish(true);
                let _ = preload.events.try_send(PreloadEvent::Failed(error));
                return true;
            }
        }
        self.store.collect();
        let brought = match preload.what_fits {
            true => self.store.bring(id, &mut counts),
            false => self.store.acquire(id, &mut counts).map(Some),
        };
        match brought {
            // It has no room, and is left out; a smaller one may have some.
            Ok(None) => self.preloads.push_back(preload),
            Ok(Some(slab)) => {
                self.store.release(id);
                preload.done_bytes += slab.bytes;
                preload.uploaded_bytes += counts.uploaded_bytes;
                if preload.events.capacity() >= 2 {
                    // A slow reader misses steps of the progress and nothing else.
                    let (done_bytes, total_bytes) = (preload.done_bytes, preload.total_bytes);
                    let _ = preload.events.try_send(PreloadEvent::Progress {
                        done_bytes,
                        total_bytes,
                    });
                }
                // Others' preloads go on in turn.
                self.preloads.push_back(preload);
            }
            Err(error) => match self.shrink_for_preload(error) {
                Ok(()) => {
                    preload.segments.push_front(index);
                    self.preloads.push_front(preload);
                }
                Err(error) => {
                    self.publish(true);
                    let _ = preload.events.try_send(PreloadEvent::Failed(error));
                }
            },
        }
        true
    }

    /// Whether a segment may be uploaded: what it needs of the file has come, where that is waited
    /// for aside.
    fn comes(&mut self, preload: &mut Preloading, segment: SegmentId) -> Result<bool, Error> {
        let coming = match preload.coming.take() {
            Some(coming) => coming,
            None => match self.store.fetch(
                segment,
                self.all_tasks().next().is_some(),
                preload.what_fits,
            )? {
                Some(coming) => coming,
                None => return Ok(true),
            },
        };
        let came = self.store.has_come(segment.model, &coming)?;
        if !came {
            preload.coming = Some(coming);
        }
        Ok(came)
    }
}

//! Decodes images of requests: memory is reserved for all images of a request, which are then
//! decoded one after the other on a few dedicated threads.
//!
//! *Invariants:* memory of decoding and its results stays reserved until it is dropped, also if no
//! client waits any more (`images_that_wait_are_counted_until_they_are_gone`); decoding checks the
//! time before each image and between its parts, and gives up after [`DECODING_MAX`].

mod memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_chat::images::{UnreadImage, needs};
use rocmforge_engine::api::ImageSpan;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_vision::Charge;

use self::memory::{DEFAULT_BYTES, ImageMemory, Refused, Reserved};
use crate::Service;
use crate::arrival::Arrival;
use crate::lane::Lane;
use crate::peer::Peer;
use crate::text_work::{LaneWords, TextWork, Unwanted};

/// Number of requests whose images are decoded at once; one client may have all but one of them.
pub const IMAGES_AT_ONCE: usize = 3;
/// Maximum number of requests whose images wait for a thread; their memory is reserved already.
const WAITING_MAX: usize = 256;
/// Maximum time of decoding a request's images.
const DECODING_MAX: Duration = Duration::from_secs(30);
/// Maximum time that a request waits for memory.
const MEMORY_WAIT_MAX: Duration = Duration::from_secs(60);
/// Retry delay of a request that got no memory for its images.
const MEMORY_RETRY: Duration = Duration::from_secs(2);
/// Message when the memory for images is full and no more requests may wait.
const FULL: &str =
    "images of other requests fill the memory for images (image_memory); try again in 2 seconds";
/// Error messages for decoding that cannot be done now.
const WORDS: LaneWords = LaneWords {
    full: FULL,
    retry: MEMORY_RETRY,
    panicked: "the decoder of images panicked",
};

/// Decoding of images, and the memory for it.
#[derive(Debug)]
pub struct ImageWork {
    /// Memory for decoding, and for patches until the engine has taken them.
    memory: Arc<ImageMemory>,
    /// Memory for fetched image files; separate, since files are held while the request waits for
    /// memory to decode them.
    files: Arc<ImageMemory>,
    lane: Arc<Lane>,
}

impl Default for ImageWork {
    fn default() -> Self {
        let work = Self {
            memory: ImageMemory::new(0),
            files: ImageMemory::new(0),
            lane: Lane::new(IMAGES_AT_ONCE, WAITING_MAX),
        };
        work.set_memory(DEFAULT_BYTES);
        work
    }
}

/// A fetched file whose bytes stay reserved until it is dropped.
#[derive(Debug)]
pub struct HeldFile {
    /// The content of the file.
    pub bytes: Vec<u8>,
    reserved: Reserved,
}

impl AsRef<[u8]> for HeldFile {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HeldFile {
    /// Reduces the reservation to the bytes that were received.
    pub fn finish(&mut self) {
        self.bytes.shrink_to_fit();
        let own = self.reserved.split(self.bytes.len() as u64);
        self.reserved = own;
    }
}

impl ImageWork {
    /// Sets the total memory: an eighth for fetched files, the rest for decoding and for waiting
    /// images.
    pub fn set_memory(&self, bytes: u64) {
        self.files.set_max(bytes / 8);
        self.memory.set_max(bytes - bytes / 8);
    }

    /// Total memory for images, and how much of it is reserved, in bytes.
    pub fn memory(&self) -> (u64, u64) {
        let (files, memory) = (self.files.used(), self.memory.used());
        (files.0 + memory.0, files.1 + memory.1)
    }

    /// Reserves memory for a file of at most `most` bytes that will be fetched.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if there is not enough.
    pub fn hold_file(&self, peer: Peer, most: u64) -> Result<HeldFile, Failure> {
        let reserved = self.files.try_reserve(peer, most);
        let reserved = reserved.ok_or_else(|| failure::exhausted(FULL, MEMORY_RETRY))?;
        Ok(HeldFile {
            bytes: Vec::new(),
            reserved,
        })
    }
}

/// Decodes images one after the other; `reserved` is memory for all of them.
fn read_all(
    mut reserved: Reserved,
    // Dropped before what is reserved for them.
    images: Vec<UnreadImage>,
    deadline: Instant,
    unwanted: &Unwanted,
) -> Result<Vec<ImageSpan>, Failure> {
    let mut spans = Vec::with_capacity(images.len());
    for image in &images {
        if unwanted.get() {
            return Err(failure::deadline());
        }
        if Instant::now() >= deadline {
            let why =
                "the images of the request take too long to decode; send fewer or smaller ones";
            return Err(failure::invalid(image.field(), why));
        }
        for (first, mut prepared) in image.read(deadline)? {
            let bytes = size_of_val(&prepared.patches[..]) as u64;
            prepared.charge = Charge::new(reserved.split(bytes));
            spans.push(ImageSpan {
                first,
                image: Arc::new(prepared),
            });
        }
    }
    Ok(spans)
}

impl Service {
    /// Decodes the images of a prompt to patches for the engine, which hold their memory.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for an image that is damaged, takes too long, or needs more memory
    /// than a client has; RESOURCE_EXHAUSTED if there is no memory for it now; DEADLINE_EXCEEDED.
    pub(crate) async fn read_images(
        &self,
        images: Vec<UnreadImage>,
        arrival: Arrival,
    ) -> Result<Vec<ImageSpan>, Failure> {
        let Some(first) = images.first() else {
            return Ok(Vec::new());
        };
        let (field, peer) = (first.field().to_owned(), arrival.peer());
        let bytes = needs(&images);
        let work = async {
            let reserving = self.images.memory.reserve(peer, bytes);
            let reserved = match tokio::time::timeout(MEMORY_WAIT_MAX, reserving).await {
                Ok(Ok(reserved)) => reserved,
                Ok(Err(Refused::TooMuch { share })) => {
                    return Err(failure::invalid(&field, &too_much(bytes, share)));
                }
                Ok(Err(Refused::Full)) | Err(_) => {
                    return Err(failure::exhausted(FULL, MEMORY_RETRY));
                }
            };
            let read = move |unwanted: &Unwanted| {
                let deadline = Instant::now() + DECODING_MAX;
                read_all(reserved, images, deadline, unwanted)
            };
            TextWork::run_in(&self.images.lane, (peer, WORDS), read).await
        };
        arrival.limit(work).await
    }
}

/// The error message for images that need more memory than a client may have.
fn too_much(bytes: u64, share: u64) -> String {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    format!(
        "the images of the request need {} MiB to be decoded, of which a client has {} at most; send fewer or \
         smaller ones, or raise image_memory",
        mib(bytes),
        share >> 20
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Peer = Peer::User(1);

    #[test]
    fn images_that_wait_are_counted_until_they_are_gone() {
        let work = ImageWork::default();
        work.set_memory(800);
        assert_eq!(work.memory(), (800, 0));
        let mut reserved = work.memory.try_reserve(PEER, 500).unwrap();
        let charge = Charge::new(reserved.split(200));
        drop(reserved);
        let other = charge.clone();
        drop(charge);
        assert_eq!(work.memory(), (800, 200), "the engine has it still");
        drop(other);
        assert_eq!(work.memory(), (800, 0));
    }

    #[test]
    fn a_file_is_counted_by_its_bytes_once_it_is_there() {
        let work = ImageWork::default();
        work.set_memory(800);
        assert!(
            work.hold_file(PEER, 80).is_err(),
            "more than a client's share"
        );
        let mut file = work.hold_file(PEER, 60).unwrap();
        assert!(work.hold_file(PEER, 60).is_err());
        file.bytes = vec![1; 9];
        file.finish();
        assert_eq!(work.memory().1, 9);
        let held = bytes::Bytes::from_owner(file);
        let part = held.slice(..2);
        drop(held);
        assert_eq!((&part[..], work.memory().1), (&[1, 1][..], 9));
        drop(part);
        assert_eq!(work.memory().1, 0);
    }

    #[test]
    fn images_that_can_never_be_read_are_told_with_their_memory() {
        let told = too_much(3 << 30, 1 << 30);
        assert!(
            told.contains("3072 MiB") && told.contains("1024 at most"),
            "{told}"
        );
    }
}

//! Reading of images: memory is reserved for all of a request's, then they are decoded one after
//! the other on a few threads of their own.
//!
//! *Invariants:* what decoding holds and what it leaves is reserved until it is dropped, also where
//! nobody waits any more (`images_that_wait_are_counted_until_they_are_gone`); decoding looks at
//! the time before each image and between parts of one, and gives up after [`DECODING_MAX`].

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_engine::api::ImageSpan;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::ChatImage;
use rocmforge_vision::{Bounds, Charge, PreparedImage, Rules};

use super::bytes_of;
use super::memory::{DEFAULT_BYTES, ImageMemory, Refused, Reserved};
use crate::Service;
use crate::arrival::Arrival;
use crate::lane::Lane;
use crate::peer::Peer;
use crate::text_work::{LaneWords, TextWork, Unwanted};

/// Requests whose images are decoded at once, all but one of one client.
pub const IMAGES_AT_ONCE: usize = 3;
/// Requests whose images may wait for a thread; they have their memory already.
const WAITING_MAX: usize = 256;
/// How long a request's images may take to decode.
const DECODING_MAX: Duration = Duration::from_secs(30);
/// How long a request waits for memory.
const MEMORY_WAIT_MAX: Duration = Duration::from_secs(60);
/// When to try again where it got none.
const MEMORY_RETRY: Duration = Duration::from_secs(2);
/// What is said where none may wait.
const FULL: &str =
    "images of other requests fill the memory for images (image_memory); try again in 2 seconds";
/// What is said of decoding that cannot be done.
const WORDS: LaneWords = LaneWords {
    full: FULL,
    retry: MEMORY_RETRY,
    panicked: "the decoder of images panicked",
};

/// Work on images, and the memory for it.
#[derive(Debug)]
pub struct ImageWork {
    /// For decoding, and for what the engine is to read.
    memory: Arc<ImageMemory>,
    /// For files that are fetched. It is another one, for they are held while the request waits for
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

/// A file that is counted until it is dropped.
#[derive(Debug)]
pub struct HeldFile {
    /// The bytes.
    pub bytes: Vec<u8>,
    reserved: Reserved,
}

impl AsRef<[u8]> for HeldFile {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HeldFile {
    /// Counts no more than the bytes that came.
    pub fn finish(&mut self) {
        self.bytes.shrink_to_fit();
        let own = self.reserved.split(self.bytes.len() as u64);
        self.reserved = own;
    }
}

impl ImageWork {
    /// Sets how much memory there is: an eighth of it for files that are fetched, the rest for
    /// decoding and for images that wait.
    pub fn set_memory(&self, bytes: u64) {
        self.files.set_max(bytes / 8);
        self.memory.set_max(bytes - bytes / 8);
    }

    /// How much memory there is, and how much of it is reserved.
    pub fn memory(&self) -> (u64, u64) {
        let (files, memory) = (self.files.used(), self.memory.used());
        (files.0 + memory.0, files.1 + memory.1)
    }

    /// Room for a file of at most so many bytes, which is to be fetched.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED where there is none.
    pub fn hold_file(&self, peer: Peer, most: u64) -> Result<HeldFile, Failure> {
        let reserved = self.files.try_reserve(peer, most);
        let reserved = reserved.ok_or_else(|| failure::exhausted(FULL, MEMORY_RETRY))?;
        Ok(HeldFile {
            bytes: Vec::new(),
            reserved,
        })
    }
}

/// An image of a prompt of which the header was read.
pub(crate) struct UnreadImage {
    /// Index of the first of its placeholders among the ids.
    pub(super) first: usize,
    /// Rows and columns of its tokens.
    pub(super) grid: [usize; 2],
    /// Bytes of what the tower reads.
    pub(super) patches_bytes: u64,
    /// Most bytes that it takes to make them, beside them.
    pub(super) decoding_bytes: u64,
    /// Tiles of the image, if it is cut.
    pub(super) tiles: Option<TilesAhead>,
    /// Rules by which the image is resized and cut.
    pub(super) rules: Rules,
    pub(super) image: ChatImage,
}

/// The tiles of an image, which stand before it in its prompt.
#[derive(Debug)]
pub(super) struct TilesAhead {
    /// Rows and columns of tiles.
    pub(super) grid: [usize; 2],
    /// Tokens of each.
    pub(super) tokens: usize,
    /// Bytes of what the tower reads of all.
    pub(super) patches_bytes: u64,
    /// The tokens in front of each, and in front of the whole image; none where nothing stands
    /// between them.
    pub(super) marks: Vec<u32>,
    /// Index of the first placeholder of each among the ids.
    pub(super) firsts: Vec<usize>,
}

impl TilesAhead {
    /// The tiles of a grid of `rows` by `columns`.
    pub(super) fn new(grid: [u32; 2], rules: &Rules) -> Self {
        let tokens: usize = rules.tile_grid().into_iter().product();
        let token = u64::from(rules.token_side()).pow(2) * 3 * size_of::<f32>() as u64;
        Self {
            grid: grid.map(|side| side as usize),
            tokens,
            patches_bytes: u64::from(grid[0]) * u64::from(grid[1]) * tokens as u64 * token,
            marks: Vec::new(),
            firsts: Vec::new(),
        }
    }

    fn n(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Tokens of all, with those in front of them and of the whole image.
    pub(super) fn tokens(&self) -> usize {
        self.n() * self.tokens + self.marks.len()
    }

    /// Appends them, with `id` as each placeholder.
    pub(super) fn put(&mut self, ids: &mut Vec<u32>, id: u32) {
        self.firsts.clear();
        let mut marks = self.marks.iter().copied();
        for _ in 0..self.n() {
            ids.extend(marks.next());
            self.firsts.push(ids.len());
            ids.resize(ids.len() + self.tokens, id);
        }
        ids.extend(marks);
    }
}

impl fmt::Debug for UnreadImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnreadImage")
            .field("first", &self.first)
            .field("grid", &self.grid)
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

impl UnreadImage {
    /// The image as the tower reads it, behind its tiles: each with the index of its first
    /// placeholder.
    fn read(&self, deadline: Instant) -> Result<Vec<(usize, PreparedImage)>, Failure> {
        let bounds = Bounds {
            deadline: Some(deadline),
            ..Bounds::default()
        };
        let bytes = bytes_of(&self.image)?;
        let prepared = rocmforge_vision::prepare_all(&bytes, bounds, &self.rules);
        let prepared =
            prepared.map_err(|error| failure::invalid(&self.image.field, &error.to_string()))?;
        let tiles = self.tiles.as_ref();
        let of_tiles = tiles.map_or(&[][..], |tiles| &tiles.firsts);
        let tokens = of_tiles
            .iter()
            .map(|_| tiles.map_or(0, |tiles| tiles.tokens));
        let tokens = tokens.chain([self.grid[0] * self.grid[1]]);
        if !prepared.iter().map(PreparedImage::tokens).eq(tokens) {
            return Err(failure::bug("an image has another size than its header"));
        }
        let firsts = of_tiles.iter().copied().chain([self.first]);
        Ok(firsts.zip(prepared).collect())
    }
}

/// Bytes that images need together: what the tower reads, their files as the request holds them
/// until all are read, and what it takes to make the largest of them.
fn needs(images: &[UnreadImage]) -> u64 {
    let patches: u64 = images.iter().map(|image| image.patches_bytes).sum();
    let data = images
        .iter()
        .filter_map(|image| image.image.data.as_ref().ok());
    let held: u64 = data.map(|data| data.byte_len() as u64).sum();
    let decoding = images.iter().map(|image| image.decoding_bytes).max();
    patches + held + decoding.unwrap_or(0)
}

/// Reads the images one after the other; `reserved` is for all of them.
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
            return Err(failure::invalid(&image.image.field, why));
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
    /// The images of a prompt as the engine takes them, with their memory.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for an image that is damaged, takes too long, or needs more memory than a
    /// client has; RESOURCE_EXHAUSTED where there is no memory for it now; DEADLINE_EXCEEDED.
    pub(crate) async fn read_images(
        &self,
        images: Vec<UnreadImage>,
        arrival: Arrival,
    ) -> Result<Vec<ImageSpan>, Failure> {
        let Some(first) = images.first() else {
            return Ok(Vec::new());
        };
        let (field, peer) = (first.image.field.clone(), arrival.peer());
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

/// Why images can never be read.
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
    use rocmforge_tokenizer::ImageData;
    use rocmforge_vision::{Filter, Sizes};

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
    fn memory_is_for_all_patches_and_files_and_one_image_that_is_decoded() {
        let image = |patches_bytes, decoding_bytes| UnreadImage {
            first: 0,
            grid: [1, 1],
            patches_bytes,
            decoding_bytes,
            tiles: None,
            rules: Rules {
                patch: 8,
                merge: 2,
                sizes: Sizes::Between {
                    min_pixels: 256,
                    max_pixels: 4096,
                    enlarges: false,
                },
                filter: Filter::Bicubic,
                mean: [0.5; 3],
                std: [0.5; 3],
            },
            image: ChatImage {
                field: "here".to_owned(),
                data: Ok(ImageData::Base64("AAAA".into())),
                pixels_max: None,
            },
        };
        let images = [image(1, 50), image(2, 70), image(3, 60)];
        assert_eq!(needs(&images), (1 + 2 + 3) + 3 * 4 + 70);
        let told = too_much(3 << 30, 1 << 30);
        assert!(
            told.contains("3072 MiB") && told.contains("1024 at most"),
            "{told}"
        );
    }
}

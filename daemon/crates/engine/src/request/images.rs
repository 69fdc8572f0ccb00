//! Images of requests: the rows computed by vision towers, which requests wait for and which are
//! cached for later requests with the same image, and the numbers that distinguish images in the
//! prefix cache.
//!
//! In a task's tokens an image's placeholders are [`IMAGE`] and the image's number. Two images have
//! two numbers, and a number is never given twice, so that the prefix cache finds a prompt again
//! with the same images alone. Kept rows are in host memory, at most [`KEPT_BYTES_MAX`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rocmforge_tensor_cache::ModelId;
use rocmforge_vision::PreparedImage;
use tokio::sync::{mpsc, oneshot};

use crate::api::error::Error;
use crate::api::images::{ImageRows, ImageSpan};
use crate::api::{Asker, GenerateEvent, GenerateRequest};
use crate::request::time_account::TimeAccount;

/// Bit that marks a task's token as a placeholder of an image; the other bits are the image's
/// number.
pub(crate) const IMAGE: u32 = 1 << 31;

/// Maximum number of bytes of image rows that are cached for later requests.
const KEPT_BYTES_MAX: usize = 256 << 20;

/// Maximum number of images whose numbers are remembered. Beyond that all images get new numbers,
/// and their cached prefixes are not found any more.
const NUMBERS_MAX: usize = 1 << 16;

/// Who may reuse the rows of an image, as with the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Sharing {
    /// Rows are shared among all requests of this client.
    Asker(u64),
    /// Rows are used by this request only.
    Request(u64),
}

/// Key of an image's cached rows: the tower, the image's content, and who shares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ImageKey {
    pub(crate) tower: ModelId,
    sharing: Sharing,
    digest: [u8; 32],
}

/// An image's place in a request's tokens.
#[derive(Debug, Clone)]
pub(crate) struct PlacedImage {
    /// Index of the image's first token.
    pub(crate) first: usize,
    /// Number of rows and columns of the image's tokens.
    pub(crate) grid: [usize; 2],
    /// Number of text tokens after each row of the image but the last.
    pub(crate) row_gap: usize,
    /// Whether the image's tokens attend to each other in both directions.
    pub(crate) whole: bool,
    pub(crate) rows: Arc<ImageRows>,
}

impl PlacedImage {
    /// Range of the image's tokens, including text tokens between its rows.
    pub(crate) fn tokens(&self) -> Range<usize> {
        let [rows, columns] = self.grid;
        self.first..self.first + rows * (columns + self.row_gap) - self.row_gap
    }

    /// Runs of consecutive tokens of the image itself, each with the index of its first row among
    /// the tower's rows.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let ([rows, columns], first, gap) = (self.grid, self.first, self.row_gap);
        let (runs, tokens) = match gap {
            0 => (1, rows * columns),
            _ => (rows, columns),
        };
        (0..runs).map(move |run| {
            let from = first + run * (tokens + gap);
            (from..from + tokens, run * tokens)
        })
    }
}

/// The M-RoPE coordinates of tokens `from..to` of a sequence with images: sequence, row, column.
/// Text after an image continues after the image's largest coordinate.
pub(crate) fn coordinates(
    images: &[PlacedImage],
    from: usize,
    to: usize,
) -> impl Iterator<Item = [u32; 3]> {
    let saves = |image: &PlacedImage| {
        let [rows, columns] = image.grid;
        rows * columns - rows.max(columns)
    };
    // Images before, and their tokens less the positions that they take.
    let mut next = images
        .iter()
        .take_while(|image| image.tokens().end <= from)
        .count();
    let mut saved: usize = images[..next].iter().map(saves).sum();
    (from..to).map(move |i| {
        while let Some(image) = images.get(next).filter(|image| image.tokens().end <= i) {
            saved += saves(image);
            next += 1;
        }
        let here = images.get(next).filter(|image| image.tokens().contains(&i));
        match here {
            None => [(i - saved) as u32; 3],
            Some(image) => {
                let (start, at) = (image.first - saved, i - image.first);
                let columns = image.grid[1];
                [start, start + at / columns, start + at % columns].map(|p| p as u32)
            }
        }
    })
}

/// The computation of one image by a vision tower.
#[derive(Debug)]
pub(crate) struct TowerWork {
    pub(crate) image: Arc<PreparedImage>,
    pub(crate) reply: oneshot::Sender<Result<ImageRows, Error>>,
    /// The rows computed so far, with capacity for all.
    pub(crate) rows: ImageRows,
    pub(crate) n: usize,
    /// Number of the tower's rows that are merged to one output row.
    pub(crate) block: usize,
    /// Number of rows of each part of the image, if the tower's layers attend within parts.
    pub(crate) parts: Vec<usize>,
    /// For each computed row its index in the image, if the tower computes them in another order.
    pub(crate) order: Option<Vec<usize>>,
}

impl TowerWork {
    /// Takes row `row` of an image; a repeated pass reports some rows twice. Returns whether the
    /// row is the image's last.
    pub(crate) fn take(&mut self, row: usize, values: &[f32]) -> bool {
        self.rows.push(row, values);
        row + 1 == self.n
    }

    /// The image's rows, in the image's order.
    pub(crate) fn into_rows(self) -> (oneshot::Sender<Result<ImageRows, Error>>, ImageRows) {
        let rows = match &self.order {
            None => self.rows,
            Some(order) => self.rows.ordered(order),
        };
        (self.reply, rows)
    }
}

/// An image that a tower is computing.
struct Computed {
    key: ImageKey,
    answer: oneshot::Receiver<Result<ImageRows, Error>>,
}

/// A request that waits for the rows of its images.
pub(crate) struct WaitingRequest {
    pub(crate) request: GenerateRequest,
    pub(crate) images: Vec<ImageSpan>,
    pub(crate) events: mpsc::Sender<GenerateEvent>,
    pub(crate) times: TimeAccount,
    pub(crate) tower: ModelId,
    pub(crate) sharing: Sharing,
    /// Rows of each image; `None` until they are computed.
    pub(crate) rows: Vec<Option<Arc<ImageRows>>>,
}

impl WaitingRequest {
    pub(crate) fn key(&self, image: usize) -> ImageKey {
        ImageKey {
            tower: self.tower,
            sharing: self.sharing,
            digest: self.images[image].image.digest,
        }
    }

    /// The images that the request waits for.
    pub(crate) fn missing(&self) -> impl Iterator<Item = (ImageKey, &Arc<PreparedImage>)> {
        let missing = (0..self.images.len()).filter(|&i| self.rows[i].is_none());
        missing.map(|i| (self.key(i), &self.images[i].image))
    }

    /// Whether the request stops waiting: all rows are there, or it was cancelled.
    fn is_done(&self, now: Instant) -> bool {
        self.rows.iter().all(Option::is_some) || self.ended(now).is_some()
    }

    /// The error that ends the waiting request, if its deadline has passed or its client is gone.
    fn ended(&self, now: Instant) -> Option<Error> {
        if self.events.is_closed() {
            return Some(Error::Cancelled);
        }
        let late = self
            .request
            .deadline
            .is_some_and(|deadline| now >= deadline);
        late.then_some(Error::DeadlineExceeded { generated: 0 })
    }

    /// Fails the waiting request with an error.
    pub(crate) fn fail(self, error: Error) {
        // The channel is new and has room, or nobody reads it.
        let _ = self.events.try_send(GenerateEvent::Failed(error));
    }
}

/// State of all requests' images.
#[derive(Default)]
pub(crate) struct Images {
    kept: HashMap<ImageKey, (Arc<ImageRows>, u64)>,
    kept_bytes: usize,
    clock: u64,
    numbers: HashMap<[u8; 32], u32>,
    next_number: u32,
    computed: Vec<Computed>,
    waiting: Vec<WaitingRequest>,
    /// Number of images whose rows were requested from towers.
    pub(crate) asked: u64,
    /// Number of requests so far that share rows with no other; the newest one's key in
    /// [`Sharing::Request`].
    alone: u64,
    /// Whether a request or rows arrived since towers were last given work; checked at every turn
    /// of the engine.
    has_news: bool,
}

impl Images {
    /// Number of requests that wait for rows of images, among those for which `of` is true.
    pub(crate) fn waiting(&self, of: impl Fn(&WaitingRequest) -> bool) -> usize {
        self.waiting.iter().filter(|waiting| of(waiting)).count()
    }

    /// With whom a request shares image rows; `None` for `asker` is with nobody.
    pub(crate) fn sharing(&mut self, asker: Option<u64>) -> Sharing {
        match asker {
            Some(asker) => Sharing::Asker(asker),
            None => {
                self.alone += 1;
                Sharing::Request(self.alone)
            }
        }
    }

    /// The token that stands for an image, by its digest, in a request's tokens.
    pub(crate) fn token(&mut self, digest: [u8; 32]) -> u32 {
        if self.numbers.len() >= NUMBERS_MAX && !self.numbers.contains_key(&digest) {
            self.numbers.clear();
        }
        let next = &mut self.next_number;
        let number = *self.numbers.entry(digest).or_insert_with(|| {
            *next = (*next + 1) % IMAGE;
            *next
        });
        IMAGE | number
    }

    /// The cached rows of an image, if there are any.
    pub(crate) fn find(&mut self, key: &ImageKey) -> Option<Arc<ImageRows>> {
        self.clock += 1;
        let (rows, used) = self.kept.get_mut(key)?;
        *used = self.clock;
        Some(Arc::clone(rows))
    }

    fn keep(&mut self, key: ImageKey, rows: &Arc<ImageRows>) {
        if rows.bytes() > KEPT_BYTES_MAX || matches!(key.sharing, Sharing::Request(_)) {
            return;
        }
        self.clock += 1;
        self.kept_bytes += rows.bytes();
        if let Some((before, _)) = self.kept.insert(key, (Arc::clone(rows), self.clock)) {
            self.kept_bytes -= before.bytes();
        }
        while self.kept_bytes > KEPT_BYTES_MAX {
            let oldest = self.kept.iter().min_by_key(|(_, (_, used))| *used);
            let Some(key) = oldest.map(|(key, _)| *key) else {
                return;
            };
            self.drop_kept(&key);
        }
    }

    fn drop_kept(&mut self, key: &ImageKey) {
        if let Some((rows, _)) = self.kept.remove(key) {
            self.kept_bytes -= rows.bytes();
        }
    }

    /// Forgets the rows of an unloaded tower. Returns the requests that wait for it.
    pub(crate) fn forget(&mut self, tower: ModelId) -> Vec<WaitingRequest> {
        self.computed.retain(|computed| computed.key.tower != tower);
        let of_tower = self.kept.keys().filter(|key| key.tower == tower);
        for key in of_tower.copied().collect::<Vec<_>>() {
            self.drop_kept(&key);
        }
        let (of_tower, others) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|waiting| waiting.tower == tower);
        self.waiting = others;
        of_tower
    }

    /// Takes all requests that wait for images.
    pub(crate) fn take_waiting(&mut self) -> Vec<WaitingRequest> {
        std::mem::take(&mut self.waiting)
    }

    /// Images that towers should compute next, each with the client of a request that waits for it:
    /// the first missing image of each request of which none is being computed. So a request takes
    /// one place in the queue, however many images it has.
    pub(crate) fn next(&mut self) -> Vec<(ImageKey, Arc<PreparedImage>, Asker)> {
        if !std::mem::take(&mut self.has_news) {
            return Vec::new();
        }
        let mut next: Vec<(ImageKey, Arc<PreparedImage>, Asker)> = Vec::new();
        for waiting in &self.waiting {
            let is_at_work = |key: &ImageKey| {
                let computed = self.computed.iter().map(|computed| computed.key);
                computed
                    .chain(next.iter().map(|(key, ..)| *key))
                    .any(|of| of == *key)
            };
            if waiting.missing().any(|(key, _)| is_at_work(&key)) {
                continue;
            }
            if let Some((key, image)) = waiting.missing().next() {
                next.push((key, Arc::clone(image), waiting.request.asker));
            }
        }
        next
    }

    /// Records that a tower is asked for the rows of an image. Returns where to send them.
    pub(crate) fn ask(&mut self, key: ImageKey) -> oneshot::Sender<Result<ImageRows, Error>> {
        let (reply, answer) = oneshot::channel();
        self.computed.push(Computed { key, answer });
        reply
    }

    /// Adds a request that waits for image rows.
    pub(crate) fn wait(&mut self, request: WaitingRequest) {
        self.waiting.push(request);
        self.has_news = true;
    }

    /// Takes rows that towers have computed. Returns the requests that have all of their rows, and
    /// those that end.
    pub(crate) fn collect(
        &mut self,
        now: Instant,
    ) -> (Vec<WaitingRequest>, Vec<(WaitingRequest, Error)>) {
        if self.waiting.is_empty() {
            // What nobody waits for any more ends: its answer has no reader.
            self.computed.clear();
            return (Vec::new(), Vec::new());
        }
        let mut came = Vec::new();
        self.computed.retain_mut(|computed| {
            let result = match computed.answer.try_recv() {
                Ok(result) => result,
                Err(oneshot::error::TryRecvError::Empty) => return true,
                Err(oneshot::error::TryRecvError::Closed) => Err(Error::Cancelled),
            };
            came.push((computed.key, result.map(Arc::new)));
            false
        });
        if came.is_empty() && !self.waiting.iter().any(|w| w.is_done(now)) {
            return (Vec::new(), Vec::new());
        }
        self.has_news = true;
        for (key, rows) in &came {
            if let Ok(rows) = rows {
                self.keep(*key, rows);
            }
        }
        let (mut ready, mut ended) = (Vec::new(), Vec::new());
        for mut request in std::mem::take(&mut self.waiting) {
            let mut error = request.ended(now);
            for (key, rows) in &came {
                for i in (0..request.images.len())
                    .filter(|&i| request.key(i) == *key)
                    .collect::<Vec<_>>()
                {
                    match rows {
                        Ok(rows) => request.rows[i] = Some(Arc::clone(rows)),
                        Err(failed) => error = error.or_else(|| Some(failed.clone())),
                    }
                }
            }
            match error {
                Some(error) => ended.push((request, error)),
                None if request.rows.iter().all(Option::is_some) => ready.push(request),
                None => self.waiting.push(request),
            }
        }
        let waiting = &self.waiting;
        let wanted = |key: &ImageKey| {
            waiting
                .iter()
                .any(|r| r.missing().any(|(of, _)| of == *key))
        };
        self.computed.retain(|computed| wanted(&computed.key));
        (ready, ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n: usize) -> Arc<ImageRows> {
        let mut rows = ImageRows::with_room(n, 1, 1);
        (0..n).for_each(|row| rows.push(row, &[0.5]));
        Arc::new(rows)
    }

    fn placed(first: usize, grid: [usize; 2]) -> PlacedImage {
        PlacedImage {
            first,
            grid,
            row_gap: 0,
            whole: false,
            rows: rows(grid[0] * grid[1]),
        }
    }

    #[test]
    fn text_behind_an_image_goes_on_behind_its_longer_side() {
        let images = [placed(2, [2, 3]), placed(9, [2, 1])];
        let all: Vec<[u32; 3]> = coordinates(&images, 0, 13).collect();
        assert_eq!(all[..2], [[0; 3], [1; 3]]);
        assert_eq!(
            all[2..8],
            [
                [2, 2, 2],
                [2, 2, 3],
                [2, 2, 4],
                [2, 3, 2],
                [2, 3, 3],
                [2, 3, 4]
            ]
        );
        assert_eq!(all[8..], [[5; 3], [6, 6, 6], [6, 7, 6], [8; 3], [9; 3]]);
        let part: Vec<[u32; 3]> = coordinates(&images, 4, 12).collect();
        assert_eq!(part, all[4..12]);
    }

    #[test]
    fn an_images_rows_may_have_text_between_them() {
        let image = PlacedImage {
            row_gap: 1,
            ..placed(4, [3, 2])
        };
        assert_eq!(image.tokens(), 4..12);
        let runs: Vec<_> = image.runs().collect();
        assert_eq!(runs, [(4..6, 0), (7..9, 2), (10..12, 4)]);
        let whole: Vec<_> = placed(4, [3, 2]).runs().collect();
        assert_eq!(whole, [(4..10, 0)]);
    }

    #[test]
    fn images_have_numbers_of_their_own() {
        let mut images = Images::default();
        let (a, b) = (images.token([1; 32]), images.token([2; 32]));
        assert_ne!(a, b);
        assert!(a & IMAGE != 0 && b & IMAGE != 0);
        assert_eq!((images.token([1; 32]), images.token([2; 32])), (a, b));
    }

    #[test]
    fn rows_are_kept_until_there_are_too_many_and_those_used_last_longest() {
        let mut images = Images::default();
        let key = |n| ImageKey {
            tower: ModelId(1),
            sharing: Sharing::Asker(0),
            digest: [n; 32],
        };
        let third = rows(KEPT_BYTES_MAX / 4 / 3);
        for n in 0..3 {
            images.keep(key(n), &third);
        }
        assert!(images.find(&key(0)).is_some());
        images.keep(key(3), &third);
        let there: Vec<bool> = (0..4).map(|n| images.find(&key(n)).is_some()).collect();
        assert_eq!(there, [true, false, true, true]);
        images.keep(key(9), &rows(KEPT_BYTES_MAX / 4 + 1));
        assert!(images.find(&key(9)).is_none());
        images.forget(ModelId(1));
        assert_eq!(images.kept_bytes, 0);
    }
}

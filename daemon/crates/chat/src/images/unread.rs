//! Images of a prompt of which only the header has been read, and their decoding.

use std::fmt;
use std::time::Instant;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::{ChatImage, ImageData};
use rocmforge_vision::{Bounds, PreparedImage, Rules};

/// Error message for an image that is given by URL.
pub(super) const BY_URL: &str = "images are fetched from hosts of image_url_hosts alone, and this is none; give the image \
                      as a data: URL (data:image/png;base64,...)";
/// Base64 as clients write it, some without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// An image of a prompt whose header was read.
pub struct UnreadImage {
    /// Index of the image's first placeholder among the prompt's ids.
    pub(super) first: usize,
    /// Number of rows and columns of the image's tokens.
    pub(super) grid: [usize; 2],
    /// Bytes of the patches that the tower reads.
    pub(super) patches_bytes: u64,
    /// Maximum number of bytes that decoding takes beside the patches.
    pub(super) decoding_bytes: u64,
    /// The image's tiles, if it is cut into tiles.
    pub(super) tiles: Option<TilesAhead>,
    /// Rules by which the image is resized and cut.
    pub(super) rules: Rules,
    pub(super) image: ChatImage,
}

/// The tiles of an image, which come before it in its prompt.
#[derive(Debug)]
pub(super) struct TilesAhead {
    /// Number of rows and columns of tiles.
    pub(super) grid: [usize; 2],
    /// Number of tokens of each tile.
    pub(super) tokens: usize,
    /// Bytes of the patches of all tiles.
    pub(super) patches_bytes: u64,
    /// The control tokens before each tile and before the whole image; empty if there are none.
    pub(super) marks: Vec<u32>,
    /// Index of the first placeholder of each tile among the ids.
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

    /// Number of tokens of all tiles, and of the control tokens in front of them and of the image.
    pub(super) fn tokens(&self) -> usize {
        self.n() * self.tokens + self.marks.len()
    }

    /// Appends the tiles' tokens; `id` is the placeholder.
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
    /// Name of the image in the request.
    pub fn field(&self) -> &str {
        &self.image.field
    }

    /// Decodes the image to patches for the tower, preceded by its tiles; each has the index of its
    /// first placeholder.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for an image that is damaged, or takes longer than until
    /// `deadline`.
    pub fn read(&self, deadline: Instant) -> Result<Vec<(usize, PreparedImage)>, Failure> {
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

/// Bytes of memory that images need together: the patches, the files until all are decoded, and the
/// memory for decoding the largest.
pub fn needs(images: &[UnreadImage]) -> u64 {
    let patches: u64 = images.iter().map(|image| image.patches_bytes).sum();
    let data = images
        .iter()
        .filter_map(|image| image.image.data.as_ref().ok());
    let held: u64 = data.map(|data| data.byte_len() as u64).sum();
    let decoding = images.iter().map(|image| image.decoding_bytes).max();
    patches + held + decoding.unwrap_or(0)
}

/// The bytes of an image's file.
pub(super) fn bytes_of(image: &ChatImage) -> Result<Bytes, Failure> {
    let refuse = |why: &str| failure::invalid(&image.field, why);
    let base64 = match &image.data {
        Ok(ImageData::Base64(base64)) => base64,
        Ok(ImageData::Bytes(bytes)) => return Ok(bytes.clone()),
        Ok(ImageData::Url(_)) => return Err(refuse(BY_URL)),
        Err(why) => return Err(refuse(why)),
    };
    let decoded = match base64.bytes().any(|byte| byte.is_ascii_whitespace()) {
        false => BASE64.decode(&**base64),
        true => BASE64.decode(base64.split_ascii_whitespace().collect::<String>()),
    };
    let bytes = decoded.map_err(|error| {
        refuse(&format!(
            "the image is no Base64 ({error}); encode its file again"
        ))
    })?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use rocmforge_vision::{Filter, Sizes};

    use super::*;

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
    }
}

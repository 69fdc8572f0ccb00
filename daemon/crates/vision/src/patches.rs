//! Converts resized images to the patches of a vision tower.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::decode::{Bounds, Pixels, decode};
use crate::error::ImageError;
use crate::resize::resize;
use crate::rules::{Rules, Size};

/// An image as patches for a vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct PreparedImage {
    /// Number of rows and columns of patches; both are multiples of [`Rules::merge`].
    pub grid: [usize; 2],
    /// Side, in patches, of the square that becomes one token.
    pub merge: usize,
    /// Patch values, `[grid[0] * grid[1]][3 * patch * patch]`, f32: each patch has its red, then
    /// green, then blue rows. Patches of a square that becomes one token are adjacent, row by row;
    /// so are the squares.
    pub patches: Vec<f32>,
    /// SHA-256 of the resized pixels and of all parameters of their conversion: equal digests mean
    /// equal rows of a tower.
    pub digest: [u8; 32],
    /// Keeps the memory of the patches counted.
    pub charge: Charge,
}

/// Keeps the memory of an image's patches counted until the last copy is dropped. It does not
/// affect equality of images.
#[derive(Clone, Default)]
pub struct Charge(Option<Arc<dyn Any + Send + Sync>>);

impl Charge {
    /// A charge that holds `counted` until the last patches of the image are dropped.
    pub fn new(counted: impl Any + Send + Sync) -> Self {
        Self(Some(Arc::new(counted)))
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Charge").field(&self.0.is_some()).finish()
    }
}

impl PartialEq for Charge {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl PreparedImage {
    /// Number of tokens that stand for the image in a prompt.
    pub fn tokens(&self) -> usize {
        self.grid[0] * self.grid[1] / (self.merge * self.merge)
    }
}

/// Decodes and resizes an image file, and converts it to patches. CPU-bound.
///
/// # Errors
///
/// As [`decode`] and [`Rules::size_for`].
pub fn prepare(bytes: &[u8], bounds: Bounds, rules: &Rules) -> Result<PreparedImage, ImageError> {
    let image = decode(bytes, bounds)?;
    let size = rules.size_for(image.width(), image.height())?;
    Ok(of_pixels(&resized(image, size, rules), rules))
}

/// As [`prepare`], but returns the tiles that the rules cut a large image into, row by row,
/// followed by the whole image. CPU-bound.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_all(
    bytes: &[u8],
    bounds: Bounds,
    rules: &Rules,
) -> Result<Vec<PreparedImage>, ImageError> {
    let image = decode(bytes, bounds)?;
    let size = rules.size_for(image.width(), image.height())?;
    let mut parts = Vec::new();
    if let Some(grid) = rules.tiles_for(image.width(), image.height()) {
        parts = tiles(image.clone(), grid, rules);
    }
    parts.push(of_pixels(&resized(image, size, rules), rules));
    Ok(parts)
}

/// Resizes an image; the part that is filled up is black.
fn resized(image: Pixels, size: Size, rules: &Rules) -> Pixels {
    let Some(shown) = rules.shown_for(image.width(), image.height()) else {
        return resize(image, size, rules.filter);
    };
    let image = resize(image, shown, rules.filter);
    let [line, shown] = [size.width, shown.width].map(|width| width as usize * 3);
    let mut rgb = vec![0; line * size.height as usize];
    for (to, from) in rgb
        .chunks_exact_mut(line)
        .zip(image.rgb.chunks_exact(shown))
    {
        to[..shown].copy_from_slice(from);
    }
    Pixels {
        width: size.width,
        height: size.height,
        rgb,
    }
}

/// Cuts an image into `rows` by `columns` tiles, as patches.
fn tiles(image: Pixels, [rows, columns]: [u32; 2], rules: &Rules) -> Vec<PreparedImage> {
    let Some(tiles) = rules.sizes.tiles() else {
        return Vec::new();
    };
    let size = Size {
        width: columns * tiles.side,
        height: rows * tiles.side,
    };
    let image = resize(image, size, rules.filter);
    let (side, line) = (tiles.side as usize * 3, image.width as usize * 3);
    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    let tile = |(row, column): (u32, u32)| {
        let lines = image.rgb.chunks_exact(line);
        let lines = lines
            .skip((row * tiles.side) as usize)
            .take(tiles.side as usize);
        let first = column as usize * side;
        let rgb = lines
            .flat_map(|line| &line[first..first + side])
            .copied()
            .collect();
        let pixels = Pixels {
            width: tiles.side,
            height: tiles.side,
            rgb,
        };
        of_pixels(&pixels, rules)
    };
    places.map(tile).collect()
}

/// Converts an image, whose sides are multiples of the rules' squares, to patches.
fn of_pixels(image: &Pixels, rules: &Rules) -> PreparedImage {
    let (patch, merge) = (rules.patch as usize, rules.merge as usize);
    let (columns, rows) = (image.width as usize / patch, image.height as usize / patch);
    let tables = tables(rules);
    let mut patches = Vec::with_capacity(image.rgb.len());
    for square_row in (0..rows).step_by(merge) {
        for square_column in (0..columns).step_by(merge) {
            for at in 0..merge * merge {
                let row = square_row + at / merge;
                let column = square_column + at % merge;
                push_patch(
                    &mut patches,
                    image,
                    [row * patch, column * patch],
                    patch,
                    &tables,
                );
            }
        }
    }
    PreparedImage {
        grid: [rows, columns],
        merge,
        patches,
        digest: digest(image, rules),
        charge: Charge::default(),
    }
}

/// For each channel the normalized value of each of its 256 values.
fn tables(rules: &Rules) -> [[f32; 256]; 3] {
    std::array::from_fn(|channel| {
        let (mean, std) = (rules.mean[channel], rules.std[channel]);
        std::array::from_fn(|step| (step as f32 / 255.0 - mean) / std)
    })
}

/// Appends the patch whose first pixel is at `[row, column]`.
fn push_patch(
    patches: &mut Vec<f32>,
    image: &Pixels,
    [top, left]: [usize; 2],
    side: usize,
    tables: &[[f32; 256]; 3],
) {
    let width = image.width as usize;
    for (channel, table) in tables.iter().enumerate() {
        for row in top..top + side {
            let first = (row * width + left) * 3;
            let line = image.rgb[first..first + side * 3].as_chunks::<3>().0;
            patches.extend(line.iter().map(|pixel| table[usize::from(pixel[channel])]));
        }
    }
}

fn digest(image: &Pixels, rules: &Rules) -> [u8; 32] {
    let mut hash = Sha256::new();
    for number in [rules.patch, rules.merge, image.width, image.height] {
        hash.update(number.to_le_bytes());
    }
    for number in rules.mean.iter().chain(&rules.std) {
        hash.update(number.to_le_bytes());
    }
    hash.update(&image.rgb);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Filter, Sizes, Tiles};
    use crate::testing::{pattern, png, rules};

    #[test]
    fn an_image_is_filled_up_with_black_at_the_right_and_below() {
        let rules = Rules {
            patch: 2,
            merge: 2,
            sizes: Sizes::Padded {
                patches: 64,
                side: 8,
            },
            mean: [0.0; 3],
            std: [1.0; 3],
            ..rules()
        };
        let white = Pixels {
            width: 3,
            height: 5,
            rgb: vec![255; 45],
        };
        let size = rules.size_for(3, 5).unwrap();
        let image = of_pixels(&resized(white, size, &rules), &rules);
        assert_eq!(image.grid, [4, 2]);
        // Red of each patch: of the first block, and of the second one.
        let reds: Vec<f32> = image
            .patches
            .chunks(12)
            .map(|p| p[..4].iter().sum())
            .collect();
        assert_eq!(reds, [4.0, 2.0, 4.0, 2.0, 2.0, 1.0, 0.0, 0.0]);
    }

    fn small() -> Rules {
        Rules {
            patch: 2,
            merge: 2,
            sizes: Sizes::Square(4),
            filter: Filter::Bicubic,
            mean: [0.5, 0.25, 0.0],
            std: [0.5, 1.0, 2.0],
        }
    }

    #[test]
    fn patches_of_a_token_stand_together_and_channels_follow_each_other() {
        let image = pattern(8, 4);
        let prepared = of_pixels(&image, &small());
        assert_eq!((prepared.grid, prepared.tokens()), ([2, 4], 2));
        let value = |x: usize, y: usize, c: usize| {
            let step = f32::from(image.rgb[(y * 8 + x) * 3 + c]) / 255.0;
            (step - small().mean[c]) / small().std[c]
        };
        // First pixels of the patches, as they stand: the left square, then the right one.
        let firsts = [
            (0, 0),
            (2, 0),
            (0, 2),
            (2, 2),
            (4, 0),
            (6, 0),
            (4, 2),
            (6, 2),
        ];
        let mut expected = Vec::new();
        for (x, y) in firsts {
            for c in 0..3 {
                for (dx, dy) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                    expected.push(value(x + dx, y + dy, c));
                }
            }
        }
        assert_eq!(prepared.patches, expected);
    }

    #[test]
    fn images_have_one_digest_where_their_pixels_and_rules_are_equal() {
        let digest = |image: &Pixels, rules: &Rules| of_pixels(image, rules).digest;
        let (image, rules) = (pattern(8, 4), small());
        assert_eq!(digest(&image, &rules), digest(&pattern(8, 4), &rules));
        let mut other = image.clone();
        other.rgb[5] ^= 1;
        assert_ne!(digest(&image, &rules), digest(&other, &rules));
        // As many bytes in another shape.
        let turned = Pixels::new(4, 8, image.rgb.clone()).unwrap();
        assert_ne!(digest(&image, &rules), digest(&turned, &rules));
        let shifted = Rules {
            mean: [0.5, 0.25, 0.1],
            ..rules
        };
        assert_ne!(digest(&image, &rules), digest(&image, &shifted));
    }

    #[test]
    fn tiles_are_the_parts_of_the_larger_image_row_by_row() {
        let rules = Rules {
            sizes: Sizes::Tiled {
                min_pixels: 16,
                max_pixels: 64,
                tiles: Tiles {
                    side: 8,
                    least: 2,
                    most: 6,
                },
            },
            filter: Filter::Bilinear,
            ..small()
        };
        // Tiles of the image's own pixels: 3 columns and 2 rows.
        let image = pattern(24, 16);
        let parts = prepare_all(&png(&image), Bounds::default(), &rules).unwrap();
        assert_eq!(parts.len(), 7);
        assert!(parts[..6].iter().all(|tile| tile.grid == [4, 4]));
        let own: Vec<u8> = (8..16)
            .flat_map(|y| &image.rgb[(y * 24 + 8) * 3..][..24])
            .copied()
            .collect();
        let fifth = of_pixels(&Pixels::new(8, 8, own).unwrap(), &rules);
        assert_eq!(parts[4], fifth, "the second of the second row");
        let whole = prepare(&png(&image), Bounds::default(), &rules).unwrap();
        assert_eq!(parts[6], whole);
        assert_eq!(whole.grid, [2, 4], "8 x 4 pixels");
        // One that is small enough is not cut.
        let parts = prepare_all(&png(&pattern(8, 8)), Bounds::default(), &rules).unwrap();
        assert_eq!(parts.len(), 1);
    }

    #[test]
    fn tiles_of_squares_come_before_the_whole_image_as_one() {
        let rules = Rules {
            sizes: Sizes::SquareTiles(Tiles {
                side: 8,
                least: 1,
                most: 6,
            }),
            ..small()
        };
        let image = pattern(24, 16);
        let parts = prepare_all(&png(&image), Bounds::default(), &rules).unwrap();
        assert_eq!(parts.len(), 7);
        assert!(parts.iter().all(|part| part.grid == [4, 4]));
        let own: Vec<u8> = (0..8)
            .flat_map(|y| &image.rgb[(y * 24 + 16) * 3..][..24])
            .copied()
            .collect();
        let third = of_pixels(&Pixels::new(8, 8, own).unwrap(), &rules);
        assert_eq!(parts[2], third, "the last of the first row");
        let size = Size {
            width: 8,
            height: 8,
        };
        let whole = of_pixels(&resize(image, size, rules.filter), &rules);
        assert_eq!(parts[6], whole);
        // A square is not cut, and is one.
        let square = pattern(8, 8);
        let parts = prepare_all(&png(&square), Bounds::default(), &rules).unwrap();
        assert_eq!(parts, [of_pixels(&square, &rules)]);
    }

    #[test]
    fn a_file_becomes_as_many_rows_as_its_grid_says() {
        let rules = rules();
        let bounds = Bounds::default();
        let prepared = prepare(&png(&pattern(500, 300)), bounds, &rules).unwrap();
        assert_eq!(prepared.grid, [18, 32], "512 x 288 pixels");
        assert_eq!(prepared.tokens(), 16 * 9);
        assert_eq!(prepared.patches.len(), 18 * 32 * 3 * 16 * 16);
        assert!(prepared.patches.iter().all(|value| value.abs() <= 1.0));
    }
}

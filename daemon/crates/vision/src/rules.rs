//! Preprocessing rules of a vision tower: sizes, filter and normalization.

use crate::error::ImageError;

/// Width and height of an image in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// Maximum ratio of an image's longer to its shorter side.
const MAX_ASPECT: u32 = 200;

/// How the size of a resized image is determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// The image's own size, rounded to whole tokens and limited in pixels: Qwen's towers.
    Between {
        /// Minimum number of pixels.
        min_pixels: u64,
        /// Maximum number of pixels; at least those of one token.
        max_pixels: u64,
        /// Whether an image with a side below a token's is enlarged to a token first: GLM's towers.
        enlarges: bool,
    },
    /// A square of this side for every image: SigLIP's towers. A multiple of [`Rules::token_side`].
    Square(u32),
    /// The image's own size, or a smaller one, filled up to whole tokens by stretching it:
    /// Pixtral's.
    Within {
        /// Longest side in pixels; above 0.
        longest: u32,
    },
    /// The image's own size, or a smaller one, filled up to whole tokens with black: Kimi's.
    Padded {
        /// Maximum number of patches before filling up; above 0.
        patches: u32,
        /// Maximum number of patches of a side before filling up; above 0.
        side: u32,
    },
    /// The largest size with the image's aspect ratio and at most `tokens` tokens: Gemma 4's
    /// towers.
    Largest {
        /// Maximum number of tokens; above 0.
        tokens: u32,
    },
    /// The size in whole tokens near the image's own whose aspect ratio is nearest: Muse Glimmer's
    /// tower.
    Nearest {
        /// Maximum number of tokens; above 0.
        tokens: u32,
    },
    /// As `Between`; a much larger image is also cut into tiles: LFM 2's tower.
    Tiled {
        /// Minimum number of pixels of the whole image.
        min_pixels: u64,
        /// Maximum number of pixels; at least those of one token.
        max_pixels: u64,
        /// Sizes and numbers of tiles.
        tiles: Tiles,
    },
    /// A square with a tile's side; an image whose aspect ratio is nearer to a rectangle of tiles
    /// is also cut into those: InternVL's tower.
    SquareTiles(Tiles),
}

impl Sizes {
    /// The tiles that large images are cut into, if any.
    pub(crate) fn tiles(&self) -> Option<Tiles> {
        match *self {
            Self::Tiled { tiles, .. } | Self::SquareTiles(tiles) => Some(tiles),
            _ => None,
        }
    }
}

/// Square tiles that a large image is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Side of a tile in pixels; a multiple of [`Rules::token_side`].
    pub side: u32,
    /// Minimum number of tiles of an image that is cut.
    pub least: u32,
    /// Maximum number of tiles; below `least` for no tiles at all.
    pub most: u32,
}

impl Tiles {
    /// These tiles, limited to `pixels` pixels together.
    fn at_most(self, pixels: u64) -> Self {
        let most = u32::try_from(pixels / u64::from(self.side).pow(2));
        Self {
            most: most.map_or(self.most, |most| self.most.min(most)),
            ..self
        }
    }
}

/// An image is cut if its pixels exceed this multiple of the maximum of a whole image.
const CUT_BEYOND: f64 = 2.0;

/// The filter by which images are resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Bilinear: weights fall linearly over one pixel.
    Bilinear,
    /// Bicubic: cubic weights over two pixels.
    Bicubic,
    /// Lanczos: a windowed sinc over three pixels on each side.
    Lanczos,
}

/// Preprocessing rules of a vision tower.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// Side of a patch in pixels; above 0.
    pub patch: u32,
    /// Side, in patches, of the square that becomes one token; above 0.
    pub merge: u32,
    /// How the size of the resized image is determined.
    pub sizes: Sizes,
    /// Filter by which the image is resized.
    pub filter: Filter,
    /// Mean that is subtracted from each channel (0 to 1): red, green, blue.
    pub mean: [f32; 3],
    /// Divisor of each channel after the mean is subtracted: red, green, blue.
    pub std: [f32; 3],
}

impl Rules {
    /// Side, in pixels, of the square that becomes one token.
    pub fn token_side(&self) -> u32 {
        self.patch * self.merge
    }

    /// The size to which an image of `width` x `height` is resized: both sides are multiples of
    /// [`Rules::token_side`].
    ///
    /// # Errors
    /// [`ImageError::Empty`] without a pixel, [`ImageError::TooNarrow`] where a side is more than
    /// 200 times the other.
    pub fn size_for(&self, width: u32, height: u32) -> Result<Size, ImageError> {
        if width == 0 || height == 0 {
            return Err(ImageError::Empty);
        }
        if width.max(height) > width.min(height).saturating_mul(MAX_ASPECT) {
            return Err(ImageError::TooNarrow {
                width,
                height,
                max: MAX_ASPECT,
            });
        }
        let sides = [f64::from(width), f64::from(height)];
        let [width, height] = match self.sizes {
            Sizes::Between {
                min_pixels,
                max_pixels,
                enlarges,
            } => {
                let sides = match enlarges {
                    true => self.enlarged(sides),
                    false => sides,
                };
                self.between(sides, [min_pixels, max_pixels], 0.0)
            }
            Sizes::Tiled {
                min_pixels,
                max_pixels,
                ..
            } => self.between(sides, [min_pixels, max_pixels], 1.0),
            Sizes::Square(side) | Sizes::SquareTiles(Tiles { side, .. }) => [side, side],
            Sizes::Within { longest } => self.within(sides, longest),
            Sizes::Padded { patches, side } => {
                let unit = self.token_side();
                let shown = self.shown(sides, patches, side);
                shown.map(|side| side.div_ceil(unit) * unit)
            }
            Sizes::Largest { tokens } => self.largest(sides, tokens),
            Sizes::Nearest { tokens } => self.nearest(sides, tokens),
        };
        Ok(Size { width, height })
    }

    /// The sides, enlarged so that the shorter one is at least a token's.
    fn enlarged(&self, sides: [f64; 2]) -> [f64; 2] {
        let scale = f64::from(self.token_side()) / sides[0].min(sides[1]);
        match scale > 1.0 {
            true => sides.map(|side| (side * scale).floor()),
            false => sides,
        }
    }

    /// The size for [`Sizes::Between`]: keeps the aspect ratio as far as whole tokens allow, within
    /// the bounds of pixels; a side counts as at least `fewest` tokens.
    fn between(&self, sides: [f64; 2], bounds: [u64; 2], fewest: f64) -> [u32; 2] {
        let unit = f64::from(self.token_side());
        let [min_pixels, max_pixels] = bounds.map(|bound| bound as f64);
        let pixels = sides[0] * sides[1];
        // Half to even, as Python rounds.
        let nearest = sides.map(|side| (side / unit).round_ties_even().max(fewest) * unit);
        let sides = if nearest[0] * nearest[1] > max_pixels {
            let shrink = (pixels / max_pixels).sqrt();
            sides.map(|side| (side / shrink / unit).floor() * unit)
        } else if nearest[0] * nearest[1] < min_pixels {
            let grow = (min_pixels / pixels).sqrt();
            sides.map(|side| (side * grow / unit).ceil() * unit)
        } else {
            nearest
        };
        sides.map(|side| side.max(unit) as u32)
    }

    /// The size for [`Sizes::Within`]: keeps the aspect ratio as far as whole pixels and tokens
    /// allow.
    fn within(&self, sides: [f64; 2], longest: u32) -> [u32; 2] {
        let [width, height] = sides.map(|side| side / f64::from(longest));
        let shrink = width.max(height).max(1.0);
        let unit = self.token_side();
        sides.map(|side| ((side / shrink).floor().max(1.0) as u32).div_ceil(unit) * unit)
    }

    /// The size of the image within its resized size, the rest of which is black; `None` if it
    /// fills it.
    #[must_use]
    pub fn shown_for(&self, width: u32, height: u32) -> Option<Size> {
        let Sizes::Padded { patches, side } = self.sizes else {
            return None;
        };
        let sides = [width, height].map(|side| f64::from(side.max(1)));
        let [width, height] = self.shown(sides, patches, side);
        Some(Size { width, height })
    }

    /// The size of the image for [`Sizes::Padded`]: keeps the aspect ratio as far as whole pixels
    /// allow, and never enlarges.
    fn shown(&self, sides: [f64; 2], patches: u32, most: u32) -> [u32; 2] {
        let unit = f64::from(self.patch);
        let longest = f64::from(most) * unit;
        let [columns, rows] = sides.map(|side| (side / unit).floor().max(1.0));
        let of_patches = (f64::from(patches) / (columns * rows)).sqrt();
        let of_sides = sides.map(|side| longest / side);
        let scale = of_patches.min(of_sides[0]).min(of_sides[1]).min(1.0);
        sides.map(|side| (side * scale).floor().clamp(1.0, longest) as u32)
    }

    /// Number of rows and columns of tiles for an image of this size; `None` if it is not cut.
    ///
    /// The grid with the nearest aspect ratio is chosen; among equally near ones the larger, if the
    /// image has half its pixels.
    #[must_use]
    pub fn tiles_for(&self, width: u32, height: u32) -> Option<[u32; 2]> {
        let tiles = self.sizes.tiles()?;
        let sides = [width, height].map(f64::from);
        if let Sizes::Tiled { max_pixels, .. } = self.sizes {
            let (unit, patch) = (f64::from(self.token_side()), f64::from(self.patch));
            let whole = sides.map(|side| ((side / unit).round_ties_even() * unit).max(patch));
            if whole[0] * whole[1] <= max_pixels as f64 * CUT_BEYOND {
                return None;
            }
        }
        let shape = sides[0] / sides[1];
        let (mut best, mut nearest) = ([1, 1], f64::INFINITY);
        for n in tiles.least..=tiles.most {
            for columns in (1..=n).filter(|columns| n % columns == 0) {
                let rows = n / columns;
                let away = (shape - f64::from(columns) / f64::from(rows)).abs();
                let half = 0.5 * f64::from(tiles.side).powi(2) * f64::from(n);
                let larger = away == nearest && sides[0] * sides[1] > half;
                if away < nearest || larger {
                    (best, nearest) = ([rows, columns], away);
                }
            }
        }
        // A tile alone is the whole image.
        (best != [1, 1]).then_some(best)
    }

    /// Number of rows and columns of tokens in a tile.
    #[must_use]
    pub fn tile_grid(&self) -> [usize; 2] {
        let tiles = self.sizes.tiles();
        tiles.map_or([0; 2], |tiles| {
            [(tiles.side / self.token_side()) as usize; 2]
        })
    }

    /// The size for [`Sizes::Largest`]: keeps the aspect ratio as far as whole tokens allow; each
    /// side has at least one token.
    fn largest(&self, sides: [f64; 2], tokens: u32) -> [u32; 2] {
        let unit = f64::from(self.token_side());
        let factor = (f64::from(tokens) * unit * unit / (sides[0] * sides[1])).sqrt();
        let whole = sides.map(|side| (factor * side / unit).floor());
        let many = |long: f64, short: f64| (long / short).floor().clamp(1.0, f64::from(tokens));
        let whole = match whole {
            [0.0, _] => [1.0, many(sides[1], sides[0])],
            [_, 0.0] => [many(sides[0], sides[1]), 1.0],
            whole => whole,
        };
        whole.map(|n| (n * unit) as u32)
    }

    /// The size for [`Sizes::Nearest`]: of the whole tokens next to both sides the ones with the
    /// nearest aspect ratio, among equally near ones the larger.
    fn nearest(&self, [width, height]: [f64; 2], tokens: u32) -> [u32; 2] {
        let (unit, most) = (f64::from(self.token_side()), f64::from(tokens));
        let [mut columns, mut rows] = [width, height].map(|side| side / unit);
        let ratio = columns / rows;
        if rows * columns > most {
            rows = (most / ratio).sqrt();
            columns = rows * ratio;
        }
        let (mut best, mut nearest) = (None, f64::INFINITY);
        for row in [rows.ceil(), rows.floor()] {
            for column in [columns.ceil(), columns.floor()] {
                let away = (row / column - height / width).abs();
                let fits = row >= 1.0 && column >= 1.0 && row * column <= most;
                if fits && away < nearest {
                    (best, nearest) = (Some([column, row]), away);
                }
            }
        }
        let rounded = || [columns, rows].map(|n| n.round_ties_even().max(1.0));
        best.unwrap_or_else(rounded).map(|n| (n * unit) as u32)
    }

    /// Bytes of the patches of an image with this resized size.
    pub fn patches_bytes(&self, size: Size) -> u64 {
        u64::from(size.width) * u64::from(size.height) * 3 * size_of::<f32>() as u64
    }

    /// These rules, limited to `pixels` pixels of the resized image (but at least one token),
    /// without filling up to whole tokens.
    #[must_use]
    pub fn at_most(&self, pixels: u64) -> Self {
        let token = u64::from(self.token_side()).pow(2);
        let most = pixels.max(token);
        let sizes = match self.sizes {
            Sizes::Between {
                min_pixels,
                max_pixels,
                enlarges,
            } => Sizes::Between {
                min_pixels: min_pixels.min(most),
                max_pixels: max_pixels.min(most),
                enlarges,
            },
            // Its tower knows no other size.
            Sizes::Square(side) => Sizes::Square(side),
            Sizes::Within { longest } => Sizes::Within {
                longest: u32::try_from(most.isqrt()).map_or(longest, |side| longest.min(side)),
            },
            Sizes::Tiled {
                min_pixels,
                max_pixels,
                tiles,
            } => Sizes::Tiled {
                min_pixels: min_pixels.min(most),
                max_pixels: max_pixels.min(most),
                tiles: tiles.at_most(most),
            },
            // The whole one is of the tower's size, as its tiles are.
            Sizes::SquareTiles(tiles) => Sizes::SquareTiles(tiles.at_most(most)),
            Sizes::Padded { patches, side } => Sizes::Padded {
                patches: u32::try_from(most / u64::from(self.patch).pow(2))
                    .map_or(patches, |most| patches.min(most)),
                side,
            },
            Sizes::Largest { tokens } => Sizes::Largest {
                tokens: u32::try_from(most / token).map_or(tokens, |most| tokens.min(most)),
            },
            Sizes::Nearest { tokens } => Sizes::Nearest {
                tokens: u32::try_from(most / token).map_or(tokens, |most| tokens.min(most)),
            },
        };
        Self { sizes, ..*self }
    }

    /// Number of rows and columns of tokens for this resized size.
    pub fn grid(&self, size: Size) -> [usize; 2] {
        let unit = self.token_side();
        [size.height / unit, size.width / unit].map(|side| side as usize)
    }

    /// Number of tokens for this resized size.
    pub fn tokens(&self, size: Size) -> usize {
        self.grid(size).into_iter().product()
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;

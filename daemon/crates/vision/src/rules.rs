//! What a tower's processor does to an image.

use crate::error::ImageError;

/// Sides of an image, pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// Longest side of an image in units of its shortest.
const MAX_ASPECT: u32 = 200;

/// The size that an image gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// Its own, as far as whole tokens and numbers of pixels allow: Qwen's towers.
    Between {
        /// Fewest pixels.
        min_pixels: u64,
        /// Most pixels; at least those of one token.
        max_pixels: u64,
        /// Whether one with a side of less than a token is enlarged to a token's before: GLM's.
        enlarges: bool,
    },
    /// A square of this side, whatever its shape is: SigLIP's. A multiple of the rules'
    /// [`Rules::token_side`].
    Square(u32),
    /// Its own, or a smaller one, filled up to whole tokens by stretching it: Pixtral's.
    Within {
        /// The longest side, pixels; above 0.
        longest: u32,
    },
    /// The largest of its shape that has no more tokens, shrunk or enlarged: Gemma 4's.
    Largest {
        /// Most tokens; above 0.
        tokens: u32,
    },
    /// As `Between`, and tiles of an image that is much larger: LFM 2's.
    Tiled {
        /// Fewest pixels of the whole image.
        min_pixels: u64,
        /// Most pixels; at least those of one token.
        max_pixels: u64,
        /// The tiles.
        tiles: Tiles,
    },
}

/// Squares that a large image is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Side of each, pixels; a multiple of the rules' [`Rules::token_side`].
    pub side: u32,
    /// Fewest of an image that is cut.
    pub least: u32,
    /// Most; fewer than `least` for none at all.
    pub most: u32,
}

/// An image is cut whose pixels are more than so many times the most of a whole one.
const CUT_BEYOND: f64 = 2.0;

/// The filter by which images are resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Weights that fall linearly to the next pixels.
    Bilinear,
    /// Cubic ones, to the second next pixels.
    Bicubic,
}

/// What the processor of a tower does to an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// Side of a patch, pixels; above 0.
    pub patch: u32,
    /// Patches on each side of a square that becomes one token; above 0.
    pub merge: u32,
    /// The size of the resized image.
    pub sizes: Sizes,
    /// How it is resized.
    pub filter: Filter,
    /// What is taken from a channel, of values from 0 to 1: red, green, blue.
    pub mean: [f32; 3],
    /// What the rest is divided by: red, green, blue.
    pub std: [f32; 3],
}

impl Rules {
    /// Side of the square that becomes one token, pixels.
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
            Sizes::Square(side) => [side, side],
            Sizes::Within { longest } => self.within(sides, longest),
            Sizes::Largest { tokens } => self.largest(sides, tokens),
        };
        Ok(Size { width, height })
    }

    /// The sides with the shorter one at least a token's.
    fn enlarged(&self, sides: [f64; 2]) -> [f64; 2] {
        let scale = f64::from(self.token_side()) / sides[0].min(sides[1]);
        match scale > 1.0 {
            true => sides.map(|side| (side * scale).floor()),
            false => sides,
        }
    }

    /// The shape is kept as far as whole tokens allow, and the pixels are between the least and the
    /// most, where a side counts for `fewest` tokens at least.
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

    /// The shape is kept as far as whole pixels and tokens allow.
    fn within(&self, sides: [f64; 2], longest: u32) -> [u32; 2] {
        let [width, height] = sides.map(|side| side / f64::from(longest));
        let shrink = width.max(height).max(1.0);
        let unit = self.token_side();
        sides.map(|side| ((side / shrink).floor().max(1.0) as u32).div_ceil(unit) * unit)
    }

    /// Rows and columns of the tiles of an image of this size; none where it is not cut.
    ///
    /// The number is that whose shape is nearest to the image's; of those that are as near the
    /// larger one, where the image has half its pixels.
    #[must_use]
    pub fn tiles_for(&self, width: u32, height: u32) -> Option<[u32; 2]> {
        let Sizes::Tiled {
            max_pixels, tiles, ..
        } = self.sizes
        else {
            return None;
        };
        let (unit, patch) = (f64::from(self.token_side()), f64::from(self.patch));
        let sides = [width, height].map(f64::from);
        let whole = sides.map(|side| ((side / unit).round_ties_even() * unit).max(patch));
        if whole[0] * whole[1] <= max_pixels as f64 * CUT_BEYOND || tiles.most < tiles.least {
            return None;
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
        Some(best)
    }

    /// Rows and columns of the tokens of a tile.
    #[must_use]
    pub fn tile_grid(&self) -> [usize; 2] {
        match self.sizes {
            Sizes::Tiled { tiles, .. } => [(tiles.side / self.token_side()) as usize; 2],
            _ => [0; 2],
        }
    }

    /// The shape is kept as far as whole tokens allow; a side that is less than one has one.
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

    /// Bytes of the patches of an image of this resized size.
    pub fn patches_bytes(&self, size: Size) -> u64 {
        u64::from(size.width) * u64::from(size.height) * 3 * size_of::<f32>() as u64
    }

    /// The rules with at most so many pixels of the resized image, but those of one token at least.
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
                tiles: Tiles {
                    most: u32::try_from(most / u64::from(tiles.side).pow(2))
                        .map_or(tiles.most, |most| tiles.most.min(most)),
                    ..tiles
                },
            },
            Sizes::Largest { tokens } => Sizes::Largest {
                tokens: u32::try_from(most / token).map_or(tokens, |most| tokens.min(most)),
            },
        };
        Self { sizes, ..*self }
    }

    /// Rows and columns of the tokens of an image of this resized size.
    pub fn grid(&self, size: Size) -> [usize; 2] {
        let unit = self.token_side();
        [size.height / unit, size.width / unit].map(|side| side as usize)
    }

    /// Tokens of an image of this resized size.
    pub fn tokens(&self, size: Size) -> usize {
        self.grid(size).into_iter().product()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::rules;

    /// A width and a height, and those after resizing.
    type Sides = ((u32, u32), (u32, u32));

    /// As `smart_resize(height, width, factor=32, min_pixels=65536, max_pixels=16777216)` of
    /// transformers' processor for Qwen2-VL computes them.
    const EXPECTED_SIZES: [Sides; 11] = [
        ((1024, 1024), (1024, 1024)),
        ((640, 480), (640, 480)),
        ((1, 1), (256, 256)),
        ((48, 48), (256, 256)),
        ((80, 4000), (64, 4000)),
        ((8000, 6000), (4704, 3520)),
        ((333, 777), (320, 768)),
        ((10, 1999), (32, 3648)),
        ((15, 2100), (32, 3040)),
        ((176, 1200), (192, 1216)),
        ((5000, 30), (4992, 32)),
    ];

    #[test]
    fn sizes_are_those_of_the_authors_processor() {
        let rules = Rules {
            sizes: Sizes::Between {
                min_pixels: 65_536,
                max_pixels: 16_777_216,
                enlarges: false,
            },
            ..rules()
        };
        for ((width, height), (to_width, to_height)) in EXPECTED_SIZES {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), (to_width, to_height));
        }
    }

    /// As `smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=3211264)`: the
    /// processor for Qwen2.5-VL, with the most pixels that its tower takes.
    const SIZES_OF_28: [Sides; 9] = [
        ((1024, 1024), (1036, 1036)),
        ((640, 480), (644, 476)),
        ((1, 1), (56, 56)),
        ((80, 4000), (84, 4004)),
        ((8000, 6000), (2044, 1540)),
        ((28, 29), (56, 84)),
        ((1999, 10), (812, 28)),
        ((42, 42), (56, 56)),
        ((1800, 1700), (1792, 1708)),
    ];

    #[test]
    fn sizes_are_those_of_the_authors_processor_for_tokens_of_28_pixels() {
        let rules = Rules {
            patch: 14,
            sizes: Sizes::Between {
                min_pixels: 3136,
                max_pixels: 3_211_264,
                enlarges: false,
            },
            ..rules()
        };
        for ((width, height), expected) in SIZES_OF_28 {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), expected, "{width} x {height}");
        }
    }

    /// As `smart_resize(2, height, width, factor=28, min_pixels=12544, max_pixels=6422528)` of
    /// transformers' processor for GLM-4.1V, which counts the pixels of two frames.
    const SIZES_OF_TWO_FRAMES: [Sides; 11] = [
        ((1024, 1024), (1036, 1036)),
        ((640, 480), (644, 476)),
        ((1, 1), (84, 84)),
        ((10, 1999), (28, 5600)),
        ((80, 4000), (84, 4004)),
        ((8000, 6000), (2044, 1540)),
        ((28, 29), (84, 84)),
        ((27, 300), (28, 308)),
        ((60, 60), (84, 84)),
        ((1800, 1700), (1792, 1708)),
        ((13, 40), (56, 140)),
    ];

    #[test]
    fn a_narrow_image_is_enlarged_where_the_authors_processor_does_so() {
        let rules = Rules {
            patch: 14,
            sizes: Sizes::Between {
                min_pixels: 6272,
                max_pixels: 3_211_264,
                enlarges: true,
            },
            ..rules()
        };
        for ((width, height), expected) in SIZES_OF_TWO_FRAMES {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), expected, "{width} x {height}");
        }
    }

    #[test]
    fn an_image_of_any_shape_becomes_a_square_where_the_tower_takes_no_other() {
        let rules = Rules {
            patch: 14,
            merge: 4,
            sizes: Sizes::Square(896),
            ..rules()
        };
        for (width, height) in [(1, 1), (896, 896), (3000, 200)] {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), (896, 896));
            assert_eq!(rules.tokens(size), 256);
        }
    }

    /// As the processor for Pixtral in transformers computes them for 1540 pixels and tokens of 28.
    const WITHIN: [Sides; 8] = [
        ((1, 1), (28, 28)),
        ((28, 29), (28, 56)),
        ((640, 480), (644, 504)),
        ((1540, 1540), (1540, 1540)),
        ((1541, 1000), (1540, 1008)),
        ((8000, 6000), (1540, 1176)),
        ((4000, 21), (1540, 28)),
        ((3333, 2777), (1540, 1288)),
    ];

    #[test]
    fn an_image_is_shrunk_to_the_longest_side_as_the_authors_processor_does() {
        let rules = Rules {
            patch: 14,
            merge: 2,
            sizes: Sizes::Within { longest: 1540 },
            ..rules()
        };
        for ((width, height), expected) in WITHIN {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), expected, "{width} x {height}");
        }
    }

    /// As the processor for Gemma 4 in transformers computes them for 280 tokens of 48 pixels.
    const LARGEST: [Sides; 8] = [
        ((1, 1), (768, 768)),
        ((48, 48), (768, 768)),
        ((640, 480), (912, 672)),
        ((1024, 1024), (768, 768)),
        ((8000, 6000), (912, 672)),
        ((80, 4000), (96, 5664)),
        ((2100, 15), (9456, 48)),
        ((333, 777), (480, 1200)),
    ];

    #[test]
    fn an_image_gets_as_many_tokens_as_it_may_as_the_authors_processor_gives_it() {
        let rules = Rules {
            patch: 16,
            merge: 3,
            sizes: Sizes::Largest { tokens: 280 },
            ..rules()
        };
        for ((width, height), expected) in LARGEST {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), expected, "{width} x {height}");
            assert!(rules.tokens(size) <= 280);
        }
        let fewer = rules.at_most(70 * 48 * 48).size_for(640, 480).unwrap();
        assert_eq!((fewer.width, fewer.height), (432, 336));
    }

    /// As the processor for LFM2-VL in transformers computes them: an image, its whole size, and
    /// the columns and rows of its tiles, 1 and 1 where it is not cut.
    const TILED: [(Sides, (u32, u32)); 12] = [
        (((1, 1), (256, 256)), (1, 1)),
        (((512, 512), (512, 512)), (1, 1)),
        (((640, 480), (576, 416)), (1, 1)),
        (((800, 600), (576, 416)), (1, 1)),
        (((1024, 1024), (512, 512)), (2, 2)),
        (((4000, 3000), (576, 416)), (3, 2)),
        (((3000, 4000), (416, 576)), (2, 3)),
        (((3000, 600), (1120, 224)), (5, 1)),
        (((500, 5000), (160, 1600)), (1, 10)),
        (((740, 740), (512, 512)), (2, 2)),
        (((10, 1999), (32, 3648)), (1, 1)),
        (((2048, 1024), (704, 352)), (4, 2)),
    ];

    fn tiled() -> Rules {
        Rules {
            patch: 16,
            merge: 2,
            sizes: Sizes::Tiled {
                min_pixels: 64 * 1024,
                max_pixels: 256 * 1024,
                tiles: Tiles {
                    side: 512,
                    least: 2,
                    most: 10,
                },
            },
            filter: Filter::Bilinear,
            ..rules()
        }
    }

    #[test]
    fn a_large_image_is_cut_as_the_authors_processor_does() {
        for (((width, height), whole), (columns, rows)) in TILED {
            let size = tiled().size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), whole, "{width} x {height}");
            let tiles = tiled().tiles_for(width, height);
            let expected = (columns * rows > 1).then_some([rows, columns]);
            assert_eq!(tiles, expected, "{width} x {height}");
        }
        assert_eq!(tiled().tile_grid(), [16, 16]);
        // Fewer pixels are fewer tiles, or none.
        let most = |pixels| tiled().at_most(pixels).tiles_for(4000, 3000);
        assert_eq!(most(1024 * 512), Some([1, 2]));
        assert_eq!(most(512 * 512), None);
        assert_eq!(rules().tiles_for(4000, 3000), None);
    }

    #[test]
    fn a_line_and_nothing_are_refused() {
        assert_eq!(rules().size_for(0, 5), Err(ImageError::Empty));
        let narrow = rules().size_for(1, 201).unwrap_err();
        assert!(narrow.to_string().contains("1 x 201"), "{narrow}");
        assert!(rules().size_for(1, 200).is_ok());
        assert!(rules().size_for(u32::MAX, 1).is_err());
    }

    proptest! {
        #[test]
        fn a_size_is_of_whole_tokens_and_within_the_bounds(
            width in 1_u32..5000,
            height in 1_u32..5000,
        ) {
            let rules = rules();
            let Ok(size) = rules.size_for(width, height) else {
                return Ok(());
            };
            let unit = rules.token_side();
            prop_assert!(size.width > 0 && size.width % unit == 0);
            prop_assert!(size.height > 0 && size.height % unit == 0);
            let pixels = u64::from(size.width) * u64::from(size.height);
            let Sizes::Between { min_pixels, max_pixels, .. } = rules.sizes else {
                unreachable!("Qwen's");
            };
            prop_assert!(pixels >= min_pixels);
            // A side of one token cannot shrink.
            let thin = size.width == unit || size.height == unit;
            prop_assert!(pixels <= max_pixels || thin);
            prop_assert_eq!(rules.tokens(size) as u64, pixels / u64::from(unit * unit));
        }
    }
}

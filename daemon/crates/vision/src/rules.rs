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

/// What the processor of a tower does to an image, of those towers that take any size: Qwen's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// Side of a patch, pixels; above 0.
    pub patch: u32,
    /// Patches on each side of a square that becomes one token; above 0.
    pub merge: u32,
    /// Fewest pixels of the resized image.
    pub min_pixels: u64,
    /// Most pixels of the resized image; at least those of one token.
    pub max_pixels: u64,
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
    /// [`Rules::token_side`], the shape is kept as far as that allows, and the pixels are between
    /// the least and the most.
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
        let unit = f64::from(self.token_side());
        let sides = [f64::from(width), f64::from(height)];
        let pixels = sides[0] * sides[1];
        // Half to even, as Python rounds.
        let nearest = sides.map(|side| (side / unit).round_ties_even() * unit);
        let sides = if nearest[0] * nearest[1] > self.max_pixels as f64 {
            let shrink = (pixels / self.max_pixels as f64).sqrt();
            sides.map(|side| (side / shrink / unit).floor() * unit)
        } else if nearest[0] * nearest[1] < self.min_pixels as f64 {
            let grow = (self.min_pixels as f64 / pixels).sqrt();
            sides.map(|side| (side * grow / unit).ceil() * unit)
        } else {
            nearest
        };
        let [width, height] = sides.map(|side| side.max(unit) as u32);
        Ok(Size { width, height })
    }

    /// Bytes of the patches of an image of this resized size.
    pub fn patches_bytes(&self, size: Size) -> u64 {
        u64::from(size.width) * u64::from(size.height) * 3 * size_of::<f32>() as u64
    }

    /// The rules with at most so many pixels of the resized image, but those of one token at least.
    #[must_use]
    pub fn at_most(&self, pixels: u64) -> Self {
        let token = u64::from(self.token_side()).pow(2);
        let max_pixels = self.max_pixels.min(pixels.max(token));
        Self {
            max_pixels,
            min_pixels: self.min_pixels.min(max_pixels),
            ..*self
        }
    }

    /// Tokens of an image of this resized size.
    pub fn tokens(&self, size: Size) -> usize {
        let unit = self.token_side();
        (size.width / unit) as usize * (size.height / unit) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::rules;

    /// A width and a height, and those after resizing.
    type Sizes = ((u32, u32), (u32, u32));

    /// As `smart_resize(height, width, factor=32, min_pixels=65536, max_pixels=16777216)` of
    /// transformers' processor for Qwen2-VL computes them.
    const EXPECTED_SIZES: [Sizes; 11] = [
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
            min_pixels: 65_536,
            max_pixels: 16_777_216,
            ..rules()
        };
        for ((width, height), (to_width, to_height)) in EXPECTED_SIZES {
            let size = rules.size_for(width, height).unwrap();
            assert_eq!((size.width, size.height), (to_width, to_height));
        }
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
            prop_assert!(pixels >= rules.min_pixels);
            // A side of one token cannot shrink.
            let thin = size.width == unit || size.height == unit;
            prop_assert!(pixels <= rules.max_pixels || thin);
            prop_assert_eq!(rules.tokens(size) as u64, pixels / u64::from(unit * unit));
        }
    }
}

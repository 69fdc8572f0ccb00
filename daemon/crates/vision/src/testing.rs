//! Images for tests.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, RgbImage};
use sha2::{Digest, Sha256};

use crate::decode::Pixels;
use crate::rules::{Filter, Rules, Sizes};

/// An image of high and low frequencies; a reference makes it by
/// `((x * 7 + y * 13 + c * 29) ^ (x * y)) & 255`.
pub(crate) fn pattern(width: u32, height: u32) -> Pixels {
    let mut rgb = Vec::new();
    for y in 0..height {
        for x in 0..width {
            rgb.extend((0..3).map(|c| (((x * 7 + y * 13 + c * 29) ^ (x * y)) & 255) as u8));
        }
    }
    Pixels::new(width, height, rgb).unwrap()
}

/// Qwen3's.
pub(crate) fn rules() -> Rules {
    Rules {
        patch: 16,
        merge: 2,
        sizes: Sizes::Between {
            min_pixels: 8 * 32 * 32,
            max_pixels: 4096 * 32 * 32,
            enlarges: false,
        },
        filter: Filter::Bicubic,
        mean: [0.5; 3],
        std: [0.5; 3],
    }
}

/// SHA-256 in hexadecimal.
pub(crate) fn sum(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The image in a file of a format that keeps each pixel.
pub(crate) fn png(image: &Pixels) -> Vec<u8> {
    file(image, ImageFormat::Png)
}

/// The image in a file.
pub(crate) fn file(image: &Pixels, format: ImageFormat) -> Vec<u8> {
    let rgb = RgbImage::from_raw(image.width, image.height, image.rgb.clone()).unwrap();
    encoded(&DynamicImage::from(rgb), format)
}

/// A file of this image.
pub(crate) fn encoded(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

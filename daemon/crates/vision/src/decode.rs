//! Image files as 8-bit RGB, within bounds.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, Rgb, RgbImage};

use crate::error::ImageError;

/// What an image may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Longest file, bytes.
    pub bytes: usize,
    /// Most pixels before resizing. Decoding needs up to 16 bytes for each.
    pub pixels: u64,
}

impl Default for Bounds {
    /// 32 MiB, and 64 Mi pixels: more than cameras of phones make.
    fn default() -> Self {
        Bounds {
            bytes: 32 << 20,
            pixels: 64 << 20,
        }
    }
}

/// Bytes that a decoder may hold for each pixel: four channels of 16 bits, once more for a frame
/// that is put on another.
const DECODER_BYTES_A_PIXEL: u64 = 16;
/// And beside them, for tables and lines.
const DECODER_BYTES: u64 = 16 << 20;

/// Pixels in 8-bit RGB, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// `[height][width][3]`.
    pub(crate) rgb: Vec<u8>,
}

impl Pixels {
    /// An image of these bytes, `[height][width][3]`; nothing where they are not as many or none.
    pub fn new(width: u32, height: u32, rgb: Vec<u8>) -> Option<Self> {
        let bytes = u64::from(width) * u64::from(height) * 3;
        let fits = bytes > 0 && rgb.len() as u64 == bytes;
        fits.then_some(Pixels { width, height, rgb })
    }

    /// Columns.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The bytes, `[height][width][3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

/// Decodes a PNG, JPEG, WebP or GIF file, whichever its first bytes say it is: the first frame, in
/// its EXIF orientation, on white where it is transparent, at 8 bits a channel. CPU-bound.
///
/// # Errors
/// [`ImageError`], where the file is of another format, damaged, or beyond the bounds. An image of
/// too many pixels is refused by its header.
pub fn decode(bytes: &[u8], bounds: Bounds) -> Result<Pixels, ImageError> {
    if bytes.is_empty() {
        return Err(ImageError::Empty);
    }
    if bytes.len() > bounds.bytes {
        return Err(ImageError::TooManyBytes {
            bytes: bytes.len(),
            max: bounds.bytes,
        });
    }
    let format = format_of(bytes).ok_or(ImageError::UnknownFormat)?;
    let damaged = |why: &dyn std::fmt::Display| ImageError::Damaged {
        format: name_of(format),
        why: why.to_string(),
    };
    let mut limits = Limits::no_limits();
    let most = bounds.pixels.saturating_mul(DECODER_BYTES_A_PIXEL);
    limits.max_alloc = Some(most.saturating_add(DECODER_BYTES));
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits.clone());
    let mut decoder = reader.into_decoder().map_err(|error| damaged(&error))?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > bounds.pixels {
        return Err(ImageError::TooManyPixels {
            width,
            height,
            max: bounds.pixels,
        });
    }
    decoder
        .set_limits(limits)
        .map_err(|error| damaged(&error))?;
    // A file whose EXIF data cannot be read is shown as it lies.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut decoded = DynamicImage::from_decoder(decoder).map_err(|error| damaged(&error))?;
    decoded.apply_orientation(orientation);
    let rgb = on_white(decoded);
    let (width, height) = rgb.dimensions();
    Pixels::new(width, height, rgb.into_raw()).ok_or(ImageError::Empty)
}

/// The format by the first bytes.
fn format_of(bytes: &[u8]) -> Option<ImageFormat> {
    let format = image::guess_format(bytes).ok()?;
    let is_read = matches!(
        format,
        ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif
    );
    is_read.then_some(format)
}

fn name_of(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Png => "PNG",
        ImageFormat::Jpeg => "JPEG",
        ImageFormat::WebP => "WebP",
        _ => "GIF",
    }
}

/// Without transparency: what lets the background through shows white.
fn on_white(image: DynamicImage) -> RgbImage {
    if !image.color().has_alpha() {
        return image.into_rgb8();
    }
    let rgba = image.into_rgba8();
    let mut rgb = RgbImage::new(rgba.width(), rgba.height());
    for (from, to) in rgba.pixels().zip(rgb.pixels_mut()) {
        let [r, g, b, a] = from.0.map(u32::from);
        // Rounded to the nearest.
        *to = Rgb([r, g, b].map(|c| ((c * a + 255 * (255 - a) + 127) / 255) as u8));
    }
    rgb
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;

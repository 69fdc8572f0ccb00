//! Decodes image files to 8-bit RGB, within limits.

use std::io::{self, BufRead, Cursor, Read, Seek, SeekFrom};
use std::time::Instant;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, Rgb, RgbImage};

use crate::error::ImageError;

/// Limits of decoding an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum size of the file in bytes.
    pub bytes: usize,
    /// Maximum number of pixels before resizing. Decoding needs up to 16 bytes for each.
    pub pixels: u64,
    /// Time at which decoding is given up.
    pub deadline: Option<Instant>,
}

impl Default for Bounds {
    /// Default limits: 32 MiB and 64 Mi pixels, more than cameras of phones make.
    fn default() -> Self {
        Bounds {
            bytes: 32 << 20,
            pixels: 64 << 20,
            deadline: None,
        }
    }
}

/// Maximum bytes per pixel of decoding and resizing: four channels of 16 bits, twice for a frame
/// that is composed or rotated.
const DECODER_BYTES_A_PIXEL: u64 = 16;
/// Additional maximum bytes of decoding, for tables and lines.
const DECODER_BYTES: u64 = 4 << 20;
/// Maximum number of pixels times scans of a JPEG file: each scan visits all pixels, and may have
/// only a few bytes.
const SCANNED_PIXELS_MAX: u64 = 1 << 30;

/// Size and format from the header of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of columns as stored; an EXIF orientation may swap columns and rows.
    pub width: u32,
    /// Number of rows as stored.
    pub height: u32,
}

impl Header {
    /// Maximum number of bytes that decoding and resizing need besides the file and the result.
    pub fn decoding_bytes(&self) -> u64 {
        let pixels = u64::from(self.width) * u64::from(self.height);
        pixels * DECODER_BYTES_A_PIXEL + DECODER_BYTES
    }
}

/// An image in 8-bit RGB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// Channel values, `[height][width][3]`.
    pub(crate) rgb: Vec<u8>,
}

impl Pixels {
    /// An image with these values, `[height][width][3]`; `None` if their number does not match or
    /// is 0.
    pub fn new(width: u32, height: u32, rgb: Vec<u8>) -> Option<Self> {
        let bytes = u64::from(width) * u64::from(height) * 3;
        let fits = bytes > 0 && rgb.len() as u64 == bytes;
        fits.then_some(Pixels { width, height, rgb })
    }

    /// Number of columns.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Number of rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Channel values, `[height][width][3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

/// Reads the header of a PNG, JPEG, WebP or GIF file, detected by its first bytes. Needs no memory
/// for pixels.
///
/// # Errors
/// [`ImageError`], if the file has another format, a damaged header, or exceeds the
/// limits.
pub fn header(bytes: &[u8], bounds: Bounds) -> Result<Header, ImageError> {
    opened(bytes, bounds).map(|opened| opened.header)
}

/// Decodes a PNG, JPEG, WebP or GIF file, detected by its first bytes: the first frame, in its EXIF
/// orientation, on white where it is transparent, at 8 bits a channel. CPU-bound.
///
/// # Errors
/// [`ImageError`], if the file has another format, is damaged, or exceeds the limits. An
/// image of too many pixels is rejected by its header.
pub fn decode(bytes: &[u8], bounds: Bounds) -> Result<Pixels, ImageError> {
    let Opened {
        format,
        header,
        mut decoder,
    } = opened(bytes, bounds)?;
    let damaged = |why: &dyn std::fmt::Display| match bounds.is_over() {
        true => ImageError::TooSlow,
        false => damaged(format, why),
    };
    if format == ImageFormat::Jpeg {
        check_scans(bytes, header)?;
    }
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(header.decoding_bytes());
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

/// A decoder whose file's header was read, with the header.
struct Opened<D> {
    format: ImageFormat,
    header: Header,
    decoder: D,
}

/// Reads and checks a file's header.
fn opened(bytes: &[u8], bounds: Bounds) -> Result<Opened<impl ImageDecoder + '_>, ImageError> {
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
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(DECODER_BYTES + bytes.len() as u64);
    let timed = Timed {
        bytes: Cursor::new(bytes),
        bounds,
    };
    let mut reader = ImageReader::with_format(timed, format);
    reader.limits(limits);
    let decoder = reader.into_decoder();
    let decoder = decoder.map_err(|error| match bounds.is_over() {
        true => ImageError::TooSlow,
        false => damaged(format, &error),
    })?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > bounds.pixels {
        return Err(ImageError::TooManyPixels {
            width,
            height,
            max: bounds.pixels,
        });
    }
    Ok(Opened {
        format,
        header: Header { width, height },
        decoder,
    })
}

fn damaged(format: ImageFormat, why: &dyn std::fmt::Display) -> ImageError {
    ImageError::Damaged {
        format: name_of(format),
        why: why.to_string(),
    }
}

impl Bounds {
    /// Whether the deadline has passed.
    fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// A reader over bytes that fails after a deadline, for decoders that read incrementally.
struct Timed<'a> {
    bytes: Cursor<&'a [u8]>,
    bounds: Bounds,
}

impl Timed<'_> {
    fn check(&self) -> io::Result<()> {
        match self.bounds.is_over() {
            true => Err(io::Error::new(io::ErrorKind::TimedOut, "out of time")),
            false => Ok(()),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.bytes.read(into)
    }
}

impl BufRead for Timed<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.check()?;
        // In pieces, so that the next one is asked for in time.
        let rest = self.bytes.fill_buf()?;
        Ok(&rest[..rest.len().min(64 << 10)])
    }

    fn consume(&mut self, n: usize) {
        self.bytes.consume(n);
    }
}

impl Seek for Timed<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.bytes.seek(to)
    }
}

/// Rejects a JPEG file whose scans visit too many pixels together: its decoder reads the whole file
/// first, so that no deadline ends it.
fn check_scans(bytes: &[u8], header: Header) -> Result<(), ImageError> {
    let pixels = u64::from(header.width) * u64::from(header.height);
    let scans = scans(bytes);
    if pixels.saturating_mul(scans) > SCANNED_PIXELS_MAX {
        return Err(ImageError::TooManyScans {
            scans,
            max: SCANNED_PIXELS_MAX / pixels.max(1),
        });
    }
    Ok(())
}

/// Number of scans of a JPEG file: segments that begin with the marker SOS.
fn scans(bytes: &[u8]) -> u64 {
    const SOS: u8 = 0xda;
    let (mut scans, mut at) = (0, 2);
    while at + 4 <= bytes.len() {
        // What is no marker is data of a scan, in which 0xff has 0 or a restart behind it.
        let (mark, kind) = (bytes[at], bytes[at + 1]);
        if mark != 0xff || matches!(kind, 0 | 0xd0..=0xd8 | 0xff) {
            at += 1;
            continue;
        }
        if kind == 0xd9 {
            break;
        }
        scans += u64::from(kind == SOS);
        at += 2 + usize::from(u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]));
    }
    scans
}

/// The format of a file by its first bytes.
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

/// The image on a white background instead of transparency.
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

//! Errors of decoding and resizing images.

/// An image cannot be used. The messages name what is wrong and what is allowed; the caller puts
/// the place of the image in a request before them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The file has no bytes, or the image no pixels.
    #[error("the image is empty")]
    Empty,
    /// The file is larger than the limit.
    #[error("the image file has {bytes} bytes; at most {max} are read")]
    TooManyBytes {
        /// Size of the file in bytes.
        bytes: usize,
        /// Maximum size in bytes.
        max: usize,
    },
    /// The first bytes are not those of a supported format.
    #[error("the image is no PNG, JPEG, WebP or GIF file")]
    UnknownFormat,
    /// The file is invalid in its format, or ends early.
    #[error("the {format} file is damaged: {why}")]
    Damaged {
        /// Name of the format.
        format: &'static str,
        /// The decoder's error message.
        why: String,
    },
    /// The image has more pixels than the limit.
    #[error("the image has {width} x {height} pixels; at most {max} pixels are read")]
    TooManyPixels {
        /// Number of columns.
        width: u32,
        /// Number of rows.
        height: u32,
        /// Maximum number of pixels.
        max: u64,
    },
    /// The JPEG file has too many scans, which visit the same pixels repeatedly.
    #[error(
        "the JPEG file has {scans} scans; at its size at most {max} are read: save it again, not \
         progressive"
    )]
    TooManyScans {
        /// Number of scans of the JPEG file.
        scans: u64,
        /// Maximum number of scans.
        max: u64,
    },
    /// Decoding did not end before the deadline.
    #[error("the image takes too long to decode; send a smaller one")]
    TooSlow,
    /// The image's aspect ratio is too extreme.
    #[error("the image has {width} x {height} pixels; one side may be {max} times the other")]
    TooNarrow {
        /// Number of columns.
        width: u32,
        /// Number of rows.
        height: u32,
        /// Maximum ratio of the longer to the shorter side.
        max: u32,
    },
}

//! Why an image is refused.

/// Why an image is refused. The texts name what is wrong and what would be right; the caller puts
/// the place of the image in a request before them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// No byte is there.
    #[error("the image is empty")]
    Empty,
    /// The file is longer than the bound.
    #[error("the image file has {bytes} bytes; at most {max} are read")]
    TooManyBytes {
        /// The file's length.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// The first bytes are those of no format that is read.
    #[error("the image is no PNG, JPEG, WebP or GIF file")]
    UnknownFormat,
    /// The file breaks its format's rules, or ends early.
    #[error("the {format} file is damaged: {why}")]
    Damaged {
        /// The format's name.
        format: &'static str,
        /// What the decoder says.
        why: String,
    },
    /// More pixels than the bound.
    #[error("the image has {width} x {height} pixels; at most {max} pixels are read")]
    TooManyPixels {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
        /// The bound.
        max: u64,
    },
    /// The file has the same pixels over and over.
    #[error(
        "the JPEG file has {scans} scans; at its size at most {max} are read: save it again, not \
         progressive"
    )]
    TooManyScans {
        /// Number of scans of the JPEG file.
        scans: u64,
        /// The bound.
        max: u64,
    },
    /// The deadline has passed.
    #[error("the image takes too long to decode; send a smaller one")]
    TooSlow,
    /// A side is too long for the other.
    #[error("the image has {width} x {height} pixels; one side may be {max} times the other")]
    TooNarrow {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
        /// The bound.
        max: u32,
    },
}

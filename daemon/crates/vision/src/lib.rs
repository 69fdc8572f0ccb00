//! From the bytes of an image file to the patches that a vision tower reads.
//!
//! ```text
//! bytes --decode--> 8-bit RGB --resize--> a multiple of the merged patch --patches--> f32 rows
//!         bounds,     as Pillow's          between the least and the          normalised, in the
//!       orientation    bicubic filter       most pixels of the rules           order of merges
//! ```
//!
//! Formats are told by their first bytes, not by what a client calls them: PNG, JPEG, WebP and GIF,
//! of which the first frame counts. An image is turned as its EXIF orientation says, and what is
//! transparent is put on white, since a tower knows no transparency.
//!
//! *Invariant:* no image costs more memory than [`Bounds`] allow, whatever its header says (test
//! `an_image_that_says_it_is_huge_is_refused_by_its_header`).

#![forbid(unsafe_code)]

mod decode;
mod error;
mod patches;
mod resize;
mod rules;

pub use decode::{Bounds, Header, Pixels, decode, header};
pub use error::ImageError;
pub use patches::{Charge, PreparedImage, prepare, prepare_all};
pub use resize::resize;
pub use rules::{Filter, Rules, Size, Sizes, Tiles};

#[cfg(test)]
mod testing;

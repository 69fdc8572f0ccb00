//! Decompresses bodies of requests (`Content-Encoding`), within bounds: a body of some bytes may
//! stand for a thousand times as many.

use std::io::Read;
use std::time::Duration;

use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::sum::Held;

/// Accepted content codings, as a header lists them.
pub(super) const ACCEPTED: &str = "gzip, deflate, identity";
/// Delay after which a client should retry when too many bytes are being read.
const RETRY: Duration = Duration::from_secs(1);
/// Number of bytes that are unpacked before they are counted.
const STEP_BYTES: usize = 64 << 10;
/// Low bits of the first byte of a zlib stream, which mean deflate.
const ZLIB_METHOD: u8 = 8;

/// Content coding of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// The bytes are not compressed.
    Plain,
    /// gzip, of one member or several.
    Gzip,
    /// deflate, within zlib as in RFC 9110, or raw as some clients send it.
    Deflate,
}

impl Coding {
    /// Parses the value of `Content-Encoding`; `None` for an unsupported one, or several. Some
    /// clients put the charset there.
    pub(super) fn of(value: &[u8]) -> Option<Self> {
        let mut coding = Self::Plain;
        for name in value.split(|&byte| byte == b',') {
            let is = |names: &[&str]| {
                let name = name.trim_ascii();
                names
                    .iter()
                    .any(|of| name.eq_ignore_ascii_case(of.as_bytes()))
            };
            let found = match () {
                () if is(&["", "identity", "utf-8", "utf8"]) => continue,
                () if is(&["gzip", "x-gzip"]) => Self::Gzip,
                () if is(&["deflate"]) => Self::Deflate,
                () => return None,
            };
            if coding != Self::Plain {
                return None;
            }
            coding = found;
        }
        Some(coding)
    }

    /// Unpacks a body to at most `max` bytes, which `held` counts in addition to the received ones.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if the bytes are invalid or incomplete, or unpack to too many;
    /// [`too_many_at_once`] if there is no room.
    pub(super) fn unpack(
        self,
        bytes: &[u8],
        max: usize,
        held: &mut Held,
    ) -> Result<Vec<u8>, Failure> {
        match self {
            Self::Plain => Ok(bytes.to_vec()),
            Self::Gzip => self.read(MultiGzDecoder::new(bytes), max, held),
            Self::Deflate if is_zlib(bytes) => self.read(ZlibDecoder::new(bytes), max, held),
            Self::Deflate => self.read(DeflateDecoder::new(bytes), max, held),
        }
    }

    fn read(self, mut from: impl Read, max: usize, held: &mut Held) -> Result<Vec<u8>, Failure> {
        let mut all = Vec::new();
        loop {
            let room = STEP_BYTES.min(max + 1 - all.len());
            let step = from.by_ref().take(room as u64).read_to_end(&mut all);
            let bytes = step.map_err(|error| {
                let name = self.name();
                let message = format!("it is not whole {name}, as Content-Encoding says: {error}");
                failure::invalid("body", &message)
            })?;
            if bytes == 0 {
                return Ok(all);
            }
            if all.len() > max {
                return Err(failure::body_too_large(max));
            }
            if !held.grow(bytes as u64) {
                return Err(too_many_at_once());
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "identity",
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }
}

/// Whether deflate data is within zlib: a header of two bytes whose value is a multiple of 31.
fn is_zlib(bytes: &[u8]) -> bool {
    match bytes {
        [first, second, ..] => {
            first & 0x0f == ZLIB_METHOD && u16::from_be_bytes([*first, *second]).is_multiple_of(31)
        }
        _ => false,
    }
}

/// RESOURCE_EXHAUSTED: the requests that arrive at once have too many bytes together.
pub(super) fn too_many_at_once() -> Failure {
    failure::exhausted(
        "too many bytes of requests arrive at once; try again in a second",
        RETRY,
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use rocmforge_service::sum::Sum;

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut to = GzEncoder::new(Vec::new(), Compression::default());
        to.write_all(text).unwrap();
        to.finish().unwrap()
    }

    fn unpack(coding: Coding, bytes: &[u8], max: usize) -> Result<Vec<u8>, Failure> {
        let sum = Sum::new(1 << 20);
        coding.unpack(bytes, max, &mut sum.hold(1))
    }

    #[test]
    fn codings_are_told_by_their_names() {
        for plain in ["identity", "UTF-8", " identity", "", "identity, identity"] {
            assert_eq!(Coding::of(plain.as_bytes()), Some(Coding::Plain), "{plain}");
        }
        for packed in ["gzip", "x-gzip", " GZIP ", "identity, gzip"] {
            assert_eq!(
                Coding::of(packed.as_bytes()),
                Some(Coding::Gzip),
                "{packed}"
            );
        }
        assert_eq!(Coding::of(b"deflate"), Some(Coding::Deflate));
        for other in ["br", "zstd", "gzip, gzip", "gzip, deflate", "gzip;q=1"] {
            assert_eq!(Coding::of(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn each_coding_gives_the_bytes_that_were_packed() {
        let text = "{\"a\": \"\u{e9}\"}".repeat(9000);
        let text = text.as_bytes();
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::best());
        zlib.write_all(text).unwrap();
        let mut bare = DeflateEncoder::new(Vec::new(), Compression::fast());
        bare.write_all(text).unwrap();
        let (first, second) = text.split_at(7);
        for (coding, packed) in [
            (Coding::Gzip, gzip(text)),
            (Coding::Gzip, [gzip(first), gzip(second)].concat()),
            (Coding::Deflate, zlib.finish().unwrap()),
            (Coding::Deflate, bare.finish().unwrap()),
            (Coding::Plain, text.to_vec()),
        ] {
            let unpacked = unpack(coding, &packed, text.len());
            assert!(unpacked.unwrap() == text, "{coding:?}");
        }
    }

    #[test]
    fn what_is_broken_or_too_much_is_refused() {
        let packed = gzip(&[b' '; 100_000]);
        assert!(packed.len() < 1000);
        let refused = unpack(Coding::Gzip, &packed, 99_999).unwrap_err();
        assert!(refused.message().contains("99999"), "{refused:?}");
        assert_eq!(
            unpack(Coding::Gzip, &packed, 100_000).unwrap().len(),
            100_000
        );
        let cut = unpack(Coding::Gzip, &packed[..packed.len() - 4], 100_000).unwrap_err();
        assert!(cut.message().contains("not whole gzip"), "{cut:?}");
        for bytes in [&b"{\"a\": 1}"[..], b"", &packed[..3]] {
            assert!(unpack(Coding::Gzip, bytes, 1000).is_err(), "{bytes:?}");
        }
        let wrong = unpack(Coding::Deflate, b"{\"a\": 1}", 1000).unwrap_err();
        assert!(wrong.message().contains("not whole deflate"), "{wrong:?}");
        // What is unpacked counts for what may arrive at once.
        let sum = Sum::new(80_000);
        let full = Coding::Gzip.unpack(&packed, 100_000, &mut sum.hold(1));
        assert!(full.unwrap_err().retry_after().is_some());
    }
}

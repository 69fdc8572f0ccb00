//! What goes over the socket between a renderer and its child: frames of a
//! length and bytes, one each way a chat.

use std::io::{self, Read, Write};

use super::super::engine::Failure;
use super::super::{MAX_CHAT_BYTES, MAX_CHAT_INPUT_BYTES, MAX_TEMPLATE_BYTES};

/// Bytes that a frame may have.
pub(super) const FRAME_BYTES_MAX: usize = MAX_CHAT_INPUT_BYTES + MAX_TEMPLATE_BYTES + 64;
const _: () = assert!(MAX_CHAT_BYTES < FRAME_BYTES_MAX);

/// What an answer is, its first byte.
const TEXT: u8 = b'T';
const FAILURE: u8 = b'F';
/// Bit of a reply whose child has become too large to be used again.
const RETIRES: u8 = 0x80;

/// A template and its variables as JSON.
pub(super) fn request(template: &str, variables: &[u8]) -> Vec<u8> {
    let len = 4 + template.len() + variables.len();
    let mut frame = Vec::with_capacity(4 + len);
    frame.extend_from_slice(&(len as u32).to_le_bytes());
    frame.extend_from_slice(&(template.len() as u32).to_le_bytes());
    frame.extend_from_slice(template.as_bytes());
    frame.extend_from_slice(variables);
    frame
}

/// Undoes [`request`], without its length.
pub(super) fn parse_request(frame: &[u8]) -> Option<(&str, &[u8])> {
    let (len, rest) = frame.split_first_chunk()?;
    let (template, variables) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((std::str::from_utf8(template).ok()?, variables))
}

/// Answers a request.
pub(super) fn write_answer(
    out: &mut impl Write,
    answer: &Result<String, Failure>,
    retires: bool,
) -> io::Result<()> {
    let failure;
    let (kind, bytes) = match answer {
        Ok(text) => (TEXT, text.as_bytes()),
        Err(error) => {
            failure = serde_json::to_vec(error)?;
            (FAILURE, failure.as_slice())
        }
    };
    out.write_all(&(bytes.len() as u32 + 1).to_le_bytes())?;
    out.write_all(&[kind | if retires { RETIRES } else { 0 }])?;
    out.write_all(bytes)
}

/// Undoes [`write_answer`], without its length: the answer, and whether the
/// child retires.
pub(super) fn parse_answer(frame: Vec<u8>) -> Option<(Result<String, Failure>, bool)> {
    let kind = *frame.first()?;
    let answer = match kind & !RETIRES {
        TEXT => {
            let mut bytes = frame;
            bytes.drain(..1);
            Ok(String::from_utf8(bytes).ok()?)
        }
        FAILURE => Err(serde_json::from_slice(&frame[1..]).ok()?),
        _ => return None,
    };
    Some((answer, kind & RETIRES != 0))
}

/// Reads one frame; `None` where the other side has closed.
pub(super) fn read_frame(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 4];
    match from.read_exact(&mut len) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut frame = vec![0; len];
    from.read_exact(&mut frame)?;
    Ok(Some(frame))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_arrives() {
        let sent = request("{{ a }}", b"{}");
        let frame = read_frame(&mut sent.as_slice()).unwrap().unwrap();
        assert_eq!(parse_request(&frame), Some(("{{ a }}", &b"{}"[..])));
        for (answer, retires) in [
            (Ok("é".to_owned()), false),
            (Err(Failure::Raised("no".to_owned())), true),
        ] {
            let mut sent = Vec::new();
            write_answer(&mut sent, &answer, retires).unwrap();
            let frame = read_frame(&mut sent.as_slice()).unwrap().unwrap();
            assert_eq!(parse_answer(frame), Some((answer, retires)));
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        assert!(read_frame(&mut &[][..]).unwrap().is_none());
        assert!(read_frame(&mut &[9, 0, 0, 0, 1][..]).is_err());
        assert!(read_frame(&mut &[0xFF; 8][..]).is_err());
        for frame in [&b""[..], b"\xFF\xFF\0\0a", b"\x02\0\0\0\xFF\xFF"] {
            assert_eq!(parse_request(frame), None);
        }
        for frame in [&b""[..], b"T\xFF", b"Fx", b"?"] {
            assert_eq!(parse_answer(frame.to_vec()), None);
        }
    }
}

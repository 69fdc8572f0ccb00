//! The byte-level alphabet of GPT-2: each byte written as one printable
//! character, so that vocabularies and merges can be stored as text.
//!
//! Printable Latin-1 bytes stand for themselves, the other 68 bytes for
//! U+0100 onwards in order. Format reference: `bytes_to_unicode` in the GPT-2
//! encoder.

/// Characters of the alphabet lie below this code point.
const ALPHABET_END: usize = 0x144;

const fn stands_for_itself(byte: usize) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// Code point that stands for each byte.
const BYTE_TO_CHAR: [u16; 256] = {
    let mut table = [0; 256];
    let (mut byte, mut next) = (0, 0x100);
    while byte < 256 {
        if stands_for_itself(byte) {
            table[byte] = byte as u16;
        } else {
            table[byte] = next;
            next += 1;
        }
        byte += 1;
    }
    table
};

/// Byte that each code point stands for; -1 for none.
const CHAR_TO_BYTE: [i16; ALPHABET_END] = {
    let mut table = [-1; ALPHABET_END];
    let mut byte = 0;
    while byte < 256 {
        table[BYTE_TO_CHAR[byte] as usize] = byte as i16;
        byte += 1;
    }
    table
};

/// Appends the alphabet's character for `byte`, in UTF-8.
pub(crate) fn push_char(byte: u8, out: &mut Vec<u8>) {
    let c = BYTE_TO_CHAR[usize::from(byte)];
    if c < 0x80 {
        out.push(c as u8);
    } else {
        out.extend_from_slice(&[0xC0 | (c >> 6) as u8, 0x80 | (c & 0x3F) as u8]);
    }
}

/// Appends the bytes that `text` stands for. What is not of the alphabet is
/// kept as it is: added tokens are stored as plain text.
pub(crate) fn push_bytes(text: &[u8], out: &mut Vec<u8>) {
    let mut i = 0;
    while i < text.len() {
        let first = text[i];
        if first < 0x80 {
            out.push(first);
            i += 1;
            continue;
        }
        if matches!(first, 0xC2..=0xC5)
            && let Some(&second) = text.get(i + 1)
            && second & 0xC0 == 0x80
        {
            let c = usize::from(first & 0x1F) << 6 | usize::from(second & 0x3F);
            match CHAR_TO_BYTE.get(c) {
                Some(&byte) if byte >= 0 => out.push(byte as u8),
                _ => out.extend_from_slice(&[first, second]),
            }
            i += 2;
            continue;
        }
        out.push(first);
        i += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives_the_alphabet() {
        let all: Vec<u8> = (0..=255).collect();
        let mut text = Vec::new();
        all.iter().for_each(|&b| push_char(b, &mut text));
        let text = String::from_utf8(text).unwrap();
        assert_eq!(text.chars().count(), 256);
        assert!(text.chars().all(|c| !c.is_whitespace() && !c.is_control()));
        let mut back = Vec::new();
        push_bytes(text.as_bytes(), &mut back);
        assert_eq!(back, all);
    }

    #[test]
    fn known_characters_of_the_alphabet() {
        let mut text = Vec::new();
        b" \n\xE3".iter().for_each(|&b| push_char(b, &mut text));
        assert_eq!(String::from_utf8(text).unwrap(), "ĠĊã");
    }

    #[test]
    fn text_outside_of_the_alphabet_is_kept() {
        let mut out = Vec::new();
        push_bytes("\u{80}▁中\u{a0}".as_bytes(), &mut out);
        assert_eq!(out, "\u{80}▁中\u{a0}".as_bytes());
        out.clear();
        push_bytes(b"\xC2", &mut out);
        push_bytes(b"\xC3\xFF", &mut out);
        assert_eq!(out, b"\xC2\xC3\xFF");
    }
}

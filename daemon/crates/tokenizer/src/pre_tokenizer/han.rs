//! Chinese characters: the script property Han of Unicode 16.

/// First and last of each range, ascending.
const RANGES: [(u32, u32); 22] = [
    (0x2E80, 0x2E99),
    (0x2E9B, 0x2EF3),
    (0x2F00, 0x2FD5),
    (0x3005, 0x3005),
    (0x3007, 0x3007),
    (0x3021, 0x3029),
    (0x3038, 0x303B),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFA6D),
    (0xFA70, 0xFAD9),
    (0x16FE2, 0x16FE3),
    (0x16FF0, 0x16FF1),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B739),
    (0x2B740, 0x2B81D),
    (0x2B820, 0x2CEA1),
    (0x2CEB0, 0x2EBE0),
    (0x2EBF0, 0x2EE5D),
    (0x2F800, 0x2FA1D),
    (0x30000, 0x3134A),
    (0x31350, 0x323AF),
];

/// True for a Chinese character.
pub(super) fn is_han(c: char) -> bool {
    let c = u32::from(c);
    if c < RANGES[0].0 {
        return false;
    }
    let at = RANGES.partition_point(|&(_, last)| last < c);
    RANGES.get(at).is_some_and(|&(first, _)| first <= c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_agrees_with_the_regex_engine_on_every_character() {
        let regex = fancy_regex::Regex::new(r"\p{Han}").unwrap();
        let mut buffer = [0; 4];
        for c in '\0'..=char::MAX {
            let expected = regex.is_match(c.encode_utf8(&mut buffer)).unwrap();
            assert_eq!(is_han(c), expected, "{c:?} {:X}", u32::from(c));
        }
    }
}

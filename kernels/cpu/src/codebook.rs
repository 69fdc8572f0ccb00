//! The codebooks of IQ1, IQ2 and IQ3: which groups of 4 or 8 values an index stands for.
//!
//! The numbers are ggml's and are in `kernels/gpu/hip/codebook_*.h`, one file a codebook, where the
//! device's kernels read them too. Here they become words of four bytes as the products want them,
//! so that a block is gathered and not computed.

/// Entry n of a codebook: four values a word, eight (two words) in all but IQ3's.
pub(crate) static IQ2_XXS: [i32; 512] = words(&IQ2_XXS_CODES, 2, &IQ2_PLUS_64);
/// Codebook of IQ2_XS.
pub(crate) static IQ2_XS: [i32; 1024] = words(&IQ2_XS_CODES, 2, &IQ2_PLUS_64);
/// Codebook of IQ2_S.
pub(crate) static IQ2_S: [i32; 2048] = words(&IQ2_S_CODES, 2, &IQ2_PLUS_64);
/// Codebook of IQ3_XXS.
pub(crate) static IQ3_XXS: [i32; 256] = words(&IQ3_XXS_CODES, 4, &IQ3_XXS_PLUS_64);
/// Codebook of IQ3_S.
pub(crate) static IQ3_S: [i32; 512] = words(&IQ3_S_CODES, 4, &IQ3_S_PLUS_64);
/// Codebook of IQ1_S and IQ1_M: eight times the value, plus one.
pub(crate) static IQ1: [i32; 4096] = words(&IQ1_CODES, 2, &IQ1_PLUS_64);

/// What the codes stand for.
pub(crate) const IQ2_VALUES: [u8; 3] = [8, 25, 43];
/// Codebook of IQ3_XXS.
pub(crate) const IQ3_XXS_VALUES: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

const IQ2_PLUS_64: [u8; 3] = [64 + 8, 64 + 25, 64 + 43];
const IQ3_XXS_PLUS_64: [u8; 8] = [68, 76, 84, 92, 100, 108, 116, 126];
const IQ3_S_PLUS_64: [u8; 8] = [65, 67, 69, 71, 73, 75, 77, 79];
const IQ1_PLUS_64: [u8; 3] = [64 - 8 + 1, 64 + 1, 64 + 8 + 1];

/// The codes of each entry, lowest bits first: 8 of 2 bits or 4 of 4 bits.
pub(crate) const IQ2_XXS_CODES: [u16; 256] =
    numbers(include_bytes!("../../gpu/hip/codebook_iq2_xxs.h"));
/// Codebook of IQ2_XS.
pub(crate) const IQ2_XS_CODES: [u16; 512] =
    numbers(include_bytes!("../../gpu/hip/codebook_iq2_xs.h"));
/// Codebook of IQ2_S.
pub(crate) const IQ2_S_CODES: [u16; 1024] =
    numbers(include_bytes!("../../gpu/hip/codebook_iq2_s.h"));
/// Codebook of IQ3_XXS.
pub(crate) const IQ3_XXS_CODES: [u16; 256] =
    numbers(include_bytes!("../../gpu/hip/codebook_iq3_xxs.h"));
/// Codebook of IQ3_S.
pub(crate) const IQ3_S_CODES: [u16; 512] =
    numbers(include_bytes!("../../gpu/hip/codebook_iq3_s.h"));
/// Codebook of IQ1_S and IQ1_M.
pub(crate) const IQ1_CODES: [u16; 2048] = numbers(include_bytes!("../../gpu/hip/codebook_iq1.h"));

/// The numbers `0x....` of a text, which has exactly N.
const fn numbers<const N: usize>(text: &[u8]) -> [u16; N] {
    let mut numbers = [0; N];
    let (mut found, mut at) = (0, 0);
    while at + 6 <= text.len() {
        if text[at] == b'0' && text[at + 1] == b'x' {
            let (a, b) = (digit(text[at + 2]), digit(text[at + 3]));
            let (c, d) = (digit(text[at + 4]), digit(text[at + 5]));
            numbers[found] = (a << 12) | (b << 8) | (c << 4) | d;
            found += 1;
            at += 6;
        } else {
            at += 1;
        }
    }
    assert!(found == N, "the codebook has another number of entries");
    numbers
}

const fn digit(hex: u8) -> u16 {
    match hex {
        b'0'..=b'9' => (hex - b'0') as u16,
        b'a'..=b'f' => (hex - b'a') as u16 + 10,
        _ => panic!("a codebook has numbers of four lower-case hexadecimal digits"),
    }
}

/// Each code of `bits` bits as a byte of `values`, four to a word.
const fn words<const N: usize, const WORDS: usize>(
    codes: &[u16; N],
    bits: u32,
    values: &[u8],
) -> [i32; WORDS] {
    let each = WORDS / N;
    assert!(each * 4 * bits as usize == 16, "an entry is 16 bits");
    let mut words = [0; WORDS];
    let mut i = 0;
    while i < WORDS {
        let mut b = 0;
        while b < 4 {
            let shift = bits * (4 * (i % each) as u32 + b);
            let code = (codes[i / each] >> shift) & ((1 << bits) - 1);
            words[i] |= (values[code as usize] as i32) << (8 * b);
            b += 1;
        }
        i += 1;
    }
    words
}

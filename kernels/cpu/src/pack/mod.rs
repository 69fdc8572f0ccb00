//! From the file's rows to packed groups, at upload. The packed layout is described in `formats`.
//!
//! Packing moves words; the only arithmetic is single bits (fifth ones, signs), 6-bit scales
//! and Q8_0's sign. It looks at every scale on the way, so that a damaged file is refused
//! before a product sees it.

mod blocks32;
mod codebooks;
mod few_bits;
mod floats;
mod iq4;
mod k_quants;

use std::ops::Range;

use super::formats::{self, Format, Group, PLANE_ENTRY, TILE_BLOCKS, Tile, has_plane, tile_bytes};
use super::matmul::dispatch::{WithFormat, with_format};
use super::simd::{Avx2, Job, ROWS, Simd};
use super::{Error, Isa, WeightType};

/// Rows in a group: the unit in which matrices are packed and divided among workers.
pub const ROW_GROUP: usize = ROWS;

/// The packed layout of one matrix: `rows` outputs by `cols` inputs (contiguous in
/// the file). Holds no weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedMatrix {
    ty: WeightType,
    rows: usize,
    cols: usize,
    isa: Isa,
    group_bytes: usize,
}

impl PackedMatrix {
    /// The layout of `rows` by `cols` weights of type `ty`, to be multiplied with `isa`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a size of zero or beyond the address space, [`Error::Block`] if `cols`
    /// is not a whole number of blocks.
    pub fn new(ty: WeightType, rows: usize, cols: usize, isa: Isa) -> Result<PackedMatrix, Error> {
        let shape = || Error::Shape { ty, rows, cols };
        if rows == 0 || cols == 0 {
            return Err(shape());
        }
        if !cols.is_multiple_of(ty.block_size()) {
            return Err(Error::Block {
                ty,
                cols,
                block: ty.block_size(),
            });
        }
        let row_bytes = (cols / ty.block_size())
            .checked_mul(ty.block_bytes())
            .ok_or_else(shape)?;
        let group_bytes = row_bytes
            .checked_mul(ROWS)
            .and_then(|bytes| bytes.checked_next_multiple_of(64))
            .ok_or_else(shape)?;
        let total = group_bytes
            .checked_mul(rows.div_ceil(ROWS))
            .ok_or_else(shape)?;
        if isize::try_from(total).is_err() {
            return Err(shape());
        }
        Ok(PackedMatrix {
            ty,
            rows,
            cols,
            isa,
            group_bytes,
        })
    }

    /// Type of the weights.
    pub fn ty(&self) -> WeightType {
        self.ty
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The instruction set that multiplies. The layout does not depend on it.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Groups, the last one padded with zeros.
    pub fn row_groups(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    /// Bytes of a packed group, a multiple of 64.
    pub fn group_bytes(&self) -> usize {
        self.group_bytes
    }

    /// Bytes of the packed matrix. Best aligned to 64; any alignment works.
    pub fn packed_bytes(&self) -> usize {
        self.group_bytes * self.row_groups()
    }

    /// Bytes of a row in the file.
    pub fn file_row_bytes(&self) -> usize {
        self.cols / self.ty.block_size() * self.ty.block_bytes()
    }

    /// Where the rows of these groups are in the file's matrix.
    pub fn file_range(&self, groups: Range<usize>) -> Range<usize> {
        let at = |group: usize| (group * ROWS).min(self.rows) * self.file_row_bytes();
        at(groups.start)..at(groups.end)
    }

    /// Where these groups are in the packed matrix.
    pub fn packed_range(&self, groups: Range<usize>) -> Range<usize> {
        groups.start * self.group_bytes..groups.end * self.group_bytes
    }

    /// Packs some groups: `file_bytes` is [`file_range`](Self::file_range) of the matrix, `dst`
    /// becomes [`packed_range`](Self::packed_range) of the packed one, every byte of it written.
    /// Several threads can pack one matrix.
    ///
    /// # Errors
    /// [`Error::Length`] if a slice has another length; [`Error::NotFinite`] if a scale, or in an
    /// unquantized type a weight, is NaN or infinite (`dst` is then unspecified).
    pub fn pack(
        &self,
        file_bytes: &[u8],
        row_groups: Range<usize>,
        dst: &mut [u8],
    ) -> Result<(), Error> {
        let ty = self.ty;
        assert!(
            row_groups.start <= row_groups.end && row_groups.end <= self.row_groups(),
            "row groups out of range"
        );
        let expected = self.file_range(row_groups.clone()).len();
        if file_bytes.len() != expected {
            return Err(Error::Length {
                what: "the file's row data",
                ty,
                expected,
                actual: file_bytes.len(),
            });
        }
        let expected = self.packed_range(row_groups.clone()).len();
        if dst.len() != expected {
            return Err(Error::Length {
                what: "the packed buffer",
                ty,
                expected,
                actual: dst.len(),
            });
        }
        let row_bytes = self.file_row_bytes();
        let groups = file_bytes
            .chunks(row_bytes * ROWS)
            .zip(dst.chunks_exact_mut(self.group_bytes));
        for (group, (rows, dst)) in row_groups.zip(groups) {
            let used = row_bytes * ROWS;
            if rows.len() < used {
                dst.fill(0);
            } else {
                dst[used..].fill(0);
            }
            let damaged = if ty.is_quantized() {
                self.pack_group(rows, dst)
            } else {
                let mut rows = rows.chunks_exact(row_bytes).enumerate();
                rows.find(|(r, row)| !floats::pack(ty, row, *r, dst))
                    .map(|(r, _)| r)
            };
            if let Some(r) = damaged {
                return Err(Error::NotFinite {
                    ty,
                    row: group * ROWS + r,
                });
            }
        }
        Ok(())
    }

    /// Packs the rows of a quantized group tile by tile, so that what is written stays in the L1
    /// cache. Yields the first row with a scale that is not finite.
    fn pack_group(&self, rows: &[u8], group: &mut [u8]) -> Option<usize> {
        let ty = self.ty;
        let (full, blocks, row_bytes) = (
            tile_bytes(ty, TILE_BLOCKS),
            self.cols / 32,
            self.file_row_bytes(),
        );
        let plane_at = if has_plane(ty) {
            blocks / TILE_BLOCKS * full
        } else {
            group.len()
        };
        let (tiles, plane) = group.split_at_mut(plane_at);
        let mut damaged = None;
        for first in (0..blocks).step_by(TILE_BLOCKS) {
            let (i, n) = (first / TILE_BLOCKS, TILE_BLOCKS.min(blocks - first));
            let dst = &mut tiles[i * full..][..tile_bytes(ty, n)];
            let plane = plane.as_chunks_mut::<PLANE_ENTRY>().0.get_mut(i);
            let at = first * 32 / ty.block_size() * ty.block_bytes();
            let bytes = n * 32 / ty.block_size() * ty.block_bytes();
            let share = rows
                .chunks_exact(row_bytes)
                .map(|row| &row[at..at + bytes])
                .enumerate();
            for (words, to) in k_quants::plain_words(ty) {
                let share = share.clone().map(|(_, src)| &src[words.clone()]);
                self.put_all_words(share, dst, *to);
            }
            let bad = pack_tile(ty, share, n, dst, plane);
            damaged = [damaged, bad].into_iter().flatten().min();
        }
        damaged
    }

    /// Puts words of each row into the rows' words of the lines from byte `at` on.
    fn put_all_words<'a>(&self, rows: impl Iterator<Item = &'a [u8]>, dst: &mut [u8], at: usize) {
        let mut all: [&[u8]; ROWS] = [&[]; ROWS];
        let mut n = 0;
        for (to, row) in all.iter_mut().zip(rows) {
            *to = row;
            n += 1;
        }
        let words = all[0].len() / 4;
        let avx2 = Avx2::detect().filter(|_| self.isa != Isa::Scalar && n == ROWS);
        match avx2 {
            Some(avx2) if words.is_multiple_of(8) => {
                let (lines, _) = dst[at..at + 64 * words].as_chunks_mut::<64>();
                avx2.transpose(&all, lines);
            }
            _ => (0..n).for_each(|r| put_words(all[r], dst, at, r)),
        }
    }

    /// Dequantizes row `row` of the packed matrix: exactly the values that the format defines.
    ///
    /// # Panics
    /// If `row` is out of range, `packed` not [`packed_bytes`](Self::packed_bytes)
    /// or `out` not `cols` long.
    pub fn unpack_row(&self, packed: &[u8], row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(
            packed.len(),
            self.packed_bytes(),
            "the packed matrix has another size"
        );
        assert_eq!(
            out.len(),
            self.cols,
            "a row has as many weights as the matrix has columns"
        );
        let group = &packed[self.packed_range(row / ROWS..row / ROWS + 1)];
        if self.ty.is_quantized() {
            let group = Group::new(self.ty, group, self.cols / 32);
            with_format(
                self.ty,
                self.isa,
                Unpack {
                    group,
                    row: row % ROWS,
                    out,
                },
            );
        } else {
            floats::unpack(self.ty, group, row % ROWS, out);
        }
    }
}

/// Dequantizes one row of a group.
struct Unpack<'a> {
    group: Group<'a>,
    row: usize,
    out: &'a mut [f32],
}

impl WithFormat for Unpack<'_> {
    fn run<F: Format, S: Simd>(self, s: S) {
        s.vectorize(UnpackAs::<F> {
            unpack: self,
            format: std::marker::PhantomData,
        });
    }
}

struct UnpackAs<'a, F> {
    unpack: Unpack<'a>,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Job for UnpackAs<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Unpack { group, row, out } = self.unpack;
        let half = row / S::LANES;
        let (blocks, _) = out.as_chunks_mut::<32>();
        for (t, blocks) in blocks.chunks_mut(TILE_BLOCKS).enumerate() {
            let tile = group.tile(t);
            let mut state = F::open(s, tile, half);
            for (b, out) in blocks.iter_mut().enumerate() {
                unpack_block::<F, S>(s, tile, &mut state, b, row, out);
            }
        }
    }
}

#[inline(always)]
fn unpack_block<F: Format, S: Simd>(
    s: S,
    tile: Tile<'_>,
    state: &mut F::State<S>,
    b: usize,
    row: usize,
    out: &mut [f32; 32],
) {
    use formats::Kind;
    let half = row / S::LANES;
    let operands = F::block(s, tile, state, b, half);
    let mut line = [0u8; 64];
    let mut floats = [[0.0f32; ROWS]; 4];
    for i in 0..2 {
        s.store_floats(&mut floats[i], half, operands.scale[i]);
        s.store_floats(&mut floats[2 + i], half, operands.bias[i]);
    }
    for j in 0..8 {
        s.store_line(&mut line, half, operands.w[j]);
        let (scale, bias) = (floats[j / 4][row], floats[2 + j / 4][row]);
        for i in 0..4 {
            let code = f32::from(line[row * 4 + i]);
            out[4 * j + i] = if F::Kind::BIAS {
                code * scale - bias
            } else {
                (code - (1 << F::Kind::OFFSET_LOG2) as f32) * scale
            };
        }
    }
}

/// Packs the rows' shares of one tile of `n` blocks; yields the first with a scale that is not
/// finite.
#[inline(always)]
fn pack_tile<'a>(
    ty: WeightType,
    share: impl Iterator<Item = (usize, &'a [u8])>,
    n: usize,
    dst: &mut [u8],
    plane: Option<&mut [u8; PLANE_ENTRY]>,
) -> Option<usize> {
    match (ty, plane) {
        (WeightType::Q4_0 | WeightType::IQ4NL, _) => {
            first_bad(share, |src, r| blocks32::q4_0(src, n, r, dst))
        }
        (WeightType::Q4_1, _) => first_bad(share, |src, r| blocks32::q4_1(src, n, r, dst)),
        (WeightType::Q5_0, _) => first_bad(share, |src, r| blocks32::q5_0(src, n, r, dst)),
        (WeightType::Q5_1, _) => first_bad(share, |src, r| blocks32::q5_1(src, n, r, dst)),
        (WeightType::Q8_0, _) => first_bad(share, |src, r| blocks32::q8_0(src, n, r, dst)),
        (WeightType::MXFP4, _) => first_bad(share, |src, r| blocks32::mxfp4(src, n, r, dst)),
        (WeightType::IQ4XS, _) => first_bad(share, |src, r| iq4::iq4_xs(src, r, dst)),
        (WeightType::IQ3S, Some(plane)) => {
            first_bad(share, |src, r| codebooks::iq3_s(src, r, dst, plane))
        }
        (WeightType::IQ3XXS, Some(plane)) => {
            first_bad(share, |src, r| codebooks::iq3_xxs(src, r, dst, plane))
        }
        (WeightType::IQ2S, Some(plane)) => {
            first_bad(share, |src, r| codebooks::iq2_s(src, r, dst, plane))
        }
        (WeightType::IQ2XS, Some(plane)) => {
            first_bad(share, |src, r| codebooks::iq2_xs(src, r, dst, plane))
        }
        (WeightType::IQ2XXS, Some(plane)) => {
            first_bad(share, |src, r| codebooks::iq2_xxs(src, r, dst, plane))
        }
        (WeightType::IQ1S, Some(plane)) => {
            first_bad(share, |src, r| codebooks::iq1_s(src, r, dst, plane))
        }
        (WeightType::IQ1M, _) => first_bad(share, |src, r| codebooks::iq1_m(src, r, dst)),
        (WeightType::TQ1_0, Some(plane)) => {
            first_bad(share, |src, r| few_bits::tq1_0(src, r, dst, plane))
        }
        (WeightType::TQ2_0, Some(plane)) => {
            first_bad(share, |src, r| few_bits::tq2_0(src, r, dst, plane))
        }
        (WeightType::NVFP4, _) => first_bad(share, |src, r| few_bits::nvfp4(src, n, r, dst)),
        (WeightType::Q1_0, _) => first_bad(share, |src, r| few_bits::q1_0(src, n, r, dst)),
        (WeightType::Q2_0, _) => first_bad(share, |src, r| few_bits::q2_0(src, n, r, dst)),
        (WeightType::Q2K, _) => first_bad(share, |src, r| k_quants::q2(src, r, dst)),
        (WeightType::Q4K, _) => first_bad(share, |src, r| k_quants::q4(src, r, dst)),
        (WeightType::Q5K, _) => first_bad(share, |src, r| k_quants::q5(src, r, dst)),
        (WeightType::Q3K, Some(plane)) => {
            first_bad(share, |src, r| k_quants::q3(src, r, dst, plane))
        }
        (WeightType::Q6K, Some(plane)) => {
            first_bad(share, |src, r| k_quants::q6(src, r, dst, plane))
        }
        _ => unreachable!("{ty} is not packed in tiles, or lost its plane"),
    }
}

/// Packs each row's share of a tile; yields the first whose scales are not finite.
#[inline(always)]
fn first_bad<'a>(
    share: impl Iterator<Item = (usize, &'a [u8])>,
    mut pack: impl FnMut(&[u8], usize) -> bool,
) -> Option<usize> {
    share.fold(
        None,
        |bad, (r, src)| if pack(src, r) { bad } else { bad.or(Some(r)) },
    )
}

/// Puts the words of `src` into row `r`'s words of the lines from byte `at` on.
#[inline(always)]
fn put_words(src: &[u8], dst: &mut [u8], at: usize, r: usize) {
    assert!(r < ROWS, "a group has 16 rows");
    let (words, _) = src.as_chunks::<4>();
    let (lines, _) = dst[at..at + 64 * words.len()].as_chunks_mut::<64>();
    for (line, word) in lines.iter_mut().zip(words) {
        line.as_chunks_mut::<4>().0[r] = *word;
    }
}

/// Copies the 2 bytes of a half float to row `r` of the 16 at byte `at`; false if it is not finite.
#[inline(always)]
fn put_half(dst: &mut [u8], at: usize, r: usize, src: [u8; 2]) -> bool {
    dst[at + 2 * r..][..2].copy_from_slice(&src);
    u16::from_le_bytes(src) & 0x7c00 != 0x7c00
}

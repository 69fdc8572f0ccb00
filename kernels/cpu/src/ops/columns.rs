//! Gathering columns: rows put together from pieces of other rows.

use super::rows_of;

/// One source of [`columns`]: `width` elements for each group.
#[derive(Debug, Clone, Copy)]
pub struct ColumnSource<'a> {
    /// `[rows][row_width]`, as many rows as the output has.
    pub x: &'a [f32],
    /// Elements of a row of `x`.
    pub row_width: usize,
    /// The first group's first element.
    pub first: usize,
    /// Elements from one group's first to the next one's; 0 gives every group the same.
    pub stride: usize,
    /// Elements a group.
    pub width: usize,
}

/// Row `t` of `out` has for each group `h` its parts one after another,
/// `part.x[t][part.first + h * part.stride ..][.. part.width]`.
///
/// # Panics
/// When a part has another number of rows than `out` or reaches beyond its own rows, or
/// when the groups are empty.
pub fn columns(parts: &[ColumnSource<'_>], n_group: usize, out: &mut [f32]) {
    let group: usize = parts.iter().map(|part| part.width).sum();
    let rows = rows_of(out.len(), n_group * group);
    for part in parts {
        assert_eq!(
            rows_of(part.x.len(), part.row_width),
            rows,
            "columns: a part has another number of rows"
        );
        let end = part.first + (n_group - 1) * part.stride + part.width;
        assert!(
            end <= part.row_width,
            "columns: {end} columns of {}",
            part.row_width
        );
    }
    let mut at = 0;
    for part in parts {
        for (out, x) in out
            .chunks_exact_mut(n_group * group)
            .zip(part.x.chunks_exact(part.row_width))
        {
            for (h, out) in out.chunks_exact_mut(group).enumerate() {
                let from = &x[part.first + h * part.stride..][..part.width];
                out[at..at + part.width].copy_from_slice(from);
            }
        }
        at += part.width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::Random;

    #[test]
    fn every_element_comes_from_its_place() {
        let mut source = Random::new("columns");
        for _ in 0..50 {
            let (rows, n_group) = (1 + source.below(4), 1 + source.below(5));
            let inputs: Vec<_> = (0..1 + source.below(3))
                .map(|_| {
                    let (first, width) = (source.below(9), 1 + source.below(20));
                    let stride = [0, width, width + 3][source.below(3)];
                    let row_width = first + (n_group - 1) * stride + width + source.below(4);
                    (
                        source.normal(rows * row_width),
                        row_width,
                        first,
                        stride,
                        width,
                    )
                })
                .collect();
            let parts: Vec<_> = inputs
                .iter()
                .map(|&(ref x, row_width, first, stride, width)| ColumnSource {
                    x,
                    row_width,
                    first,
                    stride,
                    width,
                })
                .collect();
            let mut expected = Vec::new();
            for t in 0..rows {
                for h in 0..n_group {
                    for p in &parts {
                        let from = t * p.row_width + p.first + h * p.stride;
                        expected.extend((from..from + p.width).map(|i| p.x[i]));
                    }
                }
            }
            let mut out = vec![f32::NAN; expected.len()];
            columns(&parts, n_group, &mut out);
            assert_eq!(out, expected);
        }
    }

    #[test]
    #[should_panic(expected = "columns: 9 columns of 8")]
    fn a_part_beyond_its_row_is_refused() {
        let part = ColumnSource {
            x: &[0.0; 16],
            row_width: 8,
            first: 1,
            stride: 4,
            width: 4,
        };
        columns(&[part], 2, &mut [0.0; 16]);
    }
}

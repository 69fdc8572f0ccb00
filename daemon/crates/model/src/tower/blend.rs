//! Learned positions of an image's patches, each the sum of a few rows of a table.
//!
//! 16,384 patches of 1,152 elements that have 16 rows each are 302 million products, which the
//! engine's thread computes. Where rows and columns are weighed apart, the table's rows are summed
//! once for each row of the image, and a patch has as many products as a column has weights: 113
//! million.

use super::positions::{LearnedGrid, Weights};

/// Rows of the image of which sums are kept: patches come row by row, or in blocks that are up to
/// so many high.
const KEPT: usize = 4;

/// Makes the positions of one image's patches.
#[derive(Debug)]
pub struct Blend<'a> {
    learned: &'a LearnedGrid,
    /// Rows of the table, as many as `learned` has.
    table: &'a [f32],
    width: usize,
    grid: [usize; 2],
    apart: Option<Apart>,
}

/// Of a square that is weighed by rows and columns apart.
#[derive(Debug)]
struct Apart {
    side: usize,
    rows: Vec<Weights>,
    columns: Vec<Weights>,
    /// Rows of the image, and the sums for each `[side][width]`.
    kept: [(u32, Vec<f32>); KEPT],
}

impl<'a> Blend<'a> {
    /// Of an image with this grid of patches, by rows of `width` elements.
    ///
    /// # Panics
    /// When the table has fewer rows than `learned`.
    #[must_use]
    pub fn new(learned: &'a LearnedGrid, table: &'a [f32], width: usize, grid: [usize; 2]) -> Self {
        assert!(
            table.len() as u64 >= learned.rows() * width as u64,
            "a table of {} elements",
            table.len()
        );
        let apart = learned.by_axes(grid).map(|(side, [rows, columns])| Apart {
            side,
            rows,
            columns,
            kept: std::array::from_fn(|_| (u32::MAX, Vec::new())),
        });
        // Of few columns, those of the table that no patch has would be summed, too.
        let pays = |apart: &Apart| {
            let most = apart.columns.iter().map(Vec::len).max().unwrap_or(0);
            apart.side < apart.columns.len() * most.saturating_sub(1)
        };
        Self {
            learned,
            table,
            width,
            grid,
            apart: apart.filter(pays),
        }
    }

    /// Writes the position of a patch to `row`.
    pub fn write(&mut self, place: [u32; 2], row: &mut [f32]) {
        row.fill(0.0);
        let Some(apart) = &mut self.apart else {
            for (at, weight) in self.learned.neighbours(place, self.grid) {
                add(row, weight, &self.table[at as usize * self.width..]);
            }
            return;
        };
        let sums = apart.sums(place[0], self.table, self.width);
        for &(at, weight) in &apart.columns[place[1] as usize] {
            let from = at as usize * self.width;
            add(row, weight, &apart.kept[sums].1[from..]);
        }
    }
}

impl Apart {
    /// Which of the kept sums are those of a row of the image.
    fn sums(&mut self, row: u32, table: &[f32], width: usize) -> usize {
        let at = row as usize % KEPT;
        let (of, sums) = &mut self.kept[at];
        if *of != row {
            *of = row;
            sums.clear();
            sums.resize(self.side * width, 0.0);
            for &(source, weight) in &self.rows[row as usize] {
                add(sums, weight, &table[source as usize * self.side * width..]);
            }
        }
        at
    }
}

fn add(to: &mut [f32], weight: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += weight * from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a patch has by its neighbours, in any order of patches, of images small and large.
    #[test]
    fn a_blend_is_the_sum_of_the_neighbours() {
        let width = 3;
        let kinds = [
            LearnedGrid::Square { side: 5 },
            LearnedGrid::Resized { side: 5 },
            LearnedGrid::Cubic { side: 5 },
            LearnedGrid::Crossed { side: 5 },
            LearnedGrid::Axes { n: 13 },
        ];
        let mut apart = 0;
        for learned in kinds {
            let n = learned.rows() as usize * width;
            let table: Vec<f32> = (0..n).map(|i| ((i * 7919) % 101) as f32 / 50.0).collect();
            for grid in [[1, 1], [2, 3], [4, 12], [13, 2], [12, 13]] {
                let mut blend = Blend::new(&learned, &table, width, grid);
                apart += usize::from(blend.apart.is_some());
                let patches = grid[0] * grid[1];
                // From place to place, so that kept sums are used again and replaced.
                for patch in (0..3 * patches).map(|i| i * 5 % patches) {
                    let place = [patch / grid[1], patch % grid[1]].map(|at| at as u32);
                    let mut expected = vec![0.0; width];
                    for (at, weight) in learned.neighbours(place, grid) {
                        add(&mut expected, weight, &table[at as usize * width..]);
                    }
                    let mut found = vec![f32::NAN; width];
                    blend.write(place, &mut found);
                    for (found, expected) in found.iter().zip(&expected) {
                        let off = (found - expected).abs();
                        assert!(off < 1e-5, "{learned:?} {grid:?} {place:?}: {off}");
                    }
                }
            }
        }
        assert!((3..15).contains(&apart), "{apart} by sums of rows");
    }
}

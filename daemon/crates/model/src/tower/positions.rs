//! Learned positions of patches: which rows of a tower's table make that of a patch.

use std::ops::Range;

/// Learned positions of an image's patches.
#[derive(Debug, Clone, PartialEq)]
pub enum LearnedGrid {
    /// A square grid, interpolated to each image's.
    Square {
        /// Side of the learned grid.
        side: u32,
    },
    /// A square grid, resized to each image's as an image is, by a linear filter.
    Resized {
        /// Side of the learned grid.
        side: u32,
    },
    /// A square grid, resized to each image's by cubic weights of the four places next to it by
    /// rows and by columns, the outermost ones in the place of what is beyond them.
    Cubic {
        /// Side of the learned grid.
        side: u32,
    },
    /// A square grid, resized by a linear filter to the two places next to it by rows and by
    /// columns, where what is beyond counts for nothing, to as many rows as an image has columns
    /// and the other way round. Of these, counted row by row, a patch has the one of its own
    /// number.
    Crossed {
        /// Side of the learned grid.
        side: u32,
    },
    /// A square grid for images of its size alone, behind a position of the row of the class.
    Class {
        /// Side of the learned grid.
        side: u32,
    },
    /// One for each column, and behind those one for each row; a patch has the sum of two.
    Axes {
        /// Columns, and rows: the most patches of a side.
        n: u32,
    },
}

impl LearnedGrid {
    /// Rows of the table.
    #[must_use]
    pub fn rows(&self) -> u64 {
        match *self {
            Self::Square { side }
            | Self::Resized { side }
            | Self::Cubic { side }
            | Self::Crossed { side } => u64::from(side) * u64::from(side),
            Self::Class { side } => u64::from(side) * u64::from(side) + 1,
            Self::Axes { n } => 2 * u64::from(n),
        }
    }

    /// What of it images need that have at most `grid` rows and columns of patches: the rows of
    /// the table, one range behind the other, and the grid that these rows are the table of.
    #[must_use]
    pub fn needed(&self, grid: [usize; 2]) -> (Self, Vec<Range<u64>>) {
        match *self {
            Self::Square { .. }
            | Self::Resized { .. }
            | Self::Cubic { .. }
            | Self::Crossed { .. }
            | Self::Class { .. } => (self.clone(), std::iter::once(0..self.rows()).collect()),
            Self::Axes { n } => {
                let most = (grid[0].max(grid[1]) as u64).min(u64::from(n));
                let rows = u64::from(n)..u64::from(n) + most;
                (Self::Axes { n: most as u32 }, vec![0..most, rows])
            }
        }
    }

    /// The learned positions of a patch's place in a grid of `rows` by `columns`, with their
    /// weights: of a square the four next to it, where the corners of both grids lie on each
    /// other; of axes those of the column and of the row; of a grid with a class its own.
    #[must_use]
    pub fn neighbours(&self, [row, column]: [u32; 2], grid: [usize; 2]) -> Vec<(u32, f32)> {
        let (side, along) = match *self {
            Self::Crossed { side } => return crossed(side, [row, column], grid),
            Self::Class { side } => return vec![(1 + row * side + column, 1.0)],
            Self::Axes { n } => return vec![(column, 1.0), (n + row, 1.0)],
            Self::Square { side } => (side, between as Along),
            Self::Resized { side } => (side, resized as Along),
            Self::Cubic { side } => (side, cubic as Along),
        };
        let columns = along(side, column, grid[1]);
        let of_row = |(row, of_row): (u32, f32)| {
            let both =
                move |&(column, of_column): &(u32, f32)| (row * side + column, of_row * of_column);
            columns.iter().map(both)
        };
        along(side, row, grid[0])
            .into_iter()
            .flat_map(of_row)
            .collect()
    }

    /// The side of a square whose places are weighed by rows and by columns apart, and the weights
    /// of each row and of each column of an image's grid.
    pub(crate) fn by_axes(&self, grid: [usize; 2]) -> Option<(usize, [Vec<Weights>; 2])> {
        let (side, along) = match *self {
            Self::Square { side } => (side, between as Along),
            Self::Resized { side } => (side, resized as Along),
            Self::Cubic { side } => (side, cubic as Along),
            Self::Crossed { .. } | Self::Class { .. } | Self::Axes { .. } => return None,
        };
        let all = |n: usize| (0..n as u32).map(|at| along(side, at, n)).collect();
        Some((side as usize, grid.map(all)))
    }
}

/// Places along one axis of a square, and their weights.
pub(crate) type Weights = Vec<(u32, f32)>;

/// A function that gives the weights of a place in a row of so many, of a square with so long a
/// side.
type Along = fn(u32, u32, usize) -> Weights;

/// The two places next to it, where the corners of both grids lie on each other.
fn between(side: u32, at: u32, n: usize) -> Weights {
    let last = side - 1;
    let at = (at * last) as f32 / (n as u32 - 1).max(1) as f32;
    let low = at.floor();
    let share = at - low;
    let low = low as u32;
    vec![(low.min(last), 1.0 - share), ((low + 1).min(last), share)]
}

/// Weights by a linear filter over the pixels' centres, as wide as the scale where the grid
/// shrinks.
fn resized(side: u32, at: u32, n: usize) -> Weights {
    let scale = side as f32 / n as f32;
    let (centre, reach) = ((at as f32 + 0.5) * scale - 0.5, scale.max(1.0));
    let weight = |source: u32| 1.0 - (source as f32 - centre).abs() / reach;
    let all = (0..side).map(|source| (source, weight(source)));
    let near: Weights = all.filter(|&(_, weight)| weight > 0.0).collect();
    let sum: f32 = near.iter().map(|(_, weight)| weight).sum();
    near.into_iter()
        .map(|(at, weight)| (at, weight / sum))
        .collect()
}

/// Weights by cubic weights around the patch's centre (Keys 1981, with -0.75).
fn cubic(side: u32, at: u32, n: usize) -> Weights {
    const A: f32 = -0.75;
    let weight = |away: f32| match away {
        x if x <= 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A,
        _ => 0.0,
    };
    let centre = (at as f32 + 0.5) / n as f32 * side as f32 - 0.5;
    let low = centre.floor();
    let near = [-1.0, 0.0, 1.0, 2.0].map(|step| {
        let source = low + step;
        let place = source.clamp(0.0, side as f32 - 1.0) as u32;
        (place, weight((source - centre).abs()))
    });
    near.to_vec()
}

/// See [`LearnedGrid::Crossed`].
fn crossed(side: u32, [row, column]: [u32; 2], [rows, columns]: [usize; 2]) -> Vec<(u32, f32)> {
    let number = row as usize * columns + column as usize;
    let axis = |at: usize, n: usize| {
        let centre = (at as f32 + 0.5) * side as f32 / n as f32 - 0.5;
        let low = centre.floor();
        let near = [low, low + 1.0].map(|place| (place, 1.0 - (centre - place).abs()));
        let known = move |(place, _): &(f32, f32)| (0.0..side as f32).contains(place);
        near.into_iter().filter(known)
    };
    let across: Vec<_> = axis(number % rows, rows).collect();
    let of_row = |(row, of_row): (f32, f32)| {
        let both = move |&(column, of_column): &(f32, f32)| {
            (row as u32 * side + column as u32, of_row * of_column)
        };
        across.iter().map(both)
    };
    axis(number / rows, columns).flat_map(of_row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_those_of_the_neighbours_by_nearness() {
        let of = |place, grid| LearnedGrid::Square { side: 4 }.neighbours(place, grid);
        // Corners lie on corners.
        assert_eq!(of([0, 0], [7, 7])[0], (0, 1.0));
        let last = of([6, 6], [7, 7]);
        assert_eq!((last[0], last[3].1), ((15, 1.0), 0.0));
        // Half way between two.
        assert_eq!(of([0, 1], [7, 7])[..2], [(0, 0.5), (1, 0.5)]);
        let places: Vec<u32> = of([1, 0], [7, 7]).iter().map(|(at, _)| *at).collect();
        assert_eq!(places, [0, 1, 4, 5]);
        // A grid of one.
        assert_eq!(of([0, 0], [1, 1])[0], (0, 1.0));
    }

    /// As `interpolate` of torch does with `bicubic`, and corners that do not lie on each other.
    #[test]
    fn positions_are_resized_by_cubic_weights() {
        // Of the columns of the table's first row, for a place of an image's.
        let of = |place, grid| {
            let mut columns = [0.0; 4];
            for (at, weight) in (LearnedGrid::Cubic { side: 4 }).neighbours(place, grid) {
                columns[at as usize % 4] += weight;
            }
            columns
        };
        assert_eq!(of([1, 2], [4, 4]), [0.0, 0.0, 1.0, 0.0]);
        let near = |found: [f32; 4], expected: [f32; 4]| {
            let mut pairs = found.iter().zip(expected);
            assert!(pairs.all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}");
        };
        near(
            of([0, 1], [8, 8]),
            [0.773_437_5, 0.261_718_75, -0.035_156_25, 0.0],
        );
        near(of([0, 0], [8, 8]), [1.105_468_8, -0.105_468_75, 0.0, 0.0]);
    }

    /// As transformers weighs the places of the grid for Muse Glimmer.
    #[test]
    fn crossed_positions_are_those_of_the_turned_grid_and_none_beyond() {
        let of = |place, grid| LearnedGrid::Crossed { side: 4 }.neighbours(place, grid);
        let near = |place, grid, expected: &[(u32, f32)]| {
            let found: Vec<_> = of(place, grid).into_iter().filter(|n| n.1 > 0.0).collect();
            assert_eq!(found, expected, "{place:?} of {grid:?}");
        };
        // A grid of the table's size is the table.
        near([1, 2], [4, 4], &[(6, 1.0)]);
        // Beyond the corner is nothing.
        near([0, 0], [8, 8], &[(0, 0.75 * 0.75)]);
        near([0, 1], [8, 8], &[(0, 0.75 * 0.75), (1, 0.75 * 0.25)]);
        // The last but two of 2 by 8 patches is that of the seventh of 8 rows of 2.
        near(
            [1, 5],
            [2, 8],
            &[(10, 0.125), (11, 0.125), (14, 0.375), (15, 0.375)],
        );
    }

    /// As `interpolate` of torch does with antialias, and corners that do not lie on each other.
    #[test]
    fn positions_are_resized_as_an_image_is() {
        let of = |place, grid| LearnedGrid::Resized { side: 4 }.neighbours(place, grid);
        // A grid of the table's size is the table.
        assert_eq!(of([1, 2], [4, 4]), [(6, 1.0)]);
        // Twice as many: a quarter and three quarters, and edges are alone.
        assert_eq!(of([0, 1], [8, 8]), [(0, 0.75), (1, 0.25)]);
        // Half as many: the weights of a filter twice as wide.
        let sevenths = of([0, 0], [2, 4])
            .into_iter()
            .map(|(at, w)| (at, (w * 7.0).round()));
        assert_eq!(sevenths.collect::<Vec<_>>(), [(0, 3.0), (4, 3.0), (8, 1.0)]);
        let sum: f32 = of([3, 5], [9, 7]).iter().map(|(_, weight)| weight).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }

    #[test]
    fn positions_of_axes_are_the_column_and_the_row() {
        let axes = LearnedGrid::Axes { n: 100 };
        assert_eq!(
            (axes.rows(), axes.neighbours([2, 5], [4, 6])[1].0),
            (200, 102)
        );
        let (few, rows) = axes.needed([4, 6]);
        assert_eq!(rows, [0..6, 100..106]);
        assert_eq!(few.neighbours([2, 5], [4, 6])[..2], [(5, 1.0), (8, 1.0)]);
        let square = LearnedGrid::Square { side: 4 };
        let (all, rows) = square.needed([2, 2]);
        assert_eq!((all, rows.first(), rows.len()), (square, Some(&(0..16)), 1));
    }

    #[test]
    fn positions_of_a_class_come_before_those_of_the_grid() {
        let grid = LearnedGrid::Class { side: 4 };
        assert_eq!(grid.rows(), 17);
        assert_eq!(grid.neighbours([0, 0], [4, 4]), [(1, 1.0)]);
        assert_eq!(grid.neighbours([3, 2], [4, 4]), [(15, 1.0)]);
        let (all, rows) = grid.needed([4, 4]);
        assert_eq!((all, rows.first(), rows.len()), (grid, Some(&(0..17)), 1));
    }
}

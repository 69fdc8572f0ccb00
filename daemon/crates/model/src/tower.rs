//! What a projector file (mmproj, `general.architecture = clip`) says of its vision tower.

mod blend;
mod positions;

use rocmforge_ops::{Buf, Input, InputRows, Role, TensorDesc, WeightType};

pub use blend::Blend;
pub use positions::LearnedGrid;

/// Maximum number of layers whose rows are kept for layers of the text model: parts of one
/// operation.
pub(crate) const DEEPSTACK_MAX: usize = 3;

/// Names of the kept rows, on their way to the text model's layers.
pub(crate) const DEEPSTACK: [&str; DEEPSTACK_MAX] = ["deepstack_0", "deepstack_1", "deepstack_2"];

/// A vision tower: how it takes images, and what it gives for them.
#[derive(Debug, Clone, PartialEq)]
pub struct Tower {
    /// `clip.projector_type`.
    pub projector: &'static str,
    /// Side of a patch, in pixels.
    pub patch: u32,
    /// Side of the block of patches that becomes one row of the text model.
    pub merge: u32,
    /// Width of the tower's residual stream.
    pub width: u32,
    /// Width of the text model's.
    pub n_out: u32,
    /// Layers whose rows are added behind the first layers of the text model.
    pub deepstack: Vec<u32>,
    /// Learned positions, if the tower has them.
    pub grid: Option<LearnedGrid>,
    /// Mean of each colour channel (red, green, blue; 0 to 1), subtracted from pixels.
    pub mean: [f32; 3],
    /// What the colours are divided by, once their mean is subtracted; red, green, blue.
    pub std: [f32; 3],
    /// The sizes of its images, which have no more than [`N_PATCH_MAX`](crate::N_PATCH_MAX)
    /// patches.
    pub sizes: ImageSizes,
    /// How images come to these sizes.
    pub filter: Filter,
    /// Whether in the text model the tokens of an image attend to each other both ways, as far as
    /// the model has them do so ([`Model::reads_images_whole`](crate::Model::reads_images_whole)).
    pub both_ways: bool,
    /// Tokens of the text behind each row of an image's but the last.
    pub row_gap: usize,
    /// Rows that attend to each other.
    pub parts: Parts,
}

/// Rows of an image that attend to each other in the tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// All, in each layer.
    Whole,
    /// In some layers those of a window alone; patches come window by window.
    Windows {
        /// Side of a window, in blocks; those at the right and at the bottom may be smaller.
        side: u32,
    },
    /// All, and with them a row of the class behind the patches, of which nothing is given. Rows
    /// up to a whole block follow it, which attend to themselves alone.
    Class,
}

/// The sizes that images are resized to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageSizes {
    /// Any of whole blocks, with so many pixels.
    Between {
        /// Fewest.
        min_pixels: u64,
        /// Most; no fewer than the fewest.
        max_pixels: u64,
        /// Whether one with a side of less than a block is enlarged to a block's before.
        enlarges: bool,
    },
    /// A square of this side, pixels.
    Square(u32),
    /// The sizes of the images, or smaller ones, filled up to whole blocks.
    Within {
        /// The longest side, pixels.
        longest: u32,
    },
    /// The sizes of the images, or smaller ones, filled up to whole blocks with black.
    Padded {
        /// Maximum number of patches, before.
        patches: u32,
        /// Maximum number of patches of a side, before.
        side: u32,
    },
    /// The largest of whole blocks that keep the shape.
    Largest {
        /// Maximum number of blocks.
        tokens: u32,
    },
    /// The whole blocks next to its own whose shape is nearest to the image's.
    Nearest {
        /// Maximum number of blocks.
        tokens: u32,
    },
    /// As `Between`; an image that is much larger is cut into tiles, too.
    Tiled {
        /// Fewest pixels of the whole image.
        min_pixels: u64,
        /// Most; no fewer than the fewest.
        max_pixels: u64,
        /// The tiles.
        tiles: Tiles,
    },
    /// A square of a tile's side, whatever the image's shape is; an image to which a rectangle of
    /// tiles is nearer is cut into those, too.
    SquareTiles(Tiles),
}

/// Squares that a large image is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Side of each, pixels: whole blocks.
    pub side: u32,
    /// Fewest of an image that is cut.
    pub least: u32,
    /// Most.
    pub most: u32,
}

/// The filter by which images are resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Weights that fall linearly to the next pixels.
    Bilinear,
    /// Cubic ones, to the second next pixels.
    Bicubic,
    /// A windowed sinc over three pixels to each side.
    Lanczos,
}

impl Tower {
    /// Elements of a row that it gives: that of the text model's embedding, and one for each layer
    /// of [`deepstack`](Self::deepstack).
    #[must_use]
    pub fn row_width(&self) -> u32 {
        self.n_out * (1 + self.deepstack.len() as u32)
    }

    /// Patches of a row that the tower outputs.
    #[must_use]
    pub fn block(&self) -> usize {
        (self.merge * self.merge) as usize
    }

    /// Elements of a patch: three colours.
    #[must_use]
    pub fn patch_elements(&self) -> usize {
        3 * (self.patch * self.patch) as usize
    }

    /// Pixels of a block of patches, which becomes one row of the text model.
    #[must_use]
    pub fn block_pixels(&self) -> u64 {
        let side = u64::from(self.patch) * u64::from(self.merge);
        side * side
    }

    /// Rows of a pass behind an image's patches: a block's, where the tower has a row of the class.
    #[must_use]
    pub fn rows_behind(&self) -> usize {
        match self.parts {
            Parts::Class => self.block(),
            Parts::Whole | Parts::Windows { .. } => 0,
        }
    }

    /// Rows of each part of an image of so many rows and columns of patches; none where the tower
    /// has no parts.
    #[must_use]
    pub fn parts(&self, grid: [usize; 2]) -> Vec<usize> {
        match self.parts {
            Parts::Whole => Vec::new(),
            Parts::Class => {
                let rest = self.rows_behind() - 1;
                let rest = (rest > 0).then_some(rest);
                std::iter::once(grid[0] * grid[1] + 1).chain(rest).collect()
            }
            Parts::Windows { side } => {
                let of_blocks = |window: Vec<usize>| window.len() * self.block();
                self.windows(grid, side).map(of_blocks).collect()
            }
        }
    }

    /// The blocks of such an image, counted row by row, in the order in which the tower takes them;
    /// `None` where that is the same.
    #[must_use]
    pub fn order(&self, grid: [usize; 2]) -> Option<Vec<usize>> {
        match self.parts {
            Parts::Whole | Parts::Class => None,
            Parts::Windows { side } => Some(self.windows(grid, side).flatten().collect()),
        }
    }

    /// The blocks of each window.
    fn windows(&self, grid: [usize; 2], side: u32) -> impl Iterator<Item = Vec<usize>> + use<> {
        let ([rows, columns], side) = (grid.map(|n| n / self.merge as usize), side as usize);
        let firsts = move |n: usize| (0..n).step_by(side.max(1));
        let window = move |(top, left): (usize, usize)| {
            let lines = top..rows.min(top + side);
            let line = move |row: usize| {
                let blocks = left..columns.min(left + side);
                blocks.map(move |column| row * columns + column)
            };
            lines.flat_map(line).collect()
        };
        let corners =
            firsts(rows).flat_map(move |top| firsts(columns).map(move |left| (top, left)));
        corners.map(window)
    }

    /// The row and the column of each patch of an image of so many, in the order in which the tower
    /// takes them: that of blocks.
    pub fn places(&self, grid: [usize; 2]) -> impl Fn(usize) -> [u32; 2] + use<> {
        let (merge, columns, order) = (self.merge as usize, grid[1], self.order(grid));
        move |patch| {
            let (block, inside) = (patch / (merge * merge), patch % (merge * merge));
            let block = order.as_ref().map_or(block, |order| order[block]);
            let (across, blocks) = (inside % merge, columns / merge);
            let row = block / blocks * merge + inside / merge;
            [row as u32, (block % blocks * merge + across) as u32]
        }
    }
}

/// A tower, and what of it is read from the file with each image.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TowerTable {
    pub(crate) tower: Tower,
    /// Table of learned positions.
    pub(crate) table: Option<TensorDesc>,
    /// The row of the class, where the tower has one.
    pub(crate) class: Option<ClassRow>,
}

/// The row of the class of a tower ([`Parts::Class`]), which begins as `embedding` and the first of
/// the learned positions.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassRow {
    /// Learned embedding of the class row.
    pub embedding: TensorDesc,
    /// What the product of patches adds to rows of which nothing is given.
    pub bias: TensorDesc,
}

/// An input whose rows come with a pass, f32.
pub(crate) fn given_input(buf: Buf, name: &str, width: u64, rows: InputRows) -> Input {
    Input {
        table: TensorDesc {
            name: name.to_owned(),
            ty: WeightType::F32,
            rows: 1,
            cols: width,
            offset: 0,
            bytes: width * 4,
            role: Role::Matrix,
        },
        buf,
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tower(side: u32) -> Tower {
        Tower {
            projector: "qwen3vl_merger",
            patch: 16,
            merge: 2,
            width: 8,
            n_out: 4,
            deepstack: vec![1],
            grid: Some(LearnedGrid::Square { side }),
            mean: [0.5; 3],
            std: [0.5; 3],
            sizes: ImageSizes::Square(64),
            filter: Filter::Bicubic,
            both_ways: false,
            row_gap: 0,
            parts: Parts::Whole,
        }
    }

    #[test]
    fn patches_lie_in_blocks_of_rows_and_columns() {
        let place = tower(4).places([4, 6]);
        let places: Vec<[u32; 2]> = (0..24).map(place).collect();
        assert_eq!(places[..4], [[0, 0], [0, 1], [1, 0], [1, 1]]);
        assert_eq!(
            places[8..14],
            [[0, 4], [0, 5], [1, 4], [1, 5], [2, 0], [2, 1]]
        );
        assert_eq!(places[23], [3, 5]);
    }

    #[test]
    fn windows_are_squares_and_smaller_at_the_edges() {
        let tower = Tower {
            parts: Parts::Windows { side: 2 },
            ..tower(4)
        };
        // 3 by 5 blocks.
        let grid = [6, 10];
        assert_eq!(tower.parts(grid), [16, 16, 8, 8, 8, 4]);
        let order = tower.order(grid).unwrap();
        assert_eq!(order, [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]);
        let place = tower.places(grid);
        // The first patch of the second line of blocks is that of the third block.
        assert_eq!([place(8), place(11)], [[2, 0], [3, 1]]);
        let whole = Tower {
            parts: Parts::Windows { side: 9 },
            ..tower
        };
        assert_eq!(whole.parts(grid), [60]);
    }

    #[test]
    fn a_class_is_a_row_behind_the_patches() {
        let tower = Tower {
            parts: Parts::Class,
            ..tower(4)
        };
        assert_eq!((tower.rows_behind(), tower.order([4, 4])), (4, None));
        assert_eq!(tower.parts([4, 4]), [17, 3]);
        let alone = Tower { merge: 1, ..tower };
        assert_eq!((alone.rows_behind(), alone.parts([4, 4])), (1, vec![17]));
    }
}

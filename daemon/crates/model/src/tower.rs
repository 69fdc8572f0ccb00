//! The vision tower in a projector file (mmproj, `general.architecture = clip`).

mod blend;
mod positions;

use rocmforge_ops::{Buf, Input, InputRows, Role, TensorDesc, WeightType};

pub use blend::Blend;
pub use positions::LearnedGrid;

/// Maximum number of deepstack layers of a tower.
pub(crate) const DEEPSTACK_MAX: usize = 3;

/// Names of the buffers with rows for the text model's first layers.
pub(crate) const DEEPSTACK: [&str; DEEPSTACK_MAX] = ["deepstack_0", "deepstack_1", "deepstack_2"];

/// A vision tower: its input images, and its output rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Tower {
    /// Value of `clip.projector_type`.
    pub projector: &'static str,
    /// Side of a patch in pixels.
    pub patch: u32,
    /// Side, in patches, of the block that becomes one row of the text model.
    pub merge: u32,
    /// Width of the tower's residual stream.
    pub width: u32,
    /// Width of the text model's residual stream.
    pub n_out: u32,
    /// Layers of the tower whose rows are added after the first layers of the text model
    /// (deepstack).
    pub deepstack: Vec<u32>,
    /// Learned positions, if the tower has them.
    pub grid: Option<LearnedGrid>,
    /// Mean of each colour channel (red, green, blue; 0 to 1), subtracted from pixels.
    pub mean: [f32; 3],
    /// Divisor of each colour channel (red, green, blue) after the mean is subtracted.
    pub std: [f32; 3],
    /// Sizes to which images are resized, with at most [`N_PATCH_MAX`](crate::N_PATCH_MAX) patches.
    pub sizes: ImageSizes,
    /// The filter with which images are resized.
    pub filter: Filter,
    /// Whether the tokens of an image attend to each other in both directions in the text model, if
    /// that supports it ([`Model::reads_images_whole`](crate::Model::reads_images_whole)).
    pub both_ways: bool,
    /// Number of text tokens after each row of an image but the last.
    pub row_gap: usize,
    /// Which rows of an image attend to each other.
    pub parts: Parts,
}

/// Rows of an image that attend to each other in the tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// All rows, in each layer.
    Whole,
    /// In some layers only the rows of a window; patches are ordered by windows.
    Windows {
        /// Side of a window in blocks; windows at the right and bottom may be smaller.
        side: u32,
    },
    /// All rows, with a class row after the patches that has no patch. The class row's block is
    /// filled up with rows that attend only to themselves.
    Class,
}

/// The sizes that images are resized to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageSizes {
    /// Any size of whole blocks whose number of pixels is in this range.
    Between {
        /// Minimum number of pixels.
        min_pixels: u64,
        /// Maximum number of pixels; not below the minimum.
        max_pixels: u64,
        /// Whether an image with a side below a block's is enlarged to a block first.
        enlarges: bool,
    },
    /// A square with this side in pixels.
    Square(u32),
    /// The image's size, or a smaller one, filled up to whole blocks.
    Within {
        /// Longest side in pixels.
        longest: u32,
    },
    /// The image's size, or a smaller one, filled up to whole blocks with black.
    Padded {
        /// Maximum number of patches, before filling up.
        patches: u32,
        /// Maximum number of patches of a side, before filling up.
        side: u32,
    },
    /// The largest size of whole blocks that keeps the aspect ratio.
    Largest {
        /// Maximum number of blocks.
        tokens: u32,
    },
    /// The size of whole blocks near the image's own whose aspect ratio is nearest.
    Nearest {
        /// Maximum number of blocks.
        tokens: u32,
    },
    /// As `Between`; a much larger image is also cut into tiles.
    Tiled {
        /// Minimum number of pixels of the whole image.
        min_pixels: u64,
        /// Maximum number of pixels of the whole image; not below the minimum.
        max_pixels: u64,
        /// Sizes and numbers of tiles.
        tiles: Tiles,
    },
    /// A square with a tile's side for every image; an image whose aspect ratio is nearer to a
    /// rectangle of tiles is also cut into those.
    SquareTiles(Tiles),
}

/// Square tiles that a large image is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Side of a tile in pixels: whole blocks.
    pub side: u32,
    /// Minimum number of tiles of an image that is cut.
    pub least: u32,
    /// Maximum number of tiles of an image.
    pub most: u32,
}

/// The filter by which images are resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Bilinear: weights fall linearly over one pixel.
    Bilinear,
    /// Bicubic: cubic weights over two pixels.
    Bicubic,
    /// Lanczos: a windowed sinc over three pixels on each side.
    Lanczos,
}

impl Tower {
    /// Number of elements of an output row: one embedding of the text model, and one for each layer
    /// of [`deepstack`](Self::deepstack).
    #[must_use]
    pub fn row_width(&self) -> u32 {
        self.n_out * (1 + self.deepstack.len() as u32)
    }

    /// Number of patches of an output row.
    #[must_use]
    pub fn block(&self) -> usize {
        (self.merge * self.merge) as usize
    }

    /// Number of elements of a patch: its pixels times three colours.
    #[must_use]
    pub fn patch_elements(&self) -> usize {
        3 * (self.patch * self.patch) as usize
    }

    /// Number of pixels of a block of patches, which becomes one row of the text model.
    #[must_use]
    pub fn block_pixels(&self) -> u64 {
        let side = u64::from(self.patch) * u64::from(self.merge);
        side * side
    }

    /// Number of rows in a pass after an image's patches: one block if the tower has a class row,
    /// else 0.
    #[must_use]
    pub fn rows_behind(&self) -> usize {
        match self.parts {
            Parts::Class => self.block(),
            Parts::Whole | Parts::Windows { .. } => 0,
        }
    }

    /// Number of rows of each part of an image with this grid of patches; empty if the tower has no
    /// parts.
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

    /// Order in which the tower takes the blocks of an image, by their row-major index; `None` if
    /// it is row-major.
    #[must_use]
    pub fn order(&self, grid: [usize; 2]) -> Option<Vec<usize>> {
        match self.parts {
            Parts::Whole | Parts::Class => None,
            Parts::Windows { side } => Some(self.windows(grid, side).flatten().collect()),
        }
    }

    /// The row-major indices of the blocks in each window.
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

    /// Function that returns the row and column of a patch, by its index in the tower's order (by
    /// blocks), for an image with this grid.
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

/// A tower, and its tensors that are read from the file for each image.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TowerTable {
    pub(crate) tower: Tower,
    /// Table of learned positions.
    pub(crate) table: Option<TensorDesc>,
    /// The class row, if the tower has one.
    pub(crate) class: Option<ClassRow>,
}

/// The class row of a tower ([`Parts::Class`]), whose initial value is `embedding` plus the first
/// learned position.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassRow {
    /// Learned embedding of the class row.
    pub embedding: TensorDesc,
    /// Bias of the patch product, which is also added to rows without a patch.
    pub bias: TensorDesc,
}

/// An f32 input whose rows are given for each pass.
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

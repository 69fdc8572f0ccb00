//! Images in a prompt, their rows, and the checks of both.

use std::sync::Arc;

use rocmforge_model::{ImageSizes, LearnedGrid, N_PATCH_MAX, Tower};
use rocmforge_vision::PreparedImage;

use crate::api::error::Error;

/// The place of an image in a prompt.
#[derive(Debug, Clone)]
pub struct ImageSpan {
    /// Index of the image's first placeholder among the prompt's tokens; an image has one
    /// placeholder for each row of the tower. Some towers ([`Tower::row_gap`]) put text tokens
    /// between the rows of the image.
    pub first: usize,
    /// The image, as patches for the tower.
    pub image: Arc<PreparedImage>,
}

impl ImageSpan {
    /// Number of prompt tokens from the image's first to its last: one for each row of the tower,
    /// and the text tokens between rows of the image.
    pub(crate) fn n(&self, tower: &Tower) -> usize {
        let [rows, columns] = self.image.grid.map(|side| side / tower.merge as usize);
        let all = columns.saturating_add(tower.row_gap).saturating_mul(rows);
        all.saturating_sub(tower.row_gap)
    }
}

/// The rows that a vision tower computed for an image.
#[derive(Debug, PartialEq)]
pub struct ImageRows {
    /// The rows that replace the embeddings, then the rows that are added to the first layers
    /// (deepstack); each `[tokens][n_embd]`.
    pub(crate) parts: Vec<Vec<f32>>,
    /// Number of elements of a row of a part (`n_embd`).
    pub(crate) width: usize,
}

impl ImageRows {
    /// An empty list of rows with capacity for `n`, since the rows of an image can have 64 MiB and
    /// should not be moved.
    pub(crate) fn with_room(n: usize, width: usize, n_parts: usize) -> Self {
        let part = |_| Vec::with_capacity(n * width);
        Self {
            parts: (0..n_parts).map(part).collect(),
            width,
        }
    }

    /// Writes a tower's output row, which has all parts side by side, as row `row`. Later rows are
    /// dropped.
    pub(crate) fn push(&mut self, row: usize, values: &[f32]) {
        for (part, values) in self.parts.iter_mut().zip(values.chunks(self.width.max(1))) {
            part.truncate(row * self.width);
            part.extend_from_slice(values);
        }
    }

    /// Reorders the rows: row `i` moves to the place `order[i]`.
    pub(crate) fn ordered(self, order: &[usize]) -> Self {
        let width = self.width;
        let ordered = |part: Vec<f32>| {
            let mut rows = vec![0.0; part.len()];
            for (row, &place) in part.chunks_exact(width.max(1)).zip(order) {
                rows[place * width..][..width].copy_from_slice(row);
            }
            rows
        };
        Self {
            parts: self.parts.into_iter().map(ordered).collect(),
            width,
        }
    }

    /// The rows in the tower's layout, `[tokens][parts][width]`.
    pub(crate) fn side_by_side(&self) -> Vec<f32> {
        let Some(first) = self.parts.first() else {
            return Vec::new();
        };
        let mut rows = Vec::with_capacity(first.len() * self.parts.len());
        for at in (0..first.len()).step_by(self.width.max(1)) {
            for part in &self.parts {
                rows.extend_from_slice(&part[at..][..self.width]);
            }
        }
        rows
    }

    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len() * 4).sum()
    }
}

/// Checks that an image's patches are what the tower reads; the error says what is wrong.
fn check_image(image: &PreparedImage, tower: &Tower) -> Result<(), String> {
    let merge = tower.merge as usize;
    let [rows, columns] = image.grid;
    let patches = rows
        .checked_mul(columns)
        .filter(|&n| n > 0 && n <= N_PATCH_MAX as usize);
    let Some(patches) = patches else {
        let message = format!(
            "has {rows} by {columns} patches, where 1 to {N_PATCH_MAX} can be; make it smaller"
        );
        return Err(message);
    };
    if image.merge != merge {
        let message = format!(
            "was prepared for squares of {} patches a side, where the model's are of {merge}",
            image.merge
        );
        return Err(message);
    }
    if !rows.is_multiple_of(merge) || !columns.is_multiple_of(merge) {
        let message =
            format!("has {rows} by {columns} patches; both numbers must be multiples of {merge}");
        return Err(message);
    }
    let square = match tower.sizes {
        ImageSizes::Square(side) => Some(side),
        ImageSizes::SquareTiles(tiles) => Some(tiles.side),
        _ => None,
    };
    if let Some(side) = square
        && [rows, columns] != [(side / tower.patch) as usize; 2]
    {
        let side = side / tower.patch;
        let message = format!(
            "has {rows} by {columns} patches, where the model's images have {side} by {side}"
        );
        return Err(message);
    }
    if let Some(LearnedGrid::Axes { n }) = tower.grid
        && rows.max(columns) > n as usize
    {
        let message =
            format!("has {rows} by {columns} patches, where the model knows {n} places a side");
        return Err(message);
    }
    let elements = patches * tower.patch_elements();
    if image.patches.len() != elements {
        let found = image.patches.len();
        let message = format!(
            "has {found} values where {patches} patches of {} pixels a side have {elements}",
            tower.patch
        );
        return Err(message);
    }
    // Without an early end several are looked at a time.
    if !image
        .patches
        .iter()
        .fold(true, |all, v| all & v.is_finite())
    {
        return Err("has values that are no finite numbers".to_owned());
    }
    Ok(())
}

/// Checks the images of a prompt of `n_prompt` tokens.
///
/// # Errors
/// [`Error::InvalidArgument`] says which image is wrong, and what is wrong with it.
pub(crate) fn check(images: &[ImageSpan], n_prompt: usize, tower: &Tower) -> Result<(), Error> {
    let bad = |i: usize, message: String| Error::InvalidArgument {
        field: "images",
        message: format!("image {i} {message}"),
    };
    let mut free = 0;
    for (i, span) in images.iter().enumerate() {
        check_image(&span.image, tower).map_err(|message| bad(i, message))?;
        let end = span.first.checked_add(span.n(tower));
        let Some(end) = end.filter(|&end| span.first >= free && end <= n_prompt) else {
            let message = format!(
                "has {} tokens from token {} on, which is not behind the image before it and within the {n_prompt} \
                 tokens of the prompt",
                span.n(tower),
                span.first,
            );
            return Err(bad(i, message));
        };
        free = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_towers_row_has_its_parts_side_by_side() {
        let mut rows = ImageRows::with_room(2, 2, 2);
        rows.push(0, &[1.0, 2.0, 3.0, 4.0]);
        rows.push(1, &[9.0; 4]);
        // A pass that is done again.
        rows.push(1, &[5.0, 6.0, 7.0, 8.0]);
        assert_eq!(rows.parts, [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]);
        let given = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        assert_eq!(rows.side_by_side(), given);
        let ordered = rows.ordered(&[1, 0]);
        assert_eq!(ordered.parts, [[5.0, 6.0, 1.0, 2.0], [7.0, 8.0, 3.0, 4.0]]);
    }
}

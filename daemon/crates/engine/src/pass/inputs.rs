//! The input rows of a pass: embeddings of tokens, image rows in their place, patches of images for
//! a vision tower, and scales of adapters.

use std::ops::Range;
use std::sync::Arc;

use rocmforge_kernels_cpu::reference;
use rocmforge_model::{Blend, Tower};
use rocmforge_ops::{Buf, Input, InputRows, Plan, TensorDesc};

use crate::api::error::Error;
use crate::model::embedding_rows;
use crate::model::loaded::LoadedModel;
use crate::pass::given::GivenRows;
use crate::pass::member::Member;
use crate::request::images::IMAGE;
use crate::request::task::Work;

/// Makes the rows of each input of a plan for text without images.
pub(crate) fn of_text(
    loaded: &LoadedModel,
    plan: &Plan,
    ids: &[u32],
    inputs: &mut Vec<Vec<u8>>,
) -> Result<(), Error> {
    inputs.resize_with(plan.inputs.len(), Vec::new);
    for (input, rows) in plan.inputs.iter().zip(inputs) {
        match input.rows {
            InputRows::Tokens | InputRows::TextTokens => {
                embedding_rows::rows(loaded, &input.table, ids, rows)?
            }
            _ => zeros(input, ids.len(), rows),
        }
    }
    Ok(())
}

fn zeros(input: &Input, n: usize, rows: &mut Vec<u8>) {
    rows.clear();
    rows.resize(n * input.table.bytes as usize, 0);
}

/// Makes the rows of each input of a plan for a pass of these requests, and returns the image rows
/// that replace some of them.
pub(crate) fn of_pass(
    (loaded, plan): (&LoadedModel, &Plan),
    members: &[Member],
    ids: &mut Vec<u32>,
    inputs: &mut Vec<Vec<u8>>,
) -> Result<Vec<GivenRows>, Error> {
    ids.clear();
    for Member { span, task, .. } in members {
        let known = task.row_ids(span.rows as usize);
        ids.extend(known.map(|id| if id & IMAGE == 0 { id } else { 0 }));
    }
    if loaded.model().tower().is_some() {
        inputs.resize_with(plan.inputs.len(), Vec::new);
        for (input, rows) in plan.inputs.iter().zip(inputs) {
            rows.clear();
            match input.rows {
                InputRows::Patches => patches(loaded, members, rows),
                InputRows::GridPositions => positions(loaded, members, rows)?,
                _ => zeros(input, ids.len(), rows),
            }
        }
        return Ok(Vec::new());
    }
    of_text(loaded, plan, ids, inputs)?;
    for (input, rows) in plan.inputs.iter().zip(&mut *inputs) {
        if input.rows == InputRows::AdapterScales {
            adapter_scales(members, rows);
        }
    }
    let parts = plan.inputs.iter().filter_map(|input| match input.rows {
        InputRows::Tokens => Some((input.buf, 0)),
        InputRows::Deepstack(layer) => Some((input.buf, 1 + usize::from(layer))),
        _ => None,
    });
    Ok(parts.flat_map(|part| given(members, part)).collect())
}

/// Whether the page cache lacks what a pass of these requests reads of the model's file, judged by
/// the first and the last token. A file on a network file system always counts as lacking.
pub(crate) fn are_cold((loaded, plan): (&LoadedModel, &Plan), members: &[Member]) -> bool {
    let file = loaded.file();
    let mut inputs = plan.inputs.iter();
    let Some(tokens) = inputs.find(|input| input.rows == InputRows::Tokens) else {
        return false;
    };
    let row_bytes = tokens.table.bytes / tokens.table.rows;
    let is_absent = |id: u32| {
        let at = tokens.table.offset + u64::from(id) * row_bytes;
        id & IMAGE == 0 && !file.seems_cached(at..at + 1)
    };
    let first = members.first().and_then(|m| m.task.row_ids(1).next());
    let last = members.last();
    let last = last.and_then(|m| m.task.row_ids(m.span.rows as usize).last());
    file.is_far() || [first, last].into_iter().flatten().any(is_absent)
}

/// Writes each row's scales of adapters over the zeros.
fn adapter_scales(members: &[Member], rows: &mut [u8]) {
    let mut first_row = 0;
    for Member { span, task, .. } in members {
        let n_rows = span.rows as usize;
        if let Some(applied) = &task.adapters {
            let row = applied.row();
            let place = &mut rows[first_row * row.len()..][..n_rows * row.len()];
            let each = place.chunks_exact_mut(row.len());
            each.for_each(|place| place.copy_from_slice(row));
        }
        first_row += n_rows;
    }
}

/// The image rows of one part (embeddings, or a deepstack layer) for a pass's requests.
fn given(members: &[Member], (buf, part): (Buf, usize)) -> Vec<GivenRows> {
    let mut first_row = 0;
    let mut all = Vec::new();
    for Member { span, task, .. } in members {
        let (from, to) = (task.n_past, task.n_past + span.rows as usize);
        let runs = task.images.iter().flat_map(|image| {
            let runs = image.runs();
            runs.map(move |(tokens, row)| (image, tokens, row))
        });
        for (image, tokens, row) in runs {
            let (begin, end) = (tokens.start.max(from), tokens.end.min(to));
            if begin < end {
                all.push(GivenRows {
                    buf,
                    row: (first_row + begin - from) as u64,
                    image: Arc::clone(&image.rows),
                    part,
                    first: row + begin - tokens.start,
                    n: end - begin,
                });
            }
        }
        first_row += span.rows as usize;
    }
    all
}

/// Appends f32 values as bytes. An image of 1,024 x 1,024 has 11 million in its patches and
/// positions: byte by byte they would block the engine for 60 ms.
pub(crate) fn extend_bytes(rows: &mut Vec<u8>, values: &[f32]) {
    let first = rows.len();
    rows.resize(first + size_of_val(values), 0);
    let places = rows[first..].chunks_exact_mut(size_of::<f32>());
    for (place, value) in places.zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

/// Appends the patches of a tower's pass, in the order of the tower's blocks, and zeros for rows
/// behind them.
fn patches(loaded: &LoadedModel, members: &[Member], rows: &mut Vec<u8>) {
    let behind = loaded.model().tower().map_or(0, |tower| {
        tower.rows_behind() * tower.patch_elements() * size_of::<f32>()
    });
    for member in members {
        let Work::Tower(work) = &member.task.work else {
            continue;
        };
        let patches = &work.image.patches[..];
        rows.reserve(size_of_val(patches) + behind);
        match &work.order {
            None => extend_bytes(rows, patches),
            Some(order) => {
                let block = patches.len() / order.len().max(1);
                for at in order {
                    extend_bytes(rows, &patches[at * block..][..block]);
                }
            }
        }
        rows.resize(rows.len() + behind, 0);
    }
}

/// Appends the learned positions of a tower's pass, interpolated to each image's grid, and the
/// initial values of rows behind its patches.
fn positions(loaded: &LoadedModel, members: &[Member], rows: &mut Vec<u8>) -> Result<(), Error> {
    let model = loaded.model();
    let grid = model.tower().and_then(|tower| tower.grid.as_ref());
    let (Some(tower), Some(learned), Some(table)) = (model.tower(), grid, model.tower_positions())
    else {
        return Err(Error::Internal(
            "positions of a tower without any".to_owned(),
        ));
    };
    let width = tower.width as usize;
    let grids = members.iter().filter_map(|member| match &member.task.work {
        Work::Tower(work) => Some(work.image.grid),
        _ => None,
    });
    let largest = grids.fold([0, 0], |a, b| [a[0].max(b[0]), a[1].max(b[1])]);
    let (learned, needed) = learned.needed(largest);
    let mut positions = Vec::new();
    for rows in needed {
        table_rows(loaded, table, rows, &mut positions)?;
    }
    let behind = behind(loaded, tower, &positions)?;
    let mut row = vec![0.0; width];
    for member in members {
        let Work::Tower(work) = &member.task.work else {
            continue;
        };
        let grid = work.image.grid;
        let place = tower.places(grid);
        let mut blend = Blend::new(&learned, &positions, width, grid);
        for patch in 0..grid[0] * grid[1] {
            blend.write(place(patch), &mut row);
            extend_bytes(rows, &row);
        }
        extend_bytes(rows, &behind);
    }
    Ok(())
}

/// What is added to the rows behind an image's patches: for the first one the class embedding, less
/// what the product of patches adds to it.
fn behind(loaded: &LoadedModel, tower: &Tower, positions: &[f32]) -> Result<Vec<f32>, Error> {
    let width = tower.width as usize;
    let mut rows = vec![0.0; tower.rows_behind() * width];
    if let Some(class) = loaded.model().tower_class() {
        let embedding = embedding_rows::vector(loaded, &class.embedding)?;
        let bias = embedding_rows::vector(loaded, &class.bias)?;
        let learned = embedding.iter().zip(&positions[..width]);
        for (row, ((class, position), bias)) in rows.iter_mut().zip(learned.zip(&bias)) {
            *row = class + position - bias;
        }
    }
    Ok(rows)
}

/// Appends rows of a table of the file as f32.
fn table_rows(
    loaded: &LoadedModel,
    table: &TensorDesc,
    rows: Range<u64>,
    values: &mut Vec<f32>,
) -> Result<(), Error> {
    let bytes = table.bytes / table.rows;
    let range = table.offset + rows.start * bytes..table.offset + rows.end * bytes;
    loaded.bring(std::iter::once(range.clone()))?;
    let first = values.len();
    values.resize(first + ((rows.end - rows.start) * table.cols) as usize, 0.0);
    let read = loaded.file().with_range(range, |bytes| {
        reference::dequantize(table.ty, bytes, &mut values[first..])
    });
    read.map_err(|e| crate::api::error::from_read(loaded.name(), loaded.path(), e))?
        .map_err(|e| Error::Internal(e.to_string()))
}

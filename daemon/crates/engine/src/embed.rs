//! Embedding rows, read from the file.
//!
//! A pass needs one row a token of a matrix of `[n_embd, n_vocab]`. Keeping that matrix on the device would cost as
//! much as several layers, so the rows are read where they lie and dequantized here.

use rocmforge_device::{TensorDesc, weight_type};
use rocmforge_gguf::{Error as GgufError, MappedFile};
use rocmforge_kernels::host::reference;

use crate::error::Error;
use crate::loaded::LoadedModel;

/// Writes the rows of `ids` to `out`, `[ids][n_embd]`.
pub(crate) fn rows(model: &LoadedModel, ids: &[u32], out: &mut Vec<f32>) -> Result<(), Error> {
    let table = model.model().embedding();
    let width = table.cols as usize;
    out.resize(ids.len() * width, 0.0);
    for (&id, row) in ids.iter().zip(out.chunks_exact_mut(width)) {
        read_row(model.file(), table, id, row)
            .map_err(|e| crate::error::from_read(model.name(), model.path(), e))?;
        if row.iter().any(|x| !x.is_finite()) {
            return Err(Error::BadModel {
                path: model.path().to_owned(),
                message: format!(
                    "tensor '{}' has a value that is not finite in row {id}; the file is damaged",
                    table.name
                ),
            });
        }
    }
    Ok(())
}

/// Reads a small tensor of f32 (or a type that converts) whole.
pub(crate) fn vector(model: &LoadedModel, tensor: &TensorDesc) -> Result<Vec<f32>, Error> {
    let mut out = vec![0.0; tensor.cols as usize];
    read_row(model.file(), tensor, 0, &mut out)
        .map_err(|e| crate::error::from_read(model.name(), model.path(), e))?;
    Ok(out)
}

fn read_row(
    file: &MappedFile,
    tensor: &TensorDesc,
    row: u32,
    out: &mut [f32],
) -> Result<(), GgufError> {
    let bytes = tensor.bytes / tensor.rows;
    let at = tensor.offset + u64::from(row) * bytes;
    let ty = weight_type(tensor.ty)
        .expect("the device laid out a segment with this type, or the load was refused");
    let read = file.with_range(at..at + bytes, |bytes| {
        reference::dequantize(ty, bytes, out)
    })?;
    read.expect("the shape was checked when the model was made");
    Ok(())
}

//! Embedding rows, read from the file.
//!
//! A pass needs one row for each token from a matrix `[n_embd, n_vocab]`. Keeping that matrix on
//! the device would cost as much as several layers, so the rows are read where they lie; the device
//! dequantizes them.

use rocmforge_device::TensorDesc;
use rocmforge_gguf::{Error as GgufError, MappedFile};
use rocmforge_kernels_cpu::reference;

use crate::api::error::Error;
use crate::model::loaded::LoadedModel;

/// Minimum number of rows that one thread reads: for fewer, another thread costs more than it
/// saves.
const SHARE_ROWS: usize = 512;

/// Maximum number of rows that are copied from the mapping, where a system call would cost more
/// than a row. More rows belong to a prompt; for a file that is not in the page cache, the mapping
/// would read 128 KB for each row. A file read with direct I/O has no row copied so.
const MAPPED_ROWS: usize = 256;

/// Maximum number of threads that read rows.
const THREADS_MAX: usize = 4;

/// Reads the embedding rows of `ids`, in the file's tensor type, one after another into `out`.
pub(crate) fn rows(
    model: &LoadedModel,
    table: &TensorDesc,
    ids: &[u32],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    let row_bytes = (table.bytes / table.rows) as usize;
    let at = |id: u32| table.offset + u64::from(id) * row_bytes as u64;
    model.bring(ids.iter().map(|&id| at(id)..at(id) + row_bytes as u64))?;
    out.resize(ids.len() * row_bytes, 0);
    let read = |ids: &[u32], out: &mut [u8]| {
        let mut rows = ids.iter().zip(out.chunks_exact_mut(row_bytes));
        let file = model.file();
        if ids.len() > MAPPED_ROWS || file.is_direct() {
            return file.read_each(rows.map(|(&id, row)| (at(id), row)));
        }
        rows.try_for_each(|(&id, row)| {
            let place = at(id)..at(id) + row_bytes as u64;
            file.with_range_unchecked(place, |bytes| row.copy_from_slice(bytes))
        })?;
        file.check_unchanged()
    };
    let shares = ids.len().div_ceil(SHARE_ROWS).min(THREADS_MAX);
    let result = if shares <= 1 {
        read(ids, out)
    } else {
        let share = ids.len().div_ceil(shares);
        std::thread::scope(|scope| {
            let threads: Vec<_> = ids
                .chunks(share)
                .zip(out.chunks_mut(share * row_bytes))
                .map(|(ids, out)| scope.spawn(move || read(ids, out)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|t| t.join().expect("reading does not panic"))
        })
    };
    result.map_err(|e| crate::api::error::from_read(model.name(), model.path(), e))
}

/// Reads a whole small tensor, converted to f32.
pub(crate) fn vector(model: &LoadedModel, tensor: &TensorDesc) -> Result<Vec<f32>, Error> {
    let row = tensor.offset..tensor.offset + tensor.bytes / tensor.rows;
    model.bring(std::iter::once(row))?;
    let mut out = vec![0.0; tensor.cols as usize];
    read_row(model.file(), tensor, 0, &mut out)
        .map_err(|e| crate::api::error::from_read(model.name(), model.path(), e))?;
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
    let read = file.with_range(at..at + bytes, |bytes| {
        reference::dequantize(tensor.ty, bytes, out)
    })?;
    read.expect("the shape was checked when the model was made");
    Ok(())
}

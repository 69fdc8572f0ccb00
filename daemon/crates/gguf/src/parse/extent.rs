//! Tensor records to checked extents: size, alignment, place in the file, and
//! that no two share a byte.

use crate::{Error, TensorInfo, TensorType};

/// A tensor's record as the file has it, before it is checked against the rest.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) name: Box<str>,
    pub(super) dims: [u64; 4],
    pub(super) n_dims: u32,
    pub(super) ty: TensorType,
    /// Offset from the start of the tensor data.
    pub(super) offset: u64,
}

/// A record with its size computed and its extent checked against the file.
pub(super) fn place(
    record: Record,
    alignment: u64,
    data_start: u64,
    file_len: u64,
) -> Result<TensorInfo, Error> {
    let Record {
        name,
        dims,
        n_dims,
        ty,
        offset,
    } = record;
    let tensor = String::from(name);
    if !dims[0].is_multiple_of(ty.block_size()) {
        return Err(Error::PartialBlock {
            tensor,
            ty,
            row: dims[0],
        });
    }
    let elements = dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    let bytes = ty
        .row_bytes(dims[0])
        .and_then(|row| dims[1..].iter().try_fold(row, |n, &dim| n.checked_mul(dim)));
    let bytes = match (elements, bytes) {
        (Some(elements), Some(bytes))
            if elements <= i64::MAX as u64 && bytes <= i64::MAX as u64 =>
        {
            bytes
        }
        _ => return Err(Error::SizeOverflow { tensor, dims, ty }),
    };
    if !offset.is_multiple_of(alignment) {
        return Err(Error::UnalignedTensor {
            tensor,
            offset,
            alignment,
        });
    }
    match data_start
        .checked_add(offset)
        .and_then(|start| Some((start, start.checked_add(bytes)?)))
    {
        Some((start, end)) if end <= file_len => Ok(TensorInfo {
            name: tensor,
            dims,
            n_dims,
            ty,
            offset: start,
            bytes,
        }),
        _ => Err(Error::TensorPastEnd {
            tensor,
            offset,
            bytes,
            data_start,
            file_len,
        }),
    }
}

pub(super) fn refuse_overlap(tensors: &[TensorInfo]) -> Result<(), Error> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if first.range().end > second.offset {
            return Err(Error::Overlap {
                first: first.name.clone(),
                first_end: first.range().end,
                second: second.name.clone(),
                second_start: second.offset,
            });
        }
    }
    Ok(())
}

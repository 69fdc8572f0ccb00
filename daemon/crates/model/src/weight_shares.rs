//! The types of a model's matrices, and their sizes in other types.

use rocmforge_ops::{Plan, SegmentKind, TensorDesc, WeightType};

/// Matrices of a plan's segments that are of one type and have rows of the same granularity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShare {
    /// Type of the weights.
    pub ty: WeightType,
    /// The rows are whole multiples of this number of elements: 256, 32 or 1.
    pub rows_of: u32,
    /// Number of elements.
    pub elements: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

impl WeightShare {
    /// Bytes of these matrices in another type; unchanged if that has no blocks for their rows, or
    /// is not smaller.
    #[must_use]
    pub fn bytes_as(&self, ty: WeightType) -> u64 {
        let block = ty.block_size() as u64;
        if !u64::from(self.rows_of).is_multiple_of(block) {
            return self.bytes;
        }
        (self.elements / block * ty.block_bytes() as u64).min(self.bytes)
    }
}

/// The weights of a plan by type, and the bytes that a one-token pass reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightShares {
    /// Matrices, most bytes first.
    pub matrices: Vec<WeightShare>,
    /// Bytes that a one-token pass reads: all ordered segments, and the experts that a token uses.
    pub pass_bytes: u64,
}

impl WeightShares {
    /// Shares of a plan in which each token uses `used` of `experts` experts.
    pub(crate) fn new(plan: &Plan, (used, experts): (u32, u32)) -> Self {
        let mut shares = Self::default();
        for segment in &plan.segments {
            let bytes = segment.file_bytes();
            shares.pass_bytes += match segment.kind {
                SegmentKind::Ordered => bytes,
                _ => bytes * u64::from(used) / u64::from(experts.max(1)),
            };
            let matrices = segment.tensors.iter().filter(|tensor| tensor.rows > 1);
            matrices.for_each(|tensor| shares.add(tensor));
        }
        shares
            .matrices
            .sort_by_key(|share| std::cmp::Reverse(share.bytes));
        shares
    }

    fn add(&mut self, tensor: &TensorDesc) {
        let rows_of = match tensor.cols {
            cols if cols.is_multiple_of(256) => 256,
            cols if cols.is_multiple_of(32) => 32,
            _ => 1,
        };
        let known = |share: &&mut WeightShare| share.ty == tensor.ty && share.rows_of == rows_of;
        let elements = tensor.rows * tensor.cols;
        match self.matrices.iter_mut().find(known) {
            Some(share) => {
                share.elements += elements;
                share.bytes += tensor.bytes;
            }
            None => self.matrices.push(WeightShare {
                ty: tensor.ty,
                rows_of,
                elements,
                bytes: tensor.bytes,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_smaller_in_a_smaller_type_that_their_rows_have_blocks_for() {
        let share = |ty: WeightType, rows_of| WeightShare {
            ty,
            rows_of,
            elements: 512,
            bytes: 512 / ty.block_size() as u64 * ty.block_bytes() as u64,
        };
        let large = share(WeightType::Q8_0, 256);
        assert_eq!(large.bytes, 544);
        assert_eq!(large.bytes_as(WeightType::Q4K), 288);
        assert_eq!(large.bytes_as(WeightType::F16), 544, "it is larger");
        let narrow = share(WeightType::Q8_0, 32);
        assert_eq!(narrow.bytes_as(WeightType::Q4K), 544, "no blocks");
        assert_eq!(narrow.bytes_as(WeightType::Q4_0), 288);
    }
}

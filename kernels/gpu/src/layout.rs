//! The layout of weights on a device: planes, see `hip/formats.h` for the bits in them.

use super::Error;
use crate::WeightType;

/// Every plane begins at a multiple of this many bytes.
pub const PLANE_ALIGNMENT: u64 = 256;

/// Bytes of a type's planes: (bytes, weights that they serve), in the order in which they lie.
const fn planes(ty: WeightType) -> &'static [(u64, u64)] {
    match ty {
        WeightType::F32 => &[(4, 1)],
        WeightType::F16 | WeightType::BF16 => &[(2, 1)],
        WeightType::Q4_0 => &[(16, 32), (2, 32)],
        WeightType::Q4_1 => &[(16, 32), (4, 32)],
        WeightType::Q5_0 => &[(16, 32), (4, 32), (2, 32)],
        WeightType::Q5_1 => &[(16, 32), (4, 32), (4, 32)],
        WeightType::Q8_0 => &[(32, 32), (2, 32)],
        WeightType::MXFP4 => &[(16, 32), (1, 32)],
        WeightType::IQ4NL => &[(16, 32), (2, 32)],
        WeightType::IQ4XS => &[(16, 32), (8, 256)],
        WeightType::IQ3S => &[(8, 32), (4, 32), (1, 32), (6, 256)],
        WeightType::IQ3XXS => &[(8, 32), (4, 32), (2, 256)],
        WeightType::IQ2S => &[(8, 32), (2, 32), (2, 256)],
        WeightType::IQ2XS => &[(8, 32), (1, 32), (2, 256)],
        WeightType::IQ2XXS => &[(8, 32), (2, 256)],
        WeightType::IQ1S => &[(4, 32), (2, 32), (2, 256)],
        WeightType::IQ1M => &[(4, 32), (2, 32), (8, 256)],
        WeightType::TQ1_0 => &[(6, 32), (4, 256), (2, 256)],
        WeightType::TQ2_0 => &[(8, 32), (2, 256)],
        WeightType::NVFP4 => &[(16, 32), (2, 32)],
        WeightType::Q1_0 => &[(4, 32), (2, 128)],
        WeightType::Q2_0 => &[(8, 32), (2, 64)],
        WeightType::Q2K => &[(8, 32), (2, 32), (4, 256)],
        WeightType::Q3K => &[(8, 32), (4, 32), (12, 256), (2, 256)],
        WeightType::Q4K => &[(16, 32), (16, 256)],
        WeightType::Q5K => &[(16, 32), (4, 32), (16, 256)],
        WeightType::Q6K => &[(16, 32), (8, 32), (2, 32), (2, 256)],
    }
}

/// Bytes of a matrix of `rows` rows (outputs) and `cols` columns (inputs, contiguous in the file)
/// on the device: those in the file, each plane rounded up to [`PLANE_ALIGNMENT`].
///
/// # Errors
/// [`Error::Block`] if a row is no whole number of blocks, [`Error::TooLarge`]
/// beyond what a kernel can count.
pub fn device_bytes(ty: WeightType, rows: u64, cols: u64) -> Result<u64, Error> {
    check(ty, rows, cols)?;
    Ok(planes(ty)
        .iter()
        .map(|(bytes, weights)| {
            (rows * (cols * bytes).div_ceil(*weights)).next_multiple_of(PLANE_ALIGNMENT)
        })
        .sum())
}

/// Bytes of `rows` rows in the file.
///
/// # Errors
/// As [`device_bytes`].
pub fn file_bytes(ty: WeightType, rows: u64, cols: u64) -> Result<u64, Error> {
    check(ty, rows, cols)?;
    Ok(rows * (cols / ty.block_size() as u64) * ty.block_bytes() as u64)
}

fn check(ty: WeightType, rows: u64, cols: u64) -> Result<(), Error> {
    let block = ty.block_size();
    if !cols.is_multiple_of(block as u64) {
        return Err(Error::Block { ty, cols, block });
    }
    super::error::count("the number of a matrix's rows", rows)?;
    super::error::count("the number of a matrix's columns", cols)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_have_the_bytes_of_the_file() {
        for ty in WeightType::ALL {
            for (rows, cols) in [(1, 256), (4096, 4096), (1000, 14336), (151_936, 768)] {
                let (device, file) = (
                    device_bytes(ty, rows, cols).unwrap(),
                    file_bytes(ty, rows, cols).unwrap(),
                );
                let padding = planes(ty).len() as u64 * (PLANE_ALIGNMENT - 1);
                assert!(
                    (file..=file + padding).contains(&device),
                    "{ty} {rows} x {cols}: {device} on the device, {file} in the file"
                );
            }
        }
    }

    #[test]
    fn a_row_that_is_no_whole_number_of_blocks_is_refused() {
        assert_eq!(
            device_bytes(WeightType::Q4K, 4, 288),
            Err(Error::Block {
                ty: WeightType::Q4K,
                cols: 288,
                block: 256
            })
        );
        assert!(device_bytes(WeightType::F16, 4, 77).is_ok());
    }
}

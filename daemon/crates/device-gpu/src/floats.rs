//! Floats as the bytes that are copied.

pub(super) fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: f32 has no padding, and any byte is a u8.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

pub(super) fn bytes_of_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: f32 has no padding, every bit pattern is one, and the values are
    // borrowed as long as the bytes.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size_of_val(values)) }
}

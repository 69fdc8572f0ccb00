//! Code objects on their way to a driver, and what the kernel says about its drivers.

/// A code object's bytes, aligned as an ELF header wants it and followed by
/// zeros, which end PTX text.
pub(super) struct AlignedImage(Box<[u64]>);

impl AlignedImage {
    /// Copies an image.
    pub(super) fn new(image: &[u8]) -> AlignedImage {
        let mut words = vec![0u64; image.len() / 8 + 1];
        for (word, chunk) in words.iter_mut().zip(image.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(bytes);
        }
        AlignedImage(words.into_boxed_slice())
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

/// The version of a loaded kernel module, as its vendor numbers the driver; not all modules say
/// one.
pub(super) fn kernel_module_version(module: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/sys/module/{module}/version")).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_keeps_its_bytes_and_ends_in_zero() {
        for len in [0usize, 1, 7, 8, 9, 1000] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 255) as u8 + 1).collect();
            let image = AlignedImage::new(&bytes);
            let copy: Vec<u8> = image.0.iter().flat_map(|w| w.to_ne_bytes()).collect();
            assert_eq!(&copy[..len], &bytes[..]);
            assert_eq!(copy[len], 0);
            assert_eq!(image.as_ptr() as usize % 8, 0);
        }
    }
}

//! A kernel launch as a value: entry, geometry, and one by-value struct of arguments.

/// An address in a device's memory; 0 is null.
pub type Address = u64;

/// Maximum number of bytes of one launch's arguments.
pub const ARG_BYTES_MAX: usize = 1024;

/// The bytes of the argument struct, as the kernel reads them (little-endian, C layout).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgBytes {
    /// Words, so that the bytes are aligned like any field of the struct.
    words: Vec<u64>,
    len: usize,
}

impl ArgBytes {
    /// The struct's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.truncate(self.len);
        bytes
    }

    /// The bytes as words in memory order (on a little-endian machine), the last one padded with
    /// zeros: what a driver's launch call is given the address of.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Bytes of the struct.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no arguments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn of<T: ArgField>(args: &T) -> ArgBytes {
        const { assert!(size_of::<T>() <= ARG_BYTES_MAX && size_of::<T>().is_multiple_of(8)) };
        let mut bytes = vec![0; size_of::<T>()];
        args.put(&mut bytes);
        let (words, _) = bytes.as_chunks::<8>();
        ArgBytes {
            words: words.iter().map(|w| u64::from_le_bytes(*w)).collect(),
            len: bytes.len(),
        }
    }
}

/// A launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// `unit.entry`: a unit of [`units`](super::units) and an entry in it.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// The arguments.
    pub args: ArgBytes,
    /// Whether the launch may begin while the previous launch on its stream still runs (CUDA: the
    /// launch attribute programmatic stream serialization, id 6; in a captured graph too). The
    /// kernel itself waits before it reads what that launch wrote. Only in a chain of launches
    /// that all have this, the first one excepted: before it waits, a kernel reads weights,
    /// positions and page tables, which no launch of the chain may write. Saves 1 us a launch in
    /// decode. Of no effect on AMD.
    pub overlaps: bool,
}

impl Launch {
    /// The unit that has the entry.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        self.kernel.split_once('.').map_or("", |(unit, _)| unit)
    }

    /// The entry's name in the compiled unit.
    #[must_use]
    pub fn entry(&self) -> &'static str {
        self.kernel.split_once('.').map_or("", |(_, entry)| entry)
    }
}

/// Something that can be written into a struct of arguments at its place.
pub(crate) trait ArgField {
    /// Writes itself into `size_of::<Self>()` bytes.
    fn put(&self, to: &mut [u8]);

    /// What [`ArgField::put`] wrote into these `size_of::<Self>()` bytes.
    fn take(from: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl ArgField for $ty {
            fn put(&self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }

            fn take(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<$ty>()];
                bytes.copy_from_slice(from);
                <$ty>::from_le_bytes(bytes)
            }
        }
    )* };
}
numbers!(u32, u64, f32);

impl<T: ArgField, const N: usize> ArgField for [T; N] {
    fn put(&self, to: &mut [u8]) {
        for (item, to) in self.iter().zip(to.chunks_exact_mut(size_of::<T>())) {
            item.put(to);
        }
    }

    fn take(from: &[u8]) -> Self {
        std::array::from_fn(|i| T::take(&from[i * size_of::<T>()..][..size_of::<T>()]))
    }
}

/// Declares a `#[repr(C)]` struct of arguments of a known size, how it becomes bytes, and how
/// whoever carries a launch out reads them again.
macro_rules! arg_struct {
    ($(#[$meta:meta])* $name:ident: $size:literal { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Default)]
        #[repr(C)]
        #[allow(
            missing_docs,
            unreachable_pub,
            reason = "public where its module is; the fields are documented at the twin in hip/"
        )]
        pub struct $name { $($(#[$field_meta])* pub $field: $ty,)* }

        const _: () = assert!(size_of::<$name>() == $size);

        impl $crate::launch::ArgField for $name {
            fn put(&self, to: &mut [u8]) {
                $(
                    let at = std::mem::offset_of!($name, $field);
                    $crate::launch::ArgField::put(&self.$field, &mut to[at..at + size_of::<$ty>()]);
                )*
            }

            fn take(from: &[u8]) -> Self {
                Self { $(
                    $field: {
                        let at = std::mem::offset_of!($name, $field);
                        $crate::launch::ArgField::take(&from[at..at + size_of::<$ty>()])
                    },
                )* }
            }
        }

        impl $name {
            /// The struct of a launch's bytes; `None` if they are not as many as it has.
            #[must_use]
            #[allow(
                dead_code,
                unreachable_pub,
                reason = "public where its module is; parts of other structs are not read by themselves"
            )]
            pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
                (bytes.len() == size_of::<Self>()).then(|| $crate::launch::ArgField::take(bytes))
            }
        }

        #[cfg(test)]
        impl $name {
            /// Field names in order, for the comparison with the source.
            pub(crate) const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];
        }
    };
}
pub(crate) use arg_struct;

#[cfg(test)]
mod tests {
    use super::*;

    arg_struct! {
        /// Of every kind of field.
        Example: 32 {
            a: u64,
            b: [u32; 2],
            c: f32,
            d: u32,
            e: u64,
        }
    }

    #[test]
    fn arguments_lie_as_in_c() {
        let args = ArgBytes::of(&Example {
            a: 1,
            b: [2, 3],
            c: 1.0,
            d: 4,
            e: u64::MAX,
        });
        let mut expected = Vec::new();
        expected.extend(1u64.to_le_bytes());
        expected.extend([2, 0, 0, 0, 3, 0, 0, 0]);
        expected.extend(1.0f32.to_le_bytes());
        expected.extend([4, 0, 0, 0]);
        expected.extend([255; 8]);
        assert_eq!(args.to_bytes(), expected);
        let back = Example::from_bytes(&expected).unwrap();
        assert_eq!((back.b, back.d, back.e), ([2, 3], 4, u64::MAX));
        assert_eq!(Example::from_bytes(&expected[1..]), None);
        assert_eq!((args.len(), args.words().len()), (32, 4));
        assert_eq!(Example::FIELDS, ["a", "b", "c", "d", "e"]);
    }
}

//! Many byte strings in one buffer, and the hash table that finds one of them.

use std::hash::BuildHasher;

use hashbrown::HashTable;

use crate::Error;

/// Byte strings, numbered from 0, in one allocation.
#[derive(Debug, Default, Clone)]
pub(crate) struct Texts {
    bytes: Vec<u8>,
    /// End of each string in `bytes`.
    ends: Vec<u32>,
}

impl Texts {
    /// An upper bound on all strings of a vocabulary or its merges together.
    pub(crate) const MAX_BYTES: usize = 256 << 20;

    pub(crate) fn with_capacity(strings: usize, bytes: usize) -> Texts {
        Texts {
            bytes: Vec::with_capacity(bytes),
            ends: Vec::with_capacity(strings),
        }
    }

    /// Appends the string that `write` adds to the buffer.
    pub(crate) fn push_with(
        &mut self,
        key: &'static str,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Error> {
        write(&mut self.bytes);
        if self.bytes.len() > Self::MAX_BYTES {
            return Err(Error::Size {
                key,
                len: self.bytes.len() as u64,
                unit: "bytes",
                max: Self::MAX_BYTES as u64,
            });
        }
        self.ends.push(self.bytes.len() as u32);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)? as usize;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1] as usize,
        };
        Some(&self.bytes[start..end])
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let text = &self.bytes[start..end as usize];
            start = end as usize;
            text
        })
    }

    /// Bytes of all strings together.
    pub(crate) fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<u32>()
    }

    /// Gives back what was reserved for more strings.
    pub(crate) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.ends.shrink_to_fit();
    }

    /// Bytes of the longest string.
    pub(crate) fn max_len(&self) -> usize {
        self.iter().map(<[u8]>::len).max().unwrap_or(0)
    }
}

/// Finds the id of a text. Holds ids only; the texts stay where they are.
///
/// The hash is seeded at random, so that a file cannot choose collisions.
#[derive(Debug)]
pub(crate) struct TextIndex {
    table: HashTable<u32>,
    hasher: foldhash::fast::RandomState,
    max_len: usize,
}

impl TextIndex {
    /// Indexes the texts that `keep` accepts. Empty texts have no entry.
    pub(crate) fn build(texts: &Texts, keep: impl Fn(u32) -> bool) -> Result<TextIndex, Error> {
        let hasher = foldhash::fast::RandomState::default();
        let mut table = HashTable::with_capacity(texts.len());
        let mut max_len = 0;
        let hash_of = |id: u32| hasher.hash_one(texts.get(id as usize).unwrap_or_default());
        for (id, text) in texts.iter().enumerate() {
            let id = id as u32;
            if text.is_empty() || !keep(id) {
                continue;
            }
            max_len = max_len.max(text.len());
            let hash = hasher.hash_one(text);
            let same = |&other: &u32| texts.get(other as usize) == Some(text);
            match table.entry(hash, same, |&other| hash_of(other)) {
                hashbrown::hash_table::Entry::Vacant(place) => {
                    place.insert(id);
                }
                hashbrown::hash_table::Entry::Occupied(place) => {
                    return Err(Error::DuplicateToken {
                        first: *place.get(),
                        second: id,
                        text: String::from_utf8_lossy(text).into_owned(),
                    });
                }
            }
        }
        Ok(TextIndex {
            table,
            hasher,
            max_len,
        })
    }

    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.table.allocation_size()
    }

    /// The id of `text` among `texts`, which must be those of `build`.
    pub(crate) fn find(&self, texts: &Texts, text: &[u8]) -> Option<u32> {
        if text.len() > self.max_len {
            return None;
        }
        self.table
            .find(self.hasher.hash_one(text), |&id| {
                texts.get(id as usize) == Some(text)
            })
            .copied()
    }

    /// Bytes of the longest text that can be found.
    pub(crate) fn max_len(&self) -> usize {
        self.max_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(list: &[&str]) -> Texts {
        let mut texts = Texts::default();
        for text in list {
            texts
                .push_with("test", |buffer| buffer.extend_from_slice(text.as_bytes()))
                .unwrap();
        }
        texts
    }

    #[test]
    fn finds_what_is_there_and_nothing_else() {
        let texts = texts(&["a", "", "bc", "", "def"]);
        let index = TextIndex::build(&texts, |id| id != 2).unwrap();
        assert_eq!(index.find(&texts, b"a"), Some(0));
        assert_eq!(index.find(&texts, b"def"), Some(4));
        assert_eq!(index.find(&texts, b""), None);
        assert_eq!(index.find(&texts, b"bc"), None);
        assert_eq!(index.find(&texts, b"defg"), None);
        assert_eq!(texts.get(5), None);
        assert_eq!(texts.iter().count(), 5);
    }

    #[test]
    fn two_ids_for_one_text_are_refused() {
        let texts = texts(&["x", "y", "x"]);
        let error = TextIndex::build(&texts, |_| true).unwrap_err();
        assert!(
            matches!(
                error,
                Error::DuplicateToken {
                    first: 0,
                    second: 2,
                    ..
                }
            ),
            "{error}"
        );
    }
}

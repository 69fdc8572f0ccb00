//! Takes a sound GGUF file apart, as far as it takes to spoil it in one place.
//!
//! The reader here trusts its input, a committed fixture, and shares nothing
//! with the daemon's parser.

use std::ops::Range;
use std::path::Path;

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// One metadata entry.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its key.
    pub key: String,
    /// Where the key's length begins.
    pub at: usize,
    /// Where the value's type is.
    pub type_at: usize,
    /// The value, an array's or a string's length included.
    pub value: Range<usize>,
}

/// One row of the tensor table.
#[derive(Debug, Clone)]
pub struct Row {
    /// The tensor's name.
    pub name: String,
    /// Where the name's length begins.
    pub at: usize,
    /// Where the number of dimensions is.
    pub n_dims_at: usize,
    /// Where the first dimension, the fastest one, is.
    pub dims_at: usize,
    /// Where the type is.
    pub type_at: usize,
    /// Where the offset is.
    pub offset_at: usize,
    /// The offset, from the beginning of the data.
    pub offset: u64,
}

/// A GGUF file in memory with the places of its parts.
#[derive(Debug, Clone)]
pub struct Forge {
    /// The whole file.
    pub bytes: Vec<u8>,
    /// The metadata in the file's order.
    pub entries: Vec<Entry>,
    /// The tensor table in the file's order.
    pub rows: Vec<Row>,
    /// Where the tensors' data begins.
    pub data_at: usize,
}

/// Where the version, the tensor count and the metadata count are.
pub const VERSION_AT: usize = 4;
/// See [`VERSION_AT`].
pub const TENSOR_COUNT_AT: usize = 8;
/// See [`VERSION_AT`].
pub const ENTRY_COUNT_AT: usize = 16;

impl Forge {
    /// Reads a sound file.
    ///
    /// # Panics
    /// When it is not there or not sound.
    pub fn open(path: &Path) -> Forge {
        let bytes =
            std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut reader = Reader {
            bytes: &bytes,
            at: TENSOR_COUNT_AT,
        };
        let (n_rows, n_entries) = (reader.u64(), reader.u64());
        let entries = (0..n_entries).map(|_| reader.entry()).collect();
        let rows = (0..n_rows).map(|_| reader.row()).collect();
        let data_at = reader.at.next_multiple_of(32);
        Forge {
            bytes,
            entries,
            rows,
            data_at,
        }
    }

    /// The metadata entry of a key.
    ///
    /// # Panics
    /// When the file has none.
    pub fn entry(&self, key: &str) -> &Entry {
        let found = self.entries.iter().find(|entry| entry.key == key);
        found.unwrap_or_else(|| panic!("no metadata key {key}"))
    }

    /// The row of a tensor.
    ///
    /// # Panics
    /// When the file has none.
    pub fn row(&self, name: &str) -> &Row {
        let found = self.rows.iter().find(|row| row.name == name);
        found.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Where a tensor's data begins in the file.
    pub fn data_of(&self, name: &str) -> usize {
        self.data_at + usize::try_from(self.row(name).offset).expect("the fixtures are small")
    }

    /// Overwrites bytes.
    pub fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Forge {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Overwrites a 32-bit number.
    pub fn put_u32(&mut self, at: usize, value: u32) -> &mut Forge {
        self.put(at, &value.to_le_bytes())
    }

    /// Overwrites a 64-bit number.
    pub fn put_u64(&mut self, at: usize, value: u64) -> &mut Forge {
        self.put(at, &value.to_le_bytes())
    }

    /// Gives the file another chat template, of fewer bytes than its own.
    ///
    /// # Panics
    /// When the template has too many.
    pub fn put_template(&mut self, template: &str) -> &mut Forge {
        let value = self.entry("tokenizer.chat_template").value.clone();
        // Behind the text's length; a comment fills what is left.
        let text = value.start + 8..value.end;
        let room = text.len().checked_sub(template.len() + "{##}".len());
        let filling = " ".repeat(room.expect("a template of fewer bytes"));
        self.put(text.start, format!("{template}{{#{filling}#}}").as_bytes())
    }

    /// Changes a name in place, to one as long.
    pub fn rename(&mut self, length_at: usize, name: &str) -> &mut Forge {
        let mut length = [0; 8];
        length.copy_from_slice(&self.bytes[length_at..length_at + 8]);
        assert_eq!(
            u64::from_le_bytes(length),
            name.len() as u64,
            "{name} has another length"
        );
        self.put(length_at + 8, name.as_bytes())
    }

    /// A place in every part of the file, with the part's name: cutting there
    /// leaves the part incomplete.
    pub fn cuts(&self) -> Vec<(String, usize)> {
        let mut cuts = vec![
            ("the magic".to_owned(), 2),
            ("the version".to_owned(), VERSION_AT),
            ("the tensor count".to_owned(), TENSOR_COUNT_AT + 3),
            ("the metadata count".to_owned(), ENTRY_COUNT_AT + 1),
        ];
        for entry in &self.entries {
            cuts.push((format!("the key {}", entry.key), entry.at + 9));
            cuts.push((format!("the value of {}", entry.key), entry.value.end - 1));
        }
        for row in &self.rows {
            cuts.push((format!("the name of {}", row.name), row.at + 9));
            cuts.push((format!("the dimensions of {}", row.name), row.dims_at + 3));
            cuts.push((format!("the offset of {}", row.name), row.offset_at + 7));
            let data = self.data_at + usize::try_from(row.offset).expect("the fixtures are small");
            cuts.push((format!("the data of {}", row.name), data + 1));
        }
        cuts.push(("the last byte".to_owned(), self.bytes.len() - 1));
        cuts
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.bytes[self.at..self.at + N]
            .try_into()
            .expect("N bytes");
        self.at += N;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn string(&mut self) -> String {
        let length = usize::try_from(self.u64()).expect("a sound length");
        let text = String::from_utf8_lossy(&self.bytes[self.at..self.at + length]).into_owned();
        self.at += length;
        text
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            STRING => drop(self.string()),
            ARRAY => {
                let element = self.u32();
                for _ in 0..self.u64() {
                    self.skip_value(element);
                }
            }
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            10..=12 => self.at += 8,
            other => panic!("{other} is no metadata type"),
        }
    }

    fn entry(&mut self) -> Entry {
        let at = self.at;
        let key = self.string();
        let type_at = self.at;
        let kind = self.u32();
        let start = self.at;
        self.skip_value(kind);
        Entry {
            key,
            at,
            type_at,
            value: start..self.at,
        }
    }

    fn row(&mut self) -> Row {
        let at = self.at;
        let name = self.string();
        let n_dims_at = self.at;
        let n_dims = self.u32();
        let dims_at = self.at;
        for _ in 0..n_dims {
            self.u64();
        }
        let type_at = self.at;
        self.u32();
        let offset_at = self.at;
        let offset = self.u64();
        Row {
            name,
            at,
            n_dims_at,
            dims_at,
            type_at,
            offset_at,
            offset,
        }
    }
}

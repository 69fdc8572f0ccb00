//! The index of the store: entries with their locations, and the order in which segment files are
//! deleted.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

/// Maximum number of entries: about 100 MiB of memory.
pub(crate) const ENTRIES_MAX: usize = 1 << 20;

/// Maximum number of segment files.
pub(crate) const SEGMENTS_MAX: usize = 1024;

/// The name of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// Scope of the entry: a client's entries have other keys than another's for the same content.
    pub scope: [u8; 16],
    /// Digest of what determines the bytes.
    pub digest: [u8; 32],
    /// Part of the content.
    pub slot: u16,
}

/// What the payload of an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A KV page.
    Page,
    /// A copy of recurrent states.
    State,
}

impl Kind {
    pub(crate) fn byte(self) -> u8 {
        match self {
            Kind::Page => 1,
            Kind::State => 2,
        }
    }

    pub(crate) fn of(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Kind::Page),
            2 => Some(Kind::State),
            _ => None,
        }
    }
}

/// The model that an entry belongs to, so that its entries can be deleted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelTag(pub [u8; 16]);

/// Where the bytes of an entry are.
#[derive(Debug, Clone)]
pub(crate) enum Location {
    /// The entry waits in the queue of the writer.
    Queued(Arc<Vec<u8>>),
    /// The entry is in a segment file, at the record's offset.
    Written {
        segment: u64,
        offset: u64,
        bytes: u32,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) location: Location,
    pub(crate) model: ModelTag,
    pub(crate) kind: Kind,
}

impl Entry {
    pub(crate) fn bytes(&self) -> u64 {
        match &self.location {
            Location::Queued(payload) => payload.len() as u64,
            Location::Written { bytes, .. } => u64::from(*bytes),
        }
    }
}

/// A segment file.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Time of the segment file's last use, counted in uses of any segment file; 0 if it has no
    /// entries.
    used: u64,
    /// The time of the last use that the file itself has.
    pub(crate) touched: SystemTime,
    keys: Vec<Key>,
    /// The models of its records; `None` if not all of them could be read.
    models: Option<Vec<ModelTag>>,
}

/// All entries and segments.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: HashMap<Key, Entry>,
    segments: BTreeMap<u64, Segment>,
    bytes: u64,
    clock: u64,
    /// The highest number that a segment had.
    highest: u64,
}

impl Index {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Bytes of all segment files.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// The number of the next segment.
    pub(crate) fn next_number(&self) -> u64 {
        self.highest + 1
    }

    pub(crate) fn add_segment(&mut self, number: u64, name: String, bytes: u64, at: SystemTime) {
        self.bytes += bytes;
        let segment = Segment {
            name,
            bytes,
            used: 0,
            touched: at,
            keys: Vec::new(),
            models: Some(Vec::new()),
        };
        self.highest = self.highest.max(number);
        self.segments.insert(number, segment);
    }

    pub(crate) fn segment(&mut self, number: u64) -> Option<&mut Segment> {
        self.segments.get_mut(&number)
    }

    /// Sets the size of a segment file.
    pub(crate) fn set_bytes(&mut self, number: u64, bytes: u64) {
        if let Some(segment) = self.segments.get_mut(&number) {
            self.bytes = self.bytes - segment.bytes + bytes;
            segment.bytes = bytes;
        }
    }

    /// A segment was used.
    pub(crate) fn touch(&mut self, number: u64) {
        self.clock += 1;
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.used = self.clock;
        }
    }

    /// Whether a segment has anything to use.
    pub(crate) fn has_entries(&self, number: u64) -> bool {
        let segment = self.segments.get(&number);
        segment.is_some_and(|segment| !segment.keys.is_empty())
    }

    /// Notes a use of an entry. Whether there is one.
    pub(crate) fn touch_entry(&mut self, key: &Key) -> bool {
        match self.entries.get(key).map(|entry| &entry.location) {
            None => return false,
            Some(Location::Queued(_)) => {}
            Some(&Location::Written { segment, .. }) => self.touch(segment),
        }
        true
    }

    /// An entry of the queue. Whether it was taken.
    pub(crate) fn queue(&mut self, key: Key, entry: Entry) -> bool {
        if self.entries.len() >= ENTRIES_MAX || self.entries.contains_key(&key) {
            return false;
        }
        self.entries.insert(key, entry);
        true
    }

    /// A segment has a record of a model.
    pub(crate) fn note_model(&mut self, number: u64, model: ModelTag) {
        let models = self.segments.get_mut(&number);
        if let Some(models) = models.and_then(|segment| segment.models.as_mut())
            && !models.contains(&model)
        {
            models.push(model);
        }
    }

    /// Not all records of a segment could be read.
    pub(crate) fn note_unread(&mut self, number: u64) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.models = None;
        }
    }

    /// A written entry.
    pub(crate) fn written(&mut self, number: u64, key: Key, entry: Entry) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.keys.push(key);
            self.entries.insert(key, entry);
        }
    }

    pub(crate) fn forget(&mut self, key: &Key) {
        self.entries.remove(key);
    }

    /// Forgets an entry that is still in this place.
    pub(crate) fn forget_at(&mut self, key: &Key, number: u64) {
        let is_there = |entry: &Entry| matches!(entry.location, Location::Written { segment, .. } if segment == number);
        if self.entries.get(key).is_some_and(is_there) {
            self.entries.remove(key);
        }
    }

    /// The segment that goes first, without the one that is written to.
    pub(crate) fn oldest(&self, but: Option<u64>) -> Option<u64> {
        let others = self.segments.iter().filter(|(n, _)| Some(**n) != but);
        let oldest = others.min_by_key(|(n, segment)| (segment.used, **n));
        oldest.map(|(n, _)| *n)
    }

    /// Forgets a segment and its entries. Its name.
    pub(crate) fn drop_segment(&mut self, number: u64) -> Option<String> {
        let segment = self.segments.remove(&number)?;
        self.bytes -= segment.bytes;
        for key in &segment.keys {
            self.forget_at(key, number);
        }
        Some(segment.name)
    }

    /// Segments that may have records of a model, or all; each with its entries of other models.
    pub(crate) fn segments_of(&self, model: Option<ModelTag>) -> Vec<(u64, Vec<Key>)> {
        let may_have = |segment: &Segment| match (model, &segment.models) {
            (Some(model), Some(models)) => models.contains(&model),
            _ => true,
        };
        let of_others = |number: u64, key: &&Key| {
            let entry = self.entries.get(*key);
            entry.is_some_and(|entry| {
                let is_here = matches!(
                    entry.location,
                    Location::Written { segment, .. } if segment == number
                );
                is_here && model.is_some_and(|model| entry.model != model)
            })
        };
        let segments = self
            .segments
            .iter()
            .filter(|(_, segment)| may_have(segment));
        let with_others = segments.map(|(&number, segment)| {
            let others = segment.keys.iter().filter(|key| of_others(number, key));
            (number, others.copied().collect())
        });
        with_others.collect()
    }

    /// Forgets queued entries of a model, or all. The writer skips them.
    pub(crate) fn forget_queued(&mut self, model: Option<ModelTag>) {
        self.entries.retain(|_, entry| {
            !matches!(entry.location, Location::Queued(_))
                || model.is_some_and(|m| entry.model != m)
        });
    }
}

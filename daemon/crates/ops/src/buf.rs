//! Activation buffers and where they lie in the scratch block.
//!
//! Every buffer is f32, `[rows][width]`, width fastest. Two buffers may share memory if no
//! operation needs both; a plan computes that from its operations ([`Conflicts`]).

/// An activation buffer of a plan, by its index in the plan's list of [`BufSpec`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buf(pub u8);

/// The count from which a buffer has its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rows {
    /// One row a token of the batch.
    Tokens,
    /// One row a token whose logits are wanted.
    Outputs,
    /// A number of rows a token: one for each expert that the token is routed to.
    Routed(u32),
    /// One row for so many tokens that follow each other: a block of an image's patches.
    Merged(u32),
}

/// An activation buffer: f32 `[rows][width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufSpec {
    /// Name for messages.
    pub name: &'static str,
    /// Elements a row.
    pub width: u64,
    /// Count of rows of the buffer.
    pub rows: Rows,
}

/// How many rows a pass has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowCounts {
    /// Tokens.
    pub tokens: u64,
    /// Tokens whose logits are wanted.
    pub outputs: u64,
}

impl RowCounts {
    /// Rows of a buffer.
    #[must_use]
    pub fn of(self, rows: Rows) -> u64 {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Outputs => self.outputs,
            Rows::Routed(n) => self.tokens * u64::from(n),
            Rows::Merged(n) => self.tokens / u64::from(n),
        }
    }
}

/// Which buffers must not share memory: bit `j` of word `i` for buffers `i` and `j`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflicts(Vec<[u64; 4]>);

impl Conflicts {
    /// No conflicts among `n` buffers: all may share memory.
    #[must_use]
    pub fn none(n: usize) -> Self {
        Self(vec![[0; 4]; n])
    }

    /// All conflicts among `n` buffers: each needs memory of its own.
    #[must_use]
    pub fn all(n: usize) -> Self {
        Self(vec![[u64::MAX; 4]; n])
    }

    /// Keeps two buffers apart.
    pub fn add(&mut self, a: Buf, b: Buf) {
        for (a, b) in [(a, b), (b, a)] {
            self.0[usize::from(a.0)][usize::from(b.0) / 64] |= 1 << (b.0 % 64);
        }
    }

    /// Whether two buffers are kept apart.
    #[must_use]
    pub fn between(&self, a: Buf, b: Buf) -> bool {
        self.0[usize::from(a.0)][usize::from(b.0) / 64] >> (b.0 % 64) & 1 == 1
    }
}

/// A buffer's place in the scratch block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedBuf {
    /// Offset in the block in bytes.
    pub at: u64,
    /// Elements a row.
    pub width: u64,
    /// Count of rows of the buffer.
    pub rows: Rows,
}

/// Where the buffers lie in the scratch block, for a given number of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScratchLayout {
    /// Rows that the token buffers have room for.
    pub tokens: u64,
    /// Rows that the output buffers have room for.
    pub outputs: u64,
    /// Tables of rotations that a pass brings along.
    pub tables: u64,
    /// Experts of all layers: a pass that has all of them brings the places of all along.
    pub experts: u64,
    /// Whether products are to be as exact as f32 makes them: see
    /// [`Plan::float_weights`](crate::Plan::float_weights).
    pub float_weights: bool,
    /// Whether all rows of a sequence are in one pass and attend to each other: see
    /// [`Plan::both_ways`](crate::Plan::both_ways).
    pub both_ways: bool,
    /// Whether a pass tells of parts of its sequences, too: see [`KvGroup::parts`].
    ///
    /// [`KvGroup::parts`]: crate::KvGroup::parts
    pub parts: bool,
    /// Place of each buffer.
    pub bufs: Vec<PlacedBuf>,
    /// Bytes of the block, without a device's workspace.
    pub bytes: u64,
}

impl ScratchLayout {
    /// Elements that a buffer has room for.
    #[must_use]
    pub fn elements(&self, buf: Buf) -> u64 {
        let placed = &self.bufs[usize::from(buf.0)];
        let counts = RowCounts {
            tokens: self.tokens,
            outputs: self.outputs,
        };
        counts.of(placed.rows) * placed.width
    }

    /// Lays the buffers out for a pass of so many rows: each at the lowest offset at which it
    /// overlaps no buffer that it conflicts with, in the order of the list.
    #[must_use]
    pub fn new(specs: &[BufSpec], conflicts: &Conflicts, counts: RowCounts) -> Self {
        let size = |spec: &BufSpec| {
            (counts.of(spec.rows) * spec.width * 4).next_multiple_of(crate::ALIGNMENT)
        };
        let mut placed: Vec<(u64, u64)> = Vec::with_capacity(specs.len());
        for (i, spec) in specs.iter().enumerate() {
            let bytes = size(spec);
            let mut others: Vec<(u64, u64)> = placed
                .iter()
                .enumerate()
                .filter(|&(j, _)| conflicts.between(Buf(i as u8), Buf(j as u8)))
                .map(|(_, &place)| place)
                .collect();
            others.sort_unstable();
            let mut at = 0;
            for (from, to) in others {
                if at + bytes <= from {
                    break;
                }
                at = at.max(to);
            }
            placed.push((at, at + bytes));
        }
        Self {
            tokens: counts.tokens,
            outputs: counts.outputs,
            tables: 1,
            experts: 0,
            float_weights: false,
            both_ways: false,
            parts: false,
            bytes: placed.iter().map(|p| p.1).max().unwrap_or(0),
            bufs: specs
                .iter()
                .zip(placed)
                .map(|(spec, (at, _))| PlacedBuf {
                    at,
                    width: spec.width,
                    rows: spec.rows,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_conflict_lie_apart_and_others_share() {
        let spec = |width| BufSpec {
            name: "b",
            width,
            rows: Rows::Tokens,
        };
        let specs = [spec(64), spec(128), spec(64), spec(32)];
        let mut conflicts = Conflicts::none(4);
        conflicts.add(Buf(0), Buf(1));
        conflicts.add(Buf(1), Buf(2));
        conflicts.add(Buf(0), Buf(3));
        let counts = RowCounts {
            tokens: 1,
            outputs: 1,
        };
        let layout = ScratchLayout::new(&specs, &conflicts, counts);
        let at: Vec<u64> = layout.bufs.iter().map(|b| b.at).collect();
        assert_eq!(at, [0, 256, 0, 256]);
        assert_eq!(layout.bytes, 256 + 512);
    }
}

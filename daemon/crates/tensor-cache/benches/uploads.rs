//! What a decision costs where a MoE model that does not fit streams its experts for a long prompt,
//! beside models that stay and KV blocks that come and go. `cargo bench -p rocmforge-tensor-cache
//! --bench uploads`. Counted is the time of all acquisitions and prefetches, not that of reserving
//! blocks. A link of 55 GB/s brings an expert of 3 MB in 54 us: the thread that decides
//! should need a fraction of that.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rocmforge_tensor_cache::{
    Acquired, Action, BlockId, BlockKind, Cache, CacheConfig, ModelId, PassHint, SegmentId,
    SegmentSpec,
};

const MIB: u64 = 1 << 20;
const BUDGET: u64 = 12 << 30;
const LAYERS: u32 = 48;
const EXPERTS: u32 = 128;
const MOE: ModelId = ModelId(4);
const PASSES: u32 = 6;
const SEED: u64 = 5;
const GOES_ON: PassHint = PassHint {
    expects_next_pass: true,
};

/// Uploads under way at most: as many as the engine begins.
const UPLOADS: usize = 64;

/// Layers of attention and experts as a Q4_K_M file has them: of half of the layers they are
/// larger.
fn moe() -> (Vec<SegmentSpec>, Vec<u32>) {
    let mut segments = vec![SegmentSpec::ordered(180 * MIB)];
    let mut layers = Vec::new();
    for layer in 0..LAYERS {
        segments.push(SegmentSpec::ordered(13 * MIB));
        layers.push(segments.len() as u32);
        let middle = LAYERS / 8..LAYERS * 7 / 8;
        let bytes = match !middle.contains(&layer) || layer % 3 == 2 {
            true => 3_059_712,
            false => 2_654_208,
        };
        segments.extend((0..EXPERTS).map(|_| SegmentSpec::expert(bytes)));
    }
    segments.push(SegmentSpec::ordered(250 * MIB));
    (segments, layers)
}

/// KV pages of small models and of large ones, most of which a prefix cache holds.
const BLOCKS_MAX: usize = 8000;
const BLOCKS_A_PASS: usize = 4;
const BLOCK_BYTES: [u64; 8] = [
    MIB / 16,
    MIB / 16,
    MIB / 16,
    MIB / 16,
    MIB / 16,
    MIB / 8,
    MIB / 8,
    MIB / 2,
];

struct Load {
    cache: Cache,
    actions: Vec<Action>,
    in_flight: VecDeque<SegmentId>,
    blocks: Vec<BlockId>,
    rng: StdRng,
    deciding: Duration,
    uploads: u64,
    moves: u64,
}

impl Load {
    fn new() -> Self {
        let mut config = CacheConfig::new(BUDGET);
        config.max_in_flight = UPLOADS as u32;
        Self {
            cache: Cache::new(config),
            actions: Vec::new(),
            in_flight: VecDeque::new(),
            blocks: Vec::new(),
            rng: StdRng::seed_from_u64(SEED),
            deciding: Duration::ZERO,
            uploads: 0,
            moves: 0,
        }
    }

    fn execute(&mut self) {
        for action in self.actions.drain(..) {
            match action {
                Action::Upload { segment, .. } => {
                    self.uploads += 1;
                    self.in_flight.push_back(segment);
                }
                Action::Move { .. } => self.moves += 1,
                Action::Evict { .. } => {}
            }
        }
    }

    /// All uploads but the last `left` are there.
    fn arrive(&mut self, left: usize) {
        while self.in_flight.len() > left {
            let segment = self.in_flight.pop_front().expect("looked at above");
            self.cache.uploaded(segment);
        }
    }

    fn timed<T>(&mut self, decide: impl FnOnce(&mut Cache, &mut Vec<Action>) -> T) -> T {
        let begun = Instant::now();
        let decided = decide(&mut self.cache, &mut self.actions);
        self.deciding += begun.elapsed();
        self.execute();
        decided
    }

    /// A pass of a model that stays, and KV blocks of its sequences.
    fn other(&mut self, model: ModelId, segments: u32) {
        self.cache.pass_begin(model, GOES_ON).expect("registered");
        for index in 0..segments {
            let segment = SegmentId { model, index };
            self.acquire(segment);
            self.cache.release(segment);
        }
        self.cache.pass_end(model);
        for _ in 0..BLOCKS_A_PASS {
            if self.blocks.len() > BLOCKS_MAX {
                let at = self.rng.random_range(0..self.blocks.len());
                let block = self.blocks.swap_remove(at);
                self.cache.free(block);
            }
            let bytes = BLOCK_BYTES[self.rng.random_range(0..BLOCK_BYTES.len())];
            let reserved = self
                .cache
                .reserve(BlockKind::Kv, None, bytes, &mut self.actions);
            self.execute();
            self.blocks.extend(reserved.ok());
        }
    }

    fn acquire(&mut self, segment: SegmentId) {
        loop {
            match self.timed(|cache, actions| cache.acquire(segment, actions)) {
                Ok(Acquired::Resident(_)) => return,
                Ok(_) => return self.arrive(0),
                Err(error) if self.in_flight.is_empty() => panic!("{error}"),
                Err(_) => self.arrive(0),
            }
        }
    }

    /// A pass of a long prompt: nearly all experts of each layer, those that are there first.
    fn prompt(&mut self, layers: &[u32], others: &[(ModelId, u32)]) {
        self.cache.pass_begin(MOE, GOES_ON).expect("registered");
        for &first in layers {
            let attention = SegmentId {
                model: MOE,
                index: first - 1,
            };
            self.acquire(attention);
            self.cache.release(attention);
            let mut experts: Vec<u32> = (first..first + EXPERTS).collect();
            experts.shuffle(&mut self.rng);
            let id = |index| SegmentId { model: MOE, index };
            let (there, absent): (Vec<u32>, Vec<u32>) =
                experts.into_iter().partition(|&e| self.cache.holds(id(e)));
            self.arrive(UPLOADS / 2);
            for index in there {
                self.acquire(id(index));
                self.cache.release(id(index));
            }
            for now in absent.chunks(UPLOADS / 2) {
                for &index in now {
                    self.arrive(UPLOADS - 1);
                    self.timed(|cache, actions| cache.prefetch_needed(id(index), actions));
                }
                // Others run while they come.
                for &(model, segments) in others {
                    self.other(model, segments);
                }
                self.arrive(0);
                for &index in now {
                    self.acquire(id(index));
                    self.cache.release(id(index));
                }
            }
        }
        self.cache.pass_end(MOE);
    }
}

fn main() {
    let mut load = Load::new();
    let others = [(ModelId(0), 12), (ModelId(1), 12), (ModelId(2), 99)];
    for (model, segments, bytes) in [(0, 12, MIB / 4), (1, 12, MIB / 2), (2, 99, 47 * MIB)] {
        let specs = vec![SegmentSpec::ordered(bytes); segments];
        let registered = load.cache.register(ModelId(model), &specs);
        registered.expect("it fits");
    }
    let (segments, layers) = moe();
    load.cache.register(MOE, &segments).expect("it fits");
    println!("pass, uploads, moves, us of the thread an upload");
    for pass in 0..PASSES {
        let before = (load.deciding, load.uploads, load.moves);
        load.prompt(&layers, &others);
        let uploads = load.uploads - before.1;
        let us = (load.deciding - before.0).as_secs_f64() * 1e6;
        println!(
            "{pass}, {uploads}, {}, {:.1}",
            load.moves - before.2,
            us / uploads as f64
        );
    }
    load.cache.assert_consistent();
}

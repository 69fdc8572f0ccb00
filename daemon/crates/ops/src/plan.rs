//! A plan: how a pass of one model runs, made of its header alone.
//!
//! Steps run in order. Nothing of a segment is needed but while its step runs, so that a
//! model that is larger than its budget runs segment by segment. A plan holds indices and
//! places in the file, never data.

use std::fmt;

use crate::buf::{Buf, BufSpec, Conflicts, RowCounts, ScratchLayout};
use crate::experts::ExpertFfn;
use crate::kv::{KvGroup, KvType};
use crate::op::Op;
use crate::rope::RopeSpec;
use crate::tensor::TensorDesc;

/// Operations that a device may compute as one, reading the first one's inputs while it
/// writes the last one's outputs. So a buffer's memory is another's only so many
/// operations after its last use.
pub const FUSED_OPS_MAX: usize = 3;

/// Maximum number of buffers of a plan.
pub const BUFS_MAX: usize = 256;

/// How a pass uses a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// Every pass, at the same place of the order.
    Ordered,
    /// An expert, used by the rows that are routed to it.
    Expert {
        /// The layer, counted among the layers with experts.
        layer: u32,
    },
}

/// The unit of residency: weights that are uploaded and evicted together.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// For example `blk.{i}.attn`, `blk.{i}.ffn_up`, `blk.{i}.exps.{e}` or `output`.
    pub name: String,
    /// Kind of the segment, which says when it is used.
    pub kind: SegmentKind,
    /// The segment's tensors, in the order that operations name them by index.
    pub tensors: Vec<TensorDesc>,
}

impl Segment {
    /// Bytes in the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }
}

/// A step of a pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Operations on the weights of one segment, or on none.
    Run {
        /// The segment.
        segment: Option<u32>,
        /// The operations, in order.
        ops: Vec<Op>,
        /// Buffers whose content later steps read.
        live_out: Vec<Buf>,
    },
    /// The feed-forwards of those experts that rows are routed to.
    Experts {
        /// The segment of the first experts; the others' follow it.
        first_segment: u32,
        /// Experts.
        n_expert: u32,
        /// Experts a segment; the last segment may have fewer.
        per_segment: u32,
        /// What each computes.
        ffn: ExpertFfn,
    },
}

/// Rows that a pass begins with, one for each of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The table, `[width, n_vocab]` in ggml's order; of rows that are none of a table their type
    /// and width.
    pub table: TensorDesc,
    /// Where the rows go.
    pub buf: Buf,
    /// Kind of the rows.
    pub rows: InputRows,
}

/// Kind of the rows that a pass begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputRows {
    /// A table's, by the tokens' ids; an image's in the place of those of its tokens.
    Tokens,
    /// A table's, by the tokens' ids; the first row, the padding token's, for those of an image.
    TextTokens,
    /// The residual stream of another plan.
    Stream,
    /// What an image's tower kept for a layer of the text model, 0 for the first; zeros for text.
    Deepstack(u8),
    /// An image's patches.
    Patches,
    /// The learned positions of an image's patches.
    GridPositions,
    /// Each row's scales of the model's adapters; zeros for a row without any.
    AdapterScales,
}

/// How a pass of one model runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The segments, those of ordered kind in the order of a pass.
    pub segments: Vec<Segment>,
    /// The steps of a pass.
    pub steps: Vec<Step>,
    /// Steps from this one on work on the rows whose logits are wanted, and are left out where none
    /// is.
    pub head_step: usize,
    /// Buffers that are filled before the first step.
    pub inputs: Vec<Input>,
    /// Where the last step leaves the logits, `[outputs][n_vocab]`.
    pub logits: Buf,
    /// Buffer of the normed rows from which logits are computed, `[outputs][n_embd]`.
    pub hidden: Buf,
    /// The residual stream behind the last layer, `[tokens][n_embd]`, where it is to stay readable
    /// to the pass's end: another plan's input.
    pub stream: Option<Buf>,
    /// Activation buffers.
    pub bufs: Vec<BufSpec>,
    /// Buffers that must not share memory.
    pub conflicts: Conflicts,
    /// Keys and values.
    pub kv: Vec<KvGroup>,
    /// f32 elements of recurrent state that a sequence has; they are zero
    /// before its first position.
    pub state_elements: u64,
    /// Tables of rotations.
    pub ropes: Vec<RopeSpec>,
    /// Whether no matrix is quantized. Who takes a file of floats wants their precision: a device
    /// rounds no input of a product to less than 22 bits then, whatever that costs.
    pub float_weights: bool,
    /// Whether rows attend to later rows of their sequence: then a pass has all rows of a sequence
    /// or none, and nothing of it is kept behind the pass.
    pub both_ways: bool,
}

impl Plan {
    /// About how many bytes of memory the plan takes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let tensor = |t: &TensorDesc| size_of::<TensorDesc>() + t.name.capacity();
        let segment = |s: &Segment| {
            let tensors: usize = s.tensors.iter().map(tensor).sum();
            size_of::<Segment>() + s.name.capacity() + tensors
        };
        let step = |s: &Step| {
            let inside = match s {
                Step::Run { ops, live_out, .. } => {
                    size_of_val(&ops[..]) + size_of_val(&live_out[..])
                }
                Step::Experts { .. } => 0,
            };
            size_of::<Step>() + inside
        };
        let segments: usize = self.segments.iter().map(segment).sum();
        segments + self.steps.iter().map(step).sum::<usize>()
    }
}

/// A fault of a plan: a bug of the builder that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanFault(String);

impl fmt::Display for PlanFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PlanFault {}

/// What one operation or one step of experts does to buffers.
struct Use {
    step: usize,
    name: &'static str,
    reads: Vec<Buf>,
    writes: Vec<Buf>,
    temporaries: Vec<Buf>,
}

/// The uses of all steps, in order.
fn uses(steps: &[Step]) -> Vec<Use> {
    let mut uses = Vec::new();
    let new = |step, name| Use {
        step,
        name,
        reads: Vec::new(),
        writes: Vec::new(),
        temporaries: Vec::new(),
    };
    for (i, step) in steps.iter().enumerate() {
        match step {
            Step::Run { ops, .. } => {
                for op in ops {
                    let mut u = new(i, op.name());
                    op.buffers(&mut |b| u.reads.push(b), &mut |b| u.writes.push(b));
                    u.temporaries.extend(op.temporary());
                    uses.push(u);
                }
            }
            Step::Experts { ffn, .. } => {
                let mut u = new(i, "experts");
                ffn.buffers(&mut |b| u.reads.push(b), &mut |b| u.writes.push(b));
                u.temporaries.extend(ffn.temporaries());
                uses.push(u);
            }
        }
    }
    uses
}

impl Plan {
    /// Positions of a sequence up to which it has the usual divisors of frequencies, where there
    /// are others for longer ones.
    #[must_use]
    pub fn long_beyond(&self) -> Option<u32> {
        let long = self.ropes.iter().filter_map(|r| r.long.as_ref());
        long.map(|l| l.beyond).min()
    }

    /// Whether a sequence that may come to so many positions rotates by the divisors for long ones.
    #[must_use]
    pub fn rotates_long(&self, positions: usize) -> bool {
        self.long_beyond().is_some_and(|n| positions > n as usize)
    }

    /// Elements of an embedding: the width of [`Plan::hidden`].
    #[must_use]
    pub fn embedding_width(&self) -> u64 {
        self.bufs[usize::from(self.hidden.0)].width
    }

    /// Elements of a row of [`Plan::logits`].
    #[must_use]
    pub fn logits_width(&self) -> u64 {
        self.bufs[usize::from(self.logits.0)].width
    }

    /// The layout of the scratch block.
    #[must_use]
    pub fn scratch(&self, counts: RowCounts) -> ScratchLayout {
        let experts = self.steps.iter().map(|step| match step {
            Step::Experts { n_expert, .. } => u64::from(*n_expert),
            Step::Run { .. } => 0,
        });
        ScratchLayout {
            tables: self.ropes.len() as u64,
            experts: experts.sum(),
            float_weights: self.float_weights,
            both_ways: self.both_ways,
            parts: self.kv.iter().any(|group| group.parts),
            ..ScratchLayout::new(&self.bufs, &self.conflicts, counts)
        }
    }

    /// What keys and values are stored as where nobody says: f32 for a model whose weights are
    /// floats and that f16 would move, f16 for every other one.
    ///
    /// What f16 rounds off of a key reaches the score times the factor on the product. With the
    /// usual factor, 1 / sqrt(head size), it is not felt; Gemma 4 has a factor of 1. A mixture
    /// feels it where two experts are nearly equal at the router's cut, and goes to the other one.
    /// Who has quantized its weights wants small more than exact.
    #[must_use]
    pub fn kv_type_default(&self) -> KvType {
        let as_they_are = |op: &Op| matches!(op, Op::Attention { scale, .. } if *scale >= 1.0);
        let mut steps = self.steps.iter();
        let moved = steps.any(|step| match step {
            Step::Run { ops, .. } => ops.iter().any(as_they_are),
            Step::Experts { .. } => true,
        });
        match self.float_weights && moved {
            true => KvType::F32,
            false => KvType::F16,
        }
    }

    /// Steps of a pass that wants logits of some rows, or of none.
    #[must_use]
    pub fn steps_for(&self, outputs: bool) -> &[Step] {
        if outputs {
            &self.steps
        } else {
            &self.steps[..self.head_step]
        }
    }

    /// Finds out which buffers live at the same time, what each step leaves to later ones, and
    /// whether the operations read only what was written before.
    ///
    /// `carried` tells what the builder declared to be alive behind each step.
    ///
    /// # Errors
    /// A buffer that is read before it is written, that is never read, or that is alive behind a
    /// step that does not declare it.
    pub fn settle_lifetimes(&mut self, carried: &[Vec<Buf>]) -> Result<(), PlanFault> {
        assert!(
            self.bufs.len() <= BUFS_MAX,
            "more buffers than a Buf can name"
        );
        let uses = uses(&self.steps);
        let name = |b: Buf| self.bufs[usize::from(b.0)].name;
        let mut alive: Vec<Buf> = vec![self.logits];
        alive.extend(self.stream);
        let mut live_out: Vec<Vec<Buf>> = vec![Vec::new(); self.steps.len()];
        // What is alive after each use, found from the end.
        let mut after: Vec<Vec<Buf>> = vec![Vec::new(); uses.len()];
        for (i, u) in uses.iter().enumerate().rev() {
            let last_of_step = uses.get(i + 1).is_none_or(|next| next.step != u.step);
            if last_of_step {
                live_out[u.step] = alive.clone();
            }
            after[i] = alive.clone();
            for &b in &u.writes {
                if !alive.contains(&b) {
                    return Err(PlanFault(format!(
                        "{} of step {} writes '{}', which nothing reads",
                        u.name,
                        u.step,
                        name(b)
                    )));
                }
            }
            alive.retain(|b| !u.writes.contains(b) || u.reads.contains(b));
            for &b in &u.reads {
                if !alive.contains(&b) {
                    alive.push(b);
                }
            }
        }
        let given: Vec<Buf> = self.inputs.iter().map(|i| i.buf).collect();
        if let Some(&b) = alive.iter().find(|b| !given.contains(b)) {
            return Err(PlanFault(format!(
                "'{}' is read before it is written",
                name(b)
            )));
        }
        for (step, alive) in live_out.iter().enumerate() {
            let last = step + 1 == self.steps.len();
            let undeclared = alive
                .iter()
                .find(|b| !(carried[step].contains(b) || last && **b == self.logits));
            if let Some(&b) = undeclared {
                return Err(PlanFault(format!(
                    "'{}' is alive behind step {step}, which does not declare it",
                    name(b)
                )));
            }
        }
        self.conflicts = conflicts(&uses, &after, &given, self.bufs.len());
        for (step, out) in self.steps.iter_mut().zip(live_out) {
            if let Step::Run { live_out, .. } = step {
                *live_out = out;
            }
        }
        Ok(())
    }
}

/// Buffers that are used by the same [`FUSED_OPS_MAX`] operations, or alive across them, lie apart.
fn conflicts(uses: &[Use], after: &[Vec<Buf>], given: &[Buf], n: usize) -> Conflicts {
    let mut conflicts = Conflicts::none(n);
    let mut together: Vec<Buf> = Vec::new();
    for i in 0..uses.len() {
        together.clear();
        for (u, after) in uses[i..].iter().zip(&after[i..]).take(FUSED_OPS_MAX) {
            let used = u.reads.iter().chain(&u.writes).chain(&u.temporaries);
            together.extend(used.chain(after).copied());
        }
        if i == 0 {
            together.extend(given);
        }
        together.sort_unstable();
        together.dedup();
        for (j, &a) in together.iter().enumerate() {
            for &b in &together[j + 1..] {
                conflicts.add(a, b);
            }
        }
    }
    conflicts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::Rows;

    fn plan(ops: Vec<Vec<Op>>) -> Plan {
        let spec = |name| BufSpec {
            name,
            width: 64,
            rows: Rows::Tokens,
        };
        Plan {
            segments: Vec::new(),
            steps: ops
                .into_iter()
                .map(|ops| Step::Run {
                    segment: None,
                    ops,
                    live_out: Vec::new(),
                })
                .collect(),
            head_step: 0,
            inputs: vec![Input {
                table: TensorDesc {
                    name: "token_embd.weight".to_owned(),
                    ty: crate::WeightType::F32,
                    rows: 1,
                    cols: 64,
                    offset: 0,
                    bytes: 256,
                    role: crate::Role::Matrix,
                },
                buf: X,
                rows: InputRows::Tokens,
            }],
            logits: L,
            hidden: N,
            stream: None,
            bufs: vec![spec("x"), spec("n"), spec("p"), spec("logits")],
            conflicts: Conflicts::none(4),
            kv: Vec::new(),
            state_elements: 0,
            ropes: Vec::new(),
            float_weights: false,
            both_ways: false,
        }
    }

    const X: Buf = Buf(0);
    const N: Buf = Buf(1);
    const P: Buf = Buf(2);
    const L: Buf = Buf(3);

    fn norm(x: Buf, out: Buf) -> Op {
        Op::RmsNorm {
            x,
            weight: None,
            eps: 1e-5,
            group: 64,
            out,
        }
    }

    fn add(x: Buf, y: Buf) -> Op {
        Op::Add { x, y, scale: 1.0 }
    }

    #[test]
    fn what_is_read_before_it_is_written_is_refused() {
        let mut p = plan(vec![vec![norm(N, L)]]);
        let fault = p.settle_lifetimes(&[vec![]]).unwrap_err();
        assert_eq!(fault.to_string(), "'n' is read before it is written");
    }

    #[test]
    fn what_nothing_reads_is_refused() {
        let mut p = plan(vec![vec![norm(X, P), norm(X, L)]]);
        let fault = p.settle_lifetimes(&[vec![]]).unwrap_err();
        assert!(
            fault
                .to_string()
                .contains("writes 'p', which nothing reads")
        );
    }

    #[test]
    fn what_crosses_a_step_is_declared() {
        let steps = || plan(vec![vec![norm(X, N)], vec![norm(N, L)]]);
        let fault = steps().settle_lifetimes(&[vec![], vec![]]).unwrap_err();
        assert!(fault.to_string().contains("'n' is alive behind step 0"));
        let mut p = steps();
        p.settle_lifetimes(&[vec![N], vec![]]).unwrap();
        let Step::Run { live_out, .. } = &p.steps[0] else {
            panic!("a run");
        };
        assert_eq!(live_out, &[N]);
    }

    /// The plan's own numbers say so, whatever the architecture's name.
    #[test]
    fn keys_and_values_are_f32_where_weights_are_floats_and_scores_not_scaled_down() {
        let attention = |scale| Op::Attention {
            q: X,
            out: N,
            heads: crate::HeadShape {
                n_head: 1,
                n_head_kv: 1,
                head_dim: 64,
                head_dim_v: 64,
            },
            layer: crate::KvLayer { group: 0, index: 0 },
            scale,
            mask: crate::Mask::Causal,
            softcap: 0.0,
            sinks: None,
            alibi: 0.0,
        };
        for (scales, float_weights, expected) in [
            ([0.125, 0.125], true, KvType::F16),
            ([0.125, 1.0], true, KvType::F32),
            ([1.0, 1.0], true, KvType::F32),
            ([1.0, 1.0], false, KvType::F16),
        ] {
            let ops = scales.map(|scale| vec![attention(scale)]);
            let plan = Plan {
                float_weights,
                ..plan(ops.into())
            };
            let what = format!("{scales:?}, floats {float_weights}");
            assert_eq!(plan.kv_type_default(), expected, "{what}");
        }
    }

    #[test]
    fn a_stream_that_is_kept_lies_apart_from_what_is_written_last() {
        // Nothing reads p once n is made of it; logits are written more than three operations
        // later.
        let steps = || {
            let ops = vec![
                norm(X, P),
                norm(P, N),
                add(N, X),
                add(N, X),
                add(N, X),
                norm(N, L),
            ];
            plan(vec![ops])
        };
        let mut p = steps();
        p.settle_lifetimes(&[vec![]]).unwrap();
        assert!(!p.conflicts.between(P, L));
        let mut kept = Plan {
            stream: Some(P),
            ..steps()
        };
        kept.settle_lifetimes(&[vec![P]]).unwrap();
        assert!(kept.conflicts.between(P, L));
        let Step::Run { live_out, .. } = &kept.steps[0] else {
            panic!("a run");
        };
        assert!(live_out.contains(&P));
    }

    #[test]
    fn buffers_share_memory_only_when_no_fused_operations_need_both() {
        // n is written first and read last by the third operation; p lives from the second on.
        let mut p = plan(vec![vec![
            norm(X, N),
            norm(X, P),
            add(P, N),
            norm(P, X),
            norm(X, P),
            norm(P, L),
        ]]);
        p.settle_lifetimes(&[vec![]]).unwrap();
        assert!(p.conflicts.between(N, P));
        assert!(p.conflicts.between(P, L));
        // The last read of n is three operations before logits are written.
        assert!(!p.conflicts.between(N, L));
    }
}

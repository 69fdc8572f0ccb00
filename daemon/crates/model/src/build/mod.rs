//! The builder of a plan: an architecture asks it for weights by name and shape, for buffers
//! and for places of KV and state, and emits operations; the builder cuts them into segments
//! and checks what came out.
//!
//! *Invariant:* every tensor of the file is used, or is on the list of those that are known and
//! left alone (`finish` refuses others; test `a_tensor_that_nothing_uses_is_refused`).
//!
//! *Invariant:* no buffer is read before it is written, none is written for nobody, and what
//! crosses a step was declared by `cut` (`Plan::settle_lifetimes`, run on every plan).

mod attention;
mod deltas;
mod experts;
mod feed_forward;
mod head;
mod norms;
mod numbered;
mod products;

use std::collections::{HashMap, HashSet};

use rocmforge_gguf::{Gguf, TensorInfo};
use rocmforge_ops::{
    Act, Buf, BufSpec, ColumnPart, Conflicts, Input, InputRows, KvGroup, Op, Plan, Role, RopeSpec,
    Rows, Segment, SegmentKind, Step, TensorDesc, TensorIndex,
};

use crate::error::Error;
use crate::keys::Keys;
use crate::tower::{DEEPSTACK, given_input};

pub(crate) use attention::{AttentionSpec, OutputGate, QkNorms};
pub(crate) use deltas::Adapting;
pub(crate) use experts::MoeSpec;
pub(crate) use head::ClassAct;
pub(crate) use norms::NormKind;

/// What an architecture asks of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The file must have the tensor.
    Required,
    /// The tensor is used if the file has it.
    Optional,
    /// The architecture has no such tensor.
    Absent,
}

/// Tensors that old converters wrote and that nothing needs: rotations are computed.
const IGNORED: [&str; 2] = ["attn_rot_embd", "rope.freqs"];

/// The head of a reranker, where the file says that it is two rows of the output head.
const RANK_HEAD: &str = "cls.output.weight";

/// A segment under construction.
struct Open {
    name: String,
    tensors: Vec<TensorDesc>,
    ops: Vec<Op>,
}

/// A tensor of the header, or rows of one, before its role is known.
#[derive(Debug, Clone)]
pub(crate) struct Found(TensorDesc);

/// Makes a plan.
pub(crate) struct PlanBuilder<'a> {
    pub(crate) keys: Keys<'a>,
    used: HashSet<String>,
    left_alone: Vec<String>,
    open: Option<Open>,
    ordered: Vec<Segment>,
    experts: Vec<Segment>,
    n_expert_layers: u32,
    steps: Vec<Step>,
    carried: Vec<Vec<Buf>>,
    head_step: Option<usize>,
    inputs: Vec<Input>,
    bufs: Vec<BufSpec>,
    buf_of: HashMap<(&'static str, u64, Rows), Buf>,
    /// Factors on products that are yet to be emitted, by their output.
    scales: Vec<(Buf, TensorIndex)>,
    /// What adapters add to products, where the model has any.
    pub(crate) adapting: Option<Adapting<'a>>,
    kv: Vec<KvGroup>,
    state_elements: u64,
    ropes: Vec<RopeSpec>,
    /// The residual stream and what else lives all along the pass.
    stream: Vec<Buf>,
    keeps_stream: bool,
    /// Layers that rows of an image's tower are added behind.
    n_deepstack: usize,
    pub(crate) n_embd: u64,
    pub(crate) n_vocab: u64,
    pub(crate) eps: f32,
    output_norm: &'static str,
    norm_kind: NormKind,
    /// Where one matrix has a feed-forward's gate and what is gated, the gate is behind.
    pub(crate) up_lies_first: bool,
    /// Rows attend to later ones too.
    pub(crate) both_ways: bool,
    /// Where an encoder's head leaves the pooled rows, and what a classification makes of them.
    ends: Option<(Buf, Buf)>,
    /// What there would be more of than can be numbered.
    too_many: Option<&'static str>,
}

impl<'a> PlanBuilder<'a> {
    pub(crate) fn new(keys: Keys<'a>, n_embd: u32, n_vocab: u32, eps: f32) -> Self {
        Self {
            keys,
            used: HashSet::new(),
            left_alone: Vec::new(),
            open: None,
            ordered: Vec::new(),
            experts: Vec::new(),
            n_expert_layers: 0,
            steps: Vec::new(),
            carried: Vec::new(),
            head_step: None,
            inputs: Vec::new(),
            bufs: Vec::new(),
            buf_of: HashMap::new(),
            scales: Vec::new(),
            adapting: None,
            kv: Vec::new(),
            state_elements: 0,
            ropes: Vec::new(),
            stream: Vec::new(),
            keeps_stream: false,
            n_deepstack: 0,
            n_embd: u64::from(n_embd),
            n_vocab: u64::from(n_vocab),
            eps,
            output_norm: "output_norm.weight",
            norm_kind: NormKind::Rms,
            up_lies_first: false,
            both_ways: false,
            ends: None,
            too_many: None,
        }
    }

    fn gguf(&self) -> &'a Gguf {
        self.keys.gguf
    }

    // ---- tensors

    /// A tensor of the file by its name, its shape compared; `None` where the file has none.
    fn lookup(&mut self, name: &str, dims: &[u64]) -> Result<Option<Found>, Error> {
        let Some(tensor) = self.gguf().tensor(name) else {
            return Ok(None);
        };
        let mut expected = [1; 4];
        expected[..dims.len()].copy_from_slice(dims);
        // Converters keep some vectors as matrices of one row or one column.
        let same = tensor.dims == expected || dims.len() == 1 && tensor.elements() == dims[0];
        if !same {
            // A buffer that there is no number for has another's width.
            self.refuse_too_many()?;
            return Err(Error::WrongShape {
                name: name.to_owned(),
                found: tensor.shape().to_vec(),
                expected: dims.to_vec(),
                arch: self.keys.arch,
            });
        }
        self.used.insert(name.to_owned());
        Ok(Some(Found(describe(tensor, dims)?)))
    }

    /// A tensor that the file must have.
    pub(crate) fn tensor(&mut self, name: &str, dims: &[u64]) -> Result<Found, Error> {
        self.lookup(name, dims)?
            .ok_or_else(|| Error::MissingTensor(name.to_owned()))
    }

    /// A tensor that the file may have.
    pub(crate) fn tensor_if(&mut self, name: &str, dims: &[u64]) -> Result<Option<Found>, Error> {
        self.lookup(name, dims)
    }

    /// Whether the file has a tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.gguf().tensor(name).is_some()
    }

    /// Rows of a matrix, if the file has it.
    pub(crate) fn rows_in_file(&self, name: &str) -> Option<u64> {
        self.gguf().tensor(name).map(|t| t.dims[1])
    }

    /// The names of the file's tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.gguf().tensors().iter().map(|t| t.name.as_str())
    }

    /// Notes tensors that are known and that this plan does without.
    pub(crate) fn leave_alone(&mut self, matches: impl Fn(&str) -> bool) {
        let names = self.gguf().tensors().iter().map(|t| &t.name);
        let found: Vec<String> = names.filter(|n| matches(n)).cloned().collect();
        self.used.extend(found.iter().cloned());
        self.left_alone.extend(found);
    }

    /// Places a tensor in the segment under construction.
    pub(crate) fn place(&mut self, found: &Found, role: Role) -> TensorIndex {
        let open = self.open.as_mut().expect("a segment was begun");
        open.tensors.push(TensorDesc {
            role,
            ..found.0.clone()
        });
        open.tensors.len() - 1
    }

    /// A vector of the segment under construction.
    pub(crate) fn vector(&mut self, name: &str, len: u64) -> Result<TensorIndex, Error> {
        let found = self.tensor(name, &[len])?;
        Ok(self.place(&found, Role::Vector))
    }

    /// A table of the segment under construction with at least so many rows of `n_embd`, as the
    /// vector of all of its elements.
    pub(crate) fn table(&mut self, name: &str, rows: u64) -> Result<TensorIndex, Error> {
        let n = self.rows_in_file(name).unwrap_or(rows);
        self.tensor(name, &[self.n_embd, n.max(rows)])?;
        self.vector(name, self.n_embd * n)
    }

    pub(crate) fn vector_if(
        &mut self,
        name: &str,
        len: u64,
        presence: Presence,
    ) -> Result<Option<TensorIndex>, Error> {
        match presence {
            Presence::Required => self.vector(name, len).map(Some),
            Presence::Optional => {
                let found = self.tensor_if(name, &[len])?;
                Ok(found.map(|f| self.place(&f, Role::Vector)))
            }
            Presence::Absent => Ok(None),
        }
    }

    // ---- steps

    /// Emits a short convolution of `x` into a buffer, with a state of the rows before. Its weight
    /// is `{name}.weight`.
    pub(crate) fn conv(
        &mut self,
        name: &str,
        x: Buf,
        (kernel, bias, act): (u32, Presence, Act),
        out: &'static str,
    ) -> Result<Buf, Error> {
        let width = self.width(x);
        let out = self.buf(out, width);
        let found = self.tensor(&format!("{name}.weight"), &[u64::from(kernel), width])?;
        let weight = self.place(&found, Role::Vector);
        let bias = self.vector_if(&format!("{name}.bias"), width, bias)?;
        let state = self.state(u64::from(kernel - 1) * width);
        self.op(Op::Conv {
            x,
            weight,
            bias,
            kernel,
            act,
            state,
            out,
        });
        Ok(out)
    }

    /// Emits columns of rows, side by side in each of so many groups.
    pub(crate) fn columns(&mut self, n_group: u32, parts: Vec<ColumnPart>, out: Buf) {
        self.op(Op::Columns {
            n_group,
            parts,
            out,
        });
    }

    /// `x += y`.
    pub(crate) fn add(&mut self, x: Buf, y: Buf) {
        self.op(Op::Add { x, y, scale: 1.0 });
    }

    /// Ends the segment under construction and begins one. `carried` is what later steps read of
    /// what was computed so far, beside the residual stream.
    pub(crate) fn cut(&mut self, name: String, carried: &[Buf]) {
        self.close(carried);
        self.open = Some(Open {
            name,
            tensors: Vec::new(),
            ops: Vec::new(),
        });
    }

    fn close(&mut self, carried: &[Buf]) {
        let Some(open) = self.open.take() else {
            return;
        };
        let segment = (!open.tensors.is_empty()).then(|| {
            self.ordered.push(Segment {
                name: open.name,
                kind: SegmentKind::Ordered,
                tensors: open.tensors,
            });
            self.ordered.len() as u32 - 1
        });
        if open.ops.is_empty() {
            return;
        }
        self.push_step(
            Step::Run {
                segment,
                ops: open.ops,
                live_out: Vec::new(),
            },
            carried,
        );
    }

    fn push_step(&mut self, step: Step, carried: &[Buf]) {
        self.steps.push(step);
        let carried = self.stream.iter().chain(carried).copied().collect();
        self.carried.push(carried);
    }

    /// Emits an operation.
    pub(crate) fn op(&mut self, op: Op) {
        self.open
            .as_mut()
            .expect("a segment was begun")
            .ops
            .push(op);
    }

    /// The rows of an embedding table, which live all along the pass.
    pub(crate) fn input(
        &mut self,
        buf: &'static str,
        table: &str,
        width: u64,
        rows: InputRows,
    ) -> Result<Buf, Error> {
        let found = self.tensor(table, &[width, self.n_vocab])?;
        let buf = self.buf(buf, width);
        self.stream.push(buf);
        self.inputs.push(Input {
            table: found.0,
            buf,
            rows,
        });
        Ok(buf)
    }

    /// The residual stream, which begins with the rows of `token_embd.weight`.
    pub(crate) fn embedding(&mut self) -> Result<Buf, Error> {
        self.input("x", "token_embd.weight", self.n_embd, InputRows::Tokens)
    }

    /// A residual stream that the plan makes itself.
    pub(crate) fn stream(&mut self, name: &'static str) -> Buf {
        let buf = self.buf(name, self.n_embd);
        self.stream.push(buf);
        buf
    }

    /// Rows that another plan left in its residual stream, f32.
    pub(crate) fn stream_input(&mut self, name: &'static str) -> Buf {
        let (buf, width) = (self.stream(name), self.n_embd);
        let input = given_input(buf, "the residual stream", width, InputRows::Stream);
        self.inputs.push(input);
        buf
    }

    /// Rows that come with a pass, f32.
    pub(crate) fn given(&mut self, name: &'static str, width: u64, rows: InputRows) -> Buf {
        let buf = self.buf(name, width);
        self.inputs.push(given_input(buf, name, width, rows));
        buf
    }

    /// A buffer whose content stays to the end of the pass.
    pub(crate) fn stream_rows(&mut self, name: &'static str, width: u64, rows: Rows) -> Buf {
        let buf = self.buf_rows(name, width, rows);
        self.stream.push(buf);
        buf
    }

    /// Has so many rows of an image's tower added behind the first layers.
    pub(crate) fn takes_deepstack(&mut self, n: usize) {
        self.n_deepstack = n;
    }

    /// The rows of an image's tower that are added behind the first layers, for an architecture
    /// that calls [`deepstack`](Self::deepstack) behind each.
    pub(crate) fn deepstack_inputs(&mut self) {
        for (layer, name) in DEEPSTACK.into_iter().enumerate().take(self.n_deepstack) {
            let rows = InputRows::Deepstack(layer as u8);
            let buf = self.given(name, self.n_embd, rows);
            self.stream.push(buf);
        }
    }

    /// Adds to the residual stream what an image's tower kept for a layer, behind that layer.
    pub(crate) fn deepstack(&mut self, layer: u32, x: Buf) {
        if layer as usize >= self.n_deepstack {
            return;
        }
        let y = self.buf(DEEPSTACK[layer as usize], self.n_embd);
        self.add(x, y);
    }

    /// Has the residual stream stay readable to the end of a pass.
    pub(crate) fn keep_stream(&mut self) {
        self.keeps_stream = true;
    }

    /// The plan, checked, and the names of tensors that were left alone.
    pub(crate) fn finish(mut self) -> Result<(Plan, Vec<String>), Error> {
        // What a product's input may be rounded by where a device multiplies in 4 bits; none here
        // does.
        self.leave_alone(|name| name.ends_with(".input_scale"));
        self.refuse_unused()?;
        let left_alone = std::mem::take(&mut self.left_alone);
        Ok((self.plan()?, left_alone))
    }

    /// The plan of a part of the file, checked, and the names of the tensors that it uses.
    pub(crate) fn finish_part(mut self) -> Result<(Plan, HashSet<String>), Error> {
        let used = std::mem::take(&mut self.used);
        Ok((self.plan()?, used))
    }

    fn plan(mut self) -> Result<Plan, Error> {
        self.refuse_too_many()?;
        if self.both_ways && self.state_elements > 0 {
            return Err(Error::Unsupported(format!(
                "architecture '{}' has recurrent layers, which cannot attend both ways; {} must not be false",
                self.keys.arch,
                self.keys.name("attention.causal"),
            )));
        }
        self.close(&[]);
        assert!(
            self.scales.is_empty(),
            "a scaled product was never emitted by `mat_mul`"
        );
        let n_ordered = self.ordered.len() as u32;
        for step in &mut self.steps {
            if let Step::Experts { first_segment, .. } = step {
                *first_segment += n_ordered;
            }
        }
        let (hidden, logits) = self.ends.unwrap_or_else(|| {
            let of = |name, width| self.buf_of.get(&(name, width, Rows::Outputs)).copied();
            let hidden = of("on", self.n_embd).expect("an architecture's head has a norm");
            let logits = of("logits", self.n_vocab).expect("an architecture ends with its head");
            (hidden, logits)
        });
        let segments: Vec<Segment> = self.ordered.into_iter().chain(self.experts).collect();
        let mut tensors = segments.iter().flat_map(|s| &s.tensors);
        let mut plan = Plan {
            float_weights: !tensors.any(|t| t.ty.is_quantized()),
            segments,
            head_step: self.head_step.expect("an architecture ends with its head"),
            hidden,
            steps: self.steps,
            inputs: self.inputs,
            logits,
            stream: self.stream.first().copied().filter(|_| self.keeps_stream),
            conflicts: Conflicts::all(self.bufs.len()),
            bufs: self.bufs,
            kv: self.kv,
            state_elements: self.state_elements,
            ropes: self.ropes,
            both_ways: self.both_ways,
        };
        plan.settle_lifetimes(&self.carried)
            .map_err(|fault| Error::Plan {
                arch: self.keys.arch,
                fault,
            })?;
        Ok(plan)
    }

    /// Computing without a tensor that the file has would give wrong text.
    fn refuse_unused(&self) -> Result<(), Error> {
        let ranks = self.keys.ranks_yes_no()?;
        let ignored = |name: &str| {
            IGNORED.iter().any(|part| name.contains(part)) || (ranks && name == RANK_HEAD)
        };
        let tensors = self.gguf().tensors().iter().map(|t| t.name.as_str());
        let unused: Vec<&str> = tensors
            .filter(|name| !self.used.contains(*name) && !ignored(name))
            .collect();
        if unused.is_empty() {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "the file has {} tensors that architecture '{}' as implemented does not use, so its text would be wrong: {}{}",
            unused.len(),
            self.keys.arch,
            unused[..unused.len().min(5)].join(", "),
            if unused.len() > 5 { ", ..." } else { "" },
        )))
    }
}

impl Found {
    /// Rows `first..first + rows` of the tensor.
    pub(crate) fn slice(&self, first: u64, rows: u64) -> Self {
        Self(self.0.slice(first, rows))
    }

    /// Elements `first..first + n` of a vector whose elements lie by themselves.
    pub(crate) fn columns(&self, first: u64, n: u64) -> Self {
        let tensor = &self.0;
        assert!(
            tensor.rows == 1 && first + n <= tensor.cols,
            "elements {first}..{first}+{n} of '{}' [{}, {}]",
            tensor.name,
            tensor.cols,
            tensor.rows
        );
        let element = tensor.bytes / tensor.cols;
        Self(TensorDesc {
            cols: n,
            offset: tensor.offset + first * element,
            bytes: n * element,
            ..tensor.clone()
        })
    }

    /// The tensor as a matrix of `rows` rows.
    pub(crate) fn as_matrix(&self, rows: u64) -> Self {
        let elements = self.0.rows * self.0.cols;
        Self(TensorDesc {
            rows,
            cols: elements / rows,
            ..self.0.clone()
        })
    }

    pub(crate) fn with_role(self, role: Role) -> TensorDesc {
        TensorDesc { role, ..self.0 }
    }
}

/// A tensor as rows of its first dimension: the second and third dimension are
/// rows, one after the other.
fn describe(tensor: &TensorInfo, dims: &[u64]) -> Result<TensorDesc, Error> {
    let ty = tensor
        .ty
        .weight_type()
        .ok_or_else(|| Error::UnsupportedType {
            tensor: tensor.name.clone(),
            ty: tensor.ty.name(),
        })?;
    if dims.len() == 1 && ty.is_quantized() {
        return Err(Error::Unsupported(format!(
            "tensor '{}' is a vector of type {}; vectors are F32, F16 or BF16",
            tensor.name,
            ty.name()
        )));
    }
    Ok(TensorDesc {
        name: tensor.name.clone(),
        ty,
        rows: dims[1..].iter().product(),
        cols: dims[0],
        offset: tensor.offset,
        bytes: tensor.bytes,
        role: if dims.len() == 1 {
            Role::Vector
        } else {
            Role::Matrix
        },
    })
}

/// `1 / sqrt(head_dim)`.
pub(crate) fn scale_of(head_dim: u32) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// The name of a layer's tensor or segment.
pub(crate) fn blk(layer: u32, name: &str) -> String {
    format!("blk.{layer}.{name}")
}

//! LoRA adapters (Hu et al. 2021, arXiv 2106.09685): reads their headers, and combines the matrices
//! of one model's adapters.
//!
//! ```text
//!   file:  M.lora_a [in, r], M.lora_b [r, out]      for a matrix M [in, out] of the model
//!   here:  A [in, width], B [width, out]            rows of A and columns of B: a range each
//!   adapter pass:  out = M x + B (s * (A x))                s: a row's scale of each adapter, 0
//!   for none
//! ```
//!
//! Dimensions are in ggml's order, the fastest first. An adapter has the same range in all
//! matrices, as wide as its largest rank; what it does not have is zero. So one row of `width`
//! scales does for a row of a pass in all products.

use std::collections::BTreeMap;

use rocmforge_gguf::{Gguf, Glance, OtherUse, TensorInfo, TensorType};
use rocmforge_ops::{Role, TensorDesc, WeightType};

use crate::error::Error;

/// Maximum number of adapters of a model.
pub const ADAPTERS_MAX: usize = 16;

/// Largest sum of the ranks of a model's adapters.
pub const RANK_SUM_MAX: u64 = 1024;

/// The combined matrices' width is a multiple of this: kernels read blocks of that many elements.
const WIDTH_STEP: u64 = 32;

/// Maximum number of tensor names in an error message.
const NAMED_MAX: usize = 5;

/// Both LoRA matrices of an adapter for one matrix of the model.
#[derive(Debug, Clone)]
pub struct AdapterPair {
    /// The matrix A, `[in, rank]` in ggml's order.
    pub a: TensorInfo,
    /// The matrix B, `[rank, out]` in ggml's order.
    pub b: TensorInfo,
}

impl AdapterPair {
    /// The adapter pair's rank.
    pub fn rank(&self) -> u64 {
        self.a.dims[1]
    }
}

/// The header of an adapter file.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Pairs of matrices, by the name of the model's tensor.
    pub pairs: BTreeMap<String, AdapterPair>,
    /// The factor on the product of both matrices, times the rank; 0 for a factor of 1.
    pub alpha: f32,
    /// The adapter's largest rank.
    pub rank: u64,
    /// Task that the adapter was trained for, if the file names it (`adapter.lora.task_name`).
    pub task_name: String,
    /// Text before the prompts of the adapter's training, if the file has it
    /// (`adapter.lora.prompt_prefix`).
    pub prompt_prefix: String,
}

impl Adapter {
    /// Reads the header of an adapter for the model of `base`.
    ///
    /// # Errors
    /// [`Error::Adapter`] says what does not fit, or is not implemented; [`Error::Gguf`].
    pub fn from_gguf(gguf: &Gguf, base: &Gguf) -> Result<Self, Error> {
        check_kind(gguf, base)?;
        let text = |key| Ok::<_, Error>(gguf.str(key)?.unwrap_or_default().to_owned());
        let alpha = gguf.f32("adapter.lora.alpha")?.unwrap_or(0.0);
        if !alpha.is_finite() {
            return Err(refuse(format!("adapter.lora.alpha is {alpha}")));
        }
        let pairs = pairs(gguf)?;
        for (name, pair) in &pairs {
            check_pair(name, pair, base)?;
        }
        let rank = pairs.values().map(AdapterPair::rank).max();
        let Some(rank) = rank else {
            return Err(refuse("it has no tensors; convert it again".to_owned()));
        };
        Ok(Self {
            pairs,
            alpha,
            rank,
            task_name: text("adapter.lora.task_name")?,
            prompt_prefix: text("adapter.lora.prompt_prefix")?,
        })
    }

    /// The factor on the products of pairs with the adapter's largest rank.
    pub fn scale(&self) -> f32 {
        match self.alpha {
            0.0 => 1.0,
            alpha => alpha / self.rank as f32,
        }
    }

    /// A pair's factor relative to [`Adapter::scale`].
    pub fn relative_scale(&self, pair: &AdapterPair) -> f32 {
        match self.alpha {
            0.0 => 1.0,
            _ => self.rank as f32 / pair.rank() as f32,
        }
    }
}

fn refuse(message: String) -> Error {
    Error::Adapter(message)
}

/// Checks that the file is a LoRA adapter for this architecture.
fn check_kind(gguf: &Gguf, base: &Gguf) -> Result<(), Error> {
    let glance = Glance::of(gguf, false);
    if glance.other_use != Some(OtherUse::Adapter) {
        let is = glance.other_use.map_or_else(
            || "it is a model; load it as one".to_owned(),
            |other| format!("it is {other}"),
        );
        return Err(refuse(format!(
            "it is no LoRA adapter (general.type = adapter): {is}"
        )));
    }
    match gguf.str("adapter.type")? {
        Some("lora") => {}
        kind => {
            return Err(refuse(format!(
                "adapter.type is '{}'; only 'lora' is supported",
                kind.unwrap_or_default()
            )));
        }
    }
    if gguf.value("adapter.alora.invocation_tokens").is_some() {
        return Err(refuse(
            "it is an activated LoRA (adapter.alora.invocation_tokens), which begins at certain tokens of a prompt and \
             is not supported; give a LoRA adapter"
                .to_owned(),
        ));
    }
    let architecture =
        |of: &Gguf| Ok::<_, Error>(of.str("general.architecture")?.map(str::to_owned));
    let (ours, theirs) = (architecture(base)?, architecture(gguf)?);
    if ours != theirs {
        return Err(refuse(format!(
            "it is for a model of architecture '{}', and this model is '{}'; give an adapter that was trained for \
             this model",
            theirs.unwrap_or_default(),
            ours.unwrap_or_default()
        )));
    }
    Ok(())
}

/// The adapter's tensors, in pairs by the model's tensor.
fn pairs(gguf: &Gguf) -> Result<BTreeMap<String, AdapterPair>, Error> {
    let mut halves: BTreeMap<&str, [Option<&TensorInfo>; 2]> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let name = tensor.name.as_str();
        let (of, half) = match (name.strip_suffix(".lora_a"), name.strip_suffix(".lora_b")) {
            (Some(of), _) => (of, 0),
            (_, Some(of)) => (of, 1),
            (None, None) => {
                return Err(refuse(format!(
                    "tensor '{name}' is neither a .lora_a nor a .lora_b; adapters that replace whole tensors are not \
                     supported: merge it into the model"
                )));
            }
        };
        halves.entry(of).or_default()[half] = Some(tensor);
    }
    let pair = |(name, halves): (&str, [Option<&TensorInfo>; 2])| match halves {
        [Some(a), Some(b)] => Ok((
            name.to_owned(),
            AdapterPair {
                a: a.clone(),
                b: b.clone(),
            },
        )),
        [a, _] => Err(refuse(format!(
            "'{name}' has a {} and no {}; convert the adapter again",
            if a.is_some() { ".lora_a" } else { ".lora_b" },
            if a.is_some() { ".lora_b" } else { ".lora_a" },
        ))),
    };
    halves.into_iter().map(pair).collect()
}

/// Checks that a pair has the shapes that the model's matrix requires.
fn check_pair(name: &str, pair: &AdapterPair, base: &Gguf) -> Result<(), Error> {
    let Some(matrix) = base.tensor(name) else {
        return Err(refuse(format!(
            "the model has no tensor '{name}'; give an adapter that was trained for this model"
        )));
    };
    if name == "token_embd.weight" {
        return Err(refuse(format!(
            "adapters for token embeddings ('{name}') are not supported; train without these, or merge the adapter into \
             the model"
        )));
    }
    let is_matrix = |t: &TensorInfo| t.dims[2..] == [1, 1];
    if !is_matrix(matrix) || !is_matrix(&pair.a) || !is_matrix(&pair.b) {
        return Err(refuse(format!(
            "'{name}' is the tensor of a layer's experts, for which adapters are not supported; merge the adapter into \
             the model"
        )));
    }
    for half in [&pair.a, &pair.b] {
        half.ty
            .weight_type()
            .ok_or_else(|| Error::UnsupportedType {
                tensor: half.name.clone(),
                ty: half.ty.name(),
            })?;
    }
    let (a, b) = (pair.a.dims, pair.b.dims);
    if a[1] != b[0] {
        return Err(refuse(format!(
            "'{name}': the ranks differ: .lora_a has shape {:?} and .lora_b {:?}, where [in, rank] and [rank, out] are \
             expected; convert the adapter again",
            &a[..2],
            &b[..2]
        )));
    }
    if a[0] != matrix.dims[0] || b[1] != matrix.dims[1] {
        return Err(refuse(format!(
            "'{name}' has shape {:?} in the model, and the adapter is for {:?}; give an adapter that was trained for \
             this model",
            &matrix.dims[..2],
            [a[0], b[1]]
        )));
    }
    Ok(())
}

/// An adapter's range within the combined matrices' width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterRange {
    /// First row of the range in `A`.
    pub first: u64,
    /// Number of rows of the range.
    pub rank: u64,
}

/// The matrices of all adapters for one matrix of the model.
#[derive(Debug, Clone)]
pub struct AdapterMatrices {
    /// Combined A of all adapters, `[in, width]`.
    pub a: TensorDesc,
    /// Combined B of all adapters, `[width, out]`.
    pub b: TensorDesc,
}

/// The combined adapters of a model: their matrices, and where they lie.
#[derive(Debug, Clone)]
pub struct AdapterSet {
    /// Ranges of the adapters' ranks, in the order of the adapters.
    pub ranges: Vec<AdapterRange>,
    /// The sum of the ranks, rounded up to [`WIDTH_STEP`].
    pub width: u64,
    /// Element type of the matrices, f32 or f16.
    pub ty: WeightType,
    /// Matrices of all adapters, by the name of the model's tensor.
    pub matrices: BTreeMap<String, AdapterMatrices>,
    /// Bytes of all matrices.
    pub bytes: u64,
}

impl AdapterSet {
    /// Lays out the combined matrices from the offset `start` on: in f16 if all tensors of all
    /// adapters are, else in f32.
    ///
    /// # Errors
    /// [`Error::Adapter`] if there are too many adapters, or their ranks are too large.
    pub fn new(adapters: &[Adapter], start: u64) -> Result<Self, Error> {
        if adapters.len() > ADAPTERS_MAX {
            return Err(refuse(format!(
                "{} adapters are given, and a model has at most {ADAPTERS_MAX}",
                adapters.len()
            )));
        }
        let sum: u64 = adapters.iter().map(|adapter| adapter.rank).sum();
        if sum > RANK_SUM_MAX {
            return Err(refuse(format!(
                "the ranks of the adapters come to {sum}, and those of a model to at most {RANK_SUM_MAX}; give fewer \
                 adapters"
            )));
        }
        let mut first = 0;
        let ranges = adapters.iter().map(|adapter| {
            let range = AdapterRange {
                first,
                rank: adapter.rank,
            };
            first += adapter.rank;
            range
        });
        let mut set = Self {
            ranges: ranges.collect(),
            width: sum.next_multiple_of(WIDTH_STEP),
            ty: match adapters.iter().all(is_f16) {
                true => WeightType::F16,
                false => WeightType::F32,
            },
            matrices: BTreeMap::new(),
            bytes: 0,
        };
        set.place_matrices(adapters, start);
        Ok(set)
    }

    fn place_matrices(&mut self, adapters: &[Adapter], start: u64) {
        let element = match self.ty {
            WeightType::F16 => 2,
            _ => 4,
        };
        let pairs = adapters.iter().flat_map(|adapter| &adapter.pairs);
        let shapes: BTreeMap<&String, (u64, u64)> = pairs
            .map(|(name, pair)| (name, (pair.a.dims[0], pair.b.dims[1])))
            .collect();
        for (name, (cols, rows)) in shapes {
            let mut place = |half: &str, cols: u64, rows: u64| {
                let desc = TensorDesc {
                    name: format!("{name}.{half}"),
                    ty: self.ty,
                    rows,
                    cols,
                    offset: start + self.bytes,
                    bytes: rows * cols * element,
                    role: Role::Matrix,
                };
                self.bytes += desc.bytes;
                desc
            };
            let a = place("lora_a", cols, self.width);
            let b = place("lora_b", self.width, rows);
            self.matrices.insert(name.clone(), AdapterMatrices { a, b });
        }
    }

    /// Rejects adapter matrices that no product of the model uses.
    ///
    /// # Errors
    /// [`Error::Adapter`] names the tensors.
    pub(crate) fn refuse_unused(&self, is_used: impl Fn(&str) -> bool) -> Result<(), Error> {
        let names = self.matrices.keys().map(String::as_str);
        let unused: Vec<&str> = names.filter(|name| !is_used(name)).collect();
        if unused.is_empty() {
            return Ok(());
        }
        let named = unused[..unused.len().min(NAMED_MAX)].join(", ");
        let more = match unused.len() > NAMED_MAX {
            true => ", ...",
            false => "",
        };
        Err(refuse(format!(
            "adapters for {named}{more} are not supported: only for the matrices of attention, dense feed-forwards and \
             the output head; train without these, or merge the adapter into the model"
        )))
    }
}

fn is_f16(adapter: &Adapter) -> bool {
    let halves = adapter.pairs.values().flat_map(|pair| [&pair.a, &pair.b]);
    let f16 = |half: &TensorInfo| half.ty == TensorType::F16;
    let uniform = |pair: &AdapterPair| pair.rank() == adapter.rank;
    halves.into_iter().all(f16) && adapter.pairs.values().all(uniform)
}

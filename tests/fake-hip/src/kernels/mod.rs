//! Kernels by entry name, each carried out by the host's reference on the launch's argument struct.
//!
//! The structs are those of the kernels crate that the launches are made of. What a kernel
//! reads and writes is checked against the live allocations; a grid that does not cover
//! the work, a row past its matrix or a page table that names no memory is a fault, as it
//! would be on a card (or worse).
//!
//! Products, norms, rotations and attention are the host device's own, so what comes out differs
//! from the host device in the last bits at most. Weights on the device keep their rows as they are
//! in the file, inside the bytes that [`layout`](rocmforge_kernels_gpu::layout) gives them: only
//! these kernels look into them.

mod act;
mod adapters;
mod attention;
mod elements;
mod experts;
mod heads;
mod products;
mod recurrent;
mod rows;
mod sample;
mod weights;

use std::sync::OnceLock;

use rocmforge_kernels_gpu::ops;
use rocmforge_kernels_gpu::units;
use rocmforge_ops::{KvType, WeightType};

use crate::memory::{Fault, Memory};
use weights::Form;

pub(crate) use products::Prepared;

/// A launch as it was queued.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) args: Vec<u8>,
}

/// What a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Operation {
    Matvec {
        first: WeightType,
        second: Option<WeightType>,
    },
    MatvecFloat(WeightType),
    Matmat(WeightType),
    /// Of f16 rows.
    MatmatF16 {
        ty: WeightType,
        tokens: u32,
    },
    Repack(WeightType),
    Dequantize(WeightType),
    DequantizeLow,
    Rows(WeightType),
    Activations {
        input: rows::In,
        output: rows::Out,
    },
    RopeKv {
        /// `None` for any.
        dim: Option<u32>,
        /// Of the pages.
        ty: KvType,
    },
    RopeHeads,
    AttentionDecode {
        /// Of key and value; `None` for any.
        dims: Option<(u32, u32)>,
        /// Most heads of a block.
        most: u32,
        form: attention::Form,
    },
    AttentionPrefill {
        dim: u32,
        form: attention::Form,
    },
    Gather,
    GatherOutputs,
    AddBias,
    LayerNorm,
    Change(elements::Change),
    Columns,
    Combine,
    ProductTransposed,
    Clamp,
    Route,
    Conv,
    DeltaNet {
        most: u32,
    },
    Ssm {
        most: u32,
    },
    Experts(WeightType),
    ExpertsGroup,
    ExpertsMany {
        ty: WeightType,
        /// Whether rows are f16.
        half: bool,
    },
    MatmatHeads(WeightType),
    AdaptersDown {
        ty: WeightType,
        /// Whether rows are f16.
        half: bool,
    },
    AdaptersUp(WeightType, adapters::Up),
    TopKPart,
    TopKJoin,
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// The unit that it is compiled in.
    unit: &'static str,
    operation: Operation,
    /// Bytes of its argument struct.
    pub(crate) arg_bytes: usize,
}

impl Kernel {
    pub(crate) fn run(&self, memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
        match self.operation {
            Operation::Matvec { first, second } => products::matvec(memory, launch, first, second),
            Operation::MatvecFloat(ty) => products::float(memory, launch, ty),
            Operation::Matmat(ty) => products::matmat(memory, launch, ty),
            Operation::MatmatF16 { ty, tokens } => products::f16(memory, launch, ty, tokens),
            Operation::Repack(ty) => weights::repack(memory, launch, ty),
            Operation::Dequantize(ty) => weights::dequantize(memory, launch, ty, Form::F16),
            Operation::DequantizeLow => {
                weights::dequantize(memory, launch, WeightType::F32, Form::Low)
            }
            Operation::Rows(ty) => weights::dequantize(memory, launch, ty, Form::F32),
            Operation::Activations { input, output } => {
                rows::activations(memory, launch, input, output)
            }
            Operation::RopeKv { dim, ty } => heads::rope_kv(memory, launch, dim, ty),
            Operation::RopeHeads => heads::rope_heads(memory, launch),
            Operation::AttentionDecode { dims, most, form } => {
                attention::decode(memory, launch, dims, most, form)
            }
            Operation::AttentionPrefill { dim, form } => {
                attention::prefill(memory, launch, dim, form)
            }
            Operation::Gather => rows::gather(memory, launch),
            Operation::GatherOutputs => rows::gather_outputs(memory, launch),
            Operation::AddBias => rows::add_bias(memory, launch),
            Operation::LayerNorm => rows::layer_norm(memory, launch),
            Operation::Change(what) => elements::change(memory, launch, what),
            Operation::Columns => elements::columns(memory, launch),
            Operation::Combine => elements::combine(memory, launch),
            Operation::ProductTransposed => elements::product_transposed(memory, launch),
            Operation::Clamp => elements::clamp(memory, launch),
            Operation::Route => elements::route(memory, launch),
            Operation::Conv => recurrent::conv(memory, launch),
            Operation::DeltaNet { most } => recurrent::delta_net(memory, launch, most),
            Operation::Ssm { most } => recurrent::ssm(memory, launch, most),
            Operation::Experts(ty) => experts::experts(memory, launch, ty),
            Operation::ExpertsGroup => experts::group(memory, launch),
            Operation::ExpertsMany { ty, half } => experts::many(memory, launch, ty, half),
            Operation::MatmatHeads(ty) => products::heads(memory, launch, ty),
            Operation::AdaptersDown { ty, half } => adapters::down(memory, launch, ty, half),
            Operation::AdaptersUp(ty, how) => adapters::up(memory, launch, ty, how),
            Operation::TopKPart => sample::part(memory, launch),
            Operation::TopKJoin => sample::join(memory, launch),
        }
    }
}

impl Operation {
    fn arg_bytes(self) -> usize {
        match self {
            Operation::Matvec { .. } => size_of::<ops::matvec::MatvecArgs>(),
            Operation::MatvecFloat(_) => size_of::<ops::matvec::MatvecFloatArgs>(),
            Operation::Matmat(_) => size_of::<ops::matmat::MatmatArgs>(),
            Operation::MatmatF16 { .. } => size_of::<ops::matmat::MatmatMmaArgs>(),
            Operation::Repack(_) => size_of::<ops::weights::RepackArgs>(),
            Operation::Dequantize(_) | Operation::DequantizeLow | Operation::Rows(_) => {
                size_of::<ops::weights::DequantizeArgs>()
            }
            Operation::Activations { .. } => size_of::<ops::activations::ActivationsArgs>(),
            Operation::RopeKv { .. } => size_of::<ops::kv::RopeKvArgs>(),
            Operation::RopeHeads => size_of::<ops::kv::RopeHeadsArgs>(),
            Operation::AttentionDecode { .. } => size_of::<ops::attention::AttentionDecodeArgs>(),
            Operation::AttentionPrefill { .. } => size_of::<ops::attention::AttentionPrefillArgs>(),
            Operation::Gather => size_of::<ops::rows::GatherArgs>(),
            Operation::GatherOutputs => size_of::<ops::rows::GatherOutputsArgs>(),
            Operation::AddBias => size_of::<ops::rows::AddBiasArgs>(),
            Operation::LayerNorm => size_of::<ops::rows::LayerNormArgs>(),
            Operation::Change(_) => size_of::<ops::elements::ElementsArgs>(),
            Operation::Columns => size_of::<ops::elements::ColumnsArgs>(),
            Operation::Combine => size_of::<ops::elements::CombineArgs>(),
            Operation::ProductTransposed => size_of::<ops::elements::ProductTransposedArgs>(),
            Operation::Clamp => size_of::<ops::elements::ClampArgs>(),
            Operation::Route => size_of::<ops::route::RouteArgs>(),
            Operation::Conv => size_of::<ops::recurrent::ConvArgs>(),
            Operation::DeltaNet { .. } => size_of::<ops::recurrent::DeltaNetArgs>(),
            Operation::Ssm { .. } => size_of::<ops::recurrent::SsmArgs>(),
            Operation::Experts(_) => size_of::<ops::experts::ExpertsArgs>(),
            Operation::ExpertsGroup => size_of::<ops::experts::ExpertsGroupArgs>(),
            Operation::ExpertsMany { .. } => size_of::<ops::experts::ExpertsManyArgs>(),
            Operation::MatmatHeads(ty) if ty.is_quantized() => {
                size_of::<ops::heads::MatmatHeadsArgs>()
            }
            Operation::MatmatHeads(_) => size_of::<ops::heads::MatmatHeadsFloatArgs>(),
            Operation::AdaptersDown { .. } => size_of::<ops::adapters::AdaptersDownArgs>(),
            Operation::AdaptersUp(..) => size_of::<ops::adapters::AdaptersUpArgs>(),
            Operation::TopKPart | Operation::TopKJoin => size_of::<ops::sample::TopKArgs>(),
        }
    }
}

/// What a weight type is called in units and entries: `q4_k` for Q4_K.
fn type_called(name: &str) -> Option<WeightType> {
    WeightType::ALL
        .into_iter()
        .find(|ty| ty.name().eq_ignore_ascii_case(name))
}

/// The entries of a unit of the list, with what they compute; none for a unit that is not known
/// here.
#[expect(clippy::too_many_lines, reason = "a table of kernels")]
fn entries(unit: &'static str) -> Vec<(String, Operation)> {
    let number = |text: &str| text.parse::<u32>().ok();
    let own = |operation| vec![(unit.to_owned(), operation)];
    if let Some(rest) = unit.strip_prefix("matvec_") {
        return match (type_called(rest), split_pair(rest)) {
            (Some(ty), _) if !ty.is_quantized() => own(Operation::MatvecFloat(ty)),
            (Some(first), _) => own(Operation::Matvec {
                first,
                second: None,
            }),
            (None, Some((first, second))) => own(Operation::Matvec {
                first,
                second: Some(second),
            }),
            (None, None) => Vec::new(),
        };
    }
    if let Some(ty) = unit.strip_prefix("matmat_").and_then(type_called) {
        let name = &unit["matmat_".len()..];
        let half = [16, 32, 64].map(|tokens| {
            let operation = Operation::MatmatF16 { ty, tokens };
            (format!("matmat_wmma_{tokens}_{name}"), operation)
        });
        let whole = (unit.to_owned(), Operation::Matmat(ty));
        return half.into_iter().chain([whole]).collect();
    }
    if let Some((name, ty)) = unit
        .strip_prefix("dequantize_")
        .and_then(|name| Some((name, type_called(name)?)))
    {
        let low = (ty == WeightType::F32)
            .then(|| ("dequantize_low_f32".to_owned(), Operation::DequantizeLow));
        return [
            (unit.to_owned(), Operation::Dequantize(ty)),
            (format!("rows_{name}"), Operation::Rows(ty)),
        ]
        .into_iter()
        .chain(low)
        .collect();
    }
    if let Some((name, ty)) = unit
        .strip_prefix("experts_many_")
        .and_then(|name| Some((name, type_called(name)?)))
    {
        return [
            (unit.to_owned(), false),
            (format!("experts_many_f16_{name}"), true),
        ]
        .map(|(entry, half)| (entry, Operation::ExpertsMany { ty, half }))
        .to_vec();
    }
    if let Some((name, ty)) = unit
        .strip_prefix("adapters_")
        .and_then(|name| Some((name, type_called(name)?)))
    {
        let up = |how| Operation::AdaptersUp(ty, how);
        return [
            ("down", Operation::AdaptersDown { ty, half: false }),
            ("down_half", Operation::AdaptersDown { ty, half: true }),
            ("up_1", up(adapters::Up::One)),
            ("up_32", up(adapters::Up::Many)),
            ("up_gated", up(adapters::Up::Gated)),
        ]
        .map(|(entry, operation)| (format!("adapters_{entry}_{name}"), operation))
        .to_vec();
    }
    if let Some(ty) = unit.strip_prefix("matmat_heads_").and_then(type_called) {
        return own(Operation::MatmatHeads(ty));
    }
    if let Some(ty) = unit.strip_prefix("experts_").and_then(type_called) {
        return own(Operation::Experts(ty));
    }
    if let Some(most) = unit.strip_prefix("delta_net_").and_then(number) {
        return own(Operation::DeltaNet { most });
    }
    if let Some(most) = unit.strip_prefix("ssm_").and_then(number) {
        return own(Operation::Ssm { most });
    }
    // Whether scores fall with distance, what pages are made of, and the name without both.
    let alibi = unit.ends_with("_alibi");
    let unit = unit.trim_end_matches("_alibi");
    let (of_f16, ty) = [("_q8", KvType::Q8_0), ("_f32", KvType::F32)]
        .into_iter()
        .find_map(|(suffix, ty)| Some((unit.strip_suffix(suffix)?, ty)))
        .unwrap_or((unit, KvType::F16));
    let form = attention::Form { ty, alibi };
    if let Some(dim) = of_f16.strip_prefix("rope_kv_").and_then(number) {
        return own(Operation::RopeKv { dim: Some(dim), ty });
    }
    if let Some(dim) = of_f16.strip_prefix("attention_prefill_").and_then(number) {
        return own(Operation::AttentionPrefill { dim, form });
    }
    if let Some((dim, group)) = of_f16
        .strip_prefix("attention_decode_")
        .and_then(|rest| rest.split_once('_'))
        .and_then(|(dim, group)| Some((number(dim)?, number(group)?)))
    {
        let (dims, most) = match (dim, group) {
            (576, 512) => ((576, 512), 4),
            (dim, most) => ((dim, dim), most),
        };
        let dims = Some(dims);
        return own(Operation::AttentionDecode { dims, most, form });
    }
    match unit {
        "repack" => WeightType::ALL
            .into_iter()
            .map(|ty| {
                let name = format!("repack_{}", ty.name().to_ascii_lowercase());
                (name, Operation::Repack(ty))
            })
            .collect(),
        "activations" => rows::entries()
            .map(|(name, input, output)| (name, Operation::Activations { input, output }))
            .collect(),
        "elements" => {
            let changes = [
                ("scale", elements::Change::Scale),
                ("soft_cap", elements::Change::SoftCap),
                ("add_gated", elements::Change::AddGated),
                ("add_weighted", elements::Change::AddWeighted),
                ("gate_heads", elements::Change::GateHeads),
                ("position_scale", elements::Change::PositionScale),
                ("add_table", elements::Change::AddTable),
            ]
            .map(|(name, what)| (name.to_owned(), Operation::Change(what)));
            let others = [
                ("columns", Operation::Columns),
                ("combine", Operation::Combine),
                ("product_transposed", Operation::ProductTransposed),
            ]
            .map(|(name, operation)| (name.to_owned(), operation));
            changes.into_iter().chain(others).collect()
        }
        "attention_decode_any" | "attention_decode_any_q8" | "attention_decode_any_f32" => {
            own(Operation::AttentionDecode {
                dims: None,
                most: 4,
                form,
            })
        }
        "rope_kv_any" | "rope_kv_any_q8" | "rope_kv_any_f32" => {
            own(Operation::RopeKv { dim: None, ty })
        }
        "rope_heads" => own(Operation::RopeHeads),
        "experts_group" => own(Operation::ExpertsGroup),
        "conv" => own(Operation::Conv),
        "route" => own(Operation::Route),
        "gather" => vec![
            ("gather".to_owned(), Operation::Gather),
            ("gather_outputs".to_owned(), Operation::GatherOutputs),
        ],
        "add_bias" => own(Operation::AddBias),
        "clamp" => own(Operation::Clamp),
        "layer_norm" => own(Operation::LayerNorm),
        "sample" => vec![
            ("top_k_part".to_owned(), Operation::TopKPart),
            ("top_k_join".to_owned(), Operation::TopKJoin),
        ],
        _ => Vec::new(),
    }
}

/// Two types in one name, as in `matvec_q4_k_q6_k`.
fn split_pair(names: &str) -> Option<(WeightType, WeightType)> {
    let places = names.match_indices('_').map(|(at, _)| at);
    places
        .filter_map(|at| Some((type_called(&names[..at])?, type_called(&names[at + 1..])?)))
        .next()
}

/// Every kernel of every unit that is known here.
pub(crate) fn all() -> &'static [Kernel] {
    static ALL: OnceLock<Vec<Kernel>> = OnceLock::new();
    ALL.get_or_init(|| {
        let of_unit = |unit: units::Unit| {
            let made = entries(unit.name).into_iter();
            made.map(move |(name, operation)| Kernel {
                name,
                unit: unit.name,
                operation,
                arg_bytes: operation.arg_bytes(),
            })
        };
        units::units().flat_map(of_unit).collect()
    })
}

/// Names of the kernels of a unit.
pub(crate) fn of_unit(unit: &str) -> Vec<&'static str> {
    let mine = all().iter().filter(|k| k.unit == unit);
    mine.map(|k| k.name.as_str()).collect()
}

// ---- what all of them
// use --------------------------------------------------------------------------------------------

/// The launch's arguments by the struct's own reader.
fn args<T>(launch: &Launch, read: impl Fn(&[u8]) -> Option<T>) -> Result<T, Fault> {
    read(&launch.args).ok_or_else(|| {
        Fault(format!(
            "arguments of another kernel: {} bytes",
            launch.args.len()
        ))
    })
}

fn floats(memory: &mut Memory, at: u64, n: usize, who: &str) -> Result<Vec<f32>, Fault> {
    let bytes = memory.read(at, n * 4, who)?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
}

/// f16 as f32.
fn halves(memory: &mut Memory, at: u64, n: usize, who: &str) -> Result<Vec<f32>, Fault> {
    let bytes = memory.read(at, n * 2, who)?;
    let (words, _) = bytes.as_chunks::<2>();
    Ok(words
        .iter()
        .map(|w| half::f16::from_le_bytes(*w).to_f32())
        .collect())
}

fn words(memory: &mut Memory, at: u64, n: usize, who: &str) -> Result<Vec<u32>, Fault> {
    let bytes = memory.read(at, n * 4, who)?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|w| u32::from_le_bytes(*w)).collect())
}

fn store(memory: &mut Memory, at: u64, values: &[f32]) -> Result<(), Fault> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    memory.write(at, &bytes)
}

fn store_halves(memory: &mut Memory, at: u64, values: &[f32]) -> Result<(), Fault> {
    let half = |v: &f32| half::f16::from_f32(*v).to_le_bytes();
    let bytes: Vec<u8> = values.iter().flat_map(half).collect();
    memory.write(at, &bytes)
}

/// A fault unless `has` is enough for `needs`.
fn covers(what: &str, has: u64, needs: u64) -> Result<(), Fault> {
    if has >= needs {
        return Ok(());
    }
    Err(Fault(format!("{what} covers {has} of {needs}")))
}

/// A fault unless two numbers that tell the same are equal.
fn agrees(what: &str, a: u32, b: u32) -> Result<(), Fault> {
    if a == b {
        return Ok(());
    }
    Err(Fault(format!("{what}: {a} and {b}")))
}

/// Carries a builder's launch out.
#[cfg(test)]
fn run(memory: &mut Memory, launch: &rocmforge_kernels_gpu::Launch) -> Result<(), Fault> {
    let kernel = all().iter().find(|k| k.name == launch.entry());
    let kernel = kernel.unwrap_or_else(|| panic!("no kernel {}", launch.kernel));
    assert_eq!(kernel.unit, launch.unit());
    let launch = Launch {
        grid: launch.grid,
        args: launch.args.to_bytes(),
    };
    kernel.run(memory, &launch)
}

#[cfg(test)]
mod tests;

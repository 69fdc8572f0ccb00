//! Reads a file's hyperparameters: each from its key, checked against a maximum.

use std::cell::RefCell;

use rocmforge_gguf::{Gguf, Value};
use rocmforge_ops::{RopeAxes, RopeOrder, RopeScaling, RopeSpec};

use crate::error::Error;

/// Maximum number of layers of a model.
pub(crate) const N_LAYER_MAX: u32 = 1024;
/// Maximum width of the residual stream or a feed-forward, in elements.
pub(crate) const WIDTH_MAX: u32 = 1 << 20;
/// Maximum number of attention heads of a layer.
pub(crate) const N_HEAD_MAX: u32 = 4096;
/// Maximum number of elements of a head.
pub(crate) const HEAD_DIM_MAX: u32 = 1024;
/// Maximum context length in tokens.
pub(crate) const N_CTX_MAX: u32 = 1 << 24;
/// Maximum number of experts of a layer.
pub(crate) const N_EXPERT_MAX: u32 = 1024;

/// Reads keys below the architecture's prefix.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    pub(crate) gguf: &'a Gguf,
    pub(crate) arch: &'static str,
    /// Remarks about values that are wrong but do not prevent the use of the model.
    pub(crate) remarks: &'a RefCell<Vec<String>>,
}

impl Keys<'_> {
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub(crate) fn bad(&self, key: &str, value: impl ToString, message: impl Into<String>) -> Error {
        Error::BadValue {
            key: self.name(key),
            value: value.to_string(),
            message: message.into(),
        }
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
        Error::MissingKey(self.name(key))
    }

    pub(crate) fn optional_u32(&self, key: &str) -> Result<Option<u32>, Error> {
        Ok(self.gguf.u32(&self.name(key))?)
    }

    /// Reads a count of at least 1 and at most `max`.
    pub(crate) fn count(&self, key: &str, max: u32) -> Result<u32, Error> {
        let value = self.optional_u32(key)?.ok_or_else(|| self.missing(key))?;
        self.in_bounds(key, value, max)
    }

    pub(crate) fn count_or(&self, key: &str, max: u32, default: u32) -> Result<u32, Error> {
        self.in_bounds(key, self.optional_u32(key)?.unwrap_or(default), max)
    }

    /// Reads a count that may be absent or 0.
    pub(crate) fn maybe(&self, key: &str, max: u32) -> Result<u32, Error> {
        let value = self.optional_u32(key)?.unwrap_or(0);
        if value > max {
            return Err(self.bad(key, value, format!("must be at most {max}")));
        }
        Ok(value)
    }

    fn in_bounds(&self, key: &str, value: u32, max: u32) -> Result<u32, Error> {
        if value == 0 || value > max {
            return Err(self.bad(key, value, format!("must be in 1..={max}")));
        }
        Ok(value)
    }

    /// Reads a count for each of `n` layers: an array of at least that length, or one number for
    /// all; `None` if absent.
    pub(crate) fn per_layer(&self, key: &str, n: u32, max: u32) -> Result<Option<Vec<u32>>, Error> {
        let name = self.name(key);
        let Some(value) = self.gguf.value(&name) else {
            return Ok(None);
        };
        let read = |value: &Value<'_>| match value {
            Value::Bool(b) => Ok(u32::from(*b)),
            other => other
                .as_integer()
                .and_then(|i| u32::try_from(i).ok())
                .filter(|&v| v <= max)
                .ok_or_else(|| other.as_integer()),
        };
        let bad = |found: Option<i128>, of: &str| {
            let found = found.map_or("no integer".to_owned(), |i| i.to_string());
            self.bad(key, format!("{found}{of}"), format!("must be in 0..={max}"))
        };
        match value {
            Value::Array(array) => {
                if array.len() < n as usize {
                    let found = format!("an array of {}", array.len());
                    return Err(self.bad(key, found, format!("must have {n} elements")));
                }
                array
                    .iter()
                    .take(n as usize)
                    .enumerate()
                    .map(|(i, v)| read(&v).map_err(|found| bad(found, &format!(" for layer {i}"))))
                    .collect::<Result<_, _>>()
                    .map(Some)
            }
            single => {
                let value = read(&single).map_err(|found| bad(found, ""))?;
                Ok(Some(vec![value; n as usize]))
            }
        }
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, Error> {
        Ok(self.gguf.bool(&self.name(key))?.unwrap_or(default))
    }

    /// Whether the file says that it ranks by the labels "yes" and "no", as llama.cpp's converter
    /// writes for rerankers whose classification head is two rows of the output head.
    pub(crate) fn ranks_yes_no(&self) -> Result<bool, Error> {
        const RANK: u32 = 4;
        let labels = self.gguf.strings(&self.name("classifier.output_labels"))?;
        let these = labels.is_some_and(|labels| labels.iter().eq([&b"yes"[..], b"no"]));
        Ok(these && self.optional_u32("pooling_type")? == Some(RANK))
    }

    pub(crate) fn optional_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let value = self.gguf.f32(&self.name(key))?;
        match value {
            Some(v) if !v.is_finite() => Err(self.bad(key, v, "must be a finite number")),
            other => Ok(other),
        }
    }

    pub(crate) fn f32_or(&self, key: &str, default: f32) -> Result<f32, Error> {
        Ok(self.optional_f32(key)?.unwrap_or(default))
    }

    /// Reads a number that is not negative; `default` if absent.
    pub(crate) fn not_negative_or(&self, key: &str, default: f32) -> Result<f32, Error> {
        let value = self.f32_or(key, default)?;
        if value < 0.0 {
            return Err(self.bad(key, value, "must not be negative"));
        }
        Ok(value)
    }

    /// Reads a factor or a base; 0 counts as absent, as in llama.cpp.
    pub(crate) fn positive_or(&self, key: &str, default: f32) -> Result<f32, Error> {
        let value = self.f32_or(key, default)?;
        if value < 0.0 {
            return Err(self.bad(key, value, "must be a positive number"));
        }
        if value == 0.0 {
            self.counts_as_absent(key);
            return Ok(default);
        }
        Ok(value)
    }

    /// As [`count_or`](Self::count_or), of a key whose 0 counts as absent.
    pub(crate) fn count_but_0_or(&self, key: &str, max: u32, default: u32) -> Result<u32, Error> {
        if self.optional_u32(key)? == Some(0) {
            self.counts_as_absent(key);
            return Ok(default);
        }
        self.count_or(key, max, default)
    }

    /// Remarks that a key is 0 although that makes no sense.
    fn counts_as_absent(&self, key: &str) {
        let remark = format!("{} is 0; it counts as absent", self.name(key));
        let mut remarks = self.remarks.borrow_mut();
        // There are no more than the keys that are read.
        if !remarks.contains(&remark) {
            remarks.push(remark);
        }
    }

    /// Size of the sliding window, if some layers have one.
    pub(crate) fn window(&self) -> Result<Option<u32>, Error> {
        let window = self.maybe("attention.sliding_window", N_CTX_MAX)?;
        Ok(Some(window).filter(|&n| n > 0))
    }

    /// Number of elements of a head that RoPE rotates.
    pub(crate) fn n_rot(&self, key: &str, head_dim: u32, default: u32) -> Result<u32, Error> {
        let n_rot = self.count_or(key, HEAD_DIM_MAX, default)?;
        if n_rot > head_dim || n_rot % 2 != 0 {
            let message = format!("must be even and at most the head's {head_dim} elements");
            return Err(self.bad(key, n_rot, message));
        }
        Ok(n_rot)
    }

    /// The epsilon of the RMSNorms.
    pub(crate) fn norm_eps(&self) -> Result<f32, Error> {
        const KEY: &str = "attention.layer_norm_rms_epsilon";
        // Nemotron's files have the key of the other kind of norm alone.
        let eps = match self.optional_f32(KEY)? {
            Some(eps) => eps,
            None => self
                .optional_f32("attention.layer_norm_epsilon")?
                .ok_or_else(|| self.missing(KEY))?,
        };
        if !(0.0..1.0).contains(&eps) {
            return Err(self.bad(KEY, eps, "must be in 0..1"));
        }
        Ok(eps)
    }

    /// The RoPE parameters by the usual keys.
    pub(crate) fn rope(&self, order: RopeOrder, head_dim: u32) -> Result<RopeSpec, Error> {
        let n_rot = self.n_rot("rope.dimension_count", head_dim, head_dim)?;
        Ok(RopeSpec {
            order,
            n_rot,
            axes: self.axes(n_rot)?,
            freq_base: f64::from(self.positive_or("rope.freq_base", 10_000.0)?),
            scaling: self.scaling()?,
            factors: None,
            long: None,
            magnitude: 1.0,
        })
    }

    /// Which coordinate of a position rotates which pairs of elements, for architectures with
    /// M-RoPE.
    fn axes(&self, n_rot: u32) -> Result<RopeAxes, Error> {
        const KEY: &str = "rope.dimension_sections";
        let interleaved = match self.arch {
            "qwen2vl" | "glm4" | "glm4moe" => false,
            "qwen3vl" | "qwen3vlmoe" | "qwen35" | "qwen35moe" => true,
            _ => return Ok(RopeAxes::Sequence),
        };
        let Some(sections) = self.gguf.u32s(&self.name(KEY))? else {
            return Ok(RopeAxes::Sequence);
        };
        let sum: u64 = sections.iter().map(|&n| u64::from(n)).sum();
        match sections[..] {
            [sequence, rows, columns] | [sequence, rows, columns, 0]
                if sum == u64::from(n_rot / 2) =>
            {
                Ok(RopeAxes::Sections {
                    pairs: [sequence, rows, columns],
                    interleaved,
                })
            }
            _ => {
                let message = format!("must be three numbers and 0 whose sum is {}", n_rot / 2);
                Err(self.bad(KEY, format!("{sections:?}"), message))
            }
        }
    }

    /// The RoPE scaling, which extends the context.
    fn scaling(&self) -> Result<RopeScaling, Error> {
        let kind = self.gguf.str(&self.name("rope.scaling.type"))?;
        let linear = |key: &str| -> Result<RopeScaling, Error> {
            let factor = f64::from(self.positive_or(key, 1.0)?);
            Ok(if factor == 1.0 {
                RopeScaling::None
            } else {
                RopeScaling::Linear { factor }
            })
        };
        match kind {
            // A factor without a type is a linear one; files from before the type had
            // a key of their own for it.
            None if self.optional_f32("rope.scaling.factor")?.is_some() => {
                linear("rope.scaling.factor")
            }
            None => linear("rope.scale_linear"),
            Some("none") => Ok(RopeScaling::None),
            // Per-pair factors come as tensors.
            Some("longrope") => Ok(RopeScaling::None),
            Some("linear") => linear("rope.scaling.factor"),
            Some("yarn") => {
                let n_ctx_train = self.count("context_length", N_CTX_MAX)?;
                let number =
                    |key: &str, default: f32| self.positive_or(key, default).map(f64::from);
                Ok(RopeScaling::Yarn {
                    factor: number("rope.scaling.factor", 1.0)?,
                    orig_ctx: self.count_but_0_or(
                        "rope.scaling.original_context_length",
                        N_CTX_MAX,
                        n_ctx_train,
                    )?,
                    beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
                    // 0 is linear scaling, and a negative one llama.cpp's mark for none.
                    ext_factor: match self.f32_or("rope.scaling.yarn_ext_factor", 1.0)? {
                        given if given < 0.0 => 1.0,
                        given => f64::from(given),
                    },
                    attn_factor: number("rope.scaling.attn_factor", 1.0)?,
                    rounded: true,
                })
            }
            Some(other) => Err(Error::Unsupported(format!(
                "RoPE scaling '{}' ({}) is not supported; supported: none, linear, yarn, longrope, and \
                 the rope_freqs tensor",
                other.chars().take(64).collect::<String>(),
                self.name("rope.scaling.type"),
            ))),
        }
    }
}

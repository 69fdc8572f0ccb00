//! A model of random weights that is so small that its life takes milliseconds.

use std::path::{Path, PathBuf};

use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use rocmforge_gguf::TensorType;
use rocmforge_gguf::write::{GgufWriter, MetaValue};

const N_EMBD: u64 = 64;
const N_HEAD: u64 = 2;
const HEAD_DIM: u64 = 64;
const N_FF: u64 = 96;

/// Tokens: every byte, one of two bytes, then special ones to fill a block.
pub(crate) const N_VOCAB: u64 = 288;

/// Context that the file claims.
const N_CTX: u32 = 512;

/// The character that stands for a byte in byte-level vocabularies.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + before).unwrap()
}

/// Random blocks whose weights have about the standard deviation of an
/// initialisation for rows of `cols`.
fn random(rng: &mut StdRng, ty: TensorType, cols: u64, rows: u64) -> Vec<u8> {
    let std = (cols as f32).sqrt().recip();
    let mut bytes = vec![0; (ty.row_bytes(cols).unwrap() * rows) as usize];
    rng.fill_bytes(&mut bytes);
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    for block in bytes.chunks_exact_mut(ty.block_bytes() as usize) {
        let sign = if rng.random() { 1.0 } else { -1.0 };
        match ty {
            TensorType::F16 => {
                block.copy_from_slice(&half(rng.random_range(-1.7f32..1.7) * std));
            }
            // A norm's weight, or one of a matrix.
            TensorType::F32 if rows == 1 => {
                block.copy_from_slice(&rng.random_range(0.8f32..1.2).to_le_bytes());
            }
            TensorType::F32 => {
                block.copy_from_slice(&(rng.random_range(-1.7f32..1.7) * std).to_le_bytes());
            }
            TensorType::Q4_0 => block[..2].copy_from_slice(&half(sign * std / 4.6)),
            TensorType::Q5_0 => block[..2].copy_from_slice(&half(sign * std / 9.2)),
            TensorType::Q8_0 => block[..2].copy_from_slice(&half(sign * std / 74.0)),
            TensorType::Q4_1 => {
                block[..2].copy_from_slice(&half(sign * std / 4.6));
                block[2..4].copy_from_slice(&half(-sign * 7.5 * std / 4.6));
            }
            TensorType::Q5_1 => {
                block[..2].copy_from_slice(&half(sign * std / 9.2));
                block[2..4].copy_from_slice(&half(-sign * 15.5 * std / 9.2));
            }
            other => panic!("no random blocks of {}", other.name()),
        }
    }
    bytes
}

/// Writes a llama of `n_layer` layers to `dir`; the same seed gives the same bytes.
pub(crate) fn write(dir: &Path, n_layer: u32, seed: u64) -> PathBuf {
    let shape = Shape {
        n_layer,
        n_ff: N_FF,
        matrices: None,
    };
    write_of(dir, &shape, seed)
}

/// How large a model is.
pub(crate) struct Shape {
    pub(crate) n_layer: u32,
    pub(crate) n_ff: u64,
    /// The type of the matrices of its layers, if all have one.
    pub(crate) matrices: Option<TensorType>,
}

/// Writes one of another shape.
pub(crate) fn write_of(dir: &Path, shape: &Shape, seed: u64) -> PathBuf {
    println!("seed {seed}");
    let &Shape {
        n_layer,
        n_ff,
        matrices,
    } = shape;
    let mut rng = StdRng::seed_from_u64(seed);
    let tokens: Vec<String> = (0..=255)
        .map(|b| byte_char(b).to_string())
        .chain(["th".to_owned()])
        .chain((257..N_VOCAB).map(|i| format!("<|{i}|>")))
        .collect();
    let types: Vec<i32> = (0..N_VOCAB).map(|i| if i < 257 { 1 } else { 3 }).collect();
    let mut writer = GgufWriter::new()
        .key("general.architecture", "llama")
        .key("general.name", "tiny")
        .key("llama.vocab_size", N_VOCAB as u32)
        .key("llama.context_length", N_CTX)
        .key("llama.embedding_length", N_EMBD as u32)
        .key("llama.block_count", n_layer)
        .key("llama.feed_forward_length", n_ff as u32)
        .key("llama.attention.head_count", N_HEAD as u32)
        .key("llama.attention.head_count_kv", 1u32)
        .key("llama.attention.key_length", HEAD_DIM as u32)
        .key("llama.attention.value_length", HEAD_DIM as u32)
        .key("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
        .key("llama.rope.dimension_count", HEAD_DIM as u32)
        .key("llama.rope.freq_base", 10_000.0f32)
        .key("tokenizer.ggml.model", "gpt2")
        .key("tokenizer.ggml.pre", "llama-bpe")
        .key("tokenizer.ggml.tokens", MetaValue::from_iter(&tokens))
        .key("tokenizer.ggml.token_type", types.as_slice())
        .key("tokenizer.ggml.merges", MetaValue::from_iter(["t h"]))
        .key("tokenizer.ggml.bos_token_id", 257u32)
        .key("tokenizer.ggml.eos_token_id", 258u32)
        .key("tokenizer.ggml.add_bos_token", true);
    let mut tensor = |writer: GgufWriter, name: &str, ty, cols, rows| {
        let bytes = random(&mut rng, ty, cols, rows);
        let both = [cols, rows];
        let dims: &[u64] = if rows == 1 { &both[..1] } else { &both };
        writer.tensor(name, dims, ty, bytes)
    };
    writer = tensor(
        writer,
        "token_embd.weight",
        TensorType::Q8_0,
        N_EMBD,
        N_VOCAB,
    );
    for i in 0..n_layer {
        let heads = N_HEAD * HEAD_DIM;
        // Layers of several sizes, so that what is evicted leaves holes in
        // which another does not fit.
        let down = [TensorType::F16, TensorType::F32, TensorType::Q8_0][i as usize % 3];
        for (name, ty, cols, rows) in [
            ("attn_norm", TensorType::F32, N_EMBD, 1),
            ("attn_q", TensorType::Q4_0, N_EMBD, heads),
            ("attn_k", TensorType::Q8_0, N_EMBD, HEAD_DIM),
            ("attn_v", TensorType::Q5_1, N_EMBD, HEAD_DIM),
            ("attn_output", TensorType::Q5_0, heads, N_EMBD),
            ("ffn_norm", TensorType::F32, N_EMBD, 1),
            ("ffn_gate", TensorType::Q4_1, N_EMBD, n_ff),
            ("ffn_up", TensorType::Q4_1, N_EMBD, n_ff),
            ("ffn_down", down, n_ff, N_EMBD),
        ] {
            let ty = matrices.filter(|_| rows > 1).unwrap_or(ty);
            writer = tensor(writer, &format!("blk.{i}.{name}.weight"), ty, cols, rows);
        }
    }
    writer = tensor(writer, "output_norm.weight", TensorType::F32, N_EMBD, 1);
    writer = tensor(writer, "output.weight", TensorType::Q8_0, N_EMBD, N_VOCAB);
    let of = matrices.map_or("mixed", TensorType::name);
    let path = dir.join(format!("tiny-{n_layer}-{seed}-{of}.gguf"));
    writer.write_to(&path).unwrap();
    path
}

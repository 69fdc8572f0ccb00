//! Models with a block that predicts one token more, made of the fixture of their
//! architecture: small models that count.
//!
//! Token `t` is followed by `t + 1`, since the output head's row of a token is the embedding of
//! the one before it. What the layers add to that is scaled by a factor: by none the next token
//! is certain, by more it depends on all tokens before. The block counts as well, from the
//! token or from the stream.

use std::path::PathBuf;

use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_gguf::write::{GgufWriter, split};
use rocmforge_gguf::{Gguf, TensorType};

use crate::requests::fixture;

/// The first token that is counted: those before it end texts and turns.
pub(crate) const FIRST: u32 = 3;

/// What the block counts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum From {
    /// The token behind the position, with the model's own head.
    Token,
    /// The model's stream at the position, with an embedding, a norm and a head of its own.
    Stream,
    /// Both.
    Both,
}

/// How a model is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Foresight {
    /// The architecture, of which there is a fixture.
    pub(crate) arch: &'static str,
    pub(crate) from: From,
    /// Factor on what the layers, and the block's, add to the residual stream.
    pub(crate) layers: f32,
    /// Tensors of the block whose names contain this are left out.
    pub(crate) without: &'static str,
}

/// A matrix, `rows` of `width`.
struct Matrix {
    width: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn zeros(width: usize, rows: usize) -> Self {
        Self {
            width,
            values: vec![0.0; width * rows],
        }
    }

    fn row(&mut self, i: usize) -> &mut [f32] {
        &mut self.values[i * self.width..][..self.width]
    }

    fn bytes(&self) -> Vec<u8> {
        let halves = self.values.iter().map(|&x| f16::from_f32(x));
        halves.flat_map(f16::to_le_bytes).collect()
    }
}

/// A head that says the token `steps` behind the one whose embedding it is given.
fn counting(embedding: &mut Matrix, n_vocab: usize, steps: usize) -> Matrix {
    let mut head = Matrix::zeros(embedding.width, n_vocab);
    let first = FIRST as usize;
    let n = n_vocab - first;
    for i in 0..n {
        let row = embedding.row(first + i).to_vec();
        let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        let to = head.row(first + (i + steps) % n);
        to.iter_mut().zip(row).for_each(|(to, x)| *to = x / length);
    }
    head
}

fn times(ty: TensorType, bytes: &[u8], factor: f32) -> Vec<u8> {
    assert_eq!(ty, TensorType::F16);
    let scaled = bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f16::from_le_bytes(*b).to_f32() * factor);
    scaled
        .flat_map(|x| f16::from_f32(x).to_le_bytes())
        .collect()
}

impl Foresight {
    /// Writes the model into a folder. Where it is.
    pub(crate) fn write(&self, folder: &tempfile::TempDir) -> PathBuf {
        let mut whole = std::fs::read(fixture(&format!("arch/{}.gguf", self.arch))).unwrap();
        let n_layer = self.make_room_for_the_block(&mut whole);
        let gguf = Gguf::parse(&whole, whole.len() as u64).unwrap();
        let n = gguf.tensors().len();
        let mut writer: GgufWriter = split(&whole, &[0, n]).unwrap().swap_remove(0);
        let key = format!("{}.nextn_predict_layers", self.arch);
        if gguf.value(&key).is_none() {
            writer = writer.key(&key, 1u32);
        }
        let dims = gguf.tensor("token_embd.weight").unwrap().dims;
        let (n_embd, n_vocab) = (dims[0] as usize, dims[1] as usize);
        let mut rng = StdRng::seed_from_u64(3);
        let mut embedding = Matrix::zeros(n_embd, n_vocab);
        let values = &mut embedding.values;
        values
            .iter_mut()
            .for_each(|x| *x = rng.random_range(-1.0..1.0));
        let ones: Vec<u8> = vec![1f32; n_embd]
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        for tensor in gguf.tensors() {
            let (name, ty) = (tensor.name.as_str(), tensor.ty);
            let bytes = &whole[tensor.offset as usize..tensor.range().end as usize];
            let bytes = match name {
                "token_embd.weight" => embedding.bytes(),
                "output.weight" => counting(&mut embedding, n_vocab, 1).bytes(),
                "output_norm.weight" => ones.clone(),
                _ if ["attn_output", "ssm_out", "ffn_down"]
                    .iter()
                    .any(|part| name.contains(part)) =>
                {
                    times(ty, bytes, self.layers)
                }
                _ => bytes.to_vec(),
            };
            writer = writer.tensor(name, tensor.shape(), ty, &bytes);
            // The block's layer is as the last one.
            let last = format!("blk.{}.", n_layer - 1);
            if let Some(part) = name.strip_prefix(&last)
                && !self.leaves_out(part)
            {
                let name = format!("blk.{n_layer}.{part}");
                writer = writer.tensor(&name, tensor.shape(), ty, &bytes);
            }
        }
        let mut project = Matrix::zeros(2 * n_embd, n_embd);
        for i in 0..n_embd {
            let (token, stream) = match self.from {
                From::Token => (1.0, 0.0),
                From::Stream => (0.0, 1.0),
                From::Both => (1.0, 0.25),
            };
            project.row(i)[i] = token;
            project.row(i)[n_embd + i] = stream;
        }
        let (wide, tall) = (
            [2 * n_embd as u64, n_embd as u64],
            [n_embd as u64, n_vocab as u64],
        );
        let mut parts: Vec<(&str, &[u64], TensorType, Vec<u8>)> = vec![
            ("eh_proj", &wide, TensorType::F16, project.bytes()),
            ("enorm", &tall[..1], TensorType::F32, ones.clone()),
            ("hnorm", &tall[..1], TensorType::F32, ones.clone()),
        ];
        if self.from == From::Stream {
            let head = counting(&mut embedding, n_vocab, 2).bytes();
            parts.extend([
                (
                    "embed_tokens",
                    &tall[..],
                    TensorType::F16,
                    embedding.bytes(),
                ),
                (
                    "shared_head_norm",
                    &tall[..1],
                    TensorType::F32,
                    ones.clone(),
                ),
                ("shared_head_head", &tall[..], TensorType::F16, head),
            ]);
        }
        for (part, dims, ty, bytes) in parts {
            if !self.leaves_out(part) {
                let name = format!("blk.{n_layer}.nextn.{part}.weight");
                writer = writer.tensor(&name, dims, ty, &bytes);
            }
        }
        let path = folder.path().join(format!(
            "{}-{:?}-{}.gguf",
            self.arch, self.from, self.layers
        ));
        writer.write_to(&path).unwrap();
        path
    }

    /// Has the fixture count the block behind its layers, unless it does. The number of its layers.
    fn make_room_for_the_block(&self, whole: &mut [u8]) -> u32 {
        let key = format!("{}.block_count", self.arch).into_bytes();
        let at = whole.windows(key.len()).position(|w| w == key).unwrap();
        // Behind the key the type of its value.
        let value = &mut whole[at + key.len() + 4..][..4];
        let blocks = u32::from_le_bytes(value.try_into().unwrap());
        if self.arch == "glm4moe" {
            return blocks - 1;
        }
        value.copy_from_slice(&(blocks + 1).to_le_bytes());
        blocks
    }

    fn leaves_out(&self, part: &str) -> bool {
        !self.without.is_empty() && part.contains(self.without)
    }
}

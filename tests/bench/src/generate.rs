//! Writes a model of a preset's shape with random weights: a GGUF file that any engine can load.
//!
//! The header is made in memory and the tensor data is written from a few pools of random
//! blocks by several threads, each at its own place of the file. A file appears under its name
//! only when it is complete.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_gguf::write::{GgufWriter, MetaValue, RawTensor};
use rocmforge_gguf::{Gguf, MappedFile, TensorType};

use crate::presets::{ATTENTION_EVERY, CIRCLE, Linear, Mix, Preset, Shape, WINDOW};
use crate::tensors::{Fill, TensorSpec, tensors};
use crate::{vocab, weights};

/// Raised when a preset's file changes, so that files made before are made again.
const VERSION: u32 = 3;

/// Under this key a file says which [`VERSION`] made it.
const VERSION_KEY: &str = "rocmforge.bench.version";

/// Context length that the files claim, in tokens.
const N_CTX: u32 = 131_072;

/// Alignment of tensor data in bytes, the format's default.
const ALIGNMENT: u64 = 32;

/// Bytes that a thread writes at a time.
const PIECE_BYTES: u64 = 8 << 20;

/// A chat template in Llama 3's form, with tools and calls as ChatML's models write them and images
/// as Qwen's do.
const CHAT_TEMPLATE: &str = "{{ bos_token }}\
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\nTools:' }}\
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}\
{{- '\n\nA call is:\n<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call><|eot_id|>' }}\
{%- endif %}\
{%- for message in messages %}\
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}\
{%- if message.content is string %}{{ message.content | trim }}\
{%- else %}{%- for part in message.content or [] %}\
{%- if part.type == 'image' or part.type == 'image_url' %}\
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}\
{%- else %}{{ part.text }}{% endif %}\
{%- endfor %}{% endif %}\
{%- for call in message.tool_calls or [] %}\
{{- '\n<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}\
{{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}\
{{- '}\n</tool_call>' }}\
{%- endfor %}{{ '<|eot_id|>' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

/// What was written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) tensors: usize,
}

fn title(preset: Preset, mix: Mix, seed: u64) -> String {
    format!("{}-{}-random-{seed}", preset.name(), mix.name())
}

/// The title of the file at `path` and the version that made it; `None` if it is
/// no model of this program.
fn made(path: &Path) -> Option<(String, u32)> {
    let gguf = Gguf::open(&MappedFile::open(path).ok()?).ok()?;
    let title = gguf.str("general.name").ok()??.to_owned();
    Some((title, gguf.u32(VERSION_KEY).ok()??))
}

/// Writes the model of `preset` and `mix` to `path`; the same seed gives the same bytes.
///
/// # Errors
/// What creating or writing the file gives; nothing is left under `path` then.
pub(crate) fn write(path: &Path, preset: Preset, mix: Mix, seed: u64) -> Result<Written> {
    let shape = preset.shape();
    let specs = tensors(&shape, mix, vocab::N_VOCAB);
    let metadata = metadata(&title(preset, mix, seed), &shape, mix);
    write_file(path, metadata, &specs, seed)
}

/// Writes a file of these tensors with random weights to `path`.
///
/// # Errors
/// What creating or writing the file gives; nothing is left under `path` then.
pub(crate) fn write_file(
    path: &Path,
    metadata: GgufWriter,
    specs: &[TensorSpec],
    seed: u64,
) -> Result<Written> {
    let file_name = path.file_name().context("the path names no file")?;
    let mut part = file_name.to_owned();
    part.push(".part");
    let part = path.with_file_name(part);
    let written = write_part(&part, metadata, specs, seed)
        .and_then(|written| std::fs::rename(&part, path).map(|()| written));
    if written.is_err() {
        // There may be nothing to remove; the first error is the one to tell.
        let _ = std::fs::remove_file(&part);
    }
    written.with_context(|| format!("{} could not be written", path.display()))
}

fn write_part(
    path: &Path,
    mut writer: GgufWriter,
    specs: &[TensorSpec],
    seed: u64,
) -> io::Result<Written> {
    let mut at = 0u64;
    let mut places = Vec::with_capacity(specs.len());
    for spec in specs {
        writer = writer.raw_tensor(RawTensor {
            name: spec.name.as_bytes().into(),
            dims: spec.dims.clone(),
            ty: spec.ty.id(),
            offset: at,
        });
        places.push(at);
        at = (at + spec.bytes()).next_multiple_of(ALIGNMENT);
    }
    let header = writer.header();
    let start = (header.len() as u64).next_multiple_of(ALIGNMENT);
    let file = File::create(path)?;
    file.set_len(start + at)?;
    file.write_all_at(&header, 0)?;

    let mut rng = StdRng::seed_from_u64(seed);
    let value = |spec: &TensorSpec| match spec.fill {
        Fill::Random(times) => (0, times.to_bits()),
        Fill::All(value) => (1, value.to_bits()),
        Fill::Skewed(deviation) => (2, deviation.to_bits()),
        Fill::Circling => (3, 0),
    };
    let of = |spec: &TensorSpec| (spec.ty, spec.dims[0], value(spec));
    let mut pools: HashMap<(TensorType, u64, (u8, u32)), Vec<u8>> = HashMap::new();
    for spec in specs.iter().filter(|s| s.fill != Fill::Circling) {
        pools
            .entry(of(spec))
            .or_insert_with(|| pool(spec, &mut rng));
    }
    let mut pieces = Vec::new();
    let (mut first, mut first_shift): (Option<&TensorSpec>, Option<u64>) = (None, None);
    for (spec, place) in specs.iter().zip(places) {
        let circling = spec.fill == Fill::Circling;
        let source = first.filter(|_| circling).unwrap_or(spec);
        let pool = &pools[&of(source)];
        // Each tensor begins at another block of the pool, so that no two are the same; rows
        // that are unlike stay whole.
        let block = match spec.fill {
            Fill::Skewed(_) => spec.bytes() / spec.dims[1],
            _ => spec.ty.block_bytes(),
        };
        let shift = match (circling, first_shift) {
            (true, Some(shift)) => shift,
            _ => rng.random_range(0..pool.len() as u64 / block) * block,
        };
        first = first.or(Some(spec));
        first_shift = first_shift.or(Some(shift));
        let (bytes, base) = (spec.bytes(), start + place);
        let row = circling.then(|| bytes / spec.dims[1]);
        pieces.extend(
            (0..bytes)
                .step_by(PIECE_BYTES as usize)
                .map(|from| (base, from..bytes.min(from + PIECE_BYTES), pool, shift, row)),
        );
    }
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<()> {
        while let Some((base, range, pool, shift, row)) =
            pieces.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let mut from = range.start;
            while from < range.end {
                let (source, most) = match row {
                    None => (from, range.end - from),
                    Some(row) => (circled(from, *row), row - from % row),
                };
                let in_pool = ((source + shift) % pool.len() as u64) as usize;
                let most = most.min(range.end - from) as usize;
                let len = most.min(pool.len() - in_pool);
                file.write_all_at(&pool[in_pool..in_pool + len], base + from)?;
                from += len as u64;
            }
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let joined = others.into_iter().map(|t| {
            t.join()
                .unwrap_or_else(|_| Err(io::Error::other("a writing thread panicked")))
        });
        joined.fold(own, Result::and)
    })?;
    Ok(Written {
        bytes: start + at,
        tensors: specs.len(),
    })
}

/// Where in rows of so many bytes the bytes are that come to `at` when each row goes
/// one further in its circle.
fn circled(at: u64, row: u64) -> u64 {
    let (to, within) = (at / row, at % row);
    let from = to - to % CIRCLE + (to + CIRCLE - 1) % CIRCLE;
    from * row + within
}

fn pool(spec: &TensorSpec, rng: &mut StdRng) -> Vec<u8> {
    match spec.fill {
        Fill::All(value) => value.to_le_bytes().repeat(spec.dims[0] as usize),
        Fill::Random(times) => weights::pool(spec.ty, spec.dims[0], times, rng),
        Fill::Skewed(deviation) => weights::skewed(&spec.dims, deviation, rng),
        Fill::Circling => unreachable!("it has another one's rows"),
    }
}

fn metadata(title: &str, shape: &Shape, mix: Mix) -> GgufWriter {
    let vocab = vocab::make();
    let arch = shape.arch;
    let key = |name: &str| format!("{arch}.{name}");
    let mut writer = GgufWriter::new();
    if let Some(experts) = shape.experts {
        writer = writer
            .key(&key("expert_count"), experts.n)
            .key(&key("expert_used_count"), experts.used)
            .key(&key("expert_feed_forward_length"), experts.n_ff);
        if experts.shared {
            writer = writer.key(&key("expert_shared_feed_forward_length"), experts.n_ff);
        }
    }
    if let Some(linear) = shape.linear {
        let Linear {
            n_key,
            n_value,
            head_dim,
        } = linear;
        writer = writer
            .key(&key("full_attention_interval"), ATTENTION_EVERY)
            .key(&key("ssm.conv_kernel"), 4u32)
            .key(&key("ssm.state_size"), head_dim)
            .key(&key("ssm.group_count"), n_key)
            .key(&key("ssm.time_step_rank"), n_value)
            .key(&key("ssm.inner_size"), n_value * head_dim)
            .key(
                &key("rope.dimension_sections"),
                [11i32, 11, 10, 0].as_slice(),
            );
    }
    if shape.is_gpt_oss() {
        writer = writer
            .key(&key("attention.sliding_window"), WINDOW)
            .key(&key("rope.scaling.type"), "yarn")
            .key(&key("rope.scaling.factor"), 32f32)
            .key(&key("rope.scaling.original_context_length"), 4096u32);
    }
    let rope_dims = match shape.rope_dims {
        0 => shape.head_dim,
        some => some,
    };
    writer
        .key("general.architecture", arch)
        .key("general.type", "model")
        .key("general.name", title)
        .key("general.file_type", mix.file_type())
        .key("general.quantization_version", 2u32)
        .key(VERSION_KEY, VERSION)
        .key(&key("vocab_size"), vocab::N_VOCAB)
        .key(&key("context_length"), N_CTX)
        .key(&key("embedding_length"), shape.n_embd)
        .key(&key("block_count"), shape.n_layer)
        .key(&key("feed_forward_length"), shape.n_ff)
        .key(&key("attention.head_count"), shape.n_head)
        .key(&key("attention.head_count_kv"), shape.n_head_kv)
        .key(&key("attention.key_length"), shape.head_dim)
        .key(&key("attention.value_length"), shape.head_dim)
        .key(&key("attention.layer_norm_rms_epsilon"), shape.rms_eps)
        .key(&key("rope.dimension_count"), rope_dims)
        .key(&key("rope.freq_base"), shape.rope_freq_base)
        .key("tokenizer.ggml.model", "gpt2")
        .key("tokenizer.ggml.pre", "llama-bpe")
        .key("tokenizer.ggml.tokens", MetaValue::from_iter(&vocab.tokens))
        .key("tokenizer.ggml.token_type", vocab.types.as_slice())
        .key("tokenizer.ggml.merges", MetaValue::from_iter(&vocab.merges))
        .key("tokenizer.ggml.bos_token_id", vocab::BOS)
        .key("tokenizer.ggml.eos_token_id", vocab::EOS)
        .key("tokenizer.ggml.add_bos_token", true)
        .key("tokenizer.chat_template", CHAT_TEMPLATE)
}

/// The file of a model in `dir`, made if it is not there, and read once so that
/// it lies in the page cache.
///
/// # Errors
/// What writing or reading the file gives.
pub(crate) fn provide(dir: &Path, preset: Preset, mix: Mix, seed: u64) -> Result<PathBuf> {
    std::fs::create_dir_all(dir).with_context(|| format!("--dir {}", dir.display()))?;
    let name = match seed {
        1 => format!("{}-{}.gguf", preset.name(), mix.name()),
        other => format!("{}-{}-{other}.gguf", preset.name(), mix.name()),
    };
    let path = dir.join(name);
    let found = made(&path);
    if found != Some((title(preset, mix, seed), VERSION)) {
        // Someone's own file is not ours to replace.
        ensure!(
            found.is_some() || !path.exists(),
            "{} was not made by this program and is in the way: choose another --dir",
            path.display()
        );
        eprintln!("making {}", path.display());
        write(&path, preset, mix, seed)?;
    }
    let warm = File::open(&path).and_then(|mut file| io::copy(&mut file, &mut io::sink()));
    warm.with_context(|| format!("{} could not be read", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocmforge_tokenizer::Tokenizer;

    #[test]
    fn a_file_is_whole_and_the_same_for_a_seed() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a.gguf"), dir.path().join("b.gguf"));
        let written = write(&a, Preset::Mini, Mix::Q4KM, 3).unwrap();
        write(&b, Preset::Mini, Mix::Q4KM, 3).unwrap();
        let bytes = std::fs::read(&a).unwrap();
        assert_eq!(bytes.len() as u64, written.bytes);
        assert!(bytes == std::fs::read(&b).unwrap(), "same seed, same bytes");
        let gguf = Gguf::open(&MappedFile::open(&a).unwrap()).unwrap();
        assert_eq!(gguf.tensors().len(), written.tensors);
        let types: std::collections::HashSet<_> = gguf.tensors().iter().map(|t| t.ty).collect();
        let wanted = [TensorType::F32, TensorType::Q4K, TensorType::Q6K];
        assert_eq!(types, wanted.into_iter().collect());
        let leftovers = dir.path().read_dir().unwrap().count();
        assert_eq!(leftovers, 2, "no partial file stays");
    }

    #[test]
    fn skewed_routers_have_rows_of_several_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("skewed.gguf");
        write(&path, Preset::MiniMoeSkewed, Mix::Q4KM, 3).unwrap();
        let file = MappedFile::open(&path).unwrap();
        let gguf = Gguf::open(&file).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let mut layers = Vec::new();
        for layer in 0..4 {
            let router = gguf
                .tensor(&format!("blk.{layer}.ffn_gate_inp.weight"))
                .unwrap();
            assert_eq!(router.ty, TensorType::F32);
            let start = bytes.len() - router.bytes as usize;
            assert!(router.offset as usize <= start);
            let data = &bytes[router.offset as usize..][..router.bytes as usize];
            let rows = data.chunks_exact(router.dims[0] as usize * 4);
            let sizes: Vec<f32> = rows
                .map(|row| {
                    let elements = row
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                    elements.map(|x| x * x).sum::<f32>().sqrt()
                })
                .collect();
            assert_eq!(sizes.len(), 16);
            let largest = sizes.iter().copied().fold(0.0, f32::max);
            let least = sizes.iter().copied().fold(f32::INFINITY, f32::min);
            assert!(largest / least > 2.0, "{sizes:?}");
            layers.push(sizes);
        }
        assert!(
            layers[1..].iter().any(|sizes| *sizes != layers[0]),
            "not the same experts in all layers"
        );
    }

    #[test]
    fn text_goes_through_the_vocabulary_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mini.gguf");
        write(&path, Preset::Mini, Mix::Q8_0, 1).unwrap();
        let gguf = Gguf::open(&MappedFile::open(&path).unwrap()).unwrap();
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
        let text = " the number 128 and \u{e9}t\u{e9}, <|eot_id|>";
        let ids = tokenizer.encode(text, false, true).unwrap();
        assert_eq!(ids.last(), Some(&vocab::EOS));
        assert!(ids.len() < text.len(), "merges were applied: {ids:?}");
        // Special tokens have no text of their own.
        let plain = text.trim_end_matches("<|eot_id|>");
        assert_eq!(tokenizer.decode(&ids).unwrap(), plain);
    }

    #[test]
    fn another_programs_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mini-q8_0.gguf");
        std::fs::write(&path, "a file of someone").unwrap();
        let error = provide(dir.path(), Preset::Mini, Mix::Q8_0, 1).unwrap_err();
        assert!(error.to_string().contains("--dir"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a file of someone");
    }
}

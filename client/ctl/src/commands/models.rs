//! ls, show, unload, pin and unpin.

use std::path::Path;
use std::time::Duration;

use rocmforge_client::proto::Word as _;
use rocmforge_client::proto::v1::{Adapter, Model, ModelSummary, TensorTypeShare};
use serde_json::{Value, json};

use crate::cli::SegmentsArgs;
use crate::context::Context;
use crate::human::{Align, Table, count, fields, plural, size};

pub(super) async fn ls(context: &mut Context) -> anyhow::Result<()> {
    let models = context.connect().await?.list().await?;
    context.output.answer(
        || json!({"models": models}),
        || summaries(&models).to_string(),
    )
}

/// How long a shell waits for the names of models.
const NAMES_WAIT_MAX: Duration = Duration::from_secs(2);

/// The names of the loaded models, a line each. A shell that completes a line has no use for
/// errors.
pub(super) async fn names(context: &mut Context) -> anyhow::Result<()> {
    let listed = async { context.connect().await?.list().await };
    if let Ok(Ok(models)) = tokio::time::timeout(NAMES_WAIT_MAX, listed).await {
        for model in models {
            context.output.line(&model.name)?;
        }
    }
    Ok(())
}

/// One row a model.
pub(super) fn summaries(models: &[ModelSummary]) -> Table {
    let mut table = Table::new([
        ("NAME", Align::Left),
        ("ARCH", Align::Left),
        ("PARAMS", Align::Right),
        ("QUANT", Align::Left),
        ("SIZE", Align::Right),
        ("RESIDENT", Align::Right),
        ("SEGMENTS", Align::Right),
        ("PINNED", Align::Right),
        ("BUSY", Align::Right),
    ]);
    for model in models {
        table.row([
            model.name.clone(),
            model.architecture.clone(),
            count(model.n_params),
            model.quantization.clone(),
            size(model.weight_bytes),
            size(model.resident_bytes),
            format!("{}/{}", model.n_segments_resident, model.n_segments),
            model.n_segments_pinned.to_string(),
            model.active_requests.to_string(),
        ]);
    }
    table
}

pub(super) async fn show(context: &mut Context, name: &str) -> anyhow::Result<()> {
    let model = context.connect().await?.get(name).await?;
    context.output.answer(|| &model, || description(&model))
}

/// The line of a model's adapter.
fn adapter_row(adapter: &Adapter) -> (&'static str, String) {
    let Adapter {
        name, scale, path, ..
    } = adapter;
    ("adapter", format!("{name} at {scale}: {path}"))
}

fn quantization(model: &Model) -> String {
    let share = |share: &TensorTypeShare| {
        let tensors = plural(share.tensors.into(), "tensor");
        format!("{} ({tensors}, {})", share.r#type, size(share.bytes))
    };
    let shares: Vec<String> = model.quantization.iter().map(share).collect();
    shares.join(", ")
}

fn description(model: &Model) -> String {
    let id = |id: Option<u32>| id.map_or("-".to_owned(), |id| id.to_string());
    let mut rows = vec![("name", model.name.clone())];
    if !model.title.is_empty() {
        rows.push(("title", model.title.clone()));
    }
    rows.push(("architecture", model.architecture.clone()));
    rows.push((
        "parameters",
        format!("{} ({})", model.n_params, count(model.n_params)),
    ));
    rows.push(("quantization", quantization(model)));
    if let Some(file) = &model.file {
        rows.push(("file", file.path.clone()));
        let bytes = size(file.size_bytes);
        rows.push(("file size", format!("{bytes}, GGUF v{}", file.gguf_version)));
    }
    rows.extend([
        ("n_ctx_train", model.n_ctx_train.to_string()),
        ("n_layer", model.n_layer.to_string()),
        ("n_embd", model.n_embd.to_string()),
        (
            "n_head",
            format!("{} heads of width {}", model.n_head, model.n_embd_head),
        ),
        ("n_head_kv", model.n_head_kv.to_string()),
        ("n_ff", model.n_ff.to_string()),
        ("n_vocab", model.n_vocab.to_string()),
    ]);
    if model.n_expert > 0 {
        let experts = format!("{}, {} a token", model.n_expert, model.n_expert_used);
        rows.push(("n_expert", experts));
    }
    if let Some(rope) = &model.rope {
        let (base, n_rot, scaling) = (rope.freq_base, rope.n_rot, &rope.scaling);
        rows.push((
            "rope",
            format!("base {base}, {n_rot} rotated, scaling {scaling}"),
        ));
    }
    let template = if model.has_chat_template { "yes" } else { "no" };
    let tokenizer = format!(
        "{}, bos {}, eos {}",
        model.tokenizer,
        id(model.bos_token_id),
        id(model.eos_token_id)
    );
    rows.extend([
        ("tokenizer", tokenizer),
        ("chat template", template.to_owned()),
        (
            "kv cache",
            kv_line(model.kv_bytes_per_token, &model.kv_type),
        ),
        ("weights", size(model.weight_bytes)),
        ("resident", size(model.resident_bytes)),
        ("requests", model.active_requests.to_string()),
    ]);
    if !model.draft.is_empty() {
        rows.push(("draft model", model.draft.clone()));
    }
    if !model.mmproj.is_empty() {
        rows.push(("projector", model.mmproj.clone()));
    }
    rows.extend(model.adapters.iter().map(adapter_row));
    if let Some(defaults) = &model.defaults {
        rows.push(("defaults", defaults_line(&json!(defaults))));
    }
    format!("{}\n{}", fields(&rows), segments(model))
}

/// The segments of a model and where they are.
fn segments(model: &Model) -> Table {
    let mut table = Table::new([
        ("SEGMENT", Align::Right),
        ("NAME", Align::Left),
        ("SIZE", Align::Right),
        ("STATE", Align::Left),
        ("", Align::Left),
    ]);
    for segment in &model.segments {
        let marks = match (segment.pinned, segment.in_use) {
            (false, false) => "",
            (true, false) => "pinned",
            (false, true) => "in use",
            (true, true) => "pinned, in use",
        };
        table.row([
            segment.index.to_string(),
            segment.name.clone(),
            size(segment.bytes),
            segment.state().word().to_owned(),
            marks.to_owned(),
        ]);
    }
    table
}

/// What a token of context takes, and in what; an older daemon does not say the latter.
fn kv_line(bytes_per_token: u64, kv_type: &str) -> String {
    let size = size(bytes_per_token);
    match kv_type {
        "" => format!("{size} a token"),
        kv_type => format!("{size} a token, {kv_type}"),
    }
}

/// The defaults of a declared model as `key = value`.
fn defaults_line(defaults: &Value) -> String {
    let set = defaults.as_object().into_iter().flatten();
    let set: Vec<String> = set.map(|(key, value)| format!("{key} = {value}")).collect();
    match set.is_empty() {
        true => "the daemon's".to_owned(),
        false => set.join(", "),
    }
}

pub(super) async fn unload(context: &mut Context, name: &str, force: bool) -> anyhow::Result<()> {
    let answer = context.connect().await?.unload(name, force).await?;
    context.output.answer(
        || {
            json!({
                "name": name,
                "freed_bytes": answer.freed_bytes,
                "cancelled_requests": answer.cancelled_requests,
            })
        },
        || {
            let mut text = format!("{name}: unloaded, {} freed", size(answer.freed_bytes));
            if answer.cancelled_requests > 0 {
                let requests = plural(answer.cancelled_requests.into(), "request");
                text.push_str(&format!(", {requests} cancelled"));
            }
            text
        },
    )
}

pub(super) async fn pin(context: &mut Context, args: &SegmentsArgs) -> anyhow::Result<()> {
    let answer = context
        .connect()
        .await?
        .pin(&args.name, args.indexes())
        .await?;
    pinned(
        context,
        &args.name,
        answer.pinned_segments,
        answer.pinned_bytes,
    )
}

pub(super) async fn unpin(context: &mut Context, args: &SegmentsArgs) -> anyhow::Result<()> {
    let answer = context
        .connect()
        .await?
        .unpin(&args.name, args.indexes())
        .await?;
    pinned(
        context,
        &args.name,
        answer.pinned_segments,
        answer.pinned_bytes,
    )
}

fn pinned(context: &mut Context, name: &str, segments: u32, bytes: u64) -> anyhow::Result<()> {
    context.output.answer(
        || json!({"name": name, "pinned_segments": segments, "pinned_bytes": bytes}),
        || {
            format!(
                "{name}: {} pinned ({})",
                plural(segments.into(), "segment"),
                size(bytes)
            )
        },
    )
}

/// Whether the loaded model comes from `file`, links resolved.
pub(super) fn is_of_file(model: &ModelSummary, file: &Path) -> bool {
    std::fs::canonicalize(file).is_ok_and(|file| file == Path::new(&model.path))
}

//! load and preload: what takes time and shows progress.

use std::path::Path;

use anyhow::Context as _;
use futures_util::StreamExt;
use rocmforge_client::Client;
use rocmforge_client::proto::v1::{AdapterFile, LoadRequest, Model, load_event, preload_event};
use serde_json::json;

use crate::cli::{LoadArgs, SegmentsArgs};
use crate::context::Context;
use crate::human::{count, plural, size};
use crate::progress::Progress;

/// The request to load `file`: a file that is here by its absolute path, as the
/// daemon has another working directory; any other path as it is given, so that
/// the daemon looks below its model directories. Links are left to the daemon,
/// which sees the file system that counts, and so is the name.
pub(super) fn request(file: &Path, name: Option<String>) -> anyhow::Result<LoadRequest> {
    Ok(LoadRequest {
        path: path_of(file)?,
        name: name.unwrap_or_default(),
        pin: false,
        preload: false,
        draft: String::new(),
        mmproj: String::new(),
        lora: Vec::new(),
    })
}

/// The path of a file that the daemon is to open.
fn path_of(file: &Path) -> anyhow::Result<String> {
    let path = if file.exists() {
        std::path::absolute(file).context("cannot tell the current directory")?
    } else {
        file.to_owned()
    };
    let path = path
        .to_str()
        .with_context(|| format!("{} is not UTF-8; rename the file", path.display()))?;
    Ok(path.to_owned())
}

/// An adapter that is given as `FILE` or `FILE=SCALE`.
fn adapter(text: &str) -> anyhow::Result<AdapterFile> {
    let (path, scale) = match text.rsplit_once('=') {
        Some((path, scale)) if !scale.contains('/') => {
            let number = scale.parse::<f32>().ok().filter(|scale| scale.is_finite());
            let number = number.with_context(|| {
                format!("--lora {text}: {scale} is no number; give FILE or FILE=SCALE")
            })?;
            (path, Some(number))
        }
        _ => (text, None),
    };
    Ok(AdapterFile {
        path: path_of(Path::new(path))?,
        name: String::new(),
        scale,
    })
}

/// Loads with a progress bar and gives the loaded model.
pub(super) async fn load_model(client: &Client, request: LoadRequest) -> anyhow::Result<Model> {
    let progress = Progress::new(if request.name.is_empty() {
        &request.path
    } else {
        &request.name
    });
    let mut events = client.load(request).await?;
    let mut model = None;
    while let Some(event) = events.next().await {
        match event? {
            load_event::Event::Progress(step) => progress.load(&step),
            load_event::Event::Loaded(loaded) => model = Some(loaded),
        }
    }
    model.context("the daemon did not say what it loaded; rocmforgectl and rocmforged may differ in version (see --version)")
}

pub(super) async fn load(context: &mut Context, args: LoadArgs) -> anyhow::Result<()> {
    let mut request = request(&args.file, args.name)?;
    request.pin = args.pin;
    request.preload = args.preload;
    request.draft = args.draft.unwrap_or_default();
    if let Some(mmproj) = &args.mmproj {
        request.mmproj = path_of(mmproj)?;
    }
    request.lora = args
        .lora
        .iter()
        .map(|text| adapter(text))
        .collect::<anyhow::Result<_>>()?;
    let client = context.connect().await?;
    let model = load_model(&client, request).await?;
    context.output.answer(
        || &model,
        || {
            let draft = match model.draft.as_str() {
                "" => String::new(),
                name => format!(", {name} drafts"),
            };
            let images = if model.mmproj.is_empty() {
                ""
            } else {
                ", reads images"
            };
            let adapters = match model.adapters.len() {
                0 => String::new(),
                n => format!(", {}", plural(n as u64, "adapter")),
            };
            format!(
                "{}: {}, {} parameters, {} in {}, {} resident{draft}{images}{adapters}",
                model.name,
                model.architecture,
                count(model.n_params),
                size(model.weight_bytes),
                plural(model.segments.len() as u64, "segment"),
                size(model.resident_bytes),
            )
        },
    )
}

pub(super) async fn preload(context: &mut Context, args: &SegmentsArgs) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let progress = Progress::new(&args.name);
    let mut events = client.preload(&args.name, args.indexes()).await?;
    let mut done = None;
    while let Some(event) = events.next().await {
        match event? {
            preload_event::Event::Progress(step) => progress.preload(&step),
            preload_event::Event::Done(outcome) => done = Some(outcome),
        }
    }
    drop(progress);
    let done = done.context("the daemon did not say what it uploaded; rocmforgectl and rocmforged may differ in version (see --version)")?;
    context.output.answer(
        || {
            json!({
                "name": args.name,
                "resident_segments": done.resident_segments,
                "resident_bytes": done.resident_bytes,
                "skipped_segments": done.skipped_segments,
                "skipped_bytes": done.skipped_bytes,
            })
        },
        || {
            let resident = plural(done.resident_segments.into(), "segment");
            let resident_size = size(done.resident_bytes);
            let mut text = format!("{}: {resident} resident ({resident_size})", args.name);
            if done.skipped_segments > 0 {
                let skipped = plural(done.skipped_segments.into(), "segment");
                let skipped_size = size(done.skipped_bytes);
                text.push_str(&format!(", no room for {skipped} ({skipped_size})"));
            }
            text
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_here_goes_by_its_absolute_path_and_another_as_it_is_given() {
        let made = request(Path::new("Cargo.toml"), None).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(Path::new(&made.path), here.join("Cargo.toml"));
        assert_eq!(made.name, "", "the daemon names it");
        let made = request(Path::new("models/tiny.Q4_K.gguf"), None).unwrap();
        assert_eq!(made.path, "models/tiny.Q4_K.gguf");
        let made = request(Path::new("/m/a.gguf"), Some("b".into())).unwrap();
        assert_eq!((made.path.as_str(), made.name.as_str()), ("/m/a.gguf", "b"));
    }

    #[test]
    fn an_adapter_is_given_by_its_file_and_scale() {
        let made = adapter("models/a.gguf").unwrap();
        assert_eq!((made.path.as_str(), made.scale), ("models/a.gguf", None));
        let made = adapter("/m/k=v/a.gguf=-0.5").unwrap();
        assert_eq!(
            (made.path.as_str(), made.scale),
            ("/m/k=v/a.gguf", Some(-0.5))
        );
        assert_eq!(adapter("/m=2/a.gguf").unwrap().path, "/m=2/a.gguf");
        for wrong in ["/m/a.gguf=much", "/m/a.gguf=nan", "/m/a.gguf="] {
            let error = adapter(wrong).unwrap_err().to_string();
            assert!(error.contains("FILE=SCALE"), "{error}");
        }
    }
}

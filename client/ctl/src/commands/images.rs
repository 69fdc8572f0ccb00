//! Images of `chat` and `run`, from files to parts of a message.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use rocmforge_client::Client;
use rocmforge_client::proto::v1::{ChatMessage, ContentPart, content_part::Part};

use crate::failure::Unreadable;

/// Maximum number of bytes of the images of a message: what one request may bring, with room for
/// the text.
const BYTES_MAX: u64 = 12 << 20;

/// Refuses images for a model that reads text only: the daemon would replace them by a text that
/// says they were left out.
pub(super) async fn check(client: &Client, model: &str, images: &[PathBuf]) -> anyhow::Result<()> {
    if images.is_empty() {
        return Ok(());
    }
    let found = client.get(model).await?;
    if found.mmproj.is_empty() {
        bail!(
            "model '{model}' reads text only; load it with its projector (rocmforgectl load --mmproj FILE) to give it \
             images"
        );
    }
    Ok(())
}

/// The bytes of the files.
pub(super) fn read(images: &[PathBuf]) -> anyhow::Result<Vec<Vec<u8>>> {
    let (mut files, mut bytes) = (Vec::new(), 0);
    for path in images {
        let unreadable = || Unreadable(path.clone());
        let found = std::fs::metadata(path).with_context(unreadable)?;
        if !found.is_file() {
            bail!("{} is no file; name an image file", path.display());
        }
        bytes += found.len();
        if bytes > BYTES_MAX {
            bail!(
                "the images have more than {} MiB together with {}; leave it out, or make it smaller",
                BYTES_MAX >> 20,
                path.display()
            );
        }
        files.push(std::fs::read(path).with_context(unreadable)?);
    }
    Ok(files)
}

/// A user's message with images in front of its text.
pub(super) fn message(images: Vec<Vec<u8>>, text: String) -> ChatMessage {
    if images.is_empty() {
        return super::chat::message("user", text);
    }
    let part = |part: Part| ContentPart { part: Some(part) };
    let images = images.into_iter().map(|image| part(Part::Image(image)));
    ChatMessage {
        role: "user".to_owned(),
        parts: images.chain([part(Part::Text(text))]).collect(),
        ..Default::default()
    }
}

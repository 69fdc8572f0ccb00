//! Images of a chat, from their bytes to their places among the ids.
//!
//! ```text
//! messages --take_images--> {"type": "image"} --template, tokenizer--> one placeholder an image
//!      \--Base64, decode, resize, patches--> as many placeholders as the tower gives rows, a span
//! ```
//!
//! A model without a tower is told in words that an image was left out, as its prompts always were.
//!
//! *Invariant:* a request takes at most `IMAGES_MAX` images, and at most `PATCHES_MAX_BYTES`
//! for what they are prepared to; images are prepared one after the other, and none is once the
//! room of the prompt is used up (test `images_end_where_the_room_does`).

use std::sync::Arc;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::ImageSpan;
use rocmforge_tokenizer::{Chat, ChatImage, Tokenizer};
use rocmforge_vision::{Bounds, PreparedImage, Rules};

use crate::failure::{self, Failure, Reason};
use crate::infill::named;
use crate::text_work::Unwanted;

/// What a model that reads text only is told in place of an image.
pub const LEFT_OUT: &str = "[image left out: this model reads text only]";

/// Most images of a request.
const IMAGES_MAX: usize = 64;
/// Most bytes of all that a request's images are prepared to.
const PATCHES_MAX_BYTES: usize = 256 << 20;
/// What templates of Qwen's models write for an image.
const PLACEHOLDER: &str = "<|image_pad|>";
/// Base64 as clients write it, some without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The images of a chat, of which the template is to see the places; none where the model reads
/// text only, so that its template sees what is told in their places.
///
/// # Errors
/// INVALID_ARGUMENT for more than [`IMAGES_MAX`], and for an image whose bytes the request has not.
pub(crate) fn taken(chat: &mut Chat, model: &LoadedModel) -> Result<Vec<ChatImage>, Failure> {
    if model.tower().is_none() {
        chat.leave_images_out();
        return Ok(Vec::new());
    }
    let images = chat.take_images();
    if let Some(first) = images.get(IMAGES_MAX) {
        let message = format!(
            "the conversation has {} images; at most {IMAGES_MAX} are read: leave some out",
            images.len()
        );
        return Err(failure::invalid(&first.field, &message));
    }
    for image in &images {
        if let Err(why) = &image.data {
            return Err(failure::invalid(&image.field, why));
        }
    }
    Ok(images)
}

/// What images make of the ids of a prompt.
#[derive(Debug)]
pub(crate) enum Placed {
    /// The ids, and where the images are among them.
    Whole(Vec<u32>, Vec<ImageSpan>),
    /// They are more than there is room for.
    TooMany,
}

/// Reads the images of a rendered chat, and gives each as many placeholders as it has tokens; at
/// most `most` ids. CPU-bound.
///
/// # Errors
/// INVALID_ARGUMENT names the message's part whose image cannot be read; FAILED_PRECONDITION where
/// the template writes no placeholder for each image; DEADLINE_EXCEEDED where nobody waits.
pub(crate) fn placed(
    ids: Vec<u32>,
    images: &[ChatImage],
    model: &LoadedModel,
    most: usize,
    unwanted: Option<&Unwanted>,
) -> Result<Placed, Failure> {
    if images.is_empty() {
        return Ok(Placed::Whole(ids, Vec::new()));
    }
    let (rules, pad) = (rules_of(model)?, placeholder(model, &ids, images.len())?);
    let mut n_ids = ids.len();
    let mut bytes = 0;
    let mut read: Vec<Arc<PreparedImage>> = Vec::with_capacity(images.len());
    for image in images {
        if unwanted.is_some_and(Unwanted::get) {
            return Err(failure::deadline());
        }
        let prepared = prepared(image, &rules)?;
        n_ids += prepared.tokens() - 1;
        if n_ids > most {
            return Ok(Placed::TooMany);
        }
        bytes += size_of_val(prepared.patches.as_slice());
        if bytes > PATCHES_MAX_BYTES {
            let message = format!(
                "the conversation's images are too large together (more than {} MiB once they are prepared); \
                 leave some out, or send smaller ones",
                PATCHES_MAX_BYTES >> 20
            );
            return Err(failure::invalid(&image.field, &message));
        }
        read.push(Arc::new(prepared));
    }
    let (ids, spans) = spread(&ids, pad, read);
    Ok(Placed::Whole(ids, spans))
}

/// The ids with each placeholder as often as its image has tokens, and the images' places. There
/// are as many placeholders as images.
fn spread(ids: &[u32], pad: u32, images: Vec<Arc<PreparedImage>>) -> (Vec<u32>, Vec<ImageSpan>) {
    let more: usize = images.iter().map(|image| image.tokens()).sum();
    let mut all = Vec::with_capacity(ids.len() + more);
    let mut spans = Vec::with_capacity(images.len());
    let mut images = images.into_iter();
    for &id in ids {
        let image = (id == pad).then(|| images.next()).flatten();
        let Some(image) = image else {
            all.push(id);
            continue;
        };
        let first = all.len();
        all.resize(first + image.tokens(), pad);
        spans.push(ImageSpan { first, image });
    }
    (all, spans)
}

/// An image as the tower takes it.
fn prepared(image: &ChatImage, rules: &Rules) -> Result<PreparedImage, Failure> {
    let refuse = |why: &str| failure::invalid(&image.field, why);
    let base64 = image.data.as_ref().map_err(|why| refuse(why))?;
    let decoded = match base64.bytes().any(|byte| byte.is_ascii_whitespace()) {
        false => BASE64.decode(&**base64),
        true => BASE64.decode(base64.split_ascii_whitespace().collect::<String>()),
    };
    let bytes = decoded.map_err(|error| {
        refuse(&format!(
            "the image is no Base64 ({error}); encode its file anew"
        ))
    })?;
    let prepared = rocmforge_vision::prepare(&bytes, Bounds::default(), rules);
    prepared.map_err(|error| refuse(&error.to_string()))
}

/// What the model's tower wants of an image.
fn rules_of(model: &LoadedModel) -> Result<Rules, Failure> {
    let tower = model.tower().and_then(|tower| tower.model().tower());
    let tower = tower.ok_or_else(|| failure::bug("images for a model without a tower"))?;
    Ok(Rules {
        patch: tower.patch,
        merge: tower.merge,
        min_pixels: tower.min_pixels,
        max_pixels: tower.max_pixels,
        mean: tower.mean,
        std: tower.std,
    })
}

/// The token that stands for an image, which the template wrote `n` times.
fn placeholder(model: &LoadedModel, ids: &[u32], n: usize) -> Result<u32, Failure> {
    let unusable = |what: &str| {
        let message = format!(
            "model '{}' cannot be shown images: {what}; give the model a template that shows them (`template` of \
             [[model]]), or send text only",
            model.name()
        );
        failure::model_precondition(Reason::ChatTemplateUnusable, model.name(), &message)
    };
    let tokenizer: &Tokenizer = model.tokenizer();
    let pad = named(tokenizer, PLACEHOLDER).ok_or_else(|| {
        unusable(&format!(
            "its vocabulary has no control token {PLACEHOLDER}"
        ))
    })?;
    let found = ids.iter().filter(|&&id| id == pad).count();
    if found == n {
        return Ok(pad);
    }
    Err(unusable(&format!(
        "its chat template writes {PLACEHOLDER} {found} times where the conversation has {n} images"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAD: u32 = 9;

    fn image(rows: usize, columns: usize) -> Arc<PreparedImage> {
        Arc::new(PreparedImage {
            grid: [rows, columns],
            merge: 2,
            patches: Vec::new(),
            digest: [0; 32],
        })
    }

    #[test]
    fn a_placeholder_becomes_as_many_as_its_image_has_tokens() {
        let (ids, spans) = spread(
            &[1, PAD, 2, PAD, PAD],
            PAD,
            vec![image(2, 4), image(2, 2), image(4, 6)],
        );
        assert_eq!(ids, [1, 9, 9, 2, 9, 9, 9, 9, 9, 9, 9]);
        let firsts: Vec<_> = spans.iter().map(|span| span.first).collect();
        assert_eq!(firsts, [1, 4, 5]);
        assert_eq!(spans[2].image.grid, [4, 6]);
    }

    fn rules() -> Rules {
        Rules {
            patch: 8,
            merge: 2,
            min_pixels: 8 * 256,
            max_pixels: 4096 * 256,
            mean: [0.5; 3],
            std: [0.5; 3],
        }
    }

    #[test]
    fn what_is_wrong_with_an_image_is_told_by_its_place() {
        for (base64, words) in [
            ("", "is empty"),
            ("!!", "no Base64"),
            ("aGVsbG8gd29ybGQ=", "no PNG, JPEG, WebP or GIF"),
            ("aGVsbG8gd29ybGQ", "no PNG, JPEG, WebP or GIF"),
            ("aGVs\nbG8gd29y bGQ=", "no PNG, JPEG, WebP or GIF"),
            ("iVBORw0KGgoAAAANSUhEUg", "PNG file is damaged"),
        ] {
            let image = ChatImage {
                field: "messages[0].content[1]".to_owned(),
                data: Ok(base64.into()),
            };
            let failure = prepared(&image, &rules()).unwrap_err();
            let (field, message) = &failure.fields()[0];
            assert_eq!(field, "messages[0].content[1]");
            assert!(message.contains(words), "{base64}: {message}");
        }
    }
}

//! Images of a chat, from their bytes to their places among the ids.
//!
//! ```text
//! messages --take_images--> {"type": "image"} --template, tokenizer--> one placeholder an image
//!      \--header--> as many placeholders as the tower gives rows, an UnreadImage
//!                                        |
//!                     the service: memory, decode, resize, patches, a span
//! ```
//!
//! How many tokens an image has is told by its header, so that a prompt is counted, refused and
//! shortened without decoding. What is decoded is what the engine gets, once.
//!
//! A model without a tower is told in words that an image was left out, as its prompts always were.
//!
//! *Invariant:* a request takes at most `IMAGES_MAX` images; none is decoded before the prompt is
//! known to fit (test `images_end_where_the_room_does`) and memory is reserved for it
//! (`service/src/images.rs`).

mod unread;

use rocmforge_failure::{self as failure, Failure, Reason};
use rocmforge_tokenizer::{Chat, ChatImage, ImageData, RenderedChat};
use rocmforge_vision::{Bounds, Rules};

use self::unread::{BY_URL, TilesAhead, bytes_of};
pub use self::unread::{UnreadImage, needs};
use crate::infill::named;
use crate::model::ChatModel;

/// Text that a model which reads text only gets in place of an image.
pub const LEFT_OUT: &str = "[image left out: this model reads text only]";

/// Maximum number of images of a request.
const IMAGES_MAX: usize = 64;

/// Takes the images out of a chat and leaves placeholders for the template; for a model that reads
/// text only there are none, and texts stand in their places.
///
/// # Errors
/// INVALID_ARGUMENT for more than [`IMAGES_MAX`], and for an image whose bytes the request
/// does not contain.
pub(crate) fn taken(chat: &mut Chat, model: &ChatModel<'_>) -> Result<Vec<ChatImage>, Failure> {
    if model.tower.is_none() {
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
        match &image.data {
            Ok(ImageData::Url(_)) => return Err(failure::invalid(&image.field, BY_URL)),
            Ok(_) => {}
            Err(why) => return Err(failure::invalid(&image.field, why)),
        }
    }
    Ok(images)
}

/// A prompt's token ids after images were placed.
#[derive(Debug)]
pub(crate) enum Placed {
    /// The ids, and the images with their places among them.
    Whole(Vec<u32>, Vec<UnreadImage>),
    /// The images take more tokens than there is room for.
    TooMany,
}

/// How the prompts of models with a certain projector show an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Control token that the templates of these models write for an image.
    mark: &'static str,
    /// Text that replaces the mark before the prompt is tokenized; it has the mark once.
    written: Option<&'static str>,
    /// Whether the mark stays in the prompt, with the image's tokens after it.
    stays: bool,
    /// Control tokens after each row of an image but the last, and after the last; `None` for none.
    row_ends: Option<[&'static str; 2]>,
    /// Whether each tile of a large image is preceded by a control token for its place, and the
    /// whole image by [`WHOLE`].
    marks_tiles: bool,
}

/// The control token before an image whose tiles came before it.
const WHOLE: &str = "<|img_thumbnail|>";

/// The control token before the tile at a row and column.
fn tile_mark(row: usize, column: usize) -> String {
    format!("<|img_row_{}_col_{}|>", row + 1, column + 1)
}

impl Form {
    /// Form of the models of a projector, by the projector's name.
    fn of(projector: &str) -> Option<Self> {
        match projector {
            "qwen2.5vl_merger" | "qwen3vl_merger" => Some(Self {
                mark: "<|image_pad|>",
                written: None,
                stays: false,
                row_ends: None,
                marks_tiles: false,
            }),
            "glm4v" => Some(Self {
                mark: "<|image|>",
                written: None,
                stays: false,
                row_ends: None,
                marks_tiles: false,
            }),
            "internvl" => Some(Self {
                mark: "<IMG_CONTEXT>",
                written: Some("<img><IMG_CONTEXT></img>"),
                stays: false,
                row_ends: None,
                marks_tiles: false,
            }),
            "muse-glimmer" => Some(Self {
                mark: "<|patch|>",
                written: Some("<|image_start|><|patch|><|image_end|>"),
                stays: false,
                row_ends: None,
                marks_tiles: false,
            }),
            "kimik25" => Some(Self {
                mark: "<|media_pad|>",
                written: None,
                stays: false,
                row_ends: None,
                marks_tiles: false,
            }),
            "pixtral" => Some(Self {
                mark: "[IMG]",
                written: None,
                stays: false,
                row_ends: Some(["[IMG_BREAK]", "[IMG_END]"]),
                marks_tiles: false,
            }),
            "gemma4uv" | "gemma4v" => Some(Self {
                mark: "<|image|>",
                written: Some("<|image><|image|><image|>"),
                stays: false,
                row_ends: None,
                marks_tiles: false,
            }),
            "lfm2" => Some(Self {
                mark: "<image>",
                written: Some("<|image_start|><image><|image_end|>"),
                stays: false,
                row_ends: None,
                marks_tiles: true,
            }),
            "gemma3" => Some(Self {
                mark: "<start_of_image>",
                written: Some("\n\n<start_of_image><end_of_image>\n\n"),
                stays: true,
                row_ends: None,
                marks_tiles: false,
            }),
            _ => None,
        }
    }

    fn of_model(model: &ChatModel<'_>) -> Result<Self, Failure> {
        let form = model.tower.and_then(|tower| Self::of(tower.projector));
        form.ok_or_else(|| failure::bug("images for a model that is shown none"))
    }
}

/// Completes the text for images in a rendered chat, if the model's training format has more than
/// its template writes.
///
/// # Errors
/// INTERNAL if the model has no tower.
pub(crate) fn written(
    rendered: &mut RenderedChat,
    images: &[ChatImage],
    model: &ChatModel<'_>,
) -> Result<(), Failure> {
    if images.is_empty() {
        return Ok(());
    }
    let form = Form::of_model(model)?;
    if let Some(written) = form.written {
        rendered.replace(form.mark, written);
    }
    Ok(())
}

/// Reads the headers of the images of a rendered chat, and gives each as many placeholders as it
/// has tokens; at most `most` ids. CPU-bound.
///
/// # Errors
/// INVALID_ARGUMENT names the message's part whose image cannot be read;
/// FAILED_PRECONDITION if the template does not write one placeholder for each image;
/// DEADLINE_EXCEEDED if no client waits any more.
pub(crate) fn placed(
    ids: Vec<u32>,
    images: Vec<ChatImage>,
    model: &ChatModel<'_>,
    most: usize,
    is_unwanted: Option<&dyn Fn() -> bool>,
) -> Result<Placed, Failure> {
    if images.is_empty() {
        return Ok(Placed::Whole(ids, Vec::new()));
    }
    let form = Form::of_model(model)?;
    let rules = model.tower.map(|tower| tower.rules);
    let rules = rules.ok_or_else(|| failure::bug("images for a model without a tower"))?;
    let mark = Mark {
        id: placeholder(model, &ids, form.mark, images.len())?,
        stays: form.stays,
        row_ends: match form.row_ends {
            None => None,
            Some([row, last]) => Some([control(model, row)?, control(model, last)?]),
        },
    };
    let mut n_ids = ids.len();
    let mut unread = Vec::with_capacity(images.len());
    for image in images {
        if is_unwanted.is_some_and(|is_unwanted| is_unwanted()) {
            return Err(failure::deadline());
        }
        let mut image = of_header(image, &rules)?;
        if let Some(tiles) = image.tiles.as_mut().filter(|_| form.marks_tiles) {
            tiles.marks = tile_marks(model, tiles.grid)?;
        }
        n_ids += mark.tokens(&image) - 1;
        if n_ids > most {
            return Ok(Placed::TooMany);
        }
        unread.push(image);
    }
    let ids = spread(&ids, mark, &mut unread);
    Ok(Placed::Whole(ids, unread))
}

/// The token that a template writes for each image, and what surrounds the image's tokens.
#[derive(Debug, Clone, Copy)]
struct Mark {
    id: u32,
    /// Whether the mark stays in the prompt ([`Form::stays`]).
    stays: bool,
    /// Control tokens at the ends of rows ([`Form::row_ends`]).
    row_ends: Option<[u32; 2]>,
}

impl Mark {
    /// Number of prompt tokens of an image.
    fn tokens(&self, image: &UnreadImage) -> usize {
        let [rows, columns] = image.grid;
        let ends = if self.row_ends.is_some() { rows } else { 0 };
        let tiles = image.tiles.as_ref().map_or(0, TilesAhead::tokens);
        tiles + rows * columns + ends + usize::from(self.stays)
    }
}

/// Replaces each mark by as many placeholders (the mark's own token) as its image has tokens, and
/// sets each image's first index. There are as many marks as images.
fn spread(ids: &[u32], mark: Mark, images: &mut [UnreadImage]) -> Vec<u32> {
    let more: usize = images.iter().map(|image| mark.tokens(image)).sum();
    let mut all = Vec::with_capacity(ids.len() + more);
    let mut images = images.iter_mut();
    for &id in ids {
        let image = (id == mark.id).then(|| images.next()).flatten();
        let Some(image) = image else {
            all.push(id);
            continue;
        };
        if mark.stays {
            all.push(id);
        }
        if let Some(tiles) = &mut image.tiles {
            tiles.put(&mut all, id);
        }
        image.first = all.len();
        let [rows, columns] = image.grid;
        match mark.row_ends {
            None => all.resize(image.first + rows * columns, id),
            Some([row_end, end]) => {
                for row in 1..=rows {
                    all.extend(std::iter::repeat_n(id, columns));
                    all.push(if row < rows { row_end } else { end });
                }
            }
        }
    }
    all
}

/// Reads the size of an image from its header.
fn of_header(image: ChatImage, rules: &Rules) -> Result<UnreadImage, Failure> {
    let rules = image.pixels_max.map_or(*rules, |most| rules.at_most(most));
    let bytes = bytes_of(&image)?;
    let read = || {
        let header = rocmforge_vision::header(&bytes, Bounds::default())?;
        Ok((header, rules.size_for(header.width, header.height)?))
    };
    let (header, size) = read().map_err(|error: rocmforge_vision::ImageError| {
        failure::invalid(&image.field, &error.to_string())
    })?;
    let tiles = rules.tiles_for(header.width, header.height);
    let tiles = tiles.map(|grid| TilesAhead::new(grid, &rules));
    let cut = tiles.as_ref().map_or(0, |tiles| tiles.patches_bytes);
    Ok(UnreadImage {
        first: 0,
        grid: rules.grid(size),
        patches_bytes: rules.patches_bytes(size) + cut,
        // The file once more, and two images of the resized size or, halfway, of one of its sides.
        decoding_bytes: header.decoding_bytes()
            + bytes.len() as u64
            + (rules.patches_bytes(size) + cut) / 2
            + if cut > 0 { header.decoding_bytes() } else { 0 },
        tiles,
        rules,
        image,
    })
}

/// The failure for a model that cannot read images.
fn unusable(model: &ChatModel<'_>, what: &str) -> Failure {
    let message = format!(
        "model '{}' cannot be shown images: {what}; give the model a template that shows them (`template` of \
         [[model]]), or send text only",
        model.name
    );
    failure::model_precondition(Reason::ChatTemplateUnusable, model.name, &message)
}

/// The id of the control token `name`.
fn control(model: &ChatModel<'_>, name: &str) -> Result<u32, Failure> {
    named(model.tokenizer, name).ok_or_else(|| {
        let what = format!("its vocabulary has no control token {name}");
        unusable(model, &what)
    })
}

/// The control tokens before the tiles of an image, and before the whole image.
fn tile_marks(model: &ChatModel<'_>, [rows, columns]: [usize; 2]) -> Result<Vec<u32>, Failure> {
    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    let names = places.map(|(row, column)| tile_mark(row, column));
    let names = names.chain(std::iter::once(WHOLE.to_owned()));
    names.map(|name| control(model, &name)).collect()
}

/// The id of the token `name`, which the template must have written `n` times.
fn placeholder(model: &ChatModel<'_>, ids: &[u32], name: &str, n: usize) -> Result<u32, Failure> {
    let mark = control(model, name)?;
    let found = ids.iter().filter(|&&id| id == mark).count();
    if found == n {
        return Ok(mark);
    }
    let what = format!(
        "its chat template writes {name} {found} times where the conversation has {n} images"
    );
    Err(unusable(model, &what))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAD: u32 = 9;
    const MARK: Mark = Mark {
        id: PAD,
        stays: false,
        row_ends: None,
    };

    fn chat_image(base64: &str) -> ChatImage {
        ChatImage {
            field: "messages[0].content[1]".to_owned(),
            data: Ok(ImageData::Base64(base64.into())),
            pixels_max: None,
        }
    }

    fn image(grid: [usize; 2]) -> UnreadImage {
        UnreadImage {
            first: 0,
            grid,
            patches_bytes: 0,
            decoding_bytes: 0,
            tiles: None,
            rules: rules(),
            image: chat_image(""),
        }
    }

    #[test]
    fn a_placeholder_becomes_as_many_as_its_image_has_tokens() {
        let mut images = [image([1, 2]), image([1, 1]), image([2, 3])];
        let ids = spread(&[1, PAD, 2, PAD, PAD], MARK, &mut images);
        assert_eq!(ids, [1, 9, 9, 2, 9, 9, 9, 9, 9, 9, 9]);
        assert_eq!(images.map(|image| image.first), [1, 4, 5]);
        // Behind a mark that stays.
        let mark = Mark {
            stays: true,
            ..MARK
        };
        let mut images = [image([1, 2])];
        assert_eq!(spread(&[1, PAD, 2], mark, &mut images), [1, 9, 9, 9, 2]);
        assert_eq!(images[0].first, 2);
        // Rows with ends of their own.
        let mark = Mark {
            row_ends: Some([7, 8]),
            ..MARK
        };
        let mut images = [image([2, 3])];
        let ids = spread(&[1, PAD, 2], mark, &mut images);
        assert_eq!(ids, [1, 9, 9, 9, 7, 9, 9, 9, 8, 2]);
        assert_eq!((images[0].first, mark.tokens(&images[0])), (1, 8));
    }

    #[test]
    fn tiles_stand_before_their_image_each_behind_its_mark() {
        assert_eq!(tile_mark(0, 9), "<|img_row_1_col_10|>");
        let mut cut = image([1, 2]);
        cut.tiles = Some(TilesAhead {
            grid: [1, 2],
            tokens: 3,
            patches_bytes: 0,
            marks: vec![21, 22, 23],
            firsts: Vec::new(),
        });
        assert_eq!(MARK.tokens(&cut), 2 * (1 + 3) + 1 + 2);
        let mut images = [cut, image([1, 1])];
        let ids = spread(&[1, PAD, 2, PAD], MARK, &mut images);
        assert_eq!(ids, [1, 21, 9, 9, 9, 22, 9, 9, 9, 23, 9, 9, 2, 9]);
        assert_eq!(images[0].tiles.as_ref().unwrap().firsts, [2, 6]);
        assert_eq!(images.map(|image| image.first), [10, 13]);
        // And without marks.
        let mut cut = image([1, 3]);
        cut.tiles = Some(TilesAhead {
            grid: [2, 1],
            tokens: 3,
            patches_bytes: 0,
            marks: Vec::new(),
            firsts: Vec::new(),
        });
        assert_eq!(MARK.tokens(&cut), 9);
        let mut images = [cut];
        let ids = spread(&[1, PAD, 2], MARK, &mut images);
        assert_eq!(ids, [1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 2]);
        assert_eq!(images[0].tiles.as_ref().unwrap().firsts, [1, 4]);
        assert_eq!(images[0].first, 7);
    }

    fn rules() -> Rules {
        use rocmforge_vision::{Filter, Sizes};
        Rules {
            patch: 8,
            merge: 2,
            sizes: Sizes::Between {
                min_pixels: 8 * 256,
                max_pixels: 4096 * 256,
                enlarges: false,
            },
            filter: Filter::Bicubic,
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
            let failure = of_header(chat_image(base64), &rules()).unwrap_err();
            let (field, message) = &failure.fields()[0];
            assert_eq!(field, "messages[0].content[1]");
            assert!(message.contains(words), "{base64}: {message}");
        }
    }
}

//! Parses images in messages of all dialects, for models that read images. `media.rs` has the texts
//! that replace them for other models.

use std::sync::Arc;

use rocmforge_tokenizer::{ChatImage, Content, ImageData, Seen};
use serde_json::{Value, json};

/// Maximum number of pixels of an image with the detail `low`: 512 x 512, as in OpenAI's API.
const LOW_PIXELS: u64 = 512 * 512;
/// Error for an image URL with an unsupported scheme.
const NO_URL: &str = "this is no data:, https: or http: URL; give the image as a data: URL \
                      (data:image/png;base64,...)";
/// Maximum length of an image's URL in bytes, `data:` URLs excepted.
const URL_MAX: usize = 8192;

/// Content of a message or of a tool's result.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Said {
    /// The content for a model that reads text only.
    pub(super) content: Content,
    /// The content for a model that reads images; empty if there are no images.
    pub(super) seen: Vec<Seen>,
}

impl From<Content> for Said {
    fn from(content: Content) -> Self {
        Self {
            content,
            seen: Vec::new(),
        }
    }
}

/// Joins adjacent texts to one, a line each.
pub(super) fn with_joined_texts(seen: Vec<Seen>) -> Vec<Seen> {
    let mut joined: Vec<Seen> = Vec::with_capacity(seen.len());
    for next in seen {
        if let (Some(Seen::Part(last)), Seen::Part(part)) = (joined.last_mut(), &next)
            && let (Some(before), Some(text)) = (last["text"].as_str(), part["text"].as_str())
        {
            *last = json!({"type": "text", "text": format!("{before}\n{text}")});
            continue;
        }
        joined.push(next);
    }
    joined
}

/// Whether parts of this type are images, in any of the dialects.
pub(super) fn is_image(kind: &str) -> bool {
    matches!(kind, "image" | "image_url" | "input_image" | "image_file")
}

/// The image in a part of this type, which `field` names; `None` for other types.
pub(super) fn of_part(kind: &str, part: &Value, field: &str) -> Option<ChatImage> {
    is_image(kind).then(|| {
        let pixels_max = pixels_max(part);
        ChatImage {
            field: field.to_owned(),
            data: pixels_max
                .as_ref()
                .map_or_else(|why| Err(why.clone()), |_| data_of(part)),
            pixels_max: pixels_max.ok().flatten(),
        }
    })
}

/// Maximum number of pixels by a part's `detail`; `None` lets the model decide.
fn pixels_max(part: &Value) -> Result<Option<u64>, String> {
    let places = [&part["image_url"]["detail"], &part["detail"]];
    let detail = places.into_iter().find(|detail| !detail.is_null());
    match detail.map(Value::as_str) {
        None | Some(Some("auto" | "high" | "original")) => Ok(None),
        Some(Some("low")) => Ok(Some(LOW_PIXELS)),
        Some(_) => {
            Err("its detail is none of auto, low, high and original; give one of them".into())
        }
    }
}

/// An image in Ollama's list, which `field` names.
pub(super) fn of_ollama(image: &Value, field: String) -> ChatImage {
    let data = match image.as_str() {
        Some(text) => of_base64(text),
        None => Err("it is no text; give the image's bytes as Base64".to_owned()),
    };
    ChatImage {
        field,
        data,
        pixels_max: None,
    }
}

fn data_of(part: &Value) -> Result<ImageData, String> {
    // Anthropic's.
    let source = &part["source"];
    match source["type"].as_str() {
        Some("base64") => {
            let data = source["data"].as_str();
            let data = data.ok_or("its source has no data; give the image's bytes as Base64")?;
            return of_base64(data);
        }
        Some("url") => return of_url(source["url"].as_str().unwrap_or_default()),
        Some(other) => {
            let kind: String = other.chars().take(64).collect();
            return Err(format!(
                "a source of the type {kind} is not known here; give one of the type base64"
            ));
        }
        None => {}
    }
    // OpenAI's, and that of templates.
    let places = ["image_url", "image", "url"].into_iter();
    let mut urls = places.filter_map(|key| {
        let place = &part[key];
        place.as_str().or_else(|| place["url"].as_str())
    });
    match urls.next() {
        Some(url) => of_url(url),
        None if part["file_id"].is_string() => {
            Err("files are not kept here; give the image as a data: URL".to_owned())
        }
        None => {
            Err("it has no image; give image_url, a data: URL (data:image/png;base64,...)".into())
        }
    }
}

/// The Base64 data of a `data:` URL, or the URL to fetch.
fn of_url(url: &str) -> Result<ImageData, String> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    if ["http", "https"]
        .iter()
        .any(|known| scheme.eq_ignore_ascii_case(known))
    {
        return match url.len() > URL_MAX {
            true => Err(format!(
                "its URL has more than {URL_MAX} bytes; give a shorter one"
            )),
            false => Ok(ImageData::Url(url.into())),
        };
    }
    if !scheme.eq_ignore_ascii_case("data") {
        return Err(NO_URL.to_owned());
    }
    let (kind, data) = url[5..].split_once(',').unwrap_or_default();
    let is_base64 = kind
        .rsplit(';')
        .next()
        .is_some_and(|last| last.trim().eq_ignore_ascii_case("base64"));
    if !is_base64 {
        return Err(
            "the data: URL has no Base64; give the image as data:image/png;base64,...".to_owned(),
        );
    }
    Ok(ImageData::Base64(Arc::from(data)))
}

/// Base64 data, alone or in a `data:` URL, which some clients send everywhere.
fn of_base64(text: &str) -> Result<ImageData, String> {
    match text.starts_with("data:") {
        true => of_url(text),
        false => Ok(ImageData::Base64(text.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(kind: &str, part: &Value) -> Result<String, String> {
        let image = of_part(kind, part, "here").unwrap();
        assert_eq!(image.field, "here");
        image.data.map(|data| match data {
            ImageData::Base64(text) => text.to_string(),
            ImageData::Url(url) => format!("at {url}"),
            ImageData::Bytes(_) => unreachable!("no dialect has bytes"),
        })
    }

    #[test]
    fn images_are_read_in_the_forms_that_clients_write() {
        let url = "data:image/png;base64,AAAA";
        for (kind, part) in [
            (
                "image_url",
                json!({"image_url": {"url": url, "detail": "low"}}),
            ),
            ("image_url", json!({"image_url": url})),
            ("input_image", json!({"image_url": url, "detail": "auto"})),
            ("image", json!({"image": url})),
            (
                "image",
                json!({"source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
            ),
            ("image", json!({"source": {"type": "base64", "data": url}})),
            (
                "image",
                json!({"source": {"type": "url", "url": "DATA:image/png;charset=x;Base64,AAAA"}}),
            ),
        ] {
            assert_eq!(data(kind, &part).unwrap(), "AAAA", "{part}");
        }
        assert_eq!(of_part("text", &json!({"text": "a"}), "here"), None);
        let of_ollama = |image: Value| of_ollama(&image, "images[0]".to_owned()).data;
        let expected = Ok(ImageData::Base64("AAAA".into()));
        assert_eq!(of_ollama(json!("AAAA")), expected);
        assert!(of_ollama(json!(5)).unwrap_err().contains("Base64"));
        for part in [
            json!({"image_url": {"url": "https://a.example/b.png"}}),
            json!({"image_url": "https://a.example/b.png"}),
            json!({"source": {"type": "url", "url": "https://a.example/b.png"}}),
        ] {
            assert_eq!(data("image", &part).unwrap(), "at https://a.example/b.png");
        }
    }

    #[test]
    fn the_detail_bounds_the_pixels() {
        let of = |part: Value| of_part("image_url", &part, "here").unwrap();
        let url = "data:image/png;base64,AAAA";
        for (detail, expected) in [
            (json!("low"), Some(512 * 512)),
            (json!("high"), None),
            (json!("auto"), None),
            (json!("original"), None),
            (Value::Null, None),
        ] {
            let nested = of(json!({"image_url": {"url": url, "detail": detail}}));
            let flat = of(json!({"image_url": url, "detail": detail}));
            assert_eq!((nested.pixels_max, flat.pixels_max), (expected, expected));
            assert!(nested.data.is_ok() && flat.data.is_ok());
        }
        for detail in [json!("tiny"), json!(5)] {
            let why = of(json!({"image_url": {"url": url, "detail": detail}})).data;
            assert!(why.unwrap_err().contains("none of auto, low, high"));
        }
    }

    #[test]
    fn an_image_that_is_nowhere_is_told_what_to_do() {
        for (part, words) in [
            (
                json!({"image_url": format!("https://a.example/{}", "a".repeat(URL_MAX))}),
                "more than 8192 bytes",
            ),
            (
                json!({"image_url": "ftp://a.example/b.png"}),
                "give the image as a data: URL",
            ),
            (
                json!({"image_url": "file:///etc/passwd"}),
                "give the image as a data: URL",
            ),
            (
                json!({"image_url": "d\u{e9}ta"}),
                "give the image as a data: URL",
            ),
            (
                json!({"source": {"type": "file", "file_id": "f"}}),
                "type file",
            ),
            (json!({"source": {"type": "base64"}}), "no data"),
            (json!({"image_url": "data:image/png,AAAA"}), "no Base64"),
            (json!({"image_url": "data:image/png;base64"}), "no Base64"),
            (json!({"file_id": "file-1"}), "files are not kept"),
            (json!({}), "no image"),
            (json!({"image_url": 5}), "no image"),
        ] {
            let why = data("image_url", &part).unwrap_err();
            assert!(why.contains(words), "{part}: {why}");
        }
    }

    #[test]
    fn texts_side_by_side_are_one_between_images() {
        let text = |text: &str| Seen::Part(json!({"type": "text", "text": text}));
        let image = || Seen::Image(of_ollama(&json!("AAAA"), "here".to_owned()));
        let joined = with_joined_texts(vec![text("a"), text("b"), image(), text("c"), text("d")]);
        assert_eq!(joined, [text("a\nb"), image(), text("c\nd")]);
    }
}

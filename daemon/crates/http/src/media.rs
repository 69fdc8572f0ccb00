//! Converts parts of messages other than text: documents with their text, and media that models
//! here cannot read.
//!
//! A conversation keeps a picture for as long as it lives. A request that was refused for it would
//! be refused with every later turn, too, so the model is told in a text that something was left
//! out. The text is the same for the same part, so that cached prefixes stay valid.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rocmforge_failure::{self as failure, Failure};
use serde_json::Value;

use super::picture::is_image;
use super::prompt::kind_of;

/// The first bytes of a PDF, which may otherwise be UTF-8.
const PDF: &[u8] = b"%PDF";
/// Maximum length of a file's or document's name that is shown to the model, in characters.
const NAME_MAX_CHARS: usize = 200;

/// Text that the model gets in place of an image.
pub(super) const IMAGE: &str = rocmforge_chat::images::LEFT_OUT;

/// The text of a part of this type, or a replacement text. `field` names the part.
///
/// # Errors
/// UNIMPLEMENTED if no dialect has the type, INVALID_ARGUMENT if its content is invalid.
pub(super) fn text_of(kind: &str, part: &Value, field: &str) -> Result<String, Failure> {
    let left_out = match kind {
        kind if is_image(kind) => {
            tracing::debug!(
                kind,
                "models that read text only get a text in place of an image"
            );
            return Ok(IMAGE.to_owned());
        }
        "audio" | "input_audio" | "audio_url" => "audio",
        "video" | "input_video" | "video_url" => "video",
        "file" | "input_file" | "document" | "container_upload" => return document(part, field),
        "search_result" => return search_result(part, field),
        "tool_reference" => return Ok(format!("[tool: {}]", named(&part["tool_name"]))),
        _ => {
            let message = format!("a part of the type {kind} is not known here; leave it out");
            return Err(failure::unsupported_field(field, &message));
        }
    };
    tracing::debug!(kind, "a part that models here cannot read is left out");
    Ok(format!("[{left_out} left out: this model reads text only]"))
}

/// The text of a document with its name, or a note that it was left out.
fn document(part: &Value, field: &str) -> Result<String, Failure> {
    let file = part.get("file").unwrap_or(part);
    let source = &part["source"];
    let name = [&part["title"], &file["filename"], &source["filename"]];
    let name = name.into_iter().find_map(Value::as_str).unwrap_or_default();
    let text = match source["type"].as_str() {
        Some("text") => source["data"].as_str().map(str::to_owned),
        Some("content") => Some(text_within(
            &source["content"],
            &format!("{field}.source.content"),
        )?),
        Some("base64") => source["data"].as_str().and_then(decoded),
        _ => file["file_data"].as_str().and_then(decoded),
    };
    let Some(text) = text else {
        tracing::debug!("a file that models here cannot read is left out");
        let name = if name.is_empty() {
            String::new()
        } else {
            format!(" {}", shortened(name))
        };
        return Ok(format!("[file{name} left out: this model reads text only]"));
    };
    let context = part["context"]
        .as_str()
        .map(|context| format!("{context}\n"));
    let attributes = attribute("title", name);
    let context = context.unwrap_or_default();
    Ok(format!(
        "<document{attributes}>\n{context}{text}\n</document>"
    ))
}

/// The text of a search result, with its source.
fn search_result(part: &Value, field: &str) -> Result<String, Failure> {
    let said = |key: &str| attribute(key, part[key].as_str().unwrap_or_default());
    let attributes = format!("{}{}", said("title"), said("source"));
    let text = text_within(&part["content"], &format!("{field}.content"))?;
    Ok(format!(
        "<search_result{attributes}>\n{text}\n</search_result>"
    ))
}

fn attribute(key: &str, value: &str) -> String {
    match value.is_empty() {
        true => String::new(),
        false => format!(" {key}=\"{}\"", shortened(value).replace('"', "'")),
    }
}

/// The texts in a text or a list of parts, which `field` names; empty if there are none.
fn text_within(content: &Value, field: &str) -> Result<String, Failure> {
    let parts = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => {
            let message = "neither a text nor a list of parts; give one of them";
            return Err(failure::invalid(field, message));
        }
    };
    let texts = parts.iter().enumerate().map(|(at, part)| {
        let field = format!("{field}[{at}]");
        let kind = kind_of(part, || field.clone())?;
        match part["text"].as_str() {
            Some(text) => Ok(text.to_owned()),
            None if kind == "text" => Err(failure::invalid(&field, "it has no text; give one")),
            None => text_of(kind, part, &field),
        }
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// The text in Base64, alone or in a `data:` URL; `None` if the bytes are not text.
fn decoded(data: &str) -> Option<String> {
    let base64 = match data.strip_prefix("data:") {
        Some(url) => url.split_once(";base64,")?.1,
        None => data,
    };
    let bytes = STANDARD.decode(base64.trim()).ok()?;
    if bytes.starts_with(PDF) || bytes.contains(&0) {
        return None;
    }
    String::from_utf8(bytes).ok()
}

fn named(value: &Value) -> String {
    shortened(value.as_str().unwrap_or_default())
}

fn shortened(name: &str) -> String {
    name.chars().take(NAME_MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(part: Value) -> Result<String, Failure> {
        let kind = part["type"].as_str().unwrap().to_owned();
        text_of(&kind, &part, "here")
    }

    #[test]
    fn documents_with_a_text_are_text() {
        let plain = json!({"type": "text", "media_type": "text/plain", "data": "42 - 30"});
        let base64 = |text: &[u8]| STANDARD.encode(text);
        let packed =
            json!({"type": "base64", "media_type": "text/plain", "data": base64(b"42 - 30")});
        let parts = json!({"type": "content", "content": [{"type": "text", "text": "42 - 30"}]});
        for source in [plain, packed, parts] {
            let document = of(json!({"type": "document", "source": source}));
            assert_eq!(document.unwrap(), "<document>\n42 - 30\n</document>");
        }
        let titled = json!({"type": "document", "title": "a \"b\"", "context": "c",
            "source": {"type": "text", "data": "x"}});
        let expected = "<document title=\"a 'b'\">\nc\nx\n</document>";
        assert_eq!(of(titled).unwrap(), expected);
        let url = format!(
            "data:text/markdown;base64,{}",
            base64("# \u{e9}".as_bytes())
        );
        let nested = json!({"type": "file", "file": {"file_data": url, "filename": "r.md"}});
        let flat = json!({"type": "input_file", "file_data": url, "filename": "r.md"});
        for file in [nested, flat] {
            let text = of(file).unwrap();
            assert_eq!(text, "<document title=\"r.md\">\n# \u{e9}\n</document>");
        }
        let found = json!({"type": "search_result", "source": "s", "title": "t",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]});
        let expected = "<search_result title=\"t\" source=\"s\">\nx\ny\n</search_result>";
        assert_eq!(of(found).unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_read_is_told_in_its_place() {
        let pdf = STANDARD.encode(b"%PDF-1.7");
        let bytes = STANDARD.encode([0xff, 0xfe, 0]);
        for (part, words) in [
            (
                json!({"type": "image", "source": {"type": "base64", "data": "AA=="}}),
                "[image left",
            ),
            (
                json!({"type": "image_url", "image_url": {"url": "x"}}),
                "[image left",
            ),
            (
                json!({"type": "input_image", "image_url": "x"}),
                "[image left",
            ),
            (
                json!({"type": "input_audio", "input_audio": {}}),
                "[audio left",
            ),
            (json!({"type": "video_url", "video_url": {}}), "[video left"),
            (
                json!({"type": "document", "source": {"type": "base64", "data": pdf}}),
                "[file left",
            ),
            (
                json!({"type": "document", "source": {"type": "url", "url": "u"}}),
                "[file left",
            ),
            (json!({"type": "document", "source": {}}), "[file left"),
            (
                json!({"type": "file", "file": {"file_id": "f", "filename": "a.pdf"}}),
                "[file a.pdf left",
            ),
            (
                json!({"type": "input_file", "file_data": bytes}),
                "[file left",
            ),
            (json!({"type": "document", "source": 5}), "[file left"),
        ] {
            let told = of(part.clone()).unwrap();
            assert!(
                told.starts_with(words) && told.ends_with("reads text only]"),
                "{part}: {told}"
            );
        }
        assert_eq!(of(json!({"type": "image"})).unwrap(), IMAGE);
        let failure = of(json!({"type": "robot"})).unwrap_err();
        assert_eq!(failure.fields()[0].0, "here");
    }
}

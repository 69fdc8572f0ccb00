//! Images of messages.
//!
//! Whether a model reads images is known once a request has a model. So a message that has images
//! is kept in two forms: `content` is what a model that reads text only is told, with words in the
//! place of each image, and `seen` is what a model that reads images gets. A template never has an
//! image's bytes: a part says that there is one.

use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};

use super::message::{Chat, Content};

/// A part of a message for a model that reads images.
#[derive(Debug, Clone, PartialEq)]
pub enum Seen {
    /// A part that a template gets as it is, such as a text.
    Part(Value),
    /// An image.
    Image(ChatImage),
}

/// An image of a message.
#[derive(Clone, PartialEq)]
pub struct ChatImage {
    /// What a refusal calls it, such as `messages[0].content[1]`.
    pub field: String,
    /// The bytes of the file as Base64, or why they are not here.
    pub data: Result<Arc<str>, String>,
}

impl fmt::Debug for ChatImage {
    /// Without the image, which may be megabytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.data.as_ref().map(|data| data.len());
        f.debug_struct("ChatImage")
            .field("field", &self.field)
            .field("base64_bytes", &bytes)
            .finish()
    }
}

impl Seen {
    /// What a model that reads images sees of parts, of which some are told in the place of an
    /// image; nothing where none is.
    #[must_use]
    pub fn of_parts(parts: &[Value], images: Vec<Option<ChatImage>>) -> Vec<Seen> {
        if images.iter().all(Option::is_none) {
            return Vec::new();
        }
        let each = parts.iter().zip(images);
        let each = each.map(|(part, image)| match image {
            Some(image) => Seen::Image(image),
            None => Seen::Part(part.clone()),
        });
        each.collect()
    }

    /// Bytes of its texts, about.
    pub(super) fn byte_len(&self) -> usize {
        match self {
            Seen::Part(part) => super::message::value_len(part),
            Seen::Image(image) => image
                .data
                .as_ref()
                .map_or_else(String::len, |data| data.len()),
        }
    }
}

impl Chat {
    /// The images, in the order in which they stand in the messages, of which a template gets
    /// `{"type": "image"}` in their places.
    pub fn take_images(&mut self) -> Vec<ChatImage> {
        let mut images = Vec::new();
        for message in &mut self.messages {
            if message.seen.is_empty() {
                continue;
            }
            let parts = std::mem::take(&mut message.seen).into_iter();
            let parts = parts.map(|part| match part {
                Seen::Part(part) => part,
                Seen::Image(image) => {
                    images.push(image);
                    json!({"type": "image"})
                }
            });
            message.content = Content::Parts(parts.collect());
        }
        images
    }

    /// Leaves the images out: messages say what is told in their places.
    pub fn leave_images_out(&mut self) {
        for message in &mut self.messages {
            message.seen = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    #[test]
    fn a_template_gets_the_places_of_images_or_the_words_for_them() {
        let image = |field: &str| {
            Seen::Image(ChatImage {
                field: field.to_owned(),
                data: Ok("AAAA".into()),
            })
        };
        let text = json!({"type": "text", "text": "a"});
        let mut message = Message::new("user", "a [an image]");
        message.seen = vec![Seen::Part(text.clone()), image("first"), image("second")];
        let mut chat = Chat::new(vec![Message::new("system", "s"), message]);
        let mut told = chat.clone();
        assert!(chat.byte_len() >= 8, "images count for the size");
        let images = chat.take_images();
        let fields: Vec<_> = images.iter().map(|image| &*image.field).collect();
        assert_eq!(fields, ["first", "second"]);
        let place = json!({"type": "image"});
        let parts = vec![text, place.clone(), place];
        assert_eq!(chat.messages[1].content, Content::Parts(parts));
        assert_eq!(chat.messages[0].content, Content::Text("s".to_owned()));
        assert!(chat.take_images().is_empty(), "they were taken");
        told.leave_images_out();
        assert_eq!(told.messages[1], Message::new("user", "a [an image]"));
    }

    #[test]
    fn an_image_is_shown_without_its_bytes() {
        let image = ChatImage {
            field: "here".to_owned(),
            data: Ok("A".repeat(1000).into()),
        };
        let shown = format!("{image:?}");
        assert!(shown.contains("here") && shown.contains("1000") && shown.len() < 100);
    }
}

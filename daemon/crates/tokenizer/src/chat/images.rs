//! Images of messages.
//!
//! Whether a model reads images is known once a request has a model. So a message that has images
//! is kept in two forms: `content` is what a model that reads text only is told, with words in the
//! place of each image, and `seen` is what a model that reads images gets. A template never has an
//! image's bytes: a part says that there is one.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};

use super::message::{Chat, Content, Message};

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
    /// The bytes of the file, or why there are none.
    pub data: Result<ImageData, String>,
    /// Maximum number of pixels that are read of it; without, as many as the model takes.
    pub pixels_max: Option<u64>,
}

/// Where the bytes of an image file are.
#[derive(Clone, PartialEq)]
pub enum ImageData {
    /// Image data as Base64.
    Base64(Arc<str>),
    /// Image data as bytes.
    Bytes(Bytes),
    /// At an `http` or `https` URL. Before a prompt is made, the bytes are fetched or the request
    /// is refused.
    Url(Arc<str>),
}

impl ImageData {
    /// Bytes that a request holds for it.
    pub fn byte_len(&self) -> usize {
        match self {
            Self::Base64(text) | Self::Url(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

impl fmt::Debug for ImageData {
    /// Without the image, which may be megabytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.byte_len())
    }
}

impl fmt::Debug for ChatImage {
    /// Without the image, which may be megabytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatImage")
            .field("field", &self.field)
            .field("data", &self.data)
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
                .map_or_else(String::len, ImageData::byte_len),
        }
    }
}

impl Chat {
    /// The images, in the order in which they stand in the messages, of which a template gets
    /// `{"type": "image"}` in their places. Those of the system stand at the beginning of the next
    /// message of the user: models are trained with images there, and templates have no place for
    /// them in a system message.
    pub fn take_images(&mut self) -> Vec<ChatImage> {
        self.move_images_to_the_user();
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

    /// The images of messages, in their order, to put their bytes in place of their URLs.
    pub fn images_of(messages: &mut [Message]) -> impl Iterator<Item = &mut ChatImage> {
        let seen = messages.iter_mut().flat_map(|message| &mut message.seen);
        seen.filter_map(|seen| match seen {
            Seen::Part(_) => None,
            Seen::Image(image) => Some(image),
        })
    }

    /// Moves the images of system messages to the front of the next message of the user, if there
    /// is one.
    fn move_images_to_the_user(&mut self) {
        let mut moved = Vec::new();
        let is_user = |message: &Message| message.role == "user";
        let last_user = self.messages.iter().rposition(is_user);
        for (at, message) in self.messages.iter_mut().enumerate() {
            if message.role == "system" && last_user > Some(at) {
                let is_image = |seen: &Seen| matches!(seen, Seen::Image(_));
                let (images, parts): (Vec<_>, Vec<_>) = std::mem::take(&mut message.seen)
                    .into_iter()
                    .partition(is_image);
                if !images.is_empty() {
                    message.content = system_text(&parts);
                }
                moved.extend(images);
            } else if message.role == "user" && !moved.is_empty() {
                if message.seen.is_empty() {
                    message.seen = match std::mem::replace(&mut message.content, Content::None) {
                        Content::None => Vec::new(),
                        Content::Text(text) => {
                            vec![Seen::Part(json!({"type": "text", "text": text}))]
                        }
                        Content::Parts(parts) => parts.into_iter().map(Seen::Part).collect(),
                    };
                }
                message.seen.splice(0..0, moved.drain(..));
            }
        }
    }

    /// Leaves the images out: messages say what takes their places.
    pub fn leave_images_out(&mut self) {
        for message in &mut self.messages {
            message.seen = Vec::new();
        }
    }
}

/// What a system message says beside its images, as one text: templates know no parts there.
fn system_text(parts: &[Seen]) -> Content {
    let texts = parts.iter().filter_map(|part| match part {
        Seen::Part(part) => part["text"].as_str(),
        Seen::Image(_) => None,
    });
    Content::Text(texts.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_gets_the_places_of_images_or_the_words_for_them() {
        let image = |field: &str| {
            Seen::Image(ChatImage {
                field: field.to_owned(),
                data: Ok(ImageData::Base64("AAAA".into())),
                pixels_max: None,
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
    fn images_of_the_system_are_shown_with_the_next_message_of_the_user() {
        let image = |field: &str| {
            Seen::Image(ChatImage {
                field: field.to_owned(),
                data: Ok(ImageData::Bytes(Bytes::from_static(b"a"))),
                pixels_max: None,
            })
        };
        let text = |text: &str| Seen::Part(json!({"type": "text", "text": text}));
        let mut system = Message::new("system", "as told");
        system.seen = vec![text("Look."), image("logo"), text("Talk.")];
        let mut seeing = Message::new("user", "as told");
        seeing.seen = vec![text("and"), image("photo")];
        let messages = vec![system, Message::new("user", "hi"), seeing];
        let mut chat = Chat::new(messages.clone());
        let images = chat.take_images();
        let fields: Vec<_> = images.iter().map(|image| &*image.field).collect();
        assert_eq!(fields, ["logo", "photo"]);
        let place = json!({"type": "image"});
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(
            chat.messages[0].content,
            Content::Text("Look.\nTalk.".into())
        );
        let first = vec![place.clone(), text("hi")];
        assert_eq!(chat.messages[1].content, Content::Parts(first));
        let second = vec![text("and"), place];
        assert_eq!(chat.messages[2].content, Content::Parts(second));
        // Nobody says anything: the template has to show it.
        let mut alone = Chat::new(messages[..1].to_vec());
        assert_eq!(alone.take_images().len(), 1);
        assert!(matches!(alone.messages[0].content, Content::Parts(_)));
    }

    #[test]
    fn an_image_is_shown_without_its_bytes() {
        let image = ChatImage {
            field: "here".to_owned(),
            data: Ok(ImageData::Base64("A".repeat(1000).into())),
            pixels_max: None,
        };
        let shown = format!("{image:?}");
        assert!(shown.contains("here") && shown.contains("1000") && shown.len() < 100);
    }
}

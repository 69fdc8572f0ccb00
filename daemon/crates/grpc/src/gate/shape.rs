//! Limits the lists in encoded requests, since a decoded request can be many times larger than its
//! bytes: two bytes make an empty message of a conversation, which takes fifty once decoded. They
//! are counted in the encoded form, before anything is allocated for them.
//!
//! Parses only what it needs: fields by number, and which of them are lists. Malformed messages are
//! left to the decoder.

use std::borrow::Cow;

use bytes::Bytes;
use rocmforge_chat::tools::TOOLS_MAX;
use rocmforge_failure as failure;
use rocmforge_service::check::{MESSAGES_MAX, PARTS_MAX, STOP_MAX};
use rocmforge_service::decoding::LOGIT_BIAS_MAX;
use rocmforge_service::embedding::TEXTS_MAX;
use rocmforge_service::rerank::DOCUMENTS_MAX;
use rocmforge_service::samplers::{BREAKERS_MAX, ORDER_MAX};
use tonic::Status;

use crate::status_code::status;

/// Bytes of gRPC's header of a message: a compression flag and the length.
const FRAME_HEADER: usize = 5;
/// Number of excess list entries that pass here, so that the check of the decoded request rejects
/// them with its own message.
const SLACK: usize = 16;

/// Which lists of a request are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// None: the decoded message is about as large as the encoded one.
    Any,
    /// The lists of `GenerateRequest`: those of `sampling`.
    Generate,
    /// The lists of `ChatRequest`: `messages` and their lists, `tools`, and those of `sampling`.
    Chat,
    /// The list of `EmbedRequest`: `inputs`.
    Embed,
    /// The list of `RerankRequest`: `documents`.
    Rerank,
}

/// Rejects a request with lists that are too long.
pub(super) fn check(shape: Shape, frames: &[Bytes]) -> Result<(), Status> {
    let lists: &[(&str, &[u64], usize)] = match shape {
        Shape::Any => return Ok(()),
        Shape::Generate => &[
            ("sampling.stop", &[6, 11], STOP_MAX),
            ("sampling.logit_bias", &[6, 12], LOGIT_BIAS_MAX),
            ("sampling.dry_sequence_breakers", &[6, 28, 1], BREAKERS_MAX),
            ("sampling.samplers", &[6, 32, 1], ORDER_MAX),
        ],
        Shape::Chat => &[
            ("messages", &[2], MESSAGES_MAX),
            ("messages.parts", &[2, 3], PARTS_MAX),
            ("messages.tool_calls", &[2, 5], PARTS_MAX),
            ("tools", &[9], TOOLS_MAX),
            ("sampling.stop", &[3, 11], STOP_MAX),
            ("sampling.logit_bias", &[3, 12], LOGIT_BIAS_MAX),
            ("sampling.dry_sequence_breakers", &[3, 28, 1], BREAKERS_MAX),
            ("sampling.samplers", &[3, 32, 1], ORDER_MAX),
        ],
        Shape::Embed => &[("inputs", &[2], TEXTS_MAX)],
        Shape::Rerank => &[("documents", &[3], DOCUMENTS_MAX)],
    };
    let body = match frames {
        [one] => Cow::Borrowed(&one[..]),
        many => Cow::Owned(many.concat()),
    };
    let Some(message) = body.get(FRAME_HEADER..) else {
        return Ok(());
    };
    for (field, path, max) in lists {
        let n = count(message, path);
        if n > max + SLACK {
            return Err(status(failure::invalid(
                field,
                &format!("{n} entries; at most {max} are allowed"),
            )));
        }
    }
    Ok(())
}

/// Number of entries of the list at the field path `path`.
fn count(message: &[u8], path: &[u64]) -> usize {
    let Some((&field, deeper)) = path.split_first() else {
        return 1;
    };
    let of_field = Fields(message).filter(|(number, _)| *number == field);
    of_field.map(|(_, value)| count(value, deeper)).sum()
}

/// Iterator over the length-delimited fields of a message, with their bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let tag = self.varint()?;
            match tag & 7 {
                0 => {
                    self.varint()?;
                }
                1 => self.0 = self.0.get(8..)?,
                2 => {
                    let length = usize::try_from(self.varint()?).ok()?;
                    let (value, rest) = self.0.split_at_checked(length)?;
                    self.0 = rest;
                    return Some((tag >> 3, value));
                }
                5 => self.0 = self.0.get(4..)?,
                _ => return None,
            }
        }
    }
}

impl Fields<'_> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_proto::v1;
    use tonic_types::StatusExt;

    use super::*;

    /// As on the wire, in frames of a few bytes or in one.
    fn body(message: &[u8], in_frames_of: usize) -> Vec<Bytes> {
        let mut body = vec![0];
        body.extend((message.len() as u32).to_be_bytes());
        body.extend(message);
        body.chunks(in_frames_of)
            .map(Bytes::copy_from_slice)
            .collect()
    }

    fn chat(messages: usize, stops: usize) -> Vec<u8> {
        use prost::Message;
        let request = v1::ChatRequest {
            model: "m".into(),
            messages: vec![v1::ChatMessage::default(); messages],
            sampling: Some(v1::SamplingParams {
                seed: Some(u64::MAX),
                temperature: Some(1.0),
                stop: vec![String::new(); stops],
                ..Default::default()
            }),
            n_ctx: Some(-1),
            ..Default::default()
        };
        request.encode_to_vec()
    }

    #[test]
    fn lists_are_counted_before_they_are_decoded() {
        for frame in [3, 1 << 20] {
            assert!(check(Shape::Chat, &body(&chat(MESSAGES_MAX, STOP_MAX), frame)).is_ok());
            for (message, field) in [
                (chat(MESSAGES_MAX + SLACK + 1, 0), "messages"),
                (chat(1, STOP_MAX + SLACK + 1), "sampling.stop"),
            ] {
                let status = check(Shape::Chat, &body(&message, frame)).unwrap_err();
                assert_eq!(status.code(), tonic::Code::InvalidArgument);
                let details = status.get_error_details();
                assert_eq!(
                    details.bad_request().unwrap().field_violations[0].field,
                    field
                );
            }
            assert!(check(Shape::Any, &body(&chat(9999, 99), frame)).is_ok());
        }
    }

    #[test]
    fn every_list_that_is_longer_than_its_bytes_is_counted() {
        use prost::Message;
        let refused = |shape: Shape, message: &[u8], field: &str| {
            let status = check(shape, &body(message, 1 << 20)).unwrap_err();
            assert!(status.message().contains(field), "{}", status.message());
        };
        let many = |n: usize| v1::ChatRequest {
            messages: vec![v1::ChatMessage {
                parts: vec![v1::ContentPart::default(); n],
                ..Default::default()
            }],
            ..Default::default()
        };
        let parts = many(PARTS_MAX + SLACK + 1).encode_to_vec();
        refused(Shape::Chat, &parts, "messages.parts");
        let fine = many(PARTS_MAX).encode_to_vec();
        assert!(check(Shape::Chat, &body(&fine, 1 << 20)).is_ok());
        let tools = v1::ChatRequest {
            tools: vec![v1::Tool::default(); TOOLS_MAX + SLACK + 1],
            ..Default::default()
        };
        refused(Shape::Chat, &tools.encode_to_vec(), "tools");
        let inputs = v1::EmbedRequest {
            inputs: vec![v1::EmbedInput::default(); TEXTS_MAX + SLACK + 1],
            ..Default::default()
        };
        refused(Shape::Embed, &inputs.encode_to_vec(), "inputs");
        let documents = v1::RerankRequest {
            documents: vec![String::new(); DOCUMENTS_MAX + SLACK + 1],
            ..Default::default()
        };
        refused(Shape::Rerank, &documents.encode_to_vec(), "documents");
    }

    #[test]
    fn what_is_malformed_is_the_decoders() {
        for message in [
            &b"\x12"[..],
            b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x13",
            b"\x12\x7f",
            b"",
        ] {
            assert!(check(Shape::Chat, &body(message, 1 << 20)).is_ok());
        }
        assert!(check(Shape::Chat, &[]).is_ok());
        assert!(check(Shape::Chat, &[Bytes::from_static(b"\0\0")]).is_ok());
    }
}

//! Writes responses of `Tokenize` while they are sent: their source, one id for each token, takes a
//! fraction of the message.
//!
//! ```text
//! handler --an empty message, and [`Tokens`] beside it--> [`Written`] --> [`Message`] as the body
//! ```
//!
//! The length precedes a message, so it is computed before anything is sent, and a text whose
//! response would be too long is rejected ([`Tokens::new`]).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::Map;
use http_body::{Frame, SizeHint};
use rocmforge_engine::LoadedModel;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_proto::{MAX_MESSAGE_BYTES, v1};
use rocmforge_service::sum::Held;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// Minimum size of a frame in bytes: more than a piece of [`rocmforge_connections::Replies`], and
/// about thirty microseconds of work.
const FRAME_BYTES: usize = 32 << 10;
/// Tag byte of the field `TokenizeResponse.ids`, packed; the next constant is that of `pieces`.
const IDS: u8 = 1 << 3 | 2;
const PIECES: u8 = 2 << 3 | 2;

/// Gives the bytes of tokens.
pub(super) trait Vocabulary: Send + Sync + 'static {
    /// Bytes of a token.
    fn piece(&self, id: u32) -> &[u8];
}

impl Vocabulary for LoadedModel {
    fn piece(&self, id: u32) -> &[u8] {
        self.tokenizer().token_bytes(id).unwrap_or_default()
    }
}

/// The tokens of a text, as the source of a response.
pub(super) struct Tokens<V = LoadedModel> {
    vocabulary: Arc<V>,
    ids: Box<[u32]>,
    /// Bytes of the packed ids.
    packed_bytes: usize,
    /// Bytes of the whole message.
    bytes: usize,
    /// Counts the bytes of the ids until the response is sent.
    held: Option<Held>,
}

impl<V: Vocabulary> Tokens<V> {
    /// A response with the tokens of the text in `field`.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if the response would exceed the maximum size of a message.
    pub(super) fn new(vocabulary: Arc<V>, ids: Vec<u32>, field: &str) -> Result<Self, Failure> {
        let packed_bytes = ids.iter().map(|&id| varint_bytes(id as usize)).sum();
        let with_length = |bytes: usize| 1 + varint_bytes(bytes) + bytes;
        let pieces = ids
            .iter()
            .map(|&id| with_length(vocabulary.piece(id).len()));
        let of_ids = if ids.is_empty() {
            0
        } else {
            with_length(packed_bytes)
        };
        let bytes = of_ids + pieces.sum::<usize>();
        if bytes > MAX_MESSAGE_BYTES {
            return Err(failure::invalid(
                field,
                &format!(
                    "its {} tokens with their pieces are {bytes} bytes, and an answer has at most \
                     {MAX_MESSAGE_BYTES}: send the text in parts",
                    ids.len()
                ),
            ));
        }
        // Spare room would be held until the answer is read.
        let ids = ids.into_boxed_slice();
        Ok(Self {
            vocabulary,
            ids,
            packed_bytes,
            bytes,
            held: None,
        })
    }

    /// Counts the bytes of the ids in `held` from now on.
    pub(super) fn count(&mut self, held: Held) {
        let held = self.held.insert(held);
        held.add(size_of_val(&self.ids[..]) as u64);
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }
}

impl Tokens {
    /// The response; [`Written`] writes its body.
    pub(super) fn answer(self) -> tonic::Response<v1::TokenizeResponse> {
        let mut response = tonic::Response::new(v1::TokenizeResponse::default());
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

/// A service that writes responses with [`Tokens`] while they are sent.
#[derive(Debug, Clone)]
pub(super) struct Written<S>(pub(super) S);

impl<S: NamedService> NamedService for Written<S> {
    const NAME: &'static str = S::NAME;
}

type Answer = Result<Response<Body>, Infallible>;

impl<S> Service<Request<Body>> for Written<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Map<S::Future, fn(Answer) -> Answer>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.call(request).map(written)
    }
}

fn written(answer: Answer) -> Answer {
    answer.map(
        |mut response| match response.extensions_mut().remove::<Arc<Tokens>>() {
            Some(tokens) => response.map(|_| Body::new(Message::of(tokens))),
            None => response,
        },
    )
}

/// The next part of a message to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Begin,
    /// The id with this index.
    Id(usize),
    /// The piece of the token with this index.
    Piece(usize),
    Status,
    Nothing,
}

/// A `TokenizeResponse` in gRPC's framing, written while it is sent.
struct Message<V> {
    tokens: Arc<Tokens<V>>,
    next: Next,
}

impl<V: Vocabulary> Message<V> {
    fn of(tokens: Arc<Tokens<V>>) -> Self {
        let next = Next::Begin;
        Self { tokens, next }
    }

    /// Writes the next frame; empty at the end.
    fn frame(&mut self) -> Vec<u8> {
        let tokens = &self.tokens;
        let mut out = Vec::with_capacity(FRAME_BYTES.min(tokens.bytes) + 16);
        while out.len() < FRAME_BYTES {
            self.next = match self.next {
                Next::Begin => {
                    // Not compressed, and the length.
                    out.push(0);
                    out.extend((tokens.bytes as u32).to_be_bytes());
                    if !tokens.ids.is_empty() {
                        out.push(IDS);
                        varint(tokens.packed_bytes, &mut out);
                    }
                    Next::Id(0)
                }
                Next::Id(at) => match tokens.ids.get(at) {
                    Some(&id) => {
                        varint(id as usize, &mut out);
                        Next::Id(at + 1)
                    }
                    None => Next::Piece(0),
                },
                Next::Piece(at) => match tokens.ids.get(at) {
                    Some(&id) => {
                        let piece = tokens.vocabulary.piece(id);
                        out.push(PIECES);
                        varint(piece.len(), &mut out);
                        out.extend_from_slice(piece);
                        Next::Piece(at + 1)
                    }
                    None => Next::Status,
                },
                Next::Status | Next::Nothing => break,
            };
        }
        out
    }
}

impl<V: Vocabulary> http_body::Body for Message<V> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = self.frame();
        if !frame.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(frame.into()))));
        }
        if std::mem::replace(&mut self.next, Next::Nothing) == Next::Nothing {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::new();
        let added = Status::new(Code::Ok, "").add_header(&mut trailers);
        Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.next == Next::Nothing
    }

    /// Exact only about the end: says whether the message is complete, so that a reply that is
    /// ended inside of it is reset.
    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::default();
        hint.set_lower(match self.next {
            Next::Id(_) | Next::Piece(_) => 1,
            Next::Begin | Next::Status | Next::Nothing => 0,
        });
        hint
    }
}

/// Appends a varint of protocol buffers: seven bits a byte, the lowest first.
fn varint(mut value: usize, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint_bytes(value: usize) -> usize {
    (value | 1).ilog2() as usize / 7 + 1
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// Each token is its id in bytes, as many as its last digit.
    struct Digits(Vec<u8>);

    impl Vocabulary for Digits {
        fn piece(&self, id: u32) -> &[u8] {
            &self.0[..id as usize % 10]
        }
    }

    fn tokens(ids: Vec<u32>) -> Result<Tokens<Digits>, Failure> {
        let digits = Arc::new(Digits(b"0123456789".to_vec()));
        Tokens::new(digits, ids, "text")
    }

    #[test]
    fn the_message_is_the_one_of_the_protocol_in_small_frames() {
        for n in [0, 1, 2, 127, 128, 5000, 100_000] {
            let ids: Vec<u32> = (0..n).map(|at| at * 7).collect();
            let pieces = ids
                .iter()
                .map(|id| b"0123456789"[..*id as usize % 10].to_vec());
            let pieces = pieces.collect();
            let (mut message, mut bytes) =
                (Message::of(Arc::new(tokens(ids.clone()).unwrap())), vec![]);
            loop {
                let frame = message.frame();
                assert!(frame.len() < FRAME_BYTES + 16);
                bytes.extend_from_slice(&frame);
                // What is ended here is reset, unless the message is whole.
                let is_whole = message.next == Next::Status;
                assert_eq!(http_body::Body::size_hint(&message).lower() == 0, is_whole);
                if frame.is_empty() {
                    break;
                }
            }
            let (head, body) = bytes.split_at(5);
            assert_eq!(head[0], 0);
            assert_eq!(head[1..], (body.len() as u32).to_be_bytes());
            let expected = v1::TokenizeResponse { ids, pieces };
            assert!(body == expected.encode_to_vec(), "{n}");
            assert_eq!(message.next, Next::Status);
        }
    }

    #[test]
    fn an_answer_above_a_messages_bound_is_refused_before_it_is_made() {
        // One byte of id, and two of a piece without any.
        let most = MAX_MESSAGE_BYTES / 3 - 2;
        assert!(tokens(vec![0; most]).is_ok());
        let failure = tokens(vec![0; most + 3]).err().unwrap();
        assert_eq!(failure.fields()[0].0, "text");
    }

    #[test]
    fn a_number_has_the_bytes_that_are_counted() {
        for shift in 0..31 {
            for value in [(1_usize << shift) - 1, 1 << shift] {
                let mut out = Vec::new();
                varint(value, &mut out);
                assert_eq!(out.len(), varint_bytes(value), "{value}");
            }
        }
    }
}

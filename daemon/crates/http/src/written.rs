//! Writes responses that are long lists while they are sent: the source of a list (ids, vectors)
//! takes a fraction of its JSON.
//!
//! A list that fits one chunk is a body of known length. A longer one is made chunk by chunk as the
//! connection takes them, and the bytes of its source are counted meanwhile.

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::sum::Held;

use super::call::{Call, with_type};
use super::reply::{Chunks, any, channel};

/// Minimum size of a chunk in bytes: less than a millisecond of work, so it is made on the async
/// thread.
const CHUNK_BYTES: usize = 64 << 10;
/// Maximum number of chunks that wait for the connection.
const CHUNKS_WAITING: usize = 2;
const JSON: &str = "application/json";

/// A JSON document that mostly consists of one list.
pub(super) struct List<F> {
    /// Text before the items, with the bracket.
    pub(super) begin: String,
    /// Number of items.
    pub(super) n: usize,
    /// Function that writes the item with an index.
    pub(super) item: F,
    /// Text after the items, with the bracket.
    pub(super) end: String,
    /// Size of the items' source in bytes.
    pub(super) source_bytes: usize,
}

impl<F> List<F>
where
    F: FnMut(usize, &mut Vec<u8>) -> serde_json::Result<()> + Send + 'static,
{
    /// The document as a response.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if there is no room for a long one, INTERNAL if an item cannot
    /// be written.
    pub(super) fn answer(self, call: &Call) -> Result<Response, Failure> {
        let mut writing = Writing {
            held: call.service.sending.hold(call.uid()),
            list: self,
            next: None,
        };
        let first = writing.chunk().map_err(no_json)?;
        if writing.is_done() {
            return Ok(with_type(JSON, Body::from(first)));
        }
        // Others may have filled the room since this request was let in.
        call.service.room_for_reply(call.uid())?;
        writing.held.add(writing.list.source_bytes as u64);
        let (chunks, taken) = channel(CHUNKS_WAITING);
        tokio::spawn(any(writing.write(first, chunks)));
        Ok(with_type(JSON, Body::from_stream(taken)))
    }
}

fn no_json(error: serde_json::Error) -> Failure {
    failure::bug(&format!("an answer is no JSON: {error}"))
}

/// A document that is being written.
struct Writing<F> {
    list: List<F>,
    /// Index of the next item; `None` before the beginning.
    next: Option<usize>,
    held: Held,
}

impl<F> Writing<F>
where
    F: FnMut(usize, &mut Vec<u8>) -> serde_json::Result<()> + Send + 'static,
{
    fn is_done(&self) -> bool {
        self.next.is_some_and(|next| next > self.list.n)
    }

    /// Writes the next chunk of the document.
    fn chunk(&mut self) -> serde_json::Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut next = self.next.unwrap_or_else(|| {
            out.extend_from_slice(self.list.begin.as_bytes());
            0
        });
        while next <= self.list.n && out.len() < CHUNK_BYTES {
            if next == self.list.n {
                out.extend_from_slice(self.list.end.as_bytes());
            } else {
                if next > 0 {
                    out.push(b',');
                }
                (self.list.item)(next, &mut out)?;
            }
            next += 1;
        }
        self.next = Some(next);
        Ok(out)
    }

    /// Writes the rest, until the client is gone or does not read.
    async fn write(mut self, first: Vec<u8>, chunks: Chunks) {
        let mut chunk = first;
        loop {
            if self.is_done() {
                return chunks.last.says(chunk.into());
            }
            if chunks.waiting.send(Bytes::from(chunk)).await.is_err() {
                return;
            }
            chunk = match self.chunk() {
                Ok(chunk) => chunk,
                // The connection breaks off.
                Err(error) => return tracing::error!(%error, "an answer is no JSON"),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply;

    type Item = fn(usize, &mut Vec<u8>) -> serde_json::Result<()>;

    fn writing(n: usize, item: Item) -> Writing<Item> {
        let sum = rocmforge_service::sum::Sum::new(1);
        Writing {
            list: List {
                begin: "{\"list\":[".to_owned(),
                n,
                item,
                end: "]}".to_owned(),
                source_bytes: 0,
            },
            next: None,
            held: sum.hold(1),
        }
    }

    #[tokio::test]
    async fn a_list_is_the_same_in_chunks_and_none_is_large() {
        for n in [0, 1, 2, 100_000] {
            let mut writing = writing(n, |i, out| serde_json::to_writer(out, &i));
            let first = writing.chunk().unwrap();
            let (chunks, taken) = channel(CHUNKS_WAITING);
            let (read, ()) = tokio::join!(reply::collected(taken), writing.write(first, chunks));
            let (read, end) = read;
            assert!(end.is_ok());
            assert!(read.iter().all(|chunk| chunk.len() < CHUNK_BYTES + 16));
            let list = (0..n).map(|i| i.to_string()).collect::<Vec<_>>();
            assert_eq!(read.concat(), format!("{{\"list\":[{}]}}", list.join(",")));
        }
    }

    #[tokio::test]
    async fn an_item_that_is_no_json_breaks_the_answer_off() {
        let mut writing = writing(100_000, |i, out| match i {
            90_000.. => serde_json::from_str::<()>("no JSON"),
            _ => serde_json::to_writer(out, &i),
        });
        let first = writing.chunk().unwrap();
        let (chunks, taken) = channel(CHUNKS_WAITING);
        let (read, ()) = tokio::join!(reply::collected(taken), writing.write(first, chunks));
        assert!(read.1.is_err());
    }
}

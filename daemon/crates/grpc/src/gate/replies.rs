//! The body of a reply for gRPC's transport: one that is ended early has a status after whole
//! messages, and is reset inside of one.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use rocmforge_connections::{Ended, Outgoing, Taken};
use rocmforge_failure as failure;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::HeaderMap;

use crate::status_code;

/// The body of a reply, counted while it is sent.
pub(super) struct Reply(pub(super) Outgoing<Body>);

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.poll_taken(cx).map(|taken| {
            Some(match taken? {
                Taken::Frame(frame) => Ok(frame),
                Taken::Failed(status) => Err(status),
                Taken::Ended(ended) => told(ended),
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

fn told(ended: Ended) -> Result<Frame<Bytes>, Status> {
    let status = status_code::status(failure::unread(ended.unread_max));
    if ended.inside {
        return Err(status);
    }
    let mut trailers = HeaderMap::new();
    status.add_header(&mut trailers)?;
    Ok(Frame::trailers(trailers))
}

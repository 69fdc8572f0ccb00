//! Calls without a connection, for fuzz targets.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body as Message;
use bytes::{BufMut, BytesMut};
use http_body::Body as _;
use rocmforge_service::Service;
use rocmforge_service::arrival::Caller;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::service::Routes;
use tower::{Layer, ServiceExt};

use super::gate;
use crate::connection::{Peer, Table};
use crate::runtimes::Runtimes;

/// The services behind their gate, and who calls them.
#[derive(Debug)]
pub(crate) struct Called {
    services: gate::Gate<Routes>,
    peer: Arc<Peer>,
}

impl Called {
    pub(crate) fn new(context: &Arc<Service>, runtimes: Runtimes) -> Self {
        let layer = gate::GateLayer(gate::Bounds::new(context, runtimes));
        let (peer, _closed) = Peer::enter(Caller::unknown(), &Table::new(1));
        Self {
            services: layer.layer(super::routes(context).prepare()),
            peer,
        }
    }

    /// Calls `SERVICE/METHOD` with `message`; the code and the words of the refusal, 0 where there
    /// is none.
    pub(crate) async fn call(&self, call: &str, message: &[u8]) -> (i32, String) {
        let mut framed = BytesMut::with_capacity(message.len() + 5);
        framed.put_u8(0);
        framed.put_u32(message.len() as u32);
        framed.put_slice(message);
        let mut request = Request::post(format!("/rocmforge.v1.{call}"))
            .header("content-type", "application/grpc")
            .body(Body::new(Message::from(framed.freeze())))
            .expect("a request");
        request.extensions_mut().insert(Arc::clone(&self.peer));
        let answer = self.services.clone().oneshot(request).await;
        let (head, mut body) = answer.unwrap_or_else(|never| match never {}).into_parts();
        let mut status = Status::from_header_map(&head.headers);
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            match frame.map(|frame| frame.into_trailers()) {
                Ok(Ok(trailers)) => status = Status::from_header_map(&trailers),
                Ok(Err(_data)) => {}
                Err(broken) => status = Some(broken),
            }
        }
        let status = status.expect("an answer has a status");
        (status.code() as i32, status.message().to_owned())
    }
}

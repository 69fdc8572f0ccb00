//! Both ways of asking without a socket, for the fuzz targets in `tests/fuzz`; compiled with
//! `--cfg fuzzing` alone. No model is loaded and none may be.

use std::num::NonZeroUsize;
use std::sync::Arc;

use axum::Router;
use axum::body::Body as HttpBody;
use axum::http::Request;
use bytes::Bytes;
use rocmforge_engine::api::Budget;
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_service::model_files::ModelDirs;
use rocmforge_service::roles::Roles;
use rocmforge_service::{Limits, Service};
use rocmforge_tokenizer::Renderer;
use tokio::runtime::Runtime;
use tower::ServiceExt;

use crate::http::{self, Allowed, Http};
use crate::rpc::Called;
use crate::runtimes::Runtimes;

/// Most bytes of an answer; refusals are short.
const ANSWER_MAX_BYTES: usize = 1 << 20;

/// A daemon without sockets.
#[derive(Debug)]
pub struct Desk {
    runtime: Runtime,
    http: Router,
    grpc: Called,
}

impl Desk {
    /// Starts an engine on the host.
    ///
    /// # Panics
    /// Where it does not start.
    #[expect(clippy::new_without_default, reason = "it starts a thread")]
    pub fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        let (engine, _thread) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: NonZeroUsize::new(1),
            budget: Budget::Bytes(1 << 20),
            ..EngineConfig::default()
        })
        .expect("the host device");
        let limits = Limits {
            n_ctx_max: 1024,
            max_sequences: 4,
            threads: 1,
        };
        let service = Arc::new(Service::new(
            engine,
            ModelDirs::new(&[]).expect("no directories"),
            limits,
            Renderer::in_process(),
            Roles::default(),
        ));
        let runtimes = Runtimes {
            sockets: runtime.handle().clone(),
            handlers: runtime.handle().clone(),
        };
        let http = Http::new(
            Arc::clone(&service),
            runtimes.clone(),
            None,
            None,
            Allowed::default(),
            Default::default(),
        );
        Self {
            runtime,
            http: http::router(&http),
            grpc: Called::new(&service, runtimes),
        }
    }

    /// Posts `body`; the status and the body of the answer.
    ///
    /// # Panics
    /// Where the answer has no end.
    pub fn http(&self, route: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut request = Request::post(route)
            .body(HttpBody::from(Bytes::copy_from_slice(body)))
            .expect("a request");
        request.extensions_mut().insert(http::Client {
            caller: Some(rocmforge_service::arrival::Caller::unknown()),
            reserved: false,
        });
        let answered = async {
            let answer = self.http.clone().oneshot(request).await;
            let answer = answer.unwrap_or_else(|never| match never {});
            let status = answer.status().as_u16();
            let body = axum::body::to_bytes(answer.into_body(), ANSWER_MAX_BYTES).await;
            (status, body.expect("a body with an end").to_vec())
        };
        self.runtime.block_on(answered)
    }

    /// Calls `SERVICE/METHOD` with `message`; the code and the words of the refusal, 0 where there
    /// is none.
    pub fn grpc(&self, call: &str, message: &[u8]) -> (i32, String) {
        self.runtime.block_on(self.grpc.call(call, message))
    }
}

//! The client: one method an RPC.
//!
//! *Invariant:* methods take `&self` and may run side by side; the channel multiplexes them over
//! one connection.

use std::path::{Path, PathBuf};

use rocmforge_proto::MAX_MESSAGE_BYTES;
use rocmforge_proto::v1::cache_client::CacheClient;
use rocmforge_proto::v1::inference_client::InferenceClient;
use rocmforge_proto::v1::models_client::ModelsClient;
use rocmforge_proto::v1::server_client::ServerClient;
use rocmforge_proto::v1::*;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::connect::connect;
use crate::{Error, Events, GenerateEvents, LoadEvents, PreloadEvents};

/// A connection to a daemon. Cheap to clone; clones share the connection, which
/// is made again when it broke and the next request begins.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    models: ModelsClient<Channel>,
    inference: InferenceClient<Channel>,
    cache: CacheClient<Channel>,
    server: ServerClient<Channel>,
    health: HealthClient<Channel>,
}

/// Calls `$self.$service.$method($request)` and gives the answer's message.
macro_rules! call {
    ($self:ident . $service:ident . $method:ident ( $request:expr ), $rpc:literal) => {
        $self
            .$service
            .clone()
            .$method($request)
            .await
            .map(tonic::Response::into_inner)
            .map_err(|status| Error::from_status($rpc, status))
    };
}

/// Every method fails with [`Error::Rpc`] when the daemon refuses, with the
/// codes that the `.proto` files list for its RPC, and with
/// [`Error::ConnectionLost`] when the connection breaks.
impl Client {
    /// Connects to the daemon at `path`; without one, to the first of
    /// [`socket_candidates`](crate::socket_candidates) where one answers.
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] with the paths that were tried where nobody answers,
    /// [`Error::Handshake`] where somebody else does.
    pub async fn connect(path: Option<&Path>) -> Result<Client, Error> {
        let (channel, socket) = connect(path).await?;
        macro_rules! service {
            ($client:ident) => {
                $client::new(channel.clone())
                    .max_encoding_message_size(MAX_MESSAGE_BYTES)
                    .max_decoding_message_size(MAX_MESSAGE_BYTES)
            };
        }
        Ok(Client {
            models: service!(ModelsClient),
            inference: service!(InferenceClient),
            cache: service!(CacheClient),
            server: service!(ServerClient),
            health: HealthClient::new(channel.clone()),
            socket,
        })
    }

    /// The path of the socket that this client is connected to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Opens a GGUF file under a name.
    pub async fn load(&self, request: LoadRequest) -> Result<LoadEvents, Error> {
        let messages = call!(self.models.load(request), "Models.Load")?;
        Ok(Events::new("Models.Load", messages))
    }

    /// Closes a model; with `force` even if it is pinned or busy.
    pub async fn unload(&self, name: &str, force: bool) -> Result<UnloadResponse, Error> {
        let name = name.to_owned();
        call!(
            self.models.unload(UnloadRequest { name, force }),
            "Models.Unload"
        )
    }

    /// The loaded models, by name.
    pub async fn list(&self) -> Result<Vec<ModelSummary>, Error> {
        call!(self.models.list(ListModelsRequest {}), "Models.List").map(|answer| answer.models)
    }

    /// Everything about one model.
    pub async fn get(&self, name: &str) -> Result<Model, Error> {
        let name = name.to_owned();
        call!(self.models.get(GetModelRequest { name }), "Models.Get")?
            .model
            .ok_or(Error::Incomplete {
                rpc: "Models.Get",
                missing: "the model",
            })
    }

    /// Uploads segments of a model, all of them if `segments` is empty.
    pub async fn preload(&self, name: &str, segments: &[u32]) -> Result<PreloadEvents, Error> {
        let (name, segments) = (name.to_owned(), segments.to_vec());
        let request = PreloadRequest { name, segments };
        let messages = call!(self.models.preload(request), "Models.Preload")?;
        Ok(Events::new("Models.Preload", messages))
    }

    /// Keeps segments of a model from eviction, all of them if `segments` is
    /// empty.
    pub async fn pin(&self, name: &str, segments: &[u32]) -> Result<PinResponse, Error> {
        let (name, segments) = (name.to_owned(), segments.to_vec());
        call!(self.models.pin(PinRequest { name, segments }), "Models.Pin")
    }

    /// Lifts the pins of segments of a model, of all of them if `segments` is
    /// empty.
    pub async fn unpin(&self, name: &str, segments: &[u32]) -> Result<UnpinResponse, Error> {
        let (name, segments) = (name.to_owned(), segments.to_vec());
        call!(
            self.models.unpin(UnpinRequest { name, segments }),
            "Models.Unpin"
        )
    }

    /// Continues a text. Dropping the stream cancels the work.
    pub async fn generate(&self, request: GenerateRequest) -> Result<GenerateEvents, Error> {
        let messages = call!(self.inference.generate(request), "Inference.Generate")?;
        Ok(Events::new("Inference.Generate", messages))
    }

    /// Answers a conversation. Dropping the stream cancels the work.
    pub async fn chat(&self, request: ChatRequest) -> Result<GenerateEvents, Error> {
        let messages = call!(self.inference.chat(request), "Inference.Chat")?;
        Ok(Events::new("Inference.Chat", messages))
    }

    /// What a conversation would let the model continue: the text, and its ids.
    pub async fn render(&self, request: ChatRequest) -> Result<RenderResponse, Error> {
        call!(self.inference.render(request), "Inference.Render")
    }

    /// Vectors of texts.
    pub async fn embed(&self, request: EmbedRequest) -> Result<EmbedResponse, Error> {
        call!(self.inference.embed(request), "Inference.Embed")
    }

    /// How relevant documents are to a query, the most relevant one first.
    pub async fn rerank(&self, request: RerankRequest) -> Result<RerankResponse, Error> {
        call!(self.inference.rerank(request), "Inference.Rerank")
    }

    /// Turns a text into token ids.
    pub async fn tokenize(&self, request: TokenizeRequest) -> Result<TokenizeResponse, Error> {
        call!(self.inference.tokenize(request), "Inference.Tokenize")
    }

    /// Turns token ids into text.
    pub async fn detokenize(&self, model: &str, ids: &[u32]) -> Result<String, Error> {
        let (model, ids) = (model.to_owned(), ids.to_vec());
        let request = DetokenizeRequest { model, ids };
        call!(self.inference.detokenize(request), "Inference.Detokenize").map(|answer| answer.text)
    }

    /// Log-probabilities of the tokens of a text.
    pub async fn score(&self, request: ScoreRequest) -> Result<ScoreResponse, Error> {
        call!(self.inference.score(request), "Inference.Score")
    }

    /// How the device's memory is used.
    pub async fn cache_stats(&self) -> Result<StatsResponse, Error> {
        call!(self.cache.stats(StatsRequest {}), "Cache.Stats")
    }

    /// Evicts the segments of one model, or of all.
    pub async fn cache_clear(&self, model: Option<&str>) -> Result<ClearResponse, Error> {
        self.clear(model, false).await
    }

    /// Evicts the segments of one model, or of all, and deletes its KV cache on disk.
    pub async fn cache_clear_disk(&self, model: Option<&str>) -> Result<ClearResponse, Error> {
        self.clear(model, true).await
    }

    async fn clear(&self, model: Option<&str>, kv_disk: bool) -> Result<ClearResponse, Error> {
        let model = model.map(str::to_owned);
        let request = ClearRequest { model, kv_disk };
        call!(self.cache.clear(request), "Cache.Clear")
    }

    /// Changes the budget.
    pub async fn cache_set_budget(
        &self,
        budget: set_budget_request::Budget,
    ) -> Result<SetBudgetResponse, Error> {
        let budget = Some(budget);
        call!(
            self.cache.set_budget(SetBudgetRequest { budget }),
            "Cache.SetBudget"
        )
    }

    /// Gives the device's memory back to the driver until the next request; with `host`, host
    /// memory as well.
    pub async fn cache_release(&self, host: bool) -> Result<ReleaseResponse, Error> {
        call!(self.cache.release(ReleaseRequest { host }), "Cache.Release")
    }

    /// Chooses how victims are picked.
    pub async fn cache_set_policy(&self, policy: CachePolicy) -> Result<SetPolicyResponse, Error> {
        let policy = policy.into();
        call!(
            self.cache.set_policy(SetPolicyRequest { policy }),
            "Cache.SetPolicy"
        )
    }

    /// Whether the daemon serves: `false` while it drains, and once its device is
    /// lost.
    pub async fn is_serving(&self) -> Result<bool, Error> {
        let request = HealthCheckRequest::default();
        let answer = call!(self.health.check(request), "Health.Check")?;
        Ok(answer.status() == ServingStatus::Serving)
    }

    /// The GGUF files below the daemon's model directories.
    pub async fn list_files(&self) -> Result<ListFilesResponse, Error> {
        call!(
            self.models.list_files(ListFilesRequest {}),
            "Models.ListFiles"
        )
    }

    /// The daemon's status.
    pub async fn status(&self) -> Result<StatusResponse, Error> {
        call!(self.server.status(StatusRequest {}), "Server.Status")
    }

    /// The GPU drivers and devices of the daemon's machine, and the device in
    /// use.
    pub async fn list_devices(&self) -> Result<ListDevicesResponse, Error> {
        call!(
            self.server.list_devices(ListDevicesRequest {}),
            "Server.ListDevices"
        )
    }

    /// Runs the self-test of the GPU in use, which takes up to ten seconds.
    pub async fn check_device(&self) -> Result<CheckDeviceResponse, Error> {
        call!(
            self.server.check_device(CheckDeviceRequest {}),
            "Server.CheckDevice"
        )
    }

    /// Where the time of requests went that have ended.
    pub async fn why(&self, request: WhyRequest) -> Result<Vec<RequestTimes>, Error> {
        let answer = call!(self.server.why(request), "Server.Why")?;
        Ok(answer.requests)
    }

    /// Has the daemon reload its settings.
    pub async fn reload(&self) -> Result<ReloadResponse, Error> {
        call!(self.server.reload(ReloadRequest {}), "Server.Reload")
    }
}

//! Relevance scores by a cross-encoder, a model with a classification head of one class: it reads
//! the query and the document as one text, with the separators of its training.

use std::sync::Arc;

use rocmforge_chat::prompt::{Prompt, Room};
use rocmforge_engine::api::times::TimesSlot;
use rocmforge_engine::api::{Class, EmbedRequest, Pooling};
use rocmforge_engine::{AppliedAdapters, LoadedModel};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::Tokenizer;

use crate::Service;
use crate::arrival::Arrival;
use crate::chat_model::chat_model;
use crate::limits::Ticket;

/// The tokens around a query and a document.
struct PairMarks {
    before: Vec<u32>,
    between: Vec<u32>,
    behind: Vec<u32>,
}

impl PairMarks {
    /// The separators of a model: BERT's are `[CLS] query [SEP] document [SEP]`; RoBERTa's, whose
    /// texts end with `</s>`, are `<s> query </s></s> document </s>`.
    fn of(tokenizer: &Tokenizer) -> Self {
        let end = tokenizer.eos();
        let is_roberta = end.and_then(|id| tokenizer.token_bytes(id)) == Some(b"</s>");
        let ends = |n| {
            end.iter()
                .copied()
                .cycle()
                .take(if end.is_some() { n } else { 0 })
        };
        Self {
            before: tokenizer.bos().into_iter().collect(),
            between: ends(if is_roberta { 2 } else { 1 }).collect(),
            behind: ends(1).collect(),
        }
    }
}

/// The pooling of hidden states for the classification head.
pub(crate) fn pooling(model: &LoadedModel) -> Pooling {
    let hparams = model.model().hparams();
    let usual = match hparams.arch {
        // So llama.cpp reads such files, which do not tell.
        "modern-bert" => Pooling::Mean,
        _ => Pooling::First,
    };
    let said = hparams.pooling.filter(|&pooling| pooling != Pooling::None);
    said.unwrap_or(usual)
}

/// Client and adapters of a rerank request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfWhom<'a> {
    pub(crate) ticket: &'a Ticket,
    pub(crate) class: Class,
    pub(crate) adapters: &'a Option<Arc<AppliedAdapters>>,
    /// Slot for the time accounts of all documents.
    pub(crate) times: &'a TimesSlot,
}

impl Service {
    /// The token ids of a query and a document. A document that is too long is rejected.
    pub(crate) async fn paired(
        &self,
        model: &Arc<LoadedModel>,
        (query, document): (Arc<str>, String),
        room: Room,
        arrival: Arrival,
    ) -> Result<Vec<u32>, Failure> {
        let (model, bytes) = (Arc::clone(model), query.len() + document.len());
        let work = move |_: &_| {
            let (marks, known) = (PairMarks::of(model.tokenizer()), chat_model(&model));
            let around = marks.before.len() + marks.between.len() + marks.behind.len();
            let plain = |text: String| Prompt::Text {
                text,
                add_special: false,
                parse_special: false,
            };
            let room = room.less(around);
            let query = plain(query.as_ref().to_owned());
            let query = query.encode("query", &known, Some(room), None)?.ids;
            let room = room.less(query.len());
            let document = plain(document).encode("documents", &known, Some(room), None)?;
            let parts = [
                marks.before,
                query,
                marks.between,
                document.ids,
                marks.behind,
            ];
            Ok(parts.concat())
        };
        let work = self.text.run(arrival.peer(), bytes, work);
        arrival.limit(work).await
    }

    /// The output (logit) of the classification head's only class.
    pub(crate) async fn class_logit(
        &self,
        model: Arc<LoadedModel>,
        ids: Vec<u32>,
        of_whom: OfWhom<'_>,
        arrival: Arrival,
    ) -> Result<f32, Failure> {
        let request = EmbedRequest {
            pooling: pooling(&model),
            model,
            ids,
            classes: true,
            deadline: arrival.deadline,
            asker: of_whom.ticket.asker(of_whom.class),
            adapters: of_whom.adapters.clone(),
        };
        let times = Some(of_whom.times.clone());
        let outputs = self.engine.embed_timed(request, times).await;
        let outputs = outputs.map_err(|error| of_whom.ticket.failure(&error))?;
        let first = outputs.values.first().copied();
        first.ok_or_else(|| failure::bug("a classification without outputs"))
    }
}

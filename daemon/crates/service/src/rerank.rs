//! Scores the relevance of documents to a query: with a cross-encoder (`rank_head.rs`), or with a
//! decoder that answers "yes" or "no".
//!
//! Supported decoders are the rerankers of Qwen 3 and models trained like them: the decoder is
//! asked, in the words of its training, whether a document meets a query, and the probability of
//! "yes" against "no" as its next token is the score. The classification head that converted files
//! carry (`cls.output.weight`) has the rows of these two tokens of the output head, so nothing is
//! lost without it.
//!
//! Text in the request cannot become control tokens. The query stands before the document, so that
//! documents of one query share what is computed up to there.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use rocmforge_chat::prompt::{Prompt, Room};
use rocmforge_engine::api::{Class, Decoding, GenerateEvent, GenerateRequest, SamplingParams};
use rocmforge_engine::{AppliedAdapters, LoadedModel, Purpose};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::Tokenizer;

use crate::Service;
use crate::arrival::Arrival;
use crate::chat_model::chat_model;
use crate::rank_head::OfWhom;
use crate::request_log::RequestLog;

/// Maximum number of documents of a request.
pub const DOCUMENTS_MAX: usize = 1024;
/// Maximum length in bytes of query and instruction together: they are a part of each document's
/// prompt.
const HEAD_MAX_BYTES: usize = 256 << 10;
/// Number of a request's documents that are given to the engine at a time.
const AT_A_TIME: usize = 16;

const BEFORE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
                      Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                      <|im_start|>user\n";
const BEHIND: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
/// The default instruction that rerankers were trained with.
const INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// A request to rank documents.
#[derive(Debug)]
pub struct Documents {
    /// The model that scores the documents.
    pub model: Arc<LoadedModel>,
    /// LoRA adapters of the request, with their scales.
    pub adapters: Option<Arc<AppliedAdapters>>,
    /// The query that documents are compared with.
    pub query: String,
    /// The documents to score.
    pub documents: Vec<String>,
    /// Instruction that says what makes a document relevant; if empty, the models' default.
    pub instruction: String,
    /// Whether a classification head's outputs are returned without the logistic function.
    pub raw: bool,
    /// Number of best results to return; `None` returns all.
    pub top_n: Option<u32>,
    /// Context length in tokens, within the model's and the daemon's limits.
    pub n_ctx: u32,
    /// Priority of the request.
    pub class: Class,
}

/// A document's score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// Index of the document in the request.
    pub index: u32,
    /// Probability that the document is relevant: of "yes" against "no", or the logistic function
    /// of the classification head's output; or that output itself, if requested.
    pub score: f32,
}

/// The ranked documents, with token counts.
#[derive(Debug)]
pub struct Ranked {
    /// Scores of the documents, best first.
    pub ranks: Vec<Rank>,
    /// Number of tokens of all prompts together.
    pub tokens: u32,
}

/// Ids of the tokens "yes" and "no", whose probabilities make the score.
#[derive(Debug, Clone, Copy)]
struct Answers {
    yes: u32,
    no: u32,
}

/// Checks that the query is not empty, and the number of documents.
fn check(wanted: &Documents) -> Result<(), Failure> {
    if wanted.query.is_empty() {
        return Err(failure::invalid("query", "empty; say what is looked for"));
    }
    let n = wanted.documents.len();
    if n == 0 || n > DOCUMENTS_MAX {
        let why = format!("{n} of them; give from 1 to {DOCUMENTS_MAX}");
        return Err(failure::invalid("documents", &why));
    }
    match wanted.top_n {
        Some(0) => Err(failure::invalid("top_n", "0 is out of range: at least 1")),
        _ => Ok(()),
    }
}

/// The text before each document: the query, with the instruction if the model uses one.
fn head(judge: Judge, query: String, instruction: &str) -> Result<Arc<str>, Failure> {
    let bytes = query.len() + instruction.len();
    if bytes > HEAD_MAX_BYTES {
        let why = format!("{bytes} bytes with the instruction; at most {HEAD_MAX_BYTES}");
        return Err(failure::invalid("query", &why));
    }
    Ok(match judge {
        Judge::Answers(_) => format!("<Instruct>: {instruction}\n<Query>: {query}\n").into(),
        Judge::Class => query.into(),
    })
}

/// The `top_n` best documents; each comes with the number of tokens of its prompt.
fn ranked(all: Vec<(Rank, u32)>, top_n: Option<u32>) -> Ranked {
    let tokens = all.iter().map(|(_, tokens)| tokens).sum();
    let mut ranks: Vec<Rank> = all.into_iter().map(|(rank, _)| rank).collect();
    ranks.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.index.cmp(&b.index)));
    if let Some(n) = top_n {
        ranks.truncate(n as usize);
    }
    Ranked { ranks, tokens }
}

impl Service {
    /// Scores documents. Dropping the future cancels the remaining work.
    ///
    /// # Errors
    /// UNIMPLEMENTED for a model that is no reranker, INVALID_ARGUMENT for an empty query,
    /// too many documents and one that is too long; RESOURCE_EXHAUSTED above a limit of the client;
    /// errors of the engine.
    pub async fn rerank(
        &self,
        wanted: Documents,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Ranked, Failure> {
        let judge = judge(&wanted.model)?;
        check(&wanted)?;
        let Documents {
            model,
            adapters,
            query,
            documents,
            mut instruction,
            raw,
            top_n,
            n_ctx,
            class,
        } = wanted;
        if instruction.is_empty() {
            INSTRUCTION.clone_into(&mut instruction);
        }
        let head_bytes = query.len() + instruction.len();
        let head = head(judge, query, &instruction)?;
        let bytes = documents.iter().map(String::len).sum::<usize>() + head_bytes;
        let ticket = self.enter(&arrival, bytes).await?;
        let ticket = &*ticket;
        let times = &log.times_in(self);
        let room = match judge {
            Judge::Answers(_) => Room::for_prompt(self.lengths(n_ctx, &model)),
            Judge::Class => Room::for_embedding(self.lengths(n_ctx, &model)),
        };
        let judged = |(index, document): (u32, String)| {
            let (model, head) = (Arc::clone(&model), Arc::clone(&head));
            let adapters = adapters.clone();
            async move {
                let ids = match judge {
                    Judge::Answers(_) => {
                        let text = format!("{head}<Document>: {document}");
                        self.judged(&model, text, room, arrival).await?
                    }
                    Judge::Class => self.paired(&model, (head, document), room, arrival).await?,
                };
                let tokens = ids.len() as u32;
                ticket.take_prompt(tokens)?;
                let of_whom = OfWhom {
                    ticket,
                    class,
                    adapters: &adapters,
                    times,
                };
                let score = match judge {
                    Judge::Answers(answers) => {
                        let score = self.probability(model, ids, n_ctx, answers, of_whom, arrival);
                        arrival.limit(score).await?
                    }
                    Judge::Class => {
                        let logit = self.class_logit(model, ids, of_whom, arrival);
                        let logit = arrival.limit(logit).await?;
                        match raw {
                            true => logit,
                            false => 1.0 / (1.0 + (-logit).exp()),
                        }
                    }
                };
                Ok::<_, Failure>((Rank { index, score }, tokens))
            }
        };
        let each = stream::iter((0..).zip(documents)).map(judged);
        let all: Vec<(Rank, u32)> = each.buffered(AT_A_TIME).try_collect().await?;
        Ok(ranked(all, top_n))
    }

    /// The token ids of a document's prompt.
    async fn judged(
        &self,
        model: &Arc<LoadedModel>,
        text: String,
        room: Room,
        arrival: Arrival,
    ) -> Result<Vec<u32>, Failure> {
        let (model, bytes) = (Arc::clone(model), text.len());
        let work = move |_: &_| {
            let tokenizer = model.tokenizer();
            let fixed = |text: &str| {
                let ids = tokenizer.encode(text, false, true);
                ids.map_err(|error| failure::bug(&error.to_string()))
            };
            let (mut ids, behind) = (fixed(BEFORE)?, fixed(BEHIND)?);
            let said = Prompt::Text {
                text,
                add_special: false,
                parse_special: false,
            };
            let room = room.less(ids.len() + behind.len());
            ids.extend(
                said.encode("documents", &chat_model(&model), Some(room), None)?
                    .ids,
            );
            ids.extend(behind);
            Ok(ids)
        };
        let work = self.text.run(arrival.peer(), bytes, work);
        arrival.limit(work).await
    }

    async fn probability(
        &self,
        model: Arc<LoadedModel>,
        prompt: Vec<u32>,
        n_ctx: u32,
        answers: Answers,
        of_whom: OfWhom<'_>,
        arrival: Arrival,
    ) -> Result<f32, Failure> {
        let ticket = of_whom.ticket;
        let request = GenerateRequest {
            model,
            prompt,
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            max_tokens: Some(1),
            n_ctx: Some(n_ctx),
            stop: Vec::new(),
            decoding: Decoding {
                ignore_eos: true,
                logprobs: Some(0),
                watched: vec![answers.yes, answers.no],
                ..Decoding::default()
            },
            deadline: arrival.deadline,
            max_gap: Some(std::time::Duration::ZERO),
            asker: ticket.asker(of_whom.class),
            reuse: true,
            adapters: of_whom.adapters.clone(),
        };
        let times = Some(of_whom.times.clone());
        let events = self.engine.generate_timed(request, Vec::new(), times);
        let mut events = events.map_err(|error| ticket.failure(&error))?;
        match events.next().await {
            Some(GenerateEvent::Piece { scores, .. }) => {
                ticket.note_generated(1);
                let top = scores.into_iter().next().map(|score| score.top);
                let of = |id| top.iter().flatten().find(|(of, _)| *of == id);
                let (Some((_, yes)), Some((_, no))) = (of(answers.yes), of(answers.no)) else {
                    return Err(failure::bug("two tokens have no log-probability"));
                };
                Ok(1.0 / (1.0 + (no - yes).exp()))
            }
            Some(GenerateEvent::Failed(error)) => Err(ticket.failure(&error)),
            Some(GenerateEvent::Done(_)) | None => Err(failure::engine_gone()),
        }
    }
}

/// How a reranker's scores are computed.
#[derive(Debug, Clone, Copy)]
enum Judge {
    /// By the probability of "yes" against "no" as the next token.
    Answers(Answers),
    /// By the output of the classification head's only class.
    Class,
}

/// How a model scores documents; an error if it is not a known reranker.
fn judge(model: &LoadedModel) -> Result<Judge, Failure> {
    if model.model().purpose() != Purpose::Ranking {
        return answers(model).map(Judge::Answers);
    }
    match model.model().plan().logits_width() {
        1 => Ok(Judge::Class),
        n => {
            let message = format!(
                "'{}' has {n} classes; a reranker has one, whose output says how relevant a document is",
                model.name()
            );
            Err(failure::unsupported_field("model", &message))
        }
    }
}

/// The ids of a decoder's "yes" and "no" tokens; an error if it is not a known reranker.
fn answers(model: &LoadedModel) -> Result<Answers, Failure> {
    let (info, hparams) = (model.model().info(), model.model().hparams());
    let named = |name: &String| name.to_ascii_lowercase().contains("rerank");
    let is_known = info.architecture == "qwen3"
        && (hparams.ranks_yes_no || info.title.as_ref().is_some_and(named));
    let refuse = |why: &str| {
        let message = format!("'{}' {why}", model.name());
        Err(failure::unsupported_field("model", &message))
    };
    if !is_known {
        return refuse(
            "is no reranker that is known here: encoders with a classification of one class are, and those of \
             Qwen 3, by their classification labels (yes, no) or general.name",
        );
    }
    let tokenizer = model.tokenizer();
    match (single(tokenizer, "yes"), single(tokenizer, "no")) {
        (Some(yes), Some(no)) => Ok(Answers { yes, no }),
        _ => refuse("has no tokens \"yes\" and \"no\", which a reranker answers with"),
    }
}

/// The single token that a text is encoded to, if it is one.
fn single(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    match tokenizer.encode(text, false, false).ok()?.as_slice() {
        [only] => Some(*only),
        _ => None,
    }
}

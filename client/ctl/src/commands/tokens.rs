//! score, tokenize and detokenize.

use std::io::IsTerminal;

use rocmforge_client::proto::v1::{
    Priority, ScoreRequest, ScoreResponse, TokenIds, TokenizeRequest, score_request,
};
use serde_json::json;

use super::{Input, text_of};
use crate::cli::SpecialArgs;
use crate::context::Context;
use crate::human::{Align, Table, clean_lines, piece};

pub(super) async fn score(
    context: &mut Context,
    model: String,
    input: Input,
    top_n: Option<i32>,
    n_ctx: Option<i32>,
    special: &SpecialArgs,
) -> anyhow::Result<()> {
    let input = match input.text {
        Some(text) => score_request::Input::Text(text_of(text).await?),
        None => score_request::Input::Tokens(TokenIds { ids: input.ids }),
    };
    let request = ScoreRequest {
        model,
        input: Some(input),
        add_special: Some(!special.no_add_special),
        parse_special: Some(!special.no_parse_special),
        top_n,
        n_ctx,
        priority: Priority::Unspecified.into(),
    };
    let score = context.connect().await?.score(request).await?;
    context.output.answer(|| &score, || score_text(&score))
}

fn score_text(score: &ScoreResponse) -> String {
    let number = |logprob: f32| format!("{logprob:.4}");
    let mut table = Table::new([
        ("ID", Align::Right),
        ("LOGPROB", Align::Right),
        ("TOKEN", Align::Left),
        ("MOST PROBABLE", Align::Left),
    ]);
    for token in &score.tokens {
        let top = token.top.iter();
        let top: Vec<String> = top
            .map(|top| format!("{} {}", piece(&top.piece), number(top.logprob)))
            .collect();
        table.row([
            token.id.to_string(),
            token.logprob.map_or("-".to_owned(), number),
            piece(&token.piece),
            top.join(", "),
        ]);
    }
    let mut text = table.to_string();
    if score.tokens.iter().all(|token| token.top.is_empty()) {
        // A heading without a column under it.
        text = text.replacen("  MOST PROBABLE", "", 1);
        let heading = text.find('\n').unwrap_or(0);
        let trimmed = text[..heading].trim_end().len();
        text.replace_range(trimmed..heading, "");
    }
    let (sum, n, perplexity) = (score.sum_logprob, score.n_scored, score.perplexity);
    format!("{text}\nsum {sum:.4} over {n} tokens, perplexity {perplexity:.4}\n")
}

pub(super) async fn tokenize(
    context: &mut Context,
    model: String,
    text: String,
    special: &SpecialArgs,
) -> anyhow::Result<()> {
    let request = TokenizeRequest {
        model,
        text: text_of(text).await?,
        add_special: Some(!special.no_add_special),
        parse_special: Some(!special.no_parse_special),
    };
    let answer = context.connect().await?.tokenize(request).await?;
    context.output.answer(
        || &answer,
        || {
            let mut table = Table::new([("ID", Align::Right), ("TOKEN", Align::Left)]);
            for (id, bytes) in answer.ids.iter().zip(&answer.pieces) {
                table.row([id.to_string(), piece(bytes)]);
            }
            table.to_string()
        },
    )
}

pub(super) async fn detokenize(
    context: &mut Context,
    model: &str,
    ids: &[u32],
) -> anyhow::Result<()> {
    let text = context.connect().await?.detokenize(model, ids).await?;
    let shown = match std::io::stdout().is_terminal() {
        true => clean_lines(&text),
        false => text.clone(),
    };
    context.output.answer(|| json!({"text": text}), || shown)
}

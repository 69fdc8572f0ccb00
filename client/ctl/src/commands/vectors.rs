//! embed and rerank.

use rocmforge_client::proto::v1::{
    EmbedInput, EmbedRequest, EmbedResponse, RerankRequest, RerankResponse, TokenIds, embed_input,
};

use crate::context::Context;
use crate::human::{Align, Table, clean};

/// Values of a vector that a table shows.
const SHOWN: usize = 4;

pub(super) async fn embed(
    context: &mut Context,
    mut wanted: EmbedRequest,
    texts: Vec<String>,
    ids: Vec<u32>,
) -> anyhow::Result<()> {
    let input = |input| EmbedInput { input: Some(input) };
    wanted.inputs = match ids.is_empty() {
        true => texts
            .into_iter()
            .map(|text| input(embed_input::Input::Text(text)))
            .collect(),
        false => vec![input(embed_input::Input::Tokens(TokenIds { ids }))],
    };
    let answer = context.connect().await?.embed(wanted).await?;
    context.output.answer(|| &answer, || embedded(&answer))
}

fn embedded(answer: &EmbedResponse) -> String {
    let mut table = Table::new([
        ("TOKENS", Align::Right),
        ("ELEMENTS", Align::Right),
        ("VALUES", Align::Left),
    ]);
    for one in &answer.embeddings {
        let shown: Vec<String> = one
            .values
            .iter()
            .take(SHOWN)
            .map(|v| format!("{v:.4}"))
            .collect();
        let more = if one.values.len() > SHOWN { " ..." } else { "" };
        table.row([
            one.tokens.to_string(),
            one.values.len().to_string(),
            format!("{}{more}", shown.join(" ")),
        ]);
    }
    table.to_string()
}

pub(super) async fn rerank(context: &mut Context, wanted: RerankRequest) -> anyhow::Result<()> {
    let documents = wanted.documents.clone();
    let answer = context.connect().await?.rerank(wanted).await?;
    context
        .output
        .answer(|| &answer, || ranked(&answer, &documents))
}

fn ranked(answer: &RerankResponse, documents: &[String]) -> String {
    let mut table = Table::new([
        ("SCORE", Align::Right),
        ("INDEX", Align::Right),
        ("DOCUMENT", Align::Left),
    ]);
    for result in &answer.results {
        let document = documents.get(result.index as usize);
        table.row([
            format!("{:.4}", result.score),
            result.index.to_string(),
            document.map(|text| clean(text)).unwrap_or_default(),
        ]);
    }
    table.to_string()
}

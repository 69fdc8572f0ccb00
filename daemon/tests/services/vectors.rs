//! Embeddings and ranks, over gRPC and HTTP.

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::json;
use tonic::Code;

use crate::daemon::{Daemon, assert_status, fixtures};
use crate::http::client::{HttpDaemon, LLAMA};

const FILE: &str = "tiny-llama-Q4_K_M.gguf";

fn text(text: &str) -> v1::EmbedInput {
    v1::EmbedInput {
        input: Some(v1::embed_input::Input::Text(text.into())),
    }
}

fn wanted(inputs: &[v1::EmbedInput]) -> v1::EmbedRequest {
    v1::EmbedRequest {
        model: "m".into(),
        inputs: inputs.to_vec(),
        ..Default::default()
    }
}

async fn vectors(daemon: &Daemon, request: v1::EmbedRequest) -> v1::EmbedResponse {
    daemon
        .inference()
        .embed(request)
        .await
        .unwrap()
        .into_inner()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[tokio::test]
async fn vectors_are_those_of_http_and_of_each_pooling() {
    let http = HttpDaemon::start().await;
    let daemon = &http.daemon;
    daemon.load(FILE, "m").await.unwrap();
    let texts = ["The whale sang.", "42 - 30 = 12."];
    let inputs = texts.map(text);
    let found = vectors(daemon, wanted(&inputs)).await;
    let asked = json!({"model": LLAMA, "input": texts});
    let over_http = http.post("/v1/embeddings", &asked).await.json();
    assert_eq!(found.embeddings.len(), 2);
    for (i, one) in found.embeddings.iter().enumerate() {
        let expected = over_http["data"][i]["embedding"].as_array().unwrap();
        let expected: Vec<f32> = expected
            .iter()
            .map(|v| v.as_f64().unwrap() as f32)
            .collect();
        assert_eq!(one.values, expected);
        assert!((dot(&one.values, &one.values) - 1.0).abs() < 1e-5);
    }
    assert_eq!(found.pooling(), v1::Pooling::Last);
    let tokens: u32 = found.embeddings.iter().map(|one| one.tokens).sum();
    assert_eq!(found.prompt_tokens, tokens);
    let told = over_http["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(u64::from(tokens), told);

    // Token ids in place of a text.
    let request = v1::TokenizeRequest {
        model: "m".into(),
        text: texts[1].into(),
        ..Default::default()
    };
    let ids = daemon.inference().tokenize(request).await.unwrap();
    let ids = ids.into_inner().ids;
    let of_ids = |ids: Vec<u32>| v1::EmbedInput {
        input: Some(v1::embed_input::Input::Tokens(v1::TokenIds { ids })),
    };
    let by_ids = vectors(daemon, wanted(&[of_ids(ids.clone())])).await;
    assert_eq!(by_ids.embeddings[0].values, found.embeddings[1].values);

    // Not normalised, the first of two tokens is that token alone, and the mean the middle of both.
    let raw = |pooling: v1::Pooling, ids: &[u32]| {
        let request = v1::EmbedRequest {
            pooling: pooling.into(),
            normalise: Some(false),
            ..wanted(&[of_ids(ids.to_vec())])
        };
        async move {
            let found = vectors(daemon, request).await;
            assert_eq!(found.pooling(), pooling);
            found.embeddings.into_iter().next().unwrap().values
        }
    };
    let two = &ids[..2];
    let first = raw(v1::Pooling::First, two).await;
    assert_eq!(first, raw(v1::Pooling::Last, &two[..1]).await);
    let last = raw(v1::Pooling::Last, two).await;
    let mean = raw(v1::Pooling::Mean, two).await;
    for ((first, last), mean) in first.iter().zip(&last).zip(&mean) {
        assert!(((first + last) / 2.0 - mean).abs() < 1e-3);
    }
    assert!((dot(&last, &last) - 1.0).abs() > 1e-3);
    let short = v1::EmbedRequest {
        dimensions: Some(5),
        ..wanted(&inputs)
    };
    let short = vectors(daemon, short).await;
    assert_eq!(short.embeddings[0].values.len(), 5);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn what_cannot_be_embedded_is_refused_by_its_field() {
    let daemon = Daemon::start().await;
    daemon.load(FILE, "m").await.unwrap();
    let long = text(&"whale ".repeat(5000));
    let beyond = v1::EmbedInput {
        input: Some(v1::embed_input::Input::Tokens(v1::TokenIds {
            ids: vec![1 << 30],
        })),
    };
    let fine = || wanted(&[text("a")]);
    for (request, words) in [
        (wanted(&[]), &["inputs", "from 1 to 2048"][..]),
        (wanted(&vec![text("a"); 2049]), &["inputs", "2048"]),
        (wanted(&[v1::EmbedInput::default()]), &["inputs[0]"]),
        (wanted(&[text("a"), long]), &["inputs", "parts"]),
        (wanted(&[beyond]), &["inputs", "vocabulary"]),
        (
            v1::EmbedRequest {
                dimensions: Some(0),
                ..fine()
            },
            &["dimensions"],
        ),
        (
            v1::EmbedRequest {
                dimensions: Some(-1),
                ..fine()
            },
            &["dimensions"],
        ),
        (
            v1::EmbedRequest {
                pooling: 9,
                ..fine()
            },
            &["pooling"],
        ),
        (
            v1::EmbedRequest {
                n_ctx: Some(0),
                ..fine()
            },
            &["n_ctx"],
        ),
    ] {
        let result = daemon.inference().embed(request).await;
        assert_status(result, Code::InvalidArgument, words);
    }
    assert_eq!(daemon.stop().await, End::Drained);
}

/// A text value or an entry of a list: its length, and its bytes.
fn entry(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// A file that says it is a reranker, whose vocabulary has the two answers.
pub(crate) fn reranker(daemon: &Daemon) -> &'static str {
    let mut bytes = std::fs::read(fixtures().join("tiny-qwen3-Q8_0.gguf")).unwrap();
    for (from, to) in [
        ("Tiny Qwen3", "A Reranker"),
        ("-o", "no"),
        ("- o", "n o"),
        ("-s", "es"),
        ("- s", "e s"),
        ("dog", "yes"),
        ("d og", "y es"),
    ] {
        let (from, to) = (entry(from), entry(to));
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(&to);
    }
    std::fs::write(daemon.dir.path().join("ranks.gguf"), bytes).unwrap();
    "ranks.gguf"
}

/// The probability of "yes" against "no", from the scores of both behind the prompt.
async fn expected(daemon: &Daemon, query: &str, document: &str) -> f32 {
    let ids = async |text: &str, parse_special: bool| {
        let request = v1::TokenizeRequest {
            model: "r".into(),
            text: text.into(),
            add_special: Some(false),
            parse_special: Some(parse_special),
        };
        let answer = daemon.inference().tokenize(request).await.unwrap();
        answer.into_inner().ids
    };
    let mut prompt = ids(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
         provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n",
        true,
    )
    .await;
    let body = format!(
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n\
         <Document>: {document}"
    );
    prompt.extend(ids(&body, false).await);
    prompt.extend(
        ids(
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            true,
        )
        .await,
    );
    let logprob = async |word: &str| {
        let answer = ids(word, false).await;
        assert_eq!(answer.len(), 1, "{word}");
        let scored = prompt.iter().copied().chain(answer).collect();
        let request = v1::ScoreRequest {
            model: "r".into(),
            input: Some(v1::score_request::Input::Tokens(v1::TokenIds {
                ids: scored,
            })),
            ..Default::default()
        };
        let scored = daemon.inference().score(request).await.unwrap();
        let last = scored.into_inner().tokens.pop().unwrap();
        last.logprob.unwrap()
    };
    1.0 / (1.0 + (logprob("no").await - logprob("yes").await).exp())
}

#[tokio::test]
async fn ranks_are_the_probability_of_yes_against_no() {
    let http = HttpDaemon::start().await;
    let daemon = &http.daemon;
    daemon.load(reranker(daemon), "r").await.unwrap();
    let query = "a whale <|im_end|>";
    let documents = [
        "The whale sang.",
        "A fox.",
        "Omar found <|im_start|> a coin.",
    ];
    let request = v1::RerankRequest {
        model: "r".into(),
        query: query.into(),
        documents: documents.map(str::to_owned).to_vec(),
        ..Default::default()
    };
    let found = daemon.inference().rerank(request.clone()).await.unwrap();
    let found = found.into_inner();
    assert_eq!(found.results.len(), 3);
    let ordered = found
        .results
        .windows(2)
        .all(|two| two[0].score >= two[1].score);
    assert!(ordered, "{found:?}");
    for result in &found.results {
        let expected = expected(daemon, query, documents[result.index as usize]).await;
        let off = (result.score - expected).abs();
        assert!(off < 1e-4, "{result:?}, expected {expected}");
    }
    let mut best = request.clone();
    best.top_n = Some(1);
    let best = daemon.inference().rerank(best).await.unwrap().into_inner();
    assert_eq!(best.results.len(), 1);
    assert_eq!(best.results[0].index, found.results[0].index);

    let asked = json!({
        "model": "r", "query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]],
        "top_n": 2, "return_documents": true,
    });
    for route in ["/v1/rerank", "/v2/rerank", "/rerank", "/reranking"] {
        let reply = http.post(route, &asked).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let whole = reply.json();
        assert_eq!(whole["results"].as_array().unwrap().len(), 2);
        assert_eq!(whole["usage"]["prompt_tokens"], found.prompt_tokens);
        for (told, result) in whole["results"]
            .as_array()
            .unwrap()
            .iter()
            .zip(&found.results)
        {
            assert_eq!(told["index"], result.index);
            let score = told["relevance_score"].as_f64().unwrap();
            assert!((score - f64::from(result.score)).abs() < 1e-4);
            assert_eq!(told["document"]["text"], documents[result.index as usize]);
        }
    }
    // Another instruction is another question.
    let mut other = request;
    other.instruction = "Find the document about a coin".into();
    let other = daemon.inference().rerank(other).await.unwrap().into_inner();
    assert_ne!(other.prompt_tokens, found.prompt_tokens);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn what_cannot_be_ranked_is_refused_by_its_name() {
    let http = HttpDaemon::start().await;
    let daemon = &http.daemon;
    daemon.load(reranker(daemon), "r").await.unwrap();
    daemon.load("tiny-qwen3-Q8_0.gguf", "q").await.unwrap();
    let fine = v1::RerankRequest {
        model: "r".into(),
        query: "q".into(),
        documents: vec!["d".into()],
        ..Default::default()
    };
    let with = |change: &dyn Fn(&mut v1::RerankRequest)| {
        let mut request = fine.clone();
        change(&mut request);
        request
    };
    for (request, word) in [
        (with(&|r| r.query.clear()), "query"),
        (with(&|r| r.documents.clear()), "documents"),
        (with(&|r| r.documents = vec![String::new(); 1025]), "1024"),
        (
            with(&|r| r.documents[0] = "whale ".repeat(3000)),
            "documents",
        ),
        (with(&|r| r.top_n = Some(0)), "top_n"),
    ] {
        let result = daemon.inference().rerank(request).await;
        assert_status(result, Code::InvalidArgument, &[word]);
    }
    let result = daemon
        .inference()
        .rerank(with(&|r| r.model = "q".into()))
        .await;
    assert_status(result, Code::Unimplemented, &["'q' is no reranker"]);
    for (asked, word) in [
        (
            json!({"model": "r", "query": "q", "documents": [5]}),
            "documents[0]",
        ),
        (
            json!({"model": "r", "query": "q", "documents": ["d"], "max_tokens_per_doc": 5}),
            "max_tokens_per_doc",
        ),
        (
            json!({"model": LLAMA, "query": "q", "documents": ["d"]}),
            "no reranker",
        ),
    ] {
        let reply = http.post("/v1/rerank", &asked).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.text.contains(word), "{reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

//! Files whose metadata is forged: whatever it says, loading answers with a
//! tokenizer or an error, and a tokenizer encodes and decodes.

use proptest::prelude::*;
use rocmforge_gguf::Gguf;
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_tokenizer::{Chat, ChatTemplate, Message, Renderer, Tokenizer};

/// Texts that vocabularies are made of, and some that they are not.
fn token() -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "a",
        "b",
        "ab",
        "Ġ",
        "Ġa",
        "▁",
        "▁a",
        "▁▁",
        "\n",
        "\n\n",
        "<0x61>",
        "<0xFF>",
        "<0xZZ>",
        "<s>",
        "</s>",
        "<unk>",
        "<|im_end|>",
        "<|im_start|>",
        "<tool>",
        "</",
        "é",
        "Ã",
        "©",
        "",
        "aa",
        "aaaa",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|tool_response>",
    ])
    .prop_map(str::to_owned);
    prop_oneof![8 => known, 1 => "[ab▁Ġ<>|é]{0,6}", 1 => any::<String>()]
}

fn merge() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (token(), token()).prop_map(|(left, right)| format!("{left} {right}")),
        1 => token(),
    ]
}

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => token(),
        1 => any::<String>(),
        1 => prop::sample::select(vec![" ", "  ", "\t", "123", "4567", "中文", "\u{301}"])
            .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

#[derive(Debug, Clone)]
struct Forged {
    model: &'static str,
    pre: &'static str,
    tokens: Vec<String>,
    unique: bool,
    types: Option<Vec<i32>>,
    scores: Option<Vec<f32>>,
    merges: Option<Vec<String>>,
    ids: Vec<Option<u32>>,
    add_bos: Option<bool>,
}

fn forged() -> impl Strategy<Value = Forged> {
    let pre = prop::sample::select(vec![
        "llama-bpe",
        "qwen2",
        "gpt-2",
        "tekken",
        "gpt-4o",
        "kimi-k2",
        "deepseek-llm",
        "deepseek-v3",
        "bloom",
        "viking",
        "superbpe",
        "gemma4",
        "laguna",
        "minicpm5",
        "default",
        "falcon",
        "klingon",
    ]);
    let model = prop::sample::select(vec!["gpt2", "llama", "gemma4", "bert"]);
    (
        model,
        pre,
        prop::collection::vec(token(), 0..40),
        prop::bool::weighted(0.9),
        prop::option::weighted(0.9, prop::collection::vec(-1..8i32, 40)),
        prop::option::weighted(
            0.8,
            prop::collection::vec(prop_oneof![8 => -9.0..9.0f32, 1 => any::<f32>()], 40),
        ),
        prop::option::weighted(0.9, prop::collection::vec(merge(), 0..12)),
        prop::collection::vec(
            prop::option::weighted(0.4, prop_oneof![9 => 0..40u32, 1 => any::<u32>()]),
            4,
        ),
        any::<Option<bool>>(),
    )
        .prop_map(
            |(model, pre, tokens, unique, types, scores, merges, ids, add_bos)| Forged {
                model,
                pre,
                tokens,
                unique,
                types,
                scores,
                merges,
                ids,
                add_bos,
            },
        )
}

impl Forged {
    fn file(mut self) -> Gguf {
        if self.unique {
            // Most vocabularies have no token twice; else few would load.
            let mut seen = std::collections::HashSet::new();
            self.tokens.retain(|token| seen.insert(token.clone()));
            let known = |merge: &String| {
                merge.split_once(' ').is_some_and(|(left, right)| {
                    !left.starts_with('<')
                        && [left, right, &format!("{left}{right}")]
                            .iter()
                            .all(|part| seen.contains(*part))
                })
            };
            if let Some(merges) = &mut self.merges {
                merges.retain(known);
            }
            let n = self.tokens.len();
            self.types.iter_mut().for_each(|types| {
                types.truncate(n);
                types.iter_mut().for_each(|t| *t = (*t).clamp(0, 6));
                // Control tokens are those that no merge and no byte makes.
                for (kind, token) in types.iter_mut().zip(&self.tokens) {
                    if matches!(*kind, 2 | 3) && !token.starts_with("<|") {
                        *kind = 1;
                    }
                }
            });
            self.scores.iter_mut().for_each(|scores| scores.truncate(n));
            self.ids
                .iter_mut()
                .for_each(|id| *id = id.filter(|&id| (id as usize) < n));
        }
        let mut writer = GgufWriter::new()
            .key("tokenizer.ggml.model", self.model)
            .key("tokenizer.ggml.pre", self.pre)
            .key(
                "tokenizer.ggml.tokens",
                self.tokens
                    .iter()
                    .map(String::as_str)
                    .collect::<MetaValue>(),
            );
        if let Some(types) = &self.types {
            writer = writer.key("tokenizer.ggml.token_type", types.as_slice());
        }
        if let Some(scores) = &self.scores {
            writer = writer.key("tokenizer.ggml.scores", scores.as_slice());
        }
        if let Some(merges) = &self.merges {
            let merges: MetaValue = merges.iter().map(String::as_str).collect();
            writer = writer.key("tokenizer.ggml.merges", merges);
        }
        for (key, id) in ["bos", "eos", "unknown", "eot"].iter().zip(&self.ids) {
            if let Some(id) = id {
                writer = writer.key(&format!("tokenizer.ggml.{key}_token_id"), *id);
            }
        }
        if let Some(add) = self.add_bos {
            writer = writer.key("tokenizer.ggml.add_bos_token", add);
        }
        let bytes = writer.to_bytes();
        Gguf::parse(&bytes, bytes.len() as u64).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn forged_metadata_gives_a_tokenizer_or_an_error(forged in forged(), text in text(), special in any::<[bool; 2]>()) {
        let unique = forged.unique;
        // An id that no token of the file has is left out of it.
        let distinct: std::collections::HashSet<_> = forged.tokens.iter().collect();
        let n = if unique { distinct.len() } else { forged.tokens.len() };
        let unknown = forged.ids[2].filter(|&id| (id as usize) < n).or(Some(0));
        let tokenizer = match Tokenizer::from_gguf(&forged.file()) {
            Ok(tokenizer) => tokenizer,
            Err(error) => {
                prop_assert!(!error.to_string().is_empty());
                return Ok(());
            }
        };
        if let Ok(ids) = tokenizer.encode(&text, special[0], special[1]) {
            let n_vocab = tokenizer.n_vocab();
            prop_assert!(ids.iter().all(|&id| (id as usize) < n_vocab));
            // No more than a token a byte, but for those that are added.
            prop_assert!(ids.len() <= 2 * text.len() + 4, "{} of {text:?}", ids.len());
            tokenizer.decode(&ids).unwrap();
            let again = tokenizer.encode(&text, special[0], special[1]).unwrap();
            prop_assert_eq!(again, ids);
        }
        // As in a chat: no name in a message is a control token.
        let template = ChatTemplate::new("{{ messages[0].content }}", "", "").unwrap();
        let chat = Chat::new(vec![Message::new("user", text.as_str())]);
        let rendered = Renderer::in_process().render(&template, Some(&tokenizer), &chat, &|| false).unwrap();
        prop_assert_eq!(rendered.text(), text.as_str());
        if let Ok(ids) = tokenizer.encode_rendered(usize::MAX, &rendered) {
            let mut said = ids.as_slice();
            if let Some((first, rest)) = said.split_first() && Some(*first) == tokenizer.bos() {
                said = rest;
            }
            let named = |&id: &u32| {
                // The unknown token stands for what has none.
                Some(id) != unknown && tokenizer.token_bytes(id).is_some_and(|name| name.starts_with(b"<|"))
            };
            let control = said.iter().any(|id| tokenizer.is_special(*id) && named(id));
            prop_assert!(!unique || !control, "{ids:?}");
        }
    }
}

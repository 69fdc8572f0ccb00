//! Request fields for the chat template besides messages and tools, as in vLLM and llama-server.

use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_tokenizer::Ending;
use serde::Deserialize;
use serde_json::{Map, Value, json};

const GENERATION_PROMPT: &str = "add_generation_prompt";

/// Fields that the template sees. `chat_template_kwargs` may contain `documents` and
/// `add_generation_prompt`, too; the separate fields have priority.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct WireTemplate {
    reasoning_effort: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    documents: Option<Vec<Value>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

impl WireTemplate {
    /// Additional variables for the template; `without_thoughts` turns reasoning off in any case.
    pub(super) fn kwargs(&mut self, without_thoughts: bool) -> Map<String, Value> {
        let mut kwargs = self.chat_template_kwargs.take().unwrap_or_default();
        if without_thoughts {
            kwargs.insert("enable_thinking".to_owned(), false.into());
        }
        if let Some(effort) = self.reasoning_effort.take() {
            if effort == "none" {
                kwargs.entry("enable_thinking").or_insert(false.into());
            } else {
                kwargs.entry("reasoning_effort").or_insert(effort.into());
            }
        }
        kwargs
    }

    /// The documents of the request. Templates expect objects: a plain text becomes an object with
    /// the member `text`.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a document that is neither an object nor a text.
    pub(super) fn documents(&mut self) -> Result<Vec<Value>, Failure> {
        let each = self.documents.take().unwrap_or_default();
        let each = each
            .into_iter()
            .enumerate()
            .map(|(at, document)| match document {
                Value::Object(_) => Ok(document),
                Value::String(text) => Ok(json!({"text": text})),
                _ => Err(failure::invalid(
                    &format!("documents[{at}]"),
                    "give an object, such as {\"title\": \"...\", \"text\": \"...\"}, or a text",
                )),
            });
        each.collect()
    }

    /// How the rendered conversation ends. Call it before [`kwargs`](Self::kwargs), which takes the
    /// fields.
    pub(super) fn ending(&self, violations: &mut Violations) -> Ending {
        let in_kwargs = || {
            let kwargs = self.chat_template_kwargs.as_ref()?;
            kwargs.get(GENERATION_PROMPT)?.as_bool()
        };
        let opens = self.add_generation_prompt.or_else(in_kwargs);
        match (self.continue_final_message, opens) {
            (Some(true), Some(true)) => {
                violations.add(
                    GENERATION_PROMPT,
                    "the last message cannot be gone on with behind the opening of a new one; set \
                     continue_final_message or add_generation_prompt, not both",
                );
                Ending::Continue
            }
            (Some(true), _) => Ending::Continue,
            (_, Some(false)) => Ending::Closed,
            _ => Ending::Answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> WireTemplate {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_end_of_a_prompt_is_as_it_was_asked_for() {
        for (asked, expected) in [
            (json!({}), Ending::Answer),
            (json!({"add_generation_prompt": true}), Ending::Answer),
            (json!({"add_generation_prompt": false}), Ending::Closed),
            (
                json!({"chat_template_kwargs": {"add_generation_prompt": false}}),
                Ending::Closed,
            ),
            (json!({"continue_final_message": true}), Ending::Continue),
            (
                json!({"continue_final_message": true, "add_generation_prompt": false}),
                Ending::Continue,
            ),
        ] {
            let mut violations = Violations::default();
            let ending = read(asked.clone()).ending(&mut violations);
            assert_eq!(ending, expected, "{asked}");
            violations.result().unwrap();
        }
        let mut violations = Violations::default();
        let both = json!({"continue_final_message": true, "add_generation_prompt": true});
        read(both).ending(&mut violations);
        let failure = violations.result().unwrap_err();
        assert_eq!(failure.fields()[0].0, "add_generation_prompt");
    }

    #[test]
    fn documents_are_objects_or_texts() {
        let documents = json!([{"title": "T", "text": "x"}, "y"]);
        assert_eq!(
            read(json!({"documents": documents})).documents().unwrap(),
            [json!({"title": "T", "text": "x"}), json!({"text": "y"})]
        );
        let failure = read(json!({"documents": ["x", 5]})).documents();
        assert_eq!(failure.unwrap_err().fields()[0].0, "documents[1]");
    }

    #[test]
    fn effort_and_switches_are_variables() {
        let mut asked = read(json!({
            "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": true, "a": 1},
        }));
        assert_eq!(
            Value::Object(asked.clone().kwargs(false)),
            json!({"enable_thinking": true, "a": 1, "reasoning_effort": "high"})
        );
        assert_eq!(asked.kwargs(true)["enable_thinking"], false);
        let off = read(json!({"reasoning_effort": "none"})).kwargs(false);
        assert_eq!(Value::Object(off), json!({"enable_thinking": false}));
    }
}

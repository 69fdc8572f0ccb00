//! The purpose of an embedding, such as `query` or `document` (`input_type`): the prompt that the
//! configuration declares for it is put before the text. Without an `input_type` no prompt is used.

use std::collections::BTreeMap;

use rocmforge_chat::prompt::Prompt;
use rocmforge_failure::{self as failure, Failure};

/// The prompts of a model, by the purpose of the embedding.
pub type Prompts = BTreeMap<String, String>;

/// Maximum number of prompts of a model.
const PROMPTS_MAX: usize = 32;
/// Maximum length of a prompt's name in bytes.
const NAME_MAX: usize = 64;
/// Maximum length of a prompt in bytes; it is put before each text of a request.
const PROMPT_MAX: usize = 4096;

/// Synonyms of `input_type`, as Cohere, Jina, Voyage and others name them.
const SAME: [&[&str]; 2] = [
    &["query", "search_query", "retrieval.query"],
    &[
        "document",
        "passage",
        "search_document",
        "retrieval.passage",
    ],
];

/// Checks the prompts that the configuration declares for a model.
///
/// # Errors
/// A message that says what is allowed.
pub fn check(prompts: &Prompts) -> Result<(), String> {
    if prompts.len() > PROMPTS_MAX {
        let n = prompts.len();
        return Err(format!("{n} of them; at most {PROMPTS_MAX}"));
    }
    for (name, prompt) in prompts {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(format!("{name:?} is no name: 1 to {NAME_MAX} bytes"));
        }
        if prompt.len() > PROMPT_MAX {
            let n = prompt.len();
            return Err(format!("'{name}' has {n} bytes; at most {PROMPT_MAX}"));
        }
    }
    Ok(())
}

/// The prompt with this name, or with a synonym of it.
fn find<'a>(prompts: &'a Prompts, name: &str) -> Option<&'a String> {
    prompts.get(name).or_else(|| {
        let same = SAME.iter().find(|same| same.contains(&name))?;
        same.iter().find_map(|name| prompts.get(*name))
    })
}

/// Puts the prompt with this name before each text of a request for `model`. `field` names the
/// texts in error messages.
///
/// # Errors
/// INVALID_ARGUMENT if the model has no such prompt, and for texts given as token ids.
pub(super) fn put_before(
    texts: &mut [Prompt],
    prompts: &Prompts,
    (name, model, field): (&str, &str, &'static str),
) -> Result<(), Failure> {
    let Some(prompt) = find(prompts, name) else {
        return Err(failure::invalid(
            "input_type",
            &unknown(prompts, name, model),
        ));
    };
    if prompt.is_empty() {
        return Ok(());
    }
    for text in texts {
        let Prompt::Text { text, .. } = text else {
            let why = "token ids take no prompt: give texts, or leave out input_type";
            return Err(failure::invalid(field, why));
        };
        text.insert_str(0, prompt);
    }
    Ok(())
}

fn unknown(prompts: &Prompts, name: &str, model: &str) -> String {
    let name: String = name.chars().take(NAME_MAX).collect();
    let has = match prompts.is_empty() {
        true => "no prompts".to_owned(),
        false => {
            let names: Vec<&str> = prompts.keys().map(String::as_str).collect();
            format!("prompts for {}", names.join(", "))
        }
    };
    format!(
        "{name:?} is unknown: '{model}' has {has}; leave input_type out, or declare the text that is to stand before \
         such inputs in the model's [[model]] section: prompts = {{ {name:?} = \"...\" }}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(of: &[(&str, &str)]) -> Prompts {
        let pairs = of.iter();
        pairs
            .map(|(name, prompt)| ((*name).to_owned(), (*prompt).to_owned()))
            .collect()
    }

    fn text(text: &str) -> Prompt {
        Prompt::Text {
            text: text.to_owned(),
            add_special: true,
            parse_special: false,
        }
    }

    fn with(
        name: &str,
        declared: &Prompts,
        mut texts: Vec<Prompt>,
    ) -> Result<Vec<String>, Failure> {
        put_before(&mut texts, declared, (name, "m", "input"))?;
        let texts = texts.into_iter().map(|prompt| match prompt {
            Prompt::Text { text, .. } => text,
            other => format!("{other:?}"),
        });
        Ok(texts.collect())
    }

    #[test]
    fn a_prompt_is_found_by_its_name_or_by_what_others_call_the_same() {
        let declared = prompts(&[("query", "query: "), ("passage", "passage: "), ("bare", "")]);
        for name in ["query", "search_query", "retrieval.query"] {
            assert_eq!(
                with(name, &declared, vec![text("a")]).unwrap(),
                ["query: a"]
            );
        }
        for name in [
            "passage",
            "document",
            "search_document",
            "retrieval.passage",
        ] {
            let found = with(name, &declared, vec![text("a"), text("")]).unwrap();
            assert_eq!(found, ["passage: a", "passage: "]);
        }
        // A name of its own is looked for first.
        let both = prompts(&[("query", "q "), ("search_query", "s ")]);
        assert_eq!(
            with("search_query", &both, vec![text("a")]).unwrap(),
            ["s a"]
        );
        assert_eq!(with("bare", &declared, vec![text("a")]).unwrap(), ["a"]);
        assert!(with("bare", &declared, vec![Prompt::Ids(vec![1])]).is_ok());
    }

    #[test]
    fn what_is_not_declared_and_ids_are_refused() {
        let declared = prompts(&[("query", "query: ")]);
        for (name, declared, mentions) in [
            ("clustering", &declared, "prompts for query;"),
            ("document", &Prompts::new(), "has no prompts"),
        ] {
            let failure = with(name, declared, vec![text("a")]).unwrap_err();
            let (field, message) = &failure.fields()[0];
            assert_eq!(field, "input_type");
            assert!(message.contains(mentions), "{message}");
            assert!(message.contains("[[model]]"), "{message}");
        }
        let failure = with("query", &declared, vec![text("a"), Prompt::Ids(vec![1])]).unwrap_err();
        assert_eq!(failure.fields()[0].0, "input");
    }

    #[test]
    fn prompts_have_bounds() {
        assert_eq!(
            check(&prompts(&[("query", ""), ("document", "d: ")])),
            Ok(())
        );
        let many = (0..=PROMPTS_MAX).map(|i| (i.to_string(), String::new()));
        assert!(check(&many.collect()).unwrap_err().contains("at most 32"));
        let long = "x".repeat(PROMPT_MAX + 1);
        assert!(
            check(&prompts(&[("a", &long)]))
                .unwrap_err()
                .contains("'a' has 4097")
        );
        assert!(check(&prompts(&[("", "a")])).is_err());
        assert!(check(&prompts(&[(&long[..NAME_MAX + 1], "a")])).is_err());
    }
}

//! Fill-in-the-middle: makes a prompt of the text before and after a gap, in the format that a
//! model was trained with.
//!
//! ```text
//! [repository] [file name text]... <prefix> what is before <suffix> what is behind <middle>
//! ```
//!
//! The vocabulary determines which tokens stand for `<prefix>` and so on.

use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::Tokenizer;

use crate::model::ChatModel;

/// The names of the tokens before the prefix, the suffix and the middle, by family: Qwen and Gemma,
/// StarCoder and Granite, SantaCoder, DeepSeek, Code Llama, GLM.
const NAMES: [[&str; 3]; 6] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["<PRE>", "<SUF>", "<MID>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
];
/// Names of the token before the name of a file.
const FILE: [&str; 2] = ["<|file_sep|>", "<file_sep>"];
/// Names of the token before the name of a repository.
const REPOSITORY: [&str; 2] = ["<|repo_name|>", "<repo_name>"];
/// Text before other files, if the vocabulary has no token for that.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

/// A gap to fill, with the text around it.
#[derive(Debug, Default)]
pub struct Gap {
    /// Text before the gap.
    pub prefix: String,
    /// Text after the gap.
    pub suffix: String,
    /// Context from other files: name and text.
    pub others: Vec<(String, String)>,
}

impl Gap {
    /// Size of all texts in bytes.
    pub fn bytes(&self) -> usize {
        let others = self
            .others
            .iter()
            .map(|(name, text)| name.len() + text.len());
        self.prefix.len() + self.suffix.len() + others.sum::<usize>()
    }

    /// The prompt's token ids. CPU-bound: call it on a blocking thread. `field` names the suffix in
    /// error messages.
    ///
    /// # Errors
    /// UNIMPLEMENTED if the vocabulary has no fill-in-the-middle tokens, and
    /// INVALID_ARGUMENT for a text that cannot be tokenized.
    pub fn encode(&self, field: &str, model: &ChatModel<'_>) -> Result<Vec<u32>, Failure> {
        let tokenizer = model.tokenizer;
        let text = |text: &str| {
            let ids = tokenizer.encode(text, false, false);
            ids.map_err(|error| failure::invalid(field, &error.to_string()))
        };
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        let built = self.built(&|name| named(tokenizer, name), &text, bos)?;
        built.ok_or_else(|| {
            failure::unsupported_field(
                field,
                &format!(
                    "the vocabulary of model '{}' has no tokens that stand around a gap (as <|fim_prefix|>); leave it \
                     unset, or ask a model that was trained for that",
                    model.name
                ),
            )
        })
    }

    /// Builds the ids from functions that give a named token and the tokens of a text; `None` if
    /// the vocabulary has no fill-in-the-middle tokens.
    fn built(
        &self,
        named: &dyn Fn(&str) -> Option<u32>,
        text: &dyn Fn(&str) -> Result<Vec<u32>, Failure>,
        bos: Option<u32>,
    ) -> Result<Option<Vec<u32>>, Failure> {
        let around = NAMES.iter().find_map(|[prefix, suffix, middle]| {
            Some((named(prefix)?, named(suffix)?, named(middle)?))
        });
        let Some((prefix, suffix, middle)) = around else {
            return Ok(None);
        };
        let any = |names: &[&str]| names.iter().find_map(|name| named(name));
        let mut ids: Vec<u32> = bos.into_iter().collect();
        if !self.others.is_empty()
            && let Some(repository) = any(&REPOSITORY)
        {
            ids.push(repository);
            ids.extend(text("repository\n")?);
        }
        for (name, said) in &self.others {
            match any(&FILE) {
                Some(file) => {
                    ids.push(file);
                    ids.extend(text(&format!("{name}\n"))?);
                }
                None => ids.extend(text(SNIPPET)?),
            }
            ids.extend(text(said)?);
        }
        if !self.others.is_empty()
            && let Some(file) = any(&FILE)
        {
            ids.push(file);
            ids.extend(text("filename\n")?);
        }
        ids.push(prefix);
        ids.extend(text(&self.prefix)?);
        ids.push(suffix);
        ids.extend(text(&self.suffix)?);
        ids.push(middle);
        Ok(Some(ids))
    }
}

/// The control token of this name, if the vocabulary has it.
pub(crate) fn named(tokenizer: &Tokenizer, name: &str) -> Option<u32> {
    let ids = tokenizer.encode(name, false, true).ok()?;
    match ids[..] {
        [id] if tokenizer.is_special(id) => Some(id),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts as the numbers of their characters, and tokens by their places in a list.
    fn built(gap: &Gap, names: &[&str], bos: Option<u32>) -> Option<Vec<u32>> {
        let named = |name: &str| {
            let at = names.iter().position(|known| *known == name)?;
            Some(1000 + at as u32)
        };
        let text = |text: &str| Ok(text.chars().map(u32::from).collect());
        gap.built(&named, &text, bos).unwrap()
    }

    fn gap(others: &[(&str, &str)]) -> Gap {
        let own = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
        Gap {
            prefix: "a".to_owned(),
            suffix: "b".to_owned(),
            others: others.iter().map(own).collect(),
        }
    }

    #[test]
    fn what_is_around_a_gap_stands_behind_its_tokens() {
        let (a, b) = (u32::from('a'), u32::from('b'));
        for [prefix, suffix, middle] in NAMES {
            let names = [prefix, suffix, middle];
            let ids = built(&gap(&[]), &names, Some(1));
            assert_eq!(ids.unwrap(), [1, 1000, a, 1001, b, 1002]);
        }
        assert_eq!(built(&gap(&[]), &NAMES[0][..2], None), None);
        // Those of two families are none of one.
        assert_eq!(
            built(&gap(&[]), &["<PRE>", "<fim_suffix>", "<MID>"], None),
            None
        );
    }

    #[test]
    fn other_files_stand_before_it() {
        let chars = |text: &str| text.chars().map(u32::from).collect::<Vec<_>>();
        let other = gap(&[("f", "x")]);
        let mut names = NAMES[0].to_vec();
        let expected = [chars(SNIPPET), chars("x"), vec![1000]].concat();
        assert!(built(&other, &names, None).unwrap().starts_with(&expected));
        names.extend(["<|file_sep|>", "<|repo_name|>"]);
        let begin = [
            vec![1004],
            chars("repository\n"),
            vec![1003],
            chars("f\nx"),
            vec![1003],
            chars("filename\n"),
            vec![1000],
        ];
        assert!(
            built(&other, &names, None)
                .unwrap()
                .starts_with(&begin.concat())
        );
    }
}

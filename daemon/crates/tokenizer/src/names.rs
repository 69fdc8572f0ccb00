//! Tokens that are known by their names, whatever a file's metadata says of them.

use crate::texts::Texts;
use crate::vocab::{SPM_SPACE, TokenType};

/// Tokens that end a generation by their name. Some files mark them as plain
/// tokens; they, and those that fill gaps, are control tokens all the same.
pub(crate) fn named_ends(texts: &Texts, types: &mut [TokenType]) -> Vec<u32> {
    let mut ends = Vec::new();
    let mut named = Named::default();
    for (id, (text, token_type)) in texts.iter().zip(types.iter_mut()).enumerate() {
        // Names are bracketed; look at few bytes of the others.
        let bracketed = matches!(text.first(), Some(b'<' | b'[' | b'_' | 0xE2));
        if text.len() < 4 || !bracketed {
            continue;
        }
        let (ends_text, fills) = (is_end_name(text), is_fim_name(text));
        if !ends_text && !fills {
            continue;
        }
        let id = id as u32;
        match text {
            b"<|return|>" => named.returns = true,
            b"<|call|>" | b"<|calls|>" => named.calls = true,
            b"<|flush|>" => named.flush = true,
            b"<|tool_response>" => named.tool_response = true,
            b"<|end|>" => named.end = Some(id),
            b"</s>" => named.sentence_end = Some(id),
            _ => {}
        }
        let plain = matches!(token_type, TokenType::Normal | TokenType::UserDefined);
        if plain && text != b"</s>" {
            *token_type = TokenType::Control;
        }
        if ends_text {
            ends.push(id);
        }
    }
    // In these formats <|end|> closes one message of several in an answer.
    if named.calls && (named.returns || named.flush) {
        ends.retain(|&id| Some(id) != named.end);
    }
    match named.sentence_end {
        // Beside this name </s> is struck-out text of HTML.
        Some(html) if named.tool_response => ends.retain(|&id| id != html),
        Some(end) => types[end as usize] = TokenType::Control,
        None => {}
    }
    ends
}

/// Names that tell the format of a vocabulary.
#[derive(Default)]
struct Named {
    returns: bool,
    calls: bool,
    flush: bool,
    tool_response: bool,
    end: Option<u32>,
    sentence_end: Option<u32>,
}

/// Names of tokens that end a generation, whatever the metadata says.
fn is_end_name(text: &[u8]) -> bool {
    matches!(
        text,
        b"<|eot_id|>"
            | b"<|im_end|>"
            | b"<|end|>"
            | b"<|return|>"
            | b"<|call|>"
            | b"<|eom_id|>"
            | b"<end_of_turn>"
            | b"<|endoftext|>"
            | b"<|end_of_text|>"
            | b"<end_of_utterance>"
            | b"<EOT>"
            | b"_<EOT>"
            | b"[EOT]"
            | b"<|fim_pad|>"
            | b"<|repo_name|>"
            | b"<|file_sep|>"
            | b"</s>"
            | b"<eos>"
            | b"[EOS]"
            | b"<turn|>"
            | b"<|tool_response>"
            | b"<|flush|>"
            | b"<|calls|>"
            | b"[e~["
            | b"<fim_pad>"
            | b"<fim-pad>"
            | b"<PAD>"
            | b"<|fim_repo|>"
            | b"<fim-repo>"
            | b"<REPO>"
            | b"<reponame>"
    ) || text == "<｜end▁of▁sentence｜>".as_bytes()
}

/// Names of tokens that open the parts of a gap to be filled. Some files mark
/// them as user-defined, which would let any text name them.
fn is_fim_name(text: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(text) else {
        return false;
    };
    matches!(
        text.trim_start_matches(SPM_SPACE),
        "<|fim_prefix|>"
            | "<|fim_suffix|>"
            | "<|fim_middle|>"
            | "<fim-prefix>"
            | "<fim-suffix>"
            | "<fim-middle>"
            | "<fim_prefix>"
            | "<fim_suffix>"
            | "<fim_middle>"
            | "<｜fim▁begin｜>"
            | "<｜fim▁hole｜>"
            | "<｜fim▁end｜>"
            | "<PRE>"
            | "<SUF>"
            | "<MID>"
            | "<|code_prefix|>"
            | "<|code_suffix|>"
            | "<|code_middle|>"
    )
}

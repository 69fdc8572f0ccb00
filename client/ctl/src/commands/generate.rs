//! generate, and the printing of a generation that chat and run share.

use std::io::{IsTerminal, Write};

use anyhow::Context as _;
use futures_util::StreamExt;
use rocmforge_client::GenerateEvents;
use rocmforge_client::proto::Word as _;
use rocmforge_client::proto::v1::{
    ChatMessage, FinishReason, GenerateDone, GenerateRequest, TokenIds, ToolCall, generate_event,
    generate_request,
};
use serde::Serialize;

use super::{Input, text_of};
use crate::cli::SpecialArgs;
use crate::context::Context;
use crate::human::{clean_lines, size};
use crate::output::Output;
use crate::sampling::SamplingArgs;

/// Maximum number of answers that a daemon gives.
const CHOICES_MAX: usize = 8;

pub(super) async fn generate(
    context: &mut Context,
    model: String,
    input: Input,
    special: &SpecialArgs,
    sampling: &SamplingArgs,
) -> anyhow::Result<()> {
    let prompt = match input.text {
        Some(text) => generate_request::Prompt::Text(text_of(text).await?),
        None => generate_request::Prompt::Tokens(TokenIds { ids: input.ids }),
    };
    let request = GenerateRequest {
        model,
        prompt: Some(prompt),
        add_special: Some(!special.no_add_special),
        parse_special: Some(!special.no_parse_special),
        sampling: Some(sampling.params()),
        n_ctx: sampling.n_ctx,
        logprobs: sampling.logprobs,
        priority: sampling.priority().into(),
        reuse_prompt: sampling.reuse_prompt(),
        n: sampling.choices,
        max_gap_ms: sampling.max_gap_ms,
    };
    let events = context.connect().await?.generate(request).await?;
    print(&mut context.output, events, sampling.stats).await?;
    Ok(())
}

/// Prints a generation as it comes, and gives the whole of its first answer.
///
/// As text: the pieces, ended with a newline, calls of tools as JSON, an object a
/// line; what the model thinks goes to standard error. Of several answers the
/// first comes so, and the others behind it. As JSON: an object a line for each
/// piece and one for each outcome.
pub(super) async fn print(
    output: &mut Output,
    mut events: GenerateEvents,
    stats: bool,
) -> anyhow::Result<ChatMessage> {
    let mut answers = vec![ChatMessage::default()];
    let mut outcome = None;
    let is_terminal = std::io::stdout().is_terminal();
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                // What has come so far stands; the error begins on its own line.
                let text = &answers[0].content;
                if !output.json && !text.is_empty() && !text.ends_with('\n') {
                    output.text("\n")?;
                }
                return Err(error.into());
            }
        };
        match event {
            generate_event::Event::Piece(piece) => {
                if output.json {
                    output.object(&piece)?;
                } else if piece.choice == 0 {
                    think(&piece.reasoning);
                    show(output, is_terminal, &piece.text, &piece.tool_calls)?;
                }
                let choice = piece.choice as usize;
                if choice >= answers.len() && choice < CHOICES_MAX {
                    answers.resize(choice + 1, ChatMessage::default());
                }
                if let Some(answer) = answers.get_mut(choice) {
                    answer.content.push_str(&piece.text);
                    answer.reasoning.push_str(&piece.reasoning);
                    answer.tool_calls.extend(piece.tool_calls);
                }
            }
            generate_event::Event::Done(done) => {
                if output.json {
                    output.object(&Ended::of(&done))?;
                }
                outcome = Some(done);
            }
        }
    }
    let done = outcome.context("the daemon did not say how the generation ended; rocmforgectl and rocmforged may differ in version (see --version)")?;
    if !output.json {
        for (at, answer) in answers.iter().enumerate() {
            if at > 0 {
                show(output, is_terminal, &answer.content, &answer.tool_calls)?;
            }
            if answer.tool_calls.is_empty() && !answer.content.ends_with('\n') {
                output.text("\n")?;
            }
        }
        if stats || std::io::stderr().is_terminal() {
            note(&figures(&done));
        } else if let Some(cut) = cut(&done) {
            note(cut);
        }
    }
    let mut answer = answers.swap_remove(0);
    answer.role = "assistant".to_owned();
    Ok(answer)
}

/// The end of a choice. With several choices it says which, even if that is the first.
#[derive(Serialize)]
struct Ended<'a> {
    #[serde(flatten)]
    done: &'a GenerateDone,
    #[serde(skip_serializing_if = "Option::is_none")]
    choice: Option<u32>,
}

impl<'a> Ended<'a> {
    fn of(done: &'a GenerateDone) -> Self {
        let is_one_of_several = done.choice > 0 || done.others_go_on;
        Self {
            done,
            choice: is_one_of_several.then_some(done.choice),
        }
    }
}

/// Prints more of an answer.
fn show(
    output: &mut Output,
    is_terminal: bool,
    text: &str,
    calls: &[ToolCall],
) -> anyhow::Result<()> {
    if !text.is_empty() {
        match is_terminal {
            true => output.text(&clean_lines(text))?,
            false => output.text(text)?,
        }
    }
    for call in calls {
        output.object(call)?;
    }
    Ok(())
}

/// What a model thinks, on standard error, whose reader may be gone.
fn think(text: &str) {
    if !text.is_empty() {
        let _ = write!(std::io::stderr(), "{}", clean_lines(text));
    }
}

/// A line on standard error, whose reader may be gone.
fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A note that the output was cut, if it ended because a limit was reached.
fn cut(done: &GenerateDone) -> Option<&'static str> {
    match done.finish_reason() {
        FinishReason::MaxTokens => Some("[cut: --max-tokens reached]"),
        FinishReason::ContextFull => {
            Some("[cut: the context is full; raise --n-ctx if the model allows it]")
        }
        FinishReason::Stop
        | FinishReason::StopString
        | FinishReason::StopToken
        | FinishReason::Unspecified => None,
    }
}

/// The figures of a generation on one line.
fn figures(done: &GenerateDone) -> String {
    let mut text = format!(
        "[{} + {} tokens, first after {:.0} ms, {:.1} tokens/s, {}",
        done.prompt_tokens,
        done.generated_tokens,
        done.ttft_ms,
        done.decode_tokens_per_s,
        done.finish_reason().word().replace('_', " "),
    );
    if done.reused_tokens > 0 {
        text.push_str(&format!(", {} of the prompt reused", done.reused_tokens));
    }
    if done.uploaded_bytes > 0 {
        text.push_str(&format!(", {} uploaded", size(done.uploaded_bytes)));
    }
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_a_line() {
        let done = GenerateDone {
            finish_reason: FinishReason::MaxTokens.into(),
            prompt_tokens: 12,
            generated_tokens: 80,
            ttft_ms: 41.6,
            decode_tokens_per_s: 25.04,
            uploaded_bytes: 3 << 20,
            ..Default::default()
        };
        assert_eq!(
            figures(&done),
            "[12 + 80 tokens, first after 42 ms, 25.0 tokens/s, max tokens, 3.0 MiB uploaded]"
        );
    }
}

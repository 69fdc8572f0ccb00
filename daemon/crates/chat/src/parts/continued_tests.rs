//! Messages that an answer goes on with, in families that mark all that is said.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use rocmforge_tokenizer::{ChatTemplate, Ending, Message};

use super::super::joined;
use super::*;

#[test]
fn a_message_that_goes_on_keeps_its_space_and_shows_no_closing_mark() {
    // As Command R7B has it, whose frame is in each message; and as Hunyuan, which takes it out.
    let cohere = "{% for message in messages %}{% if message.role == 'user' %}<|USER_TOKEN|>{{ message.content }}\
                  {% else %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>{% endif %}\
                  <|END_OF_TURN_TOKEN|>{% endfor %}<|CHATBOT_TOKEN|>{# <|START_THINKING|><|END_THINKING|> #}";
    let hunyuan = "{% for message in messages %}{% set content = message.content %}{% if '</answer>' in content %}\
                   {% set content = content.split('<answer>')[-1].split('</answer>')[0] %}{% endif %}\
                   {{ content }}<|eos|>{% endfor %}{# <think></think> #}";
    let long = "There once was a fox whose name was Sam, and who lived in a wood. ".repeat(3);
    for (source, close) in [(cohere, "<|END_RESPONSE|>"), (hunyuan, "\n</answer>")] {
        for said in ["Once", long.trim_end(), "Write <answer> in front", ""] {
            let template = ChatTemplate::new(source, "", "").unwrap();
            // Where the last message's text ends, what is rendered is cut.
            let open = format!("{said}\u{E000}");
            let messages = [("user", "Hi"), ("assistant", &open)];
            let messages = messages.map(|(role, said)| Message::new(role, said));
            let rendered = template.render(&messages, false).unwrap();
            let (rendered, _) = rendered.split_once('\u{E000}').unwrap();
            let tail = Tail::of(rendered, false, Ending::Continue);
            for more in [" upon a time.", "ly.", "\nNew line"] {
                let answer = format!("{more}{close}");
                let characters: Vec<char> = answer.chars().collect();
                for size in 1..=characters.len() {
                    let marks = Marks::of(source);
                    let mut splitter = Marked::new(marks, &tail, Tools::default());
                    let mut parts = Vec::new();
                    for piece in characters.chunks(size) {
                        splitter.push(&piece.iter().collect::<String>(), &mut parts);
                    }
                    splitter.finish(false, &mut parts);
                    let is_begun = said.is_empty() && source == cohere;
                    let more = if is_begun { more.trim_start() } else { more };
                    assert_eq!(joined(parts), [Part::Text(more.to_owned())], "{said}");
                }
            }
        }
    }
}

//! Chat templates. An input has parts: the template, the messages (role and text in turn), a tool
//! as JSON, and a byte that says how the text ends.
//!
//! A daemon renders in a child process with limits of memory and time, whose work this is. What
//! exceeds its memory is the end of the child, which is no defect; a panic is one. What is rendered
//! can be turned into tokens.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rocmforge_fuzz::{items, parts, text, tokenizer};
use rocmforge_tokenizer::{
    Chat, ChatTemplate, Ending, MAX_CHAT_BYTES, Message, Renderer, Tokenizer,
};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(tokenizer);

fuzz_target!(|data: &[u8]| {
    let [template, messages, tool, ending] = parts(data);
    let template = ChatTemplate::new(&text(template), "<s>", "</s>").expect("it is short");
    let texts: Vec<_> = items(messages).map(text).collect();
    let messages = texts.chunks(2).map(|pair| {
        let content = pair.get(1).map_or("", String::as_str);
        Message::new(pair[0].as_str(), content)
    });
    let mut chat = Chat::new(messages.collect());
    chat.tools.extend(serde_json::from_slice(tool).ok());
    chat.ending = match ending.first() {
        Some(b'c') => Ending::Continue,
        Some(b'e') => Ending::Closed,
        _ => Ending::Answer,
    };
    let rendered = Renderer::in_process().render(&template, Some(&TOKENIZER), &chat, &|| false);
    match rendered {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(rendered) => {
            assert!(rendered.text().len() <= MAX_CHAT_BYTES);
            let ids = TOKENIZER.encode_rendered(1 << 12, &rendered);
            let fits = |ids: Vec<u32>| ids.len() <= 1 << 12;
            assert!(ids.is_ok_and(fits) || rendered.text().len() > 1 << 11);
        }
    }
});

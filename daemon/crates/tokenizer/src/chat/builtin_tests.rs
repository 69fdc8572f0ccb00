//! What templates by name write, held against what llama.cpp writes for the name.

use super::super::{ChatTemplate, Message};
use super::*;

#[test]
fn templates_by_name_write_what_llama_cpp_writes() {
    let chat = [
        Message::new("system", "S "),
        Message::new("user", "a"),
        Message::new("assistant", " b "),
        Message::new("user", "c"),
    ];
    for (name, expected) in [
        (
            "chatml",
            "<|im_start|>system\nS <|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n b <|im_end|>\n\
             <|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "[INST] S \na [/INST] b </s>[INST] c [/INST]"),
        (
            "llama2-sys-strip",
            "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST]b</s>[INST] c [/INST]",
        ),
        (
            "llama2-sys-bos",
            "[INST] <<SYS>>\nS \n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
        ),
        (
            "mistral-v1",
            " [INST] S \n\na [/INST]  b </s> [INST] c [/INST]",
        ),
        ("mistral-v3", "[INST] S \n\na[/INST] b</s>[INST] c[/INST]"),
        (
            "mistral-v3-tekken",
            "[INST]S \n\na[/INST] b </s>[INST]c[/INST]",
        ),
        (
            "mistral-v7",
            "[SYSTEM_PROMPT] S [/SYSTEM_PROMPT][INST] a[/INST]  b </s>[INST] c[/INST]",
        ),
        (
            "gemma",
            "<start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n\
             <start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "openchat",
            "S <|end_of_turn|>GPT4 Correct User: a<|end_of_turn|>GPT4 Correct Assistant:  b <|end_of_turn|>\
             GPT4 Correct User: c<|end_of_turn|>GPT4 Correct Assistant:",
        ),
        (
            "monarch",
            "system\nS </s>\n<s>user\na</s>\n<s>assistant\n b </s>\n<s>user\nc</s>\n<s>assistant\n",
        ),
        (
            "vicuna",
            "S \n\nUSER: a\nASSISTANT:  b </s>\nUSER: c\nASSISTANT:",
        ),
        (
            "deepseek3",
            "S \n\n<｜User｜>a<｜Assistant｜> b <｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜>",
        ),
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n\
             a<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>\
             <|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "bailing",
            "<role>SYSTEM</role>S <role>HUMAN</role>a<role>ASSISTANT</role> b <role>HUMAN</role>c\
             <role>ASSISTANT</role>",
        ),
        (
            "exaone3",
            "[|system|]S[|endofturn|]\n[|user|]a\n[|assistant|]b[|endofturn|]\n[|user|]c\n[|assistant|]",
        ),
        (
            "orion",
            "Human: S \n\na\n\nAssistant: </s> b </s>Human: c\n\nAssistant: </s>",
        ),
        ("minicpm", "S<用户>a<AI>b<用户>c<AI>"),
        (
            "exaone4",
            "[|system|]S[|endofturn|]\n[|user|]a\n[|assistant|]b[|endofturn|]\n[|user|]c\n[|assistant|]",
        ),
        (
            "rwkv-world",
            "System: S\n\nUser: a\n\nAssistant: b\n\nUser: c\n\nAssistant:",
        ),
        (
            "gigachat",
            "<s>S <|message_sep|>user<|role_sep|>a<|message_sep|>available functions<|role_sep|>[]<|message_sep|>\
             assistant<|role_sep|> b <|message_sep|>\
             user<|role_sep|>c<|message_sep|>available functions<|role_sep|>[]<|message_sep|>assistant<|role_sep|>",
        ),
        (
            "yandex",
            "<s> S \n\n Пользователь: a\n\n Ассистент:  b \n\n Пользователь: c\n\n Ассистент:[SEP]",
        ),
        (
            "hunyuan-moe",
            "<|startoftext|>S <|extra_4|><|startoftext|>a<|extra_0|> b <|eos|><|startoftext|>c<|extra_0|>",
        ),
        (
            "hunyuan-dense",
            "<｜hy_begin▁of▁sentence｜>S <｜hy_place▁holder▁no▁3｜><｜hy_User｜>a\
             <｜hy_Assistant｜> b <｜hy_place▁holder▁no▁2｜><｜hy_User｜>c<｜hy_Assistant｜>",
        ),
        (
            "kimi-k2",
            "<|im_system|>system<|im_middle|>S <|im_end|><|im_user|>user<|im_middle|>a<|im_end|>\
             <|im_assistant|>assistant<|im_middle|> b <|im_end|><|im_user|>user<|im_middle|>c<|im_end|>\
             <|im_assistant|>assistant<|im_middle|>",
        ),
    ] {
        let template = ChatTemplate::new(name, "<s>", "</s>").unwrap();
        assert_eq!(template.render(&chat, true).unwrap(), expected, "{name}");
    }
}

#[test]
fn each_template_writes_all_that_is_said_and_opens_the_answer_behind_it() {
    let chat = [Message::new("system", "S "), Message::new("user", "c")];
    for (name, _) in TEMPLATES {
        let template = ChatTemplate::new(name, "<s>", "</s>").unwrap();
        let text = template.render(&chat, false).unwrap();
        assert!(text.contains('S') && text.contains('c'), "{name}: {text}");
        let open = template.render(&chat, true).unwrap();
        assert!(open.starts_with(&text), "{name}: {open}");
    }
}

#[test]
fn words_that_name_no_template_are_refused_with_the_names() {
    let template = ChatTemplate::new("chatlm", "", "").unwrap();
    let error = template
        .render(&[Message::new("user", "a")], true)
        .unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("chatlm") && message.contains("chatml"),
        "{message}"
    );
    assert!(!is_name("a b") && !is_name("{{a}}") && !is_name(""));
}

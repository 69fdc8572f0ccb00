//! Templates by name: what llama.cpp calls its own, and what a file without a template gets.
//!
//! Some files name a template (`tokenizer.chat_template = "chatml"`) where others carry one. Each
//! template here writes what llama.cpp writes for the name; none knows tools. The beginning of a
//! text is the vocabulary's affair, as with every template.

/// What a file gets whose template is empty, or whose vocabulary has ChatML's marks.
pub(super) const CHATML: &str = "chatml";
/// Marks that a vocabulary must know for ChatML.
pub(super) const CHATML_MARKS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];
/// Bytes of the longest word that may be a name.
const NAME_MAX: usize = 64;

/// Begins a loop over the messages.
macro_rules! each {
    ($($body:literal)+) => {
        concat!("{% for m in messages %}", $($body,)+ "{% endfor %}")
    };
}

/// Opens the answer.
macro_rules! answer {
    ($text:literal) => {
        concat!(
            "{% if add_generation_prompt %}{{ '",
            $text,
            "' }}{% endif %}"
        )
    };
}

/// Llama 2 and its kin: a turn is begun by whoever speaks first in it.
macro_rules! llama2 {
    ($system:literal, $content:literal, $again:literal) => {
        concat!(
            "{% set ns = namespace(open=true) %}{{ '[INST] ' }}{% for m in messages %}",
            "{% set content = ",
            $content,
            " %}{% if not ns.open %}{% set ns.open = true %}{{ '",
            $again,
            "[INST] ' }}{% endif %}{% if m.role == 'system' %}{{ ",
            $system,
            " }}{% elif m.role == 'user' %}{{ content + ' [/INST]' }}{% else %}",
            "{% set ns.open = false %}{{ content + '</s>' }}{% endif %}{% endfor %}",
        )
    };
}

/// Mistral's first three, which differ in spaces.
macro_rules! mistral {
    ($before:literal, $behind:literal, $content:literal) => {
        concat!(
            "{% set ns = namespace(open=false) %}{% for m in messages %}",
            "{% if not ns.open %}{% set ns.open = true %}{{ '",
            $before,
            "[INST]",
            $behind,
            "' }}{% endif %}{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}",
            "{% elif m.role == 'user' %}{{ m.content + '",
            $before,
            "[/INST]' }}{% else %}{% set ns.open = false %}{{ '",
            $behind,
            "' + ",
            $content,
            " + '</s>' }}{% endif %}{% endfor %}",
        )
    };
}

/// Mistral's seventh.
macro_rules! mistral_v7 {
    ($space:literal) => {
        concat!(
            "{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]",
            $space,
            "' + m.content + '[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}{{ '[INST]",
            $space,
            "' + m.content + '[/INST]' }}{% else %}{{ '",
            $space,
            "' + m.content + '</s>' }}{% endif %}{% endfor %}",
        )
    };
}

/// Three roles, each with what stands before and behind.
macro_rules! roles {
    ($system:literal, $user:literal, $assistant:literal) => {
        concat!(
            "{% for m in messages %}{% if m.role == 'system' %}{{ ",
            $system,
            " }}{% elif m.role == 'user' %}{{ ",
            $user,
            " }}{% elif m.role == 'assistant' %}{{ ",
            $assistant,
            " }}{% endif %}{% endfor %}",
        )
    };
}

/// The templates by name.
const TEMPLATES: [(&str, &str); 42] = [
    (
        CHATML,
        concat!(
            each!("{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"),
            answer!("<|im_start|>assistant\\n"),
        ),
    ),
    ("llama2", llama2!("content + '\\n'", "m.content", "")),
    (
        "llama2-sys",
        llama2!(
            "'<<SYS>>\\n' + content + '\\n<</SYS>>\\n\\n'",
            "m.content",
            ""
        ),
    ),
    (
        "llama2-sys-bos",
        llama2!(
            "'<<SYS>>\\n' + content + '\\n<</SYS>>\\n\\n'",
            "m.content",
            "<s>"
        ),
    ),
    (
        "llama2-sys-strip",
        llama2!(
            "'<<SYS>>\\n' + content + '\\n<</SYS>>\\n\\n'",
            "m.content|trim",
            ""
        ),
    ),
    ("mistral-v1", mistral!(" ", " ", "m.content")),
    ("mistral-v3", mistral!("", " ", "m.content|trim")),
    ("mistral-v3-tekken", mistral!("", "", "m.content")),
    ("mistral-v7", mistral_v7!(" ")),
    ("mistral-v7-tekken", mistral_v7!("")),
    (
        "phi3",
        concat!(
            each!("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"),
            answer!("<|assistant|>\\n"),
        ),
    ),
    (
        "phi4",
        concat!(
            each!("{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"),
            answer!("<|im_start|>assistant<|im_sep|>"),
        ),
    ),
    (
        "falcon3",
        concat!(
            each!("{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}"),
            answer!("<|assistant|>\\n"),
        ),
    ),
    (
        "zephyr",
        concat!(
            each!("{{ '<|' + m.role + '|>\\n' + m.content + '<|endoftext|>\\n' }}"),
            answer!("<|assistant|>\\n"),
        ),
    ),
    (
        "monarch",
        concat!(
            each!("{{ ('' if loop.first else '<s>') + m.role + '\\n' + m.content + '</s>\\n' }}"),
            answer!("<s>assistant\\n"),
        ),
    ),
    (
        "gemma",
        concat!(
            "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}",
            "{% set ns.system = ns.system + m.content|trim %}{% else %}",
            "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}",
            "{% if ns.system and m.role != 'assistant' %}{{ ns.system + '\\n\\n' }}",
            "{% set ns.system = '' %}{% endif %}{{ m.content|trim + '<end_of_turn>\\n' }}",
            "{% endif %}{% endfor %}",
            answer!("<start_of_turn>model\\n"),
        ),
    ),
    (
        "openchat",
        concat!(
            each!(
                "{% if m.role == 'system' %}{{ m.content + '<|end_of_turn|>' }}{% else %}"
                "{{ 'GPT4 Correct ' + m.role[:1]|upper + m.role[1:] + ': ' + m.content + '<|end_of_turn|>' }}"
                "{% endif %}"
            ),
            answer!("GPT4 Correct Assistant:"),
        ),
    ),
    (
        "vicuna",
        concat!(
            roles!(
                "m.content + '\\n\\n'",
                "'USER: ' + m.content + '\\n'",
                "'ASSISTANT: ' + m.content + '</s>\\n'"
            ),
            answer!("ASSISTANT:"),
        ),
    ),
    (
        "vicuna-orca",
        concat!(
            roles!(
                "'SYSTEM: ' + m.content + '\\n'",
                "'USER: ' + m.content + '\\n'",
                "'ASSISTANT: ' + m.content + '</s>\\n'"
            ),
            answer!("ASSISTANT:"),
        ),
    ),
    (
        "deepseek",
        concat!(
            roles!(
                "m.content",
                "'### Instruction:\\n' + m.content + '\\n'",
                "'### Response:\\n' + m.content + '\\n<|EOT|>\\n'"
            ),
            answer!("### Response:\\n"),
        ),
    ),
    (
        "deepseek2",
        concat!(
            roles!(
                "m.content + '\\n\\n'",
                "'User: ' + m.content + '\\n\\n'",
                "'Assistant: ' + m.content + '<｜end▁of▁sentence｜>'"
            ),
            answer!("Assistant:"),
        ),
    ),
    (
        "deepseek3",
        concat!(
            roles!(
                "m.content + '\\n\\n'",
                "'<｜User｜>' + m.content",
                "'<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>'"
            ),
            answer!("<｜Assistant｜>"),
        ),
    ),
    (
        "command-r",
        concat!(
            roles!(
                "'<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>'",
                "'<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>'",
                "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>'"
            ),
            answer!("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
        ),
    ),
    (
        "llama3",
        concat!(
            each!(
                "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content|trim + '<|eot_id|>' }}"
            ),
            answer!("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
        ),
    ),
    (
        "llama4",
        concat!(
            each!(
                "{{ '<|header_start|>' + m.role + '<|header_end|>\\n\\n' + m.content|trim + '<|eot|>' }}"
            ),
            answer!("<|header_start|>assistant<|header_end|>\\n\\n"),
        ),
    ),
    (
        "chatglm3",
        concat!(
            "[gMASK]sop",
            each!("{{ '<|' + m.role + '|>\\n ' + m.content }}"),
            answer!("<|assistant|>"),
        ),
    ),
    (
        "chatglm4",
        concat!(
            "[gMASK]<sop>",
            each!("{{ '<|' + m.role + '|>\\n' + m.content }}"),
            answer!("<|assistant|>\\n"),
        ),
    ),
    (
        "glmedge",
        concat!(
            each!("{{ '<|' + m.role + '|>\\n' + m.content }}"),
            answer!("<|assistant|>"),
        ),
    ),
    (
        "exaone3",
        concat!(
            roles!(
                "'[|system|]' + m.content|trim + '[|endofturn|]\\n'",
                "'[|user|]' + m.content|trim + '\\n'",
                "'[|assistant|]' + m.content|trim + '[|endofturn|]\\n'"
            ),
            answer!("[|assistant|]"),
        ),
    ),
    (
        "granite",
        concat!(
            each!(
                "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}"
            ),
            answer!("<|start_of_role|>assistant<|end_of_role|>\\n"),
        ),
    ),
    (
        "megrez",
        concat!(
            each!("{{ '<|role_start|>' + m.role + '<|role_end|>' + m.content + '<|turn_end|>' }}"),
            answer!("<|role_start|>assistant<|role_end|>"),
        ),
    ),
    (
        "smolvlm",
        concat!(
            "<|im_start|>",
            each!(
                "{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}{% else %}"
                "{{ ('User: ' if m.role == 'user' else 'Assistant: ') + m.content + '<end_of_utterance>\\n' }}"
                "{% endif %}"
            ),
            answer!("Assistant:"),
        ),
    ),
    (
        "bailing",
        concat!(
            each!(
                "{{ '<role>' + ('HUMAN' if m.role == 'user' else m.role|upper) + '</role>' + m.content }}"
            ),
            answer!("<role>ASSISTANT</role>"),
        ),
    ),
    (
        "orion",
        concat!(
            "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}",
            "{% set ns.system = ns.system + m.content %}{% elif m.role == 'user' %}",
            "{{ 'Human: ' + (ns.system + '\\n\\n' if ns.system else '') + m.content + '\\n\\nAssistant: </s>' }}",
            "{% set ns.system = '' %}{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ),
    ),
    (
        "minicpm",
        each!(
            "{% if m.role == 'user' %}{{ '<用户>' + m.content|trim + '<AI>' }}{% else %}{{ m.content|trim }}{% endif %}"
        ),
    ),
    (
        "exaone4",
        concat!(
            each!(
                "{% if m.role == 'user' %}{{ '[|user|]' + m.content|trim + '\\n' }}{% else %}"
                "{{ '[|' + m.role + '|]' + m.content|trim + '[|endofturn|]\\n' }}{% endif %}"
            ),
            answer!("[|assistant|]"),
        ),
    ),
    // Whose answers are opened behind a question alone.
    (
        "rwkv-world",
        concat!(
            roles!(
                "'System: ' + m.content|trim + '\\n\\n'",
                "'User: ' + m.content|trim + '\\n\\n'",
                "'Assistant: ' + m.content|trim + '\\n\\n'"
            ),
            "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ 'Assistant:' }}{% endif %}",
        ),
    ),
    (
        "gigachat",
        concat!(
            "{{ '<s>' }}",
            roles!(
                "m.content + '<|message_sep|>'",
                "'user<|role_sep|>' + m.content + '<|message_sep|>available functions<|role_sep|>[]<|message_sep|>'",
                "'assistant<|role_sep|>' + m.content + '<|message_sep|>'"
            ),
            answer!("assistant<|role_sep|>"),
        ),
    ),
    // llama.cpp leaves out what instructs the model.
    (
        "yandex",
        concat!(
            "{{ '<s>' }}",
            roles!(
                "' ' + m.content + '\\n\\n'",
                "' Пользователь: ' + m.content + '\\n\\n'",
                "' Ассистент: ' + m.content + '\\n\\n'"
            ),
            answer!(" Ассистент:[SEP]"),
        ),
    ),
    (
        "hunyuan-moe",
        roles!(
            "'<|startoftext|>' + m.content + '<|extra_4|>'",
            "'<|startoftext|>' + m.content + '<|extra_0|>'",
            "m.content + '<|eos|>'"
        ),
    ),
    (
        "hunyuan-dense",
        concat!(
            "{{ '<｜hy_begin▁of▁sentence｜>' }}",
            roles!(
                "m.content + '<｜hy_place▁holder▁no▁3｜>'",
                "'<｜hy_User｜>' + m.content",
                "'<｜hy_Assistant｜>' + m.content + '<｜hy_place▁holder▁no▁2｜>'"
            ),
            answer!("<｜hy_Assistant｜>"),
        ),
    ),
    (
        "kimi-k2",
        concat!(
            each!(
                "{{ '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + m.role + '<|im_middle|>' }}"
                "{{ m.content + '<|im_end|>' }}"
            ),
            answer!("<|im_assistant|>assistant<|im_middle|>"),
        ),
    ),
];

/// The template of a name; nothing for other names.
#[must_use]
pub fn builtin_template(name: &str) -> Option<&'static str> {
    let found = TEMPLATES.iter().find(|(known, _)| *known == name);
    found.map(|(_, source)| *source)
}

/// The names that [`builtin_template`] knows, with commas between them.
#[must_use]
pub fn builtin_template_names() -> String {
    TEMPLATES.map(|(name, _)| name).join(", ")
}

/// The name of a template in [`TEMPLATES`], as a constant.
pub(super) fn known(name: &str) -> Option<(&'static str, &'static str)> {
    TEMPLATES.into_iter().find(|(known, _)| *known == name)
}

/// Whether a template's text is a single word: it would write that word for every chat, so that it
/// can only be meant as a name.
pub(super) fn is_name(text: &str) -> bool {
    let of_names = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.len() <= NAME_MAX && text.chars().all(of_names)
}

#[cfg(test)]
#[path = "builtin_tests.rs"]
mod tests;

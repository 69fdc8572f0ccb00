//! Compiles rocmforge/v1/*.proto with a compiler in Rust, so that no protoc has
//! to be installed, and writes the messages, the client and server stubs, and
//! the descriptor set that reflection serves.
//!
//! Messages are serialized as JSON, too: keys are the names of the fields, enums are lowercase
//! words, a message that is not set is null. The exceptions are in [`DIFFERENT`].

use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;

use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{
    EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
};

const FILES: [&str; 4] = [
    "rocmforge/v1/models.proto",
    "rocmforge/v1/inference.proto",
    "rocmforge/v1/cache.proto",
    "rocmforge/v1/server.proto",
];

/// Left out of the JSON if it has its default.
const LEFT_OUT: &str = r#"#[serde(skip_serializing_if = "crate::json::is_default")]"#;
/// Null if it is empty.
const OR_NULL: &str = r#"#[serde(serialize_with = "crate::json::or_null")]"#;
/// The default of its type if it is not set.
const OR_DEFAULT: &str = r#"#[serde(serialize_with = "crate::json::or_default")]"#;
/// Bytes that need not be UTF-8: as text, and exactly in hexadecimal under a second key.
const PIECE: &str = r#"#[serde(flatten, serialize_with = "crate::json::piece")]"#;
const PIECES: &str = r#"#[serde(flatten, serialize_with = "crate::json::pieces")]"#;

/// Fields whose JSON is not the usual one, each with its attribute.
const DIFFERENT: [(&str, &str); 31] = [
    ("TokenLogprob.piece", PIECE),
    ("TopLogprob.piece", PIECE),
    ("TokenizeResponse.pieces", PIECES),
    // Readers of JSON round 64-bit numbers; a seed has to be exact.
    (
        "GenerateDone.seed",
        r#"#[serde(serialize_with = "crate::json::digits")]"#,
    ),
    // What most events have no use for.
    ("TokenLogprob.top", LEFT_OUT),
    ("GeneratePiece.choice", LEFT_OUT),
    ("GeneratePiece.reasoning", LEFT_OUT),
    ("GeneratePiece.tool_calls", LEFT_OUT),
    ("GeneratePiece.logprobs", LEFT_OUT),
    // Whoever prints them knows whether there are several choices.
    ("GenerateDone.choice", "#[serde(skip)]"),
    ("GenerateDone.others_go_on", "#[serde(skip)]"),
    ("GenerateDone.tool_calls", LEFT_OUT),
    ("GenerateDone.stop_string", LEFT_OUT),
    ("GenerateDone.stop_token_id", LEFT_OUT),
    // Defaults that are not set.
    ("ModelDefaults.temperature", LEFT_OUT),
    ("ModelDefaults.top_k", LEFT_OUT),
    ("ModelDefaults.top_p", LEFT_OUT),
    ("ModelDefaults.min_p", LEFT_OUT),
    ("ModelDefaults.repeat_penalty", LEFT_OUT),
    ("ModelDefaults.presence_penalty", LEFT_OUT),
    ("ModelDefaults.frequency_penalty", LEFT_OUT),
    ("ModelDefaults.penalty_last_n", LEFT_OUT),
    ("ModelDefaults.max_tokens", LEFT_OUT),
    ("ModelDefaults.priority", LEFT_OUT),
    ("ModelDefaults.template", LEFT_OUT),
    ("Model.draft", OR_NULL),
    ("Model.mmproj", OR_NULL),
    ("Device.unused_gpu", OR_NULL),
    ("ModelDirectory.trouble", OR_NULL),
    ("ModelCacheUsage.usage", OR_DEFAULT),
    ("CacheUsage.evictions_by", OR_DEFAULT),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=rocmforge");

    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let descriptors = protox::compile(FILES, ["."])?;
    std::fs::write(
        out.join("rocmforge_descriptor.bin"),
        descriptors.encode_to_vec(),
    )?;
    std::fs::write(out.join("words.rs"), words(&descriptors))?;
    let mut builder = tonic_prost_build::configure()
        .build_transport(false)
        .type_attribute(".", "#[derive(serde::Serialize)]");
    for (field, attribute) in DIFFERENT {
        builder = builder.field_attribute(field, attribute);
    }
    for (field, ty) in enum_fields(&descriptors) {
        let attribute = format!(r#"#[serde(serialize_with = "crate::json::word::<_, {ty}>")]"#);
        builder = builder.field_attribute(field, attribute);
    }
    builder.compile_fds(descriptors)?;
    Ok(())
}

/// The fields that are enums, by their full names, each with the name of its type.
fn enum_fields(descriptors: &FileDescriptorSet) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    for file in &descriptors.file {
        for message in &file.message_type {
            let is_enum = |field: &&FieldDescriptorProto| field.r#type() == Type::Enum;
            for field in message.field.iter().filter(is_enum) {
                let name = format!("{}.{}.{}", file.package(), message.name(), field.name());
                let ty = field.type_name().rsplit('.').next().unwrap_or_default();
                fields.push((name, ty.to_owned()));
            }
        }
    }
    fields
}

/// The words of all enums: `FINISH_REASON_STOP_TOKEN` of `FinishReason` is `stop_token`.
fn words(descriptors: &FileDescriptorSet) -> String {
    let mut code = String::new();
    for declared in descriptors.file.iter().flat_map(|file| &file.enum_type) {
        let name = declared.name();
        // Writing to a String does not fail.
        let _ = writeln!(
            code,
            "impl Word for {name} {{\nfn word(self) -> &'static str {{\nmatch self as i32 {{"
        );
        for (i, word) in words_of(declared).into_iter().enumerate() {
            let number = declared.value[i].number();
            let _ = writeln!(code, "{number} => \"{word}\",");
        }
        code.push_str("_ => \"unknown\",\n}\n}\n}\n");
    }
    code
}

fn words_of(declared: &EnumDescriptorProto) -> Vec<String> {
    let word = |value: &EnumValueDescriptorProto| {
        let prefix = common_prefix(declared.name());
        let word = value.name();
        let word = word.strip_prefix(&*prefix).unwrap_or(word).to_lowercase();
        match (declared.name(), &*word) {
            (_, "unspecified") => "unknown".to_owned(),
            // As --policy has them.
            ("CachePolicy", word) => word.replace('_', "-"),
            (_, word) => word.to_owned(),
        }
    };
    declared.value.iter().map(word).collect()
}

/// What the names of an enum's values begin with: `FINISH_REASON_` of `FinishReason`.
fn common_prefix(name: &str) -> String {
    let mut prefix = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !prefix.is_empty() {
            prefix.push('_');
        }
        prefix.push(c.to_ascii_uppercase());
    }
    prefix + "_"
}

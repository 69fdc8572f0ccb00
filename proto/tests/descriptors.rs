//! The descriptor set that reflection serves: complete, and documented field by
//! field.

use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};

fn files() -> Vec<FileDescriptorProto> {
    FileDescriptorSet::decode(rocmforge_proto::FILE_DESCRIPTOR_SET)
        .expect("the build script encoded it")
        .file
}

#[test]
fn every_service_and_rpc_is_there() {
    let mut rpcs: Vec<String> = Vec::new();
    for file in files() {
        assert_eq!(file.package(), "rocmforge.v1");
        for service in &file.service {
            for method in &service.method {
                let stream = if method.server_streaming() { " *" } else { "" };
                rpcs.push(format!("{}.{}{stream}", service.name(), method.name()));
            }
        }
    }
    rpcs.sort();
    assert_eq!(
        rpcs,
        [
            "Cache.Clear",
            "Cache.Release",
            "Cache.SetBudget",
            "Cache.SetPolicy",
            "Cache.Stats",
            "Inference.Chat *",
            "Inference.Detokenize",
            "Inference.Embed",
            "Inference.Generate *",
            "Inference.Render",
            "Inference.Rerank",
            "Inference.Score",
            "Inference.Tokenize",
            "Models.Get",
            "Models.List",
            "Models.ListFiles",
            "Models.Load *",
            "Models.Pin",
            "Models.Preload *",
            "Models.Unload",
            "Models.Unpin",
            "Server.CheckDevice",
            "Server.ListDevices",
            "Server.Reload",
            "Server.Status",
            "Server.Why",
        ]
    );
}

/// Paths into the descriptor of everything that wants a comment, with a name to
/// report it by. The numbers are field numbers of descriptor.proto.
fn wanted(file: &FileDescriptorProto) -> Vec<(Vec<i32>, String)> {
    let mut wanted = Vec::new();
    let message = |i: i32, m: &DescriptorProto, wanted: &mut Vec<(Vec<i32>, String)>| {
        // A map is a field of a message that its compiler adds.
        let is_map = |m: &DescriptorProto| m.options.as_ref().is_some_and(|o| o.map_entry());
        assert!(
            m.nested_type.iter().all(is_map),
            "{} nests a message",
            m.name()
        );
        wanted.push((vec![4, i], m.name().to_owned()));
        for (j, field) in (0..).zip(&m.field) {
            wanted.push((vec![4, i, 2, j], format!("{}.{}", m.name(), field.name())));
        }
    };
    for (i, m) in (0..).zip(&file.message_type) {
        message(i, m, &mut wanted);
    }
    for (i, e) in (0..).zip(&file.enum_type) {
        wanted.push((vec![5, i], e.name().to_owned()));
        for (j, value) in (0..).zip(&e.value) {
            wanted.push((vec![5, i, 2, j], value.name().to_owned()));
        }
    }
    for (i, s) in (0..).zip(&file.service) {
        wanted.push((vec![6, i], s.name().to_owned()));
        for (j, method) in (0..).zip(&s.method) {
            wanted.push((vec![6, i, 2, j], format!("{}.{}", s.name(), method.name())));
        }
    }
    wanted
}

fn comment<'a>(file: &'a FileDescriptorProto, path: &[i32]) -> &'a str {
    file.source_code_info
        .as_ref()
        .and_then(|info| info.location.iter().find(|location| location.path == path))
        .map_or("", |location| location.leading_comments())
}

#[test]
fn everything_is_documented() {
    for file in files() {
        let missing: Vec<String> = wanted(&file)
            .into_iter()
            .filter(|(path, _)| comment(&file, path).trim().is_empty())
            .map(|(_, name)| name)
            .collect();
        assert!(missing.is_empty(), "{}: {missing:?}", file.name());
    }
}

#[test]
fn every_rpc_says_how_it_fails() {
    for file in files() {
        for (path, name) in wanted(&file) {
            if let [6, _, 2, _] = path[..] {
                assert!(comment(&file, &path).contains("Errors"), "{name}");
            }
        }
    }
}

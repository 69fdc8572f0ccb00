//! Limits, checks and roles of each RPC, by its path.

use std::time::Duration;

use rocmforge_connections::{Rule, UNREAD_MAX};
use rocmforge_service::roles::Role;
use rocmforge_service::{REQUEST_MAX_BYTES, SMALL_REQUEST_MAX_BYTES};

use super::shape::Shape;

/// Maximum size in bytes of a request that is a list of ids.
const IDS_MAX_BYTES: usize = 8 << 20;
/// How long a stream may be unread while other requests wait.
const UNREAD_WHILE_OTHERS_WAIT: Duration = Duration::from_secs(10);

/// The limits and the role of an RPC.
#[derive(Debug, Clone, Copy)]
pub(super) struct Method {
    /// Maximum size of the request's body in bytes.
    pub(super) request_max_bytes: usize,
    /// Checks that are made on the encoded request before it is decoded.
    pub(super) shape: Shape,
    /// Role that the client needs; `None` for any client.
    pub(super) role: Option<Role>,
    /// Whether the RPC is served also on reserved connections.
    pub(super) is_light: bool,
    /// Whether the client streams: requests come one after another during the call.
    pub(super) streams_in: bool,
    /// Rule by which an unread reply is ended.
    pub(super) unread: Rule,
}

impl Method {
    /// The entry of the method at a request's path; unknown paths count as small calls.
    pub(super) fn of(path: &str) -> Self {
        let small = Self {
            request_max_bytes: SMALL_REQUEST_MAX_BYTES,
            shape: Shape::Any,
            role: Some(Role::Use),
            is_light: false,
            streams_in: false,
            unread: Rule {
                unread_max: UNREAD_MAX,
                only_while_others_wait: false,
                ends_connection: false,
            },
        };
        let text = Self {
            request_max_bytes: REQUEST_MAX_BYTES,
            ..small
        };
        let stream = Self {
            unread: Rule {
                unread_max: UNREAD_WHILE_OTHERS_WAIT,
                only_while_others_wait: true,
                ..text.unread
            },
            ..text
        };
        match path.strip_prefix("/rocmforge.v1.").unwrap_or(path) {
            "Inference/Generate" => Self {
                shape: Shape::Generate,
                ..stream
            },
            "Inference/Chat" => Self {
                shape: Shape::Chat,
                ..stream
            },
            "Inference/Render" => Self {
                shape: Shape::Chat,
                ..text
            },
            "Inference/Tokenize" | "Inference/Score" => text,
            "Inference/Embed" => Self {
                shape: Shape::Embed,
                ..text
            },
            "Inference/Rerank" => Self {
                shape: Shape::Rerank,
                ..text
            },
            "Inference/Detokenize" => Self {
                request_max_bytes: IDS_MAX_BYTES,
                ..small
            },
            "Models/Load" | "Models/Unload" | "Models/Preload" | "Models/Pin" | "Models/Unpin"
            | "Cache/Clear" | "Cache/Release" | "Server/CheckDevice" => Self {
                role: Some(Role::Manage),
                ..small
            },
            "Cache/SetBudget" | "Cache/SetPolicy" | "Server/Reload" => Self {
                role: Some(Role::Admin),
                ..small
            },
            "Server/Status" | "Models/List" | "Models/Get" | "Cache/Stats" => Self {
                is_light: true,
                ..small
            },
            "/grpc.health.v1.Health/Check" | "/grpc.health.v1.Health/Watch" => Self {
                role: None,
                is_light: true,
                ..small
            },
            path if path.starts_with("/grpc.reflection.") => Self {
                role: None,
                streams_in: true,
                ..small
            },
            "Server/ListDevices" | "Server/Why" | "Models/ListFiles" => small,
            // What is not named here needs the highest.
            _ => Self {
                role: Some(Role::Admin),
                ..small
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn every_call_of_the_protocol_is_named_here() {
        let set = prost_types::FileDescriptorSet::decode(rocmforge_proto::FILE_DESCRIPTOR_SET);
        let mut seen = 0;
        for service in set.unwrap().file.iter().flat_map(|file| &file.service) {
            for method in &service.method {
                let path = format!("/rocmforge.v1.{}/{}", service.name(), method.name());
                let role = Method::of(&path).role;
                let admin = matches!(method.name(), "SetBudget" | "SetPolicy" | "Reload");
                assert_eq!(role == Some(Role::Admin), admin, "{path}");
                seen += 1;
            }
        }
        assert!(seen > 15, "{seen}");
    }
}

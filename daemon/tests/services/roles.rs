//! Roles: a caller of another user, in a process of its own, meets what it may not do.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use rocmforge_proto::v1;
use rocmforge_proto::v1::cache_client::CacheClient;
use rocmforge_proto::v1::models_client::ModelsClient;
use rocmforge_proto::v1::server_client::ServerClient;
use rocmforged::roles::{Roles, Who};
use rocmforged::socket::Socket;
use rocmforged::{End, HttpListeners};
use serde_json::json;
use tonic::Code;
use tonic_types::StatusExt;

use crate::daemon::{Daemon, assert_status, connect};
use crate::http::client::unix;

/// Names the socket for the process that this test starts.
const SOCKET: &str = "ROCMFORGE_TEST_ROLES_SOCKET";
/// Likewise its HTTP socket.
const HTTP_SOCKET: &str = "ROCMFORGE_TEST_ROLES_HTTP_SOCKET";
/// A user that has no other right here.
const STRANGER: u32 = 65_534;

#[tokio::test]
async fn a_caller_without_the_role_is_refused_by_its_name() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return as_the_stranger(socket.into()).await;
    }
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can start a process of another user");
        return;
    }
    let roles = Roles {
        use_by: Who::parse(&[STRANGER.to_string()]).unwrap(),
        manage_by: Who::parse(&[]).unwrap(),
        admin_by: Who::parse(&[]).unwrap(),
    };
    let http_dir = tempfile::tempdir().unwrap();
    let http_path = http_dir.path().join("h");
    let http_socket = Socket::bind(&http_path).unwrap();
    let http = HttpListeners {
        unix: Some(http_socket.listener().unwrap()),
        ..HttpListeners::default()
    };
    let daemon = Daemon::start_with_http(roles, http).await;
    // The mode that keeps others out is not what is tested here.
    let socket = daemon.dir.path().join("s");
    for (path, mode) in [
        (daemon.dir.path(), 0o755),
        (&socket, 0o666),
        (http_dir.path(), 0o755),
        (&http_path, 0o666),
    ] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    // A copy that the stranger may run.
    let program = daemon.dir.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let child = tokio::task::spawn_blocking(move || {
        std::process::Command::new(program)
            .args([
                "--exact",
                "roles::a_caller_without_the_role_is_refused_by_its_name",
            ])
            .args(["--nocapture"])
            .env(SOCKET, socket)
            .env(HTTP_SOCKET, http_path)
            .uid(STRANGER)
            .gid(STRANGER)
            .output()
            .unwrap()
    });
    let output = child.await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(daemon.stop().await, End::Drained);
}

/// What the role 'use' may over HTTP, and what it may not.
async fn over_http(socket: &Path) {
    let health = unix(socket, "GET", "/v1/models", &[], "").await;
    assert_eq!(health.status, 200, "{health:?}");
    for target in ["/models/load", "/models/unload"] {
        let body = r#"{"model": "tiny-llama-Q4_K_M"}"#;
        let refused = unix(socket, "POST", target, &[], body).await;
        assert_eq!(refused.status, 403, "{refused:?}");
        let error = &refused.json()["error"];
        assert_eq!(
            (&error["code"], &error["details"]["role"]),
            (&json!("ROLE_MISSING"), &json!("manage"))
        );
    }
}

async fn as_the_stranger(socket: PathBuf) {
    let http = PathBuf::from(std::env::var_os(HTTP_SOCKET).expect("given with the other"));
    over_http(&http).await;
    let channel = connect(socket, 1 << 20).await;
    let mut models = ModelsClient::new(channel.clone());
    let mut cache = CacheClient::new(channel.clone());
    let mut server = ServerClient::new(channel);
    server
        .status(v1::StatusRequest {})
        .await
        .expect("the role 'use' is there");
    let name = || "m".to_owned();
    let load = v1::LoadRequest {
        path: "tiny-llama-Q4_K_M.gguf".into(),
        ..Default::default()
    };
    let unload = v1::UnloadRequest {
        name: name(),
        force: true,
    };
    let preload = v1::PreloadRequest {
        name: name(),
        ..Default::default()
    };
    let pin = v1::PinRequest {
        name: name(),
        ..Default::default()
    };
    let unpin = v1::UnpinRequest {
        name: name(),
        ..Default::default()
    };
    let budget = v1::SetBudgetRequest {
        budget: Some(v1::set_budget_request::Budget::Bytes(1 << 16)),
    };
    let policy = v1::SetPolicyRequest { policy: 2 };
    let refusals = [
        ("manage", models.load(load).await.err()),
        ("manage", models.unload(unload).await.err()),
        ("manage", models.preload(preload).await.err()),
        ("manage", models.pin(pin).await.err()),
        ("manage", models.unpin(unpin).await.err()),
        (
            "manage",
            cache.clear(v1::ClearRequest::default()).await.err(),
        ),
        (
            "manage",
            cache.release(v1::ReleaseRequest::default()).await.err(),
        ),
        ("admin", cache.set_budget(budget).await.err()),
        ("admin", cache.set_policy(policy).await.err()),
        ("admin", server.reload(v1::ReloadRequest {}).await.err()),
    ];
    for (role, refusal) in refusals {
        let refused = Err::<(), _>(refusal.expect("refused"));
        let word = format!("'{role}'");
        let status = assert_status(refused, Code::PermissionDenied, &[&word, "_by"]);
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!(
            (info.reason.as_str(), &*info.metadata["role"]),
            ("ROLE_MISSING", role)
        );
    }
}

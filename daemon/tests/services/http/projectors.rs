//! Which projector a model is loaded with.

use rocmforge_proto::v1;
use serde_json::json;

use super::images::Seeing;
use crate::daemon::fixtures;

/// Loads a model by gRPC, with this projector; its own words where it is refused.
async fn load(it: &Seeing, path: &str, name: &str, mmproj: &str) -> Result<v1::Model, String> {
    let request = v1::LoadRequest {
        path: path.to_owned(),
        name: name.to_owned(),
        mmproj: mmproj.to_owned(),
        ..Default::default()
    };
    let refused = |status: tonic::Status| {
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        status.message().to_owned()
    };
    let events = it.http.daemon.models().load(request).await;
    let mut events = events.map_err(refused)?.into_inner();
    while let Some(event) = events.message().await.map_err(refused)? {
        if let Some(v1::load_event::Event::Loaded(model)) = event.event {
            return Ok(model);
        }
    }
    panic!("the stream ended without a model");
}

#[tokio::test]
async fn a_load_names_its_projector_or_has_the_one_that_fits() {
    let it = Seeing::start("qwen3vl").await;
    let (with, without) = ("with/qwen3vl.gguf", "without/blind.gguf");
    let path = it.dir.path().join("with/mmproj-F16.gguf");
    let shown = path.canonicalize().unwrap().display().to_string();
    assert_eq!(load(&it, with, "found", "").await.unwrap().mmproj, shown);
    assert_eq!(load(&it, without, "none", "").await.unwrap().mmproj, "");
    let named = load(&it, without, "named", "with/mmproj-F16.gguf").await;
    assert_eq!(named.unwrap().mmproj, shown);
    // Loaded again as it is, and with another.
    assert_eq!(
        load(&it, without, "named", &shown).await.unwrap().mmproj,
        shown
    );
    let other = load(&it, without, "none", &shown).await.unwrap_err();
    assert!(other.contains("unload it first"), "{other}");
    std::fs::copy(&path, it.dir.path().join("with/mmproj-F32.gguf")).unwrap();
    let several = load(&it, with, "several", "").await.unwrap_err();
    for words in [
        "mmproj-F16.gguf, ",
        "mmproj-F32.gguf; ",
        "name one of them with mmproj",
    ] {
        assert!(several.contains(words), "{several}");
    }
    assert_eq!(
        load(&it, with, "several", &shown).await.unwrap().mmproj,
        shown
    );
}

#[tokio::test]
async fn a_projector_that_is_replaced_is_read_anew() {
    let it = Seeing::start("qwen3vl").await;
    let sees = async || {
        let shown = it
            .http
            .post("/api/show", &json!({"model": "qwen3vl"}))
            .await
            .json();
        shown["capabilities"]
            .as_array()
            .unwrap()
            .contains(&json!("vision"))
    };
    assert!(sees().await);
    // By one for another model, which does not fit.
    let other = fixtures().join("images/qwen35-mmproj.gguf");
    let new = it.dir.path().join("new");
    std::fs::copy(other, &new).unwrap();
    std::fs::rename(new, it.dir.path().join("with/mmproj-F16.gguf")).unwrap();
    assert!(!sees().await);
}

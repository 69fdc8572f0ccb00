//! What names lead to, and what a declared model is noted as.

use std::num::NonZeroUsize;

use rocmforge_engine::api::Budget;
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_tokenizer::Renderer;

use super::*;
use crate::Limits;
use crate::defaults::Template;
use crate::model_files::ModelDirs;
use crate::roles::Roles;

const NAME: &str = "tiny-llama-Q4_K_M";

fn service() -> Arc<Service> {
    let (engine, _) = rocmforge_engine::start(EngineConfig {
        device: DeviceChoice::Host,
        threads: NonZeroUsize::new(1),
        budget: Budget::Bytes(64 << 20),
        ..EngineConfig::default()
    })
    .unwrap();
    let limits = Limits {
        n_ctx_max: 1024,
        max_sequences: 2,
        threads: 1,
    };
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures");
    let dirs = ModelDirs::new(&[fixtures]).unwrap();
    let templates = Renderer::in_process();
    let service = Service::new(engine, dirs, limits, templates, Roles::default());
    Arc::new(service)
}

fn declared(template: Option<&str>) -> Declared {
    let template = template.map(|source| Template {
        path: "/t.jinja".into(),
        source: source.into(),
    });
    Declared {
        name: NAME.to_owned(),
        path: format!("{NAME}.gguf").into(),
        aliases: Vec::new(),
        preload: false,
        pin: false,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults {
            template,
            ..Defaults::default()
        },
    }
}

/// As where a reload declares another template while a first use still loads with the one before.
#[tokio::test]
async fn a_load_that_finds_the_model_there_is_not_noted_with_its_own_template() {
    let service = service();
    let (first, second) = (
        declared(Some("first {{ 1 }}")),
        declared(Some("second {{ 2 }}")),
    );
    let arrival = Arrival::now(None);
    for model in [&first, &second] {
        service.load_declared(model, &arrival).await.unwrap();
    }
    let loaded = service.engine.model(NAME).unwrap();
    let in_force = loaded.template().unwrap().source().unwrap();
    assert_eq!(in_force, "first {{ 1 }}");
    assert_eq!(service.origins.declared_as(&loaded), Some(first));

    // One that was loaded by hand stays so.
    service.engine.unload(NAME, false).await.unwrap();
    let by_hand = Load::checked(&format!("{NAME}.gguf"), NAME, false, false).unwrap();
    let (steps, _) = mpsc::channel(1);
    let never = std::future::pending();
    let status = service.load(&by_hand, &steps, never).await.unwrap();
    service.load_declared(&second, &arrival).await.unwrap();
    assert_eq!(service.origins.declared_as(&status.model), None);
}

#[test]
fn an_alias_leads_to_its_model_and_a_name_to_itself() {
    let book = Book::new(vec![Declared {
        name: "a".to_owned(),
        path: "/m/a.gguf".into(),
        aliases: vec!["gpt-4".to_owned()],
        preload: false,
        pin: false,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults::default(),
    }]);
    assert_eq!(book.real_name("gpt-4"), "a");
    assert_eq!(book.real_name("a"), "a");
    assert_eq!(book.real_name("b"), "b");
    assert_eq!(book.aliases_of("a"), ["gpt-4"]);
    for name in ["a", "gpt-4", "gpt-4:latest", "a:latest"] {
        assert!(book.asked(name).is_some(), "{name}");
    }
    assert!(book.asked("b:latest").is_none());
    assert!(book.model("gpt-4").is_none());
}

#[test]
fn names_are_those_that_a_load_takes() {
    assert!(Declared::check_name("org/model:7b+x@1").is_ok());
    assert!(Declared::check_name("千问:7б").is_ok());
    for bad in [
        "",
        "a b",
        "a\u{301}",
        "a\n",
        &"x".repeat(MODEL_NAME_MAX + 1),
    ] {
        assert!(Declared::check_name(bad).is_err(), "{bad:?}");
    }
}

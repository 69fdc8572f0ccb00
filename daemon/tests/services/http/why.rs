//! Where the time of requests went, over HTTP and gRPC, and who sees whose.

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::{Value, json};
use tonic::Code;

use crate::daemon::{assert_status, fixtures, greedy};
use crate::http::client::{HttpDaemon, LLAMA, tcp};

/// The parts of a request's time, of which the sum is the whole.
fn parts_of(request: &Value) -> Vec<(String, f64)> {
    let parts = request["parts"].as_array().unwrap().iter();
    let part = |part: &Value| {
        assert_ne!(part["text"], "", "{part}");
        (
            part["name"].as_str().unwrap().to_owned(),
            part["ms"].as_f64().unwrap(),
        )
    };
    let parts: Vec<_> = parts.map(part).collect();
    let total = request["total_ms"].as_f64().unwrap();
    let sum: f64 = parts.iter().map(|(_, ms)| ms).sum();
    assert!(
        (sum - total).abs() <= total * 0.01,
        "{sum} of {total}: {request}"
    );
    assert_eq!(request["cause"], *parts[0].0, "{request}");
    parts
}

#[tokio::test]
async fn the_parts_of_a_report_add_up_to_the_whole_time() {
    let http = HttpDaemon::start().await;
    assert_eq!(http.get("/why").await.json(), json!({"requests": []}));
    let body = json!({"model": LLAMA, "prompt": "Once upon a time", "max_tokens": 40});
    let id = [("x-request-id", "slow-one")];
    let answer = tcp(http.tcp, "POST", "/v1/completions", &id, &body.to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let usage = &answer.json()["usage"];
    let told = http.get("/why?request=slow-one").await.json();
    let request = &told["requests"][0];
    let parts = parts_of(request);
    assert!(parts.iter().any(|(name, _)| name == "prompt"), "{request}");
    assert!(parts.iter().any(|(name, _)| name == "decode"), "{request}");
    assert_eq!(request["prompt_tokens"], usage["prompt_tokens"]);
    assert_eq!(request["generated_tokens"], usage["completion_tokens"]);
    assert_eq!(
        (&request["code"], &request["client"]),
        (&json!("Ok"), &json!("local"))
    );
    let displaced = &request["weights"]["displaced"][0];
    assert_eq!(displaced["cause"], "first_use", "{request}");
    // The slowest, which is the only one, by its number and over gRPC.
    let number = request["number"].as_u64().unwrap();
    let mut server = http.daemon.server();
    for asked in [String::new(), number.to_string(), "slow-one".to_owned()] {
        let wanted = v1::WhyRequest {
            request: asked,
            latest: 0,
        };
        let told = server.why(wanted).await.unwrap().into_inner().requests;
        assert_eq!(told.len(), 1);
        assert_eq!((told[0].number, &*told[0].id), (number, "slow-one"));
        let sum: f64 = told[0].parts.iter().map(|part| part.ms).sum();
        assert!((sum - told[0].total_ms).abs() <= told[0].total_ms * 0.01);
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_client_is_told_of_its_own_requests_alone() {
    let http = HttpDaemon::start().await;
    http.daemon
        .load(format!("{LLAMA}.gguf"), LLAMA)
        .await
        .unwrap();
    // As the user of this process, who is admin.
    http.daemon
        .generate(greedy(LLAMA, "Once", 2))
        .await
        .unwrap();
    let latest = |reply: Value| {
        let requests = reply["requests"].as_array().unwrap().iter();
        let clients = requests.map(|r| r["client"].as_str().unwrap().to_owned());
        clients.collect::<Vec<_>>()
    };
    let of_others = tcp(http.tcp, "GET", "/why?latest=9", &[], "").await.json();
    assert_eq!(latest(of_others), Vec::<String>::new());
    let body = json!({"model": LLAMA, "prompt": "Twice", "max_tokens": 1}).to_string();
    tcp(http.tcp, "POST", "/v1/completions", &[], &body).await;
    let own = tcp(http.tcp, "GET", "/why?latest=9", &[], "").await.json();
    assert_eq!(latest(own), ["local"]);
    let user = format!("user:{}", nix::unistd::getuid());
    let all = http.get("/why?latest=9").await.json();
    assert_eq!(latest(all), ["local".to_owned(), user]);
    let refused = tcp(http.tcp, "GET", "/why?request=1", &[], "").await;
    assert_eq!(refused.status, 404, "it is another's");
    assert_eq!(refused.json()["error"]["code"], "UNKNOWN_REQUEST");
    let unknown = v1::WhyRequest {
        request: "77".into(),
        latest: 0,
    };
    let refused = http.daemon.server().why(unknown).await;
    assert_status(refused, Code::NotFound, &["77", "why --list"]);
    for bad in ["0", "257", "x"] {
        let refused = http.get(&format!("/why?latest={bad}")).await;
        assert_eq!(refused.status, 400, "{bad}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn embeddings_and_scores_have_their_times_as_well() {
    let http = HttpDaemon::start().await;
    let texts: Vec<String> = (0..8).map(|n| format!("text {n} of several")).collect();
    let body = json!({"model": LLAMA, "input": texts}).to_string();
    let id = [("x-request-id", "vectors")];
    let answer = tcp(http.tcp, "POST", "/v1/embeddings", &id, &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let told = http.get("/why?request=vectors").await.json();
    let request = &told["requests"][0];
    let parts = parts_of(request);
    assert!(parts.iter().any(|(name, _)| name == "prompt"), "{request}");
    assert_eq!(
        request["prompt_tokens"],
        answer.json()["usage"]["prompt_tokens"]
    );
    let uploaded = request["weights"]["uploaded_bytes"].as_u64().unwrap();
    let of_model = std::fs::metadata(fixtures().join(format!("{LLAMA}.gguf")));
    let of_model = of_model.unwrap().len();
    assert!(
        uploaded > 0 && uploaded <= of_model,
        "not once: {uploaded}, {of_model}"
    );
    let score = v1::ScoreRequest {
        model: LLAMA.into(),
        input: Some(v1::score_request::Input::Text("Once upon a time".into())),
        ..v1::ScoreRequest::default()
    };
    http.daemon.inference().score(score).await.unwrap();
    let told = http.get("/why?latest=1").await.json();
    let request = &told["requests"][0];
    assert_eq!(request["call"], "Score", "{request}");
    let parts = parts_of(request);
    assert!(parts.iter().any(|(name, _)| name == "prompt"), "{request}");
    assert_eq!(http.stop().await, End::Drained);
}

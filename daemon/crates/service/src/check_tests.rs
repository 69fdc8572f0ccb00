//! Every field of a request: what is taken, what is refused, and with which words.

use rocmforge_failure::Kind;

use super::*;

/// Applies one change to an otherwise empty `SamplingParams`.
fn with(change: impl FnOnce(&mut SamplingFields)) -> Result<Sampling, Failure> {
    let mut wire = SamplingFields::default();
    change(&mut wire);
    let mut violations = Violations::default();
    let sampling = sampling(wire, &mut violations);
    violations.result().map(|()| sampling)
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, Failure>, field: &str, range: &str) {
    let failure = result.expect_err(field);
    assert_eq!(failure.kind(), Kind::InvalidArgument);
    assert!(
        failure.message().contains(field),
        "'{}' lacks '{field}'",
        failure.message()
    );
    assert!(
        failure.message().contains(range),
        "'{}' lacks '{range}'",
        failure.message()
    );
    assert!(
        failure.fields().iter().any(|(name, _)| name == field),
        "{failure:?}"
    );
}

type FloatField = (
    &'static str,
    fn(&mut SamplingFields, f32),
    &'static [f32],
    &'static [f32],
);

#[test]
fn numbers_of_sampling_are_held_to_their_ranges() {
    let fields: [FloatField; 6] = [
        (
            "sampling.temperature",
            |p, x| p.temperature = Some(x),
            &[0.0, 0.8, 1e30],
            &[-0.1, -1e30],
        ),
        (
            "sampling.top_p",
            |p, x| p.top_p = Some(x),
            &[1e-6, 0.5, 1.0],
            &[0.0, -0.5, 1.001],
        ),
        (
            "sampling.min_p",
            |p, x| p.min_p = Some(x),
            &[0.0, 0.999],
            &[-0.001, 1.0],
        ),
        (
            "sampling.repeat_penalty",
            |p, x| p.repeat_penalty = Some(x),
            &[0.1, 1.0, 2.0],
            &[0.0, -1.0],
        ),
        (
            "sampling.presence_penalty",
            |p, x| p.presence_penalty = Some(x),
            &[-100.0, 0.0, 100.0],
            &[-100.1, 101.0],
        ),
        (
            "sampling.frequency_penalty",
            |p, x| p.frequency_penalty = Some(x),
            &[-100.0, 0.0, 100.0],
            &[-100.1, 101.0],
        ),
    ];
    for (field, set, fine, refused) in fields {
        for &x in fine {
            assert!(with(|p| set(p, x)).is_ok(), "{field} = {x}");
        }
        for x in refused
            .iter()
            .copied()
            .chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
        {
            assert_refused(with(|p| set(p, x)), field, "out of range");
        }
    }
}

type IntegerField = (&'static str, fn(&mut SamplingFields, i32), i32);

#[test]
fn whole_numbers_of_sampling_are_held_to_their_ranges() {
    let fields: [IntegerField; 3] = [
        ("sampling.max_tokens", |p, n| p.max_tokens = Some(n), 1),
        ("sampling.top_k", |p, n| p.top_k = Some(n), 0),
        (
            "sampling.penalty_last_n",
            |p, n| p.penalty_last_n = Some(n),
            0,
        ),
    ];
    for (field, set, min) in fields {
        for n in [min, min + 1, i32::MAX] {
            assert!(with(|p| set(p, n)).is_ok(), "{field} = {n}");
        }
        for n in [min - 1, -1, i32::MIN] {
            assert_refused(with(|p| set(p, n)), field, &format!("at least {min}"));
        }
    }
}

#[test]
fn unset_fields_have_the_documented_defaults() {
    let sampling = with(|_| {}).unwrap();
    assert_eq!(sampling.params, SamplingParams::default());
    let params = &sampling.params;
    assert_eq!(
        (params.temperature, params.top_k, params.top_p, params.min_p),
        (0.8, 40, 0.95, 0.05)
    );
    assert_eq!((params.repeat_penalty, params.penalty_last_n), (1.0, 64));
    assert_eq!((sampling.max_tokens, sampling.stop.len()), (None, 0));
}

#[test]
fn stop_strings_are_bounded_in_number_and_length() {
    let stops = |stops: Vec<String>| with(|p| p.stop = stops);
    assert!(stops(vec!["x".repeat(STOP_MAX_BYTES); STOP_MAX]).is_ok());
    assert_refused(
        stops(vec!["x".into(); STOP_MAX + 1]),
        "sampling.stop",
        "at most 256",
    );
    assert_refused(
        stops(vec!["x".into(), String::new()]),
        "sampling.stop",
        "string 1 has 0 bytes",
    );
    assert_refused(
        stops(vec!["x".repeat(STOP_MAX_BYTES + 1)]),
        "sampling.stop",
        "1 to 256",
    );
}

#[test]
fn all_violations_are_told_together() {
    let failure = with(|p| {
        p.top_p = Some(2.0);
        p.max_tokens = Some(0);
        p.stop = vec![String::new()];
    })
    .unwrap_err();
    for field in ["sampling.top_p", "sampling.max_tokens", "sampling.stop"] {
        assert!(failure.message().contains(field), "{}", failure.message());
    }
}

fn one<T>(check: impl FnOnce(&mut Violations) -> T) -> Result<T, Failure> {
    let mut violations = Violations::default();
    let value = check(&mut violations);
    violations.result().map(|()| value)
}

#[test]
fn the_other_fields_are_held_to_their_ranges() {
    assert!(one(|v| model_name("model", &"n".repeat(MODEL_NAME_MAX), v)).is_ok());
    assert_refused(one(|v| model_name("model", "", v)), "model", "empty");
    assert_refused(
        one(|v| model_name("name", &"n".repeat(MODEL_NAME_MAX + 1), v)),
        "name",
        "at most 128",
    );

    assert_eq!(one(|v| n_ctx(Some(1), v)).unwrap(), Some(1));
    assert_refused(one(|v| n_ctx(Some(0), v)), "n_ctx", "at least 1");
    assert_refused(one(|v| n_ctx(Some(-1), v)), "n_ctx", "at least 1");

    assert_eq!(one(|v| top_n(None, v)).unwrap(), 0);
    assert_eq!(
        one(|v| top_n(Some(TOP_N_MAX as i32), v)).unwrap(),
        TOP_N_MAX
    );
    assert_refused(
        one(|v| top_n(Some(TOP_N_MAX as i32 + 1), v)),
        "top_n",
        "from 0 to",
    );
    assert_refused(one(|v| top_n(Some(-1), v)), "top_n", "from 0 to");
}

#[test]
fn conversations_are_bounded() {
    assert!(one(|v| messages(&["user"], v)).is_ok());
    assert_refused(one(|v| messages(&[], v)), "messages", "1 to 4096");
    assert_refused(
        one(|v| messages(&vec!["user"; MESSAGES_MAX + 1], v)),
        "messages",
        "1 to 4096",
    );
    assert_refused(
        one(|v| messages(&["user", ""], v)),
        "messages[1].role",
        "1 to 64",
    );
    assert_refused(
        one(|v| messages(&["r".repeat(65).as_str()], v)),
        "messages[0].role",
        "1 to 64",
    );
}

#[test]
fn fields_are_called_as_the_caller_wrote_them() {
    let mut violations = Violations::named(|field| field.replace("sampling.", "options."));
    let fields = SamplingFields {
        top_p: Some(2.0),
        ..SamplingFields::default()
    };
    sampling(fields, &mut violations);
    assert_refused(violations.result(), "options.top_p", "above 0");
}

#[test]
fn the_context_is_the_smallest_of_three() {
    assert_eq!(context(None, 2048, 131_072).unwrap(), 2048);
    assert_eq!(context(None, 131_072, 4096).unwrap(), 4096);
    assert_eq!(context(Some(100), 2048, 4096).unwrap(), 100);
    assert_refused(
        context(Some(2049), 2048, 4096),
        "n_ctx",
        "at most 2048, the length that the model was trained with",
    );
    assert_refused(context(Some(4097), 8192, 4096), "n_ctx", "--n-ctx-max");
}

#[test]
fn ids_and_segments_lie_within_the_model() {
    assert!(ids("tokens.ids", &[0, 9], 10).is_ok());
    assert_refused(
        ids("tokens.ids", &[0, 10], 10),
        "tokens.ids",
        "id 10 at place 1",
    );
    assert_refused(ids("tokens.ids", &[u32::MAX], 10), "tokens.ids", "0 to 9");

    assert_eq!(segments(vec![], 3).unwrap(), None);
    assert_eq!(segments(vec![2, 0, 2], 3).unwrap(), Some(vec![2, 0]));
    assert_refused(segments(vec![3], 3), "segments", "0 to 2");
}

#[test]
fn scores_are_bounded_in_length_and_number() {
    assert!(score_length("text", 2, 0).is_ok());
    assert_refused(score_length("text", 1, 0), "text", "at least 2");
    assert_refused(score_length("text", 0, 0), "text", "at least 2");
    assert!(score_length("text", 1 << 20, 0).is_ok());
    assert_refused(score_length("text", 1 << 20, 1), "top_n", "at most");
}

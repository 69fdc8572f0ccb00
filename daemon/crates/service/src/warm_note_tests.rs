//! Notes of what was resident: what they say, what is read of them, and when they are written.

use super::*;

fn noted(name: &str, idle_s: u64) -> Noted {
    Noted {
        name: name.to_owned(),
        path: Some(format!("/models/{name}.gguf")),
        file_bytes: 1000,
        mtime_unix_ms: 1_700_000_000_000,
        idle_s,
        n_segments: 40,
        resident: vec![[0, 30], [35, 39]],
        resident_bytes: 900,
    }
}

fn names(note: &Note) -> Vec<&str> {
    note.models.iter().map(|model| &*model.name).collect()
}

#[test]
fn segments_are_noted_by_runs() {
    assert_eq!(
        runs([0, 1, 2, 5, 7, 8].into_iter()),
        [[0, 2], [5, 5], [7, 8]]
    );
    assert!(runs(std::iter::empty()).is_empty());
    let model = Noted {
        resident: vec![[0, 2], [5, 5]],
        ..noted("a", 0)
    };
    assert_eq!(model.segments(), [0, 1, 2, 5]);
}

#[test]
fn the_last_used_come_first_and_the_long_unused_not_at_all() {
    let models = vec![noted("c", 3601), noted("b", 3600), noted("a", 5)];
    let note = Note::of(models);
    assert_eq!(names(&note), ["a", "b"]);
    assert_eq!(Note::parse(note.text().unwrap().as_bytes()).unwrap(), note);
}

#[test]
fn a_note_has_bounds() {
    let many = (0..200).map(|n| Noted {
        n_segments: SEGMENTS_MAX,
        resident: (0..RUNS_MAX as u32 / 32).map(|n| [2 * n, 2 * n]).collect(),
        ..noted(&format!("m{n}"), n)
    });
    let note = Note::of(many.collect());
    assert_eq!(note.models.len(), MODELS_NOTED_MAX);
    let runs: usize = note.models.iter().map(|model| model.resident.len()).sum();
    assert_eq!(runs, RUNS_MAX);
    let text = note.text().unwrap();
    assert!((text.len() as u64) < NOTE_MAX_BYTES / 2, "{}", text.len());
    assert_eq!(Note::parse(text.as_bytes()).unwrap(), note);
}

#[test]
fn a_damaged_or_foreign_note_is_refused_and_unsound_models_are_left_out() {
    let whole = Note::of(vec![noted("a", 1)]).text().unwrap();
    for cut in [0, 1, whole.len() / 2, whole.len() - 3] {
        let error = Note::parse(&whole.as_bytes()[..cut]).unwrap_err();
        assert!(matches!(error, NoteError::Damaged(_)), "{cut}: {error}");
    }
    for foreign in [
        "null",
        "[]",
        "{}",
        r#"{"version": 1}"#,
        r#"{"version": -1}"#,
    ] {
        let error = Note::parse(foreign.as_bytes()).unwrap_err();
        assert!(matches!(error, NoteError::Damaged(_)), "{foreign}: {error}");
    }
    // Another version may have other fields.
    let newer = Note::parse(br#"{"version": 2, "segments": {}}"#).unwrap_err();
    assert!(matches!(newer, NoteError::Version(2)), "{newer}");

    let unsound = |change: fn(&mut Noted)| {
        let mut model = noted("b", 2);
        change(&mut model);
        model
    };
    let changes: [fn(&mut Noted); 8] = [
        |model| model.name = "a b".to_owned(),
        |model| model.path = Some(String::new()),
        |model| model.path = Some("x".repeat(MODEL_PATH_MAX + 1)),
        |model| model.resident = vec![[0, 40]],
        |model| model.resident = vec![[3, 2]],
        |model| model.resident = vec![[0, 5], [5, 6]],
        |model| model.n_segments = u32::MAX,
        |model| model.resident = vec![[0, u32::MAX]],
    ];
    for (n, change) in changes.into_iter().enumerate() {
        // Twice the same name: the second is left out, too.
        let models = vec![noted("a", 1), unsound(change), noted("a", 3)];
        let note = Note { tries: 0, models };
        let read = Note::parse(note.text().unwrap().as_bytes()).unwrap();
        assert_eq!(read.models, [noted("a", 1)], "{n}");
    }
}

#[test]
fn models_that_end_the_daemon_are_not_brought_back_for_ever() {
    let mut note = Note::of(vec![noted("a", 1)]);
    for _ in 0..TRIES_MAX {
        let read = Note::parse(note.text().unwrap().as_bytes()).unwrap();
        assert_eq!(names(&read), ["a"]);
        note = read.tried();
    }
    let refused = Note::parse(note.text().unwrap().as_bytes()).unwrap_err();
    assert!(matches!(refused, NoteError::Tried), "{refused}");
}

#[test]
fn a_note_is_written_each_minute_if_it_changed_and_at_once_for_other_models() {
    let begin = Instant::now();
    let at = |s| begin + Duration::from_secs(s);
    let written = (begin, Note::of(vec![noted("a", 1), noted("b", 2)]));
    let is_due = |models, s| Note::of(models).is_due(Some(&written), at(s));
    assert!(Note::of(Vec::new()).is_due(None, begin), "a try is counted");

    let half = |name, idle_s| Noted {
        resident: vec![[0, 20]],
        ..noted(name, idle_s)
    };
    assert!(!is_due(vec![half("a", 1), noted("b", 2)], 59));
    assert!(is_due(vec![half("a", 1), noted("b", 2)], 60));
    // Used in another order.
    assert!(is_due(vec![noted("b", 1), noted("a", 2)], 60));
    // Nothing but time has passed.
    assert!(!is_due(vec![noted("a", 500), noted("b", 501)], 500));
    assert!(is_due(vec![noted("a", 600), noted("b", 601)], 600));
    // One more, or one less.
    assert!(is_due(vec![noted("a", 1), noted("b", 2), noted("c", 3)], 1));
    assert!(is_due(vec![noted("a", 1)], 1));
}

#[test]
fn the_time_without_a_daemon_does_not_count() {
    let now = Instant::now() + Duration::from_secs(7200);
    let used = noted("a", 100).used_at(now);
    assert_eq!(now.duration_since(used), Duration::from_secs(100));
}

//! The board without a terminal, and its keys.

use rocmforge_client::proto::v1::{
    Device, HostTier, LiveRequest, ModelCacheUsage, Segment, SegmentState, ServerState,
};

use super::draw::HELP;
use super::*;

fn model(name: &str, states: &[(SegmentState, bool, bool)]) -> Model {
    let segment = |(state, pinned, in_use): &(SegmentState, bool, bool)| Segment {
        bytes: 1 << 20,
        state: (*state).into(),
        pinned: *pinned,
        in_use: *in_use,
        ..Segment::default()
    };
    Model {
        name: name.into(),
        segments: states.iter().map(segment).collect(),
        weight_bytes: (states.len() as u64) << 20,
        resident_bytes: 3 << 20,
        active_requests: 1,
        ..Model::default()
    }
}

fn sample(uploaded_bytes: u64, hits: u64, evictions: u64, models: Vec<Model>) -> Sample {
    let total = CacheUsage {
        resident_bytes: 6 << 20,
        kv_bytes: 2 << 20,
        pinned_bytes: 1 << 20,
        hits,
        misses: 10,
        evictions,
        uploaded_bytes,
        ..CacheUsage::default()
    };
    let usage = CacheUsage {
        kv_bytes: 2 << 20,
        hits: 3,
        misses: 1,
        ..CacheUsage::default()
    };
    let status = StatusResponse {
        version: "0.1.0".into(),
        device: Some(Device {
            name: "Test Card".into(),
            ..Device::default()
        }),
        uptime_ms: 65_000,
        state: ServerState::Serving.into(),
        running: 2,
        queue_depth: 5,
        ..StatusResponse::default()
    };
    let cache = StatsResponse {
        budget_bytes: 16 << 20,
        total: Some(total),
        models: vec![ModelCacheUsage {
            name: "a".into(),
            usage: Some(usage),
        }],
        host_tier: Some(HostTier {
            budget_bytes: 64 << 20,
            bytes: 12 << 20,
            saved: 9,
            restored: 4,
            dropped: 1,
            ..HostTier::default()
        }),
        ..StatsResponse::default()
    };
    Sample::new(status, cache, models)
}

fn board() -> Board {
    use SegmentState::{Absent, Resident, Uploading};
    let a = [
        (Resident, false, false),
        (Resident, true, false),
        (Resident, true, true),
        (Uploading, false, false),
        (Absent, false, false),
    ];
    let mut board = Board::default();
    let mut first = sample(0, 90, 3, vec![model("a", &a)]);
    first.at -= std::time::Duration::from_secs(2);
    board.take(first);
    let mut second = sample(
        8 << 20,
        120,
        7,
        vec![model("a", &a), model("b\u{1b}[2J", &a[..3])],
    );
    second.at = board.now.as_ref().unwrap().at + std::time::Duration::from_secs(2);
    board.take(second);
    board
}

const TEXT: &str = "\
rocmforged 0.1.0  Test Card  up 1m 5s  serving
memory 8.0 MiB of 16.0 MiB (50.0 %), pinned 1.0 MiB
[===============================                             ]
weights 6.0 MiB  in flight 0 B  kv 2.0 MiB  prefix 0 B  scratch 0 B
uploads 4.0 MiB/s  hits 100.0 %  evictions 7  requests 2 running, 5 queued
kv in host memory 12.0 MiB of 64.0 MiB  saved 9  restored 4  dropped 1

> a  3.0 MiB of 5.0 MiB (60.0 %)  1 request  kv 2.0 MiB  hits 75.0 %
    #*@>.

  b\\u{1b}[2J  3.0 MiB of 3.0 MiB (100.0 %)  1 request  kv 0 B  hits -
    #*@

4 segments evicted
b\\u{1b}[2J loaded
";

#[test]
fn the_board_is_drawn_as_it_is_printed_and_the_keys_stand_below() {
    let board = board();
    assert_eq!(board.as_text(80, 100), TEXT);
    let mut expected: Vec<String> = TEXT.lines().map(str::to_owned).collect();
    expected.resize(19, String::new());
    expected.push(HELP.to_owned());
    assert_eq!(shown(&board, 80, 20), expected);
}

/// The words on a screen of this size.
fn shown(board: &Board, columns: usize, rows: usize) -> Vec<String> {
    let lines = board.rows(columns, rows);
    let lines = lines.iter().map(|line| line.painted(columns));
    lines
        .map(|line| console::strip_ansi_codes(&line).trim_end().to_owned())
        .collect()
}

#[test]
fn requests_have_their_tokens_rates_and_gaps_by_line() {
    let mut last = sample(0, 0, 0, vec![model("a", &[])]);
    let request = |number| LiveRequest {
        number,
        model: "a".into(),
        client: "user:1\u{1b}".into(),
        state: "decode".into(),
        age_ms: 65_000,
        prompt_tokens: 40,
        computed_tokens: 52,
        generated_tokens: 13,
        tokens_per_s: Some(38.04),
        longest_gap_ms: Some(41.27),
        longest_gap_cause: "other_models".into(),
    };
    let waits = LiveRequest {
        state: "prompt".into(),
        computed_tokens: 32,
        generated_tokens: 0,
        tokens_per_s: None,
        longest_gap_ms: None,
        longest_gap_cause: String::new(),
        ..request(8)
    };
    last.status.requests = vec![request(7), waits];
    last.status.requests.extend((9..29).map(request));
    let mut board = Board::default();
    board.take(last);
    let text = board.as_text(120, 100);
    let expected = "\
REQUEST  STATE             TOKENS  TOKENS/S   LONG GAP      AGE  MODEL, CLIENT
      7  decode           40 + 13      38.0    41.3 ms    1m 5s  a, user:1\\u{1b}
      8  prompt          32 of 40         -          -    1m 5s  a, user:1\\u{1b}
      9  decode ";
    assert!(text.contains(expected), "{text}");
    assert!(text.ends_with("\nand 2 requests\n"), "{text}");
    assert_eq!(board.as_json()["status"]["requests"][1]["state"], "prompt");
}

#[test]
fn the_chosen_model_is_in_sight_on_a_small_screen_and_on_none() {
    let mut board = board();
    assert_eq!(board.key(Key::Down), None);
    let small = shown(&board, 40, 8);
    assert!(
        small.iter().any(|line| line.starts_with("> b")),
        "{small:?}"
    );
    for (columns, rows) in [(0, 0), (1, 1), (3, 2), (200, 60)] {
        let lines = shown(&board, columns, rows);
        assert_eq!(lines.len(), rows);
        assert!(lines.iter().all(|line| line.chars().count() <= columns));
    }
}

#[test]
fn keys_act_on_the_chosen_model() {
    let mut board = board();
    let mut press = |key: Key| board.key(key);
    assert_eq!(press(Key::Char('p')), Some(Action::Pin("a".into())));
    assert_eq!(press(Key::Up), None);
    assert_eq!(press(Key::Down), None);
    assert_eq!(press(Key::Down), None, "there is no further one");
    for (key, action) in [
        ('P', Action::Unpin as fn(String) -> Action),
        ('l', Action::Preload),
        ('e', Action::Evict),
        ('u', Action::Unload),
    ] {
        assert_eq!(press(Key::Char(key)), Some(action("b\u{1b}[2J".into())));
    }
    assert_eq!(press(Key::Char('b')), None);
    for c in "12q".chars() {
        assert_eq!(press(Key::Char(c)), None, "it is typed");
    }
    assert_eq!(press(Key::Enter), None, "it is no budget");
    assert_eq!(press(Key::Char('b')), None);
    for c in "50%".chars() {
        assert_eq!(press(Key::Char(c)), None);
    }
    assert_eq!(
        press(Key::Enter),
        Some(Action::Budget("50%".parse().unwrap()))
    );
    assert_eq!(press(Key::Char('q')), Some(Action::Quit));
}

#[test]
fn a_map_of_thousands_of_segments_has_four_lines_of_groups() {
    use SegmentState::{Absent, Resident, Uploading};
    let mut states = vec![(Resident, false, false); 6000];
    for state in &mut states[10..30] {
        state.0 = Absent;
    }
    states[47].0 = Absent;
    states[105].0 = Uploading;
    states[205].1 = true;
    states[305].2 = true;
    let mut board = Board::default();
    board.take(sample(0, 0, 0, vec![model("moe", &states)]));
    let text = board.as_text(80, 100);
    let map: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("    "))
        .collect();
    // 76 columns, 4 lines: 20 segments a cell, 300 cells.
    let cells: String = map.iter().map(|line| line.trim_start()).collect();
    assert_eq!((map.len(), cells.len()), (4, 300), "{text}");
    assert_eq!(&cells[..16], "559##>####*####@");
    assert!(cells[16..].chars().all(|cell| cell == '#'), "{cells}");
}

#[test]
fn a_message_of_the_daemon_shows_escapes_instead_of_obeying_them() {
    let mut board = board();
    board.show("no model \"\u{1b}]0;title\u{7}\u{202e}\"\nnext");
    let shown = shown(&board, 100, 30).join("\n");
    assert!(
        !shown.contains(['\u{1b}', '\u{7}', '\u{202e}']),
        "{shown:?}"
    );
    assert!(
        shown.contains(r#"no model "\u{1b}]0;title\u{7}\u{202e}"\nnext"#),
        "{shown}"
    );
}

//! A case of an operation with a state on one device: sequences with states of their own.
//!
//! ```text
//! other sequences   one row from position 0 at each place of a state: what a state counts as then
//!                   is not what it holds
//! the rows before   of each sequence that goes on, from position 0
//! the pass          all sequences' rows and drafts                                       compared
//! behind            a row more on the state that each row of the pass was to leave       compared
//! ```

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_device::{Batch, Buf, Device, Op, Scratch, Span};

use crate::Error;
use crate::cases::{Case, Sequence};
use crate::run::{ARENA, Failed, KV, Weights, bind, fill, read, wait};

/// What a case has a state for: the operation, the state's f32 elements, the sequences.
type Of<'a> = (&'a Op, u64, &'a [Sequence]);

/// A sequence's states: its own, then those of its drafts.
struct States {
    first: u64,
    stride: u64,
}

impl States {
    fn at(&self, drafts: u32) -> u64 {
        self.first + u64::from(drafts) * self.stride
    }
}

fn span(rows: u32, first_position: u32, state: u64, state_out: u64) -> Span<'static> {
    Span {
        first_row: 0,
        n_rows: rows as usize,
        first_position,
        kv_pages: &[],
        state,
        state_out,
        whole: false,
        draft: state != state_out,
    }
}

/// Where the states of each sequence are, one behind the other.
fn placed(sequences: &[Sequence], elements: u64) -> Vec<States> {
    let stride = (elements * 4).next_multiple_of(256);
    let mut end = KV;
    let mut place = |sequence: &Sequence| {
        let first = end;
        end += stride * u64::from(1 + sequence.drafts);
        States { first, stride }
    };
    let states = sequences.iter().map(&mut place).collect();
    assert!(end <= ARENA, "states end at {end}");
    states
}

/// Spans one behind the other, and how many rows they are.
fn side_by_side<'a>(spans: &[Span<'a>]) -> (Vec<Span<'a>>, usize) {
    let mut n_tokens = 0;
    let mut spans = spans.to_vec();
    for span in &mut spans {
        span.first_row = n_tokens;
        n_tokens += span.n_rows;
    }
    (spans, n_tokens)
}

/// Runs a case; its results in the pass, and behind each state that the pass left.
pub(crate) fn run(
    device: &mut dyn Device,
    case: &Case,
    (op, elements, sequences): Of<'_>,
    scratch: Scratch<'_>,
    rng: &mut StdRng,
    failed: Failed<'_>,
) -> Result<Vec<(&'static str, Vec<f32>)>, Error> {
    let weights = Weights::upload(device, case, rng, failed)?;
    let states = placed(sequences, elements);
    let of_all = || sequences.iter().zip(&states);
    let live_out: Vec<Buf> = case.compared.clone();
    let ops = std::slice::from_ref(op);
    let pass = |device: &mut dyn Device,
                spans: &[Span<'_>],
                rng: &mut StdRng,
                times: u32|
     -> Result<Vec<(&'static str, Vec<f32>)>, Error> {
        let (spans, n_tokens) = side_by_side(spans);
        assert!(n_tokens as u64 <= case.tokens, "{n_tokens} rows");
        let batch = Batch {
            n_tokens,
            spans: &spans,
            parts: &[],
            kv: &[],
            rope: &[],
            outputs: &[0],
        };
        let (seed, stamp) = (rng.random(), rng.random());
        let step = [bind(ops, &live_out, weights.bound())];
        for _ in 0..times {
            fill(device, case, scratch, n_tokens, seed).map_err(failed)?;
            match times > 1 {
                true => device.run_all(stamp, &step, scratch, &batch),
                false => device.run(&step[0], scratch, &batch),
            }
            .map_err(failed)?;
        }
        read(device, case, scratch, batch.counts()).map_err(failed)
    };
    let others: Vec<Span<'_>> = of_all()
        .flat_map(|(s, states)| (0..=s.drafts).map(|d| span(1, 0, states.at(d), states.at(d))))
        .collect();
    pass(device, &others, rng, 1)?;
    for (sequence, states) in of_all() {
        let mut first = 0;
        while first < sequence.first {
            let rows = (sequence.first - first).min(case.tokens as u32);
            let before = span(rows, first, states.at(0), states.at(0));
            pass(device, &[before], rng, 1)?;
            first += rows;
        }
    }
    let mut spans = Vec::new();
    for (sequence, states) in of_all() {
        spans.push(span(
            sequence.rows,
            sequence.first,
            states.at(0),
            states.at(0),
        ));
        let behind = sequence.first + sequence.rows;
        let drafts = 0..sequence.drafts;
        spans.extend(drafts.map(|d| span(1, behind + d, states.at(d), states.at(d + 1))));
    }
    let times = if case.recorded { 3 } else { 1 };
    let mut found = pass(device, &spans, rng, times)?;
    let goes_on = |(s, states): (&Sequence, &States)| {
        let on = |d| span(1, s.first + s.rows + d, states.at(d), states.at(d));
        (0..=s.drafts).map(on).collect::<Vec<_>>()
    };
    let spans: Vec<Span<'_>> = of_all().flat_map(goes_on).collect();
    let behind = pass(device, &spans, rng, 1)?;
    found.extend(behind.into_iter().map(|(_, values)| ("behind", values)));
    wait(device, case, scratch).map_err(failed)?;
    weights.forget(device);
    Ok(found)
}

//! The next tokens of a pass whose prompts are still under way.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod bench;

use rocmforge_scheduler::*;

use bench::{Bench, rows};

/// Two that decode, one of which ends after `more` tokens, and a pass with them and a prompt.
fn with_a_prompt(bench: &mut Bench, more: u32) -> ([SeqId; 3], PassPlan) {
    let (short, long) = (bench.comes(4, more), bench.comes(4, 40));
    bench.pass().unwrap();
    let prompt = bench.comes(60, 4);
    let plan = bench.plan().unwrap();
    assert_eq!(plan.decode_spans, 2);
    ([short, long, prompt], plan)
}

/// Tells that the tokens of a pass came, and nothing of its prompts.
fn told(bench: &mut Bench, plan: &PassPlan) {
    let tokens = PassPlan {
        spans: plan.spans[..plan.decode_spans].to_vec(),
        ..plan.clone()
    };
    bench.computed(&tokens);
    bench.scheduler.assert_consistent();
}

#[test]
fn tokens_go_on_while_a_prompt_is_under_way() {
    let mut bench = Bench::new();
    let ([short, long, prompt], plan) = with_a_prompt(&mut bench, 4);
    let mut beside = plan.clone();
    let mut counts = Vec::new();
    loop {
        told(&mut bench, &beside);
        if counts.len() == 8 {
            break;
        }
        beside = bench.scheduler.next_tokens(&beside).unwrap();
        assert_eq!(beside.rows as usize, beside.spans.len());
        for span in &beside.spans {
            let s = bench.scheduler.sequence(span.seq).unwrap();
            assert_eq!(
                (span.first_position, span.rows, span.outputs),
                (s.n_past, 1, 1)
            );
        }
        counts.push(rows(&beside));
    }
    // The first had a token by its prompt and one by the pass, and has room for two.
    assert_eq!(counts[0], [(short.0, 1), (long.0, 1)]);
    assert_eq!(counts[2], [(long.0, 1)]);
    let s = bench.scheduler.sequence(prompt).unwrap();
    assert_eq!((s.n_past, s.known), (0, 60), "nothing was told of it");
    // And then the prompt's rows.
    let chunk = PassPlan {
        spans: plan.spans[plan.decode_spans..].to_vec(),
        decode_spans: 0,
        ..plan
    };
    bench.computed(&chunk);
    assert_eq!(bench.scheduler.sequence(prompt).unwrap().n_past, 16);
    while bench.pass().is_some() {}
    assert_eq!(bench.scheduler.sequences().count(), 0);
}

#[test]
fn who_has_no_reader_or_no_promise_stays_behind() {
    let mut bench = Bench::new();
    let mut open = bench.arrival(4, 40);
    open.open_ended = true;
    let open = bench.come(open);
    let other = bench.comes(4, 40);
    bench.pass().unwrap();
    bench.comes(60, 4);
    let mut plan = bench.plan().unwrap();
    let promised = bench.scheduler.sequence(open).unwrap().promised;
    // It is promised a while at a time, and nobody is admitted meanwhile.
    loop {
        told(&mut bench, &plan);
        let s = bench.scheduler.sequence(open).unwrap();
        plan = bench.scheduler.next_tokens(&plan).unwrap();
        if s.known > promised {
            break;
        }
        assert_eq!(plan.rows, 2);
    }
    assert_eq!(rows(&plan), [(other.0, 1)]);
    told(&mut bench, &plan);
    bench.scheduler.set_ready(other, false);
    assert_eq!(bench.scheduler.next_tokens(&plan), None);
}

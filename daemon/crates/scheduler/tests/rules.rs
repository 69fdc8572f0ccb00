//! What the scheduler promises, one rule a test.

use rocmforge_scheduler::*;

use crate::bench::{A, B, Bench, rows};

#[test]
fn a_pass_has_a_row_of_everyone_who_decodes_and_a_chunk_of_a_prompt() {
    let mut bench = Bench::new();
    (0..3).for_each(|_| _ = bench.comes(5, 50));
    assert_eq!(rows(&bench.pass().unwrap()), [(1, 5), (2, 5), (3, 5)]);
    bench.comes(100, 5);
    let plan = bench.pass().unwrap();
    assert_eq!(rows(&plan), [(1, 1), (2, 1), (3, 1), (4, 16)]);
    assert_eq!((plan.decode_spans, plan.rows), (3, 19));
    let outputs: Vec<u32> = plan.spans.iter().map(|s| s.outputs).collect();
    assert_eq!(outputs, [1, 1, 1, 0], "the prompt goes on");
    assert_eq!(plan.scratch_bytes, 19 + 30);
    assert!(plan.expects_next);
}

#[test]
fn a_prompt_that_delays_nobody_has_the_longest_passes() {
    let mut bench = Bench::new();
    bench.comes(100, 5);
    assert_eq!(rows(&bench.pass().unwrap()), [(1, 64)]);
    assert_eq!(rows(&bench.pass().unwrap()), [(1, 36)]);
}

#[test]
fn a_slow_reader_is_passed_over_and_gives_way_when_nobody_else_goes_on() {
    let mut bench = Bench::new();
    let (slow, other) = (bench.comes(5, 50), bench.comes(5, 50));
    bench.pass().unwrap();
    bench.scheduler.set_ready(slow, false);
    assert_eq!(rows(&bench.pass().unwrap()), [(2, 1)]);
    bench.scheduler.end(other);
    assert!(bench.pass().is_none());
    bench.budget = 100 + 16 + 10 + 60;
    let third = bench.comes(40, 10);
    assert!(bench.plan().is_some());
    assert_eq!(
        bench.actions,
        [Action::Yielded(slow), Action::Admitted(third)]
    );
}

#[test]
fn a_client_is_served_in_the_order_in_which_it_asked() {
    let mut bench = Bench::with(Config {
        running_max: 2,
        ..Config::default()
    });
    let seqs = [9, 7, 8, 5].map(|tokens| bench.comes(tokens, 3));
    let mut admitted = Vec::new();
    while let Some(_plan) = bench.pass() {
        for action in &bench.actions {
            if let Action::Admitted(seq) = action {
                admitted.push(*seq);
            }
        }
    }
    assert_eq!(admitted, seqs);
}

#[test]
fn the_client_that_was_served_least_goes_first() {
    let mut bench = Bench::with(Config {
        running_max: 1,
        ..Config::default()
    });
    // Client 0 asks ten times before client 1 asks once.
    (0..10).for_each(|_| _ = bench.comes(20, 2));
    bench.pass().unwrap();
    let late = Arrival {
        client: ClientId(1),
        ..bench.arrival(20, 2)
    };
    let late = bench.come(late);
    while !bench.running(late) {
        bench.pass().unwrap();
    }
    let waiting = bench.scheduler.waiting();
    assert_eq!(waiting, 9, "it went right after the one that ran");
}

#[test]
fn interactive_goes_before_batch_and_takes_its_room() {
    let mut bench = Bench::new();
    bench.budget = 100 + 10 + 16 + 80;
    let batch = Arrival {
        class: Class::Batch,
        ..bench.arrival(40, 20)
    };
    let batch = bench.come(batch);
    bench.pass().unwrap();
    assert!(bench.running(batch));
    let urgent = bench.comes(30, 10);
    let plan = bench.pass().unwrap();
    assert_eq!(
        bench.actions,
        [Action::Yielded(batch), Action::Admitted(urgent)]
    );
    assert_eq!(plan.spans[0].seq, urgent);
    while bench.scheduler.sequence(urgent).is_some() {
        bench.pass().unwrap();
    }
    let plan = bench.pass().unwrap();
    assert_eq!(
        (plan.spans[0].seq, plan.spans[0].first_position),
        (batch, 0)
    );
    let said = bench.scheduler.sequence(batch).unwrap();
    assert!(said.known >= 40 && said.yields == 1, "{said:?}");
}

#[test]
fn batch_has_its_turn_after_a_bounded_wait_and_then_keeps_its_place() {
    let mut bench = Bench::with(Config {
        running_max: 1,
        batch_patience_passes: 30,
        ..Config::default()
    });
    let batch = Arrival {
        class: Class::Batch,
        client: ClientId(1),
        ..bench.arrival(4, 40)
    };
    let batch = bench.come(batch);
    let mut waited = 0;
    loop {
        bench.comes(4, 3);
        bench.pass().unwrap();
        if bench.running(batch) && waited > 0 {
            break;
        }
        waited += 1;
        assert!(waited < 40);
    }
    let mut left = 40;
    while bench.scheduler.sequence(batch).is_some() {
        bench.comes(4, 3);
        bench.pass().unwrap();
        left -= 1;
        assert!(left > -5, "it ends without yielding again");
    }
}

/// Images of a prompt whose rows see each other: as long as a pass may be, next to each other, and
/// at the prompt's end.
#[test]
fn positions_that_are_kept_whole_have_a_pass_of_all_of_them() {
    let mut bench = Bench::new();
    bench.models[0].rows_max = 20;
    let decoding = bench.comes(1, 40);
    bench.pass().unwrap();
    let seq = bench.comes(60, 2);
    bench.scheduler.keep_whole(seq, &[5..25, 25..30, 42..60]);
    let mut spans = Vec::new();
    while spans.iter().map(|(_, rows)| rows).sum::<u32>() < 60 {
        let plan = bench.pass().unwrap();
        let of_prompt = plan.spans.iter().filter(|span| span.seq == seq);
        spans.extend(of_prompt.map(|span| (span.first_position, span.rows)));
        let said = bench.scheduler.sequence(decoding).unwrap();
        assert!(said.known > 2, "others go on");
    }
    assert_eq!(spans, [(0, 5), (5, 20), (25, 5), (30, 12), (42, 18)]);
}

/// What is there of the first positions needs no pass; the rest is still whole.
#[test]
fn the_rest_of_what_is_kept_whole_is_in_one_pass() {
    let mut bench = Bench::new();
    bench.models[0].rows_max = 14;
    let seq = bench.comes(40, 2);
    let image = 5..30;
    bench
        .scheduler
        .keep_whole(seq, std::slice::from_ref(&image));
    bench.admit();
    bench.scheduler.reused(seq, 16);
    let plan = bench.pass().unwrap();
    assert_eq!((plan.spans[0].first_position, plan.spans[0].rows), (16, 14));
    let plan = bench.pass().unwrap();
    assert_eq!((plan.spans[0].first_position, plan.spans[0].rows), (30, 10));
}

#[test]
fn what_never_fits_is_refused_at_once_with_its_numbers() {
    let mut bench = Bench::new();
    bench.budget = 300;
    bench.comes(10, 10);
    bench.pass().unwrap();
    let large = bench.comes(100, 100);
    bench.plan().unwrap();
    let Some(Action::Refused { seq, why }) = bench.actions.first() else {
        panic!("{:?}", bench.actions);
    };
    let expected = Refusal::NeverFits {
        model: A,
        positions: 200,
        demand: Demand {
            kv_bytes: 200,
            scratch_bytes: 16 + 10,
            segment_bytes: 100,
            held_bytes: 0,
        },
        budget_bytes: 300,
    };
    assert_eq!((*seq, why), (large, &expected));
    assert!(why.to_string().contains("326 bytes"), "{why}");
}

#[test]
fn an_open_end_is_promised_a_while_at_a_time_and_the_newest_yields_when_kv_runs_short() {
    let mut bench = Bench::new();
    bench.budget = 100 + 10 + 16 + 64;
    let open = |bench: &mut Bench| {
        let arrival = Arrival {
            open_ended: true,
            whole: false,
            ..bench.arrival(8, 50)
        };
        bench.come(arrival)
    };
    let (first, second) = (open(&mut bench), open(&mut bench));
    bench.pass().unwrap();
    let promised = |bench: &Bench, seq| bench.scheduler.sequence(seq).unwrap().promised;
    assert_eq!(
        (promised(&bench, first), promised(&bench, second)),
        (16, 16)
    );
    let mut yields = 0;
    while bench.scheduler.sequence(first).is_some() {
        bench.pass().unwrap();
        for action in &bench.actions {
            match action {
                Action::Yielded(seq) => {
                    assert_eq!(*seq, second);
                    yields += 1;
                }
                Action::Admitted(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert!((1..4).contains(&yields), "{yields}");
    while bench.pass().is_some() {}
    assert_eq!(bench.scheduler.sequences().count(), 0, "both ended");
}

#[test]
fn a_lone_prompt_of_a_model_that_does_not_fit_has_longer_passes() {
    let mut bench = Bench::new();
    bench.budget = 100 + 104 + 40;
    bench.comes(100, 4);
    assert_eq!(bench.plan().unwrap().rows, 16, "an eighth of the budget");
    bench.models[0].fits = false;
    bench.models[0].rows_max = 20;
    bench.budget = 100 + 104 + 80;
    assert_eq!(bench.plan().unwrap().rows, 20, "half of what is left");
}

#[test]
fn nobodys_passes_become_shorter_for_one_who_can_wait() {
    let mut bench = Bench::new();
    // Room for passes of 64 rows of a long prompt, and for 40 positions.
    bench.budget = 800;
    bench.comes(400, 200);
    bench.plan().unwrap();
    let second = bench.comes(20, 20);
    bench.plan().unwrap();
    assert!(!bench.running(second), "{:?}", bench.actions);
}

#[test]
fn resident_models_take_turns_and_others_stay_for_what_a_switch_costs() {
    for (switch_bytes, least, most) in [(0, 1, 1), (100, 10, 25)] {
        let mut bench = Bench::new();
        for model in [A, B] {
            let arrival = Arrival {
                model,
                ..bench.arrival(1, 400)
            };
            bench.come(arrival);
        }
        for model in &mut bench.models {
            model.switch_bytes = switch_bytes;
        }
        let models: Vec<ModelId> = (0..200).map(|_| bench.pass().unwrap().model).collect();
        let runs: Vec<usize> = models.chunk_by(|a, b| a == b).map(<[_]>::len).collect();
        let inner = &runs[1..runs.len() - 1];
        assert!(
            inner.iter().all(|run| (least..=most).contains(run)),
            "{switch_bytes}: {runs:?}"
        );
    }
}

#[test]
fn the_next_model_is_foretold() {
    let mut bench = Bench::new();
    for model in [A, B] {
        let arrival = Arrival {
            model,
            ..bench.arrival(1, 60)
        };
        bench.come(arrival);
        bench.models[model.0 as usize].switch_bytes = 50;
    }
    let mut guess: Option<(ModelId, bool, Vec<ModelId>)> = None;
    while bench.scheduler.sequences().count() > 0 {
        bench.admit();
        let upcoming = bench.with_view(|scheduler, view| scheduler.upcoming_models(None, view));
        let plan = bench.plan().unwrap();
        assert_eq!(upcoming[0], plan.model);
        if let Some((last, again, after)) = guess {
            assert_eq!(again, last == plan.model);
            assert_eq!(after[0], plan.model);
        }
        let after = bench.with_view(|scheduler, view| scheduler.upcoming_models(Some(&plan), view));
        guess = Some((plan.model, plan.expects_next, after));
        bench.computed(&plan);
    }
    assert!(guess.is_some_and(|(_, again, after)| !again && after.is_empty()));
}

#[test]
fn drafts_are_rows_that_count_only_if_they_are_right() {
    let mut bench = Bench::new();
    let seq = bench.comes(4, 20);
    bench.pass().unwrap();
    bench.scheduler.propose(seq, 3);
    let plan = bench.plan().unwrap();
    let span = plan.spans[0];
    assert_eq!((span.first_position, span.rows, span.outputs), (4, 4, 4));
    bench.scheduler.computed(&[SpanResult {
        seq,
        rows: 3,
        appended: 3,
        ended: false,
    }]);
    let span = bench.plan().unwrap().spans[0];
    assert_eq!((span.first_position, span.rows), (7, 1));
}

#[test]
fn reused_positions_are_not_computed_again() {
    let mut bench = Bench::new();
    let seq = bench.comes(40, 4);
    assert_eq!(bench.admit(), [Action::Admitted(seq)]);
    bench.scheduler.reused(seq, 32);
    let span = bench.plan().unwrap().spans[0];
    assert_eq!((span.first_position, span.rows, span.outputs), (32, 8, 1));
}

#[test]
fn a_scoring_wants_every_row_but_of_its_last_token_none() {
    let mut bench = Bench::new();
    let arrival = Arrival {
        kind: Kind::Score,
        ..bench.arrival(11, 0)
    };
    bench.come(arrival);
    let plan = bench.plan().unwrap();
    assert_eq!((plan.spans[0].rows, plan.spans[0].outputs), (10, 10));
}

#[test]
fn one_sequence_a_pass_takes_turns_between_prompts_and_tokens() {
    let mut bench = Bench::new();
    bench.spans_max = 1;
    bench.comes(2, 20);
    bench.pass().unwrap();
    bench.comes(60, 20);
    let turns: Vec<u64> = (0..6)
        .map(|_| bench.pass().unwrap().spans[0].seq.0)
        .collect();
    assert_eq!(turns, [1, 2, 1, 2, 1, 2]);
}

#[test]
fn a_deadline_ends_who_waits_and_who_runs() {
    let mut bench = Bench::with(Config {
        running_max: 1,
        ..Config::default()
    });
    let timed = |bench: &mut Bench, deadline| {
        let arrival = Arrival {
            deadline: Some(Tick(deadline)),
            ..bench.arrival(4, 40)
        };
        bench.come(arrival)
    };
    let (running, waiting) = (timed(&mut bench, 5), timed(&mut bench, 3));
    bench.pass().unwrap();
    bench.now = 3;
    assert_eq!(bench.admit(), [Action::Expired(waiting)]);
    bench.now = 5;
    assert_eq!(bench.admit(), [Action::Expired(running)]);
}

#[test]
fn memory_that_is_refused_again_and_again_ends_the_request() {
    let mut bench = Bench::with(Config {
        refusals_max: 2,
        ..Config::default()
    });
    let seq = bench.comes(4, 4);
    for refusals in 1..=3 {
        assert_eq!(rows(&bench.plan().unwrap()), [(1, 4)]);
        assert_eq!(bench.scheduler.memory_refused([seq]), refusals);
    }
    let why = Refusal::DriverRefuses { refusals: 3 };
    assert_eq!(bench.admit(), [Action::Refused { seq, why }]);
}

#[test]
fn what_is_lost_is_computed_again_and_needs_are_told() {
    let mut bench = Bench::new();
    let seqs = [30, 50].map(|tokens| bench.comes(tokens, 10));
    bench.pass().unwrap();
    assert_eq!(bench.scheduler.sequence(seqs[0]).unwrap().n_past, 30);
    bench.scheduler.start_over(seqs[0]);
    let status = bench.scheduler.sequence(seqs[0]).unwrap();
    assert_eq!((status.n_past, status.known, status.running), (0, 31, true));
    let [alone, other] =
        seqs.map(|seq| bench.with_view(|scheduler, view| scheduler.needed_alone(seq, view)));
    let all = bench.with_view(|scheduler, view| scheduler.needed(view));
    assert!(alone < other && other < all, "{alone} {other} {all}");
    let nobody = SeqId(u64::MAX);
    assert_eq!(
        bench.with_view(|scheduler, view| scheduler.needed_alone(nobody, view)),
        0
    );
}

#[test]
fn the_least_budget_is_one_in_which_all_that_began_ends() {
    let mut bench = Bench::new();
    let seqs = [30, 50, 20].map(|tokens| bench.comes(tokens, 10));
    bench.pass().unwrap();
    assert!(seqs.iter().all(|seq| bench.running(*seq)));
    bench.budget = bench.with_view(|scheduler, view| scheduler.budget_least(view));
    // By single rows, if need be.
    assert_eq!(bench.budget, 100 + 60 + 1 + 10);
    let mut yielded = 0;
    while bench.pass().is_some() {
        for action in &bench.actions {
            assert!(!matches!(action, Action::Refused { .. }), "{action:?}");
            yielded += usize::from(matches!(action, Action::Yielded(_)));
        }
    }
    assert!(yielded > 0 && bench.scheduler.sequences().count() == 0);
}

#[test]
fn a_full_queue_takes_nobody() {
    let mut bench = Bench::with(Config {
        waiting_max: 1,
        ..Config::default()
    });
    bench.comes(4, 4);
    let arrival = bench.arrival(4, 4);
    let full = NotTaken::QueueFull {
        waiting: 1,
        waiting_max: 1,
    };
    assert_eq!(bench.scheduler.arrive(arrival), Err(full));
    assert!(bench.scheduler.sequence(arrival.seq).is_none());
}

#[test]
fn a_model_that_is_unloaded_takes_its_sequences_along() {
    let mut bench = Bench::new();
    let a = bench.comes(4, 4);
    let arrival = Arrival {
        model: B,
        ..bench.arrival(4, 4)
    };
    let b = bench.come(arrival);
    bench.pass().unwrap();
    assert_eq!(bench.scheduler.model_unloaded(A), [a]);
    assert_eq!(bench.plan().unwrap().spans[0].seq, b);
}

#[test]
fn what_only_keeps_admits_nobody() {
    let (mut bench, mut actions) = (Bench::new(), Vec::new());
    bench.comes(4, 20);
    bench.with_view(|scheduler, view| scheduler.keep(view, Tick(0), &mut actions));
    assert!(actions.is_empty() && bench.admit().len() == 1);
}

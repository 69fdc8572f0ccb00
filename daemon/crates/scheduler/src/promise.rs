//! Gaps between tokens that are promised.
//!
//! For each model with sequences that were promised a gap, the engine reports when the next tokens
//! are due and how long the pass takes that computes them ([`Promise`]). Passes follow one another,
//! so the *slack* of all promises is the time until the first of these passes has to begin: the one
//! whose tokens are due last ends when they are due, each other one ends before the next one
//! begins.
//!
//! The model whose turn it is runs as long as its next uninterruptible *piece* fits into the slack.
//! Otherwise the pass whose tokens are due first goes first, whatever the turns say
//! ([`Scheduler::before_promises`](crate::Scheduler)). It is charged as usual, so a model that goes
//! first has less time later: a promise takes what it needs, and no more.
//!
//! [`least_gap`] computes which gap can be held, so that only such gaps are promised.

/// The promise to a model's running sequences: when their next tokens are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// Microseconds until the first of the next tokens is due; 0 if it is late, `u64::MAX` while no
    /// sequence waits for one.
    pub due_us: u64,
    /// Microseconds of the pass that computes these tokens, or of what is left of it.
    pub pass_us: u64,
    /// The shortest gap promised to a sequence of the model, in microseconds.
    pub gap_us: u64,
}

/// The promises of a model as admission counts them: gap and pass time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The shortest promised gap, in microseconds.
    pub gap_us: u64,
    /// Microseconds of a pass that computes the promised tokens.
    pub pass_us: u64,
}

/// What makes a requested gap too short to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooShort {
    /// The pass of the sequence's own model takes as long as the gap.
    OwnPass,
    /// The longest piece of other work that cannot be interrupted.
    Piece,
    /// The passes of other models with promises.
    Promises,
}

/// The requested gap cannot be held; says which one could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CannotHold {
    /// The shortest gap that could be held, in microseconds; `None` if there is none, because
    /// existing promises would be broken.
    pub least_us: Option<u64>,
    /// What makes the gap too short.
    pub why: TooShort,
}

/// Upper bound on promised gaps, in microseconds; also bounds the search for one.
const GAP_US_MAX: u64 = 3_600_000_000;

/// Maximum share of the time that all promised passes may take together. Closer to 1 the search for
/// the longest gap takes too many steps.
const PART_MAX: f64 = 0.99;

/// Longest possible gap in microseconds: a piece that has just begun, the model's own pass, and
/// passes of others that are due meanwhile; `None` if that exceeds `most_us`.
fn longest_us(own: Share, others: &[Share], piece_us: u64, most_us: u64) -> Option<u64> {
    let alone = own.pass_us.saturating_add(piece_us);
    let part = |other: &Share| other.pass_us as f64 / other.gap_us.max(1) as f64;
    let parts: f64 = others.iter().map(part).sum();
    if parts > PART_MAX {
        return None;
    }
    // Passes that came without rounding up would take this: the search begins near its end.
    let least = (alone as f64 / (1.0 - parts) * (1.0 - 1e-9)) as u64;
    let mut gap_us = least.max(alone).max(1);
    while gap_us <= most_us {
        let passes = others.iter().map(|other| {
            let times = gap_us.div_ceil(other.gap_us.max(1));
            times.saturating_mul(other.pass_us)
        });
        match passes.fold(alone, u64::saturating_add) {
            more if more > gap_us => gap_us = more,
            _ => return Some(gap_us),
        }
    }
    None
}

/// Whether existing promises can still be held beside one more.
fn keep_theirs(more: Share, others: &[Share], piece_us: u64) -> bool {
    (0..others.len()).all(|at| {
        let mut beside = others.to_vec();
        let own = std::mem::replace(&mut beside[at], more);
        longest_us(own, &beside, piece_us, own.gap_us).is_some()
    })
}

/// Checks that a model can be promised the gap `asked`, where `others` are other models' promises
/// and no uninterruptible piece of other work is longer than `piece_us`.
///
/// This is the response time of tasks with deadlines that cannot be stopped, in which each pass may
/// come as often as its gap says.
///
/// # Errors
/// The gap cannot be held; says which one could.
pub fn least_gap(asked: Share, others: &[Share], piece_us: u64) -> Result<(), CannotHold> {
    let cannot = |least_us, why| Err(CannotHold { least_us, why });
    let with = |gap_us| keep_theirs(Share { gap_us, ..asked }, others, piece_us);
    let Some(own) = longest_us(asked, others, piece_us, GAP_US_MAX).filter(|_| with(GAP_US_MAX))
    else {
        return cannot(None, TooShort::Promises);
    };
    // The longer its gap, the more is left to the others.
    let (mut too_short, mut least) = (own.saturating_sub(1), GAP_US_MAX);
    if with(own) {
        least = own;
    }
    while least - too_short > 1 {
        let between = u64::midpoint(too_short, least);
        match with(between) {
            true => least = between,
            false => too_short = between,
        }
    }
    if asked.gap_us >= least {
        return Ok(());
    }
    let fits = |piece_us| longest_us(asked, others, piece_us, asked.gap_us).is_some();
    let why = match asked.pass_us > asked.gap_us {
        true => TooShort::OwnPass,
        false if fits(0) && with(asked.gap_us.max(1)) => TooShort::Piece,
        false => TooShort::Promises,
    };
    cannot(Some(least), why)
}

/// Whether a slice has to end after the step that it just ran: it has run for `elapsed_us` of
/// `limit_us`, and a further step may take as long as the longest so far.
#[must_use]
pub fn slice_is_over(elapsed_us: u64, longest_step_us: u64, limit_us: u64) -> bool {
    elapsed_us.saturating_add(longest_step_us) > limit_us
}

/// Microseconds until the first promised pass has to begin; `None` if no sequence waits for
/// promised tokens.
pub fn slack_us(promises: impl Iterator<Item = Promise>) -> Option<u64> {
    let mut promises: Vec<Promise> = promises.collect();
    promises.sort_unstable_by_key(|p| std::cmp::Reverse(p.due_us));
    let latest = promises.iter().fold(None, |latest: Option<u64>, p| {
        let end = latest.map_or(p.due_us, |latest| latest.min(p.due_us));
        Some(end.saturating_sub(p.pass_us))
    });
    latest.filter(|slack| *slack < u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promise(due_us: u64, pass_us: u64) -> Promise {
        Promise {
            due_us,
            pass_us,
            gap_us: due_us,
        }
    }

    fn share(gap_us: u64, pass_us: u64) -> Share {
        Share { gap_us, pass_us }
    }

    #[test]
    fn passes_that_follow_one_another_leave_less_than_each_alone() {
        let of = |promises: &[Promise]| slack_us(promises.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[promise(50, 8)]), Some(42));
        // Both are due at the same time: one has to end before the other begins.
        assert_eq!(of(&[promise(50, 8), promise(50, 5)]), Some(37));
        // The later one leaves room enough.
        assert_eq!(of(&[promise(50, 8), promise(90, 5)]), Some(42));
        assert_eq!(of(&[promise(50, 8), promise(53, 9)]), Some(36));
        assert_eq!(of(&[promise(5, 8)]), Some(0));
        // Nobody waits for these tokens.
        assert_eq!(of(&[promise(u64::MAX, 8)]), None);
        assert_eq!(of(&[promise(u64::MAX, 8), promise(50, 5)]), Some(45));
    }

    #[test]
    fn a_gap_is_as_long_as_what_comes_in_it() {
        assert_eq!(least_gap(share(10, 10), &[], 0), Ok(()));
        let too_short = |asked, others: &[Share], piece| least_gap(asked, others, piece).err();
        let cannot = |least_us, why| Some(CannotHold { least_us, why });
        assert_eq!(
            too_short(share(9, 10), &[], 3),
            cannot(Some(13), TooShort::OwnPass)
        );
        assert_eq!(
            too_short(share(12, 10), &[], 3),
            cannot(Some(13), TooShort::Piece)
        );
        assert_eq!(too_short(share(13, 10), &[], 3), None);
        // A pass of the other comes in the gap of 17, two in that of 25.
        let other = [share(20, 4)];
        assert_eq!(
            too_short(share(16, 10), &other, 3),
            cannot(Some(17), TooShort::Promises)
        );
        assert_eq!(too_short(share(25, 10), &other, 3), None);
        // Of what the other leaves it takes too much.
        assert_eq!(
            too_short(share(1000, 14), &other, 3),
            cannot(None, TooShort::Promises)
        );
    }

    /// These would take millions of rounds each if every pass was counted.
    #[test]
    fn what_takes_nearly_all_of_the_time_is_refused_at_once() {
        let cannot = |asked, others: &[Share]| least_gap(asked, others, 1).unwrap_err().least_us;
        for other in [share(1, 1), share(1_000_000, 999_999), share(100, 101)] {
            assert_eq!(cannot(share(3_000_000_000, 1), &[other, share(7, 0)]), None);
        }
        // 98 of 100 are taken: of the rest it has what it asks for, with the piece.
        let other = share(100, 98);
        assert_eq!(
            longest_us(share(9_000, 99), &[other], 1, 9_000),
            Some(5_000)
        );
        assert_eq!(longest_us(share(9_000, 99), &[other], 1, 4_999), None);
    }

    #[test]
    fn what_is_held_is_never_shorter_than_what_comes_in_it() {
        use rand::{RngExt, SeedableRng};
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        let mut tried = 0;
        for _ in 0..8_000 {
            let n = rng.random_range(0..4);
            let others: Vec<Share> = (0..n)
                .map(|_| share(rng.random_range(1..400), rng.random_range(0..60)))
                .collect();
            let asked = share(rng.random_range(1..400), rng.random_range(0..60));
            let piece = rng.random_range(0..60);
            // The others have what they were promised.
            let held = |at: usize| {
                let mut beside = others.clone();
                let own = beside.remove(at);
                longest_us(own, &beside, piece, own.gap_us).is_some()
            };
            if !(0..others.len()).all(held) {
                continue;
            }
            tried += 1;
            let held = least_gap(asked, &others, piece);
            if held.is_ok() {
                assert!(longest_us(asked, &others, piece, asked.gap_us).is_some());
                assert!(keep_theirs(asked, &others, piece), "{asked:?} {others:?}");
            }
            // Who asks for the least that it is told is not told another one.
            if let Err(CannotHold {
                least_us: Some(least),
                ..
            }) = held
            {
                assert!(least > asked.gap_us, "{asked:?} {others:?} {piece}");
                let again = share(least, asked.pass_us);
                assert_eq!(
                    least_gap(again, &others, piece),
                    Ok(()),
                    "{asked:?} {others:?}"
                );
            }
        }
        assert!(tried > 500, "{tried}");
    }
}

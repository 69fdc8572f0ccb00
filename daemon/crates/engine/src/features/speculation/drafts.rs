//! N-gram speculation: drafts tokens from the request's own text. Where its last tokens occurred
//! before, the tokens that followed then are drafted now. A pass computes a row for each draft
//! beside the row of the last known token; each row's token is chosen as it would be without
//! drafts, and a draft that is not the token chosen before it ends the sequence's part in the pass.
//! So on the CPU the text does not depend on drafts, whatever the sampling. On a GPU the kernel
//! depends on the number of rows, and the text may differ where two tokens are nearly equal.
//!
//! Whether drafts are faster depends on the cost of rows and on the acceptance rate. Both are
//! measured: the time of passes by their rows, and the acceptance by sequence. If drafts are not
//! faster, few or none are made, and after a while they are tried again.
//!
//! If the text has no match, the model's MTP head drafts one token
//! ([`crate::features::speculation::mtp`]). Its first drafts are made whatever they cost, to learn
//! the acceptance rate; a sequence that made none for a while stops using it.
//!
//! A draft model, if there is one, drafts after a pass what the next pass checks
//! ([`crate::features::speculation::draft_model`]), for all sequences together, and as many as are
//! worth the time of both models. N-gram drafts are used where they gain more.
//!
//! A sequence with a recurrent state drafts at most as many tokens as its model has spare states
//! ([`crate::features::speculation::spare_states`]).

use crate::pass::times::PassTimes;
use std::collections::HashMap;

/// Number of tokens of an n-gram that is looked up in the text.
const GRAM: usize = 3;

/// Numbers of draft tokens that a sequence may make in a pass: few different ones, since a device
/// may capture a graph for each.
const DRAFTS: [usize; 3] = [7, 3, 1];

/// Assumed acceptance rate before any draft was made.
pub(crate) const LIKELY_AT_FIRST: f64 = 0.6;

/// Weight of a new outcome in the moving average of acceptance.
const WEIGHT: f64 = 1.0 / 16.0;

/// Rate at which the estimate of a sequence that makes no drafts recovers per token, so that drafts
/// are tried again.
const RECOVERY: f64 = 1.0 / 128.0;

/// Rate of recovery per token for drafts of a draft model, which first has to catch up with the
/// text.
const MODEL_RECOVERY: f64 = 1.0 / 512.0;

/// Minimum gain in tokens per second for drafts to be made, since times are noisy.
const GAIN_MIN: f64 = 1.05;

/// Number of drafts of the MTP head that are made whatever they cost.
const TRIALS: u32 = 16;

/// Number of passes without a use of the MTP head's draft after which a sequence stops using the
/// head.
const TIRED_PASSES: u32 = 64;

/// State of speculation of one sequence.
#[derive(Debug)]
pub(crate) struct Drafts {
    /// Position after the last occurrence of each n-gram of the text.
    behind: HashMap<[u32; GRAM], u32>,
    /// Number of tokens that were indexed.
    seen: usize,
    /// Moving average of the probability that a draft token is accepted if those before it were.
    likely: f64,
    /// The draft tokens for the next pass.
    pub(crate) next: Vec<u32>,
    /// The drafter of `next`.
    by: By,
    block: BlockDrafts,
    model: ModelDrafts,
}

/// A drafter: n-gram, MTP head or draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// N-gram: the tokens occurred in the text before.
    Text,
    /// The model's MTP head.
    Block,
    /// The model's draft model.
    Model,
}

/// The draft model's drafts for a sequence, and their acceptance.
#[derive(Debug, Default)]
struct ModelDrafts {
    /// Draft tokens of the draft model, preceded by the number of tokens of the text after which
    /// they follow.
    foretold: Option<(usize, Vec<u32>)>,
    /// Probability that a draft token is accepted if those before it were; `None` before it is
    /// known.
    likely: Option<f64>,
    /// Number of passes since the draft model's drafts were last useful.
    unused: u32,
}

/// The MTP head's drafts for a sequence, and their acceptance.
#[derive(Debug)]
struct BlockDrafts {
    /// Draft token of the MTP head, preceded by the number of tokens of the text after which it
    /// follows.
    foretold: Option<(usize, u32)>,
    likely: f64,
    made: u32,
    /// Number of passes since the MTP head's draft was last used.
    unused: u32,
}

impl Default for Drafts {
    fn default() -> Self {
        Self {
            behind: HashMap::new(),
            seen: 0,
            likely: LIKELY_AT_FIRST,
            next: Vec::new(),
            by: By::Text,
            model: ModelDrafts::default(),
            block: BlockDrafts {
                foretold: None,
                likely: LIKELY_AT_FIRST,
                made: 0,
                unused: 0,
            },
        }
    }
}

impl Drafts {
    /// Drafts at most `most` tokens that follow `tokens`, for a pass that has `rows` rows without
    /// them. Returns the number of drafts.
    pub(crate) fn draft(
        &mut self,
        tokens: &[u32],
        most: usize,
        rows: usize,
        times: &PassTimes,
    ) -> usize {
        self.next.clear();
        self.by = By::Text;
        let from = self.look_through(tokens);
        let Some(from) = from else {
            return 0;
        };
        let there = &tokens[from..];
        let most = most.min(there.len());
        let n = times.worth(self.likely, most, rows);
        if n == 0 {
            recover(&mut self.likely, RECOVERY);
        }
        self.next.extend_from_slice(&there[..n]);
        n
    }

    /// Factor by which up to `most` n-gram drafts after `tokens` would raise tokens per second in a
    /// pass that has `rows` rows without them; 1 is no gain.
    pub(crate) fn gain_of_text(
        &mut self,
        tokens: &[u32],
        most: usize,
        rows: usize,
        times: &PassTimes,
    ) -> f64 {
        let from = self.look_through(tokens);
        let there = from.map_or(0, |from| tokens.len() - from);
        times.best(self.likely, most.min(there), rows).1
    }

    /// Acceptance rate of the draft model's drafts for this sequence; `otherwise` before it is
    /// known.
    pub(crate) fn likely_of_model(&mut self, otherwise: impl FnOnce() -> f64) -> f64 {
        *self.model.likely.get_or_insert_with(otherwise)
    }

    /// Records that the draft model was not used after this pass. Returns whether that has been so
    /// for long.
    pub(crate) fn rest_model(&mut self) -> bool {
        let model = &mut self.model;
        if let Some(likely) = &mut model.likely {
            recover(likely, MODEL_RECOVERY);
        }
        model.unused = model.unused.saturating_add(1);
        model.unused > TIRED_PASSES
    }

    /// Sets the draft model's draft tokens that follow the first `known` tokens.
    pub(crate) fn foretell_all(&mut self, known: usize, drafts: Vec<u32>) {
        self.model.unused = 0;
        self.model.foretold = Some((known, drafts));
    }

    /// Takes the tokens that the draft model has predicted after `known` tokens, at most `most`, as
    /// drafts. Returns their number.
    pub(crate) fn take_foretold(&mut self, known: usize, most: usize) -> usize {
        let foretold = self.model.foretold.as_ref();
        let Some((_, drafts)) = foretold.filter(|(at, _)| *at == known) else {
            return 0;
        };
        self.by = By::Model;
        self.next.clear();
        self.next.extend(drafts.iter().take(most));
        self.next.len()
    }

    /// The drafter of the next pass's drafts.
    pub(crate) fn by(&self) -> By {
        self.by
    }

    /// Indexes new tokens. Returns the position after the last earlier occurrence of the text's
    /// last n-gram.
    fn look_through(&mut self, tokens: &[u32]) -> Option<usize> {
        // The run that ends with the last token is looked up before it is noted.
        let ends = self.seen.max(GRAM)..tokens.len();
        for end in ends {
            self.behind.insert(gram(&tokens[..end])?, end as u32);
        }
        self.seen = tokens.len();
        let last = gram(tokens)?;
        self.behind.get(&last).map(|&at| at as usize)
    }

    /// Sets the MTP head's draft `token` that follows the first `known` tokens.
    pub(crate) fn foretell(&mut self, known: usize, token: u32) {
        self.block.foretold = Some((known, token));
    }

    /// Uses the MTP head's draft after `known` tokens, if that is worthwhile in a pass of `rows`
    /// rows without it; the head itself takes `block_seconds`. Returns the number of drafts, 0 or
    /// 1.
    pub(crate) fn foretold(
        &mut self,
        known: usize,
        rows: usize,
        times: &PassTimes,
        block_seconds: f64,
    ) -> usize {
        let block = &mut self.block;
        let Some((_, token)) = block.foretold.filter(|(at, _)| *at == known) else {
            return 0;
        };
        if block.made >= TRIALS && !times.pays(block.likely, rows, block_seconds) {
            return 0;
        }
        self.by = By::Block;
        self.next.push(token);
        1
    }

    /// Records that a pass with this sequence was computed. Returns whether the MTP head's drafts
    /// have not been worthwhile for long.
    pub(crate) fn is_tired(&mut self) -> bool {
        let block = &mut self.block;
        block.unused += 1;
        block.unused > TIRED_PASSES
    }

    /// Records that of `made` draft tokens the first `right` were accepted.
    pub(crate) fn note(&mut self, made: usize, right: usize) {
        let likely = match self.by {
            By::Text => &mut self.likely,
            By::Block => &mut self.block.likely,
            By::Model => self.model.likely.get_or_insert(LIKELY_AT_FIRST),
        };
        learn(likely, made, right);
        if self.by == By::Block {
            self.block.made += made as u32;
            self.block.unused = 0;
        }
        self.by = By::Text;
        self.next.clear();
    }
}

/// Updates the acceptance rate: of `made` draft tokens the first `right` were accepted.
pub(crate) fn learn(likely: &mut f64, made: usize, right: usize) {
    let wrong = usize::from(right < made);
    for outcome in std::iter::repeat_n(1.0, right).chain(std::iter::repeat_n(0.0, wrong)) {
        *likely += (outcome - *likely) * WEIGHT;
    }
}

/// Raises an estimate by a step, so that what was found unlikely is tried again.
pub(crate) fn recover(likely: &mut f64, by: f64) {
    *likely += (LIKELY_AT_FIRST - *likely).max(0.0) * by;
}

/// The last n-gram of the tokens; `None` if there are too few.
fn gram(tokens: &[u32]) -> Option<[u32; GRAM]> {
    tokens.last_chunk().copied()
}

impl PassTimes {
    /// Whether one draft token of this acceptance rate is worthwhile beside `rows` rows, if it
    /// takes `seconds` to make.
    fn pays(&self, likely: f64, rows: usize, seconds: f64) -> bool {
        let (Some(without), Some(with)) = (self.seconds(rows), self.seconds(rows + 1)) else {
            return false;
        };
        (rows as f64 + likely) / rows as f64 * without / (with + seconds) > GAIN_MIN
    }

    /// Number of draft tokens of this acceptance rate, at most `most`, that are worth their rows
    /// beside `rows` others.
    fn worth(&self, likely: f64, most: usize, rows: usize) -> usize {
        self.best(likely, most, rows).0
    }

    /// Number of draft tokens of this acceptance rate that are worth their rows, and the factor by
    /// which they raise tokens per second.
    fn best(&self, likely: f64, most: usize, rows: usize) -> (usize, f64) {
        let chance = Chance {
            likely,
            most,
            unknown: 0,
        };
        let worth = self.worth_of_model(&[chance], rows, &|_, _| 0.0);
        (worth.drafts, worth.gain)
    }

    /// Number of draft tokens that are worth their rows beside `rows` others, and for how many of
    /// `chances`, which are in descending order of likelihood. `drafting` returns the seconds that
    /// the draft model takes for a number of drafts of each.
    pub(crate) fn worth_of_model(
        &self,
        chances: &[Chance],
        rows: usize,
        drafting: &dyn Fn(&[Chance], usize) -> f64,
    ) -> Worth {
        let mut best = Worth::NOTHING;
        let Some(without) = self.seconds(rows) else {
            return best;
        };
        for n in DRAFTS {
            let (mut right, mut more) = (0.0, 0);
            for (i, chance) in chances.iter().enumerate() {
                let most = n.min(chance.most);
                right += (1..=most)
                    .map(|i| chance.likely.powi(i as i32))
                    .sum::<f64>();
                more += most;
                let Some(with) = self.seconds(rows + more) else {
                    break;
                };
                let with = with + drafting(&chances[..=i], n);
                let gain = (rows as f64 + right) / rows as f64 * without / with;
                if gain > best.gain.max(GAIN_MIN) && (most == n || chances.len() > 1) {
                    best = Worth {
                        drafts: n,
                        sequences: i + 1,
                        gain,
                    };
                }
            }
        }
        best
    }
}

/// A sequence for which tokens could be drafted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chance {
    /// Probability that a draft token is accepted if those before it were.
    pub(crate) likely: f64,
    /// Maximum number of draft tokens of the sequence.
    pub(crate) most: usize,
    /// Number of rows that the draft model has to compute first to catch up.
    pub(crate) unknown: usize,
}

/// Number of draft tokens worth computing, and their gain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Worth {
    /// Maximum number of draft tokens of each sequence.
    pub(crate) drafts: usize,
    /// Number of sequences to draft for.
    pub(crate) sequences: usize,
    /// Factor by which drafts raise tokens per second.
    pub(crate) gain: f64,
}

impl Worth {
    const NOTHING: Self = Self {
        drafts: 0,
        sequences: 0,
        gain: 1.0,
    };
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pass::times::{ROWS_MAX, STALE_PASSES};

    /// Times of a device on which a row costs `each` of what a pass costs anyway.
    fn times(each: f64) -> PassTimes {
        let mut times = PassTimes::default();
        for rows in 1..=ROWS_MAX {
            times.note(rows, Duration::from_secs_f64(1.0 + each * rows as f64));
        }
        times
    }

    #[test]
    fn what_followed_before_is_drafted_again() {
        let mut drafts = Drafts::default();
        let cheap = times(0.01);
        let text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3];
        assert_eq!(drafts.draft(&text, 20, 1, &cheap), 7);
        assert_eq!(drafts.next, [4, 5, 6, 7, 8, 9, 1]);
        assert_eq!(drafts.draft(&text, 5, 1, &cheap), 3);
        // Where it stood last counts.
        let longer = [&text[..], &[7, 7, 1, 2, 3]].concat();
        drafts.draft(&longer, 2, 1, &cheap);
        assert_eq!(drafts.next, [7]);
        assert_eq!(
            drafts.draft(&[&longer[..], &[50]].concat(), 9, 1, &cheap),
            0
        );
        assert_eq!(Drafts::default().draft(&[1, 2], 9, 1, &cheap), 0);
    }

    #[test]
    fn drafts_are_made_while_they_pay() {
        let text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3];
        let (cheap, dear) = (times(0.01), times(100.0));
        assert_eq!(
            PassTimes::default().worth(0.9, 7, 1),
            0,
            "nothing is measured"
        );
        // Rows as dear as passes: no draft pays, however likely.
        assert_eq!(dear.worth(0.9, 7, 1), 0);
        let mut drafts = Drafts::default();
        let mut tried = 0;
        for _ in 0..200 {
            let n = drafts.draft(&text, 7, 1, &cheap);
            tried += usize::from(n > 0);
            if n > 0 {
                drafts.note(n, 0);
            }
        }
        assert!(
            (10..150).contains(&tried),
            "wrong ones are made less often: {tried}"
        );
        for _ in 0..50 {
            drafts.likely = drafts.likely.max(0.3);
            let n = drafts.draft(&text, 7, 1, &cheap);
            drafts.note(n, n);
        }
        assert_eq!(drafts.draft(&text, 7, 1, &cheap), 7);
        // Beside many others a row costs more than it brings.
        let mut steps = PassTimes::default();
        for rows in 1..=ROWS_MAX {
            steps.note(
                rows,
                Duration::from_millis(if rows <= 8 { 10 } else { 5 * rows as u64 }),
            );
        }
        assert_eq!(steps.worth(0.9, 7, 1), 7);
        assert_eq!(steps.worth(0.9, 7, 64), 0);
    }

    #[test]
    fn what_the_block_foretold_is_drafted_while_it_pays() {
        let (cheap, dear) = (times(0.01), times(100.0));
        let text = [1, 2, 3, 4];
        let mut drafts = Drafts::default();
        assert_eq!(drafts.draft(&text, 7, 1, &dear), 0);
        assert_eq!(drafts.foretold(4, 1, &dear, 0.1), 0, "nothing is foretold");
        drafts.foretell(4, 5);
        assert_eq!(drafts.foretold(5, 1, &dear, 0.1), 0, "for another place");
        for _ in 0..TRIALS {
            assert_eq!(drafts.foretold(4, 1, &dear, 0.1), 1);
            assert_eq!(drafts.next, [5]);
            drafts.note(1, 1);
        }
        // The likelihood of what the text repeats is another one.
        assert_eq!(drafts.likely, LIKELY_AT_FIRST);
        assert!(drafts.block.likely > 0.8);
        assert_eq!(drafts.foretold(4, 1, &dear, 0.1), 0);
        assert_eq!(drafts.foretold(4, 1, &cheap, 0.1), 1);
        // The block itself may take too long.
        drafts.note(1, 1);
        assert_eq!(drafts.foretold(4, 1, &cheap, 2.0), 0);
        // Where something repeats, that is drafted, and counts for itself.
        let text = [1, 2, 3, 4, 1, 2, 3];
        drafts.foretell(7, 9);
        let known = drafts.block.likely;
        assert_eq!(drafts.draft(&text, 1, 1, &cheap), 1);
        assert_eq!(drafts.next, [4]);
        drafts.note(1, 0);
        assert_eq!(drafts.block.likely, known);
        assert!(drafts.likely < LIKELY_AT_FIRST);
        for _ in 0..TIRED_PASSES {
            assert!(!drafts.is_tired());
        }
        assert!(drafts.is_tired());
    }

    #[test]
    fn a_draft_model_drafts_for_those_for_whom_it_pays() {
        let cheap = times(0.01);
        let chance = |likely| Chance {
            likely,
            most: 7,
            unknown: 1,
        };
        let each = |seconds: f64| move |_: &[Chance], n: usize| seconds * n as f64;
        let (likely, unlikely) = (chance(0.9), chance(0.05));
        let worth = cheap.worth_of_model(&[likely], 1, &each(0.1));
        assert_eq!((worth.drafts, worth.sequences), (7, 1));
        assert!(worth.gain > 3.0 && worth.gain < 3.5, "{worth:?}");
        // Its own time counts, and so does what there may be of them.
        assert_eq!(cheap.worth_of_model(&[likely], 1, &each(0.5)).drafts, 3);
        let few = Chance { most: 2, ..likely };
        assert_eq!(cheap.worth_of_model(&[few], 1, &each(0.1)).drafts, 1);
        let nothing = cheap.worth_of_model(&[likely], 1, &each(1.0));
        assert_eq!(nothing, Worth::NOTHING);
        // Those that are hardly ever right are left out.
        let worth = cheap.worth_of_model(&[likely, unlikely], 2, &each(0.1));
        assert_eq!((worth.drafts, worth.sequences), (7, 1));
        // With many sequences a row costs what it is worth.
        let dear = times(1.0);
        assert_eq!(dear.worth_of_model(&[likely; 32], 32, &each(0.1)).drafts, 0);
        assert_eq!(dear.worth_of_model(&[], 1, &each(0.1)), Worth::NOTHING);
    }

    #[test]
    fn what_the_draft_model_foretold_is_drafted_at_its_place() {
        let mut drafts = Drafts::default();
        assert_eq!(drafts.likely_of_model(|| 0.5), 0.5);
        drafts.foretell_all(4, vec![5, 6, 7]);
        assert_eq!(drafts.take_foretold(5, 9), 0, "for another place");
        assert_eq!(drafts.take_foretold(4, 0), 0);
        // A sequence that was left out of a pass has its drafts in the next one.
        for most in [9, 2] {
            assert_eq!(drafts.take_foretold(4, most), most.min(3));
            assert_eq!(drafts.by(), By::Model);
        }
        assert_eq!(drafts.next, [5, 6]);
        drafts.note(2, 2);
        assert!(drafts.likely_of_model(|| 0.0) > 0.5);
        assert_eq!(drafts.likely, LIKELY_AT_FIRST);
        // One that is of no use for long gives its part back, and comes to be tried again.
        drafts.model.likely = Some(0.1);
        for _ in 0..TIRED_PASSES {
            assert!(!drafts.rest_model());
        }
        assert!(drafts.rest_model());
        let likely = drafts.likely_of_model(|| 0.0);
        assert!(0.1 < likely && likely < 0.2, "{likely}");
        drafts.foretell_all(9, vec![1]);
        assert!(!drafts.rest_model());
    }

    #[test]
    fn a_size_that_was_not_measured_is_tried_and_old_times_are_forgotten() {
        let mut times = PassTimes::default();
        times.note(1, Duration::from_millis(10));
        assert_eq!(times.worth(0.9, 7, 1), 7);
        times.note(8, Duration::from_millis(100));
        assert_eq!(times.worth(0.9, 7, 1), 3);
        times.note(4, Duration::from_millis(100));
        times.note(2, Duration::from_millis(100));
        assert_eq!(times.worth(0.9, 7, 1), 0);
        for _ in 0..STALE_PASSES {
            times.note(1, Duration::from_millis(10));
        }
        assert_eq!(times.worth(0.9, 7, 1), 7);
    }
}

//! Memory of a sequence on the device: KV pages for each group of the plan, allocated as the
//! sequence grows and freed behind the group's window, and the recurrent state.
//!
//! Full pages are handed to the prefix cache ([`crate::features::prefix_cache`]), and the sequence
//! becomes one of their users; a new sequence begins with the pages found there. Shared pages are
//! never written.

mod gathered;
mod sharing;

use rocmforge_device::{ALIGNMENT, NO_PAGE, Plan};
use rocmforge_model::Model;
use rocmforge_ops::{KV_PAGE_TOKENS, KvGroup};
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId, Slab};

use crate::api::error::Error;
use crate::features::prefix_cache::partings::Partings;
use crate::features::prefix_cache::{NodeId, Realm, SlotLocation};
use crate::features::speculation::draft_kv::{DraftKey, DraftKv};
use crate::memory::Memory;
use crate::request::kv::sharing::Sharing;

/// Minimum number of pages by which a prompt must exceed its cached prefix for its end to get a
/// pass of its own: a recurrent state can be kept only where a pass ends.
const STATE_PAGES_MIN: usize = 2;

/// Maximum number of positions of a sequence at which state is kept for later requests: a state can
/// have tens of MiB.
const MARKS_MAX: usize = 8;

/// Owner of a KV page or state that a sequence uses.
#[derive(Debug, Clone, Copy)]
enum PageOwner {
    /// The page is the sequence's own.
    Own(BlockId),
    /// The page is a slot of this node of the prefix cache.
    Shared(NodeId),
}

/// A sequence's KV pages of one group, by page number.
#[derive(Debug, Default)]
struct Pages {
    held: Vec<Option<PageOwner>>,
    /// Arena offset of each page; [`NO_PAGE`] where the sequence holds none.
    offsets: Vec<u64>,
    /// Number of the first page that is still held; earlier ones were freed.
    first: usize,
}

/// KV pages and recurrent state of one sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceMemory {
    groups: Vec<Pages>,
    state: Option<BlockId>,
    /// Borrowed states for the draft tokens of the current pass
    /// ([`crate::features::speculation::spare_states`]).
    lent: Vec<BlockId>,
    sharing: Option<Sharing>,
    predicting: Option<Predicting>,
    /// Key of the draft model's KV cache for this sequence
    /// ([`crate::features::speculation::draft_kv::DraftKvCache`]).
    drafting: Option<DraftKey>,
}

/// The draft model's KV cache of the sequence was evicted.
#[derive(Debug)]
pub(crate) struct GivenUp;

/// Whether a sequence can continue from any page: its layers have neither windows nor states.
pub(crate) fn goes_on_anywhere(plan: &Plan) -> bool {
    plan.state_elements == 0 && plan.kv.iter().all(|g| g.window.is_none())
}

/// The MTP head's KV pages of a sequence.
#[derive(Debug, Default)]
struct Predicting {
    groups: Vec<Pages>,
    /// Number of positions whose K and V the MTP head has computed.
    past: usize,
}

/// Index of the MTP head's first group among the slots of a prefix-cache node: after the KV groups
/// and the state.
pub(crate) fn predicting_slot(plan: &Plan) -> usize {
    plan.kv.len() + usize::from(plan.state_elements > 0)
}

/// Number of slots of a prefix-cache node of this model.
pub(crate) fn slots_of(model: &Model) -> usize {
    let of_block = model.predictor().map_or(0, |block| block.kv.len());
    predicting_slot(model.plan()) + of_block
}

impl Pages {
    /// Allocates pages for positions up to `end`.
    fn grow(
        &mut self,
        memory: &mut Memory,
        model: ModelId,
        group: &KvGroup,
        end: usize,
    ) -> Result<(), Error> {
        while self.held.len() < group.layout.pages_for(end) {
            let bytes = group.layout.page_bytes() as u64;
            let (block, slab) = memory.reserve(BlockKind::Kv, Some(model), bytes)?;
            self.held.push(Some(PageOwner::Own(block)));
            self.offsets.push(slab.offset);
        }
        Ok(())
    }

    /// Takes over the cached pages of these nodes, from page `first` on.
    fn begin(&mut self, memory: &mut Memory, nodes: &[NodeId], slot: usize, first: usize) {
        self.first = first;
        for (page, &node) in nodes.iter().enumerate() {
            let used = page >= first;
            if used {
                memory.prefixes.hold(node, slot);
            }
            self.held.push(used.then_some(PageOwner::Shared(node)));
            let slab = used.then(|| memory.prefixes.slab(node, slot));
            self.offsets.push(slab.map_or(NO_PAGE, |s| s.offset));
        }
    }

    /// Publishes a full page for sequences that reach this node of the prefix cache.
    fn share(&mut self, memory: &mut Memory, page: usize, node: NodeId, slot: usize) {
        // Where another sequence computed the same at the same time, each keeps its own.
        if let Some(Some(PageOwner::Own(block))) = self.held.get(page).copied() {
            let slab = memory.store.cache.block(block);
            if memory.prefixes.put(node, slot, (block, slab), true) {
                self.held[page] = Some(PageOwner::Shared(node));
            }
        }
    }

    /// Frees or releases all pages.
    fn free(self, memory: &mut Memory, slot: usize) {
        for held in self.held.into_iter().flatten() {
            match held {
                PageOwner::Own(block) => memory.store.free(block),
                PageOwner::Shared(node) => memory.prefixes.let_go(node, slot),
            }
        }
    }
}

/// What a sequence begins with after the prefix cache was searched.
#[derive(Debug, Default)]
pub(crate) struct PrefixStart {
    /// Number of positions that are already computed.
    pub(crate) positions: usize,
    /// Positions at which a pass should end, so that state can be kept.
    pub(crate) stops: Vec<usize>,
}

impl SequenceMemory {
    /// Arena offsets of the pages, for each group.
    pub(crate) fn pages(&self) -> Vec<&[u64]> {
        self.groups.iter().map(|g| g.offsets.as_slice()).collect()
    }

    /// Arena offset of the recurrent state after the sequence's own rows of a pass and `drafts`
    /// draft tokens; 0 if it has no state.
    pub(crate) fn state_offset(&self, memory: &Memory, drafts: usize) -> u64 {
        self.state_behind(drafts)
            .map_or(0, |block| memory.store.cache.block(block).offset)
    }

    fn state_behind(&self, drafts: usize) -> Option<BlockId> {
        match drafts {
            0 => self.state,
            n => self.lent.get(n - 1).copied(),
        }
    }

    /// Takes borrowed states for the draft tokens of a pass.
    pub(crate) fn borrow_states(&mut self, states: Vec<BlockId>) {
        self.lent = states;
    }

    /// After a pass of which `right` draft tokens were accepted: keeps the state after the last
    /// accepted one, and returns the states that are not needed.
    pub(crate) fn settle_states(&mut self, right: usize) -> Vec<BlockId> {
        let mut lent = std::mem::take(&mut self.lent);
        if let (Some(state), Some(behind)) = (&mut self.state, lent.get_mut(right.wrapping_sub(1)))
        {
            std::mem::swap(state, behind);
        }
        lent
    }

    /// All slabs of the KV cache; a slab that sequences share is yielded once for each of them.
    pub(crate) fn slabs<'a>(
        &'a self,
        memory: &'a Memory,
        plan: &'a Plan,
    ) -> impl Iterator<Item = Slab> + 'a {
        let of_block = self.predicting.iter().flat_map(|p| &p.groups);
        let of_block = of_block.enumerate();
        let of_block = of_block.map(move |(g, pages)| (predicting_slot(plan) + g, pages));
        let groups = self.groups.iter().enumerate().chain(of_block);
        let pages = groups.flat_map(move |(g, pages)| {
            let held = pages.held.iter().flatten();
            held.map(move |held| match *held {
                PageOwner::Own(block) => memory.store.cache.block(block),
                PageOwner::Shared(node) => memory.prefixes.slab(node, g),
            })
        });
        let state = self.state.iter();
        pages.chain(state.map(|&block| memory.store.cache.block(block)))
    }

    /// Begins with the cached prefix of `tokens`, and takes part in the prefix cache from now on.
    /// The last token is always computed, for its logits. `partings` are the places where other
    /// prompts may diverge.
    pub(crate) fn begin(
        &mut self,
        memory: &mut Memory,
        realm: Realm,
        of: &Model,
        tokens: &[u32],
        (partings, predicts): (&Partings, bool),
    ) -> PrefixStart {
        let plan = of.plan();
        let most = tokens.len().saturating_sub(1) / KV_PAGE_TOKENS;
        let (found, held) = memory.find_prefix(realm, of, tokens, most, predicts);
        let mut pages = found.nodes.len();
        if plan.state_elements > 0
            && let Some(&last) = found.nodes.last()
            && !self.take_state(memory, realm.model, plan, last)
        {
            pages = 0;
        }
        let block = of.predictor().filter(|_| predicts && pages > 0);
        if let Some(block) = block {
            pages = self.begin_predicting_with(memory, plan, block, &found.nodes[..pages]);
        }
        let nodes = &found.nodes[..pages];
        self.groups.resize_with(plan.kv.len(), Pages::default);
        let positions = pages * KV_PAGE_TOKENS;
        for (g, (own, group)) in self.groups.iter_mut().zip(&plan.kv).enumerate() {
            let first = group.first_page(positions).min(pages);
            own.begin(memory, nodes, g, first);
        }
        if let Some(&last) = nodes.last() {
            memory.prefixes.touch(last);
        }
        memory.let_go(held);
        let chain = memory.note_prefix(realm, nodes, tokens);
        let (mut marks, mut chances) = (Vec::new(), Vec::new());
        if !goes_on_anywhere(plan) {
            // Where prompts part, unless that is near to where this one goes on.
            let known = [found.common, most].into_iter();
            let known = known.chain(partings.likely.iter().copied());
            let far = known.filter(|&p| p >= pages + STATE_PAGES_MIN && p <= most);
            marks.extend(far.map(|p| p * KV_PAGE_TOKENS));
            marks.sort_unstable();
            marks.dedup();
            // In what is new: before that, prompts parted where there is more.
            let may = partings.chances.iter().filter(|&&p| p > found.common);
            chances.extend(may.map(|p| p * KV_PAGE_TOKENS));
        }
        let sharing = Sharing {
            realm,
            at: nodes.last().copied(),
            chain,
            found: pages,
            pages,
            marks,
            chances,
            moving: None,
        };
        let stops = sharing.stops(plan);
        self.sharing = Some(sharing);
        PrefixStart { positions, stops }
    }

    /// Marks a position (not computed yet, at a page's end) so that other requests can continue
    /// from there. Returns the positions at which passes have to end from now on; `None` if nothing
    /// changes.
    pub(crate) fn mark(&mut self, plan: &Plan, position: usize) -> Option<Vec<usize>> {
        let sharing = self.sharing.as_mut()?;
        let is_new = !sharing.marks.contains(&position);
        if !is_new || sharing.marks.len() >= MARKS_MAX {
            return None;
        }
        sharing.marks.push(position);
        Some(sharing.stops(plan))
    }

    /// The last marked position up to `position`: its state is kept for other requests once
    /// computed.
    pub(crate) fn marked_up_to(&self, position: usize) -> Option<usize> {
        let marks = self.sharing.iter().flat_map(|sharing| &sharing.marks);
        marks.copied().filter(|&mark| mark <= position).max()
    }

    /// Begins with the MTP head's cached pages if they cover the whole prefix. Returns with how
    /// many nodes the sequence has to begin.
    fn begin_predicting_with(
        &mut self,
        memory: &mut Memory,
        plan: &Plan,
        block: &Plan,
        nodes: &[NodeId],
    ) -> usize {
        let slots = predicting_slot(plan)..predicting_slot(plan) + block.kv.len();
        let is_here = |node, slot| {
            let place = memory.prefixes.place(node, slot);
            matches!(place, Some(SlotLocation::Device(..)))
        };
        let has = |node: &&NodeId| slots.clone().all(|s| is_here(**node, s));
        let there = nodes.iter().take_while(has).count();
        // The last page of an answer may lack its last row, whose next token was not known. A page
        // is less to compute than to go on without drafts; but with a window or a state it goes on
        // only from where it was found to.
        if there < nodes.len() && !(goes_on_anywhere(plan) && there + 1 == nodes.len()) {
            return nodes.len();
        }
        let mut groups: Vec<Pages> = Vec::new();
        groups.resize_with(block.kv.len(), Pages::default);
        for (pages, slot) in groups.iter_mut().zip(slots) {
            pages.begin(memory, &nodes[..there], slot, 0);
        }
        self.predicting = Some(Predicting {
            groups,
            past: there * KV_PAGE_TOKENS,
        });
        there
    }

    /// Records that the MTP head has computed K and V of `past` positions.
    pub(crate) fn set_predicted(&mut self, past: usize) {
        self.predicting.get_or_insert_default().past = past;
    }

    /// Number of positions whose K and V the MTP head has computed; `None` if the sequence does not
    /// use it.
    pub(crate) fn predicted(&self) -> Option<usize> {
        self.predicting.as_ref().map(|p| p.past)
    }

    /// Allocates the MTP head's pages for positions up to `end`.
    pub(crate) fn prepare_predicting(
        &mut self,
        memory: &mut Memory,
        model: ModelId,
        block: &Plan,
        end: usize,
    ) -> Result<(), Error> {
        let groups = &mut self.predicting.get_or_insert_default().groups;
        groups.resize_with(block.kv.len(), Pages::default);
        for (pages, group) in groups.iter_mut().zip(&block.kv) {
            pages.grow(memory, model, group, end)?;
        }
        Ok(())
    }

    /// Arena offsets of the MTP head's pages, for each of its KV groups.
    pub(crate) fn predicting_pages(&self) -> Vec<&[u64]> {
        let groups = self.predicting.iter().flat_map(|p| &p.groups);
        groups.map(|g| g.offsets.as_slice()).collect()
    }

    /// Frees the MTP head's pages.
    pub(crate) fn stop_predicting(&mut self, memory: &mut Memory, plan: &Plan) {
        let groups = self.predicting.take().into_iter().flat_map(|p| p.groups);
        for (g, pages) in groups.enumerate() {
            pages.free(memory, predicting_slot(plan) + g);
        }
    }

    /// Copies a cached state into the sequence's own. Returns whether there was memory for it.
    fn take_state(
        &mut self,
        memory: &mut Memory,
        model: ModelId,
        plan: &Plan,
        node: NodeId,
    ) -> bool {
        let (slot, bytes) = (plan.kv.len(), plan.state_elements * 4);
        let from = memory.prefixes.hold(node, slot);
        let taken = match memory.reserve(BlockKind::Kv, Some(model), bytes) {
            Ok((block, to)) => memory.copy_to(from, to, (block, model)).then_some(block),
            Err(error) => {
                tracing::debug!(%error, "a kept state is not used");
                None
            }
        };
        memory.prefixes.let_go(node, slot);
        self.state = taken;
        taken.is_some()
    }

    /// Prepares for a pass over positions `first..end`: frees pages that no row of it reads,
    /// allocates those that it writes, and for groups without a window also those up to `ahead`.
    pub(crate) fn prepare(
        &mut self,
        memory: &mut Memory,
        (model, plan): (ModelId, &Plan),
        (first, end): (usize, usize),
        ahead: usize,
    ) -> Result<(), Error> {
        self.groups.resize_with(plan.kv.len(), Pages::default);
        let sharing = self.sharing.as_ref();
        let (marks, chances, found) =
            sharing.map_or((&[][..], &[][..], 0), |s| (&s.marks, &s.chances, s.found));
        for (g, (pages, group)) in self.groups.iter_mut().zip(&plan.kv).enumerate() {
            let behind = group.first_page(first).min(pages.held.len());
            for page in pages.first..behind {
                pages.offsets[page] = NO_PAGE;
                match pages.held[page].take() {
                    None => {}
                    Some(PageOwner::Own(block)) => memory.store.free(block),
                    Some(PageOwner::Shared(node)) => {
                        memory.prefixes.let_go(node, g);
                        // Who goes on from a mark reads what is in the window before it; and from
                        // where this one went on others may, too.
                        let is_read = |&mark: &usize| {
                            (group.first_page(mark)..mark / KV_PAGE_TOKENS).contains(&page)
                        };
                        let mut read = marks.iter().chain(chances);
                        if page >= found && !read.any(is_read) {
                            memory.give_up(node, g);
                        }
                    }
                }
            }
            pages.first = pages.first.max(behind);
            let end = match group.window {
                Some(_) => end,
                None => end.max(ahead),
            };
            pages.grow(memory, model, group, end)?;
        }
        if plan.state_elements > 0 && self.state.is_none() {
            let bytes = plan.state_elements * 4;
            let (block, _) = memory.reserve(BlockKind::Kv, Some(model), bytes)?;
            self.state = Some(block);
        }
        Ok(())
    }

    /// After a pass with `right` accepted draft tokens: hands full pages to the prefix cache, and
    /// keeps the state at marked positions. `tokens` has the tokens of all `n_past` computed
    /// positions.
    pub(crate) fn hand_over(
        &mut self,
        memory: &mut Memory,
        of: &Model,
        tokens: &[u32],
        n_past: usize,
        right: usize,
    ) {
        let plan = of.plan();
        // The state at the last page's end, if this pass left it anywhere.
        let beyond = n_past % KV_PAGE_TOKENS;
        let state = right.checked_sub(beyond);
        let state = state.and_then(|drafts| self.state_behind(drafts));
        // Who goes on from there goes on with the block, too: else the last page with all
        // of both is the better one.
        let block_is_there = |p: &Predicting| p.past >= n_past - beyond;
        let state = state.filter(|_| self.predicting.as_ref().is_none_or(block_is_there));
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        let full = n_past / KV_PAGE_TOKENS;
        while sharing.pages < full {
            let page = sharing.pages;
            let chunk = &tokens[page * KV_PAGE_TOKENS..][..KV_PAGE_TOKENS];
            let slots = slots_of(of);
            let Some(node) = memory.add_prefix(sharing.realm, sharing.at, chunk, slots) else {
                // The beginning that it went on from was given up.
                self.sharing = None;
                return;
            };
            for (g, pages) in self.groups.iter_mut().enumerate() {
                pages.share(memory, page, node, g);
            }
            let complete = |p: &&mut Predicting| p.past >= (page + 1) * KV_PAGE_TOKENS;
            if let Some(predicting) = self.predicting.as_mut().filter(complete) {
                for (g, pages) in predicting.groups.iter_mut().enumerate() {
                    pages.share(memory, page, node, predicting_slot(plan) + g);
                }
            }
            sharing.at = Some(node);
            sharing.pages += 1;
            sharing.chain = sharing.chain.and_then(|chain| chain.next(chunk));
            if let Some(chain) = sharing.chain {
                memory.note_node(node, sharing.realm.model, chain, false);
            }
        }
        if let (Some(node), Some(state)) = (sharing.at, state) {
            keep_state(sharing, memory, (node, n_past - beyond), (plan, state));
        }
    }

    /// Takes the draft model's KV cache of the sequence; `Err` if it was evicted, `None` if there
    /// was none.
    pub(crate) fn take_draft_kv(
        &mut self,
        memory: &mut Memory,
    ) -> Result<Option<DraftKv>, GivenUp> {
        match self.drafting.take() {
            None => Ok(None),
            Some(key) => memory.draft_kv.take(key).map(Some).ok_or(GivenUp),
        }
    }

    /// Number of positions whose K and V the draft model has computed.
    pub(crate) fn draft_kv_past(&self, memory: &Memory) -> usize {
        self.drafting.map_or(0, |key| memory.draft_kv.past(key))
    }

    /// Keeps the draft model's KV cache of the sequence until the next run.
    pub(crate) fn keep_draft_kv(&mut self, memory: &mut Memory, draft: DraftKv) {
        self.stop_drafting(memory);
        self.drafting = Some(memory.draft_kv.keep(draft));
    }

    /// Frees the draft model's KV cache of the sequence.
    pub(crate) fn stop_drafting(&mut self, memory: &mut Memory) {
        let draft = self.drafting.take();
        if let Some(draft) = draft.and_then(|key| memory.draft_kv.take(key)) {
            draft.free(memory);
        }
    }

    /// Frees or releases all memory of the sequence.
    pub(crate) fn free(&mut self, memory: &mut Memory, plan: &Plan) {
        self.stop_predicting(memory, plan);
        self.stop_drafting(memory);
        for (g, group) in self.groups.drain(..).enumerate() {
            group.free(memory, g);
        }
        if let Some(block) = self.state.take() {
            memory.store.free(block);
        }
        let Some(sharing) = self.sharing.take() else {
            return;
        };
        if let Some(at) = sharing.at {
            memory.prefixes.touch(at);
            if let Some(chain) = sharing.chain {
                memory.note_node(at, sharing.realm.model, chain, true);
            }
        }
    }
}

/// Maximum bytes of a sequence of `n_tokens` positions that is computed by passes of at most `rows`
/// rows.
pub(crate) fn bytes_for(plan: &Plan, n_tokens: usize, rows: usize) -> u64 {
    let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
    let pages: u64 = plan
        .kv
        .iter()
        .map(|group| {
            let page = aligned(group.layout.page_bytes() as u64);
            group.pages_at_most(n_tokens, rows) as u64 * page
        })
        .sum();
    pages + aligned(plan.state_elements * 4)
}

/// Keeps a copy of a sequence's state in the prefix cache, at this node and position.
fn keep_state(
    sharing: &mut Sharing,
    memory: &mut Memory,
    (node, position): (NodeId, usize),
    (plan, state): (&Plan, BlockId),
) {
    let (model, slot) = (sharing.realm.model, plan.kv.len());
    let marked = sharing.marks.contains(&position);
    if memory.prefixes.has(node, slot) {
        if marked {
            memory.prefixes.settle(node, slot);
        }
        return;
    }
    let on_chance = !marked && sharing.chances.contains(&position);
    if on_chance && memory.keep_spare_state(node, slot, state, model) {
        return;
    }
    let kept = memory.keep_state(node, slot, state, model);
    if let Some(chain) = sharing.chain.filter(|_| kept && marked) {
        memory.note_node(node, model, chain, true);
    }
    if kept
        && !marked
        && let Some(before) = sharing.moving.replace(node)
    {
        memory.give_up(before, slot);
    }
}

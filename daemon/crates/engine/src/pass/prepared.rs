//! What a pass borrows from its requests: their memory, input rows, RoPE angles, and which row
//! belongs to which request.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::{ScratchLayout, Span};
use rocmforge_kernels_cpu::ops::RopeAngles;
use rocmforge_ops::{KV_PAGE_TOKENS, Plan};
use rocmforge_scheduler::{PassPlan, SeqId};
use rocmforge_tensor_cache::ModelId;

use crate::api::error::Error;
use crate::clock::Clock;
use crate::memory::Memory;
use crate::model::loaded::LoadedModel;
use crate::pass::given::GivenRows;
use crate::pass::member::{Member, nobody_waits};
use crate::pass::row_threads::RowThreads;
use crate::pass::spec::{Interest, Pass, PassClient, RowOutput, WantedRow};
use crate::request::encode;
use crate::request::kv::SequenceMemory;
use crate::request::task::{Task, Work};

/// A pass's requests, prepared for the device. The requests' memory is kept here until the pass has
/// ended, since the requests change with each row and their memory does not.
pub(crate) struct Prepared {
    pub(crate) loaded: Arc<LoadedModel>,
    pub(crate) model: ModelId,
    /// Whether any row uses an adapter.
    pub(crate) adapted: bool,
    pub(crate) layout: ScratchLayout,
    /// For each input of the plan its rows, in the tensor type of its table.
    pub(crate) inputs: Vec<Vec<u8>>,
    /// Rows of images that replace some of the input rows.
    pub(crate) given: Vec<GivenRows>,
    pub(crate) angles: Vec<RopeAngles>,
    pub(crate) memories: Vec<SequenceMemory>,
}

/// Spans, rows and outputs of a pass.
#[derive(Default)]
pub(crate) struct PassRows<'a> {
    spans: Vec<Span<'a>>,
    /// Spans of the parts of images in a tower's pass.
    parts: Vec<Span<'a>>,
    /// Index of each request's first row in the pass; for an image, its first row of the tower's
    /// output.
    first_rows: Vec<usize>,
    outputs: Vec<u32>,
    /// How much of the logits of each row in `outputs` is needed.
    interests: Vec<Interest>,
    hidden: Vec<u32>,
    /// Index of the request that each wanted row belongs to: first the rows of `outputs`, then
    /// those of `hidden`.
    owners: Vec<usize>,
}

/// Arena offsets of the KV pages of a pass's requests, for each KV group.
pub(crate) struct PassPages<'a> {
    of_requests: Vec<Vec<&'a [u64]>>,
    /// KV pages of the parts of images in a tower's pass.
    of_parts: Vec<Vec<&'a [u64]>>,
}

/// The requests for which a pass is computed, and others to serve meanwhile.
pub(crate) struct PassRequests<'a> {
    rows: &'a PassRows<'a>,
    members: &'a mut [Member],
    /// Other requests, whose due events are sent while the device works: waking the clients of a
    /// pass's rows takes as long as computing some rows.
    others: Option<&'a mut BTreeMap<SeqId, Task>>,
    threads: &'a RowThreads,
    /// Total time in which tokens were chosen.
    pub(crate) sampling: Duration,
}

/// Rows of one request with their logits.
struct MemberLogits<'a> {
    member: &'a mut Member,
    /// Index of each of the request's rows in the pass, and its logits.
    rows: Vec<(usize, &'a mut [f32])>,
}

impl MemberLogits<'_> {
    fn take(&mut self) {
        for (row, logits) in &mut self.rows {
            self.member.take(*row, RowOutput::Logits(logits));
        }
    }
}

impl<'a> PassRequests<'a> {
    pub(crate) fn new(
        rows: &'a PassRows<'a>,
        members: &'a mut [Member],
        others: Option<&'a mut BTreeMap<SeqId, Task>>,
        threads: &'a RowThreads,
    ) -> Self {
        Self {
            rows,
            members,
            others,
            threads,
            sampling: Duration::ZERO,
        }
    }
}

impl PassClient for PassRequests<'_> {
    fn ended(&self) -> Option<Error> {
        nobody_waits(self.members)
    }

    fn begun(&mut self) {
        for member in &mut *self.members {
            member.task.tell();
        }
        for task in self
            .others
            .iter_mut()
            .flat_map(|others| others.values_mut())
        {
            task.tell();
        }
    }

    fn take(&mut self, row: WantedRow, found: RowOutput<'_>) {
        let owner = self.rows.owners[row.wanted];
        let begun = Clock.now();
        self.members[owner].take(row.row - self.rows.first_rows[owner], found);
        self.sampling += Clock.now() - begun;
    }

    fn take_logits(&mut self, rows: &[WantedRow], logits: &mut [f32]) {
        let begun = Clock.now();
        let n_logits = logits.len();
        let width = n_logits / rows.len().max(1);
        let found = rows.iter().zip(logits.chunks_exact_mut(width.max(1)));
        let mut found = found.peekable();
        let mut by_member = Vec::new();
        for (owner, member) in self.members.iter_mut().enumerate() {
            let first_row = self.rows.first_rows[owner];
            let mut rows = Vec::new();
            while let Some((row, logits)) =
                found.next_if(|(row, _)| self.rows.owners[row.wanted] == owner)
            {
                rows.push((row.row - first_row, logits));
            }
            if !rows.is_empty() {
                by_member.push(MemberLogits { member, rows });
            }
        }
        debug_assert!(found.peek().is_none(), "rows come in the order of requests");
        self.threads
            .each(&mut by_member, n_logits, MemberLogits::take);
        self.sampling += Clock.now() - begun;
    }
}

impl Prepared {
    pub(crate) fn plan(&self) -> &Plan {
        self.loaded.plan(self.adapted)
    }

    /// Arena offsets of each request's pages.
    pub(crate) fn pages(&self, members: &[Member]) -> PassPages<'_> {
        let of_requests: Vec<_> = self.memories.iter().map(SequenceMemory::pages).collect();
        let mut of_parts = Vec::new();
        for (member, pages) in members.iter().zip(&of_requests) {
            let mut first = 0;
            for &rows in member.task.parts() {
                let of_part = first..first + rows.div_ceil(KV_PAGE_TOKENS);
                first = of_part.end;
                let groups = self.plan().kv.iter().zip(pages);
                let of_group = groups.map(|(group, pages)| match group.parts {
                    true => &pages[of_part.clone()],
                    false => &[],
                });
                of_parts.push(of_group.collect());
            }
        }
        PassPages {
            of_requests,
            of_parts,
        }
    }

    /// Makes the spans and rows of the pass; the first `decode_spans` requests have one token each
    /// and its draft tokens.
    pub(crate) fn rows<'a>(
        &self,
        members: &[Member],
        decode_spans: usize,
        pages: &'a PassPages<'a>,
        memory: &Memory,
    ) -> PassRows<'a> {
        let mut rows = PassRows::default();
        let mut hidden_owners = Vec::new();
        let mut first_row = 0;
        for (i, member) in members.iter().enumerate() {
            let n_rows = member.span.rows as usize;
            let state = |drafts| self.memories[i].state_offset(memory, drafts);
            let span = Span {
                first_row,
                n_rows,
                first_position: member.task.n_past as u32,
                kv_pages: &pages.of_requests[i],
                state: state(0),
                state_out: state(0),
                whole: i >= decode_spans && member.task.is_whole_at(member.task.n_past),
                draft: false,
            };
            if i < decode_spans {
                rows.spans.extend((0..n_rows).map(|row| Span {
                    first_row: first_row + row,
                    n_rows: 1,
                    first_position: span.first_position + row as u32,
                    state: state(row.saturating_sub(1)),
                    state_out: state(row),
                    draft: row > 0,
                    ..span
                }));
            } else {
                rows.spans.push(span);
            }
            rows.first_rows.push(first_row);
            first_row += n_rows;
            for &n_rows in member.task.parts() {
                let of_parts = rows.parts.last();
                rows.parts.push(Span {
                    first_row: of_parts.map_or(0, |part| part.first_row + part.n_rows),
                    n_rows,
                    kv_pages: &pages.of_parts[rows.parts.len()],
                    ..span
                });
            }
            if let Work::Tower(work) = &member.task.work {
                // Its outputs are rows of blocks of the pass's.
                let first = (first_row - n_rows) / work.block;
                if let Some(place) = rows.first_rows.last_mut() {
                    *place = first;
                }
                rows.hidden
                    .extend((first..first + work.n).map(|row| row as u32));
                hidden_owners.extend((0..work.n).map(|_| i));
                continue;
            }
            if let Work::Embed(e) = &member.task.work {
                let (task, begin) = (&member.task, first_row - n_rows);
                if e.whole {
                    let wanted = encode::wanted(e.pooling, begin..first_row);
                    let owners = wanted.clone().map(|_| i);
                    match e.classes {
                        true => {
                            rows.owners.extend(owners);
                            let interest = member.interest();
                            rows.interests.extend(wanted.clone().map(|_| interest));
                            rows.outputs.extend(wanted);
                        }
                        false => {
                            hidden_owners.extend(owners);
                            rows.hidden.extend(wanted);
                        }
                    }
                    continue;
                }
                let end = task.n_past + n_rows;
                let wanted = e.wanted(task.n_past, end, task.tokens.len() - 1);
                hidden_owners.extend(wanted.clone().map(|_| i));
                let of_pass = |position| (begin + position - task.n_past) as u32;
                rows.hidden.extend(wanted.map(of_pass));
                continue;
            }
            let wanted = (first_row as u32 - member.span.outputs)..first_row as u32;
            rows.owners.extend(wanted.clone().map(|_| i));
            let interest = member.interest();
            rows.interests.extend(wanted.clone().map(|_| interest));
            rows.outputs.extend(wanted);
        }
        rows.owners.append(&mut hidden_owners);
        rows
    }

    /// Makes the pass, whose scratch lies at the arena's offset `scratch_at`.
    pub(crate) fn pass<'a>(
        &'a self,
        plan: &PassPlan,
        rows: &'a PassRows<'a>,
        scratch_at: u64,
        prefetch: u32,
    ) -> Pass<'a> {
        Pass {
            model: self.model,
            plan: self.plan(),
            adapted: self.adapted,
            angles: &self.angles,
            spans: &rows.spans,
            parts: &rows.parts,
            n_tokens: plan.rows as usize,
            outputs: &rows.outputs,
            hidden: &rows.hidden,
            given: &self.given,
            expects_next_pass: plan.expects_next,
            scratch: &self.layout,
            scratch_at,
            prefetch,
            interests: &rows.interests,
        }
    }
}

//! What a pass takes of its requests: their memory made ready, the rows of the model's inputs,
//! rotations, and whose the rows are.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use rocmforge_device::{ScratchLayout, Span};
use rocmforge_kernels::host::ops::RopeAngles;
use rocmforge_ops::{Plan, RowCounts};
use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::actor::Engine;
use crate::api::RequestCacheUse;
use crate::embedding_rows;
use crate::encode;
use crate::error::Error;
use crate::kv::SequenceMemory;
use crate::loaded::LoadedModel;
use crate::member::{Member, interest};
use crate::pass::{Pass, RowOutput};
use crate::rotations::{self, Positions};
use crate::task::Work;
use crate::weight_store::WeightStore;

/// A pass's requests, ready for the device. The requests' memory is here until
/// [`Engine::put_back`]: they change with each row that comes, and their memory does not.
pub(crate) struct Prepared {
    pub(crate) loaded: Arc<LoadedModel>,
    pub(crate) model: ModelId,
    pub(crate) layout: ScratchLayout,
    /// For each input of the plan its rows, as its table has them.
    pub(crate) inputs: Vec<Vec<u8>>,
    angles: Vec<RopeAngles>,
    memories: Vec<SequenceMemory>,
}

/// The rows of a pass.
#[derive(Default)]
pub(crate) struct PassRows<'a> {
    spans: Vec<Span<'a>>,
    /// Of each request.
    first_rows: Vec<usize>,
    outputs: Vec<u32>,
    hidden: Vec<u32>,
    /// Whose each of the wanted rows is: first those of `outputs`, then those of `hidden`.
    owners: Vec<usize>,
}

impl<'a> PassRows<'a> {
    /// Gives each wanted row, in their order, to the request whose it is.
    pub(crate) fn sink<'s, 'm>(
        &'s self,
        members: &'s RefCell<&'m mut [Member]>,
    ) -> impl FnMut(usize, RowOutput<'_>) -> Result<(), Error> + use<'s, 'm, 'a> {
        let mut owners = self.owners.iter();
        move |row, found| {
            let owner = *owners.next().expect("no more rows than were wanted");
            members.borrow_mut()[owner].take(row - self.first_rows[owner], found);
            Ok(())
        }
    }
}

impl Engine {
    /// Makes the requests of a pass ready for it.
    ///
    /// # Errors
    /// There is no room for their keys and values, or the file cannot be read.
    pub(crate) fn prepare(
        &mut self,
        plan: &PassPlan,
        members: &mut [Member],
    ) -> Result<Prepared, Error> {
        let first = members.first().ok_or_else(|| {
            Error::Internal("the scheduler planned a pass without rows".to_owned())
        })?;
        let (model, loaded) = (first.task.model, Arc::clone(&first.task.loaded));
        self.lend_states(model, members)?;
        let of_model = loaded.model().plan();
        let layout = of_model.scratch(RowCounts {
            tokens: u64::from(plan.rows),
            outputs: u64::from(plan.outputs_at_a_time),
        });
        let scratch_bytes = self.scratch.map_or(0, |s| s.1);
        for Member { span, task, .. } in &mut *members {
            let end = task.n_past + span.rows as usize;
            // One that found no room in one piece has its blocks side by side from the beginning.
            let ahead = match task.compactions {
                0 | 1 => end,
                _ => self
                    .scheduler
                    .sequence(task.seq)
                    .map_or(end, |s| s.promised as usize),
            };
            let (of, rows) = ((model, of_model), (task.n_past, end));
            task.memory.prepare(&mut self.store, of, rows, ahead)?;
            let held = crate::kv::bytes_for(of_model, end, span.rows as usize);
            task.counts.block_bytes = task.counts.block_bytes.max(held + scratch_bytes);
            if let Work::Generate(g) = &mut task.work {
                g.started.get_or_insert_with(Instant::now);
            }
        }
        let mut angles = std::mem::take(&mut self.angles);
        self.set_angles(model, &*members, &mut angles)?;
        let mut inputs = std::mem::take(&mut self.inputs);
        inputs.resize_with(of_model.inputs.len(), Vec::new);
        let mut ids = std::mem::take(&mut self.ids);
        ids.clear();
        for Member { span, task, .. } in &*members {
            ids.extend(task.row_ids(span.rows as usize));
        }
        let waiting = self.store.files.begin(loaded.name(), loaded.path());
        for (input, rows) in of_model.inputs.iter().zip(&mut inputs) {
            embedding_rows::rows(&loaded, &input.table, &ids, rows)?;
        }
        drop(waiting);
        self.ids = ids;
        let memories = members.iter_mut();
        Ok(Prepared {
            memories: memories
                .map(|m| std::mem::take(&mut m.task.memory))
                .collect(),
            loaded,
            model,
            layout,
            inputs,
            angles,
        })
    }

    /// Gives the requests of a pass their memory back, and notes what the pass used.
    pub(crate) fn put_back(
        &mut self,
        prepared: Prepared,
        members: &mut [Member],
        counts: RequestCacheUse,
    ) {
        for (member, memory) in members.iter_mut().zip(prepared.memories) {
            let task = &mut member.task;
            task.memory = memory;
            task.counts.hits += counts.hits;
            task.counts.misses += counts.misses;
            task.counts.uploaded_bytes += counts.uploaded_bytes;
            task.counts.host_bytes += counts.host_bytes;
        }
        (self.inputs, self.angles) = (prepared.inputs, prepared.angles);
    }

    /// Sets the rotations of a pass's rows.
    fn set_angles(
        &mut self,
        model: ModelId,
        members: &[Member],
        angles: &mut Vec<RopeAngles>,
    ) -> Result<(), Error> {
        let entry = self
            .models
            .iter_mut()
            .find(|e| e.id == model)
            .expect("a request keeps its model registered");
        let plan = entry.loaded.model().plan();
        if entry.rope.is_empty() {
            let (name, path) = (entry.loaded.name(), entry.loaded.path());
            let _waiting = self.store.files.begin(name, path);
            entry.rope = rotations::tables(&entry.loaded, plan)?;
        }
        let sequences = members.iter().map(|m| Positions {
            first: m.task.n_past,
            n: m.span.rows as usize,
            reach: m.task.reach,
        });
        rotations::set_angles(plan, &entry.rope, sequences, angles);
        Ok(())
    }
}

impl Prepared {
    pub(crate) fn plan(&self) -> &Plan {
        self.loaded.model().plan()
    }

    /// Arena offsets of each request's pages.
    pub(crate) fn pages(&self) -> Vec<Vec<&[u64]>> {
        self.memories.iter().map(SequenceMemory::pages).collect()
    }

    /// The rows, of which the first `decode_spans` requests have a token each and its drafts.
    pub(crate) fn rows<'a>(
        &self,
        members: &[Member],
        decode_spans: usize,
        pages: &'a [Vec<&'a [u64]>],
        store: &WeightStore,
    ) -> PassRows<'a> {
        let mut rows = PassRows::default();
        let mut hidden_owners = Vec::new();
        let mut first_row = 0;
        for (i, member) in members.iter().enumerate() {
            let n_rows = member.span.rows as usize;
            let state = |drafts| self.memories[i].state_offset(store, drafts);
            let span = Span {
                first_row,
                n_rows,
                first_position: member.task.n_past as u32,
                kv_pages: &pages[i],
                state: state(0),
                state_out: state(0),
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
            if let Work::Embed(e) = &member.task.work {
                let (task, begin) = (&member.task, first_row - n_rows);
                if e.whole {
                    let wanted = encode::wanted(e.pooling, begin..first_row);
                    match e.classes {
                        true => {
                            rows.outputs.push(wanted);
                            rows.owners.push(i);
                        }
                        false => {
                            rows.hidden.push(wanted);
                            hidden_owners.push(i);
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
            rows.outputs.extend(wanted);
        }
        rows.owners.append(&mut hidden_owners);
        rows
    }

    /// The pass, whose scratch lies at an offset of the arena.
    pub(crate) fn pass<'a>(
        &'a self,
        plan: &PassPlan,
        members: &[Member],
        rows: &'a PassRows<'a>,
        scratch_at: u64,
        prefetch: u32,
    ) -> Pass<'a> {
        Pass {
            model: self.model,
            plan: self.plan(),
            angles: &self.angles,
            spans: &rows.spans,
            n_tokens: plan.rows as usize,
            outputs: &rows.outputs,
            hidden: &rows.hidden,
            expects_next_pass: plan.expects_next,
            scratch: &self.layout,
            scratch_at,
            prefetch,
            interest: interest(members),
        }
    }
}

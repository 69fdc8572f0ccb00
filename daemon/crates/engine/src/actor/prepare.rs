//! Prepares requests for a pass, and returns their memory to them after it.

use std::sync::Arc;
use std::time::Instant;

use rocmforge_kernels_cpu::ops::RopeAngles;
use rocmforge_ops::{RowCounts, positions_of_parts};
use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::model::rotations::{self, Coordinates, Positions};
use crate::pass::inputs;
use crate::pass::member::Member;
use crate::pass::prepared::Prepared;
use crate::request::task::Work;

impl Engine {
    /// Prepares requests for a pass: KV pages, states and input rows.
    ///
    /// # Errors
    ///
    /// Their KV cache has no room, or the model file cannot be read.
    pub(crate) fn prepare(
        &mut self,
        plan: &PassPlan,
        members: &mut [Member],
        now: Instant,
    ) -> Result<Prepared, Error> {
        let first = members.first().ok_or_else(|| {
            Error::Internal("the scheduler planned a pass without rows".to_owned())
        })?;
        let (model, loaded) = (first.task.model, Arc::clone(&first.task.loaded));
        self.speculation
            .lend_states(&mut self.memory, model, members)?;
        let adapted = members.iter().any(|m| m.task.adapters.is_some());
        let of_model = loaded.plan(adapted);
        self.memory.store.prepare_anew(model, of_model);
        let layout = of_model.scratch(RowCounts {
            tokens: u64::from(plan.rows),
            outputs: u64::from(plan.outputs_at_a_time),
        });
        let scratch_bytes = self.space.scratch_bytes();
        for Member { span, task, .. } in &mut *members {
            let end = task.n_past + span.rows as usize;
            // One that found no room in one piece has its blocks side by side from the beginning.
            let ahead = match task.compactions {
                0 | 1 => end,
                _ => self
                    .requests
                    .scheduler
                    .sequence(task.seq)
                    .map_or(end, |s| s.promised as usize),
            };
            // Parts begin pages of their own.
            let of_parts = positions_of_parts(task.parts().iter().copied());
            let (of, rows) = ((model, of_model), (task.n_past, end));
            task.memory
                .prepare(&mut self.memory, of, rows, ahead.max(of_parts))?;
            let positions = end.max(of_parts);
            let held = crate::request::kv::bytes_for(of_model, positions, span.rows as usize);
            task.counts.block_bytes = task.counts.block_bytes.max(held + scratch_bytes);
            if let Work::Generate(g) = &mut task.work {
                g.started.get_or_insert(now);
            }
        }
        let mut angles = std::mem::take(&mut self.space.angles);
        self.set_angles(model, &*members, &mut angles)?;
        let mut inputs = std::mem::take(&mut self.space.inputs);
        let waiting = self.memory.store.files.begin(loaded.name(), loaded.path());
        let are_cold = inputs::are_cold((&loaded, of_model), members);
        let read = self.now();
        let ids = &mut self.space.ids;
        let given = inputs::of_pass((&loaded, of_model), members, ids, &mut inputs)?;
        if are_cold {
            let took = self.now().saturating_duration_since(read);
            self.memory.store.reasons.note_rows_from_disk(model, took);
        }
        drop(waiting);
        let memories = members.iter_mut();
        Ok(Prepared {
            memories: memories
                .map(|m| std::mem::take(&mut m.task.memory))
                .collect(),
            loaded: Arc::clone(&loaded),
            model,
            adapted,
            layout,
            inputs,
            given,
            angles,
        })
    }

    /// Returns to a pass's requests the memory that the pass borrowed, and records its use of the
    /// cache.
    pub(crate) fn put_back(
        &mut self,
        prepared: Prepared,
        members: &mut [Member],
        counts: RequestCacheUse,
    ) {
        for (member, memory) in members.iter_mut().zip(prepared.memories) {
            let task = &mut member.task;
            task.memory = memory;
            task.counts.add(&counts);
        }
        (self.space.inputs, self.space.angles) = (prepared.inputs, prepared.angles);
    }

    /// Computes the RoPE angles of a pass's rows.
    fn set_angles(
        &mut self,
        model: ModelId,
        members: &[Member],
        angles: &mut Vec<RopeAngles>,
    ) -> Result<(), Error> {
        let entry = self
            .models
            .get_mut(model)
            .expect("a request keeps its model registered");
        let plan = entry.loaded.model().plan();
        if entry.rope.is_empty() {
            let (name, path) = (entry.loaded.name(), entry.loaded.path());
            let _waiting = self.memory.store.files.begin(name, path);
            entry.rope = rotations::tables(&entry.loaded, plan)?;
        }
        let sequences = members.iter().map(|m| Positions {
            first: m.task.n_past,
            n: m.span.rows as usize,
            reach: m.task.reach,
            coordinates: match (&m.task.work, entry.loaded.model().tower()) {
                (Work::Tower(work), Some(tower)) => Coordinates::Patches(tower, work.image.grid),
                _ => Coordinates::of_images(&m.task.images),
            },
        });
        rotations::set_angles(plan, &entry.rope, sequences, angles);
        Ok(())
    }
}

"""The tower of make_images.py for Muse Glimmer.

needs: torch, transformers
"""

import torch
import transformers

from image_models import IMAGE, Writer, base_config, fill, halves, pairs, picture


class Muse:
    """muse-glimmer: windows as large as the grid of positions, cut at both edges; layer 3 and the last see all."""

    merge, grids, patch, steps = 2, [(6, 10), (10, 6), (4, 2)], 4, 64
    WIDTH, HEADS, INNER, SIDE, LAYERS = 128, 2, 96, 4, 5

    def model(self, t):
        text = base_config(num_hidden_layers=4, sliding_window=16, final_logit_softcapping=4.0, qk_scale_factor=3.87,
                           output_multiplier=1.25, rope_parameters=dict(rope_type="default", rope_theta=1e4))
        vision = dict(patch_size=self.patch, pos_emb_height=self.SIDE, pos_emb_width=self.SIDE,
                      num_attention_heads=self.HEADS, num_hidden_layers=self.LAYERS, hidden_size=self.WIDTH,
                      intermediate_size=self.INNER, patch_temporal=2, merge_size=2,
                      rope_parameters=dict(rope_type="axial", rope_theta=1e4))
        config = transformers.MuseGlimmerConfig(text_config=text, vision_config=vision, image_token_id=IMAGE,
                                                video_token_id=1193, out_hidden_size=4 * self.WIDTH,
                                                projector_hidden_size=80)
        model = transformers.MuseGlimmerForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
        for i in range(4):
            get = lambda name: t[f"blk.{i}.{name}.weight"]
            layer = {f"self_attn.{ours}.weight": get(theirs) for ours, theirs in [
                ("v_proj", "attn_v"), ("o_proj", "attn_output"), ("gate_proj", "attn_gate")]}
            for part, heads in [("q", 4), ("k", 2)]:
                layer[f"self_attn.{part}_proj.weight"] = halves(get(f"attn_{part}"), heads)
            for part in ("gate", "up", "down"):
                layer[f"mlp.{part}_proj.weight"] = get(f"ffn_{part}")
            for ours, theirs in [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm"),
                                 ("pre_feedforward_layernorm", "ffn_norm"),
                                 ("post_feedforward_layernorm", "post_ffw_norm")]:
                layer[f"{ours}.weight"] = get(theirs) - 1
            out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        m = model.model
        return torch.nn.ModuleList([m.vision_tower, m.vision_adapter, m.vision_projection])

    def write(self, path, model):
        m, tower = model.model, model.model.vision_tower
        config = dict(hidden_size=self.WIDTH, intermediate_size=self.INNER, layers=self.LAYERS,
                      image_size=self.SIDE * self.patch * 2, patch_size=self.patch)
        w = Writer(path, "muse-glimmer", config, [("spatial_merge_size", 2)])
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        # Of both frames together, as the converter writes them; here without rounding.
        kernel = tower.patch_embedder.patch_embedding.weight.detach()
        frames = kernel.reshape(self.WIDTH, 2, 3, self.patch, self.patch)
        both = frames.sum(1).half().float()
        frames[:, 1] = both - frames[:, 0]
        w.put("v.patch_embd.weight", both)
        w.put("v.position_embd.weight", tower.patch_embedder.position_embedding_table.weight)
        w.both("v.pre_ln", tower.ln_pre)
        for i, b in enumerate(tower.layers):
            a = b.attn
            for part, module in [("q", a.q_proj), ("k", a.k_proj)]:
                w.put(f"v.blk.{i}.attn_{part}.weight", pairs(module.weight, self.HEADS))
                w.put(f"v.blk.{i}.attn_{part}.bias", pairs(module.bias[:, None], self.HEADS)[:, 0])
            for name, module in [("ln1", b.norm1), ("ln2", b.norm2), ("attn_v", a.v_proj), ("attn_out", a.proj),
                                 ("ffn_up", b.mlp.fc1), ("ffn_down", b.mlp.fc2)]:
                w.both(f"v.blk.{i}.{name}", module)
        w.both("v.post_ln", tower.ln_post)
        w.put("mm.0.weight", m.vision_adapter.fc1.weight)
        w.put("mm.1.weight", m.vision_adapter.fc2.weight)
        w.put("mm.2.weight", m.vision_projection.weight)
        w.close()

    def pixels(self, images):
        """Patches row by row, twice for both frames, as the processor gives them."""
        given = []
        for (rows, columns), patches in images:
            x = picture((rows, columns), patches, self.patch, self.merge)
            x = x.reshape(3, rows, self.patch, columns, self.patch).permute(1, 3, 0, 2, 4)
            given.append(x.reshape(rows * columns, 1, -1).expand(-1, 2, -1).reshape(rows * columns, -1))
        return torch.cat(given), torch.tensor([[1, *grid] for grid, _ in images])

    def rows(self, model, grid, patches):
        """As they are before the norm, which the text model does to all of its inputs."""
        m = model.model
        pixels, grids = self.pixels([(grid, patches)])
        return m.vision_projection(m.vision_adapter(m.vision_tower(pixels, grids).last_hidden_state))

    def logits(self, model, ids, images):
        pixels, grids = self.pixels(images)
        return model(input_ids=ids, pixel_values=pixels, image_grid_thw=grids).logits[0]

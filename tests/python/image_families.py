"""Towers of make_images.py: with windows in an image, without any layer, of GLM 4 and of Kimi.

needs: torch, transformers, gguf, numpy
"""

import gguf
import numpy as np
import torch
import transformers

from image_models import END, IMAGE, START, V, Writer, base_config, fill, picture


def biased(t, i):
    """A layer of Qwen 2's text models, by the module's own names."""
    layer = {}
    for theirs, ours in [("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")]:
        layer[f"self_attn.{theirs}.weight"] = t[f"blk.{i}.{ours}.weight"]
        layer[f"self_attn.{theirs}.bias"] = t[f"blk.{i}.{ours}.bias"]
    layer["self_attn.o_proj.weight"] = t[f"blk.{i}.attn_output.weight"]
    for part in ("gate", "up", "down"):
        layer[f"mlp.{part}_proj.weight"] = t[f"blk.{i}.ffn_{part}.weight"]
    layer["input_layernorm.weight"] = t[f"blk.{i}.attn_norm.weight"]
    layer["post_attention_layernorm.weight"] = t[f"blk.{i}.ffn_norm.weight"]
    return layer


class Qwen25:
    """qwen2.5vl_merger: windows of 2 by 2 tokens, smaller ones at the edges, and a layer without."""

    merge, grids, patch, steps = 2, [(6, 10), (10, 6), (4, 2)], 4, 64
    VISION = dict(depth=3, hidden_size=128, num_heads=2, intermediate_size=96, patch_size=4, spatial_merge_size=2,
                  temporal_patch_size=2, out_hidden_size=64, window_size=16, fullatt_block_indexes=[1])

    def model(self, t):
        rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])
        text = base_config(num_hidden_layers=3, rope_parameters=rope)
        del text["head_dim"]
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=dict(self.VISION), image_token_id=IMAGE,
                                               video_token_id=1193, vision_start_token_id=START,
                                               vision_end_token_id=END)
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
        for i in range(3):
            out.update({f"layers.{i}.{k}": v for k, v in biased(t, i).items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return model.model.visual

    def write(self, path, model):
        tower = model.model.visual
        config = dict(self.VISION, image_size=560, layers=3)
        w = Writer(path, "qwen2.5vl_merger", config, [("n_wa_pattern", 2), ("window_size", 16)])
        w.w.add_bool("clip.use_silu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        w.put("v.patch_embd.weight", tower.patch_embed.proj.weight[:, :, 0])
        w.put("v.patch_embd.weight.1", tower.patch_embed.proj.weight[:, :, 1])
        for i, b in enumerate(tower.blocks):
            for j, part in enumerate(("q", "k", "v")):
                w.put(f"v.blk.{i}.attn_{part}.weight", b.attn.qkv.weight.chunk(3)[j])
                w.put(f"v.blk.{i}.attn_{part}.bias", b.attn.qkv.bias.chunk(3)[j])
            for name, module in [("attn_out", b.attn.proj), ("ffn_gate", b.mlp.gate_proj), ("ffn_up", b.mlp.up_proj),
                                 ("ffn_down", b.mlp.down_proj)]:
                w.both(f"v.blk.{i}.{name}", module)
            for name, module in [("ln1", b.norm1), ("ln2", b.norm2)]:
                w.put(f"v.blk.{i}.{name}.weight", module.weight)
        w.put("v.post_ln.weight", tower.merger.ln_q.weight)
        w.both("mm.0", tower.merger.mlp[0])
        w.both("mm.2", tower.merger.mlp[2])
        w.close()

    def pixels(self, patches):
        """As the processor gives them: both frames of an image are the same."""
        x = patches.reshape(-1, 3, 1, self.patch, self.patch).expand(-1, 3, 2, self.patch, self.patch)
        return x.reshape(len(patches), -1)

    def rows(self, model, grid, patches):
        return model.model.visual(self.pixels(patches), grid_thw=torch.tensor([[1, *grid]])).pooler_output

    def logits(self, model, ids, images):
        return model(
            input_ids=ids,
            pixel_values=torch.cat([self.pixels(patches) for _, patches in images]),
            image_grid_thw=torch.tensor([[1, *grid] for grid, _ in images]),
            mm_token_type_ids=(ids == IMAGE).int(),
        ).logits[0]


def fill_gemma4(language_model, t, out, norms):
    """Gemma 4's text models, with what `out` and `norms` of a layer tell of more."""
    norms = [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm"),
             ("pre_feedforward_layernorm", "ffn_norm"), ("post_feedforward_layernorm", "post_ffw_norm"), *norms]
    out |= {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
    for i, layer_of in enumerate(language_model.layers):
        of_file = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
                   "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
        layer = {f"self_attn.{k}.weight": t[f"blk.{i}.{v}.weight"] for k, v in of_file.items()
                 if hasattr(layer_of.self_attn, k)}
        for part in ("gate", "up", "down"):
            layer[f"mlp.{part}_proj.weight"] = t[f"blk.{i}.ffn_{part}.weight"]
        layer.update({f"{ours}.weight": t[f"blk.{i}.{theirs}.weight"] for ours, theirs in norms})
        layer_of.layer_scalar.copy_(t[f"blk.{i}.layer_output_scale.weight"])
        out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
    fill(language_model, out)


class Gemma4Unified:
    """gemma4uv: no layers, and a patch is a token."""

    text, merge, grids, patch, steps = "gemma4", 1, [(2, 3), (4, 2), (1, 1)], 12, 64
    WIDTH, PLACES = 144, 24

    def __init__(self, layer_types):
        self.layer_types = layer_types

    def model(self, t):
        text = base_config(num_hidden_layers=len(self.layer_types), sliding_window=16, global_head_dim=64,
                           layer_types=self.layer_types, final_logit_softcapping=30.0)
        text["tie_word_embeddings"] = True
        vision = dict(patch_size=self.patch // 3, pooling_kernel_size=3, mm_embed_dim=self.WIDTH,
                      mm_posemb_size=self.PLACES, output_proj_dims=self.WIDTH)
        config = transformers.Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None,
                                                  image_token_id=IMAGE)
        model = transformers.Gemma4UnifiedForConditionalGeneration._from_config(config, attn_implementation="eager")
        fill_gemma4(model.model.language_model, t, {}, [])
        return model

    def tower(self, model):
        return model.model.embed_vision

    def write(self, path, model):
        tower = model.model.embed_vision
        config = dict(hidden_size=self.WIDTH, intermediate_size=0, layers=0, image_size=224, patch_size=self.patch // 3)
        w = Writer(path, "gemma4uv", config, [], mean=0.0, std=1.0, key="clip.vision.projector_type")
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        colours_first = lambda x: x.reshape(-1, self.patch, self.patch, 3).permute(0, 3, 1, 2).reshape(x.shape)
        w.put("v.patch_embd.weight", colours_first(tower.patch_dense.weight))
        w.put("v.patch_embd.bias", tower.patch_dense.bias)
        w.put("v.patch_norm.1.weight", colours_first(tower.patch_ln1.weight))
        w.put("v.patch_norm.1.bias", colours_first(tower.patch_ln1.bias))
        w.both("v.patch_norm.2", tower.patch_ln2)
        w.both("v.patch_norm.3", tower.pos_norm)
        w.put("v.position_embd.weight", tower.pos_embedding.permute(1, 0, 2))
        w.put("mm.input_projection.weight", tower.multimodal_embedder.embedding_projection.weight)
        w.close()

    def pixels(self, images):
        """Patches row by row, colours last, filled up to one number; and their columns and rows."""
        given, places = [], []
        for (rows, columns), patches in images:
            x = picture((rows, columns), patches, self.patch, self.merge)
            x = x.reshape(3, rows, self.patch, columns, self.patch).permute(1, 3, 2, 4, 0)
            given.append(x.reshape(rows * columns, -1))
            places.append(torch.tensor([[c, r] for r in range(rows) for c in range(columns)]))
        most = max(len(x) for x in given)
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 0, 0, most - len(x)), value=value)
        return torch.stack([pad(x, 0.0) for x in given]), torch.stack([pad(x, -1) for x in places])

    def rows(self, model, grid, patches):
        """As the text model's embeddings are before it multiplies them."""
        pixels, places = self.pixels([(grid, patches)])
        return model.model.get_image_features(pixels, places, return_dict=True).pooler_output[0] / 64**0.5

    def logits(self, model, ids, images):
        pixels, places = self.pixels(images)
        return model(input_ids=ids, pixel_values=pixels, image_position_ids=places,
                     mm_token_type_ids=(ids == IMAGE).int()).logits[0]


class Glm4:
    """glm4v. Its text model is made here, too: that of a file with two heads less, as the authors' code has no other."""

    text, source, merge, grids, patch, steps = "glm4v", "glm4", 2, [(6, 10), (10, 4), (2, 2)], 4, 64
    SECTIONS, SIDE, DIM, ROTATED = [2, 3, 3], 6, 32, 16
    VISION = dict(depth=3, hidden_size=128, num_heads=2, intermediate_size=160, out_hidden_size=64, patch_size=4,
                  image_size=24, spatial_merge_size=2, temporal_patch_size=2)

    def write_text(self, path, source):
        """Half of the heads of `source`, whose rotated elements stand as the converter has them for sections."""
        def part(name, x):
            heads = {"attn_q": 2, "attn_k": 1, "attn_v": 1}.get(name.split(".")[-2] if "attn_" in name else "")
            if name.endswith("attn_output.weight"):
                return x[:, : 2 * self.DIM]
            if heads is None:
                return x
            x = x[: heads * self.DIM].reshape(heads, self.DIM, -1)
            if not "attn_v" in name:
                turned = x[:, : self.ROTATED].reshape(heads, -1, 2, x.shape[2]).swapaxes(1, 2)
                x[:, : self.ROTATED] = turned.reshape(heads, self.ROTATED, -1)
            return x.reshape(heads * self.DIM, -1).squeeze()

        reader = gguf.GGUFReader(source)
        w = gguf.GGUFWriter(path, "glm4")
        own = {"glm4.attention.head_count": 2, "glm4.attention.head_count_kv": 1}
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                sub_type = field.types[1] if len(field.types) > 1 else None
                w.add_key_value(name, own.get(name, field.contents()), field.types[0], sub_type)
        w.add_array("glm4.rope.dimension_sections", [*self.SECTIONS, 0])
        for tensor in reader.tensors:
            w.add_tensor(tensor.name, np.ascontiguousarray(part(tensor.name, np.array(tensor.data))))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()

    def model(self, t):
        rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=self.SECTIONS)
        text = dict(base_config(num_hidden_layers=3, rope_parameters=rope, pad_token_id=0), num_attention_heads=2,
                    num_key_value_heads=1)
        config = transformers.Glm4vConfig(text_config=text, vision_config=dict(self.VISION), image_token_id=IMAGE,
                                          video_token_id=1193, image_start_token_id=START, image_end_token_id=END)
        model = transformers.Glm4vForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}

        def by_neighbours(x, heads):
            x = x.reshape(heads, self.DIM, -1).clone()
            turned = x[:, : self.ROTATED].reshape(heads, 2, -1, x.shape[2]).transpose(1, 2)
            x[:, : self.ROTATED] = turned.reshape(heads, self.ROTATED, -1)
            return x.reshape(heads * self.DIM, -1)

        for i in range(3):
            get = lambda name: t[f"blk.{i}.{name}"]
            layer = {}
            for end in ("weight", "bias"):
                layer[f"self_attn.q_proj.{end}"] = by_neighbours(get(f"attn_q.{end}"), 2)
                layer[f"self_attn.k_proj.{end}"] = by_neighbours(get(f"attn_k.{end}"), 1)
                layer[f"self_attn.v_proj.{end}"] = get(f"attn_v.{end}")
            for ours, theirs in [("self_attn.o_proj", "attn_output"), ("mlp.gate_up_proj", "ffn_up"),
                                 ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
                                 ("post_self_attn_layernorm", "post_attention_norm"),
                                 ("post_attention_layernorm", "ffn_norm"), ("post_mlp_layernorm", "post_ffw_norm")]:
                layer[f"{ours}.weight"] = get(f"{theirs}.weight")
            out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return model.model.visual

    def write(self, path, model):
        tower = model.model.visual
        config = dict(self.VISION, layers=3)
        w = Writer(path, "glm4v", config, [("spatial_merge_size", 2)])
        w.w.add_bool("clip.use_silu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        w.put("v.patch_embd.weight", tower.patch_embed.proj.weight[:, :, 0])
        w.put("v.patch_embd.weight.1", tower.patch_embed.proj.weight[:, :, 1])
        w.put("v.patch_embd.bias", tower.patch_embed.proj.bias)
        w.put("v.norm_embd.weight", tower.post_conv_layernorm.weight)
        w.put("v.position_embd.weight", tower.embeddings.position_embedding.weight)
        for i, b in enumerate(tower.blocks):
            for name, module in [("ln1", b.norm1), ("ln2", b.norm2), ("attn_qkv", b.attn.qkv), ("attn_out", b.attn.proj),
                                 ("ffn_gate", b.mlp.gate_proj), ("ffn_up", b.mlp.up_proj),
                                 ("ffn_down", b.mlp.down_proj)]:
                w.put(f"v.blk.{i}.{name}.weight", module.weight)
        w.put("v.post_ln.weight", tower.post_layernorm.weight)
        merger = tower.merger
        w.both("mm.patch_merger", tower.downsample)
        w.put("mm.model.fc.weight", merger.proj.weight)
        w.both("mm.post_norm", merger.post_projection_norm)
        for name, module in [("gate", merger.gate_proj), ("up", merger.up_proj), ("down", merger.down_proj)]:
            w.put(f"mm.{name}.weight", module.weight)
        w.close()

    def pixels(self, patches):
        """As the processor gives them: both frames of an image are the same."""
        x = patches.reshape(-1, 3, 1, self.patch, self.patch).expand(-1, 3, 2, self.patch, self.patch)
        return x.reshape(len(patches), -1)

    def rows(self, model, grid, patches):
        return model.model.visual(self.pixels(patches), grid_thw=torch.tensor([[1, *grid]])).pooler_output

    def logits(self, model, ids, images):
        return model(
            input_ids=ids,
            pixel_values=torch.cat([self.pixels(patches) for _, patches in images]),
            image_grid_thw=torch.tensor([[1, *grid] for grid, _ in images]),
            mm_token_type_ids=(ids == IMAGE).int(),
        ).logits[0]


class Kimi:
    """kimik25, of which the text model is that of DeepSeek V3."""

    text, merge, grids, patch, steps = "deepseek2", 2, [(6, 10), (10, 4), (2, 2)], 4, 64
    WIDTH, HEADS, SIDE = 128, 2, 6

    def model(self, t):
        text = dict(model_type="deepseek_v3", vocab_size=V, hidden_size=64, intermediate_size=160, moe_intermediate_size=64,
                    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
                    n_shared_experts=1, num_experts_per_tok=2, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                    norm_topk_prob=True, first_k_dense_replace=1, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32,
                    qk_rope_head_dim=16, v_head_dim=32, rms_norm_eps=1e-6, max_position_embeddings=4096,
                    rope_parameters=dict(rope_type="default", rope_theta=1e4), tie_word_embeddings=False)
        vision = dict(patch_size=self.patch, pos_emb_height=self.SIDE, pos_emb_width=self.SIDE, num_attention_heads=self.HEADS,
                      num_hidden_layers=3, hidden_size=self.WIDTH, intermediate_size=96)
        config = transformers.Kimi_K25Config(text_config=text, vision_config=vision, image_token_id=IMAGE,
                                             video_token_id=1193, vision_start_token_id=START, vision_end_token_id=END,
                                             projection_hidden_size=self.WIDTH, tie_word_embeddings=False)
        model = transformers.Kimi_K25ForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
        for i, layer_of in enumerate(model.model.language_model.layers):
            get = lambda name: t[f"blk.{i}.{name}"]
            layer = {f"self_attn.{ours}.weight": get(f"{theirs}.weight") for ours, theirs in [
                ("q_a_proj", "attn_q_a"), ("q_a_layernorm", "attn_q_a_norm"), ("q_b_proj", "attn_q_b"),
                ("kv_a_proj_with_mqa", "attn_kv_a_mqa"), ("kv_a_layernorm", "attn_kv_a_norm"), ("o_proj", "attn_output")]}
            both = torch.cat([get("attn_k_b.weight").transpose(1, 2), get("attn_v_b.weight")], 1)
            layer["self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[2])
            layer["input_layernorm.weight"] = get("attn_norm.weight")
            layer["post_attention_layernorm.weight"] = get("ffn_norm.weight")
            if i == 0:
                for part in ("gate", "up", "down"):
                    layer[f"mlp.{part}_proj.weight"] = get(f"ffn_{part}.weight")
            else:
                gates = [get("ffn_gate_exps.weight"), get("ffn_up_exps.weight")]
                layer["mlp.experts.gate_up_proj"] = torch.cat(gates, 1)
                layer["mlp.experts.down_proj"] = get("ffn_down_exps.weight")
                layer["mlp.gate.weight"] = get("ffn_gate_inp.weight")
                layer_of.mlp.gate.e_score_correction_bias.copy_(get("exp_probs_b.bias"))
                for part in ("gate", "up", "down"):
                    layer[f"mlp.shared_experts.{part}_proj.weight"] = get(f"ffn_{part}_shexp.weight")
            out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return torch.nn.ModuleList([model.model.vision_tower, model.model.mm_projector])

    def by_axes(self, x):
        """Columns' pairs of each head, then rows', as neighbours: the converter's order."""
        x = x.reshape(self.HEADS, 2, -1, 2, *x.shape[1:])
        return x.movedim(3, 1).movedim(2, 3).reshape(self.WIDTH, *x.shape[4:])

    def write(self, path, model):
        tower, projector = model.model.vision_tower, model.model.mm_projector
        config = dict(hidden_size=self.WIDTH, intermediate_size=96, layers=3, image_size=self.SIDE * self.patch,
                      patch_size=self.patch)
        w = Writer(path, "kimik25", config, [("projector.scale_factor", 2)])
        w.w.add_bool("clip.use_gelu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        w.both("v.patch_embd", tower.patch_embed.proj)
        w.put("v.position_embd.weight", tower.patch_embed.pos_emb.position_embeddings)
        for i, b in enumerate(tower.layers):
            a = b.attn
            for end in ("weight", "bias"):
                q, k, v = (getattr(module, end) for module in (a.q_proj, a.k_proj, a.v_proj))
                w.put(f"v.blk.{i}.attn_qkv.{end}", torch.cat([self.by_axes(q), self.by_axes(k), v]))
            for name, module in [("ln1", b.norm1), ("ln2", b.norm2), ("attn_out", a.proj), ("ffn_up", b.mlp.fc1),
                                 ("ffn_down", b.mlp.fc2)]:
                w.both(f"v.blk.{i}.{name}", module)
        w.both("v.post_ln", tower.final_layernorm)
        w.both("mm.input_norm", projector.pre_norm)
        w.both("mm.1", projector.in_proj)
        w.both("mm.2", projector.out_proj)
        w.close()

    def pixels(self, images):
        """Patches row by row, as the processor gives them."""
        given = []
        for (rows, columns), patches in images:
            x = picture((rows, columns), patches, self.patch, self.merge)
            x = x.reshape(3, rows, self.patch, columns, self.patch).permute(1, 3, 0, 2, 4)
            given.append(x.reshape(rows * columns, 3, self.patch, self.patch))
        return torch.cat(given), torch.tensor([[1, *grid] for grid, _ in images])

    def rows(self, model, grid, patches):
        return model.model.get_image_features(*self.pixels([(grid, patches)]), return_dict=True).pooler_output[0]

    def logits(self, model, ids, images):
        pixels, grids = self.pixels(images)
        return model(input_ids=ids, pixel_values=pixels, image_grid_thw=grids).logits[0]

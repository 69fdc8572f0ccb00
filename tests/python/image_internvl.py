"""Towers of make_images.py with a row of the class: InternVL's, in both sizes' forms.

needs: torch, transformers, gguf, numpy
"""

import gguf
import numpy as np
import torch
import transformers

from image_families import biased
from image_models import IMAGE, Writer, attention, base_config, fill, picture


class InternVl:
    """internvl, as in the smaller sizes: norms by mean and variance, products with biases. Text of Qwen 3's mixtures."""

    text, merge, patch, steps = "qwen3moe", 2, 4, 64
    SIDE, WIDTH, INNER = 6, 128, 96
    grids = [(SIDE, SIDE)] * 3
    VISION = dict(norm_type="layer_norm", attention_bias=True, use_qk_norm=False)

    def text_config(self):
        rope = dict(rope_type="default", rope_theta=1e6)
        return base_config(model_type="qwen3_moe", num_hidden_layers=3, rope_parameters=rope, num_experts=8,
                           num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)

    def layer(self, t, i):
        get = lambda name: t[f"blk.{i}.{name}.weight"]
        layer = attention(t, i, 0.0)
        layer["mlp.gate.weight"] = get("ffn_gate_inp")
        layer["mlp.experts.gate_up_proj"] = torch.cat([get("ffn_gate_exps"), get("ffn_up_exps")], 1)
        layer["mlp.experts.down_proj"] = get("ffn_down_exps")
        layer["input_layernorm.weight"] = get("attn_norm")
        layer["post_attention_layernorm.weight"] = get("ffn_norm")
        return layer

    def model(self, t):
        vision = dict(self.VISION, hidden_size=self.WIDTH, intermediate_size=self.INNER, num_hidden_layers=3,
                      num_attention_heads=2, image_size=self.SIDE * self.patch, patch_size=self.patch)
        config = transformers.InternVLConfig(text_config=self.text_config(), vision_config=vision, image_token_id=IMAGE,
                                             image_seq_length=(self.SIDE // 2) ** 2, tie_word_embeddings=False)
        model = transformers.InternVLForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
        for i in range(3):
            out.update({f"layers.{i}.{k}": v for k, v in self.layer(t, i).items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return torch.nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    def write(self, path, model):
        tower, projector = model.model.vision_tower, model.model.multi_modal_projector
        config = dict(hidden_size=self.WIDTH, intermediate_size=self.INNER, layers=3, image_size=self.SIDE * self.patch,
                      patch_size=self.patch)
        w = Writer(path, "internvl", config, [("projector.scale_factor", 2), ("preproc_min_tiles", 1),
                                              ("preproc_max_tiles", 6)])
        w.w.add_bool("clip.use_gelu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        w.put("v.class_embd", tower.embeddings.cls_token.reshape(-1))
        w.both("v.patch_embd", tower.embeddings.patch_embeddings.projection)
        w.put("v.position_embd.weight", tower.embeddings.position_embeddings[0])
        put = lambda name, module: w.both(name, module) if getattr(module, "bias", None) is not None else w.put(
            f"{name}.weight", module.weight)
        for i, b in enumerate(tower.encoder.layer):
            a = b.attention
            for name, module in [("ln1", b.layernorm_before), ("ln2", b.layernorm_after), ("attn_q", a.q_proj),
                                 ("attn_k", a.k_proj), ("attn_v", a.v_proj), ("attn_out", a.projection_layer),
                                 ("ffn_up", b.mlp.fc1), ("ffn_down", b.mlp.fc2)]:
                put(f"v.blk.{i}.{name}", module)
            if self.VISION["use_qk_norm"]:
                put(f"v.blk.{i}.attn_q_norm", a.q_norm)
                put(f"v.blk.{i}.attn_k_norm", a.k_norm)
            w.put(f"v.blk.{i}.ls1.weight", b.lambda_1)
            w.put(f"v.blk.{i}.ls2.weight", b.lambda_2)
        w.both("mm.model.mlp.0", projector.layer_norm)
        w.both("mm.model.mlp.1", projector.linear_1)
        w.both("mm.model.mlp.3", projector.linear_2)
        w.close()

    def pixels(self, images):
        return torch.stack([picture(grid, patches, self.patch, self.merge) for grid, patches in images])

    def rows(self, model, grid, patches):
        return model.model.get_image_features(self.pixels([(grid, patches)]), return_dict=True).pooler_output[0]

    def logits(self, model, ids, images):
        return model(input_ids=ids, pixel_values=self.pixels(images)).logits[0]


class InternVl6(InternVl):
    """As in the larger sizes: norms by the mean of squares, of queries and keys, too. Text of Qwen 2, whose file is
    that of Qwen 2 VL without what images would need."""

    text, source = "qwen2", "qwen2vl"
    VISION = dict(norm_type="rms_norm", attention_bias=False, use_qk_norm=True)

    def write_text(self, path, source):
        reader = gguf.GGUFReader(source)
        w = gguf.GGUFWriter(path, "qwen2")
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture" and "sections" not in name:
                sub_type = field.types[1] if len(field.types) > 1 else None
                w.add_key_value(name.replace("qwen2vl.", "qwen2."), field.contents(), field.types[0], sub_type)
        for tensor in reader.tensors:
            w.add_tensor(tensor.name, np.ascontiguousarray(np.array(tensor.data)))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()

    def text_config(self):
        rope = dict(rope_type="default", rope_theta=1e6)
        config = base_config(model_type="qwen2", num_hidden_layers=3, rope_parameters=rope)
        del config["head_dim"]
        return config

    def layer(self, t, i):
        return biased(t, i)

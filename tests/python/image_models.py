"""What the small random towers of make_images.py have in common: ids, weights of text models, projector files.

needs: torch, gguf, numpy
"""

import gguf
import numpy as np
import torch

V, IMAGE, START, END = 1198, 1190, 1191, 1192


def tensors_of(path):
    reader = gguf.GGUFReader(path)
    return {t.name: torch.from_numpy(np.array(t.data).astype(np.float32)) for t in reader.tensors}


def base_config(**more):
    return dict(vocab_size=V, hidden_size=64, intermediate_size=160, max_position_embeddings=4096, rms_norm_eps=1e-6,
                tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **more)


def fill(module, values):
    """Takes over weights by the module's own names; each must be there, and each be filled."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values.pop(name).reshape(parameter.shape))
    assert not values, sorted(values)


def attention(t, i, norm):
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    out = {f"self_attn.{k}.weight": t[f"blk.{i}.{v}.weight"] for k, v in names.items()}
    for k in ("q", "k"):
        out[f"self_attn.{k}_norm.weight"] = t[f"blk.{i}.attn_{k}_norm.weight"] - norm
    return out


class Writer:
    """The projector file of a tower."""

    def __init__(self, path, projector, config, keys, mean=0.5, std=0.5, key="clip.projector_type"):
        w = self.w = gguf.GGUFWriter(path, "clip")
        w.add_type("mmproj")
        w.add_string(key, projector)
        w.add_bool("clip.has_vision_encoder", True)
        v = lambda key: f"clip.vision.{key}"
        for key, value in [("image_size", config["image_size"]), ("patch_size", config["patch_size"]),
                           ("embedding_length", config["hidden_size"]),
                           ("feed_forward_length", config["intermediate_size"]), ("projection_dim", 64),
                           ("block_count", config["layers"]), ("attention.head_count", 2), *keys]:
            w.add_uint32(v(key), value)
        w.add_array(v("image_mean"), [mean] * 3)
        w.add_array(v("image_std"), [std] * 3)

    def put(self, name, value):
        value = value.detach().numpy()
        # Positions stay f32, as the converter keeps them.
        half = value.ndim >= 2 and name != "v.position_embd.weight"
        self.w.add_tensor(name, np.ascontiguousarray(value.astype(np.float16 if half else np.float32)))

    def both(self, name, module):
        self.put(name + ".weight", module.weight)
        self.put(name + ".bias", module.bias)

    def close(self):
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def picture(grid, patches, patch, merge):
    """[3][height][width] of patches in the order of blocks."""
    rows, columns = grid
    x = patches.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
    return x.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)


def pairs(weight, heads):
    """Rows that rotate with the half behind them, as neighbours: the converter's order."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def halves(weight, heads):
    """The other way round."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

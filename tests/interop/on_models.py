"""Models that transformers builds from a configuration, through dcpd and back: to DCP over four ranks, to safetensors with small files
beside, and loaded by from_pretrained. Run by test_models.py, in an environment that has transformers.

    on_models.py DCPD_SOCKET STORAGE_DIR
"""
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
import dcpd as lib  # noqa: E402

SIZES = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=4, n_positions=64),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
ROWS = [{"match": "*", "mesh": [4], "placements": ["Shard(0)"], "optional": True}]


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(60).reshape(2, 30) % 131).logits


def main(socket, storage):
    api, storage = lib.Client(pathlib.Path(socket)), pathlib.Path(storage)
    for name, config in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            hf, at = f"{name}-{str(dtype)[6:]}", {"storage": "main"}
            model.save_pretrained(storage / hf)
            api.run("reshard", source={**at, "name": hf},
                    target={**at, "name": hf + "-dcp", "world_size": 4, "layout": ROWS, "copy_assets": True})
            api.run("reshard", source={**at, "name": hf + "-dcp"},
                    target={**at, "name": hf + "-back", "format": "safetensors", "copy_assets": True, "max_file_bytes": 40_000})
            back = AutoModelForCausalLM.from_pretrained(storage / (hf + "-back"), dtype=dtype)
            assert torch.equal(logits(back), logits(model)), hf
            assert len(list((storage / (hf + "-back")).glob("model-*.safetensors"))) > 1, "in files of the size that was asked for"
            print(hf, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Wraps a Hugging Face model; `torchrun --nproc-per-node 2 examples/wrap_a_model.py` for two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import tbo


def main() -> list[list[int]]:
    """Generates from a tiny model with random weights; the new tokens of each prompt of this rank."""
    torch.manual_seed(0)  # ranks must hold the same model; real ones load the same checkpoint
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()

    ep_group = dist.group.WORLD if dist.is_initialized() else None
    rank = dist.get_rank() if dist.is_initialized() else 0
    handle = tbo.wrap(model, ep_group, overlap="always")
    prompts = torch.randint(3, 128, (4 + rank, 12), generator=torch.Generator().manual_seed(rank))
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    print(tbo.explain(model))
    handle.unwrap()
    return [row.tolist() for row in tokens[:, prompts.shape[1] :]]


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    print(main())

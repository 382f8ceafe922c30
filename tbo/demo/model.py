"""The demo's models with one rank's questions: SmolLM2 as a mixture of experts, and a tiny random one.

Shapes: B questions, S positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tbo.demo.options import EXPERTS
from tbo.demo.questions import QUESTIONS
from tbo.demo.weights import EXPERTS_PER_TOKEN, Report, find_gguf, load_smollm2

TINY_VOCABULARY = 128
TINY_LONGEST_QUESTION = 48


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
    return _prepare_smollm2(rank, report) if name == "smollm2" else _prepare_tiny(rank, report)


def _prepare_smollm2(rank: int, report: Report) -> Prepared:
    from transformers import AutoTokenizer

    gguf = find_gguf()
    report("reading the tokenizer", 0, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on converting the file, of no use to who runs a demo
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    questions = QUESTIONS[rank % len(QUESTIONS)]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in questions
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True)
    return Prepared(
        model=load_smollm2(gguf, pad_token_id=tokenizer.pad_token_id, report=report),
        questions=questions,
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pad_token_id=tokenizer.pad_token_id,
        to_text=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)).strip(),
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
    ids_BS, mask_BS = _random_questions(rank, count=len(QUESTIONS[rank % len(QUESTIONS)]))
    return Prepared(
        model=model.eval(),
        questions=tuple(_ids_as_text(ids[mask.bool()].tolist()) for ids, mask in zip(ids_BS, mask_BS, strict=True)),
        input_ids=ids_BS,
        attention_mask=mask_BS,
        pad_token_id=0,
        to_text=_ids_as_text,
    )


def _random_questions(rank: int, *, count: int) -> tuple[Tensor, Tensor]:
    """Token ids of different lengths, left padded, and their mask."""
    generator = torch.Generator().manual_seed(100 + rank)
    longest = TINY_LONGEST_QUESTION
    ids_BS = torch.randint(3, TINY_VOCABULARY, (count, longest), generator=generator)
    lengths_B1 = torch.randint(longest // 2, longest + 1, (count, 1), generator=generator)
    lengths_B1[0] = longest
    mask_BS = (torch.arange(longest)[None] >= longest - lengths_B1).long()
    return ids_BS * mask_BS, mask_BS


def _ids_as_text(ids: list[int], most: int = 10) -> str:
    shown = " ".join(map(str, ids[:most]))
    return f"{shown} ... ({len(ids)} tokens)" if len(ids) > most else shown

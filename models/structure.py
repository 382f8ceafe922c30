"""Recognising a family tbo has no entry for by its code.

transformers generates many families from a few: of its 60 mixture-of-experts decoder layers, 28 have the same forward
to the letter. A layer whose forward and whose block's forward are the same code as a served family's differs from it
in nothing an adapter has to know. The comparison is with the installed release, so that no change is overlooked.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from dataclasses import replace
from types import FunctionType
from typing import Final

from torch import nn

from tbo.models.family_table import FAMILIES, FamilyTraits
from tbo.models.parts import MoeParts

_LAYERS: Final = (
    ("deepseek_v3", "DeepseekV3DecoderLayer"),
    ("mixtral", "MixtralDecoderLayer"),
    ("qwen3_next", "Qwen3NextDecoderLayer"),
)
_BLOCKS: Final = (
    ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3DecoderLayer"),
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeDecoderLayer"),
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeDecoderLayer"),
    ("mixtral", "MixtralSparseMoeBlock", "MixtralDecoderLayer"),
    ("olmoe", "OlmoeSparseMoeBlock", "OlmoeDecoderLayer"),
)


def traits_by_structure(layer: nn.Module, moe: MoeParts | None) -> FamilyTraits | None:
    """The traits of a layer built like a served family's; None where the layer or its block is like none.

    Cutting between tokens is left out: that takes knowing the attention, too.
    """
    like = next((name for folder, name in _LAYERS if _same_forward(layer, folder, name)), None)
    if like is None:
        return None
    traits = FAMILIES[like]
    if moe is not None:
        owner = next((owner for folder, name, owner in _BLOCKS if _same_forward(moe.block, folder, name)), None)
        if owner is None:
            return None
        block = FAMILIES[owner]
        traits = replace(
            traits,
            router_call=block.router_call,
            router_output=block.router_output,
            experts=block.experts,
            shared_on_rows=block.shared_on_rows,
        )
    return replace(traits, family=f"{type(layer).__name__} (built like {traits.family})", token_split=False)


def _same_forward(module: nn.Module, folder: str, class_name: str) -> bool:
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    code = _code(inspect.unwrap(type(module).forward))
    return code is not None and code == _code(inspect.unwrap(getattr(modeling, class_name).forward))


@functools.cache
def _code(function: FunctionType) -> str | None:
    """A function's code without annotations, decorators and docstring; None if its source cannot be read."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    definition = ast.parse(textwrap.dedent(source)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return ast.dump(definition.args) + "".join(ast.dump(statement) for statement in body)

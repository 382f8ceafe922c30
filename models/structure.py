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

from tbo.errors import UnsupportedModelError
from tbo.models.family_table import FAMILIES, FamilyTraits
from tbo.models.parts import EXPERTS, ROUTERS, MoeParts, own_forward
from tbo.models.routing import RouterOutput

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
    code = _code(own_forward(module))
    return code is not None and code == _code(inspect.unwrap(getattr(modeling, class_name).forward))


@functools.cache
def _code(function: FunctionType) -> str | None:
    """A function's code without annotations, decorators and docstring; None if its source cannot be read."""
    definition = _definition(function)
    if definition is None:
        return None
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return ast.dump(definition.args) + "".join(ast.dump(statement) for statement in body)


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    definition = ast.parse(textwrap.dedent(source)).body[0]
    return definition if isinstance(definition, ast.FunctionDef) else None


@functools.cache
def unpacked_order(block_forward: FunctionType) -> RouterOutput | None:
    """The order of a router's output, read off the block that unpacks it and hands ids and weights to the experts.

    The order of one family changed between transformers releases (Granite, by 5.24). None where the code does not
    say: the source cannot be read, or the block uses the output in another way.

    Raises:
        UnsupportedModelError: the block unpacks an order that tbo cannot read.
    """
    definition = _definition(block_forward)
    if definition is None:
        return None
    unpacked, experts_arguments = _router_targets(definition), _experts_arguments(definition)
    if unpacked is None or experts_arguments is None:
        return None
    _, ids, weights = experts_arguments
    for order in (RouterOutput.LOGITS_WEIGHTS_IDS, RouterOutput.IDS_WEIGHTS_LOGITS):
        kinds = order.value.split(", ")
        if unpacked[kinds.index("ids")] == ids and unpacked[kinds.index("weights")] == weights:
            return order
    raise UnsupportedModelError(
        f"{block_forward.__qualname__} unpacks its router's output as {', '.join(unpacked)} and calls its experts with"
        f" {ids} and {weights}",
        remedy="Leave this model unwrapped; routers must return logits, weights, ids or ids, weights, logits.",
    )


def _router_targets(definition: ast.FunctionDef) -> list[str] | None:
    """The three names a router's output is unpacked to."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and _calls_own(node.value, ROUTERS):
            names = [target.id for target in node.targets[0].elts if isinstance(target, ast.Name)]
            return names if len(names) == 3 else None
    return None


def _experts_arguments(definition: ast.FunctionDef) -> list[str] | None:
    """The names of rows, ids and weights in the call of the experts."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and _calls_own(node, (EXPERTS,)):
            names = [argument.id for argument in node.args if isinstance(argument, ast.Name)]
            return names if len(names) == 3 else None
    return None


def _calls_own(node: ast.expr, names: tuple[str, ...]) -> bool:
    """Whether an expression calls a submodule of one of these names."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and node.func.attr in names
    )

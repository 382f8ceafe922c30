"""Wrapping, unwrapping, copying, saving, and turning tbo off: what is left of a wrapped model, and when."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tbo
from oracle import case, hidden_of_steps, worst_difference
from tiny_models import build, token_batch
from wrapped_models import hidden, refused, report

IDS, MASK = token_batch(5, 9)


def forwards(model: torch.nn.Module) -> list[str]:
    """Modules that have a forward of their own."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_unwrapping_restores_the_model_exactly(family: str) -> None:
    model: Any = build(family)
    ids, mask, following = case(decode_steps=2)
    expected = hidden_of_steps(model, ids, mask, following)
    names, attributes = list(model.state_dict()), [set(vars(module)) for module in model.modules()]
    handle = tbo.wrap(model, overlap="always")
    assert len(forwards(model)) == 4
    assert list(model.state_dict()) == names
    hidden_of_steps(model, ids, mask, following)
    last = handle.last
    handle.unwrap()
    handle.unwrap()
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(layer.forward.__func__ is type(layer).forward for layer in model.model.layers)
    assert worst_difference(hidden_of_steps(model, ids, mask, following), expected, mask) == 0
    assert handle.last is last
    refused(
        tbo.WrapError,
        f"{type(model).__name__} is not wrapped. Call tbo.wrap(model, ...) first.",
        lambda: tbo.explain(model),
    )


def test_a_wrapped_model_is_wrapped_again_with_other_options_after_unwrapping() -> None:
    model = build("qwen3_moe")
    for sub_batches in (2, 3, 2):
        with tbo.wrap(model, overlap="always", sub_batches=sub_batches) as handle:
            hidden(model, IDS)
            assert len(report(handle).tokens_per_sub_batch) == sub_batches
            assert report(handle).step == 1
    assert forwards(model) == []


def test_the_context_manager_unwraps_when_its_body_fails() -> None:
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match="in the body"), tbo.wrap(model):
        raise ValueError("in the body")
    assert forwards(model) == []


def test_finishing_on_one_rank_does_nothing() -> None:
    model = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    handle.finish()
    hidden(model, IDS)
    handle.finish()
    assert report(handle).step == 1


def test_a_forward_wrapped_around_ours_reaches_the_layers_own_after_unwrapping() -> None:
    """Other software may keep what it has wrapped; it must not call a step that is no more."""
    model: Any = build("qwen3_moe")
    expected = hidden(model, IDS)
    handle = tbo.wrap(model, overlap="always")
    layer = model.model.layers[1]
    layer.forward = functools.partial(layer.forward)
    overlapped = hidden(model, IDS)
    assert report(handle).engaged
    handle.unwrap()
    assert forwards(model) == ["model.layers.1"]
    assert torch.equal(hidden(model, IDS), expected)
    assert report(handle).step == 1
    del layer.forward
    with tbo.wrap(model, overlap="always"):
        assert torch.equal(hidden(model, IDS), overlapped)


def test_layers_that_call_with_positional_arguments_are_served() -> None:
    """A model's forward may pass by place what ours take by name."""
    model: Any = build("qwen3_moe")
    expected = hidden(model, IDS)
    layer = model.model.layers[2]

    class ByPlace(type(layer)):  # type: ignore[misc]
        def __call__(self, hidden_states: Any, **kwargs: Any) -> Any:
            return super().__call__(hidden_states, kwargs.pop("attention_mask"), **kwargs)

    layer.__class__ = ByPlace
    with tbo.wrap(model, overlap="never") as handle:
        assert torch.equal(hidden(model, IDS), expected)
        assert "self-check: 3 kinds of layer equal their ops" in handle.notes[0]
    with tbo.wrap(model, overlap="always"):
        torch.testing.assert_close(hidden(model, IDS), expected, rtol=0, atol=5e-6)


def test_a_dropped_model_is_freed() -> None:
    model = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    hidden(model, IDS)
    weak = weakref.ref(model)
    del model, handle
    gc.collect()
    assert weak() is None


def test_a_model_wrapped_twice_whole_or_in_part() -> None:
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model)
    refused(
        tbo.WrapError,
        "this model is already wrapped. Call unwrap() on its handle first.",
        lambda: tbo.wrap(model),
    )
    refused(
        tbo.WrapError,
        "layer 0 is already wrapped, through another model that has it. Call unwrap() on that model's handle first.",
        lambda: tbo.wrap(model.model),
    )
    hidden(model, IDS)
    assert report(handle).step == 1


COPIED = (
    "a wrapped model cannot be copied: the copy's layers would run in the original's steps. Copy the model first, or"
    " call handle.unwrap()."
)
PICKLED = (
    "a wrapped model cannot be pickled. Save with save_pretrained() or state_dict(), or call handle.unwrap() first."
)


@pytest.mark.parametrize("part", ["", "model", "model.layers", "model.layers.1"])
def test_copies_and_pickles(part: str) -> None:
    model = build("qwen3_moe")
    handle = tbo.wrap(model)
    module = model.get_submodule(part)
    refused(tbo.WrapError, COPIED, lambda: copy.deepcopy(module))
    refused(tbo.WrapError, PICKLED, lambda: pickle.dumps(module))
    refused(tbo.WrapError, PICKLED, lambda: torch.save(module, io.BytesIO()))
    handle.unwrap()
    copy.deepcopy(module)


def test_saving_a_wrapped_model_writes_the_plain_models_files(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "plain")
    tbo.wrap(model)
    model.save_pretrained(tmp_path / "wrapped")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "wrapped").iterdir())
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "wrapped" / name).read_bytes(), name


@pytest.mark.parametrize("value", ["0", "", "1"])
def test_the_environment_turns_tbo_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBO_DISABLE", value)
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    hidden(model, IDS)
    assert (handle.last is None) == (value == "1")
    if value == "1":
        assert tbo.explain(model) == "TBO_DISABLE=1: tbo is off, the model runs its own code"
        assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
        handle.unwrap()
        refused(
            tbo.WrapError,
            "Qwen3MoeForCausalLM is not wrapped. Call tbo.wrap(model, ...) first.",
            lambda: tbo.explain(model),
        )


def test_the_environment_says_neither_yes_nor_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBO_DISABLE", "maybe")
    refused(
        tbo.WrapError,
        "TBO_DISABLE='maybe' is neither 0 nor 1. Set TBO_DISABLE=1 or unset it.",
        lambda: tbo.wrap(build("qwen3_moe")),
    )


@pytest.mark.parametrize(
    ("name", "missing", "why"),
    [
        ("wrap", "transformers", "which is not installed"),
        ("load_expert_parallel", "transformers", "which is not installed"),
        ("wrap", "transformers.cache_utils", "and not the installed one (no transformers.cache_utils)"),
    ],
    ids=["wrap", "load", "another release"],
)
def test_a_missing_package_is_named_with_how_to_install_it(name: str, missing: str, why: str) -> None:
    code = f"""
import sys
class Missing:
    def find_spec(self, name, *_):
        if name == {missing!r}:
            raise ModuleNotFoundError("no " + name, name=name)
sys.meta_path.insert(0, Missing())
import tbo
tbo.compile_plan, tbo.run, tbo.op, tbo.Trace
try:
    tbo.{name}
except tbo.MissingPackageError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert found.stdout.strip() == (
        f"tbo.{name} needs the package {missing.partition('.')[0]!r}, {why}. Install it with: pip install"
        ' "two-batch-overlap[hf]"'
    )

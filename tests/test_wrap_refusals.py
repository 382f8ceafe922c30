"""What `tbo.wrap` refuses, each with its exact message, and that nothing is left behind then."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import tbo
from tbo.batch import Reason
from tbo.wrapping.handle import HANDLE_ATTRIBUTE
from tiny_models import build, token_batch
from wrapped_models import hidden, refused, report

IDS, MASK = token_batch(5, 9)


OPTIONS: dict[str, tuple[dict[str, Any], type[tbo.UserError], str]] = {
    "sub_batches zero": ({"sub_batches": 0}, tbo.WrapError, "sub_batches=0. Use a whole number from 1 to 8."),
    "sub_batches many": ({"sub_batches": 9}, tbo.WrapError, "sub_batches=9. Use a whole number from 1 to 8."),
    "sub_batches bool": ({"sub_batches": True}, tbo.WrapError, "sub_batches=True. Use a whole number from 1 to 8."),
    "sub_batches half": ({"sub_batches": 2.0}, tbo.WrapError, "sub_batches=2.0. Use a whole number from 1 to 8."),
    "overlap": ({"overlap": "on"}, tbo.WrapError, "overlap='on'. Use one of 'auto', 'always', 'never'."),
    "order": ({"order": "backwards"}, tbo.WrapError, "order='backwards'. Use 'interleaved' or 'sequential'."),
    "link": (
        {"link": 50},
        tbo.WrapError,
        "link is a int. Pass tbo.Link(gigabytes_per_second, latency=seconds) or None.",
    ),
    "timeout": ({"timeout": 0}, tbo.WrapError, "timeout=0. Give a number of seconds above 0."),
    "timeout infinite": ({"timeout": float("inf")}, tbo.WrapError, "timeout=inf. Give a number of seconds above 0."),
    "timeout none": ({"timeout": None}, tbo.WrapError, "timeout=None. Give a number of seconds above 0."),
    "timeout bool": ({"timeout": True}, tbo.WrapError, "timeout=True. Give a number of seconds above 0."),
    "instrument": (
        {"instruments": [tbo.Trace]},
        tbo.WrapError,
        "instruments holds a type. Derive it from tbo.Instrument.",
    ),
    "instruments": ({"instruments": tbo.Trace()}, tbo.WrapError, "instruments is a Trace. Pass a list of instruments."),
    "thresholds": ({"thresholds": 256}, tbo.WrapError, "thresholds is a int. Pass tbo.Thresholds(...) or None."),
    "dispatcher": (
        {"dispatcher": "nccl"},
        tbo.DispatcherError,
        (
            "there is no dispatcher 'nccl'. Use one of: auto, local, all_to_all, deepep, deepep_low_latency,"
            " deepep_elastic, flashinfer, all_gather, loopback."
        ),
    ),
    "dispatcher of a later version": (
        {"dispatcher": "deepep"},
        tbo.DispatcherError,
        (
            "dispatcher 'deepep' (DeepEP's normal mode over NVLink and RDMA) is not built yet in this version. Use"
            " 'auto', or one of: local, all_to_all."
        ),
    ),
    "group without torch.distributed": (
        {"ep_group": object()},
        tbo.WrapError,
        (
            "ep_group was given, but torch.distributed is not initialised. Call torch.distributed.init_process_group"
            " first (torchrun sets its environment)."
        ),
    ),
    "schedules": (
        {"schedules": [tbo.PREFILL]},
        tbo.PlanError,
        "schedules is a list. Map tbo.Phase members to tbo.Schedule values.",
    ),
    "schedules by name": (
        {"schedules": {"prefill": tbo.PREFILL}},
        tbo.PlanError,
        "schedules maps 'prefill' to Schedule. Map tbo.Phase members to tbo.Schedule values.",
    ),
    "schedule as names": (
        {"schedules": {tbo.Phase.DECODE: ("op_core",)}},
        tbo.PlanError,
        "schedules maps <Phase.DECODE: 2> to tuple. Map tbo.Phase members to tbo.Schedule values.",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str) -> None:
    options, error, message = OPTIONS[case]
    model = build("qwen3_moe")
    refused(error, message, lambda: tbo.wrap(model, **options))
    untouched(model)


def untouched(model: nn.Module) -> None:
    """No module has a forward of its own, and the model can be wrapped."""
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert HANDLE_ATTRIBUTE not in vars(model)
    tbo.wrap(model).unwrap()


def test_what_is_no_model() -> None:
    refused(
        tbo.WrapError,
        "model is a str. Pass a transformers model (a torch.nn.Module).",
        lambda: tbo.wrap("Qwen/Qwen3-30B-A3B"),  # type: ignore[arg-type]
    )
    refused(
        tbo.UnsupportedModelError,
        "Linear has no decoder that tbo can find: no non-empty ModuleList `layers` in the model itself (Linear). Pass a"
        " transformers decoder model; submodules named model, language_model, text_model, base_model, transformer are"
        " searched.",
        lambda: tbo.wrap(nn.Linear(2, 2)),
    )


def test_a_dense_model() -> None:
    model = build("llama", intermediate_size=64)
    refused(
        tbo.UnsupportedModelError,
        "LlamaForCausalLM has no mixture-of-experts layer. Expert parallelism needs a mixture-of-experts model.",
        lambda: tbo.wrap(model),
    )


def reclass(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Makes a module an instance of a new subclass with another forward."""
    kind = type(module)
    module.__class__ = type(f"Own{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})


def test_an_unknown_layer_class_is_refused_with_what_is_known() -> None:
    model: Any = build("qwen3_moe")
    reclass(model.model.layers[2], lambda self, hidden_states, **kwargs: hidden_states)
    with pytest.raises(
        tbo.UnsupportedModelError, match=r"^OwnQwen3MoeDecoderLayer with Qwen3MoeSparseMoeBlock \("
    ) as e:
        tbo.wrap(model)
    assert "is of no family tbo knows, and its code is like that of none. Served are deepseek_v2, " in str(e.value)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_the_self_check_finds_a_block_that_computes_something_else(layer: int) -> None:
    """Also where the layers before it are as they should be."""
    model: Any = build("qwen3_moe")
    block = model.model.layers[layer].mlp
    own = type(block).forward
    reclass(block, lambda self, hidden_states: own(self, hidden_states) * 1.01)
    with pytest.raises(tbo.UnsupportedModelError) as caught:
        tbo.wrap(model)
    assert str(caught.value).startswith(f"layer {layer} (Qwen3MoeDecoderLayer) and its ops differ by ")
    assert caught.value.remedy == "Do not use tbo with this model and transformers release; please report both."
    block.__class__ = block.__class__.__base__
    untouched(model)


def test_the_self_check_finds_a_release_whose_layers_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("mixtral")
    layer = type(model.model.layers[0])
    own = layer.forward

    def changed(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states, *args, **kwargs) + 0.01 * hidden_states

    changed.__module__, changed.__qualname__ = own.__module__, own.__qualname__
    monkeypatch.setattr(layer, "forward", changed)
    with pytest.raises(tbo.UnsupportedModelError, match=r"layer 0 \(MixtralDecoderLayer\) and its ops differ by"):
        tbo.wrap(model)


def test_a_layer_that_the_model_does_not_call() -> None:
    model: Any = build("mixtral")
    model.model.layers[1].self_attn.register_module("extra", nn.Identity())  # of another kind, so it must be checked
    own = type(model.model).forward

    def skipping(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers, self.layers = self.layers, nn.ModuleList([self.layers[0], *self.layers[2:]])
        try:
            return own(self, *args, **kwargs)
        finally:
            self.layers = layers

    reclass(model.model, skipping)
    refused(
        tbo.UnsupportedModelError,
        "OwnMixtralModel does not call its layer 1 in its forward. Leave this model unwrapped; its layers are not run"
        " one after another.",
        lambda: tbo.wrap(model),
    )


def test_weights_that_are_not_numbers() -> None:
    model: Any = build("qwen3_moe")
    model.model.layers[0].mlp.gate.weight.data[3] = float("nan")
    refused(
        tbo.WrapError,
        "layer 0 (Qwen3MoeDecoderLayer) gives NaN or infinity for a plain row of tokens. Look for such values in its"
        " weights, or use a wider dtype.",
        lambda: tbo.wrap(model),
    )


def test_layers_on_the_meta_device() -> None:
    model: Any = build("qwen3_moe")
    model.model.layers[1].mlp.to("meta")
    refused(
        tbo.WrapError,
        "layer 1: mlp.gate_proj.weight is on the meta device and has no values. Load the weights before wrapping.",
        lambda: tbo.wrap(model),
    )


@pytest.mark.parametrize("whole_layers", [False, True])
def test_offloading(whole_layers: bool) -> None:
    import accelerate

    cpu = torch.device("cpu")
    model: Any = build("qwen3_moe")
    if whole_layers:
        accelerate.dispatch_model(model, {"": "cpu", "model.layers.1": "cpu"}, main_device=cpu, force_hooks=True)
    else:
        accelerate.cpu_offload(model, execution_device=cpu)
    with pytest.raises(tbo.WrapError) as caught:
        tbo.wrap(model)
    assert "carries an accelerate hook that moves weights around its forward" in str(caught.value)
    assert caught.value.remedy == (
        "Load the model onto one device: without offloading, and without a device_map over several."
    )


@pytest.mark.parametrize(
    ("name", "called", "kind"),
    [
        ("", "the layer", "Qwen3MoeDecoderLayer"),
        ("self_attn", "attention", "Qwen3MoeAttention"),
        ("mlp", "the MoE block", "Qwen3MoeSparseMoeBlock"),
    ],
)
def test_a_forward_put_on_by_other_software_stays(name: str, called: str, kind: str) -> None:
    model: Any = build("qwen3_moe")
    module = model.model.layers[3].get_submodule(name)
    module.forward = own = types.MethodType(type(module).forward, module)
    refused(
        tbo.WrapError,
        f"layer 3: {called} ({kind}) already has a forward of its own, put on by other software. Unwrap or remove that"
        " first; tbo would call past it.",
        lambda: tbo.wrap(model),
    )
    assert module.forward is own


def test_a_tensor_argument_nobody_has_classified() -> None:
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    refused(
        tbo.WrapError,
        "the layer argument 'bias' ([5, 9]) cannot be cut into sub-batches: tbo does not know whether it belongs to"
        " tokens, rows or the whole batch. Call the model without it, or wrap with overlap='never'.",
        lambda: hidden(model, IDS, bias=torch.zeros(5, 9)),
    )
    hidden(model, IDS, bias=torch.tensor(1.0), flag=True)
    assert report(handle).step == 1


@pytest.fixture
def attention_by_blocks() -> Iterator[str]:
    AttentionInterface.register("block_mask_stand_in", dense_from_block_mask)
    AttentionMaskInterface.register("block_mask_stand_in", sdpa_mask)
    yield "block_mask_stand_in"
    del AttentionInterface._global_mapping["block_mask_stand_in"]
    del AttentionMaskInterface._global_mapping["block_mask_stand_in"]


def test_a_flex_attention_mask_keeps_the_batch_whole(attention_by_blocks: str) -> None:
    """A BlockMask has no rows to take; an attention function stands in that reads it as a dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    model: Any = build("qwen3_moe")
    expected = hidden(model, IDS)
    handle = tbo.wrap(model, overlap="always")
    model.set_attn_implementation(attention_by_blocks)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, B=5, H=None, Q_LEN=9, KV_LEN=9, device="cpu", BLOCK_SIZE=1)
    assert torch.equal(hidden(model, IDS, attention_mask=mask), expected)
    assert (report(handle).engaged, report(handle).reason) == (False, Reason.ARGUMENT_NOT_SPLITTABLE)


def dense_from_block_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert type(mask).__name__ == "BlockMask"
    assert mask.shape[0] == len(query)
    return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **options)


def test_flex_attention_keeps_the_batch_whole_whatever_its_first_layer_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer may be one of linear attention, with a mask that has rows. Real flex attention is compiled."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", sdpa_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "flex_attention", sdpa_mask)
    model: Any = build("qwen3_moe")
    expected = hidden(model, IDS)
    handle = tbo.wrap(model, overlap="always")
    model.config._attn_implementation = "flex_attention"
    assert torch.equal(hidden(model, IDS), expected)
    assert (report(handle).engaged, report(handle).reason) == (False, Reason.ARGUMENT_NOT_SPLITTABLE)

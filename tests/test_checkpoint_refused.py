"""Checkpoints that are missing, broken or do not fit are refused by name, before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tbo.errors import CheckpointError, TboError, UnsupportedModelError, WrapError
from tbo.models.checkpoint import load_expert_parallel
from tiny_models import NUM_EXPERTS, build

pytestmark = pytest.mark.timeout(120)


def refused(path: Path, match: str, error: type[TboError] = CheckpointError, **changed: Any) -> None:
    arguments: dict[str, Any] = {"rank": 0, "world_size": 2, **changed}
    with pytest.raises(error, match=match):
        load_expert_parallel(path, **arguments)


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a checkpoint in one file."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint in one file with each expert apart, to be damaged."""
    build("qwen3_moe").save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


EXPERT = "model.layers.0.mlp.experts.{}.up_proj.weight"


def test_missing_unexpected_and_misshapen_tensors_are_named_in_one_error(whole: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        del weights["model.layers.2.input_layernorm.weight"]
        del weights[EXPERT.format(6)]
        weights["model.layers.0.mlp.experts.8.up_proj.weight"] = weights[EXPERT.format(0)].clone()
        weights["model.extra.weight"] = torch.zeros(2)
        weights["model.norm.weight"] = torch.zeros(63)
        weights["model.layers.2.mlp.experts.1.down_proj.weight"] = torch.zeros(64, 31)

    edit(whole, change)
    for rank in (0, 1):
        with pytest.raises(CheckpointError) as caught:
            load_expert_parallel(whole, rank=rank, world_size=2)
        message = str(caught.value)
        assert "does not fit Qwen3MoeForCausalLM: 2 missing: " in message
        assert "model.layers.0.mlp.experts.6.up_proj.weight" in message
        assert "model.layers.2.input_layernorm.weight" in message
        assert "2 unexpected: " in message
        assert "model.layers.0.mlp.experts.8.up_proj.weight" in message
        assert "model.extra.weight" in message
        assert "model.norm.weight (the checkpoint has [63], the model [64])" in message
        assert ("model.layers.2.mlp.experts.down_proj (its parts do not fit together" in message) == (rank == 0)


def test_many_faults_are_cut_short(whole: Path) -> None:
    edit(whole, lambda weights: [weights.pop(key) for key in list(weights) if "self_attn" in key])
    refused(whole, r"24 missing: (model\S+, ){7}model\S+ and 16 more\. Check that config\.json")


def test_a_kind_of_expert_tensor_that_is_missing_whole(whole: Path) -> None:
    edit(whole, lambda weights: [weights.pop(key) for key in list(weights) if "layers.0" in key and "up_proj" in key])
    refused(whole, r"missing: mlp\.experts\.\*\.up_proj\.weight for model\.layers\.0\.mlp\.experts\.gate_up_proj")


def test_stacked_experts_of_the_wrong_number(tmp_path: Path) -> None:
    build("gpt_oss").save_pretrained(tmp_path)
    key = "model.layers.1.mlp.experts.down_proj"
    edit(tmp_path, lambda weights: weights.update({key: weights[key][:3].clone()}))
    refused(
        tmp_path, r"layers\.1\.mlp\.experts\.down_proj \(the checkpoint has \[3, 32, 64\], the model \[4, 32, 64\]\)"
    )


def test_tensors_a_family_lets_pass_are_not_unexpected(whole: Path) -> None:
    edit(whole, lambda weights: weights.update({"model.rotary_emb.inv_freq": torch.zeros(8)}))
    load_expert_parallel(whole, rank=0, world_size=2)


def test_directories_without_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    refused(tmp_path / "nowhere", "there is no directory .*nowhere. .*snapshot_download")
    refused(whole / "config.json", "there is no directory")
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    refused(whole, r"holds neither model\.safetensors nor .*index\.json, only pytorch_model\.bin")
    (whole / "pytorch_model.bin").unlink()
    refused(whole, "no weights at all")


def test_configurations_that_cannot_be_used(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused(whole, "is quantised, and its experts cannot be read one by one")
    (whole / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    refused(whole, r"config\.json cannot be used: .*no_such_model")
    (whole / "config.json").write_text("{")
    refused(whole, r"config\.json cannot be used")
    (whole / "config.json").unlink()
    refused(whole, r"has no config\.json")


def test_broken_files(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "parts"
    build("qwen3_moe").save_pretrained(path, max_shard_size="100KB")
    content = (whole / "model.safetensors").read_bytes()
    for damaged in (content[: len(content) // 2], b"version https://git-lfs.github.com/spec/v1\n", b""):
        (whole / "model.safetensors").write_bytes(damaged)
        refused(whole, r"model\.safetensors is not a whole safetensors file")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    key = next(key for key, name in index["weight_map"].items() if name == first)
    wrong = {**index, "weight_map": {**index["weight_map"], key: second}}
    (path / "model.safetensors.index.json").write_text(json.dumps(wrong))
    refused(path, rf"{re.escape(second)} does not hold {re.escape(key)}", world_size=1)
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        (path / "model.safetensors.index.json").write_text(text)
        refused(path, r"index\.json is not a safetensors index")


def test_models_and_shares_that_make_no_sense(whole: Path, tmp_path: Path) -> None:
    refused(whole, f"the {NUM_EXPERTS} experts of .* cannot be shared equally by 3 ranks", WrapError, world_size=3)
    refused(whole, "fewer than the 16 ranks", WrapError, world_size=16)
    refused(whole, "neither an expert-parallel group", WrapError, rank=None)
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    refused(tmp_path / "dense", "LlamaForCausalLM has no mixture-of-experts layer", UnsupportedModelError)


def test_files_with_only_other_ranks_experts_are_not_needed(whole: Path) -> None:
    weights = load_file(whole / "model.safetensors")
    file_of = {
        key: f"experts-{number.group(1)}.safetensors"
        if (number := re.search(r"experts\.(\d+)", key))
        else "rest.safetensors"
        for key in weights
    }
    for name in set(file_of.values()):
        save_file({key: weights[key] for key in weights if file_of[key] == name}, whole / name)
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    for expert in range(2, NUM_EXPERTS):
        (whole / f"experts-{expert}.safetensors").unlink()
    load_expert_parallel(whole, rank=0, world_size=4)
    refused(whole, r"experts-2\.safetensors is missing, although .*index\.json names it", rank=1, world_size=4)

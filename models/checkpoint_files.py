"""Reading single tensors, or some experts of a stacked one, from a safetensors checkpoint.

Files are opened when a tensor in them is first read, so that a rank needs only the files its experts are in.

Shapes: E experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tbo.errors import CheckpointError

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


class CheckpointFiles:
    """A checkpoint directory: one safetensors file, or several and their index.

    Args:
        directory: where `save_pretrained` wrote.

    Raises:
        CheckpointError: there is no checkpoint there, or its index is broken.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handles: dict[str, Any] = {}
        self.bytes_read = 0
        self.tensors_read = 0
        self._file_of = self._find()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all tensors in the checkpoint."""
        return tuple(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header.

        Raises:
            CheckpointError: the file is missing or broken, or does not hold what the index says.
        """
        return tuple(self._slice(key).get_shape())

    def read(self, key: str, experts: slice | None = None) -> Tensor:
        """A tensor, or only those experts of it (dimension 0), on the CPU.

        Raises:
            CheckpointError: as `shape`.
        """
        piece = self._slice(key)
        try:
            tensor: Tensor = piece[:] if experts is None and piece.get_shape() else self._rows(key, piece, experts)
        except (SafetensorError, OSError) as error:
            raise self._broken(self._file_of[key], error) from error
        self.bytes_read += tensor.numel() * tensor.element_size()
        self.tensors_read += 1
        return tensor

    def _rows(self, key: str, piece: Any, experts: slice | None) -> Tensor:
        tensor: Tensor = self._open(self._file_of[key]).get_tensor(key) if experts is None else piece[experts]
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            handle.__exit__(kind, error, trace)
        self._handles.clear()

    def _find(self) -> Mapping[str, str]:
        if not self._directory.is_dir():
            raise CheckpointError(
                f"there is no directory {self._directory}",
                remedy="Pass a local checkpoint directory; huggingface_hub.snapshot_download makes one.",
            )
        if (self._directory / _INDEX).is_file():
            return self._read_index()
        if (self._directory / _SINGLE).is_file():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        other = sorted(path.name for path in self._directory.iterdir() if path.suffix in (".bin", ".pt", ".gguf"))
        held = f"only {', '.join(other)}" if other else "no weights at all"
        raise CheckpointError(
            f"{self._directory} holds neither {_SINGLE} nor {_INDEX}, {held}",
            remedy="Save the model with save_pretrained, which writes safetensors, and load that.",
        )

    def _read_index(self) -> Mapping[str, str]:
        path = self._directory / _INDEX
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(key): str(name) for key, name in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a safetensors index ({type(error).__name__}: {error})",
                remedy="Download or save the checkpoint again.",
            ) from error

    def _slice(self, key: str) -> Any:
        name = self._file_of[key]
        handle = self._open(name)
        try:
            return handle.get_slice(key)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self._directory / name} does not hold {key}, which {_INDEX} says is there",
                remedy="Download or save the checkpoint again.",
            ) from error

    def _open(self, name: str) -> Any:
        if name not in self._handles:
            path = self._directory / name
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, although {_INDEX} names it", remedy="Download the checkpoint again."
                )
            try:
                self._handles[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise self._broken(name, error) from error
        return self._handles[name]

    def _broken(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._directory / name} is not a whole safetensors file ({error})",
            remedy="Download or save it again; a download may have stopped early, or left a pointer file.",
        )

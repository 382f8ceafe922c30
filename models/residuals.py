"""How a decoder layer adds what attention and feed-forward compute to what it was given.

A rule owns the norms and what lies between them: `before_attention`, `between` (after attention, before the
feed-forward block) and `after`. `extra` is whatever a rule needs from one to the next besides the residual; nothing
else passes between them.

Shapes: B sequences, S positions, H hidden size, C residual streams.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Prepared = tuple[Tensor, Tensor, Any]
"""The input of attention or of the feed-forward block, the residual, and `extra`."""


class ResidualRule(Protocol):
    """One family's way. `layer` is the decoder layer, whose norms and factors are looked up when used."""

    def before_attention(self, layer: Any, hidden: Tensor) -> Prepared:
        """From the layer's input."""
        ...

    def between(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Prepared:
        """From attention's output."""
        ...

    def after(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """From the feed-forward output to the layer's output."""
        ...


class PreNorm:
    """``x + f(norm(x))``, twice: almost every family."""

    def before_attention(self, layer: Any, hidden: Tensor) -> Prepared:
        """Norms the input; the input itself is the residual."""
        return layer.input_layernorm(hidden), hidden, None

    def between(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Prepared:
        """Adds, then norms the sum, which is the next residual."""
        summed = residual + output
        return layer.post_attention_layernorm(summed), summed, None

    def after(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """Adds."""
        return residual + output.view(residual.shape)


class ScaledPreNorm(PreNorm):
    """``x + m * f(norm(x))`` with one multiplier a layer (Granite)."""

    def between(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Prepared:
        """Scales what attention adds."""
        return super().between(layer, output * layer.residual_multiplier, residual, extra)

    def after(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """Scales what the feed-forward block adds."""
        return super().after(layer, output * layer.residual_multiplier, residual, extra)


class AlphaBeta:
    """``a * norm(x) + b * f(norm(x))``: the residual is taken after the norm (MiniMax)."""

    def before_attention(self, layer: Any, hidden: Tensor) -> Prepared:
        """The normed input is both input and residual."""
        normed = layer.input_layernorm(hidden)
        return normed, normed, None

    def between(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Prepared:
        """Weighs both; the normed sum is both input and residual."""
        normed = layer.post_attention_layernorm(residual * layer.attn_alpha_factor + output * layer.attn_beta_factor)
        return normed, normed, None

    def after(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """Weighs both."""
        summed: Tensor = residual * layer.mlp_alpha_factor + output * layer.mlp_beta_factor
        return summed


class HyperConnections:
    """Several residual streams ``[B, S, C, H]``, mixed by learned matrices around each block (DeepSeek V4).

    `extra` is the pair (how the block's output is spread over the streams, how the streams mix among themselves).
    """

    def before_attention(self, layer: Any, hidden: Tensor) -> Prepared:
        """Collapses the streams to attention's input."""
        spread, mix, collapsed = self._collapse(layer.attn_hc, hidden)
        return layer.input_layernorm(collapsed), hidden, (spread, mix)

    def between(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Prepared:
        """Mixes attention's output in and collapses again."""
        streams = self.after(layer, output, residual, extra)
        spread, mix, collapsed = self._collapse(layer.ffn_hc, streams)
        return layer.post_attention_layernorm(collapsed), streams, (spread, mix)

    def after(self, layer: Any, output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """Mixes a block's output into the streams."""
        spread, mix = extra
        dtype = residual.dtype
        added: Tensor = spread.to(dtype).unsqueeze(-1) * output.unsqueeze(-2)
        return added + torch.matmul(mix.to(dtype).transpose(-1, -2), residual)

    def _collapse(self, connection: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transformers' module cannot be called without tokens (from 5.24 on); of none, everything is nothing."""
        if streams.numel() == 0:
            spread = streams.new_empty(streams.shape[:-1])
            return (
                spread,
                streams.new_empty(*spread.shape, streams.shape[2]),
                streams.new_empty(streams[..., 0, :].shape),
            )
        collapsed: tuple[Tensor, Tensor, Tensor] = connection(streams)
        return collapsed

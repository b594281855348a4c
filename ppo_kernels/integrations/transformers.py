"""The linear forms of this library on causal LMs of transformers; tested with transformers 5.24.

    head = patch_lm_head(model)
    hidden = model(input_ids).logits  # [B, T, H]: what the head would have been given
    logprobs_from_hidden(hidden, head.weight, tokens, bias=head.bias, **head.options)

A patched model skips its head, so that no [B, T, V] exists. The model is otherwise as it was: parameters, state_dict,
tied embeddings, hooks, the arguments of forward and its other outputs.

What a model does to its logits after the head (a soft cap in Gemma 2, a factor in Cohere, a divisor in Granite, padded
columns cut off) is measured, not read from a configuration, whose names differ and lie: `logits_scaling` divides in one
family and multiplies in another. patch_lm_head calls the model once, with one token, in which the head answers with
known numbers; what comes out is softcap * tanh(scale * logits / softcap) on the first vocab_size columns, or an error.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TESTED", "PatchedHead", "patch_lm_head"]

TESTED = "transformers 5.24.0"

HUGE, TINY = 2.0**14, 2.0**-14  # logits that show the cap, and the slope at 0
PROBES = (HUGE, TINY, 0.0, 1.0, -1.0, -3.0, 20.0, -100.0)


def patch_lm_head(model: Any) -> PatchedHead:
    """Make model(...).logits the final hidden states [B, T, H], in the dtype and after the norm that the head is given.

    Args:
        model: a causal LM of transformers, or a PEFT model around one, before DDP or torch.compile wraps it. Its head
            must be a plain torch.nn.Linear. A model that is patched already gives its handle, and so does a deepcopy
            of one: the copy is patched too, on its own.

    Returns: the handle: weight, bias and options for the linear loss; unpatch() undoes, as does the end of `with`.

    While patched, `generate` and whatever runs inside `with head.logits():` see logits; labels are a ValueError, as
    the loss of a model needs logits too.

    Raises: TypeError for a model or a head that this cannot work on (LoRA on the head, a quantised head),
        NotImplementedError if the model does to its logits what the linear loss cannot.
    """
    model = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    if not hasattr(type(model), "get_output_embeddings"):  # a wrapper's instance would ask the model inside
        raise TypeError(
            f"model is a {type(model).__name__}, expected a causal LM of transformers: patch the model inside, "
            "before DDP or torch.compile wraps it"
        )
    current = vars(model).get("forward")
    return current if isinstance(current, PatchedHead) else PatchedHead(model)


class PatchedHead:
    """What patch_lm_head returns, and the forward of the patched model.

    Attributes:
        options: {"logit_softcap", "logit_scale", "vocab_size"}, keywords of logprobs_from_hidden and PPOLossConfig.
        head: the module.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.head = model, model.get_output_embeddings()
        _check_head(model, self.head)
        self.__wrapped__ = model.forward  # its signature is the one that generate() and Trainer see
        self._head_forward = self.head.forward
        names = list(inspect.signature(model.forward).parameters)
        self._labels_at = names.index("labels") if "labels" in names else len(names)
        self._logits = False  # inside `with self.logits()`
        self._probes: Tensor | None = None
        self._hidden: list[Tensor] | None = None  # of the call of forward in progress
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._replace(self.head, "forward", self._skip)
        self._replace(model, "forward", self)
        try:
            self.options = self._measure()
        except BaseException:
            self.unpatch()
            raise
        generators = ("generate", "generate_batch", "init_continuous_batching")
        self._generators = {name: getattr(model, name) for name in generators if hasattr(model, name)}
        for name in self._generators:
            self._replace(model, name, getattr(self, "_" + name))

    @property
    def weight(self) -> Tensor:
        """[V, H], the parameter itself. Under FSDP2 the gathered one, from the end of forward until backward."""
        return self.head.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """[V]."""
        return self.head.bias  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def logits(self) -> Iterator[None]:
        """The model returns logits inside, and takes labels."""
        before, self._logits = self._logits, True
        try:
            yield
        finally:
            self._logits = before

    def unpatch(self) -> None:
        """The model is as before; weight, bias and options stay valid. A second call does nothing."""
        for owner, name, new, _ in self._replaced:
            if vars(owner).get(name) != new:
                raise RuntimeError(f"{type(owner).__name__}.{name} was replaced since it was patched: undo that first")
        for owner, name, _, old in self._replaced:
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._replaced.clear()

    def __enter__(self) -> PatchedHead:
        return self

    def __exit__(self, *exc: object) -> None:
        self.unpatch()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The patched model's forward."""
        if self._logits:
            return self.__wrapped__(*args, **kwargs)
        labels = args[self._labels_at] if len(args) > self._labels_at else kwargs.get("labels")
        if labels is not None:
            raise ValueError(
                "labels were given to a model that returns hidden states: the model's own loss needs logits, "
                "`with head.logits():` has them"
            )
        given: list[Tensor] = []
        self._hidden = given
        try:
            output = self.__wrapped__(*args, **kwargs)
        finally:
            self._hidden = None
        name = type(self.model).__name__
        if len(given) != 1:
            raise NotImplementedError(f"{name} called its head {len(given)} times in one forward, expected 1")
        if not hasattr(output, "logits"):
            raise TypeError(f"{name} returned a {type(output).__name__}, expected a ModelOutput: use return_dict=True")
        if self._probes is None:
            output.logits = given[0]
        return output

    def _skip(self, hidden: Tensor) -> Tensor:
        """The head's forward. Nobody reads what it returns while patched: one row, for the code between it and us."""
        if self._hidden is None:
            return self._head_forward(hidden)  # type: ignore[no-any-return]
        self._hidden.append(hidden)
        if self._probes is not None:
            return self._probes
        return hidden.new_zeros((1,) * (hidden.dim() - 1) + (self.head.out_features,))

    def _measure(self) -> dict[str, Any]:
        model, name = self.model, type(self.model).__name__
        x = torch.tensor(PROBES, dtype=torch.float64, device="cpu")
        self._probes = x[None, :, None].repeat(1, 1, self.head.out_features)  # [1, rows, V]
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        # dropout draws nothing from the caller's generators; gradients are on to see whether a parameter takes part
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                y = model(input_ids=token).logits
        except (NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"{name} could not be called with one token, to see what it does to its logits: {error}"
            ) from error
        finally:
            self._probes = None
        constant, vocab_size = not y.requires_grad, y.shape[-1]
        y = y.detach().double().reshape(len(PROBES), vocab_size)
        scale, cap = y[1, 0].item() / TINY, abs(y[0, 0].item())
        scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale
        capped = cap < 0.999 * scale * HUGE
        expected = cap * torch.tanh(scale * x / cap) if capped else scale * x
        if not (constant and scale > 0 and torch.allclose(y, expected[:, None], 1e-5, 1e-6)):
            raise NotImplementedError(
                f"{name} does more to its logits than softcap * tanh(scale * logits / softcap) with constant softcap "
                f"and scale: 1.0 became {y[3].min():g} to {y[3].max():g}"
            )
        return {
            "logit_softcap": cap if capped else None,
            "logit_scale": scale,
            "vocab_size": None if vocab_size == self.head.out_features else vocab_size,
        }

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._replaced.append((owner, name, new, vars(owner).get(name)))
        setattr(owner, name, new)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.logits():
            return self._generators["generate"](*args, **kwargs)

    def _generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.logits():
            return self._generators["generate_batch"](*args, **kwargs)

    def _init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        if not self._logits:
            raise RuntimeError("a manager of continuous batching outlives this call: unpatch the model first")
        return self._generators["init_continuous_batching"](*args, **kwargs)


def _check_head(model: Any, head: Any) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder, expected a causal LM")
    if head is None:
        raise TypeError(f"{name} has no output embeddings, expected a causal LM")
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    if not plain or "forward" in vars(head):
        kind = "a Linear whose forward was replaced" if plain else f"{type(head).__module__}.{type(head).__name__}"
        raise TypeError(
            f"the head of {name} is {kind}, expected a plain torch.nn.Linear, whose weight and bias give the logits "
            "(LoRA: merge the head's adapter, or leave the head out of target_modules and modules_to_save)"
        )

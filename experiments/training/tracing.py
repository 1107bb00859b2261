"""Record the tensor operations of a function as a graph, as `torch.fx.experimental.proxy_tensor.make_fx` does.

The operations are the same, in the same order. But make_fx imports PyTorch's compiler, which takes longer than all
other imports of a run together. What is recorded has passed through autograd and vmap: plain operations remain.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary


def recorded(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """The operations of `function(*inputs)`. Every node's meta["val"] is a tensor of its shape and strides."""
    with torch.no_grad(), _Recording(inputs) as recording:
        outputs = function(*inputs)
    recording.graph.output(tuple(map(recording.node, outputs)))
    return fx.GraphModule(recording.constants, recording.graph)


class _Recording(TorchDispatchMode):
    """Records every operation that is executed, and which node made which tensor."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), nn.Module()
        self._nodes = WeakTensorKeyDictionary()
        for number, tensor in enumerate(inputs):
            self._made(tensor, self.graph.placeholder(f"input_{number}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        arguments = tree_map(self.node, (args, kwargs or {}))  # before an operation in place changes them
        result = function(*args, **(kwargs or {}))
        node = self.graph.call_function(function, *arguments)
        if isinstance(result, Tensor):
            self._made(result, node)
        else:
            for index, part in enumerate(result):
                if isinstance(part, Tensor):  # some operations return None for outputs that are not needed
                    self._made(part, self.graph.call_function(operator.getitem, (node, index)))
        return result

    def node(self, value: object) -> object:
        """The node that made a tensor. A tensor from outside is a constant; other values stand for themselves."""
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            name = f"constant_{len(list(self.constants.buffers()))}"
            self.constants.register_buffer(name, value)
            self._made(value, self.graph.get_attr(name))
        return self._nodes[value]

    def _made(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._nodes[tensor] = node


class _Compiler:
    """Stands in for torch._dynamo until somebody imports it.

    torch.func.grad would import it only to switch it off (`torch._dynamo.compiled_autograd._disable`).
    """

    def __getattr__(self, name: str) -> object:
        if name == "compiled_autograd" and "torch._dynamo" not in sys.modules:
            return SimpleNamespace(_disable=contextlib.nullcontext)
        return getattr(importlib.import_module("torch._dynamo"), name)


if "torch._dynamo" not in sys.modules:
    torch._dynamo = _Compiler()  # importing the real one replaces it

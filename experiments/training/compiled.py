"""Turn a small tensor function into one that costs little Python per call.

Small models are bound by the interpreter: vmap(grad) of logistic regression takes 1.5 ms a step in eager mode, of
which arithmetic is 1 %. The function is traced once per input shape into plain tensor operations (which removes
autograd and vmap), and on a CPU run by the TorchScript interpreter (which removes Python). The operations and their
order stay the same, hence the numbers too. Unlike torch.compile, this needs no C++ compiler.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.training.tracing import recorded

aten = torch.ops.aten


class Compiled:
    """`function` takes a fixed number of tensors and returns a tuple of tensors. It is traced once per shape."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], enabled: bool = True) -> None:
        self.function, self.enabled = function, enabled
        self._traced: dict[tuple, Callable] = {}

    def for_inputs(self, *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        """The function specialised to the shapes and strides of `inputs`; call it only with inputs like these."""
        if not self.enabled:
            return self.function
        key = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
        if key not in self._traced:
            self._traced[key] = _trace(self.function, inputs)
        return self._traced[key]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.for_inputs(*inputs)(*inputs)


WARM_UP = 3  # calls before a capture: libraries choose their algorithms and allocate then


def captured(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`function`, which changes tensors in place, as a CUDA graph to be replayed; on a CPU, the function itself.

    It is called a few times on the way. Thread-local: other threads may use the GPU meanwhile.
    """
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay


def side_by_side(functions: list[Callable], device: torch.device) -> list:
    """The results of all functions. On a GPU each runs in its own stream, since small kernels leave room for others."""
    if device.type != "cuda":
        return [function() for function in functions]
    here, results = torch.cuda.current_stream(device), []
    streams = [torch.cuda.Stream(device) for _ in functions]
    for function, stream in zip(functions, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(function())
    for stream in streams:
        here.wait_stream(stream)
    return results


def _trace(function: Callable, inputs: tuple[Tensor, ...]) -> Callable:
    with torch.no_grad():
        graph = recorded(function, inputs)
        simplify(graph)
        if inputs[0].device.type != "cpu":
            return graph
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TorchScript is deprecated; the plain graph is the fallback
                traced = torch.jit.trace(graph, inputs, check_trace=False)
            return traced.forward  # the bare method: a module looks for hooks in every call
        except (RuntimeError, AttributeError) as error:
            logging.getLogger("cdgrab").warning("steps run without TorchScript, several times slower: %s", error)
            return graph


_RESHAPES = {aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.detach.default}


def simplify(graph: torch.fx.GraphModule) -> None:
    """Simplify what vmap leaves behind: remove operations that do nothing, and replace matrix products that are outer
    products. No rewrite changes a single bit of the numbers.
    """
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        with graph.graph.inserting_before(node):
            replacement = _simpler(node, graph.graph)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            replacement.meta.setdefault("val", node.meta["val"])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _simpler(node: torch.fx.Node, graph: torch.fx.Graph) -> torch.fx.Node | None:
    """A cheaper node with the same result as `node`, or None."""
    if node.target in _RESHAPES:
        before, after = node.args[0].meta["val"], node.meta["val"]
        unchanged = before.shape == after.shape and before.stride() == after.stride()
        return node.args[0] if unchanged else None
    if node.target == aten.transpose.int:
        inner = node.args[0]
        undone = inner.target == aten.transpose.int and set(inner.args[1:]) == set(node.args[1:])
        return inner.args[0] if undone else None
    if node.target == aten.mean.dim and len(node.args) == 2 and not node.kwargs:
        tensor, dims = node.args
        single = len(dims) > 0 and all(tensor.meta["val"].shape[dim] == 1 for dim in dims)
        return graph.call_function(aten.squeeze.dims, (tensor, dims)) if single else None
    if node.target == aten.bmm.default and node.args[0].meta["val"].shape[2] == 1:
        return graph.call_function(aten.mul.Tensor, node.args)  # [n, a, 1] x [n, 1, b] is an outer product
    return None

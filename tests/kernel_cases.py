"""What the tests of kernels share: types, and the versions for long rows."""

import types

import pytest
import torch

from cdgrab.balance import kernels

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def long_rows_by(how, monkeypatch):
    """A module whose `balance` is the version for long rows."""
    if how == "by threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if how != "divided":
        return types.SimpleNamespace(balance=kernels.optional("cpu").balance)
    monkeypatch.setattr(kernels.optional("divided"), "ROWS_AT_ONCE", 10)
    return types.SimpleNamespace(balance=kernels.balance_divided)

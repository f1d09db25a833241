import sys

import numpy as np
import pytest
import torch

from unskew.core.key import Key
from unskew.core.machine import neutral


def product():
    square = torch.randn(300, 300, generator=Key(0).torch(), device="cpu", dtype=torch.float32)
    return square @ square


def test_inside_everything_is_as_a_new_process_has_it():
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"), np.errstate(all="raise"):
        with neutral():
            made = torch.ones(2, requires_grad=True)
            (made * made).sum().backward()
            assert (made.device.type, made.dtype, made.is_inference()) == ("cpu", torch.float32, False)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
            assert np.geterr() == {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
        assert torch.zeros(1).is_meta
        assert torch.is_inference_mode_enabled()
        assert np.geterr()["under"] == "raise"


def test_small_numbers_are_numbers_inside():
    tiny = torch.tensor(sys.float_info.min, dtype=torch.float64)
    torch.set_flush_denormal(True)
    try:
        with neutral():
            assert float(tiny / 2) == sys.float_info.min / 2 > 0
        assert float(tiny / 2) == 0
    finally:
        torch.set_flush_denormal(False)
    with neutral():
        pass
    assert sys.float_info.min / 2 > 0


@pytest.mark.parametrize("way", ["legacy", "new"])
def test_products_of_float32_are_float32_inside(way):
    plain = product()
    if way == "legacy":
        torch.set_float32_matmul_precision("medium")
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with neutral():
            assert torch.equal(product(), plain)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_kernels_are_the_usual_ones_inside():
    torch._C._set_mkldnn_enabled(False)
    try:
        with neutral():
            assert torch.backends.mkldnn.enabled
        assert not torch.backends.mkldnn.enabled
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_threads_are_one_inside_unless_they_are_kept():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with neutral():
            assert torch.get_num_threads() == 1
            with neutral(keep_threads=True):
                assert torch.get_num_threads() == 1
        with neutral(keep_threads=True):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_nested_contexts_restore_at_the_outermost_end_alone():
    torch.set_default_dtype(torch.float64)
    try:
        with neutral():
            with neutral():
                pass
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_as_a_decorator_the_function_keeps_its_name_and_signature():
    @neutral()
    def kind(count: int) -> torch.device:
        """Words."""
        return torch.zeros(count).device

    with torch.device("meta"):
        assert kind(2).type == "cpu"
    assert (kind.__name__, kind.__doc__) == ("kind", "Words.")

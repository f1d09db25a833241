"""A device that pretends: tensors that report another device and compute with the CPU's own kernels.

There is no GPU where these tests run. ``with PretendDevice("cuda:0"):`` makes ``tensor.to("cuda:0")`` and
``torch.zeros(…, device="cuda:0")`` work. What comes out has the CPU's values inside, so that a whole run can be
compared bit for bit with one on the CPU, and it refuses what a real device would refuse:

- an operation on tensors of both sides, except a CPU scalar (no dimensions) in a pointwise operation, as CUDA has it;
- writing into a CPU tensor from the device or the other way round, except by ``copy_``;
- ``.numpy()``;
- a draw from a CPU generator into a tensor of the device;
- float64, where the device is "mps".

It is stricter than CUDA in one place: CUDA takes indices from the CPU, which hides a copy in every call.

Inside, PyTorch also says that there is such a device, and waiting for it (``synchronize``) is counted.

For PyTorch's C++ such a tensor is a "meta" tensor with a Python subclass: autograd runs it in the calling thread and
never asks a driver. Only Python sees the pretended name.
"""

from collections import Counter
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
META = torch.device("meta")
CPU = torch.device("cpu")
COPIES = {aten.copy_.default, aten._foreach_copy_.default}  # that may cross from one side to the other
# Operations whose result the host must wait for, beside copies to the CPU
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten._unique2.default, aten.equal.default,
}  # fmt: skip


class WrongDevice(RuntimeError):
    """An operation that a real device would refuse."""


class PretendTensor(Tensor):
    """A tensor that reports its PretendDevice's name; ``value`` is the CPU tensor that it stands for."""

    @staticmethod
    def __new__(cls, value, home):
        if home.device.type == "mps" and value.dtype == torch.float64:
            raise WrongDevice("mps has no float64: move the tensor to the CPU first")
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            device=META,
        )  # fmt: skip
        made.value, made.home = value, home
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return self.home.device

    @property
    def is_meta(self):
        return False

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    def numpy(self, *, force=False):
        raise WrongDevice(f"NumPy cannot read a tensor on {self.device}: move it to the CPU first")

    def __array__(self, *_, **__):
        return self.numpy()

    def tolist(self):
        self.home.waits["copy to the CPU"] += 1
        return self.value.tolist()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = PretendTensor(self.value.clone(), self.home).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self, *, tensor_contents=None):
        return f"PretendTensor({self.value!r}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = list(_tensors((args, kwargs)))
        home = next(each.home for each in given if isinstance(each, PretendTensor))
        if func is aten._to_copy.default:
            return _moved_copy(home, args[0], kwargs)
        if kwargs.get("device") == META:
            kwargs["device"] = CPU
        _check_sides(func, args, kwargs, given)
        _count_wait(home, func, args, kwargs)
        result = func(*_plain(args), **_plain(kwargs))
        written = _written(func, args, kwargs)
        if written:
            if len(func._schema.returns) == 0:
                return None
            return written[0] if len(written) == 1 else tuple(written)
        return _each(result, lambda each: PretendTensor(each, home))


class PretendDevice(TorchFunctionMode):
    """``with PretendDevice("cuda:0") as home``: that device exists inside.

    ``home.waits`` counts by name the operations for which the host has to wait for the device, ``home.arrivals`` the
    tensors that came from the CPU.
    """

    def __init__(self, name="cuda:0"):
        super().__init__()
        self.device = torch.device(name)
        self.waits = Counter()
        self.arrivals = 0
        self._factories = _MetaFactories(self)
        cuda, mps = (self.device.type == kind for kind in ("cuda", "mps"))
        self._said = [
            patch("torch.cuda.is_available", lambda: cuda),
            patch("torch.cuda.device_count", lambda: int(cuda)),
            patch("torch.backends.mps.is_available", lambda: mps),
            patch("torch.cuda.synchronize", self._synchronize),
            patch("torch.mps.synchronize", self._synchronize),
        ]

    def __enter__(self):
        for each in self._said:
            each.start()
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *problem):
        super().__exit__(*problem)
        self._factories.__exit__(*problem)
        for each in self._said:
            each.stop()

    def _synchronize(self, device=None):
        assert device is None or self.is_here(device)
        self.waits["synchronize"] += 1

    def place(self, value):
        """A CPU tensor's values on this device, in memory of their own."""
        if value.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("a gradient that would flow from the device back to the CPU")
        self.arrivals += 1
        return PretendTensor(value.detach().clone(), self)

    def is_here(self, device):
        """Whether a device's name, with or without a number, is this one's."""
        device = torch.device(device)
        return device.type == self.device.type and device.index in (None, self.device.index)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            return self._to(args[0], args[1:], kwargs)
        if func is Tensor.cuda:
            return self._to(args[0], (kwargs.get("device") or "cuda",), {})
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        if torch.device(device) == META:
            with self._factories.left_alone():
                return func(*args, **kwargs)
        here = self.is_here(device)
        if here and kwargs.get("generator") is not None:
            raise WrongDevice(f"a CPU generator cannot draw on {self.device}: draw on the CPU and move it")
        result = func(*_plain(args), **{**_plain(kwargs), "device": CPU if here else device})
        return PretendTensor(result, self) if here else result

    def _to(self, value, args, kwargs):
        if args and isinstance(args[0], Tensor):  # like another tensor
            args = (args[0].device, args[0].dtype, *args[1:])
        if isinstance(other := kwargs.pop("other", None), Tensor):
            args = (other.device, other.dtype)
        copy = bool(kwargs.get("copy", False))
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        rest = {key: it for key, it in (("dtype", dtype), ("memory_format", layout)) if it is not None}
        if device is not None and not self.is_here(device):
            return value.to(device, copy=copy, **rest)
        if device is None or isinstance(value, PretendTensor):
            return value.to(copy=copy, **rest) if rest or copy else value
        return self.place(value.to(**rest) if rest else value)


class _MetaFactories(TorchDispatchMode):
    """What C++ makes "like" a pretended tensor it makes as a meta tensor, without values: here it gets them.

    A meta tensor that a program asks for by that name stays what it is.
    """

    def __init__(self, home):
        super().__init__()
        self._home = home
        self._asked_for = 0

    @contextmanager
    def left_alone(self):
        self._asked_for += 1
        try:
            yield
        finally:
            self._asked_for -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") != META or self._asked_for:
            return func(*args, **kwargs)
        if any(isinstance(each, PretendTensor) for each in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        return PretendTensor(func(*args, **{**kwargs, "device": CPU}), self._home)


def _plain(values):
    return _each(values, _value)


def _value(each):
    if _is_empty_index(each):
        return torch.empty_like(each, device=CPU)
    return each.value if isinstance(each, PretendTensor) else each


def _is_empty_index(each):
    """Made in C++ of an empty list as an index, which a real device takes."""
    return not isinstance(each, PretendTensor) and each.device == META and each.shape == (0,)


def _each(values, change):
    """The same lists, tuples and dicts with every tensor in them changed."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        return {name: _each(value, change) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_each(value, change) for value in values])
    return values


def _tensors(values):
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _moved_copy(home, value, kwargs):
    """``value`` to another type, or to the CPU."""
    device = kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    result = aten._to_copy.default(_plain(value), **kwargs)
    if device is None or device == META:
        return PretendTensor(result, home)
    home.waits["copy to the CPU"] += 1
    return result


def _check_sides(func, args, kwargs, given):
    if kwargs.get("generator") is not None:
        raise WrongDevice(f"{func}: a CPU generator cannot draw into a tensor of the device")
    strangers = [each for each in given if not (isinstance(each, PretendTensor) or _is_empty_index(each))]
    if not strangers or func in COPIES:
        return
    written = {id(each) for each in _tensors(_written(func, args, kwargs))}
    for each in strangers:
        scalar = each.dim() == 0 and each.device == CPU and torch.Tag.pointwise in func.tags
        if not scalar or id(each) in written:
            raise WrongDevice(f"{func} on tensors of both sides: one is on {each.device}, shape {list(each.shape)}")


def _count_wait(home, func, args, kwargs):
    if func in WAITS:
        home.waits[str(func)] += 1
    elif func in COPIES:
        onto, given = (list(_tensors(args[place])) for place in (0, 1))
        sides = [tuple(isinstance(each, PretendTensor) for each in pair) for pair in zip(onto, given, strict=True)]
        home.waits["copy to the CPU"] += sides.count((False, True))
        home.arrivals += sides.count((True, False))
    elif func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
        home.waits["a mask as an index"] += len(masks)


def _written(func, args, kwargs):
    """The arguments that an operation writes into, in their order."""
    values = (args[place] if place < len(args) else kwargs.get(name) for place, name in _writes(func))
    return [value for value in values if value is not None]


@cache
def _writes(func):
    arguments = enumerate(func._schema.arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]

"""The same bits in any context: what the caller has set in PyTorch, NumPy or Python does not reach a result."""

import asyncio
import hashlib
import threading
import warnings
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import unskew
from unskew.extend import Key
from unskew.report.write import make_report

CLASSES = 3


def data():
    draw = Key(0).fold("contexts").numpy()
    labels = np.arange(60) % CLASSES
    images = (draw.integers(0, 120, (60, 8, 8)) + 40 * labels[:, None, None]).astype(np.uint8)
    return images[:45], labels[:45], images[45:], labels[45:]


def encoder():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 70), nn.BatchNorm1d(70))
    draw = Key(1).torch()
    for value in layers.parameters():
        value.data = torch.randn(value.shape, generator=draw)
    return layers


@pytest.fixture(scope="module")
def modules():
    """Encoder and classifier as a user has them: made before the context is entered."""
    layer = nn.Linear(70, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=Key(2).torch()))
        layer.bias.zero_()
    return encoder(), layer


def digest(*tensors):
    sha = hashlib.sha256()
    for value in tensors:
        assert not value.is_inference()
        sha.update(f"{value.dtype} {tuple(value.shape)} {value.device}".encode())
        sha.update(value.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def everything(modules, folder):
    """What the public functions give, as texts and hashes."""
    seen = {}
    folder.mkdir()
    images, labels, *_ = data()
    network, layer = modules
    modes = [part.training for part in network.modules()]
    state = {name: value.clone() for name, value in network.state_dict().items()}

    settings = {"data": data(), "model": "tiny-cnn", "method": "moon + fedavgm(0.5) + ccvr(per_class=20) + lda",
                "partition": "dirichlet(alpha=0.5)", "clients": 3, "rounds": 2, "epochs": 1, "batch": 8,
                "engine": "loop", "checkpoint_seconds": 0}  # fmt: skip
    result = unskew.run(**settings, out=folder / "run")
    seen["run"] = (
        result.weights_sha256,
        result.loss,
        [(each.accuracy, each.loss) for each in result.calibrations.values()],
    )
    with pytest.raises(unskew.StopRun):
        unskew.run(
            **settings,
            out=folder / "stopped",
            observe=lambda event: unskew.STOP if hasattr(event, "train_loss") else None,
        )
    seen["resume"] = unskew.resume(folder / "stopped", data=data()).weights_sha256
    again = unskew.calibrate_run(folder / "run", "uscc(epochs=1)", data=data())
    seen["calibrate_run"] = [(each.accuracy, each.loss) for each in again.calibrations.values()]
    for name in (None, "lda"):
        module = unskew.load(folder / "run", name)
        seen["load", name] = digest(*module.state_dict().values()), any(p.is_inference() for p in module.parameters())
    measured = unskew.analyse(folder / "run", "norms", "cka", "drift", "projection", data=data())
    seen["analyse"] = {name: repr(each.values) for name, each in measured.items()}
    seen["report"] = make_report(folder / "run", only=["norms"], data=data())[1].findings

    pixels = torch.from_numpy(images.copy()).to(torch.float32, copy=True).to("cpu") / 255
    batches = [(pixels[:20], labels[:20].tolist()), (pixels[20:], labels[20:].astype(np.uint8))]
    for form in ("full", "diagonal", "shared", "low-rank(4)"):
        whole = unskew.ClassStatistics.measure(network, batches, np.int64(CLASSES), form=form)
        whole = whole + unskew.ClassStatistics.empty(CLASSES, 70, form)
        whole.save(folder / "statistics")
        read = unskew.ClassStatistics.load(folder / "statistics")
        seen["statistics", form] = digest(
            *read.tensors().values(), read.counts, read.means(), read.mean(1), read.covariance(2), read.within()
        )
        for method in ("ccvr(per_class=20)", "lda", "uscc(epochs=1)"):
            if "uscc" in method and form == "low-rank(4)":
                continue
            made = unskew.calibrate(layer, read, method=method)
            seen["calibrate", form, method] = digest(*made.tensors().values()), digest(made.linear().weight)
    seen["lift"] = digest(unskew.Lift.of(70, 10).weight)
    drawn = torch.rand(3, generator=unskew.Key(0).fold("a").torch(), dtype=torch.float64, device="cpu")
    seen["key"] = drawn.tolist(), unskew.Key(0).fold("a").numpy().random(3).tolist()

    assert [part.training for part in network.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    return seen


@contextmanager
def setting(setter, inside, outside):
    setter(inside)
    try:
        yield
    finally:
        setter(outside)


def default_dtype(kind):
    return setting(torch.set_default_dtype, kind, torch.float32)


def threads(count):
    return setting(torch.set_num_threads, count, torch.get_num_threads())


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default type float64": lambda: default_dtype(torch.float64),
    "default type bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: setting(torch.set_default_device, "meta", None),
    "inside torch.device": lambda: torch.device("meta"),
    "default device cpu": lambda: setting(torch.set_default_device, "cpu", None),
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "three threads": lambda: threads(3),
    "float32 products in bfloat16": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "without oneDNN": lambda: setting(torch._C._set_mkldnn_enabled, False, True),
    "small numbers are zero": lambda: setting(torch.set_flush_denormal, True, False),
    "NumPy raises": lambda: np.errstate(all="raise"),
    "warnings are errors": lambda: warnings.catch_warnings(action="error"),
}


def settings_now():
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), np.geterr(),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(), str(torch.zeros(1).device),
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(modules, tmp_path_factory):
    return everything(modules, tmp_path_factory.mktemp("plain") / "all")


def check(names, plain, modules, folder):
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(CONTEXTS[name]())
        before = settings_now()
        found = everything(modules, folder)
        assert settings_now() == before
    assert found == plain


TOGETHER = {
    "one half": ["inference_mode", "autocast to bfloat16", "default type float64", "default device meta",
                 "three threads", "NumPy raises", "warnings are errors"],
    "the other half": ["no_grad", "autocast to float16", "default type bfloat16", "inside torch.device",
                       "deterministic algorithms", "float32 products in bfloat16", "without oneDNN",
                       "small numbers are zero"],
}  # fmt: skip


@pytest.mark.parametrize("names", TOGETHER)
def test_every_public_function_gives_the_same_bits_in_any_context(names, plain, modules, tmp_path):
    check(TOGETHER[names], plain, modules, tmp_path / "all")


@pytest.mark.heavy
@pytest.mark.parametrize("name", CONTEXTS)
def test_every_public_function_gives_the_same_bits_in_each_context(name, plain, modules, tmp_path):
    check([name], plain, modules, tmp_path / "all")


def test_a_running_event_loop_in_another_thread_changes_nothing(plain, modules, tmp_path):
    found = []

    async def work():
        found.append(everything(modules, tmp_path / "all"))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join()
    assert found == [plain]


def test_two_threads_at_once_disturb_neither_each_other_nor_the_settings(modules):
    network, layer = modules
    images, labels, *_ = data()
    pixels = torch.from_numpy(images / 255).float()
    together, found = threading.Barrier(2), []

    def batches():
        together.wait()  # both are inside now
        yield pixels, labels
        together.wait()  # one leaves while the other may still work

    def work():
        statistics = unskew.ClassStatistics.measure(network, batches(), CLASSES)
        found.append(digest(*unskew.calibrate(layer, statistics, "lda").tensors().values()))

    with default_dtype(torch.float64):
        both = [threading.Thread(target=work) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert torch.get_default_dtype() == torch.float64
    alone = unskew.ClassStatistics.measure(network, [(pixels, labels)], CLASSES)
    assert found == [digest(*unskew.calibrate(layer, alone, "lda").tensors().values())] * 2


def test_another_working_directory_in_the_middle_of_a_run_changes_nothing(plain, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = unskew.run(
        data=data(), clients=3, rounds=2, epochs=1, engine="loop", checkpoint_seconds=0,
        observe=lambda event: monkeypatch.chdir(tmp_path / "there"),
    )  # fmt: skip
    assert result.path.is_relative_to(tmp_path / "here")
    assert {"result.json", "model.safetensors", "metrics.jsonl"} <= {each.name for each in result.path.iterdir()}
    assert not list((tmp_path / "there").iterdir())


def test_the_context_is_restored_after_an_exception():
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), default_dtype(torch.float64), threads(2):
        before = settings_now()
        with pytest.raises(unskew.UserError, match="no data set is called 'no such data'"):
            unskew.run(data="no such data")
        with pytest.raises(unskew.UserError, match=r"labels must be in 0\.\.2"):
            unskew.ClassStatistics.measure(nn.Identity(), [(torch.zeros(1, 2), [7])], 3)
        assert settings_now() == before

"""``package.module:function`` is read in one way, and a plug-in that misbehaves is one message."""

import hashlib
import sys

import pytest
import torch

from unskew.core.errors import Ended, UserError
from unskew.core.language import apply, parse_calls
from unskew.core.plugins import find_plugins, guard_plugins, load_function, parse_plugin, plugin_sha256

NOT_PLUGINS = [
    "this:-", "wave:", "mailbox::x", "unittest.__main__:-", ":", "a", "a:b:c", "a:b.c", ".a:b", "a.:b", "1a:b",
]  # fmt: skip


@pytest.mark.parametrize("name", NOT_PLUGINS)
def test_what_is_no_plugin_imports_nothing(name):
    before = set(sys.modules)
    with pytest.raises(UserError, match=r"cannot be imported: it does not have the form package\.module:function"):
        load_function(name, "method")
    if ":" in name:
        with pytest.raises(UserError, match="cannot be imported"):
            find_plugins(f"fedavg + {name}(1)")
    assert set(sys.modules) == before


def test_a_plugin_is_found_wherever_a_text_names_it():
    assert parse_plugin("my-pack.part_2:make") == "my-pack.part_2:make"
    found = find_plugins("a.b:c(x='d:e', y=f:g) + fedavg(0.5)")
    assert list(map(str, found)) == ["a.b:c", "d:e", "f:g"]
    assert find_plugins("fedavgm(0.9) + ccvr") == []


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that is new for every test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    yield write
    for name in [name for name in sys.modules if name.startswith("misbehaving")]:
        del sys.modules[name]


@pytest.mark.parametrize("raised", ["SystemExit(0)", "GeneratorExit", "BaseException('odd')", "ZeroDivisionError"])
def test_a_module_that_ends_the_process_when_it_is_imported_is_a_users_error(module, raised):
    module("misbehaving", f"raise {raised}")
    with pytest.raises(UserError, match=f"cannot be imported: {raised[:8]}"):
        load_function("misbehaving:f", "method")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Ended])
def test_an_interrupt_is_not_taken_for_a_plugins_mistake(monkeypatch, raised):
    def interrupted(name):
        raise raised(7)

    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(raised, match="7"):
        load_function("json:loads", "method")


def test_a_function_that_ends_the_process_when_it_is_called_is_a_users_error():
    (call,) = parse_calls("mine", "method")
    with pytest.raises(UserError, match="method mine raises SystemExit"):
        apply(call, lambda: sys.exit(0), "method")


def test_a_guard_sees_a_plugin_before_it_is_imported(module):
    module("misbehaving", "raise RuntimeError('imported')")

    def refuse(plugin):
        raise UserError(f"{plugin} is not allowed")

    with guard_plugins(refuse), pytest.raises(UserError, match="misbehaving:f is not allowed"):
        load_function("misbehaving:f", "method")
    with pytest.raises(UserError, match="RuntimeError: imported"):
        load_function("misbehaving:f", "method")


def test_a_modules_hash_is_taken_without_importing_anything(module):
    module("misbehaving/__init__", "raise RuntimeError('imported')")
    file = module("misbehaving/inside", "def f(): ...")
    assert plugin_sha256("misbehaving.inside:f") == hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=r"the module misbehaving.nowhere does not exist"):
        plugin_sha256("misbehaving.nowhere:f")
    with pytest.raises(UserError, match="the module sys"):
        plugin_sha256("sys:exit")


@pytest.mark.parametrize(
    "name", ["unskew:run", "unskew.api:sweep", "unskew.runs.train:run", "unskew.console.main:main"]
)
def test_our_own_commands_are_no_plugins(name):
    """A measure's text is called when it is parsed: ``unskew:run`` would train."""
    with pytest.raises(UserError, match="Unskew's own functions cannot be used as plug-ins"):
        load_function(name, "measure")
    assert callable(load_function("unskew.methods.fedprox:fedprox", "method"))


def test_importing_a_plugin_does_not_change_the_default_type(tmp_path, monkeypatch):
    """What is computed afterwards would depend on whether the module was imported already."""
    (tmp_path / "doubles.py").write_text("import torch\ntorch.set_default_dtype(torch.float64)\ndef net(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert callable(load_function("doubles:net", "model"))
    assert torch.get_default_dtype() == torch.float32

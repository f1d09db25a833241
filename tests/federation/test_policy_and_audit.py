"""The commands for a node's policy, and for what left it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unskew.console.federation import federation_app
from unskew.core.errors import UserError
from unskew.engines.flower.audit import AUDIT, AuditLog
from unskew.engines.flower.node_service import read_settings
from unskew.engines.flower.policy import Policy, read_policy
from unskew.federation.folder import initialise, read_node


def command(*words):
    result = CliRunner().invoke(federation_app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def federation(tmp_path):
    return initialise(tmp_path / "fed", nodes=["ward", "lab"])


def test_a_policy_is_written_with_its_defaults_checked_and_enforced(federation):
    folder = federation.node("ward")
    settings = folder / "service.toml"
    settings.write_text(f'name = "ward"\ndata = "digits"\nfolder = "{read_node(folder).state}"\n')
    assert not read_settings(settings).policy
    assert "written to" in command("node", folder, "--write-policy")
    with pytest.raises(UserError, match="exists; remove it first"):
        command("node", folder, "--write-policy")
    assert command("node", folder, "--check-policy").count("\n") == 1
    file = folder / "policy.toml"
    file.write_text(file.read_text().replace("# min_class = 5", "min_class = 7"))
    assert "min_class: 7" in command("node", folder, "--check-policy")
    assert read_policy(Path(read_settings(settings).policy)) == Policy(min_class=7)
    file.write_text("min_clas = 7")
    for check in (
        lambda: command("node", folder, "--check-policy"),
        lambda: read_policy(Path(read_settings(settings).policy)),
    ):
        with pytest.raises(UserError, match="unknown key 'min_clas'; did you mean 'min_class'"):
            check()


def test_a_data_officer_verifies_a_receipt(federation, tmp_path):
    node = read_node(federation.node("ward"))
    with pytest.raises(UserError, match="nothing was recorded yet"):
        command("audit", node.path)
    AuditLog(node.state / AUDIT).append({"run": "ab" * 16, "job": "train", "round": 3, "bytes": 1000, "members": None})
    said = command("audit", node.path, "--receipt", tmp_path / "receipt.json")
    assert "node ward: 1 message left" in said
    assert "1 × train; 1.0 kB, not all masked, no ε promised" in said.replace("\n", " ")
    keys = federation.public_keys()
    assert "not changed since" in command("audit", tmp_path / "receipt.json", "--key", keys["ward"])
    with pytest.raises(UserError, match="not signed with this key, or was changed since"):
        command("audit", tmp_path / "receipt.json", "--key", keys["lab"])
    changed = json.loads((tmp_path / "receipt.json").read_text())
    changed["runs"][0]["bytes"] = 10
    (tmp_path / "receipt.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="not signed with this key, or was changed since"):
        command("audit", tmp_path / "receipt.json", "--key", keys["ward"])
    with pytest.raises(UserError, match=r"a receipt needs --key NAME\.pub"):
        command("audit", tmp_path / "receipt.json")

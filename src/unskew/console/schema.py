"""The command schema: recipes and results as JSON schemas, made from their types."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from unskew.console.progress import print_json
from unskew.core.errors import UserError, nearest
from unskew.runs.config import OPTIONS, SEEDS, TABLE, Config
from unskew.runs.result import Result


def schema(
    what: Annotated[str, typer.Argument(metavar="recipe|result", help="A recipe, or the result.json of a run.")],
) -> None:
    """Print the JSON schema of a recipe or a result, for scripts and editors."""
    kinds = {"recipe": recipe_schema, "result": result_schema}
    if what not in kinds:
        raise UserError(f"unskew schema {what}: {nearest(what, kinds)}")
    print_json(kinds[what]())


def recipe_schema() -> dict[str, Any]:
    """A recipe: every option with its description and limits, the list of seeds, the table for federations."""
    options = _schema_of(Config, "An Unskew recipe: the options of unskew run, as TOML or JSON.")
    for name, entry in options["properties"].items():
        option = OPTIONS[name]
        facts = {
            "description": option.help, "enum": list(option.choices) or None, "minimum": option.least,
            "exclusiveMinimum": option.above, "maximum": option.most, "exclusiveMaximum": option.below,
        }  # fmt: skip
        entry |= {key: value for key, value in facts.items() if value is not None}
    options["properties"][SEEDS] = {
        "type": "array", "items": {"type": "integer", "minimum": 0}, "description": "Seeds, for one run each.",
    }  # fmt: skip
    options["properties"][TABLE] = {"type": "object", "description": "Settings that only a federation uses."}
    return options | {"additionalProperties": False}


def result_schema() -> dict[str, Any]:
    """A result, as result.json has it and --json prints it: what is unknown is left out, calibrations are a list."""
    made = _schema_of(Result, "The result of an Unskew run; fields that are unknown are left out.")
    del made["properties"]["path"]
    made["properties"]["run"] = {"type": "string", "description": "The run directory; printed by --json only."}
    made["properties"]["calibrations"] = {"type": "array", "items": {"$ref": "#/$defs/Calibration"}}
    made["required"].remove("path")
    return made


def _schema_of(kind: type, words: str) -> dict[str, Any]:
    (top,), parts = msgspec.json.schema_components([kind], schema_hook=_describe_other)
    made: dict[str, Any] = parts.pop(top["$ref"].rpartition("/")[2])
    made |= {"description": words, "$defs": parts}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _describe_other(kind: type) -> dict[str, Any]:
    if kind is Path:
        return {"type": "string"}
    raise NotImplementedError

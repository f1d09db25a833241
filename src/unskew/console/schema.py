"""The command schema: JSON schemas of recipes and results, derived from their types."""

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
    """The schema of a recipe: every option with its description and limits, the seeds, the federation table."""
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
    """The schema of a result, as in result.json and with --json: unknown fields are missing, calibrations a list."""
    result = _schema_of(Result, "The result of an Unskew run; fields that are unknown are left out.")
    del result["properties"]["path"]
    result["properties"]["run"] = {"type": "string", "description": "The run directory; printed by --json only."}
    result["properties"]["calibrations"] = {"type": "array", "items": {"$ref": "#/$defs/Calibration"}}
    result["required"].remove("path")
    return result


def _schema_of(kind: type, description: str) -> dict[str, Any]:
    (top,), parts = msgspec.json.schema_components([kind], schema_hook=lambda path: {"type": "string"})
    own: dict[str, Any] = parts.pop(top["$ref"].rpartition("/")[2])
    own |= {"description": description, "$defs": parts}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **own}

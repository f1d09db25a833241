"""Reads the records of a large JSON file one after another, so that memory holds the wanted fields and no more.

Annotations in COCO's form are an object of lists (``images``, ``annotations``, …), other files one list. A file may
have gigabytes: it is read in blocks, and a single record may have 16 MB.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from unskew.core.errors import UserError

BLOCK = 1 << 20  # bytes read at a time
MAX_RECORD = 16 * BLOCK  # characters of one record
_SPACE = " \t\n\r"

Columns = list[list[Any]]  # a list for each wanted field


def read_records(stream: IO[bytes], path: Path | str, wanted: Mapping[str, Sequence[str]]) -> dict[str, Columns]:
    """The wanted fields of the named lists as columns; the list with the name "" is the whole file.

    A field whose name ends with ``?`` may be missing, and is None then. What is not JSON, a list that is missing or
    twice there, and a record without its field are a UserError that says where.
    """
    reader = _Reader(stream, path)
    columns: dict[str, Columns] = {name: [[] for _ in fields] for name, fields in wanted.items()}
    seen: set[str] = set()
    for name in reader.names() if "" not in wanted else [""]:
        if name not in wanted:
            reader.value()
            continue
        if name in seen:
            raise UserError(f"{path} is not the published file: it has a second list {name!r}; fetch it again")
        seen.add(name)
        for number, record in enumerate(reader.items(name)):
            _take(record, wanted[name], columns[name], f"{path}, {name or 'the list'}, record {number}")
    reader.end()
    if missing := [name for name in wanted if name not in seen]:
        raise UserError(f"{path} has no list {missing[0]!r}; give the annotations as they were published")
    return columns


def _take(record: Any, fields: Sequence[str], columns: Columns, where: str) -> None:
    if not isinstance(record, dict):
        raise UserError(f"{where} is not an object with {', '.join(fields).replace('?', '')}; give the published file")
    for field, column in zip(fields, columns, strict=True):
        name = field.rstrip("?")
        if name not in record and name == field:
            raise UserError(f"{where} has no {name!r}; give the annotations as they were published")
        column.append(record.get(name))


class _Reader:
    """A place in a stream of JSON text."""

    def __init__(self, stream: IO[bytes], path: Path | str) -> None:
        self._stream, self._path = stream, path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder(parse_constant=_no_number).raw_decode
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    def names(self) -> Iterator[str]:
        """The names in the object that the file is; after each, its value must be read."""
        for name in self._members("{", "}"):
            if not isinstance(name, str):
                self._broken("a name was expected")
            self._expect(":")
            yield name

    def items(self, name: str) -> Iterator[Any]:
        """The values of the list that begins here."""
        if self._peek() != "[":
            self._broken(f"{name or 'the file'} is not a list")
        yield from self._members("[", "]")

    def value(self) -> Any:
        """The value that begins here."""
        self._peek()
        while True:
            try:
                value, end = self._parse(self._text, self._at)
                if end < len(self._text) or self._ended:  # a number may go on in the next block
                    self._at = end
                    return value
            except RecursionError:
                self._broken("lists or objects are nested too deeply")
            except ValueError as error:
                if self._ended:
                    self._broken(getattr(error, "msg", str(error)))
            if len(self._text) - self._at > MAX_RECORD:
                self._broken(f"a value has more than {MAX_RECORD:,} characters, or is not JSON")
            self._more()

    def end(self) -> None:
        """Refuse what follows the last value."""
        if self._peek():
            self._broken("more follows after its end")

    def _members(self, opening: str, closing: str) -> Iterator[Any]:
        self._expect(opening)
        if self._peek() == closing:
            self._at += 1
            return
        while True:
            yield self.value()
            mark = self._peek()
            if mark == closing:
                self._at += 1
                return
            self._expect(",")

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            self._broken(f"expected {mark!r}")
        self._at += 1

    def _peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        try:
            block = self._stream.read(max(BLOCK, len(self._text) - self._at))
            self._before += self._at
            self._text, self._at = self._text[self._at :] + self._decode(block, final=not block), 0
        except UnicodeDecodeError:
            self._broken("it is not UTF-8")
        self._ended = not block

    def _broken(self, why: str) -> NoReturn:
        place = f"character {self._before + self._at:,}"
        raise UserError(f"{self._path} is damaged, or not JSON, at {place}: {why}; fetch it again")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")

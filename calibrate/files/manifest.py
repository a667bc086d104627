"""The manifest of a collection: strict reading."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files.coefficient_schema import DIGEST
from calibrate.files.json_shapes import Integer, List, Object, Word, read_field
from calibrate.files.strict_json import parse

FORMAT = "calibrate.collection"
SCHEMA_VERSION = "0.1"
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 26  # 250,000 shards
BAD = ("nan", "inf", "masked_target")
COUNTS = ("rows", "misranked", "ties", *BAD)
STATUS = ("partial", "complete")

_COUNT = Integer(0, (1 << 62) - 1)  # of bytes, rows or items
_SIZE = Object(dict.fromkeys(("size", *COUNTS, "kept"), _COUNT), required=True, others="")
_SHARD = Object(
    {**dict.fromkeys(("size", "unit", "kept", "bytes"), _COUNT), "sha256": DIGEST},
    required=True,
    others="",
)


def count_bad(counts: Mapping[str, int]) -> int:
    """How many rows have NaN, +inf or a masked target, by the counts of COUNTS."""
    return sum(counts[reason] for reason in BAD)


def share_misranked(counts: Mapping[str, int]) -> float:
    """Of the rows that are not bad; 0 if all of them are."""
    return counts["misranked"] / max(1, counts["rows"] - count_bad(counts))


def _text(value: Any) -> str:
    str.encode(value)  # no lone surrogates
    return str(value)


_CONFIGURATION = Object(
    {
        **dict.fromkeys(("head", "fingerprint"), _text),
        **dict.fromkeys(("sets", "max_bytes"), _COUNT),
        "sizes": List(Integer(2, (1 << 31) - 1)),
    },
    required=True,
    others="",
)
_PARTIAL = Object({"configuration": _CONFIGURATION}, required=True, others="")
_COMPLETE = Object(
    {"configuration": _CONFIGURATION, "sizes": List(_SIZE), "shards": List(_SHARD)},
    required=True,
    others="",
)

_MOST_LETTERS = 100  # of a value in a message: hundreds of heads have names


def another_collection(
    folder: Path, changed: Sequence[str], recorded: Mapping[str, Any], given: Mapping[str, Any]
) -> CalibrateError:
    """The error for a folder with a collection that a call does not ask for.

    Args:
      changed: the files that are no longer what the collection was made of.
      recorded: the collection's configuration, without digests of files.
      given: the call's.
    """
    remedy = "another folder with --out (`run`: another --name), or --fresh to replace it"
    if changed:
        verb = "has" if len(changed) == 1 else "have"
        return CalibrateError(
            f"{' and '.join(changed)} {verb} changed since {folder} was made (or is another one); "
            f"give {remedy}"
        )
    differences = [
        f"{key} is {_shown(recorded.get(key))} in the folder and {_shown(given.get(key))} in this "
        "call"
        for key in dict.fromkeys([*given, *recorded])
        if given.get(key) != recorded.get(key)
    ]
    return CalibrateError(
        f"{folder} is another collection: {'; '.join(differences)}; give the same options, or "
        f"{remedy}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """The manifest in the bytes of a file.

    Raises:
      CalibrateError: it is not a manifest, its numbers contradict each other or are out of
        range, or it has another version.
    """
    try:
        manifest = parse(data)
        version = [read_field(manifest, key, _text) for key in ("format", "schema_version")]
        if version != [FORMAT, SCHEMA_VERSION]:
            raise CalibrateError(
                f"{path} is {version[0]} {version[1]}, expected {FORMAT} {SCHEMA_VERSION}; "
                "collect again with this version of calibrate"
            )
        complete = read_field(manifest, "status", Word(STATUS)) == "complete"
        (_COMPLETE if complete else _PARTIAL)(manifest)
        _check_configuration(manifest["configuration"])
        if complete:
            _check_counts(manifest)
            _check_shards(manifest)
    except (CoefficientsError, ValueError, TypeError) as failure:
        raise CalibrateError(
            f"{path} is not a manifest ({failure}); restore it or collect into a new folder"
        ) from failure
    return dict(manifest)


def _check_configuration(configuration: dict[str, Any]) -> None:
    if type(configuration.get("seed")) is not int:  # of any size
        raise ValueError("seed is not an integer")
    if not configuration["sizes"] or configuration["sizes"] != sorted(set(configuration["sizes"])):
        raise ValueError("sizes do not increase")
    _COUNT(configuration.get("trained_up_to", 0))
    Word(("misranked", "all"))(configuration.get("keep", "misranked"))
    List(List(Integer(-1, (1 << 15) - 1), exact=2))(configuration.get("heads", []))


def _check_counts(manifest: dict[str, Any]) -> None:
    """Raises unless the counts of each size agree with each other."""
    for entry in manifest["sizes"]:
        classified = sum(entry[name] for name in COUNTS if name != "rows")  # a row is in one class
        if max(classified, entry["kept"]) > entry["rows"]:
            raise ValueError(f"counts of size {entry['size']} exceed its {entry['rows']} rows")
    if [entry["size"] for entry in manifest["sizes"]] != manifest["configuration"]["sizes"]:
        raise ValueError("sizes differ from the configuration's")


def _check_shards(manifest: dict[str, Any]) -> None:
    kept: Counter[int] = Counter()
    for entry in manifest["shards"]:
        if 4 * entry["size"] * entry["kept"] > entry["bytes"]:
            raise ValueError(f"{entry['kept']} rows of {entry['size']} in {entry['bytes']} bytes")
        kept[entry["size"]] += entry["kept"]
    shards = manifest["shards"]
    if len({(entry["size"], entry["unit"]) for entry in shards}) < len(shards):
        raise ValueError("a shard is listed twice")
    if kept - Counter({entry["size"]: entry["kept"] for entry in manifest["sizes"]}) or (
        sum(kept.values()) != sum(entry["kept"] for entry in manifest["sizes"])
    ):
        raise ValueError("the shards and the sizes count different numbers of rows")
    if sum(entry["bytes"] for entry in shards) > manifest["configuration"]["max_bytes"]:
        raise ValueError("the shards have more bytes than max_bytes")

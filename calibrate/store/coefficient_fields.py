"""The fields of the coefficient file, schema 1.0.

scripts/tools/write_schemas.py writes these types into `schemas/coefficient-file-1.0.json` for other
readers, which has the meanings of fields. Conditions between fields are checked in `fit.py`,
`entries.py` and `coefficient_file.py`.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from calibrate.core.rule import (
    CONSTANT,
    ENTROPY_AND_SIZE,
    KINDS,
    LOG_SIZE,
    POLYNOMIAL,
    TERMS,
    RuleForm,
)
from calibrate.storage.strict_json import (
    FLOAT32_MAX,
    NAME_PATTERN,
    PRINTABLE_LINES,
    Count,
    Digest,
    Number,
    PrintableText,
    Scalar,
)

FORMAT = "calibrate.fit"
COEFFICIENT_SCHEMA_VERSION = "1.0"
MAX_INDEX = 32_767  # of a layer or head: collections hold them as int16
MAX_ENTROPY = 64.0  # nats, and log n: e^64 items are more than any memory holds
_MAX_HEAD_RECORDS = 100_000
_MAX_VERDICT = 2000  # characters: that of a language model has over a thousand

_TERMS = ", ".join(TERMS[ENTROPY_AND_SIZE])
_UNITS = {"quantity": "beta", "entropy_unit": "nats", "size_unit": "log items"}
_TIME_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00$(?!\n)"

Name = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=64)]
Version = Annotated[int, Meta(ge=1, le=999_999_999)]
Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)] | None
Time = Annotated[str, Meta(pattern=_TIME_PATTERN, max_length=25)]
VerdictText = Annotated[str, Meta(min_length=1, max_length=_MAX_VERDICT, pattern=PRINTABLE_LINES)]
Beta = Annotated[float, Meta(gt=0, le=FLOAT32_MAX)]
Nats = Annotated[float, Meta(ge=0, le=FLOAT32_MAX)]
Bound = Annotated[float, Meta(ge=0, le=MAX_ENTROPY)]
SourceSeed = Annotated[int, Meta(ge=0)]  # at most 2^64 - 1, which `coefficient_file.py` checks


def _rule_struct(name: str, kind: str) -> type[Struct]:
    """`rule` of a kind."""
    by_entropy, by_size = RuleForm(kind=kind).by_entropy, RuleForm(kind=kind).by_size
    order = _TERMS if by_entropy and by_size else "descending"
    fields: list[tuple[str, Any]] = [("quantity", Literal["beta"]), ("order", Literal[order])]
    fields += [("entropy_unit", Literal["nats"])] * by_entropy
    fields += [("size_unit", Literal["log items"])] * by_size
    fields += [("min_entropy", Nats)] * by_entropy
    fields += [("min_beta", Beta), ("max_beta", Beta)]
    fields += [("outside", Literal["clamp", "identity"])] * (kind == POLYNOMIAL)
    options: dict[str, Any] = {"tag_field": "kind", "tag": kind, "forbid_unknown_fields": True}
    return defstruct(name, fields, module=__name__, **options)


ConstantRule = _rule_struct("ConstantRule", CONSTANT)
LogSizeRule = _rule_struct("LogSizeRule", LOG_SIZE)
PolynomialRule = _rule_struct("PolynomialRule", POLYNOMIAL)
EntropyAndSizeRule = _rule_struct("EntropyAndSizeRule", ENTROPY_AND_SIZE)
RULE_FIELDS: dict[str, type[Struct]] = {
    CONSTANT: ConstantRule,
    LOG_SIZE: LogSizeRule,
    POLYNOMIAL: PolynomialRule,
    ENTROPY_AND_SIZE: EntropyAndSizeRule,
}


def rule_fields(rule: RuleForm) -> dict[str, Any]:
    """`rule` as the file has it."""
    values = {**rule._asdict(), **_UNITS, "order": _TERMS if rule.depends_on_both else "descending"}
    return {"kind": rule.kind} | {
        name: values[name] for name in RULE_FIELDS[rule.kind].__struct_fields__
    }


class EntryFields(Struct, forbid_unknown_fields=True):
    """An element of `entries`; the kind of rule determines the lengths of its lists."""

    layer: Index
    head: Index
    coefficients: list[Number]
    domain: list[Bound]
    check: list[list[Number]]


def optional_fields(name: str, **types: Any) -> type[Struct]:
    """An object with these fields, of which each may be absent."""
    fields = [(field, kind | UnsetType, UNSET) for field, kind in types.items()]
    return defstruct(name, fields, forbid_unknown_fields=True, module=__name__)


def _all_of(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


InputCounts = optional_fields(
    "InputCounts",
    **_all_of(Count, "seen misranked optimum_infinite optimum_zero optimum_finite bad fitted"),
)
HeadRecord = optional_fields(
    "HeadRecord",
    **_all_of(Index, "layer head"),
    inputs=Count,
    penalty=Number | Literal["infinite"] | None,
    r_squared_log_beta=Number | None,
    at_bound=Literal["", "min", "max"],
    **_all_of(Number, "degrees_of_freedom gain se"),
)
SizeRecord = optional_fields(
    "SizeRecord", **_all_of(Count, "n inputs"), **_all_of(Number, "nll_before nll_after se")
)
KindRecord = optional_fields(
    "KindRecord",
    kind=PrintableText,
    **_all_of(Number, "nll gain se gain_over_fit se_over_fit"),
)
EvidenceFields = optional_fields(
    "EvidenceFields",
    inputs=InputCounts,
    heads=Annotated[list[HeadRecord], Meta(max_length=_MAX_HEAD_RECORDS)],  # type: ignore[valid-type]
    held_out=list[SizeRecord],  # type: ignore[valid-type]
    kinds=Annotated[list[KindRecord], Meta(max_length=16)],  # type: ignore[valid-type]
    advised_kind=Literal[KINDS],
    verdict=VerdictText,
)
SourceFields = optional_fields(
    "SourceFields",
    **_all_of(PrintableText, "head fingerprint citation"),
    collection=Digest,
    seed=SourceSeed,
    options=dict[PrintableText, Scalar],
)
ProvenanceFields = optional_fields(
    "ProvenanceFields", created=Time, versions=dict[PrintableText, PrintableText]
)


class CoefficientDocument(Struct, forbid_unknown_fields=True):
    """The whole file, without the user's own fields, whose names begin with "x-"."""

    format: Literal[FORMAT]  # type: ignore[valid-type]
    schema_version: Literal[COEFFICIENT_SCHEMA_VERSION]  # type: ignore[valid-type]
    name: Name
    version: Version
    id: Digest
    rule: ConstantRule | LogSizeRule | PolynomialRule | EntropyAndSizeRule  # type: ignore[valid-type]
    entries: Annotated[list[EntryFields], Meta(min_length=1)]
    evidence: EvidenceFields  # type: ignore[valid-type]
    source: SourceFields  # type: ignore[valid-type]
    provenance: ProvenanceFields  # type: ignore[valid-type]
